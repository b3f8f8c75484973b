"""GGUF files: metadata, tensor index, and one dequantised tensor at a time.

Layout (version 2 and 3, little-endian): magic, version, counts; then typed key-value pairs; then for every tensor a
name, dimensions (fastest first, so reversed they are numpy's), a type and an offset; then, aligned, the data.
Specification: github.com/ggml-org/ggml/blob/master/docs/gguf.md.

The header is parsed here and not by `gguf.GGUFReader`: that one makes several numpy arrays per list element (two to
four seconds for SmolLM2's 98,000 vocabulary strings; this takes a tenth) and trusts the counts it reads. A cache of
the parsed header was rejected: it needs invalidation, a folder of the user's, and still a parser. The `gguf` package
does what it's best at, dequantising the two dozen block formats.

The file is untrusted. A count or length is believed only after comparing it with the bytes that are left, so memory
stays proportional to the file's size; nesting is bounded; tensors must lie in the file, aligned, without overlapping.
"""

import itertools
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from gguf import quants
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from mtpjax.errors import UserError
from mtpjax.models.fields import shown

MAGIC: Final = b"GGUF"
VERSIONS: Final = (2, 3)
MAX_DIMS: Final = 4
MAX_NESTING: Final = 4

_SCALARS: Final[Mapping[int, str]] = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
_STRING: Final = 8
_ARRAY: Final = 9
_U32: Final = struct.Struct("<I")
_U64: Final = struct.Struct("<Q")


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies. `shape` is numpy's order, [out, in]; `offset` is from the start of the file, in bytes."""

    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    offset: int
    n_bytes: int


@dataclass(frozen=True)
class GGUFFile:
    """An open file: `metadata` by key (lists of numbers are numpy arrays), `tensors` by name, `data` all its bytes."""

    name: str
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    data: memoryview

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor, by name."""
        return {name: info.shape for name, info in self.tensors.items()}

    def read(self, name: str) -> np.ndarray:
        """One tensor, dequantised, float32 [out, in]; a view of the file where it's stored as float32."""
        info = self.tensors[name]
        raw = np.frombuffer(self.data, np.uint8, info.n_bytes, info.offset)
        rows = raw.reshape(*info.shape[:-1], -1)
        try:
            with np.errstate(all="ignore"):  # damaged block scales overflow; the caller checks for finite values
                return quants.dequantize(rows, info.kind)
        except NotImplementedError:
            known = ", ".join(sorted(kind.name for kind in DEQUANTISABLE))
            what = f"tensor {shown(name)} has type {info.kind.name}, which can't be dequantised"
            raise UserError(f"{self.name}: {what}; supported: {known}") from None


def _dequantisable() -> frozenset[GGMLQuantizationType]:
    """The types that the installed `gguf` can dequantise, found by asking for zero blocks of each."""

    def works(kind: GGMLQuantizationType) -> bool:
        try:
            quants.dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
        except NotImplementedError:
            return False
        return True

    return frozenset(kind for kind in GGMLQuantizationType if kind in GGML_QUANT_SIZES and works(kind))


DEQUANTISABLE: Final = _dequantisable()


def open_gguf(path: Path) -> GGUFFile:
    """Map a GGUF file and parse its header. UserError on anything that isn't a well-formed GGUF file."""
    try:
        with path.open("rb") as file:
            data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except (OSError, ValueError) as error:  # ValueError: an empty file can't be mapped
        raise UserError(f"{path}: can't be read ({_reason(error)})") from None
    return parse_gguf(data, str(path))


def parse_gguf(data: memoryview, name: str) -> GGUFFile:
    """Parse a GGUF file that is in memory; `name` is what errors call it."""
    cursor = _Cursor(data, name)
    if bytes(data[:4]) != MAGIC:
        raise UserError(f"{name}: not a GGUF file (it starts with {bytes(data[:4])!r}, expected {MAGIC!r})")
    cursor.at = 4
    version = cursor.u32()
    if version not in VERSIONS:
        big = " (a big-endian file?)" if version and version % 65536 == 0 else ""
        raise UserError(f"{name}: GGUF version {version}{big} isn't supported; supported: little-endian 2 and 3")
    n_tensors, n_pairs = cursor.u64(), cursor.u64()
    metadata: dict[str, Any] = {}
    for _ in range(cursor.bounded(n_pairs, 12, "metadata keys")):
        key = cursor.string()
        if key in metadata:
            raise UserError(f"{name}: metadata key {shown(key)} occurs twice")
        metadata[key] = cursor.value(cursor.u32(), key)
    if metadata.get("split.count", 0) not in (0, 1):
        raise UserError(f"{name}: one part of a split model; join the parts first (llama-gguf-split --merge)")
    entries = [_tensor_entry(cursor) for _ in range(cursor.bounded(n_tensors, 24, "tensors"))]
    return GGUFFile(name, metadata, _place(entries, cursor, metadata.get("general.alignment", 32)), data)


