"""The report of ``check``: passed or not, what failed and why, one line a case; from 80 columns on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rich.console import RenderableType
from rich.table import Column, Table
from rich.text import Text

from attn_diag.reports import layout, words
from attn_diag.reports.lead import FAIL, OK, lead
from attn_diag.reports.quantities import NOISE_FACTOR
from attn_diag.results.check import BROKEN, FACTOR, OF_QUANTITY, CheckedBias, CheckedCase, CheckReport, Failure, Size
from attn_diag.results.quality import SHARED_ERRORS, Pattern
from attn_diag.results.wording import (
    DASH,
    EVERY_SYMBOL,
    SYMBOLS,
    chance,
    in_last_bits,
    percent,
    plural,
    times,
    together,
    yardstick,
)

_SIZES = {"o": "O\nulp", "delta": NOISE_FACTOR.heading} | {name: SYMBOLS[name] for name in ("dq", "dk", "dv")}
# So many failures; the rest are in the JSON.
_SHOWN = 12
# The gravest first: what is not this attention at all needs no words on its bias.
_ORDER = ("fit", "nonfinite", "wrong", "invariance", "determinism", "bias", "lossy", "growth", "bits")
# The first is what the others are made from.
_MADE_FROM = ("o", "final_state", "lse", "delta", "dv", "dq", "dk")
# Up to so many times a well-rounded kernel's error a kernel is as good (``docs/verdicts.md``).
_AS_GOOD = 1.1
# No chance makes these.
_CERTAIN = ("fit", "nonfinite", "wrong", "determinism", "invariance", "bits")
_KINDS = {
    "wrong": "wrong in some cases",
    "determinism": "other in its bits from run to run",
    "bias": "biased",
    "lossy": "coarser than {}'s",
    "growth": "less accurate than the baseline's",
    "bits": "other in its bits than the baseline's",
}
# Patterns of where an error is, or of its size.
_PLACES = ("elements", "factor", "features", "keys", "off", "rounding", "rows", "sign")
_NAMES = {**EVERY_SYMBOL, "lse": "L (lse)"}
# Of linear attention the columns that are told; --json has all.
_OF_LINEAR = ("o", "final_state", "dq", "dk", "dv", "dg", "dbeta")
_SHORT = {"final_state": "state", "dg": "dg", "dbeta": "dbeta"}


def check_renderables(found: CheckReport) -> Iterator[RenderableType]:
    """The report, piece by piece, for a rich console."""
    yield from first_lines(found)
    yield Text("")
    yield layout.heading(f"check of {found.source}")
    yield Text(verdict(found), style="bold green" if found.passed else "bold red")
    yield layout.note(against(found))
    failures = [f"[{failure.kind}] {failure.message}" for failure in found.failures]
    yield from layout.bullets("✗", failures, _SHOWN, "… and {} more (--json has all)")
    for suspect in suspects(found):
        yield layout.bullet("→", suspect)
    if found.baseline and found.failures and not any(f.kind in BROKEN for f in found.failures):
        yield layout.bullet("?", f"accept: the same with --baseline {found.baseline} --update")
    yield from layout.bullets("-", found.notes, _SHOWN, "… and {} more notes (--json has all)")
    yield Text("")
    yield _table(found)
    yield Text("")
    yield layout.note(_legend(found))
    yield layout.note(words.tool_line(found.tool))


def first_lines(found: CheckReport) -> Iterator[RenderableType]:
    """OK, or the gravest failure or its suspect; what to run next; what speaks for it and what else failed."""
    source = found.source
    if found.passed:
        held = _as_accepted(found) if found.baseline_key else _as_good(found)
        if found.saved is not None:
            held = f"{found.saved} in {found.baseline}"
        cases = plural(len(found.cases), "case")
        yield from lead(OK, f"{source}: {cases}, {held}", [] if found.saved else [_passed(found)])
        return
    first = told_first(found.failures, of_linear=found.operator is not None)
    certainty = "certain" if first.kind in _CERTAIN and (first.suspect is None or first.kind == "fit") else "sure"
    what = _what(found, first)
    yield from lead(FAIL, f"{source} ({certainty}): {what}", _evidence(found, first), first.look_closer)


def _as_accepted(found: CheckReport) -> str:
    """As the baseline; of cases that it lacks, as good as a well-rounded kernel."""
    new = [all(size.limit is None for size in case.sizes.values()) for case in found.cases if case.sizes]
    lacking = sum(new)
    if not lacking:
        return "as accepted before"
    if all(new):
        return f"not in the baseline; {_as_good(found)}"
    return f"as accepted before but for {lacking}, not in the baseline; {_as_good(found)}"


def _as_good(found: CheckReport) -> str:
    """What a kernel is that fails nothing: as good as a well-rounded one, unless it is surely coarser."""
    coarser: dict[str, float] = {}
    for q in (q for case in found.cases for q in case.quantities if q.quantity not in case.documented):
        # Of a gradient in which a well-rounded kernel has no digit right a factor says nothing.
        told = q.relative_error_well_rounded is None or q.relative_error_well_rounded < 1
        if told and q.factor is not None and q.factor_ci95 is not None and q.factor_ci95[0] > _AS_GOOD:
            coarser[q.quantity] = max(coarser.get(q.quantity, 0.0), q.factor)
    if not coarser:
        return f"as good as {yardstick(found.declared)}"
    factors = together([f"{SYMBOLS[name]} {times(factor)}" for name, factor in coarser.items()])
    return f"no failure, but errors of {factors} times {yardstick(found.declared)}'s"


def told_first(failures: Sequence[Failure], *, of_linear: bool = False) -> Failure:
    """The failure that says most: what is no attention or not finite, one with a suspect, of what others are made.

    Of linear attention what is wrong comes before a suspect of what is merely coarse: a site explains a part of an
    error there, and none of a wrong gradient.
    """
    gravest = ("fit", "nonfinite", "wrong") if of_linear else ("fit", "nonfinite")

    def order(failure: Failure) -> tuple[int, bool, int, int]:
        broken = gravest.index(failure.kind) if failure.kind in gravest else len(gravest)
        made_from = _MADE_FROM.index(failure.quantity) if failure.quantity in _MADE_FROM else len(_MADE_FROM)
        return broken, failure.suspect is None, made_from, _ORDER.index(failure.kind)

    return min(failures, key=order)


def _what(found: CheckReport, first: Failure) -> str:
    """What is wrong, in a few words."""
    name = _NAMES.get(first.quantity, first.quantity)
    beside = _wrong_beside(found, first)
    if first.suspect is not None:
        suspect = first.suspect if first.kind == "fit" else first.suspect.partition(" (recipe ")[0].partition(": ")[0]
        return f"{suspect}{_also_wrong(beside)}"
    if first.kind == "nonfinite":
        return f"{name} holds NaN or Inf{_in_cases(found, 'nonfinite')}"
    if first.kind in ("fit", "invariance"):
        return first.message.partition(": ")[2] or first.message
    if first.kind == "wrong":
        wrong = [f for f in found.failures if f.kind == "wrong" and f.quantity == first.quantity]
        known = sorted((p for f in wrong for p in _patterns(found, f)[:1]), key=_tells_less)
        pattern = f", of which {known[0].words}" if known else ", which no rounding makes"
        return f"{name} is wrong{_in_cases(found, 'wrong')}{pattern}"
    if (shared := _shared_error(found, first)) is not None:
        return f"of {name} {shared}{_also_wrong(beside)}"
    if (longer := _longer(found, first)) is not None:
        return f"{name} is {longer} times the true one in the mean{_also_wrong(beside)}"
    kinds = {f.kind for f in found.failures if f.quantity == first.quantity}
    said = together([words.format(yardstick(found.declared)) for kind, words in _KINDS.items() if kind in kinds])
    failed = {f.quantity for f in found.failures} - {first.quantity, *beside}
    others = [_NAMES[n] for n in _MADE_FROM if n in failed]
    also = f", and so {together(others)}" if others else ""
    return f"{name} is {said}{also}{_also_wrong(beside)}"


def _patterns(found: CheckReport, failure: Failure) -> tuple[Pattern, ...]:
    """What is known of how a failure's quantity came about."""
    case = next((c for c in found.cases if c.name == failure.case), None)
    known = [] if case is None else [v for v in case.quantities if v.quantity == failure.quantity and v.patterns]
    return known[0].patterns if known else ()


