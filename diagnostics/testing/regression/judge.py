"""The rules: when a bias, a size, or different bits are a failure. The design is in the package's docstring."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from attn_diag.head.quality import LOSSY
from attn_diag.results.baseline import BaselineCase, SequenceMean
from attn_diag.results.check import FACTOR, GRADIENTS, OF_QUANTITY, CheckedBias, CheckedCase, Failure, Kind, Size
from attn_diag.results.quality import QuantityVerdict
from attn_diag.results.wording import EVERY_SYMBOL, chance, in_last_bits, percent
from attn_diag.statistics import welch as means
from attn_diag.statistics.means import holm
from attn_diag.testing.regression.cases import SECOND
from attn_diag.testing.regression.documented import judged
from attn_diag.testing.regression.figures import Measured, between, walk

# How many times the baseline's an error may be: one more rounding, with errors half as large, adds so much in squares.
GROWTH = math.sqrt(5 / 4)
_OF_O = ("o", "delta")
_WORDS = EVERY_SYMBOL | {"lse": "L (lse)"}
_UNIT = {"o": " ulp rms", "lse": "", "delta": " noise floors"}
_DIRECTION = {"o_excess": "upward", "o_away_excess": "away from zero", "delta_excess": "upward"}


def compared(
    case: CheckedCase, known: BaselineCase | None, bits: str, *, exact: bool, same_key: bool
) -> tuple[CheckedCase, list[Failure], list[str]]:
    """Determinism and bits: the case with what was compared, failures, and notes for the report.

    Args:
        case: What was run, ``deterministic`` known.
        known: The baseline's case.
        bits: The fingerprint of its outputs.
        exact: Whether equal bits are demanded.
        same_key: As in ``biases_of``.
    """
    failures, notes = [], []
    if case.deterministic is False:
        words = f"{case.name}: two runs on the same inputs differ in their bits"
        if exact:
            failures.append(Failure("determinism", case.name, "o", f"{words}, although bits are demanded"))
        elif not case.name.endswith(SECOND):
            notes.append(f"{words}: both are judged, and bits cannot be compared")
    if known is not None and known.outputs != case.outputs:
        words = f"{', '.join(known.outputs)} in the baseline, {', '.join(case.outputs)} now"
        failures.append(Failure("fit", case.name, "o", f"{case.name}: other outputs: {words}"))
        return case, failures, notes
    if known is None or not same_key or case.deterministic is False:
        return case, failures, notes
    if known.inputs_fingerprint != case.inputs_fingerprint:
        if exact:
            notes.append(f"{case.name}: other inputs than the baseline's (seed?): bits were not compared")
        return case, failures, notes
    same = known.fingerprint == bits
    if not same:
        words = f"{case.name}: outputs differ in their bits from the baseline's on the same inputs"
        if exact:
            words = f"{words}, device and versions{'' if case.linear else f'; {worst_words(case)}'}"
            failures.append(Failure("bits", case.name, "o", words))
        else:
            notes.append(f"{words} (no failure without exact)")
    return replace(case, same_bits=same), failures, notes


def biases_of(
    measured: Measured, rows: int, known: BaselineCase | None, *, same_key: bool, same_inputs: bool
) -> dict[str, CheckedBias]:
    """The tests of a case, not yet adjusted.

    A gradient's factor is held against the baseline's on its own inputs alone: where all sequences of a case have one
    normaliser, they round alike, and their spread says nothing of another seed's.

    Args:
        measured: The case's figures.
        rows: Tq.
        known: The baseline's case, of the same bits or not.
        same_key: The baseline is of this device and these versions, where any change is news; else one has to exceed
            what adds up, over the rows, to correct rounding's own random walk (or the declared recipe's).
        same_inputs: The baseline's inputs were these.
    """
    found = {}
    for name, mean in measured.biases.items():
        size = measured.sizes.get(OF_QUANTITY[name])
        width = walk(name, size, rows)
        if measured.declared is not None and size is not None:
            width = max(width, size.yardstick / math.sqrt(rows))
        accepted = between(measured.accepted[name], width)
        apart = not same_inputs and name.endswith(FACTOR)
        before = None if known is None or apart else known.biases.get(name)
        p = beyond(mean, accepted) if before is None else welch(mean, before, 0.0 if same_key else width)
        found[name] = CheckedBias(
            mean=mean.mean, standard_error=mean.standard_error, degrees_of_freedom=mean.degrees_of_freedom,
            accepted=accepted, p_value=p, baseline_mean=None if before is None else before.mean,
        )  # fmt: skip
    return found


def beyond(mean: SequenceMean, accepted: tuple[float, float]) -> float:
    """p-value of "the true mean lies in the interval": t of the distance to it, two-sided; 1 inside."""
    distance = max(accepted[0] - mean.mean, mean.mean - accepted[1], 0.0)
    return _t_p(distance, mean.standard_error or 0.0, mean.degrees_of_freedom or 1.0)


def welch(one: SequenceMean, other: SequenceMean, width: float = 0.0) -> float:
    """p-value of "the two means differ by at most ``width``": Welch's test of what they differ by beyond it."""
    a, b = (means.Estimated(m.mean, m.standard_error or 0.0, m.degrees_of_freedom or 1.0) for m in (other, one))
    test = means.welch(a, b)
    return _t_p(max(abs(test.difference) - width, 0.0), test.standard_error, test.df)


