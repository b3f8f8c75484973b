import struct

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants

from mtpjax.errors import UserError
from mtpjax.io.gguf import DEQUANTISABLE, open_gguf, parse_gguf
from mtpjax.io.lm import open_model


def kinds_with_a_quantiser():
    def works(kind):
        try:
            quants.quantize(np.zeros((1, 256), np.float32), kind)
        except NotImplementedError:
            return False
        return True

    return sorted((kind for kind in DEQUANTISABLE if works(kind)), key=lambda kind: kind.name)


@pytest.fixture
def path(make, tmp_path):
    config = make.config()
    return make.gguf(tmp_path / "m.gguf", config, make.flat(config))


def load_all(path):
    return open_model(path).params(lambda _, array: array)


@pytest.mark.parametrize("kind", kinds_with_a_quantiser(), ids=lambda kind: kind.name)
def test_every_type_reads_as_it_dequantises(tmp_path, kind):
    x = np.random.default_rng(0).normal(size=(5, 512)).astype(np.float32)
    packed = quants.quantize(x, kind)
    writer = gguf.GGUFWriter(tmp_path / "t.gguf", "llama")
    writer.add_tensor("t", packed, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = open_gguf(tmp_path / "t.gguf")
    assert file.shapes == {"t": (5, 512)}
    found = file.read("t")
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, quants.dequantize(packed, kind).reshape(5, 512))
    assert np.abs(found - x).max() < 2.5


def test_quantised_model_loads(make, tmp_path):
    config = make.config(d_ff=64, n_heads=2, n_kv_heads=2, head_dim=16)
    flat = make.flat(config)
    kind = GGMLQuantizationType.Q8_0
    params = load_all(make.gguf(tmp_path / "q.gguf", config, flat, arch="qwen2", kind=kind))
    want = quants.dequantize(quants.quantize(flat["layers_1", "attn", "k", "weight"], kind), kind)
    np.testing.assert_array_equal(params["layers_1"]["attn"]["k"]["weight"], want)


def test_metadata_equals_the_package_reader(path):
    ours, theirs = open_gguf(path), gguf.GGUFReader(path)
    keys = {key for key in theirs.fields if not key.startswith("GGUF.")}
    assert set(ours.metadata) == keys
    for key in keys:
        assert np.array_equal(ours.metadata[key], theirs.fields[key].contents()), key
    for tensor in theirs.tensors:
        np.testing.assert_array_equal(ours.read(tensor.name), tensor.data)


def test_type_that_cannot_be_dequantised_is_named(make, tmp_path):
    config = make.config()
    flat = make.flat(config) | {("final_norm", "scale"): np.ones(config.d_model, np.int32)}
    with pytest.raises(UserError, match=r"'output_norm.weight' has type I32.*supported: BF16, F16, F32, IQ1_M"):
        load_all(make.gguf(tmp_path / "m.gguf", config, flat))


def test_rope_freqs_of_a_file(make, tmp_path):
    config = make.config()
    divisors = np.array([1, 2, 3, 4], np.float32)

    def add(writer):
        writer.add_tensor("rope_freqs.weight", divisors)

    file = open_model(make.gguf(tmp_path / "m.gguf", config, make.flat(config), extra=add))
    assert file.config.rope.freq_divisors == (1.0, 2.0, 3.0, 4.0)
    assert file.config.rope.kind == "llama3"
    assert "embed" in file.params(lambda _, array: array)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda flat: flat.pop(("layers_1", "mlp", "up", "weight")), "tensor 'blk.1.ffn_up.weight' is missing"),
        (
            lambda flat: flat.update({("final_norm", "scale"): np.ones(31, np.float32)}),
            r"shape \(31,\), the config implies \(32,\)",
        ),
        (
            lambda flat: flat.update({("layers_1", "attn", "o", "bias"): np.ones(32, np.float32)}),
            "'blk.1.attn_output.bias' belongs to no part",
        ),
        (
            lambda flat: flat.update({("layers_2", "attn_norm", "scale"): np.ones(32, np.float32)}),
            "'blk.2.attn_norm.weight' belongs to no part",
        ),
        (
            lambda flat: flat.update({("final_norm", "scale"): np.full(32, np.nan, np.float32)}),
            "'output_norm.weight' holds NaN or infinity",
        ),
        (lambda flat: flat.update({("final_norm", "scale"): np.full(32, np.inf, np.float32)}), "holds NaN or infinity"),
    ],
)
def test_tensors_that_do_not_fit(make, tmp_path, change, words):
    config = make.config()
    flat = make.flat(config)
    change(flat)
    path = make.gguf(tmp_path / "m.gguf", config, flat)
    with pytest.raises(UserError, match=words) as error:
        load_all(path)
    assert str(path) in str(error.value)


def u64(value):
    return struct.pack("<Q", value)


def header(tensors=0, pairs=0, version=3, rest=b""):
    return b"GGUF" + struct.pack("<I", version) + u64(tensors) + u64(pairs) + rest


def text(value):
    return u64(len(value)) + value


