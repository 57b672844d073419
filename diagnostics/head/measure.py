"""Every observation's signed errors of several heads, row by row, against the float64 reference."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attn_diag.head import judging
from attn_diag.head.certification import Certify, RoundedBound, rounding_of_products, sums_of
from attn_diag.head.effects import measure_effects
from attn_diag.head.figure_sums import UlpCounts, aligned, row_norms
from attn_diag.head.gradient_sums import GradientSums
from attn_diag.head.head_stack import HeadStack
from attn_diag.head.key_gradients import KeyTerms
from attn_diag.head.mean_sums import cut_off, mean_sums
from attn_diag.head.measurement import HeadMeasurement
from attn_diag.head.opened import Bools, OpenedHead, alike, open_heads
from attn_diag.head.projection import HeadProjection
from attn_diag.head.propagation import GradientParts, dq_parts, project
from attn_diag.head.row_maxima import swamped_elements
from attn_diag.head.shared import SharedRows
from attn_diag.head.signed_errors import each_by_feature, each_of_elements, each_of_rows
from attn_diag.head.sink_gradients import sink_terms
from attn_diag.head.stacks import numbers
from attn_diag.head.streaming import ObservedHead, StreamedHead
from attn_diag.reference import FloatFormat, Rows, round_nearest_even, ulp
from attn_diag.reference.heads import stacked
from attn_diag.results.diagnosis import DeltaRounding


def measure_heads(
    passes: Sequence[StreamedHead],
    places: Sequence[tuple[int, int]],
    certify: Certify | None = None,
    shared: Sequence[SharedRows | None] = (),
) -> list[list[HeadMeasurement]]:
    """Measure every observation of some heads of one capture against the reference.

    Args:
        passes: The passes over the heads, made.
        places: Indices of each head's batch item and of the head in the capture, for the measurements.
        certify: Rows to recompute by the oracle.
        shared: What each head has in common with earlier sequences; the rows count once. Empty: nothing.

    Returns:
        For every head one measurement for every observation.
    """
    results: list[list[HeadMeasurement]] = [[] for _ in passes]
    for i in range(len(passes[0].observed)):
        opened = open_heads(passes, [p.observed[i] for p in passes], places)
        for one, of_head in zip(opened, shared or [None] * len(opened), strict=True):
            one.shared = of_head
        for some in alike(opened):
            _measure(some)
        for found, one in zip(results, opened, strict=True):
            found.append(one.result)
    if certify is not None:
        for passed, measured in zip(passes, results, strict=True):
            usable = passed.truth.usable & passed.bounds.known_rows
            certificate = certify.check(passed.inputs.head, passed.truth.reference, passed.bounds, usable)
            for result in measured:
                result.certificate = certificate
    return results


def _measure(some: Sequence[OpenedHead]) -> None:
    """Measure heads that can be side by side."""
    results = [one.result for one in some]
    stack = HeadStack([one.passed for one in some], [one.seen for one in some], [one.rows for one in some])
    _measure_errors(results, stack, [one.eligible for one in some])
    found = zip(results, judging.measure_quality(stack), measure_effects(stack), strict=True)
    for result, quality, effects in found:
        result.quality, result.effects = quality, effects
    for one in some:
        if one.shared is not None:
            _leave_out(one, one.shared)
        one.result.alike = one.result.alike[one.result.tested]
        one.result.sink = sink_terms(one.passed, one.seen.outputs)
    if not len(results[0].rows):
        return
    parts = [stack]
    if any(one.shared is not None for one in some):
        tested = [torch.from_numpy(result.tested).to(stack.head.q.device) for result in results]
        parts = [replace(stack.only([h]), rows=[rows]) for h, rows in enumerate(tested)]
    for result, sums in zip(results, chain.from_iterable(map(mean_sums, parts)), strict=True):
        result.mean_sums = sums
    for result, passed, seen, rows in zip(results, stack.passes, stack.seen, stack.indices, strict=True):
        result.cut_off = cut_off(passed, seen, rows, result.errors.get("o_away_excess"))


def _leave_out(one: OpenedHead, shared: SharedRows) -> None:
    """Keep the signed errors of those rows alone that no earlier sequence has; all else is over all rows."""
    result, repeated = one.result, one.usable & shared.repeated
    result.repeated = int(repeated.sum())
    if result.repeated:
        result.source = shared.source
        kept = one.usable & ~repeated
        rows = np.flatnonzero(kept)
        once = replace(result, errors={}, reference_bounds={}, tested=rows, figures=replace(result.figures))
        stack = HeadStack([one.passed], [one.seen], [torch.from_numpy(rows).to(one.passed.truth.head.q.device)])
        _measure_errors([once], stack, [one.several_keys[kept]])
        for name in ("errors", "reference_bounds", "tested", "with_gradient", "noise"):
            setattr(result, name, getattr(once, name))
        result.top_key = result.top_key[~repeated[one.usable]]
    result.top_key = shared.keys[result.top_key]


class _Rounding:
    """What one correct rounding of O (``truth`` [H, n, Dv], up to ``bound``) to its format gives and errs by."""

    def __init__(self, truth: Tensor, bound: Tensor, fmt: FloatFormat) -> None:
        self.truth, self.bound = truth, bound
        self.rounded = round_nearest_even(truth, fmt)
        self.error = self.rounded - truth
        self.ulps = ulp(truth, fmt)
        self.ulp_sums = self.ulps.flatten(1).sum(1).tolist()
        self.certain = RoundedBound.of(truth, self.error, self.ulps, bound)


def _measure_errors(results: Sequence[HeadMeasurement], stack: HeadStack, eligible: Sequence[Bools]) -> None:
    """Everything that is known row by row; ``eligible`` of each head's rows, [n], have several keys."""
    truth, bound = stack.of(lambda passed: passed.truth.reference.out), stack.of(lambda passed: passed.bounds.out)
    rounding = _Rounding(truth, bound, stack.formats.get("o", stack.passes[0].inputs.input_format))
    own = each_of_elements(rounding.error, rounding.ulp_sums)
    _put(results, "errors", "rounding_o", each_by_feature(own, rounding.error, stack.top_key))
    _measure_forward(results, stack, rounding, eligible)
    if stack.head.do is not None:
        _measure_backward(results, stack, rounding)


