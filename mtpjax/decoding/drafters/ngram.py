"""Prompt lookup: propose what followed the last time these words were said.

The last n tokens are looked up in the prompt and the output so far; the tokens behind the match are the draft (Prompt
Lookup Decoding, Saxena 2023). The longest matching suffix wins, and among equals the most recent. It costs no
parameters and helps where output repeats input: summaries, code edits, quotations.

A match p places back leaves only p tokens to copy. If the draft is longer it goes on copying its own beginning, which
is what a loop of period p would say.

State: the tokens so far [B, S] and their number [B]. The draft is deterministic: its law q is one-hot.
"""

from functools import lru_cache

import jax.numpy as jnp
from flax import struct
from jax import Array
from jaxtyping import Int

from mtpjax.decoding.drafters.base import Committed, Drafted, Drafter, Memory, Params, Proposal, append, chain
from mtpjax.decoding.sampling import Law
from mtpjax.records import Leaf


class History(struct.PyTreeNode):
    """Prompt and output: int32 [B, S], of which the first `length` [B] are real."""

    tokens: Leaf
    length: Leaf


def _empty(batch: int, capacity: int) -> History:
    return History(jnp.zeros((batch, capacity), jnp.int32), jnp.zeros(batch, jnp.int32))


def _remember(params: Params, state: History, committed: Committed, features: tuple[Array, ...]) -> History:
    tokens = append(state.tokens, state.length, committed)
    return History(tokens, state.length + committed.count)


HISTORY = Memory(_empty, _remember)
"""The memory of every lookup drafter: the text itself."""


@lru_cache(maxsize=64)
def ngram(depth: int = 3, longest: int = 4, shortest: int = 1) -> Drafter:
    """Prompt-lookup drafter: suffixes of `longest` down to `shortest` tokens are looked up."""

    def propose(params: Params, state: History, key_B: Array, law: Law) -> Drafted:
        tokens, count = lookup(state.tokens, state.length, depth, longest, shortest)
        return Proposal(tokens=tokens, q=None, count=count, parents=chain(depth)), state

    return Drafter("ngram", depth, HISTORY, propose)


def lookup(
    tokens_BS: Int[Array, "B S"], length_B: Int[Array, "B"], depth: int, longest: int, shortest: int
) -> tuple[Int[Array, "B {depth}"], Int[Array, "B"]]:
    """Longest, then most recent earlier occurrence of each row's last tokens.

    Returns:
        drafts int32 [B, depth] and how many were found, int32 [B]: `depth` or 0.
    """
    S = tokens_BS.shape[1]
    run = match_lengths(tokens_BS, length_B, longest)
    last = length_B[:, None] - 1
    best = jnp.argmax(jnp.where(run >= shortest, run * S + jnp.arange(S)[None, :], -1), axis=1)[:, None]
    found = jnp.take_along_axis(run, best, axis=1) >= shortest
    period = jnp.maximum(last - best, 1)
    source = best + 1 + jnp.arange(depth)[None, :] % period
    drafts = jnp.take_along_axis(tokens_BS, jnp.minimum(source, S - 1), axis=1)
    return drafts, jnp.where(found[:, 0], depth, 0).astype(jnp.int32)


def match_lengths(tokens_BS: Int[Array, "B S"], length_B: Int[Array, "B"], longest: int) -> Int[Array, "B S"]:
    """How many tokens up to and with each earlier place are those that the text ends with, at most `longest`."""
    place = jnp.arange(tokens_BS.shape[1])[None, :]
    last = length_B[:, None] - 1
    run = jnp.zeros(tokens_BS.shape, jnp.int32)
    going = jnp.broadcast_to(place < last, tokens_BS.shape)
    for back in range(longest):
        ending = jnp.take_along_axis(tokens_BS, jnp.maximum(last - back, 0), axis=1)
        shifted = jnp.roll(tokens_BS, back, axis=1)
        going = going & (place >= back) & (last >= back) & (shifted == ending)
        run = run + going
    return run
