"""From what a model file says about itself to `ModelConfig`, for GGUF metadata and Hugging Face config.json.

The rule of this file: **a setting that changes the computation is either honoured or refused by name.** A decoder
that silently ignores a logit cap, a sliding window or an unknown rotary scaling still writes fluent text, so nobody
notices. Hence

- GGUF: every key below the architecture's own prefix must be known here, or hold a neutral value (0, false, "");
- Hugging Face: config.json has no closed list of keys, so those of every known variation are checked for neutrality;
- tensors: whoever assembles the parameters refuses tensors that no parameter asked for (`mtpjax.io.assemble`).

Absent keys get the default of the format's own definition (llama.cpp for GGUF, the transformers class for Hugging
Face), never a guess of ours. Formats: github.com/ggml-org/ggml/blob/master/docs/gguf.md; the configuration classes of
transformers. Rejected: a registry with one class per family. The families differ in six booleans, which fit a table.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

from mtpjax.errors import UserError
from mtpjax.models.config import ModelConfig, RopeConfig
from mtpjax.models.fields import LARGEST, Fields, shown


@dataclass(frozen=True)
class Family:
    """What a family's name implies. `interleaved`: its GGUF files hold q and k rows in interleaved rotary order."""

    name: str
    interleaved: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    head_dim: int | None = None
    default_kv_heads: int | None = None  # of the transformers class, where it isn't the number of query heads
    default_context: int = 2048
    sliding_window: int | None = None


# The Mistral and SmolLM families are converted to GGUF under the name of `llama`.
GGUF_FAMILIES: Final = {
    "llama": Family("llama", interleaved=True),
    "qwen2": Family("qwen2"),
    "qwen3": Family("qwen3", qk_norm=True),
}
HF_FAMILIES: Final = {
    "LlamaForCausalLM": Family("llama"),
    "MistralForCausalLM": Family("mistral", default_kv_heads=8, default_context=131072, sliding_window=4096),
    "Qwen2ForCausalLM": Family("qwen2", qkv_bias=True, default_kv_heads=32, default_context=32768),
    "Qwen3ForCausalLM": Family("qwen3", qk_norm=True, head_dim=128, default_kv_heads=32, default_context=32768),
}

# fmt: off
_GGUF_KNOWN: Final = frozenset((
    "context_length", "embedding_length", "block_count", "feed_forward_length", "vocab_size", "tensor_data_layout",
    "attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length",
    "attention.causal", "attention.layer_norm_rms_epsilon", "rope.dimension_count", "rope.freq_base",
    "rope.scale_linear", "rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length",
    "rope.scaling.finetuned", "rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor",
    "rope.scaling.yarn_ext_factor", "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow",
))
# fmt: on

# Hugging Face keys which change the computation, with the values (besides null) at which they don't.
_HF_NEUTRAL: Final[Mapping[str, tuple[object, ...]]] = {
    "partial_rotary_factor": (1,),
    "num_local_experts": (0, 1),
    "num_experts": (0, 1),
    "n_routed_experts": (0, 1),
    "num_nextn_predict_layers": (0,),
    "attn_logit_softcapping": (0,),
    "final_logit_softcapping": (0,),
    "logit_scale": (1,),
    "logits_scaling": (1,),
    "embedding_multiplier": (1,),
    "residual_multiplier": (1,),
    "attention_multiplier": (),
    "query_pre_attn_scalar": (),
    "clip_qkv": (0,),
    "no_rope_layers": ((),),
    "use_mrope": (False,),
    "use_qk_norm": (False,),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "auto_map": ((),),
}
_ROPE_KINDS: Final = {"none": "default", "default": "default", "linear": "linear", "llama3": "llama3", "yarn": "yarn"}


def gguf_family(metadata: Mapping[str, Any], source: str) -> Family:
    """The family of a GGUF file."""
    name = Fields(metadata, source).text("general.architecture")
    if name not in GGUF_FAMILIES:
        raise _unsupported(source, "architecture", name, GGUF_FAMILIES)
    return GGUF_FAMILIES[name]


def hf_family(config: Mapping[str, Any], source: str) -> Family:
    """The family of a Hugging Face folder, by `architectures[0]`."""
    names = config.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise Fields(config, source).wrong("architectures", names, f"a list with one of {', '.join(HF_FAMILIES)}")
    if names[0] not in HF_FAMILIES:
        raise _unsupported(source, "architecture", names[0], HF_FAMILIES)
    return HF_FAMILIES[names[0]]


