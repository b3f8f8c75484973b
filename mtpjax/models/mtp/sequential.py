"""Sequential multi-token prediction: one-block modules in a chain behind the trunk (DeepSeek-V3 2412.19437, eq. 21-23).

    h'_i = W_eh [RMSNorm(m_{k-1}(i)); RMSNorm(Emb(t_{i+k}))],    m_k(i) = Block(h')_i,    logits = Head(RMSNorm(m_k(i)))

Embedding and head are the trunk's; `eh_proj` is [D, 2D]. With `reuse` one module serves all depths, unrolled on its own
outputs (FastMTP 2509.18362). Which half of the input comes first, and whether the trunk's state is taken before or
after its final norm, differs by family (the paper writes [h; emb], published weights [emb; h]): the config has no
default for either. From one module to the next the state goes on before the output norm.

Parameters: {"module_1": {hidden_norm, embed_norm, eh_proj, block, output_norm}, ..., "head"?, "d2t"?}.
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
from mtpjax.models.mtp.readout import Order, Stage, Tree, init_readout, join, read_out, trunk_hidden
from mtpjax.models.transformer import Block, RMSNorm, Weight
from mtpjax.quant import ops


class MTPConfig(Config):
    """Sequential modules behind a trunk."""

    order: Order
    """Which half of eh_proj's input comes first."""
    hidden_from: Stage
    """Where the trunk's hidden state is taken."""
    depth_modules: int = Field(default=1, ge=1)
    """Modules; each predicts one token further."""
    reuse: bool = False
    """Use the one module for every depth."""
    draft_vocab: int | None = Field(default=None, ge=1)
    """Size of a reduced output vocabulary."""
    own_head: bool = False
    """An output head of its own instead of the trunk's, or of the rows of it that d2t picks."""
    block: ModelConfig | None = None
    """Shape of the module's block; the trunk's unless given."""


class MTPModule(nn.Module):
    """One module M_k: see the head of the file."""

    config: ModelConfig
    order: Order

    def setup(self) -> None:
        c = self.config
        self.hidden_norm, self.embed_norm, self.output_norm = (RMSNorm(c.norm_eps) for _ in range(3))
        self.eh_proj = Weight((c.d_model, 2 * c.d_model))
        self.block = Block(c)

    def __call__(self, hidden: Array, embedding: Array, layer: int, cache: kv.KVCache | None, positions, mask):
        """M_k of hidden states and embeddings [B, W, D] at int32 positions [B, W]: (m_k [B, W, D], cache)."""
        c = self.config
        x = join(self.order, self.hidden_norm(hidden), self.embed_norm(embedding))
        (x,) = ops.project(x, self.eh_proj()[0])
        return self.block(x, layer, cache, rope.cos_sin(c.rope, c.head_dim, positions), mask)

    def normed(self, x: Array) -> Array:
        """What the head reads."""
        return self.output_norm(x)


def own_block(trunk: ModelConfig, block: ModelConfig | None) -> ModelConfig:
    """Shape of a module's block; it must be as wide as the trunk."""
    if block is not None and block.d_model != trunk.d_model:
        raise UserError(f"block.d_model is {block.d_model}, expected the trunk's {trunk.d_model}")
    return trunk if block is None else block


def init_module(module: nn.Module, width: int, key: Array) -> Tree:
    """Random parameters of a module over pairs that has `normed`."""
    x, at, mask = jnp.zeros((1, 1, width)), jnp.zeros((1, 1), jnp.int32), jnp.ones((1, 1, 1), bool)

    def everything(module):
        return module.normed(module(x, x, 0, None, at, mask)[0])

    return module.init(key, method=everything)["params"]


@lru_cache(maxsize=64)
def sequential_stack(trunk: ModelConfig, config: MTPConfig, dtype: str = "float32") -> PairStack:
    """The modules as a `PairStack`.

    Raises:
        UserError: `reuse` with several modules, or a block of another width than the trunk.
    """
    if config.reuse and config.depth_modules > 1:
        raise UserError(f"reuse is one module for all depths, but depth_modules is {config.depth_modules}: set it to 1")
    block = own_block(trunk, config.block)
    module = MTPModule(block, config.order)

    def begin(trunk_params: Tree, params: Tree, features: tuple[Array, ...]) -> Array:
        return trunk_hidden(trunk, trunk_params, config.hidden_from, features[0], dtype)

    def run(params: Tree, k: int, hidden, embedding, cache, positions, mask) -> Any:
        return module.apply(_of(params, k), hidden, embedding, k - 1, cache, positions, mask)

    def logits(trunk_params: Tree, params: Tree, k: int, hidden: Array) -> Array:
        x: Any = module.apply(_of(params, k), hidden, method="normed")
        return read_out(trunk, trunk_params, params, x)

    def init(key: Array, d2t: Sequence[int] | None = None) -> Tree:
        keys = jax.random.split(key, config.depth_modules + 1)
        params = init_readout(trunk, keys[0], config.draft_vocab, config.own_head, d2t)
        return params | {f"module_{k}": init_module(module, block.d_model, own) for k, own in enumerate(keys[1:], 1)}

    features = (trunk.n_layers,)
    return PairStack(trunk, block, config.depth_modules, config.reuse, features, begin, run, logits, init, dtype)


def _of(params: Tree, k: int) -> dict[str, Tree]:
    return {"params": params[f"module_{k}"]}
