"""The microscope: how one element O[row, feature] came about, rounding by rounding, and what its residual decided."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import overload

import numpy as np
import torch
from torch import Tensor
from typing_extensions import Unpack

from attn_diag.analyses.microscopy.addition import examine_addition
from attn_diag.analyses.microscopy.closed_form import MicroscopeSubject, explain, predict_block, subject_of
from attn_diag.analyses.microscopy.walk import Array as Values
from attn_diag.analyses.microscopy.walk import Walk, WalkParts, exponent_factor, walk_element
from attn_diag.analyses.several import answers, require_by_name
from attn_diag.captures.capture import Capture
from attn_diag.captures.given import Array, CallTensors, Named, One, Source
from attn_diag.errors import InputError
from attn_diag.head.machine import describe_tool
from attn_diag.head.row_maxima import site_format
from attn_diag.kernels import Recipe, emulate_rows, trace_row
from attn_diag.kernels.emulation_block import rounds_dropout
from attn_diag.kernels.formats import parse, round_to
from attn_diag.reference import AttentionHead, RowBlock, reference_head, reference_rows, round_nearest_even, ulp
from attn_diag.results.microscope import Addition, Class, Curve, Element, Microscope, Point, SumSite, Term
from attn_diag.results.several import Several
from attn_diag.work import Progress, silent

_MAX_POINTS = 512
# Operands of the decisive addition, and further terms, that are listed one by one.
_SHOWN_OPERANDS = 6
_SHOWN_TERMS = 12
# Rows that are emulated together with the one that is walked.
_EMULATED_ROWS = 64


# Above it the emulation moves the maximum to the sink.
_FAR_SINK = 64.0


@overload
def microscope(
    source: One | AttentionHead, k: Array | None = None, v: Array | None = None, *,
    row: int | None = None, feature: int | None = None, recipe: str | Recipe | None = None,
    observation: str | None = None, observed: Tensor | None = None, batch: int = 0, head: int | None = None,
    device: str = "auto", whole_head: bool = True, progress: Progress | None = None, **call: Unpack[CallTensors],
) -> Microscope: ...  # fmt: skip
@overload
def microscope(
    source: Named | Sequence[Capture | Named], *,
    row: int | None = None, feature: int | None = None, recipe: str | Recipe | None = None,
    observation: str | None = None, observed: Tensor | None = None, batch: int = 0, head: int | None = None,
    device: str = "auto", whole_head: bool = True, progress: Progress | None = None, **call: Unpack[CallTensors],
) -> Microscope | Several[Microscope]: ...  # fmt: skip
def microscope(
    source: Source | AttentionHead,
    k: Array | None = None,
    v: Array | None = None,
    *,
    row: int | None = None,
    feature: int | None = None,
    recipe: str | Recipe | None = None,
    observation: str | None = None,
    observed: Tensor | None = None,
    batch: int = 0,
    head: int | None = None,
    device: str = "auto",
    whole_head: bool = True,
    progress: Progress | None = None,
    **call: Unpack[CallTensors],
) -> Microscope | Several[Microscope]:
    """Walk O[row, feature] through a recipe's own arithmetic and schedule, and examine its decisive rounding.

    Args:
        source: q of a call, [B, H, T, D]; a Capture, a capture's file, a folder of them, or a list of these; or one
            head (q, k, v float64).
        k, v: Of the call.
        row, feature: A query row of the capture, and a feature; None: those of the largest |excess error| of the
            captured O, or of the recipe's where none was captured.
        recipe: A name or a Recipe; None: what the captured O is recognised as, else fa2.
        observation: None: the first with an O.
        observed: O [Tq, Dv] of a head, where there is one.
        batch: Index of the batch item.
        head: The model's number of the head; None: the capture's first.
        device: auto, cpu or cuda.
        whole_head: Also give the closed form's totals over the head (another pass over it).
        progress: Called with (done, total) of three steps: recipe found, element walked, closed form.
        **call: What else the call had and returned, as ``attn_diag.inspect`` takes it: o, lse, delta, do, dq, dk, dv,
            x, w_q, dq_pre, mask, causal, scale, window, softcap, layout.

    Returns:
        One answer; of a folder or a list ``Several``, an answer a capture.

    Raises:
        InputError: A row, feature, head or name does not exist, NaN or Inf makes the row unusable, it sees no key, or
            the recipe rounds at random; and as ``captures_of``.
    """

    def of(one: Capture | AttentionHead, counted: Progress | None) -> Microscope:
        subject = subject_of(
            one, recipe=recipe, observation=observation, observed=observed, batch=batch, head=head, device=device
        )
        return look(subject, row, feature, whole_head=whole_head, progress=counted or silent)

    if isinstance(source, AttentionHead):
        require_by_name("microscope", k)
        return of(source, progress)
    return answers("microscope", source, k, v, call, of, progress)


def look(
    subject: MicroscopeSubject,
    row: int | None,
    feature: int | None,
    *,
    chosen: str = "as asked",
    whole_head: bool = True,
    progress: Progress = silent,
) -> Microscope:
    """The microscope on a subject; see ``microscope``. ``chosen``: how row and feature, where both are given, were."""
    opened, head, recipe = subject.opened, subject.inputs.head, subject.recipe
    progress(1, 3)
    for name, number, count in (("row", row, len(head.q)), ("feature", feature, head.v.shape[1])):
        if number is not None and not 0 <= number < count:
            raise InputError(f"{opened.source}: {name} must lie between 0 and {count - 1}, got {number}")
    if row is None or feature is None:
        row, feature, chosen = _worst(subject, row, feature)
    forward, values = replace(head, do=None), head.v[:, feature].cpu().numpy()
    rows = torch.tensor([row], device=head.q.device)
    block = reference_rows(forward, rows)
    subject.inputs.mark_rows(block)
    if bool(subject.inputs.unusable[row]):
        raise InputError(f"{opened.source}: row {row} holds or sees NaN or Inf; choose another row")
    if bool(block.fully_masked[0]):
        raise InputError(f"{opened.source}: row {row} sees no key; choose another row")
    _refuse_low_bit(subject)
    _refuse_sinks_beyond_the_walk(subject, block)
    trace = trace_row(recipe, forward, row)
    walk = walk_element(recipe, trace, head.v[:, feature], exponent_factor(recipe, head))
    emulated = _emulated(recipe, forward, row, feature)
    reference = float(block.out[0, feature])
    truth = torch.tensor(reference, dtype=torch.float64)
    rounded = float(round_nearest_even(truth, subject.out_format))
    observed = None if opened.observation is None else float(subject.out[row, feature])
    told = walk.out if observed is None else observed
    decisive = _decisive(walk.sites)
    kept = values
    if head.dropout is not None:
        kept = np.where(head.dropout.kept[row].cpu().numpy(), values, 0.0)
    prefix = _prefix_errors(walk, recipe, block.scores[0].cpu().numpy(), block.keys, kept)
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
        addition = _examined_mean(site, walk, values * trace.factor) if of_o else _examined(site, parts)
    progress(2, 3)
    found = Microscope(
        tool=describe_tool(head.q.device),
        source=opened.source,
        observation=opened.observation,
        recipe=recipe.name,
        recipe_reason=opened.baseline.words,
        layer=opened.layer,
        batch=opened.batch,
        head=opened.head,
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
        terms=_terms(walk, prefix[1], values),
        curve=_curve(walk, *prefix),
        element=Element(
            kind,
            int(prediction.unit_keys[0]),
            float(prediction.base[0, feature]),
            float(prediction.residual[0, feature]),
            float(prediction.error[0, feature]),
        ),
        closed_form=explain(subject).totals if whole_head else None,
        unfit=opened.baseline.caution,
    )
    progress(3, 3)
    return found


def _refuse_low_bit(subject: MicroscopeSubject) -> None:
    """Raise InputError where operands are quantised, or P holds a rounded 1 / (1 - p): the walk multiplies others."""
    recipe = subject.recipe
    low_bit = recipe.quantized or recipe.alpha == "in-q" or recipe.pv_sums != "fp32"
    if low_bit or rounds_dropout(recipe, subject.inputs.head):
        what = "quantised operands" if low_bit else "rounded 1 / (1 - p) of dropout"
        source = subject.opened.source
        raise InputError(f"{source}: the microscope does not follow {recipe.name}'s {what}; use attn-diag attribute")


def _refuse_sinks_beyond_the_walk(subject: MicroscopeSubject, block: RowBlock) -> None:
    """Raise InputError where a sink joins merged splits, or takes so much that the maximum moves to it."""
    opened, split = subject.opened, subject.recipe.schedule.split_keys
    if block.sink is None:
        return
    if split is not None and split < len(subject.inputs.head.k):
        raise InputError(
            f"{opened.source}: recipe {subject.recipe.name} splits the keys, and the microscope does not follow a sink "
            "through their merge; choose a recipe without splits"
        )
    if block.sink - float(block.row_max[0]) > _FAR_SINK:
        raise InputError(
            f"{opened.source}: the sink lies {block.sink - float(block.row_max[0]):.3g} above the row's largest score "
            "and takes all of it; choose another row"
        )


def most_of_delta(subject: MicroscopeSubject, row: int) -> int | None:
    """The feature whose error of O adds most to |delta's error| in ``row``; None where none does, or without dO."""
    head = subject.inputs.head
    if head.do is None:
        return None
    truth = reference_rows(replace(head, do=None), torch.tensor([row], device=head.q.device)).out[0]
    parts = (head.do[row] * (subject.out[row] - truth)).abs()
    at = int(parts.argmax())
    return at if float(parts[at]) > 0 else None


