"""Losses on logits, in nats per token.

Labels are token ids, with `IGNORE` where there is nothing to learn: behind the end of a text, across the border of two
documents, padding. The rule that every loss here keeps: an ignored place adds exactly 0 to the loss and to the
gradient, whatever its logits hold, and the mean is over the valid places. A batch without any has loss 0, not NaN.

The negative log-likelihood is logsumexp(z) - z[label] in float32. Where a label is ignored, its logits are replaced
*before* they are used and the result *after*: a product with a 0/1 mask would keep the NaN of an infinite logit, in the
loss or in the gradient, and an id of -100 would wrap around to a real row.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

IGNORE = -100
"""The label of a place that counts for nothing; any negative id does."""


def token_nll(
    logits: Float[Array, "B T V"], labels: Int[Array, "B T"]
) -> tuple[Float[Array, "B T"], Bool[Array, "B T"]]:
    """Negative log-likelihood of each label in nats, 0 where it is ignored; and which labels are valid."""
    valid = labels >= 0
    logits = jnp.where(valid[..., None], logits.astype(jnp.float32), 0.0)
    ids = jnp.where(valid, labels, 0)
    picked = jnp.take_along_axis(logits, ids[..., None], axis=-1)[..., 0]
    return jnp.where(valid, jax.nn.logsumexp(logits, axis=-1) - picked, 0.0), valid


def cross_entropy(logits: Float[Array, "B T V"], labels: Int[Array, "B T"]) -> tuple[Float[Array, ""], Int[Array, ""]]:
    """Mean negative log-likelihood over the valid labels (0 if there are none), in nats per token; and their number."""
    nll, valid = token_nll(logits, labels)
    count = jnp.sum(valid)
    return jnp.sum(nll) / jnp.maximum(count, 1), count
