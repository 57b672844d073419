"""Several heads side by side, so that what is computed of each of them is one operation for all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attn_diag.reference.attention import (
    AttentionHead,
    HeadReference,
    inverse_of,
    lse_of,
    scaled_products,
    softcap_,
)
from attn_diag.reference.masking import Masking
from attn_diag.reference.sums import product_in_parts, sum_in_parts


def stacked(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors of H heads of one shape as one, [H, ...], not to be changed.

    Those that lie one after the other in memory, as slices of one tensor do, are it without a copy.
    """
    first = tensors[0]
    if len(tensors) == 1:
        return first[None]
    apart, start = first.numel() * first.element_size(), first.data_ptr()
    if not apart or tensors[1].data_ptr() != start + apart or not _one_after_the_other(tensors, start, apart):
        return torch.stack(list(tensors))
    return first.as_strided((len(tensors), *first.shape), (first.numel(), *first.stride()))


def _one_after_the_other(tensors: Sequence[Tensor], start: int, apart: int) -> bool:
    """Whether contiguous tensors begin every ``apart`` bytes from ``start`` on, and in one piece of memory."""
    if [t.data_ptr() for t in tensors] != list(range(start, start + apart * len(tensors), apart)):
        return False
    if not all(t.is_contiguous() and not t.requires_grad for t in tensors):
        return False
    if len({t.shape for t in tensors}) > 1 or len({t.dtype for t in tensors}) > 1:
        return False
    # Pieces that were allocated each by itself may happen to be neighbours.
    memory = tensors[0].untyped_storage()
    return start + apart * len(tensors) <= memory.data_ptr() + memory.nbytes()


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
        parts = [scaled_products(head.q[of_head], head.k[keys], head.scale) for head, of_head in some]
        found = parts[0] if len(parts) == 1 else torch.cat(parts)
        softcap_(first, found)
        if first.masking.alibi is None:
            first.apply_mask(found, torch.cat([of_head for _, of_head in some]), keys, least=least)
        else:  # every head has a slope of its own
            for (head, of_head), part in zip(some, torch.split(found, [len(r) for _, r in some]), strict=True):
                head.apply_mask(part, of_head, keys, least=least)
    return found


def out_and_lse(heads: Sequence[AttentionHead], rows: Tensor) -> tuple[Tensor, Tensor]:
    """O and L of some rows ([R] indices) of H heads of one shape, scale and masking, without dropout.

    Returns:
        [H, R, Dv] and [H, R]: as ``reference_rows``, up to the order in which products add.
    """
    first = heads[0]
    keys, least = first.visible_span(rows), int(first.positions[rows].min())
    with torch.no_grad(), torch.autocast(first.q.device.type, enabled=False):
        q, k, v = (stacked([getattr(h, n)[at] for h in heads]) for n, at in (("q", rows), ("k", keys), ("v", keys)))
        scores = scaled_products(q, k, first.scale)
        softcap_(first, scores)
        if first.masking.alibi is None:
            first.apply_mask(scores, rows, keys, least=least)
        else:  # every head has a slope of its own
            for head, own in zip(heads, scores, strict=True):
                head.apply_mask(own, rows, keys, least=least)
        row_max = scores.amax(2) if scores.shape[2] else scores.new_full(scores.shape[:2], -torch.inf)
        masked = row_max == -torch.inf
        probs = scores.sub_(row_max.masked_fill(masked, 0.0)[..., None]).exp_()
        row_sum, sinks = sum_in_parts(probs.flatten(0, 1)).view_as(row_max), None
        if first.sink is not None:
            sinks = row_max.new_tensor([head.sink for head in heads])[:, None]
            row_sum = row_sum + (sinks - row_max).exp()
        out = product_in_parts(probs, v) * inverse_of(row_sum, masked)[..., None]
        return out, lse_of(row_max, row_sum, sinks)


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


def batches(heads: Sequence[AttentionHead]) -> list[list[int]]:
    """Indices of the heads that ``FusedHeads`` takes together: one shape, scale, softcap and masking, sinks or none."""
    found: dict[object, list[int]] = {}
    for i, head in enumerate(heads):
        masking = head.masking
        mask = None if masking.mask is None else (masking.mask.data_ptr(), masking.mask.stride(), masking.mask.dtype)
        positions = None if masking.positions is None else tuple(masking.positions.tolist())
        key = (
            head.q.shape, head.k.shape, head.v.shape, head.do is None, head.scale, head.softcap, head.sink is None,
            masking.causal, masking.window, mask, positions, None if masking.alibi is None else masking.alibi.origin,
        )  # fmt: skip
        found.setdefault(key, []).append(i)
    return list(found.values())
