"""A language model that is not ours, in plain Flax: a gated sum over the last tokens, with a cache of its own kind."""

from functools import lru_cache

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from mtpjax.decoding.target import Target

VOCAB, BACK, WIDTH = 61, 3, 16


class LastTokens(nn.Module):
    """Logits [..., VOCAB] from the ids of the last `BACK` tokens [..., BACK], -1 where there is none."""

    @nn.compact
    def __call__(self, ids: Array) -> Array:
        x = nn.Embed(VOCAB + 1, WIDTH, embedding_init=nn.initializers.normal(1.0))(ids + 1)
        x = jnp.tanh(nn.Dense(WIDTH)(x.reshape(*ids.shape[:-1], BACK * WIDTH)))
        return nn.Dense(VOCAB, kernel_init=nn.initializers.normal(1.5))(x)


@struct.dataclass
class Seen:
    """Tokens so far [B, S], and how many are committed [B]."""

    tokens: Array
    committed: Array


@lru_cache(maxsize=1)
def other_target() -> Target:
    """`LastTokens` behind the target seam: chains and trees, ragged rows, roll-back by number."""
    model = LastTokens()

    def forward(params, ids_BW, cache, positions_BW, mask, logits_at_BR, features):
        B, W = ids_BW.shape
        rows = jnp.arange(B)[:, None]
        tokens = cache.tokens.at[rows, cache.committed[:, None] + jnp.arange(W)[None, :]].set(ids_BW, mode="drop")
        if mask is None:
            mask = jnp.tril(jnp.ones((W, W), bool))
        mask = jnp.broadcast_to(mask, (B, W, W))
        window = jnp.where(mask, jnp.arange(W)[None, None, :], -1)
        recent = jax.lax.top_k(window, min(BACK, W))[0]  # the nearest ancestors of each place, itself first
        recent = jnp.pad(recent, ((0, 0), (0, 0), (0, BACK - recent.shape[2])), constant_values=-1)
        inside = jnp.sum(recent >= 0, axis=2, keepdims=True)
        behind = cache.committed[:, None, None] - 1 - (jnp.arange(BACK)[None, None, :] - inside)
        slot = jnp.where(recent >= 0, cache.committed[:, None, None] + recent, behind)
        ids = tokens[rows[:, :, None], jnp.clip(slot, 0, tokens.shape[1] - 1)]
        ids = jnp.where(slot >= 0, ids, -1)
        if logits_at_BR is not None:
            ids = jnp.take_along_axis(ids, logits_at_BR[:, :, None], axis=1)
        return model.apply({"params": params}, ids), (), cache.replace(tokens=tokens)

    def init_cache(batch: int, capacity: int) -> Seen:
        return Seen(jnp.zeros((batch, capacity), jnp.int32), jnp.zeros(batch, jnp.int32))

    def set_length(cache: Seen, length_B: Array) -> Seen:
        return cache.replace(committed=length_B)

    def keep_path(cache: Seen, path_BD: Array) -> Seen:
        rows, start = jnp.arange(path_BD.shape[0])[:, None], cache.committed[:, None]
        place = start + 1 + jnp.arange(path_BD.shape[1])[None, :]
        moved = cache.tokens.at[rows, start + path_BD].get(mode="clip")
        return cache.replace(tokens=cache.tokens.at[rows, place].set(moved, mode="drop"))

    return Target(forward, init_cache, VOCAB, 2048, VOCAB, set_length, keep_path)


def other_params(seed: int = 0):
    """Random parameters of it."""
    return LastTokens().init(jax.random.key(seed), jnp.zeros((1, BACK), jnp.int32))["params"]
