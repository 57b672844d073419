"""What the tool predicted from one capture beside what training did: the numbers, and what had to hold.

For every captured run: each mitigation of what-if with the error of dQ that it was predicted to leave, and the fork
that trained with it from the alarm's weights on; how well the two orders agree, and whether the site that ``attribute``
blamed is the guilty one (``forks``). When the alarms came (``alarms``), and the NaN that was forecast (``limits``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from alarms import SPACINGS, Replay, alarm_rows, fork_alarms
from forks import Agreement, Row, SiteCheck, agreements, forks_of, rows_of, site_check
from limits import Limited, limits_of, signed_percent
from predictions import Chain, read_chains
from record import Record, Repeats

from attn_diag.captures.hardware import package_version
from attn_diag.head.machine import describe_tool, pick_device
from attn_diag.watching.monitoring.alarm import AlarmRule

# The alarm's lead in steps by failing arm, and its seeds; how long healthy runs must last.
LEADS = {"A": 150, "B": 100}
SEEDS = {"A": (0, 1, 2), "B": (0,)}
HEALTHY_STEPS = 2500
# Of the agreement between predicted and trained order.
ORDER_LEVEL = 0.05
# How far a forecast may be off, and a run made again.
FORECAST, REPEATED = 0.2, 0.05


@dataclass(frozen=True)
class Criterion:
    """Something that the experiment must show."""

    words: str
    held: bool | None
    """None: it was not run."""
    found: str
    """What there is of it."""


@dataclass(frozen=True)
class Predicted:
    """One capture's predictions beside what training did."""

    chain: Chain
    rows: tuple[Row, ...]
    """By mitigation, the least predicted error first."""
    agreement: tuple[Agreement, ...]
    """Of the two orders."""
    site: SiteCheck
    """Of the site that was blamed."""

    @classmethod
    def of(cls, record: Record, chain: Chain) -> Predicted:
        """A capture's predictions beside the forks of its run."""
        forks = forks_of(record, chain.run)
        rows = rows_of(chain, forks, {name: record.runs[fork.run].header for name, fork in forks.items()})
        return cls(chain, tuple(rows), tuple(agreements(rows)), site_check(chain, rows))

    @property
    def trained(self) -> dict[str, Row]:
        """Those that were trained, by mitigation, the unchanged run first."""
        return {row.mitigation: row for row in sorted(self.rows, key=lambda r: r.mitigation != "control") if row.fork}

    def plain(self) -> dict[str, Any]:
        """As outcomes.json has it: the chain has a file of its own."""
        named = {name: getattr(self.chain, name) for name in ("run", "step", "layer", "head", "sequences")}
        return named | {
            "rows": [asdict(row) for row in self.trained.values()],
            "not_run": [row.mitigation for row in self.rows if row.fork is None],
            "agreement": [asdict(a) for a in self.agreement],
            "site": asdict(self.site),
        }


@dataclass(frozen=True)
class Outcomes:
    """Everything that a record says."""

    rule: AlarmRule
    alarms: list[Replay]
    """Of runs from step 0."""
    fork_alarms: list[Replay]
    """Of forks."""
    chains: dict[str, Predicted]
    """By arm, or by ARM_seedN for other seeds."""
    limits: list[Limited]
    """Of the stabilised softmax."""
    criteria: list[Criterion]

    @classmethod
    def of(cls, record: Record) -> Outcomes:
        """Judge a record. Raises ValueError without a run of arm A and its capture."""
        rule = AlarmRule()
        alarms = alarm_rows([run for run in record.runs.values() if run.origin is None], rule)
        chains = {arm: Predicted.of(record, chain) for arm, chain in read_chains(record).items()}
        if not record.of("A") or "A" not in chains:
            raise ValueError(f"{record.folder.name} has no run of arm A with its capture: there is nothing to show")
        limits = limits_of(record, chains["A"].chain)
        found = [*of_runs(alarms, record), *of_chains(chains), *of_limits(limits)]
        if (repeats := record.document("repeats")) is not None:
            found.append(of_repeats(Repeats.from_json(repeats)))
        return cls(rule, alarms, fork_alarms(record, rule), chains, limits, found)

    def plain(self) -> dict[str, Any]:
        """As outcomes.json has it."""
        tool = asdict(describe_tool(pick_device("cpu")))
        return {
            "tool": tool | {name: package_version(name) for name in ("numpy", "scipy")},
            "rule": asdict(self.rule),
            **{name: [asdict(x) for x in getattr(self, name)] for name in ("alarms", "fork_alarms", "limits")},
            "criteria": [asdict(c) for c in self.criteria],
            "chains": {arm: chain.plain() for arm, chain in self.chains.items()},
        }


