"""Lossy: the candidate to which the target gives the highest probability wins, and is kept down to a threshold.

The target scores all candidates in one pass; a candidate's score is the mean of log p over its tokens. Of the winner's
tokens those before the first with p(x) < `threshold` are committed, then one token drawn from p. The drafter's law
plays no part, so the output leans towards what the drafter finds likely and the target does not mind.

Total variation: given the drafts, a committed draft is a certainty, at distance 1 - p(x) from p. Over the drafter's own
randomness the law is a mixture of these, so what is reported is an upper bound (by convexity), exact for deterministic
drafts. The law over the drafts would need the scores of all candidates that might have been drawn.

At temperature 0 a token with p = 0 is never kept: token-identical, like every other rule.
"""

from functools import lru_cache

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from mtpjax.decoding import tree
from mtpjax.decoding.drafters.base import Proposal
from mtpjax.decoding.sampling import BONUS, draw, tagged
from mtpjax.decoding.verify.base import Rule, Settings, Verdict
from mtpjax.decoding.verify.chain import leading
from mtpjax.decoding.verify.lossy import number
from mtpjax.decoding.verify.tree import token_of

# A token of probability 0 counts as this: a candidate that starts well still beats one that does not.
_LEAST_LOG_P = -1e4


def verify(p_BWV: Float[Array, "B W V"], proposal: Proposal, key_B: Array, settings: Settings) -> Verdict:
    """Score every candidate, keep the winner's tokens down to the threshold."""
    parents = proposal.parents
    W, depth = len(parents) + 1, tree.depth_of(parents)
    above = jnp.asarray((0, *parents))
    p_x = _chance_of(p_BWV, proposal)
    log_p = jnp.maximum(jnp.log(p_x), _LEAST_LOG_P)
    ancestors = jnp.asarray(tree.ancestor_mask(parents)[1:, 1:], jnp.float32)
    level = jnp.asarray(tree.levels(parents))
    real = jnp.arange(W)[None, :] <= proposal.count[:, None]
    has_child = jnp.any((real[:, None, 1:] & (above[None, None, 1:] == jnp.arange(W)[None, :, None])), axis=2)
    score = jnp.matmul(log_p, ancestors.T, precision="highest") / level[None, 1:]
    score = jnp.where((real & ~has_child)[:, 1:], score, -jnp.inf)
    leaf = jnp.argmax(score, axis=1) + 1 if W > 1 else jnp.zeros_like(proposal.count)
    leaf = jnp.where(proposal.count > 0, leaf, 0).astype(jnp.int32)

    offsets = [leaf]
    for _ in range(depth - 1):
        offsets.append(above[offsets[-1]])
    way = jnp.stack(offsets[::-1], axis=1)[:, :depth]  # from the top; 0 before a short candidate's first token
    path = jnp.take_along_axis(way, _shifted(way, depth), axis=1) if depth else way[:, :0]
    length = level[leaf]
    p_path = jnp.take_along_axis(p_x, jnp.maximum(path - 1, 0), axis=1) if depth else jnp.zeros(path.shape)
    kept = (p_path >= settings["threshold"]) & (p_path > 0.0) & (jnp.arange(depth)[None, :] < length[:, None])
    accepted = leading(kept)
    node = jnp.take_along_axis(
        jnp.concatenate([jnp.zeros_like(leaf)[:, None], path], axis=1), accepted[:, None], axis=1
    )
    weights = jnp.take_along_axis(p_BWV, node[:, :, None], axis=1)[:, 0]
    tv = jnp.where(jnp.arange(depth)[None, :] < accepted[:, None], 1.0 - p_path, 0.0)
    return Verdict(accepted, path, draw(tagged(key_B, BONUS), weights), tv)


def _chance_of(p_BWV: Array, proposal: Proposal) -> Array:
    """P of each drafted token at its parent, f32 [B, nodes]."""
    parents = jnp.asarray(proposal.parents, jnp.int32)
    token = token_of(proposal, jnp.broadcast_to(jnp.arange(1, len(parents) + 1)[None, :], proposal.tokens.shape))
    at_parent = p_BWV[:, parents]
    return jnp.take_along_axis(at_parent, token[:, :, None], axis=2)[..., 0]


def _shifted(way_BD: Array, depth: int) -> Array:
    """Where the first, second, ... real offset of each row stands in `way`, whose zeros come first."""
    missing = jnp.sum(way_BD == 0, axis=1, keepdims=True)
    return jnp.minimum(missing + jnp.arange(depth)[None, :], depth - 1)


@lru_cache(maxsize=64)
def best_of_candidates(threshold: float = 0.0) -> Rule:
    """The rule; tokens of the winner with less than `threshold` (0 to 1) are not kept."""
    value = number("best_of_candidates", "threshold", threshold, 0.0, 1.0)
    return Rule("best_of_candidates", verify, lossless=False, samples=True, trees=True, settings={"threshold": value})
