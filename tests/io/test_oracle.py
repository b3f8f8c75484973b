"""Folders written by transformers load, and their logits are transformers' own, for every family and rotary scaling."""

import json
import subprocess
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from mtpjax.io.lm import open_model
from mtpjax.models.transformer import Transformer

NAMES = (
    "llama",
    "llama-tied-biases",
    "llama-wide-heads",
    "llama3-rope",
    "linear-rope",
    "yarn-rope",
    "mistral",
    "qwen2",
    "qwen3",
)


@pytest.fixture(scope="module")
def folder(oracle_python, tmp_path_factory):
    out = tmp_path_factory.mktemp("transformers")
    subprocess.run([oracle_python, Path(__file__).with_name("oracle_models.py"), out], check=True, timeout=300)
    return out


@pytest.mark.oracle
@pytest.mark.parametrize("name", NAMES)
def test_logits_equal_those_of_transformers(folder, name):
    opened = open_model(folder / name)
    params = opened.params(lambda path, array: jnp.asarray(array, jnp.float32))
    ids = jnp.asarray(json.loads((folder / name / "ids.json").read_text()), jnp.int32)
    logits = Transformer(opened.config).apply({"params": params}, ids).logits
    np.testing.assert_allclose(logits, np.load(folder / name / "logits.npy"), atol=2e-3, rtol=1e-4)
