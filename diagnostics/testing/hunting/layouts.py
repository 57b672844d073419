"""How a call's tensors lie in memory: strides that a kernel is given and a test with contiguous tensors never sees.

Memory that belongs to no tensor is NaN, so that a kernel that reads it shows it.
"""

from __future__ import annotations

import torch
from torch import Tensor

TENSORS = ("q", "k", "v", "do")
LAYOUTS = (
    "transposed", "sliced features", "every second row", "packed", "reversed heads", "shared key head", "one dO row",
    "offset by one",
)  # fmt: skip
"""transposed: [B, T, H, D] in memory. sliced features: D of a longer row. every second row: of twice as many. packed:
q, k and v one tensor's parts. reversed heads: the heads' stride is that of [H, B, T, D]. shared key head, one dO row:
expanded, with stride 0. offset by one: the first number is no multiple of 16 bytes away from an aligned address."""

_SAME_HEADS, _SAME_ROWS = "shared key head", "one dO row"


def parse(layout: str) -> tuple[str, tuple[str, ...]]:
    """The name, and the tensors that lie so."""
    name, _, only = layout.partition(" of ")
    if only:
        return name, (only,)
    return name, {_SAME_HEADS: ("k", "v"), _SAME_ROWS: ("do",)}.get(name, TENSORS)


def restricted(layout: str) -> list[str]:
    """The same for one tensor alone, each in turn."""
    name, tensors = parse(layout)
    if name in ("contiguous", "packed") or len(tensors) == 1:
        return []
    return [f"{name} of {tensor}" for tensor in tensors]


def fitted(layout: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The values that tensors must have for a layout that shows some of them more than once."""
    name, which = parse(layout)
    if name == _SAME_HEADS:
        return tensors | {n: tensors[n][:, :1].expand_as(tensors[n]).contiguous() for n in which}
    if name == _SAME_ROWS:
        return tensors | {n: tensors[n][:, :, :1].expand_as(tensors[n]).contiguous() for n in which}
    return tensors


def arranged(layout: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same values [B, H, T, D] with other strides, on the same device.

    Args:
        layout: As ``Variant.layout``.
        tensors: q, k, v and perhaps do, contiguous.
    """
    name, which = parse(layout)
    if name == "contiguous":
        return tensors
    if name == "packed":
        return tensors | _packed({n: tensors[n] for n in ("q", "k", "v")})
    return tensors | {n: _lying(name, tensors[n]) for n in which if n in tensors}


def _packed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """[B, T, Hq + 2 Hk, D] in one piece, as a projection returns it; features where lengths differ."""
    if len({x.shape[2] for x in tensors.values()}) == 1:
        whole = torch.cat([x.transpose(1, 2) for x in tensors.values()], 2)
        parts = whole.split([x.shape[1] for x in tensors.values()], 2)
        return {n: part.transpose(1, 2) for n, part in zip(tensors, parts, strict=True)}
    key, value = tensors["k"], tensors["v"]
    whole = torch.cat([key, value], 3)
    parts = whole.split([key.shape[3], value.shape[3]], 3)
    return {"q": tensors["q"], "k": parts[0], "v": parts[1]}


def _lying(name: str, x: Tensor) -> Tensor:
    b, h, t, d = x.shape
    if name == "transposed":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if name == "reversed heads":
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    if name == _SAME_HEADS:
        return x[:, :1].contiguous().expand(b, h, t, d)
    if name == _SAME_ROWS:
        return x[:, :, :1].contiguous().expand(b, h, t, d)
    if name == "sliced features":
        whole = x.new_full((b, h, t, d + 8), torch.nan)
        part = whole[..., :d]
    elif name == "every second row":
        whole = x.new_full((b, h, 2 * t, d), torch.nan)
        part = whole[:, :, ::2]
    elif name == "offset by one":
        whole = x.new_full((x.numel() + 8,), torch.nan)
        part = whole[1 : x.numel() + 1].view(b, h, t, d)
    else:
        raise ValueError(f"no layout {name!r}")
    part.copy_(x)
    return part
