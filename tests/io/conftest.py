"""Small models in every file layout, written by the tests themselves from one tree of parameters."""

import json
import struct
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
import tokenizers
from safetensors.numpy import save_file

from mtpjax.io.bpe import BYTES
from mtpjax.models.config import ModelConfig
from mtpjax.models.names import gguf_name, hf_name, is_rotary, param_shapes

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["t h", "th e", "Ġ the", "i n", "Ġ a", "a n", "an d"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def half_split_to_interleaved(rows, head_dim):
    halves = rows.reshape(-1, 2, head_dim // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape).copy()


def flat_random(config, seed=0):
    """Random parameters by path, float32, rotary rows in half-split order."""
    rng = np.random.default_rng(seed)
    return {path: rng.normal(0, 0.2, shape).astype(np.float32) for path, shape in param_shapes(config).items()}


def bpe_vocabulary(size):
    tokens = [*SPECIALS, *BYTES, *(merge.replace(" ", "") for merge in MERGES)]
    return tokens + [f"<unused{i}>" for i in range(size - len(tokens))]


def bpe_metadata(writer, size):
    tokens = bpe_vocabulary(size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in SPECIALS else 5 if token.startswith("<unused") else 1 for token in tokens])
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)


def write_gguf(path, config, flat, arch="llama", vocabulary=bpe_metadata, kind=None, extra=lambda writer: None):
    """A GGUF file of `flat`; `kind`: a type for the matrices; `vocabulary` and `extra` add metadata."""
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(config.max_context)
    writer.add_embedding_length(config.d_model)
    writer.add_block_count(config.n_layers)
    writer.add_feed_forward_length(config.d_ff)
    writer.add_head_count(config.n_heads)
    writer.add_head_count_kv(config.n_kv_heads)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_freq_base(config.rope.theta)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    vocabulary(writer, config.vocab_size)
    extra(writer)
    for name_path, array in flat.items():
        if arch == "llama" and is_rotary(name_path):
            array = half_split_to_interleaved(array, config.head_dim)
        if kind is None or array.ndim == 1:
            writer.add_tensor(gguf_name(name_path), array)
        else:
            writer.add_tensor(gguf_name(name_path), gguf.quants.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


def hf_config(config, **changes):
    values = {
        "architectures": [ARCHITECTURES[config.family]],
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.d_ff,
        "max_position_embeddings": config.max_context,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope.theta,
        "tie_word_embeddings": config.tie_embeddings,
        "hidden_act": "silu",
    }
    return values | changes


def write_tokenizer(folder, size):
    """tokenizer.json and its companions, the same vocabulary as `bpe_metadata`."""
    encoder = tokenizers.Tokenizer(
        tokenizers.models.BPE(
            {token: i for i, token in enumerate(bpe_vocabulary(size))},
            [(left, right) for left, right in map(str.split, MERGES)],
        )
    )
    encoder.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    encoder.decoder = tokenizers.decoders.ByteLevel()
    encoder.add_special_tokens(SPECIALS)
    (folder / "tokenizer.json").write_text(encoder.to_str(), "utf-8")
    settings = {"bos_token": "<|im_start|>", "eos_token": {"content": "<|im_end|>"}, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0]}))


def write_hf(folder, config, flat, dtype=np.float32, shards=1, tokenizer=True, **changes):
    """A Hugging Face folder of `flat`, in as many shards as asked for."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(hf_config(config, **changes)))
    tensors = [(hf_name(path), array.astype(dtype)) for path, array in flat.items()]
    if shards == 1:
        save_file(dict(tensors), folder / "model.safetensors")
    else:
        files = [f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)]
        for i, file in enumerate(files):
            save_file(dict(tensors[i::shards]), folder / file)
        weight_map = {name: files[i % shards] for i, (name, _) in enumerate(tensors)}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    if tokenizer:
        write_tokenizer(folder, config.vocab_size)
    return folder


def tiny_config(**changes):
    values = {
        "vocab_size": 272, "d_model": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "head_dim": 8, "d_ff": 44,
        "max_context": 64, "norm_eps": 1e-5,
    }  # fmt: skip
    return ModelConfig.model_validate(values | changes)


def read_stories(shared):
    """(config, flat parameters in half-split order, (token, score) pairs, reference) of the public stories260K."""
    folder = shared / "data" / "stories260k"
    data = (folder / "stories260K.bin").read_bytes()
    d, f, n_layers, n, k, v, context = struct.unpack("<7i", data[:28])
    config = ModelConfig(
        vocab_size=v, d_model=d, n_layers=n_layers, n_heads=n, n_kv_heads=k, head_dim=d // n, d_ff=f,
        max_context=context, norm_eps=1e-5,
    )  # fmt: skip
    values, at = np.frombuffer(data, "<f4", offset=28), 0

    def take(*shape):
        nonlocal at
        at += int(np.prod(shape))
        return values[at - int(np.prod(shape)) : at].reshape(shape)

    kv = k * config.head_dim
    stacks = {}
    embed = take(v, d)
    for key, shape in (
        (("attn_norm", "scale"), (d,)), (("attn", "q", "weight"), (d, d)), (("attn", "k", "weight"), (kv, d)),
        (("attn", "v", "weight"), (kv, d)), (("attn", "o", "weight"), (d, d)), (("mlp_norm", "scale"), (d,)),
        (("mlp", "gate", "weight"), (f, d)), (("mlp", "down", "weight"), (d, f)), (("mlp", "up", "weight"), (f, d)),
    ):  # fmt: skip
        stacks[key] = take(n_layers, *shape)
    flat: dict[tuple[str, ...], np.ndarray] = {("embed", "weight"): embed, ("final_norm", "scale"): take(d)}
    for key, stack in stacks.items():
        for i in range(n_layers):
            rows = stack[i]
            if is_rotary(("layer", *key)):  # the file's order is interleaved; undone here by an independent spelling
                head = config.head_dim
                order = [
                    h * head + 2 * j + s for h in range(len(rows) // head) for s in (0, 1) for j in range(head // 2)
                ]
                rows = rows[order]
            flat[f"layers_{i}", *key] = rows
    reference = json.loads((folder / "greedy_reference.json").read_text())
    return config, {path: flat[path] for path in param_shapes(config)}, read_llama2c_vocabulary(folder), reference


def read_llama2c_vocabulary(folder):
    data, at, pairs = (folder / "tok512.bin").read_bytes(), 4, []
    while at < len(data):
        score, length = struct.unpack_from("<fi", data, at)
        pairs.append((data[at + 8 : at + 8 + length].decode(), score))
        at += 8 + length
    return pairs


def spm_metadata(pairs):
    """A function that writes a SentencePiece vocabulary given as (token, score) pairs, ids 0..2 being special."""

    def add(writer, size):
        del size
        types = [2, 3, 3] + [6 if token.startswith("<0x") else 1 for token, _ in pairs[3:]]
        writer.add_tokenizer_model("llama")
        writer.add_token_list(["<unk>", "<s>", "</s>", *(token.replace(" ", "▁") for token, _ in pairs[3:])])
        writer.add_token_scores([score for _, score in pairs])
        writer.add_token_types(types)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_unk_token_id(0)

    return add


@pytest.fixture(scope="session")
def stories(shared):
    return read_stories(shared)


@pytest.fixture(scope="session")
def make():
    return SimpleNamespace(
        gguf=write_gguf, hf=write_hf, hf_config=hf_config, tokenizer=write_tokenizer, config=tiny_config,
        flat=flat_random, spm_metadata=spm_metadata,
    )  # fmt: skip
