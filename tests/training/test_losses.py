"""The mean is over what counts, and what does not count adds nothing, however wild."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtpjax.training.losses import IGNORE, cross_entropy, token_nll


def example(seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(2, 5, 7)).astype(np.float32) * 3, rng.integers(0, 7, (2, 5))


def test_it_is_the_negative_log_of_the_softmax():
    logits, labels = example()
    law = np.exp(logits.astype(np.float64))
    law /= law.sum(-1, keepdims=True)
    expected = -np.log(np.take_along_axis(law, labels[..., None], -1)[..., 0])
    nll, valid = token_nll(jnp.asarray(logits), jnp.asarray(labels))
    np.testing.assert_allclose(nll, expected, rtol=1e-5)
    assert valid.all()
    loss, count = cross_entropy(jnp.asarray(logits), jnp.asarray(labels))
    assert count == 10
    np.testing.assert_allclose(loss, expected.mean(), rtol=1e-6)


def test_the_mean_is_over_valid_places():
    logits, labels = example()
    masked = labels.copy()
    masked[0, 1:] = IGNORE
    masked[1, 4] = -1
    expected = np.asarray(token_nll(jnp.asarray(logits), jnp.asarray(labels))[0])[masked >= 0].mean()
    loss, count = cross_entropy(jnp.asarray(logits), jnp.asarray(masked))
    assert count == 5
    np.testing.assert_allclose(loss, expected, rtol=1e-6)


@pytest.mark.parametrize("wild", [np.inf, -np.inf, np.nan, 1e38])
def test_ignored_places_add_nothing_whatever_they_hold(wild):
    logits, labels = example()
    labels[:, 3] = IGNORE
    bad = logits.copy()
    bad[:, 3] = wild
    value_and_grad = jax.value_and_grad(lambda z: cross_entropy(z, jnp.asarray(labels))[0])
    value, grad = value_and_grad(jnp.asarray(bad))
    assert value == value_and_grad(jnp.asarray(logits))[0]
    assert (np.asarray(grad)[:, 3] == 0).all()
    assert np.isfinite(grad).all()


def test_no_valid_label_gives_zero_and_a_zero_gradient():
    logits = jnp.asarray(example()[0])
    labels = jnp.full((2, 5), IGNORE)
    value, grad = jax.value_and_grad(lambda z: cross_entropy(z, labels)[0])(logits)
    assert value == 0
    assert (grad == 0).all()


def test_half_precision_logits_are_summed_in_f32():
    logits, labels = (jnp.asarray(part) for part in example())
    loss, _ = cross_entropy(logits.astype(jnp.bfloat16), labels)
    assert loss.dtype == jnp.float32
    np.testing.assert_allclose(loss, cross_entropy(logits, labels)[0], atol=0.02)
