"""Verifying a tree: walk down from the root, one level at a time, and stop where no child is accepted.

On laws this is the recursive residual (SpecInfer 2305.09781, recursive rejection sampling 2402.14160), lossless. At the
node reached, with p_1 = p, its children x_1, x_2, ... are tried in order:

    accept x_i with probability min(1, p_i(x_i) / q_i(x_i)),   else   p_{i+1} = norm(max(p_i - q_i, 0)),

and when all are rejected the next token comes from the last p_i. Drawn independently, q_i = q, and a duplicate still
runs its residual step. Drawn without replacement (`Proposal.distinct`), q_i is q with the earlier siblings taken out
and renormalised, in the ratio and in the residual; where nothing of q is left the child is passed over. A deterministic
child is accepted with p_i(x_i), and then x_i is taken out of p_i. With one child a level this is rejection sampling.

In floats as for chains: a coin falls when ``u < chance``, and a residual that sums to 0 leaves p_i as it is.

Rejected: trying only the most likely child (rejection sampling on it alone: the others would be scored in vain);
optimal transport over all siblings (2310.15141: a linear program a step).
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from mtpjax.decoding import tree
from mtpjax.decoding.drafters.base import Proposal
from mtpjax.decoding.sampling import ACCEPT, BONUS, RESIDUAL, draw, tagged, uniforms
from mtpjax.decoding.verify.base import Settings, Verdict


class Walk(NamedTuple):
    """Where a walk ended, one entry a row.

    Attributes:
        at: int32 [B], the offset reached.
        accepted: int32 [B], its level.
        path: int32 [B, depth], offsets on the way; meaningless behind `accepted`.
        stopped: bool [B], whether children were there and none was accepted.
        weights: f32 [B, V], law of the next token, or None when no laws are looked at.
    """

    at: Array
    accepted: Array
    path: Array
    stopped: Array
    weights: Array | None


Choose = Callable[[Array, Array, Array], tuple[Array, Array | None]]
"""``(node [B], kids [B, C], alive [B]) -> (kid taken [B] or 0, weights [B, V] that are left at the node)``."""

Coin = Callable[[Array, Array, Array], Array]
"""``(kid [B], chance [B], asked [B]) -> bool [B]``: whether the coin of each kid falls for it."""


def walk(proposal: Proposal, choose: Choose) -> Walk:
    """Go down while `choose` takes a child; a child behind `count` is not there."""
    table = jnp.asarray(tree.children(proposal.parents))
    B = proposal.count.shape[0]
    node, accepted, alive = jnp.zeros(B, jnp.int32), jnp.zeros(B, jnp.int32), jnp.ones(B, bool)
    path, weights, stopped = [], None, jnp.zeros(B, bool)
    for _ in range(tree.depth_of(proposal.parents) + 1):
        kids = table[node]
        kids = jnp.where(kids <= proposal.count[:, None], kids, 0)
        taken, left = choose(node, kids, alive)
        taken = jnp.where(alive, taken, 0)
        if left is not None:
            weights = left if weights is None else jnp.where(alive[:, None], left, weights)
        stopped = stopped | (alive & (taken == 0) & jnp.any(kids > 0, axis=1))
        alive = alive & (taken > 0)
        node, accepted = jnp.where(alive, taken, node), accepted + alive
        path.append(node)
    return Walk(node, accepted, jnp.stack(path[:-1] or [node], axis=1)[:, : len(path) - 1], stopped, weights)


def choose_choice(proposal: Proposal, choice_BW: Int[Array, "B W"]) -> Choose:
    """Take the child that is the target's choice at the node."""

    def choose(node: Array, kids: Array, alive: Array) -> tuple[Array, None]:
        hit = (kids > 0) & (token_of(proposal, kids) == _at(choice_BW, node)[:, None])
        first = jnp.argmax(hit, axis=1)[:, None]
        return jnp.where(jnp.any(hit, axis=1), jnp.take_along_axis(kids, first, axis=1)[:, 0], 0), None

    return choose


