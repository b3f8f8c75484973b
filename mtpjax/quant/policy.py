"""Which parameter is stored in which dtype, and what was really allocated.

One function, `is_quantised_path`, decides from a parameter's path alone which leaves carry the bytes (linear weights,
the embedding, the head). Those take the precision's weight dtype; norms and biases are small and sensitive and stay
float32 in every precision, as do the scales of FP8 weights. Training's `fake_quant_params` asks the same function, so
what is trained is what is deployed.

Conversion works on one tensor at a time (`convert_leaf`), so that a loader never holds a second full copy.

`precision_report` reads the arrays themselves, never the request: rows say what was asked and what was got. A group
whose leaves differ gives one row for each dtype, so a model of mixed precision reports itself.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypedDict

import jax
import jax.numpy as jnp
import numpy as np

from mtpjax.errors import UserError
from mtpjax.quant.formats import ArrayLike, namespace
from mtpjax.quant.qtensor import QTensor, dequantize, quantize

type Path = tuple[str, ...]


@dataclass(frozen=True)
class Precision:
    """Dtype names of the large weights, of the computation, and of the KV cache."""

    name: str
    weights: str
    compute: str
    cache: str


PRECISIONS: dict[str, Precision] = {
    "f32": Precision("f32", weights="float32", compute="float32", cache="float32"),
    "bf16": Precision("bf16", weights="bfloat16", compute="bfloat16", cache="bfloat16"),
    "f16": Precision("f16", weights="float16", compute="float16", cache="float16"),
    "fp8": Precision("fp8", weights="float8_e4m3fn", compute="bfloat16", cache="bfloat16"),
}

GROUPS = ("embedding", "attention", "mlp", "norms", "biases", "head", "other", "scales", "cache")
"""Order of the report's rows. `scales` are those of FP8 weights; groups without tensors do not appear."""


class ReportRow(TypedDict):
    """Tensors of one group and dtype: what was asked, what was allocated, bytes, number of arrays."""

    group: str
    asked: str
    got: str
    bytes: int
    tensors: int


def find_precision(name: str) -> Precision:
    """The precision called `name`; UserError listing the known ones."""
    if name not in PRECISIONS:
        raise UserError(f"unknown precision {name!r}: expected one of {', '.join(PRECISIONS)}")
    return PRECISIONS[name]


def is_quantised_path(path: Path) -> bool:
    """True for linear weights, the embedding and the head; False for norms, biases and scales."""
    return path[-1] == "weight" and not any("norm" in part for part in path)


def group_of(path: Path) -> str:
    """The report's group of a parameter path, one of GROUPS."""
    if path[-1] == "bias":
        return "biases"
    if path[-1] == "scale" or any("norm" in part for part in path):
        return "norms"
    for part, group in (("embed", "embedding"), ("attn", "attention"), ("mlp", "mlp"), ("head", "head")):
        if part in path:
            return group
    return "other"


def asked_dtype(path: Path, precision: str) -> str:
    """Name of the dtype in which `precision` stores the parameter at `path`."""
    weights = find_precision(precision).weights
    return weights if is_quantised_path(path) else "float32"


def map_leaves(function: Callable[[Path, Any], Any], params: Any) -> Any:
    """`params` with every leaf replaced by `function(path, leaf)`; a QTensor is one leaf."""
    return jax.tree_util.tree_map_with_path(
        lambda keys, leaf: function(_names(keys), leaf), params, is_leaf=_is_qtensor
    )


def convert_leaf(path: Path, array: ArrayLike | QTensor, precision: str) -> jax.Array | QTensor:
    """The parameter at `path` as `precision` stores it, on the device.

    numpy arrays (say, mapped memory of a file) are converted on the host and copied, never aliased. JAX arrays stay
    where they are, and one that has its dtype already is returned as it is. A QTensor is kept for fp8 and dequantised
    for the others. UserError, naming the tensor: infinity or NaN for fp8, values beyond float16's range for f16, an FP8
    array without its scale, an array that is not float.
    """
    name, target = ".".join(path), np.dtype(asked_dtype(path, precision))
    if isinstance(array, QTensor):
        if target.itemsize == 1:
            return jax.tree.map(jnp.array, array) if namespace(array.q) is np else array
        array = dequantize(array)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise UserError(f"parameter {name!r} has dtype {array.dtype}: expected a float array")
    if array.dtype.itemsize == 1:
        raise UserError(
            f"FP8 parameter {name!r} ({array.dtype}) came without its scale: expected a QTensor, check the file"
        )
    if target.itemsize == 1:
        return jax.tree.map(jnp.asarray, quantize(array, name=name))
    if target == np.float16:
        _refuse_overflow(array, name)
    if namespace(array) is np and array.dtype == target:
        return jnp.array(array, copy=True)
    return jnp.asarray(array.astype(target))


def apply_precision(params: Any, precision: str) -> Any:
    """Every leaf of `params` through `convert_leaf`, one at a time. UserError for an unknown precision."""
    find_precision(precision)
    return map_leaves(lambda path, leaf: convert_leaf(path, leaf, precision), params)


def precision_report(params: Any, cache: Any = None, asked: str = "bf16") -> list[ReportRow]:
    """Rows {group, asked, got, bytes, tensors} in the order of GROUPS, read from the arrays (or shape structs).

    `asked` names the precision that was requested. Bytes sum to the arrays' own nbytes. Integer arrays of the cache,
    such as lengths, have no precision: they are asked as what they are.
    """
    entries: list[tuple[str, str, Any]] = []

    def add(path: Path, leaf: Any) -> None:
        if isinstance(leaf, QTensor):
            entries.append(("scales", "float32", leaf.scale))
            leaf = leaf.q
        entries.append((group_of(path), asked_dtype(path, asked), leaf))

    map_leaves(add, params)
    for leaf in jax.tree.leaves(cache):
        is_float = jnp.issubdtype(leaf.dtype, jnp.floating)
        entries.append(("cache", find_precision(asked).cache if is_float else str(leaf.dtype), leaf))
    rows: dict[tuple[int, str, str], ReportRow] = {}
    for group, wanted, leaf in entries:
        got = str(leaf.dtype)
        empty = ReportRow(group=group, asked=wanted, got=got, bytes=0, tensors=0)
        row = rows.setdefault((GROUPS.index(group), wanted, got), empty)
        row["bytes"] += leaf.size * leaf.dtype.itemsize
        row["tensors"] += 1
    return [rows[key] for key in sorted(rows)]


def _refuse_overflow(array: ArrayLike, name: str) -> None:
    largest = namespace(array).abs(array).max()
    if not isinstance(largest, jax.core.Tracer) and float(largest) >= 65520:  # what rounds to infinity
        raise UserError(f"parameter {name!r} holds {float(largest):.6g}, beyond float16's 65504: use bf16, f32 or fp8")


def _is_qtensor(leaf: Any) -> bool:
    return isinstance(leaf, QTensor)


def _names(keys: tuple[Any, ...]) -> Path:
    return tuple(str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in keys)
