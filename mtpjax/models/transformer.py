"""One decoder for the Llama / Qwen / SmolLM family: GQA, RoPE, RMSNorm, SwiGLU, in a handful of Linen modules.

A single `__call__` at different widths is prefill chunk, decode step, verify window and training pass. The cache is an
argument and a result; nothing is mutable. Layers are unrolled, since mixed precision gives each its own weight type.
Weights are [out, in], as in the files; each may be an array or a `QTensor`, which only `mtpjax.quant.ops` can tell.
"""

from typing import NamedTuple

import flax.linen as nn
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Bool, Int

from mtpjax.models import cache as kv
from mtpjax.models import rope
from mtpjax.models.config import ModelConfig
from mtpjax.quant import ops


class Output(NamedTuple):
    """What one pass returns: logits f32 [B, W, V] (or [B, R, V], see `logits_at`), the hidden states asked for,
    each [B, W, D], and the cache with the window written behind its committed slots (None if none was given).
    """

    logits: Array
    features: tuple[Array, ...]
    cache: kv.KVCache | None


class RMSNorm(nn.Module):
    """x / rms(x) * scale over the last axis (1910.07467), in f32, returned in the dtype of x."""

    eps: float

    @nn.compact
    def __call__(self, x: Array) -> Array:
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],))
        y = x.astype(jnp.float32)
        y = y * (1.0 / jnp.sqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + self.eps))
        return (y * jnp.broadcast_to(scale.astype(jnp.float32), y.shape)).astype(x.dtype)


class Weight(nn.Module):
    """A named weight [out, in] and, if the model has one, its bias [out]. Holds parameters; products are `ops`'."""

    shape: tuple[int, int]
    bias: bool = False

    @nn.compact
    def __call__(self):
        weight = self.param("weight", nn.initializers.normal(0.02), self.shape)
        bias = self.param("bias", nn.initializers.zeros, self.shape[:1]) if self.bias else None
        return weight, bias


class Attention(nn.Module):
    """Grouped-query attention (2305.13245) over the cache, or over the window alone when there is none.

    With a cache the mask may be [B, W, T]: the window is then the last W of T places behind the committed ones, and
    what the first T - W hold is there from earlier passes.
    """

    config: ModelConfig

    @nn.compact
    def __call__(self, x: Array, layer: int, cache: kv.KVCache | None, cos_sin, mask: Array):
        c = self.config
        B, W, D = x.shape
        N, K, H = c.n_heads, c.n_kv_heads, c.head_dim
        sizes = {"q": (N * H, D), "k": (K * H, D), "v": (K * H, D)}
        weights = [Weight(size, c.qkv_bias, name=name)() for name, size in sizes.items()]
        projected = ops.project(x, *(w for w, _ in weights))
        q, k, v = (ops.add_bias(y, b).reshape(B, W, -1, H) for y, (_, b) in zip(projected, weights, strict=True))
        if c.qk_norm:
            q, k = RMSNorm(c.norm_eps, name="q_norm")(q), RMSNorm(c.norm_eps, name="k_norm")(k)
        q, k = rope.rotate(q, *cos_sin), rope.rotate(k, *cos_sin)
        if cache is None:
            y = ops.attention_window(q, k, v, mask)
        else:
            cache = kv.write(cache, layer, k, v, mask.shape[2] - W)
            y = ops.attention(q, cache.k, cache.v, layer, cache.length, mask)
        w, b = Weight((c.d_model, N * H), c.o_bias, name="o")()
        (y,) = ops.project(y.reshape(B, W, N * H), w)
        return ops.add_bias(y, b), cache


class MLP(nn.Module):
    """SwiGLU feed-forward (2002.05202)."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x: Array) -> Array:
        c = self.config
        gate, gate_b = Weight((c.d_ff, c.d_model), c.mlp_bias, name="gate")()
        up, up_b = Weight((c.d_ff, c.d_model), c.mlp_bias, name="up")()
        down, down_b = Weight((c.d_model, c.d_ff), c.mlp_bias, name="down")()
        return ops.mlp(x, (gate, up, down), (gate_b, up_b, down_b))


class Block(nn.Module):
    """Pre-norm residual block: attention, then feed-forward."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x: Array, layer: int, cache: kv.KVCache | None, cos_sin, mask: Array):
        c = self.config
        y, cache = Attention(c, name="attn")(RMSNorm(c.norm_eps, name="attn_norm")(x), layer, cache, cos_sin, mask)
        x = x + y
        return x + MLP(c, name="mlp")(RMSNorm(c.norm_eps, name="mlp_norm")(x)), cache


class Transformer(nn.Module):
    """Decoder-only language model.

    ``Transformer(config).apply({"params": params}, ids)`` gives the logits of every position. With a cache the ids
    are a window behind each row's committed tokens.
    """

    config: ModelConfig
    dtype: jnp.dtype = jnp.dtype(jnp.float32)

    @nn.compact
    def __call__(
        self,
        ids: Int[Array, "B W"],
        cache: kv.KVCache | None = None,
        positions: Int[Array, "B W"] | None = None,
        mask: Bool[Array, "*B W W"] | None = None,
        *,
        logits_at: Int[Array, "B R"] | None = None,
        features: tuple[int, ...] = (),
    ) -> Output:
        """One pass over a window.

        Args:
            ids: int32 [B, W].
            cache: committed tokens before the window; None treats the window as the whole sequence.
            positions: int32 [B, W]; default: behind the committed tokens.
            mask: bool [W, W] or [B, W, W], which key of the window each query sees; default causal.
            logits_at: int32 [B, R], offsets in the window whose logits are wanted; default all.
            features: hidden states to return, by layer: 0 is the embedding, n_layers the last, before the final norm.
        """
        c = self.config
        B, W = ids.shape
        if positions is None:
            start = jnp.zeros(B, jnp.int32) if cache is None else cache.length
            positions = start[:, None] + jnp.arange(W)[None, :]
        if mask is None:
            mask = jnp.tril(jnp.ones((W, W), bool))
        mask = jnp.broadcast_to(mask, (B, W, W))
        cos_sin = rope.cos_sin(c.rope, c.head_dim, positions)

        table, _ = Weight((c.vocab_size, c.d_model), name="embed")()
        x = ops.embed(ids, table, self.dtype)
        states = [x]
        for layer in range(c.n_layers):
            x, cache = Block(c, name=f"layers_{layer}")(x, layer, cache, cos_sin, mask)
            states.append(x)
        if logits_at is not None:
            x = jnp.take_along_axis(x, logits_at[:, :, None], axis=1)
        x = RMSNorm(c.norm_eps, name="final_norm")(x)
        out = table if c.tie_embeddings else Weight((c.vocab_size, c.d_model), name="head")()[0]
        return Output(ops.head(x, out), tuple(states[i] for i in features), cache)

    def init_cache(self, batch: int, capacity: int, dtype: DTypeLike | None = None) -> kv.KVCache:
        """An empty cache for `batch` rows of at least `capacity` slots, in the compute dtype unless one is given."""
        c = self.config
        return kv.init_cache(c.n_layers, batch, c.n_kv_heads, capacity, c.head_dim, dtype or self.dtype)
