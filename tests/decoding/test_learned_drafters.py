"""Learned drafters: what they draft from their caches is what a pass without any gives, and no token ever changes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtpjax.config import replace
from mtpjax.decoding import tree
from mtpjax.decoding.drafters import Committed, Params, sequential
from mtpjax.decoding.drive import rounds, run
from mtpjax.decoding.request import make_request
from mtpjax.decoding.result import emitted_ids
from mtpjax.decoding.sampling import Law, probabilities, step_keys
from mtpjax.decoding.target import target_from_model
from mtpjax.errors import UserError
from mtpjax.models.mtp import MTPConfig, head_logits, init_params, logits_of
from mtpjax.quant.policy import apply_precision
from tests.exactness.laws import encode, sequence_law
from tests.exactness.statistics import LEVEL, chi_square, rows_needed
from tests.learned import D2T, FAMILIES, PLANTED, STRIDE, planted, planted_trunk
from tests.marks import slow
from tests.tiny import CONFIG, tiny_model, tiny_target

RNG = np.random.default_rng(11)
PROMPTS = [RNG.integers(0, CONFIG.vocab_size, n).tolist() for n in (1, 2, 30, 70)]
DEPTH, CHUNK = 3, 8
LAW = Law(jnp.array([0.0, 1.0, 0.7, 1.3]), jnp.array([0, 0, 9, 0]), jnp.array([1, 1, 1, 0.9]), jnp.zeros(4))


def fast(*names):
    """All families, of which `make test` has these; the suite's time is compilation, and each is another loop."""
    return [name if name in names else slow(name) for name in FAMILIES]


def reference(name, trunk, params, features, tokens, last):
    """Logits [B, depth, V] behind which the drafts stand, without a cache."""
    stack = FAMILIES[name].stack
    if hasattr(stack, "heads"):
        at = jnp.arange(len(last)), last - 1
        return head_logits(stack, trunk, params, features)[at]
    return logits_of(stack, trunk, params, features, tokens, last, DEPTH)


def told(memory, params, state, features, tokens, start, count, width):
    """The memory after it was told `count` [B] tokens from `start` [B] on, with the hidden states before them."""
    at = start[:, None] + np.arange(width)[None, :]
    rows = np.arange(len(count))[:, None]
    before = tuple(jnp.where((at > 0)[:, :, None], f[rows, np.maximum(at - 1, 0)], 0.0) for f in features)
    return memory(params, state, Committed(jnp.asarray(tokens[rows, at]), jnp.asarray(count)), before)


@pytest.mark.parametrize("candidates", [slow(1), 2])
@pytest.mark.parametrize("name", fast("modules", "eagle", "gloeckle"))
def test_drafts_and_laws_are_those_of_a_pass_without_a_cache(name, candidates):
    """Prompts of 1 to 20 tokens told in chunks of 8, then rounds that accept 0 to 3 drafts, or none of a row at all."""
    family, trunk, slots = FAMILIES[name], tiny_model()[1], 64
    drafter = family.drafter(DEPTH, candidates)
    params = Params(trunk, family.params())
    text = RNG.integers(0, CONFIG.vocab_size, (4, slots)).astype(np.int32)
    features = tuple(jnp.asarray(RNG.normal(size=(4, slots, 48)), jnp.float32) for _ in drafter.memory.features)
    memory, propose = jax.jit(drafter.memory.update), jax.jit(drafter.propose)
    check = jax.jit(lambda *args: reference(name, trunk, params.drafter, *args))
    state, length = drafter.memory.init(4, slots), np.zeros(4, np.int32)
    prompt = np.array([1, 2, 13, 20], np.int32)
    for start in range(0, 24, CHUNK):
        count = np.clip(prompt - start, 0, CHUNK).astype(np.int32)
        state = told(memory, params, state, features, text, np.full(4, start), count, CHUNK)
    length = prompt
    for seed, counts in enumerate([(1, 1, 1, 1), (1, 4, 0, 3), (0, 1, 2, 4), (4, 1, 1, 0), (1, 1, 1, 1)]):
        state = told(memory, params, state, features, text, length, np.array(counts, np.int32), DEPTH + 1)
        length = length + np.array(counts, np.int32)
        keys = step_keys(jax.vmap(jax.random.key)(np.arange(4, dtype=np.uint32) + 9 * seed), jnp.zeros(4, jnp.int32))
        proposal, state = propose(params, state, keys, LAW)
        if name != "medusa":
            assert state.cache.length.tolist() == (length - 1).tolist()
        tokens = np.asarray(proposal.tokens).reshape(4, DEPTH, candidates)
        q = np.asarray(proposal.q).reshape(4, DEPTH, candidates, -1)
        for c in range(candidates):
            whole = text.copy()
            whole[np.arange(4)[:, None], length[:, None] + np.arange(DEPTH)[None, :]] = tokens[:, :, c]
            logits = check(features, jnp.asarray(whole), jnp.asarray(length - 1))
            p = np.asarray(probabilities(logits, LAW))
            np.testing.assert_allclose(q[1:, :, c], p[1:], atol=2e-5)
            later = slice(min(c, 1), None)  # the second candidate's first token isn't the likeliest
            assert tokens[0, later, c].tolist() == np.argmax(logits[0, later], axis=-1).tolist()
        np.testing.assert_allclose(q.sum(axis=-1), 1, rtol=1e-5)
        if family.config.draft_vocab:
            assert set(tokens.ravel().tolist()) <= set(D2T)
            assert np.delete(q, D2T, axis=-1).max() == 0


