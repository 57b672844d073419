"""One case's figures: every sequence becomes a Capture and is inspected; nothing is measured here in another way."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

import torch
from torch import Tensor

from attn_diag.analyses.inspection.inspect import inspect_captures
from attn_diag.captures.capture import DEFAULT_OBSERVATION, Capture
from attn_diag.kernels import Recipe
from attn_diag.reference import AttentionHead, FloatFormat, Masking, format_of, reference_head, ulp
from attn_diag.results.baseline import SequenceMean
from attn_diag.results.diagnosis import CaptureDiagnosis, HeadDiagnosis
from attn_diag.results.wording import percent
from attn_diag.statistics.means import MIN_SEQUENCES
from attn_diag.testing.target import CaseInputs

BIASES = ("o_excess", "o_away_excess", "delta_excess")
_YARDSTICK = "yardstick"
_GRADIENTS = ("dq", "dk", "dv")


@dataclass(frozen=True)
class ErrorSize:
    """An error beside the published recipe's on the same input."""

    error: float
    """Rms over sequences."""
    yardstick: float
    """The recipe's, likewise."""
    budget_band: float
    """What one correct rounding adds to the budget."""
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
    """The published recipe's means on the same inputs."""
    sizes: dict[str, ErrorSize]
    """By quantity."""
    worst: tuple[int, int, int, float] | None
    """Batch item, head and row of O's largest error, and that in ulp of the row's largest element."""
    misfit: str | None = None
    """Why there are no figures."""


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
    """What ``inspect`` finds in the outputs, and in the published recipe's on the same inputs."""
    captures = [_one_sequence(case, observed, yardstick, b) for b in range(case.q.shape[0])]
    # "Made by" only spares recognising the recipe by its bits.
    known = {DEFAULT_OBSERVATION: recipe, _YARDSTICK: recipe}
    # Whatever is not this attention is so in every sequence, and to look for what it is instead takes long.
    (first,) = inspect_captures(captures[:1], made_by=known, device=device).captures
    if (misfit := _misfit(first)) is not None:
        return Measured({}, {}, {}, None, misfit)
    rest = inspect_captures(captures[1:], made_by=known, device=device, merge_ranks=False).captures
    found = (first, *rest)
    if misfits := [words for sequence in rest if (words := _misfit(sequence)) is not None]:
        return Measured({}, {}, {}, None, misfits[0])
    heads = [{o.name: o.pooled for o in sequence.observations} for sequence in found]
    own, other = ([h[name] for h in heads] for name in (DEFAULT_OBSERVATION, _YARDSTICK))
    units = _Units.of(case, yardstick["o"])
    accepted = {name: mean.mean for name, mean in _means(other, units).items()}
    sizes = _sizes(own, other, units, yardstick, observed["o"].dtype == case.q.dtype)
    return Measured(_means(own, units), accepted, sizes, _worst(case, observed["o"], device))


def _one_sequence(case: CaseInputs, observed: dict[str, Tensor], yardstick: dict[str, Tensor], b: int) -> Capture:
    """One batch item with both observations: a capture of its own, since sequences are what is independent."""
    tensors = {"q": case.q, "k": case.k, "v": case.v, "do": case.do, **observed}
    tensors |= {f"{_YARDSTICK}.{name}": tensor for name, tensor in yardstick.items()}
    own = {name: None if tensor is None else tensor[b : b + 1] for name, tensor in tensors.items()}
    return Capture.from_tensors(own, scale=case.scale, causal=case.causal)


def _misfit(found: CaptureDiagnosis) -> str | None:
    for check in found.assumptions.checks:
        if check.observation == DEFAULT_OBSERVATION and not check.ok:
            named = {"o": "O", "lse": "LSE"}[check.output]
            fits = f"; with {check.better} it fits" if check.better else ""
            what = "softmax(scale Q K^T) V" if check.output == "o" else "the logsumexp of scale Q K^T"
            return (
                f"{named} is {percent(check.relative_error)} off {what} as stated "
                f"(causal {found.metadata['causal']}), which no rounding explains{fits}"
            )
    return None