def _put(results: Iterable[HeadMeasurement], field: str, name: str, values: Iterable[Any]) -> None:
    """One item of a dictionary of each measurement."""
    for result, value in zip(results, values, strict=True):
        getattr(result, field)[name] = value


def _by_feature_where_uniform(
    results: Sequence[HeadMeasurement], name: str, contributions: Tensor, keys: Tensor
) -> None:
    """Where O is nearly the same in all rows and lies near a tie, all of them share the excess of that feature."""
    for h, result in enumerate(results):
        if result.nearly_uniform:
            one = slice(h, h + 1)
            (result.errors[name],) = each_by_feature([result.errors[name]], contributions[one], keys[one])


def _measure_forward(
    results: Sequence[HeadMeasurement], stack: HeadStack, rounding: _Rounding, eligible: Sequence[Bools]
) -> None:
    if (out := stack.output("o")) is not None:
        error, excess = out - rounding.truth, out - rounding.rounded
        in_all = each_of_elements(error, rounding.ulp_sums)
        _put(results, "errors", "o", each_by_feature(in_all, error, stack.top_key))
        away = excess * rounding.truth.sign()
        for name, values in (("o_excess", excess), ("o_away_excess", away)):
            _put(results, "errors", name, each_of_elements(values, rounding.ulp_sums))
            _by_feature_where_uniform(results, name, values, stack.top_key)
        certain = rounding.certain
        moved = certain.sums()
        for name, sums in (("o", sums_of(rounding.bound)), ("o_excess", moved)):
            _put(results, "reference_bounds", name, sums.tolist())
        _put(results, "reference_bounds", "o_away_excess", (moved + certain.turned(excess)).tolist())
        v = stacked([p.truth.head.v for p in stack.passes])
        v_top = v[torch.arange(len(v), device=v.device)[:, None], stack.top_key]
        swamped = swamped_elements(out, rounding.truth, v_top).sum(2).cpu().numpy()
        for h, (result, counts, doubtful) in enumerate(
            zip(results, UlpCounts.each(error / rounding.ulps), certain.counts, strict=True)
        ):
            result.figures.o_error, result.in_doubt = counts, doubtful
            result.bit_identical = not result.errors["o_excess"].nonzero if out.shape[1] else None
            some = swamped[h][eligible[h]]
            result.swamped = int((some == out.shape[2]).sum()), int(some.sum())
    if (lse := stack.output("lse")) is not None:
        truth = stack.of(lambda passed: passed.truth.reference.lse)
        bounds = sums_of(stack.of(lambda passed: passed.bounds.lse))
        ulp_sums = ulp(truth, stack.formats["lse"]).sum(1).tolist()
        _put(results, "reference_bounds", "lse", bounds.tolist())
        _put(results, "errors", "lse", each_of_elements((lse - truth)[..., None], ulp_sums))


