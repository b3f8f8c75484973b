"""The gate fails on every known bug, put back one by one; and passes where nothing is put back."""

import pytest

from mtpjax.decoding.verify import BLOCK, REJECTION
from tests.exactness.exact import error
from tests.exactness.mutants import CAUGHT_P, MUTANTS, TOLERANCE, Mutant, case_of, run_gate, verify_gate


def marked(mutant: Mutant):
    # Each of these compiles a loop; the greedy rows' stands for them in the fast suite.
    slow = mutant.layer == "run" and "greedy" not in mutant.name
    return pytest.param(mutant, id=mutant.name, marks=[pytest.mark.exactness] if slow else [])


@pytest.mark.parametrize("mutant", [marked(mutant) for mutant in MUTANTS])
def test_the_gate_sees(mutant):
    measured = mutant.measure()
    assert mutant.caught(measured), measured


def test_the_gate_passes_what_is_right():
    """The same cases and seeds without a bug."""
    for rule in (REJECTION, BLOCK):
        assert error(rule, case_of()) <= TOLERANCE
        assert verify_gate(rule) > 1e-3


@pytest.mark.exactness
def test_the_gate_passes_the_right_loop():
    assert min(run_gate("top-p"), run_gate("mixed")) > 1e-3 > CAUGHT_P
