"""The type of a field in a record of arrays.

JAX rebuilds a record (a pytree) with whatever stands in an array's place: a tracer, a shape, None, a plain object. So
at run time a field may be anything; to a type checker and to a reader it is an array.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jax import Array as Leaf
else:
    Leaf = Any

__all__ = ["Leaf"]
