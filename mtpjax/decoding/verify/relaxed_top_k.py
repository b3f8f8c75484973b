"""Lossy: relaxed top-k, which keeps a token that is among the target's k most likely.

Keep x if fewer than k tokens are more likely; all those tied with the k-th are kept. With k = 1 only the arg-max is,
which is not greedy decoding: the next token is still drawn. The output is not the target's: see `lossy.py` for what is
reported. No sort: the k-th largest probability is found by bisection over its bits, as in `sampling.py`.
"""

import jax
import jax.numpy as jnp
from jax import Array, lax

from mtpjax.decoding.sampling import cutoff
from mtpjax.decoding.verify.base import Rule, Settings
from mtpjax.decoding.verify.chain import chain_rule
from mtpjax.decoding.verify.lossy import keeping, number
from mtpjax.errors import UserError


def keeps(p_BDV: Array, settings: Settings) -> Array:
    """Bool [B, depth, V]: p(x) is at least the k-th largest."""
    k = jnp.minimum(settings["k"], p_BDV.shape[2])

    def one(p_V: Array) -> Array:
        # The bits of a non-negative f32, read as an integer, keep its order; from the largest down.
        below = lax.bitcast_convert_type(jnp.max(p_V), jnp.int32) - lax.bitcast_convert_type(p_V, jnp.int32)
        return below <= cutoff(below, jnp.ones_like(p_V), k)

    return jax.vmap(jax.vmap(one))(p_BDV.astype(jnp.float32))


CHAIN = keeping(keeps)


def relaxed_top_k(k: int | float = 3) -> Rule:
    """The rule with its k, a whole number from 1, never compiled in."""
    if number("relaxed_top_k", "k", k, 1, 2**24) % 1:
        raise UserError(f"k of rule 'relaxed_top_k' is {k!r}, expected a whole number from 1")
    return chain_rule("relaxed_top_k", CHAIN, {"k": float(k)})
