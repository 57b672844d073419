"""An error that all numbers share and that is all that is wrong.

A factor near 1, as of a constant that is off by 1/256 or a 1/(1-p) in 16 bits; half an ulp in one direction, which a
cast leaves that truncates, rounds up or down; of O a softmax scale that is a little off, as one times log2(e) in 16
bits is, or another softcap.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from attn_diag.analyses.patterns.evidence import Evidence
from attn_diag.analyses.patterns.numbers import rounded_scales, rounded_softcap
from attn_diag.analyses.patterns.readings import other_softcap
from attn_diag.head.counterfactual import FORMATS
from attn_diag.head.quality import AS_GOOD
from attn_diag.kernels.formats import Mode, parse, round_to
from attn_diag.reference import AttentionHead, ulp
from attn_diag.reference.fused import reference_of
from attn_diag.reference.masking import adds
from attn_diag.results.quality import Pattern

_SAMPLE = 64
# By chance one number explains as much with probability exp(-_NATS) at most, and so much less than another.
_NATS = 7.0
_FAR_BELOW = 1e-3
# A factor further from 1 is no constant that is a little off.
_NEAR = 0.5
# O's derivative by its scale is a difference over so much: its own error, of second order, is far below the cast's.
_STEP = 1e-3
# Eight passes of a longer head would take minutes.
_MOST_SCORES = 2**27
# What is said to be open of a scale, in standard deviations of its fit.
_SIGMAS = 4.0


def shared_error(evidence: Evidence, factor: float) -> Pattern | None:
    """What all numbers share, where what is left without it is as good as a well-rounded kernel's.

    Args:
        evidence: A quantity that is merely coarse.
        factor: Its error over a well-rounded kernel's.
    """
    rows = evidence.usable.nonzero()[:, 0]
    error = evidence.error[rows]
    before = float(error.square().sum())
    if not before > 0:
        return None
    sample = rows[torch.linspace(0, len(rows) - 1, min(_SAMPLE, len(rows)), device=rows.device).long()]
    numbers = evidence.dimensions(sample) / len(sample)

    def cost(remains: Tensor) -> float:
        """Minus the log-likelihood of independent errors [n, D], of a size of their own in each row."""
        squares = remains.square().sum(1)
        # What is far below a well-rounded kernel's error tells no more for being smaller.
        return numbers / 2 * float(torch.maximum(squares, _FAR_BELOW * evidence.noise[rows]).log().sum())

    found = [(cost(error - made), kind, words, made) for kind, words, made in _shared(evidence, rows)]
    if not found:
        return None
    least, kind, words, made = min(found, key=lambda one: one[0])
    left = float((error - made).square().sum())
    remaining = factor * math.sqrt(left / before)
    if remaining > AS_GOOD or cost(error) - least < _NATS:
        return None
    alike = [words, *(words for theirs, _, words, _ in found if theirs - least < _NATS)]
    but_for = "and but for that as good as a well-rounded kernel's"
    together = ", or ".join(dict.fromkeys(alike))
    return Pattern(kind, f"all {evidence.unit} are {together}, {but_for}", 1 - left / before, remaining)


def _shared(evidence: Evidence, rows: Tensor) -> Iterator[tuple[str, str, Tensor]]:
    """What may be shared: kind, words and the error [n, D] that it makes."""
    truth, error = evidence.truth[rows], evidence.error[rows]
    own = float((error * truth).sum() / truth.square().sum().clamp(min=1e-300))
    if abs(own) < _NEAR:
        # A cast that truncates takes half an ulp of numbers and so of their sums: 1 / 2 to 1 times 2^-(precision + 1).
        truncates = 0.5 <= -own * 2.0 ** (evidence.fmt.precision + 1) <= 1
        how = ", as a cast that truncates makes them" if truncates else ""
        yield "shared factor", f"{1 + own:.5g} times the true ones{how}", own * truth
    if evidence.quantity == "o":
        yield from _other_scores(evidence, rows)
    if evidence.fmt.name not in FORMATS:
        return
    half = ulp(truth, evidence.fmt) / 2
    for mode, way, where, direction in (
        (Mode.TOWARD_ZERO, "toward zero", "nearer to zero than", -truth.sign()),
        (Mode.UP, "up", "above", 1.0),
        (Mode.DOWN, "down", "below", -1.0),
    ):
        words = f"half an ulp {where} the true ones, as a last cast that rounds {way} leaves them"
        yield "last rounding", words, direction * half
        # Without noise that moves numbers by more than an ulp, what each of them loses is known: of fp32 sums.
        yield "last rounding", words, round_to(truth.float().double(), parse(f"{evidence.fmt.name}:{mode}")) - truth


def _other_scores(evidence: Evidence, rows: Tensor) -> Iterator[tuple[str, str, Tensor]]:
    """What another softcap makes of O, or a scale or the cap a little off: along one derivative in every row."""
    head = replace(evidence.heads[0], do=None)
    adding = head.masking.mask is not None and adds(head.masking.mask)
    if not head.scale > 0 or adding or len(head.q) * len(head.k) > _MOST_SCORES:
        return
    truth, noise = evidence.truth[rows], evidence.noise[rows].clamp(min=1e-300)[:, None]

    def out(other: AttentionHead) -> Tensor:
        return reference_of(other).out[rows]

    for reading in other_softcap(head):
        yield "shared softcap", f"what {reading.words} gives", out(reading.head) - truth

    def fitted(changed: Callable[[float], AttentionHead]) -> tuple[float, float]:
        """By what factor, less 1, and what is open of it."""
        more, less = (out(changed(factor)) for factor in (1 + _STEP, 1 - _STEP))
        slope = (more - less) / (2 * _STEP)
        size = float((slope.square() / noise).sum())
        return (float((evidence.error[rows] * slope / noise).sum()) / size, _SIGMAS / size**0.5) if size > 0 else (1, 0)

    cap = head.softcap
    changes: list[tuple[str, str, Callable[[float], AttentionHead]]]
    changes = [("shared scale", "softmax scale", lambda factor: replace(head, scale=factor * head.scale))]
    if cap is not None:
        changes.append(("shared softcap", "softcap", lambda factor: replace(head, softcap=factor * cap)))
    for kind, name, changed in changes:
        off, within = fitted(changed)
        if abs(off) >= _NEAR:
            continue
        words = f"what a {name} {1 + off:.5f} (± {within:.1g}) times the stated one gives"
        if kind == "shared scale":
            known = _rounded(rounded_scales(head.scale), head.scale, off, within)
            # A cast that truncates shrinks numbers as in ``_shared``: once the scores, q or k, twice q and k.
            if 0.5 <= -off * 2.0 ** (evidence.fmt.precision + 1) <= 2:
                known.append("a cast of scores, q or k that truncates makes one like it")
        else:
            assert cap is not None
            known = _rounded(rounded_softcap(cap), cap, off, within)
        also = f" ({'; '.join(known)})" if known else ""
        yield kind, words + also, out(changed(1 + off)) - truth


def _rounded(made: Mapping[str, float], stated: float, off: float, within: float) -> list[str]:
    """What is known to make a number off by so much: a constant in 16 bits."""
    by_name = {name: value / stated - 1 for name, value in made.items()}
    return [f"{name} makes {1 + by:.5f}" for name, by in by_name.items() if abs(by - off) <= within <= abs(by) / 4]
