"""Verifying a chain: one coin for each drafted token, then one draw for the token behind the accepted ones.

In floats: a coin falls for its token when ``u < chance``, strictly, since `uniform` does return 0 and ``<=`` would then
accept a token of probability 0. A remainder that sums to 0 (laws equal up to rounding) falls back to p.
"""

from collections.abc import Callable
from functools import lru_cache, partial

import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int

from mtpjax.decoding.drafters.base import Proposal
from mtpjax.decoding.sampling import ACCEPT, BONUS, RESIDUAL, draw, tagged, uniforms
from mtpjax.decoding.verify.base import Chain, Rule, Settings, Verdict


def chain_rule(name: str, chain: Chain, settings: dict[str, float] | None = None) -> Rule:
    """The rule made of these parts; lossless if they report no total variation."""
    return Rule(name, _verifier(chain), lossless=chain.tv is None, samples=True, chain=chain, settings=settings or {})


@lru_cache(maxsize=64)
def _verifier(chain: Chain) -> Callable[..., Verdict]:
    """One function object for the same parts, so that rules which differ in numbers alone are equal."""
    return partial(verify_chain, chain)


def verify_chain(
    chain: Chain, p_BWV: Float[Array, "B W V"], proposal: Proposal, key_B: Array, settings: Settings
) -> Verdict:
    """Throw the coins, settle how many are accepted, draw the next token; p f32 [B, W, V] with W = depth + 1."""
    u = uniforms(tagged(key_B, ACCEPT), proposal.tokens.shape[1])
    accepted = decide(chain, p_BWV, proposal, u, settings)
    stream = jnp.where(accepted < proposal.count, RESIDUAL, BONUS)
    next_token = draw(tagged(key_B, stream), next_weights(chain, p_BWV, proposal, accepted, settings))
    tv = None
    if chain.tv is not None:
        tv = jnp.where(proposed(proposal), chain.tv(p_BWV, proposal, settings), 0.0)
    return Verdict(accepted, chain_path(proposal), next_token, tv)


def decide(
    chain: Chain, p_BWV: Float[Array, "B W V"], proposal: Proposal, u_BD: Float[Array, "B D"], settings: Settings
) -> Int[Array, "B"]:
    """How many are accepted, given the uniforms of the coins f32 [B, depth]."""
    return chain.settle(proposed(proposal) & (u_BD < chain.accept(p_BWV, proposal, settings)))


def next_weights(
    chain: Chain, p_BWV: Float[Array, "B W V"], proposal: Proposal, accepted_B: Int[Array, "B"], settings: Settings
) -> Float[Array, "B V"]:
    """Weights of the token behind the accepted ones, f32 [B, V]: the rule's remainder, or p where nothing remains."""
    remainder = chain.remainder(p_BWV, proposal, accepted_B, settings)
    return jnp.where(jnp.sum(remainder, axis=1, keepdims=True) > 0.0, remainder, law_at(p_BWV, accepted_B))


def leading(coins_BD: Bool[Array, "B D"]) -> Int[Array, "B"]:
    """Number of leading True in each row."""
    return jnp.sum(jnp.cumprod(coins_BD.astype(jnp.int32), axis=1), axis=1)


def proposed(proposal: Proposal) -> Bool[Array, "B D"]:
    """Which places hold a proposed token."""
    return jnp.arange(proposal.tokens.shape[1])[None, :] < proposal.count[:, None]


def chain_path(proposal: Proposal) -> Int[Array, "B D"]:
    """Window offsets 1..depth for every row: the path along a chain."""
    B, depth = proposal.tokens.shape
    return jnp.broadcast_to(1 + jnp.arange(depth), (B, depth))


def law_at(law_BPV: Float[Array, "B P V"], place_B: Int[Array, "B"]) -> Float[Array, "B V"]:
    """The law of one place in each row."""
    return jnp.take_along_axis(law_BPV, place_B[:, None, None], axis=1)[:, 0]


def at_tokens(value_BPV: Array, proposal: Proposal) -> Array:
    """Of values [B, depth or more, V], the one of each drafted token: [B, depth]."""
    tokens = proposal.tokens[:, :, None]
    return jnp.take_along_axis(value_BPV[:, : tokens.shape[1]], tokens, axis=2)[..., 0]


def draft_chance(proposal: Proposal) -> Float[Array, "B D"]:
    """Q of each drafted token: 1 for a deterministic draft."""
    return jnp.ones(proposal.tokens.shape) if proposal.q is None else at_tokens(proposal.q, proposal)


def draft_laws(proposal: Proposal, vocab: int) -> Float[Array, "B D V"]:
    """Q of every place, one-hot for a deterministic draft."""
    if proposal.q is not None:
        return proposal.q
    return (proposal.tokens[:, :, None] == jnp.arange(vocab)[None, None, :]).astype(jnp.float32)


def draft_law_at(proposal: Proposal, place_B: Int[Array, "B"], vocab: int) -> Float[Array, "B V"]:
    """Q at one place of each row; at the bonus place, where no row has one, any row of q serves."""
    depth = proposal.tokens.shape[1]
    if depth == 0:
        return jnp.zeros((place_B.shape[0], vocab))
    place = jnp.minimum(place_B, depth - 1)
    if proposal.q is not None:
        return law_at(proposal.q, place)
    token = jnp.take_along_axis(proposal.tokens, place[:, None], axis=1)
    return (token == jnp.arange(vocab)[None, :]).astype(jnp.float32)
