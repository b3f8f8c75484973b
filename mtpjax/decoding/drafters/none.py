"""No drafter: a window of one token, which is plain decoding (depth 0)."""

from functools import lru_cache

import jax.numpy as jnp

from mtpjax.decoding.drafters.base import Drafter, Proposal


@lru_cache(maxsize=1)
def none() -> Drafter:
    """The drafter of plain decoding: its state is the batch's shape and nothing else."""

    def init(params, tokens_BS, length_B):
        return jnp.zeros((tokens_BS.shape[0], 0), jnp.int32)

    def propose(state, key_B, law):
        return Proposal(tokens=state, q=None, count=jnp.zeros(state.shape[0], jnp.int32), parents=())

    return Drafter("none", init, propose, lambda state, committed, features: state, depth=0)
