"""Several heads side by side, so that what is computed of each of them is one operation for all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attn_diag.reference.attention import AttentionHead, HeadReference, scaled_products, softcap_
from attn_diag.reference.masking import Masking


def stacked(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors of H heads as one, [H, ...]; of one head its own memory."""
    return tensors[0][None] if len(tensors) == 1 else torch.stack(list(tensors))


def scores_of(heads: Sequence[AttentionHead], rows: Sequence[Tensor], keys: slice, least: int) -> Tensor:
    """S of some rows of each of H heads of one shape, scale and masking, one after the other: [R of all, K].

    -inf where masked.

    Args:
        heads: The heads.
        rows: Indices of each head's, int64.
        keys: The keys.
        least: The smallest position of all the rows.
    """
    first, some = heads[0], [(head, of_head) for head, of_head in zip(heads, rows, strict=True) if len(of_head)]
    with torch.no_grad(), torch.autocast(first.q.device.type, enabled=False):
        parts = [scaled_products(head, of_head, keys) for head, of_head in some]
        found = parts[0] if len(parts) == 1 else torch.cat(parts)
        softcap_(first, found)
        if first.masking.alibi is None:
            first.apply_mask(found, torch.cat([of_head for _, of_head in some]), keys, least=least)
        else:  # every head has a slope of its own
            for (head, of_head), part in zip(some, torch.split(found, [len(r) for _, r in some]), strict=True):
                head.apply_mask(part, of_head, keys, least=least)
    return found


@dataclass(frozen=True)
class Heads:
    """H heads of one shape, scale and masking, and what their references hold: [H, Tq], but where it is said."""

    q: Tensor
    """[H, Tq, D]."""
    k: Tensor
    """[H, Tk, D]."""
    v: Tensor
    """[H, Tk, Dv]."""
    do: Tensor | None
    """[H, Tq, Dv]."""
    sink: Tensor | None
    """Their sinks' logits, [H, 1]."""
    row_max: Tensor
    """m."""
    row_sum: Tensor
    """l."""
    fully_masked: Tensor
    """Rows without a visible key, bool."""
    scale: float
    """alpha."""
    softcap: float | None
    """c; None for none."""
    masking: Masking
    """Which keys a row sees."""
    positions: Tensor
    """position(t) of every query row, int64 [Tq]."""
    dropout: float | None
    """What is kept is multiplied by that; None without dropout."""

    @classmethod
    def of(cls, heads: Sequence[AttentionHead], references: Sequence[HeadReference]) -> Heads:
        """From one head after the other."""
        first = heads[0]
        q, k, v = (stacked([getattr(h, name) for h in heads]) for name in ("q", "k", "v"))
        return cls(
            q=q,
            k=k,
            v=v,
            do=None if first.do is None else stacked([h.do for h in heads if h.do is not None]),
            sink=None if first.sink is None else q.new_tensor([h.sink for h in heads])[:, None],
            row_max=stacked([r.row_max for r in references]),
            row_sum=stacked([r.row_sum for r in references]),
            fully_masked=stacked([r.fully_masked for r in references]),
            scale=first.scale,
            softcap=first.softcap,
            masking=first.masking,
            positions=first.positions,
            dropout=None if first.dropout is None else first.dropout.factor,
        )
