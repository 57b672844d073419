"""The result of a probe run: plain frozen dataclasses, and their JSON (schema "attn-diag-probe" 1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from attn_diag.results.base import Number, Result, Tool
from attn_diag.results.estimates import BiasEstimate
from attn_diag.results.wording import function_words

# "broken" is the older name of "nonfinite": new reports have both, older ones the first alone.
Label = Literal[
    "exact",
    "within-rounding",
    "biased",
    "too-large",
    "lse-biased",
    "lse-too-large",
    "not-invariant",
    "broken",
    "nonfinite",
]
Direction = Literal["away from zero", "upward"]


@dataclass(frozen=True)
class SignedTest:
    """Is the mean error in one direction zero? Heads are the clusters (t with heads - 1 degrees of freedom).

    A kernel that rounds O to nearest has no mean excess, one that rounds without bias (stochastically) no mean error.
    An O in fp32 also shows what fp32 arithmetic makes: means up to ``allowed_ulp`` are no bias then.
    """

    direction: Direction
    """upward, or away from zero: times the sign of the reference."""
    error: BiasEstimate
    """O_obs - O_ref."""
    excess: BiasEstimate
    """O_obs - RN(O_ref)."""
    mean_ulp: Number | None
    """Mean excess in ulp."""
    ci_ulp: tuple[Number, Number] | None
    """Confidence interval of ``mean_ulp`` at 1 - level; null with fewer than two heads or no excess."""
    p_value: Number | None
    """The larger of error's and excess's: that of "one of both is zero" (intersection-union test, Berger, Technometrics
    24 (1982) 295); null where either is not tested, as where every excess is zero."""
    p_adjusted: Number | None = None
    """p_value after Benjamini-Hochberg over the whole report."""
    biased: bool = False
    """Whether that is at most the level."""
    allowed_ulp: Number = 0.0
    """The mean of what fp32 arithmetic can make of each error (``testing.probing.head_errors``); 0 for a coarser
    O."""
    upper_less_lower_ci: tuple[Number, Number] | None = None
    """Confidence interval, at 1 - level, of the mean excess in ulp where O_ref lies in the upper half of its binade,
    less that in the lower half: 0 for a rounding of O itself, a third of the mean for an error relative to O."""


@dataclass(frozen=True)
class LseTest:
    """L_obs - L_ref (natural logarithm) over the rows where L is finite; heads are the clusters."""

    error: BiasEstimate
    """The signed error."""
    ci: tuple[Number, Number] | None
    """Confidence interval of its mean at 1 - level."""
    allowed: Number
    """The mean of what fp32 arithmetic alone can make of each error."""
    max_error: Number
    """The largest size of an error."""
    of_budget: Number
    """The largest error as a fraction of what fp32 arithmetic, and a cast of the P_bar that l sums, can make of it."""
    nonfinite: int
    """Rows whose L is NaN or Inf."""
    fits_base_2: bool
    """L is too far off, L ln 2 is not: it is a logarithm to base 2."""
    p_value: Number | None
    """Of "the mean is at most ``allowed``"."""
    p_adjusted: Number | None = None
    """p_value after Benjamini-Hochberg over the whole report."""
    biased: bool = False
    """Whether that is at most the level."""
    rounded_to: str | None = None
    """bf16 or fp16, where every L came in more bits and is a number of that format beside the true one; else
    null."""


@dataclass(frozen=True)
class ProbeFinding:
    """What one probe found: accuracy against the reference, or invariance between two calls."""

    name: str
    """The probe's name."""
    shows: str
    """What it shows, in words."""
    kind: Literal["accuracy", "invariance"]
    """Which of the two it is."""
    labels: tuple[Label, ...]
    """The gravest first."""
    words: str
    """What was found, in words."""
    elements: int
    """Elements of O compared."""
    differing: int
    """How many are not the correctly rounded reference's (accuracy), or not the other call's (invariance)."""
    nonfinite: int
    """How many are NaN or Inf."""
    max_error_ulp: Number | None
    """The largest error, or difference, in spacings of O's format at the reference (at the first call's O)."""
    of_budget: Number | None = None
    """The largest error as a fraction of what casts of P_bar and O, and sums in fp32, can make of it
    (``testing.probing.head_errors``); null for invariance."""
    relative: Number | None = None
    """Mean excess away from zero / mean |O_ref|: the normaliser's defect where V > 0."""
    relative_ci: tuple[Number, Number] | None = None
    """Its confidence interval at 1 - level."""
    predicted: Number | None = None
    """What it would be with P_bar cast for V but not for l; null but in the normaliser probes."""
    predicted_truncated: Number | None = None
    """The same with a cast that truncates."""
    tests: tuple[SignedTest, ...] = ()
    """One entry a direction; only away from zero where O_ref has one sign."""
    lse: LseTest | None = None
    """The test of L; null where fn does not return it."""
    nonfinite_rows: tuple[tuple[int, int], ...] = ()
    """The rows of O that hold NaN or Inf, of all heads together: first and last of each run."""


