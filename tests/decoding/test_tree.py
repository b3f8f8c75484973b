"""Trees: their shape, and that decoding with one is plain decoding (invariants 1, 4, 6, 10, 12)."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtpjax.decoding import tree
from mtpjax.decoding.drafters import Drafter, Proposal
from mtpjax.decoding.drive import rounds, run
from mtpjax.decoding.request import make_request
from mtpjax.decoding.result import emitted_ids
from mtpjax.decoding.verify import RULES
from mtpjax.errors import UserError
from mtpjax.models.cache import KVCache, keep_path
from tests.drafters import oracle_tree, twins
from tests.marks import slow
from tests.tiny import CONFIG, table_target, tiny_target

RNG = np.random.default_rng(8)
PROMPTS = [RNG.integers(0, CONFIG.vocab_size, n).tolist() for n in (1, 7, 40, 90)]
BUSHY = (0, 0, 0, 1, 1, 3, 4, 6)


def test_shapes():
    assert tree.candidates(1, 4) == tree.chain(4) == (0, 1, 2, 3)
    assert tree.candidates(3, 2) == (0, 0, 0, 1, 2, 3)
    assert tree.levels(BUSHY) == (0, 1, 1, 1, 2, 2, 2, 3, 3)[: len(BUSHY) + 1]
    assert tree.level_ends(BUSHY).tolist() == [0, 3, 6, 8]
    assert tree.children(BUSHY)[:5].tolist() == [[1, 2, 3], [4, 5, 0], [0, 0, 0], [6, 0, 0], [7, 0, 0]]
    assert np.array_equal(tree.ancestor_mask(tree.chain(5)), np.tril(np.ones((6, 6), bool)))
    assert tree.ancestor_mask(BUSHY)[8].nonzero()[0].tolist() == [0, 3, 6, 8]


@pytest.mark.parametrize("parents", [(1,), (0, 2), (0, 1, 0), (-1,)])
def test_a_shape_that_is_none_is_refused(parents):
    with pytest.raises(ValueError, match="parents is"):
        tree.check_parents(parents)


def test_a_drafter_that_does_not_keep_to_its_shape_is_refused():
    lying = Drafter("liar", 2, twins(2).memory, twins(2).propose)
    target, params = tiny_target()
    with pytest.raises(ValueError, match="'liar' proposed tokens"):
        run(target, params, make_request(target, PROMPTS[:1], drafter=lying, rule="greedy"))


def plain(count=40, **settings):
    target, params = tiny_target()
    return emitted_ids(run(target, params, make_request(target, PROMPTS, max_new_tokens=count, **settings))[0])


@pytest.mark.parametrize("depth", [slow(1), 3])
@pytest.mark.parametrize("rule", [slow("greedy"), "rejection", slow("best_of_candidates")])
def test_a_tree_equals_plain_greedy(rule, depth):
    target, params = tiny_target()
    request = make_request(target, PROMPTS, max_new_tokens=40, drafter=twins(depth), rule=rule)
    state, stats = run(target, params, request)
    assert emitted_ids(state) == plain()
    assert stats.num_draft_tokens > 0
    assert state.cache.length.tolist() == (state.length - 1).tolist()


@pytest.mark.slow
def test_the_right_path_is_found_wherever_it_lies():
    """Invariant 10 for trees: true tokens along one path only, and all of it is accepted in every round."""
    target, params = tiny_target()
    texts = plain(41)
    for path in ((3, 6, 8), (1, 4, 7), (1, 5), (2,)):
        drafter = oracle_tree(BUSHY, texts, {k: k in path for k in range(1, 9)})
        request = make_request(target, PROMPTS, max_new_tokens=41, drafter=drafter, rule="greedy")
        for latest in rounds(target, params, request, steps=1):
            assert latest[0].cache.length.tolist() == (latest[0].length - 1).tolist()
        state, stats = latest
        assert emitted_ids(state) == texts
        assert stats.accept_histogram[len(path)] >= stats.num_drafts - len(PROMPTS), "but for the end of a row"


def test_a_lossy_pick_keeps_the_winner_down_to_the_threshold():
    vocab = 5
    p = np.full((1, 7, vocab), 0.05, np.float32)
    parents = tree.candidates(2, 3)  # offsets 1 3 5 and 2 4 6
    tokens = jnp.asarray([[0, 1, 0, 1, 0, 1]])
    p[0, 0, :2], p[0, 1, 0], p[0, 2, 1], p[0, 3, 0], p[0, 4, 1] = (0.3, 0.5), 0.8, 0.7, 0.8, 0.1
    p /= p.sum(axis=2, keepdims=True)
    proposal = Proposal(tokens, None, jnp.asarray([6]), parents)
    rule = RULES["best_of_candidates"]
    key = jnp.asarray([0], jnp.uint32)
    keys = jax.vmap(jax.random.key)(key)
    won = rule.verify(jnp.asarray(p), proposal, keys, {"threshold": jnp.float32(0.0)})
    assert won.accepted.tolist() == [3] and won.path.tolist() == [[1, 3, 5]]
    np.testing.assert_allclose(won.tv[0], 1 - np.array([p[0, 0, 0], p[0, 1, 0], p[0, 3, 0]]), atol=1e-6)
    less = rule.verify(jnp.asarray(p), proposal, keys, {"threshold": jnp.float32(0.4)})
    assert less.accepted.tolist() == [0] and less.tv.tolist() == [[0, 0, 0]]
    cut = rule.verify(jnp.asarray(p), proposal.replace(count=jnp.asarray([2])), keys, {"threshold": jnp.float32(0)})
    assert cut.accepted.tolist() == [1] and cut.path[0, 0] == 2, "of one level, the likelier"


def test_log_probabilities_are_those_of_plain_decoding():
    """Invariant 12: one per emitted token, under a chain and a tree, greedy and sampled rows side by side."""
    target, params = tiny_target()
    settings = {"max_new_tokens": 30, "logprobs": True}
    state, _ = run(target, params, make_request(target, PROMPTS, **settings))
    for drafter in ("ngram", twins(3)):
        other, _ = run(target, params, make_request(target, PROMPTS, drafter=drafter, **settings))
        assert emitted_ids(other) == emitted_ids(state)
        np.testing.assert_allclose(other.logprobs, state.logprobs, atol=1e-4)
    assert np.all(np.asarray(state.logprobs[:, :1]) == 0), "none for the prompt"
    assert np.all(np.asarray(state.logprobs)[1, 7:37] < 0)


def test_a_depth_cap_holds_row_by_row():
    target, params = tiny_target()
    caps = [0, 1, 2, 9]
    for drafter in ("ngram", twins(3)):
        request = make_request(target, PROMPTS, max_new_tokens=40, drafter=drafter, max_depth=caps, rule="greedy")
        state, _ = run(target, params, request)
        assert emitted_ids(state) == plain()
        reached = np.asarray(state.counters.proposed_at)
        assert [np.max(np.nonzero(row)[0], initial=-1) + 1 for row in reached] == [0, 1, 2, 3]


def test_a_path_is_moved_as_it_is():
    rng = np.random.default_rng(0)
    k = jnp.asarray(rng.normal(size=(2, 3, 2, 32, 4)).astype(np.float32))
    cache = KVCache(k, k + 1, jnp.asarray([5, 0, 30]))
    path = jnp.asarray([[2, 4, 6], [1, 2, 3], [1, 2, 3]])
    kept = keep_path(cache, path)
    for row, start in enumerate([5, 0, 30]):
        wanted = np.array(k[:, row])
        for place, offset in enumerate(path[row].tolist(), 1):
            if start + place < 32:
                wanted[:, :, start + place] = np.asarray(k)[:, row, :, min(start + offset, 31)]
        np.testing.assert_array_equal(kept.k[:, row], wanted)
        np.testing.assert_array_equal(kept.v[:, row], wanted + 1)


def test_what_cannot_serve_a_tree_says_so():
    target, _ = tiny_target()
    with pytest.raises(UserError, match="rule 'block' verifies one candidate"):
        make_request(target, PROMPTS, drafter=twins(2), rule="block")
    with pytest.raises(UserError, match="the target has no keep_path"):
        make_request(dataclasses.replace(table_target(61), keep_path=None), [[1, 2]], drafter=twins(2))
