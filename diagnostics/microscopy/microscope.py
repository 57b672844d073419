"""The microscope: how one element O[row, feature] came about, rounding by rounding, and what its residual decided."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch import Tensor

from attn_diag.captures import Capture
from attn_diag.diagnosis import Tool
from attn_diag.errors import InputError
from attn_diag.kernels import Recipe, emulate_rows, trace_row
from attn_diag.kernels.formats import parse, round_to
from attn_diag.microscopy.addition import Addition, examine_addition
from attn_diag.microscopy.closed_form import Class, ClosedFormTotals, explain, predict_block
from attn_diag.microscopy.subject import Subject, subject_of
from attn_diag.microscopy.walk import Array, Parts, Site, Walk, exponent_factor, site_format, walk_element
from attn_diag.progress import Progress
from attn_diag.provenance import describe_tool
from attn_diag.reference import AttentionHead, reference_head, reference_rows, round_nearest_even, ulp
from attn_diag.result import Result

if TYPE_CHECKING:
    from rich.console import RenderableType

_MAX_POINTS = 512
# Operands of the decisive addition, and further terms, that are listed one by one.
_SHOWN_OPERANDS = 6
_SHOWN_TERMS = 12
# Rows that are emulated together with the one that is walked.
_EMULATED_ROWS = 64


@dataclass(frozen=True)
class Term:
    """A key's part in the sum: ``position`` counts visible keys in the recipe's order, from 1; ``key`` is its index.

    ``probs``, ``cast_probs``: P_bar before and after its cast, relative to the maximum that far; ``value`` = V;
    ``product`` = cast P_bar V relative to the final maximum; ``unit``: P_bar = 1 there. ``error_before`` and
    ``error_after`` it: the prefix error.
    """

    position: int
    key: int
    probs: float
    cast_probs: float
    value: float
    product: float
    unit: bool
    error_before: float
    error_after: float


@dataclass(frozen=True)
class Point:
    """The prefix error after ``position`` keys (see Curve); ``unit``: P_bar = 1 at this key."""

    position: int
    key: int
    error: float
    rounding_error: float
    unit: bool


@dataclass(frozen=True)
class Curve:
    """O_bar_err(t), the prefix error of Figure 6 of Qiu & Yao (arXiv 2510.04212), over the visible keys in order.

    ``error`` at t = held(t) - sum_{j <= t} exp(S_j - m) V_j, S in float64 and m the recipe's final maximum; held(t) is
    O_bar as the recipe would hold it were key t the last: with the roundings of range_pv and accumulator if it has any,
    else the running sum rounded to ``format``, that of O ("what rounding O_bar would do"). ``rounding_error``: the same
    against sum cast(P_bar_j) V_j, the recipe's own terms: without what the scores and the cast of P_bar make.
    ``points``: at most 512, always with those of P_bar = 1 (thinned evenly if they alone are more). ``keys``: all.
    """

    format: str
    keys: int
    unit_keys: int
    points: tuple[Point, ...]


@dataclass(frozen=True)
class Element:
    """The closed form for this element (``attn_diag.closed_form``): its class, base, residual, and the error of O."""

    kind: Class
    unit_keys: int
    base: float
    residual: float
    predicted_error: float


@dataclass(frozen=True, repr=False)
class Microscope(Result):
    """One element of O under the microscope.

    ``row``, ``feature``, and ``chosen``: how they came to be. ``observed``: captured O (None: there is none);
    ``walked``: as walked here, ``emulated``: as the recipe's emulation has it, ``bit_equal``: whether these two agree;
    ``reference``: float64's; ``rounded_reference``: that rounded once to O's format, with spacing ``ulp``. ``error`` =
    observed (else walked) - reference; ``excess`` = that - rounded_reference. ``sites``: every rounding of the sum, its
    contribution to O; ``before_sum``: what of walked - reference is left: scores, P_bar, l, fp32. ``decisive``: the
    index of the site with the largest contribution (None: the recipe rounds nothing), examined in ``addition`` as if to
    nearest even. ``terms``: the P_bar = 1 and the largest ones, in order. ``closed_form``: of the whole head.
    """

    source: str
    observation: str | None
    recipe: str
    recipe_reason: str
    layer: int | None
    batch: int
    head: int
    row: int
    feature: int
    chosen: str
    keys: int
    ranges: int
    splits: int
    observed: float | None
    walked: float
    emulated: float
    bit_equal: bool
    reference: float
    rounded_reference: float
    error: float
    excess: float
    ulp: float
    sites: tuple[Site, ...]
    before_sum: float
    decisive: int | None
    addition: Addition | None
    terms: tuple[Term, ...]
    curve: Curve
    element: Element
    closed_form: ClosedFormTotals | None
    tool: Tool
    schema: Literal["attn-diag-microscope"] = "attn-diag-microscope"
    schema_version: Literal[1] = 1

    def renderables(self) -> Iterator[RenderableType]:
        """The report, piece by piece, for a rich console."""
        from attn_diag.reports.microscope import microscope_renderables

        yield from microscope_renderables(self)


def microscope(
    source: Capture | AttentionHead,
    row: int | None = None,
    feature: int | None = None,
    recipe: str | Recipe | None = None,
    *,
    observation: str | None = None,
    observed: Tensor | None = None,
    batch: int = 0,
    head: int = 0,
    device: str = "auto",
    whole_head: bool = True,
    progress: Progress | None = None,
) -> Microscope:
    """Walk O[row, feature] through a recipe's own arithmetic and schedule, and examine its decisive rounding.

    ``source``: a capture, or one head (q, k, v float64) with ``observed`` O [Tq, Dv] where there is one. ``row`` (a
    query row of the capture) and ``feature``: default, those of the largest |excess error| of the captured O, or of the
    recipe's where none was captured. ``recipe``: a name or a Recipe; default: what the captured O is recognised as,
    else fa2. ``observation``: default the first with an O. ``batch``, ``head`` count within the capture.
    ``whole_head``: also give the closed form's totals over the head (another pass over it). ``progress(done, total)``
    counts the three steps: the recipe found, the element walked, the closed form.

    Raises InputError for a row, feature, head or name that does not exist, a row that NaN or Inf makes unusable or that
    sees no key, and a recipe that rounds at random.
    """
    subject = subject_of(
        source, recipe=recipe, observation=observation, observed=observed, batch=batch, head=head, device=device
    )
    return look(subject, row, feature, whole_head=whole_head, progress=progress or _silent)


def _silent(done: int, total: int) -> None:
    """Nobody listens."""


def look(
    subject: Subject, row: int | None, feature: int | None, *, whole_head: bool = True, progress: Progress = _silent
) -> Microscope:
    """The microscope on a subject; see ``microscope``."""
    head, recipe = subject.inputs.head, subject.recipe
    progress(1, 3)
    for name, number, count in (("row", row, len(head.q)), ("feature", feature, head.v.shape[1])):
        if number is not None and not 0 <= number < count:
            raise InputError(f"{subject.source}: {name} must lie between 0 and {count - 1}, got {number}")
    chosen = "as asked"
    if row is None or feature is None:
        row, feature, chosen = _worst(subject, row, feature)
    forward, values = replace(head, do=None), head.v[:, feature].cpu().numpy()
    rows = torch.tensor([row], device=head.q.device)
    block = reference_rows(forward, rows)
    subject.inputs.mark_rows(block)
    if bool(subject.inputs.unusable[row]):
        raise InputError(f"{subject.source}: row {row} holds or sees NaN or Inf; choose another row")
    if bool(block.fully_masked[0]):
        raise InputError(f"{subject.source}: row {row} sees no key; choose another row")
    trace = trace_row(recipe, forward, row)
    walk = walk_element(recipe, trace, head.v[:, feature], exponent_factor(recipe, head))
    emulated = _emulated(recipe, forward, row, feature)
    reference = float(block.out[0, feature])
    truth = torch.tensor(reference, dtype=torch.float64)
    rounded = float(round_nearest_even(truth, subject.out_format))
    observed = None if subject.observation is None else float(subject.out[row, feature])
    told = walk.out if observed is None else observed
    decisive = _decisive(walk.sites)
    prefix = _prefix_errors(walk, recipe, block.scores[0].cpu().numpy(), block.keys, values)
    prediction = predict_block(recipe, forward, block)
    kind: Class = "ordinary"
    if bool(prediction.tie[0, feature]):
        kind = "tie"
    elif bool(prediction.swamped[0, feature]):
        kind = "swamped"
    addition = None
    if decisive is not None:
        site, parts = walk.sites[decisive], walk.parts[decisive]
        of_o = site.step == "cast" and kind != "ordinary" and not parts.earlier
        addition = _examined_mean(site, walk, values) if of_o else _examined(site, parts)
    progress(2, 3)
    found = Microscope(
        tool=describe_tool(head.q.device),
        source=subject.source,
        observation=subject.observation,
        recipe=recipe.name,
        recipe_reason=subject.recipe_reason,
        layer=subject.layer,
        batch=subject.batch,
        head=subject.head,
        row=row,
        feature=feature,
        chosen=chosen,
        keys=len(walk.keys),
        ranges=len(trace.ranges),
        splits=len({part.split for part in trace.ranges}),
        observed=observed,
        walked=walk.out,
        emulated=emulated,
        bit_equal=walk.out == emulated,
        reference=reference,
        rounded_reference=rounded,
        error=told - reference,
        excess=told - rounded,
        ulp=float(ulp(truth, subject.out_format)),
        sites=walk.sites,
        before_sum=walk.out - reference - sum(site.contribution for site in walk.sites),
        decisive=decisive,
        addition=addition,
        terms=_terms(walk, prefix.error, values),
        curve=_curve(walk, prefix),
        element=Element(
            kind,
            int(prediction.unit_keys[0]),
            float(prediction.base[0, feature]),
            float(prediction.residual[0, feature]),
            float(prediction.error[0, feature]),
        ),
        closed_form=explain(subject).totals if whole_head else None,
    )
    progress(3, 3)
    return found


def _decisive(sites: tuple[Site, ...]) -> int | None:
    """The site with the largest contribution; one that overflows comes first, one that rounds no number never."""
    ranked = {i: abs(site.contribution) for i, site in enumerate(sites) if math.isfinite(site.before)}
    return max(ranked, key=lambda i: ranked[i], default=None)


def _emulated(recipe: Recipe, head: AttentionHead, row: int, feature: int) -> float:
    """The element as the emulation has it among its neighbours: products of many rows add up in another order."""
    start = row - row % min(recipe.schedule.query_block, _EMULATED_ROWS)
    stop = min(start + _EMULATED_ROWS, len(head.q))
    rows = torch.arange(start, stop, device=head.q.device)
    return float(emulate_rows(recipe, head, rows)[row - start, feature])


def _worst(subject: Subject, row: int | None, feature: int | None) -> tuple[int, int, str]:
    """The (row, feature) of the largest |excess| within what is asked for, of the largest |error| where all are 0."""
    inputs = subject.inputs
    head = replace(inputs.head, do=None)
    reference = reference_head(head, inputs.mark_rows)
    errors = subject.out - round_nearest_even(reference.out, subject.out_format)
    wanted = torch.ones_like(errors, dtype=torch.bool)
    wanted[inputs.unusable | reference.fully_masked] = False
    if row is not None:
        wanted[torch.arange(len(wanted), device=wanted.device) != row] = False
    if feature is not None:
        wanted[:, torch.arange(wanted.shape[1], device=wanted.device) != feature] = False
    wanted &= errors.isfinite()
    if not bool(wanted.any()):
        where = "no row" if row is None else f"row {row} is not one that"
        raise InputError(f"{subject.source}: {where} sees a key and holds finite numbers; nothing can be looked at")
    name = "largest |excess error|"
    if not bool((errors[wanted] != 0).any()):
        errors, name = subject.out - reference.out, "largest |error| (O is correctly rounded everywhere)"
    at = int(torch.where(wanted, errors.abs(), -1.0).argmax())
    return at // errors.shape[1], at % errors.shape[1], name


@dataclass(frozen=True)
class _Prefix:
    """Prefix errors [N], see Curve."""

    format: str
    error: Array
    rounding_error: Array


def _prefix_errors(walk: Walk, recipe: Recipe, scores: Array, keys: slice, values: Array) -> _Prefix:
    """``scores`` [K]: float64 S of the row over ``keys``; ``values`` [Tk]."""
    held, fmt = walk.held, recipe.accumulator
    if not any(parse(text) for text in (recipe.range_pv, recipe.accumulator)):
        fmt = recipe.out
        held = round_to(torch.from_numpy(held), parse(fmt)).numpy()
    elif parse(fmt) is None:
        fmt = recipe.range_pv
    with np.errstate(over="ignore", invalid="ignore"):
        exact = np.exp(scores[walk.keys - keys.start] - walk.maximum) * values[walk.keys]
        return _Prefix(fmt, held - np.cumsum(exact), held - np.cumsum(walk.products))


def _curve(walk: Walk, prefix: _Prefix) -> Curve:
    count = len(walk.keys)
    units = np.flatnonzero(walk.unit)
    if len(units) > _MAX_POINTS:
        units = units[np.linspace(0, len(units) - 1, _MAX_POINTS - 1).astype(int)]
    units = np.union1d(units, [count - 1])
    others = np.setdiff1d(np.arange(count), units)
    room = min(max(_MAX_POINTS - len(units), 0), len(others))
    picked = others[np.unique(np.linspace(0, len(others) - 1, room).astype(int))] if room else others[:0]
    points = tuple(
        Point(i + 1, int(walk.keys[i]), float(prefix.error[i]), float(prefix.rounding_error[i]), bool(walk.unit[i]))
        for i in np.union1d(units, picked).astype(int).tolist()
    )
    return Curve(prefix.format, count, int(walk.unit.sum()), points)


def _terms(walk: Walk, errors: Array, values: Array) -> tuple[Term, ...]:
    """The P_bar = 1 terms first, then the largest, as many as are shown, in the recipe's order."""
    ranked = np.lexsort((-np.abs(walk.products), ~walk.unit))[:_SHOWN_TERMS]
    return tuple(
        Term(
            position=i + 1,
            key=int(walk.keys[i]),
            probs=float(walk.probs[i]),
            cast_probs=float(walk.cast_probs[i]),
            value=float(values[walk.keys[i]]),
            product=float(walk.products[i]),
            unit=bool(walk.unit[i]),
            error_before=float(errors[i - 1]) if i else 0.0,
            error_after=float(errors[i]),
        )
        for i in sorted(ranked.tolist())
    )


