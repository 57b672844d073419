"""What a probe run shows, in sentences. Causes are named by ``pointers`` alone."""

from __future__ import annotations

import math
from collections.abc import Sequence

from attn_diag.results.probe import LseTest, ProbeAssumptions, ProbeFinding, SignedTest
from attn_diag.results.wording import listed, percent
from attn_diag.testing.probing.pointers import own_rounding, pointers, relative_words, sums_uncast

# More probes of one kind are only counted.
_NAMED = 6


def accuracy_words(found: ProbeFinding, level: float) -> str:
    """The verdict on a comparison with the reference, gravest first."""
    parts = []
    if found.nonfinite:
        parts.append(f"NaN or Inf in {found.nonfinite} of {found.elements} elements")
    if "too-large" in found.labels:
        largest, budget = _short(found.max_error_ulp), _short(found.of_budget)
        parts.append(f"errors up to {largest} ulp, {budget} times what casts of P̄ and O and fp32 sums can make")
    parts += [_bias_words(test, level) for test in found.tests if test.biased]
    if not parts:
        parts.append(_quiet_words(found))
    if found.lse is not None:
        parts += _lse_words(found.lse)
    if found.name == "ones" and "biased" in found.labels:
        parts.append("noise in the sum of P alone can do that, for spacing halves below 1")
    if found.name == "unit-vectors" and found.relative_ci is not None:
        parts.append(f"rows of P sum to 1 {_relative_mean(found)}")
    return "; ".join(parts)


def _quiet_words(found: ProbeFinding) -> str:
    if not found.differing:
        return "exact: every element is the correctly rounded one"
    shown = found.tests[0] if found.tests else None
    if shown is None or shown.ci_ulp is None:
        return "within the bound, no bias"
    if shown.allowed_ulp:
        return f"no bias beyond fp32 arithmetic's (± {shown.allowed_ulp:.2g} ulp); mean {_mean(shown)} ulp"
    return f"within the bound, no bias; mean {_mean(shown)} ulp"


def _lse_words(lse: LseTest) -> list[str]:
    """What is wrong with L, if anything."""
    parts = []
    if lse.nonfinite:
        parts.append(f"L is NaN or Inf in {lse.nonfinite} rows")
    if lse.of_budget > 1:
        base = ", but L ln 2 fits: it is in base 2" if lse.fits_base_2 else ""
        parts.append(f"L off by up to {_short(lse.max_error)}, {_short(lse.of_budget)} times its bound{base}")
    if lse.biased:
        interval = "" if lse.ci is None else f" ({lse.ci[0]:+.2g} to {lse.ci[1]:+.2g})"
        parts.append(f"L biased by {lse.error.mean or 0.0:+.2g}{interval}, p {_p(lse.p_adjusted)}")
    return parts


def invariance_words(found: ProbeFinding) -> str:
    """The verdict on two calls that must agree."""
    broken = f"NaN or Inf in {found.nonfinite} of {found.elements} elements"
    if not found.differing:
        return (
            f"{broken}, the same in both calls" if "nonfinite" in found.labels else "exact: all elements bit-identical"
        )
    moved = (
        f"not invariant: {found.differing} of {found.elements} elements differ, "
        f"by up to {_short(found.max_error_ulp)} ulp"
    )
    return f"{broken}; {moved}" if "nonfinite" in found.labels else moved


def summarise(
    findings: Sequence[ProbeFinding], assumptions: ProbeAssumptions, level: float, name: str, *, emulated: bool
) -> tuple[str, ...]:
    """What is wrong, most important first; or what was looked at without finding anything."""
    if assumptions.words is not None:
        return (_wrong_function(assumptions, name),)
    sentences = []
    if not any(set(f.labels) - {"exact", "within-rounding"} for f in findings):
        sentences.append(_nothing_found(findings, name))
    nonfinite = [f for f in findings if "nonfinite" in f.labels]
    if nonfinite:
        sentences.append(
            f"NaN or Inf: {_names(nonfinite)}. Mend that first: what follows is about the other rows. It is made by an "
            "overflow of a format, by 0/0 or Inf - Inf, or it is memory that was never written."
        )
    large = [f for f in findings if "too-large" in f.labels]
    if large:
        sentences.append(
            "Errors beyond what casts of P̄ and O and sums in fp32 can make (some other step rounds, or something is "
            f"lost or wrong): {_names(large)}."
        )
    sentences += pointers(findings)
    sentences += _normaliser_facts(findings, level)
    explained = sums_uncast(findings) is not None
    biased = [f for f in findings if "biased" in f.labels and not (explained and f.predicted is not None)]
    if biased and not own_rounding(findings):
        named = listed([_with_mean(f) for f in biased], _NAMED)
        sentences.append(f"Biased beyond correct rounding: {named}.")
    sentences += _lse_summary(findings)
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


