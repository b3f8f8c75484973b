import io
import time
import types

import pytest

from mtpjax.progress import LINE_EVERY_S, QUIET_S, progress, track


class Clock:
    """Seconds that pass only when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("mtpjax.progress.monotonic", clock)
    return clock


@pytest.fixture(params=["file", "terminal"])
def any_stream(request, monkeypatch):
    return replace_stderr(monkeypatch, terminal=request.param == "terminal")


@pytest.fixture
def stream(monkeypatch):
    return replace_stderr(monkeypatch, terminal=False)


def replace_stderr(monkeypatch, *, terminal: bool) -> io.StringIO:
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: terminal)
    # Not sys.stderr itself, which pytest's capture sets anew between a fixture and its test.
    monkeypatch.setattr("mtpjax.progress.sys", types.SimpleNamespace(stderr=stream))
    return stream


def work(clock: Clock, total: int | None, step_s: float, steps: int = 40) -> None:
    with progress("work", total) as advance:
        for _ in range(steps):
            clock.now += step_s
            advance(1)


def test_nothing_under_two_seconds(clock, any_stream):
    work(clock, 40, 0.99 * QUIET_S / 40)
    assert any_stream.getvalue() == ""


def test_plain_lines_are_rare_and_end_with_the_total(clock, stream):
    work(clock, 40, 1.0)
    lines = stream.getvalue().splitlines()
    assert lines[0] == "work: 2/40, 2 s"
    assert lines[-1] == "work: 40/40, 40 s"
    assert len(lines) <= 2 + 40 / LINE_EVERY_S


def test_plain_lines_hold_no_control_characters(clock, stream):
    work(clock, None, 3.0, steps=2)
    assert stream.getvalue() == "work: 1, 3 s\nwork: 2, 6 s\n"


def test_a_terminal_gets_a_bar_that_is_wiped(clock, monkeypatch):
    stream = replace_stderr(monkeypatch, terminal=True)
    work(clock, 40, 1.0)
    text = stream.getvalue()
    assert "work" in text
    assert "2/40" in text
    assert "\x1b[2K" in text


def test_work_that_does_not_advance_is_shown(clock, stream, monkeypatch):
    monkeypatch.setattr("mtpjax.progress.TICK_S", 0.001)
    with progress("compiling"):
        clock.now += 3.0
        deadline = time.monotonic() + 30
        while not stream.getvalue() and time.monotonic() < deadline:
            time.sleep(0.001)
    assert stream.getvalue() == "compiling: 3 s\n"


def test_track_gives_every_item_and_keeps_standard_output_clean(capsys, monkeypatch):
    monkeypatch.setattr("mtpjax.progress.QUIET_S", 0.0)
    assert list(track(range(3), "counting")) == [0, 1, 2]
    assert list(track(iter("ab"), "spelling", total=2)) == ["a", "b"]
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("counting: 1/3, 0 s\n")
    assert "spelling: 1/2, 0 s\n" in captured.err


def test_an_exception_passes_through_and_ends_the_display(clock, stream):
    def fail():
        with progress("work", 3) as advance:
            clock.now += 4.0
            advance(1)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert stream.getvalue() == "work: 1/3, 4 s\n"
