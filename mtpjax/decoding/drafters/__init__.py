"""Drafters. A new one is one file here; one that needs nothing but a depth has a name, a line in `DRAFTERS`.

`draft_model`, `sequential`, `eagle`, `medusa` and `gloeckle` are made for one target, whose shape they take, and need
parameters: call them and pass the result as `drafter`, with `drafter_params`.
"""

from mtpjax.decoding.drafters.base import Committed, Drafted, Drafter, Memory, Params, Proposal, chain
from mtpjax.decoding.drafters.draft_model import draft_model
from mtpjax.decoding.drafters.eagle import eagle
from mtpjax.decoding.drafters.ngram import ngram
from mtpjax.decoding.drafters.none import none
from mtpjax.decoding.drafters.parallel import gloeckle, medusa
from mtpjax.decoding.drafters.sequential import sequential

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
    "eagle",
    "gloeckle",
    "medusa",
    "ngram",
    "none",
    "sequential",
]
