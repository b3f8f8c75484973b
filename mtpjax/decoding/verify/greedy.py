"""Greedy verification: accept while the draft is what the target would have said.

At temperature 0 this is rejection sampling with one-hot p. It needs only the arg-max of each place, so the loop takes
it whenever every row is greedy and no law has to be made.
"""

import jax.numpy as jnp
from jax import Array

from mtpjax.decoding.drafters.base import Proposal
from mtpjax.decoding.verify.base import Rule, Verdict


def leading(ok_BD: Array) -> Array:
    """Number of leading True in each row of bool [B, depth]: int32 [B]."""
    return jnp.sum(jnp.cumprod(ok_BD.astype(jnp.int32), axis=1), axis=1)


def proposed(proposal: Proposal) -> Array:
    """Bool [B, depth]: which places hold a proposed token."""
    return jnp.arange(proposal.tokens.shape[1])[None, :] < proposal.count[:, None]


def verify_choice(choice_BW: Array, proposal: Proposal) -> Verdict:
    """Accept drafts that equal the target's choice; `choice` int32 [B, W] is the arg-max of every place."""
    accepted = leading(proposed(proposal) & (proposal.tokens == choice_BW[:, :-1]))
    next_token = jnp.take_along_axis(choice_BW, accepted[:, None], axis=1)[:, 0]
    return Verdict(accepted, chain_path(proposal), next_token)


def chain_path(proposal: Proposal) -> Array:
    """Window offsets 1..depth for every row: the path along a chain."""
    B, depth = proposal.tokens.shape
    return jnp.broadcast_to(1 + jnp.arange(depth), (B, depth))


def verify(p_BWV: Array, proposal: Proposal, key_B: Array) -> Verdict:
    """The rule on laws: the arg-max of p decides, whatever the temperature."""
    return verify_choice(jnp.argmax(p_BWV, axis=-1).astype(jnp.int32), proposal)


GREEDY = Rule("greedy", verify, lossless=True, samples=False)
