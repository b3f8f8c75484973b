"""Greedy decoding: any drafter, depth and batch gives the ids of plain greedy decoding (invariants 1, 4, 5, 6, 10)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtpjax.decoding import loop
from mtpjax.decoding.drafters import Drafter, Memory, Params, Proposal, chain, ngram, none
from mtpjax.decoding.drive import rounds, run, start_state
from mtpjax.decoding.request import make_request
from mtpjax.decoding.result import emitted_drafted, emitted_ids, finish_reasons
from tests.marks import slow
from tests.tiny import CONFIG, tiny_model, tiny_target

RNG = np.random.default_rng(5)
PROMPTS = [RNG.integers(0, CONFIG.vocab_size, n).tolist() for n in (1, 7, 40, 90)]


@jax.jit
def last_logits(params, ids, at):
    """Logits of one place, by a pass without a cache."""
    model, _ = tiny_model()
    return model.apply({"params": params}, ids, logits_at=at).logits


def ask(target, prompts, **settings):
    """A request under the greedy rule, whose loop compiles in half the time, unless a test names another."""
    return make_request(target, prompts, **{"rule": "greedy", **settings})


def continuation(prompts, **settings):
    target, params = tiny_target()
    state, stats = run(target, params, ask(target, prompts, **settings))
    return emitted_ids(state), state, stats


def naive(prompt, count):
    """Plain greedy by running the whole sequence without a cache for every token."""
    _, params = tiny_model()
    ids, padded = list(prompt), 160
    for _ in range(count):
        row = jnp.asarray([ids + [0] * (padded - len(ids))], jnp.int32)
        logits = last_logits(params, row, jnp.asarray([[len(ids) - 1]]))
        ids.append(int(jnp.argmax(logits[0, 0])))
    return ids[len(prompt) :]


def test_plain_greedy_equals_a_model_without_cache():
    ids, _, _ = continuation(PROMPTS, max_new_tokens=24)
    assert ids == [naive(prompt, 24) for prompt in PROMPTS]


@pytest.mark.parametrize("depth", [3, 8, *map(slow, (1, 2, 4, 5, 6, 7))])
def test_ngram_equals_plain(depth):
    """Single and in a ragged batch; at one depth under the default rule, whose loop holds the sampling branch too."""
    rule = "rejection" if depth == 4 else "greedy"
    for prompts in (PROMPTS[1:2], PROMPTS) if depth in (1, 3, 8) else (PROMPTS,):
        plain, _, _ = continuation(prompts, max_new_tokens=60)
        ids, state, stats = continuation(prompts, max_new_tokens=60, drafter="ngram", depth=depth, rule=rule)
        assert ids == plain
        assert stats.num_draft_tokens > 0
        assert state.cache.length.tolist() == (state.length - 1).tolist()


def oracle(depth: int, answers: list[list[int]], wrong_from: int = 99) -> Drafter:
    """Proposes the target's own continuation, wrong from place `wrong_from` on: everything before is accepted."""
    width = max(len(a) for a in answers) + depth + 1
    table = jnp.asarray([a + [0] * (width - len(a)) for a in answers], jnp.int32)

    # What it keeps is how many tokens were said; the prompt's are taken off.
    prompt_B = jnp.asarray([len(prompt) for prompt in PROMPTS])
    memory = Memory(lambda B, S: -prompt_B, lambda params, done, committed, features: done + committed.count)

    def propose(params, done_B, key_B, law):
        at = done_B[:, None] + jnp.arange(depth)[None, :]
        tokens = jnp.take_along_axis(table, at, axis=1)
        tokens = jnp.where(jnp.arange(depth)[None, :] >= wrong_from, (tokens + 1) % CONFIG.vocab_size, tokens)
        return Proposal(tokens, None, jnp.full_like(done_B, depth), chain(depth)), done_B

    return Drafter("oracle", depth, memory, propose)


