"""A cache in pages as ``attention`` takes it: its sequences are documents of query rows, whose keys lie in pages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from attn_diag.kernels.arguments import checked_borders
from attn_diag.kernels.backend import BackendError
from attn_diag.kernels.geometry import Level


@dataclass(frozen=True)
class Pages:
    """q, k and v as the kernels take them, and where each sequence's keys lie."""

    q: Tensor
    """[1, Hq, rows of all sequences, D]."""
    k: Tensor
    """[pages, Hk, page size, D]."""
    v: Tensor
    """[pages, Hk, page size, Dv]."""
    borders: Tensor
    """Of the sequences' rows, int32 [B + 1]."""
    table: Tensor
    """int32 [B, pages of a sequence], contiguous."""
    lengths: Tensor
    """Keys of each sequence, int32 [B], contiguous."""
    layout: str
    """Of the given q: "BHTD" or "BTHD"; where it was packed "THD", "1HTD" or "1THD"."""

    @staticmethod
    def of(
        q: Tensor, k: Tensor, v: Tensor, layout: str, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None,
        page_table: Tensor | None, cache_seqlens: Tensor | None, level: Level,
    ) -> Pages:  # fmt: skip
        """What ``attention`` was given, checked: ValueError, TypeError or BackendError; see there."""
        if cache_seqlens is None:
            raise ValueError("page_table needs cache_seqlens: how many keys each sequence has, [B]")
        if cu_seqlens_k is not None:
            raise ValueError("cu_seqlens_k and cache_seqlens both say how many keys there are: give one of them")
        if level in ("tiles", "full"):
            raise ValueError(
                f"instrument={level!r} is not there for a cache in pages: use 'rows', or give contiguous k and v"
            )
        if torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v)):
            raise ValueError(
                "a cache in pages has no gradients here: call under torch.no_grad(), or give contiguous k and v"
            )
        packed = cu_seqlens_q is not None
        if k.ndim != 4 or v.ndim != 4 or q.ndim not in ((3, 4) if packed else (4,)):
            raise ValueError(
                "a cache needs q [B, Hq, Tq, D] (or packed), and k and v [pages, page size, Hk, D], or without a "
                f"page_table as q: got q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
            )
        if page_table is not None or layout == "BTHD":
            k, v = k.transpose(1, 2), v.transpose(1, 2)
        q = q.transpose(1, 2) if layout == "BTHD" and q.ndim == 4 else q
        if cu_seqlens_q is None:
            count, rows = q.shape[0], q.shape[2]
            borders = torch.arange(count + 1, dtype=torch.int32, device=q.device) * rows
            q = q.transpose(0, 1).flatten(1, 2)[None]
        else:
            layout = "THD" if q.ndim == 3 else f"1{layout[1:]}"
            q = q.transpose(0, 1)[None] if q.ndim == 3 else q
            borders, _ = checked_borders(cu_seqlens_q, cu_seqlens_q, q, q)
            count = len(borders) - 1
        if page_table is None:
            if len(k) != count:
                raise ValueError(f"without a page_table k and v need one item a sequence, {count}, got {len(k)}")
            page_table = torch.arange(count, dtype=torch.int32, device=q.device)[:, None]
        _check({"page_table": page_table, "cache_seqlens": cache_seqlens}, count, q)
        if q.device.type == "cpu" and not torch.compiler.is_compiling():
            _check_numbers(page_table, cache_seqlens, k)
        table, lengths = (t.int().contiguous() for t in (page_table, cache_seqlens))
        return Pages(q, k, v, borders, table, lengths, layout)

    def restored(self, o: Tensor) -> Tensor:
        """O [1, Hq, rows, Dv] in the layout of the q that was given."""
        if self.layout[0] != "B":
            return o[0].transpose(0, 1) if self.layout == "THD" else o.transpose(1, 2) if self.layout == "1THD" else o
        count, (_, heads, rows, dim) = len(self.lengths), o.shape
        apart = o[0].view(heads, count, rows // count, dim)
        return apart.transpose(0, 1) if self.layout == "BHTD" else apart.permute(1, 2, 0, 3)


def _check(given: Mapping[str, Tensor], count: int, q: Tensor) -> None:
    """Raise unless there is a row of the table, and a length, for each of ``count`` sequences."""
    for (name, tensor), axes in zip(given.items(), (2, 1), strict=True):
        if tensor.ndim != axes or len(tensor) != count or not tensor.numel():
            shape = f"[{count}, pages of a sequence]" if axes == 2 else f"[{count}], one length a sequence"
            raise ValueError(f"{name} must have shape {shape}, got {list(tensor.shape)}")
        if tensor.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"{name} must be int32 (or int64), got {tensor.dtype}")
        if tensor.device != q.device:
            raise BackendError(f"{name} must be where q is, on {q.device}, got {tensor.device}")


def _check_numbers(table: Tensor, lengths: Tensor, k: Tensor) -> None:
    """Raise ValueError where a sequence's keys lie in no page."""
    pages, _, size, _ = k.shape
    room = table.shape[1] * size
    if bool(((lengths < 0) | (lengths > room)).any()):
        raise ValueError(
            f"cache_seqlens must be 0 to {room}, the keys that page_table has room for: {lengths.tolist()}"
        )
    used = torch.arange(table.shape[1])[None] * size < lengths[:, None]
    if bool((used & ((table < 0) | (table >= pages))).any()):
        raise ValueError(f"page_table must name pages from 0 to {pages - 1} for all keys, got {table.tolist()}")
