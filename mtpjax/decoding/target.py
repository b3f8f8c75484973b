"""The target seam: the main model as a record of pure functions.

Any model becomes a target by supplying these: our `Transformer`, a user's own Flax model, or a table that is a law.
The loops call `forward` at every width: a prefill chunk, one decode step, a verify window.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from mtpjax.models import cache as kv
from mtpjax.models.transformer import Transformer

Cache = Any


def _replace_length(cache: Cache, length_B: Array) -> Cache:
    return cache.replace(length=length_B)


@dataclass(frozen=True)
class Target:
    """A language model as the decoding loops see it. Equal records share one compiled loop.

    Attributes:
        forward: ``(params, ids_BW, cache, positions_BW, mask, logits_at_BR, features) -> (logits, features, cache)``.
            Scores a window behind each row's committed tokens and writes it to the cache without committing it.
            `mask` is None (causal) or bool [W, W] or [B, W, W]; `logits_at` is None (all) or int32 [B, R], the window's
            offsets whose logits are wanted; `features` is a static tuple of layers whose hidden states a drafter
            asked for. Logits are f32 [B, W or R, V].
        init_cache: ``(batch, capacity) -> cache``, any pytree.
        vocab_size: V, the width of the logits.
        max_context: longest sequence, prompt and output together.
        emit_vocab: ids at or above this are padding of the vocabulary and never emitted.
        set_length: ``(cache, length_B) -> cache``: commit or roll back to `length` tokens in each row.
        keep_path: ``(cache, path_BD) -> cache``: of a window behind the committed tokens, move what lies at the offsets
            `path` int32 [B, depth] to offsets 1, 2, ...; None where the cache can't, and trees are refused.
        params_like: ``() -> pytree`` of the shapes of its parameters, against which a draft model's are checked; None
            where they aren't known.
    """

    forward: Callable[..., tuple[Array, tuple[Array, ...], Cache]]
    init_cache: Callable[[int, int], Cache]
    vocab_size: int
    max_context: int
    emit_vocab: int
    set_length: Callable[[Cache, Array], Cache] = _replace_length
    keep_path: Callable[[Cache, Array], Cache] | None = None
    params_like: Callable[[], Any] | None = None


@lru_cache(maxsize=64)
def target_from_model(model: Transformer, emit_vocab: int | None = None, cache_dtype: str | None = None) -> Target:
    """The target of one of our models; remembered, so that the same model meets its compiled loop again."""

    def forward(params, ids_BW, cache, positions_BW, mask, logits_at_BR, features) -> Any:
        return model.apply(
            {"params": params}, ids_BW, cache, positions_BW, mask, logits_at=logits_at_BR, features=features
        )

    vocab, dtype = model.config.vocab_size, None if cache_dtype is None else jnp.dtype(cache_dtype)
    return Target(
        forward=forward,
        init_cache=lambda batch, capacity: model.init_cache(batch, capacity, dtype),
        vocab_size=vocab,
        max_context=model.config.max_context,
        emit_vocab=min(emit_vocab or vocab, vocab),
        keep_path=kv.keep_path,
        params_like=lambda: jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"],
    )
