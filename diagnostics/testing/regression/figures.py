"""One case's figures: its sequences become one Capture, which is inspected; nothing is measured here in another way."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field

import torch
from torch import Tensor

from attn_diag.analyses.inspection.capture_job import CaptureJob, Runs
from attn_diag.captures.selection import Selection
from attn_diag.captures.sources import DEFAULT_OBSERVATION
from attn_diag.head.gradient_sums import GradientSums
from attn_diag.head.machine import pick_device
from attn_diag.head.measurement import HeadMeasurement
from attn_diag.kernels import LOW_BIT, Recipe
from attn_diag.reference import FloatFormat, format_of, ulp
from attn_diag.reference.fused import reference_of
from attn_diag.results.baseline import SequenceMean
from attn_diag.results.check import FACTOR, GRADIENTS, OF_QUANTITY
from attn_diag.results.diagnosis import Assumptions
from attn_diag.results.quality import QuantityVerdict
from attn_diag.results.wording import percent
from attn_diag.statistics.means import MIN_SEQUENCES, SignedErrors
from attn_diag.testing.case_inputs import CaseInputs
from attn_diag.testing.regression.documented import explained, factors
from attn_diag.testing.stated import stated_words

BIASES = tuple(OF_QUANTITY)
_YARDSTICK = "yardstick"
# No test of an inspection is looked at: those of a check are its own.
_LEVEL = 0.01


@dataclass(frozen=True)
class ErrorSize:
    """An error beside the published recipe's on the same input."""

    error: float
    """Rms over sequences."""
    yardstick: float
    """The recipe's, likewise."""
    growth_band: float
    """Half the error of one rounding, added (in squares) to errors whose growth is judged: nothing grows from 0."""
    log_ratio: SequenceMean
    """ln(error / yardstick), so added to, over sequences; it hardly depends on the inputs, the same in both."""


@dataclass(frozen=True)
class Measured:
    """The figures of a case."""

    biases: dict[str, SequenceMean]
    """By name, out of ``BIASES``."""
    accepted: dict[str, float]
    """The published recipe's means on the same inputs; a gradient's factor of a documented kernel where that is nearer.
    """
    sizes: dict[str, ErrorSize]
    """By quantity."""
    worst: tuple[int, int, int, float] | None
    """Batch item, head and row of O's largest error, and that in ulp of the row's largest element."""
    quantities: tuple[QuantityVerdict, ...] = ()
    """Each captured quantity over all sequences, beside a well-rounded kernel's; of several heads the gravest."""
    documented: dict[str, str] = field(default_factory=dict)
    """By quantity: the published kernel that makes the same error; see ``documented``."""
    misfit: str | None = None
    """Why there are no figures."""
    declared: str | None = None
    """The recipe below 16 bits that the kernel is declared to be, and that the sizes are beside."""


@dataclass(frozen=True)
class _Units:
    """Scales of one input: the mean spacing of O and the rms noise floor of delta, and roundings in those units."""

    ulp: float
    floor: float | None
    one_rounding_ulp: float
    fmt: FloatFormat

    @classmethod
    def of(cls, case: CaseInputs, out: Tensor) -> _Units:
        fmt = format_of(case.q.dtype)
        spacings = ulp(out.double(), fmt)
        mean = float(spacings.mean())
        floor = None
        if case.do is not None:
            floor = math.sqrt(float((case.do.double() * spacings).square().sum(3).mean()) / 12)
        # An error uniform within half a spacing: rms spacing / sqrt(12).
        return cls(mean, floor, math.sqrt(float(spacings.square().mean()) / 12) / mean, fmt)


