"""Settings of model files: honoured, or refused by name."""

import math

import numpy as np
import pytest

from mtpjax.errors import UserError
from mtpjax.models.config import RopeConfig
from mtpjax.models.families import config_from_gguf, config_from_hf
from mtpjax.models.names import gguf_name, hf_name, param_shapes

GGUF = {
    "general.architecture": "llama",
    "llama.context_length": 128,
    "llama.embedding_length": 32,
    "llama.block_count": 2,
    "llama.feed_forward_length": 44,
    "llama.attention.head_count": 4,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
}
SHAPES = {"token_embd.weight": (99, 32), "blk.0.x": (1,), "blk.1.x": (1,)}


def gguf(divisors=None, shapes=None, **changes):
    dotted = {key.replace("__", "."): value for key, value in changes.items()}
    metadata = {key: value for key, value in (GGUF | dotted).items() if value is not None}
    return config_from_gguf(metadata, SHAPES if shapes is None else shapes, divisors, "f.gguf")


def llama(**changes):
    return gguf(**{f"llama.{key.replace('__', '.')}": value for key, value in changes.items()})


HF = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 99,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 44,
    "max_position_embeddings": 128,
}


def hf(tensors=("lm_head.weight", "a", "b"), **changes):
    return config_from_hf(HF | changes, tensors, "config.json")


def test_defaults_of_absent_keys():
    c = gguf()
    assert (c.n_kv_heads, c.head_dim, c.vocab_size, c.rope) == (4, 8, 99, RopeConfig())
    assert c.tie_embeddings
    d = hf()
    assert (d.n_kv_heads, d.head_dim, d.norm_eps, d.tie_embeddings) == (4, 8, 1e-6, False)
    assert hf(("a", "b")).tie_embeddings
    assert hf(architectures=["Qwen3ForCausalLM"], num_attention_heads=32).head_dim == 128
    assert hf(architectures=["Qwen2ForCausalLM"], num_key_value_heads=2).qkv_bias
    assert not hf(architectures=["Qwen2ForCausalLM"], num_key_value_heads=2).o_bias
    mistral = {"architectures": ["MistralForCausalLM"], "num_attention_heads": 16, "sliding_window": None}
    assert hf(**mistral).n_kv_heads == 8


def test_biases_by_tensors_or_config():
    c = gguf(shapes=SHAPES | {"blk.0.attn_q.bias": (32,), "blk.0.ffn_gate.bias": (44,), "output.weight": (99, 32)})
    assert (c.qkv_bias, c.o_bias, c.mlp_bias, c.tie_embeddings) == (True, False, True, False)
    c = hf(attention_bias=True, mlp_bias=True)
    assert (c.qkv_bias, c.o_bias, c.mlp_bias) == (True, True, True)
    assert hf(("model.layers.0.self_attn.q_proj.bias", "b")).qkv_bias


def test_a_value_per_layer_counts_if_all_are_equal():
    assert llama(feed_forward_length=np.array([44, 44])).d_ff == 44
    with pytest.raises(UserError, match="layers of different shapes"):
        llama(feed_forward_length=np.array([44, 48]))


def test_rope_of_gguf():
    assert llama(rope__scaling__type="none").rope.kind == "default"
    assert llama(rope__scaling__factor=4.0).rope == RopeConfig(kind="linear", factor=4.0)
    assert llama(rope__scale_linear=2.0).rope == RopeConfig(kind="linear", factor=2.0)
    yarn = {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0}
    assert llama(**yarn).rope == RopeConfig(kind="yarn", factor=4.0, original_context=128)
    full = llama(**yarn, rope__scaling__original_context_length=64, rope__scaling__attn_factor=0.5).rope
    assert full.original_context == 64
    assert full.attention_factor == pytest.approx(0.5 * (1 + 0.1 * math.log(4)))
    assert gguf((1.0, 1.0, 1.0, 1.0)).rope.kind == "default"
    assert gguf((1.0, 1.0, 2.0, 8.0)).rope == RopeConfig(kind="llama3", freq_divisors=(1.0, 1.0, 2.0, 8.0))
    assert llama(rope__freq_base=5e5).rope.theta == 5e5


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("kind_key", ["type", "rope_type"])
def test_rope_of_hugging_face_in_both_spellings(key, kind_key):
    def rope(**values):
        return hf(**{key: {kind_key: values.pop("kind"), **values}}).rope

    assert rope(kind="default") == RopeConfig()
    assert rope(kind="linear", factor=2) == RopeConfig(kind="linear", factor=2.0)
    llama3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    assert rope(kind="llama3", **llama3) == RopeConfig(kind="llama3", factor=8.0, original_context=64)
    assert rope(kind="yarn", factor=4.0).original_context == 128
    deepseek = rope(kind="yarn", factor=4.0, mscale=1.0, mscale_all_dim=0.5)
    assert deepseek.attention_factor == pytest.approx((0.1 * math.log(4) + 1) / (0.05 * math.log(4) + 1))
    assert rope(kind="yarn", factor=4.0, attention_factor=0.7).attention_factor == 0.7


