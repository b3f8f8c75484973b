"""Rejection sampling: the output has exactly the target's law (Leviathan 2211.17192, Chen 2302.01318).

Token x drawn from q is accepted with probability min(1, p(x) / q(x)); at the first rejection the next token comes from
norm(max(p - q, 0)). If all are accepted, the next token comes from the last law: the bonus.

Several candidates are verified by the recursive residual (`tree`), which is the same rule with more than one try.

A deterministic draft has one-hot q: it is accepted with p(x), and the residual is p without x. A place that was not
proposed has nothing to subtract: the next token comes from p itself. Greedy rows have one-hot p and need no case of
their own.
"""

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from mtpjax.decoding.drafters.base import Proposal
from mtpjax.decoding.tree import is_chain
from mtpjax.decoding.verify.base import Chain, Rule, Settings, Verdict
from mtpjax.decoding.verify.chain import at_tokens, draft_chance, draft_law_at, law_at, leading, verify_chain
from mtpjax.decoding.verify.tree import verify_recursively


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


CHAIN = Chain(accept, leading, remainder)


def verify(p_BWV: Float[Array, "B W V"], proposal: Proposal, key_B: Array, settings: Settings) -> Verdict:
    """A chain by its parts, a tree by the recursive residual."""
    if is_chain(proposal.parents):
        return verify_chain(CHAIN, p_BWV, proposal, key_B, settings)
    return verify_recursively(p_BWV, proposal, key_B, settings)


REJECTION = Rule("rejection", verify, lossless=True, samples=True, trees=True, chain=CHAIN)
