import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from mtpjax.errors import UserError
from mtpjax.io.hf import INDEX, open_hf, read_json
from mtpjax.io.lm import load, open_model
from mtpjax.io.safetensors import MAX_HEADER_BYTES, open_safetensors, parse_safetensors


def blob(header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def one(**changes):
    return {"t": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | changes}


BAD = {
    "empty": (b"", "not a safetensors file"),
    "no header": (blob(b"", length=2**63), "a header of 9223372036854775808 bytes announced"),
    "long header": (blob(b"{}", length=MAX_HEADER_BYTES + 1), "bytes announced"),
    "text": (blob(b"hello"), "isn't valid JSON"),
    "not UTF-8": (blob(b"\xff\xff"), "isn't valid JSON"),
    "deep": (blob(b"[" * 100_000), "isn't valid JSON"),
    "list": (blob([]), "no JSON object"),
    "twice": (blob(b'{"a": 1, "a": 2}'), "occurs twice"),
    "entry": (blob({"t": 1}), "malformed entry"),
    "dtype": (blob(one(dtype="F33"), bytes(8)), "unknown dtype 'F33'"),
    "dtype list": (blob(one(dtype=[1]), bytes(8)), "unknown dtype"),
    "shape": (blob(one(shape=[-2]), bytes(8)), "malformed shape"),
    "shape bool": (blob(one(shape=[True, 2]), bytes(8)), "malformed shape"),
    "dims": (blob(one(shape=[1] * 9), bytes(8)), "malformed shape"),
    "offsets": (blob(one(data_offsets=[0]), bytes(8)), "malformed data_offsets"),
    "negative": (blob(one(data_offsets=[-8, 0]), bytes(8)), "malformed data_offsets"),
    "backwards": (blob(one(data_offsets=[8, 0]), bytes(8)), "takes 8 bytes"),
    "size": (blob(one(shape=[3]), bytes(12)), r"spans \[0, 8\], but F32 of shape \[3\] takes 12 bytes"),
    "huge": (blob(one(shape=[2**40, 2**40]), bytes(8)), "takes 4835703278458516698824704 bytes"),
    "truncated": (blob(one(), bytes(7)), "but the file has"),
    "overlap": (blob(one() | {"u": one()["t"] | {"data_offsets": [4, 12]}}, bytes(12)), "'t' and 'u' overlap"),
}


@pytest.mark.parametrize("case", BAD)
def test_malformed_safetensors(case):
    data, words = BAD[case]
    with pytest.raises(UserError, match=words) as error:
        parse_safetensors(memoryview(data), "f.safetensors")
    assert str(error.value).startswith("f.safetensors: ")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_what_the_library_writes_reads_the_same(tmp_path, dtype):
    arrays = {"a": np.arange(6).reshape(2, 3).astype(dtype), "b": np.ones((), dtype), "c": np.zeros((0, 4), dtype)}
    save_file(arrays, tmp_path / "x.safetensors", metadata={"format": "pt"})
    file = open_safetensors(tmp_path / "x.safetensors")
    assert set(file.tensors) == set(arrays)
    for name, array in arrays.items():
        found = file.read(name)
        assert found.dtype == array.dtype
        np.testing.assert_array_equal(found, array)
        assert not found.flags.writeable


def test_an_unaligned_header_is_read():
    header = blob(b'{"t":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}} ', np.float32(1.5).tobytes())
    assert (len(header) - 4) % 4
    assert parse_safetensors(memoryview(header), "f").read("t") == np.float32(1.5)


@pytest.mark.parametrize("dtype", ["F64", "F8_E4M3", "F8_E5M2", "I8", "I64", "BOOL"])
def test_dtypes_that_no_weight_may_have_are_named(dtype):
    size = {"F64": 8, "I64": 8}.get(dtype, 1)
    data = blob({"w": {"dtype": dtype, "shape": [1], "data_offsets": [0, size]}}, bytes(size))
    with pytest.raises(UserError, match=rf"tensor 'w' is {dtype}.*; supported: F32, BF16, F16"):
        parse_safetensors(memoryview(data), "f").read("w")


@pytest.fixture
def folder(make, tmp_path):
    config = make.config()
    return make.hf(tmp_path / "m", config, make.flat(config), shards=2)


def edit(path, change):
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


def first_shard(folder):
    return sorted(folder.glob("*.safetensors"))[0]


def refused(folder, words):
    with pytest.raises(UserError, match=words) as error:
        open_model(folder).params(lambda _, array: array)
    assert "\n" not in str(error.value)
    return str(error.value)


NORM = "model.norm.weight"


def test_shards_and_index_must_agree(folder):
    assert load(folder, precision="f32").n_params
    shard = first_shard(folder)
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    name = next(name for name, file in weight_map.items() if file == shard.name)
    edit(folder / INDEX, lambda v: v["weight_map"].update({"extra.weight": shard.name}))
    refused(folder, f"tensor 'extra.weight' isn't in '{shard.name}'")
    edit(folder / INDEX, lambda v: v["weight_map"].pop("extra.weight"))
    edit(folder / INDEX, lambda v: v["weight_map"].pop(name))
    assert open_hf(folder).shapes.keys() >= {name}  # the index forgot it, the shard has it
    shard.rename(folder / "away")
    refused(folder, f"shard '{shard.name}' is missing")


@pytest.mark.parametrize(
    "file",
    ["../x.safetensors", "/etc/x.safetensors", "a\\x.safetensors", "C:x.safetensors", "x.bin", 7, "\0.safetensors"],
)
def test_an_index_cannot_point_outside(folder, file):
    edit(folder / INDEX, lambda v: v["weight_map"].update({NORM: file}))
    refused(folder, f"tensor '{NORM}' is said to be in")


def test_a_tensor_in_two_shards(folder):
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    other = next(file for file in sorted(set(weight_map.values())) if file != weight_map[NORM])
    tensors = read_all(folder / other) | {NORM: np.ones(32, np.float32)}
    save_file(tensors, folder / other)
    refused(folder, f"tensor '{NORM}' is in '{other}' as well as in")


def read_all(path):
    file = open_safetensors(path)
    return {name: file.read(name).copy() for name in file.tensors}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop(NORM), f"tensor '{NORM}' is missing"),
        (lambda t: t.update({NORM: np.ones(33, np.float32)}), r"shape \(33,\), the config implies \(32,\)"),
        (lambda t: t.update({NORM: np.ones(32, np.int8)}), "is I8; supported"),
        (lambda t: t.update({NORM: np.ones(32, ml_dtypes.float8_e4m3fn)}), "F8_E4M3 without a scale"),
        (lambda t: t.update({"model.layers.9.mlp.up_proj.weight": np.ones((1, 1), np.float32)}), "belongs to no part"),
        (lambda t: t.update({"lm_head.weight": np.ones((272, 32), np.float32)}), "holds another matrix"),
        (lambda t: t.update({NORM: np.full(32, np.nan, ml_dtypes.bfloat16)}), "holds NaN or infinity"),
    ],
)
def test_tensors_that_do_not_fit(make, tmp_path, change, words):
    config = make.config()
    folder = make.hf(tmp_path / "m", config, make.flat(config))
    tensors = read_all(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    assert str(folder) in refused(folder, words)


def test_harmless_extras_are_allowed(make, tmp_path):
    """An equal copy of the tied head, and tables that everyone recomputes."""
    config = make.config()
    folder = make.hf(tmp_path / "m", config, make.flat(config))
    tensors = read_all(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
    save_file(tensors, folder / "model.safetensors")
    assert "head" not in load(folder).params


def test_folders_without_weights(make, tmp_path):
    refused(tmp_path, "config.json: no such file")
    (tmp_path / "config.json").write_text(json.dumps(make.hf_config(make.config())))
    refused(tmp_path, "has neither model.safetensors nor")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    refused(tmp_path, "pytorch_model.bin: pickled weights aren't read")
    (tmp_path / INDEX).write_text("{}")
    refused(tmp_path, "has no weight_map")
    (tmp_path / "config.json").write_text("[" * 100_000)
    refused(tmp_path, "not valid JSON")
    (tmp_path / "config.json").write_text("9" * 10_000)
    refused(tmp_path, "not valid JSON")


def test_a_folder_in_place_of_a_file(tmp_path):
    (tmp_path / "config.json").mkdir()
    with pytest.raises(UserError, match="can't be read"):
        read_json(tmp_path / "config.json")
