"""What a planted defect is, and the small tools that defects are made of."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from verdicts.inputs import Inputs
from verdicts.kernels import PLAIN, Hook, Kernel, Outputs, PlanHook, Seen, attend, with_settings

Region = Callable[[Inputs], tuple[int, int]]
"""First and last row, or key, of a region of a call."""
Extent = Literal["everywhere", "heads", "tile", "rows", "keys", "features", "row", "element"]
Numbers = Callable[[Inputs], dict[str, object]]


def _nothing(_: Inputs) -> dict[str, object]:
    return {}


@dataclass(frozen=True, eq=False)
class Defect:
    """One thing that a kernel does wrong, or more coarsely than it should."""

    name: str
    where: Literal["forward", "backward"]
    """Where it begins; a wrong scale or mask that both passes share begins in the forward."""
    quantities: tuple[str, ...]
    """What it makes wrong by itself, of ``QUANTITIES``."""
    hooks: Mapping[str, Hook] = field(default_factory=dict)
    site: str = ""
    """The step that rounds too coarsely, in words; empty for wrong mathematics."""
    pattern: str = ""
    """How the mathematics is wrong, in words; empty for coarse rounding."""
    numbers: Numbers = _nothing
    """What a report may name, for a call: rows, keys, features, heads (first and last), factor, format, …"""
    extent: Extent = "everywhere"
    plans: Mapping[str, PlanHook] = field(default_factory=dict)
    reads: Callable[[Inputs], Inputs] | None = None
    """What both passes take the call for."""
    kernel: Mapping[str, object] = field(default_factory=dict)
    """Choices of the schedule without which the defect cannot be."""
    needs: frozenset[str] = frozenset()
    """``Inputs.features`` without which the defect cannot be."""
    source: str = ""
    """A thread about the like of it in a released kernel."""

    @property
    def carried(self) -> tuple[str, ...]:
        """What changes only because it is computed from a wrong O or LSE."""
        after = set()
        if self.where == "forward":
            after |= {"dq", "dk"} if "o" in self.quantities else set()
            after |= {"dq", "dk", "dv"} if "lse" in self.quantities else set()
        return tuple(sorted(after - set(self.quantities)))

    @property
    def culprit(self) -> str:
        """The site or the pattern."""
        return self.site or self.pattern

    def schedule(self, kernel: Kernel) -> Kernel:
        """The kernel with the choices that the defect needs."""
        return with_settings(kernel, self.kernel)

    def applies(self, inputs: Inputs) -> bool:
        return self.needs <= inputs.features

    def run(self, inputs: Inputs, kernel: Kernel = PLAIN) -> Outputs:
        """What the defective kernel returns."""
        read = inputs if self.reads is None else self.reads(inputs)
        return attend(read, self.schedule(kernel), self.hooks, self.plans)

    def healthy(self, inputs: Inputs, kernel: Kernel = PLAIN) -> Outputs:
        """What the same schedule returns without the defect."""
        return attend(inputs, self.schedule(kernel))


def low(x: Tensor, s: Seen) -> Tensor:
    """Rounded to the inputs' format."""
    return s.cast(x)


def stored(f: Callable[[Tensor], Tensor]) -> Hook:
    """A hook that needs nothing but the value."""
    return lambda x, _: f(x)


def last_tile(x: Inputs) -> tuple[int, int]:
    """Rows of the last tile of 128."""
    t = x.q.shape[2]
    return (t - 1) // 128 * 128, t - 1


def second_tile(_: Inputs) -> tuple[int, int]:
    return 128, 255


def one_row(row: int) -> Region:
    return lambda _: (row, row)


def rows(region: Region) -> Numbers:
    return lambda x: {"rows": region(x)}


def on_rows(hook: Hook, region: Region) -> Hook:
    """The hook, at the rows of a region; for values that are cut into tiles, [B, H, A, M, …]."""

    def act(x: Tensor, s: Seen) -> Tensor:
        first, last = region(s.inputs)
        chosen = (s.rows >= first) & (s.rows <= last)
        return torch.where(chosen.reshape(chosen.shape + (1,) * (x.ndim - 4)), hook(x, s), x)

    return act


def edit(change: Callable[[Tensor, Inputs], None]) -> Hook:
    """A hook that changes a copy in place."""

    def act(x: Tensor, s: Seen) -> Tensor:
        y = x.clone()
        change(y, s.inputs)
        return y

    return act


def fill_rows(region: Region, value: float) -> Hook:
    """[B, H, T, …] with one value in the rows of a region."""

    def change(y: Tensor, x: Inputs) -> None:
        first, last = region(x)
        y[:, :, first : last + 1] = value

    return edit(change)


def fill_features(first: int, value: float) -> Hook:
    """[B, H, T, D] with one value in all features from ``first`` on."""

    def change(y: Tensor, _: Inputs) -> None:
        y[..., first:] = value

    return edit(change)


def shift_rows(region: Region, by: int) -> Hook:
    """[B, H, T, …] whose rows in a region are those that lie ``by`` rows before; rows before the first wrap around."""

    def change(y: Tensor, x: Inputs) -> None:
        first, last = region(x)
        source = torch.arange(first - by, last - by + 1, device=y.device) % y.shape[2]
        y[:, :, first : last + 1] = y[:, :, source]

    return edit(change)


def swap_heads(y: Tensor, _: Inputs) -> None:
    """Heads 0 and 1 exchanged, in place."""
    y[:, :2] = y[:, :2].flip(1)


def every_row(x: Inputs) -> tuple[int, int]:
    return 0, x.q.shape[2] - 1


def row_maxima(s: Seen, scores: str, mask: str) -> Tensor:
    """Maxima of all rows' visible scores [B, H, Tq], from the values of the hooks so named."""
    tile = s[scores].masked_fill(~s[mask], -math.inf).amax(-1)
    b, h = tile.shape[:2]
    count = int(s.pair_rows.max()) + 1
    index = s.pair_rows.flatten().expand(b, h, -1)
    highest = tile.new_full((b, h, max(count, s.inputs.q.shape[2])), -math.inf)
    return highest.scatter_reduce(2, index, tile.flatten(2), "amax")[:, :, : s.inputs.q.shape[2]]
