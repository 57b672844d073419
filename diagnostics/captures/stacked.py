"""Packed sequences of several data-parallel ranks, put one after the other: their documents are one batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

import torch

from attn_diag.captures.alibi import SLOPES
from attn_diag.captures.joined import JoinedSource
from attn_diag.captures.sinks import OF_HEADS
from attn_diag.captures.sources import INPUTS, OBSERVED, PACKING, TensorSource
from attn_diag.errors import InputError

_ROWS = ("lse", "delta")
_TOKENS = ("q", "k", "v", "do", "o", "dq", "dk", "dv", "dkv", "dq_pre")


def documents_axis(name: str, layout: str) -> int | None:
    """Along which axis a tensor of packed sequences counts their rows, keys or borders.

    Args:
        name: The tensor's.
        layout: "BHTD" or "BTHD".

    Returns:
        The axis; None where it counts none.
    """
    base = name.rpartition(".")[2]
    if base in _TOKENS:
        return layout.index("T")
    return {**dict.fromkeys((*PACKING, "q_positions"), 0), "x": 1, **dict.fromkeys(_ROWS, 2)}.get(base)


def stacked_documents(members: Sequence[Mapping[str, TensorSource]], layout: str) -> dict[str, TensorSource]:
    """The tensors of ranks that hold other documents, but for those that all ranks share (w_q).

    Args:
        members: Of each rank, by name.
        layout: "BHTD" or "BTHD".

    Returns:
        The tensors by name, with the cu_seqlens of all documents.

    Raises:
        InputError: A rank has padding behind its last document, or a mask or descale factors of its own.
    """
    tensors: dict[str, TensorSource] = {}
    for name in members[0]:
        base, axis = name.rpartition(".")[2], documents_axis(name, layout)
        sources = tuple(member[name] for member in members)
        if base in PACKING:
            along = layout.index("T")
            totals = [member[base[-1]].shape[along] for member in members]
            tensors[name] = _borders(name, sources, totals)
        elif axis is not None:
            tensors[name] = JoinedSource(sources, axis)
        elif base == SLOPES and len(sources[0].shape) == 2:
            tensors[name] = JoinedSource(sources, 0)
        elif base in INPUTS + OBSERVED and base not in ("w_q", SLOPES, *OF_HEADS):
            raise InputError(f"{name} of packed sequences cannot be put together over ranks; inspect each rank's file")
    return tensors


def _borders(name: str, sources: Sequence[TensorSource], totals: Sequence[int]) -> torch.Tensor:
    ends = [source[...].to(torch.int64) for source in sources]
    if any(int(end[-1]) != total for end, total in zip(ends, totals, strict=True)):
        raise InputError(f"{name}: padding behind a rank's last document lies between documents then; leave it out")
    starts = [0, *accumulate(totals)]
    moved = [end[1:] + start for end, start in zip(ends, starts, strict=False)]
    return torch.cat([ends[0][:1], *moved])
