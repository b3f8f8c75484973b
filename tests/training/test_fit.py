"""A run: what it leaves, and that stopping it anywhere changes no bit of it."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from mtpjax.config import load_config, replace, to_yaml
from mtpjax.errors import UserError
from mtpjax.io import checkpoint as ck
from mtpjax.training import OptimizerConfig, TrainConfig, fit, run_folder, train

ROOT = Path(__file__).resolve().parents[2]


def same_params(a, b):
    return all(np.array_equal(x, y) for x, y in zip(*map(jax.tree.leaves, (a, b)), strict=True))


def metrics(folder):
    """The rows without their times."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if key not in ("seconds", "tok_s")} for row in rows]


def test_what_a_run_leaves(config, finished):
    folder, result = finished.folder, finished.result
    assert sorted(path.name for path in folder.iterdir()) == [
        "checkpoints",
        "config.yaml",
        "metrics.jsonl",
        "results.json",
    ]
    assert load_config(TrainConfig, folder / "config.yaml") == config
    assert result.finished
    assert result.step == 9
    assert ck.checkpoint_steps(folder / "checkpoints") == [6, 9]
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 10))
    assert [row["fake_quant"] for row in rows] == [False] * 4 + [True] * 5
    assert all(row["tokens"] == 64 and row["grad_norm"] > 0 and row["tok_s"] > 0 for row in rows)
    assert rows[-1]["loss"] < rows[0]["loss"] - 0.3
    assert result.results == json.loads((folder / "results.json").read_text())
    assert result.results["train_tokens"] == 9 * 64


def test_fake_quantised_and_real_fp8_weights_have_one_loss(finished):
    values = finished.result.results
    assert values["validation_nll_fake_quant"] == pytest.approx(values["validation_nll_fp8"], abs=1e-6)
    assert values["validation_nll_fake_quant"] != values["validation_nll_f32"]
    assert values["weight_bytes_fp8"] < values["weight_bytes_f32"] / 3


def test_the_padded_last_batch_counts_once(config, finished):
    result = finished.result
    corpus = fit.load_corpus(config.data)
    sizes = {
        size: fit.validation_nll(result.params, corpus.validation, model=fit.Transformer(config.model), batch_size=size)
        for size in (4, 6)
    }
    assert len(corpus.validation) == 6
    assert sizes[4] == pytest.approx(sizes[6], abs=1e-6)
    assert sizes[4] == pytest.approx(result.results["validation_nll_f32"], abs=1e-6)


def test_a_finished_run_does_nothing(config, finished):
    before = {path: path.stat().st_mtime_ns for path in finished.folder.rglob("*")}
    again = train(config, run_dir=finished.folder, progress=False)
    assert again.finished
    assert "nothing to do" in again.message
    assert again.results == finished.result.results
    assert same_params(again.params, finished.result.params)
    assert {path: path.stat().st_mtime_ns for path in finished.folder.rglob("*")} == before


class Killed(BaseException):
    """Stands for the end of the process: nothing may catch it."""


def killing(monkeypatch, owner, name, call):
    """Replace `owner.name` by itself, but the `call`-th call ends the run."""
    original, calls = getattr(owner, name), []

    def patched(*args, **kwargs):
        calls.append(name)
        if len(calls) == call:
            raise Killed
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, patched)


