"""Frozen, typed configs: the only source of defaults, and the only thing that a YAML file or the command line fills.

A config class derives from `Config` and stands beside the object that it configures. Its file is YAML:

    base: common.yaml        # optional: this file's values are laid over that one's
    steps: 200
    optimizer: {learning_rate: 1e-3}

`load_config(TrainConfig, "configs/tiny.yaml", ["optimizer.learning_rate=3e-4"])` reads it. Later layers win; mappings
merge key by key, anything else replaces. Every mistake is a `UserError` of one line that names the file or the override
that made it, the dotted path of the key, and the nearest known key.

Rejected: pydantic's lax mode (it takes True for 1 and "3" for 3); a registry or one large file of all options (a config
is found beside its object); hydra (a second language for what Python and one `base:` line say).
"""

import functools
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from mtpjax.config.dialect import MAX_DEPTH, dump_yaml, parse_yaml, read_yaml
from mtpjax.config.explain import explain, show
from mtpjax.errors import UserError

MAX_BASES = 32


class _OneLineErrors(type(BaseModel)):
    """Lets a construction in Python fail as one in YAML does: with one line and a suggestion.

    It wraps the call and not `__init__`, which pydantic would also call for every nested config, losing the path.
    """

    if not TYPE_CHECKING:

        def __call__(cls, *args, **values):
            try:
                return super().__call__(*args, **values)
            except ValidationError as error:
                raise UserError(f"{cls.__name__}: {explain(cls, error, values)[1]}") from None


class Config(BaseModel, metaclass=_OneLineErrors):
    """Base of every config: frozen, strictly typed, unknown keys refused, hashable while its fields are.

    Lists become tuples, True is not 1, and infinities and NaN are no numbers here. A docstring under a field is its
    description in the JSON schema. `base` is no field name: it is the files' own key.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        validate_default=True,
        use_attribute_docstrings=True,
    )

    @model_validator(mode="before")
    @classmethod
    def _lists_to_tuples(cls, values: Any) -> Any:
        return {key: _freeze(value) for key, value in values.items()} if isinstance(values, dict) else values

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> "Config":
        """As `replace`: pydantic's own would take `update` unchecked."""
        del deep  # frozen all the way down
        return replace(self, **(update or {}))


def replace[C: Config](config: C, **changes: Any) -> C:
    """A copy with some fields changed, validated. Raises UserError."""
    values = {name: getattr(config, name) for name in config.__class__.model_fields}
    return config.__class__(**(values | changes))


def load_config[C: Config](cls: type[C], path: str | Path | None, overrides: Sequence[str] = ()) -> C:
    """Read a `cls` from a YAML file (None: its defaults), with `key.path=value` overrides laid over it.

    Raises UserError.
    """
    layers = [] if path is None else _read_chain(Path(path))
    layers += [(_label(text), _parse_override(text)) for text in overrides]
    merged: dict[str, Any] = {}
    for _, layer in layers:
        merged = merge(merged, layer)
    try:
        return cls.model_validate(merged)
    except ValidationError as error:
        keys, line = explain(cls, error, merged)
        default = cls.__name__ if path is None else str(path)
        source = next((name for name, layer in reversed(layers) if _sets(layer, keys)), default)
        raise UserError(f"{source}: {line}") from None


def parse_overrides(overrides: Iterable[str]) -> dict[str, Any]:
    """["a.b=3", "c=[1, 2]"] to {"a": {"b": 3}, "c": [1, 2]}; values are YAML, the last one wins. Raises UserError."""
    merged: dict[str, Any] = {}
    for text in overrides:
        merged = merge(merged, _parse_override(text))
    return merged


def merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """`above` laid over `below`: mappings merge key by key, anything else replaces. Neither is changed."""
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        merged[key] = merge(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged


def to_yaml(config: Config) -> str:
    """The whole config, defaults included, as YAML that `load_config` reads back equal."""
    return dump_yaml(config.model_dump(mode="json"))


def json_schema(cls: type[Config]) -> dict[str, Any]:
    """The JSON schema of `cls` as a file may hold it, for editors: the fields and `base`."""
    schema = cls.model_json_schema()
    base = {"type": "string", "description": "a YAML file, relative to this one, that these values are laid over"}
    schema["properties"] = {"base": base} | schema.get("properties", {})
    return schema


def _read_chain(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """(name, values) of the file and of its bases, the lowest first."""
    tree = _tree_of(path)
    layers: list[tuple[str, dict[str, Any]]] = []
    seen: list[Path] = []
    while True:
        resolved = _real(path)
        if resolved in seen:
            chain = " -> ".join(file.name for file in [*seen, resolved])
            raise UserError(f"{path}: `base:` leads in a circle ({chain}); one of them must not name a base")
        if len(seen) == MAX_BASES:
            raise UserError(f"{path}: more than {MAX_BASES} files in a chain of `base:`; merge some of them")
        seen.append(resolved)
        values = _read_mapping(path)
        base = values.pop("base", None)
        layers.append((str(path), values))
        if base is None:
            return layers[::-1]
        path = _base_path(path, base, tree)


def _read_mapping(path: Path) -> dict[str, Any]:
    values = read_yaml(path)
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise UserError(f"{path}: expected `key: value` lines, got {show(values)}")
    return values


def _tree_of(path: Path) -> Path:
    """The folder that bases must lie in: the outermost `configs` above the file, else the file's own folder."""
    folder = _real(path).parent
    configs = [parent for parent in [folder, *folder.parents] if parent.name == "configs"]
    return configs[-1] if configs else folder


def _real(path: Path) -> Path:
    """The path without links; unlike `Path.resolve`, a circle of links is no exception in any Python."""
    return Path(os.path.realpath(path))


def _base_path(path: Path, base: Any, tree: Path) -> Path:
    if not isinstance(base, str):
        raise UserError(f"{path}: `base:` must be the name of one YAML file, got {show(base)}")
    target = path.parent / base.replace("\0", "")
    if target.suffix not in (".yaml", ".yml") or not _real(target).is_relative_to(tree):
        raise UserError(f"{path}: `base:` must name a .yaml file inside {tree}, got {show(base)}")
    if not target.is_file():
        raise UserError(f"{path}: `base:` names {show(base)}, but there is no file {target}")
    return target


def _label(override: str) -> str:
    return f"override '{override if len(override) <= 60 else override[:57] + '...'}'"


def _parse_override(text: str) -> dict[str, Any]:
    key, equals, value = text.partition("=")
    names = [name.strip() for name in key.split(".")]
    if not equals or not all(names) or len(names) > MAX_DEPTH:
        raise UserError(f"{_label(text)}: expected key.path=value, such as optimizer.learning_rate=1e-3")
    if not value.strip():
        raise UserError(f"{_label(text)}: no value; write {key.strip()}=null or {key.strip()}=''")
    parsed = parse_yaml(value, _label(text), lines=False)
    return functools.reduce(lambda inner, name: {name: inner}, reversed(names), parsed)


def _sets(layer: Any, keys: Sequence[str | int]) -> bool:
    """Whether a layer set the value at `keys` (a list is replaced whole, so whoever set it set its items)."""
    for key in keys:
        if isinstance(layer, list) and isinstance(key, int):
            return True
        if not (isinstance(layer, Mapping) and key in layer):
            return False
        layer = layer[key]
    return True


def _freeze(value: Any) -> Any:
    return tuple(_freeze(item) for item in value) if isinstance(value, list | tuple) else value
