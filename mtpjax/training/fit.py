"""A whole training run, from a config to a folder of results, that can be killed and resumed at any moment.

    corpus, folder  ->  state, batches (fresh, or the newest checkpoint's)  ->  loop { step, log, save }  ->  evaluate

A resumed run ends with the same bits as one that was never stopped: the checkpoint holds the whole state, the position
in the data is part of it, batches are a function of (seed, position), and both runs execute the same two compiled
programs. The host reads the device only every `log_every` steps and before a checkpoint; in between, steps queue up.

A signal (Ctrl-C, or a scheduler's SIGTERM) is noticed between two steps: the state is saved and `train` returns,
saying how to go on. A second one ends the program at once, and loses only what came after the last checkpoint.

The end compares three losses of the final weights on the same validation text: the float32 masters, the masters through
fake quantisation, and real FP8 weights (`QTensor`) in float32 arithmetic. The last two must agree: that is the promise
that what was trained is what is deployed.
"""

import contextlib
import json
import math
import platform
import signal
import threading
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

import jax
import numpy as np

from mtpjax.errors import UserError
from mtpjax.io.checkpoint import Checkpoint, latest_checkpoint, restore_checkpoint, save_checkpoint
from mtpjax.models.transformer import Transformer
from mtpjax.progress import progress as show_progress
from mtpjax.quant import apply_precision, precision_report
from mtpjax.training import run_folder
from mtpjax.training.config import TrainConfig
from mtpjax.training.data import Corpus, batches, load_corpus, to_batch
from mtpjax.training.losses import IGNORE
from mtpjax.training.step import TrainState, compiled_nll_sum, compiled_step, init_state, make_optimizer


@dataclass(frozen=True)
class TrainResult:
    """What a call of `train` leaves: `params` are the float32 weights after `step` steps.

    `finished` is False after an interruption, and then `results` is empty; otherwise it is what results.json holds.
    `message` is one line for the person who started it.
    """

    run_dir: Path
    step: int
    finished: bool
    message: str
    params: Any = field(repr=False)
    results: dict[str, Any] = field(default_factory=dict)


@dataclass
class _Run:
    """The moving parts of one run, so that the loop below reads as what it does."""

    config: TrainConfig
    folder: Path
    corpus: Corpus
    model: Transformer
    optimizer: Any
    state: TrainState
    batches: Any
    step: int = 0
    saved_step: int = -1
    compile_s: float = 0.0
    pending: list[dict[str, Any]] = field(default_factory=list)
    compiled: set[bool] = field(default_factory=set)
    since: float = 0.0

    @property
    def metrics(self) -> Path:
        return self.folder / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"


def train(config: TrainConfig, *, run_dir: str | Path, resume: bool = True, progress: bool = True) -> TrainResult:
    """Train as `config` says, in the folder `run_dir`; go on where an earlier call with the same config stopped.

    Args:
        config: the run.
        run_dir: made if need be; holds config.yaml, metrics.jsonl, checkpoints/ and results.json.
        resume: False refuses a folder that holds a run.
        progress: show progress on standard error.

    Raises UserError: text that is missing or too short, a folder that cannot be written or holds a run of another
    config or text, a checkpoint that cannot be read, a loss that is no longer finite.
    """
    run, found = _open(config, run_dir, resume)
    results = run.folder / "results.json"
    if run.step == config.steps and results.exists():
        message = f"{run.folder} is finished: {config.steps} steps are done; nothing to do"
        return TrainResult(run.folder, run.step, True, message, run.state.params, json.loads(results.read_text()))
    run_folder.write_config(run.folder, config)
    run_folder.cut_metrics(run.metrics, run.step)
    label = f"training from step {run.step}" if found else "training"
    with _interruption() as stop, _progress(progress, label, config.steps - run.step) as advance:
        try:
            _loop(run, stop, advance)
        except OSError as error:
            raise UserError(
                f"cannot write in {run.folder} at step {run.step} ({error.strerror or error}); make room, then run the "
                "same command to go on from the last checkpoint"
            ) from error
        if stop.is_set():
            message = f"interrupted at step {run.step} of {config.steps} and saved; the same command goes on from there"
            return TrainResult(run.folder, run.step, False, message, run.state.params)
    with _progress(progress, "evaluating", None):
        values = _results(run)
    run_folder.replace_text(results, json.dumps(values, indent=2) + "\n")
    message = f"{run.folder}: {config.steps} steps, validation loss {values['validation_nll_f32']:.4f} nats/token"
    return TrainResult(run.folder, run.step, True, message, run.state.params, values)


