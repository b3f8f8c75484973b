"""How good the next-token laws are: loss of a text, and distance to the laws of a reference model.

Every figure is teacher-forced: the text is given, and each token is scored under the law that the model had before it.
A text longer than the context is scored in windows that overlap by half, so that no token but the first few is judged
with less than half a context before it. Logits are made `CHUNK` places at a time, through the target's window pass and
its cache (the same arithmetic that generates), and reduced at once: no [T, V] array is ever held.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from mtpjax.decoding.generate import target_of
from mtpjax.decoding.request import bucket
from mtpjax.decoding.target import Cache, Target
from mtpjax.errors import UserError
from mtpjax.io.lm import LM

CHUNK = 128


@dataclass(frozen=True)
class Scores:
    """Figures of tokens 1, 2, ... of a text, in order; token 0 has no law before it.

    nll: float64 [T - 1], nats. best: int64 [T - 1], the arg-max id. margin: float64 [T - 1], the best logit less the
    second best: a near-tie is where rounding may turn a greedy choice.
    """

    nll: np.ndarray
    best: np.ndarray
    margin: np.ndarray


@dataclass(frozen=True)
class Distance:
    """One model's laws against a reference's on the same text.

    kl: mean KL(reference || model), nats a token. top1_agreement: share of places with the same arg-max. tokens: how
    many places.
    """

    kl: float
    top1_agreement: float
    tokens: int


def nll(lm: LM, text: str) -> float:
    """Mean negative log-likelihood of a text, nats a token. UserError for a text of fewer than two tokens."""
    return float(score(lm, encode(lm, text)).nll.mean())


def encode(lm: LM, text: str) -> list[int]:
    """Ids of a text that is data: control tokens written in it are plain characters."""
    return lm.tokenizer.encode(text, special=False)


def score(lm: LM, ids: Sequence[int]) -> Scores:
    """Score every token of `ids` but the first. UserError for fewer than two, or an id outside the vocabulary."""
    parts = [_figures(logits, jnp.asarray(ids[at : at + len(logits)])) for at, logits in laws(lm, ids)]
    joined = [np.concatenate([np.asarray(part[i]) for part in parts]) for i in range(3)]
    return Scores(joined[0].astype(np.float64), joined[1].astype(np.int64), joined[2].astype(np.float64))


def compare(lm: LM, reference: LM, ids: Sequence[int]) -> Distance:
    """Distance of `lm`'s laws to those of `reference` on a text. UserError where the vocabularies differ."""
    if lm.tokenizer.vocab_size != reference.tokenizer.vocab_size:
        raise UserError(
            f"vocabularies of {lm.tokenizer.vocab_size} and {reference.tokenizer.vocab_size} tokens can't be compared"
        )
    kl, same = [], []
    for (_, ours), (_, theirs) in zip(laws(lm, ids), laws(reference, ids), strict=True):
        chunk_kl, chunk_same = _distance(ours, theirs)
        kl.append(np.asarray(chunk_kl, np.float64))
        same.append(np.asarray(chunk_same))
    joined = np.concatenate(kl)
    return Distance(float(joined.mean()), float(np.concatenate(same).mean()), len(joined))


def laws(lm: LM, ids: Sequence[int], chunk: int = CHUNK) -> Iterator[tuple[int, Array]]:
    """(t, logits f32 [n, V]): the logits before tokens t, t + 1, ..., t + n - 1 of `ids`, until all have been seen.

    Ids that are never emitted (padding of the embedding) have -inf.
    """
    target = target_of(lm)
    wrong = next((i for i in ids if not 0 <= i < target.vocab_size), None)
    if len(ids) < 2 or wrong is not None:
        what = f"holds id {wrong}, expected ids below {target.vocab_size}" if wrong is not None else "is too short"
        raise UserError(f"the text to score {what}; at least two tokens are needed")
    for begin, end, first in windows(len(ids), target.max_context):
        for at, logits in _window_laws(target, lm.params, ids[begin : end - 1], chunk):
            skip = max(first - (begin + at + 1), 0)
            if skip < len(logits):
                yield begin + at + 1 + skip, logits[skip:] if skip else logits


def windows(tokens: int, context: int) -> Iterator[tuple[int, int, int]]:
    """(begin, end, first): read tokens begin..end-1 and score first..end-1; together each of 1..tokens-1 once."""
    if context < 2:
        raise UserError(f"the context is {context}, expected at least 2 to score a text")
    begin, first = 0, 1
    while first < tokens:
        end = min(begin + context, tokens)
        yield begin, end, first
        begin, first = begin + max(context // 2, 1), end


def _window_laws(target: Target, params: Any, ids: Sequence[int], chunk: int) -> Iterator[tuple[int, Array]]:
    padded = np.zeros(-(-len(ids) // chunk) * chunk, np.int32)
    padded[: len(ids)] = ids
    cache = target.init_cache(1, bucket(len(padded)))
    for start in range(0, len(ids), chunk):
        window = jnp.asarray(padded[None, start : start + chunk])
        logits, cache = _pass(params, cache, window, jnp.int32(start), target=target)
        yield start, logits[: len(ids) - start]


@partial(jax.jit, static_argnames="target", donate_argnames="cache")
def _pass(params: Any, cache: Cache, ids_1C: Array, start: Array, *, target: Target) -> tuple[Array, Cache]:
    cache = target.set_length(cache, start[None])
    positions = start + jnp.arange(ids_1C.shape[1])[None, :]
    logits, _, cache = target.forward(params, ids_1C, cache, positions, None, None, ())
    return jnp.where(jnp.arange(target.vocab_size)[None, :] < target.emit_vocab, logits[0], -jnp.inf), cache


@jax.jit
def _figures(logits_nV: Array, ids_n: Array) -> tuple[Array, Array, Array]:
    own = jnp.take_along_axis(logits_nV, ids_n[:, None], axis=1)[:, 0]
    top, best = jax.lax.top_k(logits_nV, 2)
    return jax.nn.logsumexp(logits_nV, axis=1) - own, best[:, 0], top[:, 0] - top[:, 1]


@jax.jit
def _distance(ours_nV: Array, theirs_nV: Array) -> tuple[Array, Array]:
    log_q, log_p = jax.nn.log_softmax(ours_nV), jax.nn.log_softmax(theirs_nV)
    p = jnp.exp(log_p)
    terms = jnp.where(p > 0, p * (log_p - log_q), 0.0)
    return jnp.sum(terms, axis=1), jnp.argmax(ours_nV, axis=1) == jnp.argmax(theirs_nV, axis=1)
