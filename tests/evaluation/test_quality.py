"""Teacher-forced figures against sums made by hand."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mtpjax
from mtpjax.errors import UserError
from mtpjax.evaluation import quality
from mtpjax.io.lm import load


@pytest.fixture(scope="module")
def lm(tiny_folder):
    return load(tiny_folder, precision="f32")


@pytest.fixture(scope="module")
def ids():
    return np.random.default_rng(0).integers(3, 250, 150).tolist()


def full_laws(lm, ids):
    return np.asarray(lm.model.apply({"params": lm.params}, jnp.asarray([ids])).logits[0], np.float64)


def log_softmax(logits):
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def test_scores_are_those_of_one_pass_over_the_whole_text(lm, ids):
    scores = quality.score(lm, ids)
    logits = full_laws(lm, ids)[:-1]
    expected = -log_softmax(logits)[np.arange(len(ids) - 1), ids[1:]]
    np.testing.assert_allclose(scores.nll, expected, atol=2e-4)
    assert scores.best.tolist() == logits.argmax(-1).tolist()
    two_best = np.sort(logits, axis=-1)[:, -2:]
    np.testing.assert_allclose(scores.margin, two_best[:, 1] - two_best[:, 0], atol=2e-4)


def test_chunks_join(lm, ids):
    one = [np.asarray(logits) for _, logits in quality.laws(lm, ids, chunk=256)]
    many = list(quality.laws(lm, ids, chunk=7))
    assert [at for at, _ in many] == list(range(1, 150, 7))
    np.testing.assert_allclose(np.concatenate([np.asarray(x) for _, x in many]), np.concatenate(one), atol=1e-4)


@pytest.mark.slow
def test_a_long_text_is_scored_in_overlapping_windows(tiny_folder, ids):
    lm = load(tiny_folder, precision="f32", context=40)
    scores = quality.score(lm, ids)
    assert len(scores.nll) == len(ids) - 1
    for begin, end, first in quality.windows(len(ids), 40):
        alone = -log_softmax(full_laws(lm, ids[begin : end - 1]))[np.arange(end - 1 - begin), ids[begin + 1 : end]]
        np.testing.assert_allclose(scores.nll[first - 1 : end - 1], alone[first - begin - 1 :], atol=2e-4)


@pytest.mark.parametrize(("tokens", "context"), [(2, 2), (10, 3), (100, 7), (100, 100), (101, 100), (5, 50)])
def test_windows_score_every_token_but_the_first_once(tokens, context):
    found = list(quality.windows(tokens, context))
    assert [t for _, end, first in found for t in range(first, end)] == list(range(1, tokens))
    assert all(end - begin <= context and begin < first for begin, end, first in found)


def test_a_model_is_at_no_distance_from_itself_and_at_the_right_one_from_another(lm, ids):
    same = quality.compare(lm, lm, ids)
    assert (same.kl, same.top1_agreement, same.tokens) == (pytest.approx(0, abs=1e-6), 1.0, len(ids) - 1)

    other = dataclasses.replace(lm, params=jax.tree.map(lambda x: x * 0.8, lm.params))
    distance = quality.compare(other, lm, ids)
    p, q = (log_softmax(full_laws(m, ids)[:-1]) for m in (lm, other))
    assert distance.kl == pytest.approx((np.exp(p) * (p - q)).sum(-1).mean(), rel=1e-3)
    assert distance.top1_agreement == pytest.approx((p.argmax(-1) == q.argmax(-1)).mean())


def test_padding_of_the_vocabulary_is_no_part_of_the_law(lm, ids):
    assert lm.tokenizer.vocab_size == 272  # the file names every row; now pretend that it does not
    shorter = dataclasses.replace(lm, tokenizer=dataclasses.replace(lm.tokenizer, pieces=lm.tokenizer.pieces[:266]))
    (_, logits), *_ = quality.laws(shorter, ids)
    assert bool(jnp.all(jnp.isneginf(logits[:, 266:]))) and bool(jnp.all(jnp.isfinite(logits[:, :266])))
    assert np.isfinite(quality.score(shorter, ids).nll).all()
    assert np.isfinite(quality.compare(shorter, shorter, ids).kl)
    with pytest.raises(UserError, match="266 and 272"):
        quality.compare(shorter, lm, ids)


def test_nll_of_a_text(lm):
    text = "the hand and the thing"
    ids = lm.tokenizer.encode(text)
    logits = full_laws(lm, ids)[:-1]
    expected = -log_softmax(logits)[np.arange(len(ids) - 1), ids[1:]].mean()
    assert quality.nll(lm, text) == pytest.approx(expected, abs=1e-4)


def test_a_text_is_data(lm):
    assert 1 not in quality.encode(lm, "<|im_start|>")


@pytest.mark.parametrize("ids", [[], [5], [5, 272], [5, -1]])
def test_what_cannot_be_scored(lm, ids):
    with pytest.raises(UserError, match="the text to score"):
        quality.score(lm, ids)


def test_the_public_names_are_there():
    assert {"LM", "generate", "load", "stream"} <= set(dir(mtpjax))
    assert mtpjax.load is load
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = mtpjax.nothing
