"""Suffix lookup against a slow reading of the same idea, and the first of several drafters, row by row."""

from collections import Counter

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtpjax.decoding import loop
from mtpjax.decoding.drafters import Params, draft_model, first_of, ngram, suffix
from mtpjax.decoding.drafters.ngram import lookup
from mtpjax.decoding.drafters.suffix import VOTERS, vote
from mtpjax.decoding.drive import run, start_state
from mtpjax.decoding.request import make_request
from mtpjax.decoding.result import emitted_ids
from mtpjax.errors import UserError
from tests.drafters import twins
from tests.tiny import tiny_model, tiny_target

SLOTS, DEPTH = 32, 4
PROMPTS = [[5, 9, 2, 5, 9], [1, 2, 3, 4, 5, 6, 7], [11]]


def slow_vote(text, depth, longest, per_match):
    """The same by hand: the most recent occurrences of the longest earlier ending vote, token by token."""
    n = len(text)
    for size in range(min(longest, n - 1), 0, -1):
        ends = [i for i in range(n - 2, size - 2, -1) if text[i - size + 1 : i + 1] == text[n - size :]][:VOTERS]
        if ends:
            break
    else:
        return []
    drafts = []
    while ends and len(drafts) < min(depth, per_match * size):
        ends = [i for i in ends if i + 1 + len(drafts) < n]
        words = [text[i + 1 + len(drafts)] for i in ends]
        if not words:
            break
        most = max(Counter(words).values())
        word = next(w for w in words if words.count(w) == most)
        drafts.append(word)
        ends = [i for i, w in zip(ends, words, strict=True) if w == word]
    return drafts


@given(st.lists(st.integers(0, 2), min_size=1, max_size=SLOTS), st.sampled_from([1, 2]))
def test_suffix_lookup_is_what_it_says(text, per_match):
    tokens = jnp.asarray([text + [7] * (SLOTS - len(text))], jnp.int32)
    drafts, count = vote(tokens, jnp.asarray([len(text)], jnp.int32), DEPTH, 8, per_match)
    assert drafts[0, : int(count[0])].tolist() == slow_vote(text, DEPTH, 8, per_match)


def test_a_vote_beats_the_most_recent():
    """After "1 2" came 3 twice and then once 4: prompt lookup repeats the slip, the vote does not."""
    text = [1, 2, 3, 5, 1, 2, 3, 6, 1, 2, 4, 1, 2]
    tokens, length = jnp.asarray([text], jnp.int32), jnp.asarray([len(text)], jnp.int32)
    assert lookup(tokens, length, 1, 4, 1)[0].tolist() == [[4]]
    assert vote(tokens, length, 1, 8, 2)[0].tolist() == [[3]]


@pytest.mark.parametrize("drafter", ["suffix", "first"])
def test_ids_are_those_of_plain_decoding(drafter):
    target, params = tiny_target()
    _, other = tiny_model(seed=7)
    chosen = suffix(4) if drafter == "suffix" else first_of(ngram(2), draft_model(target, 3))
    own = None if drafter == "suffix" else (None, other)
    plain, _ = run(target, params, make_request(target, PROMPTS, max_new_tokens=40))
    request = make_request(target, PROMPTS, drafter=chosen, drafter_params=own, max_new_tokens=40)
    state, stats = run(target, params, request)
    assert emitted_ids(state) == emitted_ids(plain)
    assert stats.num_accepted_tokens > 0


def test_the_first_with_a_proposal_wins_row_by_row():
    target, params = tiny_target()
    drafter = first_of(ngram(2), draft_model(target, 3))
    every_token = list(range(target.vocab_size))  # whatever the target says first, it stood before
    prompts = [every_token, *PROMPTS[:2]]
    request = make_request(target, prompts, drafter=drafter, drafter_params=(None, params), temperature=[0, 1.0, 0])
    state = start_state(target, request)
    both = Params(params, (None, params))
    static = {"target": target, "memory": drafter.memory, "rule": request.rule, "chunk": request.chunk}
    state = loop.prefill(both, state, **static)
    found = np.asarray(lookup(state.tokens, state.length, 2, 4, 1)[1])
    proposal, _ = loop.draft(both, state, drafter)
    assert proposal.count.tolist() == [2 if n else 3 for n in found] and {0, 2} == set(found.tolist())
    assert proposal.q is not None
    one_hot = np.asarray(jnp.max(proposal.q, axis=2))
    np.testing.assert_allclose(np.sum(np.asarray(proposal.q)[1], axis=1)[: proposal.count[1]], 1, rtol=1e-5)
    assert np.all(one_hot[found > 0][:, :2] == 1)


def test_what_first_of_refuses():
    target, params = tiny_target()
    with pytest.raises(UserError, match="expected two or more drafters of one candidate"):
        first_of(ngram(3))
    with pytest.raises(UserError, match="expected two or more drafters of one candidate"):
        first_of(ngram(3), twins(2))
    drafter = first_of(ngram(2), draft_model(target, 3))
    with pytest.raises(UserError, match="needs a tuple of 2 parameters"):
        make_request(target, PROMPTS, drafter=drafter)
    with pytest.raises(UserError, match="1' needs its parameters"):
        make_request(target, PROMPTS, drafter=drafter, drafter_params=(None, None))
    with pytest.raises(UserError, match="0' has no parameters"):
        make_request(target, PROMPTS, drafter=drafter, drafter_params=(params, params))
