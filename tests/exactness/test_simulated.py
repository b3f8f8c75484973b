"""Sampled output has the target's joint law (invariant 2, its simulated layer), row by row (invariant 3)."""

import numpy as np
import pytest

from mtpjax.decoding.drive import run
from mtpjax.decoding.request import make_request
from mtpjax.decoding.result import emitted_ids
from mtpjax.decoding.verify import typical
from tests.exactness.drafters import V, markov
from tests.exactness.laws import encode, sequence_law
from tests.exactness.simulate import (
    CALL_ROWS,
    DRAFTERS,
    FAST,
    FULL,
    GROUPS,
    TABLE,
    cells,
    counts,
    law_of,
    p_values,
    request_of,
)
from tests.exactness.statistics import LEVEL, POWER, SEEN_TV, chi_square, power, rejected, rows_needed
from tests.tiny import table_target


def failures(combinations):
    """Every p-value of a family, and those that Holm's procedure rejects."""
    family = sum(combination.tests for combination in combinations)
    found = [(str(c), p) for c in combinations for p in p_values(c, family=family)]
    bad = rejected([p for _, p in found])
    return [entry for entry, wrong in zip(found, bad, strict=True) if wrong]


def test_the_output_has_the_targets_law():
    assert failures(FAST) == []


@pytest.mark.exactness
def test_the_output_has_the_targets_law_in_every_combination():
    assert failures(FULL) == []


def test_the_stated_power():
    """The chance to see a total variation of 0.02 is computed; here it is also tried, in the worst direction."""
    rng, size, family = np.random.default_rng(0), 81, 10
    rows = rows_needed(size, family)
    assert power(rows, size, family) >= POWER > power(rows // 2, size, family)
    law = rng.dirichlet(np.full(size, 3.0))
    sign = np.where(np.cumsum(law) <= 0.5, 1, -1)
    other = law * (1 + 2 * SEEN_TV * sign)
    other /= other.sum()
    assert 0.5 * np.abs(other - law).sum() == pytest.approx(SEEN_TV, rel=0.05)
    seen = [chi_square(rng.multinomial(rows, other), law) <= LEVEL / family for _ in range(300)]
    assert np.mean(seen) >= POWER - 0.01
    right = [chi_square(rng.multinomial(rows, law), law) for _ in range(300)]
    assert 0.4 < np.mean(right) < 0.6
    assert all(cells(c) <= 243 for c in FULL)


def test_holm():
    assert rejected([0.5, 4e-4, 3e-4, 0.9], level=1e-3) == [False, False, False, False]
    assert rejected([0.5, 3e-4, 2e-4, 0.9], level=1e-3) == [False, True, True, False]
    assert rejected([0.5, 6e-4, 2e-4, 0.9], level=1e-3) == [False, False, True, False]


@pytest.mark.exactness
def test_a_lossy_rule_fails_the_gate():
    request = request_of(typical(), markov(1), 1, GROUPS["plain"])
    found = counts(request, 1, rows=CALL_ROWS)
    assert chi_square(found[0], law_of(GROUPS["plain"][0], 1)) < LEVEL


def test_the_law_of_sequences_ends_rows_at_a_stop_id():
    law = sequence_law(np.asarray(TABLE), (1, 2), 3, stop_ids=[0])
    assert law.sum() == pytest.approx(1)
    assert law[encode(np.array([[0, V, V]]), V)[0]] > 0
    assert law[encode(np.array([[0, 1, 1]]), V)[0]] == law[encode(np.array([[1, V, V]]), V)[0]] == 0


@pytest.mark.parametrize("rule", [pytest.param("rejection", marks=pytest.mark.exactness), "block"])
def test_a_seeded_row_equals_its_solo_run(rule):
    """Invariant 3: per-row keys; batch-mates, their settings and their number do not matter.

    So what is shown for large batches holds for a batch of one.
    """
    target = table_target(V)
    prompts = [[1, 2], [2, 1, 1, 1, 0, 2], [0]]
    settings = {"max_new_tokens": 15, "drafter": DRAFTERS["stopping"](2), "rule": rule}
    rows = {"temperature": [1.0, 0.8, 1.5], "top_p": [0.9, 1.0, 0.7], "seed": [11, 5, 11]}
    together, _ = run(target, TABLE, make_request(target, prompts, **settings, **rows))
    for row, prompt in enumerate(prompts):
        alone = {key: value[row] for key, value in rows.items()}
        solo, _ = run(target, TABLE, make_request(target, [prompt], **settings, **alone))
        assert emitted_ids(solo)[0] == emitted_ids(together)[row]
