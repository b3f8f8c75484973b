"""Chat templates: Jinja programs that come inside model files, so untrusted code with a small useful purpose.

jinja2's immutable sandbox keeps a template from reaching Python's internals and from changing what it's given. It
doesn't keep it from running for ever or from filling the memory: `{% set x = x ~ x %}` in a loop of forty turns asks
for a terabyte. A process of its own with limits would, at the price of 0.2 s a prompt and a different recipe for each
operating system. Instead the template is metered, which its small language allows:

- *Fuel.* Each operation pays for the size of what it handles before it's carried out: turns of loops, calls, strings
  joined or repeated or written, comparisons. The tank is proportional to the conversation.
- *Closed lists.* Only filters, tests and methods whose results are no larger than what they were given, or whose size
  is charged beforehand (`replace`, `join`, `*`), may be called. `%` formatting and `str.format` are not among them.
- *A deadline*, looked at whenever fuel is taken, for whatever is slower than thought.

The fuel is taken by rewriting the syntax tree before it's compiled: outputs, operands of `~`, comparisons and loops are
passed through the filter `__pay`. Everything a template may legitimately do in the common formats is left in:
`raise_exception`, `strftime_now`, `tojson`, `namespace`, `range`, macros, `break`/`continue`, `{% generation %}`.
"""

import datetime
import json
import time
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Mapping, ValuesView
from collections.abc import Set as AbstractSet
from functools import wraps
from typing import Any, Final

from jinja2 import TemplateError, Undefined, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from mtpjax.errors import UserError
from mtpjax.models.fields import shown

MAX_TEMPLATE_CHARS: Final = 128 * 1024
BASE_FUEL: Final = 2_000_000
FUEL_PER_CHAR: Final = 64
DEADLINE_S: Final = 5.0
CALL_COST: Final = 20
PAID_AT_ONCE: Final = 1_000
MAX_EXPONENT: Final = 64

FILTERS: Final = frozenset((
    "abs", "capitalize", "count", "d", "default", "dictsort", "first", "float", "int", "items", "join", "last",
    "length", "list", "lower", "map", "max", "min", "reject", "rejectattr", "replace", "reverse", "safe", "select",
    "selectattr", "string", "title", "trim", "unique", "upper",
))  # fmt: skip
METHODS: Final[Mapping[type, frozenset[str]]] = {
    str: frozenset((
        "capitalize", "count", "endswith", "find", "index", "isalnum", "isalpha", "isdecimal", "isdigit", "islower",
        "isnumeric", "isspace", "isupper", "lower", "lstrip", "partition", "removeprefix", "removesuffix", "replace",
        "rfind", "rindex", "rpartition", "rsplit", "rstrip", "split", "splitlines", "startswith", "strip", "title",
        "upper",
    )),
    dict: frozenset(("get", "items", "keys", "values")),
    list: frozenset(("count", "index")),
    tuple: frozenset(("count", "index")),
    LoopContext: frozenset(("changed", "cycle")),
}  # fmt: skip


class TemplateRefusedError(SecurityError):
    """A template asked for more than it may: time, memory, or an operation that isn't on the lists."""