def _measure_backward(results: Sequence[HeadMeasurement], stack: HeadStack, rounding: _Rounding) -> None:
    do = stack.of(lambda passed: passed.truth.head.do)
    # sigma_t: the standard deviation of delta_t if every O_ti is rounded once, uniformly within half an ulp.
    noise_floor = ((do * rounding.ulps).square_().sum(2) / 12).sqrt()
    judged = noise_floor > 0
    for result, marked in zip(results, judged.cpu().numpy(), strict=True):
        result.with_gradient = marked
    direction = (
        stack.of(lambda passed: passed.truth.probs_k).square().sum(2) * stack.head.scale**2
    )  # ||alpha (P K)_t||^2
    floors = (noise_floor.square() * direction).sum(1).tolist()
    terms = {"floors": noise_floor, "keys": stack.top_key, "of_rounding": do * rounding.error}
    out, dq, dq_error, by_delta = stack.output("o"), stack.output("dq"), None, None
    if stack.errors is not None:
        error = terms["error"] = stack.chosen([e.delta_error for e in stack.errors])
        # Squared norms of alpha Delta_delta (P K), row by row.
        by_delta = error.square() * direction
        bounds = sums_of(stack.of(lambda passed: passed.bounds.delta))
        of_excess = rounding.certain.sums(do)
        if out is not None:
            terms["contributions"] = do * (out - rounding.truth)
            for result, sums in zip(results, aligned(terms["contributions"]), strict=True):
                result.figures.aligned = sums
        if (captured := stack.output("delta")) is not None:
            terms["excess"] = stack.chosen([e.delta for e in stack.errors]) - (do * rounding.rounded).sum(2)
            of_excess = of_excess + rounding_of_products(do, rounding.rounded)
        else:
            assert out is not None
            bounds = bounds + rounding_of_products(do, out)
            # The same quantity without cancellation: zero where O is correctly rounded.
            difference = out - rounding.rounded
            terms["excess_by_feature"] = do * difference
            terms["excess"] = terms["excess_by_feature"].sum(2)
            of_excess = of_excess + rounding_of_products(do, difference)
        _put(results, "reference_bounds", "delta", bounds.tolist())
        _put(results, "reference_bounds", "delta_excess", of_excess.tolist())
        for result in results:
            result.delta_source = "from_o" if captured is None else "captured"
        if captured is not None and out is not None and out.shape[1]:
            cast = captured - (do * out).sum(2)
            sizes = numbers(cast.mean(1), cast.square().mean(1).sqrt(), cast.abs().amax(1))
            for result, of_cast in zip(results, sizes, strict=True):
                result.delta_rounding = DeltaRounding(*of_cast)
    exact = stack.of(lambda passed: passed.truth.reference.dq)
    if dq is not None:
        _put(results, "reference_bounds", "dq", sums_of(stack.of(lambda passed: passed.bounds.dq)).tolist())
        dq_error = terms["dq_error"] = dq - exact
        terms["dq_ulps"] = ulp(exact, stack.formats["dq"])
    _sign_backward(results, terms, judged)
    parts = _dq_parts(stack, exact, dq)
    norms = row_norms(dq_error, by_delta, exact)
    delta = stack.of(lambda passed: passed.truth.reference.delta)
    weights = (delta.square() * direction).sum(1).tolist()
    for h, (result, sums) in enumerate(zip(results, GradientSums.each(parts, floors), strict=True)):
        result.dq, result.figures.dq, result.conditioning = sums, norms[h], (weights[h], sums.reference)
        passed, seen, rows = stack.passes[h], stack.seen[h], stack.rows[h]
        if (projection := passed.truth.projection) is not None:
            x = projection.x[rows]
            pulled = parts.map(partial(_pulled, projection, h, rows))
            result.dw_q = project(pulled, x)
            if (of_delta := pulled.parts["delta"]) is not None:
                result.atoms = of_delta, x
        if seen.want_keys:
            result.keys = _key_terms(passed, seen)