@pytest.mark.parametrize("depth", [slow(1), 3, slow(8)])
def test_a_drafter_equal_to_the_target_has_everything_accepted(depth):
    """Invariant 10: all accepted, and after every round the cache holds the committed tokens, no more."""
    target, params = tiny_target()
    plain, _, _ = continuation(PROMPTS, max_new_tokens=55)
    request = ask(target, PROMPTS, max_new_tokens=55, drafter=oracle(depth, plain))
    for state, stats in rounds(target, params, request, steps=1):
        assert state.cache.length.tolist() == (state.length - 1).tolist()
        assert stats.num_accepted_tokens == stats.num_draft_tokens
    assert emitted_ids(state) == plain
    passes = -(-54 // (depth + 1))
    assert state.counters.passes.tolist() == [passes] * len(PROMPTS)
    drafted = emitted_drafted(state)[0]
    assert drafted[0] is False and drafted[1 : depth + 1] == [True] * depth
    assert stats.acceptance_length == pytest.approx(54 / passes)


@pytest.mark.parametrize("wrong_from", [slow(0), 1, slow(2)])
def test_rates_count_prefixes(wrong_from):
    target, params = tiny_target()
    plain, _, _ = continuation(PROMPTS, max_new_tokens=41)
    request = ask(target, PROMPTS, max_new_tokens=41, drafter=oracle(3, plain, wrong_from))
    state, stats = run(target, params, request)
    assert emitted_ids(state) == plain
    assert all((r > 0.9) == (i < wrong_from) for i, r in enumerate(stats.rates_unconditional))
    assert sum(stats.accept_histogram) == stats.num_drafts
    assert sum(i * n for i, n in enumerate(stats.accept_histogram)) == stats.num_accepted_tokens


def test_rows_do_not_depend_on_their_batch_mates():
    together, _, _ = continuation(PROMPTS, max_new_tokens=20, drafter="ngram", depth=2)
    assert together == [continuation([p], max_new_tokens=20, drafter="ngram", depth=2)[0][0] for p in PROMPTS]


@pytest.mark.parametrize("count", [0, 1, 2, 3])
@pytest.mark.parametrize("depth", [0, 5])
def test_max_new_tokens_is_exact(count, depth):
    plain, _, _ = continuation(PROMPTS, max_new_tokens=8)
    ids, state, stats = continuation(PROMPTS, max_new_tokens=count, drafter="ngram", depth=depth)
    assert ids == [row[:count] for row in plain]
    assert finish_reasons(state) == ["length"] * 4
    assert stats.new_tokens == 4 * count


def test_max_new_tokens_per_row():
    ids, _, _ = continuation(PROMPTS, max_new_tokens=[0, 1, 9, 30], drafter="ngram", depth=4)
    assert [len(row) for row in ids] == [0, 1, 9, 30]


@pytest.mark.parametrize("depth", [slow(1), 4, slow(8)])
def test_stop_id_inside_an_accepted_block(depth):
    """Invariant 5: the row ends at the first stop id, duplicates in the list do no harm, the others go on."""
    target, params = tiny_target()
    plain, _, _ = continuation(PROMPTS, max_new_tokens=50)
    stop = plain[2][17]
    expected = [row[: row.index(stop) + 1] if stop in row else row for row in plain]
    settings = {"max_new_tokens": 50, "stop_ids": [stop, stop, 60, stop]}
    expected = [cut(row, {stop, 60}) for row in plain]
    for drafter in (oracle(depth, plain), ngram(depth)):
        request = ask(target, PROMPTS, drafter=drafter, **settings)
        state, _ = run(target, params, request)
        assert emitted_ids(state) == expected
        reasons = ["stop" if row[-1] in (stop, 60) else "length" for row in expected]
        assert finish_reasons(state) == reasons


def cut(row, stops):
    for i, token in enumerate(row):
        if token in stops:
            return row[: i + 1]
    return row


def test_a_stop_id_that_is_drafted_but_rejected_does_not_stop():
    target, params = tiny_target()
    plain, _, _ = continuation(PROMPTS, max_new_tokens=30)
    wrong = {(t + 1) % CONFIG.vocab_size for row in plain for t in row} - {t for row in plain for t in row}
    assert wrong, "the planted drafts must hold an id that the target never says"
    request = make_request(
        target, PROMPTS, max_new_tokens=30, drafter=oracle(4, plain, wrong_from=1), stop_ids=sorted(wrong)
    )
    state, _ = run(target, params, request)
    assert emitted_ids(state) == plain


def test_the_context_end_shortens_the_draft():
    config = CONFIG.model_copy(update={"max_context": 96})
    target, params = tiny_target(config)
    request = ask(target, PROMPTS[2:], max_new_tokens=200, drafter="ngram", depth=8)
    state, _ = run(target, params, request)
    assert [len(row) for row in emitted_ids(state)] == [56, 6]
    plain, _ = run(target, params, ask(target, PROMPTS[2:], max_new_tokens=200))
    assert emitted_ids(state) == emitted_ids(plain)


def test_long_prompt_in_chunks_equals_one_pass():
    """A prompt over several chunks and attention blocks: same first token as one pass without a cache."""
    prompt = RNG.integers(0, CONFIG.vocab_size, 700).tolist()
    model, params = tiny_model()
    whole = model.apply({"params": params}, jnp.asarray([prompt]), logits_at=jnp.asarray([[699]])).logits
    ids, _, _ = continuation([prompt, PROMPTS[1]], max_new_tokens=1)
    assert ids[0] == [int(jnp.argmax(whole))]


def test_finished_rows_stay_finished():
    target, params = tiny_target()
    request = ask(target, PROMPTS, max_new_tokens=[2, 30, 30, 30], drafter="ngram", depth=3)
    seen = []
    for state, _ in rounds(target, params, request, steps=1):
        seen.append((emitted_ids(state)[0], int(state.cache.length[0])))
    assert len(seen) > 5 and all(entry == seen[-1] for entry in seen[2:])


def test_numbers_do_not_recompile():
    """Limits, seeds, temperatures, prompt lengths inside a bucket: the same compiled loop."""
    target, params = tiny_target()
    run(target, params, make_request(target, PROMPTS[:2], max_new_tokens=5, temperature=0.0))
    before = loop.decode._cache_size(), loop.prefill._cache_size()
    for settings in (
        {"max_new_tokens": 9, "temperature": 0.7},
        {"max_new_tokens": 3, "temperature": [0.0, 1.3], "top_k": 5, "top_p": 0.5, "seed": 9, "stop_ids": [1, 2]},
    ):
        run(target, params, make_request(target, [PROMPTS[1], PROMPTS[2]], **settings))
    assert (loop.decode._cache_size(), loop.prefill._cache_size()) == before


def test_a_request_can_be_run_again():
    target, params = tiny_target()
    request = make_request(target, PROMPTS[:2], max_new_tokens=5, temperature=0.8, seed=3)
    assert emitted_ids(run(target, params, request)[0]) == emitted_ids(run(target, params, request)[0])


def test_each_stage_can_be_called_alone_outside_jit():
    target, params = tiny_target()
    plain, _, _ = continuation(PROMPTS[1:2], max_new_tokens=6)
    request = ask(target, PROMPTS[1:2], max_new_tokens=6, drafter="ngram", depth=2)
    drafter = request.drafter
    params, state = Params(params), start_state(target, request)
    state = loop.prefill(params, state, target=target, memory=drafter.memory, rule=request.rule, chunk=64)
    while state.status[0] == loop.RUNNING:
        proposal, state = loop.draft(params, state, drafter)
        logits, features, cache = loop.score(params, state, proposal, target, drafter.memory.features)
        verdict = loop.verify(target, request.rule, state, proposal, logits)
        before = state.length
        state = loop.commit(state.replace(cache=cache), proposal, verdict)
        state = loop.settle(params, state, before, verdict, features, target, drafter)
        assert state.cache.length.tolist() == (state.length - 1).tolist()
        assert state.memory.length.tolist() == state.length.tolist()
    assert emitted_ids(state) == plain


def test_plain_drafter_has_depth_zero():
    assert none().depth == 0
