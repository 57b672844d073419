"""What the kernels of ``fused`` are given, and how they are launched: on one GPU, or dealt out over several.

Every program of a kernel computes rows of its own: programs that are dealt out give the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attn_diag.reference.attention import AttentionHead
from attn_diag.reference.fused_products import MOST_FEATURES, TileWeight
from attn_diag.reference.heads import stacked

if TYPE_CHECKING:
    from attn_diag.reference.triton_tiles import Tiling

# A product of so many scores takes some 10 ms at D = 128: launches of fewer are not worth the copies. Not tuned.
_WORTH_DEALING = 2**31
# Of fewer scores, of all heads together, products take less time than what surrounds them.
WORTH_NARROW = 2**27
# CUDA's limit of a grid's second dimension.
_MOST_BLOCKS = 65535
# fp32 holds products of numbers whose largest are of these sizes.
_SMALLEST, _LARGEST = 2.0**-50, 2.0**50
_DEVICES: ContextVar[tuple[torch.device, ...]] = ContextVar("devices", default=())


@contextmanager
def dealt_over(devices: Sequence[torch.device]) -> Iterator[None]:
    """Deal long launches of ``FusedHeads`` out over these devices, as long as the block runs.

    All else stays on the device of the heads, which takes its share too. Each other one holds q, k, v, dO and what a
    launch makes.

    Args:
        devices: GPUs of one kind, with their numbers; the heads' own may be among them. Empty: nothing is dealt out.
    """
    token = _DEVICES.set(tuple(devices))
    try:
        yield
    finally:
        _DEVICES.reset(token)


@dataclass(frozen=True)
class Filled:
    """What a launch fills."""

    tensor: Tensor
    """All of it."""
    dim: int
    """Its dimension of rows."""


@dataclass(frozen=True)
class LaunchGrid:
    """Rows that the programs of a launch divide among themselves in blocks, and the rest of its grid."""

    rows: int
    """How many rows."""
    block: int
    """Rows of a block."""
    heads: int
    """How many heads."""
    parts: int
    """Into how many parts the features of a row are divided."""
    last_first: bool = True
    """Whether the last block begins, where the last rows see most."""

    def turn(self, number: int, of: int) -> range:
        """The blocks of one of several devices."""
        count = -(-self.rows // self.block)
        return range(count - 1 - number, -1, -of) if self.last_first else range(number, count, of)

    def rows_of(self, blocks: range, device: torch.device) -> Tensor:
        """The rows of these blocks, int64."""
        starts = torch.arange(blocks.start, blocks.stop, blocks.step, device=device) * self.block
        rows = (starts[:, None] + torch.arange(self.block, device=device)).flatten()
        return rows[rows < self.rows]


class FusedInputs:
    """Heads of one shape, scale and masking (``batches``), as the kernels take them."""

    def __init__(self, heads: Sequence[AttentionHead]) -> None:
        """Put the heads side by side."""
        self.heads, self._ahead = list(heads), False
        self.head = self.heads[0]
        """The first, for all that they share."""
        # Query heads that share a key head share its tensors.
        keys = [tuple((t.data_ptr(), t.stride()) for t in (h.k, h.v)) for h in self.heads]
        owners = dict(zip(keys, self.heads, strict=True))
        numbers = {key: i for i, key in enumerate(owners)}
        self._owners = self._integers([numbers[key] for key in keys])
        self.q = stacked([h.q for h in self.heads]).contiguous()
        self.k, self.v = (stacked([getattr(h, name) for h in owners.values()]).contiguous() for name in ("k", "v"))
        do = [h.do for h in self.heads if h.do is not None]
        self.do = stacked(do).contiguous() if do else None
        slopes = [0.0 if h.masking.alibi is None else h.masking.alibi.slope for h in self.heads]
        # As a tensor: Triton hands on a Python float as fp32.
        self._numbers = self.q.new_tensor([self.head.scale, self.head.softcap or 1.0, *slopes])
        self._positions = self.head.positions.to(torch.int32)
        sinks = [h.sink for h in self.heads]
        self.sinks = None if sinks[0] is None else self.q.new_tensor(sinks)[:, None]
        """s of every head, [H, 1]; None without."""
        self._copies: dict[torch.device, dict[int, Tensor]] = {}

    @cached_property
    def narrow(self) -> list[Tensor] | None:
        """q, k, v and dO, if any, in BF16, where that holds every number of them, and many heads or long ones are worth
        kernels that take it; else None."""
        (count, length, width), (_, k_length, value_width) = self.q.shape, self.v.shape
        if count * length * k_length < WORTH_NARROW or max(width, value_width) > MOST_FEATURES:
            return None
        given = [t for t in (self.q, self.k, self.v, self.do) if t is not None]
        narrow = [t.bfloat16() for t in given]
        sizes = torch.stack([torch.linalg.vector_norm(t, torch.inf) for t in narrow])
        same = torch.stack([(one == other).all() for one, other in zip(given, narrow, strict=True)])
        return narrow if ((sizes > _SMALLEST) & (sizes < _LARGEST) & same).all() else None

    @cached_property
    def _reach(self) -> tuple[int, int]:
        left, right = self.head.masking.reach
        return left or 0, right or 0

    @cached_property
    def _mask(self) -> tuple[Tensor, int, int]:
        """The mask and its strides; any tensor without one."""
        mask = self.head.masking.mask
        if mask is None:
            return self.q, 0, 0
        # What is expanded stays so: it would fill T x T.
        repeats = [stride == 0 for stride in mask.stride()]
        mask = mask[:1] if repeats[0] else mask
        mask = mask[:, :1] if repeats[1] else mask
        if mask.dtype == torch.bool:
            mask = torch.where(mask, 0.0, -torch.inf)
        elif mask.dtype.itemsize < 4:
            mask = mask.float()  # exact
        return mask, 0 if repeats[0] else mask.stride(0), 0 if repeats[1] else mask.stride(1)

    def _tiling(
        self, kernel: str, x_width: int, *weights: TileWeight, details: bool = False, of_keys: bool = False
    ) -> Tiling:
        from attn_diag.reference.triton_tiles import tiling_of

        masking = self.head.masking
        left, right = masking.reach
        widths = self.q.shape[2], self.v.shape[2], x_width
        chosen = tiling_of(kernel, *widths, of_keys=of_keys, count=len(weights))
        return replace(
            chosen,
            left=left is not None,
            right=right is not None,
            scattered=masking.positions is not None,
            softcap=self.head.softcap is not None,
            mask=masking.mask is not None,
            alibi="none" if masking.alibi is None else masking.alibi.origin,
            details=details,
            weights=weights,
        )

    def _integers(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.head.q.device)

    def _empty_integers(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=self.q.device)

    def _launch(
        self, kernel: object, grid: LaunchGrid, tiling: Tiling, inputs: Sequence[Tensor | int], made: Sequence[Filled],
        numbers: Sequence[int],
    ) -> None:  # fmt: skip
        """Launch a kernel, which takes these in this order, dealt out where that is worth it."""
        own, deals = self.q.device, grid.heads * grid.rows * max(self.q.shape[1], self.k.shape[1]) >= _WORTH_DEALING
        others = [device for device in _DEVICES.get() if device != own] if deals and not self._ahead else []
        others = others[: max(0, len(grid.turn(0, 1)) - 1)]
        shares = [grid.turn(number, len(others) + 1) for number in range(len(others) + 1)]
        outs = [one.tensor for one in made]
        returned = []
        for device, share in zip(others, shares[1:], strict=True):
            given = [self._copy(one, device) if isinstance(one, Tensor) else one for one in inputs]
            filled = {id(out): torch.empty_like(out, device=device) for out in outs}
            self._run(kernel, grid, share, tiling, device, *given, *(filled[id(out)] for out in outs), *numbers)
            returned.append((device, share, filled))
        self._run(kernel, grid, shares[0], tiling, own, *inputs, *outs, *numbers)
        for device, share, filled in returned:
            here, there = (grid.rows_of(share, on) for on in (own, device))
            for out, dim in {id(one.tensor): (one.tensor, one.dim) for one in made}.values():
                out.index_copy_(dim, here, filled[id(out)].index_select(dim, there).to(own))

    def _run(
        self, kernel: object, grid: LaunchGrid, blocks: range, tiling: Tiling, device: torch.device, *arguments: object
    ) -> None:
        """No fused multiply-adds but those of products: sums are what the bounds take them for."""
        options = {"num_warps": tiling.warps, "num_stages": tiling.stages, "enable_fp_fusion": False}
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            for start in range(0, len(blocks), _MOST_BLOCKS):
                some = blocks[start : start + _MOST_BLOCKS]
                # Blocks of all heads that take as long begin together: the longest first.
                size, given = (grid.heads, len(some), grid.parts), (*arguments, some.start, some.step)
                if self._ahead:
                    kernel.warmup(*given, grid=size, G=tiling, **options)  # type: ignore[attr-defined]
                else:
                    kernel[size](*given, G=tiling, **options)  # type: ignore[index]

    def _copy(self, tensor: Tensor, device: torch.device) -> Tensor:
        """The tensor on another device; what every launch takes is copied once."""
        kept = self.q, self.k, self.v, self.do, self._positions, self._owners, self._numbers, self._mask[0]
        number = next((i for i, one in enumerate(kept) if one is tensor), None)
        if number is None:
            return tensor.to(device)
        copies = self._copies.setdefault(device, {})
        if number not in copies:
            copies[number] = tensor.to(device)
        return copies[number]
