"""Suffix lookup: what followed the longest repeated ending, by vote of all its earlier occurrences.

Where prompt lookup (`ngram`) copies behind the most recent of the matches of at most four tokens, this looks for the
longest ending of the text that stood before, up to `longest` tokens, and lets the `VOTERS` most recent of its
occurrences vote on each next token; those that are outvoted fall silent. How much is drafted follows how much matched,
`per_match` tokens for each token of the match, and stops where nobody has a word left (SuffixDecoding, 2411.04975,
whose tree over all earlier answers becomes here a scan over prompt and output: arrays of a static size, no tree).

State: the text, as for `ngram`. The draft is deterministic: q is one-hot.
"""

from functools import lru_cache

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Int

from mtpjax.decoding.drafters.base import Drafted, Drafter, Params, Proposal, chain
from mtpjax.decoding.drafters.ngram import HISTORY, History, match_lengths
from mtpjax.decoding.sampling import Law

VOTERS = 16


@lru_cache(maxsize=64)
def suffix(depth: int = 3, longest: int = 32, per_match: int = 2) -> Drafter:
    """Suffix-lookup drafter of at most `depth` tokens, and at most `per_match` for each matching one."""

    def propose(params: Params, state: History, key_B: Array, law: Law) -> Drafted:
        tokens, count = vote(state.tokens, state.length, depth, longest, per_match)
        return Proposal(tokens=tokens, q=None, count=count, parents=chain(depth)), state

    return Drafter("suffix", depth, HISTORY, propose)


def vote(
    tokens_BS: Int[Array, "B S"], length_B: Int[Array, "B"], depth: int, longest: int, per_match: int
) -> tuple[Int[Array, "B {depth}"], Int[Array, "B"]]:
    """Drafts int32 [B, depth] and how many are proposed, int32 [B]. Ties go to the most recent occurrence."""
    S = tokens_BS.shape[1]
    run = match_lengths(tokens_BS, length_B, longest)
    rank, place_BP = lax.top_k(run * S + jnp.arange(S)[None, :], min(VOTERS, S))
    matched = rank // S
    best = matched[:, :1]
    speaks = (matched == best) & (best > 0)
    drafts, going, count = [], jnp.ones_like(length_B, bool), jnp.zeros_like(length_B)
    for step in range(depth):
        at = place_BP + 1 + step
        speaks = speaks & (at < length_B[:, None])
        word = jnp.take_along_axis(tokens_BS, jnp.minimum(at, S - 1), axis=1)
        agree = (word[:, :, None] == word[:, None, :]) & speaks[:, None, :]
        votes = jnp.where(speaks, jnp.sum(agree, axis=2), 0)
        chosen = jnp.take_along_axis(word, jnp.argmax(votes, axis=1)[:, None], axis=1)
        going = going & jnp.any(speaks, axis=1) & (step < per_match * best[:, 0])
        speaks = speaks & (word == chosen)
        drafts.append(chosen[:, 0])
        count = count + going
    return jnp.stack(drafts, axis=1), count
