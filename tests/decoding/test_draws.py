"""Drafted tokens come from the law that is reported, siblings without replacement, and parameters are checked."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtpjax.decoding import tree
from mtpjax.decoding.drafters import Proposal
from mtpjax.decoding.drafters.draws import draw_each, draw_siblings
from mtpjax.decoding.drafters.params import check_params
from mtpjax.decoding.sampling import Law, step_keys
from mtpjax.decoding.verify.tree import sibling_law
from mtpjax.errors import UserError
from tests.exactness.statistics import chi_square

LOGITS = np.array([1.0, 0.2, -0.5, 0.6], np.float32)


def law(rows, temperature=1.0):
    fill = lambda value, dtype: jnp.full(rows, value, dtype)  # noqa: E731
    return Law(fill(temperature, jnp.float32), fill(0, jnp.int32), fill(1.0, jnp.float32), fill(0.0, jnp.float32))


def keys(rows):
    return step_keys(jax.vmap(jax.random.key)(jnp.arange(rows, dtype=jnp.uint32)), jnp.zeros(rows, jnp.int32))


def test_siblings_are_draws_without_replacement():
    rows = 40_000
    logits = jnp.broadcast_to(LOGITS, (rows, 4))
    tokens, q = jax.jit(lambda: draw_siblings(logits, law(rows), keys(rows), 1, 2, True))()
    p = np.exp(LOGITS) / np.exp(LOGITS).sum()
    wanted = np.zeros((4, 4))
    for a, b in itertools.permutations(range(4), 2):
        wanted[a, b] = p[a] * p[b] / (1 - p[a])
    found = np.bincount(np.asarray(tokens) @ [4, 1], minlength=16)
    assert chi_square(found, wanted.ravel()) > 1e-3
    np.testing.assert_allclose(q, np.broadcast_to(p, (rows, 2, 4)), rtol=1e-5)


def test_greedy_rows_take_the_largest_logits_with_a_one_hot_law():
    tokens, q = draw_siblings(jnp.asarray(LOGITS)[None], law(1, 0.0), keys(1), 1, 3, True)
    assert tokens.tolist() == [[0, 3, 1]]
    assert q is not None
    assert np.argmax(q, axis=2).tolist() == [[0, 3, 1]]
    assert np.sum(q) == 3


def test_a_law_with_fewer_tokens_than_siblings_has_nothing_left_for_the_rest():
    one = Law(jnp.ones(1), jnp.array([1], jnp.int32), jnp.ones(1), jnp.zeros(1))
    tokens, q = draw_siblings(jnp.asarray(LOGITS)[None], one, keys(1), 1, 2, True)
    assert q is not None
    proposal = Proposal(tokens, q, jnp.array([2], jnp.int32), tree.candidates(2, 1), distinct=True)
    assert tokens[0, 0] == 0
    assert float(jnp.sum(sibling_law(proposal, jnp.array([[1, 2]], jnp.int32), 1, 4))) == 0


def test_places_of_a_level_and_levels_have_streams_of_their_own():
    rows = 4_000
    logits = jnp.broadcast_to(jnp.zeros(50), (rows, 2, 50))
    first, q = draw_each(logits, law(rows), keys(rows), 1, True)
    second, _ = draw_each(logits, law(rows), keys(rows), 2, True)
    assert q is not None and q.shape == (rows, 2, 50)
    drawn = np.concatenate([first, second], axis=1)
    for a, b in itertools.combinations(range(4), 2):
        assert np.mean(drawn[:, a] == drawn[:, b]) < 0.04  # by chance: 0.02


def test_a_deterministic_draft_has_no_law():
    tokens, q = draw_each(jnp.asarray(LOGITS)[None, None], law(1), keys(1), 1, False)
    assert tokens.tolist() == [[0]] and q is None


WANTED = {"head": {"weight": jax.ShapeDtypeStruct((3, 2), jnp.float32)}}


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (None, "needs its parameters"),
        ({"head": {}}, "head/weight of drafter 'mtp' is unassigned"),
        ({"head": {"weight": None}}, "head/weight of drafter 'mtp' is unassigned"),
        (WANTED, "shape without values"),
        ({"head": {"weight": np.zeros((2, 3))}}, r"has shape \(2, 3\), expected \(3, 2\)"),
        ({"head": {"weight": np.zeros((3, 2)), "bias": np.zeros(3)}}, "no parameter head/bias"),
    ],
)
def test_invariant_9_a_drafter_with_an_unassigned_parameter_does_not_run(params, message):
    with pytest.raises(UserError, match=message):
        check_params("mtp", params, WANTED)


def test_parameters_that_fit_pass_and_a_drafter_without_any_takes_none():
    check_params("mtp", {"head": {"weight": np.zeros((3, 2))}}, WANTED)
    check_params("ngram", None, None)
    with pytest.raises(UserError, match="leave drafter_params out"):
        check_params("ngram", {"x": np.zeros(1)}, None)
