"""Small targets that tests make themselves: a random decoder, and a law given as a table."""

from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array

from mtpjax.decoding.target import Target, target_from_model
from mtpjax.models.config import ModelConfig
from mtpjax.models.transformer import Transformer

CONFIG = ModelConfig(
    vocab_size=61,
    d_model=48,
    n_layers=2,
    n_heads=6,
    n_kv_heads=2,
    head_dim=8,
    d_ff=80,
    max_context=2048,
)


@lru_cache(maxsize=8)
def tiny_model(config: ModelConfig = CONFIG, seed: int = 0, spread: float = 6.0):
    """A random decoder with weights large enough that its choices vary: (model, params)."""
    model = Transformer(config)
    params = jax.jit(model.init)(jax.random.key(seed), jnp.zeros((1, 4), jnp.int32))["params"]
    return model, jax.tree.map(lambda x: x * spread if x.ndim == 2 else x, params)


def tiny_target(config: ModelConfig = CONFIG, seed: int = 0) -> tuple[Target, dict]:
    """`tiny_model` behind the target seam."""
    model, params = tiny_model(config, seed)
    return target_from_model(model), params


@struct.dataclass
class TableCache:
    """The tokens seen so far [B, S] and how many are committed [B]."""

    tokens: Array
    length: Array


def _keep_path(cache: TableCache, path_BD: Array) -> TableCache:
    rows, start = jnp.arange(path_BD.shape[0])[:, None], cache.length[:, None]
    moved = cache.tokens.at[rows, start + path_BD].get(mode="clip")
    place = start + 1 + jnp.arange(path_BD.shape[1])[None, :]
    return cache.replace(tokens=cache.tokens.at[rows, place].set(moved, mode="drop"))


@lru_cache(maxsize=8)
def table_target(vocab: int, max_context: int = 64) -> Target:
    """A target whose next-token law depends on the last two tokens, by a table of logits [V, V, V] given as params.

    It isn't a `Transformer`: it shows that any pure functions will do.
    """

    def forward(params, ids_BW, cache, positions_BW, mask, logits_at_BR, features):
        B, W = ids_BW.shape
        slots = cache.length[:, None] + jnp.arange(W)[None, :]
        tokens = cache.tokens.at[jnp.arange(B)[:, None], slots].set(ids_BW, mode="drop")
        before = jnp.take_along_axis(tokens, jnp.clip(slots - 1, 0, tokens.shape[1] - 1), axis=1)
        before = jnp.where(slots > 0, before, 0)
        if mask is not None:  # the token before is the parent's: the last offset seen but oneself
            parent = jnp.max(jnp.where(jnp.tril(mask, -1), jnp.arange(W)[None, :], 0), axis=1)
            before = jnp.where(jnp.arange(W)[None, :] > 0, ids_BW[:, parent], before)
        if logits_at_BR is not None:
            before, ids_BW = (jnp.take_along_axis(x, logits_at_BR, axis=1) for x in (before, ids_BW))
        return params[before, ids_BW], (), cache.replace(tokens=tokens)

    def init_cache(batch: int, capacity: int) -> TableCache:
        return TableCache(jnp.zeros((batch, capacity), jnp.int32), jnp.zeros(batch, jnp.int32))

    return Target(
        forward, init_cache, vocab_size=vocab, max_context=max_context, emit_vocab=vocab, keep_path=_keep_path
    )


def table_logits(vocab: int, seed: int = 0, spread: float = 1.5) -> Array:
    """Random logits [V, V, V] for `table_target`."""
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.normal(size=(vocab, vocab, vocab)) * spread, jnp.float32)
