"""What a decoder of the Llama / Qwen / SmolLM family is, read from its file and never hard-coded."""

from typing import Literal

from mtpjax.config import Config


class RopeConfig(Config):
    """Rotary position embedding: base frequency and long-context scaling.

    `kind` names the scaling; `default` has none. `freq_divisors` (length head_dim / 2) are per-frequency divisors
    that a GGUF file ships as `rope_freqs.weight`; they replace the computed ones of `llama3`.
    """

    theta: float = 10_000.0
    kind: Literal["default", "linear", "llama3", "yarn"] = "default"
    factor: float = 1.0
    original_context: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    freq_divisors: tuple[float, ...] | None = None


class ModelConfig(Config):
    """Shape and options of one decoder-only transformer (see `mtpjax.models.transformer`)."""

    family: str = "llama"
    vocab_size: int
    d_model: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    d_ff: int
    max_context: int
    norm_eps: float = 1e-5
    rope: RopeConfig = RopeConfig()
    tie_embeddings: bool = True
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
