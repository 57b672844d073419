"""What a probe run shows, in sentences; and what the pattern of biases says of their cause."""

from __future__ import annotations

import math
from collections.abc import Sequence

from attn_diag.results.probe import Direction, LseTest, ProbeAssumptions, ProbeFinding, SignedTest
from attn_diag.results.wording import listed, percent

# More probes of one kind are only counted.
_NAMED = 6
# V is 1, or one key has nearly all of P: O_ref lies at, or next to, a number, where rounding is another than elsewhere.
_AT_NUMBERS = ("ones", "one-hot")
# Means of one sign are alike where the largest is less than twice the smallest.
_ALIKE = 2.0
# An l that misses the casts' mean errors is off by their prediction; what is off by less than a tenth has other causes.
_FAR_BELOW = 0.1


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
        return "within rounding, no bias"
    if shown.allowed_ulp:
        return f"no bias beyond fp32 arithmetic's (± {shown.allowed_ulp:.2g} ulp); mean {_mean(shown)} ulp"
    return f"within rounding, no bias; mean {_mean(shown)} ulp"


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
        return f"{broken}, the same in both calls" if "broken" in found.labels else "exact: all elements bit-identical"
    moved = (
        f"not invariant: {found.differing} of {found.elements} elements differ, "
        f"by up to {_short(found.max_error_ulp)} ulp"
    )
    return f"{broken}; {moved}" if "broken" in found.labels else moved


def summarise(
    findings: Sequence[ProbeFinding], assumptions: ProbeAssumptions, level: float, name: str, *, emulated: bool
) -> tuple[str, ...]:
    """What is wrong, most important first; or that nothing is."""
    sentences = []
    if not assumptions.ok:
        sentences.append(_wrong_function(assumptions))
    elif not any(set(f.labels) - {"exact", "within-rounding"} for f in findings):
        sentences.append(f"Nothing beyond correct rounding was found in {name}.")
    # Of another function the predictions do not hold.
    mismatch = assumptions.ok and shows_mismatch(findings)
    own = of_own_rounding(findings) if assumptions.ok else None
    if assumptions.ok:
        sentences += normaliser_words(findings, level)
    if own is not None:
        sentences.append(
            f"All probes whose O lies anywhere between two numbers are biased alike, by {own[0]:+.2g} ulp ({own[1]}): "
            "that is O's own rounding, not l or P̄."
        )
    broken = [f for f in findings if "broken" in f.labels]
    if broken:
        sentences.append(f"NaN or Inf: {_names(broken)}.")
    large = [f for f in findings if "too-large" in f.labels]
    if large:
        sentences.append(
            "Errors beyond what casts of P̄ and O and sums in fp32 can make (something else is rounded, or lost): "
            f"{_names(large)}."
        )
    biased = [f for f in findings if "biased" in f.labels and not (mismatch and f.predicted is not None)]
    if biased and own is None:
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
        cast = "" if found.predicted is None else f" (an l that sums P̄ cast gives {math.log1p(found.predicted):+.2g})"
        sentences.append(
            f"L (lse) is biased: {_names([f for f, _ in biased])}; by {mean:+.2g} in {found.name}{cast}, where rows of "
            f"the exp(S - L) that a backward takes for P sum to 1 {math.expm1(-mean):+.2g}."
        )
    return sentences


def _wrong_function(assumptions: ProbeAssumptions) -> str:
    off = "not finite" if assumptions.relative_error is None else f"{percent(assumptions.relative_error)} off"
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


def of_own_rounding(findings: Sequence[ProbeFinding]) -> tuple[float, str] | None:
    """The mean in ulp, and where it points, of a bias that every probe shows alike; None where they differ.

    l, P_bar and the sums differ from probe to probe, O's last rounding does not. Two probes at least beside the
    normaliser's must show it.
    """
    spread = [f for f in findings if f.kind == "accuracy" and f.name not in _AT_NUMBERS and "broken" not in f.labels]
    if sum(f.predicted is None for f in spread) < 2:
        return None
    names: tuple[tuple[Direction, str, str], ...] = (
        ("away from zero", "toward zero", "away from zero"),
        ("upward", "downward", "upward"),
    )
    for direction, down, up in names:
        means = [_biased_mean(f, direction) for f in spread]
        known = [m for m in means if m is not None]
        if len(known) == len(means) and _alike(known):
            return sum(known) / len(known), down if known[0] < 0 else up
    return None


