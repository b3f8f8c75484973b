"""Drafters by name. A new one is one file here and one line in `DRAFTERS`."""

from mtpjax.decoding.drafters.base import Committed, Drafted, Drafter, Memory, Params, Proposal, chain
from mtpjax.decoding.drafters.draft_model import draft_model
from mtpjax.decoding.drafters.ngram import ngram
from mtpjax.decoding.drafters.none import none

DRAFTERS = {"ngram": ngram}

__all__ = [
    "DRAFTERS",
    "Committed",
    "Drafted",
    "Drafter",
    "Memory",
    "Params",
    "Proposal",
    "chain",
    "draft_model",
    "ngram",
    "none",
]
