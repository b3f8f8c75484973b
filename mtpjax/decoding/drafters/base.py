"""The drafter seam: three pure functions that guess what the target will say."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from flax import struct
from jax import Array

from mtpjax.decoding.sampling import Law
from mtpjax.records import Leaf

State = Any


class Proposal(struct.PyTreeNode):
    """What a drafter proposes for one verify window.

    Attributes:
        tokens: int32 [B, depth].
        q: f32 [B, depth, V], the processed law each token was drawn from; None for a deterministic draft, whose law is
            one-hot at its token.
        count: int32 [B], how many of `tokens` are proposed; the rest are padding, never accepted.
        parents: for each drafted token the window offset of its parent; 0 is the last committed token. A chain is
            (0, 1, 2, ...).
    """

    tokens: Leaf
    q: Leaf | None
    count: Leaf
    parents: tuple[int, ...] = struct.field(pytree_node=False)


class Committed(struct.PyTreeNode):
    """Tokens that a step committed: int32 [B, W], of which the first `count` [B] are real."""

    tokens: Leaf
    count: Leaf


@dataclass(frozen=True)
class Drafter:
    """A record of pure functions and static facts; hashable, so that it is a static argument of the compiled loop.

    Attributes:
        name: its key in `DRAFTERS`.
        init: ``(params, tokens_BS, length_B) -> state``: from the prompt (and the target's first token).
        propose: ``(state, key_B, law) -> Proposal``.
        update: ``(state, committed, features) -> state``.
        depth: drafted tokens per step.
        features: layers of the target whose hidden states `update` wants.
    """

    name: str
    init: Callable[[Any, Array, Array], State]
    propose: Callable[[State, Array, Law], Proposal]
    update: Callable[[State, Committed, tuple[Array, ...]], State]
    depth: int
    features: tuple[int, ...] = ()


def chain(depth: int) -> tuple[int, ...]:
    """Parents of a single candidate: each token follows the one before."""
    return tuple(range(depth))