def _decisive(sites: tuple[SumSite, ...]) -> int | None:
    """The site with the largest contribution; one that overflows comes first, one that rounds no number never."""
    ranked = {i: abs(site.contribution) for i, site in enumerate(sites) if math.isfinite(site.before)}
    return max(ranked, key=lambda i: ranked[i], default=None)


def _emulated(recipe: Recipe, head: AttentionHead, row: int, feature: int) -> float:
    """The element as the emulation has it among its neighbours: products of many rows add up in another order."""
    start = row - row % min(recipe.schedule.query_block, _EMULATED_ROWS)
    stop = min(start + _EMULATED_ROWS, len(head.q))
    rows = torch.arange(start, stop, device=head.q.device)
    return float(emulate_rows(recipe, head, rows)[row - start, feature])


def _worst(subject: MicroscopeSubject, row: int | None, feature: int | None) -> tuple[int, int, str]:
    """The (row, feature) of the largest |excess| within what is asked for, of the largest |error| where all are 0."""
    inputs, truth = subject.inputs, subject.opened.measured
    # The forward alone, unless the truth is known.
    reference = reference_head(replace(inputs.head, do=None), inputs.mark_rows) if truth is None else truth.reference
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
        raise InputError(
            f"{subject.opened.source}: {where} sees a key and holds finite numbers; nothing can be looked at"
        )
    name = "largest |excess error|"
    if not bool((errors[wanted] != 0).any()):
        errors, name = subject.out - reference.out, "largest |error| (O is correctly rounded everywhere)"
    at = int(torch.where(wanted, errors.abs(), -1.0).argmax())
    return at // errors.shape[1], at % errors.shape[1], name