def _tells_less(pattern: Pattern) -> tuple[bool, bool]:
    """What says where an error is, or how large, tells less than how it is made; some rows tell less than all."""
    return pattern.kind in _PLACES, not pattern.words.startswith("all ")


def _shared_error(found: CheckReport, first: Failure) -> str | None:
    """What ails all numbers of a quantity alike; None where something else does.

    Where other quantities fail too, only other scores than the stated ones, of which these are made as well.
    """
    alone = {f.quantity for f in found.failures} == {first.quantity}
    kinds = SHARED_ERRORS if alone else ("shared scale", "shared softcap")
    return next((p.words for p in _patterns(found, first) if p.kind in kinds), None)


def _longer(found: CheckReport, first: Failure) -> str | None:
    """The factor of a gradient that is biased and nothing else."""
    if {f.kind for f in found.failures if f.quantity == first.quantity} != {"bias"}:
        return None
    case = next((c for c in found.cases if c.name == first.case), None)
    bias = None if case is None else case.biases.get(first.quantity + FACTOR)
    return None if bias is None else f"{1 + bias.mean:.6g}"


def _wrong_beside(found: CheckReport, first: Failure) -> list[str]:
    """The quantities that are wrong beside it, and that its suspect does not explain."""
    if first.kind == "fit":
        return []
    wrong = {f.quantity for f in found.failures if f.kind == "wrong" and f.suspect is None}
    return [n for n in _MADE_FROM if n in wrong and n != first.quantity]


