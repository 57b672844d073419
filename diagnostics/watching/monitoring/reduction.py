"""The sums of all ranks of a data-parallel job, added up: three collectives a check, whatever a rank has seen.

All ranks must run a monitor with the same options. Which layers there are is agreed on once, at the first check (an
all-gather of their names); after that every rank sends tensors of that one layout, zeros for a layer that it missed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from attn_diag.watching.monitoring.figures import MAXIMA, NORMS, SUMS, HeadSums


@dataclass(frozen=True, order=True)
class LayerKey:
    """A layer as the ranks name it to each other, with its shapes."""

    layer: int
    module: str
    heads: int
    dim: int
    columns: int
    """Columns of its sketches; 0 without any."""

    @classmethod
    def of(cls, layer: int, module: str | None, sums: HeadSums) -> LayerKey:
        """Name a layer by its number, its module and the shapes of its sums."""
        dim, columns = (0, 0) if sums.sketches is None else sums.sketches.shape[2:]
        return cls(layer, "" if module is None else module, len(sums.sums), dim, columns)


def device_of(sums: Mapping[Any, HeadSums]) -> torch.device:
    """Where a rank's sums are; where it has none, where collectives want them."""
    for one in sums.values():
        return one.sums.device
    if torch.cuda.is_available() and dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


class Reduction:
    """Adds up the sums of the ranks of ``group`` (None: all)."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self._layout: list[LayerKey] | None = None
        self.unknown: set[LayerKey] = set()

    def reduce(self, own: Mapping[LayerKey, HeadSums], device: torch.device) -> dict[LayerKey, HeadSums]:
        """Add up every layer that any rank has seen, over all ranks. All ranks must call this."""
        if self._layout is None:
            gathered: list[list[LayerKey] | None] = [None] * dist.get_world_size(self._group)
            dist.all_gather_object(gathered, sorted(own), group=self._group)
            self._layout = sorted({key for keys in gathered if keys for key in keys})
        self.unknown |= set(own) - set(self._layout)
        if not self._layout:
            self._layout = None
            return {}
        known = [own.get(key) or _nothing(key, device) for key in self._layout]
        sums = torch.cat([k.sums.to(device, non_blocking=True) for k in known])
        largest = torch.cat([k.maxima.to(device, non_blocking=True) for k in known])
        largest = torch.where(largest.isnan(), -torch.inf, largest)
        flat = [k.sketches.to(device, non_blocking=True).reshape(-1) for k in known if k.sketches is not None]
        sketches = torch.cat([torch.zeros(0, device=device), *flat])
        dist.all_reduce(sums, dist.ReduceOp.SUM, self._group)
        dist.all_reduce(largest, dist.ReduceOp.MAX, self._group)
        dist.all_reduce(sketches, dist.ReduceOp.SUM, self._group)
        return self._unpack(sums, torch.where(largest == -torch.inf, torch.nan, largest), sketches)

    def _unpack(self, sums: Tensor, largest: Tensor, flat: Tensor) -> dict[LayerKey, HeadSums]:
        assert self._layout is not None
        found, head, at = {}, 0, 0
        for key in self._layout:
            rows = slice(head, head + key.heads)
            head = rows.stop
            sketches = None
            norms = torch.full((key.heads, len(NORMS)), torch.nan, dtype=sums.dtype, device=sums.device)
            if key.columns:
                shape = _sketch_shape(key)
                sketches = flat[at : at + math.prod(shape)].view(shape)
                at += math.prod(shape)
                norms = sketches.double().square_().sum((2, 3)).T
            found[key] = HeadSums(sums[rows], largest[rows], norms, sketches)
        return found


def _sketch_shape(key: LayerKey) -> tuple[int, int, int, int]:
    return len(NORMS), key.heads, key.dim, key.columns


def _nothing(key: LayerKey, device: torch.device) -> HeadSums:
    """The sums of a layer that this rank has missed."""
    sums = torch.zeros(key.heads, len(SUMS), dtype=torch.float64, device=device)
    largest, norms = (torch.full_like(sums[:, :1], torch.nan).repeat(1, len(names)) for names in (MAXIMA, NORMS))
    return HeadSums(sums, largest, norms, torch.zeros(_sketch_shape(key), device=device))
