"""A draft model: never another token than plain decoding, everything accepted when it is the target, own cache kept."""

import dataclasses

import numpy as np
import pytest

from mtpjax.config import replace
from mtpjax.decoding import loop
from mtpjax.decoding.drafters import Params
from mtpjax.decoding.drafters.draft_model import draft_model
from mtpjax.decoding.drive import run, start_state
from mtpjax.decoding.request import make_request
from mtpjax.decoding.result import emitted_ids
from mtpjax.errors import UserError
from tests.marks import slow
from tests.other_model import other_params, other_target
from tests.tiny import CONFIG, tiny_model, tiny_target

PROMPTS = [[5, 9, 2], [1, 2, 3, 4, 5, 6, 7], [11], [8, 8, 3, 9]]
SHAPES = [slow((1, 1)), (3, 1), slow((8, 1)), slow((1, 2)), (2, 2), slow((3, 3))]


@pytest.mark.parametrize(("depth", "candidates"), [(8, 1), (2, 2)], ids=["chain", "tree"])
def test_invariant_10_a_draft_equal_to_the_target_has_everything_accepted(depth, candidates):
    target, params = tiny_target()
    drafter = draft_model(target, depth, candidates)
    request = make_request(
        target, PROMPTS, drafter=drafter, drafter_params=params, max_new_tokens=[28, 40, 9, 1], temperature=[0, 1, 0, 0]
    )
    state, stats = run(target, params, request)
    assert stats.num_accepted_tokens == sum(stats.proposed_per_pos)
    plain, _ = run(target, params, make_request(target, PROMPTS, max_new_tokens=[28, 1, 9, 1]))
    ids, alone = emitted_ids(state), emitted_ids(plain)
    assert [ids[row] for row in (0, 2, 3)] == [alone[row] for row in (0, 2, 3)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_another_draft_never_changes_a_greedy_token(shape):
    target, params = tiny_target()
    _, other = tiny_model(seed=7)
    plain, _ = run(target, params, make_request(target, PROMPTS, max_new_tokens=30))
    request = make_request(
        target, PROMPTS, drafter=draft_model(target, *shape), drafter_params=other, max_new_tokens=30
    )
    state, stats = run(target, params, request)
    assert emitted_ids(state) == emitted_ids(plain)
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens


def test_the_drafts_cache_is_as_long_as_the_text_after_every_round():
    target, params = tiny_target()
    _, other = tiny_model(seed=7)
    drafter = draft_model(target, 2, 2)
    request = make_request(target, PROMPTS, drafter=drafter, drafter_params=other, max_new_tokens=[9, 5, 1, 12])
    both = Params(params, other)
    static = {"target": target, "rule": request.rule}
    state = loop.prefill(both, start_state(target, request), memory=drafter.memory, chunk=request.chunk, **static)
    state = loop.start_decoding(state, drafter)
    for _ in range(5):
        assert state.memory.length.tolist() == state.length.tolist()
        assert state.memory.cache.length.tolist() == state.length.tolist()
        state = loop.decode(both, state, np.int32(1), drafter=drafter, **static)


def test_a_seeded_row_equals_its_solo_run():
    target, params = tiny_target()
    _, other = tiny_model(seed=7)
    settings = {"drafter": draft_model(target, 2, 2), "drafter_params": other, "max_new_tokens": 16}
    temperature = [0.9, 0.0, 1.2, 0.7]
    both, _ = run(target, params, make_request(target, PROMPTS, temperature=temperature, seed=3, **settings))
    solo, _ = run(target, params, make_request(target, PROMPTS[2:3], temperature=1.2, seed=5, **settings))
    assert emitted_ids(both)[2] == emitted_ids(solo)[0]


@pytest.mark.parametrize("shape", [(3, 1), slow((2, 2))], ids=str)
def test_models_that_are_not_ours_serve_as_target_and_as_draft(shape):
    other, theirs = other_target(), other_params()
    ours, params = tiny_target()
    for target, own, draft, drafts in ((other, theirs, ours, params), (ours, params, other, theirs)):
        plain, _ = run(target, own, make_request(target, PROMPTS, max_new_tokens=20))
        request = make_request(
            target, PROMPTS, drafter=draft_model(draft, *shape), drafter_params=drafts, max_new_tokens=20
        )
        assert emitted_ids(run(target, own, request)[0]) == emitted_ids(plain)
    same = make_request(other, PROMPTS, drafter=draft_model(other, *shape), drafter_params=theirs, max_new_tokens=20)
    stats = run(other, theirs, same)[1]
    assert stats.num_accepted_tokens == sum(stats.proposed_per_pos)


def test_parameters_are_checked():
    target, params = tiny_target()
    with pytest.raises(UserError, match="needs its parameters"):
        make_request(target, PROMPTS, drafter=draft_model(target))
    with pytest.raises(UserError, match="embed/weight of drafter 'draft_model' is unassigned"):
        make_request(target, PROMPTS, drafter=draft_model(target), drafter_params={**params, "embed": {"weight": None}})
    with pytest.raises(UserError, match="leave drafter_params out"):
        make_request(target, PROMPTS, drafter="ngram", drafter_params=params)
    with pytest.raises(UserError, match="needs its parameters"):
        make_request(target, PROMPTS, drafter=draft_model(other_target()))


@pytest.mark.parametrize(("depth", "candidates"), [(0, 1), (3, 0), (1, 62)])
def test_bad_shapes(depth, candidates):
    with pytest.raises(UserError, match="expected from 1"):
        draft_model(tiny_target()[0], depth, candidates)


def test_padding_of_the_drafts_vocabulary_is_never_drafted():
    """Both models pad their logits, to different widths: what lies behind the real tokens has no chance."""
    wide = replace(CONFIG, vocab_size=64)
    padded, params = tiny_target(wide, seed=2)
    draft = dataclasses.replace(padded, emit_vocab=61)
    target, own = tiny_target()
    plain, _ = run(target, own, make_request(target, PROMPTS, max_new_tokens=20))
    drafter = draft_model(draft, 2, vocab_size=61)
    request = make_request(target, PROMPTS, drafter=drafter, drafter_params=params, max_new_tokens=20)
    assert emitted_ids(run(target, own, request)[0]) == emitted_ids(plain)
    with pytest.raises(ValueError, match="q is a law over 64 tokens"):
        run(target, own, make_request(target, PROMPTS, drafter=draft_model(draft), drafter_params=params))