def _also_wrong(quantities: Sequence[str]) -> str:
    if not quantities:
        return ""
    names = together([_NAMES[n] for n in quantities])
    return f"; {names} {'is' if len(quantities) == 1 else 'are'} wrong, which no rounding makes"


def _evidence(found: CheckReport, first: Failure) -> list[str]:
    """What speaks for it, and how much it matters."""
    told = []
    if first.kind == "fit":
        return [f"Case {first.message}."]
    if first.suspect is not None and " (recipe " in first.suspect:
        shares = first.suspect.partition(" (recipe ")[2].removesuffix(")")
        told.append(f"Its bits say so: recipe {shares}.")
    elif first.kind == "nonfinite" or (first.suspect is not None and found.operator is not None):
        told.append(f"Case {first.message}.")
    elif first.suspect is not None:
        told.append(f"{first.suspect.partition(': ')[2]}.")
    worst: dict[str, float] = {}
    for failure in found.failures:
        if failure.factor is not None:
            worst[failure.quantity] = max(worst.get(failure.quantity, 0.0), failure.factor)
    if worst:
        factors = [f"{_NAMES.get(name, name)} {times(factor)}" for name, factor in worst.items()]
        told.append(f"Errors beside {yardstick(found.declared)}'s, at most: {', '.join(factors)} times.")
    biased = [_bias_of(found, f) for f in found.failures if f.kind == "bias"]
    if said := next((words for words in biased if words), None):
        told.append(said)
    failed = {f.case for f in found.failures}
    told.append(f"{len(failed)} of {plural(len(found.cases), 'case')} failed{_like(found)}.")
    return told


def _bias_of(found: CheckReport, failure: Failure) -> str | None:
    """A bias in plain words."""
    case = next((c for c in found.cases if c.name == failure.case), None)
    biases = [] if case is None else [(n, b) for n, b in case.biases.items() if OF_QUANTITY.get(n) == failure.quantity]
    if not biases:
        return None
    name, bias = max(biases, key=lambda pair: abs(pair[1].mean))
    if name.endswith(FACTOR):
        se = "" if bias.standard_error is None else f" ± {bias.standard_error:.1g}"
        longer = f"{_NAMES[failure.quantity]} is {1 + bias.mean:.6g}{se} times the true one in the mean"
        return f"{longer} of case {failure.case}, {chance(bias.p_adjusted)}."
    if name == "delta_excess":
        size = f"{abs(bias.mean):.2g} of what one correct rounding of O makes of it"
    else:
        size = in_last_bits(abs(bias.mean))
    side = ("too large", "too small") if name == "o_away_excess" else ("too high", "too low")
    where = f"{_NAMES[failure.quantity]} is {side[bias.mean < 0]} by {size} in the mean of case {failure.case}"
    return f"{where}, {chance(bias.p_adjusted)}."


def _in_cases(found: CheckReport, kind: str) -> str:
    count = len({f.case for f in found.failures if f.kind == kind})
    return f" in {count} of {plural(len(found.cases), 'case')}"


def _like(found: CheckReport) -> str:
    kinds = dict.fromkeys(f.kind for f in found.failures)
    return f" ({', '.join(kinds)})" if kinds else ""


def _passed(found: CheckReport) -> str:
    outputs = dict.fromkeys(name for case in found.cases for name in case.outputs)
    judged = together([EVERY_SYMBOL[name] for name in outputs]) if outputs else "outputs"
    missing = "" if any(name in outputs for name in ("dq", "dk", "dv")) else "; gradients were not checked"
    held = "the baseline's" if found.baseline_key else f"{yardstick(found.declared)}'s"
    arranged = len({p.arrangement for p in found.arrangements if p.status not in ("not-run", "refused")})
    same = f" Nothing but rounding differs between {arranged} arrangements of a call." if arranged else ""
    if found.operator is not None:
        return f"{judged}: no bias beyond correct rounding, no error above {held} by more than is allowed{missing}."
    return (
        f"{judged}: no bias beyond correct rounding, no error above {held} by more than is allowed{missing}.{same} A "
        f"healthy kernel fails by chance in at most {percent(found.level, 'g')} of runs.{_tried(found)}"
    )


def _tried(found: CheckReport) -> str:
    """Which shapes a kernel was run with; nothing of outputs that were captured."""
    if found.backend == "stored":
        return ""
    first, *others = dict.fromkeys(case.shape[-2:] for case in found.cases)
    beside = f" and {plural(len(others), 'other shape')}" if others else ""
    return f" Run with {first[0]} rows of {first[1]} features{beside} alone: --hunt tries others."


