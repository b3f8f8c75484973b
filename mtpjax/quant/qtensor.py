"""QTensor: a matrix stored as E4M3FN with one float32 scale per block, w ≈ q · scale.

Idea. Absolute-maximum block scaling, as in DeepSeek-V3 (arXiv 2412.19437, section 3.3): every 128 x 128 block of a
weight [out, in] is divided by amax / 448, so that its largest element lands on the format's largest value. The grid of
scales is ceil(out / 128) x ceil(in / 128); blocks at the right and lower edge are ragged, as if padded with zeros.

Four choices make the numbers exact, the same in numpy and in XLA, on every backend:

1. The scale keeps 20 significant bits (its lowest 4 are rounded off). An E4M3FN value has 4, so q · scale is exact in
   float32: dequantising does not round, and it cannot matter whether a kernel applies the scale before or after
   widening. It also makes quantisation idempotent: a block's new amax is exactly 448 · scale, whose scale is `scale`
   again. With 24 bits, 448 · scale rounds, and a second pass gave another scale in 46 % of blocks (Gaussian, formula of
   point 2). The cost is a relative change of at most 2^-20 in the scale, against a rounding error of 2^-4 in q.
2. amax / 448 is amax times the float32 nearest to 1 / 448, spelled out: XLA on CPU compiles a division by a constant so
   anyway, and numpy does not. amax = 448 gives scale 1 exactly. The division of the elements is spelled out likewise:
   one reciprocal a block, one product an element.
3. A block whose amax is under 2^-91 counts as zero: scale 1, zeros back. XLA flushes subnormals to zero and numpy does
   not; above this threshold every scale, reciprocal and dequantised value is a normal float32, so both agree.
4. No clamp is needed at the top: the scale of float32's largest value happens to round down, so 448 · scale is finite.

Error: |w - q · scale| <= max(|w| / 16, scale · 2^-10), up to the rounding of one float32 product (factor 1 + 2^-18).

Shape of the data. The orientation is that of the checkpoint files, [out, in], and `q` is the first field, in the
logical shape: Linen compares the shape of the *first* leaf with the declared parameter, so a QTensor may stand in a
parameter's place in `apply`. Packed layouts are made elsewhere, at load.

Gradients. A QTensor is a constant. Autodiff through a float8 leaf would round the cotangent to 8 bits, NaN above 464,
and an optimiser would then keep float8 moments; a bit cast would silently give zero. So differentiating with respect to
a QTensor raises `UserError` at trace time. Products with one stay differentiable in the other operand.

Rejected: a power-of-two scale (simpler, exact, yet up to a factor of two of the top of the range is wasted, and files
with float32 scales must load anyway); a floor on the scale (float16 weights with small blocks lose precision).
"""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from mtpjax.errors import UserError
from mtpjax.kernels.product import spread
from mtpjax.quant.formats import FORMATS, ArrayLike, cast, namespace

BLOCK = (128, 128)
E4M3FN = FORMATS["e4m3fn"]
RECIPROCAL_MAX = np.float32(1 / E4M3FN.max)
TINY_AMAX = np.float32(2.0**-91)


class QTensor(flax.struct.PyTreeNode):
    """A quantised matrix, w ≈ q · scale.

    q:      float8_e4m3fn [out, in]
    scale:  float32 [ceil(out / block[0]), ceil(in / block[1])], multiplied
    block:  rows and columns that share one scale; static
    """

    q: Any
    scale: Any
    block: tuple[int, int] = flax.struct.field(pytree_node=False, default=BLOCK)

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape [out, in]."""
        return self.q.shape

    @property
    def ndim(self) -> int:
        return self.q.ndim

    @property
    def dtype(self) -> np.dtype:
        """Dtype of the values that it stands for (float32), not of their storage (`q.dtype`)."""
        return self.scale.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of `q` and `scale` together."""
        return self.q.nbytes + self.scale.nbytes


