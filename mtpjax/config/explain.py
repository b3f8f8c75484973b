"""One line out of pydantic's report: the dotted path, what was expected, what came, and the nearest known key."""

import difflib
import json
import re
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

from pydantic import BaseModel, ValidationError

type Keys = tuple[str | int, ...]


def explain(cls: type, error: ValidationError, values: Any) -> tuple[Keys, str]:
    """The keys that lead to the first mistake in `values`, which were to become a `cls`, and one line about it."""
    found = [(_keys(item, values), cast(dict[str, Any], item)) for item in error.errors(include_url=False)]
    # Unknown keys come first, because a misspelt key also makes its right name a missing one; but a key that another
    # member of a union knows comes last, because that member's own complaint says more.
    found.sort(key=lambda pair: _rank(cls, *pair))
    keys, first = found[0]
    path = dotted(keys)
    others = len({other for other, _ in found}) - 1
    more = f" (and {others} more)" if others else ""
    match first["type"]:
        case "extra_forbidden":
            return keys, f"unknown key '{path}'; {_nearest(cls, keys)}{more}"
        case "missing":
            return keys, f"the key '{path}' is missing{more}"
        case "value_error":
            said = " ".join(str(first["ctx"]["error"]).split())
            return keys, f"{path}: {said}{more}" if path else f"{said}{more}"
    # A union reports each of its members at one place: join what they expected.
    here = [item for other, item in found if other == keys and item["type"] != "extra_forbidden"]
    said = dict.fromkeys(_expected(item["msg"]) for item in here)
    return keys, f"{path}: expected {' or '.join(said)}, got {show(first['input'])}{more}"


def _rank(cls: type, keys: Keys, item: dict[str, Any]) -> int:
    if item["type"] != "extra_forbidden":
        return 1
    return 2 if keys[-1] in _known(cls, keys[:-1]) else 0


def _expected(message: str) -> str:
    message = " ".join(message.removeprefix("Input should be ").split())
    return re.sub(r"a valid dictionary or instance of \w+", "a mapping", message)


def dotted(keys: Iterable[str | int]) -> str:
    """("a", 0, "b") to "a[0].b"."""
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in keys).removeprefix(".")


def show(value: Any) -> str:
    """A value as a file would say it, with its kind: `"3" (string)`."""
    kinds = {type(None): "", bool: "boolean", int: "integer", float: "float", str: "string"}
    if isinstance(value, Mapping):
        kind = "mapping"
    elif isinstance(value, list | tuple):
        kind = "list"
    else:
        kind = kinds.get(type(value), type(value).__name__)
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        text = " ".join(repr(value).split())
    text = text if len(text) <= 60 else f"{text[:57]}..."
    return f"{text} ({kind})" if kind else text


def _keys(item: Any, values: Any) -> Keys:
    """The place of a mistake, less the names of union members and validators that pydantic puts between the keys."""
    keys: list[str | int] = []
    for part in item["loc"]:
        values = dict(values) if isinstance(values, BaseModel) else values
        in_mapping = isinstance(values, Mapping) and part in values
        if in_mapping or (isinstance(values, list | tuple) and isinstance(part, int) and part < len(values)):
            keys.append(part)
            values = cast(Any, values)[part]
        elif item["type"] == "missing" and part is item["loc"][-1]:
            keys.append(part)
    return tuple(keys)


def _known(cls: type, parents: Keys) -> set[str]:
    """The fields that may stand under `parents`: those of every config class that the annotations allow there."""
    classes: Sequence[type] = [cls]
    for key in parents:
        if not isinstance(key, int):
            classes = [inner for outer in classes for inner in _configs_in(_fields(outer).get(key))]
    return {name for owner in classes for name in _fields(owner)}


def _nearest(cls: type, keys: Keys) -> str:
    *parents, wrong = keys
    known = sorted(_known(cls, tuple(parents)))
    if wrong in known:
        return "it does not go with the other keys here"
    close = difflib.get_close_matches(str(wrong), known, n=1)
    if close:
        return f"did you mean '{dotted([*parents, close[0]])}'?"
    elsewhere = [path for path in _all_paths(cls) if path.rpartition(".")[2] == wrong]
    if elsewhere:
        return f"did you mean '{elsewhere[0]}'?"
    return f"known keys: {', '.join(known)}" if known else "no keys are known here"


def _fields(cls: type) -> dict[str, Any]:
    """The annotation of each field of a config class."""
    return {name: field.annotation for name, field in getattr(cls, "model_fields", {}).items()}


def _configs_in(annotation: Any) -> Sequence[type]:
    """The config classes in an annotation such as `tuple[A | B, ...] | None`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [cls for argument in typing.get_args(annotation) for cls in _configs_in(argument)]


def _all_paths(cls: type, above: tuple[type, ...] = ()) -> Iterator[str]:
    for name, annotation in _fields(cls).items():
        yield name
        for inner in _configs_in(annotation):
            if inner not in above:
                yield from (f"{name}.{path}" for path in _all_paths(inner, (*above, inner)))
