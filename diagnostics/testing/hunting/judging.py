"""The verdict on one case, by the rules of ``inspect``: which outputs are wrong, and which errors are known."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from attn_diag.analyses.inspection.capture_job import CaptureJob, Runs
from attn_diag.captures.capture import Capture
from attn_diag.captures.metadata import Causal
from attn_diag.captures.selection import Selection
from attn_diag.captures.sources import DEFAULT_OBSERVATION
from attn_diag.errors import InputError
from attn_diag.head.baseline import DEFAULT_RECIPE
from attn_diag.head.quality import LOSSY
from attn_diag.kernels import PRESETS, preset
from attn_diag.results.hunt import Fault
from attn_diag.results.quality import QuantityVerdict
from attn_diag.results.wording import percent
from attn_diag.testing.case_inputs import CaseInputs
from attn_diag.testing.libraries import LIBRARIES
from attn_diag.testing.other_function import as_counted
from attn_diag.testing.regression.documented import explained, judged
from attn_diag.testing.replaying.processes import Ran
from attn_diag.testing.target import DTYPES, RECIPE_DTYPES, emulate

CPU = torch.device("cpu")
_LEVEL = 0.01
# A hunt compares some thousands of outputs with a well-rounded kernel's: all of them at once at the level.
_COMPARISONS = 5_000
_ENDED: dict[str, Fault] = {"crashed": "crashed", "timed-out": "timed-out", "raised": "raised", "unusable": "raised"}


@dataclass(frozen=True)
class CaseVerdict:
    """What is wrong with a case."""

    faults: Mapping[str, Fault] = field(default_factory=dict)
    """By output; by "forward" or "backward" where that ended early."""
    refused: bool = False
    """The kernel does not take it (or not its backward)."""
    message: str | None = None
    """What it said, or how it ended."""
    words: Mapping[str, str] = field(default_factory=dict)
    """By output: what was found."""
    errors: Mapping[str, float] = field(default_factory=dict)
    """By output: ||error|| / ||reference||."""
    documented: Mapping[str, str] = field(default_factory=dict)
    """By output that is lossy: the published kernel that is so too, or what is so by design."""
    ran: Ran | None = None
    """How it ended, with its outputs."""
    passed: bool = False
    """Outputs were judged, and none is wrong."""

    @property
    def ran_in_part(self) -> bool:
        """Whether outputs were judged, all or those of the forward."""
        return self.passed or any(name not in ("forward", "backward") for name in self.faults)

    def without_outputs(self) -> CaseVerdict:
        """What is kept of it."""
        return replace(self, ran=None)


@dataclass(frozen=True)
class CaseJudge:
    """Judges what one kernel returned."""

    name: str
    """The kernel's."""
    fixed: bool
    """Its mask is its own: where Tq and Tk differ it may be aligned either way."""
    device: torch.device
    """Where the kernel ran, for published kernels to run there too."""
    declared: str | None = None
    """The recipe below 16 bits that it is meant to be, and is held against; None: a well-rounded kernel of 16 bits."""

    @classmethod
    def for_capture(cls, name: str, capture: Capture, device: torch.device, *, fixed: bool) -> CaseJudge:
        """Of a kernel that a hunt starts from this capture: what that declares holds for all but those of 16 bits."""
        library = LIBRARIES.get(name)
        of_16_bits = name in PRESETS or (library is not None and library.by_design is None)
        return cls(name, fixed, device, None if of_16_bits else capture.metadata.declared)

    def of(self, case: CaseInputs, ran: Ran) -> CaseVerdict:
        """The verdict on how a case ended, and on what came back."""
        ended = _ENDED.get(ran.outcome)
        stage = ran.stage if ran.stage in ("forward", "backward") else "forward"
        refused = ran.outcome == "refused"
        found = CaseVerdict(ran=ran, refused=refused, message=ran.message)
        if ran.outputs:
            found = self._outputs(case, ran)
            if self.fixed and case.q.shape[2] != case.k.shape[2] and found.faults and case.causal != "none":
                other: Causal = "bottom-right" if case.causal == "top-left" else "top-left"
                again = self._outputs(replace(case, causal=other), ran)
                found = again if not again.faults else found
            found = replace(found, refused=refused, message=ran.message)
        if ended is not None:
            faults, words = {stage: ended, **found.faults}, {stage: ran.message or "", **found.words}
            found = replace(found, faults=faults, words=words)
        return replace(found, passed=bool(ran.outputs) and not found.faults)

    def _outputs(self, case: CaseInputs, ran: Ran) -> CaseVerdict:
        case = as_counted(case, ran.outputs, CPU)
        quantities = judge_quantities(case, ran.outputs, self.declared)
        bad = [q for q in quantities if q.answer in ("nonfinite", "wrong") and judged(q)]
        coarse = [q for q in quantities if q.answer == "lossy" and judged(q)]
        known: dict[str, str] = {}
        library = LIBRARIES.get(self.name)
        if coarse:
            if self.declared is None and library is not None and library.by_design is not None:
                known = {q.quantity: f"by design: {library.by_design}" for q in coarse}
            else:
                known = explained(coarse, case, dict(ran.outputs), self.device)
        if any(q.answer == "nonfinite" for q in bad):
            broken = _overflowing(case, self.declared)
            bad = [q for q in bad if q.answer != "nonfinite" or q.quantity not in broken]
        bad += [q for q in coarse if q.quantity not in known and _beyond_chance(q)]
        return CaseVerdict(
            faults={q.quantity: q.answer for q in bad},  # type: ignore[misc]
            words={q.quantity: q.words for q in bad},
            errors={q.quantity: q.relative_error for q in bad if q.relative_error is not None},
            documented=known,
            ran=ran,
        )


