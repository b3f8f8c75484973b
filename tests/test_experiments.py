"""The studies in experiments/, on a model that the tests make: what they compute, write, resume and refuse."""

import json
from pathlib import Path

import pytest

from experiments import ngram_depth as study_of_depth
from experiments.ngram_depth import Study, difference, iid, mixture, per_pass, per_position
from mtpjax.config import load_config
from mtpjax.decoding.result import Stats
from mtpjax.io.lm import LM
from mtpjax.io.tokenizer import Tokenizer
from tests.tiny import CONFIG, tiny_model

ROOT = Path(__file__).resolve().parents[1]
PROMPTS = [
    {"kind": "copying", "name": "loop", "text": "abcabcabcabc"},
    {"kind": "chat", "name": "word", "text": "hello"},
]
FACTS = {
    "date_utc": "2026-01-01T00:00:00+00:00",
    "command": ["python", "experiments/ngram_depth.py", "tiny.yaml"],
    "source": {"commit": "c0ffee", "dirty": False},
    "versions": {"python": "3.12.0", "jax": "0.12.0"},
    "device": {
        "platform": "cpu",
        "kind": "cpu",
        "devices": 1,
        "processor": "a processor",
        "cpus": 2,
        "system": "Linux",
    },
    "xla_flags": "",
    "seeds": [],
    "model": {"file": "tiny.gguf", "sha256": "0" * 64},
}


@pytest.fixture(scope="module")
def lm():
    model, params = tiny_model()
    tokenizer = Tokenizer(
        split=lambda text, special: [ord(c) % CONFIG.vocab_size for c in text],
        pieces=tuple(bytes([65 + i]) for i in range(CONFIG.vocab_size)),
        special=frozenset(),
    )
    return LM(model, params, tokenizer, CONFIG, "f32", "tiny.gguf", "tiny")


def tiny_study(**changes):
    return Study(**{"prompts": PROMPTS, "max_depth": 2, "max_new_tokens": 12, "repeats": 1, "passes": 2} | changes)


def counts(depth, passes, accepted, tokens):
    return Stats(
        batch=1, depth=depth, prompt_tokens=5, new_tokens=tokens, target_passes=passes, compile_s=0.0, prefill_s=0.1,
        decode_s=1.0, num_drafts=passes, num_draft_tokens=passes * depth, num_accepted_tokens=sum(accepted),
        proposed_per_pos=(passes,) * depth, accepted_per_pos=tuple(accepted),
        lossless=True, tv_per_pos=None, weight_bytes=1, cache_bytes=1,
    )  # fmt: skip


def test_predictions():
    """By hand: a = 1/2 gives 1 + 1/2 + 1/4; equal rates make all three the same; a = 1 accepts everything."""
    assert iid(0.5, 2) == pytest.approx(1.75)
    assert per_position([0.5, 0.5, 0.9], 2) == pytest.approx(1.75)
    assert iid(1.0, 8) == 9.0
    one = counts(1, passes=8, accepted=[4], tokens=13)
    assert per_pass(one) == [0.5]
    assert mixture([one, one], 2) == pytest.approx(1.75)
    # 12 tokens at 1 a pass and 16 at 2 a pass: 28 over 12 + 8, not the mean of the rates' predictions.
    assert mixture([counts(1, 12, [0], 13), counts(1, 8, [8], 17)], 1) == pytest.approx(28 / 20)
    assert iid(0.0, 5) == per_position([0.0], 1) == 1.0


@pytest.mark.slow
def test_the_study_writes_its_results(lm, tmp_path):
    files = study_of_depth.run(lm, tiny_study(), tmp_path, FACTS)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(p.name for p in files)
    results = json.loads((tmp_path / "ngram_depth.json").read_text())
    assert [row["depth"] for row in results["rows"]] == [0, 1, 2]
    assert all(s["difference"] is None for row in results["rows"] for s in row["samples"])
    records = {(r["kind"], r["depth"]): r for r in results["analysis"]}
    assert set(records) == {(kind, depth) for kind in ("copying", "chat", "all") for depth in range(3)}
    for (_, depth), record in records.items():
        assert 1 <= record["acceptance_length"] <= depth + 1
        assert record["new_tokens"] == records[record["kind"], 0]["new_tokens"]
        assert record["gain_predicted"] == pytest.approx(record["acceptance_length"] / record["window_cost"])
    assert records["all", 0]["gain"] == records["all", 0]["window_cost"] == 1
    text = (tmp_path / "ngram_depth.md").read_text()
    assert "c0ffee" in text
    assert "ngram_depth.png" in text
    assert (tmp_path / "ngram_depth.png").read_bytes().startswith(b"\x89PNG")