def _prefix_errors(
    walk: Walk, recipe: Recipe, scores: Values, keys: slice, values: Values
) -> tuple[str, Values, Values]:
    """The format, and ``error`` and ``rounding_error`` [N], of a Curve.

    ``scores`` [K]: float64 S of the row over ``keys``; ``values`` [Tk], 0 where a key is dropped.
    """
    held, fmt = walk.held, recipe.accumulator
    if not any(parse(text) for text in (recipe.range_pv, recipe.accumulator)):
        fmt = recipe.out
        held = round_to(torch.from_numpy(held), parse(fmt)).numpy()
    elif parse(fmt) is None:
        fmt = recipe.range_pv
    with np.errstate(over="ignore", invalid="ignore"):
        exact = np.exp(scores[walk.keys - keys.start] - walk.maximum) * values[walk.keys]
        return fmt, held - np.cumsum(exact), held - np.cumsum(walk.products)


def _curve(walk: Walk, fmt: str, error: Values, rounding_error: Values) -> Curve:
    count = len(walk.keys)
    units = np.flatnonzero(walk.unit)
    if len(units) > _MAX_POINTS:
        units = units[np.linspace(0, len(units) - 1, _MAX_POINTS - 1).astype(int)]
    units = np.union1d(units, [count - 1])
    others = np.setdiff1d(np.arange(count), units)
    room = min(max(_MAX_POINTS - len(units), 0), len(others))
    picked = others[np.unique(np.linspace(0, len(others) - 1, room).astype(int))] if room else others[:0]
    points = tuple(
        Point(i + 1, int(walk.keys[i]), float(error[i]), float(rounding_error[i]), bool(walk.unit[i]))
        for i in np.union1d(units, picked).astype(int).tolist()
    )
    return Curve(fmt, count, int(walk.unit.sum()), points)


def _terms(walk: Walk, errors: Values, values: Values) -> tuple[Term, ...]:
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


def _examined(site: SumSite, parts: WalkParts) -> Addition:
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


def _examined_mean(site: SumSite, walk: Walk, values: Values) -> Addition:
    """The cast of O of a tied or swamped element: the n keys of P_bar = 1 by V / n, and the rest as the residual.

    O = A / n + r, as in the closed form: r is what the other keys pull O away from the unit keys' mean of V.
    ``values`` [Tk]: times 1 / (1 - p) of dropout.
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
