"""A probe run in a few sentences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from attn_diag.probing.result import Assumptions, Finding, SignedTest

# More probes of one kind are only counted.
_NAMED = 6


def accuracy_words(found: Finding, level: float) -> str:
    """The verdict on a comparison with the reference, gravest first."""
    parts = []
    if "broken" in found.labels:
        parts.append(f"NaN or Inf in {found.nonfinite} of {found.elements} elements")
    if "too-large" in found.labels:
        largest, budget = _short(found.max_error_ulp), _short(found.of_budget)
        parts.append(f"errors up to {largest} ulp, {budget} times what casts of P̄ and O and fp32 sums can make")
    parts += [_bias_words(test, level) for test in found.tests if test.biased]
    if not parts and "exact" in found.labels:
        return "exact: every element is the correctly rounded one"
    if not parts:
        shown = found.tests[0] if found.tests else None
        mean = "" if shown is None or shown.ci_ulp is None else f"; mean {_mean(shown)} ulp"
        parts.append(f"within rounding, no bias{mean}")
    if found.name == "ones" and "biased" in found.labels:
        parts.append("noise in the sum of P alone can do that, for spacing halves below 1")
    if found.name == "unit-vectors" and found.relative_ci is not None:
        parts.append(f"rows of P sum to 1 {_relative_mean(found)}")
    return "; ".join(parts)


def invariance_words(found: Finding) -> str:
    """The verdict on two calls that must agree."""
    broken = f"NaN or Inf in {found.nonfinite} of {found.elements} elements"
    if not found.differing:
        return f"{broken}, the same in both calls" if "broken" in found.labels else "exact: all elements bit-identical"
    moved = (
        f"not invariant: {found.differing} of {found.elements} elements differ, "
        f"by up to {_short(found.max_error_ulp)} ulp"
    )
    return f"{broken}; {moved}" if "broken" in found.labels else moved


def normaliser_words(findings: Sequence[Finding], level: float) -> list[str]:
    """Whether the row sum matches the weights that multiply V, of the findings with a prediction."""
    known = [f for f in findings if f.predicted is not None and f.relative is not None and "broken" not in f.labels]
    if not known:
        return []
    off = [f for f in known if "biased" in f.labels]
    if not off:
        return [
            "The row sum matches the weights that multiply V: normaliser off by "
            f"{' and '.join(relative_words(f) for f in known)}, where an l that sums P̄ before its cast would give "
            f"{' and '.join(f'{f.predicted:+.3g}' for f in known)}."
        ]
    as_predicted = [f for f in off if matches_prediction(f)]
    measured = " and ".join(f"{relative_words(f)} ({_rounds(f)})" for f in off)
    words = (
        f"The row sum does not match the weights that multiply V: normaliser off by {measured}; intervals at "
        f"{100 * (1 - level):g} %."
    )
    expected = " and ".join(f"{f.predicted:+.4g}" for f in off)
    if len(as_predicted) == len(known):
        words += f" That is {expected}, what an l that sums P̄ in fp32 gives while P̄ is cast for P̄V."
    else:
        words += (
            f" It is not {expected}, which an l that sums P̄ in fp32 would give: look at how l is rounded, and at exp."
        )
    return [words]


def summarise(
    findings: Sequence[Finding], assumptions: Assumptions, level: float, name: str, *, emulated: bool
) -> tuple[str, ...]:
    """What is wrong, most important first; or that nothing is."""
    sentences = []
    if not assumptions.ok:
        sentences.append(_wrong_function(assumptions))
    elif not any(set(f.labels) - {"exact", "within-rounding"} for f in findings):
        sentences.append(f"Nothing beyond correct rounding was found in {name}.")
    sentences += normaliser_words(findings, level)
    broken = [f for f in findings if "broken" in f.labels]
    if broken:
        sentences.append(f"NaN or Inf: {_names(broken)}.")
    large = [f for f in findings if "too-large" in f.labels]
    if large:
        sentences.append(
            "Errors beyond what casts of P̄ and O and sums in fp32 can make (something else is rounded, or lost): "
            f"{_names(large)}."
        )
    biased = [f for f in findings if "biased" in f.labels and f.predicted is None]
    if biased:
        sentences.append(f"Biased beyond correct rounding: {', '.join(_with_mean(f) for f in biased[:_NAMED])}.")
    moved = [f for f in findings if "not-invariant" in f.labels]
    if any(f.name == "repeat" for f in moved):
        sentences.append(
            "The same call gives different results: no other comparison of two calls can hold bit for bit."
        )
        moved = [f for f in moved if f.name != "repeat"]
    if moved:
        sentences.append(f"Not invariant: {'; '.join(f'{f.name} ({f.shows})' for f in moved)}.")
    if emulated and any(f.name == "length" for f in moved):
        sentences.append(
            "(The emulation adds inside a tile as the library does, whose order may change with size and place.)"
        )
    return tuple(sentences)


def relative_words(found: Finding) -> str:
    """A relative defect with its interval."""
    if found.relative is None:
        return "unknown"
    if found.relative_ci is None:
        return f"{found.relative:+.3g}"
    return f"{found.relative:+.3g} ({found.relative_ci[0]:+.3g} to {found.relative_ci[1]:+.3g})"


def matches_prediction(found: Finding) -> bool:
    """Whether the predicted relative error lies in the measured interval."""
    if found.relative_ci is None or found.predicted is None:
        return False
    return found.relative_ci[0] <= found.predicted <= found.relative_ci[1]


def _wrong_function(assumptions: Assumptions) -> str:
    off = "not finite" if assumptions.relative_error is None else f"{100 * assumptions.relative_error:.3g} % off"
    words = (
        f"On N(0,1) inputs O is {off}: fn does not compute softmax(scale Q K^T) V with scale {assumptions.scale:g}, "
        f"causal {assumptions.causal}"
    )
    if assumptions.fits is not None:
        return f"{words}; with {assumptions.fits} it fits: probe it so. What follows is about another function."
    return f"{words}, nor with other scales or masks that were tried. What follows may be about another function."


def _bias_words(test: SignedTest, level: float) -> str:
    interval = "" if test.ci_ulp is None else f" ({test.ci_ulp[0]:+.2g} to {test.ci_ulp[1]:+.2g})"
    away = " upward" if test.direction == "upward" else ""
    return f"biased by {test.mean_ulp or 0.0:+.2g} ulp{away}{interval}, p {_p(test.p_adjusted)} at level {level:g}"


def _mean(test: SignedTest) -> str:
    assert test.ci_ulp is not None
    half = (test.ci_ulp[1] - test.ci_ulp[0]) / 2
    return f"{test.mean_ulp or 0.0:+.1g} ± {half:.1g}"


def _relative_mean(found: Finding) -> str:
    assert found.relative_ci is not None
    return f"{found.relative or 0.0:+.1g} ± {(found.relative_ci[1] - found.relative_ci[0]) / 2:.1g}"


def _with_mean(found: Finding) -> str:
    worst = max((t for t in found.tests if t.biased), key=lambda t: abs(t.mean_ulp or 0.0))
    return f"{found.name} ({worst.mean_ulp or 0.0:+.2g} ulp{' upward' if worst.direction == 'upward' else ''})"


def _rounds(found: Finding) -> str:
    return "casts down" if (found.predicted or 0.0) < 0 else "casts up"


def _names(findings: Sequence[Finding]) -> str:
    more = f" and {len(findings) - _NAMED} more" if len(findings) > _NAMED else ""
    return f"{', '.join(f.name for f in findings[:_NAMED])}{more}"


def _p(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.1g}"


def _short(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.3g}"
