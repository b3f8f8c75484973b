"""Damaged files end in a model or in `UserError`, never in another exception, a long wait or a lot of memory."""

import contextlib
import json
import random
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtpjax.errors import UserError
from mtpjax.io.gguf import parse_gguf
from mtpjax.io.gguf_vocab import tokenizer_from_gguf
from mtpjax.io.hf import open_hf
from mtpjax.io.hf_vocab import tokenizer_from_hf
from mtpjax.io.lm import open_model
from mtpjax.io.safetensors import parse_safetensors
from mtpjax.models.families import config_from_gguf, config_from_hf
from mtpjax.models.names import param_shapes

PEAK_BYTES = 64 * 2**20


def damage(data, rng):
    """`data` with a few bytes changed, a piece cut out, doubled or filled."""
    data = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at, length = rng.randrange(len(data)), rng.randint(1, 16)
        kind = rng.randrange(5)
        if kind == 0:
            data[at] = rng.randrange(256)
        elif kind == 1:
            data[at : at + length] = rng.choice((b"\xff", b"\0", b"\x7f")) * len(data[at : at + length])
        elif kind == 2:
            del data[at : at + length]
        elif kind == 3:
            data[at:at] = data[at : at + length]
        else:
            data[at : at + 8] = rng.choice((0, 1, 2**31, 2**32, 2**62, 2**64 - 1)).to_bytes(8, "little")
    return bytes(data)


@contextlib.contextmanager
def only_user_errors():
    """No other exception, one line each, and little memory."""
    tracemalloc.start()
    message = ""
    try:
        yield
    except UserError as error:
        message = str(error)
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < PEAK_BYTES
    assert "\n" not in message
    assert len(message) < 2000


seeds = st.integers(0, 2**32 - 1)


@pytest.fixture(scope="module")
def files(make, tmp_path_factory):
    """The header part of a small GGUF file (where damage matters), and a small folder."""
    folder = tmp_path_factory.mktemp("fuzz")
    config = make.config(n_layers=1)
    path = make.gguf(folder / "m.gguf", config, make.flat(config))
    return path.read_bytes(), make.hf(folder / "m", config, make.flat(config))


def damage_head(data, rng, size):
    return damage(data[:size], rng) + data[size:]


@settings(max_examples=80, deadline=None)
@given(seed=seeds)
def test_gguf(files, seed):
    load_damaged_gguf(files, seed)


@pytest.mark.fuzz
def test_many_damaged_gguf_files(files):
    for seed in range(5_000):
        load_damaged_gguf(files, seed)


def load_damaged_gguf(files, seed):
    rng = random.Random(seed)
    data = damage_head(files[0], rng, rng.choice((100, 1000, 12_000)))
    with only_user_errors():
        file = parse_gguf(memoryview(data), "f")
        for name in file.tensors:
            with contextlib.suppress(UserError):
                file.read(name)
        config = config_from_gguf(file.metadata, file.shapes, None, "f")
        param_shapes(config)
        tokenizer = tokenizer_from_gguf(file.metadata, "f")
        tokenizer.decode(tokenizer.encode("the <|im_end|> end"))
        tokenizer.chat("hello")


@settings(max_examples=80, deadline=None)
@given(seed=seeds)
def test_safetensors(files, seed):
    rng = random.Random(seed)
    data = (files[1] / "model.safetensors").read_bytes()
    size = 8 + int.from_bytes(data[:8], "little")
    with only_user_errors():
        file = parse_safetensors(memoryview(damage_head(data, rng, size)), "f")
        for name in file.tensors:
            with contextlib.suppress(UserError):
                file.read(name)


@settings(max_examples=60, deadline=None)
@given(seed=seeds)
def test_config_text(files, seed):
    text = (files[1] / "config.json").read_bytes()
    with only_user_errors(), contextlib.suppress(ValueError):
        values = json.loads(damage(text, random.Random(seed)))
        if isinstance(values, dict):
            param_shapes(config_from_hf(values, ["lm_head.weight"], "f"))


odd = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_config_values(make, data):
    """Every key of config.json holding anything that JSON can say."""
    values = make.hf_config(make.config()) | {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}
    key = data.draw(
        st.sampled_from([*values, "sliding_window", "rope_parameters", "layer_types", "quantization_config"])
    )
    with only_user_errors():
        config_from_hf(values | {key: data.draw(odd)}, ["lm_head.weight"], "f")


@settings(max_examples=25, deadline=None)
@given(seed=seeds)
def test_folder(files, tmp_path_factory, seed):
    rng = random.Random(seed)
    names = ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "model.safetensors"]
    folder = tmp_path_factory.mktemp("d")
    broken = rng.choice(names)
    for name in names:
        data = (files[1] / name).read_bytes()
        size = min(len(data), 4000)
        (folder / name).write_bytes(damage_head(data, rng, size) if name == broken else data)
    with only_user_errors():
        open_model(folder).params(lambda _, array: array.shape)
        opened = open_hf(folder)
        tokenizer = tokenizer_from_hf(folder, opened.config)
        tokenizer.decode(tokenizer.encode("the end"))
        tokenizer.chat("hello")
