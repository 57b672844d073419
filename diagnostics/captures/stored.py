"""Tensors in a safetensors file: read part by part when they are needed, with nothing open or mapped in between.

A mapped file that somebody cuts off kills its reader (SIGBUS), and a system allows a process only so many maps.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from torch import Tensor

from attn_diag.captures.places import identity, is_remote, reached, read_range
from attn_diag.errors import InputError

_DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "BOOL": torch.bool,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "U16": torch.uint16,
}
# So many bytes are read at once of a tensor whose heads lie between each other (BTHD).
_BLOCK = 2**24
# Bytes of the longest header that safetensors takes.
_HEADER = 100_000_000


_CHANGED = (
    "cut off or overwritten since it was opened; expected it unchanged, as its tensors are read when they are needed: "
    "begin again"
)


class Stored(Protocol):
    """Bytes that are read range by range."""

    def read(self, start: int, count: int) -> Tensor:
        """Bytes ``start`` to ``start + count``, uint8. Raises InputError where they are not what they were."""


@dataclass(frozen=True)
class StoredFile:
    """A file as it was when it was opened."""

    path: Path
    """Where it is, absolute."""
    state: tuple[int, int, int]
    """Its number, size and time of change, by which another file of the same name is told from it."""

    @classmethod
    def at(cls, path: Path) -> StoredFile:
        """The file that is at ``path`` now."""
        return cls(path.absolute(), _state(path.stat()))

    def read(self, start: int, count: int) -> Tensor:
        """Bytes ``start`` to ``start + count``, uint8.

        Raises:
            InputError: The file is gone, or is not what it was: cut off, written to or replaced.
        """
        buffer = torch.empty(count, dtype=torch.uint8)
        try:
            with self.path.open("rb") as file:
                same = _state(os.fstat(file.fileno())) == self.state
                file.seek(start)
                same = same and file.readinto(buffer.numpy().data) == count
        except OSError as error:
            raise InputError(
                f"{self.path}: cannot be read any more: {error.strerror}; its tensors are read when they are needed: "
                "leave it where it is, and begin again"
            ) from None
        if not same:
            raise InputError(f"{self.path}: {_CHANGED}")
        return buffer


@dataclass(frozen=True)
class StoredObject:
    """An object of a store as it was when it was opened; of each read the range alone travels."""

    path: Path
    """Its URL, as ``places.place`` makes it."""
    state: str
    """By which the store tells it from another one under the same name."""

    @classmethod
    def at(cls, path: Path) -> StoredObject:
        """The object that is at ``path`` now."""
        with reached(path, "read"):
            return cls(path, identity(path))

    def read(self, start: int, count: int) -> Tensor:
        """Bytes ``start`` to ``start + count``, uint8.

        Raises:
            InputError: The object is gone, cannot be reached, or is not what it was.
        """
        try:
            with reached(self.path, "read"):
                # Empty ranges mean the whole object to some stores.
                content = read_range(self.path, start, count) if count else b""
                same = identity(self.path) == self.state
        except FileNotFoundError:
            raise InputError(f"{self.path}: removed since it was opened; begin again") from None
        if len(content) != count or not same:
            raise InputError(f"{self.path}: {_CHANGED}")
        return torch.frombuffer(bytearray(content), dtype=torch.uint8) if count else torch.empty(0, dtype=torch.uint8)


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a file; indexing reads just that part."""

    file: Stored
    start: int
    """Its first byte."""
    shape: tuple[int, ...]
    dtype: torch.dtype

    def __getitem__(self, index: Any) -> Tensor:
        places = () if index is Ellipsis else index if isinstance(index, tuple) else (index,)
        first = tuple(takewhile(lambda place: isinstance(place, int), places))
        rest, shape, skipped = places[len(first) :], self.shape[len(first) :], 0
        for place, size in zip(first, self.shape, strict=False):
            if not -size <= place < size:
                raise IndexError(f"index {list(first)} of a tensor of shape {list(self.shape)}")
            skipped = skipped * size + place % size
        skipped *= math.prod(shape)
        if not (rest and isinstance(rest[0], slice) and rest[0].step is None):
            part = self._read(skipped, shape)
            return part[rest] if rest else part
        row = math.prod(shape[1:])
        step = max(_BLOCK // max(row * self.dtype.itemsize, 1), 1)
        begin, end, _ = rest[0].indices(shape[0])
        blocks = [(at, min(step, end - at)) for at in range(begin, max(end, begin + 1), step)]
        within = (slice(None), *rest[1:])
        return torch.cat([self._read(skipped + at * row, (max(n, 0), *shape[1:]))[within] for at, n in blocks])

    def _read(self, skipped: int, shape: tuple[int, ...]) -> Tensor:
        """A tensor of this shape, behind so many elements."""
        size = self.dtype.itemsize
        raw = self.file.read(self.start + skipped * size, math.prod(shape) * size)
        return raw.view(self.dtype).view(shape)


def read_header(path: Path) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """The tensors of a safetensors file, still in it, and its metadata.

    Raises:
        InputError: It holds a tensor of a type that is not supported.
        Exception: Whatever else safetensors finds wrong.
    """
    # safetensors checks the whole header against the file's size.
    file: Stored
    if is_remote(path):
        file = StoredObject.at(path)
        text = _text_of_object(file, path.stat().st_size)
    else:
        file = StoredFile.at(path)
        text = _text(path)
    length = int.from_bytes(bytes(file.read(0, 8).numpy()), "little")
    header = json.loads(bytes(file.read(8, length).numpy()))
    tensors = {}
    for name in sorted(header.keys() - {"__metadata__"}):
        entry = header[name]
        if entry["dtype"] not in _DTYPES:
            raise InputError(f"{name} has dtype {entry['dtype']}, which is not supported")
        start = 8 + length + entry["data_offsets"][0]
        tensors[name] = StoredTensor(file, start, tuple(entry["shape"]), _DTYPES[entry["dtype"]])
    return tensors, text


def _text(path: str | Path) -> dict[str, str]:
    """A file's metadata. Raises whatever safetensors finds wrong with its header."""
    opened: Any = safe_open(path, framework="pt")  # it ships without types
    with opened as handle:
        return handle.metadata() or {}


def _text_of_object(stored: StoredObject, size: int) -> dict[str, str]:
    """As ``_text`` of an object of ``size`` bytes, by a hollow file of its size and header: nothing else travels."""
    start = bytes(stored.read(0, min(8, size)).numpy())
    length = int.from_bytes(start, "little")
    with tempfile.NamedTemporaryFile(suffix=".safetensors") as hollow:
        hollow.write(start)
        if length <= min(size - 8, _HEADER):
            hollow.write(bytes(stored.read(8, length).numpy()))
        hollow.truncate(size)
        hollow.flush()
        return _text(hollow.name)


def _state(found: os.stat_result) -> tuple[int, int, int]:
    return found.st_ino, found.st_size, found.st_mtime_ns
