"""Packed (varlen) sequences: which rows and keys of a capture's tensors belong to which document.

``cu_seqlens_q`` and ``cu_seqlens_k`` are the documents' borders, [documents + 1]: document i has the query rows from
cu_seqlens_q[i] to cu_seqlens_q[i + 1]. ``position_ids`` that restart at 0 say the same where rows and keys are alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attn_diag.captures.sources import OBSERVED, PACKING, TensorSource
from attn_diag.errors import InputError

# [total, H, D], as flash_attn's varlen functions have them; of the others the first axis is the batch, or lacks.
_TOKENS = ("q", "k", "v", "do", "o", "dq", "dk", "dv", "dq_pre")
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


@dataclass(frozen=True)
class Lifted:
    """A tensor with a first axis of one place in front."""

    source: TensorSource

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of all axes."""
        return (1, *self.source.shape)

    @property
    def dtype(self) -> torch.dtype:
        """Type of the stored values."""
        return self.source.dtype

    def __getitem__(self, index: Any) -> Tensor:
        if isinstance(index, tuple) and len(index) > 1 and index[0] in (0, -1):
            return self.source[index[1:]]
        return self.source[...][None][index]


def is_packed(tensors: Mapping[str, TensorSource]) -> bool:
    """Whether these tensors of a capture hold several documents along one axis."""
    return any(name in tensors for name in PACKING)


def with_cu_seqlens(tensors: Mapping[str, TensorSource]) -> Mapping[str, TensorSource]:
    """The tensors with ``cu_seqlens_q`` and ``cu_seqlens_k`` where they are packed, each with a batch axis.

    Args:
        tensors: By name. ``cu_seqlens`` stands for both; ``cu_seqlens_q`` alone is that of the keys too; so do
            ``position_ids`` [total] or [1, total] that restart at 0.

    Raises:
        InputError: The position_ids restart, and yet do not count 0, 1, 2, … in every document.
    """
    found = dict(tensors)
    both = found.pop("cu_seqlens", None)
    if both is None and not is_packed(found) and "q" in found and "position_ids" in found:
        both = _of_positions(found["position_ids"])
        if both is not None:
            del found["position_ids"]
    if both is not None:
        found = {"cu_seqlens_q": both, "cu_seqlens_k": both, **found}
    if not is_packed(found):
        return tensors
    if "cu_seqlens_q" in found:
        found.setdefault("cu_seqlens_k", found["cu_seqlens_q"])
    for name, tensor in found.items():
        base = name.rpartition(".")[2]
        axes = 4 if base in _TOKENS else 3 if base in (*OBSERVED, "x") else 0
        if len(tensor.shape) == axes - 1:
            found[name] = tensor[None] if isinstance(tensor, Tensor) else Lifted(tensor)
    return found


def has_tokens_first(tensors: Mapping[str, TensorSource]) -> bool:
    """Whether packed q is [total, H, D]: a layout of its own, whatever is stated."""
    return is_packed(tensors) or "cu_seqlens" in tensors or "position_ids" in tensors


def _of_positions(source: TensorSource) -> Tensor | None:
    """cu_seqlens of position_ids; None where they do not restart, or are those of several batch items."""
    if len(source.shape) not in (1, 2) or (len(source.shape) == 2 and source.shape[0] != 1):
        return None
    positions = source[...].flatten()
    _require_integers("position_ids", positions.dtype)
    starts = (positions == 0).nonzero()[:, 0]
    if not len(positions) or not bool((starts > 0).any()):
        return None
    steps = positions.diff()
    if int(positions[0]) != 0 or not bool(((steps == 1) | (positions[1:] == 0)).all()):
        raise InputError(
            "position_ids must count 0, 1, 2, … and begin again at 0 with every document, got "
            f"{_some(positions.tolist())}; give cu_seqlens_q and cu_seqlens_k, or leave them out"
        )
    return torch.cat([starts, starts.new_tensor([len(positions)])]).to(torch.int64)


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
        said.append(f"{len(empty)} of {len(every)} documents are empty and left out (number {_some(empty, '')})")
    for what, total, end in (("query rows", rows, ends[0][-1]), ("keys", keys, ends[1][-1])):
        if end < total:
            said.append(f"{total - end} {what} after the last document are padding, left out")
    return found, tuple(said)


def _borders(tensors: Mapping[str, TensorSource], name: str, total: int) -> list[int]:
    """cu_seqlens as a list. Raises InputError for what cannot be one."""
    if name not in tensors:
        raise InputError(f"{name} is missing: packed sequences need cu_seqlens_q and cu_seqlens_k")
    source = tensors[name]
    _require_integers(name, source.dtype)
    if len(source.shape) != 1 or source.shape[0] < 2:
        raise InputError(f"{name} must have shape [documents + 1], got {list(source.shape)}")
    found = source[...].to("cpu", torch.int64)
    ends: list[int] = found.tolist()
    if ends[0] != 0:
        raise InputError(f"{name} must begin with 0, got {_some(ends)}")
    if bool((found.diff() < 0).any()):
        raise InputError(
            f"{name} must not decrease, got {_some(ends)}: it holds where documents end, not their lengths"
        )
    if ends[-1] > total:
        what = "query rows" if name == PACKING[0] else "keys"
        raise InputError(f"{name} ends at {ends[-1]}, but there are {total} {what}")
    return ends


def _require_integers(name: str, dtype: torch.dtype) -> None:
    if dtype.is_floating_point or dtype.is_complex or dtype == torch.bool:
        raise InputError(f"{name} must be integers, got {str(dtype).removeprefix('torch.')}")


def _some(numbers: Sequence[int], brackets: str = "[]") -> str:
    words = ", ".join(map(str, numbers[:_LISTED])) + (", …" if len(numbers) > _LISTED else "")
    return f"{brackets[:1]}{words}{brackets[1:]}"
