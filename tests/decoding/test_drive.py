"""Host code between the loops' calls: stop texts, a state taken up again, what the public call gives."""

import numpy as np
import pytest

import mtpjax
from mtpjax.decoding.drafters import ngram
from mtpjax.decoding.drive import extend, rounds, run
from mtpjax.decoding.request import make_request
from mtpjax.decoding.result import emitted_ids
from mtpjax.errors import UserError
from mtpjax.io.lm import load
from tests.drafters import twins
from tests.marks import slow
from tests.tiny import CONFIG, tiny_target

RNG = np.random.default_rng(5)
PROMPTS = [RNG.integers(0, CONFIG.vocab_size, n).tolist() for n in (1, 7, 40, 90)]


@pytest.fixture(scope="module")
def lm(tiny_folder):
    return load(tiny_folder, precision="f32")


@pytest.mark.parametrize("drafter", [slow(None), slow("ngram"), twins(2)], ids=["plain", "ngram", "tree"])
def test_a_state_taken_up_again_goes_on_as_if_never_left(drafter):
    """Over a border of capacity too: 90 + 30 tokens fit into 256 slots, 90 + 300 do not."""
    target, params = tiny_target()
    settings = {"drafter": drafter, "rule": "greedy", "logprobs": True}
    whole, _ = run(target, params, make_request(target, PROMPTS, max_new_tokens=300, **settings))
    request = make_request(target, PROMPTS, max_new_tokens=30, **settings)
    state, _ = run(target, params, request)
    for more in (0, 5, 265):
        request, state = extend(target, request, state, more)
        state, stats = run(target, params, request, state=state)
    assert emitted_ids(state) == emitted_ids(whole)
    assert stats.new_tokens == 1200
    np.testing.assert_allclose(
        np.asarray(state.logprobs)[:, :380], np.asarray(whole.logprobs)[:, :380], atol=1e-4, rtol=1e-4
    )


def test_nothing_was_asked_for_and_then_something():
    target, params = tiny_target()
    plain, _ = run(target, params, make_request(target, PROMPTS, max_new_tokens=6, rule="greedy"))
    request = make_request(target, PROMPTS, max_new_tokens=0, rule="greedy")
    state, _ = run(target, params, request)
    state, _ = run(target, params, extend(target, request, state, 6)[0], state=extend(target, request, state, 6)[1])
    assert emitted_ids(state) == emitted_ids(plain)


def test_a_watched_row_ends_where_it_is_told_and_counts_what_it_keeps():
    """The cut may fall inside an accepted block: tokens, cache and counters are those of a stop id there."""
    target, params = tiny_target()
    texts = emitted_ids(run(target, params, make_request(target, PROMPTS, max_new_tokens=40, rule="greedy"))[0])
    last = texts[2][17]
    request = make_request(target, PROMPTS, max_new_tokens=40, drafter=ngram(5), rule="greedy")

    def watch(row, ids):
        return ids.index(last) + 1 if last in ids else None

    for latest in rounds(target, params, request, watch=watch):
        assert latest[0].cache.length.tolist() == (latest[0].length - 1).tolist()
    state, stats = latest
    by_id = make_request(target, PROMPTS, max_new_tokens=40, drafter=ngram(5), rule="greedy", stop_ids=[last])
    wanted, wanted_stats = run(target, params, by_id)
    assert emitted_ids(state) == emitted_ids(wanted)
    assert stats.accepted_per_pos == wanted_stats.accepted_per_pos
    assert stats.new_tokens == wanted_stats.new_tokens and stats.num_drafts == wanted_stats.num_drafts


def test_stop_texts_end_a_row_across_tokens_and_blocks(lm):
    plain = mtpjax.generate(lm, ["the hand", "an inn"], max_new_tokens=40, stop_ids=())
    text = plain.text[0]
    for at, length in ((3, 2), (11, 4), (20, 7)):
        stop = text[at : at + length]
        out = mtpjax.generate(lm, ["the hand", "an inn"], max_new_tokens=40, stop_ids=(), stop=stop, drafter="ngram")
        for row, whole in enumerate(plain.text):
            found = whole.find(stop)
            assert out.text[row] == (whole if found < 0 else whole[:found])
            assert "".join(out.pieces[row]) == out.text[row] and len(out.pieces[row]) == len(out.ids[row])
            assert out.finish_reason[row] == ("length" if found < 0 else "stop")
            assert out.ids[row] == plain.ids[row][: len(out.ids[row])]
        stream = mtpjax.stream(lm, "the hand", max_new_tokens=40, stop_ids=(), stop=[stop, "never said"])
        assert "".join(stream) == stream.result.text[0] == out.text[0]


def test_resume(lm):
    settings = {"stop_ids": (), "drafter": "ngram", "logprobs": True}
    whole = mtpjax.generate(lm, ["the hand", "an inn"], max_new_tokens=50, **settings)
    part = mtpjax.generate(lm, ["the hand", "an inn"], max_new_tokens=20, keep=True, **settings)
    for _ in range(2):  # resuming does not use it up
        rest = mtpjax.resume(lm, part, max_new_tokens=30)
        assert rest.ids == whole.ids and rest.text == whole.text
    assert [len(row) for row in whole.logprobs] == [50, 50]
    np.testing.assert_allclose(rest.logprobs, whole.logprobs, atol=1e-4)
    assert mtpjax.resume(lm, part, max_new_tokens=0).ids == part.ids
    with pytest.raises(UserError, match="keep=True"):
        mtpjax.resume(lm, whole)
    with pytest.raises(UserError, match="max_new_tokens is -1"):
        mtpjax.resume(lm, part, max_new_tokens=-1)


@pytest.mark.parametrize("stop", ["", ["a", ""]])
def test_bad_stop_texts(lm, stop):
    with pytest.raises(UserError, match="stop is"):
        mtpjax.generate(lm, "the", stop=stop)
