"""Fake quantisation equals the real one to the bit, is not folded, and leaves the cotangent alone."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from mtpjax.errors import UserError
from mtpjax.quant import QTensor, apply_precision, dequantize, fake_quant, fake_quant_params, quantize
from mtpjax.quant.fake_quant import round_e4m3fn

jitted = jax.jit(fake_quant, static_argnums=1)


def bits(x) -> np.ndarray:
    return np.asarray(x, np.float32).view(np.uint32)


def gaussian(shape, seed=0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def awkward_values() -> np.ndarray:
    """Every finite bfloat16; every midpoint of E4M3FN with the float32 values beside it; a million random ones."""
    halves = np.arange(2**16, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)
    codes = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    codes = np.unique(codes[np.isfinite(codes)])
    middle = (codes[1:] + codes[:-1]) / 2
    beside = [np.nextafter(middle, np.float32(-1e9)), np.nextafter(middle, np.float32(1e9))]
    random = gaussian(1_000_000) * np.exp2(np.random.default_rng(1).integers(-12, 12, 1_000_000)).astype(np.float32)
    return np.concatenate([halves[np.isfinite(halves)], middle, *beside, random, np.float32([464, -464, 0.0, -0.0])])


def test_the_emulation_is_the_cast_to_the_bit():
    x = awkward_values()
    expected = np.clip(x, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    assert (bits(round_e4m3fn(jnp.asarray(x))) == bits(expected)).all()
    assert (bits(jax.jit(round_e4m3fn)(x)) == bits(expected)).all()


@pytest.mark.parametrize("shape", [(172, 64), (576, 200), (1, 1), (129, 127)])
def test_it_equals_dequantize_of_quantize_to_the_bit(shape):
    w = gaussian(shape)
    w[0, 0] = -0.0
    expected = dequantize(quantize(w))
    assert (bits(jitted(w)) == bits(expected)).all() and (bits(fake_quant(jnp.asarray(w))) == bits(expected)).all()


@settings(max_examples=60, deadline=None)
@given(hnp.arrays(np.float32, (5, 7), elements=st.floats(width=32, allow_nan=False, allow_infinity=False)))
def test_it_equals_dequantize_of_quantize_on_any_floats(w):
    assert (bits(jitted(w, (2, 3))) == bits(dequantize(quantize(w, (2, 3))))).all()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_weights_keep_their_dtype(dtype):
    w = jnp.asarray(gaussian((130, 20)), dtype)
    got = jitted(w)
    assert got.dtype == dtype and (got == dequantize(quantize(w), dtype)).all()


def test_zero_and_tiny_blocks_stay_finite_and_bad_ones_show():
    w = np.zeros((256, 128), np.float32)
    w[128:] = 1e-42
    assert (np.asarray(jitted(w)) == 0).all()
    w[0, 0] = np.inf
    got = np.asarray(jitted(w))
    assert np.isnan(got[:128]).all() and (got[128:] == 0).all()


@pytest.mark.parametrize("size", [1.0, 1000.0, 1e5, 1.2345678e-7])
def test_the_cotangent_passes_untouched(size):
    w = jnp.asarray(gaussian((130, 20)))
    cotangent = jnp.asarray(gaussian((130, 20), seed=2)) + jnp.float32(size)
    for pull in (lambda: jax.vjp(fake_quant, w)[1], lambda: jax.vjp(jitted, w)[1]):
        (got,) = pull()(cotangent)
        assert got.dtype == jnp.float32 and (got == cotangent).all()
    assert (jax.grad(lambda w: (1000.0 * fake_quant(w)).sum())(w) == 1000).all()


def test_autodiff_through_the_bare_cast_would_not():
    """Why the custom rule exists: the cotangent itself is cast to 8 bits."""
    w = jnp.ones((2, 2))
    got = jax.grad(lambda w: (1000.0 * w.astype(jnp.float8_e4m3fn).astype(jnp.float32)).sum())(w)
    assert np.isnan(np.asarray(got)).all()


def test_it_still_changes_values_inside_one_jit():
    w = gaussian((130, 20))
    changed = np.asarray(jax.jit(lambda w: fake_quant(w) * 1.0)(w))
    assert (changed != w).mean() > 0.9
    np.testing.assert_allclose(changed, w, rtol=1 / 15, atol=np.abs(w).max() / 448 / 1000)


def test_the_program_rounds_without_any_float8_that_a_compiler_could_fold():
    w = jnp.ones((130, 20))
    lowered = jitted.lower(w)
    assert "reduce_precision" in lowered.as_text() and "f8E4M3" not in lowered.as_text()
    compiled = lowered.compile().as_text()
    assert "reduce-precision" in compiled and "exponent_bits=8, mantissa_bits=3" in compiled
    assert "f8e4m3" not in compiled and "round-nearest-even" in compiled


def params() -> dict:
    return {
        "embed": {"weight": gaussian((30, 8))},
        "layers_0": {
            "attn_norm": {"scale": gaussian(8)},
            "attn": {"q": {"weight": gaussian((8, 8), 3), "bias": gaussian(8)}, "q_norm": {"scale": gaussian(8)}},
            "mlp": {"down": {"weight": gaussian((8, 16), 4)}},
        },
        "final_norm": {"scale": gaussian(8)},
        "head": {"weight": gaussian((30, 8), 5)},
    }


def test_training_sees_exactly_the_values_that_fp8_inference_gets():
    tree = params()
    deployed = jax.tree.map(
        lambda leaf: dequantize(leaf) if isinstance(leaf, QTensor) else leaf,
        apply_precision(tree, "fp8"),
        is_leaf=lambda leaf: isinstance(leaf, QTensor),
    )
    trained = jax.jit(fake_quant_params)(tree)
    assert jax.tree.structure(trained) == jax.tree.structure(deployed) == jax.tree.structure(tree)
    assert all(
        (bits(a) == bits(b)).all() for a, b in zip(jax.tree.leaves(trained), jax.tree.leaves(deployed), strict=True)
    )


def test_gradients_of_all_parameters_are_float32_and_straight_through():
    grads = jax.grad(lambda p: sum(1000.0 * leaf.sum() for leaf in jax.tree.leaves(fake_quant_params(p))))(params())
    assert all(leaf.dtype == jnp.float32 and (leaf == 1000).all() for leaf in jax.tree.leaves(grads))


def test_the_choice_of_leaves_can_be_given():
    tree = params()
    got = fake_quant_params(tree, lambda path: path[0] == "head")
    assert (got["embed"]["weight"] == tree["embed"]["weight"]).all()
    assert (np.asarray(got["head"]["weight"]) == dequantize(quantize(tree["head"]["weight"]))).all()


def test_master_weights_may_not_be_quantised_already():
    with pytest.raises(UserError, match=r"'embed\.weight' is already FP8"):
        fake_quant_params(apply_precision(params(), "fp8"))