def measure_case(
    case: CaseInputs, observed: dict[str, Tensor], yardstick: dict[str, Tensor], recipe: Recipe, device: str
) -> Measured:
    """What ``inspect`` finds in the outputs, and in ``yardstick``, those of the recipe on the same inputs.

    A recipe below 16 bits is what the kernel is declared to be.
    """
    outputs = {**observed, **{f"{_YARDSTICK}.{name}": tensor for name, tensor in yardstick.items()}}
    declared = recipe.name if recipe.name in LOW_BIT else None
    capture = case.captured(outputs, declared=declared)
    # "Made by" only spares recognising the recipe by its bits.
    known = {DEFAULT_OBSERVATION: recipe, _YARDSTICK: recipe}
    job = CaptureJob(capture, Selection(), Runs((), "emulation", known), pick_device(device), _LEVEL)
    if (misfit := _misfit(job.opened.assumptions([DEFAULT_OBSERVATION]), case)) is not None:
        return Measured({}, {}, {}, None, misfit=misfit)
    for _ in job.run():
        pass
    units = _Units.of(case, yardstick["o"])
    own, other = (_by_sequence(job, name, units) for name in (DEFAULT_OBSERVATION, _YARDSTICK))
    accepted = {name: mean.mean for name, mean in _means(other).items()}
    sizes = _sizes(own, other, units, yardstick, observed["o"].dtype == case.q.dtype)
    # A gradient in which a well-rounded kernel has no digit right has no factor either.
    biases = {n: m for n, m in _means(own).items() if not n.endswith(FACTOR) or n.removesuffix(FACTOR) in sizes}
    quantities = job.entries[DEFAULT_OBSERVATION][-1].diagnosis.quantities
    return Measured(
        biases=biases,
        accepted=accepted | _documented(biases, accepted, sizes, case, yardstick, pick_device(device)),
        sizes=sizes,
        worst=_worst(case, observed["o"], device),
        declared=declared,
        quantities=quantities,
        documented=explained(quantities, case, observed, pick_device(device)),
    )


def walk(name: str, size: ErrorSize | None, rows: int) -> float:
    """What one correct rounding adds up to over the rows, over their number: in the unit of a bias.

    The rms of one rounding is 1 noise floor of delta, 1 / sqrt(12) ulp of O, and of a gradient relative.
    """
    if name.endswith(FACTOR):
        one = math.inf if size is None else 2 * size.growth_band
    else:
        one = 1.0 if name == "delta_excess" else 1 / math.sqrt(12)
    return one / math.sqrt(rows)


def between(expected: float, width: float) -> tuple[float, float]:
    """The means that are accepted without a baseline: from 0 to the expected one, and so much about that."""
    return min(0.0, expected) - width, max(0.0, expected) + width


def _documented(
    biases: dict[str, SequenceMean], accepted: dict[str, float], sizes: dict[str, ErrorSize], case: CaseInputs,
    yardstick: dict[str, Tensor], where: torch.device,
) -> dict[str, float]:  # fmt: skip
    """Of gradients whose factors are not accepted: those of documented kernels, where they are nearer."""
    asked = {}
    for name, mean in biases.items():
        quantity = name.removesuffix(FACTOR)
        if quantity in GRADIENTS:
            low, high = between(accepted[name], walk(name, sizes[quantity], case.q.shape[2]))
            if not low <= mean.mean <= high:
                asked[quantity] = mean.mean
    found = {}
    for name, others in factors(asked, case, yardstick, where).items():
        base = accepted[name + FACTOR]
        found[name + FACTOR] = min((base, *(base + x for x in others)), key=lambda x: abs(x - asked[name]))
    return found


@dataclass(frozen=True)
class _Sequence:
    """One sequence of an observation, over its heads."""

    means: dict[str, float]
    """Of ``BIASES``: the mean, in the unit of ``CheckedBias``."""
    errors: dict[str, float]
    """The sizes of ``Size``."""
    coarse_delta: float | None
    """delta's rms over its noise floor, for O in more than the inputs' precision."""


def _by_sequence(job: CaptureJob, name: str, units: _Units) -> list[_Sequence]:
    """The figures of every sequence of one observation: sequences are what is independent."""
    parts: dict[int, list[HeadMeasurement]] = {batch: [] for batch in job.batches}
    for measured in job.measured[name].values():
        for part in measured:
            parts[part.batch].append(part)
    gradients: dict[int, dict[str, list[GradientSums]]] = {batch: {} for batch in job.batches}
    for found in job.key_sums.get(name, {}).values():
        for quantity, of_sequences in found.items():
            for batch, one in zip(job.batches, of_sequences, strict=True):
                gradients[batch].setdefault(quantity, []).append(one.sums)
    for batch, of_batch in parts.items():
        if (dq := [p.dq for p in of_batch if p.dq is not None]) and dq[0].observed:
            gradients[batch]["dq"] = dq
    return [_sequence(parts[batch], gradients[batch], units) for batch in job.batches]


