"""Run by the oracles' interpreter: random models of each family, saved by transformers with their own logits.

usage: oracle_models.py FOLDER    writes FOLDER/<name>/{config.json, model.safetensors, ids.json, logits.npy}
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
import transformers as tf

SMALL = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 100,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rope_theta": 10_000.0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
MODELS = {
    "llama": (tf.LlamaConfig, {"tie_word_embeddings": False}),
    "llama-tied-biases": (tf.LlamaConfig, {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "llama-wide-heads": (tf.LlamaConfig, {"head_dim": 16, "tie_word_embeddings": True}),
    "llama3-rope": (tf.LlamaConfig, {"rope_scaling": LLAMA3}),
    "linear-rope": (tf.LlamaConfig, {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    "yarn-rope": (
        tf.LlamaConfig,
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}},
    ),
    "mistral": (tf.MistralConfig, {"sliding_window": None}),
    "qwen2": (tf.Qwen2Config, {"tie_word_embeddings": True}),
    "qwen3": (tf.Qwen3Config, {"head_dim": 16}),
}


def main(folder: Path) -> None:
    for seed, (name, (config, extra)) in enumerate(MODELS.items()):
        torch.manual_seed(seed)
        model = tf.AutoModelForCausalLM.from_config(config(**SMALL, **extra), dtype=torch.float32).eval()
        with torch.no_grad():
            for key, weight in model.named_parameters():
                weight.normal_(1.0 if "norm" in key else 0.0, 0.3)
            ids = torch.randint(0, SMALL["vocab_size"], (2, 150))
            logits = model(ids).logits
        model.save_pretrained(folder / name, safe_serialization=True)
        (folder / name / "ids.json").write_text(json.dumps(ids.tolist()))
        np.save(folder / name / "logits.npy", logits.numpy())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