def _open(config: TrainConfig, run_dir: str | Path, resume: bool) -> tuple[_Run, Checkpoint | None]:
    """The run as it stands in its folder, or before its first step; nothing is written but the folder."""
    corpus = load_corpus(config.data)
    folder = run_folder.open_run(run_dir)
    found = latest_checkpoint(folder / "checkpoints")
    if found and not resume:
        raise UserError(f"{folder} holds a run at step {found.step}; give another run folder, or let it be resumed")
    run_folder.refuse_other_config(folder, config, found.info["config"] if found else None)
    model, optimizer = Transformer(config.model), make_optimizer(config.optimizer, config.steps)
    state, data = init_state(model, optimizer, config.seed), batches(corpus.train, config.data.batch_size, config.seed)
    # Restored arrays are bound to their device. Binding fresh ones too makes both kinds of run execute one program.
    state = jax.device_put(state, jax.devices()[0])
    if found is None:
        return _Run(config, folder, corpus, model, optimizer, state, data), None
    if found.info["text_sha256"] != corpus.sha256:
        raise UserError(f"the text is not the one that {folder} was trained on; give another run folder or that text")
    data.set_state(found.info["data"])
    state = restore_checkpoint(found, state)
    return _Run(config, folder, corpus, model, optimizer, state, data, found.step, found.step), found


def _loop(run: _Run, stop: threading.Event, advance: Callable[[int], None]) -> None:
    """Steps until the end, or until `stop` is set; the state that it leaves is saved."""
    config = run.config
    run.since = monotonic()
    while run.step < config.steps and not stop.is_set():
        _take_step(run)
        save = run.step % config.checkpoint.every == 0 or run.step == config.steps or stop.is_set()
        if save or run.step % config.log_every == 0:
            advance(_flush(run))
        if save:
            _save(run)
    if run.saved_step != run.step:
        _save(run)


def _take_step(run: _Run) -> None:
    batch = jax.device_put(next(run.batches))
    quantise = run.config.qat.from_step is not None and run.step >= run.config.qat.from_step
    start = monotonic()
    run.state, metrics = compiled_step(run.state, batch, model=run.model, optimizer=run.optimizer, quantise=quantise)
    if quantise not in run.compiled:  # a first call returns when it is compiled, before it has run
        run.compiled.add(quantise)
        run.compile_s += monotonic() - start
        run.since += monotonic() - start
    run.step += 1
    run.pending.append({"step": run.step, "fake_quant": quantise, **metrics})


def _flush(run: _Run) -> int:
    """Wait for the device, write the steps since the last time, and return how many they are."""
    rows = jax.device_get(run.pending)
    if not rows:
        return 0
    seconds = (monotonic() - run.since) / len(rows)
    for row in rows:
        row.update(loss=float(row["loss"]), grad_norm=float(row["grad_norm"]), tokens=int(row["tokens"]))
        row.update(seconds=round(seconds, 6), tok_s=round(row["tokens"] / seconds, 1))
        if not math.isfinite(row["loss"]) or not math.isfinite(row["grad_norm"]):
            raise UserError(
                f"step {row['step']}: the loss is {row['loss']} and the gradient's norm {row['grad_norm']}; "
                f"lower optimizer.learning_rate (the checkpoints in {run.checkpoints} are from before)"
            )
    run_folder.append_metrics(run.metrics, rows)
    run.pending, run.since = [], monotonic()
    return len(rows)


