"""A folder for the results of one run that is there whole or not at all.

The files are written to a hidden folder, which gets its final name when the work has ended well. A folder that can't be
written is refused before the work begins; a run that fails or is interrupted leaves nothing behind.
"""

import contextlib
import os
import shutil
from collections.abc import Generator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from mtpjax.errors import UserError


@dataclass(frozen=True)
class RunFolder:
    """`work` is where to write now, `path` where the files will lie; `id` is the last part of `path`."""

    id: str
    work: Path
    path: Path


@contextlib.contextmanager
def run_folder(parent: Path) -> Generator[RunFolder]:
    """Make a new folder under `parent`, named after the time (UTC). UserError where it can't be written."""
    missing = [folder for folder in (parent, *parent.parents) if not folder.exists()]
    try:
        folder = _make(parent)
    except OSError as error:
        _remove_empty(missing)
        raise UserError(
            f"{parent}: can't write a run folder there ({error.strerror or error}); name another folder with --runs"
        ) from None
    try:
        yield folder
        folder.work.rename(folder.path)
    except BaseException:
        shutil.rmtree(folder.work, ignore_errors=True)
        _remove_empty(missing)
        raise


def _make(parent: Path) -> RunFolder:
    parent.mkdir(parents=True, exist_ok=True)
    base = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    for attempt in range(1, 1000):
        name = base if attempt == 1 else f"{base}-{attempt}"
        work, path = parent / f".{name}.{os.getpid()}", parent / name
        if not path.exists() and not work.exists():
            work.mkdir()
            return RunFolder(name, work, path)
    raise OSError("a thousand runs began in this second")


def _remove_empty(folders: list[Path]) -> None:
    """Take away the folders that this run made, the innermost first, as far as nobody else uses them."""
    for folder in folders:
        with contextlib.suppress(OSError):
            folder.rmdir()
