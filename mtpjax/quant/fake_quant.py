"""Fake quantisation for training: the forward pass sees FP8 weights, the backward pass does not know.

Idea. Quantisation-aware training (Jacob et al., arXiv 1712.05877) with the straight-through estimator (Bengio et al.,
arXiv 1308.3432): forward w -> dequantize(quantize(w)), backward the identity. Weights, gradients and optimiser moments
stay float32. The equations:

    fake_quant(w) == dequantize(quantize(w))      to the bit, -0 and subnormals of the format included
    d fake_quant(w) / d w == identity             the cotangent is returned untouched, whatever its size

Why an emulation. XLA on GPU folds float32 -> float8 -> float32 into nothing (`xla_allow_excess_precision`, on by
default), and training would silently see unquantised weights. `reduce_precision` is the operation that XLA promises to
keep; with 8 exponent and 3 mantissa bits it rounds to E4M3FN's normals (4 exponent bits would send 248 and above to
infinity), and below the smallest normal, 2^-6, the grid is even, so rounding 512 x to an integer gives the subnormals.

Why a custom derivative rule. Autodiff through a cast to float8 casts the cotangent too: rounded to 3 bits, and NaN
above 464.

Rejected: `optimization_barrier` between two casts, which also works but materialises the float8 array, and
`x + stop_gradient(fq(x) - x)`, whose sum rounds, so that the forward value is not exactly the FP8 one.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from mtpjax.errors import UserError
from mtpjax.kernels.product import spread
from mtpjax.quant.formats import FORMATS
from mtpjax.quant.policy import is_quantised_path, map_leaves
from mtpjax.quant.qtensor import BLOCK, QTensor, block_amax, block_scale

E4M3FN = FORMATS["e4m3fn"]


def round_e4m3fn(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Float32 values rounded to the nearest that E4M3FN holds, saturating at 448; still float32."""
    clipped = jnp.clip(x, -E4M3FN.max, E4M3FN.max)
    subnormal = jnp.round(clipped * (1 / E4M3FN.min_subnormal)) * E4M3FN.min_subnormal
    normal = jax.lax.reduce_precision(clipped, exponent_bits=8, mantissa_bits=E4M3FN.mantissa_bits)
    return jnp.where(jnp.abs(clipped) < E4M3FN.min_normal, subnormal, normal)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def fake_quant(w: Float[Array, "out in"], block: tuple[int, int] = BLOCK) -> Float[Array, "out in"]:
    """The values that `dequantize(quantize(w, block), w.dtype)` would give, with a straight-through gradient.

    Master weights are float32; bfloat16 and float16 work too, and their result is rounded to their own dtype. A block
    that holds NaN or infinity becomes NaN: inside jit nothing can be raised, and the loss must show it.
    """
    wide = w.astype(jnp.float32)
    scale = block_scale(block_amax(wide, block))
    rounded = round_e4m3fn(wide * spread(1 / scale, w.shape, block))
    return (rounded * spread(scale, w.shape, block)).astype(w.dtype)


def _forward(w: Array, block: tuple[int, int]) -> tuple[Array, None]:
    return fake_quant(w, block), None


def _backward(block: tuple[int, int], residual: None, cotangent: Array) -> tuple[Array]:
    return (cotangent,)


fake_quant.defvjp(_forward, _backward)


def fake_quant_params(params: Any, is_quantised: Callable[[tuple[str, ...]], bool] = is_quantised_path) -> Any:
    """`params` with `fake_quant` applied to exactly the leaves that `apply_precision(params, "fp8")` would quantise.

    `is_quantised` decides from the parameter's path; the other leaves are returned as they are. UserError for a QTensor
    among them: training starts from full-precision master weights.
    """

    def convert(path: tuple[str, ...], leaf: Any) -> Any:
        if isinstance(leaf, QTensor):
            raise UserError(f"parameter {'.'.join(path)!r} is already FP8: training needs float32 master weights")
        return fake_quant(jnp.asarray(leaf), BLOCK) if is_quantised(path) else leaf

    return map_leaves(convert, params)
