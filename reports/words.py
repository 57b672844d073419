"""A diagnosis in sentences: what was read, what made the numbers, and what is known of a head besides its table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from attn_diag.reports.layout import Spark
from attn_diag.reports.quantities import GRADIENTS, SHARES, tested
from attn_diag.results.base import Tool
from attn_diag.results.diagnosis import (
    BiasEstimate,
    CaptureDiagnosis,
    Diagnosis,
    GradientError,
    HeadDiagnosis,
    ObservationDiagnosis,
)
from attn_diag.results.wording import DASH, file_name, number, percent, share, together

CAVEAT = (
    "Error = observed - float64 reference on the same inputs; excess = beyond one correct rounding; a well-rounded "
    "kernel = the published recipe (FlashAttention-2's) of the inputs' format, run on the same inputs. "
    "Bias in one capture does not prove that training diverges."
)
_SIGNIFICANT = 0.05


def shape(capture: CaptureDiagnosis) -> str:
    """Sizes, type and masking in one line."""
    s, m = capture.shape, capture.metadata
    heads = f"H={s['Hq']}" if s["Hq"] == s["Hk"] else f"Hq={s['Hq']} Hk={s['Hk']}"
    length = f"T={s['Tq']}" if s["Tq"] == s["Tk"] else f"Tq={s['Tq']} Tk={s['Tk']}"
    stated = [f"{k} {m[k]}" for k in ("scale", "window", "softcap", "step") if k in m]
    causal = "no causal mask" if m["causal"] == "none" else f"causal {m['causal']}"
    batch = f"B={s['B']}" if "documents" not in m else f"documents: {m['documents']};"
    return ", ".join([f"{batch} {heads} {length} D={s['D']} {m['dtype']}", causal, *stated])


def observation_line(observation: ObservationDiagnosis) -> str:
    """Who made the numbers."""
    if observation.emulated:
        return f"{observation.name}: {observation.backend}"
    recipe = "no known recipe reproduces its O"
    if observation.recipe is not None:
        recipe = f"recipe {observation.recipe}"
    if observation.agreement is not None:
        equal = f"{share(observation.agreement)} of sampled elements bit-equal"
        recipe = f"O as recipe {observation.recipe} makes it ({equal})"
    return f"{observation.name}: {observation.backend}; {recipe}"


def tool_line(tool: Tool) -> str:
    """Versions and the reference's backend."""
    measured = f"; {tool.hardware}" if tool.hardware else ""
    return f"{versions(tool)}; float64 reference on {tool.backend} ({tool.device}){measured}"


def versions(tool: Tool) -> str:
    """Versions of attn-diag, torch and triton."""
    triton = f", triton {tool.triton}" if tool.triton else ""
    return f"attn-diag {tool.version}, torch {tool.torch}{triton}"


def family_line(diagnosis: Diagnosis) -> str:
    """How many tests share one level."""
    family = diagnosis.family
    return f"{family.size} primary tests, one Benjamini-Hochberg family at level {family.level}"


def warnings(diagnosis: Diagnosis) -> Iterator[str]:
    """Everything that limits what can be concluded: what was not read, not finite, or not as assumed."""
    for capture in diagnosis.captures:
        if capture.unjudged:
            yield f"no verdict for {file_name(capture.source)}: {capture.assumptions.message}"
    yield from diagnosis.summary.warnings
    yield from (f"not read: {u}" for u in diagnosis.summary.unreadable)


def numbers(head: HeadDiagnosis) -> Iterator[str]:
    """What else is known of a head, a sentence each: sharpness of the reference, gradients, rows left out."""
    yield from (said for said in (reference_words(head), certificate_words(head)) if said is not None)
    for name, title in GRADIENTS.items():
        error = getattr(head.propagation, name)
        if error is not None and error.relative_error is not None:
            yield f"{title} off {percent(error.relative_error)}: {share_words(error)}{_unexplained(error)}"
            if error.coherence is not None:
                yield (
                    f"coherence of delta's part in {title} {number(error.coherence)} (random signs: up to "
                    f"{number(error.coherence_null95)}), cancellation {number(error.cancellation)}, "
                    f"participation {number(error.participation)}"
                )
    yield from head.propagation.notes
    counted = {
        "fully masked": head.rows_fully_masked,
        "not finite": head.rows_nonfinite,
        "beyond float64 (huge scores or masks)": head.rows_unknown,
    }
    if left_out := [f"{rows} {why}" for why, rows in counted.items() if rows]:
        yield f"rows left out: {', '.join(left_out)}; {head.rows_all} analysed"


