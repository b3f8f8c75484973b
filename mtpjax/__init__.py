"""mtpjax: multi-token prediction and FP8 for language models in JAX.

    lm = mtpjax.load()
    out = mtpjax.generate(lm, ["...", "..."], max_new_tokens=64, drafter="ngram", depth=3)
    out.text, out.ids, out.stats

Dimension key, used in einsum strings and shape suffixes throughout:
B batch, T query length, S cache length, D model, N query heads, K KV heads, G = N / K, H head dim, F FFN, V vocab,
W verify window, C candidates, L layers, R rows of a product or places asked for.
"""

from mtpjax.decoding.generate import generate, stream
from mtpjax.io.lm import LM, load

__all__ = ["LM", "generate", "load", "stream"]
