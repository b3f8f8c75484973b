"""Acceptance rules by name. A new one is one file here and one line in `RULES`.

Lossless: greedy (rows at temperature 0), rejection, block. Lossy, and labelled so in every output: typical, threshold,
relaxed_top_k, best_of_candidates; those stand here with their default numbers, and `typical(epsilon=0.2)` is the same
rule with others.
"""

from mtpjax.decoding.verify.base import Chain, Rule, Settings, Verdict
from mtpjax.decoding.verify.best_of_candidates import best_of_candidates
from mtpjax.decoding.verify.block import BLOCK
from mtpjax.decoding.verify.greedy import GREEDY
from mtpjax.decoding.verify.rejection import REJECTION
from mtpjax.decoding.verify.relaxed_top_k import relaxed_top_k
from mtpjax.decoding.verify.threshold import threshold
from mtpjax.decoding.verify.typical import typical

RULES = {
    "greedy": GREEDY,
    "rejection": REJECTION,
    "block": BLOCK,
    "typical": typical(),
    "threshold": threshold(),
    "relaxed_top_k": relaxed_top_k(),
    "best_of_candidates": best_of_candidates(),
}

__all__ = [
    "BLOCK",
    "GREEDY",
    "REJECTION",
    "RULES",
    "Chain",
    "Rule",
    "Settings",
    "Verdict",
    "best_of_candidates",
    "relaxed_top_k",
    "threshold",
    "typical",
]
