"""The acceptance-rule seam: one pure function from laws and a draft to what is committed."""

from collections.abc import Callable
from dataclasses import dataclass

from flax import struct
from jax import Array

from mtpjax.decoding.drafters.base import Proposal
from mtpjax.records import Leaf


class Verdict(struct.PyTreeNode):
    """What a rule decided for each row.

    Attributes:
        accepted: int32 [B], how many drafted tokens are accepted.
        path: int32 [B, depth], the window offsets of the accepted tokens in order; for a chain 1, 2, ...
        next_token: int32 [B], the token the target adds behind them.
    """

    accepted: Leaf
    path: Leaf
    next_token: Leaf


@dataclass(frozen=True)
class Rule:
    """An acceptance rule.

    Attributes:
        name: its key in `RULES`.
        verify: ``(p_BWV, proposal, key_B) -> Verdict``, on processed laws only.
        lossless: whether what it commits has the target's own law.
        samples: whether it serves rows with a temperature; if not, it is lossless for greedy rows only.
    """

    name: str
    verify: Callable[[Array, Proposal, Array], Verdict]
    lossless: bool
    samples: bool
