"""Precisions by name, conversion leaf by leaf, and a report read from the arrays themselves."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from mtpjax.errors import UserError
from mtpjax.quant import PRECISIONS, QTensor, apply_precision, convert_leaf, dequantize, precision_report, quantize
from mtpjax.quant.policy import GROUPS, group_of, is_quantised_path

WEIGHTS = {"f32": "float32", "bf16": "bfloat16", "f16": "float16", "fp8": "float8_e4m3fn"}


def gaussian(*shape) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape, dtype=np.float32)


def params() -> dict:
    def linear(out, width, bias=False):
        return {"weight": gaussian(out, width)} | ({"bias": gaussian(out)} if bias else {})

    layer = {
        "attn_norm": {"scale": gaussian(64)},
        "attn": {
            "q": linear(64, 64, bias=True),
            "k": linear(32, 64),
            "v": linear(32, 64),
            "o": linear(64, 64),
            "q_norm": {"scale": gaussian(16)},
        },
        "mlp_norm": {"scale": gaussian(64)},
        "mlp": {"gate": linear(172, 64), "up": linear(172, 64), "down": linear(64, 172)},
    }
    return {
        "embed": linear(200, 64),
        "layers_0": layer,
        "final_norm": {"scale": gaussian(64)},
        "head": linear(200, 64),
    }


def leaves(tree) -> list[tuple[tuple[str, ...], object]]:
    flat = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda leaf: isinstance(leaf, QTensor))
    return [(tuple(key.key for key in path), leaf) for path, leaf in flat]


@pytest.mark.parametrize("name", PRECISIONS)
def test_weights_take_the_precision_and_small_vectors_stay_float32(name):
    assert PRECISIONS[name].name == name and PRECISIONS[name].weights == WEIGHTS[name]
    for path, leaf in leaves(apply_precision(params(), name)):
        if path[-1] == "weight":
            stored = leaf.q if isinstance(leaf, QTensor) else leaf
            assert stored.dtype == WEIGHTS[name] and isinstance(leaf, QTensor) == (name == "fp8"), path
        else:
            assert leaf.dtype == jnp.float32, path
        assert all(isinstance(array, jax.Array) for array in jax.tree.leaves(leaf))


def test_fp8_computes_and_caches_in_bf16():
    assert (PRECISIONS["fp8"].compute, PRECISIONS["fp8"].cache) == ("bfloat16", "bfloat16")


def test_values_equal_the_direct_conversion():
    tree = params()
    w = tree["embed"]["weight"]
    for name, dtype in (("bf16", ml_dtypes.bfloat16), ("f16", np.float16)):
        assert (np.asarray(apply_precision(tree, name)["embed"]["weight"]) == w.astype(dtype)).all()
    qt = apply_precision(tree, "fp8")["embed"]["weight"]
    assert (np.asarray(dequantize(qt)) == dequantize(quantize(w))).all()


@pytest.mark.parametrize("name", PRECISIONS)
@pytest.mark.parametrize("start", PRECISIONS)
def test_any_precision_converts_to_any_other_on_the_device(start, name):
    once = apply_precision(params(), start)
    tree = apply_precision(once, name)
    dtypes = {str(leaf.q.dtype if isinstance(leaf, QTensor) else leaf.dtype) for path, leaf in leaves(tree)}
    assert dtypes == {WEIGHTS[name], "float32"}
    if start == name:
        pairs = zip(jax.tree.leaves(once), jax.tree.leaves(tree), strict=True)
        assert all(before is after for before, after in pairs), "nothing to convert, nothing copied"


def test_numpy_leaves_are_copied_never_aliased():
    for path, name, dtype in (
        (("final_norm", "scale"), "bf16", np.float32),
        (("embed", "weight"), "bf16", ml_dtypes.bfloat16),
    ):
        source = np.zeros((256, 256), dtype)
        leaf = convert_leaf(path, source, name)
        source[:] = 1
        assert (np.asarray(leaf) == 0).all()
    host = quantize(np.ones((256, 256), np.float32))
    kept = convert_leaf(("embed", "weight"), host, "fp8")
    host.q[:] = 0
    assert (np.asarray(kept.q).astype(np.float32) == 448).all() and isinstance(kept.q, jax.Array)


def test_a_loader_can_convert_leaf_by_leaf():
    whole = apply_precision(params(), "fp8")
    for (path, leaf), (_, source) in zip(leaves(whole), leaves(params()), strict=True):
        single = convert_leaf(path, source, "fp8")
        assert all(
            (np.asarray(a) == np.asarray(b)).all()
            for a, b in zip(jax.tree.leaves(single), jax.tree.leaves(leaf), strict=True)
        )


@pytest.mark.parametrize(
    ("path", "group", "quantised"),
    [
        ("embed.weight", "embedding", True),
        ("layers_0.attn.q.weight", "attention", True),
        ("layers_0.attn.q.bias", "biases", False),
        ("layers_0.attn.q_norm.scale", "norms", False),
        ("layers_0.attn_norm.scale", "norms", False),
        ("layers_0.attn_norm.weight", "norms", False),
        ("layers_11.mlp.down.weight", "mlp", True),
        ("final_norm.scale", "norms", False),
        ("head.weight", "head", True),
        ("mtp_0.proj.weight", "other", True),
    ],
)
def test_paths_decide(path, group, quantised):
    assert (group_of(tuple(path.split("."))), is_quantised_path(tuple(path.split(".")))) == (group, quantised)
    assert group in GROUPS


def test_unknown_precision_lists_the_known_ones():
    for call in (
        lambda: apply_precision(params(), "fp4"),
        lambda: apply_precision({}, "fp4"),
        lambda: precision_report(params(), asked="fp4"),
    ):
        with pytest.raises(UserError, match="unknown precision 'fp4'.*f32, bf16, f16, fp8"):
            call()


@pytest.mark.parametrize("convert", [np.asarray, jnp.asarray])
def test_bad_tensors_are_named(convert):
    path, w = ("layers_0", "mlp", "up", "weight"), gaussian(8, 8)
    w[3, 3] = np.inf
    with pytest.raises(UserError, match=r"layers_0\.mlp\.up\.weight.*infinity or NaN"):
        convert_leaf(path, convert(w), "fp8")
    w[3, 3] = 1e5
    with pytest.raises(UserError, match=r"layers_0\.mlp\.up\.weight.*100000.*65504"):
        convert_leaf(path, convert(w), "f16")
    with pytest.raises(UserError, match=r"layers_0\.mlp\.up\.weight.*without its scale"):
        convert_leaf(path, convert(w.astype(ml_dtypes.float8_e4m3fn)), "fp8")
    with pytest.raises(UserError, match=r"layers_0\.mlp\.up\.weight.*int32"):
        convert_leaf(path, convert(w.astype(np.int32)), "bf16")
    assert convert_leaf(path, convert(w), "bf16").dtype == jnp.bfloat16


@pytest.mark.parametrize("name", PRECISIONS)
def test_report_bytes_are_the_arrays_own(name):
    tree = apply_precision(params(), name)
    cache = {"k": jnp.zeros((2, 8), PRECISIONS[name].cache), "lengths": jnp.zeros(2, jnp.int32)}
    rows = precision_report(tree, cache, asked=name)
    assert sum(row["bytes"] for row in rows) == sum(leaf.nbytes for leaf in jax.tree.leaves((tree, cache)))
    assert sum(row["tensors"] for row in rows) == len(jax.tree.leaves((tree, cache)))
    assert all(row["asked"] == row["got"] for row in rows)
    groups = [row["group"] for row in rows]
    assert sorted(set(groups), key=GROUPS.index) == list(dict.fromkeys(groups)) and ("scales" in groups) == (
        name == "fp8"
    )
    weights = {row["group"]: row for row in rows}
    assert weights["embedding"]["got"] == WEIGHTS[name] and weights["norms"]["got"] == "float32"
    assert weights["attention"]["bytes"] == 192 * 64 * np.dtype(WEIGHTS[name]).itemsize


def test_report_tells_what_was_got_where_it_differs_from_what_was_asked():
    tree = apply_precision(params(), "fp8")
    tree["layers_1"] = apply_precision(params(), "bf16")["layers_0"]
    rows = [row for row in precision_report(tree, asked="fp8") if row["group"] == "mlp"]
    assert [(row["asked"], row["got"], row["tensors"]) for row in rows] == [
        ("float8_e4m3fn", "bfloat16", 3),
        ("float8_e4m3fn", "float8_e4m3fn", 3),
    ]
    assert [row["bytes"] for row in rows] == [2 * 3 * 172 * 64, 3 * 172 * 64]


def test_report_reads_shapes_without_arrays():
    tree = apply_precision(params(), "fp8")
    shapes = jax.eval_shape(lambda: tree)
    assert precision_report(shapes, asked="fp8") == precision_report(tree, asked="fp8")
