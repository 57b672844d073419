"""What was measured on one GPU: a frozen dataclass with JSON, a report and one line for other reports."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Literal

from attn_diag.results.base import Number, Result

Rounding = Literal["toward-zero", "nearest-even", "nearest-away", "down", "up"]
Subnormals = Literal["kept", "flushed"]


@dataclass(frozen=True)
class SumProfile:
    """How one instruction adds products of 16-bit operands; null where the probes contradict each other.

    ``block`` products and the running fp32 sum are added at a time: every term is rounded to ``fraction_bits`` bits
    below the largest exponent among them, their sum to fp32; see ``attn_diag.kernels.accumulation.TensorCore``.
    """

    operands: Literal["bf16", "fp16"]
    """The format of the factors."""
    instruction: str
    """The instruction: wgmma, mma.sync, other or interpreter."""
    block: int | None
    """How many products are added at a time."""
    fraction_bits: int | None
    """How many bits below the largest exponent a term keeps."""
    alignment: Rounding | None
    """How terms are rounded to these bits."""
    result: Rounding | None
    """How the sum of a block is rounded to fp32; null too where fewer than 23 bits are kept."""
    subnormals: Subnormals | None
    """What becomes of subnormal operands and running sums."""
    products_exact: bool
    """Whether products keep all their bits until they are added."""
    sums: int
    """How many random sums were compared with the model; 0 without one."""
    mismatches: int | None
    """How many of these differ in a bit; null: there is no model to compare with."""
    fits: bool
    """Whether a model was found and missed no sum."""
    notes: tuple[str, ...] = ()
    """What contradicts the model."""


@dataclass(frozen=True)
class Exp2Profile:
    """exp2 of fp32 against float64's. Errors are observed - true, in ulp of fp32 at the true value."""

    arguments: int
    """How many arguments of [-126, 0] were tried for the largest error."""
    max_error_ulp: Number
    """The largest size of an error; NaN where a result was."""
    worst_argument: Number
    """Where that was."""
    mean_error_ulp: Number
    """Mean signed error over a uniform grid on [-1, 0)."""
    mean_relative_error: Number
    """Mean of observed / true - 1 over that grid."""
    not_nearest: Number
    """Fraction of that grid where another fp32 number is nearer."""
    exact_at_zero: bool
    """Whether exp2 of +0 and -0 is 1."""
    exact_at_integers: bool
    """Whether exp2 is exact at the integers from -126 to 0."""
    subnormal_results: Subnormals | None
    """What becomes of results below 2^-126; null: neither."""


@dataclass(frozen=True)
class CastProfile:
    """A cast from fp32."""

    format: Literal["bf16", "fp16", "e4m3", "e5m2"]
    """What is cast to."""
    values: int
    """How many numbers were cast."""
    rounding: Rounding | None
    """How normal numbers are rounded; null: in no known way."""
    subnormals: Subnormals | None
    """kept: rounded likewise; flushed to 0; null: neither."""
    overflow: Literal["infinite", "largest", "nan"] | None
    """What a number becomes that is far too large; null: none of these."""


@dataclass(frozen=True, repr=False)
class HardwareProfile(Result):
    """The arithmetic of one GPU under one pair of torch and Triton versions, as probes found it."""

    gpu: str
    """The GPU's name."""
    backend: str
    """Its compute capability, such as sm90."""
    torch: str
    """Version of torch."""
    triton: str
    """Version of triton."""
    measured: str
    """When: a date (ISO 8601, UTC)."""
    seconds: Number
    """How long the measurement took, compilation included."""
    sums: tuple[SumProfile, ...]
    """One entry for each format and each instruction."""
    exp2: Exp2Profile
    """exp2 of fp32."""
    multiply_subnormals: Subnormals | None
    """What becomes of subnormal operands and results of fp32 products; null: neither."""
    casts: tuple[CastProfile, ...]
    """One entry a format."""
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
