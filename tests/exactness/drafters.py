"""Drafters with a law of their own, known exactly: the next draft depends on the token before it, by a table.

The table is part of the drafter's state, since a constant of the loop would be folded at compile time.
"""

from collections.abc import Callable
from functools import lru_cache

import jax.numpy as jnp
import numpy as np
from jax import Array

from mtpjax.decoding.drafters import Committed, Drafter, Memory, Params, Proposal, chain
from mtpjax.decoding.sampling import DRAFT, Law, draw, probabilities, tagged

V = 3


def table() -> np.ndarray:
    """Logits f32 [V, V] of the next draft after each token."""
    return np.random.default_rng(9).normal(size=(V, V)).astype(np.float32)


def at_row(value_BVV: Array, token_B: Array) -> Array:
    """The row of each batch's table that belongs to its token, [B, V]."""
    return jnp.take_along_axis(value_BVV, token_B[:, None, None], axis=1)[:, 0]


@lru_cache(maxsize=32)
def markov(
    depth: int,
    *,
    sampled: bool = True,
    stops: bool = False,
    drawn_from: Callable[[Array, Law], Array] = probabilities,
    stream: int = DRAFT,
) -> Drafter:
    """Drafts from the table: sampled with their q, or the most likely token.

    Args:
        depth: drafted tokens a step.
        sampled: whether tokens are drawn, or the arg-max is taken and q is one-hot.
        stops: stop behind a drafted 0: a depth that depends on what was drafted, never on what is being judged.
        drawn_from: the law that tokens are drawn from; another than the processed law, which is reported, is a bug.
        stream: the random stream that they are drawn with; another than `DRAFT` is a bug.
    """

    def propose(params: Params, state: dict[str, Array], key_B: Array, law: Law) -> tuple[Proposal, dict[str, Array]]:
        logits = jnp.broadcast_to(state["table"], (*key_B.shape, V, V))
        reported, drawn = probabilities(logits, law), drawn_from(logits, law)
        token, tokens, laws = state["last"], [], []
        for i in range(depth):
            laws.append(at_row(reported, token))
            if sampled:
                key = tagged(tagged(key_B, stream), i) if i else tagged(key_B, stream)
                token = draw(key, at_row(drawn, token))
            else:
                token = jnp.argmax(at_row(logits, token), axis=-1).astype(jnp.int32)
            tokens.append(token)
        drafted = jnp.stack(tokens, axis=1)
        zero = drafted == 0
        first = jnp.where(jnp.any(zero, axis=1), jnp.argmax(zero, axis=1) + 1, depth)
        count = first if stops else jnp.full_like(first, depth)
        q = jnp.stack(laws, axis=1) if sampled else None
        return Proposal(drafted, q, count.astype(jnp.int32), chain(depth)), state

    return Drafter("markov", depth, MEMORY, propose)


def _begin(batch: int, capacity: int) -> dict[str, Array]:
    return {"table": jnp.asarray(table()), "last": jnp.zeros(batch, jnp.int32)}


def _remember(
    params: Params, state: dict[str, Array], committed: Committed, features: tuple[Array, ...]
) -> dict[str, Array]:
    at = jnp.maximum(committed.count - 1, 0)[:, None]
    last = jnp.take_along_axis(committed.tokens, at, axis=1)[:, 0]
    return {**state, "last": jnp.where(committed.count > 0, last, state["last"])}


MEMORY = Memory(_begin, _remember)
