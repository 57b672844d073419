"""Which means of a head changed between two diagnoses, and what a significant difference means."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from attn_diag.results.comparison import MeanChange, MeanOutcome
from attn_diag.results.diagnosis import BiasEstimate, HeadDiagnosis
from attn_diag.statistics.means import PRIMARY, adjust
from attn_diag.statistics.welch import estimated, welch


def mean_changes(a: HeadDiagnosis, b: HeadDiagnosis, levels: tuple[float, float]) -> list[MeanChange]:
    """The primary means of one head that A or B has, tested but not yet judged. ``levels``: of A's and B's own runs."""
    found = []
    for name in PRIMARY:
        one, other = getattr(a.bias, name), getattr(b.bias, name)
        if one is None and other is None:
            continue
        change = MeanChange(
            name=name,
            a=one.mean if one else None,
            b=other.mean if other else None,
            a_units=one.mean_ulp if one else None,
            b_units=other.mean_ulp if other else None,
            a_biased=_significant(one, levels[0]),
            b_biased=_significant(other, levels[1]),
        )
        first, second = estimated(one), estimated(other)
        if first is not None and second is not None:
            test = welch(first, second)
            change = replace(
                change,
                difference=test.difference,
                standard_error=test.standard_error,
                df=test.df,
                t=test.t,
                p_value=test.p_value,
                ci95=test.ci95,
                outcome="none",
            )
        found.append(change)
    return found


def _significant(estimate: BiasEstimate | None, level: float) -> bool:
    return estimate is not None and estimate.p_adjusted is not None and estimate.p_adjusted <= level


def judged(changes: Sequence[MeanChange], level: float) -> list[MeanChange]:
    """The changes of the whole run with adjusted p-values and outcomes.

    Benjamini & Hochberg, J. R. Stat. Soc. B 57 (1995) 289, over all differences tested.
    """
    adjusted = iter(adjust([c.p_value for c in changes if c.p_value is not None]))
    result = []
    for change in changes:
        if change.p_value is None:
            result.append(change)
            continue
        p = next(adjusted)
        result.append(replace(change, p_adjusted=p, outcome=_outcome(change) if p <= level else "none"))
    return result


def _outcome(change: MeanChange) -> MeanOutcome:
    """What a significant difference means."""
    a, b = change.a or 0.0, change.b or 0.0
    if change.a_biased and change.b_biased:
        if a * b < 0:
            return "reversed"
        return "grew" if abs(b) > abs(a) else "shrank"
    if change.b_biased:
        return "became biased"
    return "cured" if change.a_biased else "moved"