def plain(count=24, **settings):
    target, params = tiny_target()
    return emitted_ids(run(target, params, make_request(target, PROMPTS, max_new_tokens=count, **settings))[0])


def request_of(name, depth, candidates=1, prompts=PROMPTS, **settings):
    family = FAMILIES[name]
    drafter = family.drafter(depth, candidates)
    settings = {"drafter": drafter, "drafter_params": family.params(), "max_new_tokens": 24, **settings}
    return make_request(tiny_target()[0], prompts, **settings)


SHAPES = [slow((1, 1)), (3, 2), slow((3, 1)), slow((2, 3))]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", fast("reuse", "medusa"))
def test_greedy_ids_are_those_of_plain_decoding(name, shape):
    """Also: after every round the memory holds what the target's hidden states of the text give, and no more."""
    target, params = tiny_target()
    model, family = tiny_model()[0], FAMILIES[name]
    request = request_of(name, *shape, rule="greedy")
    layers = request.drafter.memory.features

    @jax.jit
    def first_draft(tokens, last):
        features = model.apply({"params": params}, tokens, features=layers).features
        return reference(name, params, family.params(), features, tokens, last)[:, 0]

    @jax.jit
    def kept(memory):
        if name == "medusa":
            at = jnp.zeros((4, 1), jnp.int32)
            made = family.stack.run(family.params(), 1, memory.last[:, None], None, at, at)[0][:, 0]
        else:
            made = memory.last[:, 0]
        return family.stack.logits(params, family.params(), 1, made)

    for latest in rounds(target, params, request, steps=4):
        state, stats = latest
        assert state.cache.length.tolist() == (state.length - 1).tolist()
        if name != "medusa":
            assert state.memory.cache.length.tolist() == (state.length - 1).tolist()
        np.testing.assert_allclose(kept(state.memory), first_draft(state.tokens[:, :128], state.length - 1), atol=1e-3)
    assert emitted_ids(state) == plain()
    assert stats.num_draft_tokens > 0


@pytest.mark.parametrize("depth", [slow(1), 4, slow(8)])
@pytest.mark.parametrize("name", fast("gloeckle"))
def test_invariant_10_planted_weights_have_everything_accepted(name, depth):
    model, params = tiny_model(PLANTED)
    target, params = target_from_model(model), planted_trunk(params)
    drafter, drafts = planted(name, depth)
    settings = {"max_new_tokens": [31, 20, 9, 1], "rule": "greedy"}
    prompts = [[3], [1, 2], [5, 5, 4], [0, 9, 9, 9]]
    request = make_request(target, prompts, drafter=drafter, drafter_params=drafts, **settings)
    state, stats = run(target, params, request)
    assert stats.num_accepted_tokens == sum(stats.proposed_per_pos) > 0
    for ids, prompt in zip(emitted_ids(state), prompts, strict=True):
        assert ids == [(t + STRIDE) % 16 for t in [prompt[-1], *ids[:-1]]]


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_a_seeded_row_equals_its_solo_run(name):
    target, params = tiny_target()
    both, stats = run(target, params, request_of(name, 2, 2, temperature=[0.9, 0.0, 1.2, 0.7], seed=3))
    solo, _ = run(target, params, request_of(name, 2, 2, prompts=PROMPTS[2:3], temperature=1.2, seed=5))
    assert emitted_ids(both)[2] == emitted_ids(solo)[0]
    assert emitted_ids(both)[1] == plain()[1]
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens


@pytest.mark.slow
@pytest.mark.parametrize("name", ["reuse", "gloeckle", "eagle"])
def test_a_quantised_trunk_is_drafted_for(name):
    """An FP8 embedding, which is the head as well; the modules compute in bf16 beside it."""
    model, params = tiny_model()
    target, params = target_from_model(model), apply_precision(params, "fp8")
    family, settings = FAMILIES[name], {"max_new_tokens": 20, "rule": "greedy"}
    drafter = family.drafter(2, dtype="bfloat16")
    request = make_request(target, PROMPTS, drafter=drafter, drafter_params=family.params(), **settings)
    state, stats = run(target, params, request)
    assert state.memory.last.dtype == jnp.bfloat16
    assert emitted_ids(state) == emitted_ids(run(target, params, make_request(target, PROMPTS, **settings))[0])
    assert stats.num_draft_tokens > 0