LOST_GRADIENT = (
    "see where the gradient is lost: dO is zero where nothing of the loss comes from here (no labels), behind an "
    "output projection of zeros, where FP16 underflows, or in a backward that drops it (compiled code: does it in "
    "eager code too?)."
)


def not_judged(missing: Sequence[str]) -> str | None:
    """What was not judged, quantities with one reason together; None where nothing is missing."""
    reasons: dict[str, list[str]] = {}
    for said in missing:
        name, _, reason = said.partition(" ")
        reasons.setdefault(reason, []).append(name)
    listed = ", ".join(f"{together(names)} {reason}".rstrip() for reason, names in reasons.items())
    return f"Not judged: {listed}." if listed else None


def reference_words(head: HeadDiagnosis) -> str | None:
    """How far the reference's own error can have moved the means tested; None where nothing was tested."""
    bounds = [f"{test.title} {b:.1g}" for test, e in tested(head) if (b := e.reference_bound) is not None]
    return f"the reference's own error has moved these means by at most: {', '.join(bounds)}" if bounds else None


def certificate_words(head: HeadDiagnosis) -> str | None:
    """What recomputing rows in mpmath said of the reference; None where none were."""
    found = head.certificate
    if found is None:
        return None
    if not found.rows:
        why = "fully masked, not finite, or beyond float64"
        return f"certified: nothing, as none of the rows asked for is analysed ({why})"
    names = {"o": "O", "lse": "L", "delta": "delta", "dq": "dQ", "dsink": "dSink"}
    worst = ", ".join(f"{names[name]} {number(ratio, 2)}" for name, ratio in found.worst_ratio.items())
    outcome = "every error of the float64 reference is within its bound" if found.held else "THE BOUND IS VIOLATED"
    return f"certified: {found.rows} rows recomputed in mpmath ({found.bits} bits): {outcome} (worst part: {worst})"


def share_words(error: GradientError) -> str:
    """The shares of an error's parts, largest first."""
    known = [(name, part) for name, part in (error.shares or {}).items() if part is not None]
    known.sort(key=lambda item: -abs(item[1]))
    # Adding 0 makes -0.0 the 0.0 that it stands for.
    return ", ".join(f"{SHARES.get(name, name)} {round(100 * part, 1) + 0.0:.1f} %" for name, part in known) or DASH


def _unexplained(error: GradientError) -> str:
    parts = []
    if error.unexplained_fraction:
        parts.append(f"{percent(error.unexplained_fraction)} by delta alone")
    if error.unexplained_with_casts is not None:
        parts.append(f"{percent(error.unexplained_with_casts)} with LSE and casts")
    return f"; unexplained {', '.join(parts)}" if parts else ""


def drift_words(estimate: BiasEstimate, found: Spark) -> str:
    """Where a running sum ends, and whether it leaves the band that unbiased noise stays inside."""
    band = "" if estimate.drift_band99 is None else f" of +-{estimate.drift_band99:.2g}"
    ends = "" if estimate.cumulative_sum is None else f"ends at {estimate.cumulative_sum:+.2g}, "
    if not estimate.drift_outside:
        return f"{ends}inside the 99 % band{band}"
    first = f" from row {found.first_row} on" if found.first_row is not None else " between the rows drawn"
    p = estimate.p_value if estimate.p_adjusted is None else estimate.p_adjusted
    # The test of the mean clusters rows that copy the same key; the band takes rows as independent.
    clustered = ", though the mean is not significant where rows that copy one key count as one"
    chance = "" if p is None or p < _SIGNIFICANT else clustered
    return f"{ends}OUTSIDE the 99 % band{band}{first}{chance}"
