"""Marks of single parameters."""

import pytest


def slow(value):
    """A parameter that `make test` leaves out; `make test-slow`, and so `.ci/run`, has it."""
    return pytest.param(value, marks=pytest.mark.slow)
