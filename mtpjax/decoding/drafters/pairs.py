"""Drafting with modules over pairs (hidden state, next token), which see the target's own hidden states.

For what the modules M_k and their outputs m_k(i) are, see `mtpjax.models.mtp.pairs`. Let t_L be the last committed
token. The last hidden state known is h_{L-1}: t_L was drawn from it and has not been through the target. So m_1(L-1),
of the pair (h_{L-1}, t_L), predicts t_{L+1}, the first draft; `update` has computed it already.

A token told to `update` comes with the hidden state of the place before: that is the pair. The text's first token has
no hidden state and makes no pair. M_k has in its cache the places i <= L-k, for which t_{i+k} is committed. All modules
see the same window of tokens, each with the previous one's outputs, one place earlier:

    tokens     t_{n}        t_{n+1}      ...           n tokens were told before
    M_1        m_0(n-1)     m_0(n)
    M_2        m_1(n-2)     m_1(n-1)                   m_1(n-2) is the last output of the update before: `last`

Drafting is the same with drafted tokens, in slots behind the committed ones which nothing counts: with a module for
each depth, M_k runs the k-1 places that it lacks; a reused module goes on one place a level. With several candidates a
place of the window sees its own chain only.

State: one cache for all modules, the last output of each, and the number of tokens told. The cache's length is that of
M_1, L pairs, which is the target's own committed length; M_k has k - 1 fewer.

Rejected: keeping what drafting wrote for accepted tokens (its hidden states were the drafter's own, not the target's);
the prediction from the drafted path instead of `last` (another pass for the same numbers).
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from mtpjax.decoding import tree
from mtpjax.decoding.drafters.base import Committed, Drafted, Drafter, Memory, Params, Proposal
from mtpjax.decoding.drafters.draws import draw_each, draw_siblings
from mtpjax.decoding.sampling import Law
from mtpjax.errors import UserError
from mtpjax.models.cache import KVCache, init_cache
from mtpjax.models.mtp.pairs import PairStack
from mtpjax.models.mtp.readout import trunk_embedding
from mtpjax.records import Leaf


class PairState(struct.PyTreeNode):
    """What modules keep of the text.

    Attributes:
        cache: keys and values of all modules; its length is the pairs of the first.
        last: [B, n, D], the last committed output of each module.
        seen: int32 [B], tokens told.
    """

    cache: KVCache
    last: Leaf
    seen: Leaf


def empty_state(batch: int, capacity: int, modules: int, block, dtype: str) -> PairState:
    """No text yet: for `modules` blocks of shape `block`."""
    cache = init_cache(modules, batch, block.n_kv_heads, capacity, block.head_dim, dtype)
    return PairState(cache, jnp.zeros((batch, modules, block.d_model), dtype), jnp.zeros(batch, jnp.int32))


def skip(x_BW: Array, by_B: Array) -> Array:
    """Drop the first `by` of each row's window [B, W, ...]; the end is filled with its last entry."""
    at = jnp.minimum(jnp.arange(x_BW.shape[1])[None, :] + by_B[:, None], x_BW.shape[1] - 1)
    return jnp.take_along_axis(x_BW, at.reshape(*at.shape, *(1 for _ in x_BW.shape[2:])), axis=1)


def pick(x_BWD: Array, at_B: Array) -> Array:
    """One place of each row's window, [B, D]."""
    return jnp.take_along_axis(x_BWD, at_B[:, None, None], axis=1)[:, 0]


def causal(batch: int, width: int) -> Array:
    """Mask bool [B, W, W] of a window in order."""
    return jnp.broadcast_to(jnp.tril(jnp.ones((width, width), bool)), (batch, width, width))


@lru_cache(maxsize=64)
def pair_memory(stack: PairStack) -> Memory:
    """The memory of every drafter over one stack, whatever its depth."""

    def init(batch: int, capacity: int) -> PairState:
        return empty_state(batch, capacity, stack.modules, stack.block, stack.dtype)

    def update(params: Params, state: PairState, committed: Committed, features: tuple[Array, ...]) -> PairState:
        (B, W), seen = committed.tokens.shape, state.seen
        cache: Any = state.cache
        told = seen + committed.count
        known = stack.begin(params.target, params.drafter, features)
        before, made = known[:, :1], jnp.roll(known, -1, axis=1)  # m_0 before the window, and of each token itself
        last = []
        for k in range(1, stack.modules + 1):
            hidden = jnp.where((seen >= k)[:, None, None], jnp.concatenate([before, made[:, :-1]], axis=1), made)
            start = jnp.maximum(seen - k, 0)
            tokens = skip(committed.tokens, jnp.maximum(k - seen, 0))
            embedding = trunk_embedding(params.target, tokens, stack.dtype)
            positions = start[:, None] + jnp.arange(W)[None, :]
            made, cache = stack.run(
                params.drafter, k, hidden, embedding, cache.replace(length=start), positions, causal(B, W)
            )
            count = jnp.maximum(told - k, 0) - start
            end = pick(made, jnp.maximum(count - 1, 0))
            before = state.last[:, k - 1 : k]
            last.append(jnp.where((count > 0)[:, None], end, before[:, 0]))
        return PairState(cache.replace(length=jnp.maximum(told - 1, 0)), jnp.stack(last, axis=1), told)

    return Memory(init, update, stack.features)


