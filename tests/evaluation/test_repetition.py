"""Counting, against counts made by hand."""

import pytest

from mtpjax.evaluation.repetition import agreement, distinct, rep, repetition, seq_rep


def test_rep():
    #                       a  b  a: 2 back  c  d  b: 4 back  e  a: 5 back
    assert rep([1, 2, 1, 3, 4, 2, 5, 1], 4) == 2 / 8
    assert rep([7, 7, 7, 7], 1) == 3 / 4
    assert rep([], 4) == 0


def test_seq_rep():
    assert seq_rep([1, 2, 3, 4, 1, 2, 3, 4], 4) == pytest.approx(1 - 4 / 5)  # 1234 2341 3412 4123 1234
    assert seq_rep([1, 2, 3], 4) == 0
    assert seq_rep([5] * 8, 4) == pytest.approx(1 - 1 / 5)


def test_distinct_counts_over_all_texts():
    assert distinct([[1, 2, 1], [1, 2]], 1) == 2 / 5
    assert distinct([[1, 2, 1], [1, 2]], 2) == 2 / 3  # 12 21 12
    assert distinct([[], [1]], 2) == 0


def test_repetition_by_name():
    assert repetition([[1, 2, 3, 4], [5, 5, 5, 5, 5]]) == {
        "rep-4": pytest.approx((0 + 4 / 5) / 2),
        "seq-rep-4": pytest.approx((0 + 1 / 2) / 2),
        "distinct-1": 5 / 9,
        "distinct-2": 4 / 7,
    }
    assert set(repetition([]).values()) == {0}


@pytest.mark.parametrize(
    ("ids", "reference", "equal", "compared", "first"),
    [
        ([1, 2, 3], [1, 2, 3], 3, 3, None),
        ([1, 2, 9, 4], [1, 2, 3, 4], 2, 4, 2),
        ([1, 2], [1, 2, 3, 4], 2, 2, None),
        ([9], [1], 0, 1, 0),
        ([], [1], 0, 0, None),
    ],
)
def test_agreement(ids, reference, equal, compared, first):
    found = agreement(ids, reference, margins=[0.1, 0.2, 0.3, 0.4])
    assert (found.equal, found.compared, found.first_difference) == (equal, compared, first)
    assert found.share == (equal / compared if compared else 1)
    assert found.margin == (None if first is None else [0.1, 0.2, 0.3, 0.4][first])
