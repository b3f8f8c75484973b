"""Attention over the cache against a plain softmax, block borders and ragged rows included."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtpjax.kernels.attention import BLOCK, attention, attention_window

RNG = np.random.default_rng(0)
L, B, K, G, H = 2, 3, 2, 3, 8


def reference(q, k, v, lengths, mask):
    """Softmax attention in float64, one row, head and query at a time."""
    out = np.zeros(q.shape)
    for b, w, n in np.ndindex(q.shape[:3]):
        seen = list(range(lengths[b])) + [lengths[b] + j for j in range(mask.shape[2]) if mask[b, w, j]]
        keys, values = k[b, n // G, seen].astype(np.float64), v[b, n // G, seen].astype(np.float64)
        score = keys @ q[b, w, n].astype(np.float64) / np.sqrt(H)
        weight = np.exp(score - score.max())
        out[b, w, n] = weight @ values / weight.sum()
    return out


@pytest.mark.parametrize("capacity", [32, BLOCK, 3 * BLOCK])
@pytest.mark.parametrize(("window", "behind"), [(1, 1), (4, 4), (2, 6)], ids=["step", "window", "level of a tree"])
def test_equals_softmax(capacity, window, behind):
    """The window is the last part of what lies behind the committed slots."""
    lengths = [0, min(BLOCK - 2, capacity - behind), capacity - behind]
    q = RNG.normal(size=(B, window, K * G, H)).astype(np.float32)
    k, v = RNG.normal(size=(2, L, B, K, capacity, H)).astype(np.float32)
    mask = np.broadcast_to(np.tri(behind, dtype=bool)[-window:], (B, window, behind))
    run = jax.jit(attention, static_argnums=3)
    got = run(q, k, v, 1, jnp.asarray(lengths, jnp.int32), jnp.asarray(mask))
    np.testing.assert_allclose(got, reference(q, k[1], v[1], lengths, mask), atol=2e-5)


def test_stale_keys_do_not_matter():
    """What lies behind the window, even infinities in keys, changes nothing."""
    q = jnp.asarray(RNG.normal(size=(1, 2, K * G, H)), jnp.float32)
    k, v = RNG.normal(size=(2, 1, 1, K, 32, H)).astype(np.float32)
    mask, length = jnp.ones((1, 2, 2), bool), jnp.asarray([5], jnp.int32)
    clean = attention(q, jnp.asarray(k), jnp.asarray(v), 0, length, mask)
    k[..., 7:, :], v[..., 7:, :] = 1e30, -1e30
    np.testing.assert_array_equal(clean, attention(q, jnp.asarray(k), jnp.asarray(v), 0, length, mask))


def test_the_form_without_cache_agrees():
    T = 20
    q = RNG.normal(size=(B, T, K * G, H)).astype(np.float32)
    k, v = RNG.normal(size=(2, B, T, K, H)).astype(np.float32)
    mask = jnp.broadcast_to(jnp.tril(jnp.ones((T, T), bool)), (B, T, T))
    cached = jnp.pad(jnp.asarray([k, v]).transpose(0, 1, 3, 2, 4), ((0, 0), (0, 0), (0, 0), (0, 12), (0, 0)))
    got = attention_window(*map(jnp.asarray, (q, k, v)), mask)
    want = attention(jnp.asarray(q), cached[0][None], cached[1][None], 0, jnp.zeros(B, jnp.int32), mask)
    np.testing.assert_allclose(got, want, atol=2e-5)
