"""From named tensors in a file to the nested dict of a decoder's parameters, whatever the format.

Everything about names and shapes is checked before the first byte of data is read: a parameter that the file lacks,
a shape that the config contradicts, a tensor that no parameter asked for (it would mean a part of the model that this
decoder doesn't compute). Then one tensor at a time is read, reordered and handed to `store`, which makes the array
that is kept (another dtype, quantised, on a device). So at most one tensor exists twice, never the model.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol, runtime_checkable

import numpy as np

from mtpjax.errors import UserError
from mtpjax.models.config import ModelConfig
from mtpjax.models.fields import shown
from mtpjax.models.names import Path, interleaved_to_half_split, is_rotary, param_shapes
from mtpjax.progress import track

type Store = Callable[[Path, np.ndarray], Any]

# Tables that older exports carry along and every implementation recomputes, and what the config already took over.
RECOMPUTED: Final = re.compile(r"rope_freqs\.weight|.*\.(rotary_emb\.inv_freq|attn_rot_embd|masked_bias)")


@runtime_checkable
class TensorSource(Protocol):
    """An open model file or folder of files."""

    @property
    def name(self) -> str:
        """What errors call it."""
        ...

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor, by name."""
        ...

    def read(self, name: str) -> np.ndarray:
        """One tensor."""
        ...


def assemble(
    config: ModelConfig,
    source: TensorSource,
    name_of: Callable[[Path], str],
    store: Store,
    *,
    interleaved: bool = False,
) -> dict[str, Any]:
    """The parameters of `config` read from `source`, each as `store(path, array)` returns it.

    Arrays come to `store` as they're stored (float32, or bfloat16/float16 of a safetensors file), [out, in], with the
    rotary rows in half-split order. UserError on missing, misshapen, surplus and non-finite tensors.
    """
    wanted = param_shapes(config)
    names = {path: name_of(path) for path in wanted}
    shapes = source.shapes
    for path, name in names.items():
        if name not in shapes:
            raise UserError(f"{source.name}: tensor {shown(name)} is missing")
        if shapes[name] != wanted[path]:
            found = f"tensor {shown(name)} has shape {shown(shapes[name])}"
            raise UserError(f"{source.name}: {found}, the config implies {wanted[path]}")
    _refuse_surplus(config, source, set(names.values()), name_of)
    params: dict[str, Any] = {}
    for path, name in track(names.items(), "loading", total=len(names)):
        array = source.read(name)
        if not (np.isfinite(array.min()) and np.isfinite(array.max())):
            raise UserError(f"{source.name}: tensor {shown(name)} holds NaN or infinity")
        if interleaved and is_rotary(path):
            array = interleaved_to_half_split(array, config.head_dim)
        put(params, path, store(path, array))
    return params


def put(tree: dict[str, Any], path: Path, leaf: Any) -> None:
    """Set the leaf at `path` of a nested dict, making the dicts on the way."""
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    tree[path[-1]] = leaf


def _refuse_surplus(config: ModelConfig, source: TensorSource, used: set[str], name_of: Callable[[Path], str]) -> None:
    """UserError for tensors that nothing asked for. A head equal to the embedding that it's tied to may be there."""
    surplus = [name for name in source.shapes if name not in used and not RECOMPUTED.fullmatch(name)]
    head = name_of(("head", "weight"))
    if config.tie_embeddings and head in surplus:
        embed = name_of(("embed", "weight"))
        if source.shapes[head] != source.shapes[embed] or not np.array_equal(source.read(head), source.read(embed)):
            raise UserError(
                f"{source.name}: the config ties {shown(head)} to {shown(embed)}, but the file holds another matrix"
            )
        surplus.remove(head)
    if surplus:
        more = f" (and {len(surplus) - 1} more)" if len(surplus) > 1 else ""
        raise UserError(
            f"{source.name}: tensor {shown(surplus[0])}{more} belongs to no part of a {config.family} decoder here"
        )
