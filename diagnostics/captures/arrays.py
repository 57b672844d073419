"""Captures in .npz files: headers first, each array only when it is looked at."""

from __future__ import annotations

import math
import zipfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from attn_diag.captures.files import named_errors
from attn_diag.captures.sources import OBSERVED, TensorSource
from attn_diag.errors import InputError

Read = tuple[dict[str, TensorSource], dict[str, str], list[str]]
"""Of a file: its tensors, its metadata, and what is to be said of it."""
_FLOATING = ("q", "k", "v", "do", "x", "w_q", *OBSERVED)
# Of what an .npz states; notes and the like.
_LONGEST_TEXT = 2**20
# Bytes that one of a deflated file can stand for, at most.
_DEFLATED = 1032


@dataclass(frozen=True)
class _NpzSource:
    """An array in an .npz file, unpacked when it is first indexed."""

    path: Path
    member: zipfile.ZipInfo
    shape: tuple[int, ...]
    dtype: torch.dtype
    words: bool

    def __getitem__(self, index: Any) -> Tensor:
        return self._unpacked[index]

    @cached_property
    def _unpacked(self) -> Tensor:
        with named_errors(self.path), zipfile.ZipFile(self.path) as archive, archive.open(self.member) as file:
            return _tensor_from_numpy(np.lib.format.read_array(file, allow_pickle=False), words=self.words)


def read_npz(path: Path) -> Read:
    """The arrays of a file, what it states, and what is to be said of it. Raises InputError, or what numpy raises."""
    if not zipfile.is_zipfile(path):
        raise InputError("truncated or damaged: not a complete .npz archive")
    tensors: dict[str, TensorSource] = {}
    text: dict[str, str] = {}
    notes: list[str] = []
    size = path.stat().st_size
    with zipfile.ZipFile(path) as archive:
        for member in archive.infolist():
            name = member.filename.removesuffix(".npy")
            if member.compress_size > size or member.file_size > _DEFLATED * member.compress_size:
                raise InputError(f"{name} is truncated or damaged: it says that it is longer than the file can hold")
            base = name.rpartition(".")[2]
            with archive.open(member) as file:
                shape, dtype = _npy_header(file)
                if math.prod(shape) * dtype.itemsize != member.file_size - file.tell():
                    raise InputError(f"{name} is truncated or damaged: it says {list(shape)} {dtype}")
            if not shape and dtype.kind in "USifb" and not name.endswith("_descale"):
                if dtype.itemsize > _LONGEST_TEXT:
                    raise InputError(f"{name} is a text of {dtype.itemsize} bytes; expected at most {_LONGEST_TEXT}")
                with archive.open(member) as file:
                    text[name] = str(np.lib.format.read_array(file, allow_pickle=False))
                continue
            if dtype.kind in "US":
                raise InputError(f"{name} holds text; expected numbers")
            # ml_dtypes arrays come back from an .npz as raw bytes ("void") of their size.
            words = dtype.itemsize == 2 and (dtype.kind == "V" or (dtype.kind == "u" and base in _FLOATING))
            if dtype.kind == "V" and not words:
                raise InputError(
                    f"{name} holds {dtype.itemsize}-byte raw data; .npz keeps no FP8 type, use safetensors"
                )
            if words:
                notes.append(f"{name}: 16-bit words taken as BF16")
            try:
                kind = _tensor_from_numpy(np.empty(0, dtype), words=words).dtype
            except TypeError:
                raise InputError(
                    f"{name} holds {dtype.name}; expected numbers that torch has, such as float32"
                ) from None
            tensors[name] = _NpzSource(path, member, tuple(shape), kind, words)
    return tensors, text, notes


def _npy_header(file: IO[bytes]) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Shape and dtype of the array that begins here. Raises InputError for one of objects."""
    version = np.lib.format.read_magic(file)
    read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    if version not in read:
        raise InputError(f"an array of .npy version {version}; expected 1.0 or 2.0")
    shape, _, dtype = read[version](file)
    if dtype.hasobject or dtype.names is not None:
        raise InputError(f"an array of {dtype}; expected numbers")
    return shape, dtype


def _tensor_from_numpy(array: np.ndarray[Any, Any], *, words: bool) -> Tensor:
    """The array as a tensor; ``words``: of BF16, whose bits it holds."""
    if words:
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("=")).copy())