def config_from_gguf(
    metadata: Mapping[str, Any],
    tensors: Mapping[str, tuple[int, ...]],
    freq_divisors: tuple[float, ...] | None = None,
    source: str = "GGUF file",
) -> ModelConfig:
    """`ModelConfig` of a GGUF file.

    `tensors`: shapes [out, in] by name (biases and a tied head show only there, and the embedding gives the
    vocabulary); `freq_divisors`: the values of `rope_freqs.weight` where the file has it. UserError on anything
    missing, contradictory or unsupported.
    """
    family = gguf_family(metadata, source)
    arch = metadata["general.architecture"]
    prefix = f"{arch}."
    for key, value in metadata.items():
        if key.startswith(prefix) and key.removeprefix(prefix) not in _GGUF_KNOWN and not _neutral(value, (0, "")):
            raise UserError(f"{source}: setting {key} = {shown(value)} isn't supported by this decoder")
    fields = Fields(metadata, source)
    embed = tensors.get("token_embd.weight")
    if embed is None or len(embed) != 2:
        raise UserError(f"{source}: tensor 'token_embd.weight' is missing or not a matrix")
    n_heads = fields.integer(prefix + "attention.head_count")
    d_model = fields.integer(prefix + "embedding_length")
    head_dim = _head_dim(fields, n_heads, d_model, fields.integer(prefix + "attention.key_length", None))
    for key in ("attention.value_length", "rope.dimension_count"):
        if fields.integer(prefix + key, head_dim) != head_dim:
            raise fields.wrong(
                prefix + key, metadata[prefix + key], f"the head size {head_dim} (no other is supported)"
            )
    if not fields.boolean(prefix + "attention.causal", True):
        raise fields.wrong(prefix + "attention.causal", False, "true (this is a causal decoder)")
    context = fields.integer(prefix + "context_length")
    return _checked(
        source,
        len(tensors),
        family=family.name,
        vocab_size=embed[0],
        d_model=d_model,
        n_layers=fields.integer(prefix + "block_count"),
        n_heads=n_heads,
        n_kv_heads=fields.integer(prefix + "attention.head_count_kv", n_heads),
        head_dim=head_dim,
        d_ff=fields.integer(prefix + "feed_forward_length"),
        max_context=context,
        norm_eps=fields.number(prefix + "attention.layer_norm_rms_epsilon"),
        rope=_gguf_rope(fields, prefix, context, head_dim, freq_divisors),
        tie_embeddings="output.weight" not in tensors,
        qkv_bias="blk.0.attn_q.bias" in tensors,
        o_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_gate.bias" in tensors,
        qk_norm=family.qk_norm,
    )


def config_from_hf(config: Mapping[str, Any], tensors: Collection[str], source: str = "config.json") -> ModelConfig:
    """`ModelConfig` of a Hugging Face folder; `tensors`: names of the tensors present. UserError as for GGUF."""
    family = hf_family(config, source)
    fields = Fields(config, source)
    _refuse_hf_variations(fields, family)
    n_heads = fields.integer("num_attention_heads")
    d_model = fields.integer("hidden_size")
    head_dim = _head_dim(fields, n_heads, d_model, fields.integer("head_dim", family.head_dim))
    context = fields.integer("max_position_embeddings", family.default_context)
    rope = _hf_rope(fields, context)
    if rope.kind == "yarn":  # files state the length before or after stretching; both mean the stretched one
        context = max(context, int((rope.original_context or context) * rope.factor))
    attention_bias = family.name != "qwen2" and fields.boolean("attention_bias", False)
    layer0 = "model.layers.0."
    return _checked(
        source,
        len(tensors),
        family=family.name,
        vocab_size=fields.integer("vocab_size"),
        d_model=d_model,
        n_layers=fields.integer("num_hidden_layers"),
        n_heads=n_heads,
        n_kv_heads=fields.integer("num_key_value_heads", family.default_kv_heads or n_heads),
        head_dim=head_dim,
        d_ff=fields.integer("intermediate_size"),
        max_context=context,
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=rope,
        tie_embeddings=fields.boolean("tie_word_embeddings", "lm_head.weight" not in tensors),
        qkv_bias=family.qkv_bias or attention_bias or layer0 + "self_attn.q_proj.bias" in tensors,
        o_bias=attention_bias or layer0 + "self_attn.o_proj.bias" in tensors,
        mlp_bias=fields.boolean("mlp_bias", False) or layer0 + "mlp.gate_proj.bias" in tensors,
        qk_norm=family.qk_norm,
    )


