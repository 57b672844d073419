"""Forks: runs that go on from another one's weights with something changed, and what became of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from departure import WINDOW, departures
from folder import arm_of, start_of
from runlog import RunLog

from attn_diag.watching.monitoring.record import MonitorCheck

# Steps whose mean is called a loss.
_TRAILING = 20


@dataclass(frozen=True)
class Fork:
    """A run from another's weights on, or that other one itself: ``control``.

    ``start``: the first step of its own; ``until``: its last one. ``departure``: None where it kept its trend so long.
    ``loss``: mean of the last 20 steps before the control's departure (for one that departs earlier: None). ``gap``:
    that less the loss of the run that ``gap_to`` names, which saw the same data: the fork with fa2, else fa2 from step
    0 on, whose weights are other ones; None where neither was run. ``last_loss``: of the last 20 steps of a run that
    did not depart. ``share``: the largest monitored error of dW_Q over dW_Q up to the control's departure, ``worst``:
    in which layer and head, ``largest_share``: up to the end. ``cut_off``: it ended before the control's departure, so
    that its trend says nothing.
    """

    run: str
    mitigation: str
    control: bool
    start: int
    until: int
    departure: int | None
    reason: str | None
    loss: float | None = None
    gap: float | None = None
    gap_to: str | None = None
    last_loss: float | None = None
    share: float | None = None
    worst: tuple[int, int] | None = None
    largest_share: float | None = None
    cut_off: bool = False

    @property
    def failed(self) -> bool | None:
        """Whether it left its trend; None where it was cut off before that could be seen."""
        return None if self.cut_off else self.departure is not None


def forks_of(runs: Mapping[str, RunLog], parent: str, checks: Mapping[str, Sequence[MonitorCheck]]) -> dict[str, Fork]:
    """The forks of a run by their mitigation; the control is called "control".

    A fork of the parent's own arm is the control; without one it is the parent itself.
    """
    if parent not in runs:
        return {}
    base = arm_of(runs[parent])
    logs = {name: log for name, log in runs.items() if (origin := start_of(log)) is not None and origin[0] == parent}
    named: dict[str, RunLog] = {}
    for _, log in sorted(logs.items()):
        # A run with a tag comes after the one without, and does not replace it.
        named.setdefault(mitigation_of(arm_of(log), base), log)
    start = min((origin[1] for log in named.values() if (origin := start_of(log)) is not None), default=0)
    # A fork of the same arm that was cut off says less than the run itself.
    control = max([runs[parent], *([named["control"]] if "control" in named else [])], key=lambda log: log.steps[-1][0])
    named["control"] = control
    end = _departure(control, runs[parent], start)
    until = end[0] if end is not None else control.steps[-1][0]
    found = {name: _fork(name, log, runs[parent], start, until, checks.get(log.name)) for name, log in named.items()}
    seed = runs[parent].headers[0]["run"]["seed"]
    healthy = named.get("fa2", runs.get(f"fa2_seed{seed}"))
    reference = None if healthy is None else _fork("fa2", healthy, runs[parent], start, until, None).loss
    if healthy is None or reference is None:
        return found
    return {
        n: f if f.loss is None else replace(f, gap=f.loss - reference, gap_to=healthy.name) for n, f in found.items()
    }


def mitigation_of(arm: str, base: str) -> str:
    """What was changed: MITIGATION of BASE+MITIGATION, "control" for BASE, another arm's name else."""
    return "control" if arm == base else arm.removeprefix(f"{base}+")


def _departure(log: RunLog, parent: RunLog, start: int) -> tuple[int, str] | None:
    """The first departure from ``start`` on; the parent's steps before are what the fork has behind it."""
    # A log may hold the steps before its start itself.
    history = [row for row in parent.steps if row[0] < log.steps[0][0]]
    found = [
        d for d in departures(row for row in [*history, *log.steps] if row[0] >= start - WINDOW) if d.step >= start
    ]
    return (found[0].step, found[0].reason) if found else None


def _fork(
    name: str, log: RunLog, parent: RunLog, start: int, common: int, checks: Sequence[MonitorCheck] | None
) -> Fork:
    """``common``: the control's departure, up to which forks are compared."""
    found = _departure(log, parent, start)
    own = [(step, loss) for step, loss, _ in log.steps if step >= start]
    until, seen = log.steps[-1][0], [c for c in checks or () if c.step >= start]
    compared = [loss for step, loss in own if common - _TRAILING <= step < common]
    share, worst = largest_share([c for c in seen if c.step <= common])
    whole = len(compared) == _TRAILING and (found is None or found[0] >= common)
    return Fork(
        run=log.name,
        mitigation=name,
        control=name == "control",
        start=start,
        until=until,
        departure=None if found is None else found[0],
        reason=None if found is None else found[1],
        loss=fmean(compared) if whole else None,
        last_loss=fmean(loss for _, loss in own[-_TRAILING:]) if found is None and own else None,
        share=share,
        worst=worst,
        largest_share=largest_share(seen)[0],
        cut_off=found is None and until < common,
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
