"""Acceptance rules by name. A new one is one file here and one line in `RULES`."""

from mtpjax.decoding.verify.base import Rule, Verdict
from mtpjax.decoding.verify.greedy import GREEDY
from mtpjax.decoding.verify.rejection import REJECTION

RULES = {"greedy": GREEDY, "rejection": REJECTION}

__all__ = ["GREEDY", "REJECTION", "RULES", "Rule", "Verdict"]