def grid(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, int]:
    """Number of blocks down and across, counting ragged ones."""
    return -(-shape[0] // block[0]), -(-shape[1] // block[1])


def block_scale(amax: ArrayLike) -> ArrayLike:
    """Scale for blocks of largest magnitude `amax` (float32, any shape): amax / 448 to 20 significant bits.

    1 where amax < 2^-91. NaN where amax is not finite, so that under jit, where nothing can be raised, a bad value is
    seen instead of zeroing its block.
    """
    xp = namespace(amax)
    bits = (amax * RECIPROCAL_MAX).view(np.uint32)
    rounded = ((bits + np.uint32(8)) & np.uint32(0xFFFFFFF0)).view(np.float32)
    scale = xp.where(amax < TINY_AMAX, np.float32(1), rounded)
    return xp.where(xp.isfinite(amax), scale, np.float32(np.nan))


def block_amax(w: jax.Array, block: tuple[int, int]) -> jax.Array:
    """Largest magnitude in each block of w [out, in] float32, as the grid of blocks; infinite for a block with NaN.

    The NaN is replaced by hand, since XLA's maximum on CPU drops it.
    """
    (down, across), (rows, columns) = grid(w.shape, block), block
    magnitude = jnp.where(jnp.isnan(w), jnp.inf, jnp.abs(w))
    padded = jnp.pad(magnitude, ((0, down * rows - w.shape[0]), (0, across * columns - w.shape[1])))
    return padded.reshape(down, rows, across, columns).max(axis=(1, 3))


def quantize(w: ArrayLike, block: tuple[int, int] = BLOCK, name: str = "") -> QTensor:
    """Quantise a float matrix [out, in]; numpy in, numpy out, a strip of blocks at a time; JAX in, JAX out.

    Scale granularity per tensor is `block=w.shape`, per row `(1, in)`. Raises UserError, naming the tensor, on a wrong
    rank, an empty or non-float array, a bad block, infinity or NaN. Traced values cannot be refused: under jit a block
    with a value that is not finite gets scale NaN.
    """
    _check(w, block, name)
    if namespace(w) is jnp:
        qt = _quantize_jax(jnp.asarray(w), block)
        if not isinstance(w, jax.core.Tracer) and not bool(jnp.isfinite(qt.scale).all()):
            raise _not_finite(name)
        return qt
    return _quantize_numpy(np.asarray(w), block, name)


def dequantize(qt: QTensor, dtype: Any = jnp.float32) -> ArrayLike:
    """The matrix q · scale [out, in], exact in float32 for scales made by `quantize`, then rounded once to `dtype`.

    UserError when differentiated with respect to the QTensor.
    """
    qt = frozen(qt)
    return (qt.q.astype(np.float32) * spread(qt.scale, qt.shape, qt.block)).astype(dtype)


def take(qt: QTensor, ids: ArrayLike, dtype: Any = jnp.float32) -> ArrayLike:
    """Rows `ids` (integers >= 0, any shape) of the dequantised matrix: [..., in] in `dtype`.

    Reads and widens only those rows. Under JAX an id beyond the last row gives the last row, as JAX's indexing does.
    """
    qt = frozen(qt)
    scale = qt.scale[ids // qt.block[0]]
    columns = namespace(scale).repeat(scale, qt.block[1], axis=-1)[..., : qt.shape[1]]
    return (qt.q[ids].astype(np.float32) * columns).astype(dtype)


def frozen(qt: QTensor) -> QTensor:
    """The same QTensor, marked as a constant: differentiating with respect to it raises UserError while tracing.

    For code that hands `q` and `scale` on as raw arrays, whose own derivative rule then need not consider them.
    """
    if namespace(qt.q) is not jnp:
        return qt
    q, scale = _constant(qt.q, qt.scale)
    return qt.replace(q=q, scale=scale)


@jax.custom_jvp
def _constant(q: jax.Array, scale: jax.Array) -> tuple[jax.Array, jax.Array]:
    return q, scale


@_constant.defjvp
def _refuse_derivative(primals: Any, tangents: Any) -> Any:
    raise UserError(
        "an FP8 weight (QTensor) has no gradient: keep float32 master weights and train through fake_quant, "
        "or leave the QTensor out of the differentiated arguments"
    )


def _quantize_jax(w: jax.Array, block: tuple[int, int]) -> QTensor:
    wide = w.astype(jnp.float32)
    scale = block_scale(block_amax(wide, block))
    return QTensor(cast(wide * spread(1 / scale, w.shape, block)), scale, block)


def _quantize_numpy(w: np.ndarray, block: tuple[int, int], name: str) -> QTensor:
    """The same to the bit, one strip of block rows at a time: the float32 temporaries stay in the CPU's cache."""
    (down, across), (rows, columns) = grid(w.shape, block), block
    starts = np.arange(across) * columns
    q, scale = np.empty(w.shape, E4M3FN.dtype), np.empty((down, across), np.float32)
    limit = np.float32(E4M3FN.max)
    for i in range(down):
        with np.errstate(over="ignore"):  # a float64 beyond float32's range becomes infinite, and is refused below
            strip = w[i * rows : (i + 1) * rows].astype(np.float32)
        amax = np.maximum.reduceat(np.abs(strip).max(axis=0), starts)
        if not np.isfinite(amax).all():
            raise _not_finite(name)
        scale[i] = block_scale(amax)
        strip *= np.repeat(1 / scale[i], columns)[: w.shape[1]]
        q[i * rows : (i + 1) * rows] = np.clip(strip, -limit, limit, out=strip)
    return QTensor(q, scale, block)


def _check(w: ArrayLike, block: tuple[int, int], name: str) -> None:
    label = f"tensor {name!r}" if name else "tensor"
    if not jnp.issubdtype(w.dtype, jnp.floating) or w.dtype.itemsize < 2:
        raise UserError(f"cannot quantise {label} of dtype {w.dtype}: expected a float16, bfloat16 or float32 matrix")
    if w.ndim != 2 or w.size == 0:
        raise UserError(f"cannot quantise {label} of shape {tuple(w.shape)}: expected a non-empty matrix [out, in]")
    if len(block) != 2 or not all(type(side) is int and side > 0 for side in block):
        raise UserError(f"cannot quantise {label} in blocks of {block}: expected two positive integers")


def _not_finite(name: str) -> UserError:
    label = f"tensor {name!r}" if name else "tensor"
    return UserError(f"cannot quantise {label}: it holds infinity or NaN; expected finite weights, check its source")
