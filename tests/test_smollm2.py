"""SmolLM2-135M-Instruct against figures made by another implementation from the same file (transformers, float32).

`tests/data/smollm2_golden.json` holds prompts, ids, negative log-likelihoods, greedy continuations and the margin
between the two largest logits of each step; `smollm2_last_logits.npz` the logits of the last position.
"""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mtpjax
from mtpjax.decoding.drive import rounds
from mtpjax.decoding.generate import target_of
from mtpjax.decoding.request import make_request
from mtpjax.evaluation.quality import score

DATA = Path(__file__).parent / "data"
GOLDEN = json.loads((DATA / "smollm2_golden.json").read_text(encoding="utf-8"))
NAMES = [name for name in GOLDEN if not name.startswith("_")]
TIE = 2e-3  # after a step whose margin is under this, another order of summation may choose otherwise


@pytest.fixture(scope="module")
def lm(smollm2):
    return mtpjax.load(smollm2, precision="f32")


@pytest.fixture(scope="module")
def logits(lm):
    """Logits of every position of every prompt, without a cache: padded to one shape, compiled once."""
    longest = max(len(GOLDEN[name]["ids"]) for name in NAMES)
    ids = np.zeros((len(NAMES), longest), np.int32)
    for row, name in enumerate(NAMES):
        ids[row, : len(GOLDEN[name]["ids"])] = GOLDEN[name]["ids"]
    out = jax.jit(lambda params, ids: lm.model.apply({"params": params}, ids).logits)(lm.params, jnp.asarray(ids))
    return {name: np.asarray(out[row, : len(GOLDEN[name]["ids"])]) for row, name in enumerate(NAMES)}


def same_until_a_tie(ids: list[int], name: str) -> bool:
    golden, margins = GOLDEN[name]["greedy_ids"], GOLDEN[name]["greedy_margins"]
    for step, (got, want) in enumerate(zip(ids, golden, strict=True)):
        if got != want:
            return any(margin < TIE for margin in margins[: step + 1])
    return True


@pytest.mark.parametrize("name", NAMES)
def test_prompt_ids(lm, name):
    assert lm.tokenizer.encode(GOLDEN[name]["prompt"]) == GOLDEN[name]["ids"]


@pytest.mark.parametrize("name", NAMES)
def test_last_logits_and_prompt_nll(logits, name):
    want = np.load(DATA / "smollm2_last_logits.npz")[f"{name}_last_logits"]
    np.testing.assert_allclose(logits[name][-1], want, atol=2e-3, rtol=0)
    logprobs = jax.nn.log_softmax(logits[name][:-1])
    ids = np.array(GOLDEN[name]["ids"])
    got = -np.mean(np.asarray(logprobs)[np.arange(len(ids) - 1), ids[1:]])
    assert got == pytest.approx(GOLDEN[name]["prompt_nll"], abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("drafter", [None, "ngram"])
def test_greedy_ids_of_a_ragged_batch(lm, drafter):
    """All six prompts at once, with prompt lookup at depth 3 and plain."""
    prompts = [GOLDEN[name]["ids"] for name in NAMES]
    together = mtpjax.generate(lm, prompts, drafter=drafter, max_new_tokens=96, stop_ids=()).ids
    for row, name in enumerate(NAMES):
        assert same_until_a_tie(together[row], name), (name, drafter)


def greedy_ids_alone(lm, name, depth, count=96):
    drafter = "ngram" if depth else None
    prompt = [GOLDEN[name]["ids"]]
    return mtpjax.generate(lm, prompt, max_new_tokens=count, stop_ids=(), drafter=drafter, depth=depth).ids[0]


@pytest.mark.slow
def test_greedy_ids_alone(lm):
    assert greedy_ids_alone(lm, NAMES[0], 3, 24) == GOLDEN[NAMES[0]]["greedy_ids"][:24]


@pytest.mark.slow
@pytest.mark.parametrize("depth", range(9))
def test_greedy_ids_alone_at_every_depth(lm, depth):
    for name in NAMES:
        assert same_until_a_tie(greedy_ids_alone(lm, name, depth), name), (name, depth)


@pytest.mark.slow
def test_streamed_text_is_the_whole_text(lm):
    prompt = GOLDEN["unicode"]["prompt"]
    stream = mtpjax.stream(lm, prompt, max_new_tokens=24, stop_ids=(), drafter="ngram")
    chunks = list(stream)
    assert len(chunks) > 3
    assert "".join(chunks) == stream.result.text[0]
    assert stream.result.ids[0] == GOLDEN["unicode"]["greedy_ids"][:24]


@pytest.mark.slow
def test_nll_of_a_public_text(lm, shared):
    text = (shared / "data/tinyshakespeare/input.txt").read_text(encoding="utf-8")
    golden = GOLDEN["_nll_tinyshakespeare"]
    ids = lm.tokenizer.encode(text[: golden["chars_read"]])[: golden["tokens"]]
    assert ids[:16] == golden["first_ids"]
    assert score(lm, ids).nll.mean() == pytest.approx(golden["nll_per_token"], abs=1e-4)


@pytest.mark.slow
def test_a_prompt_of_8000_tokens(lm):
    """Chunks, no logits but the last position's, no score matrix: the workspace stays small."""
    rng = np.random.default_rng(0)
    prompt = rng.integers(100, 40_000, 8_000).tolist()
    request = make_request(target_of(lm), [prompt], max_new_tokens=3, drafter="ngram")
    steps = [
        (state.cache.length.tolist(), stats.new_tokens) for state, stats in rounds(target_of(lm), lm.params, request)
    ]
    assert steps[0] == ([8_000], 1)
    assert steps[-1] == ([8_002], 3)