class _Cursor:
    """A position in the bytes of a header. Every step first checks that the bytes are there."""

    def __init__(self, data: memoryview, name: str) -> None:
        self.data, self.name, self.at = data, name, 0

    def bounded(self, count: int, least: int, what: str) -> int:
        """`count`, once it's known that so many items of at least `least` bytes can follow."""
        left = len(self.data) - self.at
        if count * least > left:
            raise UserError(f"{self.name}: truncated or damaged: {count} {what} announced, {left} bytes left")
        return count

    def take(self, count: int) -> int:
        """The present position, having moved `count` bytes on."""
        if count > len(self.data) - self.at:
            raise UserError(f"{self.name}: truncated or damaged: the header ends at byte {len(self.data)}")
        self.at += count
        return self.at - count

    def u32(self) -> int:
        return _U32.unpack_from(self.data, self.take(4))[0]

    def u64(self) -> int:
        return _U64.unpack_from(self.data, self.take(8))[0]

    def string(self) -> str:
        start = self.take(self.bounded(self.u64(), 1, "bytes of text"))
        try:
            return str(self.data[start : self.at], "utf-8")
        except UnicodeDecodeError:
            raise UserError(f"{self.name}: damaged: text at byte {start} isn't UTF-8") from None

    def _strings(self, count: int) -> list[str]:
        """Many strings, as `string` but in one loop without calls: vocabularies have a hundred thousand."""
        data, size, at, found = self.data, len(self.data), self.at, []
        for _ in range(count):
            (length,) = _U64.unpack_from(data, at) if at + 8 <= size else (size,)
            start, at = at + 8, at + 8 + length
            if at > size:
                raise UserError(f"{self.name}: truncated or damaged: {length} bytes of text announced at byte {start}")
            try:
                found.append(str(data[start:at], "utf-8"))
            except UnicodeDecodeError:
                raise UserError(f"{self.name}: damaged: text at byte {start} isn't UTF-8") from None
        self.at = at
        return found

    def value(self, kind: int, key: str, depth: int = 0) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY and depth < MAX_NESTING:
            return self._array(key, depth)
        if kind not in _SCALARS:
            raise UserError(f"{self.name}: metadata key {shown(key)} has the unknown or too deeply nested type {kind}")
        return self._numbers(kind, 1).item()

    def _numbers(self, kind: int, count: int) -> np.ndarray:
        dtype = np.dtype(_SCALARS[kind])
        start = self.take(count * dtype.itemsize)
        values = np.frombuffer(self.data, np.uint8 if dtype.kind == "b" else dtype, count, start)
        return values != 0 if dtype.kind == "b" else values

    def _array(self, key: str, depth: int) -> Any:
        kind, count = self.u32(), self.u64()
        if kind in _SCALARS:
            return self._numbers(
                kind, self.bounded(count, np.dtype(_SCALARS[kind]).itemsize, f"numbers in {shown(key)}")
            )
        if kind == _STRING:
            return self._strings(self.bounded(count, 8, f"strings in {shown(key)}"))
        self.bounded(count, 12, f"lists in {shown(key)}")
        return [self.value(kind, key, depth + 1) for _ in range(count)]


def _tensor_entry(cursor: _Cursor) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
    """(name, shape in numpy's order, type, offset from the start of the data) of the next tensor."""
    name = cursor.string()
    where = f"{cursor.name}: tensor {shown(name)}"
    n_dims = cursor.u32()
    if not 1 <= n_dims <= MAX_DIMS:
        raise UserError(f"{where} has {n_dims} dimensions, expected 1 to {MAX_DIMS}")
    shape = tuple(cursor.u64() for _ in range(n_dims))[::-1]
    raw_kind = cursor.u32()
    try:
        kind = GGMLQuantizationType(raw_kind)
        block, _ = GGML_QUANT_SIZES[kind]
    except (ValueError, KeyError):
        raise UserError(f"{where} has the unknown type {raw_kind}") from None
    if min(shape) < 1 or shape[-1] % block:
        raise UserError(f"{where} has shape {list(shape)}, expected rows of a positive multiple of {block}")
    return name, shape, kind, cursor.u64()


def _place(
    entries: list[tuple[str, tuple[int, ...], GGMLQuantizationType, int]], cursor: _Cursor, alignment: Any
) -> dict[str, TensorInfo]:
    """Tensors by name with their place in the file, all checked to lie inside it, aligned and apart."""
    if isinstance(alignment, bool) or not isinstance(alignment, int) or alignment < 8 or alignment & (alignment - 1):
        raise UserError(
            f"{cursor.name}: general.alignment is {shown(alignment)}, expected a power of two of at least 8"
        )
    start = -(-cursor.at // alignment) * alignment
    tensors: dict[str, TensorInfo] = {}
    for name, shape, kind, offset in entries:
        block, block_bytes = GGML_QUANT_SIZES[kind]
        n_elements = 1
        for size in shape:
            n_elements *= size
        info = TensorInfo(shape, kind, start + offset, n_elements // block * block_bytes)
        where = f"{cursor.name}: tensor {shown(name)}"
        if name in tensors:
            raise UserError(f"{where} occurs twice")
        if offset % alignment:
            raise UserError(f"{where} starts at offset {offset}, not a multiple of the alignment {alignment}")
        if info.offset + info.n_bytes > len(cursor.data):
            raise UserError(
                f"{where} ends at byte {info.offset + info.n_bytes}, but the file has {len(cursor.data)}: truncated?"
            )
        tensors[name] = info
    ordered = sorted(tensors.items(), key=lambda item: item[1].offset)
    for (first, a), (second, b) in itertools.pairwise(ordered):
        if a.offset + a.n_bytes > b.offset:
            raise UserError(f"{cursor.name}: tensors {shown(first)} and {shown(second)} overlap")
    return tensors


def _reason(error: Exception) -> str:
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)
