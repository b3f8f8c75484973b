"""From logits to the processed law, and draws from it.

Everything that compares or draws uses the one law made here, in f32: temperature, then top-k, then top-p, then min-p,
renormalised. Draft sampling, acceptance ratio, residual and bonus token all see the same numbers; that is what makes
verification lossless.

No sort: one sort of 49,152 logits costs 8 ms on a CPU. Top-k and top-p are thresholds on the logit, found by bisection
over its bits: the gap below the largest logit is a non-negative f32, whose bits, read as an integer, keep its order, so
31 halvings find the threshold exactly. Tokens tied with the threshold are all kept.

Temperatures under `GREEDY_BELOW` are greedy: the law is one-hot at the first largest logit, whatever top-k or top-p.
"""

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array, lax
from jaxtyping import Float, Int

from mtpjax.records import Leaf

GREEDY_BELOW = 1e-5

# Tags that keep the random streams of one step apart.
DRAFT, ACCEPT, RESIDUAL, BONUS = range(4)


class Law(struct.PyTreeNode):
    """Sampling settings of each row, all [B]. They are numbers in the compiled loop: changing them compiles nothing.

    Attributes:
        temperature: f32; under `GREEDY_BELOW` is greedy.
        top_k: int32; 0 is off.
        top_p: f32 in (0, 1]; 1 is off.
        min_p: f32 in [0, 1]; keep tokens with at least this share of the largest probability; 0 is off.
    """

    temperature: Leaf
    top_k: Leaf
    top_p: Leaf
    min_p: Leaf

    @property
    def greedy(self) -> Array:
        """Bool [B]: which rows take the arg-max."""
        return self.temperature < GREEDY_BELOW


def probabilities(logits_BWV: Float[Array, "B W V"], law: Law) -> Float[Array, "B W V"]:
    """The processed law p of each place: logits f32 [B, W, V] -> f32 [B, W, V], each summing to 1."""
    each = jax.vmap(jax.vmap(_row, in_axes=(0, None)), in_axes=(0, 0))
    return each(logits_BWV, law)


def _row(logits_V: Array, law: Law) -> Array:
    V = logits_V.shape[0]
    greedy = law.greedy
    temperature = jnp.where(greedy, 1.0, law.temperature)
    z = (logits_V - jnp.max(logits_V)) / temperature
    gap = lax.bitcast_convert_type(jnp.abs(z), jnp.int32)  # 0 at the largest logit; order of the gap
    weight = jnp.exp(z)

    k = jnp.where(law.top_k <= 0, V, jnp.minimum(law.top_k, V))
    kept = _when(law.top_k > 0, lambda: gap <= cutoff(gap, jnp.ones(V), k.astype(jnp.float32)), V)
    weight = jnp.where(kept, weight, 0.0)
    need = law.top_p * jnp.sum(weight)
    kept = _when(law.top_p < 1.0, lambda: gap <= cutoff(gap, weight, need), V)
    weight = jnp.where(kept, weight, 0.0)
    weight = jnp.where(weight >= law.min_p, weight, 0.0)  # the largest weight is exactly 1
    p = weight / jnp.sum(weight)
    return jnp.where(greedy, jax.nn.one_hot(jnp.argmax(logits_V), V), p)


def _when(wanted: Array, kept, size: int) -> Array:
    return lax.cond(wanted, kept, lambda: jnp.ones(size, bool))


def cutoff(order: Array, weight: Array, need: Array) -> Array:
    """Smallest t >= 0 such that the weights with order <= t sum to at least `need`; the largest int if none do."""

    def halve(i: Array, t: Array) -> Array:
        step = jnp.left_shift(jnp.int32(1), 30 - i)
        short = jnp.sum(jnp.where(order < t + step, weight, 0.0)) < need
        return jnp.where(short, t + step, t)

    return lax.fori_loop(0, 31, halve, jnp.int32(0))


def step_keys(key_B: Array, emitted_B: Array) -> Array:
    """Keys of one step, from each row's own key and how many tokens it has emitted: batch-mates do not matter."""
    return jax.vmap(jax.random.fold_in)(key_B, emitted_B)


def tagged(key_B: Array, tag: int | Array) -> Array:
    """The stream `tag` of each row's step key."""
    return jax.vmap(jax.random.fold_in)(key_B, jnp.broadcast_to(jnp.asarray(tag), key_B.shape))


def draw(key_B: Array, weight_BV: Float[Array, "B V"]) -> Int[Array, "B"]:
    """One token per row with probability proportional to `weight` f32 [B, V] (Gumbel-max); never one of weight 0."""

    def one(key: Array, weight_V: Array) -> Array:
        noise = jax.random.gumbel(key, weight_V.shape, jnp.float32)
        return jnp.argmax(jnp.log(weight_V) + noise)

    return jax.vmap(one)(key_B, weight_BV).astype(jnp.int32)


def uniforms(key_B: Array, count: int) -> Float[Array, "B {count}"]:
    """f32 [B, count] in [0, 1), each row from its own key."""
    return jax.vmap(lambda key: jax.random.uniform(key, (count,)))(key_B)
