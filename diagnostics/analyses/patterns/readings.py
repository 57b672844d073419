"""The same head under another mask, scale, softcap, or with tensors of another head."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import get_args

import torch

from attn_diag.analyses.patterns.evidence import Evidence
from attn_diag.head.usual_readings import BEFORE_THE_SCALE, USUAL_SOFTCAPS, usual_windows
from attn_diag.reference import AttentionHead, Masking
from attn_diag.reference.masking import Causal, adds, hides

_TILES = (16, 32, 64, 128, 256)
_MOST_HEADS = 16


@dataclass(frozen=True)
class Reading:
    """Another head that a kernel may have computed."""

    kind: str
    """mask, softcap, shift, head, documents."""
    words: str
    """What follows "are what … gives"."""
    head: AttentionHead
    """The head."""


def _as_band(head: AttentionHead) -> Masking:
    """The masking, said as causality and a window where its mask is no more than that (transformers' often is)."""
    masking, mask = head.masking, head.masking.mask
    if mask is None or masking.causal != "none" or masking.window is not None or adds(mask):
        return masking
    seen = ~hides(mask)
    distance = torch.arange(len(head.k), device=mask.device) - head.positions[:, None]
    if not seen.any():
        return masking
    first, last = int(distance[seen].min()), int(distance[seen].max())
    if first > 0 or last < 0 or not torch.equal(seen, (distance >= first) & (distance <= last)):
        return masking
    causal: Causal = "none" if last else "top-left" if len(head.q) == len(head.k) else "bottom-right"
    left = -first if first > int(distance.min()) else -1
    right = last if last < int(distance.max()) else -1
    window = (left, right) if left >= 0 or right > 0 else None
    return replace(masking, causal=causal, window=window, mask=None)


def other_masks(head: AttentionHead) -> Iterator[Reading]:
    """Other causal alignments, borders one key off or on a tile's, other windows, no mask."""
    masking = _as_band(head)

    def reading(words: str, changed: Masking) -> Reading:
        return Reading("mask", words, replace(head, masking=changed))

    unequal = len(head.q) != len(head.k) and masking.positions is None
    if unequal and masking.window is not None and masking.causal == "none":
        first = torch.arange(len(head.q), device=head.k.device)
        yield reading("a window counted from the first key (top-left)", replace(masking, positions=first))
    causals: list[Causal] = [c for c in get_args(Causal) if c != masking.causal]
    for causal in causals:
        # Without causality the alignment places a window alone.
        square = len(head.q) == len(head.k) and masking.positions is None
        if square and causal == "bottom-right" and masking.causal in ("top-left", "none"):
            continue
        if causal == "none" or masking.positions is None:
            words = "attention without the causal mask" if causal == "none" else f"a causal mask ({causal})"
            yield reading(words, replace(masking, causal=causal))
    left, right = masking.reach
    if masking.window is not None:
        yield reading("attention without the window", replace(masking, window=None))
        for side in (0, 1):
            if min(masking.window) >= 0 and masking.causal == "none":
                open_side = (-1, masking.window[1]) if side == 0 else (masking.window[0], -1)
                words = f"a window without its {('left', 'right')[side]} border"
                yield reading(words, replace(masking, window=open_side))
            for by in (-1, 1):
                window = list(masking.window)
                if window[side] < 0 or window[side] + by < 0 or (side == 1 and masking.causal != "none"):
                    continue
                window[side] += by
                yield reading(f"the window {window[0]},{window[1]}", replace(masking, window=(window[0], window[1])))
        for usual in usual_windows(len(head.k)):
            if abs(usual - masking.window[0]) > 1:
                other = (usual, min(masking.window[1], usual))
                yield reading(f"the window {other[0]},{other[1]}", replace(masking, window=other))
    # After the windows: rows whose own key weighs nothing show both.
    if left is not None or right is not None:
        positions = head.positions
        border = "causal border" if masking.window is None else "mask"
        yield reading(f"a {border} one key further on", replace(masking, positions=positions + 1))
        yield reading(f"a {border} one key earlier", replace(masking, positions=positions - 1))
        if masking.causal != "none":
            for size in _TILES:
                end = (positions // size + 1) * size - 1
                if size < len(head.k):
                    words = f"a diagonal tile of {size} keys without its causal mask"
                    yield reading(words, replace(masking, positions=end))
    masking = head.masking
    if masking.mask is not None:
        yield reading("attention without the mask", replace(masking, mask=None))
        if masking.mask.dtype == torch.bool:
            yield reading("the mask with True and False exchanged", replace(masking, mask=~masking.mask))
        if masking.mask.shape[0] == masking.mask.shape[1]:
            yield reading("the mask transposed", replace(masking, mask=masking.mask.T))
        yield reading("the mask with its keys in reverse", replace(masking, mask=masking.mask.flip(1)))
        if masking.mask.is_floating_point():
            yield reading("the mask multiplied by the scale", replace(masking, mask=masking.mask * head.scale))
            yield reading("the mask of the wrong sign", replace(masking, mask=_negative(masking.mask)))


def unstated_windows(head: AttentionHead) -> Iterator[Reading]:
    """Windows that models use, of a causal head without one."""
    masking = _as_band(head)
    for left in usual_windows(len(head.k)) if masking.causal != "none" and masking.window is None else ():
        yield Reading("mask", f"the window {left},0", replace(head, masking=replace(masking, window=(left, 0))))


def _negative(mask: torch.Tensor) -> torch.Tensor:
    return torch.where(mask.isinf(), mask, -mask)


def shifted_keys(head: AttentionHead) -> Iterator[Reading]:
    """The head with K or V one key off, or a cache's last key a copy of the one before."""
    for by, way in ((1, "before"), (-1, "further on")):
        yield Reading("shift", f"K of the key {way}", replace(head, k=head.k.roll(by, 0)))
        yield Reading("shift", f"V of the key {way}", replace(head, v=head.v.roll(by, 0)))
    if 1 < len(head.k) > len(head.q):  # a cache
        stale = (torch.cat([t[:-1], t[-2:-1]]) for t in (head.k, head.v))
        yield Reading(
            "shift", "a cache whose last key is the one before it", replace(head, k=next(stale), v=next(stale))
        )


def first_features(head: AttentionHead) -> Iterator[Reading]:
    """The head with scores of its first features alone: a tile's, or MLA's without the rotated ones behind them."""
    for n in sorted({size for size in _TILES if size < head.q.shape[1]}):
        q = head.q.clone()
        q[:, n:] = 0
        yield Reading("features", f"a Q Kᵀ of the first {n} features alone", replace(head, q=q))


def other_heads(evidence: Evidence) -> Iterator[Reading]:
    """The head with K, V or both of another one of the capture, or that head itself."""
    own = evidence.heads[0]
    for name, read in evidence.others[:_MOST_HEADS]:
        other = read()
        if any(getattr(other, name).shape != getattr(own, name).shape for name in "qkv"):
            continue
        same_k, same_v = torch.equal(other.k, own.k), torch.equal(other.v, own.v)
        if not same_k and not same_v:
            yield Reading("head", f"K with V of {name}", replace(own, k=other.k, v=other.v))
        if not same_k:
            yield Reading("head", f"K of {name}", replace(own, k=other.k))
        if not same_v:
            yield Reading("head", f"V of {name}", replace(own, v=other.v))
        if not torch.equal(other.q, own.q):
            yield Reading("head", f"Q of {name}", replace(own, q=other.q))
        if own.do is not None and other.do is not None and not torch.equal(other.do, own.do):
            yield Reading("head", f"dO of {name}", replace(own, do=other.do))
            yield Reading("head", f"Q with dO of {name}", replace(own, q=other.q, do=other.do))
        stated, theirs = own.masking.mask, other.masking.mask
        if stated is not None and theirs is not None and not torch.equal(stated, theirs):
            words = f"the mask of {name}"
            yield Reading("mask", words, replace(own, masking=replace(own.masking, mask=theirs)))
        yield Reading("head", name, replace(other, scale=own.scale, masking=own.masking, softcap=own.softcap))


def other_documents(evidence: Evidence) -> Iterator[Reading]:
    """Of packed sequences: the rows with the keys of documents that are cut in another way."""
    for words, read in evidence.cuts if evidence.unit == "rows" else ():
        head = read()
        if head is not None:
            yield Reading("documents", words, head)


def other_softcap(head: AttentionHead) -> Iterator[Reading]:
    """The head without its softcap, or with one that models use."""
    if head.softcap is not None:
        yield Reading("softcap", "attention without the softcap", replace(head, softcap=None))
    for cap in USUAL_SOFTCAPS:
        if cap != head.softcap:
            yield Reading("softcap", f"a softcap of {cap:g}", replace(head, softcap=cap))
    if head.softcap is not None:
        cap = head.softcap * head.scale
        yield Reading("softcap", f"a softcap of {cap:g} ({BEFORE_THE_SCALE})", replace(head, softcap=cap))
