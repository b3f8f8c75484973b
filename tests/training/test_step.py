"""One step: it learns, it sees quantised weights when told to, and it never sees the future."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtpjax.config import replace
from mtpjax.models.transformer import Transformer
from mtpjax.quant import apply_precision, fake_quant_params
from mtpjax.training import OptimizerConfig
from mtpjax.training import step as steps
from mtpjax.training.losses import IGNORE
from mtpjax.training.step import compiled_nll_sum, compiled_step, init_state, make_optimizer, train_step
from tests.marks import slow

from .conftest import MODEL

MODULE = Transformer(MODEL)
OPTIMIZER = make_optimizer(OptimizerConfig(learning_rate=2e-2, warmup_steps=5), 60)


forward = jax.jit(steps.forward, static_argnames=("model", "quantise"))
loss = jax.jit(steps.loss, static_argnames=("model", "quantise"))


@functools.cache
def params():
    return init_state(MODULE, OPTIMIZER, 0).params


def batch(rows=2, length=12, seed=0):
    ids = np.random.default_rng(seed).integers(0, 256, (rows, length + 1))
    return {"ids": jnp.asarray(ids[:, :-1]), "labels": jnp.asarray(ids[:, 1:])}


@pytest.mark.parametrize("quantise", [slow(False), True])
def test_it_learns_a_batch_by_heart(quantise):
    state, data = init_state(MODULE, OPTIMIZER, 0), batch()
    step = functools.partial(compiled_step, model=MODULE, optimizer=OPTIMIZER, quantise=quantise)
    first = None
    for _ in range(60):
        state, metrics = step(state, data)
        first = first or float(metrics["loss"])
    assert first == pytest.approx(np.log(257), abs=0.1), "at first it guesses"
    assert float(metrics["loss"]) < 0.3
    assert int(state.step) == 60
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(state.params)} == {"float32"}


def test_a_compiled_step_consumes_its_state():
    state, data = init_state(MODULE, OPTIMIZER, 0), batch()
    weight = state.params["embed"]["weight"]
    compiled_step(state, data, model=MODULE, optimizer=OPTIMIZER, quantise=False)
    assert weight.is_deleted()


def test_fake_quantisation_is_in_the_forward_pass_and_equals_fp8():
    sizes = [float(loss(params(), batch(), model=MODULE, quantise=quantise)[0]) for quantise in (False, True)]
    assert sizes[0] != sizes[1]
    plain = forward(params(), batch()["ids"], model=MODULE)
    fake = forward(params(), batch()["ids"], model=MODULE, quantise=True)
    real = forward(apply_precision(params(), "fp8"), batch()["ids"], model=MODULE)
    assert float(jnp.abs(fake - plain).max()) > 1e-4
    np.testing.assert_allclose(fake, real, atol=1e-6)


def test_gradients_flow_straight_through_to_float32_masters():
    """The gradient at the masters is the one at the quantised weights, unrounded."""
    at_masters = jax.grad(lambda p: loss(p, batch(), model=MODULE, quantise=True)[0])(params())
    at_quantised = jax.grad(lambda p: loss(p, batch(), model=MODULE)[0])(fake_quant_params(params()))
    for ours, expected in zip(*map(jax.tree.leaves, (at_masters, at_quantised)), strict=True):
        assert ours.dtype == jnp.float32
        assert float(jnp.abs(ours).max()) > 0
        np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("quantise", [slow(False), True])
def test_the_logits_do_not_depend_on_the_future(quantise):
    """Gradient of the logits at t by the embedding of each place: zero behind t, and not before."""
    ids = jnp.arange(10, 22)[None, :]  # all different, so that each place has its own row of the table

    def at(table, place):
        tree = {**params(), "embed": {"weight": table}, "head": {"weight": jnp.eye(257, 16)}}
        untied = Transformer(replace(MODEL, tie_embeddings=False))
        return steps.forward(tree, ids, model=untied, quantise=quantise)[0, place].sum()

    gradient = jax.jit(jax.grad(at))
    for place in (0, 5, 11):
        by_place = jnp.abs(gradient(params()["embed"]["weight"], place)[ids[0]]).sum(-1)
        assert (by_place[place + 1 :] == 0).all()
        assert (by_place[: place + 1] > 0).all()


def test_ignored_labels_do_not_train():
    state, data = init_state(MODULE, OPTIMIZER, 0), batch()
    dead = {"ids": data["ids"], "labels": jnp.full_like(data["labels"], IGNORE)}
    _, metrics = compiled_step(state, dead, model=MODULE, optimizer=OPTIMIZER, quantise=False)
    assert {name: float(value) for name, value in metrics.items()} == {"loss": 0, "grad_norm": 0, "tokens": 0}
    half = {"ids": data["ids"], "labels": data["labels"].at[1].set(IGNORE)}
    alone = {name: rows[:1] for name, rows in data.items()}
    values = [float(loss(params(), rows, model=MODULE)[0]) for rows in (half, alone)]
    assert values[0] == pytest.approx(values[1], abs=1e-6)


@pytest.mark.slow
def test_the_plain_function_does_what_the_compiled_one_does():
    state, data = init_state(MODULE, OPTIMIZER, 0), batch()
    plain, metrics = train_step(state, data, model=MODULE, optimizer=OPTIMIZER, quantise=True)
    compiled, expected = compiled_step(state, data, model=MODULE, optimizer=OPTIMIZER, quantise=True)
    assert float(metrics["loss"]) == pytest.approx(float(expected["loss"]), rel=1e-6)
    for ours, theirs in zip(*map(jax.tree.leaves, (plain.opt_state, compiled.opt_state)), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-7)


def test_sums_add_up_to_the_loss():
    data = batch()
    data["labels"] = data["labels"].at[0, 3:].set(IGNORE)
    total, count = compiled_nll_sum(params(), data, model=MODULE)
    assert int(count) == 15
    assert float(total / count) == pytest.approx(float(loss(params(), data, model=MODULE)[0]), rel=1e-6)


def test_the_learning_rate_warms_up_and_falls():
    config = OptimizerConfig(learning_rate=1.0, warmup_steps=4, final_fraction=0.1, weight_decay=0.0, clip_norm=1e9)
    optimizer = make_optimizer(config, 20)
    tree = {"w": jnp.ones((1, 1))}
    state, sizes = optimizer.init(tree), []
    for _ in range(21):
        updates, state = optimizer.update({"w": jnp.ones((1, 1))}, state, tree)
        sizes.append(-jax.tree.leaves(updates)[0].item())
    np.testing.assert_allclose(sizes[:5], [0, 0.25, 0.5, 0.75, 1.0], atol=1e-5)
    assert all(b < a for a, b in itertools.pairwise(sizes[4:]))
    assert sizes[20] == pytest.approx(0.1, abs=1e-5)
    for few in (0, 1, 3):
        make_optimizer(config, few).init(tree)


def test_only_matrices_decay():
    config = OptimizerConfig(learning_rate=0.1, warmup_steps=0, weight_decay=0.5)
    optimizer = make_optimizer(config, 10)
    tree = {"weight": jnp.ones((2, 2)), "scale": jnp.ones(2)}
    updates, _ = optimizer.update(jax.tree.map(jnp.zeros_like, tree), optimizer.init(tree), tree)
    scale, weight = jax.tree.leaves(updates)
    np.testing.assert_allclose(weight, -0.05, rtol=1e-5)
    assert (scale == 0).all()
