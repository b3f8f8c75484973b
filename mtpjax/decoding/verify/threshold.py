"""Lossy: acceptance threshold, which keeps a token if the target gives it at least a fixed probability.

Keep x if p(x) >= threshold. At 0 every token that the target could say is kept, at 1 only certain ones. The output is
not the target's: see `lossy.py` for what is reported.
"""

from jax import Array

from mtpjax.decoding.verify.base import Rule, Settings
from mtpjax.decoding.verify.chain import chain_rule
from mtpjax.decoding.verify.lossy import keeping, number


def keeps(p_BDV: Array, settings: Settings) -> Array:
    """Bool [B, depth, V]: p(x) >= threshold."""
    return p_BDV >= settings["threshold"]


CHAIN = keeping(keeps)


def threshold(threshold: float = 0.3) -> Rule:
    """The rule with its threshold, from 0 to 1, never compiled in."""
    return chain_rule("threshold", CHAIN, {"threshold": number("threshold", "threshold", threshold, 0, 1)})