def _unsupported(source: str, what: str, name: object, known: Collection[str]) -> UserError:
    return UserError(f"{source}: {what} {shown(name)} isn't supported; supported: {', '.join(known)}")


def _neutral(value: object, allowed: tuple[object, ...]) -> bool:
    """Whether `value` is absent or one of `allowed`; empty lists and dicts count as ()."""
    if value is None or (isinstance(value, (list, dict)) and not value and () in allowed):
        return True
    return isinstance(value, (bool, int, float, str)) and any(value == item for item in allowed)


def _head_dim(fields: Fields, n_heads: int, d_model: int, stated: int | None) -> int:
    """The stated head size, or d_model / n_heads; it must be even, since rotary embedding pairs its coordinates."""
    if stated is None and d_model % n_heads:
        raise UserError(f"{fields.source}: width {d_model} isn't a multiple of {n_heads} heads, and no head size given")
    head_dim = stated or d_model // n_heads
    if head_dim % 2:
        raise UserError(f"{fields.source}: head size {head_dim} is odd; rotary embedding needs an even one")
    return head_dim


def _checked(source: str, n_tensors: int, **values: Any) -> ModelConfig:
    """ModelConfig after the checks across fields. `n_tensors` bounds the layers, before anything is made per layer."""
    if values["n_heads"] % values["n_kv_heads"]:
        raise UserError(
            f"{source}: {values['n_heads']} query heads aren't a multiple of {values['n_kv_heads']} key-value heads"
        )
    if values["n_layers"] > n_tensors:
        raise UserError(f"{source}: says {values['n_layers']} layers, but there are only {n_tensors} tensors")
    if values["max_context"] > LARGEST:
        raise UserError(f"{source}: the context after rotary scaling, {values['max_context']}, is out of range")
    return ModelConfig(**values)


def _gguf_rope(
    fields: Fields, prefix: str, context: int, head_dim: int, divisors: tuple[float, ...] | None
) -> RopeConfig:
    """Rotary settings as llama.cpp reads them: a factor without a type is linear scaling, and the length before
    stretching is the context length unless given. Its YaRN multiplies the factors for attention by 1 + 0.1 ln(factor).
    """
    scaling = prefix + "rope.scaling."
    factor = fields.number(scaling + "factor", fields.number(prefix + "rope.scale_linear", 1.0), positive=False) or 1.0
    known = {name: name for name in ("none", "linear", "yarn")}
    kind = _ROPE_KINDS[_kind(fields, scaling + "type", known, "linear" if factor != 1.0 else "none")]
    attention = fields.number(scaling + "attn_factor", 1.0) * fields.number(scaling + "yarn_attn_factor", 1.0)
    if kind != "yarn" and attention != 1.0:
        raise UserError(f"{fields.source}: {scaling}attn_factor {attention} without rope type yarn isn't supported")
    if (ext := fields.number(scaling + "yarn_ext_factor", 1.0, positive=False)) != 1.0:
        raise fields.wrong(scaling + "yarn_ext_factor", ext, "1 (no other is supported)")
    rope: dict[str, Any] = {"theta": fields.number(prefix + "rope.freq_base", 10_000.0), "kind": kind}
    if kind == "linear":
        rope |= {"factor": factor}
    if kind == "yarn":
        rope |= {
            "factor": factor,
            "original_context": fields.integer(scaling + "original_context_length", context, low=0) or context,
            "beta_fast": fields.number(scaling + "yarn_beta_fast", 32.0),
            "beta_slow": fields.number(scaling + "yarn_beta_slow", 1.0),
            "attention_factor": attention * (1.0 + 0.1 * math.log(factor)) if attention != 1.0 else None,
        }
    if divisors is not None and any(value != 1.0 for value in divisors):
        if len(divisors) != head_dim // 2 or not all(math.isfinite(v) and v > 0 for v in divisors):
            raise UserError(f"{fields.source}: 'rope_freqs.weight' must hold {head_dim // 2} positive finite numbers")
        if kind != "default":
            raise UserError(f"{fields.source}: 'rope_freqs.weight' together with rope type {kind} isn't supported")
        rope |= {"kind": "llama3", "freq_divisors": divisors}
    return RopeConfig(**rope)


def _kind(fields: Fields, key: str, known: Collection[str], default: str) -> str:
    kind = fields.text(key, default)
    if kind not in known:
        raise _unsupported(fields.source, "rope type", kind, known)
    return kind


