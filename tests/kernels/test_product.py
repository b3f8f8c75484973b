"""Products with few rows: every form agrees, and FP8 weights are not unpacked behind our back."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from mtpjax.kernels.product import FEW_ROWS, dequantize_block, product, product_block

RNG = np.random.default_rng(0)


@pytest.mark.parametrize("rows", [1, 2, 3, FEW_ROWS, FEW_ROWS + 1, 40])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("shape", [(1, 1), (33, 17), (64, 172)])
def test_equals_numpy(rows, dtype, shape):
    x = jnp.asarray(RNG.normal(size=(rows, shape[1])), dtype)
    w = jnp.asarray(RNG.normal(size=shape), dtype)
    want = np.asarray(x, np.float64) @ np.asarray(w, np.float64).T
    got = jax.jit(product, static_argnums=2)(x, w, jnp.dtype(jnp.float32))
    np.testing.assert_allclose(got, want, atol=2e-4 if dtype == "float32" else 0.05, rtol=1e-3)


@pytest.mark.parametrize("shape", [(172, 64), (129, 127), (1, 1), (128, 256)])
def test_block_product_equals_dequantised_product(shape):
    q = jnp.asarray(RNG.normal(size=shape), jnp.float8_e4m3fn)
    scale = jnp.asarray(RNG.uniform(0.5, 2, (-(-shape[0] // 128), -(-shape[1] // 128))), jnp.float32)
    x = jnp.asarray(RNG.normal(size=(3, shape[1])), jnp.float32)
    full = np.asarray(dequantize_block(q, scale, (128, 128), jnp.dtype(jnp.float32)))
    for i, j in np.ndindex(shape):
        if i % 50 == 0 and j % 40 == 0:
            assert full[i, j] == np.float32(q[i, j]) * np.float32(scale[i // 128, j // 128])
    got = product_block(x, q, scale, (128, 128), jnp.dtype(jnp.float32))
    np.testing.assert_allclose(got, np.asarray(x) @ full.T, rtol=1e-4, atol=1e-4)


def test_the_product_is_differentiable_in_x():
    q = jnp.asarray(RNG.normal(size=(20, 30)), jnp.float8_e4m3fn)
    scale = jnp.full((1, 1), 0.5)
    f = lambda x: jnp.sum(product_block(x, q, scale, (128, 128), jnp.dtype(jnp.float32)) ** 2)  # noqa: E731
    x = jnp.asarray(RNG.normal(size=(4, 30)), jnp.float32)
    w = dequantize_block(q, scale, (128, 128), jnp.dtype(jnp.float32))
    np.testing.assert_allclose(jax.grad(f)(x), 2 * (x @ w.T) @ w, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("kind", ["fp8", "bf16"])
def test_no_converted_copy_of_a_weight_outlives_a_step(kind):
    """Without the barrier, XLA moves the conversion out of the loop and keeps a 4-byte copy of every weight."""
    layers, size = 6, 256
    weights = [jnp.asarray(RNG.normal(size=(size, size)), jnp.bfloat16) for _ in range(layers)]

    def run(x, weights, n):
        def body(carry):
            i, x = carry
            for w in weights:
                if kind == "fp8":
                    q, scale = w
                    y = product_block(x, q, scale, (128, 128), jnp.dtype(jnp.bfloat16))
                else:
                    y = product(x, w, jnp.dtype(jnp.bfloat16))
                x = y / size
            return i + 1, x

        return lax.while_loop(lambda c: c[0] < n, body, (0, x))[1]

    if kind == "fp8":
        weights = [(w.astype(jnp.float8_e4m3fn), jnp.ones((2, 2))) for w in weights]
    x = jnp.ones((1, size), jnp.bfloat16)
    workspace = jax.jit(run).lower(x, weights, 5).compile().memory_analysis().temp_size_in_bytes
    assert workspace < 2 * size * size * 4, "more than two converted weights are alive at once"
