"""Drafters by name. A new one is one file here and one line in `DRAFTERS`.

Those that need more than a depth (a model, or several drafters) are made by their function: `draft_model`, `first_of`.
"""

from mtpjax.decoding.drafters.base import Committed, Drafted, Drafter, Memory, Params, Proposal, chain
from mtpjax.decoding.drafters.draft_model import draft_model
from mtpjax.decoding.drafters.first_of import first_of
from mtpjax.decoding.drafters.ngram import ngram
from mtpjax.decoding.drafters.none import none
from mtpjax.decoding.drafters.suffix import suffix

DRAFTERS = {"ngram": ngram, "suffix": suffix}

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
    "first_of",
    "ngram",
    "none",
    "suffix",
]
