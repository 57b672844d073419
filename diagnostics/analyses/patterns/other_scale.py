"""Another softmax scale, or factor of a mask, found from the known ones by Gauss-Newton steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from attn_diag.analyses.patterns.evidence import Evidence, Guess
from attn_diag.analyses.patterns.numbers import named, scales
from attn_diag.head.quality import LOSSY
from attn_diag.head.scale_fit import one_over_root
from attn_diag.reference import reference_rows
from attn_diag.reference.masking import adds
from attn_diag.results.wording import number

# Roundings of scores, truncations too, look like a change of the scale by up to 2^-8.
_SCALE_FROM = 0.005
# A small change of it needs many rows: in a few, coarse scores look like one.
_SMALL, _MANY = 0.05, 16
# In plain torch stored scores leave 1.7 times a well-rounded kernel's error; of 0.5 to 5 % of the scale that is little.
_NEARLY_ALL = 0.95
_STEPS, _SAMPLE = 8, 64
_STEP = 1e-4


def other_scale(
    evidence: Evidence, rows: Tensor, predict: Callable[[float, Tensor], Tensor], where: str = ""
) -> Iterator[Guess]:
    """The quantity with the scale that fits best.

    Args:
        evidence: The quantity.
        rows: Which n rows.
        predict: What a scale makes of some rows, [n, D].
        where: What is said after the scale: " in the backward alone".
    """
    head = evidence.heads[0]
    if not head.scale > 0 or (head.masking.mask is not None and adds(head.masking.mask)):
        return
    known = scales(head.scale, head.q.shape[1])
    if (found := _fitted(evidence, rows, predict, (head.scale, *known.values()))) is None:
        return
    scale, uncertain = found
    off = scale / head.scale - 1
    if abs(off) < _SCALE_FROM or (abs(off) < _SMALL and len(rows) < _MANY):
        return
    if abs(off) < _SMALL:
        usable = evidence.usable.nonzero()[:, 0]
        everywhere = usable[:: -(-len(usable) // _SAMPLE)]
        fit = evidence.fit(everywhere, predict(scale, everywhere))
        # Dropped small P look like it in the rows that stand out; in plain torch, which is coarse, it explains nearly
        # all of what is far beyond that.
        if fit.remaining > LOSSY and not (fit.holds and fit.explained >= _NEARLY_ALL):
            return
    name = named(scale, known, max(1e-3 * abs(off), min(uncertain, abs(off) / 4)))
    name = name or (one_over_root(scale, abs(scale) * uncertain) if scale > 0 else None)
    said = f"{number(scale, 5)}{f' ({name})' if name else ''} instead of {number(head.scale, 5)}"
    yield Guess("scale", f"are what the scale {said}{where} gives", predict(scale, rows), 1, fitted=1)


def other_factor(evidence: Evidence, rows: Tensor) -> Iterator[Guess]:
    """O with what the mask adds, or that and the scores, times the factor that fits best.

    Args:
        evidence: O, under a mask that adds numbers.
        rows: Which n rows.
    """
    head = replace(evidence.heads[0], do=None)
    mask = head.masking.mask
    if mask is None or not adds(mask) or not head.scale > 0:
        return

    def changed(factor: float, at: Tensor, scale: float) -> Tensor:
        exact = mask.double()
        times = torch.where(exact.isinf(), exact, exact * factor)
        return reference_rows(replace(head, scale=scale, masking=replace(head.masking, mask=times)), at).out

    known = {"the scale": head.scale, "1/scale": 1 / head.scale}
    root = head.q.shape[1] ** 0.5
    for name, value in (("1/sqrt(D)", 1 / root), ("sqrt(D)", root)):
        if named(value, known, 1e-6) is None:
            known[name] = value
    ways: dict[str, Callable[[float, Tensor], Tensor]] = {
        "the mask": lambda factor, at: changed(factor, at, head.scale),
        "scores and mask together": lambda factor, at: changed(factor, at, head.scale * factor),
    }
    for what, predict in ways.items():
        if (found := _fitted(evidence, rows, predict, (1.0, 2.0, 0.5, *known.values()))) is None:
            continue
        factor, uncertain = found
        if abs(factor - 1) < _SMALL or not factor > 0:
            continue
        known_as = named(factor, known, max(1e-3, min(uncertain, 0.01)))
        said = f"{number(factor, 3)}{f' ({known_as})' if known_as else ''}"
        yield Guess("mask", f"are what a factor of {said} on {what} gives", predict(factor, rows), 1, fitted=1)


def _fitted(
    evidence: Evidence, rows: Tensor, predict: Callable[[float, Tensor], Tensor], starts: tuple[float, ...]
) -> tuple[float, float] | None:
    """The number that fits best, from the best of some, and how uncertain it is; None where nothing depends on it."""
    noise = evidence.noise[rows].clamp(min=1e-300)[:, None]
    observed = evidence.observed[rows]

    def left(value: float) -> float:
        found = float(((observed - predict(value, rows)).square() / noise).sum())
        return found if math.isfinite(found) else math.inf

    value = min(starts, key=left)
    size = 0.0
    for _ in range(_STEPS):
        prediction = predict(value, rows)
        slope = (predict(value * (1 + _STEP), rows) - predict(value * (1 - _STEP), rows)) / (2 * _STEP)
        size = float((slope.square() / noise).sum())
        if not size or not math.isfinite(size):
            return None
        step = float(((observed - prediction) * slope / noise).sum()) / size
        value *= 1 + max(-0.5, min(step, 0.5))
        if abs(step) < 1e-6:
            break
    return value, 4 / size**0.5
