"""Drafters that tests make themselves: prompt lookup in a tree, and one that knows the text and errs where told."""

from functools import lru_cache

import jax.numpy as jnp

from mtpjax.decoding import tree
from mtpjax.decoding.drafters import Drafter, Memory, Proposal
from mtpjax.decoding.drafters.ngram import HISTORY, lookup


@lru_cache(maxsize=16)
def twins(depth: int, vocab: int = 61) -> Drafter:
    """Two candidates: prompt lookup's draft, and that draft with every token one larger."""
    parents = tree.candidates(2, depth)

    def propose(params, state, key_B, law):
        tokens, count = lookup(state.tokens, state.length, depth, 3, 1)
        both = jnp.stack([tokens, (tokens + 1) % vocab], axis=2).reshape(tokens.shape[0], 2 * depth)
        return Proposal(tokens=both, q=None, count=2 * count, parents=parents), state

    return Drafter("twins", depth, HISTORY, propose, parents)


def oracle_tree(parents: tree.Parents, texts, right: dict[int, bool], vocab: int = 61) -> Drafter:
    """A tree drafter that knows each row's text [B][n]: offset k holds the true token of its level if `right[k]`."""
    length = max(map(len, texts))
    known = jnp.asarray([row + [0] * (length - len(row)) for row in texts], jnp.int32)
    level = jnp.asarray(tree.levels(parents)[1:])
    off = jnp.asarray([0 if right[k] else k for k in range(1, len(parents) + 1)])

    def update(params, state, committed, features):
        return state + jnp.where(committed.tokens.shape[1] < 16, committed.count, 0)

    def propose(params, state, key_B, law):
        at = jnp.minimum(state[:, None] + level[None, :] - 1, length - 1)
        tokens = (jnp.take_along_axis(known, at, axis=1) + off[None, :]) % vocab
        return Proposal(tokens, None, jnp.full(tokens.shape[0], len(parents), jnp.int32), parents), state

    memory = Memory(lambda batch, capacity: jnp.zeros(batch, jnp.int32), update)
    return Drafter("oracle", tree.depth_of(parents), memory, propose, parents)
