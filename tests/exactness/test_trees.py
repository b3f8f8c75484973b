"""Several candidates without loss: the recursive residual's joint law, by enumeration (invariant 2, exact layer)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtpjax.decoding import tree
from mtpjax.decoding.drafters import Proposal
from mtpjax.decoding.verify import REJECTION, best_of_candidates
from mtpjax.decoding.verify import tree as verify_tree
from mtpjax.decoding.verify.tree import verify_recursively
from tests.exactness import trees
from tests.exactness.mutants import patched

TOLERANCE = 2e-6
FAST = [((0, 0), 3), (tree.candidates(2, 2), 2)]
FULL = [((0, 0, 0), 3), ((0, 0), 5), (tree.candidates(3, 2), 2), ((0, 0, 1, 1, 2), 2), ((0, 0, 1, 2), 3)]


@pytest.mark.parametrize("kind", trees.KINDS)
@pytest.mark.parametrize(("parents", "V"), FAST)
def test_a_tree_has_the_targets_joint_law(parents, V, kind):
    assert trees.error(parents, V, 40, kind) <= TOLERANCE


@pytest.mark.exactness
@pytest.mark.parametrize("kind", trees.KINDS)
@pytest.mark.parametrize(("parents", "V"), FULL)
def test_a_tree_has_the_targets_joint_law_on_more_shapes(parents, V, kind):
    assert trees.error(parents, V, 60, kind, seed=1) <= TOLERANCE


def test_siblings_drawn_without_replacement_taken_for_independent_are_seen():
    """The known bug: the ratio sees q with the earlier siblings, or the residual does."""
    assert trees.error((0, 0), 3, 40, "distinct", mutate=lambda p: p.replace(distinct=False)) > 0.05


def test_a_residual_that_is_not_taken_is_seen():
    with patched(verify_tree, "residual", lambda p, q: p):
        assert trees.error((0, 0, 0), 2, 40, "independent") > 0.05


def test_one_child_a_level_is_rejection_sampling():
    """The same coins and the same draws: a chain by the tree's way is a chain by its own."""
    rng = np.random.default_rng(0)
    B, D, V = 64, 3, 5
    p = jnp.asarray(rng.dirichlet(np.ones(V), (B, D + 1)), jnp.float32)
    q = jnp.asarray(rng.dirichlet(np.ones(V), (B, D)), jnp.float32)
    tokens, count = (
        jnp.asarray(rng.integers(0, V, (B, D)), jnp.int32),
        jnp.asarray(rng.integers(0, D + 1, B), jnp.int32),
    )
    keys = jax.vmap(jax.random.key)(jnp.arange(B))
    for law in (q, None):
        proposal = Proposal(tokens, law, count, tree.chain(D))
        one, other = REJECTION.verify(p, proposal, keys, {}), verify_recursively(p, proposal, keys, {})
        assert one.accepted.tolist() == other.accepted.tolist()
        assert one.next_token.tolist() == other.next_token.tolist()


def test_the_pick_of_the_best_is_lossy_and_says_by_how_much():
    """Two stated drafts, the likelier of which always wins: the text is it, at 1 - p from the target's law."""
    p = jnp.broadcast_to(jnp.asarray([0.5, 0.3, 0.2]), (2000, 3, 3))
    drafts = jnp.broadcast_to(jnp.asarray([1, 0]), (2000, 2))
    keys = jax.vmap(jax.random.key)(jnp.arange(2000))
    proposal = Proposal(drafts, None, jnp.full(2000, 2), (0, 0))
    verdict = best_of_candidates().verify(p, proposal, keys, {"threshold": jnp.float32(0.0)})
    assert np.all(np.asarray(verdict.accepted) == 1) and np.all(np.asarray(verdict.path) == 2)
    np.testing.assert_allclose(verdict.tv, 0.5)
