"""One case's figures: a Capture is built in memory and inspected; nothing is measured here in another way."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from attn_diag.analysis import inspect_captures
from attn_diag.bias import MIN_SEQUENCES
from attn_diag.captures import DEFAULT_OBSERVATION, Capture
from attn_diag.diagnosis import CaptureDiagnosis, HeadDiagnosis
from attn_diag.kernels import Recipe
from attn_diag.reference import AttentionHead, FloatFormat, Masking, format_of, reference_head, ulp
from attn_diag.regression.cases import CaseInputs

BIASES = ("o_excess", "o_away_excess", "delta_excess")
_YARDSTICK = "yardstick"


@dataclass(frozen=True)
class MeanError:
    """A mean over sequences in its unit (see ``result.Bias``), its standard error and degrees of freedom."""

    mean: float
    standard_error: float | None
    degrees_of_freedom: float | None


@dataclass(frozen=True)
class ErrorSize:
    """An error, the yardstick's on the same input, and what one correct rounding adds to the budget and to growth."""

    error: float
    yardstick: float
    budget_band: float
    growth_band: float


@dataclass(frozen=True)
class Measured:
    """A case's biases, those of the yardstick on the same inputs, and its sizes; ``misfit``: why there are none."""

    biases: dict[str, MeanError]
    accepted: dict[str, float]
    sizes: dict[str, ErrorSize]
    worst: tuple[int, int, int, float] | None
    misfit: str | None = None


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
    tensors: dict[str, Tensor | None] = {"q": case.q, "k": case.k, "v": case.v, "do": case.do, **observed}
    tensors |= {f"{_YARDSTICK}.{name}": tensor for name, tensor in yardstick.items()}
    capture = Capture.from_tensors(tensors, scale=case.scale, causal=case.causal)
    # "Made by" only spares recognising the recipe by its bits.
    known = {DEFAULT_OBSERVATION: recipe, _YARDSTICK: recipe}
    (found,) = inspect_captures([capture], made_by=known, device=device).captures
    if (misfit := _misfit(found)) is not None:
        return Measured({}, {}, {}, None, misfit)
    pooled = {o.name: o.pooled for o in found.observations}
    units = _Units.of(case, yardstick["o"])
    sequences = case.q.shape[0]
    biases = _means(pooled[DEFAULT_OBSERVATION], units, sequences)
    accepted = {name: mean.mean for name, mean in _means(pooled[_YARDSTICK], units, sequences).items()}
    sizes = _sizes(pooled[DEFAULT_OBSERVATION], pooled[_YARDSTICK], units, yardstick)
    return Measured(biases, accepted, sizes, _worst(case, observed["o"], device))


def _misfit(found: CaptureDiagnosis) -> str | None:
    for check in found.assumptions.checks:
        if check.observation == DEFAULT_OBSERVATION and not check.ok:
            named = {"o": "O", "lse": "LSE"}[check.output]
            fits = f"; with {check.better} it fits" if check.better else ""
            return (
                f"{named} is {100 * check.relative_error:.3g} % off softmax(scale Q K^T) V as stated "
                f"(causal {found.metadata['causal']}), which no rounding explains{fits}"
            )
    return None


def _means(head: HeadDiagnosis, units: _Units, sequences: int) -> dict[str, MeanError]:
    """The tests' means, where there are sequences enough to be the clusters."""
    if sequences < MIN_SEQUENCES:
        return {}
    scales = {"o_excess": units.ulp, "o_away_excess": units.ulp, "delta_excess": units.floor}
    found = {}
    for name, scale in scales.items():
        estimate = getattr(head.bias, name)
        if estimate is None or estimate.mean is None or not scale:
            continue
        se = estimate.standard_error
        found[name] = MeanError(
            estimate.mean / scale, None if se is None else se / scale, float(estimate.n_clusters - 1)
        )
    return found


def _sizes(
    head: HeadDiagnosis, yardstick: HeadDiagnosis, units: _Units, outputs: dict[str, Tensor]
) -> dict[str, ErrorSize]:
    # The largest relative error of one rounding; as an rms of an error uniform within it, u / sqrt(3).
    u = 2.0 ** -(units.fmt.precision + 1)
    cast = u / math.sqrt(3)
    pairs: dict[str, tuple[float | None, float | None, float, float]] = {
        "o": (
            _in_ulp(head, units), _in_ulp(yardstick, units), units.one_rounding_ulp, units.one_rounding_ulp,
        ),
        "delta": (head.noise_factor, yardstick.noise_factor, 1.0, 1.0),
    }  # fmt: skip
    if head.bias.lse is not None and yardstick.bias.lse is not None:
        lse = outputs["lse"]
        spacing = float(ulp(lse[lse.isfinite()].double(), format_of(torch.float32)).mean())
        # An l that sums P_bar after its cast moves L by at most ln(1 + u).
        pairs["lse"] = (head.bias.lse.rms, yardstick.bias.lse.rms, u, spacing)
    for name in ("dq", "dk", "dv"):
        own, other = (getattr(h.propagation, name) if h.propagation else None for h in (head, yardstick))
        if own is not None and other is not None:
            pairs[name] = (own.relative_error, other.relative_error, cast, cast)
    return {
        name: ErrorSize(error, by, budget, growth)
        for name, (error, by, budget, growth) in pairs.items()
        if error is not None and by is not None and not (name.startswith("d") and name != "delta" and not by < 1)
    }


def _in_ulp(head: HeadDiagnosis, units: _Units) -> float | None:
    return None if head.bias.o is None or head.bias.o.rms is None else head.bias.o.rms / units.ulp


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