def test_an_interrupted_study_goes_on(lm, tmp_path, monkeypatch):
    row = {"compile_s": 0.0, "pass_ms": {"plain": 1.0, "window": 1.0}}
    measured, interruptions = [], [KeyboardInterrupt()]

    def measure(lm, study, depth, plain, advance):
        if depth == 2 and interruptions:
            raise interruptions.pop()
        measured.append(depth)
        stats = counts(depth, passes=4, accepted=[0] * depth, tokens=5)
        samples = [{**p, "stats": vars(stats), "difference": None} for p in PROMPTS]
        return {**row, "depth": depth, "samples": samples}

    monkeypatch.setattr(study_of_depth, "measure_depth", measure)
    with pytest.raises(KeyboardInterrupt):
        study_of_depth.run(lm, tiny_study(), tmp_path, FACTS)
    assert [p.name for p in tmp_path.iterdir()] == [".ngram_depth.partial.json"]
    study_of_depth.run(lm, tiny_study(), tmp_path, FACTS)
    assert measured == [0, 1, 2]
    assert json.loads((tmp_path / "ngram_depth.json").read_text())["sittings"] == 2
    study_of_depth.run(lm, tiny_study(), tmp_path, FACTS)  # nothing is left to go on from
    assert measured == [0, 1, 2, 0, 1, 2]


def test_another_study_does_not_go_on_from_it(lm, tmp_path, monkeypatch):
    kept = tmp_path / ".ngram_depth.partial.json"
    kept.write_text(json.dumps({"key": {"study": "another"}, "sittings": 1, "rows": [{}, {}, {}]}))
    monkeypatch.setattr(study_of_depth, "measure_depth", lambda *_: pytest.fail("reached, as it should be"))
    with pytest.raises(pytest.fail.Exception, match="as it should be"):
        study_of_depth.run(lm, tiny_study(), tmp_path, FACTS)


def test_a_difference_comes_with_its_margin(lm):
    prompt, plain = [1, 2, 3], [4, 5, 6]
    assert difference(lm, prompt, plain, plain) is None
    found = difference(lm, prompt, plain, [4, 9, 6])
    assert found["at"] == 1
    assert found["margin"] > 0
    assert difference(lm, prompt, plain, [4, 5])["at"] == 2


def test_the_committed_config_is_the_study_that_its_comment_promises():
    study = load_config(Study, ROOT / "configs" / "ngram_depth.yaml")
    assert study.max_depth == 8
    assert len(study.chosen) == 12
    short = load_config(Study, ROOT / "configs" / "ngram_depth.yaml", ["per_kind=1", "max_depth=3"])
    assert [p.kind for p in short.chosen] == list(dict.fromkeys(p.kind for p in study.prompts))


@pytest.mark.parametrize(
    ("arguments", "line"),
    [(["missing.yaml"], "cannot read the config"), (["configs/ngram_depth.yaml", "repeat=3"], "repeats")],
)
def test_a_mistake_is_one_line(arguments, line, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert study_of_depth.main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert line in error


def test_the_page_warns_of_a_machine_that_was_not_quiet(lm, tmp_path, monkeypatch):
    def measure(times):
        def one(lm, study, depth, plain, advance):
            stats = vars(counts(depth, passes=4, accepted=[1] * depth, tokens=5))
            samples = [{**p, "ids": [1, 2], "stats": stats, "difference": None} for p in PROMPTS]
            ms = {"plain": times[depth], "window": times[depth]}
            return {"depth": depth, "compile_s": 0.0, "samples": samples, "pass_ms": ms}

        return one

    for times, warned in ([1.0, 1.1, 1.0], False), ([1.0, 1.5, 1.0], True):
        monkeypatch.setattr(study_of_depth, "measure_depth", measure(times))
        study_of_depth.run(lm, tiny_study(), tmp_path, FACTS)
        assert ("not quiet" in (tmp_path / "ngram_depth.md").read_text()) is warned
