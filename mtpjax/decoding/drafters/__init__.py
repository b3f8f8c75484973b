"""Drafters. A new one is one file here; one that needs nothing but a depth has a name, a line in `DRAFTERS`.

`draft_model`, `sequential`, `eagle`, `medusa` and `gloeckle` are made for one target, whose shape they take, and need
parameters: call them and pass the result as `drafter`, with `drafter_params`. `first_of` joins several.
"""

from mtpjax.decoding.drafters.base import Committed, Drafted, Drafter, Memory, Params, Proposal, chain
from mtpjax.decoding.drafters.draft_model import draft_model
from mtpjax.decoding.drafters.eagle import eagle
from mtpjax.decoding.drafters.first_of import first_of
from mtpjax.decoding.drafters.ngram import ngram
from mtpjax.decoding.drafters.none import none
from mtpjax.decoding.drafters.parallel import gloeckle, medusa
from mtpjax.decoding.drafters.sequential import sequential
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
    "eagle",
    "first_of",
    "gloeckle",
    "medusa",
    "ngram",
    "none",
    "sequential",
    "suffix",
]
