"""A draft model: a smaller language model over the same vocabulary drafts what the main one will say.

This is speculative decoding as first published (Leviathan 2211.17192, Chen 2302.01318). The draft model is any
`Target`, with a cache and a config of its own; its parameters are the drafter's.

State: the draft model's cache, in which every committed token is (its length is the text's length, after every round),
and its logits behind the last of them. `update` is one window pass over what was committed. `propose` draws the first
token from the logits that are there, and runs one pass for each further level, in slots behind the committed ones; so
a step of depth d costs d - 1 narrow passes and one window of d + 1. Nothing is rolled back, since nothing was counted.

Several candidates are chains that share the committed text: level l is one pass over the nodes of all levels up to l,
each seeing its own ancestors. Running a level's nodes alone would need a mask over slots that the target seam does not
have; for shallow trees the wider pass costs the same reading of the weights.

Rejected: keeping what drafting wrote for accepted tokens (saves nothing, since the window pass is needed for the last
one anyway, and must follow whichever candidate won).
"""

from functools import lru_cache
from typing import Any

import jax.numpy as jnp
from flax import struct
from jax import Array

from mtpjax.decoding import tree
from mtpjax.decoding.drafters.base import Committed, Drafted, Drafter, Memory, Params, Proposal
from mtpjax.decoding.drafters.draws import draw_each, draw_siblings
from mtpjax.decoding.drafters.params import ANY
from mtpjax.decoding.sampling import Law
from mtpjax.decoding.target import Target
from mtpjax.errors import UserError
from mtpjax.records import Leaf


class Drafting(struct.PyTreeNode):
    """What a draft model keeps.

    Attributes:
        cache: the draft model's cache of the committed text.
        length: int32 [B], tokens of it.
        logits: f32 [B, V], behind the last committed token.
    """

    cache: Any
    length: Leaf
    logits: Leaf


@lru_cache(maxsize=16)
def draft_memory(model: Target) -> Memory:
    """The committed text in the draft model's cache; shared by drafters of every depth."""

    def init(batch: int, capacity: int) -> Drafting:
        logits = jnp.zeros((batch, model.vocab_size), jnp.float32)
        return Drafting(model.init_cache(batch, capacity), jnp.zeros(batch, jnp.int32), logits)

    def update(params: Params, state: Drafting, committed: Committed, features: tuple[Array, ...]) -> Drafting:
        count = committed.count
        positions = state.length[:, None] + jnp.arange(committed.tokens.shape[1])[None, :]
        at = jnp.maximum(count - 1, 0)[:, None]
        logits, _, cache = model.forward(params.drafter, committed.tokens, state.cache, positions, None, at, ())
        length = state.length + count
        logits = jnp.where((count > 0)[:, None], logits[:, 0], state.logits)
        return Drafting(model.set_length(cache, length), length, logits)

    return Memory(init, update)


@lru_cache(maxsize=64)
def draft_model(
    model: Target, depth: int = 3, candidates: int = 1, sample: bool = True, vocab_size: int | None = None
) -> Drafter:
    """A drafter that runs `model`; its parameters are `generate`'s `drafter_params`.

    Args:
        model: the draft model as a target (`target_of(lm)` for a loaded one).
        depth: drafted tokens a step.
        candidates: chains drafted side by side; their first tokens are drawn without replacement.
        sample: draw from the processed law of each row (the q of rejection sampling), or always take the arg-max.
        vocab_size: width of the main model's logits, if its padding differs from the draft model's.

    Raises:
        UserError: depth or candidates below 1, or more candidates than tokens.
    """
    V = model.vocab_size if vocab_size is None else vocab_size
    real = min(model.emit_vocab, V)
    if depth < 1 or not 1 <= candidates <= real:
        raise UserError(f"depth is {depth} and candidates {candidates}, expected from 1, and up to {real} candidates")
    parents = tree.candidates(candidates, depth)

    def over_main_vocabulary(logits_BRV: Array) -> Array:
        B, R = logits_BRV.shape[:2]
        padding = jnp.full((B, R, V - real), -jnp.inf)
        return jnp.concatenate([logits_BRV[:, :, :real], padding], axis=2)

    def propose(params: Params, state: Drafting, key_B: Array, law: Law) -> Drafted:
        B = state.length.shape[0]
        first = over_main_vocabulary(state.logits[:, None])[:, 0]
        tokens, q = draw_siblings(first, law, key_B, 1, candidates, sample)
        drafted, laws, cache = [tokens], [q], state.cache
        for level in range(1, depth):
            logits, cache = _score_level(model, params.drafter, state, cache, drafted, candidates)
            tokens, q = draw_each(over_main_vocabulary(logits), law, key_B, level + 1, sample)
            drafted.append(tokens)
            laws.append(q)
        q = jnp.concatenate([q for q in laws if q is not None], axis=1) if sample else None
        count = jnp.full(B, len(parents), jnp.int32)
        proposal = Proposal(jnp.concatenate(drafted, axis=1), q, count, parents, distinct=candidates > 1)
        return proposal, state.replace(cache=model.set_length(cache, state.length))

    wanted = model.params_like or (lambda: ANY)
    return Drafter("draft_model", depth, draft_memory(model), propose, parents, wanted)


def _score_level(model: Target, params: Any, state: Drafting, cache: Any, drafted: list[Array], candidates: int):
    """Logits behind the last drafted level f32 [B, C, V], and the cache with the drafts behind the committed text."""
    B, level = state.length.shape[0], len(drafted)
    if candidates == 1:  # earlier levels are in their slots already
        length = state.length + level - 1
        logits, _, cache = model.forward(
            params, drafted[-1], model.set_length(cache, length), length[:, None], None, None, ()
        )
        return logits, cache
    parents = tree.candidates(candidates, level)
    window = jnp.concatenate(drafted, axis=1)
    positions = state.length[:, None] + jnp.asarray(tree.levels(parents))[None, 1:] - 1
    mask = jnp.asarray(tree.ancestor_mask(parents)[1:, 1:])
    last = jnp.broadcast_to(jnp.arange(len(parents) - candidates, len(parents)), (B, candidates))
    logits, _, cache = model.forward(params, window, model.set_length(cache, state.length), positions, mask, last, ())
    return logits, cache