def _sequence(parts: list[HeadMeasurement], gradients: dict[str, list[GradientSums]], units: _Units) -> _Sequence:
    errors = {
        name: SignedErrors.join([p.errors[name] for p in parts])
        for name in parts[0].errors
        if all(name in p.errors for p in parts)
    }
    errors = {name: e for name, e in errors.items() if len(e.total)}
    scales = {
        "o_excess": units.ulp,
        "o_away_excess": units.ulp,
        "delta_excess": units.floor,
        "o": units.ulp,
        "lse": 1.0,
    }
    rms = {n: math.sqrt(e.square / (len(e.total) * e.count)) for n, e in errors.items()}
    sizes: dict[str, float] = {n: rms[n] / scale for n in ("o", "lse") if n in rms and (scale := scales[n])}
    noise = [p.noise for p in parts if p.noise is not None]
    if judged := sum(len(n) for n in noise):
        sizes["delta"] = math.sqrt(sum(float(n.sum()) for n in noise) / judged)
    for name, sums in gradients.items():
        if (error := GradientSums.pool(sums).result().relative_error) is not None:
            sizes[name] = error
    means = {
        n: float(errors[n].total.sum()) / (len(errors[n].total) * errors[n].count) / scale
        for n in BIASES
        if n in errors and (scale := scales[n])
    }
    for name, sums in gradients.items():
        if reference := sum(s.reference for s in sums):
            means[name + FACTOR] = sum(s.along for s in sums) / reference
    return _Sequence(means, sizes, rms["delta"] / units.floor if "delta" in rms and units.floor else None)


def _misfit(found: Assumptions, case: CaseInputs) -> str | None:
    for check in found.checks:
        if not check.ok:
            named = {"o": "O", "lse": "LSE"}[check.output]
            fits = f"; with {check.better} it fits" if check.better else ""
            what = "softmax(scale Q K^T) V" if check.output == "o" else "the logsumexp of scale Q K^T"
            return (
                f"{named} is {percent(check.relative_error)} off {what} as stated ({stated_words(case)}), which no "
                f"rounding explains{fits}"
            )
    return None


def _means(sequences: list[_Sequence]) -> dict[str, SequenceMean]:
    """The tests' means, where there are sequences enough to be the clusters."""
    if len(sequences) < MIN_SEQUENCES:
        return {}
    return {n: _mean([s.means[n] for s in sequences]) for n in BIASES if all(n in s.means for s in sequences)}


def _mean(values: list[float]) -> SequenceMean:
    """Mean, standard error and G - 1."""
    n = len(values)
    if n < 2:
        return SequenceMean(values[0], None, None)
    return SequenceMean(math.fsum(values) / n, statistics.stdev(values) / math.sqrt(n), n - 1.0)


def _sizes(
    own: list[_Sequence], other: list[_Sequence], units: _Units, outputs: dict[str, Tensor], coarse: bool
) -> dict[str, ErrorSize]:
    # One rounding: the rms of an error uniform within the largest relative one.
    cast = 2.0 ** -(units.fmt.precision + 1) / math.sqrt(3)
    roundings = {"o": units.one_rounding_ulp, "delta": 1.0, **dict.fromkeys(GRADIENTS, cast)}
    if "lse" in outputs:
        lse = outputs["lse"]
        roundings["lse"] = float(ulp(lse[lse.isfinite()].double(), format_of(torch.float32)).mean())
    found = {}
    for name, rounding in roundings.items():
        errors = [s.coarse_delta if name == "delta" and not coarse else s.errors.get(name) for s in own]
        by = [s.errors.get(name) for s in other]
        known = [(e, y) for e, y in zip(errors, by, strict=True) if e is not None and y is not None]
        if len(known) < len(own):
            continue
        error, yardstick = (math.sqrt(math.fsum(pair[i] ** 2 for pair in known) / len(known)) for i in (0, 1))
        if name in GRADIENTS and not yardstick < 1:
            continue
        half = rounding / 2
        ratios = [math.log(math.hypot(e, half) / math.hypot(y, half)) for e, y in known]
        found[name] = ErrorSize(error, yardstick, half, _mean(ratios))
    return found


def _worst(case: CaseInputs, out: Tensor, device: str) -> tuple[int, int, int, float] | None:
    """Batch item, head and row of O's largest error, and that in ulp of the row's largest element.

    (In ulp of the element itself the worst are those next to zero, in any kernel.)
    """
    where = torch.device("cuda" if device == "cuda" else "cpu")
    best: tuple[int, int, int, float] | None = None
    for b in range(case.q.shape[0]):
        for h in range(case.q.shape[1]):
            truth = reference_of(case.head(b, h, where, gradients=False)).out
            errors = (out[b, h].to(where).double() - truth).abs().amax(1)
            errors = errors / ulp(truth.abs().amax(1), format_of(case.q.dtype))
            row = int(errors.argmax())
            if best is None or float(errors[row]) > best[3]:
                best = b, h, row, float(errors[row])
    return best