def of_runs(rows: Sequence[Replay], record: Record) -> Iterator[Criterion]:
    """Of the failing and the healthy runs."""
    for arm, lead in LEADS.items():
        runs = [record.runs.get(f"{arm}_seed{seed}") for seed in SEEDS[arm]]
        ends = [None if run is None or run.departure is None else run.departure.step for run in runs]
        yield Criterion(f"{arm} fails", None if None in runs else None not in ends, _listed(ends))
        for every in SPACINGS:
            here = {row.run: row.lead for row in rows if row.every == every}
            leads = [here[name] for seed in SEEDS[arm] if (name := f"{arm}_seed{seed}") in here]
            good = [found is not None and found >= lead for found in leads]
            words = f"{arm}: alarm at least {lead} steps ahead, checks every {every}"
            yield Criterion(words, _held(good, len(SEEDS[arm])), f"{_listed(leads)} steps" if leads else "")
    healthy = {run.name for run in record.healthy}
    for every in SPACINGS:
        calm = [row for row in rows if row.run in healthy and row.every == every and row.steps >= HEALTHY_STEPS]
        words = f"three healthy runs keep their trend for {HEALTHY_STEPS} steps without an alarm, checks every {every}"
        good = [row.departure is None and row.alarm is None for row in calm]
        yield Criterion(words, _held(good, 3), f"alarms: {_listed([row.alarm for row in calm])}" if calm else "")


def _held(good: Sequence[bool], wanted: int) -> bool | None:
    """A failed check is a failure whatever is missing; with something missing success is not known."""
    return False if not all(good) else None if len(good) < wanted else True


def _listed(steps: Sequence[int | None]) -> str:
    return ", ".join("none" if step is None else f"{step:,}" for step in steps)


def of_chains(chains: Mapping[str, Predicted]) -> Iterator[Criterion]:
    """Of the predictions, by arm, or by ARM_seedN for other seeds, of which the cure and one sham are trained."""
    for arm, chain in chains.items():
        words = f"{arm}: the repair of the site that attribute blames removes the failure, those of other sites do not"
        yield Criterion(words, chain.site.holds, chain.site.words)
        if "_seed" not in arm:
            order = chain.agreement[0]
            words = f"{arm}: what-if's order agrees with training's beyond chance (p < {ORDER_LEVEL:g})"
            yield Criterion(words, None if order.p_value is None else order.p_value < ORDER_LEVEL, order.words)


def of_limits(limits: Sequence[Limited]) -> Iterator[Criterion]:
    """Whether the NaN came where it was forecast; runs past their limit at the capture had nothing to forecast."""
    runs = [run for run in limits if run.ahead and run.error is not None]
    for of, name in (("it", "error"), ("the steps ahead", "error_ahead")):
        errors = [getattr(run, name) for run in runs]
        good = [error is not None and abs(error) <= FORECAST for error in errors]
        words = f"the stabilised softmax: the step of its NaN is forecast within {100 * FORECAST:g} % of {of}"
        yield Criterion(words, _held(good, 1), ", ".join(map(signed_percent, errors)))


def of_repeats(repeats: Repeats) -> Criterion:
    """Whether runs made twice fail at the same step, to 5 %; those that were ended before say nothing."""
    close, said = [], []
    for run in repeats.repeats:
        steps = sorted(step for step in run.departures if step is not None)
        ends = zip(run.departures, run.ends, strict=True)
        kept = sum(step is None and end >= steps[0] for step, end in ends if steps)
        if steps and len(steps) + kept > 1:
            close.append(not kept and steps[-1] <= (1 + REPEATED) * steps[0])
            said.append(f"{run.run}: {_listed([*steps, *[None] * kept])}")
    return Criterion("a run made again fails within 5 % of the same step", _held(close, 1), "; ".join(said))
