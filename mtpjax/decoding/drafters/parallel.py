"""Parallel heads as drafters: Medusa's (2401.10774) and Gloeckle's (2404.19737); the heads are `models.mtp.parallel`.

Let t_L be the last committed token. The last hidden state known is h_{L-1}, from which t_L itself was drawn: the
trunk's own head is used up, and head k gives t_{L+k}. `update` runs the heads over each hidden state as it becomes
known and keeps the last outputs, so a draft costs the output heads only, whatever its depth.

Heads do not see each other's tokens: level l of every candidate is an independent draw from head l, given nothing of
its chain. That is the q that the rule is told, so verification is lossless like any other; it only accepts less.

State: for Gloeckle a `PairState`, the blocks' keys and values of h_0 .. h_{L-1} (the text's first token brings no
hidden state), the heads' last outputs and the tokens told; for Medusa h_{L-1} alone.
"""

from functools import lru_cache
from typing import Any

import jax.numpy as jnp
from flax import struct
from jax import Array, lax

from mtpjax.decoding import tree
from mtpjax.decoding.drafters.base import Committed, Drafted, Drafter, Memory, Params
from mtpjax.decoding.drafters.draws import draw_each, draw_siblings
from mtpjax.decoding.drafters.pairs import PairState, causal, check_shape, empty_state, pick, proposal_of, shapes_of
from mtpjax.decoding.sampling import Law
from mtpjax.models.config import ModelConfig
from mtpjax.models.mtp import GloeckleConfig, HeadStack, MedusaConfig, gloeckle_stack, medusa_stack
from mtpjax.records import Leaf


class Hidden(struct.PyTreeNode):
    """The hidden state h_{L-1} that the last token was drawn from, [B, D]."""

    last: Leaf


@lru_cache(maxsize=64)
def hidden_memory(stack: HeadStack) -> Memory:
    """The memory of heads that look at one place."""

    def init(batch: int, capacity: int) -> Hidden:
        return Hidden(jnp.zeros((batch, stack.trunk.d_model), stack.dtype))

    def update(params: Params, state: Hidden, committed: Committed, features: tuple[Array, ...]) -> Hidden:
        end = pick(features[0], jnp.maximum(committed.count - 1, 0))
        hidden = stack.begin(params.target, (end,))
        return Hidden(jnp.where((committed.count > 0)[:, None], hidden, state.last))

    return Memory(init, update, (stack.trunk.n_layers,))


@lru_cache(maxsize=64)
def block_memory(stack: HeadStack) -> Memory:
    """The memory of heads that attend: each hidden state, as it becomes known, goes through all of them."""
    assert stack.block is not None
    block = stack.block

    def init(batch: int, capacity: int) -> PairState:
        return empty_state(batch, capacity, stack.heads, block, stack.dtype)

    def update(params: Params, state: PairState, committed: Committed, features: tuple[Array, ...]) -> PairState:
        (B, W), seen = committed.tokens.shape, state.seen
        cache: Any = state.cache
        hidden = stack.begin(params.target, features)
        hidden = jnp.where((seen > 0)[:, None, None], hidden, jnp.roll(hidden, -1, axis=1))
        start, told = jnp.maximum(seen - 1, 0), seen + committed.count
        count = jnp.maximum(told - 1, 0) - start
        positions, last = start[:, None] + jnp.arange(W)[None, :], []
        for k in range(1, stack.heads + 1):
            made, cache = stack.run(params.drafter, k, hidden, cache, positions, causal(B, W))
            hidden, made = lax.optimization_barrier((hidden, made))  # one head after the other, or the cache is copied
            end = pick(made, jnp.maximum(count - 1, 0))
            last.append(jnp.where((count > 0)[:, None], end, state.last[:, k - 1]))
        return PairState(cache.replace(length=start + count), jnp.stack(last, axis=1), told)

    return Memory(init, update, (stack.trunk.n_layers,))


def medusa(
    trunk: ModelConfig,
    config: MedusaConfig,
    depth: int = 3,
    candidates: int = 1,
    sample: bool = True,
    dtype: str = "float32",
) -> Drafter:
    """A drafter of Medusa heads; see `sequential` for the arguments and errors. `depth` is at most the heads."""
    return _parallel("medusa", medusa_stack(trunk, config, dtype), depth, candidates, sample)


def gloeckle(
    trunk: ModelConfig,
    config: GloeckleConfig,
    depth: int = 3,
    candidates: int = 1,
    sample: bool = True,
    dtype: str = "float32",
) -> Drafter:
    """A drafter of one-block heads; see `sequential` for the arguments and errors. `depth` is at most the heads."""
    return _parallel("gloeckle", gloeckle_stack(trunk, config, dtype), depth, candidates, sample)


@lru_cache(maxsize=64)
def _parallel(name: str, stack: HeadStack, depth: int, candidates: int, sample: bool) -> Drafter:
    check_shape(name, depth, candidates, stack.trunk.vocab_size, stack.heads)
    parents = tree.candidates(candidates, depth)

    def outputs(params: Params, state: Hidden | PairState, k: int) -> Array:
        if isinstance(state, PairState):
            return state.last[:, k - 1]
        one = state.last[:, None]
        place = jnp.zeros(one.shape[:2], jnp.int32)
        return stack.run(params.drafter, k, one, None, place, causal(len(one), 1))[0][:, 0]

    def propose(params: Params, state: Hidden | PairState, key_B: Array, law: Law) -> Drafted:
        drafted, laws = [], []
        for k in range(1, depth + 1):
            logits = stack.logits(params.target, params.drafter, k, outputs(params, state, k))
            if k == 1:
                tokens, q = draw_siblings(logits, law, key_B, k, candidates, sample)
            else:
                alike = jnp.broadcast_to(logits[:, None], (len(logits), candidates, logits.shape[1]))
                tokens, q = draw_each(alike, law, key_B, k, sample)
            drafted.append(tokens)
            laws.append(q)
        return proposal_of(drafted, laws, parents), state

    memory = hidden_memory(stack) if stack.block is None else block_memory(stack)
    return Drafter(name, depth, memory, propose, parents, lambda: shapes_of(stack.init))