@dataclass(frozen=True)
class ProbeAssumptions:
    """What was assumed of fn, checked on N(0,1) inputs."""

    scale: Number
    """The softmax scale."""
    causal: str
    """The mask: none, top-left or bottom-right."""
    relative_error: Number | None
    """||O_obs - O_ref|| / ||O_ref|| of one head; null where no row of it is finite."""
    ok: bool
    """Whether that is at most 5 %."""
    fits: str | None = None
    """Another choice that does fit; null where the assumed one does, or none was found."""
    words: str | None = None
    """What fn computes instead, in words that follow its name; null where it computes what was assumed."""
    alibi_slopes: tuple[Number, ...] | None = None
    """ALiBi's slopes, one a head; null: none."""
    window: tuple[int, int] | None = None
    """(left, right), inclusive, -1 unlimited; null: none."""
    softcap: Number | None = None
    """c of S = c tanh(alpha q.k / c); null: none."""
    sinks: tuple[Number, ...] | None = None
    """Logits of attention sinks, one a head; null: none."""

    @property
    def said(self) -> str:
        """The function in words."""
        return function_words(self.causal, self.scale, self.window, self.softcap, self.alibi_slopes, self.sinks)


@dataclass(frozen=True, repr=False)
class ProbeReport(Result):
    """The result of ``attn_diag.probe``: signed defects of an attention on inputs with known answers."""

    tool: Tool
    """Versions and device of what produced the numbers."""
    source: str
    """What was probed."""
    backend: str
    """What ran it."""
    dtype: str
    """The inputs' dtype."""
    out_dtype: str
    """O's dtype."""
    shape: tuple[int, int, int, int]
    """[B, H, T, D] of the inputs of one call."""
    rounds: int
    """How many times they were drawn."""
    heads: int
    """Independent heads in all."""
    seed: int
    """Seed of the inputs."""
    level: Number
    """The significance level."""
    assumptions: ProbeAssumptions
    """What was assumed of fn."""
    findings: tuple[ProbeFinding, ...]
    """One entry a probe."""
    family_size: int
    """How many p-values were adjusted together (Benjamini-Hochberg)."""
    summary: tuple[str, ...]
    """The result in sentences."""
    outcome: Literal["ok", "fail", "other-function"] | None = None
    """ok: nothing but what published kernels do too (``normal``); other-function: fn is not the attention that was
    asked for, but other options fit, and nothing was probed; null: a document of before this was said."""
    suspect: str | None = None
    """What is wrong, in a few words; null where nothing is."""
    certainty: Literal["certain", "sure"] | None = None
    """certain: no rounding, and no chance, makes what was seen; sure: beyond chance, or by the bits; null: nothing is
    wrong."""
    evidence: str | None = None
    """Why, in sentences; null where nothing is wrong."""
    normal: tuple[str, ...] = ()
    """What was found that published kernels do too, or that is too small to add up, in sentences."""
    next: str | None = None
    """What to run next: a command, or a call in Python."""
    gradients: str | None = None
    """What one backward showed, or why there was none, in sentences; null: not looked at, as some probes alone were
    run, or O is at fault."""
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
