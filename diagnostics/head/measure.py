"""One streamed pass over one head: every observation's signed errors, row by row, against the float64 reference."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from attn_diag.head import judging
from attn_diag.head.certification import Certify, RoundedBound, rounding_of_products, sum_of
from attn_diag.head.figure_sums import FigureSums
from attn_diag.head.gradient_sums import GradientSums
from attn_diag.head.judging import KeyTerms
from attn_diag.head.propagation import GradientParts, dq_parts, project
from attn_diag.head.quality import QuantitySample, RowEffect
from attn_diag.head.read import all_finite
from attn_diag.head.row_maxima import DEFINITIONS, Repeats, swamped_elements
from attn_diag.head.shared import SharedRows, rows_alike
from attn_diag.head.signed_errors import by_feature, of_elements, of_rows
from attn_diag.head.sink_gradients import SinkTerms, sink_terms
from attn_diag.head.streaming import ObservedHead, StreamedHead
from attn_diag.reference import FloatFormat, Rows, round_nearest_even, ulp
from attn_diag.results.diagnosis import Certificate, DeltaRounding
from attn_diag.statistics.means import SignedErrors


@dataclass(frozen=True)
class RepeatSums:
    """Rows with a repeated maximum by one definition, and the largest multiplicity; adds over heads."""

    rows: int
    largest: int


@dataclass
class HeadMeasurement:
    """One observation of one head and sequence, reduced to what is linear in T."""

    batch: int
    """Index of the batch item."""
    head: int
    """Index of the head in the capture."""
    rows: npt.NDArray[np.int64]
    """[n], the usable ones: finite, with at least one key."""
    rows_fully_masked: int
    """Rows without a key."""
    rows_unknown: int
    """Rows whose truth float64 cannot tell."""
    rows_nonfinite: int
    """Rows left out because of NaN or Inf in what goes in or comes out."""
    rows_eligible: int
    """Usable rows with several keys."""
    repeats: dict[str, RepeatSums | None]
    """Repeated row maxima, by definition."""
    figures: FigureSums
    """Sums for the figures."""
    tested: npt.NDArray[np.int64]
    """[m], those of ``rows`` that no earlier sequence has too."""
    top_key: npt.NDArray[np.int64]
    """[m], the argmax key of each of ``tested``: of which key it is (``SharedRows.keys``); without that its index."""
    alike: npt.NDArray[np.int64]
    """[m], of each of ``tested`` the first row with the same q and dO: see ``rows_alike``."""
    with_gradient: npt.NDArray[np.bool_] | None = None
    """[m], where dO is not 0; None without dO."""
    repeated: int = 0
    """Usable rows that are left out because an earlier sequence has them too."""
    source: int | None = None
    """The sequence that has most of these."""
    nearly_uniform: bool = False
    """Whether attention is: in half of the rows the mean of exp(S - m) over the visible keys is at least 1/2."""
    swamped: tuple[int, int] | None = None
    """Rows wholly swamped, and swamped elements, of the eligible rows; None without an O."""
    bit_identical: bool | None = None
    """Whether O is RN(O_ref); None without an O or rows."""
    in_doubt: int = 0
    """Elements of RN(O_ref) that the reference's error could change."""
    broken_outputs: dict[str, int] = field(default_factory=dict)
    """Rows of each output with NaN or Inf where the truth is known; only outputs with some."""
    without_keys: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Of o and dq, rows that see no key: with NaN or Inf, and with other numbers than 0; only outputs with some."""
    errors: dict[str, SignedErrors] = field(default_factory=dict)
    """By quantity; arrays follow ``tested``, where dO matters those ``with_gradient`` alone."""
    reference_bounds: dict[str, float] = field(default_factory=dict)
    """What the reference's own error can have added to the sum of each of ``errors``."""
    certificate: Certificate | None = None
    """The oracle's comparison with the reference, where it was asked for."""
    delta_source: str | None = None
    """captured, or from_o; None: neither."""
    delta_rounding: DeltaRounding | None = None
    """The rounding of a captured delta itself; None unless O was captured too."""
    noise: npt.NDArray[np.float64] | None = None
    """delta's squared error over its noise floor's, by row with a gradient."""
    conditioning: tuple[float, float] | None = None
    """||alpha diag(delta) P K||^2 and ||dQ||^2; None without dO."""
    dq: GradientSums | None = None
    """None where it cannot be known."""
    dw_q: GradientParts | None = None
    """None where it cannot be known."""
    atoms: tuple[Tensor, Tensor] | None = None
    """The factors of dW_Q's rank-1 atoms of delta's error: its part of dQ, pulled back, and x."""
    keys: KeyTerms | None = None
    """What is kept of the backward for dK and dV."""
    quality: dict[str, QuantitySample] = field(default_factory=dict)
    """O and dQ beside a well-rounded kernel's."""
    sink: SinkTerms | None = None
    """Of its sink's gradient; None without one."""
    effects: dict[str, RowEffect] = field(default_factory=dict)
    """LSE and a captured delta, by what their errors make of dQ."""
    mean_sums: dict[str, npt.NDArray[np.float64]] = field(default_factory=dict)
    """By test, observed and of what it is held against, see ``judging.measure_means``."""