def verdict(found: CheckReport) -> str:
    """The outcome in a sentence."""
    cases = plural(len(found.cases), "case")
    if found.saved is not None:
        return f"{found.saved}: {cases} of {found.source}"
    if found.passed:
        compared = any(case.same_bits is not None for case in found.cases)
        bits = "; bits were NOT compared" if found.exact and not compared else ""
        return f"passed: {cases}, {found.tests} tests at level {found.level:g}{bits}"
    failed = {f.case for f in found.failures}
    return f"FAILED: {len(failed)} of {cases}, {plural(len(found.failures), 'failure')}"


def against(found: CheckReport) -> str:
    """What the kernel was compared with."""
    if found.baseline_key is not None:
        return f"{found.backend}; against {found.baseline}: {found.baseline_key}"
    what = "the key of the entry" if found.saved else "no baseline; key"
    return f"{found.backend}; {what}: {found.key}"


def suspects(found: CheckReport) -> list[str]:
    """What was found to have changed, or that nothing was."""
    if named := suspected(found.failures):
        return [f"looks like: {name}" for name in named]
    if (
        found.declared is None
        and found.operator is None
        and any(f.kind in ("bias", "lossy", "growth", "bits") for f in found.failures)
    ):
        return ["no single change of a published recipe that is known here makes these bits"]
    return []


def suspected(failures: Iterable[Failure]) -> list[str]:
    """Each suspected change once, as the first failure words it; the numbers behind it are that case's."""
    found: dict[str, str] = {}
    for suspect in (f.suspect for f in failures if f.suspect):
        found.setdefault(suspect.partition(" (")[0], suspect)
    return list(found.values())


def _table(found: CheckReport) -> Table:
    linear = found.operator is not None
    headings = {n: _SHORT.get(n, EVERY_SYMBOL[n]) for n in _OF_LINEAR} if linear else _SIZES
    sizes = {n: heading for n, heading in headings.items() if any(n in c.sizes for c in found.cases)}
    table = layout.table(
        Column("case", no_wrap=True, overflow="ellipsis", max_width=24),
        *([] if linear else [Column("bias of |O|\nulp", no_wrap=True)]),
        *layout.figures(list(sizes.values())),
        Column("bits", no_wrap=True),
        Column("", no_wrap=True),
        collapse=True,
    )
    for case in found.cases:
        kinds = list(dict.fromkeys(f.kind for f in found.failures if f.case == case.name))
        table.add_row(
            case.name,
            *([] if linear else [_bias(case.biases.get("o_away_excess"))]),
            *(_size("" if linear else n, case.sizes.get(n)) for n in sizes),
            _bits(case),
            Text(", ".join(kinds) or "ok", style="bold red" if kinds else "green"),
        )
    return table


def _bias(bias: CheckedBias | None) -> str:
    if bias is None:
        return DASH
    return f"{bias.mean:+.1g}" + ("" if bias.standard_error is None else f" ± {bias.standard_error:.0g}")


def _size(name: str, size: Size | None) -> str:
    if size is None:
        return DASH
    return f"{size.error:.2g}" if name in ("o", "delta") else percent(size.error, ".2g")


def _bits(case: CheckedCase) -> str:
    if case.deterministic is False:
        return "vary"
    return {True: "same", False: "other", None: DASH}[case.same_bits]


def _legend(found: CheckReport) -> str:
    if found.operator is not None:
        held = (
            "sizes at most sqrt(5/4) of the baseline's"
            if found.baseline_key is not None
            else "every quantity at most 1.25 times a well-rounded kernel's error (2 times where no site makes it)"
        )
        return (
            "Error = ||output - float64 reference|| / ||reference|| on the same inputs, of the worst head. Held to: "
            f"{held}; no mean of O beyond one correct rounding."
        )
    held = (
        "means against the baseline's (Welch), sizes at most sqrt(5/4) of the baseline's on the same input"
        if found.baseline_key is not None
        else "means between 0 and a published recipe's, and 1/sqrt(12 T) ulp about that; every quantity at most 1.25 "
        "times a well-rounded kernel's error, or what is documented of a published kernel"
        if found.declared is None
        else f"means between 0 and those of {yardstick(found.declared)}, and its error/sqrt(T) about that; every "
        "quantity at most 1.25 times its error"
    )
    return (
        "Error = output - float64 reference on the same inputs; bias = mean beyond one correct rounding, ± standard "
        "error over sequences; ulp = the last bit of O; noise factor = delta's error over what one correct rounding of "
        f"O makes of it. Held to: {held}; Holm over {found.tests} tests (p-values raised so that one false alarm in "
        "all of them is as rare as the level says)."
    )
