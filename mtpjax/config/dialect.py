"""The YAML that configs are written in: a small and safe dialect.

Strings, numbers, true, false, null, lists and mappings. `1e-3` is a float, `no` is a string and `010` is ten (YAML 1.1,
which PyYAML speaks, reads a string, false and eight). Refused, each with its line: duplicate keys, tags, more than 32
levels, and anchors with their aliases, because a few aliases of aliases stand for a billion values and a config shares
through `base:` anyway.
"""

import re
from pathlib import Path
from typing import Any, cast

import yaml

from mtpjax.config.explain import show
from mtpjax.errors import UserError

MAX_FILE_BYTES = 1 << 20
MAX_DEPTH = 32


def read_yaml(path: Path) -> Any:
    """The value in a YAML file, None when it is empty. Raises UserError."""
    try:
        if path.exists() and not path.is_file():
            raise UserError(f"{path}: not a file; expected a YAML file")
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise UserError(f"{path}: cannot read the config: {error.strerror or error}") from None
    if len(data) > MAX_FILE_BYTES:
        raise UserError(f"{path}: over {MAX_FILE_BYTES:,} bytes, which is the most that a config may have")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise UserError(f"{path}: not UTF-8 text; expected a YAML file") from None
    return parse_yaml(text, str(path))


def parse_yaml(text: str, source: str, lines: bool = True) -> Any:
    """The value of one YAML document. Raises UserError, which opens with `source` and, if wanted, the line."""
    try:
        return _Loader(text).get_single_data()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f" line {mark.line + 1}:" if mark is not None and lines else ""
        problem = error.problem or error.context or "not YAML"
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # a character that YAML forbids, or that is none
        line, problem = "", str(error)
    raise UserError(f"{source}:{line} {' '.join(problem.split())}")


def dump_yaml(values: dict[str, Any]) -> str:
    """YAML in the given order of keys that `parse_yaml` reads back equal; lists of scalars stand on one line."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


class _Loader(yaml.SafeLoader):
    """Reads the dialect."""

    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = cast(Any, self.peek_event())
        problem = None
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            problem = "anchors (&) and aliases (*) are not read; quote the text if it is one"
        elif getattr(event, "tag", None):
            problem = "tags (!) are not read; quote the text if it is one"
        elif self.depth == MAX_DEPTH:
            problem = f"nested deeper than {MAX_DEPTH} levels"
        if problem:
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        mapping: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, str) and key not in mapping:
                mapping[key] = self.construct_object(value_node, deep=deep)
                continue
            problem = f"the key '{key}' stands twice" if isinstance(key, str) else f"the key {show(key)} is not a name"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=key_node.start_mark)
        return mapping


class _Dumper(yaml.SafeDumper):
    """Writes the dialect, and quotes what YAML 1.1 would not read back as a string either."""


_EXPONENT = r"(?:[eE][-+]?[0-9]+)"
_RESOLVERS = (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9][0-9_]*", list("-+0123456789")),
    ("float", rf"[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*){_EXPONENT}?", list("-+.0123456789")),
    ("float", rf"[-+]?[0-9][0-9_]*{_EXPONENT}|[-+]?\.(?:inf|nan)", list("-+.0123456789")),
)
_Loader.yaml_implicit_resolvers = {}
for _name, _pattern, _first in _RESOLVERS:
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", re.compile(f"(?:{_pattern})$"), _first)


def _integer(_: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    if len(node.value) > 100:
        raise yaml.MarkedYAMLError(problem="a number of over 100 digits", problem_mark=node.start_mark)
    return int(node.value.replace("_", ""), 10)


def _number(_: yaml.SafeLoader, node: yaml.ScalarNode) -> float:
    return float(node.value.replace("_", "").replace(".inf", "inf").replace(".nan", "nan"))


def _represent_list(dumper: yaml.SafeDumper, items: list) -> yaml.Node:
    flow = not any(isinstance(item, dict | list) for item in items)
    return dumper.represent_sequence("tag:yaml.org,2002:seq", items, flow_style=flow)


_Loader.add_constructor("tag:yaml.org,2002:int", _integer)
_Loader.add_constructor("tag:yaml.org,2002:float", _number)
_Dumper.add_representer(list, _represent_list)
