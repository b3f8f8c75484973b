"""The test behind the simulated layers: chi-square, its power, and Holm's correction over a family."""

import numpy as np
from scipy import stats

LEVEL = 1e-3  # chance that a family of tests fails although every law is right
SEEN_TV = 0.02  # total variation that one test must see ...
POWER = 0.99  # ... with this chance
RARE = 8  # cells expected less often than this are counted together


def chi_square(counts: np.ndarray, law: np.ndarray) -> float:
    """p-value of counts under a law; an outcome that can't happen but did gives 0."""
    if counts[law == 0].sum() > 0:
        return 0.0
    expected = law * counts.sum()
    rare = (expected < RARE) & (law > 0)
    common = (law > 0) & ~rare
    observed, wanted = counts[common], expected[common]
    if rare.any():
        observed, wanted = np.append(observed, counts[rare].sum()), np.append(wanted, expected[rare].sum())
    if len(wanted) < 2:
        return 1.0
    return float(stats.chi2.sf(((observed - wanted) ** 2 / wanted).sum(), len(wanted) - 1))


def power(rows: int, cells: int, family: int) -> float:
    """Chance to see a total variation of `SEEN_TV` in the worst direction, at the strictest level of the family.

    The statistic is then non-central with rows * sum(d^2 / law), where sum |d| = 2 TV; by Cauchy-Schwarz that is at
    least rows (2 TV)^2, whatever the law and the direction d.
    """
    critical = stats.chi2.isf(LEVEL / family, cells - 1)
    return float(stats.ncx2.sf(critical, cells - 1, rows * (2 * SEEN_TV) ** 2))


def rows_needed(cells: int, family: int) -> int:
    """Smallest number of rows, in thousands, with the stated power."""
    thousands = next(n for n in range(1, 1000) if power(1000 * n, cells, family) >= POWER)
    return 1000 * thousands


def rejected(p_values: list[float], level: float = LEVEL) -> list[bool]:
    """Holm's step-down procedure: which of a family are rejected."""
    order = np.argsort(p_values)
    out, failing = [False] * len(p_values), True
    for rank, at in enumerate(order):
        failing = failing and p_values[at] <= level / (len(p_values) - rank)
        out[at] = failing
    return out
