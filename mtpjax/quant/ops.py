"""The operations that model code calls. A weight is an array or a `QTensor`; the model never asks which.

Each hands raw arrays to `mtpjax.kernels`, where the reference and the fast paths live. Weights are [out, in].
"""

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from mtpjax.kernels.attention import attention, attention_window
from mtpjax.kernels.product import product, product_block, silu_gate
from mtpjax.quant.qtensor import QTensor, frozen, take

__all__ = ["add_bias", "attention", "attention_window", "embed", "head", "mlp", "project"]

Weight = Array | QTensor


def project(x: Array, *weights: Weight) -> tuple[Array, ...]:
    """X [..., K] times each weight [F_i, K]: a tuple of [..., F_i] in the dtype of x.

    Several weights at once (query, key and value; gate and up) are one call, so that a fused path may read x once.
    """
    return tuple(_apply(x, w, x.dtype) for w in weights)


def mlp(x: Array, weights: tuple[Weight, Weight, Weight], biases: tuple[Array | None, ...]) -> Array:
    """SwiGLU feed-forward ``down(silu(gate x) * up x)``: [..., D] -> [..., D].

    `weights` and `biases` (None where the model has none) are those of gate, up and down.
    """
    gate, up = (add_bias(y, b) for y, b in zip(project(x, *weights[:2]), biases[:2], strict=True))
    return add_bias(_apply(silu_gate(gate, up), weights[2], x.dtype), biases[2])


def embed(ids: Array, weight: Weight, dtype: DTypeLike) -> Array:
    """Rows of the embedding [V, D] for int ids [...]: [..., D] in `dtype`."""
    if isinstance(weight, QTensor):
        return jnp.asarray(take(weight, ids, dtype))
    return jnp.take(weight, ids, axis=0).astype(dtype)


def head(x: Array, weight: Weight) -> Array:
    """Logits [..., V] in f32 from hidden states [..., D] and the output embedding [V, D]."""
    return _apply(x, weight, jnp.float32)


def _apply(x: Array, weight: Weight, out_dtype: DTypeLike) -> Array:
    rows = x.reshape(-1, x.shape[-1])
    if isinstance(weight, QTensor):
        weight = frozen(weight)
        y = product_block(rows, weight.q, weight.scale, weight.block, out_dtype)
    else:
        y = product(rows, weight.astype(x.dtype), out_dtype)
    return y.reshape(*x.shape[:-1], y.shape[-1])


def add_bias(y: Array, bias: Array | None) -> Array:
    """Y + bias, or y itself where the model has none."""
    return y if bias is None else y + jnp.broadcast_to(bias.astype(y.dtype), y.shape)
