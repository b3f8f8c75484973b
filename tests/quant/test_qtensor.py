"""QTensor: blocks, edges, extremes, exactness, and its place in a Linen parameter tree."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from mtpjax.errors import UserError
from mtpjax.quant import QTensor, dequantize, frozen, quantize, take
from mtpjax.quant.qtensor import block_scale, grid

RAGGED = [(172, 64), (576, 1536), (1, 1), (129, 127), (128, 128), (3, 300), (257, 129)]
jitted = jax.jit(quantize, static_argnums=1)


def gaussian(shape, seed=0, sigma=1.0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, sigma, shape).astype(np.float32)


def same_bits(a: QTensor, b: QTensor) -> bool:
    q = (np.asarray(a.q).view(np.uint8) == np.asarray(b.q).view(np.uint8)).all()
    return bool(q and (np.asarray(a.scale).view(np.uint32) == np.asarray(b.scale).view(np.uint32)).all())


def sqnr_db(w: np.ndarray, got: np.ndarray) -> float:
    w, got = w.astype(np.float64), np.asarray(got).astype(np.float64)
    return float(10 * np.log10((w**2).sum() / ((w - got) ** 2).sum()))


def within_bound(w: np.ndarray, qt: QTensor) -> bool:
    """|w - q scale| <= max(|w| / 16, scale / 1024), up to the rounding of float32 (factor 1 + 2^-18)."""
    scale = np.repeat(np.repeat(np.float64(qt.scale), qt.block[0], 0)[: w.shape[0]], qt.block[1], 1)[:, : w.shape[1]]
    error = np.abs(w.astype(np.float64) - np.asarray(qt.q).astype(np.float64) * scale)
    return bool((error <= np.maximum(np.abs(w.astype(np.float64)) / 16, scale / 1024) * (1 + 2**-18)).all())


@pytest.mark.parametrize("shape", RAGGED)
def test_ragged_edges_in_numpy_and_under_jit(shape):
    w = gaussian(shape)
    qt = quantize(w)
    assert qt.shape == shape and qt.scale.shape == grid(shape, (128, 128)) == tuple(-(-side // 128) for side in shape)
    assert qt.q.dtype == ml_dtypes.float8_e4m3fn and qt.scale.dtype == qt.dtype == np.float32
    assert qt.nbytes == qt.q.nbytes + qt.scale.nbytes and qt.ndim == 2
    assert same_bits(qt, jitted(w)) and same_bits(qt, quantize(jnp.asarray(w)))
    assert within_bound(w, qt)
    corner = w[(qt.scale.shape[0] - 1) * 128 :, (qt.scale.shape[1] - 1) * 128 :]
    np.testing.assert_allclose(qt.scale[-1, -1], np.abs(corner).max() / 448, rtol=2**-19)
    everything = dequantize(qt)
    assert (np.asarray(jax.jit(dequantize)(jitted(w))) == everything).all()
    assert (everything[-1:, -1:] == qt.q[-1, -1].astype(np.float32) * qt.scale[-1, -1]).all()


def test_a_padded_matrix_quantises_like_the_ragged_one():
    w = gaussian((129, 127))
    padded = np.zeros((256, 128), np.float32)
    padded[:129, :127] = w
    whole = quantize(padded)
    ragged = quantize(w)
    assert (whole.scale == ragged.scale).all() and (whole.q[:129, :127] == ragged.q).all()


@pytest.mark.parametrize("block", [(1, 300), (1, 128), (1, 32), (257, 300), (128, 128)])
def test_other_granularities_agree_with_jit(block):
    w = gaussian((257, 300))
    assert same_bits(quantize(w, block), jitted(w, block)) and within_bound(w, quantize(w, block))


def test_zero_blocks_have_scale_one_and_leave_their_neighbours_alone():
    w = gaussian((256, 256))
    w[:128, 128:] = 0
    for qt in (quantize(w), jitted(w)):
        assert float(qt.scale[0, 1]) == 1 and (np.asarray(dequantize(qt))[:128, 128:] == 0).all()
        assert (np.asarray(qt.scale)[[0, 1, 1], [0, 0, 1]] < 1).all()


@pytest.mark.parametrize("amax", [1e-38, 1e-42, 1e-45, 2.0**-92])
def test_tiny_blocks_are_finite_zeros(amax):
    w = np.full((130, 3), amax, np.float32)
    w[129] = 1.0
    for qt in (quantize(w), jitted(w)):
        back = np.asarray(dequantize(qt))
        assert np.asarray(qt.scale)[0, 0] == 1 and (back[:128] == 0).all()
        np.testing.assert_allclose(back[129], 1, rtol=2**-20)


@pytest.mark.parametrize("amax", [2.0**-91, 1e-27, 1e-10, 6e-8, 1.0, 65504.0, 1e30, np.finfo(np.float32).max])
def test_extreme_magnitudes_keep_full_precision(amax):
    w = (gaussian((64, 64)) / 8).clip(-1, 1) * np.float32(amax)
    w[0, 0] = amax
    qt = quantize(w)
    assert same_bits(qt, jitted(w)) and within_bound(w, qt) and sqnr_db(w, dequantize(qt)) > 28
    assert np.isfinite(dequantize(qt)).all() and float(np.abs(qt.q.astype(np.float32)).max()) == 448


def test_float16_weights_lose_nothing_to_a_floor():
    w = gaussian((4, 64), sigma=1e-5).astype(np.float16)
    for block in [(1, 32), (128, 128)]:
        assert sqnr_db(w, dequantize(quantize(w, block))) > 28


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_half_precision_inputs_are_widened_first(dtype):
    w = gaussian((200, 150)).astype(dtype)
    assert same_bits(quantize(w), quantize(w.astype(np.float32))) and same_bits(quantize(w), jitted(jnp.asarray(w)))


def test_amax_of_448_gives_scale_one_and_saturation_stays_finite():
    w = np.float32([[448, -448, 447.9, 0.3]])
    for qt in (quantize(w), jitted(w)):
        assert float(qt.scale[0, 0]) == 1
        assert (np.asarray(dequantize(qt)) == np.float32([[448, -448, 448, 0.3125]])).all()


def test_scales_are_the_same_in_numpy_and_jit_where_a_division_would_differ():
    amax = np.abs(gaussian(100_000, seed=5))
    scale = block_scale(amax)
    assert (np.asarray(jax.jit(block_scale)(amax)) == scale).all()
    np.testing.assert_allclose(scale, amax.astype(np.float64) / 448, rtol=2**-19)
    assert (scale.view(np.uint32) % 16 == 0).all(), "20 significant bits, so that q * scale is exact in float32"


@pytest.mark.parametrize("granularity", ["block", "tensor", "row"])
@pytest.mark.parametrize("seed", range(5))
def test_idempotence_to_the_bit(granularity, seed):
    w = gaussian((256, 300), seed, sigma=10.0 ** (seed - 2))
    block = {"block": (128, 128), "tensor": (256, 300), "row": (1, 300)}[granularity]
    once = quantize(w, block)
    twice = quantize(dequantize(once), block)
    assert same_bits(once, twice) and (dequantize(twice) == dequantize(once)).all()


def test_dequantised_values_are_exact_products():
    qt = quantize(gaussian((130, 130)))
    scale = np.repeat(np.repeat(np.float64(qt.scale), 128, 0)[:130], 128, 1)[:, :130]
    assert (dequantize(qt).astype(np.float64) == qt.q.astype(np.float64) * scale).all()
    assert dequantize(qt, ml_dtypes.bfloat16).dtype == ml_dtypes.bfloat16
    assert (dequantize(qt, ml_dtypes.bfloat16) == dequantize(qt).astype(ml_dtypes.bfloat16)).all()


def test_negative_zero_survives():
    w = np.float32([[-0.0, 1.0, 0.0, -1e-30]])
    for qt in (quantize(w), jitted(w)):
        back = np.asarray(dequantize(qt))
        assert np.signbit(back).tolist() == [[True, False, False, True]] and back[0, 0] == 0


def test_gaussian_sqnr():
    w = gaussian((1024, 1024))
    assert 31.2 < sqnr_db(w, dequantize(quantize(w, w.shape))) < 32.0
    assert 31.2 < sqnr_db(w, dequantize(quantize(w))) < 32.2
    assert 31.5 < sqnr_db(w, dequantize(quantize(w, (1, 128)))) < 32.3


def test_blocks_beat_one_scale_by_20_db_beside_an_extreme_outlier():
    w = gaussian((512, 512))
    w[0, 0] = 3e5
    unaffected = np.ones(w.shape, bool)
    unaffected[:128, :128] = False
    by_block, by_tensor = dequantize(quantize(w)), dequantize(quantize(w, w.shape))
    gain = sqnr_db(w[unaffected], by_block[unaffected]) - sqnr_db(w[unaffected], by_tensor[unaffected])
    assert gain >= 20


@settings(max_examples=150, deadline=None)
@given(
    hnp.arrays(
        np.float32,
        hnp.array_shapes(min_dims=2, max_dims=2, max_side=9),
        elements=st.floats(width=32, allow_nan=False, allow_infinity=False),
    ),
    st.tuples(st.integers(1, 6), st.integers(1, 6)),
)
def test_error_bound_idempotence_and_finiteness_on_any_floats(w, block):
    qt = quantize(w, block)
    back = dequantize(qt)
    assert np.isfinite(back).all() and np.isfinite(qt.scale).all() and (qt.scale > 0).all()
    assert within_bound(w, qt)
    assert same_bits(qt, quantize(back, block))


@settings(max_examples=60, deadline=None)
@given(hnp.arrays(np.float32, (5, 7), elements=st.floats(width=32, allow_nan=False, allow_infinity=False)))
def test_jit_equals_numpy_on_any_floats(w):
    assert same_bits(quantize(w, (2, 3)), jitted(w, (2, 3)))
    assert (np.asarray(jax.jit(dequantize)(jitted(w, (2, 3)))) == dequantize(quantize(w, (2, 3)))).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("convert", [np.asarray, jnp.asarray])
def test_values_that_are_not_finite_are_refused_by_name(bad, convert):
    w = gaussian((200, 200))
    w[199, 5] = bad
    with pytest.raises(UserError, match=r"'layers_3\.mlp\.up\.weight'.*infinity or NaN") as caught:
        quantize(convert(w), name="layers_3.mlp.up.weight")
    assert "\n" not in str(caught.value)
    traced = jitted(w)
    assert np.isnan(np.asarray(traced.scale)).tolist() == [[False, False], [True, False]], "seen, not zeroed"


@pytest.mark.parametrize(
    ("w", "block", "message"),
    [
        (np.ones((2, 2), np.int32), (128, 128), "dtype int32"),
        (np.ones((2, 2), ml_dtypes.float8_e4m3fn), (128, 128), "dtype float8_e4m3fn"),
        (np.ones(3, np.float32), (128, 128), r"shape \(3,\)"),
        (np.ones((0, 3), np.float32), (128, 128), r"shape \(0, 3\)"),
        (np.ones((2, 2), np.float32), (0, 128), r"blocks of \(0, 128\)"),
        (np.full((2, 2), 1e300), (128, 128), "infinity or NaN"),
    ],
)
def test_other_bad_input_is_refused_by_name(w, block, message):
    with pytest.raises(UserError, match=f"'some.weight'.*{message}"):
        quantize(w, block, "some.weight")


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_take_equals_rows_of_the_whole(dtype):
    w = gaussian((300, 130))
    ids = np.array([[0, 127, 128], [299, 5, 256]])
    host, device = quantize(w), jitted(w)
    expected = dequantize(host, dtype)[ids]
    assert take(host, ids, dtype).dtype == dtype and (take(host, ids, dtype) == expected).all()
    rows = jax.jit(take, static_argnums=2)(device, ids, dtype)
    assert rows.shape == (2, 3, 130) and rows.dtype == dtype and (np.asarray(rows) == expected).all()
    text = jax.jit(take, static_argnums=2).lower(device, ids, dtype).as_text()
    assert "300x130xf32" not in text and "300x130xbf16" not in text, "only the rows are widened"


def test_products_differentiate_in_x_and_refuse_the_weight():
    qt, x = jitted(gaussian((6, 4))), jnp.ones((2, 4))
    by_x = jax.grad(lambda x: (x @ dequantize(qt).T).sum())(x)
    assert by_x.dtype == jnp.float32 and jnp.allclose(by_x, dequantize(qt).sum(0, keepdims=True))
    for loss in (
        lambda w: (x @ dequantize(w).T).sum(),
        lambda w: take(w, jnp.array([1])).sum(),
        lambda w: frozen(w).q.astype(jnp.float32).sum(),
    ):
        for differentiate in (jax.grad(loss), jax.jit(jax.grad(loss))):
            with pytest.raises(UserError, match="no gradient.*fake_quant"):
                differentiate(qt)


def test_beside_trainable_leaves_a_frozen_qtensor_gives_only_float32_gradients():
    weights = {"weight": jitted(gaussian((6, 4)))}
    norms = {"scale": jnp.ones((1, 4))}

    @jax.jit
    def loss(norms, weights):
        return ((norms["scale"] * jnp.ones((2, 4))) @ dequantize(weights["weight"]).T).sum()

    grads = jax.grad(loss)(norms, weights)
    assert [leaf.dtype for leaf in jax.tree.leaves(grads)] == [jnp.float32]


class Linear(nn.Module):
    features: int

    @nn.compact
    def __call__(self, x):
        weight = self.param("weight", nn.initializers.normal(), (self.features, x.shape[-1]))
        return x @ (dequantize(weight) if isinstance(weight, QTensor) else weight).T


def test_a_qtensor_stands_in_place_of_a_linen_parameter():
    model, x, w = Linear(4), jnp.ones((2, 4)), gaussian((4, 4))
    qt = jitted(w)
    expected = x @ dequantize(qt).T
    params = {"params": {"weight": qt}}
    assert jax.tree.leaves(qt)[0].dtype == jnp.float8_e4m3fn, "q is the first leaf: Linen checks the shape of that one"
    assert (model.apply(params, x) == expected).all()

    @jax.jit
    def three_times(params, x):
        return jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, model.apply(params, c[1])), (0, x))[1]

    by_hand = x
    for _ in range(3):
        by_hand = model.apply(params, by_hand)
    np.testing.assert_allclose(three_times(params, x), by_hand, rtol=1e-5)


def test_linen_still_checks_the_logical_shape():
    with pytest.raises(Exception, match="shape"):
        Linear(4).apply({"params": {"weight": jitted(gaussian((5, 4)))}}, jnp.ones((2, 4)))


def test_it_is_a_pytree_whose_block_is_static():
    qt = jitted(gaussian((130, 4)))
    leaves, tree = jax.tree.flatten(qt)
    assert len(leaves) == 2 and jax.tree.unflatten(tree, leaves).block == (128, 128)
    assert jax.tree.map(lambda leaf: None, qt).q is None, "placeholders may stand for arrays"
    assert jax.eval_shape(quantize, jnp.ones((130, 4))).shape == (130, 4)
    assert jax.vmap(dequantize)(jax.tree.map(lambda leaf: leaf[None], qt)).shape == (1, 130, 4)