def _save(run: _Run) -> None:
    info = {
        "config": run.config.model_dump(mode="json"),
        "data": run.batches.get_state(),
        "text_sha256": run.corpus.sha256,
    }
    start = monotonic()
    save_checkpoint(run.checkpoints, run.step, run.state, info, run.config.checkpoint.keep)
    run.saved_step = run.step
    run.since += monotonic() - start


def validation_nll(params: Any, windows: np.ndarray, *, model: Any, batch_size: int, quantise: bool = False) -> float:
    """Mean negative log-likelihood of windows [n, T + 1] in nats per token; `params` may hold QTensors."""
    sums = []
    for start in range(0, len(windows), batch_size):
        batch = to_batch(windows[start : start + batch_size])
        missing = batch_size - len(batch["ids"])
        padded = {
            name: np.pad(rows, ((0, missing), (0, 0)), constant_values=IGNORE if name == "labels" else 0)
            for name, rows in batch.items()
        }
        sums.append(compiled_nll_sum(params, padded, model=model, quantise=quantise))
    nll, tokens = np.sum(np.asarray(jax.device_get(sums), np.float64), axis=0)
    return float(nll / max(tokens, 1))


def _results(run: _Run) -> dict[str, Any]:
    config, params = run.config, run.state.params
    deployed = apply_precision(params, "fp8")

    def nll(weights: Any, quantise: bool) -> float:
        size = config.data.batch_size
        return validation_nll(weights, run.corpus.validation, model=run.model, batch_size=size, quantise=quantise)

    rows = run_folder.read_metrics(run.metrics) if run.metrics.exists() else []
    seconds, tokens = sum(row["seconds"] for row in rows), sum(row["tokens"] for row in rows)
    return {
        "steps": run.step,
        "fake_quant_steps": sum(row["fake_quant"] for row in rows),
        "train_loss_first": rows[0]["loss"] if rows else None,
        "train_loss_last": rows[-1]["loss"] if rows else None,
        "validation_nll_f32": nll(params, False),
        "validation_nll_fake_quant": nll(params, True),
        "validation_nll_fp8": nll(deployed, False),
        "unit": "nats/token",
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(params)),
        "weight_bytes_f32": sum(row["bytes"] for row in precision_report(params, asked="f32")),
        "weight_bytes_fp8": sum(row["bytes"] for row in precision_report(deployed, asked="fp8")),
        "train_tokens": tokens,
        "train_seconds": round(seconds, 3),
        "train_tok_s": round(tokens / seconds, 1) if seconds else None,
        "compile_seconds": round(run.compile_s, 3),
        "seed": config.seed,
        "text": {"sha256": run.corpus.sha256, "files": run.corpus.files, "bytes": run.corpus.bytes},
        "device": jax.devices()[0].device_kind,
        "versions": {"python": platform.python_version(), "jax": jax.__version__},
    }


def _progress(wanted: bool, label: str, total: int | None) -> Any:
    return show_progress(label, total) if wanted else contextlib.nullcontext(lambda n: None)


@contextlib.contextmanager
def _interruption() -> Generator[threading.Event]:
    """An event that the first SIGINT or SIGTERM sets; the second has its usual effect.

    Elsewhere than in the main thread Python allows no handlers, and signals keep their usual effect.
    """
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    usual = {name: signal.getsignal(name) for name in (signal.SIGINT, signal.SIGTERM)}

    def restore() -> None:
        for name, handler in usual.items():
            signal.signal(name, handler)

    def first(number: int, frame: Any) -> None:
        stop.set()
        restore()

    for name in usual:
        signal.signal(name, first)
    try:
        yield stop
    finally:
        restore()