def choose_recursively(proposal: Proposal, p_BWV: Float[Array, "B W V"], falls: Coin) -> Choose:
    """The recursive residual."""

    def choose(node: Array, kids: Array, alive: Array) -> tuple[Array, Array]:
        p = jnp.take_along_axis(p_BWV, node[:, None, None], axis=1)[:, 0]
        taken = jnp.zeros_like(node)
        for i in range(kids.shape[1]):
            kid = kids[:, i]
            q = sibling_law(proposal, kids, i, p.shape[1])
            asked = alive & (taken == 0) & (kid > 0)
            kept = asked & falls(kid, chance(p, q, token_of(proposal, kid[:, None])[:, 0]), asked)
            p = jnp.where((asked & ~kept)[:, None], residual(p, q), p)
            taken = jnp.where(kept, kid, taken)
        return taken, p

    return choose


def chance(p_BV: Float[Array, "B V"], q_BV: Float[Array, "B V"], token_B: Int[Array, "B"]) -> Float[Array, "B"]:
    """min(1, p(x) / q(x)); 0 where q has nothing."""
    p_x, q_x = _at(p_BV, token_B), _at(q_BV, token_B)
    return jnp.where(q_x > 0.0, jnp.minimum(p_x / jnp.where(q_x > 0.0, q_x, 1.0), 1.0), 0.0)


def residual(p_BV: Float[Array, "B V"], q_BV: Float[Array, "B V"]) -> Float[Array, "B V"]:
    """norm(max(p - q, 0)), or p where nothing remains."""
    rest = jnp.maximum(p_BV - q_BV, 0.0)
    total = jnp.sum(rest, axis=1, keepdims=True)
    return jnp.where(total > 0.0, rest / jnp.where(total > 0.0, total, 1.0), p_BV)


def sibling_law(proposal: Proposal, kids_BC: Int[Array, "B C"], i: int, vocab: int) -> Float[Array, "B V"]:
    """The law from which the i-th child was drawn, given the earlier ones; f32 [B, V], zeros where nothing is left."""
    if proposal.q is None:
        token = token_of(proposal, kids_BC[:, i : i + 1])
        return (token == jnp.arange(vocab)[None, :]).astype(jnp.float32)
    at = jnp.maximum(kids_BC[:, i] - 1, 0)
    q = jnp.take_along_axis(proposal.q, at[:, None, None], axis=1)[:, 0]
    if not proposal.distinct or i == 0:
        return q
    earlier = token_of(proposal, kids_BC[:, :i])[:, :, None] == jnp.arange(vocab)[None, None, :]
    q = jnp.where(jnp.any(earlier, axis=1), 0.0, q)
    total = jnp.sum(q, axis=1, keepdims=True)
    return q / jnp.where(total > 0.0, total, 1.0)


def verify_recursively(p_BWV: Float[Array, "B W V"], proposal: Proposal, key_B: Array, settings: Settings) -> Verdict:
    """The lossless rule for trees: coins, the walk, and one draw for the token behind it."""
    u = uniforms(tagged(key_B, ACCEPT), proposal.tokens.shape[1])

    def falls(kid: Array, chance_B: Array, asked: Array) -> Array:
        return _at(u, jnp.maximum(kid - 1, 0)) < chance_B

    end = walk(proposal, choose_recursively(proposal, p_BWV, falls))
    assert end.weights is not None, "the recursive residual looks at laws"
    next_token = draw(tagged(key_B, jnp.where(end.stopped, RESIDUAL, BONUS)), end.weights)
    return Verdict(end.accepted, end.path, next_token)


def token_of(proposal: Proposal, offset_BC: Int[Array, "B C"]) -> Int[Array, "B C"]:
    """Tokens at window offsets; at the root, which is no draft, any."""
    if proposal.tokens.shape[1] == 0:
        return jnp.zeros_like(offset_BC)
    return jnp.take_along_axis(proposal.tokens, jnp.maximum(offset_BC - 1, 0), axis=1)


def _at(value_BX: Array, index_B: Array) -> Array:
    return jnp.take_along_axis(value_BX, index_B[:, None], axis=1)[:, 0]
