"""Matrix products of a few rows with a large weight: the operation that decides the speed of decoding.

A decode step multiplies 1..16 rows with every weight of the model once, so it is bound by reading the weights. On
GPU and TPU the compiler's `dot` does that well. On the CPU it does not: measured with XLA 0.12 on 2 cores, a
2048x8192 weight, the `dot` takes 1.8 ms in f32 for one row but 4-8 ms for two to four, and in bf16 25 ms for one row
but 2 ms for two. The same product written as multiply-and-reduce is compiled into one fused pass over the weight:
1.2-1.5 ms in f32 for 1..8 rows and 1.3 ms in bf16 for one row. So the CPU path picks the form by dtype and rows.

Rejected: padding a bf16 row to two (2 ms, and still half the speed of the fused pass); converting the weight to f32
first (the copy alone costs 15 ms). A native kernel that reads each weight once for all rows and decodes FP8 in
registers belongs behind this same function.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import DTypeLike
from jaxtyping import Float

FEW_ROWS = 16


def product(x_RK: Float[Array, "R K"], w_FK: Float[Array, "F K"], out_dtype: DTypeLike) -> Float[Array, "R F"]:
    """Rows times a weight stored [out, in]: ``x @ w.T`` accumulated in f32.

    Args:
        x_RK: rows [R, K], f32, bf16 or f16.
        w_FK: weight [F, K] in the dtype of `x_RK`.
        out_dtype: dtype of the result.

    Returns:
        [R, F] in `out_dtype`.
    """
    x_RK, w_FK = lax.optimization_barrier((x_RK, w_FK))
    rows = x_RK.shape[0]
    if rows > FEW_ROWS:
        return _dot(x_RK, w_FK, out_dtype)
    fused = rows == 1 or x_RK.dtype == jnp.float32
    on_cpu = _multiply_reduce if fused else _dot
    return lax.platform_dependent(
        x_RK, w_FK, cpu=lambda x, w: on_cpu(x, w, out_dtype), default=lambda x, w: _dot(x, w, out_dtype)
    )


def _dot(x_RK: Array, w_FK: Array, out_dtype: DTypeLike) -> Array:
    # Without HIGHEST, an f32 product would run in TF32 on GPU and in bf16 on TPU.
    precision = lax.Precision.HIGHEST if x_RK.dtype == jnp.float32 else None
    y_RF = lax.dot_general(
        x_RK, w_FK, (((1,), (1,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
    )
    return y_RF.astype(out_dtype)


def _multiply_reduce(x_RK: Array, w_FK: Array, out_dtype: DTypeLike) -> Array:
    f32 = jnp.float32
    if x_RK.shape[0] == 1:
        y_RF = jnp.sum(w_FK.astype(f32) * x_RK.astype(f32), axis=1)[None, :]
    else:
        y_RF = jnp.sum(w_FK.astype(f32)[None] * x_RK.astype(f32)[:, None], axis=2)
    return y_RF.astype(out_dtype)


def spread(values: Array | np.ndarray, shape: tuple[int, ...], block: tuple[int, int]) -> Array | np.ndarray:
    """A value per block [ceil(F/b0), ceil(K/b1)], repeated to a value per element of `shape` [F, K]."""
    return values.repeat(block[0], axis=0)[: shape[0]].repeat(block[1], axis=1)[:, : shape[1]]


def dequantize_block(
    q_FK: Float[Array, "F K"], scale: Float[Array, "f k"], block: tuple[int, int], dtype: DTypeLike
) -> Float[Array, "F K"]:
    """``q * scale`` with one f32 scale per block: q [F, K], scale [ceil(F/b0), ceil(K/b1)] -> [F, K] in `dtype`."""
    return (q_FK.astype(jnp.float32) * jnp.asarray(spread(scale, q_FK.shape, block))).astype(dtype)


def product_block(
    x_RK: Float[Array, "R K"],
    q_FK: Float[Array, "F K"],
    scale: Float[Array, "f k"],
    block: tuple[int, int],
    out_dtype: DTypeLike,
) -> Float[Array, "R F"]:
    """`product` with a block-scaled FP8 weight: dequantise to the dtype of `x_RK`, then multiply (W8A16)."""
    x_RK, q_FK, scale = lax.optimization_barrier((x_RK, q_FK, scale))
    return product(x_RK, dequantize_block(q_FK, scale, block, x_RK.dtype), out_dtype)


def silu_gate(gate: Array, up: Array) -> Array:
    """SwiGLU's gate ``silu(gate) * up``, computed in f32, in the dtype of `gate`."""
    gate_f32 = gate.astype(jnp.float32)
    return (jax.nn.silu(gate_f32) * up.astype(jnp.float32)).astype(gate.dtype)
