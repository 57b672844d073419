"""Forks, what was predicted of them, and how well that agrees: runs that go on from another's weights with a change.

A row has a mitigation of what-if (or a fork that is none of them), the error that it was predicted to leave, from the
capture alone, and the fork that trained with it. The check of the site asks whether the repair of the one that
``attribute`` blames removes the failure, while that of another does not.

Whether mitigations that were predicted to leave less error trained longer: a fork that kept its trend until it was
ended would have failed later, or not at all; it is known to have lasted longer than those that failed until then, and
no more (``Fork.lasted``). Somers' D is, over the pairs of forks whose order in training is known, the share of those
that the prediction orders alike less that of those it orders otherwise; it is 2 C - 1, with C the concordance index of
Harrell et al. (JAMA 247, 2543, 1982). The p-value is the share of orders of the predictions that agree as well or
better (one-sided: all of them up to 8 forks, else 100,000 drawn ones); it takes forks for independent, where several of
them change the same site.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt
from predictions import Chain
from record import Record, Run

from attn_diag.kernels.recipe import BACKWARD
from attn_diag.results.what_if import Candidate
from attn_diag.watching.monitoring.record import MonitorCheck

_ALL_ORDERS = 8
_DRAWN_ORDERS = 100_000

Signs = npt.NDArray[np.int8]


@dataclass(frozen=True)
class Fork:
    """A run from another's weights on, or that other one itself."""

    run: str
    mitigation: str
    """What was changed; "control" for the run that goes on unchanged."""
    start: int
    """The first step of its own."""
    until: int
    """Its last step."""
    departure: int | None
    """The step at which it left its trend; None where it kept it to its last one."""
    reason: str | None
    """By which criterion it left its trend."""
    share: float | None = None
    """The largest monitored error of dW_Q over dW_Q up to the control's departure."""
    worst: tuple[int, int] | None = None
    """The layer and head that has it."""
    cut_off: bool = False
    """Whether it ended before the control's departure, so that its trend says nothing."""

    @property
    def lasted(self) -> int:
        """The first step at which it is not known to be on its trend: its departure, or the step after its last one.

        Every judgement of what was ended early rests on this: a fork is known to have outlived all that happened
        before this step, and nothing else.
        """
        return self.until + 1 if self.departure is None else self.departure

    @property
    def failed(self) -> bool | None:
        """Whether it left its trend; None where it was cut off before that could be seen."""
        return None if self.cut_off else self.departure is not None

    @property
    def words(self) -> str:
        """What training did."""
        if self.departure is not None:
            how = {"non-finite": "NaN", "loss": "fails by its loss"}.get(self.reason or "", "fails")
            return f"{how} at {self.departure:,}"
        return f"cut off at {self.until:,}" if self.cut_off else f"on its trend to {self.until:,}"


@dataclass(frozen=True)
class Row:
    """A mitigation, what was predicted of it, and its fork."""

    mitigation: str
    left: float | None
    """Error of dQ over dQ, median over the sequences; infinite where an output is not finite."""
    left_by: str | None
    """"what-if", or "attribute" for a fork that repairs one site and is none of what-if's candidates."""
    left_dw_q: float | None
    """Error of dW_Q over dW_Q, median."""
    rank: float | None
    """Median; None where what-if does not rank it in all sequences."""
    sites: tuple[str, ...]
    """Rounding sites that it repairs."""
    fork: Fork | None
    """None: not run."""


@dataclass(frozen=True)
class SiteCheck:
    """Whether the repair of the blamed site removes the failure, and that of another does not."""

    guilty: str
    """The site that most sequences blame for dQ's error."""
    sequences: int
    """How many do."""
    of: int
    """Of how many."""
    repair: str | None
    """The fork that repairs it, and least besides."""
    others: dict[str, bool | None]
    """Those that repair other sites, and whether they failed."""
    holds: bool | None
    """None: not known."""
    words: str


def forks_of(record: Record, parent: str) -> dict[str, Fork]:
    """The forks of a run by their mitigation; the control is called "control".

    A fork of the parent's own arm is the control where it was trained longer than the parent itself.
    """
    origin = record.runs.get(parent)
    if origin is None:
        return {}
    named: dict[str, Run] = {}
    for _, run in sorted(record.runs.items()):
        if run.origin == parent:
            # A run with a tag comes after the one without, and does not replace it.
            name = "control" if run.arm == origin.arm else run.arm.removeprefix(f"{origin.arm}+")
            named.setdefault(name, run)
    start = min((run.first for run in named.values()), default=0)
    control = max([origin, *([named["control"]] if "control" in named else [])], key=lambda run: run.until)
    named["control"] = control
    end = control.departure_from(start)
    common = control.until if end is None else end.step
    return {name: _fork(name, run, start, common) for name, run in named.items()}