def _nothing_found(findings: Sequence[ProbeFinding], name: str) -> str:
    """What was looked at, and what was not."""
    compared = any(f.kind == "accuracy" for f in findings)
    with_lse = compared and all(f.lse is not None for f in findings if f.kind == "accuracy")
    seen = [
        *(["no bias and no error beyond the bound"] if compared else []),
        *(["no difference between calls that must agree"] if any(f.kind == "invariance" for f in findings) else []),
    ]
    judged = "O and L" if with_lse else "O"
    missing = "" if with_lse or not compared else "L did not come; "
    return (
        f"Nothing was found in {judged} of {name}: {', '.join(seen)}. Not judged: {missing}errors of "
        "either sign that are larger than one rounding's but within the bound (attn-diag inspect measures them)."
    )


def _normaliser_facts(findings: Sequence[ProbeFinding], level: float) -> list[str]:
    """O's mean in the normaliser probes beside what a mismatch of l would give; nothing where a pointer says so."""
    known = [f for f in findings if f.predicted is not None and f.relative is not None and "nonfinite" not in f.labels]
    if not known or sums_uncast(findings) is not None:
        return []
    measured = " and ".join(f"{relative_words(f)} ({_rounds(f)})" for f in known)
    expected = " and ".join(f"{f.predicted:+.3g}" for f in known)
    if not any("biased" in f.labels for f in known):
        return [
            "The row sum matches the weights that multiply V, in the mean: the normaliser (l, which O is divided by) "
            f"is off by {measured}, where an l that sums P̄ before its cast gives {expected}."
        ]
    return [
        f"In the normaliser probes O is off by {measured}, where an l that sums P̄ before its cast gives {expected}; "
        f"intervals at {percent(1 - level, 'g')}."
    ]


def _lse_summary(findings: Sequence[ProbeFinding]) -> list[str]:
    """Where L is wrong; nothing where it is not, or did not come."""
    known = [(f, f.lse) for f in findings if f.lse is not None]
    large = [(f, lse) for f, lse in known if lse.of_budget > 1]
    sentences = []
    if large:
        worst = max(lse.max_error for _, lse in large)
        # A base fits only if it fits everywhere.
        base = all(lse.fits_base_2 for _, lse in large)
        hint = " L ln 2 fits: return the natural logarithm, m + ln l." if base else ""
        sentences.append(
            f"L (lse) is off by up to {worst:.3g}, more than fp32 arithmetic and a cast of P̄ can make: "
            f"{_names([f for f, _ in large])}.{hint}"
        )
    biased = [(f, lse) for f, lse in known if lse.biased and lse.of_budget <= 1]
    if biased:
        found, lse = max(biased, key=lambda pair: abs(pair[1].error.mean or 0.0))
        mean = lse.error.mean or 0.0
        # With l the sum of P̄ cast, L moves by ln(1 + what O would be off by if l alone summed it uncast).
        cast = "" if found.predicted is None else f" (an l that sums P̄ cast: {math.log1p(found.predicted):+.2g})"
        sentences.append(
            f"L (lse) is biased: {_names([f for f, _ in biased])}; by {mean:+.2g} in {found.name}{cast}, where rows of "
            f"the exp(S - L) that a backward takes for P sum to 1 {math.expm1(-mean):+.2g}."
        )
    return sentences


def _wrong_function(assumptions: ProbeAssumptions, name: str) -> str:
    said = assumptions.said
    words = (
        f"On N(0,1) inputs O is {percent(assumptions.relative_error)} off: {name} does not compute softmax(scale Q "
        f"K^T) V with {said}"
    )
    if assumptions.fits is not None:
        ask = "check" if assumptions.fits.startswith("declared") else "probe"
        return f"{words}; with {assumptions.fits} it fits: {ask} it so. Nothing was probed."
    return f"{words}, nor with other scales, masks and layouts that were tried. Nothing was probed."


def _bias_words(test: SignedTest, level: float) -> str:
    interval = "" if test.ci_ulp is None else f" ({test.ci_ulp[0]:+.2g} to {test.ci_ulp[1]:+.2g})"
    away = " upward" if test.direction == "upward" else ""
    return f"biased by {test.mean_ulp or 0.0:+.2g} ulp{away}{interval}, p {_p(test.p_adjusted)} at level {level:g}"


def _mean(test: SignedTest) -> str:
    assert test.ci_ulp is not None
    half = (test.ci_ulp[1] - test.ci_ulp[0]) / 2
    return f"{test.mean_ulp or 0.0:+.1g} ± {half:.1g}"


def _relative_mean(found: ProbeFinding) -> str:
    assert found.relative_ci is not None
    return f"{found.relative or 0.0:+.1g} ± {(found.relative_ci[1] - found.relative_ci[0]) / 2:.1g}"


def _with_mean(found: ProbeFinding) -> str:
    worst = max((t for t in found.tests if t.biased), key=lambda t: abs(t.mean_ulp or 0.0))
    return f"{found.name} ({worst.mean_ulp or 0.0:+.2g} ulp{' upward' if worst.direction == 'upward' else ''})"


def _names(findings: Sequence[ProbeFinding]) -> str:
    return listed([f.name for f in findings], _NAMED)


def _p(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.1g}"


def _short(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.3g}"


def _rounds(found: ProbeFinding) -> str:
    return "casts down" if (found.predicted or 0.0) < 0 else "casts up"