def normaliser_words(findings: Sequence[ProbeFinding], level: float) -> list[str]:
    """Whether the row sum matches the weights that multiply V, where the normaliser probes show it.

    A mismatch biases every one of them, to the predicted side, unlike "constant-rows" and "ramp".
    """
    known = [f for f in findings if f.predicted is not None and f.relative is not None and "broken" not in f.labels]
    off = [f for f in known if "biased" in f.labels]
    if known and not off and not any(matches_prediction(f) for f in known):
        return [
            "The row sum matches the weights that multiply V: normaliser off by "
            f"{' and '.join(relative_words(f) for f in known)}, where an l that sums P̄ before its cast would give "
            f"{' and '.join(f'{f.predicted:+.3g}' for f in known)}."
        ]
    if not shows_mismatch(findings):
        return []
    measured = " and ".join(f"{relative_words(f)} ({_rounds(f)})" for f in off)
    expected = " and ".join(f"{f.predicted:+.4g}" for f in off)
    words = (
        f"The row sum does not match the weights that multiply V: normaliser off by {measured}; intervals at "
        f"{percent(1 - level, 'g')}."
    )
    if all(matches_prediction(f) for f in known):
        words += f" That is {expected}, what an l that sums P̄ in fp32 gives while P̄ is cast for P̄V."
    else:
        words += (
            f" It is not {expected}, which an l that sums P̄ in fp32 would give: look at how l is rounded, and at exp."
        )
    return [words]


def shows_mismatch(findings: Sequence[ProbeFinding]) -> bool:
    """Whether every normaliser probe that ran is biased as a mismatch of l biases it, and other probes are not."""
    known = [f for f in findings if f.predicted is not None]
    if not known or not all("biased" in f.labels and "broken" not in f.labels and _to_its_side(f) for f in known):
        return False
    elsewhere = [_biased_mean(f, "away from zero") for f in findings if f.name in ("constant-rows", "ramp")]
    own = [_biased_mean(f, "away from zero") for f in known]
    return not any(m is not None and o is not None and _alike([m, o]) for m in elsewhere for o in own)


def relative_words(found: ProbeFinding) -> str:
    """A relative defect with its interval."""
    if found.relative is None:
        return "unknown"
    if found.relative_ci is None:
        return f"{found.relative:+.3g}"
    return f"{found.relative:+.3g} ({found.relative_ci[0]:+.3g} to {found.relative_ci[1]:+.3g})"


def matches_prediction(found: ProbeFinding) -> bool:
    """Whether the predicted relative error lies in the measured interval."""
    if found.relative_ci is None or found.predicted is None:
        return False
    return found.relative_ci[0] <= found.predicted <= found.relative_ci[1]


def _to_its_side(found: ProbeFinding) -> bool:
    predicted, relative = found.predicted or 0.0, found.relative or 0.0
    return relative * predicted > 0 and abs(relative) >= _FAR_BELOW * abs(predicted)


def _biased_mean(found: ProbeFinding, direction: Direction) -> float | None:
    """The mean in ulp of a biased test; of a positive O the one test serves both directions."""
    tests = {t.direction: t for t in found.tests}
    test = tests.get(direction, found.tests[0] if len(found.tests) == 1 else None)
    return test.mean_ulp if test is not None and test.biased else None


def _alike(means: Sequence[float]) -> bool:
    sizes = [abs(m) for m in means]
    return len({m > 0 for m in means}) == 1 and max(sizes) < _ALIKE * min(sizes)


def _rounds(found: ProbeFinding) -> str:
    return "casts down" if (found.predicted or 0.0) < 0 else "casts up"
