"""Which mean errors are a kernel's own: not sharper than the reference is, nor than rounding makes in any kernel."""

from __future__ import annotations

from dataclasses import replace

from attn_diag.analyses.verdicts.advice import KEPT_WHOLE
from attn_diag.head.cut_off import SITES
from attn_diag.head.measurement import CutOff
from attn_diag.results.diagnosis import BiasEstimate, RoundingBias, Verdict
from attn_diag.statistics.means import MIN_EFFECTIVE

# A mean is not tested where the reference's own error may be more than this part of its standard error.
REFERENCE_BELOW = 0.01
_CUT_OFF: dict[CutOff, str] = {
    "operands": "O errs as operands of its products make it that are cut off to TF32's 10 bits: as Triton's tl.dot "
    "takes fp32 numbers, unless it is told otherwise.",
    "probs": f"O errs as where {SITES['cut-off-probs']}.",
}
_NOT_CUT_OFF: dict[CutOff, str] = {
    "operands": "Its products cut fp32 operands off to TF32, as tl.dot does by default: give it "
    'input_precision="ieee" or "tf32x3" where fp32 is meant. TF32 that rounds to nearest (torch\'s allow_tf32) is as '
    "coarse, but not biased.",
    "probs": KEPT_WHOLE,
}


def beyond_reference(estimate: BiasEstimate) -> bool:
    """Whether the reference's own error may matter beside the standard error, so that the test decides nothing.

    It may not where it is as small beside the mean itself: an error that is the same everywhere has a standard error of
    next to 0, and is no less certain for that.
    """
    bound, error, mean = estimate.reference_bound, estimate.standard_error, estimate.mean
    if bound is None or error is None:
        return False
    return bound > REFERENCE_BELOW * max(error, abs(mean or 0.0))


def rejects(estimate: BiasEstimate, level: float) -> bool:
    """Whether the test of a mean rejects, after the correction for all tests of the run."""
    return estimate.p_adjusted is not None and estimate.p_adjusted <= level


def excuse(name: str, estimate: BiasEstimate, rounding_bias: RoundingBias, level: float) -> str | None:
    """Why a mean that differs from zero is no kernel's fault, in words; None where it is not known to be excused.

    delta's total has the mean that correct rounding of O has, where that is as significant: the null for a nearest-even
    kernel is "no bias beyond correct rounding". And any test may have the mean that a well-rounded kernel has on the
    same input: the casts of its format make it, or tensor cores, which cut sums off, or of FP32 inputs V's rounding to
    TF32.

    Args:
        name: The primary test.
        estimate: Its mean.
        rounding_bias: What correct rounding alone makes.
        level: The level of significance.
    """
    rounding = rounding_bias.delta if name == "delta" else None
    tested = rounding is not None and rounding.p_value is not None and rounding.p_value <= level
    if tested and rounding is not None and _alike(rounding.mean, estimate.mean):
        return f"correct rounding of O alone gives {rounding.mean:.3g}"
    if estimate.mean and estimate.well_rounded_mean == estimate.mean:
        return "sound arithmetic of this format leaves as much on this input"
    if _alike(estimate.well_rounded_mean, estimate.mean):
        return f"a well-rounded kernel has {estimate.well_rounded_mean:.3g} on this input"
    return None


def of_cut_off(verdict: Verdict, what: CutOff) -> Verdict:
    """A biased head's verdict, whose O errs as products make it that cut this off to TF32, with that as the reason."""
    if "biased" not in verdict.labels:
        return verdict
    after = next(i for i, reason in enumerate(verdict.reasons) if reason.startswith("Mean error")) + 1
    reasons = (*verdict.reasons[:after], _CUT_OFF[what], *verdict.reasons[after:])
    named = zip(verdict.labels, verdict.suggestions, strict=True)
    suggestions = tuple(_NOT_CUT_OFF[what] if label == "biased" else said for label, said in named)
    return replace(verdict, reasons=reasons, suggestions=suggestions)


def leans_on_few(estimate: BiasEstimate, level: float) -> bool:
    """Whether a test found nothing, but had too few terms to say so.

    A test that did find something has paid for its few terms with its standard error. An excess of a kernel close to
    correct rounding has few terms by nature, and a bias that is the same in all rows rests on the most copied key
    alone.
    """
    return not rejects(estimate, level) and estimate.n_eff is not None and estimate.n_eff < MIN_EFFECTIVE


def _alike(other: float | None, mean: float | None) -> bool:
    """Whether another mean has the sign of ``mean`` and at least half its size."""
    return (other or 0.0) * (mean or 0.0) > 0 and abs(other or 0.0) >= abs(mean or 0.0) / 2