def tensor(name=b"t", dims=(4,), kind=0, offset=0):
    return text(name) + struct.pack("<I", len(dims)) + b"".join(map(u64, dims)) + struct.pack("<I", kind) + u64(offset)


def nested(depth):
    inner = struct.pack("<I", 9) + u64(1)
    return inner * depth + struct.pack("<I", 0) + u64(1) + b"\0"


HUGE = 2**64 - 1
BAD = {
    "empty": (b"", "not a GGUF file"),
    "magic": (b"GGML" + bytes(40), "not a GGUF file"),
    "version 1": (header(version=1), "version 1 isn't supported"),
    "big-endian": (b"GGUF\0\0\0\3" + bytes(40), "big-endian"),
    "short": (b"GGUF\3\0\0", "truncated or damaged"),
    "pairs": (header(pairs=HUGE), "18446744073709551615 metadata keys announced, 0 bytes left"),
    "tensors": (header(tensors=2**60), "tensors announced"),
    "key length": (header(pairs=1, rest=u64(HUGE) + bytes(8)), "bytes of text announced"),
    "list length": (
        header(pairs=1, rest=text(b"k") + struct.pack("<II", 9, 4) + u64(2**61)),
        "numbers in 'k' announced",
    ),
    "text list": (header(pairs=1, rest=text(b"k") + struct.pack("<II", 9, 8) + u64(2**61)), "strings in 'k' announced"),
    "lists": (header(pairs=1, rest=text(b"k") + struct.pack("<II", 9, 9) + u64(2**61)), "lists in 'k' announced"),
    "nesting": (
        header(pairs=1, rest=text(b"k") + struct.pack("<I", 9) + nested(9) + bytes(99)),
        "too deeply nested type 9",
    ),
    "type": (
        header(pairs=1, rest=text(b"k") + struct.pack("<I", 77) + bytes(8)),
        "unknown or too deeply nested type 77",
    ),
    "UTF-8": (header(pairs=1, rest=text(b"\xff") + bytes(12)), "isn't UTF-8"),
    "twice": (header(pairs=2, rest=(text(b"k") + struct.pack("<I", 7) + b"\1") * 2), "'k' occurs twice"),
    "dimensions": (header(1, rest=tensor(dims=(1,) * 5) + bytes(99)), "5 dimensions, expected 1 to 4"),
    "no dimension": (header(1, rest=tensor(dims=()) + bytes(99)), "0 dimensions"),
    "zero size": (header(1, rest=tensor(dims=(0,)) + bytes(99)), r"shape \[0\], expected"),
    "huge size": (header(1, rest=tensor(dims=(HUGE, HUGE)) + bytes(99)), "but the file has"),
    "kind": (header(1, rest=tensor(kind=99) + bytes(99)), "unknown type 99"),
    "half a block": (header(1, rest=tensor(dims=(33,), kind=8) + bytes(99)), "multiple of 32"),
    "offset": (header(1, rest=tensor(offset=2**40) + bytes(99)), "truncated"),
    "unaligned": (header(1, rest=tensor(offset=4) + bytes(99)), "not a multiple of the alignment 32"),
    "tensor twice": (header(2, rest=tensor() * 2 + bytes(199)), "occurs twice"),
    "overlap": (header(2, rest=tensor() + tensor(b"u") + bytes(199)), "'t' and 'u' overlap"),
    "alignment": (
        header(pairs=1, rest=text(b"general.alignment") + struct.pack("<II", 4, 33)),
        "expected a power of two",
    ),
    "split": (header(pairs=1, rest=text(b"split.count") + struct.pack("<IH", 2, 3)), "one part of a split model"),
}


@pytest.mark.parametrize("case", BAD)
def test_malformed_files(case):
    data, words = BAD[case]
    with pytest.raises(UserError, match=words) as error:
        parse_gguf(memoryview(data), "f.gguf")
    assert str(error.value).startswith("f.gguf: ")
    assert "\n" not in str(error.value)


def test_truncated_anywhere(path):
    """Cut at any place, a file is refused; none of the cuts is taken for a whole model."""
    data = path.read_bytes()
    for size in [*range(0, 400, 7), *range(400, len(data), len(data) // 40), len(data) - 33]:
        with pytest.raises(UserError):
            parse_gguf(memoryview(data[:size]), "f.gguf")


def test_well_formed_oddities():
    """Lists of lists, empty lists, and every kind of number."""
    pairs = [
        (b"nested", 9, struct.pack("<I", 9) + u64(2) + (struct.pack("<I", 0) + u64(1) + b"\5") * 2),
        (b"none", 9, struct.pack("<I", 8) + u64(0)),
        (b"flag", 7, b"\2"),
        (b"big", 10, u64(HUGE)),
        (b"double", 12, struct.pack("<d", 1.5)),
    ]
    rest = b"".join(text(key) + struct.pack("<I", kind) + value for key, kind, value in pairs)
    metadata = parse_gguf(memoryview(header(0, len(pairs), 2, rest)), "f").metadata
    assert [list(item) for item in metadata["nested"]] == [[5], [5]]
    assert (metadata["none"], metadata["flag"], metadata["big"], metadata["double"]) == ([], True, HUGE, 1.5)
