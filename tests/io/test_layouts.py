"""One tree of parameters, written in every layout of rotary rows, loads as the same model."""

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from mtpjax.io.lm import load, open_model
from mtpjax.models.names import interleaved_to_half_split, param_shapes
from mtpjax.models.transformer import Transformer


def leaves(params):
    return {tuple(key.key for key in path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}


def assert_equal_params(params, flat):
    found = leaves(params)
    assert set(found) == set(flat)
    for path, array in flat.items():
        np.testing.assert_array_equal(np.asarray(found[path], np.float32), array, err_msg=".".join(path))


def logits(params, config, ids):
    output: Any = Transformer(config).apply({"params": params}, jnp.asarray(ids))
    return output.logits


def layouts(make, tmp_path, config, flat, **gguf):
    """The model as a file in the three layouts: interleaved, Qwen's, Hugging Face's."""
    yield make.gguf(tmp_path / "llama.gguf", config, flat, **gguf)
    yield make.gguf(tmp_path / "qwen2.gguf", config, flat, arch="qwen2", **gguf)
    yield make.hf(tmp_path / "folder", config, flat)


@pytest.mark.parametrize(
    "options", [{}, {"tie_embeddings": False, "qkv_bias": True, "o_bias": True, "mlp_bias": True}], ids=["bare", "full"]
)
def test_layouts_of_a_made_model_are_equal(make, tmp_path, options):
    config = make.config(**options)
    flat = make.flat(config)
    ids = np.random.default_rng(1).integers(0, config.vocab_size, (2, 9))
    results = []
    for path in layouts(make, tmp_path, config, flat):
        file = open_model(path)
        params = file.params(lambda _, array: jnp.array(array, copy=True))
        assert_equal_params(params, flat)
        results.append(logits(params, file.config, ids))
    for other in results[1:]:
        np.testing.assert_array_equal(results[0], other)


def test_qk_norm_of_qwen3(make, tmp_path):
    config = make.config(qk_norm=True, family="qwen3", head_dim=16)
    flat = make.flat(config)
    for path in (
        make.gguf(tmp_path / "a.gguf", config, flat, arch="qwen3"),
        make.hf(tmp_path / "b", config, flat),
    ):
        file = open_model(path)
        assert (file.config.qk_norm, file.config.head_dim) == (True, 16)
        assert_equal_params(file.params(lambda _, array: array), flat)


def test_the_order_of_rows_matters_to_the_logits(make):
    """The control: a loader that forgets the reordering gives other logits."""
    config = make.config()
    flat = make.flat(config)
    wrong = {
        path: interleaved_to_half_split(array, config.head_dim) if path[1:-1] == ("attn", "q") else array
        for path, array in flat.items()
    }

    def nested(items):
        tree = {}
        for path, array in items.items():
            node = tree
            for key in path[:-1]:
                node = node.setdefault(key, {})
            node[path[-1]] = jnp.array(array)
        return tree

    ids = np.arange(12)[None]
    difference = np.abs(logits(nested(flat), config, ids) - logits(nested(wrong), config, ids)).max()
    assert difference > 1e-3


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32])
def test_dtypes_and_shards(make, tmp_path, dtype):
    config = make.config(tie_embeddings=False)
    flat = {path: array.astype(dtype).astype(np.float32) for path, array in make.flat(config).items()}
    for shards in (1, 3):
        folder = make.hf(tmp_path / f"of{shards}", config, flat, dtype=dtype, shards=shards)
        lm = load(folder, precision="f32")
        assert_equal_params(lm.params, flat)
        assert lm.config == config


def test_stories_in_three_layouts(make, stories, tmp_path):
    """The public 260K model: equal parameters, equal logits, and the reference's own greedy continuation."""
    config, flat, vocabulary, reference = stories
    vocab = make.spm_metadata(vocabulary)
    ids = np.array([[reference["bos"], *reference["greedy_ids"]]])[:, : config.max_context]
    results = []
    for path in layouts(make, tmp_path, config, flat, vocabulary=vocab):
        file = open_model(path)
        params = file.params(lambda _, array: jnp.array(array, copy=True))
        assert_equal_params(params, flat)
        results.append(logits(params, file.config, ids[:, :-1]))
    np.testing.assert_array_equal(results[0], results[1])
    np.testing.assert_array_equal(results[0], results[2])
    np.testing.assert_array_equal(jnp.argmax(results[0], -1), ids[:, 1:])


def test_fp8_stores_matrices_and_keeps_norms(make, tmp_path):
    config = make.config()
    lm = load(make.gguf(tmp_path / "m.gguf", config, make.flat(config)), precision="fp8")
    attn = lm.params["layers_0"]["attn"]
    assert attn["q"]["weight"].q.dtype == jnp.float8_e4m3fn
    assert lm.params["final_norm"]["scale"].dtype == jnp.float32
    assert lm.n_params == sum(int(np.prod(shape)) for shape in param_shapes(config).values())
    assert lm.n_bytes < lm.n_params * 1.1