class _Tank:
    """What one rendering may still spend, in characters handled, and when it must be over."""

    def __init__(self, fuel: int) -> None:
        self.left, self.end = fuel, time.monotonic() + DEADLINE_S

    def pay(self, cost: int) -> None:
        self.left -= cost
        if self.left < 0 or time.monotonic() > self.end:
            raise TemplateRefusedError("the chat template does too much work or writes too much")

    def pay_for(self, value: Any) -> Any:
        """`value`, having paid for its size, with everything inside it as often as it would be written out."""
        stack, cost = [value], 0
        while stack:
            item = stack.pop()
            if isinstance(item, str):
                cost += 1 + len(item)
            elif isinstance(item, int):
                cost += 1 + item.bit_length() ** 2 // 64  # writing an integer in decimal takes quadratic time
            elif isinstance(item, Mapping):
                cost += CALL_COST
                stack.extend(item.items())
            elif isinstance(item, (list, tuple, AbstractSet, KeysView, ValuesView, ItemsView)):
                cost += CALL_COST
                stack.extend(item)
            elif isinstance(item, Namespace):
                stack.append(object.__getattribute__(item, "_Namespace__attrs"))
            cost += 1
            if cost > PAID_AT_ONCE:
                self.pay(cost)
                cost = 0
        self.pay(cost)
        return value

    def turns(self, iterable: Iterable[Any]) -> Iterator[Any] | list[Any]:
        """The iterable of a loop, each turn paid for. Sized ones stay sized, since loops ask for `loop.last`."""
        if hasattr(iterable, "__len__"):
            self.pay(CALL_COST * (1 + len(iterable)))  # type: ignore[arg-type]
            return list(iterable)
        return self._lazily(iterable)

    def _lazily(self, iterable: Iterable[Any]) -> Iterator[Any]:
        for item in iterable:
            self.pay(CALL_COST)
            yield item


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}`, with which training code marks answers: the body as it stands."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _MeteredEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox with a tank: a syntax tree that pays, and calls and operators that are looked at."""

    intercepted_binops = frozenset(("+", "-", "*", "/", "//", "%", "**"))

    def __init__(self, tank: _Tank) -> None:
        # The optimiser would run filters and operators while compiling; without it all is run, and paid for, once.
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, optimized=False, extensions=[loopcontrols, _Generation], cache_size=0
        )
        self.tank = tank
        kept = {name: self.filters[name] for name in FILTERS}
        kept["tojson"] = self._to_json
        self.filters = {name: self._paid(name, function) for name, function in kept.items()}
        self.filters |= {"__pay": tank.pay_for, "__turns": tank.turns}
        known: dict[str, Any] = {
            "range": self.globals["range"],
            "namespace": Namespace,
            "dict": dict,
            "raise_exception": _raise_exception,
            "strftime_now": lambda form: datetime.datetime.now().strftime(str(form)[:100]),
        }
        self.globals = known

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return _metered(super()._parse(source, name, filename))

    def unsafe_undefined(self, obj: Any, attribute: str) -> Undefined:
        """Refuses, rather than giving an undefined value that prints as nothing."""
        raise TemplateRefusedError(f"the attribute {shown(attribute)} of a {type(obj).__name__} isn't allowed")

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """An operator between two values, its result paid for beforehand."""
        if operator == "%" and not isinstance(left, (int, float)):
            raise TemplateRefusedError("formatting with % isn't allowed in a chat template")
        if operator == "**" and not (isinstance(right, (int, float)) and abs(right) <= MAX_EXPONENT):
            raise TemplateRefusedError(f"exponents over {MAX_EXPONENT} aren't allowed in a chat template")
        times = 1
        for factor in (left, right):
            if operator == "*" and isinstance(factor, int):
                sized = right if factor is left else left
                times = max(1, factor) if not isinstance(sized, (int, float)) else 1
        before = self.tank.left
        self.tank.pay_for(left)
        self.tank.pay_for(right)
        self.tank.pay((before - self.tank.left) * (MAX_EXPONENT if operator == "**" else times))
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """A call: of something this module put there, of a macro, or of a method on the list."""
        self.tank.pay(CALL_COST)
        ours = any(function is known for known in self.globals.values())
        if not ours and not isinstance(function, (Macro, LoopContext, Undefined)):
            owner, method = getattr(function, "__self__", None), getattr(function, "__name__", "")
            if not any(isinstance(owner, kind) and method in names for kind, names in METHODS.items()):
                raise TemplateRefusedError(f"calling {shown(method or function)} isn't allowed in a chat template")
            self.tank.pay_for(owner)
            if method == "replace":
                self._pay_replace(owner, *args[:2])
        return super().call(context, function, *args, **kwargs)

    def _pay_replace(self, text: Any, old: Any = "", new: Any = "") -> None:
        text, old, new = str(text), str(old), str(new)
        self.tank.pay(len(text) + text.count(old) * len(new))

    def _paid(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """A filter that pays for its arguments and its result."""
        skip = 1 if hasattr(function, "jinja_pass_arg") else 0

        @wraps(function)
        def paid(*args: Any, **kwargs: Any) -> Any:
            values = list(args[skip:])
            for value in (*values, *kwargs.values()):
                self.tank.pay_for(value)
            if name == "join":
                values[0] = list(self.tank.turns(values[0]))
                separator = (values[1:] or [kwargs.get("d", "")])[0]
                self.tank.pay(len(values[0]) * len(str(separator)))
                self.tank.pay_for(values[0])
            if name == "replace":
                named = [kwargs[key] for key in ("old", "new") if key in kwargs]
                self._pay_replace(*values[:3], *named)
            return self.tank.pay_for(function(*args[:skip], *values, **kwargs))

        return paid

    def _to_json(
        self,
        value: Any,
        ensure_ascii: Any = False,
        indent: Any = None,
        separators: Any = None,
        sort_keys: Any = False,
    ) -> str:
        """JSON as chat templates expect it: no HTML escapes, and paid for piece by piece."""
        if indent is not None and not (isinstance(indent, int) and 0 <= indent <= 16):
            raise TemplateRefusedError("an indent beyond 16 isn't allowed in a chat template")
        encoder = json.JSONEncoder(
            ensure_ascii=bool(ensure_ascii), indent=indent, separators=separators, sort_keys=bool(sort_keys)
        )
        return "".join(self.tank.pay_for(chunk) for chunk in encoder.iterencode(value))


def _raise_exception(message: object = "") -> None:
    raise TemplateError(str(message))


def _metered(tree: nodes.Template) -> nodes.Template:
    """The tree with payments put in; see the head of the file."""

    def through(name: str, node: Any) -> Any:
        return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)

    def pay(node: Any) -> Any:
        return node if isinstance(node, nodes.TemplateData) else through("__pay", node)

    for node in list(tree.find_all(nodes.Node)):
        if isinstance(node, (nodes.Output, nodes.Concat)):
            node.nodes = [pay(child) for child in node.nodes]
        elif isinstance(node, nodes.For):
            node.iter = through("__turns", node.iter)
        elif isinstance(node, nodes.Compare):
            node.expr = pay(node.expr)
            for operand in node.ops:
                operand.expr = pay(operand.expr)
        elif isinstance(node, nodes.Test):
            node.node = pay(node.node)
        elif isinstance(node, (nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends)):
            raise TemplateRefusedError("loading other templates isn't allowed in a chat template")
    return tree


def render(template: str, variables: Mapping[str, Any]) -> str:
    """The text of a chat template. UserError, on one line, when it fails or asks for more than it may."""
    if len(template) > MAX_TEMPLATE_CHARS:
        raise UserError(f"the chat template has {len(template)} characters, more than the {MAX_TEMPLATE_CHARS} allowed")
    tank = _Tank(BASE_FUEL + FUEL_PER_CHAR * _size(variables))
    try:
        compiled = _MeteredEnvironment(tank).from_string(template)
        return "".join(tank.pay_for(chunk) for chunk in compiled.generate(**variables))
    except (TemplateError, RecursionError, MemoryError, SyntaxError) as error:
        reason = str(error) or type(error).__name__
    except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
    raise UserError(f"the chat template failed: {' '.join(reason.split())[:300]}")


def _size(value: Any) -> int:
    """Characters in a nested value."""
    if isinstance(value, Mapping):
        return sum(_size(key) + _size(item) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return sum(map(_size, value))
    return len(value) if isinstance(value, str) else 1
