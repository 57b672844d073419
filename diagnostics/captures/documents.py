"""Packed (varlen) sequences: which rows and keys of a capture's tensors belong to which document.

``cu_seqlens_q`` and ``cu_seqlens_k`` are the documents' borders, [documents + 1]: document i has the query rows from
cu_seqlens_q[i] to cu_seqlens_q[i + 1].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from attn_diag.captures.sources import PACKING, TensorSource
from attn_diag.errors import InputError

_LISTED = 8


@dataclass(frozen=True)
class Document:
    """One sequence of several that share an axis."""

    number: int
    """Its place in cu_seqlens."""
    rows: slice
    """Its query rows among all."""
    keys: slice
    """Its keys among all."""

    @property
    def lengths(self) -> tuple[int, int]:
        """Tq and Tk."""
        return self.rows.stop - self.rows.start, self.keys.stop - self.keys.start


def read_documents(
    tensors: Mapping[str, TensorSource], rows: int, keys: int
) -> tuple[tuple[Document, ...], tuple[str, ...]]:
    """The documents of packed tensors, without those that have no rows or no keys.

    Args:
        tensors: With both cu_seqlens.
        rows: How many query rows there are, padding included.
        keys: How many keys.

    Returns:
        The documents, and in words what is left out.

    Raises:
        InputError: cu_seqlens are no borders of documents, or no document has rows and keys.
    """
    ends = [_borders(tensors, name, count) for name, count in zip(PACKING, (rows, keys), strict=True)]
    if len(ends[0]) != len(ends[1]):
        raise InputError(
            f"cu_seqlens_q has {len(ends[0]) - 1} documents and cu_seqlens_k has {len(ends[1]) - 1}; expected as many"
        )
    every = [Document(i, slice(*ends[0][i : i + 2]), slice(*ends[1][i : i + 2])) for i in range(len(ends[0]) - 1)]
    found = tuple(d for d in every if min(d.lengths))
    if not found:
        raise InputError("cu_seqlens: no document has query rows and keys; expected one at least")
    said = []
    if len(found) < len(every):
        empty = [d.number for d in every if not min(d.lengths)]
        said.append(f"{len(empty)} of {len(every)} documents are empty and left out (number {first_of(empty, '')})")
    for what, total, end in (("query rows", rows, ends[0][-1]), ("keys", keys, ends[1][-1])):
        if end < total:
            said.append(f"{total - end} {what} after the last document are padding, left out")
    return found, tuple(said)


def _borders(tensors: Mapping[str, TensorSource], name: str, total: int) -> list[int]:
    """cu_seqlens as a list. Raises InputError for what cannot be one."""
    if name not in tensors:
        raise InputError(f"{name} is missing: packed sequences need cu_seqlens_q and cu_seqlens_k")
    source = tensors[name]
    require_integers(name, source.dtype)
    if len(source.shape) != 1 or source.shape[0] < 2:
        raise InputError(f"{name} must have shape [documents + 1], got {list(source.shape)}")
    found = source[...].to("cpu", torch.int64)
    ends: list[int] = found.tolist()
    if ends[0] != 0:
        raise InputError(f"{name} must begin with 0, got {first_of(ends)}")
    if bool((found.diff() < 0).any()):
        raise InputError(
            f"{name} must not decrease, got {first_of(ends)}: it holds where documents end, not their lengths"
        )
    if ends[-1] > total:
        what = "query rows" if name == PACKING[0] else "keys"
        raise InputError(f"{name} ends at {ends[-1]}, but there are {total} {what}")
    return ends


def require_integers(name: str, dtype: torch.dtype) -> None:
    """Raise InputError, naming the tensor, for a type that is none of integers."""
    if dtype.is_floating_point or dtype.is_complex or dtype == torch.bool:
        raise InputError(f"{name} must be integers, got {str(dtype).removeprefix('torch.')}")


def first_of(numbers: Sequence[int], brackets: str = "[]") -> str:
    """The first few numbers of a list in words."""
    words = ", ".join(map(str, numbers[:_LISTED])) + (", …" if len(numbers) > _LISTED else "")
    return f"{brackets[:1]}{words}{brackets[1:]}"
