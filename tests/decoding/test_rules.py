"""Acceptance rules as the public call sees them: names, numbers, labels, what a lossy one reports."""

import jax.numpy as jnp
import numpy as np
import pytest

from mtpjax.decoding import loop
from mtpjax.decoding.drafters import Proposal, chain
from mtpjax.decoding.drive import run
from mtpjax.decoding.request import make_request
from mtpjax.decoding.result import emitted_ids
from mtpjax.decoding.verify import RULES, Rule, relaxed_top_k, threshold, typical
from mtpjax.errors import UserError
from tests.exactness.drafters import V, markov, table
from tests.exactness.laws import processed
from tests.exactness.simulate import TABLE
from tests.marks import slow
from tests.tiny import table_target

PROMPTS = [[2, 1, 0, 1], [0, 2], [1]]
LOSSY = [name for name, rule in RULES.items() if not rule.lossless]


def drive(prompts=PROMPTS, **settings):
    target = table_target(V)
    settings = {"max_new_tokens": 20, "drafter": markov(2), **settings}
    return run(target, TABLE, make_request(target, prompts, **settings))


def test_names_and_labels():
    assert list(RULES) == ["greedy", "rejection", "block", *LOSSY]
    assert LOSSY == ["typical", "threshold", "relaxed_top_k", "best_of_candidates"]
    assert all(rule.name == name for name, rule in RULES.items())


@pytest.mark.parametrize("name", LOSSY)
def test_a_lossy_rule_says_so_in_its_first_line(name):
    import importlib

    assert importlib.import_module(f"mtpjax.decoding.verify.{name}").__doc__.startswith("Lossy")


@pytest.mark.parametrize("rule", [name if name == "block" else slow(name) for name in RULES])
def test_every_rule_is_token_identical_when_greedy(rule):
    """At temperature 0 the law is one-hot: a lossy rule keeps what the arg-max is, nothing else."""
    plain, _ = drive(drafter=None)
    greedy, stats = drive(rule=rule)
    assert emitted_ids(greedy) == emitted_ids(plain)
    assert stats.lossless == RULES[rule].lossless
    assert stats.tv_per_token == (None if stats.lossless else 0.0)
    if rule != "greedy":
        beside, stats = drive(rule=rule, temperature=[0.0, 1.0, 0.0])
        assert emitted_ids(beside)[::2] == emitted_ids(plain)[::2]


def test_numbers_do_not_recompile():
    drive(rule=typical(0.1, 0.2), temperature=1.0)
    before = loop.decode._cache_size(), loop.prefill._cache_size()
    some, _ = drive(rule=typical(0.5, 0.9), temperature=1.0)
    others, stats = drive(rule=typical(0.0, 0.0), temperature=1.0)
    assert (loop.decode._cache_size(), loop.prefill._cache_size()) == before
    assert typical(0.1) == typical(0.2), "one static argument"
    assert emitted_ids(some) != emitted_ids(others), "and yet the numbers count"
    assert stats.acceptance_rate > 0.95, "at 0 whatever p allows is kept"


def test_what_a_lossy_rule_reports_is_exact():
    """One draft a row: the sum reported is that of q a + (1 - A) p against p after each row's first token."""
    rows, temperature, limit = 64, 1.3, 0.35
    target = table_target(V)
    request = make_request(
        target, [PROMPTS[0]] * rows, max_new_tokens=3, drafter=markov(1), rule=threshold(limit), temperature=temperature
    )
    state, stats = run(target, TABLE, request)
    wanted = 0.0
    for first, *_ in emitted_ids(state):
        p = processed(np.asarray(TABLE)[PROMPTS[0][-1], first], temperature=temperature)
        q = processed(table()[first], temperature=temperature)
        kept = np.where(p >= limit, q, 0)
        wanted += 0.5 * np.abs(kept - kept.sum() * p).sum()
    assert wanted > 1
    assert stats.tv_per_pos[0] == pytest.approx(wanted, rel=1e-4)
    assert stats.tv_per_step == pytest.approx(wanted / stats.target_passes, rel=1e-4)
    assert stats.tv_per_token == pytest.approx(wanted / (stats.new_tokens - rows), rel=1e-4)
    assert "lossy: total variation" in str(stats)


def kept(rule: Rule, p: list[float]) -> list[bool]:
    """Which tokens of one law the rule keeps, asking it of every token."""
    n = len(p)
    laws = jnp.broadcast_to(jnp.asarray(p, jnp.float32), (n, 2, n))
    proposal = Proposal(jnp.arange(n)[:, None], None, jnp.ones(n, jnp.int32), chain(1))
    settings = {name: jnp.float32(value) for name, value in rule.settings.items()}
    return (np.asarray(rule.chain.accept(laws, proposal, settings))[:, 0] == 1).tolist()


@pytest.mark.parametrize(
    ("rule", "p", "wanted"),
    [
        (threshold(0.3), [0.5, 0.3, 0.2, 0.0], [True, True, False, False]),
        (threshold(0.0), [0.5, 0.3, 0.2, 0.0], [True, True, True, False]),
        (threshold(1.0), [1.0, 0.0], [True, False]),
        (relaxed_top_k(1), [0.2, 0.5, 0.3], [False, True, False]),
        (relaxed_top_k(2), [0.25, 0.5, 0.25], [True, True, True]),  # ties with the second are kept
        (relaxed_top_k(3), [1.0, 0.0, 0.0, 0.0], [True, False, False, False]),
        (relaxed_top_k(99), [0.5, 0.5, 0.0], [True, True, False]),
        (typical(0.09, 0.3), [0.9, 0.06, 0.04], [True, False, False]),
        # H = ln 2, so the threshold is the smaller of .9 and .5 delta.
        (typical(0.9, 0.98), [0.5, 0.5], [True, True]),
        (typical(0.9, 1.0), [0.5, 0.5], [False, False]),
    ],
)
def test_which_tokens_a_lossy_rule_keeps(rule, p, wanted):
    assert kept(rule, p) == wanted


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: typical(epsilon=-0.1), "epsilon of rule 'typical' is -0.1, expected a number from 0 to 1"),
        (lambda: typical(delta=True), "delta of rule 'typical' is True"),
        (lambda: threshold(1.5), "threshold of rule 'threshold' is 1.5"),
        (lambda: relaxed_top_k(0), "k of rule 'relaxed_top_k' is 0"),
        (lambda: relaxed_top_k(2.5), "expected a whole number"),
        (lambda: drive(rule="blok"), "unknown rule 'blok', expected one of: greedy, rejection, block, typical"),
    ],
)
def test_bad_numbers_and_names(make, said):
    with pytest.raises(UserError) as error:
        make()
    assert said in str(error.value)
    assert "\n" not in str(error.value)
