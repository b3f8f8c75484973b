"""Lossy rules share one form: whether a drafted token is kept is read from the target's law p alone.

Places are judged in order; at the first token that is not kept, and behind the last, the next token comes from p
itself. With a(x) in {0, 1} for "kept" and A = sum of q a, the token committed at a place has the law

    q a + (1 - A) p,   at total variation  1/2 sum |q a - A p|  from p.

That is computed for every place from the whole laws, not estimated from text. It is reported for the places that
committed a token: the sum of a step bounds the total variation of what the step committed.

p is the processed law. At temperature 0 it is one-hot, and since a token of probability 0 is never kept, every lossy
rule is then greedy verification: token-identical, total variation 0. They are lossy on rows with a temperature.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int

from mtpjax.decoding.drafters.base import Proposal
from mtpjax.decoding.verify.base import Chain, Settings
from mtpjax.decoding.verify.chain import at_tokens, draft_laws, law_at, leading
from mtpjax.errors import UserError

Keeps = Callable[[Array, Settings], Array]


def keeping(keeps: Keeps) -> Chain:
    """The parts of a rule that keeps a token where ``keeps(p_BDV, settings) -> bool [B, depth, V]`` says so."""

    def kept(p_BWV: Array, proposal: Proposal, settings: Settings) -> Bool[Array, "B D V"]:
        p = p_BWV[:, : proposal.tokens.shape[1]]
        return keeps(p, settings) & (p > 0.0)

    def accept(p_BWV: Float[Array, "B W V"], proposal: Proposal, settings: Settings) -> Float[Array, "B D"]:
        return at_tokens(kept(p_BWV, proposal, settings), proposal).astype(jnp.float32)

    def remainder(
        p_BWV: Float[Array, "B W V"], proposal: Proposal, accepted_B: Int[Array, "B"], settings: Settings
    ) -> Float[Array, "B V"]:
        return law_at(p_BWV, accepted_B)

    def tv(p_BWV: Float[Array, "B W V"], proposal: Proposal, settings: Settings) -> Float[Array, "B D"]:
        p = p_BWV[:, : proposal.tokens.shape[1]]
        taken = jnp.where(kept(p_BWV, proposal, settings), draft_laws(proposal, p.shape[2]), 0.0)
        return 0.5 * jnp.sum(jnp.abs(taken - jnp.sum(taken, axis=2, keepdims=True) * p), axis=2)

    return Chain(accept, leading, remainder, tv)


def number(rule: str, name: str, value: float, low: float, high: float) -> float:
    """A rule's number, checked."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise UserError(f"{name} of rule {rule!r} is {value!r}, expected a number from {low:g} to {high:g}")
    return float(value)
