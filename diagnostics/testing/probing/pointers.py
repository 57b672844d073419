"""Which step makes what the probes show: said only where that step, and no other, was measured to leave it.

``TABLE`` holds all there is. Each signature was derived (its docstring says how) and then measured: of every planted
forward defect of benchmarks/verdicts, of healthy schedules, and of variants that were written once the table was fixed,
``benchmarks/study_probe.py`` records which entries speak, in BF16 and FP16, with and without a mask, and whether what
they say is so (benchmarks/results/probe_cpu.json). What many steps leave alike (noise of either sign, scores, exp, m,
1/l, the accumulator, V) gets facts without a pointer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from attn_diag.results.probe import Direction, ProbeFinding, SignedTest

# Probes whose O_ref lies anywhere between two numbers.
_SPREAD = ("normal", "unit-vectors", "ramp", "constant-rows", "duplicates", "sinks", "tails", "outliers")
# Those of them whose O is positive and takes many values: near a zero of O sums alone make many ulp.
_POSITIVE = ("unit-vectors", "ramp", "tails")
_NORMALISER = ("normaliser-down", "normaliser-up")
# Errors relative to O have means that differ by a third between the halves of a binade; O's own rounding, by nothing.
_APART = 1 / 4
# Means that are one number, beyond their intervals: P_bar's casts and O's last rounding move them by less.
_ALIKE = 0.1
_NAMES = {"bf16": "BF16", "fp16": "FP16"}

ByName = dict[str, ProbeFinding]


@dataclass(frozen=True)
class Pointer:
    """A step, and what its fault alone leaves."""

    site: str
    """The step, in the words of ``benchmarks/verdicts``."""
    speaks: Callable[[ByName], str | None]
    """The sentence, where the findings are the step's signature."""
    suspect: Callable[[str], str] | None = None
    """That sentence -> the fault in a few words; None where it is what published kernels do."""


def pointers(findings: Sequence[ProbeFinding]) -> list[str]:
    """The sentences of ``TABLE`` that these findings allow."""
    return [words for pointer in TABLE if (words := pointer.speaks(_by_name(findings))) is not None]


def own_rounding(findings: Sequence[ProbeFinding]) -> str | None:
    """All means alike in ulp, whatever the probe, and in both halves of a binade: nothing before O's last cast does so.

    l, 1/l, P_bar, V and the accumulators make errors relative to what they round, which differ by a third between the
    halves of O's binades, and differ from probe to probe. O's cast moves no element beyond the bound; a cast of splits
    before their merge does, and is O's own only in rows that see one split.
    """
    found = _by_name(findings)
    if not all(name in found and not {"nonfinite", "too-large"} & set(found[name].labels) for name in _SPREAD):
        return None
    names: tuple[tuple[Direction, str, str], ...] = (
        ("away from zero", "toward zero", "away from zero"),
        ("upward", "downward", "upward"),
    )
    for direction, down, up in names:
        tests = [_test(found[name], direction) for name in _SPREAD]
        known = [t for t in tests if t.biased and t.mean_ulp is not None and t.ci_ulp is not None]
        if len(known) < len(tests):
            continue
        mean = sum(t.mean_ulp or 0.0 for t in known) / len(known)
        apart = [_test(found[name], direction).upper_less_lower_ci for name in _POSITIVE]
        within = all(ci is not None and max(map(abs, ci)) < _APART * abs(mean) for ci in apart)
        # One cast moves a number by less than a spacing.
        if within and abs(mean) < 1 and all(_holds(t.ci_ulp, mean, _ALIKE) for t in known):
            return (
                f"O itself is rounded {down if mean < 0 else up} in the mean, by {mean:+.2g} ulp in every probe "
                "and in both halves of a binade: that is a cast of O, not l, P̄ or a sum."
            )
    return None


def sums_uncast(findings: Sequence[ProbeFinding]) -> str | None:
    """O off as predicted of P_bar cast to nearest for P_bar V but not for l, to both sides; L, if it came, is right."""
    known = _normalisers(_by_name(findings))
    if known is None or not all("biased" in f.labels and _holds(f.relative_ci, f.predicted) for f in known):
        return None
    if any(f.lse is not None and (f.lse.biased or f.lse.of_budget > 1) for f in known):
        return None
    measured = " and ".join(f"{relative_words(f)}" for f in known)
    expected = " and ".join(f"{f.predicted:+.4g}" for f in known)
    return (
        f"The row sum does not match the weights that multiply V: the normaliser (l, which O is divided by) is off by "
        f"{measured} (casts down, casts up). That is {expected}, what an l that sums P̄ in fp32 gives while P̄ is cast "
        "for P̄V, as FlashAttention-2 and cuDNN do: it is normal, and no fault of this kernel."
    )


def _truncates_probs(found: ByName) -> str | None:
    """As ``sums_uncast``, where the cast truncates; L must have come and be right, as coarse scores can look alike."""
    known = _normalisers(found)
    if known is None or not all("biased" in f.labels and _holds(f.relative_ci, f.predicted_truncated) for f in known):
        return None
    if not all(f.lse is not None and not f.lse.biased and f.lse.of_budget <= 1 for f in known):
        return None
    measured = " and ".join(f"{relative_words(f)}" for f in known)
    expected = " and ".join(f"{f.predicted_truncated:+.4g}" for f in known)
    return (
        f"P̄ is too small where it multiplies V: O is off by {measured}, as predicted of a cast that truncates "
        f"({expected}), and L is right."
    )


