"""Drafters by name. A new one is one file here and one line in `DRAFTERS`."""

from mtpjax.decoding.drafters.base import Committed, Drafter, Memory, Params, Proposal, chain
from mtpjax.decoding.drafters.ngram import ngram
from mtpjax.decoding.drafters.none import none

DRAFTERS = {"ngram": ngram}

__all__ = ["DRAFTERS", "Committed", "Drafter", "Memory", "Params", "Proposal", "chain", "ngram", "none"]
