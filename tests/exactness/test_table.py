"""The page of exactness says what the gate is, and its combinations' own laws are exact."""

import pytest

from mtpjax.decoding.verify import RULES
from tests.exactness.exact import error
from tests.exactness.mutants import MUTANTS
from tests.exactness.simulate import FULL, GROUPS, Combination
from tests.exactness.table import COMMAND, DOC, STATED, TOLERANCE, combination_case, stated_case


def test_the_page_is_of_this_gate():
    text = DOC.read_text(encoding="utf-8")
    missing = [str(entry) for entry in FULL if f"| {entry} |" not in text]
    missing += [mutant.name for mutant in MUTANTS if f"| {mutant.name} |" not in text]
    assert missing == [], f"run {COMMAND}"
    assert "; 0 failures" in text


@pytest.mark.parametrize("drafter", ["ngram", "sampled", "stopping"])
def test_a_combinations_own_laws_are_exact(drafter):
    combination = Combination("block", drafter, 2, "top-p")
    assert error(RULES["block"], combination_case(combination, GROUPS["top-p"][0])) <= TOLERANCE


@pytest.mark.parametrize("name", STATED)
def test_lossy_rules_cost_at_least_a_hundredth_on_the_stated_case(name):
    assert error(RULES[name], stated_case(*STATED[name])) >= 0.01
