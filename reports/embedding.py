"""The diagnosis inside its own page: thinned and shortened until the page keeps its size, and packed for it.

A packed one is {"gzip": …, "details": […]}: what the map and the table show of all heads, and the figures of the heads,
sixteen at a time and the worst first, which the page unpacks when such a head is looked at. ``results/embedded.py`` and
``static/core.js`` put it together again.
"""

from __future__ import annotations

import base64
import gzip
import json
import math
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import fields, replace
from functools import cache
from typing import Any, NamedTuple

from attn_diag.results.compact import bare_json, without_curves
from attn_diag.results.diagnosis import Bias, BiasEstimate, Diagnosis, Drift, HeadDiagnosis, RoundingBias, severity
from attn_diag.results.figures import HeadFigures, PredictedError, RowRuns, RowStrip, UnitPositions
from attn_diag.results.packing import packed

# Running sums that the page draws; the others are left out of it.
_DRAWN = ("delta", "delta_excess")
# Of a head, what only its own figures show; the running sums too.
_OF_FIGURES = ("figures", "attribution", "microscope")
_NO_DRIFT = Drift()
# Heads whose figures are packed together.
_TOGETHER = 16
# Heads measured to foresee the size of all.
_SAMPLE = 2 * _TOGETHER


class Detail(NamedTuple):
    """How much is kept."""

    points: int
    """Of every curve."""
    digits: int
    """Of every number."""
    compressed: bool


_COMPRESSED = ((256, 9), (256, 6), (192, 5), (128, 5), (96, 5), (96, 4), (64, 4), (32, 4), (32, 3))
# From everything a page can show to the least that still shows its shape, and the digits that it shows.
_DETAILS = (Detail(512, 17, False), Detail(512, 9, False), *(Detail(*kept, True) for kept in _COMPRESSED))


def fitted(diagnosis: Diagnosis, limit: int) -> Any:
    """The diagnosis as JSON data of at most ``limit`` bytes once written out, with as much detail as fits.

    Where all fits it is the diagnosis itself, else packed. Where the least detail of all heads does not fit, the
    figures of the worst are kept that do. 4,096 heads without figures take some 3 MB; what is larger than ``limit``
    even so is returned all the same.
    """
    sample, times = _sample(diagnosis)

    def hopeful(detail: Detail) -> bool:
        return times * _written(sample, detail, math.inf)[1] <= limit

    # Less detail takes less room.
    for detail in _DETAILS[bisect_left(_DETAILS, True, hi=len(_DETAILS) - 1, key=hopeful) :]:
        data, size = _written(diagnosis, detail, limit if detail == _DETAILS[-1] else math.inf)
        if size <= limit:
            break
    return data


def _written(diagnosis: Diagnosis, detail: Detail, limit: float) -> tuple[Any, int]:
    """The data with so much detail, figures as far as ``limit`` goes, and its size in bytes."""
    if not detail.compressed:
        data = _as_data(thinned(diagnosis, detail.points), detail)
        return data, len(bare_json(data))
    whole = _as_data(thinned(diagnosis, 0), detail)
    observations = [o for capture in whole["captures"] for o in capture["observations"]]
    beside: dict[str, list[Any]] = {"heads": [], "kv_heads": []}
    for observation in observations:
        for kind, found in beside.items():
            found += observation[kind]
            observation[kind] = len(observation[kind])
    heads = [h for capture in diagnosis.captures for o in capture.observations for h in o.heads]
    # Those of all heads together have no figures.
    ranked = sorted((i for i, h in enumerate(heads) if h.head is not None), key=lambda i: severity(heads[i]))
    columns = {kind: packed(found) for kind, found in beside.items()}
    parts = [_packed_text({"diagnosis": whole, **columns, "ranked": ranked, "together": _TOGETHER})]
    size = len(parts[0]) + len('{"gzip":"","details":[]}')
    for start in range(0, len(ranked), _TOGETHER):
        chosen = [_head(heads[i], detail.points) for i in ranked[start : start + _TOGETHER]]
        part = _packed_text(
            packed(
                [
                    _figures_of(head)
                    for head in _as_data(_only(diagnosis, chosen), detail)["captures"][0]["observations"][0]["heads"]
                ]
            )
        )
        size += len(part) + 3
        if size > limit:
            break
        parts.append(part)
    return {"gzip": parts[0], "details": parts[1:]}, size


def _figures_of(head: dict[str, Any]) -> dict[str, Any]:
    """What of a head's data ``thinned`` to no points lacks."""
    drift = {test: estimate["drift"] for test, estimate in head["bias"].items() if estimate and estimate["drift"]}
    return {**{name: head[name] for name in _OF_FIGURES}, "drift": drift}


def _as_data(diagnosis: Diagnosis, detail: Detail) -> Any:
    whole = diagnosis.to_json(indent=None)
    digits = f".{detail.digits}g"
    # Two in five numbers are there more than once.
    return json.loads(whole, parse_float=cache(lambda number: float(format(float(number), digits))))


def _packed_text(data: Any) -> str:
    # The time of making is left out, so that the same diagnosis gives the same page.
    return base64.b64encode(gzip.compress(bare_json(data), 6, mtime=0)).decode()


def _only(diagnosis: Diagnosis, heads: list[HeadDiagnosis]) -> Diagnosis:
    """The diagnosis of these heads alone, as if one observation had them."""
    capture = diagnosis.captures[0]
    observation = replace(capture.observations[0], heads=tuple(heads), kv_heads=())
    return replace(diagnosis, captures=(replace(capture, observations=(observation,)),))


def _sample(diagnosis: Diagnosis) -> tuple[Diagnosis, float]:
    """A few of the heads, and how many times as many there are: so that trying out what fits takes no time."""
    heads = [head for capture in diagnosis.captures for o in capture.observations for head in o.heads]
    if len(heads) <= _SAMPLE:
        return diagnosis, 1.0
    return _only(diagnosis, [heads[i] for i in _evenly(len(heads), _SAMPLE)]), len(heads) / _SAMPLE


def thinned(diagnosis: Diagnosis, points: int) -> Diagnosis:
    """With at most ``points`` points of every curve that a page draws, and none of the others.

    With no points it has no figures, but for the numbers that the map and the table show.
    """
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
    found = replace(head, bias=Bias(**estimates), rounding_bias=rounding, figures=figures)
    return found if points else replace(found, attribution=None, microscope=None)


def _estimate(estimate: BiasEstimate | None, points: int) -> BiasEstimate | None:
    if estimate is None:
        return None
    return replace(estimate, drift=estimate.drift.at(_evenly(len(estimate.drift), points)) if points else _NO_DRIFT)


def _figures(figures: HeadFigures, points: int) -> HeadFigures:
    runs, unit = figures.rows, figures.unit_positions
    if not points:
        return without_curves(figures)
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