def measure_head(
    passed: StreamedHead,
    batch: int,
    head: int,
    certify: Certify | None = None,
    shared: SharedRows | None = None,
) -> list[HeadMeasurement]:
    """Measure every observation of a head against the reference.

    Args:
        passed: The pass over the head, made.
        batch: Index of the batch item, for the measurements.
        head: Index of the head in the capture, likewise.
        certify: Rows to recompute by the oracle.
        shared: What the head has in common with earlier sequences; the rows count once.

    Returns:
        One measurement for every observation.
    """
    results = [_measure(passed, seen, batch, head, shared) for seen in passed.observed]
    if certify is not None:
        usable = passed.truth.usable & passed.bounds.known_rows
        certificate = certify.check(passed.inputs.head, passed.truth.reference, passed.bounds, usable)
        for result in results:
            result.certificate = certificate
    return results


def _measure(
    passed: StreamedHead, seen: ObservedHead, batch: int, head: int, shared: SharedRows | None = None
) -> HeadMeasurement:
    inputs, reference, maxima = passed.truth.inputs, passed.truth.reference, passed.maxima[seen.name]
    broken = {name: ~_row_finite(values) for name, values in seen.outputs.items()}
    finite = ~inputs.unusable
    known = passed.bounds.known_rows
    usable = finite & ~reference.fully_masked & known
    faulty, before = {name: int((bad & usable).sum()) for name, bad in broken.items()}, int(usable.sum())
    for bad in broken.values():
        usable = usable & ~bad
    lost = before - int(usable.sum())
    # All rows usable, as ever but for masked or non-finite ones: a slice spares copies of every tensor.
    rows = slice(None) if bool(usable.all()) else usable.nonzero()[:, 0]
    kept = torch.arange(len(usable))[rows] if isinstance(rows, slice) else rows.cpu()
    eligible = usable & maxima.several_keys
    repeats = {name: maxima.repeats(name) for name in DEFINITIONS}
    exact, unit = repeats["exact"], repeats["unit"]
    assert exact is not None
    assert unit is not None
    top_key = maxima.top_key[rows]
    result = HeadMeasurement(
        batch=batch,
        head=head,
        rows=kept.numpy(),
        rows_fully_masked=int((reference.fully_masked & finite).sum()),
        rows_unknown=int((finite & ~reference.fully_masked & ~known).sum()),
        rows_nonfinite=int((~finite).sum()) + lost,
        rows_eligible=int(eligible.sum()),
        repeats={name: _repeat_sums(found, usable) for name, found in repeats.items()},
        tested=kept.numpy(),
        top_key=top_key.cpu().numpy(),
        alike=rows_alike(inputs.head),
        figures=FigureSums.of(exact, unit, maxima.row_max, rows),
        broken_outputs={name: count for name, count in faulty.items() if count},
        without_keys=judging.rows_without_keys(seen, reference.fully_masked & finite),
    )
    result.nearly_uniform = passed.nearly_uniform(usable)
    _measure_errors(result, passed, seen, rows, top_key, eligible[rows])
    if shared is not None:
        _leave_out(result, passed, seen, usable, shared, maxima.top_key, eligible)
    result.alike = result.alike[result.tested]
    kept_rows = usable.nonzero()[:, 0]
    result.quality = judging.measure_quality(passed, seen, kept_rows, top_key)
    result.sink = sink_terms(passed, seen.outputs)
    if len(kept_rows):
        result.effects = judging.measure_effects(passed, seen, kept_rows)
        tested = torch.from_numpy(result.tested).to(kept_rows.device)
        result.mean_sums = judging.measure_means(passed, seen, tested)
    return result


def _measure_errors(
    result: HeadMeasurement, passed: StreamedHead, seen: ObservedHead, rows: Rows, top_key: Tensor, eligible: Tensor
) -> None:
    """Everything that is known row by row."""
    inputs = passed.truth.inputs
    truth, bound = passed.truth.reference.out[rows], passed.bounds.out[rows]
    rounding = _Rounding(truth, bound, seen.formats.get("o", inputs.input_format))
    result.errors["rounding_o"] = by_feature(of_elements(rounding.error, rounding.ulp_sum), rounding.error, top_key)
    _measure_forward(result, passed, seen, rounding, rows, top_key, eligible)
    if inputs.head.do is not None:
        _measure_backward(result, passed, seen, rounding, rows, top_key)