def _means(sequences: list[HeadDiagnosis], units: _Units) -> dict[str, SequenceMean]:
    """The tests' means, where there are sequences enough to be the clusters."""
    if len(sequences) < MIN_SEQUENCES:
        return {}
    scales = {"o_excess": units.ulp, "o_away_excess": units.ulp, "delta_excess": units.floor}
    found = {}
    for name, scale in scales.items():
        estimates = [getattr(head.bias, name) for head in sequences]
        means = [e.mean for e in estimates if e is not None and e.mean is not None]
        if scale and len(means) == len(sequences):
            found[name] = _mean([m / scale for m in means])
    return found


def _mean(values: list[float]) -> SequenceMean:
    """Mean, standard error and G - 1."""
    n = len(values)
    if n < 2:
        return SequenceMean(values[0], None, None)
    return SequenceMean(math.fsum(values) / n, statistics.stdev(values) / math.sqrt(n), n - 1.0)


def _sizes(
    own: list[HeadDiagnosis], other: list[HeadDiagnosis], units: _Units, outputs: dict[str, Tensor], coarse: bool
) -> dict[str, ErrorSize]:
    # The largest relative error of one rounding, and the rms of an error uniform within it.
    u = 2.0 ** -(units.fmt.precision + 1)
    cast = u / math.sqrt(3)
    bands = {"o": (units.one_rounding_ulp, units.one_rounding_ulp), "delta": (1.0, 1.0)}
    bands |= dict.fromkeys(("dq", "dk", "dv"), (cast, cast))
    if "lse" in outputs:
        lse = outputs["lse"]
        # An l that sums P_bar after its cast moves L by at most ln(1 + u).
        bands["lse"] = u, float(ulp(lse[lse.isfinite()].double(), format_of(torch.float32)).mean())
    found = {}
    for name, (budget, rounding) in bands.items():
        errors = [_error(name, head, units, coarse) for head in own]
        by = [_error(name, head, units) for head in other]
        known = [(e, y) for e, y in zip(errors, by, strict=True) if e is not None and y is not None]
        if len(known) < len(own):
            continue
        error, yardstick = (math.sqrt(math.fsum(pair[i] ** 2 for pair in known) / len(known)) for i in (0, 1))
        if name in _GRADIENTS and not yardstick < 1:
            continue
        half = rounding / 2
        ratios = [math.log(math.hypot(e, half) / math.hypot(y, half)) for e, y in known]
        found[name] = ErrorSize(error, yardstick, budget, half, _mean(ratios))
    return found


def _error(name: str, head: HeadDiagnosis, units: _Units, coarse: bool = True) -> float | None:
    """The size of one quantity's error in one sequence, as ``result.Size`` has it."""
    if name == "delta":
        if not coarse and units.floor and head.bias.delta is not None and head.bias.delta.rms is not None:
            return float(head.bias.delta.rms / units.floor)
        return head.noise_factor
    if name in _GRADIENTS:
        gradient = getattr(head.propagation, name)
        return None if gradient is None else gradient.relative_error
    estimate = getattr(head.bias, name)
    if estimate is None or estimate.rms is None:
        return None
    return float(estimate.rms / units.ulp if name == "o" else estimate.rms)


def _worst(case: CaseInputs, out: Tensor, device: str) -> tuple[int, int, int, float] | None:
    """Batch item, head and row of O's largest error, and that in ulp of the row's largest element.

    (In ulp of the element itself the worst are those next to zero, in any kernel.)
    """
    where = torch.device("cuda" if device == "cuda" else "cpu")
    group = case.q.shape[1] // case.k.shape[1]
    best: tuple[int, int, int, float] | None = None
    for b in range(case.q.shape[0]):
        for h in range(case.q.shape[1]):
            q, k, v = (x.to(where).double() for x in (case.q[b, h], case.k[b, h // group], case.v[b, h // group]))
            truth = reference_head(AttentionHead(q, k, v, None, case.scale, Masking(causal=case.causal))).out
            errors = (out[b, h].to(where).double() - truth).abs().amax(1)
            errors = errors / ulp(truth.abs().amax(1), format_of(case.q.dtype))
            row = int(errors.argmax())
            if best is None or float(errors[row]) > best[3]:
                best = b, h, row, float(errors[row])
    return best
