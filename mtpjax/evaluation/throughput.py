"""Speed of generation: one prompt after the other, compile time apart, the spread reported with the median."""

import dataclasses
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mtpjax.decoding.generate import generate
from mtpjax.decoding.result import Generation, Stats
from mtpjax.io.lm import LM

WARM_UPS = 2
"""How often at most a prompt is run again because something was compiled meanwhile."""


@dataclass(frozen=True)
class Spread:
    """Median, least and greatest of some values, and the values themselves."""

    median: float
    low: float
    high: float
    values: tuple[float, ...]


def spread(values: Sequence[float]) -> Spread:
    """The spread of at least one value."""
    return Spread(statistics.median(values), min(values), max(values), tuple(values))


def generate_warm(lm: LM, prompt: str, **settings: Any) -> tuple[Generation, float]:
    """`generate` with everything compiled: a run that compiled counts as a warm-up and is made again.

    Returns the last run and the seconds spent compiling in all of them.
    """
    out = generate(lm, prompt, **settings)
    compile_s = out.stats.compile_s
    for _ in range(WARM_UPS):
        if out.stats.compile_s == 0.0:
            break
        out = generate(lm, prompt, **settings)
        compile_s += out.stats.compile_s
    return out, compile_s


def pool(stats: Sequence[Stats]) -> Stats:
    """Counts and times of several calls at one depth and rule added up; bytes are the largest of them."""
    total: dict[str, Any] = {}
    for name in (field.name for field in dataclasses.fields(Stats)):
        values = [getattr(one, name) for one in stats]
        if name in ("depth", "lossless") or values[0] is None:
            total[name] = values[0]
        elif name.endswith("_bytes"):
            total[name] = max(values)
        elif name.endswith("_per_pos"):
            total[name] = tuple(map(sum, zip(*values, strict=True)))
        else:
            total[name] = sum(values)
    return Stats(**total)


def pass_ms(stats: Stats) -> float:
    """Milliseconds of one decoding pass, everything around the target's own work included; 0 where none was made."""
    return 1e3 * stats.decode_s / stats.target_passes if stats.target_passes else 0.0


def figures(stats: Stats) -> dict[str, Any]:
    """Every field and derived figure of `Stats` by name, ready for JSON."""
    derived = (
        "decode_tok_s",
        "acceptance_length",
        "acceptance_rate",
        "rates_unconditional",
        "rates_conditional",
        "accept_histogram",
        "tv_per_step",
        "tv_per_token",
    )
    return dataclasses.asdict(stats) | {name: getattr(stats, name) for name in derived}