def _leave_out(
    result: HeadMeasurement,
    passed: StreamedHead,
    seen: ObservedHead,
    usable: Tensor,
    shared: SharedRows,
    top_key: Tensor,
    eligible: Tensor,
) -> None:
    """Keep the signed errors of those rows alone that no earlier sequence has; all else is over all rows."""
    repeated = usable & torch.from_numpy(shared.repeated).to(usable.device)
    result.repeated = int(repeated.sum())
    if result.repeated:
        result.source = shared.source
        rows = (usable & ~repeated).nonzero()[:, 0]
        once = replace(
            result, errors={}, reference_bounds={}, tested=rows.cpu().numpy(), figures=replace(result.figures)
        )
        _measure_errors(once, passed, seen, rows, top_key[rows], eligible[rows])
        for name in ("errors", "reference_bounds", "tested", "with_gradient", "noise"):
            setattr(result, name, getattr(once, name))
        result.top_key = top_key[rows].cpu().numpy()
    result.top_key = shared.keys[result.top_key]


class _Rounding:
    """What one correct rounding of O (``truth`` [n, Dv], up to ``bound``) to its format gives and errs by."""

    def __init__(self, truth: Tensor, bound: Tensor, fmt: FloatFormat) -> None:
        self.truth, self.bound = truth, bound
        self.rounded = round_nearest_even(truth, fmt)
        self.error = self.rounded - truth
        self.ulps = ulp(truth, fmt)
        self.ulp_sum = float(self.ulps.sum())
        self.certain = RoundedBound.of(truth, self.error, self.ulps, bound)


def _measure_forward(
    result: HeadMeasurement,
    passed: StreamedHead,
    seen: ObservedHead,
    rounding: _Rounding,
    rows: Rows,
    top_key: Tensor,
    eligible: Tensor,
) -> None:
    if (out := seen.outputs.get("o")) is not None:
        out = out[rows]
        error, excess = out - rounding.truth, out - rounding.rounded
        result.errors["o"] = by_feature(of_elements(error, rounding.ulp_sum), error, top_key)
        result.figures.add_out(error, rounding.ulps)
        result.errors["o_excess"] = of_elements(excess, rounding.ulp_sum)
        away = excess * rounding.truth.sign()
        result.errors["o_away_excess"] = of_elements(away, rounding.ulp_sum)
        if result.nearly_uniform:
            # O is nearly the same in all rows: where it lies near a tie, all of them share the excess of that feature.
            for name, values in (("o_excess", excess), ("o_away_excess", away)):
                result.errors[name] = by_feature(result.errors[name], values, top_key)
        certain = rounding.certain
        result.reference_bounds |= {
            "o": sum_of(rounding.bound),
            "o_excess": certain.sum(),
            "o_away_excess": certain.sum() + certain.turned(excess),
        }
        result.in_doubt = certain.count
        result.bit_identical = not result.errors["o_excess"].nonzero if len(out) else None
        swamped = swamped_elements(out, rounding.truth, passed.truth.head.v, top_key).sum(1)[eligible]
        result.swamped = int((swamped == out.shape[1]).sum()), int(swamped.sum())
    if (lse := seen.outputs.get("lse")) is not None:
        truth = passed.truth.reference.lse[rows]
        result.reference_bounds["lse"] = sum_of(passed.bounds.lse[rows])
        ulp_sum = float(ulp(truth, seen.formats["lse"]).sum())
        result.errors["lse"] = of_elements((lse[rows] - truth)[:, None], ulp_sum)


