"""Adaptive depth: it finds what pays, it compiles once, and no outcome decides what is kept."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtpjax.decoding import adaptive as pace
from mtpjax.decoding import loop
from mtpjax.decoding.adaptive import adaptive
from mtpjax.decoding.drafters import ngram
from mtpjax.decoding.drive import rounds, run
from mtpjax.decoding.request import make_request
from mtpjax.decoding.result import emitted_ids
from mtpjax.errors import UserError
from tests.exactness.drafters import markov
from tests.tiny import CONFIG, tiny_target

RNG = np.random.default_rng(5)
PROMPTS = [RNG.integers(0, CONFIG.vocab_size, n).tolist() for n in (1, 7, 40, 90)]


def test_ids_are_those_of_plain_decoding_and_costs_compile_nothing():
    target, params = tiny_target()
    settings = {"max_new_tokens": 60, "rule": "greedy"}
    plain, _ = run(target, params, make_request(target, PROMPTS, **settings))
    request = make_request(target, PROMPTS, drafter=adaptive(ngram, (1, 3, 7)), **settings)
    for latest in rounds(target, params, request, steps=1):
        assert latest[0].cache.length.tolist() == (latest[0].length - 1).tolist()
    state, stats = latest
    assert emitted_ids(state) == emitted_ids(plain)
    assert stats.depth == 7 and len(stats.accepted_per_pos) == 7
    compiled = loop.decode._cache_size()
    dear = make_request(target, PROMPTS, drafter=adaptive(ngram, (1, 3, 7), (1, 50, 90)), **settings)
    state, stats = run(target, params, dear)
    assert emitted_ids(state) == emitted_ids(plain)
    assert sum(stats.proposed_per_pos[1:]) == 0, "deeper than 1 never pays"
    assert loop.decode._cache_size() == compiled


@pytest.mark.slow
def test_a_seeded_row_equals_its_solo_run():
    """Its batch-mates widen the window, and change nothing of it (invariant 3)."""
    target, params = tiny_target()
    settings = {"max_new_tokens": 40, "temperature": 0.7, "drafter": adaptive(ngram, (1, 4))}
    together, _ = run(target, params, make_request(target, PROMPTS, seed=[5, 6, 7, 8], **settings))
    for row in (0, 2):
        alone, _ = run(target, params, make_request(target, PROMPTS[row : row + 1], seed=[5 + row], **settings))
        assert emitted_ids(alone)[0] == emitted_ids(together)[row]


def test_it_settles_on_what_pays():
    depths, drafters = (1, 2, 4, 8), adaptive(markov, (1, 2, 4, 8), (1.1, 1.2, 1.4, 1.8))
    for rate, best in ((0.05, 1), (0.5, 2), (0.95, 8)):
        rng, state, chosen = np.random.default_rng(0), pace.begin(drafters, 1), []
        learn = jax.jit(pace.learn)
        for _ in range(300):
            depth = depths[int(pace.choose(state, depths)[0])]
            accepted = int(np.argmin(np.append(rng.random(depth) < rate, False)))
            state = learn(state, jnp.asarray([depth]), jnp.asarray([accepted]))
            chosen.append(depth)
        assert abs(depths.index(int(np.median(chosen))) - depths.index(best)) <= 1


def test_nothing_allowed_teaches_nothing_but_forgetting():
    state = pace.begin(adaptive(ngram, (1, 3)), 2)
    same = pace.learn(state, jnp.zeros(2, jnp.int32), jnp.zeros(2, jnp.int32))
    np.testing.assert_allclose(same.offered, state.offered, rtol=1e-6)
    np.testing.assert_allclose(same.accepted, state.accepted, rtol=1e-6)


@pytest.mark.parametrize("depths", [(), (0, 1), (3, 1), (2, 2)])
def test_bad_depths(depths):
    with pytest.raises(UserError, match="depths is"):
        adaptive(ngram, depths)


def test_bad_costs_and_memories():
    with pytest.raises(UserError, match="costs is"):
        adaptive(ngram, (1, 3), (1.0, 0.0))
    with pytest.raises(UserError, match="one memory"):
        adaptive(lambda depth: ngram(depth) if depth == 1 else markov(depth), (1, 3))
