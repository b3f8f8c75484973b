"""The folder of a run: what is in it, and how it survives a kill.

    config.yaml     the whole config, defaults included
    metrics.jsonl   one line a step
    checkpoints/    see `mtpjax.io.checkpoint`
    results.json    written when the run has ended

Metrics are appended, and always before the checkpoint that follows them; so after a kill the file may be ahead of the
newest checkpoint (or end in half a line) but never behind it, and cutting it back to that step makes it whole. Files
that are replaced are written beside and renamed.
"""

import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mtpjax.config import Config, to_yaml
from mtpjax.config.dialect import read_yaml
from mtpjax.config.explain import show
from mtpjax.errors import UserError

FREE_KEYS = ("checkpoint", "log_every")
"""Keys that may differ when a run goes on: they change when something is written, not what is computed."""


def open_run(run_dir: str | Path) -> Path:
    """Make the folder if need be and try to write in it. UserError if that fails, before any work is done."""
    folder = Path(run_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise UserError(f"cannot write in the run folder {folder} ({reason}); give another one") from None
    return folder


def refuse_other_config(folder: Path, config: Config, found: Mapping[str, Any] | None = None) -> None:
    """UserError, naming the first key that differs, if `folder` holds a run of another config.

    `found` is the config in its checkpoint; without one, its `config.yaml` speaks, if there is one.
    """
    if found is None:
        path = folder / "config.yaml"
        found = read_yaml(path) if path.exists() else None
        if found is None:
            return
        if not isinstance(found, Mapping):
            raise UserError(f"{path} is not a run's config: give another run folder")
    wanted = json.loads(json.dumps(config.model_dump(mode="json")))
    for key, here, there in _differences(wanted, found):
        if key.split(".")[0] not in FREE_KEYS:
            raise UserError(
                f"{folder} holds a run of another config: {key} is {_say(there)} there and {_say(here)} here; "
                "give another run folder or the same value"
            )


def write_config(folder: Path, config: Config) -> None:
    """Write config.yaml."""
    replace_text(folder / "config.yaml", to_yaml(config))


def cut_metrics(path: Path, step: int) -> None:
    """Drop the lines behind `step`, and one that a kill left unfinished."""
    if path.exists():
        kept = [row for row in read_metrics(path) if row["step"] <= step]
        replace_text(path, "".join(json.dumps(row) + "\n" for row in kept))


def append_metrics(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Append one line a row, and sync them to the disk."""
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
        file.flush()
        os.fsync(file.fileno())


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl, without what follows a line that is not whole."""
    rows: list[dict[str, Any]] = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True):
        try:
            row = json.loads(line) if line.endswith("\n") else None
        except ValueError:
            row = None
        if not isinstance(row, dict) or "step" not in row:
            break
        rows.append(row)
    return rows


def replace_text(path: Path, text: str) -> None:
    """Write a whole file or nothing."""
    beside = path.with_name(f".{path.name}.new")
    with beside.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


_ABSENT = object()


def _say(value: Any) -> str:
    return "absent" if value is _ABSENT else show(value)


def _differences(here: Any, there: Any, path: str = "") -> Iterable[tuple[str, Any, Any]]:
    if isinstance(here, Mapping) and isinstance(there, Mapping):
        for key in [*here, *(key for key in there if key not in here)]:
            inner = f"{path}.{key}" if path else str(key)
            yield from _differences(here.get(key, _ABSENT), there.get(key, _ABSENT), inner)
    elif here != there:
        yield path, here, there