def _measure_backward(
    result: HeadMeasurement,
    passed: StreamedHead,
    seen: ObservedHead,
    rounding: _Rounding,
    rows: Rows,
    top_key: Tensor,
) -> None:
    truth, forward_errors = passed.truth, passed.errors.get(seen.name)
    head, reference, projection = truth.head, truth.reference, truth.projection
    assert head.do is not None
    assert reference.delta is not None
    assert reference.dq is not None
    assert truth.probs_k is not None
    do = head.do[rows]
    # sigma_t: the standard deviation of delta_t if every O_ti is rounded once, uniformly within half an ulp.
    noise_floor = ((do * rounding.ulps).square_().sum(1) / 12).sqrt()
    of_rounding = do * rounding.error
    judged = noise_floor > 0
    result.with_gradient = judged.cpu().numpy()
    # Rows without a gradient have no error of delta, whatever the kernel does: they are no evidence.
    some: Rows = slice(None) if result.with_gradient.all() else judged.nonzero()[:, 0]
    floors, keys = noise_floor[some], top_key[some]
    of_rounding = of_rounding[some]
    result.errors["rounding_delta"] = by_feature(of_rows(of_rounding.sum(1), floors), of_rounding, keys)
    direction = truth.probs_k[rows].square().sum(1) * head.scale**2  # ||alpha (P K)_t||^2
    floor = float((noise_floor.square() * direction).sum())

    if forward_errors is not None:
        error = forward_errors.delta_error[rows]
        result.errors["delta"] = of_rows(error[some], floors)
        if (out := seen.outputs.get("o")) is not None:
            contributions = do * (out[rows] - rounding.truth)
            result.figures.add_contributions(contributions)
            result.errors["delta"] = by_feature(result.errors["delta"], contributions[some], keys)
        assert passed.bounds.delta is not None
        own, moved = sum_of(passed.bounds.delta[rows]), rounding.certain.sum(do)
        if "delta" in seen.outputs:
            difference = None
            excess = forward_errors.delta[rows] - (do * rounding.rounded).sum(1)
            own_excess = moved + rounding_of_products(do, rounding.rounded)
        else:
            out = seen.outputs["o"][rows]
            own += rounding_of_products(do, out)
            # The same quantity without cancellation: zero where O is correctly rounded.
            difference = out - rounding.rounded
            excess = (do * difference).sum(1)
            own_excess = moved + rounding_of_products(do, difference)
        result.reference_bounds |= {"delta": own, "delta_excess": own_excess}
        result.errors["delta_excess"] = of_rows(excess[some], floors)
        if result.nearly_uniform and difference is not None:
            contributions = (do * difference)[some]
            result.errors["delta_excess"] = by_feature(result.errors["delta_excess"], contributions, keys)
        result.noise = (error[some] / floors).square().cpu().numpy()
        result.delta_source = "captured" if "delta" in seen.outputs else "from_o"
        if "delta" in seen.outputs and "o" in seen.outputs and len(error):
            cast = seen.outputs["delta"][rows] - (do * seen.outputs["o"][rows]).sum(1)
            result.delta_rounding = DeltaRounding(
                float(cast.mean()), float(cast.square().mean().sqrt()), float(cast.abs().max())
            )
    dq_error, by_delta = None, None
    if (dq := seen.outputs.get("dq")) is not None:
        exact = reference.dq[rows]
        assert passed.bounds.dq is not None
        result.reference_bounds["dq"] = sum_of(passed.bounds.dq[rows])
        dq_error = dq[rows] - exact
        result.errors["dq"] = of_elements(dq_error[some], float(ulp(exact[some], seen.formats["dq"]).sum()))
    parts = _dq_parts(passed, seen)
    kept = parts if isinstance(rows, slice) else parts.map(lambda tensor: tensor[rows])
    result.dq = GradientSums.of(kept, floor=floor)
    if forward_errors is not None:
        # Squared norms of alpha Delta_delta (P K), row by row.
        by_delta = forward_errors.delta_error[rows].square() * direction
    result.figures.add_dq(dq_error, by_delta, kept.reference)
    result.conditioning = float((reference.delta[rows].square() * direction).sum()), result.dq.reference
    if projection is not None:
        x = projection.x[rows]
        pulled = kept.map(lambda errors: projection.pull(errors, rows))
        result.dw_q = project(pulled, x)
        if (delta := pulled.parts["delta"]) is not None:
            result.atoms = delta, x
    if seen.want_keys:
        noise = passed.noise
        result.keys = KeyTerms(
            backward=passed.backward.get(seen.name),
            counterfactuals=passed.declared(seen) or passed.counterfactuals,
            variance=passed.variance(seen),
            by_delta=noise.by_delta,
            delta_errors=None if forward_errors is None else judging.paired_deltas(passed, forward_errors),
        )


def _dq_parts(passed: StreamedHead, seen: ObservedHead) -> GradientParts:
    truth, forward_errors, observed = passed.truth, passed.errors.get(seen.name), seen.outputs.get("dq")
    if forward_errors is None:
        assert truth.reference.dq is not None
        unknown: dict[str, Tensor | None] = dict.fromkeys(("delta", "lse", "ds_cast", "dq_cast"))
        return GradientParts(truth.reference.dq, observed, unknown, None)
    assert truth.probs_k is not None
    collected, fmt = passed.backward[seen.name], seen.formats.get("dq")
    return dq_parts(truth.head, truth.reference, truth.probs_k, forward_errors, collected, observed, fmt)


def _repeat_sums(found: Repeats | None, usable: Tensor) -> RepeatSums | None:
    if found is None:
        return None
    multiplicity = found.multiplicity[usable]
    return RepeatSums(int((multiplicity > 1).sum()), int(multiplicity.max()) if len(multiplicity) else 0)


def _row_finite(values: Tensor) -> Tensor:
    if all_finite(values):
        return torch.ones(len(values), dtype=torch.bool, device=values.device)
    finite = values.isfinite()
    return finite.all(1) if finite.ndim == 2 else finite