def test_rope_theta_in_either_place_and_the_stretched_context():
    assert hf(rope_theta=1e5).rope.theta == 1e5
    assert hf(rope_parameters={"rope_type": "default", "rope_theta": 1e6}).rope.theta == 1e6
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    assert hf(rope_scaling=yarn).max_context == 512
    assert hf(rope_scaling=yarn, max_position_embeddings=512).max_context == 512


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"general__architecture": "mamba"}, "architecture 'mamba' isn't supported; supported: llama, qwen2, qwen3"),
        ({"general__architecture": None}, "required key 'general.architecture' is missing"),
        ({"llama__context_length": None}, "required key 'llama.context_length' is missing"),
        ({"llama__embedding_length": "32"}, "llama.embedding_length is '32', expected an integer"),
        ({"llama__embedding_length": True}, "expected an integer"),
        ({"llama__block_count": 10**6}, "says 1000000 layers, but there are only 3 tensors"),
        ({"llama__block_count": 2**40}, "expected an integer"),
        ({"llama__attention__head_count": 5}, "width 32 isn't a multiple of 5 heads"),
        ({"llama__attention__head_count": 0}, "expected an integer"),
        ({"llama__attention__head_count_kv": 3}, "4 query heads aren't a multiple of 3"),
        ({"llama__attention__key_length": 7}, "head size 7 is odd"),
        ({"llama__attention__value_length": 16}, "expected the head size 8"),
        ({"llama__rope__dimension_count": 4}, "expected the head size 8"),
        ({"llama__attention__layer_norm_rms_epsilon": math.nan}, "finite positive number"),
        ({"llama__attention__layer_norm_rms_epsilon": 0.0}, "finite positive number"),
        ({"llama__attention__causal": False}, "expected true"),
        ({"llama__attention__sliding_window": 64}, "attention.sliding_window = 64 isn't supported"),
        ({"llama__expert_count": 8}, "expert_count = 8 isn't supported"),
        ({"llama__attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0 isn't supported"),
        ({"llama__final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"llama__logit_scale": 2.0}, "logit_scale"),
        ({"llama__residual_scale": 0.2}, "residual_scale"),
        ({"llama__embedding_scale": 12.0}, "embedding_scale"),
        ({"llama__attention__scale": 0.1}, "attention.scale"),
        ({"llama__some_new_thing": 1}, "some_new_thing = 1 isn't supported"),
        ({"llama__rope__scaling__type": "longrope"}, "rope type 'longrope' isn't supported; supported: none, linear"),
        ({"llama__rope__scaling__attn_factor": 1.5}, "without rope type yarn"),
        ({"llama__rope__dimension_sections": np.array([1, 2])}, "dimension_sections"),
        ({"divisors": (1.0, 2.0)}, "must hold 4 positive finite numbers"),
        ({"divisors": (1.0, 2.0, 3.0, math.inf)}, "must hold 4 positive finite numbers"),
        ({"divisors": (2.0,) * 4, "llama__rope__scaling__factor": 2.0}, "together with rope type linear"),
        ({"shapes": {"x": (1,)}}, "'token_embd.weight' is missing"),
    ],
)
def test_gguf_refusals(changes, words):
    with pytest.raises(UserError, match=words) as error:
        gguf(**changes)
    assert str(error.value).startswith("f.gguf: ")
    assert "\n" not in str(error.value)


def test_neutral_values_are_no_settings():
    assert llama(
        expert_count=0, attention__sliding_window=0, logit_scale=0.0, tensor_data_layout="Meta AI original pth"
    )
    assert hf(num_local_experts=1, partial_rotary_factor=1.0, sliding_window=None, hidden_act="silu", auto_map={})
    assert hf(architectures=["Qwen2ForCausalLM"], num_key_value_heads=2, sliding_window=16, use_sliding_window=False)
    assert hf(layer_types=["full_attention"] * 2, quantization_config=None, attention_multiplier=None)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architecture 'GPT2LMHeadModel' isn't supported; supported: Llama"),
        ({"architectures": ["SmolLM3ForCausalLM"]}, "isn't supported"),
        ({"architectures": None}, "expected a list with one of"),
        ({"architectures": [1]}, "expected a list with one of"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' isn't supported; supported: silu"),
        ({"hidden_size": 32.0}, "hidden_size is 32.0, expected an integer"),
        ({"num_hidden_layers": -1}, "expected an integer"),
        ({"rope_theta": 1e400}, "finite positive number"),
        ({"rope_theta": 10**400}, "finite positive number"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope type 'dynamic' isn't supported"),
        ({"rope_scaling": {"type": "su"}}, "rope type 'su' isn't supported"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope type 'longrope' isn't supported"),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [1]}}, "rope type 'mrope' isn't supported"),
        ({"rope_scaling": {"mrope_section": [1]}}, "rope type 'mrope' isn't supported"),
        ({"rope_scaling": {"rope_type": "linear"}}, "'factor' is missing"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "'original_max_position_embeddings' is missing"),
        ({"rope_scaling": "linear"}, "one flat set"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "one flat set"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, "truncate": False}}, "truncate"),
        ({"rope_scaling": {"type": "yarn", "factor": 1e300}}, "out of range"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5 isn't supported"),
        ({"num_local_experts": 8}, "num_local_experts = 8 isn't supported"),
        ({"n_routed_experts": 64}, "n_routed_experts"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ({"embedding_multiplier": 12.0}, "embedding_multiplier"),
        ({"residual_multiplier": 0.2}, "residual_multiplier"),
        ({"attention_multiplier": 0.1}, "attention_multiplier"),
        ({"logits_scaling": 8.0}, "logits_scaling"),
        ({"num_nextn_predict_layers": 1}, "num_nextn_predict_layers"),
        ({"auto_map": {"AutoModel": "x.py"}}, "auto_map"),
        (
            {"quantization_config": {"quant_method": "fp8"}},
            "quantised checkpoints .quant_method 'fp8'. can't be read yet",
        ),
        ({"layer_types": ["sliding_attention"]}, "layer_types"),
        (
            {"architectures": ["MistralForCausalLM"], "num_key_value_heads": 2, "sliding_window": 64},
            "sliding_window is 64",
        ),
        (
            {"architectures": ["MistralForCausalLM"], "max_position_embeddings": 8192, "num_key_value_heads": 2},
            "sliding_w",
        ),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "num_key_value_heads": 2,
                "sliding_window": 64,
                "use_sliding_window": True,
            },
            "sliding_window is 64",
        ),
        ({"tie_word_embeddings": 1}, "expected true or false"),
    ],
)
def test_hugging_face_refusals(changes, words):
    with pytest.raises(UserError, match=words) as error:
        hf(**changes)
    assert str(error.value).startswith("config.json")
    assert "\n" not in str(error.value)


def test_names():
    paths = list(param_shapes(hf(attention_bias=True)))
    assert len(set(map(gguf_name, paths))) == len(set(map(hf_name, paths))) == len(paths)
    assert gguf_name(("layers_1", "attn", "q", "bias")) == "blk.1.attn_q.bias"
    assert hf_name(("layers_1", "attn", "q_norm", "scale")) == "model.layers.1.self_attn.q_norm.weight"
    assert hf_name(("embed", "weight")) == "model.embed_tokens.weight"
    assert gguf_name(("head", "weight")) == "output.weight"
