"""The outcome of a probe run: OK or not, the suspect, how sure that is, what is normal, and what to run next."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from attn_diag.results.probe import Label, ProbeFinding, SignedTest
from attn_diag.results.wording import chance, in_last_bits, listed, percent, runs_of, together
from attn_diag.testing.next_command import Again
from attn_diag.testing.other_function import OtherFunction
from attn_diag.testing.probing.pointers import TABLE, matches_prediction
from attn_diag.testing.probing.search import Suspect

# More probes of one kind are only counted.
_NAMED = 4
# L moves by ln(1 + prediction) where l sums the cast P_bar; rows weigh as V does, to so much.
_AS_PREDICTED = 0.02
# Where an l makes both errors they agree to so much: rows weigh otherwise, and other errors are there.
_OF_ONE_SUM = 0.5
# Bits that depend on these two are not promised by kernels that choose splits of the keys by what there is to do.
_MAY_VARY = ("batch", "length")


@dataclass(frozen=True)
class ProbeOutcome:
    """What the first lines of a report say; see ``ProbeReport``."""

    outcome: Literal["ok", "fail", "other-function"]
    suspect: str | None = None
    certainty: Literal["certain", "sure"] | None = None
    evidence: str | None = None
    normal: tuple[str, ...] = ()
    next: str | None = None


def outcome_of(
    findings: Sequence[ProbeFinding], other: OtherFunction | None, asked: Again, unit: float,
    search: Callable[[bool], Suspect | None],
) -> ProbeOutcome:  # fmt: skip
    """OK or not, and what of.

    Args:
        findings: Judged ones.
        other: What fn computes instead, if it does; nothing was probed then.
        asked: What was asked for.
        unit: The spacing of the inputs' format over that of O's: an O in fp32 counts its errors in finer units.
        search: Looks for what makes such an O (True: such an L) where the findings do not name it.
    """
    if other is not None:
        certain = f"On N(0,1) inputs O is {percent(other.relative_error)} off"
        certain += "" if other.rounded else ", which no rounding makes"
        if other.fits is None:
            evidence = (
                f"{certain}; no scale, mask or layout that was tried fits. Nothing else was probed: mend that first."
            )
            command: str | None = _after(asked, ["--cases normal", "--out failing"]) or asked.command("probe")
            if asked.stated.causal == "none" and "a causal mask shifted" in other.words:
                command = asked.command("probe", ["--causal top-left"])
            return ProbeOutcome("fail", f"it {other.words}", "certain", evidence, next=command)
        evidence = f"{certain}; with {other.fits} it fits. Nothing else was probed."
        command = other.again("probe", asked)
        return ProbeOutcome("other-function", f"it {other.words}", "certain", evidence, next=command)
    judged = sorted_out(findings, asked.shape[2], unit, asked.dtype.upper(), asked.stated.softcap)
    if not judged.wrong:
        return ProbeOutcome("ok", normal=judged.normal, next=_after(asked))
    if any("nonfinite" in f.labels for f in findings):
        suspect, evidence = nonfinite_words(findings)
        first = next(f.name for f in findings if "nonfinite" in f.labels)
        command = asked.command("probe", [f"--probes {first}"])
        return ProbeOutcome("fail", suspect, "certain", evidence, judged.normal, command)
    what, certainty, sure, guess = facts(findings, judged.wrong)
    after = _after(asked)
    if (step := pointed(findings, judged.wrong)) is not None:
        return ProbeOutcome("fail", step, "sure", sure, judged.normal, after)
    of_o = any(set(labels) & {"biased", "too-large"} for labels in judged.wrong.values())
    of_l = any(set(labels) & {"lse-biased", "lse-too-large"} for labels in judged.wrong.values())
    if certainty == "certain" and "too-large" not in {x for labels in judged.wrong.values() for x in labels}:
        of_o = of_l = False
    if (of_o or of_l) and (found := search(not of_o)) is not None:
        if found.options:
            after = asked.command("probe", found.options)
        return ProbeOutcome("fail", found.words, "sure", f"{found.evidence} {sure}", judged.normal, after)
    return ProbeOutcome("fail", what, certainty, f"{sure}{guess}", judged.normal, after)


def _after(asked: Again, also: Sequence[str] = ()) -> str | None:
    """What ``check`` makes of the kernel, which knows no FP32."""
    return None if asked.dtype == "fp32" else asked.command("check", also)


@dataclass(frozen=True)
class SortedOut:
    """The findings of a run, sorted into what is wrong and what is not."""

    wrong: dict[str, tuple[Label, ...]]
    """Probe -> the labels that no published kernel has there."""
    normal: tuple[str, ...]
    """What published kernels do too, or what is too small to add up, in sentences."""


def sorted_out(
    findings: Sequence[ProbeFinding], rows: int, unit: float, casts: str, softcap: float | None = None
) -> SortedOut:
    """Which labels are a fault of this kernel, and which every kernel of its kind has.

    Args:
        findings: Judged ones.
        rows: T.
        unit: The spacing of the inputs' format over that of O's: an O in fp32 counts its errors in finer units.
        casts: The inputs' format in words.
        softcap: c, below which all scores are.

    As in ``check``, a mean of 1 / sqrt(12 T) ulp and less is none of its faults: over T rows it adds up to less than
    the random walk of correct rounding, sqrt(T / 12) ulp. Nor is what a cast makes of x = exp(-2 c), the P_bar of all
    keys that the cap holds at -c: it is off by half a spacing, at most one of O's, in x of 1 + x parts.
    """
    small = unit / math.sqrt(12 * rows)
    least = 0.0 if softcap is None else math.exp(-2 * softcap)
    capped = unit * least / (1 + least)
    wrong: dict[str, tuple[Label, ...]] = {}
    tiny, uncast, cast, leaning = [], [], [], []
    # One may agree by accident.
    predicted = [f for f in findings if f.predicted is not None and "nonfinite" not in f.labels]
    both_uncast, both_cast = all(map(_as_uncast, predicted)), all(map(_as_cast, predicted))
    for found in findings:
        faults = [label for label in found.labels if label not in ("exact", "within-rounding")]
        if "biased" in faults and both_uncast and _as_uncast(found):
            uncast.append(found)
            faults.remove("biased")
        if "biased" in faults and _largest_mean([found]) <= small:
            tiny.append(found)
            faults.remove("biased")
        if "biased" in faults and _largest_mean([found]) <= capped:
            leaning.append(found)
            faults.remove("biased")
        if "lse-biased" in faults and both_cast and _as_cast(found):
            cast.append(found)
            faults.remove("lse-biased")
        if found.name in _MAY_VARY and "not-invariant" in faults:
            faults.remove("not-invariant")
        if faults:
            wrong[found.name] = tuple(faults)
    moved = [f.name for f in findings if "not-invariant" in f.labels]
    varying = [] if "repeat" in moved else [name for name in moved if name in _MAY_VARY]
    said = _normal(tiny, uncast, cast, varying, small, casts)
    if leaning:
        said.append(
            f"Normal: behind a softcap of {softcap:g} no P̄ is below {least:.2g}, and casts of many alike to {casts} "
            f"err to one side: a mean of {in_last_bits(_largest_mean(leaning))} at most in "
            f"{listed([f.name for f in leaning], _NAMED)}, where they can make {capped:.2g}."
        )
    return SortedOut(wrong, tuple(said))


def _largest_mean(findings: Sequence[ProbeFinding]) -> float:
    """Of those beyond chance, in ulp."""
    return max(abs(t.mean_ulp or 0.0) for f in findings for t in f.tests if t.biased)


def _as_uncast(found: ProbeFinding) -> bool:
    """Off by what is predicted of an l that sums P_bar before its cast, or by a part of it; by no l that L shows.

    A part is left where P_bar is scaled to something else than the row's maximum in some tiles (to the LSE so far, as
    in flash_attn_triton.py), whose casts err another way. ``check`` allows it, too.
    """
    if found.predicted is None or found.relative_ci is None or _of_a_wrong_sum(found):
        return False
    least, most = sorted(end / found.predicted for end in found.relative_ci)
    return matches_prediction(found) or 0 < least < most < 1


def _of_a_wrong_sum(found: ProbeFinding) -> bool:
    """Whether L is off as by an l that O was divided by, too, rather than right, or wrong by itself."""
    if found.lse is None or not found.lse.biased:
        return False
    made = math.expm1(min(-(found.lse.error.mean or 0.0), 1.0))
    return math.isclose(made, found.relative or 0.0, rel_tol=_OF_ONE_SUM)


def _as_cast(found: ProbeFinding) -> bool:
    """L off as predicted of an l that sums P_bar after its cast."""
    if found.predicted is None or found.lse is None:
        return False
    return math.isclose(found.lse.error.mean or 0.0, math.log1p(found.predicted), rel_tol=_AS_PREDICTED)


def _normal(
    tiny: list[ProbeFinding], uncast: list[ProbeFinding], cast: list[ProbeFinding],
    varying: list[str], small: float, casts: str,
) -> list[str]:  # fmt: skip
    said = []
    if uncast:
        by = " and ".join(percent(f.relative, "+.2g") for f in uncast)
        said.append(
            f"Normal: l sums P̄ before its cast to {casts}, P̄V takes it after, as in every FlashAttention-2 and cuDNN: "
            f"O is off by {by} where every cast errs to one side, by nothing on ordinary inputs."
        )
    if cast:
        by = " and ".join(percent(f.predicted, "+.2g") for f in cast)
        said.append(
            f"Normal: l sums P̄ after its cast to {casts}, as in some published kernels: O is right, and the P that a "
            f"backward makes from L sums to 1 less {by} where every cast errs to one side."
        )
    if tiny:
        names = listed([f.name for f in tiny], _NAMED)
        said.append(
            f"Too small to matter: a mean of {in_last_bits(_largest_mean(tiny))} at most in {names}, beyond chance but "
            f"below the {small:.2g} that correct rounding itself adds up to over the rows."
        )
    if varying:
        said.append(
            f"Bits depend on the {together(varying)} of the call, as in kernels that split the keys by how much there "
            "is to do: no bit-for-bit comparison across these."
        )
    return said


def pointed(findings: Sequence[ProbeFinding], wrong: dict[str, tuple[Label, ...]]) -> str | None:
    """The step that is at fault, where the findings are its signature."""
    by_name = {f.name: f for f in findings}
    if not wrong:
        return None
    return next((p.suspect(words) for p in TABLE if p.suspect is not None and (words := p.speaks(by_name))), None)


def nonfinite_words(findings: Sequence[ProbeFinding]) -> tuple[str, str]:
    """What is NaN or Inf, and where it comes from as far as that shows."""
    known = [f for f in findings if "nonfinite" in f.labels]
    ran = len(findings)
    rows = sorted({row for f in known for first, last in f.nonfinite_rows for row in range(first, last + 1)})
    of_l = "" if any(f.nonfinite for f in known) else " in L"
    everywhere = bool(known) and all(f.nonfinite == f.elements for f in known)
    where = " in every element" if everywhere else f" in {runs_of('row', rows)}" if rows else of_l
    if len(known) == ran:
        return f"NaN or Inf{where}", (
            f"In all {ran} probes, whatever the values; so it is not an overflow but 0/0, Inf - Inf (a row with "
            "all keys masked), or memory that was never written."
        )
    names = listed([f.name for f in known], _NAMED)
    others = "an overflow (exp of scores that are not taken less their maximum, or a sum in FP16)"
    return f"NaN or Inf{where} of {names}", (
        f"In {len(known)} of {ran} probes; as the others are finite, these values make it: {others}, or 0/0."
    )


def facts(
    findings: Sequence[ProbeFinding], wrong: dict[str, tuple[Label, ...]]
) -> tuple[str, Literal["certain", "sure"], str, str]:
    """What is wrong where no step is known to make it, how sure that is, why, and what may make it."""
    by_name = {f.name: f for f in findings}

    def having(label: Label) -> list[ProbeFinding]:
        return [by_name[name] for name, labels in wrong.items() if label in labels]

    large, biased = having("too-large"), having("biased")
    moved, lse = having("not-invariant"), having("lse-too-large") or having("lse-biased")
    if large:
        worst = max(large, key=lambda f: f.of_budget or 0.0)
        return (
            f"O is further off than its roundings allow ({listed([f.name for f in large], _NAMED)})",
            "certain",
            f"In {worst.name} it is off by up to {worst.of_budget or 0.0:.3g} times what casts of P̄ and O and sums in "
            f"fp32 can make{_also_biased(biased)}.",
            " So another step rounds, or it computes another function (its scale, what it adds to scores, a lost key).",
        )
    if (repeat := next((f for f in moved if f.name == "repeat"), None)) is not None:
        return (
            "the same call gives other bits each time",
            "certain",
            f"{repeat.differing} of {repeat.elements} elements differ between two calls.",
            " Sums in an order that changes, a race, or random rounding make that.",
        )
    if biased:
        found, test = max(((f, t) for f in biased for t in f.tests if t.biased), key=_size)
        ordinary = "" if "normal" in wrong or "normal" not in by_name else " Ordinary rows (normal) show nothing."
        return (
            f"O is too {_direction(test)} in the mean ({listed([f.name for f in biased], _NAMED)})",
            "sure",
            f"In {found.name} by {in_last_bits(abs(test.mean_ulp or 0.0))} in the mean, beyond correct rounding; "
            f"{chance(test.p_adjusted)}.{ordinary}",
            "",
        )
    if lse:
        worst = max(lse, key=lambda f: abs(f.lse.error.mean or 0.0) if f.lse is not None else 0.0)
        mean = 0.0 if worst.lse is None else worst.lse.error.mean or 0.0
        base = all(f.lse is not None and f.lse.fits_base_2 for f in lse)
        return (
            "L (lse) is in base 2: return m + ln l" if base else "L (lse) is off, O is right",
            "sure",
            f"In {worst.name} by {mean:+.2g} in the mean; a backward makes its P from L, whose rows then sum to 1 "
            f"{math.expm1(-mean):+.2g}.",
            "",
        )
    found = moved[0]
    names = {"sign": "-V does not give -O", "power-of-two": "16 V does not give 16 O"}
    return (
        together([names.get(f.name, f.name) for f in moved]),
        "certain",
        f"{found.differing} of {found.elements} elements differ; a rounding to nearest keeps both.",
        " O is rounded to one side, clamped, or overflows.",
    )


def _size(pair: tuple[ProbeFinding, SignedTest]) -> float:
    return abs(pair[1].mean_ulp or 0.0)


def _direction(test: SignedTest) -> str:
    up = (test.mean_ulp or 0.0) > 0
    if test.direction == "upward":
        return "high" if up else "low"
    return "large" if up else "small"


def _also_biased(biased: Sequence[ProbeFinding]) -> str:
    if not biased:
        return ""
    _, test = max(((f, t) for f in biased for t in f.tests if t.biased), key=_size)
    return f"; O is biased too, {chance(test.p_adjusted)}"
