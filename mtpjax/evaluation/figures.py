"""Figures as inline SVG: a few shapes by hand, coloured by the page's CSS, so that they are sharp and fit both themes.

Each function returns one `<svg>` for a drawing `WIDTH` units wide, which the page scales. All text is escaped here.
Classes `s0`, `s1`, ... are the page's series colours; `s0l` is the light tint of the first.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH = 520
LABEL = 116
ROW = 38


@dataclass(frozen=True)
class Bar:
    """One horizontal bar: its length, what is written behind it, a colour class, and dots along its axis."""

    label: str
    value: float
    text: str
    colour: str
    dots: tuple[float, ...] = ()


@dataclass(frozen=True)
class Stack:
    """One horizontal bar of parts: (name, size, what is written in it, colour class)."""

    label: str
    parts: tuple[tuple[str, float, str, str], ...]
    text: str


@dataclass(frozen=True)
class Positions:
    """Acceptance of one row by position: of all drafts, and of those accepted so far."""

    label: str
    unconditional: tuple[float, ...]
    conditional: tuple[float, ...]
    colour: str


def bars(items: Sequence[Bar], unit: str) -> str:
    """Horizontal bars from zero, with dots for single values."""
    top = _nice(max([item.value for item in items] + [dot for item in items for dot in item.dots]))
    right = WIDTH - 74
    height = ROW * len(items) + 26

    def x(value: float) -> float:
        return LABEL + (right - LABEL) * value / top

    parts = _grid(top, x, height - 22, unit)
    for i, item in enumerate(items):
        y = i * ROW + 8
        parts.append(_text(LABEL - 10, y + 15, item.label, "end"))
        parts.append(_rect(LABEL, y, x(item.value) - LABEL, 22, item.colour))
        parts += [f'<circle class="dot" cx="{x(dot):.1f}" cy="{y + 11}" r="3.5"/>' for dot in item.dots]
        end = max([item.value, *item.dots])
        parts.append(_text(x(end) + 9, y + 15, item.text))
    return _svg(height, parts, "; ".join(f"{item.label}: {item.text}" for item in items))


def stacks(items: Sequence[Stack]) -> str:
    """Horizontal bars of parts on one scale, with a legend of the parts."""
    top = max(sum(size for _, size, _, _ in item.parts) for item in items) or 1.0
    right = WIDTH - 74
    height = ROW * len(items) + 34
    parts: list[str] = []
    for i, item in enumerate(items):
        y, x = i * ROW + 4, float(LABEL)
        parts.append(_text(LABEL - 10, y + 15, item.label, "end"))
        for _, size, text, colour in item.parts:
            width = (right - LABEL) * size / top
            parts.append(_rect(x, y, width, 22, colour, radius=2))
            if text and width > 9 + 6.6 * len(text):
                parts.append(_text(x + width / 2, y + 15, text, "mid"))
            x += width
        parts.append(_text(x + 9, y + 15, item.text))
    names = {name: colour for item in items for name, _, _, colour in item.parts}
    parts += _legend(names, height - 12)
    return _svg(height, parts, "; ".join(f"{item.label}: {item.text}" for item in items))


def positions(items: Sequence[Positions]) -> str:
    """Groups of upright bars, one group a position: how many drafts reach it; a tick shows the conditional rate."""
    depth = max(len(item.unconditional) for item in items)
    height, base, left = 196, 146, 40
    group = (WIDTH - left - 10) / depth
    width = min(46.0, (group - 26) / len(items))
    parts: list[str] = []
    for share in (0, 0.25, 0.5, 0.75, 1):
        y = base - 126 * share
        parts.append(f'<line class="grid" x1="{left}" x2="{WIDTH - 6}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(_text(left - 8, y + 4, f"{share:.0%}", "end soft"))
    for place in range(depth):
        middle = left + group * (place + 0.5)
        parts.append(_text(middle, base + 18, f"position {place + 1}", "mid soft"))
        x = middle - width * len(items) / 2
        for i, item in enumerate(items):
            if place < len(item.unconditional):
                parts += _column(x + i * width, base, width - 4, item, place)
    parts += _legend({item.label: item.colour for item in items}, height - 12, left)
    return _svg(height, parts, "; ".join(f"{item.label}: {item.unconditional}" for item in items))


def shares(names: Sequence[str], rows: Sequence[tuple[str, Sequence[tuple[float, str] | None], str]]) -> str:
    """A grid of small bars, one row a row and one column a name: (share, text), None where there is nothing."""
    width, left, gap = 2 * WIDTH + 40, LABEL + 4, 12
    cell = (width - left) / len(names)
    parts = [_text(left + i * cell + 1, 12, name, "soft") for i, name in enumerate(names)]
    for r, (label, cells, colour) in enumerate(rows):
        y = 24 + r * 34
        parts.append(_text(left - 14, y + 14, label, "end"))
        for i, item in enumerate(cells):
            x = left + i * cell
            if item is None:
                parts.append(_text(x + 1, y + 14, "not run", "soft"))
                continue
            parts.append(_rect(x, y + 4, cell - gap - 56, 13, "track"))
            parts.append(_rect(x, y + 4, (cell - gap - 56) * item[0], 13, colour))
            parts.append(_text(x + cell - gap - 48, y + 15, item[1]))
    return _svg(24 + 34 * len(rows), parts, "agreement with the reference", width)


def _column(x: float, base: float, width: float, item: Positions, place: int) -> list[str]:
    share, given = item.unconditional[place], item.conditional[place]
    y = base - 126 * given
    return [
        _rect(x, base - 126 * share, width, 126 * share, item.colour),
        f'<line class="tick" x1="{x:.1f}" x2="{x + width:.1f}" y1="{y:.1f}" y2="{y:.1f}"/>',
        _text(x + width / 2, base - 5, f"{share:.0%}", "mid in") if share > 0.14 else "",
    ]


def _grid(top: float, x, bottom: float, unit: str) -> list[str]:
    parts: list[str] = []
    for i in range(5):
        value = top * i / 4
        parts.append(f'<line class="grid" x1="{x(value):.1f}" x2="{x(value):.1f}" y1="0" y2="{bottom}"/>')
        label = f"{value:g} {unit}" if i == 4 else f"{value:g}"
        parts.append(_text(x(value), bottom + 16, label, "mid soft"))
    return parts


def _legend(names: dict[str, str], y: float, x: float = LABEL) -> list[str]:
    parts: list[str] = []
    for name, colour in names.items():
        parts.append(_rect(x, y - 1, 10, 10, colour, radius=2))
        parts.append(_text(x + 15, y + 8, name, "soft"))
        x += 30 + 6.6 * len(name)
    return parts


def _nice(value: float) -> float:
    """The next round number that divides well by four."""
    if value <= 0:
        return 1.0
    size = 10.0 ** math.floor(math.log10(value))
    return next(step * size for step in (1, 1.2, 1.6, 2, 2.4, 3.2, 4, 5, 6, 8, 10) if step * size >= value)


def _rect(x: float, y: float, width: float, height: float, colour: str, radius: float = 3) -> str:
    width = max(width, 0.0)
    return (
        f'<rect class="{colour}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" '
        f'rx="{min(radius, width / 2, height / 2):.1f}"/>'
    )


def _text(x: float, y: float, text: str, classes: str = "") -> str:
    named = f' class="{classes}"' if classes else ""
    return f'<text{named} x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'


def _svg(height: float, parts: Sequence[str], says: str, width: float = WIDTH) -> str:
    inside = "".join(parts)
    return f'<svg viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{escape(says)}">{inside}</svg>'
