"""Sampled output has the target's own law: the joint law of whole short sequences (invariant 2, its simulated layer).

The target is a table over five tokens, so the law of every sequence of three tokens is known exactly; 20,000 rows of
the public loop are compared with it by chi-square. The drafter proposes from its own, different law.
"""

from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats as scipy_stats

from mtpjax.decoding.drafters import Drafter, Memory, Proposal, chain
from mtpjax.decoding.generate import run
from mtpjax.decoding.request import make_request
from mtpjax.decoding.result import emitted_ids
from mtpjax.decoding.sampling import DRAFT, Law, draw, probabilities, tagged
from tests.tiny import table_logits, table_target

V, LENGTH, ROWS = 5, 3, 20_000
LEVEL = 1e-3 / 8  # Bonferroni over the eight cases
LOGITS = table_logits(V)


def fixed_law_drafter(depth: int, sampled: bool) -> Drafter:
    """Drafts from one law whatever was said; as samples with their q, or as a deterministic token."""
    logits = jnp.asarray(np.random.default_rng(9).normal(size=V), jnp.float32)

    def propose(params, state, key_B, law: Law):
        B = key_B.shape[0]
        q = probabilities(jnp.broadcast_to(logits, (B, depth, V)), law)
        if not sampled:
            tokens = jnp.broadcast_to(jnp.arange(depth) % V, (B, depth)).astype(jnp.int32)
            return Proposal(tokens, None, jnp.full(B, depth), chain(depth))
        keys = jax.vmap(lambda k: jax.random.split(k, depth))(tagged(key_B, DRAFT))
        tokens = jnp.stack([draw(keys[:, i], q[:, i]) for i in range(depth)], axis=1)
        return Proposal(tokens, q, jnp.full(B, depth), chain(depth))

    memory = Memory(lambda B, S: (), lambda params, state, committed, features: state)
    return Drafter("fixed", depth, memory, propose)


def joint_law(prompt: list[int], **settings) -> np.ndarray:
    """Exact probability of every continuation of LENGTH tokens, [V^LENGTH]."""
    law = Law(*(jnp.asarray([settings.get(k, d)]) for k, d in DEFAULTS.items()))
    p = np.asarray(probabilities(LOGITS.reshape(1, V * V, V), law), np.float64).reshape(V, V, V)
    out = []
    for sequence in product(range(V), repeat=LENGTH):
        ids = [0, *prompt, *sequence]
        out.append(np.prod([p[ids[i - 2], ids[i - 1], ids[i]] for i in range(len(ids) - LENGTH, len(ids))]))
    return np.array(out)


DEFAULTS = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
CASES = [
    ("ngram", {}),
    ("ngram", {"temperature": 0.7, "top_k": 3}),
    ("sampled", {}),
    ("sampled", {"temperature": 0.6}),
    ("sampled", {"top_p": 0.8}),
    ("sampled", {"min_p": 0.15, "temperature": 1.4}),
    ("fixed", {"top_k": 4}),
    ("none", {"top_p": 0.9}),
]


def chi_square_p(counts: np.ndarray, law: np.ndarray) -> float:
    """p-value of the counts under the law; rare cells are pooled, an impossible one that occurs gives 0."""
    if counts[law == 0].sum() > 0:
        return 0.0
    expected = law * counts.sum()
    rare = (expected < 8) & (law > 0)
    observed = np.append(counts[(law > 0) & ~rare], counts[rare].sum())
    wanted = np.append(expected[(law > 0) & ~rare], expected[rare].sum())
    if wanted[-1] == 0:
        observed, wanted = observed[:-1], wanted[:-1]
    statistic = ((observed - wanted) ** 2 / wanted).sum()
    return float(scipy_stats.chi2.sf(statistic, len(wanted) - 1))


def sample_counts(drafter, settings) -> np.ndarray:
    target = table_target(V)
    prompt = [3, 1, 4, 1]
    state, stats = run(
        target,
        LOGITS,
        make_request(target, [prompt] * ROWS, max_new_tokens=LENGTH, drafter=drafter, **settings),
    )
    ids = np.array(emitted_ids(state))
    code = ids @ V ** np.arange(LENGTH - 1, -1, -1)
    return np.bincount(code, minlength=V**LENGTH), stats


@pytest.mark.parametrize(("kind", "settings"), CASES)
def test_joint_law_is_the_targets(kind, settings):
    settings = {**DEFAULTS, **settings}
    drafter = {
        "ngram": "ngram",
        "none": None,
        "sampled": fixed_law_drafter(2, sampled=True),
        "fixed": fixed_law_drafter(2, sampled=False),
    }[kind]
    counts, stats = sample_counts(drafter, settings)
    p_value = chi_square_p(counts, joint_law([3, 1, 4, 1], **settings))
    assert p_value > LEVEL, f"p = {p_value:.2g}"
    if drafter is not None:
        assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens


def test_the_test_sees_a_lossy_rule(monkeypatch):
    """Power: accept with u <= p instead of u * q < p, and the same test fails."""
    from mtpjax.decoding import verify
    from mtpjax.decoding.verify import rejection

    def ignores_q(p, proposal, key):
        flat = jnp.full_like(proposal.q, 1.0 / V) if proposal.q is not None else None
        return rejection.verify(p, proposal.replace(q=flat), key)

    lossy = verify.Rule("lossy", ignores_q, lossless=False, samples=True)
    counts, _ = sample_counts(fixed_law_drafter(2, sampled=True), {**DEFAULTS, "rule": lossy})
    assert chi_square_p(counts, joint_law([3, 1, 4, 1], **DEFAULTS)) < LEVEL


def test_a_greedy_row_beside_sampled_rows():
    target = table_target(V)
    prompt = [3, 1, 4, 1]
    settings = {"max_new_tokens": 12, "drafter": fixed_law_drafter(3, sampled=True)}
    alone, _ = run(target, LOGITS, make_request(target, [prompt], temperature=0.0, **settings))
    mixed, _ = run(target, LOGITS, make_request(target, [prompt] * 4, temperature=[1.0, 0.0, 0.5, 2.0], **settings))
    assert emitted_ids(mixed)[1] == emitted_ids(alone)[0]


def test_a_seeded_row_equals_its_solo_run():
    """Invariant 3: per-row keys; batch-mates, their settings and their number do not matter."""
    target = table_target(V)
    prompts = [[1, 2], [3, 1, 4, 1, 0, 2], [4]]
    settings = {"max_new_tokens": 15, "drafter": "ngram", "depth": 3}
    rows = {"temperature": [1.0, 0.8, 1.5], "top_p": [0.9, 1.0, 0.7], "seed": [11, 5, 11]}
    together, _ = run(target, LOGITS, make_request(target, prompts, **settings, **rows))
    for row, prompt in enumerate(prompts):
        alone = {key: value[row] for key, value in rows.items()}
        solo, _ = run(target, LOGITS, make_request(target, [prompt], **settings, **alone))
        assert emitted_ids(solo)[0] == emitted_ids(together)[row]