def _hf_rope(fields: Fields, context: int) -> RopeConfig:
    """Rotary settings in either spelling: `rope_theta` with `rope_scaling`, or the newer `rope_parameters`."""
    scaling: Any = fields.get("rope_scaling", {})
    parameters: Any = fields.get("rope_parameters", {})
    for key, value in (("rope_scaling", scaling), ("rope_parameters", parameters)):
        if not isinstance(value, dict) or any(isinstance(item, dict) for item in value.values()):
            raise fields.wrong(key, value, "one flat set of settings for all layers")
    both = Fields({**scaling, **parameters}, f"{fields.source} (rope_scaling)")
    if not _neutral(both.values.get("partial_rotary_factor"), (1,)):
        raise both.wrong("partial_rotary_factor", both.values["partial_rotary_factor"], "1 (no other is supported)")
    known = [name for name in _ROPE_KINDS if name != "none"]
    kind = _ROPE_KINDS[_kind(both, "rope_type", known, _kind(both, "type", known, "default"))]
    if kind == "default" and both.values.get("mrope_section"):
        raise _unsupported(both.source, "rope type", "mrope", known)
    rope: dict[str, Any] = {"theta": both.number("rope_theta", fields.number("rope_theta", 10_000.0)), "kind": kind}
    if kind != "default":
        rope["factor"] = both.number("factor")
    if kind == "llama3":
        rope |= {
            "original_context": both.integer("original_max_position_embeddings"),
            "low_freq_factor": both.number("low_freq_factor"),
            "high_freq_factor": both.number("high_freq_factor"),
        }
        if rope["high_freq_factor"] <= rope["low_freq_factor"]:
            raise both.wrong("high_freq_factor", rope["high_freq_factor"], f"more than {rope['low_freq_factor']}")
    if kind == "yarn":
        if not both.boolean("truncate", True):
            raise both.wrong("truncate", False, "true (no other is supported)")
        rope |= {
            "original_context": both.integer("original_max_position_embeddings", context),
            "beta_fast": both.number("beta_fast", 32.0),
            "beta_slow": both.number("beta_slow", 1.0),
            "attention_factor": _yarn_attention(both, rope["factor"]),
        }
    return RopeConfig(**rope)


def _yarn_attention(fields: Fields, factor: float) -> float | None:
    """YaRN's factor on cos and sin: given, or from DeepSeek's pair of multipliers; None means 1 + 0.1 ln(factor)."""
    stated = fields.number("attention_factor", None)
    scale, all_dim = (fields.number(key, 0.0, positive=False) for key in ("mscale", "mscale_all_dim"))
    if stated is not None or not scale or not all_dim:
        return stated
    grow = 0.1 * math.log(max(factor, 1.0))
    return (scale * grow + 1.0) / (all_dim * grow + 1.0)


def _refuse_hf_variations(fields: Fields, family: Family) -> None:
    """UserError for a setting that this decoder doesn't compute."""
    for key, neutral in _HF_NEUTRAL.items():
        if not _neutral(value := fields.values.get(key), neutral):
            raise UserError(f"{fields.source}: setting {key} = {shown(value)} isn't supported by this decoder")
    if (act := fields.text("hidden_act", "silu")) not in ("silu", "swish"):
        raise _unsupported(fields.source, "hidden_act", act, ("silu",))
    if (scheme := fields.get("quantization_config", None)) is not None:
        method = scheme.get("quant_method") if isinstance(scheme, dict) else scheme
        raise UserError(
            f"{fields.source}: quantised checkpoints (quant_method {shown(method)}) can't be read yet; "
            "give one stored in f32, bf16 or f16 and choose precision fp8 when loading"
        )
    layer_types = fields.get("layer_types", [])
    if not isinstance(layer_types, list) or any(kind != "full_attention" for kind in layer_types):
        raise fields.wrong("layer_types", layer_types, "full_attention in every layer (no other is supported)")
    # Mistral's window is on unless null; Qwen's is off unless switched on.
    absent = family.sliding_window if "sliding_window" not in fields.values else None
    window = fields.integer("sliding_window", absent)
    used = fields.boolean("use_sliding_window", family.name in ("llama", "mistral"))
    if used and window is not None and window < fields.integer("max_position_embeddings", family.default_context):
        raise fields.wrong("sliding_window", window, "null (sliding-window attention isn't supported)")
