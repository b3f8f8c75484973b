"""EAGLE-3's head: one decoder layer over fused features of the target, unrolled on itself (2503.01840).

    g_i = W_fc [low_i; middle_i; high_i],
    x = g_i + Attention([RMSNorm(Emb(t_{i+1})); RMSNorm(g_i)]),
    m(i) = x + MLP(RMSNorm(x)),    logits = Head(RMSNorm(m(i))).

Queries, keys and values are read from the pair, 2D wide, and the residual stream is g alone. For text not yet seen by
the target, m(i) stands in g's place. The head is its own, over a reduced vocabulary with `d2t` if there is one; `d2t`
holds ids (files of EAGLE-3 hold differences, id minus place).

Parameters: {"fc", "layer": {hidden_norm, embed_norm, attn, mlp_norm, mlp, output_norm}, "head", "d2t"?}.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array
from pydantic import Field

from mtpjax.config import Config
from mtpjax.errors import UserError
from mtpjax.models import cache as kv
from mtpjax.models import rope
from mtpjax.models.config import ModelConfig
from mtpjax.models.mtp.pairs import PairStack
from mtpjax.models.mtp.readout import Order, Tree, init_readout, join, read_out
from mtpjax.models.mtp.sequential import init_module, own_block
from mtpjax.models.transformer import MLP, Attention, RMSNorm
from mtpjax.quant import ops


class EagleConfig(Config):
    """An EAGLE-3 head behind a trunk."""

    layers: tuple[int, int, int]
    """Low, middle and high: 0 is the trunk's embedding, n_layers its last hidden state before the final norm."""
    order: Order
    """Which half of the attention's input comes first; the published heads are embedding_first."""
    draft_vocab: int | None = Field(default=None, ge=1)
    """Size of a reduced output vocabulary."""
    block: ModelConfig | None = None
    """Shape of the layer; the trunk's unless given."""


class EagleLayer(nn.Module):
    """The decoder layer: see the head of the file."""

    config: ModelConfig
    order: Order

    def setup(self) -> None:
        c = self.config
        self.hidden_norm, self.embed_norm, self.mlp_norm, self.output_norm = (RMSNorm(c.norm_eps) for _ in range(4))
        self.attn, self.mlp = Attention(c), MLP(c)

    def __call__(self, hidden: Array, embedding: Array, layer: int, cache: kv.KVCache | None, positions, mask):
        """Hidden states and embeddings [B, W, D] at int32 positions [B, W]: (m [B, W, D], cache)."""
        c = self.config
        pair = join(self.order, self.hidden_norm(hidden), self.embed_norm(embedding))
        y, cache = self.attn(pair, layer, cache, rope.cos_sin(c.rope, c.head_dim, positions), mask)
        x = hidden + y
        return x + self.mlp(self.mlp_norm(x)), cache

    def normed(self, x: Array) -> Array:
        """What the head reads."""
        return self.output_norm(x)


@lru_cache(maxsize=64)
def eagle_stack(trunk: ModelConfig, config: EagleConfig, dtype: str = "float32") -> PairStack:
    """The head as a `PairStack` of one module, reused.

    Raises:
        UserError: a layer that the trunk does not have, or a block of another width.
    """
    if not all(0 <= layer <= trunk.n_layers for layer in config.layers):
        raise UserError(f"layers is {config.layers}, expected layers from 0 to the trunk's {trunk.n_layers}")
    block, D = own_block(trunk, config.block), trunk.d_model
    module = EagleLayer(block, config.order)

    def begin(trunk_params: Tree, params: Tree, features: tuple[Array, ...]) -> Array:
        fused = jnp.concatenate([jnp.asarray(f, dtype) for f in features], axis=-1)
        return ops.project(fused, params["fc"]["weight"])[0]

    def run(params: Tree, k: int, hidden, embedding, cache, positions, mask) -> Any:
        return module.apply({"params": params["layer"]}, hidden, embedding, 0, cache, positions, mask)

    def logits(trunk_params: Tree, params: Tree, k: int, hidden: Array) -> Array:
        x: Any = module.apply({"params": params["layer"]}, hidden, method="normed")
        return read_out(trunk, trunk_params, params, x)

    def init(key: Array, d2t: Sequence[int] | None = None) -> Tree:
        out, fc, layer = jax.random.split(key, 3)
        params = init_readout(trunk, out, config.draft_vocab, True, d2t)
        fuse = {"weight": jax.random.normal(fc, (D, 3 * D)) * 0.02}
        return params | {"fc": fuse, "layer": init_module(module, D, layer)}

    return PairStack(trunk, block, 1, True, config.layers, begin, run, logits, init, dtype)
