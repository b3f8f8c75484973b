"""Safetensors files: an index of named arrays over one memory map.

Layout: an unsigned 64-bit length, so many bytes of JSON `{name: {dtype, shape, data_offsets}}`, then the data;
github.com/huggingface/safetensors. The reader is our own because the library's numpy side knows neither bfloat16 nor
any float8 (`ml_dtypes` does), and because a file is untrusted: header size, offsets, overlap and the product of each
shape are all checked against the bytes that are there, before anything is allocated.
"""

import itertools
import json
import math
import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import ml_dtypes
import numpy as np

from mtpjax.errors import UserError
from mtpjax.models.fields import shown

MAX_HEADER_BYTES: Final = 64 * 2**20

# Name in the file -> (numpy dtype, whether weights may have it). The others are here so that they're refused by name.
DTYPES: Final[Mapping[str, tuple[np.dtype[Any], bool]]] = {
    "F32": (np.dtype("<f4"), True),
    "BF16": (np.dtype(ml_dtypes.bfloat16), True),
    "F16": (np.dtype("<f2"), True),
    "F64": (np.dtype("<f8"), False),
    "F8_E4M3": (np.dtype(ml_dtypes.float8_e4m3fn), False),
    "F8_E5M2": (np.dtype(ml_dtypes.float8_e5m2), False),
    "I64": (np.dtype("<i8"), False),
    "U64": (np.dtype("<u8"), False),
    "I32": (np.dtype("<i4"), False),
    "U32": (np.dtype("<u4"), False),
    "I16": (np.dtype("<i2"), False),
    "U16": (np.dtype("<u2"), False),
    "I8": (np.dtype("i1"), False),
    "U8": (np.dtype("u1"), False),
    "BOOL": (np.dtype("u1"), False),
}


@dataclass(frozen=True)
class TensorInfo:
    """Where an array lies: `dtype` by its name in the file, `offset` in bytes from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    n_bytes: int


@dataclass(frozen=True)
class SafetensorsFile:
    """An open file: `tensors` by name, `data` all its bytes."""

    name: str
    tensors: Mapping[str, TensorInfo]
    data: memoryview

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor, by name."""
        return {name: info.shape for name, info in self.tensors.items()}

    def read(self, name: str) -> np.ndarray:
        """One weight, a read-only view of the file in its own dtype. UserError for a dtype that no weight may have."""
        info = self.tensors[name]
        dtype, usable = DTYPES[info.dtype]
        if not usable:
            known = ", ".join(key for key, (_, weight) in DTYPES.items() if weight)
            scaled = " without a scale that could be read" if info.dtype.startswith("F8") else ""
            raise UserError(f"{self.name}: tensor {shown(name)} is {info.dtype}{scaled}; supported: {known}")
        raw = np.frombuffer(self.data, np.uint8, info.n_bytes, info.offset)
        if info.offset % dtype.itemsize:
            raw = raw.copy()  # the header of an unaligned file is no multiple of the item size
        return raw.view(dtype).reshape(info.shape)


def open_safetensors(path: Path) -> SafetensorsFile:
    """Map a safetensors file and check its header. UserError on anything malformed."""
    try:
        with path.open("rb") as file:
            data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise UserError(f"{path}: can't be read ({reason})") from None
    return parse_safetensors(data, str(path))


def parse_safetensors(data: memoryview, name: str) -> SafetensorsFile:
    """Check a safetensors file that is in memory; `name` is what errors call it."""
    if len(data) < 8:
        raise UserError(f"{name}: not a safetensors file ({len(data)} bytes)")
    header_bytes = int.from_bytes(data[:8], "little")
    if header_bytes > min(MAX_HEADER_BYTES, len(data) - 8):
        raise UserError(f"{name}: truncated or not a safetensors file (a header of {header_bytes} bytes announced)")
    start = 8 + header_bytes
    header = _json_header(bytes(data[8:start]), name)
    header.pop("__metadata__", None)
    tensors = {key: _entry(name, key, entry, start, len(data)) for key, entry in header.items()}
    ordered = sorted(tensors.items(), key=lambda item: item[1].offset)
    for (first, a), (second, b) in itertools.pairwise(ordered):
        if a.offset + a.n_bytes > b.offset:
            raise UserError(f"{name}: tensors {shown(first)} and {shown(second)} overlap")
    return SafetensorsFile(name, tensors, data)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a name occurs twice")
    return result


def _json_header(text: bytes, name: str) -> dict[str, Any]:
    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{name}: the header isn't valid JSON ({shown(str(error))})") from None
    if not isinstance(header, dict):
        raise UserError(f"{name}: the header is no JSON object")
    return header


def _natural(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _entry(file: str, name: str, entry: Any, start: int, file_bytes: int) -> TensorInfo:
    """One entry of the header, checked: known dtype, whole shape, in range, and shape * item size = bytes."""
    where = f"{file}: tensor {shown(name)}"
    if not isinstance(entry, dict):
        raise UserError(f"{where} has a malformed entry")
    dtype, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise UserError(f"{where} has the unknown dtype {shown(dtype)}")
    if not isinstance(shape, list) or len(shape) > 8 or not all(_natural(size) for size in shape):
        raise UserError(f"{where} has the malformed shape {shown(shape)}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_natural(offset) for offset in offsets):
        raise UserError(f"{where} has malformed data_offsets {shown(offsets)}")
    n_bytes = math.prod(shape) * DTYPES[dtype][0].itemsize
    if offsets[1] - offsets[0] != n_bytes:
        raise UserError(f"{where} spans {shown(offsets)}, but {dtype} of shape {shown(shape)} takes {n_bytes} bytes")
    if start + offsets[1] > file_bytes:
        raise UserError(f"{where} ends at byte {start + offsets[1]}, but the file has {file_bytes}: truncated?")
    return TensorInfo(dtype, tuple(shape), start + offsets[0], n_bytes)
