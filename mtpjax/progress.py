"""Progress of anything that may last: a bar in a terminal, plain lines elsewhere, nothing under two seconds.

    for batch in track(batches, "training"):
        ...

    with progress("loading", total=272) as advance:
        advance(1)

    with progress("compiling"):
        ...

Inside another the inner one shows nothing: two bars would overwrite each other.

Everything goes to standard error, so that standard output holds results alone. In a notebook too the lines are plain:
a bar would need a widget that is not there when the notebook is read later.
"""

import contextlib
import sys
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sized
from contextvars import ContextVar
from time import monotonic

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

QUIET_S = 2.0
"""Work that ends within this time shows nothing."""
LINE_EVERY_S = 5.0
"""The least time between two plain lines."""
TICK_S = 0.5
"""How often a look is taken at work that does not advance, such as a compilation."""
_inside: ContextVar[bool] = ContextVar("inside a progress", default=False)


def track[T](iterable: Iterable[T], label: str, total: int | None = None) -> Iterator[T]:
    """The items of `iterable`, showing how far it has come; `total` is its length where it tells none."""
    if total is None and isinstance(iterable, Sized):
        total = len(iterable)
    with progress(label, total) as advance:
        for item in iterable:
            yield item
            advance(1)


@contextlib.contextmanager
def progress(label: str, total: int | None = None) -> Generator[Callable[[int], None]]:
    """Gives `advance(n)`, to be called after each `n` units of `total` (None: unknown)."""
    if _inside.get():
        yield lambda n=1: None
        return
    view = _Bar(label, total) if sys.stderr.isatty() else _Lines(label, total)
    start, done = monotonic(), 0
    lock, ended = threading.Lock(), threading.Event()

    def look() -> None:
        with lock:
            elapsed_s = monotonic() - start
            if elapsed_s >= QUIET_S and not ended.is_set():
                view.show(done, elapsed_s)

    def advance(n: int = 1) -> None:
        nonlocal done
        done += n
        look()

    def watch() -> None:
        while not ended.wait(TICK_S):
            look()

    threading.Thread(target=watch, name=f"progress of {label}", daemon=True).start()
    _inside.set(True)
    try:
        yield advance
    finally:
        _inside.set(False)
        ended.set()
        with lock:
            view.end(done, monotonic() - start)


class _Lines:
    """`training: 120/200, 14 s` at most once in `LINE_EVERY_S`, and once at the end if anything was shown."""

    def __init__(self, label: str, total: int | None) -> None:
        self.label, self.total, self.stream = label, total, sys.stderr
        self.shown_s: float | None = None

    def show(self, done: int, elapsed_s: float) -> None:
        if self.shown_s is None or elapsed_s - self.shown_s >= LINE_EVERY_S:
            self._write(done, elapsed_s)

    def end(self, done: int, elapsed_s: float) -> None:
        if self.shown_s is not None and elapsed_s > self.shown_s:
            self._write(done, elapsed_s)

    def _write(self, done: int, elapsed_s: float) -> None:
        self.shown_s = elapsed_s
        of = "" if self.total is None else f"/{self.total:,}"
        count = f"{done:,}{of}, " if done or of else ""
        print(f"{self.label}: {count}{elapsed_s:.0f} s", file=self.stream, flush=True)


class _Bar:
    """rich's bar, made when the work has lasted long enough to deserve one, and wiped when it ends."""

    def __init__(self, label: str, total: int | None) -> None:
        self.label, self.total, self.stream = label, total, sys.stderr
        self.bar: Progress | None = None
        self.drawn_s = 0.0

    def show(self, done: int, elapsed_s: float) -> None:
        if self.bar is None:
            self.bar = self._make(elapsed_s)
        elif elapsed_s - self.drawn_s < 0.1:
            return
        self.drawn_s = elapsed_s
        self.bar.update(self.bar.task_ids[0], completed=done, refresh=True)

    def end(self, done: int, elapsed_s: float) -> None:
        del done, elapsed_s
        if self.bar is not None:
            self.bar.stop()

    def _make(self, elapsed_s: float) -> Progress:
        count = () if self.total is None else (MofNCompleteColumn(), TimeRemainingColumn())
        columns = (TextColumn("{task.description}"), BarColumn(), *count, TimeElapsedColumn())
        bar = Progress(*columns, console=Console(file=self.stream), auto_refresh=False, transient=True)
        task = bar.add_task(self.label, total=self.total)
        began = bar.tasks[task].start_time
        bar.tasks[task].start_time = None if began is None else began - elapsed_s
        bar.start()
        return bar