@lru_cache(maxsize=64)
def pair_drafter(name: str, stack: PairStack, depth: int, candidates: int, sample: bool) -> Drafter:
    """A drafter of a stack; UserError where it can't draft so deep or so many."""
    check_shape(name, depth, candidates, stack.trunk.vocab_size, None if stack.reuse else stack.modules)
    parents = tree.candidates(candidates, depth)
    behind = _behind_own_outputs if stack.reuse else _behind_next_module

    def propose(params: Params, state: PairState, key_B: Array, law: Law) -> Drafted:
        first = stack.logits(params.target, params.drafter, 1, state.last[:, 0])
        tokens, q = draw_siblings(first, law, key_B, 1, candidates, sample)
        drafted, laws, cache = [tokens], [q], state.cache
        made = jnp.broadcast_to(state.last[:, :1], (*tokens.shape, state.last.shape[2]))
        for level in range(2, depth + 1):
            made, logits, cache = behind(stack, params, state, cache, made, drafted)
            tokens, q = draw_each(logits, law, key_B, level, sample)
            drafted.append(tokens)
            laws.append(q)
        proposal = proposal_of(drafted, laws, parents)
        return proposal, state.replace(cache=cache.replace(length=state.cache.length))

    return Drafter(name, depth, pair_memory(stack), propose, parents, lambda: shapes_of(stack.init))


def shapes_of(init: Callable[[Array], Any]) -> Any:
    """Shapes of the parameters that `init` makes of a key."""
    return jax.eval_shape(init, jax.random.key(0))


def check_shape(name: str, depth: int, candidates: int, vocab: int, deepest: int | None) -> None:
    """UserError for a depth or a number of candidates that can't be drafted."""
    if depth < 1 or (deepest is not None and depth > deepest):
        most = "" if deepest is None else f" to {deepest}, one for each module"
        raise UserError(f"depth of drafter {name!r} is {depth}, expected from 1{most}")
    if not 1 <= candidates <= vocab:
        raise UserError(f"candidates of drafter {name!r} is {candidates}, expected from 1 to {vocab}")


def proposal_of(drafted: list[Array], laws: list[Array | None], parents: tree.Parents) -> Proposal:
    """All levels' tokens [B, C] and laws [B, C, V] as one proposal."""
    known = [q for q in laws if q is not None]
    tokens = jnp.concatenate(drafted, axis=1)
    count = jnp.full(tokens.shape[0], len(parents), jnp.int32)
    q = jnp.concatenate(known, axis=1) if known else None
    return Proposal(tokens, q, count, parents, distinct=drafted[0].shape[1] > 1)


def _behind_own_outputs(
    stack: PairStack, params: Params, state: PairState, cache: Any, made_BCD: Array, drafted: list[Array]
) -> tuple[Array, Array, Any]:
    """One level of a reused module: its outputs [B, C, D], logits [B, C, V], and the cache."""
    (B, C), level = drafted[-1].shape, len(drafted)
    embedding = trunk_embedding(params.target, drafted[-1], stack.dtype)
    length = state.cache.length
    positions = jnp.broadcast_to(length[:, None] + level - 1, (B, C))
    own = jnp.arange(level * C)[None, :] % C == jnp.arange(C)[:, None]
    mask = jnp.broadcast_to(own, (B, C, level * C))
    made, cache = stack.run(params.drafter, 1, made_BCD, embedding, cache.replace(length=length), positions, mask)
    return made, stack.logits(params.target, params.drafter, 1, made), cache


def _behind_next_module(
    stack: PairStack, params: Params, state: PairState, cache: Any, made: Array, drafted: list[Array]
) -> tuple[Array, Array, Any]:
    """The next module over the places it lacks, for each chain: its outputs [B, (k-1)C, D], logits [B, C, V], cache.

    `made` are the previous module's, of k-2 places; for the first, which lacks none, it is not looked at.
    """
    (B, C), k, D, seen = drafted[-1].shape, len(drafted) + 1, made.shape[2], state.seen
    W, early = k - 1, jnp.maximum(k - seen, 0)
    made = made.reshape(B, -1, C, D)[:, : W - 1]
    before = jnp.broadcast_to(state.last[:, k - 2, None, None], (B, 1, C, D))
    hidden = jnp.where(
        (early == 0)[:, None, None, None],
        jnp.concatenate([before, made], axis=1),
        jnp.concatenate([made, before], axis=1),
    )
    tokens = skip(jnp.stack(drafted, axis=1).reshape(B, W, C), early)
    start = jnp.maximum(seen - k, 0)
    place, chain = jnp.arange(W * C) // C, jnp.arange(W * C) % C
    mask = (chain[None, :] == chain[:, None]) & (place[None, :] <= place[:, None])
    made, cache = stack.run(
        params.drafter,
        k,
        hidden.reshape(B, W * C, D),
        trunk_embedding(params.target, tokens.reshape(B, W * C), stack.dtype),
        cache.replace(length=start),
        start[:, None] + place[None, :],
        jnp.broadcast_to(mask, (B, W * C, W * C)),
    )
    end = jnp.maximum(seen - 2 - start, 0)
    ends = jnp.take_along_axis(made.reshape(B, W, C, D), end[:, None, None, None], axis=1)[:, 0]
    return made, stack.logits(params.target, params.drafter, k, ends), cache
