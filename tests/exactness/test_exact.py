"""Every rule's joint law, by enumeration on tiny vocabularies (invariant 2, its exact layer)."""

import numpy as np
import pytest

from mtpjax.decoding.verify import BLOCK, REJECTION, RULES, relaxed_top_k, threshold, typical
from tests.exactness.exact import (
    KINDS,
    Case,
    error,
    impossible,
    outcome,
    random_case,
    target_law,
    total_variation,
)
from tests.exactness.table import stated_case

LOSSLESS = [REJECTION, BLOCK]
LOSSY = [typical(), threshold(), relaxed_top_k(2)]
SHAPES = [(3, 1), (2, 3)]  # vocabulary, depth
MORE_SHAPES = [(3, 3), (5, 1), (2, 1), (3, 2), (5, 2), (2, 4), (4, 3), (2, 6)]
TOLERANCE = 1e-6


def case_of(shape: tuple[int, int], kind: str, sets: int = 300) -> Case:
    return random_case(np.random.default_rng([*shape, KINDS.index(kind)]), *shape, sets, kind)


def by_name(rules):
    return pytest.mark.parametrize("rule", rules, ids=lambda rule: rule.name)


@by_name(LOSSLESS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_lossless_rule_has_the_targets_joint_law(rule, kind, shape):
    assert error(rule, case_of(shape, kind)) <= TOLERANCE


@pytest.mark.exactness
@by_name(LOSSLESS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", MORE_SHAPES)
def test_a_lossless_rule_has_the_targets_joint_law_on_more_shapes(rule, kind, shape):
    assert error(rule, case_of(shape, kind, sets=400)) <= TOLERANCE


def test_the_rules_labelled_lossless_are_those_tested():
    assert {rule.name for rule in RULES.values() if rule.lossless and rule.samples} == {r.name for r in LOSSLESS}
    lossy = {rule.name for rule in RULES.values() if not rule.lossless}
    assert lossy == {r.name for r in LOSSY} | {"best_of_candidates"}, "the last is in test_trees.py"


def test_the_corners_are_among_the_law_sets():
    case = case_of((3, 3), "sampled")
    p, q = case.p[1], case.q[1]
    assert np.any(np.all(p == q, axis=-1)), "equal laws"
    assert np.any(np.all((p > 0) != (q > 0), axis=-1)), "disjoint supports"
    assert np.any(p.max(axis=-1) == 1) and np.any(q.max(axis=-1) == 1), "one-hot laws"
    assert np.any(np.any(p == 0, axis=-1) & (p.max(axis=-1) < 1)), "zeros"


@pytest.mark.parametrize("kind", KINDS)
def test_block_verification_never_accepts_fewer(kind):
    case = case_of((2, 3), kind)
    more = outcome(BLOCK, case).accepted - outcome(REJECTION, case).accepted
    assert np.all(more >= -TOLERANCE)
    if kind == "sampled":
        assert more.mean() > 1e-3 and more.max() > 0.05, "and more where the laws leave room"


@by_name(LOSSLESS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_uniform_of_zero_accepts_nothing_impossible(rule, kind):
    assert impossible(rule, case_of((2, 3), kind)) == 0


@pytest.mark.parametrize(
    ("rule", "p", "q", "wanted"),
    [
        # H(p) = .673, so min(.09, .3 exp(-H)) = .09: both are kept, and the text has the drafter's law.
        (typical(), [0.6, 0.4], [0.5, 0.5], 0.1),
        # .2 is below the threshold: q a + (1 - A) p = (.5 + .5 * .8, .5 * .2).
        (threshold(0.3), [0.8, 0.2], [0.5, 0.5], 0.1),
        # The two largest of three: (.2, .2, 0) + .6 (.5, .3, .2).
        (relaxed_top_k(2), [0.5, 0.3, 0.2], [0.2, 0.2, 0.6], 0.08),
    ],
)
def test_the_total_variation_of_a_lossy_rule_on_a_stated_case(rule, p, q, wanted):
    case = stated_case(p, q)
    result = outcome(rule, case)
    assert error(rule, case) == pytest.approx(wanted, abs=1e-6)
    assert result.tv[0] == pytest.approx(wanted, abs=1e-6)
    assert wanted >= 0.01


@by_name(LOSSY)
@pytest.mark.parametrize("kind", ["sampled", "deterministic"])
def test_what_a_lossy_rule_reports(rule, kind):
    """At depth 1 it is the total variation of the joint law; deeper, its expected sum is no less."""
    shallow, deep = case_of((3, 1), kind), case_of((2, 3), kind)
    result = outcome(rule, shallow)
    mixed = total_variation(result.joint, target_law(shallow))
    np.testing.assert_allclose(result.tv, mixed, atol=2e-6)
    result = outcome(rule, deep)
    assert np.all(result.tv >= total_variation(result.joint, target_law(deep)) - 2e-6)
    assert error(rule, deep) > 0.1