def _examined(site: Site, parts: Parts) -> Addition:
    """The site's rounding, with what it rounds taken apart.

    Main operands: earlier sums, P_bar = 1 terms, and terms of at least half a spacing; the residual: all smaller terms,
    and what fp32 arithmetic lost on the way. Operands sum exactly to what is rounded.
    """
    fmt = site_format(site.format)
    assert fmt is not None
    half = float(ulp(torch.tensor(site.before, dtype=torch.float64), fmt)) / 2
    large = np.abs(parts.products) >= half
    main = parts.unit.astype(bool) | large
    ranked = np.lexsort((-np.abs(parts.products), ~main))
    if not main.any() and not parts.earlier:
        main = np.zeros(len(ranked), dtype=bool)
        main[ranked[:_SHOWN_OPERANDS]] = True
    shown = [i for i in ranked.tolist() if main[i]][:_SHOWN_OPERANDS]
    terms: list[Fraction] = [Fraction(value) for _, value in parts.earlier]
    labels, residual = [name for name, _ in parts.earlier], [False] * len(parts.earlier)

    def add(label: str, value: Fraction, *, small: bool) -> None:
        terms.append(value)
        labels.append(label)
        residual.append(small)

    for i in sorted(shown):
        mark = " (P_bar = 1)" if parts.unit[i] else ""
        add(f"key {int(parts.keys[i])}{mark}", Fraction(float(parts.products[i])), small=False)
    for name, chosen, small in (("large ", main, False), ("", ~main, True)):
        rest = [i for i in np.flatnonzero(chosen).tolist() if i not in shown]
        if rest:
            value = sum((Fraction(float(parts.products[i])) for i in rest), Fraction(0))
            add(f"{len(rest)} {name}term{'s' if len(rest) > 1 else ''}", value, small=small)
    if lost := Fraction(site.before) - sum(terms, Fraction(0)):
        add("arithmetic", lost, small=bool(terms))
    return examine_addition(terms, fmt, residual=residual, labels=labels)


def _examined_mean(site: Site, walk: Walk, values: Array) -> Addition:
    """The cast of O of a tied or swamped element: the n keys of P_bar = 1 by V / n, and the rest as the residual.

    O = A / n + r, as in the closed form: r is what the other keys pull O away from the unit keys' mean of V.
    """
    fmt = site_format(site.format)
    assert fmt is not None
    keys = walk.keys[walk.unit].tolist()
    shares = [Fraction(float(values[key])) / len(keys) for key in keys]
    over = f" / {len(keys)}" if len(keys) > 1 else ""
    terms, labels = shares[:_SHOWN_OPERANDS], [f"V[{key}]{over}, P_bar = 1" for key in keys[:_SHOWN_OPERANDS]]
    if more := shares[_SHOWN_OPERANDS:]:
        terms.append(sum(more, Fraction(0)))
        labels.append(f"{len(more)} further such keys")
    residual = [False] * len(terms)
    if rest := Fraction(site.before) - sum(terms, Fraction(0)):
        terms.append(rest)
        labels.append("other keys")
        residual.append(True)
    return examine_addition(terms, fmt, residual=residual, labels=labels)
