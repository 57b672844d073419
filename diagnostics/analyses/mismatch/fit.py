"""Which hypothesis a run's O fits, and none where several do or none does."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from attn_diag.analyses.mismatch.coarse import CoarseSite, coarse_site, well_rounded_square
from attn_diag.analyses.mismatch.hypotheses import OtherComputation, Stated, hypotheses
from attn_diag.analyses.mismatch.rows import RunRows
from attn_diag.analyses.mismatch.split import expected_square, out_of_few
from attn_diag.head.quality import LOSSY
from attn_diag.reference import FloatFormat
from attn_diag.results.wording import percent, times
from attn_diag.statistics.ratios import RatioEstimate, paired_ratio

# Of the squared error that a hypothesis may leave beyond what rounding does: kernels may be coarse, and wrong besides.
_EXPLAINS = 0.01
# And what rounding alone is not mistaken for.
_MOST = 0.5
# Standard errors of the log ratio: some fifty hypotheses a layer and a hundred layers are tried, 0.05 / 5000 two-sided.
_SIGNIFICANT = 4.4
# From so many times a well-rounded kernel's error on an fp32 O is more than sums of many terms in fp32 leave, in
# whatever order; one site in 16 bits, or in TF32, leaves thousands.
_FP32_LOSSY = 32.0
# What is named leaves more than a coarse kernel does from so many times the rounding on.
_MORE = 2.0
# Enough to tell: rows, and heads, of a layer.
_ROWS, _HEADS = 192, 6


@dataclass(frozen=True)
class LayerFit:
    """How well one run's O of a layer fits what is stated, and what fits better."""

    factor: float
    """Rms error over that of a well-rounded kernel, under what is stated."""
    coarse: bool
    """Whether that is more than rounding at the usual sites leaves, beyond its uncertainty."""
    site: CoarseSite | None
    """The coarser rounding that makes it; None: none is known, or none was looked for."""
    site_explains: float
    """The part of the squared error that it takes away."""
    relative: float
    """Norm of the error over that of O."""
    best: OtherComputation | None
    """What is named; None where nothing is."""
    explained: float
    """The part of the squared error that the best hypothesis takes away, named or not; 0 where none was tried."""
    nearest: str
    """Why the best hypothesis is not named though it comes near, in words; empty: none comes near."""
    runner_up: str
    """The best one of another kind, in words, and what it leaves; empty: nothing was tried."""
    beside: str = ""
    """Where what is named leaves clearly more than rounding, that in words; empty: it does not."""


def fit_layer(stated: Stated, fmt: FloatFormat, out: FloatFormat) -> LayerFit:
    """Try what is stated, and then all that is known, on a layer of one run.

    Args:
        stated: Its heads, all sequences'.
        fmt: The format of its inputs.
        out: O's.
    """
    sampled = [(_sample(rows), semantics, rows) for rows, semantics in _spread(stated)]
    chosen = [(rows.select(at), semantics.of_rows(at)) for at, semantics, rows in sampled]
    expected = torch.cat([expected_square(s, r, fmt, out) for r, s in chosen])
    truth = torch.cat([out_of_few(s, r) for r, s in chosen])
    before = (torch.cat([r.o for r, _ in chosen]) - truth).square().sum(1)
    well = well_rounded_square(chosen, fmt, out, truth)
    usable = before.isfinite() & expected.isfinite()
    against = _ratio(before[usable], (expected if well is None else well)[usable])
    if against is None:
        return LayerFit(0.0, False, None, 0.0, 0.0, None, 0.0, "", "")
    lossy = _FP32_LOSSY if out.name == "fp32" else LOSSY
    coarse = against.low > lossy
    size = float(torch.cat([r.o.square().sum(1) for r, _ in chosen])[usable].sum())
    relative = math.sqrt(float(before[usable].sum()) / size) if size else 0.0
    # Where O is as near as a well-rounded kernel's there is nothing to explain: on saturated rows, of which O is a row
    # of V to the last bit, a larger scale is nearer still.
    if against.factor <= 1:
        return LayerFit(against.factor, False, None, 0.0, relative, None, 0.0, "", "")
    tried = []
    for hypothesis, outs in hypotheses(chosen):
        left = torch.cat([_square(r, out) for (r, _), out in zip(chosen, outs, strict=True)])
        left = torch.where(left.isfinite(), left, before)
        tried.append((float(left[usable].sum()), hypothesis, left[usable]))
    tried.sort(key=lambda one: one[0])
    total, best, left = tried[0]
    others = [t for t in tried if t[1].kind != best.kind]
    kept, wanted = before[usable], expected[usable]
    over = _ratio(left, wanted)
    explains = total <= _EXPLAINS * float(kept.sum()) or (
        # What leaves most of the error is not what makes it: a truncated O is a little smaller, as by another scale.
        over is not None and over.low <= LOSSY and total <= _MOST * float(kept.sum())
    )
    named = explains and _beyond(kept, left) and all(_beyond(other[2], left) for other in others[:1])
    runner_up = ""
    if others:
        runner_up = (
            f"{others[0][1].words} leaves {math.sqrt(others[0][0] / float(wanted.sum())):.3g} times the rounding"
        )
    nearest = ""
    if not named and _beyond(kept, left) and explains:
        nearest = f"{best.words} would explain it, but {runner_up}"
    elif not named and _beyond(kept, left) and total <= _MOST * float(kept.sum()):
        factor = times(math.sqrt(total / float(wanted.sum())))
        part = f"{best.words} explains {percent(1 - total / float(kept.sum()))} of its square"
        nearest = f"{part}, but leaves {factor} times the rounding, so that it is not all of it"
    beside = ""
    if named and over is not None and over.low > max(lossy, _MORE):
        beside = f", and more is wrong, or rounded coarsely, there: that leaves {times(over.factor)} times the rounding"
    found = coarse_site(chosen, fmt, out) if against.factor > lossy and not named else None
    return LayerFit(
        factor=against.factor,
        # A rounding that explains it is sure where the interval is wide.
        coarse=coarse or found is not None,
        site=None if found is None else found[0],
        site_explains=0.0 if found is None else found[1],
        relative=relative,
        best=best if named else None,
        explained=1 - total / float(kept.sum()),
        nearest=nearest,
        runner_up=runner_up,
        beside=beside,
    )


def _beyond(more: Tensor, less: Tensor) -> bool:
    """Whether one hypothesis leaves significantly more than another, row by row paired."""
    found = _ratio(more, less)
    if found is None or found.factor <= 1:
        return False
    half = math.log(found.high / found.low) / 2 if found.low > 0 and math.isfinite(found.high) else math.inf
    # The interval is 95 %: two standard errors, for the many rows that there are.
    return math.log(found.factor) > _SIGNIFICANT * half / 1.96


def _ratio(observed: Tensor, yardstick: Tensor) -> RatioEstimate | None:
    return paired_ratio(observed.cpu().numpy(), yardstick.cpu().numpy())


def _square(rows: RunRows, predicted: Tensor) -> Tensor:
    return (rows.o - predicted).square().sum(1)


def _spread(stated: Stated) -> Stated:
    at = torch.linspace(0, len(stated) - 1, min(len(stated), _HEADS)).long().tolist()
    return [stated[i] for i in dict.fromkeys(at)]


def _sample(rows: RunRows) -> Tensor:
    count = len(rows.tokens)
    return torch.linspace(0, count - 1, min(count, _ROWS), device=rows.tokens.device).long()
