"""Block verification: judges the drafted block as a whole, and keeps at least as much as rejection sampling.

Sun et al., 2403.10444. Rejection sampling stops at the first unlucky coin; but a prefix that the target likes better
than the drafter did has probability to spare, which may pay for a later, poorer token. With x_1 .. x_n drafted from
q_1 .. q_n (n = `count`):

    P_0 = 1,  P_i = min(P_{i-1} p_i(x_i) / q_i(x_i), 1)
    R_i = sum over x of max(P_i p_{i+1}(x) - q_{i+1}(x), 0)
    h_i = R_i / (R_i + 1 - P_i) for i < n,  h_n = P_n
    accepted = the last i with U_i < h_i, or 0

and the next token comes from p_{n+1} if all are accepted, else from max(P_i p_{i+1} - q_{i+1}, 0) with i = accepted.
Every coin is thrown: stopping at the first that fails would be another law, wrong by a total variation up to .67.
Where R_i + 1 - P_i is 0 the two laws agree and h_i = 1.

The number proposed may depend on the tokens drafted so far, not on the one being judged: n is a stopping time.

Data: p f32 [B, W, V] and q f32 [B, depth, V] or one-hot; R takes one pass over both.
"""

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Int

from mtpjax.decoding.drafters.base import Proposal
from mtpjax.decoding.verify.base import Chain, Settings
from mtpjax.decoding.verify.chain import at_tokens, chain_rule, draft_chance, draft_law_at, draft_laws, law_at


def prefix_weight(p_BWV: Float[Array, "B W V"], proposal: Proposal) -> Float[Array, "B W"]:
    """P_0 .. P_depth of each row; 0 from the first token of which q(x) is 0, which is padding."""
    q_x = draft_chance(proposal)
    ratio = jnp.where(q_x > 0.0, at_tokens(p_BWV, proposal) / q_x, 0.0)
    one = jnp.ones((ratio.shape[0], 1), ratio.dtype)

    def times(weight: Array, ratio_B: Array) -> tuple[Array, Array]:
        weight = jnp.minimum(weight * ratio_B, 1.0)
        return weight, weight

    _, weights = lax.scan(times, one[:, 0], ratio.T)
    return jnp.concatenate([one, weights.T], axis=1)


def accept(p_BWV: Float[Array, "B W V"], proposal: Proposal, settings: Settings) -> Float[Array, "B D"]:
    """h_1 .. h_depth; those behind `count` mean nothing."""
    weight = prefix_weight(p_BWV, proposal)[:, 1:]
    if weight.shape[1] == 0:
        return weight
    inner = weight[:, :-1]
    q = draft_laws(proposal, p_BWV.shape[2])[:, 1:]
    spare = jnp.sum(jnp.maximum(inner[:, :, None] * p_BWV[:, 1:-1] - q, 0.0), axis=2)
    total = spare + (1.0 - inner)  # in this order, or a small `spare` is lost in the 1
    chance = jnp.where(total > 0.0, spare / jnp.where(total > 0.0, total, 1.0), 1.0)
    place = 1 + jnp.arange(weight.shape[1])[None, :]
    padded = jnp.concatenate([chance, weight[:, -1:]], axis=1)
    return jnp.where(place == proposal.count[:, None], weight, padded)


def last(coins_BD: Bool[Array, "B D"]) -> Int[Array, "B"]:
    """Place of the last True in each row, counted from 1; 0 if there is none."""
    place = 1 + jnp.arange(coins_BD.shape[1], dtype=jnp.int32)[None, :]
    return jnp.max(jnp.where(coins_BD, place, 0), axis=1, initial=0)


def remainder(
    p_BWV: Float[Array, "B W V"], proposal: Proposal, accepted_B: Int[Array, "B"], settings: Settings
) -> Float[Array, "B V"]:
    """max(P p - q, 0) behind the accepted prefix; p behind the last proposed token."""
    p = law_at(p_BWV, accepted_B)
    weight = jnp.take_along_axis(prefix_weight(p_BWV, proposal), accepted_B[:, None], axis=1)
    residual = jnp.maximum(weight * p - draft_law_at(proposal, accepted_B, p.shape[1]), 0.0)
    return jnp.where((accepted_B < proposal.count)[:, None], residual, p)


BLOCK = chain_rule("block", Chain(accept, last, remainder))
