"""The decoder: windows, chunks and batches agree; what is masked is not seen; quantised weights stand in."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtpjax.models.cache import init_cache, write
from mtpjax.models.config import ModelConfig, RopeConfig
from mtpjax.models.transformer import Transformer
from mtpjax.quant.policy import apply_precision
from tests.marks import slow
from tests.tiny import CONFIG, tiny_model


@partial(jax.jit, static_argnames=("model", "features"))
def forward(model, params, *window, logits_at=None, features=()):
    """One compiled pass; eager operations would each be compiled alone."""
    return model.apply({"params": params}, *window, logits_at=logits_at, features=features)


IDS = jnp.asarray(np.random.default_rng(0).integers(0, CONFIG.vocab_size, (2, 40)), jnp.int32)
VARIANTS = {
    "tied": {},
    "untied": {"tie_embeddings": False},
    "biases and norms": {"qkv_bias": True, "o_bias": True, "mlp_bias": True, "qk_norm": True},
    "linear rope": {"rope": RopeConfig(kind="linear", factor=2.0)},
    "llama3 rope": {"rope": RopeConfig(kind="llama3", factor=8.0, original_context=64)},
    "yarn rope": {"rope": RopeConfig(kind="yarn", factor=4.0, original_context=64)},
}


FAST = ("biases and norms",)


@pytest.mark.parametrize("variant", [*FAST, *(slow(name) for name in VARIANTS if name not in FAST)])
def test_cached_windows_equal_one_pass_without_cache(variant):
    config = ModelConfig(**{**CONFIG.model_dump(), **VARIANTS[variant]})
    model, params = tiny_model(config)
    whole = forward(model, params, IDS).logits
    cache, parts, start = model.init_cache(2, 64), [], 0
    for width in (17, 1, 1, 4, 1, 4, 4, 4, 4):
        out = forward(model, params, IDS[:, start : start + width], cache)
        parts.append(out.logits)
        start += width
        cache = out.cache.replace(length=out.cache.length + width)
    np.testing.assert_allclose(jnp.concatenate(parts, axis=1), whole, atol=2e-4, rtol=1e-4)


def test_ragged_rows_and_stale_slots():
    """Rows of different lengths, behind which lie garbage keys: each row sees its own tokens only."""
    model, params = tiny_model()
    cache = forward(model, params, IDS, model.init_cache(2, 64)).cache
    for lengths in ([5, 30], [0, 12]):
        rolled = cache.replace(length=jnp.asarray(lengths, jnp.int32))
        window = jnp.stack([IDS[row, n : n + 4] for row, n in enumerate(lengths)])
        out = forward(model, params, window, rolled)
        for row, n in enumerate(lengths):
            whole = forward(model, params, IDS[row : row + 1, : n + 4]).logits[0, -4:]
            np.testing.assert_allclose(out.logits[row], whole, atol=2e-4, rtol=1e-4)


def test_no_query_sees_the_future():
    """Causality by gradient: the logits of place t do not depend on the embedding of a later token."""
    model, params = tiny_model()

    def loss(table, place):
        changed = {**params, "embed": {"weight": table}}
        return jnp.sum(forward(model, changed, jnp.arange(12)[None]).logits[0, place])

    config = ModelConfig(**{**CONFIG.model_dump(), "tie_embeddings": False})
    model, params = tiny_model(config)
    for place in (0, 5, 11):
        grad = jax.grad(loss)(params["embed"]["weight"], place)
        moved = jnp.any(grad != 0, axis=1)[:12]
        assert moved.tolist() == [i <= place for i in range(12)]


def test_a_tree_mask_hides_siblings():
    """Two candidates after one token: each sees its own branch, as if it were decoded alone."""
    model, params = tiny_model()
    cache = forward(model, params, IDS[:1, :10], model.init_cache(1, 64)).cache
    cache = cache.replace(length=jnp.asarray([10], jnp.int32))
    window = jnp.asarray([[7, 11, 22]], jnp.int32)  # 11 and 22 both follow 7
    mask = jnp.asarray([[1, 0, 0], [1, 1, 0], [1, 0, 1]], bool)
    positions = jnp.asarray([[10, 11, 11]], jnp.int32)
    tree = forward(model, params, window, cache, positions, mask).logits[0]
    for place, token in ((1, 11), (2, 22)):
        chain = forward(model, params, jnp.asarray([[7, token]], jnp.int32), cache).logits[0, 1]
        np.testing.assert_allclose(tree[place], chain, atol=2e-4, rtol=1e-4)


def test_logits_at_and_features():
    model, params = tiny_model()
    whole = forward(model, params, IDS, features=(0, 1, 2))
    some = forward(model, params, IDS, logits_at=jnp.asarray([[3], [39]]))
    assert some.logits.shape == (2, 1, CONFIG.vocab_size)
    np.testing.assert_allclose(some.logits[:, 0], whole.logits[jnp.arange(2), jnp.asarray([3, 39])], atol=1e-4)
    assert [f.shape for f in whole.features] == [(2, 40, CONFIG.d_model)] * 3
    np.testing.assert_array_equal(whole.features[0], params["embed"]["weight"][IDS])


def test_a_window_past_the_capacity_is_dropped_not_clamped():
    cache = init_cache(1, 1, 2, 32, 4, jnp.float32)
    cache = write(cache.replace(length=jnp.asarray([30])), 0, jnp.ones((1, 4, 2, 4)), jnp.ones((1, 4, 2, 4)))
    written = np.asarray(cache.k[0, 0, 0, :, 0])
    assert written.tolist() == [0.0] * 30 + [1.0, 1.0]


def test_fp8_weights_stand_in_for_arrays():
    """Same model, QTensor leaves: near the f32 logits, and equal to running on the dequantised weights."""
    model, params = tiny_model()
    fp8 = apply_precision(params, "fp8")
    logits = forward(model, fp8, IDS).logits
    from mtpjax.quant.qtensor import QTensor, dequantize

    plain = jax.tree.map(
        lambda x: dequantize(x) if isinstance(x, QTensor) else x, fp8, is_leaf=lambda x: isinstance(x, QTensor)
    )
    np.testing.assert_allclose(logits, forward(model, plain, IDS).logits, atol=1e-4, rtol=1e-4)
    assert 0 < float(jnp.max(jnp.abs(logits - forward(model, params, IDS).logits))) < 30


@pytest.mark.parametrize("precision", ["bf16", "f16", "fp8"])
def test_low_precisions_stay_near(precision):
    _, params = tiny_model()
    dtype = jnp.dtype("float16") if precision == "f16" else jnp.dtype("bfloat16")
    low = forward(Transformer(CONFIG, dtype), apply_precision(params, precision), IDS).logits
    high = forward(Transformer(CONFIG), params, IDS).logits
    assert low.dtype == jnp.float32
    error = jnp.linalg.norm(low - high) / jnp.linalg.norm(high)
    assert float(error) < (0.2 if precision == "fp8" else 0.05)
