"""mtpjax: multi-token prediction and FP8 for language models in JAX.

    lm = mtpjax.load()
    out = mtpjax.generate(lm, ["...", "..."], max_new_tokens=64, drafter="ngram", depth=3)
    out.text, out.ids, out.stats

Dimension key, used in einsum strings and shape suffixes throughout:
B batch, T query length, S cache length, D model, N query heads, K KV heads, G = N / K, H head dim, F FFN, V vocab,
W verify window, C candidates, L layers, R rows of a product or places asked for.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mtpjax.compile_cache import keep_compiled
    from mtpjax.decoding.generate import generate, resume, stream
    from mtpjax.io.lm import LM, load

__all__ = ["LM", "generate", "keep_compiled", "load", "resume", "stream"]

_HOME = {
    "LM": "mtpjax.io.lm",
    "generate": "mtpjax.decoding.generate",
    "keep_compiled": "mtpjax.compile_cache",
    "load": "mtpjax.io.lm",
    "resume": "mtpjax.decoding.generate",
    "stream": "mtpjax.decoding.generate",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for, so that `mtpjax --help` need not wait for JAX."""
    if name not in _HOME:
        raise AttributeError(f"module 'mtpjax' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
