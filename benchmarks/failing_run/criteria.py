"""What the experiment must show of failing and healthy runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from alarms import SPACINGS, Replay
from departure import departures
from folder import HEALTHY, arm_of
from runlog import RunLog

# The alarm's lead in steps by failing arm, and its seeds; how long healthy runs must last.
LEADS = {"A": 150, "B": 100}
SEEDS = {"A": (0, 1, 2), "B": (0,)}
HEALTHY_SEEDS = (0, 1, 2)
HEALTHY_STEPS = 2500
# Of the agreement between predicted and trained order.
ORDER_LEVEL = 0.05


@dataclass(frozen=True)
class Criterion:
    """Something that the experiment must show; ``held`` None: not all of it was run."""

    words: str
    held: bool | None
    found: str


def criteria(rows: Sequence[Replay], runs: Mapping[str, RunLog]) -> list[Criterion]:
    """What must hold of the failing and the healthy runs; what was not run is named."""
    found = [c for arm, lead in LEADS.items() for c in _failing(arm, lead, rows, runs)]
    return [*found, *(_healthy(every, rows, runs) for every in SPACINGS)]


def _failing(arm: str, lead: int, rows: Sequence[Replay], runs: Mapping[str, RunLog]) -> Iterator[Criterion]:
    names = [f"{arm}_seed{seed}" for seed in SEEDS[arm]]
    ends = {name: departures(runs[name].steps) for name in names if name in runs}
    missing = [f"{name}: not run" for name in names if name not in runs]
    said = [f"{name}: {found[0].step if found else 'no departure'}" for name, found in ends.items()]
    yield Criterion(f"{arm} fails", _held([bool(found) for found in ends.values()], missing), "; ".join(said + missing))
    for every in SPACINGS:
        here = [row for row in rows if row.run in ends and row.every == every]
        seen = {row.run for row in here}
        absent = missing + [f"{name}: no checks every {every}" for name in ends if name not in seen]
        good = [row.lead is not None and row.lead >= lead for row in here if row.departure is not None]
        said = [f"{row.run}: {row.lead if row.lead is not None else 'no alarm ahead'}" for row in here]
        words = f"{arm}: alarm at least {lead} steps ahead, checks every {every}"
        yield Criterion(words, _held(good, absent), "; ".join(said + absent))


def _healthy(every: int, rows: Sequence[Replay], runs: Mapping[str, RunLog]) -> Criterion:
    here = [row for row in rows if arm_of(runs[row.run]) in HEALTHY and row.every == every]
    seen = {runs[row.run].headers[0]["run"]["seed"] for row in here}
    absent = [f"seed {seed}: no healthy run with checks every {every}" for seed in HEALTHY_SEEDS if seed not in seen]
    absent += [f"{row.run}: only {row.steps} of {HEALTHY_STEPS} steps" for row in here if row.steps < HEALTHY_STEPS]
    good = [row.departure is None and row.alarm is None for row in here]
    said = [
        f"{row.run}: {'silent' if row.alarm is None else f'alarm at {row.alarm}'}"
        + ("" if row.departure is None else f", left its trend at {row.departure}")
        for row in here
    ]
    words = f"healthy runs keep their trend for {HEALTHY_STEPS} steps without an alarm, checks every {every}"
    return Criterion(words, _held(good, absent), "; ".join(said + absent))


def of_chains(chains: Mapping[str, Mapping[str, Any]]) -> list[Criterion]:
    """What must hold of the predictions, by arm, or by ARM_seedN for other seeds (``outcomes``)."""
    found = []
    for arm, chain in chains.items():
        site, order = chain["site"], chain["agreement"][0]
        words = f"{arm}: the repair of the site that attribute blames removes the failure, those of other sites do not"
        found.append(Criterion(words, site["holds"], site["words"]))
        if "_seed" in arm:
            continue  # of other seeds the cure and one sham are trained, which is no order
        # Too few forks to show it are no answer.
        few = order["p_value"] is None or order["smallest_p"] > ORDER_LEVEL
        agrees = None if few else order["p_value"] < ORDER_LEVEL
        words = f"{arm}: what-if's order agrees with training's beyond chance (p < {ORDER_LEVEL:g})"
        found.append(Criterion(words, agrees, order["words"]))
    return found


def _held(checks: Sequence[bool], missing: Sequence[str]) -> bool | None:
    """A failed check is a failure whatever is missing; with something missing success is not known."""
    if not all(checks):
        return False
    return None if missing or not checks else True
