"""Tensors of several captures read as one, without copying them first."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from attn_diag.captures.sources import TensorSource


@dataclass(frozen=True)
class JoinedSource:
    """Tensors put side by side along ``axis``; no more is read of them than an index picks along it."""

    parts: tuple[TensorSource, ...]
    axis: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of all axes; that of ``axis`` is the sum over the parts."""
        first = tuple(self.parts[0].shape)
        return (*first[: self.axis], sum(self._sizes), *first[self.axis + 1 :])

    @property
    def dtype(self) -> torch.dtype:
        """Type of the stored values."""
        return self.parts[0].dtype

    def __getitem__(self, index: Any) -> Tensor:
        place = index if isinstance(index, tuple) else (index,)
        if Ellipsis not in place and len(place) > self.axis and isinstance(place[self.axis], int):
            part, within = self._find(place[self.axis])
            return part[(*place[: self.axis], within, *place[self.axis + 1 :])]
        if Ellipsis not in place and len(place) > self.axis and _is_plain(place[self.axis]):
            return self._slice(place)
        whole = torch.cat([part[...] for part in self.parts], self.axis)
        return whole if index is Ellipsis else whole[index]

    def _slice(self, place: tuple[Any, ...]) -> Tensor:
        begin, end, _ = place[self.axis].indices(sum(self._sizes))
        found: list[Tensor] = []
        start = 0
        for part, size in zip(self.parts, self._sizes, strict=True):
            inside = slice(max(begin - start, 0), max(min(end - start, size), 0))
            if inside.start < inside.stop or (part is self.parts[-1] and not found):
                found.append(part[(*place[: self.axis], inside, *place[self.axis + 1 :])])
            start += size
        return torch.cat(found, self.axis - sum(isinstance(i, int) for i in place[: self.axis]))

    @property
    def _sizes(self) -> list[int]:
        return [part.shape[self.axis] for part in self.parts]

    def _find(self, position: int) -> tuple[TensorSource, int]:
        total = sum(self._sizes)
        if not -total <= position < total:
            raise IndexError(f"index {position} of axis {self.axis} with {total} places")
        position %= total
        number = next(i for i, end in enumerate(accumulate(self._sizes)) if position < end)
        return self.parts[number], position - sum(self._sizes[:number])


def _is_plain(place: object) -> bool:
    return isinstance(place, slice) and place.step is None


@dataclass(frozen=True)
class RowsSource:
    """Rows of several tensors along ``axis``, in another order."""

    parts: tuple[TensorSource, ...]
    axis: int
    order: Tensor
    """Which row, of the parts' after each other, comes where."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of all axes."""
        first = tuple(self.parts[0].shape)
        return (*first[: self.axis], len(self.order), *first[self.axis + 1 :])

    @property
    def dtype(self) -> torch.dtype:
        """Type of the stored values."""
        return self.parts[0].dtype

    def __getitem__(self, index: Any) -> Tensor:
        place = index if isinstance(index, tuple) else (index,)
        before = place[: self.axis]
        if Ellipsis in before or not all(isinstance(i, (int, slice)) for i in before):
            whole = self._rows((), self.axis)
            return whole[index]
        # Of the axes before the rows' only what is asked for is read.
        rows = self._rows(before, self.axis - sum(isinstance(i, int) for i in before))
        rest = (*(slice(None) for i in before if isinstance(i, slice)), *place[self.axis :])
        return rows[rest] if place[self.axis :] else rows

    def _rows(self, index: tuple[Any, ...], axis: int) -> Tensor:
        parts = [part[index] if index else part[...] for part in self.parts]
        return torch.cat(parts, axis).index_select(axis, self.order)


def equal_bits(one: Tensor, other: Tensor) -> bool:
    """Equal bit for bit; NaN equals NaN."""
    one, other = one.contiguous(), other.contiguous()
    same = one.shape == other.shape and one.dtype == other.dtype
    return same and torch.equal(one.flatten().view(torch.uint8), other.flatten().view(torch.uint8))
