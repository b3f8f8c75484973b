"""Check of a drafter's parameters: a drafter with one that is missing, spare or in another shape does not run.

Frameworks have run drafters whose weights were silently random: output stays right, since the target verifies, and only
the speed is gone. So the check comes before any work, by name.
"""

from typing import Any

import jax

from mtpjax.errors import UserError

ANY = object()
"""Stands for parameters whose shapes aren't known: there must be some."""


def check_params(name: str, params: Any, wanted: Any) -> None:
    """UserError unless `params` has exactly the leaves of `wanted` (arrays or `jax.ShapeDtypeStruct`s) in their shapes.

    A `QTensor` stands for the array of its shape. `wanted` of None asks for nothing, `ANY` for something, a tuple for a
    tuple, one for each of several drafters.
    """
    if isinstance(wanted, tuple):
        if not isinstance(params, tuple | list) or len(params) != len(wanted):
            raise UserError(f"drafter {name!r} needs a tuple of {len(wanted)} parameters, None for those without any")
        for i, (own, needed) in enumerate(zip(params, wanted, strict=True)):
            check_params(f"{name}: {i}", own, needed)
    elif wanted is None:
        if params is not None:
            raise UserError(f"drafter {name!r} has no parameters but some were given: leave drafter_params out")
    elif params is None:
        raise UserError(f"drafter {name!r} needs its parameters: pass drafter_params")
    elif wanted is not ANY:
        _check_leaves(name, _leaves(params), _leaves(wanted))


def _check_leaves(name: str, given: dict[str, Any], needed: dict[str, Any]) -> None:
    for path, leaf in needed.items():
        if given.get(path) is None:
            raise UserError(f"parameter {path} of drafter {name!r} is unassigned: pass all {len(needed)} of them")
        shape = getattr(given[path], "shape", None)
        if shape != leaf.shape:
            raise UserError(f"parameter {path} of drafter {name!r} has shape {shape}, expected {leaf.shape}")
        if isinstance(given[path], jax.ShapeDtypeStruct):
            raise UserError(f"parameter {path} of drafter {name!r} is unassigned: it is a shape without values")
    spare = sorted(set(given) - set(needed))
    if spare:
        raise UserError(f"drafter {name!r} has no parameter {spare[0]}: it would be ignored, so leave it out")


def _leaves(tree: Any) -> dict[str, Any]:
    def is_leaf(x: Any) -> bool:
        return x is None or hasattr(x, "shape")

    flat, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in flat}
