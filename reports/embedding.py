"""The diagnosis inside its own page: thinned and shortened until the page keeps its size, and read back from it."""

from __future__ import annotations

import base64
import gzip
import json
import math
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any, NamedTuple

from attn_diag.results.diagnosis import Bias, BiasEstimate, Diagnosis, Drift, HeadDiagnosis, RoundingBias
from attn_diag.results.figures import HeadFigures, PredictedError, RowRuns, RowStrip, UnitPositions

# Running sums that the page draws; the others are left out of it.
_DRAWN = ("delta", "delta_excess")
# Heads measured to foresee the size of all.
_SAMPLE = 12


class Detail(NamedTuple):
    """How much is kept."""

    points: int
    """Of every curve."""
    digits: int
    """Of every number."""
    compressed: bool


_COMPRESSED = ((256, 9), (256, 6), (192, 5), (128, 5), (96, 5), (96, 4), (64, 4), (32, 4))
# From everything a page can show to the least that still shows its shape.
_DETAILS = (Detail(512, 17, False), Detail(512, 9, False), *(Detail(*kept, True) for kept in _COMPRESSED))


def fitted(diagnosis: Diagnosis, limit: int) -> Any:
    """The diagnosis as JSON data of at most ``limit`` bytes once written out, with as much detail as fits.

    Where all fits it is the diagnosis itself; else {"gzip": base64 of its gzipped JSON}. The smallest is returned
    where nothing fits (many hundreds of heads).
    """
    sample, times = _sample(diagnosis)
    hopeful = [detail for detail in _DETAILS if times * _written(sample, detail)[1] <= limit]
    for detail in _DETAILS[_DETAILS.index(hopeful[0]) if hopeful else -1 :]:
        data, size = _written(diagnosis, detail)
        if size <= limit:
            break
    return data


def _written(diagnosis: Diagnosis, detail: Detail) -> tuple[Any, int]:
    """The data with so much detail, and its size in bytes."""
    whole = thinned(diagnosis, detail.points).to_json(indent=None)
    data = json.loads(whole, parse_float=lambda number: float(f"{float(number):.{detail.digits}g}"))
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    if not detail.compressed:
        return data, len(text.encode())
    # The time of making is left out, so that the same diagnosis gives the same page.
    packed = base64.b64encode(gzip.compress(text.encode(), 6, mtime=0)).decode()
    return {"gzip": packed}, len(packed)


def _sample(diagnosis: Diagnosis) -> tuple[Diagnosis, float]:
    """A few of the heads, and how many times as many there are: so that trying out what fits takes no time."""
    entries = [(capture, observation, head) for capture in diagnosis.captures
               for observation in capture.observations for head in observation.heads]  # fmt: skip
    if len(entries) <= _SAMPLE:
        return diagnosis, 1.0
    chosen = [entries[i] for i in _evenly(len(entries), _SAMPLE)]
    capture, observation, _ = chosen[0]
    heads = tuple(head for _, _, head in chosen)
    one = replace(capture, observations=(replace(observation, heads=heads),))
    return replace(diagnosis, captures=(one,)), len(entries) / len(heads)


def thinned(diagnosis: Diagnosis, points: int) -> Diagnosis:
    """With at most ``points`` points of every curve that a page draws, and none of the others."""
    captures = []
    for capture in diagnosis.captures:
        thin = [replace(o, heads=tuple(_head(head, points) for head in o.heads)) for o in capture.observations]
        captures.append(replace(capture, observations=tuple(thin)))
    return replace(diagnosis, captures=tuple(captures))


def _head(head: HeadDiagnosis, points: int) -> HeadDiagnosis:
    single = head.head is not None
    estimates = {f.name: _estimate(getattr(head.bias, f.name), points if single and f.name in _DRAWN else 0)
                 for f in fields(Bias)}  # fmt: skip
    rounding = RoundingBias(_estimate(head.rounding_bias.o, 0), _estimate(head.rounding_bias.delta, 0))
    figures = None if head.figures is None else _figures(head.figures, points)
    return replace(head, bias=Bias(**estimates), rounding_bias=rounding, figures=figures)


def _estimate(estimate: BiasEstimate | None, points: int) -> BiasEstimate | None:
    if estimate is None:
        return None
    kept = [estimate.drift[i] for i in _evenly(len(estimate.drift), points)]
    return replace(estimate, drift=Drift([p["row"] for p in kept], [p["sum"] for p in kept]))


def _figures(figures: HeadFigures, points: int) -> HeadFigures:
    runs, unit = figures.rows, figures.unit_positions
    listed, shown = min(len(runs.first), points), _evenly(len(unit.rows), points)
    return replace(
        figures,
        rows=RowRuns(runs.first[:listed], runs.batch[:listed], runs.row[:listed], runs.rows, runs.total),
        strip=_strip(figures.strip, points),
        unit_positions=UnitPositions(
            tuple(unit.rows[i] for i in shown), tuple(unit.keys[i] for i in shown), unit.total
        ),
        dq=_predicted(figures.dq, points // 4),
        dw_q=_predicted(figures.dw_q, points // 4),
    )


def _strip(strip: RowStrip, points: int) -> RowStrip:
    groups = list(_groups(len(strip.first_rows), points))
    return RowStrip(
        tuple(strip.first_rows[g.start] for g in groups),
        tuple(max(strip.exact[g]) for g in groups),
        tuple(max(strip.unit[g]) for g in groups),
    )


def _predicted(error: PredictedError | None, points: int) -> PredictedError | None:
    """Norms over wider groups: squares add up."""
    if error is None:
        return None
    groups = list(_groups(len(error.first), points))

    def joined(norms: tuple[float, ...] | None) -> tuple[float, ...] | None:
        return None if norms is None else tuple(math.hypot(*norms[g]) for g in groups)

    first = tuple(error.first[g.start] for g in groups)
    return PredictedError(first, joined(error.observed), joined(error.predicted), joined(error.reference) or ())


def _groups(count: int, most: int) -> Iterator[slice]:
    """``count`` consecutive things in at most ``most`` groups of one size (the last may be smaller)."""
    size = -(-count // most) if count else 1
    return (slice(start, min(start + size, count)) for start in range(0, count, size))


def _evenly(count: int, most: int) -> list[int]:
    """At most ``most`` of ``count`` indices, evenly, the first and the last among them."""
    if count <= most:
        return list(range(count))
    return sorted({round(i * (count - 1) / (most - 1)) for i in range(most)}) if most > 1 else []