def _fork(name: str, run: Run, start: int, common: int) -> Fork:
    """``common``: the control's departure, up to which forks are compared."""
    found = run.departure_from(start)
    share, worst = largest_share([c for c in run.checks if start <= c.step <= common])
    return Fork(
        run=run.name,
        mitigation=name,
        start=start,
        until=run.until,
        departure=None if found is None else found.step,
        reason=None if found is None else found.reason,
        share=share,
        worst=worst,
        cut_off=found is None and run.until < common,
    )


def largest_share(checks: Sequence[MonitorCheck]) -> tuple[float | None, tuple[int, int] | None]:
    """Of the monitored errors of dW_Q over dW_Q, and its layer and head; infinite where none of them is finite."""
    shares = [(c.layer, c.values["dw_q_share"]) for check in checks for c in check.layers if "dw_q_share" in c.values]
    finite = [
        (float(share), (layer, head))
        for layer, heads in shares
        for head, share in enumerate(heads)
        if math.isfinite(share)
    ]
    return max(finite, default=(math.inf if shares else None, None))


def rows_of(chain: Chain, forks: Mapping[str, Fork], headers: Mapping[str, Mapping[str, Any]]) -> list[Row]:
    """Every candidate of what-if, the control and forks that are no candidates; the least predicted error first.

    ``headers``: of the forks' logs by mitigation, which say what a fork that what-if does not know changes.
    """
    candidates = chain.candidates()
    errors = [t.baseline.errors for t in chain.what_if]
    rows = [Row("control", _median(e.dq for e in errors), "what-if", _median(e.dw_q for e in errors), None, (),
                forks.get("control"))]  # fmt: skip
    for name, found in candidates.items():
        rows.append(_row(name, found, repaired_sites(found[0].changes, chain), chain, forks))
    for name in forks:
        if name not in candidates and name != "control":
            changes = changed_in(headers["control"], headers[name])
            rows.append(_row(name, [], repaired_sites(changes, chain), chain, forks))

    def order(row: Row) -> tuple[bool, float]:
        return row.rank is None and row.left_by != "attribute", math.inf if row.left is None else row.left

    return sorted(rows, key=order)


def _row(name: str, found: Sequence[Candidate], sites: Collection[str], chain: Chain, forks: Mapping[str, Fork]) -> Row:
    left, left_by = [c.left for c in found], "what-if" if found else None
    if not found and len(sites) == 1:
        left, left_by = [effect.repaired for effect in chain.effects(next(iter(sites)))], "attribute"
    ranks = [c.rank for c in found]
    return Row(
        mitigation=name,
        left=_median(left),
        left_by=left_by,
        left_dw_q=_median(c.errors.dw_q for c in found),
        rank=_median(ranks) if len(ranks) == chain.sequences and None not in ranks else None,
        sites=tuple(sites),
        fork=forks.get(name),
    )


def repaired_sites(changes: Mapping[str, str], chain: Chain) -> tuple[str, ...]:
    """The rounding sites, of those that act, that changes of the form "bf16 -> fp32" make exact.

    Empty where anything else changes too (a schedule, where delta comes from): that is no repair of sites alone.
    """
    acting = {site.site for site in chain.attribute.heads[0].sites}
    exact = [field for field, words in changes.items() if words.endswith("-> fp32") and field in acting]
    return tuple(exact) if len(exact) == len(changes) else ()


def changed_in(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, str]:
    """What a fork's header says otherwise than the control's, forward and backward: field -> "before -> after"."""
    found: dict[str, str] = {}
    for way in ("forward", "backward"):
        old, new = before[way], after[way]
        if isinstance(old, dict) and isinstance(new, dict):
            for words in dict.fromkeys([*old, *new]):
                field = words.replace(" ", "_")
                # Each recipe is run one way only: the other way's fields do nothing.
                if (field in BACKWARD) == (way == "backward") and old.get(words) != new.get(words):
                    found[field] = f"{old.get(words)} -> {new.get(words)}"
    return found


def _median(values: Iterable[float | None]) -> float | None:
    known = [math.inf if math.isnan(v) else v for v in values if v is not None]
    return median(known) if known else None


def site_check(chain: Chain, rows: Sequence[Row]) -> SiteCheck:
    """The site that most sequences blame for dQ; its repair is the fork that repairs it and least besides."""
    heads, (guilty, count) = chain.attribute.heads, chain.blamed()
    repairs = sorted((row for row in rows if guilty in row.sites), key=lambda row: len(row.sites))
    others = {row.mitigation: row.fork for row in rows if row.sites and guilty not in row.sites}
    # Without a run the simplest repair is named, as one that was not run.
    chosen = next(iter([row for row in repairs if row.fork is not None] or repairs), None)
    control = next((row.fork for row in rows if row.mitigation == "control"), None)
    repair_failed = None if chosen is None or chosen.fork is None else chosen.fork.failed
    tried = {name: None if fork is None else fork.failed for name, fork in others.items()}
    failed = [value for value in tried.values() if value is not None]
    holds = None
    if repair_failed is not None and failed and control is not None:
        holds = bool(control.failed) and not repair_failed and all(failed)

    def said(fork: Fork | None) -> str:
        return "not run" if fork is None else fork.words

    words = f"attribute blames {guilty} in {count} of {len(heads)} sequences"
    if chosen is not None:
        words += f"; {chosen.mitigation} (repairs {', '.join(chosen.sites)}): {said(chosen.fork)}. Repairs of other "
        words += f"sites: {'; '.join(f'{name}: {said(fork)}' for name, fork in others.items()) or 'none'}"
    repair = None if chosen is None else chosen.mitigation
    return SiteCheck(guilty, count, len(heads), repair, tried, holds, words)


