"""The KV cache: one array for all layers, a length for every row.

Keys and values are [L, B, K, S, H]: this is the one form that XLA updates in place inside `while_loop` with ragged rows
(measured; per-layer tuples, scanned caches and one-hot updates are all copied each step) and that attention reads
without a transpose. A row's first `length` slots are committed. A forward pass writes its window behind them and
leaves `length` alone: committing is adding to `length`, rolling back is not adding, so a rejected draft costs nothing.
"""

import jax.numpy as jnp
from flax import struct
from jax import Array
from jax.typing import DTypeLike

from mtpjax.kernels.attention import BLOCK
from mtpjax.records import Leaf


class KVCache(struct.PyTreeNode):
    """Keys and values [L, B, K, S, H] and the committed length of each row, int32 [B]."""

    k: Leaf
    v: Leaf
    length: Leaf

    @property
    def capacity(self) -> int:
        """Slots S of each row."""
        return self.k.shape[3]


def init_cache(layers: int, batch: int, kv_heads: int, capacity: int, head_dim: int, dtype: DTypeLike) -> KVCache:
    """An empty cache; `capacity` is rounded up to whole attention blocks (or, below one block, to 32 slots)."""
    step = BLOCK if capacity > BLOCK else 32
    slots = -(-capacity // step) * step
    shape = (layers, batch, kv_heads, slots, head_dim)
    return KVCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), jnp.zeros(batch, jnp.int32))


def write(cache: KVCache, layer: int, k_BWKH: Array, v_BWKH: Array, behind: int = 0) -> KVCache:
    """Put a window's keys and values [B, W, K, H] behind each row's committed slots, and `behind` more.

    A slot past the capacity is dropped, never clamped onto a committed one.
    """
    batch, window = k_BWKH.shape[:2]
    rows = jnp.arange(batch)[:, None]
    slots = cache.length[:, None] + behind + jnp.arange(window)[None, :]
    k = cache.k.at[layer, rows, :, slots].set(k_BWKH.astype(cache.k.dtype), mode="drop")
    v = cache.v.at[layer, rows, :, slots].set(v_BWKH.astype(cache.v.dtype), mode="drop")
    return cache.replace(k=k, v=v)


def keep_path(cache: KVCache, path_BD: Array) -> KVCache:
    """Of the window behind each row's committed slots, move offsets `path` int32 [B, D] to offsets 1, 2, ... D, as is.

    This commits a path of a tree: its keys and values are moved, never computed or rounded again. Offset 0, the root,
    stays. A path goes down, so each offset is at least its place.
    """
    B, D = path_BD.shape
    rows = jnp.arange(B)[:, None]
    start = cache.length[:, None]
    source, place = start + path_BD, start + 1 + jnp.arange(D)[None, :]

    def move(x: Array) -> Array:
        moved = x.at[:, rows, :, source].get(mode="clip")
        return x.at[:, rows, :, place].set(moved, mode="drop")

    return cache.replace(k=move(cache.k), v=move(cache.v))
