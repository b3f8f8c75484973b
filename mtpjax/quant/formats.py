"""Eight-bit floating-point formats, and the one cast into them that never turns a large number into NaN.

Facts (Micikevicius et al., "FP8 Formats for Deep Learning", arXiv 2209.05433). E4M3FN has 4 exponent bits, bias 7,
3 mantissa bits, no infinity and one NaN per sign: S.1111.111. E5M2 is IEEE-like: 5 exponent bits, bias 15, 2 mantissa
bits, with infinities. Both round to nearest, ties to even, keep subnormals and keep the sign of zero.

A bare `astype` is a trap: above 464 E4M3FN becomes NaN and E5M2 becomes infinity, and a bfloat16 stop on the way rounds
twice. `cast` goes from float32 in one rounding and clips first, so a finite input gives a finite output.

Rejected: scaled or stochastic rounding inside the cast. Scaling belongs to `qtensor`, and rounding to nearest is what
every checkpoint on disk was made with.
"""

from dataclasses import dataclass
from types import ModuleType

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from mtpjax.errors import UserError

type ArrayLike = jax.Array | np.ndarray


@dataclass(frozen=True)
class Format:
    """What one eight-bit format can hold. All values are exact in float32.

    `max` is the largest finite value, `min_normal` the smallest normal one, `min_subnormal` the smallest above zero
    (also the spacing of the subnormals).
    """

    name: str
    dtype: np.dtype
    exponent_bits: int
    mantissa_bits: int
    max: float
    min_normal: float
    min_subnormal: float


FORMATS: dict[str, Format] = {
    "e4m3fn": Format("e4m3fn", np.dtype(ml_dtypes.float8_e4m3fn), 4, 3, 448.0, 2.0**-6, 2.0**-9),
    "e5m2": Format("e5m2", np.dtype(ml_dtypes.float8_e5m2), 5, 2, 57344.0, 2.0**-14, 2.0**-16),
}


def find_format(name: str) -> Format:
    """The format called `name`; UserError listing the known ones."""
    if name not in FORMATS:
        raise UserError(f"unknown 8-bit format {name!r}: expected one of {', '.join(FORMATS)}")
    return FORMATS[name]


def namespace(x: ArrayLike) -> ModuleType:
    """`jax.numpy` for JAX arrays and tracers, `numpy` for everything else."""
    return jnp if isinstance(x, jax.Array) else np


def cast(x: ArrayLike, format: str = "e4m3fn") -> ArrayLike:
    """Saturating cast of a float array of any shape, round to nearest even; numpy in, numpy out.

    NaN stays NaN, infinities become the largest finite value. f16 and bf16 widen to float32 exactly; numpy's float64
    is first rounded to float32. In JAX the result stands behind an optimisation barrier, since XLA on GPU otherwise
    folds a later `.astype(float32)` with this cast and the quantisation vanishes (`xla_allow_excess_precision`).
    The derivative is not defined here: train through `fake_quant`, for autodiff would cast the cotangent to 8 bits.
    """
    target, xp = find_format(format), namespace(x)
    if xp is jnp:
        return jax.lax.optimization_barrier(
            jnp.clip(x.astype(jnp.float32), -target.max, target.max).astype(target.dtype)
        )
    with np.errstate(over="ignore"):
        wide = np.asarray(x).astype(np.float32)
    return np.clip(wide, np.float32(-target.max), np.float32(target.max)).astype(target.dtype)