@pytest.mark.parametrize("name", FAMILIES)
def test_invariant_9_parameters_are_checked(name):
    target, _ = tiny_target()
    family = FAMILIES[name]
    drafter, params = family.drafter(2), family.params()
    with pytest.raises(UserError, match="needs its parameters"):
        make_request(target, PROMPTS, drafter=drafter)
    some = next(iter(params))
    with pytest.raises(UserError, match=f"parameter {some}"):
        make_request(target, PROMPTS, drafter=drafter, drafter_params={**params, some: None})
    with pytest.raises(UserError, match="no parameter spare"):
        make_request(target, PROMPTS, drafter=drafter, drafter_params={**params, "spare": np.zeros(1)})


@pytest.mark.parametrize(("name", "depth"), [("reuse", 0), ("modules", 4), ("medusa", 4), ("gloeckle", 0)])
def test_depths_that_cannot_be_drafted(name, depth):
    with pytest.raises(UserError, match=f"is {depth}, expected from 1"):
        FAMILIES[name].drafter(depth)
    with pytest.raises(UserError, match="candidates of drafter"):
        FAMILIES[name].drafter(1, 62)


def test_the_same_settings_are_the_same_drafter():
    """It is a static argument of the compiled loop; those that differ in depth alone share a memory, and a prefill."""
    for family in FAMILIES.values():
        assert family.drafter(2, 2) is family.drafter(2, 2)
        assert family.drafter(1).memory is family.drafter(2, 2).memory
        assert family.drafter(2, 2).shape == tree.candidates(2, 2)


MARKOV = replace(CONFIG, vocab_size=3, d_model=8, n_layers=0, n_heads=2, n_kv_heads=1, head_dim=4, d_ff=8)
"""A trunk without layers: its law depends on the last token only, so that the law of whole outputs is known."""
GROUPS = ({"temperature": 1.0}, {"temperature": 0.0}, {"temperature": 0.7, "top_p": 0.9}, {"temperature": 1.4})


@pytest.mark.slow
@pytest.mark.parametrize("reuse", [True, False])
def test_invariant_2_the_law_of_whole_outputs_is_the_targets(reuse):
    """Two candidates over a reduced vocabulary, sampled and greedy rows side by side, prompts of two lengths."""
    model, params = tiny_model(MARKOV, spread=60.0)
    target = target_from_model(model)
    said = {"order": "embedding_first", "hidden_from": "before_final_norm", "draft_vocab": 2}
    config = MTPConfig(**said, reuse=reuse, depth_modules=1 if reuse else 2)
    drafter = sequential(MARKOV, config, 2, candidates=2)
    drafts = jax.tree.map(lambda x: x * 9 if x.ndim == 2 else x, init_params(MARKOV, config, d2t=(2, 0)))
    B, length, prompts = 8_192, 4, [(1,) if row // 4 % 2 else (0, 2, 1) for row in range(8_192)]
    rows = {
        name: [GROUPS[row % 4].get(name, default) for row in range(B)]
        for name, default in {"temperature": 1.0, "top_p": 1.0}.items()
    }
    settings = {"drafter": drafter, "drafter_params": drafts, "max_new_tokens": length, **rows}
    request = make_request(target, prompts, **settings)
    request = dataclasses.replace(request, tokens=request.tokens[:, :16], chunk=8)
    found, accepted = [], 0
    for call in range(-(-rows_needed(3**length, 8) * 4 // B)):
        seeds = np.arange(B, dtype=np.uint32) + np.uint32(call * B)
        state, stats = run(target, params, dataclasses.replace(request, seed=seeds))
        at = np.asarray(state.prompt_length)[:, None] + np.arange(length)[None, :]
        found.append(encode(np.take_along_axis(np.asarray(state.tokens), at, axis=1), 3))
        accepted += stats.num_accepted_tokens / stats.num_draft_tokens
    assert 0.05 < accepted / len(found) < 0.95
    logits = np.asarray(model.apply({"params": params}, jnp.arange(3)[:, None]).logits)[:, 0]
    table = np.broadcast_to(logits[None], (3, 3, 3))
    for group, settings in enumerate(GROUPS):
        codes = np.concatenate([codes[group::4] for codes in found])
        law = sequence_law(table, (1,), length, **settings)
        assert chi_square(np.bincount(codes, minlength=4**length), law) > LEVEL / (2 * len(GROUPS))
