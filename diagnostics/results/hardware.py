"""What was measured on one GPU: a frozen dataclass with JSON, a report and one line for other reports."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Literal

from attn_diag.results.base import Result
from attn_diag.results.diagnosis import Number

Rounding = Literal["toward-zero", "nearest-even", "nearest-away", "down", "up"]
Subnormals = Literal["kept", "flushed"]


@dataclass(frozen=True)
class SumProfile:
    """How one instruction adds products of 16-bit operands; None where the probes contradict each other.

    ``block`` products and the running fp32 sum are added at a time. Every term is rounded (``alignment``) to
    ``fraction_bits`` bits below the largest exponent among them, their sum (``result``) to fp32; see
    ``attn_diag.kernels.accumulation.TensorCore``. ``products_exact``: products keep all their bits.
    ``subnormals``: of operands and accumulators. ``sums`` random ones were compared with that model,
    ``mismatches`` of them differ in a bit (None: there is no model to compare). ``fits``: a model was found and missed
    none. ``notes``: what contradicts it.
    """

    operands: Literal["bf16", "fp16"]
    instruction: str
    block: int | None
    fraction_bits: int | None
    alignment: Rounding | None
    result: Rounding | None
    subnormals: Subnormals | None
    products_exact: bool
    sums: int
    mismatches: int | None
    fits: bool
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Exp2Profile:
    """exp2 of fp32 against float64's. Errors are observed - true, in ulp of fp32 at the true value.

    ``max_error_ulp`` is the largest size of an error over ``arguments`` of [-126, 0], at ``worst_argument``;
    ``mean_error_ulp`` and ``mean_relative_error`` are signed means over a uniform grid on [-1, 0);
    ``not_nearest``: fraction of the grid where another fp32 number is nearer.
    """

    arguments: int
    max_error_ulp: Number
    worst_argument: Number
    mean_error_ulp: Number
    mean_relative_error: Number
    not_nearest: Number
    exact_at_zero: bool
    exact_at_integers: bool
    subnormal_results: Subnormals | None


@dataclass(frozen=True)
class CastProfile:
    """A cast from fp32. ``rounding`` of normal numbers, ``subnormals`` kept (rounded alike) or not; None: unknown.

    ``overflow``: what is far too large becomes infinite, the largest number, or NaN. ``values`` were cast.
    """

    format: Literal["bf16", "fp16", "e4m3", "e5m2"]
    values: int
    rounding: Rounding | None
    subnormals: Subnormals | None
    overflow: Literal["infinite", "largest", "nan"] | None


@dataclass(frozen=True, repr=False)
class HardwareProfile(Result):
    """The arithmetic of one GPU under one pair of torch and Triton versions, as probes found it.

    ``measured`` is a date (ISO 8601). ``multiply_subnormals``: whether fp32 products keep subnormal operands and
    results. ``seconds``: how long the measurement took, compilation included.
    """

    gpu: str
    backend: str
    torch: str
    triton: str
    measured: str
    seconds: Number
    sums: tuple[SumProfile, ...]
    exp2: Exp2Profile
    multiply_subnormals: Subnormals | None
    casts: tuple[CastProfile, ...]
    schema: Literal["attn-diag-hardware-profile"] = "attn-diag-hardware-profile"
    schema_version: Literal[1] = 1

    @property
    def fits(self) -> bool:
        """Whether every instruction adds as its measured model says."""
        return all(found.fits for found in self.sums)

    @property
    def summary(self) -> str:
        """One line for the reports of other commands."""
        parts = list(dict.fromkeys(_sums_in_words(found) for found in self.sums))
        exp2 = f"exp2 max {self.exp2.max_error_ulp:.2g} ulp"
        return f"{'; '.join(parts)}; {exp2} (measured {self.measured})"

    def note(self) -> str:
        """Short JSON for a capture's metadata: the summary, and the sums' parameters."""
        names = ("operands", "instruction", "block", "fraction_bits", "alignment", "result", "fits")
        sums = [{name: getattr(found, name) for name in names} for found in self.sums]
        return json.dumps({"summary": self.summary, "gpu": self.gpu, "triton": self.triton, "sums": sums})


def summary_of(note: str) -> str | None:
    """The summary in a note of ``HardwareProfile.note``; None where it is none."""
    try:
        found = json.loads(note)
    except ValueError:
        return None
    summary = found.get("summary") if isinstance(found, dict) else None
    return summary if isinstance(summary, str) else None


def _sums_in_words(found: SumProfile) -> str:
    name = f"{found.operands.upper()} sums ({found.instruction})"
    if not found.fits:
        return f"{name} fit no known model"
    how = "cut" if found.alignment == "toward-zero" else f"rounded {found.alignment}"
    return f"{name} of {found.block} products {how} at {found.fraction_bits} bits"