def _t_p(distance: float, se: float, df: float) -> float:
    from scipy.special import stdtr

    if distance == 0:
        return 1.0
    return 0.0 if se == 0 else float(2 * stdtr(df, -distance / se))


def sizes_of(measured: Measured, known: BaselineCase | None, *, same_inputs: bool) -> dict[str, Size]:
    """Every size beside that of a lossy kernel, and beside what it may have grown to since the baseline.

    On the baseline's own inputs growth is a fact; on others it must also be beyond chance: Welch's test of the means
    over sequences of ln(error / yardstick).
    """
    found = {}
    for name, size in measured.sizes.items():
        budget = None if name in ("lse", "delta") else LOSSY * size.yardstick
        before = None if known is None else known.sizes.get(name)
        if before is None:
            found[name] = Size(size.error, size.yardstick, budget)
            continue
        now, then = size.log_ratio, before.log_ratio
        scaled = math.hypot(size.error, size.growth_band) * math.exp(then.mean - now.mean)
        baseline, limit = (math.sqrt(max(x**2 - size.growth_band**2, 0.0)) for x in (scaled, GROWTH * scaled))
        p = None if same_inputs else welch(now, then) if now.mean > then.mean else 1.0
        found[name] = Size(size.error, size.yardstick, budget, baseline, limit, p)
    return found


def adjusted(cases: Sequence[CheckedCase]) -> tuple[list[CheckedCase], int]:
    """The cases with Holm's p-values over all tests of the run, of biases and of growth, and the number of tests."""
    every: list[Any] = [test for case in cases for test in (*case.biases.values(), *case.sizes.values())]
    p_values: list[float | None] = holm([test.p_value for test in every])
    found = iter(p_values)

    def corrected(tests: dict[str, Any]) -> dict[str, Any]:
        return {n: replace(t, p_adjusted=next(found)) for n, t in tests.items()}

    cases = [replace(c, biases=corrected(c.biases), sizes=corrected(c.sizes)) for c in cases]
    return cases, sum(p is not None for p in p_values)


def failures_of(case: CheckedCase, level: float) -> list[Failure]:
    """What is wrong with a case, whose p-values are adjusted: its quantities, biases and growth, once each.

    A quantity that has a baseline may be as lossy as that: growth alone counts.
    """
    significant = {n: b for n, b in case.biases.items() if b.p_adjusted is not None and not b.p_adjusted > level}
    biased = []
    impossible = {v.quantity for v in case.quantities if v.answer in ("nonfinite", "wrong")}
    for quantity, names in groupby(significant, key=lambda name: OF_QUANTITY[name]):
        # Of a gradient that is wrong its factor says no more.
        if quantity in GRADIENTS and quantity in impossible:
            continue
        name = max(names, key=lambda n: abs(significant[n].mean - (significant[n].baseline_mean or 0.0)))
        biased.append(Failure("bias", case.name, quantity, _bias_words(case, name, significant[name])))
    grown = [
        Failure("growth", case.name, name, _size_words(case, name, size))
        for name, size in case.sizes.items()
        if size.limit is not None
        and not size.error <= size.limit
        and (size.p_adjusted is None or size.p_adjusted <= level)
    ]
    return [*_bad_quantities(case), *biased, *grown]


