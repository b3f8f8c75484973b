"""Parallel heads: head k reads the trunk's h_i and predicts t_{i+k+1}, without waiting for the tokens between.

Medusa (2401.10774): a residual block on the one hidden state, and an unembedding of its own or the trunk's,

    x_k = h_i + SiLU(W_k h_i + b_k),    logits_k = Head_k(x_k).

Gloeckle et al. (2404.19737): a transformer block for each head over all of h_0 .. h_i, with keys and values of its own,
and the trunk's final norm and unembedding,

    x_k = Block_k(h)_i,    logits_k = Head(RMSNorm(x_k)).

The trunk's own head is the one for k = 0. Where the hidden state is taken has no default: published Medusa heads read
it after the final norm, Gloeckle's blocks before. Draft vocabularies are as in `mtpjax.models.mtp.readout`.

Parameters: {"head_1": {"proj", "head"?}, ..., "d2t"?} and {"block_1": ..., "head"?, "d2t"?}.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float
from pydantic import Field

from mtpjax.config import Config
from mtpjax.models import rope
from mtpjax.models.cache import KVCache
from mtpjax.models.config import ModelConfig
from mtpjax.models.mtp.readout import Stage, Tree, final_norm, init_readout, read_out, trunk_hidden
from mtpjax.models.mtp.sequential import own_block
from mtpjax.models.transformer import Block
from mtpjax.quant import ops


class MedusaConfig(Config):
    """Residual heads on a trunk."""

    heads: int = Field(ge=1)
    """Heads; head k predicts the token k places behind the next."""
    hidden_from: Stage
    """Where the trunk's hidden state is taken."""
    draft_vocab: int | None = Field(default=None, ge=1)
    """Size of a reduced output vocabulary."""
    own_head: bool = True
    """An unembedding for each head instead of the trunk's, or of the rows of it that d2t picks."""


class GloeckleConfig(Config):
    """One-block heads on a trunk."""

    heads: int = Field(ge=1)
    """Heads; head k predicts the token k places behind the next."""
    hidden_from: Stage
    """Where the trunk's hidden state is taken."""
    draft_vocab: int | None = Field(default=None, ge=1)
    """Size of a reduced output vocabulary."""
    own_head: bool = False
    """An unembedding shared by the heads instead of the trunk's, or of the rows of it that d2t picks."""
    block: ModelConfig | None = None
    """Shape of the blocks; the trunk's unless given."""


@dataclass(frozen=True)
class HeadStack:
    """Heads 1 .. n over one trunk.

    Attributes:
        trunk: the trunk's shape.
        heads: n.
        begin: ``(trunk_params, features) -> h`` [B, W, D].
        block: shape of the heads' blocks, for their cache; None for heads that look at one place.
        run: ``(params, k, h, cache, positions, mask) -> (x_k, cache)``, over a window behind the cache's committed
            places, or over a whole sequence when the cache is None.
        logits: ``(trunk_params, params, k, x_k) -> f32 [..., V]``.
        init: ``(key, d2t or None) -> params``.
        dtype: compute dtype, and the cache's.
    """

    trunk: ModelConfig
    heads: int
    begin: Callable[[Tree, tuple[Array, ...]], Array]
    block: ModelConfig | None
    run: Callable[[Tree, int, Array, KVCache | None, Array, Array], tuple[Array, Any]]
    logits: Callable[[Tree, Tree, int, Array], Array]
    init: Callable[..., Tree]
    dtype: str


@lru_cache(maxsize=64)
def medusa_stack(trunk: ModelConfig, config: MedusaConfig, dtype: str = "float32") -> HeadStack:
    """Medusa's heads as a `HeadStack`."""
    D = trunk.d_model

    def run(params: Tree, k: int, hidden: Array, cache: KVCache | None, positions: Array, mask: Array):
        proj = params[f"head_{k}"]["proj"]
        (y,) = ops.project(hidden, proj["weight"])
        return hidden + jax.nn.silu(ops.add_bias(y, proj["bias"])), cache

    def logits(trunk_params: Tree, params: Tree, k: int, x: Array) -> Array:
        shared = {name: params[name] for name in ("d2t",) if name in params}
        return read_out(trunk, trunk_params, params[f"head_{k}"] | shared, x)

    def init(key: Array, d2t: Sequence[int] | None = None) -> Tree:
        def head(key: Array) -> Tree:
            proj, out = jax.random.split(key)
            own = init_readout(trunk, out, config.draft_vocab, config.own_head, d2t)
            own.pop("d2t", None)
            return own | {"proj": {"weight": jax.random.normal(proj, (D, D)) * 0.02, "bias": jnp.zeros(D)}}

        shared = init_readout(trunk, key, config.draft_vocab, False, d2t)
        return shared | {f"head_{k}": head(own) for k, own in enumerate(jax.random.split(key, config.heads), 1)}

    return HeadStack(trunk, config.heads, _begin(trunk, config.hidden_from, dtype), None, run, logits, init, dtype)


@lru_cache(maxsize=64)
def gloeckle_stack(trunk: ModelConfig, config: GloeckleConfig, dtype: str = "float32") -> HeadStack:
    """Gloeckle's heads as a `HeadStack`.

    Raises:
        UserError: a block of another width than the trunk.
    """
    block = own_block(trunk, config.block)
    module = Block(block)

    def run(params: Tree, k: int, hidden: Array, cache: KVCache | None, positions: Array, mask: Array) -> Any:
        cos_sin = rope.cos_sin(block.rope, block.head_dim, positions)
        return module.apply({"params": params[f"block_{k}"]}, hidden, k - 1, cache, cos_sin, mask)

    def logits(trunk_params: Tree, params: Tree, k: int, x: Array) -> Array:
        return read_out(trunk, trunk_params, params, final_norm(trunk, trunk_params, x))

    def init(key: Array, d2t: Sequence[int] | None = None) -> Tree:
        out, *keys = jax.random.split(key, config.heads + 1)
        x, at = jnp.zeros((1, 1, block.d_model)), jnp.zeros((1, 1), jnp.int32)
        window = 0, None, rope.cos_sin(block.rope, block.head_dim, at), jnp.ones((1, 1, 1), bool)
        params = init_readout(trunk, out, config.draft_vocab, config.own_head, d2t)
        return params | {f"block_{k}": module.init(own, x, *window)["params"] for k, own in enumerate(keys, 1)}

    return HeadStack(trunk, config.heads, _begin(trunk, config.hidden_from, dtype), block, run, logits, init, dtype)


def head_logits(
    stack: HeadStack, trunk_params: Tree, params: Tree, features: tuple[Float[Array, "B T D"], ...]
) -> Float[Array, "B T n V"]:
    """Logits of every head at every place, by one pass over the whole sequence: [b, i, k - 1] is about t_{i+k+1}."""
    B, T = features[0].shape[:2]
    places = jnp.broadcast_to(jnp.arange(T)[None, :], (B, T))
    causal = jnp.broadcast_to(jnp.tril(jnp.ones((T, T), bool)), (B, T, T))
    hidden = stack.begin(trunk_params, features)
    made = [stack.run(params, k, hidden, None, places, causal)[0] for k in range(1, stack.heads + 1)]
    return jnp.stack([stack.logits(trunk_params, params, k, x) for k, x in enumerate(made, 1)], axis=2)


def _begin(trunk: ModelConfig, stage: Stage, dtype: str) -> Callable[[Tree, tuple[Array, ...]], Array]:
    return lambda trunk_params, features: trunk_hidden(trunk, trunk_params, stage, features[0], dtype)
