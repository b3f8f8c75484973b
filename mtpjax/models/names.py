"""The tree of a decoder's parameters, and what GGUF and Hugging Face files call each leaf.

A path is a tuple of keys in the nested dict that `Transformer.apply` takes, e.g. ("layers_3", "attn", "q", "weight").
Weights are [out, in], as in both file formats, so no loader transposes anything. The only reordering is that of the
rotary rows (see `interleaved_to_half_split`).
"""

from collections.abc import Iterator
from typing import Final

import numpy as np

from mtpjax.models.config import ModelConfig

type Path = tuple[str, ...]

# (path below the model or below one layer) -> (name in GGUF, name in Hugging Face files), without the ending
_TOP: Final = {
    "embed": ("token_embd", "model.embed_tokens"),
    "final_norm": ("output_norm", "model.norm"),
    "head": ("output", "lm_head"),
}
_LAYER: Final = {
    "attn_norm": ("attn_norm", "input_layernorm"),
    "attn.q": ("attn_q", "self_attn.q_proj"),
    "attn.k": ("attn_k", "self_attn.k_proj"),
    "attn.v": ("attn_v", "self_attn.v_proj"),
    "attn.o": ("attn_output", "self_attn.o_proj"),
    "attn.q_norm": ("attn_q_norm", "self_attn.q_norm"),
    "attn.k_norm": ("attn_k_norm", "self_attn.k_norm"),
    "mlp_norm": ("ffn_norm", "post_attention_layernorm"),
    "mlp.gate": ("ffn_gate", "mlp.gate_proj"),
    "mlp.up": ("ffn_up", "mlp.up_proj"),
    "mlp.down": ("ffn_down", "mlp.down_proj"),
}


def _layer_shapes(config: ModelConfig) -> Iterator[tuple[Path, tuple[int, ...]]]:
    d, f, h = config.d_model, config.d_ff, config.head_dim
    q, kv = config.n_heads * h, config.n_kv_heads * h
    yield ("attn_norm", "scale"), (d,)
    for name, rows, columns, bias in (
        ("q", q, d, config.qkv_bias),
        ("k", kv, d, config.qkv_bias),
        ("v", kv, d, config.qkv_bias),
        ("o", d, q, config.o_bias),
    ):
        yield ("attn", name, "weight"), (rows, columns)
        if bias:
            yield ("attn", name, "bias"), (rows,)
    if config.qk_norm:
        yield ("attn", "q_norm", "scale"), (h,)
        yield ("attn", "k_norm", "scale"), (h,)
    yield ("mlp_norm", "scale"), (d,)
    for name, rows, columns in (("gate", f, d), ("up", f, d), ("down", d, f)):
        yield ("mlp", name, "weight"), (rows, columns)
        if config.mlp_bias:
            yield ("mlp", name, "bias"), (rows,)


def param_shapes(config: ModelConfig) -> dict[Path, tuple[int, ...]]:
    """Every parameter of the decoder with its shape, in the order of computation."""
    shapes: dict[Path, tuple[int, ...]] = {("embed", "weight"): (config.vocab_size, config.d_model)}
    layer = list(_layer_shapes(config))
    for i in range(config.n_layers):
        shapes |= {(f"layers_{i}", *path): shape for path, shape in layer}
    shapes["final_norm", "scale"] = (config.d_model,)
    if not config.tie_embeddings:
        shapes["head", "weight"] = (config.vocab_size, config.d_model)
    return shapes


def _split(path: Path) -> tuple[str | None, str, str]:
    """(layer number or None, dotted module, ending of the name in files)."""
    ending = "bias" if path[-1] == "bias" else "weight"  # norms call their vector `scale`, files call it weight
    if path[0].startswith("layers_"):
        return path[0].removeprefix("layers_"), ".".join(path[1:-1]), ending
    return None, path[0], ending


def gguf_name(path: Path) -> str:
    """Name of a parameter in a GGUF file, e.g. `blk.3.attn_q.weight`."""
    layer, module, ending = _split(path)
    return f"{_TOP[module][0]}.{ending}" if layer is None else f"blk.{layer}.{_LAYER[module][0]}.{ending}"


def hf_name(path: Path) -> str:
    """Name of a parameter in a Hugging Face file, e.g. `model.layers.3.self_attn.q_proj.weight`."""
    layer, module, ending = _split(path)
    return f"{_TOP[module][1]}.{ending}" if layer is None else f"model.layers.{layer}.{_LAYER[module][1]}.{ending}"


def is_rotary(path: Path) -> bool:
    """Whether the rows of this parameter carry rotary pairs (weights and biases of q and k)."""
    return path[1:-1] in (("attn", "q"), ("attn", "k"))


def interleaved_to_half_split(rows: np.ndarray, head_dim: int) -> np.ndarray:
    """Reorder rows [heads * H, ...] from rotary pairs (2j, 2j+1) to pairs (j, j + H/2), head by head.

    GGUF files of architecture `llama` and llama2.c checkpoints rotate neighbours; Hugging Face files, Qwen's GGUF
    files and this package rotate the two halves. Row 2j + s of a head becomes row s * H/2 + j.
    """
    pairs = rows.reshape(-1, head_dim // 2, 2, *rows.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)