def _bad_quantities(case: CheckedCase) -> list[Failure]:
    found = []
    for verdict in case.quantities:
        size = case.sizes.get(verdict.quantity)
        kinds: dict[str, Kind] = {"nonfinite": "nonfinite", "wrong": "wrong"}
        if size is None or size.limit is None:
            kinds["lossy"] = "lossy"
        if verdict.answer in kinds and verdict.quantity not in case.documented and judged(verdict):
            words = f"{case.name}: {verdict.words.removesuffix('.')}{_where(case, verdict.quantity)}"
            kind = kinds[verdict.answer]
            found.append(Failure(kind, case.name, verdict.quantity, words, factor=_shown(verdict)))
    return found


def _shown(verdict: QuantityVerdict) -> float | None:
    """The factor that shows it lossy: of all rows weighted alike where few rows have most of the error."""
    whole, each = verdict.factor_ci95, verdict.typical_factor_ci95
    if verdict.answer == "lossy" and whole and each and whole[0] <= LOSSY < each[0]:
        return verdict.typical_factor
    return verdict.factor


def _bias_words(case: CheckedCase, name: str, bias: CheckedBias) -> str:
    quantity, unit = OF_QUANTITY[name], "noise floors" if name == "delta_excess" else "ulp"
    se = "" if bias.standard_error is None else f" ± {bias.standard_error:.1g}"
    if name.endswith(FACTOR):
        before = "accepted without a baseline: {:.6g} to {:.6g}".format(*(1 + x for x in bias.accepted))
        if bias.baseline_mean is not None:
            before = f"{1 + bias.baseline_mean:.6g} in the baseline"
        return (
            f"{case.name}: {_WORDS[quantity]} is {1 + bias.mean:.6g}{se} times the true one in the mean ({before}; "
            f"adjusted p {bias.p_adjusted or 0.0:.1g}), which roundings to nearest do not make"
        )
    against = "accepted without a baseline: {:+.2g} to {:+.2g}".format(*bias.accepted)
    if bias.baseline_mean is not None:
        against = f"{bias.baseline_mean:+.2g} in the baseline"
    return (
        f"{case.name}: {_WORDS[quantity]} is biased beyond correct rounding by {bias.mean:+.3g}{se} {unit} "
        f"{_DIRECTION[name]} ({against}; adjusted p {bias.p_adjusted or 0.0:.1g}): {_plainly(quantity, bias)}; "
        f"{worst_words(case)}"
    )


def _plainly(quantity: str, bias: CheckedBias) -> str:
    """What a bias means for the kernel."""
    size = abs(bias.mean)
    unit = f"{size:.2g} of what one correct rounding of O makes of it" if quantity == "delta" else in_last_bits(size)
    return f"its roundings lean to one side by {unit} on average, {chance(bias.p_adjusted)}"


def _size_words(case: CheckedCase, name: str, size: Size) -> str:
    def shown(value: float) -> str:
        return f"{value:.3g}{_UNIT[name]}" if name in _UNIT and not case.linear else percent(value)

    assert size.baseline is not None
    assert size.limit is not None
    floors = "; 1 noise floor: what one correct rounding of O makes of delta" if name == "delta" else ""
    return (
        f"{case.name}: the error of {_WORDS[name]} has grown to {shown(size.error)} (in the baseline "
        f"{shown(size.baseline)}, limit {shown(size.limit)}{floors}){_where(case, name)}"
    )


def _where(case: CheckedCase, quantity: str) -> str:
    """Of a gradient it would be no answer where O is off."""
    return f"; {worst_words(case)}" if quantity in _OF_O and not case.linear else ""


def worst_words(case: CheckedCase) -> str:
    """Where O is off most."""
    if case.worst is None:
        return "no place is known"
    batch, head, row, error = case.worst
    return f"O is off most in batch item {batch}, head {head}, row {row}: {error:.3g} ulp of that row's largest element"
