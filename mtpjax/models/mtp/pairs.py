"""Modules that turn a pair (hidden state, next token) into a hidden state: what sequential MTP and EAGLE-3 share.

The trunk's h_i knows the text up to t_i. A module M_k mixes what is known of a place with the token that came next:

    m_0(i) = h_i,      m_k(i) = M_k(m_{k-1}(i), Emb(t_{i+k})),      which predicts t_{i+k+1}.

Each M_k is causal over places i and has keys and values of its own. Either there is a module for every depth
(DeepSeek-V3), or one that is `reuse`d: it sees the trunk's h_i for all of the committed text and, going beyond it, its
own outputs, m(i+1) = M_1(m(i), Emb(t_{i+2})), which is how FastMTP and EAGLE draft.

A `PairStack` is a record of pure functions, so that the cached drafter, the reference below and training call the same
module. `logits_of` is that reference: everything at once, without a cache.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from mtpjax.models.cache import KVCache
from mtpjax.models.config import ModelConfig
from mtpjax.models.mtp.readout import Tree, trunk_embedding


@dataclass(frozen=True)
class PairStack:
    """Modules M_1 .. M_n over one trunk.

    Attributes:
        trunk: the trunk's shape; its embedding, and where a module has none its head, are shared.
        block: shape of a module's own block, for its cache.
        modules: n.
        reuse: whether the one module serves every depth.
        features: layers of the trunk whose hidden states `begin` takes.
        begin: ``(trunk_params, params, features) -> m_0`` [B, W, D].
        run: ``(params, k, hidden, embedding, cache, positions, mask) -> (m_k, cache)``: M_k over a window [B, W, D]
            behind the cache's committed places, or over a whole sequence when the cache is None.
        logits: ``(trunk_params, params, k, m_k) -> f32 [..., V]``.
        init: ``(key, d2t or None) -> params``.
        dtype: compute dtype, and the cache's.
    """

    trunk: ModelConfig
    block: ModelConfig
    modules: int
    reuse: bool
    features: tuple[int, ...]
    begin: Callable[[Tree, Tree, tuple[Array, ...]], Array]
    run: Callable[[Tree, int, Array, Array, KVCache | None, Array, Array], tuple[Array, Any]]
    logits: Callable[[Tree, Tree, int, Array], Array]
    init: Callable[..., Tree]
    dtype: str


def logits_of(
    stack: PairStack,
    trunk_params: Tree,
    params: Tree,
    features: tuple[Float[Array, "B T D"], ...],
    tokens_BT: Int[Array, "B T"],
    last_B: Int[Array, "B"],
    depth: int,
) -> Float[Array, "B depth V"]:
    """Logits behind which drafts d_1 .. d_depth stand, by passes over the whole sequence without a cache.

    Args:
        stack: the modules.
        trunk_params: the trunk's parameters.
        params: the stack's.
        features: the trunk's hidden states h_0, h_1, ... of each layer asked for; read up to place ``last - 1``.
        tokens_BT: the text t_0 .. t_last, and behind it the drafts d_1, d_2, ...
        last_B: int32 [B], at least 1: the place L of the last committed token.
        depth: how many places.
    """
    B, T = tokens_BT.shape
    rows, places = jnp.arange(B), jnp.broadcast_to(jnp.arange(T)[None, :], (B, T))
    causal = jnp.broadcast_to(jnp.tril(jnp.ones((T, T), bool)), (B, T, T))
    hidden, out = stack.begin(trunk_params, params, features), []
    for step in range(depth):
        k = 1 if stack.reuse else step + 1
        following = trunk_embedding(trunk_params, jnp.roll(tokens_BT, -k, axis=1), stack.dtype)
        made, _ = stack.run(params, k, hidden, following, None, places, causal)
        at = last_B - 1 + (step if stack.reuse else 0)
        out.append(stack.logits(trunk_params, params, k, made[rows, at]))
        hidden = hidden.at[rows, at + 1].set(made[rows, at]) if stack.reuse else made
    return jnp.stack(out, axis=1)