def judge_quantities(
    case: CaseInputs, outputs: Mapping[str, Tensor], declared: str | None = None
) -> list[QuantityVerdict]:
    """Each output as ``inspect`` judges it, over all heads and batch items the gravest."""
    capture = case.captured(outputs, declared=declared)
    # "Made by" only spares recognising the recipe by its bits.
    recipes = {}
    if case.q.dtype in RECIPE_DTYPES:
        recipes = {DEFAULT_OBSERVATION: preset(declared or DEFAULT_RECIPE, DTYPES[case.q.dtype], case.q.shape[3])}
    job = CaptureJob(capture, Selection(), Runs((), "emulation", recipes), CPU, _LEVEL)
    misfits = [c for c in job.opened.assumptions([DEFAULT_OBSERVATION]).checks if not c.ok]
    for _ in job.run():
        pass
    found = {q.quantity: q for q in job.entries[DEFAULT_OBSERVATION][-1].diagnosis.quantities}
    for check in misfits:
        name = check.output
        if name in found and found[name].answer not in ("nonfinite", "wrong"):
            said = f"{percent(check.relative_error)} off the attention that was asked for"
            better = f"; with {check.better} it fits" if check.better else ""
            found[name] = replace(found[name], answer="wrong", words=f"{name.upper()} is {said}{better}.")
    return list(found.values())


def _beyond_chance(found: QuantityVerdict) -> bool:
    """Whether it is lossy beyond what one of all comparisons of a hunt may be by chance."""
    from scipy.special import stdtr, stdtrit

    df = max((found.groups or 2.0) - 1, 1.0)
    for factor, interval in (
        (found.factor, found.factor_ci95), (found.typical_factor, found.typical_factor_ci95),
    ):  # fmt: skip
        if factor is None or interval is None or not factor > LOSSY:
            continue
        if not 0 < interval[0] <= factor:
            continue
        error = math.log(factor / interval[0]) / stdtrit(df, 0.975)
        if error == 0 or stdtr(df, -math.log(factor / LOSSY) / error) < _LEVEL / _COMPARISONS:
            return True
    return False


def _overflowing(case: CaseInputs, declared: str | None = None) -> set[str]:
    """Outputs in which the published or declared recipe has NaN or Inf too: the format itself overflows."""
    if case.q.dtype not in RECIPE_DTYPES:
        return set()
    recipe = preset(declared or DEFAULT_RECIPE, DTYPES[case.q.dtype], case.q.shape[3])
    try:
        made = emulate(recipe, case, CPU)
    except InputError:
        return set()
    return {n for n, x in made.items() if not bool(x.isfinite().all())}
