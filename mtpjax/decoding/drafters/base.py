"""The drafter seam: what a drafter keeps of the text, and how it guesses what the target will say.

A drafter is a `Memory` and a `propose`. The memory is told every token as it is committed, the prompt's as well as the
output's, together with the target's hidden states that predicted it; n-gram lookup keeps the tokens, a draft model its
own cache, an MTP module the hidden states. `propose` reads the memory and drafts. The depth is a fact of `propose`
alone, so that drafters which differ in depth share one compiled prefill.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from flax import struct
from jax import Array

from mtpjax.decoding.sampling import Law
from mtpjax.decoding.tree import Parents, chain, check_parents, depth_of
from mtpjax.records import Leaf

State = Any


class Params(struct.PyTreeNode):
    """Parameters of the target and of the drafter (None if it has none): arguments of the loops, never captured."""

    target: Any
    drafter: Any = None


class Proposal(struct.PyTreeNode):
    """What a drafter proposes for one verify window.

    Attributes:
        tokens: int32 [B, nodes]; a chain has as many nodes as its depth.
        q: f32 [B, nodes, V], the processed law each token was drawn from; None for a deterministic draft, whose law is
            one-hot at its token.
        count: int32 [B], how many of `tokens` are proposed; the rest are padding, never accepted.
        parents: for each drafted token the window offset of its parent; 0 is the last committed token. A chain is
            (0, 1, 2, ...); see `mtpjax.decoding.tree`.
        distinct: whether siblings were drawn without replacement: each from its q with the earlier siblings' tokens
            taken out. Otherwise they were drawn independently.
    """

    tokens: Leaf
    q: Leaf | None
    count: Leaf
    parents: Parents = struct.field(pytree_node=False)
    distinct: bool = struct.field(pytree_node=False, default=False)


Drafted = tuple[Proposal, State]
"""What `propose` returns: the draft, and the state in which `update` will find the memory."""


class Committed(struct.PyTreeNode):
    """Tokens that were committed: int32 [B, W], of which the first `count` [B] are real."""

    tokens: Leaf
    count: Leaf


def append(tokens_BS: Array, length_B: Array, committed: Committed) -> Array:
    """Write each row's committed tokens behind its first `length`; what has no place is dropped, never clamped."""
    B, W = committed.tokens.shape
    offset = jnp.arange(W)[None, :]
    slot = jnp.where(offset < committed.count[:, None], length_B[:, None] + offset, tokens_BS.shape[1])
    return tokens_BS.at[jnp.arange(B)[:, None], slot].set(committed.tokens, mode="drop")


@dataclass(frozen=True)
class Memory:
    """What a drafter keeps of the text.

    Attributes:
        init: ``(batch, capacity) -> state`` of an empty text.
        update: ``(params, state, committed, features) -> state``. `features` holds, for each layer asked for, the
            target's hidden states [B, W, D] that predicted the committed tokens: those of the place before each. The
            very first token of a text has none, zeros.
        features: layers of the target whose hidden states `update` wants.
    """

    init: Callable[[int, int], State]
    update: Callable[[Params, State, Committed, tuple[Array, ...]], State]
    features: tuple[int, ...] = ()


@dataclass(frozen=True)
class Drafter:
    """A record of pure functions and static facts; hashable, so that it is a static argument of the compiled loop.

    Attributes:
        name: its key in `DRAFTERS`.
        depth: the most tokens of a draft that a step can accept: the longest path.
        memory: what it keeps of the text.
        propose: ``(params, state, key_B, law) -> (Proposal, state)``. It returns the state it was given, so that a
            drafter may use slots of its cache behind what is committed: a cache that is only read and dropped would be
            copied every step.
        parents: the tree it drafts; None is a chain of `depth` tokens.
        params_like: ``() -> pytree`` of the shapes of its parameters (`jax.eval_shape` of their init), against which
            those given are checked; None for a drafter without.
    """

    name: str
    depth: int
    memory: Memory
    propose: Callable[[Params, State, Array, Law], Drafted]
    parents: Parents | None = None
    params_like: Callable[[], Any] | None = None

    @property
    def shape(self) -> Parents:
        """Parents of the nodes it drafts."""
        return chain(self.depth) if self.parents is None else self.parents

    def __post_init__(self) -> None:
        check_parents(self.shape)
        if depth_of(self.shape) != self.depth:
            raise ValueError(f"depth is {self.depth} but the tree {self.shape} is {depth_of(self.shape)} deep")