@dataclass(frozen=True)
class Agreement:
    """Somers' D between predicted errors and how long training lasted."""

    of: str
    forks: int
    kept: int
    """How many of them kept their trend."""
    pairs: int
    """Of how many the order is known."""
    somers_d: float | None
    """1: of every two forks whose order is known, the one with less error left lasted longer."""
    p_value: float | None
    """One-sided."""

    @property
    def words(self) -> str:
        """All of it."""
        if self.somers_d is None or self.p_value is None:
            return f"{self.forks} forks: nothing can be said of the order"
        return (
            f"Somers' D {self.somers_d:+.2f} over {self.pairs} pairs of {self.forks} forks, {self.kept} of which kept "
            f"their trend; p = {self.p_value:.2g}"
        )


def agreement(of: str, pairs: Sequence[tuple[float | None, Fork]]) -> Agreement:
    """Between predicted errors and outcomes."""
    left = np.array([value for value, _ in pairs if value is not None], dtype=np.float64)
    forks = [fork for value, fork in pairs if value is not None]
    known, less = lasted_longer(forks).astype(np.int64), _less(left)
    kept, count = sum(fork.failed is False for fork in forks), int(np.abs(known).sum())
    if not known.any() or not less.any():
        return Agreement(of, len(forks), kept, count, None, None)
    agreed = int(less @ known)
    return Agreement(of, len(forks), kept, count, agreed / count, _p_value(left, known, agreed))


def lasted_longer(forks: Sequence[Fork]) -> Signs:
    """Over the pairs i < j: 1 where i lasted longer than j, -1 where j did, 0 where that is not known or both the same.

    A fork that was ended lasted longer than one that failed no later than its last step.
    """
    lasted = np.array([fork.lasted for fork in forks])
    failed = np.array([fork.departure is not None for fork in forks], dtype=bool)
    outlived = (failed[None, :] & (lasted[None, :] < lasted[:, None])).astype(np.int8)
    i, j = np.triu_indices(len(forks), 1)
    return np.asarray(outlived[i, j] - outlived[j, i])


def _less(left: npt.NDArray[np.float64]) -> Signs:
    """Over the pairs i < j, along the last axis: 1 where i was predicted to leave less than j; infinities are equal."""
    i, j = np.triu_indices(left.shape[-1], 1)
    ranks = np.unique(left, return_inverse=True)[1].reshape(left.shape).astype(np.int8)
    return np.asarray(np.sign(ranks[..., j] - ranks[..., i]))


def _p_value(left: npt.NDArray[np.float64], known: npt.NDArray[np.int64], agreed: int) -> float:
    """One-sided: of the orders of ``left`` those that agree as well or better."""
    n = len(left)
    if n <= _ALL_ORDERS:
        return float(np.mean(_less(left[np.array(list(permutations(range(n))))]) @ known >= agreed))
    orders = np.random.default_rng(0).permuted(np.tile(np.arange(n), (_DRAWN_ORDERS, 1)), axis=1)
    # The observed order counts as one that was drawn.
    return (int((_less(left[orders]) @ known >= agreed).sum()) + 1) / (_DRAWN_ORDERS + 1)


def agreements(rows: Sequence[Row]) -> list[Agreement]:
    """How the orders agree over several choices of forks.

    Of the mitigations that what-if ranks, but for those that failed by a NaN, which the error of dQ does not make; of
    those of them that failed; of everything that was run, non-finite predictions as the worst; and of the first by the
    error of dW_Q, by which what-if does not rank.
    """
    ran = [(row, row.fork) for row in rows if row.fork is not None]
    ranked = [(row, fork) for row, fork in ran if row.rank is not None and fork.reason != "non-finite"]
    failed = [(row.left, fork) for row, fork in ranked if fork.departure is not None]
    return [
        agreement("mitigations that what-if ranks, but for NaN", [(row.left, fork) for row, fork in ranked]),
        agreement("those of them that failed", failed),
        agreement("all forks and the control", [(row.left, fork) for row, fork in ran]),
        agreement("the first by the error of dW_Q", [(row.left_dw_q, fork) for row, fork in ranked]),
    ]
