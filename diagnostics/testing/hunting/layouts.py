"""How a call's tensors lie in memory: strides that a kernel is given and a test with contiguous tensors never sees.

Memory beside a tensor is NaN where it can be, so that a kernel that reads it shows it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attn_diag.testing.invariance import layouts
from attn_diag.testing.target import Place

TENSORS = ("q", "k", "v", "do")


def _sliced(x: Tensor) -> Tensor:
    memory = x.new_full((*x.shape[:3], x.shape[3] + 8), torch.nan)
    memory[..., : x.shape[3]] = x
    return memory[..., : x.shape[3]]


def _every_second_row(x: Tensor) -> Tensor:
    memory = x.new_full((*x.shape[:2], 2 * x.shape[2], x.shape[3]), torch.nan)
    memory[:, :, ::2] = x
    return memory[:, :, ::2]


def _heads_first(x: Tensor) -> Tensor:
    return x.transpose(0, 1).contiguous().transpose(0, 1)


def _first_head(x: Tensor) -> Tensor:
    return x[:, :1].contiguous().expand(x.shape)


def _first_row(x: Tensor) -> Tensor:
    return x[:, :, :1].contiguous().expand(x.shape)


LAYOUTS: dict[str, tuple[Place, tuple[str, ...]]] = {
    "transposed": (layouts.rows_first, TENSORS),
    "sliced features": (_sliced, TENSORS),
    "every second row": (_every_second_row, TENSORS),
    "packed": (layouts.packed, ("q", "k", "v")),
    "heads first": (_heads_first, TENSORS),
    "shared key head": (_first_head, ("k", "v")),
    "one dO row": (_first_row, ("do",)),
    "off alignment": (layouts.shifted, TENSORS),
}
"""By ``Variant.layout``: how it is made, and of which tensors. transposed: [B, T, H, D] in memory. packed: the middle
of [B, T, 3, H, D]. heads first: [H, B, T, D]. shared key head, one dO row: expanded, with stride 0."""


def parse(layout: str) -> tuple[str, tuple[str, ...]]:
    """The name, and the tensors that lie so: of "transposed of k" k alone."""
    name, _, only = layout.partition(" of ")
    return name, ((only,) if only else LAYOUTS[name][1] if name in LAYOUTS else ())


def restricted(layout: str) -> list[str]:
    """The same for one tensor alone, each in turn."""
    name, tensors = parse(layout)
    return [f"{name} of {tensor}" for tensor in tensors] if len(tensors) > 1 else []


def fitted(layout: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The values that tensors must have for a layout that shows some of them more than once, contiguous."""
    name, which = parse(layout)
    if name in ("shared key head", "one dO row"):
        return tensors | {n: LAYOUTS[name][0](tensors[n]).contiguous() for n in which}
    return tensors


def placed(layout: str, tensor: str, x: Tensor) -> Tensor:
    """The same values [B, H, T, D] with other strides, on the same device.

    Args:
        layout: As ``Variant.layout``.
        tensor: q, k, v or do.
        x: It, contiguous.
    """
    name, which = parse(layout)
    return LAYOUTS[name][0](x) if tensor in which else x