def test_killed_again_and_again_it_ends_with_the_same_bits(config, finished, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    kills = [
        (fit, "_take_step", 2),  # before any checkpoint
        (fit, "save_checkpoint", 1),  # metrics written, checkpoint not
        (fit, "_take_step", 5),  # between checkpoints, in the quantised half
        (ck, "_hash_files", 1),  # in the middle of saving
        (fit, "_results", 1),  # everything done but the evaluation
    ]
    for owner, name, call in kills:
        with monkeypatch.context() as patch:
            killing(patch, owner, name, call)
            with pytest.raises(Killed):
                train(config, run_dir=folder, progress=False)
        if name == "_take_step":
            with (folder / "metrics.jsonl").open("a") as file:
                file.write('{"step": 3, "lo')  # a line that the kill cut short
    result = train(config, run_dir=folder, progress=False)
    assert result.finished
    assert same_params(result.params, finished.result.params)
    assert metrics(folder) == metrics(finished.folder)
    compared = ("validation_nll_f32", "validation_nll_fp8", "train_tokens", "fake_quant_steps")
    assert [result.results[key] for key in compared] == [finished.result.results[key] for key in compared]
    assert ck.checkpoint_steps(folder / "checkpoints") == [6, 9]


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_saves_and_the_run_goes_on(config, finished, tmp_path, monkeypatch, name):
    original = fit._take_step

    def interrupted(run):
        original(run)
        if run.step == 5:
            signal.raise_signal(getattr(signal, name))

    usual = signal.getsignal(getattr(signal, name))
    with monkeypatch.context() as patch:
        patch.setattr(fit, "_take_step", interrupted)
        result = train(config, run_dir=tmp_path, progress=False)
    assert not result.finished
    assert result.message == "interrupted at step 5 of 9 and saved; the same command goes on from there"
    assert ck.checkpoint_steps(tmp_path / "checkpoints") == [3, 5]
    assert signal.getsignal(getattr(signal, name)) is usual
    assert not (tmp_path / "results.json").exists()
    if name == "SIGINT":
        again = train(config, run_dir=tmp_path, progress=False)
        assert same_params(again.params, finished.result.params)
        assert metrics(tmp_path) == metrics(finished.folder)


def test_a_damaged_checkpoint_costs_only_its_own_steps(config, finished, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        killing(patch, fit, "_take_step", 8)
        with pytest.raises(Killed):
            train(config, run_dir=tmp_path, progress=False)
    assert ck.checkpoint_steps(tmp_path / "checkpoints") == [3, 6]
    victim = max((tmp_path / "checkpoints" / "00000006").rglob("*"), key=lambda path: path.stat().st_size)
    victim.write_bytes(victim.read_bytes()[:-1])
    with pytest.warns(UserWarning, match="is damaged"):
        result = train(config, run_dir=tmp_path, progress=False)
    assert same_params(result.params, finished.result.params)
    assert metrics(tmp_path) == metrics(finished.folder)


def test_a_run_in_a_thread_needs_no_signals(config, tmp_path):
    results = []
    small = replace(config, steps=0)
    thread = threading.Thread(target=lambda: results.append(train(small, run_dir=tmp_path, progress=False)))
    thread.start()
    thread.join()
    assert results[0].finished
    assert results[0].results["validation_nll_f32"] == pytest.approx(np.log(257), abs=0.1)


def test_another_config_or_text_is_refused_by_name(config, finished, tmp_path, text):
    other = replace(config, optimizer=OptimizerConfig(learning_rate=2e-2, warmup_steps=2))
    with pytest.raises(UserError, match=r"optimizer\.learning_rate is 0\.01 \(float\) there and 0\.02 \(float\) here"):
        train(other, run_dir=finished.folder, progress=False)
    with pytest.raises(UserError, match=r"holds a run at step 9"):
        train(config, run_dir=finished.folder, resume=False, progress=False)
    (tmp_path / "config.yaml").write_text("somebody: else\n")
    with pytest.raises(UserError, match="holds a run of another config"):
        train(config, run_dir=tmp_path, progress=False)
    assert (tmp_path / "config.yaml").read_text() == "somebody: else\n"
    before = text.read_text()
    try:
        text.write_text(before + "!")
        with pytest.raises(UserError, match="the text is not the one"):
            train(config, run_dir=finished.folder, progress=False)
    finally:
        text.write_text(before)


def test_when_things_are_written_may_change(config, finished):
    """Only what is computed makes it another run."""
    relaxed = replace(config, log_every=7, checkpoint=fit.TrainConfig.model_fields["checkpoint"].default)
    assert train(relaxed, run_dir=finished.folder, progress=False).finished


def test_a_folder_that_cannot_be_written_is_refused_before_any_work(config, tmp_path, monkeypatch):
    monkeypatch.setattr(fit, "init_state", lambda *_: pytest.fail("work was done"))
    (tmp_path / "file").write_text("")
    for run_dir in (tmp_path / "file", tmp_path / "file" / "inside"):
        with pytest.raises(UserError, match=r"cannot write in the run folder .*; give another one"):
            train(config, run_dir=run_dir, progress=False)

    def refuse(**_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(run_folder.tempfile, "TemporaryFile", refuse)
    with pytest.raises(UserError, match="Permission denied"):
        train(config, run_dir=tmp_path / "new", progress=False)


def test_bad_text_leaves_no_folder(config, tmp_path):
    bad = replace(config, data=replace(config.data, text_files=(str(tmp_path / "absent"),)))
    with pytest.raises(UserError, match="cannot read"):
        train(bad, run_dir=tmp_path / "run", progress=False)
    assert not (tmp_path / "run").exists()


def test_a_loss_that_explodes_stops_the_run(config, tmp_path, monkeypatch):
    """Before the state is saved, so that the last checkpoint is a good one."""

    def explode(state, batch, **_):
        bad = jax.numpy.float32("nan" if run_steps else 1.0)
        run_steps.append(bad)
        return state, {"loss": bad, "grad_norm": bad, "tokens": jax.numpy.int32(64)}

    run_steps: list[jax.Array] = []
    monkeypatch.setattr(fit, "compiled_step", explode)
    with pytest.raises(UserError, match=r"step 2: the loss is nan .*; lower optimizer\.learning_rate"):
        train(config, run_dir=tmp_path, progress=False)
    assert ck.checkpoint_steps(tmp_path / "checkpoints") == []


def test_a_full_disk_is_one_line(config, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(fit, "save_checkpoint", full)
    with pytest.raises(UserError, match=r"cannot write in .* at step 3 \(No space left on device\)"):
        train(config, run_dir=tmp_path, progress=False)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("steps=-1", "steps: expected greater than or equal to 0"),
        ("data.batch_size=0", "data.batch_size: expected greater than 0"),
        ("model.vocab_size=256", "the byte-level text needs 257"),
        ("model.n_kv_heads=3", "must be a multiple of model.n_kv_heads"),
        ("model.head_dim=7", "must be even"),
        ("model.n_layers=0", "model.n_layers is 0"),
        ("data.sequence_length=500", "exceeds model.max_context"),
        ("qat.from=3", "did you mean 'qat.from_step'"),
        ("optimizer.learning_rate=0", "optimizer.learning_rate: expected greater than 0"),
    ],
)
def test_bad_values_are_refused_by_name(override, said):
    with pytest.raises(UserError) as caught:
        load_config(TrainConfig, ROOT / "configs" / "tiny_qat.yaml", [override])
    assert said in str(caught.value)


def test_the_shipped_config_trains_half_its_steps_quantised():
    config = load_config(TrainConfig, ROOT / "configs" / "tiny_qat.yaml")
    assert (config.steps, config.qat.from_step) == (200, 100)
    assert config.data.text_files == ()


PROGRAM = """
import sys
from mtpjax.config import load_config
from mtpjax.training import TrainConfig, train
print(train(load_config(TrainConfig, sys.argv[1]), run_dir=sys.argv[2]).message)
"""


@pytest.mark.slow
def test_killed_by_the_system_it_ends_with_the_same_bits(config, finished, tmp_path):
    """SIGKILL at arbitrary moments, by the clock."""
    path, folder = tmp_path / "run.yaml", tmp_path / "run"
    path.write_text(to_yaml(replace(config, checkpoint=replace(config.checkpoint, every=1))))
    command = [sys.executable, "-W", "error", "-c", PROGRAM, str(path), str(folder)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    for lines in (1, 3, 5, 7):
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        deadline = time.monotonic() + 120
        while process.poll() is None and time.monotonic() < deadline:
            done = (folder / "metrics.jsonl").read_bytes().count(b"\n") if (folder / "metrics.jsonl").exists() else 0
            if done >= lines:
                break
            time.sleep(0.002)
        process.kill()
        process.communicate()
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    found = ck.latest_checkpoint(folder / "checkpoints")
    assert found is not None
    assert found.step == 9
    assert metrics(folder) == metrics(finished.folder)
    again = train(load_config(TrainConfig, path), run_dir=folder, progress=False)
    assert same_params(again.params, finished.result.params)