def _sums_cast(found: ByName) -> str | None:
    """L off by ln(1 + prediction) to both sides while O is right: l sums P_bar after its cast to nearest."""
    known = _normalisers(found)
    if known is None or any({"biased", "too-large"} & set(f.labels) for f in known):
        return None
    for f in known:
        expected, lse = math.log1p(f.predicted or 0.0), f.lse
        # The prediction is of O, whose rows weigh as V does: to a hundredth alike.
        if lse is None or not lse.biased or not math.isclose(lse.error.mean or 0.0, expected, rel_tol=0.02):
            return None
    moved = " and ".join(f"{f.lse.error.mean or 0.0:+.2g}" for f in known if f.lse is not None)
    return (
        f"l sums the P̄ that multiplies V, rounded to nearest: O's mean is right in the normaliser probes, and L is off "
        f"by {moved}, as predicted of that."
    )


def _row_sum(found: ByName) -> str | None:
    """O too large by r while exp(L) is too small by r: O exp(L), which is P_bar V, is right.

    Compared where every row weighs the same, as it does in L's mean; other probes must lean to the same sides.
    """
    sides = [_sides(found.get(name)) for name in ("normal", "unit-vectors", "ramp", "tails")]
    if None in sides or len(set(sides)) > 1:
        return None
    known = [found[name] for name in ("unit-vectors", "tails")]
    factors = [math.expm1(-f.lse.error.mean) for f in known if f.lse is not None and f.lse.error.mean is not None]
    if len(factors) < 2 or not all(_holds(f.relative_ci, r, _ALIKE) for f, r in zip(known, factors, strict=True)):
        return None
    return (
        f"O and exp(L) are off by the same factor to opposite sides (O by {factors[0]:+.2g} in {known[0].name}, by "
        f"{factors[1]:+.2g} in {known[1].name}), so that their product, P̄V, is right: the row sum l is off."
    )


def _sides(found: ProbeFinding | None) -> tuple[bool, bool] | None:
    """Whether O is too large and L too small in the mean; None unless both are biased, to opposite sides."""
    if found is None or found.lse is None or not found.lse.biased or not _test(found, "away from zero").biased:
        return None
    large, small = (found.relative or 0.0) > 0, (found.lse.error.mean or 0.0) < 0
    return (large, small) if large == small else None


def _stored_lse(found: ByName) -> str | None:
    """Every L of every probe is a number of 16 bits, and beside the true one."""
    formats = {None if f.lse is None else f.lse.rounded_to for f in found.values() if f.kind == "accuracy"}
    if len(formats) != 1 or (only := formats.pop()) is None:
        return None
    return f"Every L is a {_NAMES[only]} number beside the true L: L is rounded to {_NAMES[only]} when it is stored."


def _of_own_rounding(said: str) -> str:
    """Of "O itself is rounded toward zero in the mean, by -0.5 ulp in …", in the words of ``check``."""
    side = said.removeprefix("O itself is rounded ").partition(" in the mean")[0]
    does = {"toward zero": "truncates", "upward": "rounds up", "downward": "rounds down"}
    return f"the last cast of O {does.get(side, f'rounds {side}')}"


TABLE = (
    Pointer("O", lambda found: own_rounding(list(found.values())), _of_own_rounding),
    Pointer("l sums P̄ uncast", lambda found: sums_uncast(list(found.values()))),
    Pointer("l sums P̄ cast", _sums_cast),
    Pointer("P̄", _truncates_probs, lambda _: "the cast of P̄ truncates"),
    Pointer("row sum", _row_sum, lambda _: "the row sum l is off"),
    Pointer("LSE", _stored_lse, lambda said: said.partition(": ")[2].removesuffix(".")),
)


def relative_words(found: ProbeFinding) -> str:
    """A relative defect with its interval."""
    if found.relative is None:
        return "unknown"
    if found.relative_ci is None:
        return f"{found.relative:+.3g}"
    return f"{found.relative:+.3g} ({found.relative_ci[0]:+.3g} to {found.relative_ci[1]:+.3g})"


def matches_prediction(found: ProbeFinding) -> bool:
    """Whether the predicted relative error lies in the measured interval."""
    return _holds(found.relative_ci, found.predicted)


def _by_name(findings: Sequence[ProbeFinding]) -> ByName:
    return {f.name: f for f in findings}


def _normalisers(found: ByName) -> list[ProbeFinding] | None:
    """Both normaliser probes; None where one did not run or holds NaN."""
    known = [found[name] for name in _NORMALISER if name in found and "nonfinite" not in found[name].labels]
    return known if len(known) == len(_NORMALISER) else None


def _test(found: ProbeFinding, direction: Direction) -> SignedTest:
    """Of a positive O the one test serves both directions."""
    return next((t for t in found.tests if t.direction == direction), found.tests[0])


def _holds(interval: tuple[float, float] | None, value: float | None, slack: float = 0.0) -> bool:
    """Whether the interval, wider by that share of the value, holds it."""
    if interval is None or value is None:
        return False
    wider = slack * abs(value)
    return interval[0] - wider <= value <= interval[1] + wider
