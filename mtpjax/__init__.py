"""mtpjax: multi-token prediction and FP8 for language models in JAX.

Dimension key, used in einsum strings and shape suffixes throughout:
B batch, T query length, S cache length, D model, N query heads, K KV heads, G = N / K, H head dim, F FFN, V vocab,
W verify window, C candidates, L layers.
"""