def _pulled(projection: HeadProjection, head: int, rows: Rows, errors: Tensor) -> Tensor:
    """Errors of dQ of one head of several, [n, D], as they are where dW_Q is made of them."""
    return projection.pull(errors[head], rows)


def _sign_backward(results: Sequence[HeadMeasurement], terms: dict[str, Tensor], judged: Tensor) -> None:
    """The signed errors of delta and dQ.

    Args:
        results: Of the heads.
        terms: [H, n, ...], by name.
        judged: Rows with a gradient, bool [H, n]: others have no error of delta, whatever the kernel does: they are no
            evidence.
    """
    whole = [h for h, result in enumerate(results) if result.with_gradient is not None and result.with_gradient.all()]
    if len(whole) < len(results):
        for h in sorted(set(range(len(results))) - set(whole)):
            rows = judged[h].nonzero()[:, 0]
            some = {name: t[h : h + 1, rows] for name, t in terms.items()}
            _sign_backward_of([results[h]], some)
        terms = {name: t[whole] for name, t in terms.items()}
    if whole:
        _sign_backward_of([results[h] for h in whole], terms)


def _sign_backward_of(results: Sequence[HeadMeasurement], terms: dict[str, Tensor]) -> None:
    floors, keys, of_rounding = terms["floors"], terms["keys"], terms["of_rounding"]
    signed = each_of_rows(of_rounding.sum(2), floors)
    _put(results, "errors", "rounding_delta", each_by_feature(signed, of_rounding, keys))
    if (error := terms.get("error")) is not None:
        signed = each_of_rows(error, floors)
        if "contributions" in terms:
            signed = each_by_feature(signed, terms["contributions"], keys)
        _put(results, "errors", "delta", signed)
        _put(results, "errors", "delta_excess", each_of_rows(terms["excess"], floors))
        if "excess_by_feature" in terms:
            _by_feature_where_uniform(results, "delta_excess", terms["excess_by_feature"], keys)
        for result, noise in zip(results, (error / floors).square().cpu().numpy(), strict=True):
            result.noise = noise
    if "dq_error" in terms:
        ulp_sums = terms["dq_ulps"].flatten(1).sum(1).tolist()
        _put(results, "errors", "dq", each_of_elements(terms["dq_error"], ulp_sums))


def _key_terms(passed: StreamedHead, seen: ObservedHead) -> KeyTerms:
    errors = passed.errors.get(seen.name)
    return KeyTerms(
        backward=passed.backward.get(seen.name),
        counterfactuals=passed.declared(seen) or passed.counterfactuals,
        variance=passed.variance(seen),
        by_delta=passed.noise.by_delta,
        delta_errors=None if errors is None else judging.paired_deltas(passed, errors),
        shown=passed.shown(seen.name),
        out=seen.outputs.get("o"),
    )


def _dq_parts(stack: HeadStack, exact: Tensor, observed: Tensor | None) -> GradientParts:
    if stack.errors is None:
        unknown: dict[str, Tensor | None] = dict.fromkeys(("delta", "lse", "ds_cast", "dq_cast"))
        return GradientParts(exact, observed, unknown, None)
    lse_errors, casts = [e.lse_error for e in stack.errors], [p.backward[stack.seen[0].name] for p in stack.passes]
    return dq_parts(
        stack.head.scale,
        exact,
        stack.of(lambda passed: passed.truth.probs_k),
        stack.chosen([e.delta_error for e in stack.errors]),
        None if lse_errors[0] is None else stack.chosen(lse_errors),
        None if casts[0].dq_cast is None else stack.chosen([c.dq_cast for c in casts]),
        observed,
        stack.formats.get("dq"),
    )
