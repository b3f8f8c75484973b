"""Attention of a window of queries over the KV cache, block by block, with a running softmax.

The cache of all layers is one array [L, B, K, S, H]. Its keys are read in blocks of `BLOCK` slots, only as many as the
longest row fills, so time follows the filled length and not the capacity, and no [W, S] score matrix exists: the same
code serves a decode step (W = 1), a verify window (W = depth + 1), a tree (with its mask) and a prefill chunk.
The running maximum and sum are those of Milakov and Gimelshein (1805.02867), as in FlashAttention (2205.14135).

Visibility is by slot. Slots below the row's `length` are committed and visible to every query. The window occupies
slots length .. length + W - 1 and is seen through `mask` [B, W, W] (query, key); a window that is the last part of a
tree written in several passes has a mask [B, W, T] over all the T slots behind the committed ones. All others hold
stale keys of rejected drafts or nothing at all; they are masked to -inf, never zeroed (a zeroed key would enter the
softmax).

Rejected: attention over the whole capacity (3-10x slower at short lengths); [B, S, K, H] (the cache is transposed each
step, 5x); one array per layer (copied inside `while_loop` for some shapes).
"""

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Int

BLOCK = 256
_NEVER = -1e30  # finite, so that a block without a visible key leaves no NaN


def attention(
    q_BWNH: Float[Array, "B W N H"],
    k_LBKSH: Float[Array, "L B K S H"],
    v_LBKSH: Float[Array, "L B K S H"],
    layer: int,
    length_B: Int[Array, "B"],
    mask_BWT: Bool[Array, "B W T"],
) -> Float[Array, "B W N H"]:
    """Scaled dot-product attention of a window over one layer of the cache.

    Args:
        q_BWNH: rotated queries [B, W, N, H].
        k_LBKSH: keys of all layers [L, B, K, S, H], the window's own already written; S a multiple of `BLOCK` or below.
        v_LBKSH: values, same shape.
        layer: which layer to read.
        length_B: committed slots of each row, int32 [B].
        mask_BWT: bool [B, W, T]: may query w see the j-th of the T slots behind the committed ones; the window's own
            are the last W of them.

    Returns:
        [B, W, N, H] in the dtype of `q_BWNH`; softmax and sums are f32.
    """
    _, B, K, S, H = k_LBKSH.shape
    W, N = q_BWNH.shape[1:3]
    block = min(BLOCK, S)
    q = q_BWNH.reshape(B, W, K, N // K, H).transpose(0, 2, 3, 1, 4).reshape(B, K, (N // K) * W, H)
    q = (q.astype(jnp.float32) * H**-0.5).astype(k_LBKSH.dtype)

    def read(i: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        top, total, acc = carry
        start = i * block
        k = lax.dynamic_slice(k_LBKSH, (layer, 0, 0, start, 0), (1, B, K, block, H))[0]
        v = lax.dynamic_slice(v_LBKSH, (layer, 0, 0, start, 0), (1, B, K, block, H))[0]
        seen = _visible(start + jnp.arange(block), length_B, mask_BWT)
        seen = jnp.broadcast_to(seen[:, None, None], (B, K, N // K, W, block)).reshape(B, K, -1, block)
        scores = jnp.where(seen, _batched(q, k, 3), -jnp.inf)
        new_top = jnp.maximum(top, jnp.max(scores, axis=-1))
        weights = jnp.exp(scores - new_top[..., None])
        keep = jnp.exp(top - new_top)
        total = total * keep + jnp.sum(weights, axis=-1)
        acc = acc * keep[..., None] + _batched(weights.astype(v.dtype), v, 2)
        return new_top, total, acc

    rows = q.shape[2]
    empty = (jnp.full((B, K, rows), _NEVER), jnp.zeros((B, K, rows)), jnp.zeros((B, K, rows, H)))
    if block == S:
        _, total, acc = read(jnp.int32(0), empty)
    else:
        blocks = jnp.minimum((jnp.max(length_B) + mask_BWT.shape[2] + block - 1) // block, S // block)
        _, total, acc = lax.fori_loop(0, blocks, read, empty)
    out = (acc / total[..., None]).reshape(B, K, N // K, W, H).transpose(0, 3, 1, 2, 4)
    return out.reshape(B, W, N, H).astype(q_BWNH.dtype)


def attention_window(
    q_BTNH: Float[Array, "B T N H"],
    k_BTKH: Float[Array, "B T K H"],
    v_BTKH: Float[Array, "B T K H"],
    mask_BTT: Bool[Array, "B T T"],
) -> Float[Array, "B T N H"]:
    """Attention of a sequence over itself, without a cache: the differentiable form that training uses.

    Args:
        q_BTNH: rotated queries [B, T, N, H].
        k_BTKH: keys [B, T, K, H].
        v_BTKH: values [B, T, K, H].
        mask_BTT: bool [B, T, T]: may query t see key s; every query must see one.

    Returns:
        [B, T, N, H] in the dtype of `q_BTNH`; softmax in f32. Memory is B * N * T^2 floats.
    """
    B, T, N, H = q_BTNH.shape
    K = k_BTKH.shape[2]
    q = (q_BTNH.astype(jnp.float32) * H**-0.5).astype(q_BTNH.dtype)
    q = q.reshape(B, T, K, N // K, H).transpose(0, 2, 3, 1, 4).reshape(B, K, -1, H)
    scores = _batched(q, k_BTKH.transpose(0, 2, 1, 3), 3).reshape(B, K, N // K, T, T)
    scores = jnp.where(mask_BTT[:, None, None], scores, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1).astype(v_BTKH.dtype).reshape(B, K, -1, T)
    out = _batched(weights, v_BTKH.transpose(0, 2, 1, 3), 2).reshape(B, K, N // K, T, H)
    return out.transpose(0, 3, 1, 2, 4).reshape(B, T, N, H).astype(q_BTNH.dtype)


def _visible(slots_s: Array, length_B: Array, mask_BWT: Array) -> Array:
    """Bool [B, W, s]: committed slots, and those behind through the mask."""
    T = mask_BWT.shape[2]
    offset_Bs = slots_s[None, :] - length_B[:, None]
    inside_Bs = (offset_Bs >= 0) & (offset_Bs < T)
    window_BWs = jnp.take_along_axis(mask_BWT, jnp.clip(offset_Bs, 0, T - 1)[:, None, :], axis=2)
    return (offset_Bs < 0)[:, None, :] | (inside_Bs[:, None, :] & window_BWs)


def _batched(a: Array, b: Array, contract: int) -> Array:
    """Product over the leading two axes of a [B, K, r, x] and b, contracting b's axis `contract`; f32 result."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    dims = (((3,), (contract,)), ((0, 1), (0, 1)))
    return lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)
