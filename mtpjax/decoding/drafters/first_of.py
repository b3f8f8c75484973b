"""The first drafter that has something to say: lookup where the text repeats itself, a model where it does not.

Row by row, the first of the drafters with a proposal wins. All of them are run, since shapes are static: put cheap ones
first, and expect the time of their sum. Each keeps its own memory, told of the same text. Where a deterministic draft
wins beside one that samples, its law is one-hot.

State: a tuple of states. Parameters: a tuple, None for a drafter without any.
"""

from functools import lru_cache
from typing import Any

import jax.numpy as jnp
from jax import Array

from mtpjax.decoding.drafters.base import Committed, Drafted, Drafter, Memory, Params, Proposal, chain
from mtpjax.decoding.sampling import Law
from mtpjax.decoding.tree import is_chain
from mtpjax.errors import UserError


@lru_cache(maxsize=64)
def first_of(*drafters: Drafter) -> Drafter:
    """A chain of drafters, of which the first with a proposal wins; as deep as the deepest.

    Raises:
        UserError: fewer than two, or one that proposes a tree.
    """
    if len(drafters) < 2 or not all(is_chain(drafter.shape) for drafter in drafters):
        names = ", ".join(f"{drafter.name} {drafter.shape}" for drafter in drafters)
        raise UserError(f"first_of was given ({names}), expected two or more drafters of one candidate each")
    depth = max(drafter.depth for drafter in drafters)

    def propose(params: Params, state: tuple, key_B: Array, law: Law) -> Drafted:
        made = [d.propose(own, kept, key_B, law) for d, own, kept in zip(drafters, _each(params), state, strict=True)]
        proposals = [_padded(proposal, depth) for proposal, _ in made]
        vocab = max((p.q.shape[2] for p in proposals if p.q is not None), default=0)
        best = proposals[-1].replace(q=_law(proposals[-1], vocab))
        for proposal in reversed(proposals[:-1]):
            won = proposal.count > 0
            q, other = _law(proposal, vocab), best.q
            best = Proposal(
                tokens=jnp.where(won[:, None], proposal.tokens, best.tokens),
                q=None if q is None or other is None else jnp.where(won[:, None, None], q, other),
                count=jnp.where(won, proposal.count, best.count),
                parents=chain(depth),
            )
        return best, tuple(kept for _, kept in made)

    name = f"first of {', '.join(drafter.name for drafter in drafters)}"
    return Drafter(name, depth, _memory(drafters), propose, params_like=_like(drafters))


def _each(params: Params) -> list[Params]:
    return [Params(params.target, own) for own in params.drafter]


def _memory(drafters: tuple[Drafter, ...]) -> Memory:
    memories = [drafter.memory for drafter in drafters]
    wanted = tuple(sorted({layer for memory in memories for layer in memory.features}))

    def init(batch: int, capacity: int) -> tuple:
        return tuple(memory.init(batch, capacity) for memory in memories)

    def update(params: Params, state: tuple, committed: Committed, features: tuple[Array, ...]) -> tuple:
        by_layer = dict(zip(wanted, features, strict=True))
        return tuple(
            memory.update(own, kept, committed, tuple(by_layer[layer] for layer in memory.features))
            for memory, own, kept in zip(memories, _each(params), state, strict=True)
        )

    return Memory(init, update, wanted)


def _like(drafters: tuple[Drafter, ...]):
    def like() -> tuple[Any, ...]:
        return tuple(None if drafter.params_like is None else drafter.params_like() for drafter in drafters)

    return like


def _padded(proposal: Proposal, depth: int) -> Proposal:
    more = depth - proposal.tokens.shape[1]
    tokens = jnp.pad(proposal.tokens, ((0, 0), (0, more)))
    q = None if proposal.q is None else jnp.pad(proposal.q, ((0, 0), (0, more), (0, 0)))
    return proposal.replace(tokens=tokens, q=q, parents=chain(depth))


def _law(proposal: Proposal, vocab: int) -> Array | None:
    """Its q, one-hot for a deterministic draft; None when no drafter has one."""
    if proposal.q is not None or vocab == 0:
        return proposal.q
    return (proposal.tokens[:, :, None] == jnp.arange(vocab)[None, None, :]).astype(jnp.float32)
