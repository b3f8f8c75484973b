"""No drafter: a window of one token, which is plain decoding (depth 0)."""

from functools import lru_cache

import jax.numpy as jnp

from mtpjax.decoding.drafters.base import Drafter, Memory, Proposal


@lru_cache(maxsize=1)
def none() -> Drafter:
    """The drafter of plain decoding: it keeps nothing, and proposes nothing."""

    def propose(params, state, key_B, law):
        (batch,) = key_B.shape
        nothing = Proposal(jnp.zeros((batch, 0), jnp.int32), q=None, count=jnp.zeros(batch, jnp.int32), parents=())
        return nothing, state

    memory = Memory(init=lambda batch, capacity: (), update=lambda params, state, committed, features: state)
    return Drafter("none", 0, memory, propose)
