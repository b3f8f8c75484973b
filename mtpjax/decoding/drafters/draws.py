"""From a drafter's logits to drafted tokens and their law q, for drafters that have logits: a model, or heads.

Tokens are drawn from the processed law (the row's temperature, top-k, top-p and min-p), and that law is the q that the
rule is told: the same array, so that what is reported is what was drawn from. Siblings are drawn without replacement:
the `count` largest of log q + Gumbel noise are, in order, such draws. Greedy rows take the largest logits, one-hot.

Without `sample`, every row takes the largest logits and q is None: a deterministic draft, accepted with p(x). Sampling
accepts more often at high temperature (1 - TV(p, q) against p at the mode of q), and needs q for every node.
"""

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from mtpjax.decoding.sampling import DRAFT, Law, probabilities, tagged


def draw_siblings(
    logits_BV: Float[Array, "B V"], law: Law, key_B: Array, level: int, count: int, sample: bool
) -> tuple[Array, Array | None]:
    """`count` different tokens for one place.

    Args:
        logits_BV: the drafter's logits f32 [B, V], -inf where it has no token.
        law: the rows' settings.
        key_B: the step's keys.
        level: level of the place in the draft, from 1; keeps the streams of a step apart.
        count: how many.
        sample: draw from the processed law, or take the largest logits.

    Returns:
        tokens int32 [B, count], and the law q f32 [B, count, V] of each before the earlier siblings are taken out
        (`Proposal.distinct`), or None for a deterministic draft. Where the law has fewer tokens than `count`, the rest
        have no probability once the earlier ones are taken out, and are passed over.
    """
    if not sample:
        return _largest(logits_BV, count), None
    V = logits_BV.shape[1]
    q_BV = probabilities(logits_BV[:, None], law)[:, 0]
    keys = tagged(tagged(key_B, DRAFT), level)
    noise = jax.vmap(lambda key: jax.random.gumbel(key, (V,), jnp.float32))(keys)
    greedy = law.greedy[:, None]
    tokens = _largest(jnp.where(greedy, logits_BV, jnp.log(q_BV) + noise), count)
    one_hot = (tokens[:, :, None] == jnp.arange(V)[None, None, :]).astype(jnp.float32)
    return tokens, jnp.where(greedy[:, :, None], one_hot, jnp.broadcast_to(q_BV[:, None], one_hot.shape))


def draw_each(
    logits_BCV: Float[Array, "B C V"], law: Law, key_B: Array, level: int, sample: bool
) -> tuple[Array, Array | None]:
    """One token for each of C places of a level: tokens int32 [B, C] and q f32 [B, C, V], or None."""
    C = logits_BCV.shape[1]
    keys = [tagged(key_B, place) for place in range(C)] if C > 1 else [key_B]
    drawn = [draw_siblings(logits_BCV[:, c], law, keys[c], level, 1, sample) for c in range(C)]
    tokens = jnp.concatenate([token for token, _ in drawn], axis=1)
    laws = [q for _, q in drawn if q is not None]
    return tokens, jnp.concatenate(laws, axis=1) if laws else None


def _largest(score_BV: Array, count: int) -> Array:
    """Places of the `count` largest, in order, int32 [B, count]: a few scans, where a sort of 49,152 costs 8 ms."""
    found = []
    for _ in range(count):
        found.append(jnp.argmax(score_BV, axis=1).astype(jnp.int32))
        score_BV = jnp.where(jnp.arange(score_BV.shape[1])[None, :] == found[-1][:, None], -jnp.inf, score_BV)
    return jnp.stack(found, axis=1)
