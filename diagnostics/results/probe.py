"""The result of a probe run: plain frozen dataclasses, and their JSON (schema "attn-diag-probe" 1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from attn_diag.results.base import Result
from attn_diag.results.diagnosis import BiasEstimate, Number, Tool

Label = Literal[
    "exact", "within-rounding", "biased", "too-large", "lse-biased", "lse-too-large", "not-invariant", "broken"
]
Direction = Literal["away from zero", "upward"]


@dataclass(frozen=True)
class SignedTest:
    """Is the mean error in one direction zero? Heads are the clusters (t with heads - 1 degrees of freedom).

    ``error``: O_obs - O_ref; ``excess``: O_obs - RN(O_ref); "away from zero": times O_ref's sign. A kernel that rounds
    O to nearest has no mean excess, one that rounds without bias (stochastically) no mean error; ``p_value`` is the
    larger of the two, the p-value of "one of both is so" (Berger, Technometrics 24 (1982) 295: intersection-union
    test). None where every excess is zero. ``p_adjusted``: after Benjamini-Hochberg over the whole report.
    ``mean_ulp`` and ``ci_ulp`` (at 1 - level) are those of the excess. An O in fp32 also shows what fp32 arithmetic
    makes: means up to ``allowed_ulp``, the mean of its bound (``testing.probing.head_errors``), are no bias then,
    and the tests ask for more. It is 0 for coarser O.
    """

    direction: Direction
    error: BiasEstimate
    excess: BiasEstimate
    mean_ulp: Number | None
    ci_ulp: tuple[Number, Number] | None
    p_value: Number | None
    p_adjusted: Number | None = None
    biased: bool = False
    allowed_ulp: Number = 0.0


@dataclass(frozen=True)
class LseTest:
    """L_obs - L_ref (natural logarithm) over the rows where L is finite; heads are the clusters.

    ``max_error``: the largest; ``of_budget``: as a fraction of what fp32 arithmetic, and a cast of the P_bar that l
    sums, can make of it. ``p_value`` that the mean is at most ``allowed``, the mean of what fp32 arithmetic alone can
    make; ``p_adjusted`` as in ``SignedTest``. ``ci`` at 1 - level. ``fits_base_2``: L is too far off, L ln 2 is not.
    """

    error: BiasEstimate
    ci: tuple[Number, Number] | None
    allowed: Number
    max_error: Number
    of_budget: Number
    nonfinite: int
    fits_base_2: bool
    p_value: Number | None
    p_adjusted: Number | None = None
    biased: bool = False


@dataclass(frozen=True)
class ProbeFinding:
    """What one probe found.

    ``elements`` compared; ``differing`` of them are not the correctly rounded reference's (accuracy) or not the other
    call's (invariance); ``nonfinite`` are NaN or Inf. ``max_error_ulp``: the largest error, or difference, in spacings
    of O's format at the reference; ``of_budget``: the largest error as a fraction of what casts of P_bar and O to the
    input's format and sums in fp32 can make of it (see ``testing.probing.head_errors``). ``relative``: mean excess
    away from zero / mean |O_ref|, which is the normaliser's defect where V > 0, with ``relative_ci`` at 1 - level;
    ``predicted``: what it would be with P_bar cast for V but not for l (the normaliser probes). ``lse``: where fn
    returns L. The first label is the gravest.
    """

    name: str
    shows: str
    kind: Literal["accuracy", "invariance"]
    labels: tuple[Label, ...]
    words: str
    elements: int
    differing: int
    nonfinite: int
    max_error_ulp: Number | None
    of_budget: Number | None = None
    relative: Number | None = None
    relative_ci: tuple[Number, Number] | None = None
    predicted: Number | None = None
    tests: tuple[SignedTest, ...] = ()
    lse: LseTest | None = None


@dataclass(frozen=True)
class ProbeAssumptions:
    """What was assumed of fn. ``relative_error``: ||O_obs - O_ref|| / ||O_ref|| on N(0,1) inputs; ``ok``: at most 5 %.

    ``fits``: another choice that does fit, where the assumed one does not.
    """

    scale: Number
    causal: str
    relative_error: Number | None
    ok: bool
    fits: str | None = None


@dataclass(frozen=True, repr=False)
class ProbeReport(Result):
    """Signed defects of an attention on inputs with known answers. ``print(r.report())``, ``r.to_json()``.

    ``shape`` [B, H, T, D] of the inputs, drawn ``rounds`` times: ``heads`` independent heads. ``family_size``: p-values
    adjusted together. ``summary``: sentences.
    """

    tool: Tool
    source: str
    backend: str
    dtype: str
    out_dtype: str
    shape: tuple[int, int, int, int]
    rounds: int
    heads: int
    seed: int
    level: Number
    assumptions: ProbeAssumptions
    findings: tuple[ProbeFinding, ...]
    family_size: int
    summary: tuple[str, ...]
    schema: Literal["attn-diag-probe"] = "attn-diag-probe"
    schema_version: Literal[1] = 1

    def __getitem__(self, name: str) -> ProbeFinding:
        """The finding of that probe; KeyError names those there are."""
        for finding in self.findings:
            if finding.name == name:
                return finding
        raise KeyError(f"no probe {name!r}; there are {', '.join(f.name for f in self.findings)}")

    @property
    def labels(self) -> frozenset[str]:
        """Every label that some finding has."""
        return frozenset(label for finding in self.findings for label in finding.labels)
