"""Rejection sampling: the output has exactly the target's law (Leviathan 2211.17192, Chen 2302.01318).

Token x drawn from q is accepted with probability min(1, p(x) / q(x)); at the first rejection the next token comes from
norm(max(p - q, 0)). If all are accepted, the next token comes from the last law: the bonus.

A deterministic draft has one-hot q: it is accepted with p(x), and the residual is p without x. A place that was not
proposed has nothing to subtract: the next token comes from p itself. Greedy rows have one-hot p and need no case of
their own.

In floats: `u < p / q` is compared as `u * q < p`, strictly, since `uniform` does return 0 and `<=` would then accept a
token of probability 0; a residual that sums to 0 (p and q equal up to rounding) falls back to p.
"""

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from mtpjax.decoding.drafters.base import Proposal
from mtpjax.decoding.sampling import ACCEPT, BONUS, RESIDUAL, draw, tagged, uniforms
from mtpjax.decoding.verify.base import Rule, Verdict
from mtpjax.decoding.verify.greedy import chain_path, leading, proposed


def verify(p_BWV: Float[Array, "B W V"], proposal: Proposal, key_B: Array) -> Verdict:
    """Verify a chain: p f32 [B, W, V] with W = depth + 1."""
    depth = proposal.tokens.shape[1]
    at_draft = proposal.tokens[:, :, None]
    p_x = jnp.take_along_axis(p_BWV[:, :depth], at_draft, axis=2)[..., 0]
    q_x = jnp.ones_like(p_x) if proposal.q is None else jnp.take_along_axis(proposal.q, at_draft, axis=2)[..., 0]
    u = uniforms(tagged(key_B, ACCEPT), depth)
    accepted = leading(proposed(proposal) & (u * q_x < p_x))

    p = jnp.take_along_axis(p_BWV, accepted[:, None, None], axis=1)[:, 0]
    rejected = accepted < proposal.count
    residual = jnp.where(rejected[:, None], jnp.maximum(p - _draft_law(proposal, accepted, p.shape[1]), 0.0), p)
    weight = jnp.where(jnp.sum(residual, axis=1, keepdims=True) > 0.0, residual, p)
    stream = jnp.where(rejected, RESIDUAL, BONUS)
    return Verdict(accepted, chain_path(proposal), draw(tagged(key_B, stream), weight))


def _draft_law(proposal: Proposal, place_B: Array, vocab: int) -> Array:
    """Q at one place of each row, f32 [B, V]; at the bonus place, which no row subtracts, any row of q serves."""
    depth = proposal.tokens.shape[1]
    if depth == 0:
        return jnp.zeros((place_B.shape[0], vocab))
    place = jnp.minimum(place_B, depth - 1)[:, None]
    if proposal.q is not None:
        return jnp.take_along_axis(proposal.q, place[:, :, None], axis=1)[:, 0]
    token = jnp.take_along_axis(proposal.tokens, place, axis=1)
    return (token == jnp.arange(vocab)[None, :]).astype(jnp.float32)


REJECTION = Rule("rejection", verify, lossless=True, samples=True)
