"""Greedy verification: accept while the draft is what the target would have said.

At temperature 0 this is rejection sampling with one-hot p. It needs only the arg-max of each place, so the loop takes
it whenever every row is greedy and no law has to be made.
"""

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from mtpjax.decoding.drafters.base import Proposal
from mtpjax.decoding.tree import is_chain
from mtpjax.decoding.verify.base import Rule, Settings, Verdict
from mtpjax.decoding.verify.chain import chain_path, leading, proposed
from mtpjax.decoding.verify.tree import choose_choice, walk


def verify_choice(choice_BW: Int[Array, "B W"], proposal: Proposal) -> Verdict:
    """Accept drafts that equal the target's choice, the arg-max of every place."""
    if not is_chain(proposal.parents):
        end = walk(proposal, choose_choice(proposal, choice_BW))
        return Verdict(end.accepted, end.path, jnp.take_along_axis(choice_BW, end.at[:, None], axis=1)[:, 0])
    accepted = leading(proposed(proposal) & (proposal.tokens == choice_BW[:, :-1]))
    next_token = jnp.take_along_axis(choice_BW, accepted[:, None], axis=1)[:, 0]
    return Verdict(accepted, chain_path(proposal), next_token)


def verify(p_BWV: Float[Array, "B W V"], proposal: Proposal, key_B: Array, settings: Settings) -> Verdict:
    """The rule on laws: the arg-max of p decides, whatever the temperature."""
    return verify_choice(jnp.argmax(p_BWV, axis=-1).astype(jnp.int32), proposal)


GREEDY = Rule("greedy", verify, lossless=True, samples=False, trees=True)
