"""Rejection sampling: the output has exactly the target's law (Leviathan 2211.17192, Chen 2302.01318).

Token x drawn from q is accepted with probability min(1, p(x) / q(x)); at the first rejection the next token comes from
norm(max(p - q, 0)). If all are accepted, the next token comes from the last law: the bonus.

A deterministic draft has one-hot q: it is accepted with p(x), and the residual is p without x. A place that was not
proposed has nothing to subtract: the next token comes from p itself. Greedy rows have one-hot p and need no case of
their own.
"""

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from mtpjax.decoding.drafters.base import Proposal
from mtpjax.decoding.verify.base import Chain, Settings
from mtpjax.decoding.verify.chain import at_tokens, chain_rule, draft_chance, draft_law_at, law_at, leading


def accept(p_BWV: Float[Array, "B W V"], proposal: Proposal, settings: Settings) -> Float[Array, "B D"]:
    """p(x) / q(x) of each drafted token, at most 1; padding has no q and gets 0."""
    q_x = draft_chance(proposal)
    return jnp.where(q_x > 0.0, jnp.minimum(at_tokens(p_BWV, proposal) / q_x, 1.0), 0.0)


def remainder(
    p_BWV: Float[Array, "B W V"], proposal: Proposal, accepted_B: Int[Array, "B"], settings: Settings
) -> Float[Array, "B V"]:
    """max(p - q, 0) at the first rejected place; p behind the last proposed one."""
    p = law_at(p_BWV, accepted_B)
    residual = jnp.maximum(p - draft_law_at(proposal, accepted_B, p.shape[1]), 0.0)
    return jnp.where((accepted_B < proposal.count)[:, None], residual, p)


REJECTION = chain_rule("rejection", Chain(accept, leading, remainder))
