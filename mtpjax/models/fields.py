"""Typed look-ups in a mapping that came from somebody's file.

Model files are untrusted: a key may be absent, of another type, infinite, or a list where a number belongs. Every
look-up here either returns a value of the asked type or raises `UserError` naming the file and the key, so that the
code which maps files to `ModelConfig` reads as a plain list of facts.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from mtpjax.errors import UserError

REQUIRED: Final = object()
LARGEST: Final = 2**31 - 1  # every count of a model (rows, layers, positions) must be an int32


def shown(value: object) -> str:
    """`value` on one line, cut to a length fit for an error message."""
    text = repr(value)
    return text if len(text) <= 100 else text[:97] + "..."


@dataclass(frozen=True)
class Fields:
    """A mapping and the name of the file that it came from."""

    values: Mapping[str, Any]
    source: str

    def get(self, key: str, default: Any = REQUIRED) -> Any:
        """The raw value; None counts as absent, since JSON files write null for "not set"."""
        value = self.values.get(key)
        if value is not None:
            return value
        if default is REQUIRED:
            raise UserError(f"{self.source}: required key {key!r} is missing")
        return default

    def wrong(self, key: str, value: object, expected: str) -> UserError:
        """The error that says what a key holds and what it should; the caller raises it."""
        return UserError(f"{self.source}: {key} is {shown(value)}, expected {expected}")

    def integer(self, key: str, default: Any = REQUIRED, *, low: int = 1) -> Any:
        """An int in low..2^31-1; a list of equal ints (a value written per layer) counts as that int."""
        value = self.get(key, default)
        if value is default:
            return value
        items = _listed(value)
        if items is not None:
            if not items or any(item != items[0] for item in items):
                raise self.wrong(key, value, "one value for all layers (layers of different shapes are unsupported)")
            value = items[0]
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= LARGEST:
            raise self.wrong(key, value, f"an integer in {low}..{LARGEST}")
        return value

    def number(self, key: str, default: Any = REQUIRED, *, positive: bool = True) -> Any:
        """A finite float (ints are taken); `positive` asks for > 0, otherwise ≥ 0."""
        value = self.get(key, default)
        if value is default:
            return value
        kind = "positive" if positive else "non-negative"
        try:
            usable = not isinstance(value, bool) and isinstance(value, (int, float)) and math.isfinite(value)
        except OverflowError:
            usable = False
        if not usable or value < 0 or (positive and value == 0):
            raise self.wrong(key, value, f"a finite {kind} number")
        return float(value)

    def boolean(self, key: str, default: Any = REQUIRED) -> Any:
        """True or False; no number stands for either."""
        value = self.get(key, default)
        if value is not default and not isinstance(value, bool):
            raise self.wrong(key, value, "true or false")
        return value

    def text(self, key: str, default: Any = REQUIRED) -> Any:
        """A string."""
        value = self.get(key, default)
        if value is not default and not isinstance(value, str):
            raise self.wrong(key, value, "a string")
        return value


def _listed(value: object) -> list[Any] | None:
    """A list, tuple or 1-D numpy array as a list; None for anything else."""
    if isinstance(value, (list, tuple)):
        return list(value)
    if getattr(value, "ndim", None) == 1:
        return value.tolist()  # type: ignore[union-attr, attr-defined]
    return None
