"""The search: every axis by itself, all head sizes with all else changed too, then pairs; and what failing cases share.

A rule says that an output is wrong under conditions, sets of levels of one or more axes. A case that fails in a way
that no rule covers is reduced to the changes of the first case that it takes, and becomes a rule.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest

from attn_diag.results.hunt import Condition, Fault, HuntedAxis, TriedLevel, Variant
from attn_diag.testing.hunting.axes import (
    FIELDS,
    Level,
    at,
    covering,
    differing,
    law,
    level_of,
    level_words,
    levels,
    rich,
)
from attn_diag.testing.hunting.judging import CaseVerdict
from attn_diag.testing.hunting.run import Runner, as_grave, gravest, same

# After so many in a row the levels up to the last one are taken to end so too: each costs a process, or the limit.
_IN_A_ROW: dict[Fault, int] = {"crashed": 3, "timed-out": 2}
_MOST_RULES = 24
# What pairs are made of.
_FEW: dict[str, tuple[Level, ...]] = {
    "head size": ((32,), (64,), (72,), (80,), (96,), (128,)),
    "group": ((1,), (2,), (3,)),
    # Both causal masks are one where Tq = Tk; where not, few kernels know top-left.
    "mask": (("none",), ("bottom-right",)),
    "length": ((128, 128), (65, 65), (127, 127), (17, 17), (100, 133), (133, 100)),
    "dtype": (("bf16",), ("fp16",)),
    "batch": ((1,), (2,)),
    "key heads": ((1,), (2,)),
}
# What the fewest kernels have wrong.
_PLAIN: dict[str, Level] = {"group": (1,), "mask": ("none",)}


@dataclass
class Rule:
    """Outputs that are wrong wherever all conditions hold."""

    outputs: dict[str, Fault]
    failing: dict[str, list[Level]]
    """Axis -> its levels that fail; empty: the first case does."""
    passing: dict[str, list[Level]]
    example: Variant
    """A case that fails so."""

    def covers(self, variant: Variant, output: str, fault: Fault) -> bool:
        """Whether this says that the output is wrong there."""
        known = self.outputs.get(output)
        if known is None or not as_grave(fault, known):
            return False
        return all(level_of(variant, axis) in found for axis, found in self.failing.items())

    def ends_early(self, variant: Variant) -> bool:
        """Whether nothing else can be learnt of a variant."""
        ended = any(fault in _IN_A_ROW for fault in self.outputs.values())
        return ended and all(level_of(variant, axis) in found for axis, found in self.failing.items())

    def conditions(self) -> tuple[Condition, ...]:
        """In words."""
        return tuple(
            Condition(
                axis, tuple(level_words(axis, x) for x in found),
                tuple(level_words(axis, x) for x in self.passing.get(axis, [])),
                law(axis, found, self.passing.get(axis, [])),
            )
            for axis, found in self.failing.items()
        )  # fmt: skip


@dataclass
class Search:
    """One kernel's search."""

    runner: Runner
    axes: Sequence[str]
    """Those that are changed."""
    cuda: bool
    fixed: bool
    """The kernel's mask is its own."""
    seed: int
    first: Variant | None = None
    rules: list[Rule] = field(default_factory=list)
    tried: dict[str, list[tuple[Level, CaseVerdict | None]]] = field(default_factory=dict)
    not_run: int = 0
    notes: list[str] = field(default_factory=list)

    def run(self, wanted: Variant) -> None:
        """Everything; ``wanted``: the case to start from, if the kernel takes it."""
        self.first = self._first(wanted)
        if self.first is None:
            return
        self._sweep(self.first)
        self._explain([v for v, found in self.runner.known.items() if found.faults])
        self._narrow()
        accepted = self._accepted()
        base = self._rich(accepted)
        if base is not None:
            swept = [at(base, axis, x) for axis in ("head size", "group", "length") for x in accepted.get(axis, [])]
            self._try(swept)
        accepted = {axis: found for axis, found in accepted.items() if len(found) > 1}
        few = {axis: [x for x in accepted[axis] if x in found] for axis, found in _FEW.items() if axis in accepted}
        for axis, found in few.items():
            own = level_of(self.first, axis)
            if own not in found and not (axis == "mask" and own != ("none",) and len(found) > 1):
                found.insert(0, own)
        self._try(list(covering(self.first, accepted, few, self.seed)))
        self._narrow()
        self._bound()

    def _bound(self) -> None:
        """What fails in the first case already is right at some levels of an axis: then the others are its rule."""
        for rule in (r for r in self.rules if not r.failing):
            for axis, tried in self.tried.items():
                ran = [(x, v) for x, v in tried if v is not None and (v.passed or (v.faults and not _stopped(v)))]
                failing = [x for x, v in ran if rule.outputs.keys() & v.faults.keys()]
                if failing and len(failing) < len(ran):
                    rule.failing[axis] = failing
                    rule.passing[axis] = [x for x, _ in ran if x not in failing]

    def _narrow(self) -> None:
        """What the first case has, a rule may need: outputs that are right without it get a rule that says so."""
        for rule in self.rules:
            for axis, plain in _PLAIN.items():
                plainer = at(rule.example, axis, plain)
                if axis not in self.tried or axis in rule.failing or plainer == rule.example or self.runner.too_late:
                    continue
                verdict = self.runner.verdict(plainer)
                right = {n: fault for n, fault in rule.outputs.items() if n not in verdict.faults}
                if not right or verdict.refused or _stopped(verdict):
                    continue
                fault = gravest(right.values())
                output = next(n for n, found in right.items() if found == fault)
                failing, passing = self._spread(rule.example, axis, output, fault)
                if len(right) < len(rule.outputs):
                    rest = {n: found for n, found in rule.outputs.items() if n not in right}
                    self.rules.append(
                        replace(rule, outputs=rest, failing=dict(rule.failing), passing=dict(rule.passing))
                    )
                rule.outputs, rule.failing[axis], rule.passing[axis] = right, failing, passing

    def _first(self, wanted: Variant) -> Variant | None:
        """The first of some plain cases that the kernel takes and has right; else one that it takes."""
        mask = wanted.causal if self.fixed else "none"
        plain = Variant(1, 2, 1, 128, 128, 64, mask, source="normal")
        others = [plain, replace(plain, head_dim=wanted.head_dim), replace(plain, head_dim=128)]
        others += [replace(plain, causal="bottom-right"), replace(plain, dtype="fp16"), replace(plain, key_heads=8)]
        taken = None
        for case in dict.fromkeys([wanted, *others]):
            found = self.runner.verdict(case)
            if found.refused and not found.passed and found.message and case == wanted:
                self.notes.append(f"{case.words}: {found.message}")
            if found.passed:
                if taken is not None:
                    self._reduced(taken, case)
                return case
            if found.faults and taken is None:
                taken = case
        if taken is not None:
            faults = dict(self.runner.verdict(taken).faults)
            self.rules.append(Rule(faults, {}, {}, taken))
        return taken

    def _sweep(self, first: Variant) -> None:
        """Every axis by itself."""
        plan = {axis: levels(axis, first, cuda=self.cuda, fixed=self.fixed) for axis in self.axes}
        # By turns, the cheapest lengths first: where the time does not reach for all levels no axis is left out, nor
        # are lengths of rows and keys that differ.
        cheap = [sorted(found, key=_work) if axis == "length" else found for axis, found in plan.items()]
        turns = [at(first, axis, x) for each in zip_longest(*cheap) for axis, x in zip(plan, each, strict=True) if x]
        axis_of = {at(first, axis, level): axis for axis, found in plan.items() for level in found}
        last = {at(first, axis, found[-1]) for axis, found in plan.items()}

        def skip(variant: Variant) -> bool:
            axis = axis_of[variant]
            ended = [self._ended(at(first, axis, x)) for x in plan[axis] if at(first, axis, x) in self.runner.known]
            for fault, count in _IN_A_ROW.items():
                if len(ended) >= count and all(e == fault for e in ended[-count:]) and variant not in last:
                    return True
            return False

        found = dict(zip(turns, self.runner.many(turns, skip), strict=True))
        for axis, of_axis in plan.items():
            self.tried[axis] = [(level, found[at(first, axis, level)]) for level in of_axis]
            self.not_run += sum(verdict is None for _, verdict in self.tried[axis])
            self._rules_of_axis(axis, first)

    def _ended(self, variant: Variant) -> Fault | None:
        faults = self.runner.known[variant].faults
        return next((faults[stage] for stage in ("forward", "backward") if stage in faults), None)

    def _rules_of_axis(self, axis: str, first: Variant) -> None:
        """Outputs that fail at the same levels of an axis are one rule; what is known of the first case is none."""
        failing: dict[str, dict[Level, Fault]] = {}
        for level, verdict in self.tried[axis]:
            for output, fault in () if verdict is None else verdict.faults.items():
                if not any(r.covers(at(first, axis, level), output, fault) for r in self.rules):
                    failing.setdefault(output, {})[level] = fault
        by_levels: dict[tuple[Level, ...], dict[str, Fault]] = {}
        for output, found in failing.items():
            by_levels.setdefault(tuple(found), {})[output] = gravest(found.values())
        for found_levels, outputs in by_levels.items():
            passing = [x for x, v in self.tried[axis] if v is not None and v.passed and x not in found_levels]
            passing += [x for x, v in self.tried[axis] if v is not None and v.faults and x not in found_levels]
            worst = gravest(outputs.values())
            output = next(n for n, fault in outputs.items() if fault == worst)
            example = next(at(first, axis, x) for x in found_levels if failing[output][x] == worst)
            self.rules.append(Rule(outputs, {axis: list(found_levels)}, {axis: passing}, example))

    def _accepted(self) -> dict[str, list[Level]]:
        """Levels that returned something by themselves, the right thing or not."""
        return {
            axis: [x for x, v in found if v is not None and v.ran_in_part and not _stopped(v)]
            for axis, found in self.tried.items()
        }

    def _rich(self, accepted: dict[str, list[Level]]) -> Variant | None:
        """A case with everything changed that can be, in which nothing is wrong."""
        assert self.first is not None
        right = {
            axis: [x for x, v in self.tried[axis] if v is not None and not v.faults and x in found]
            for axis, found in accepted.items()
        }
        case = rich(self.first, right)
        for _ in range(len(FIELDS)):
            if case == self.first or self.runner.late:
                return None
            found = self.runner.verdict(case)
            if found.passed:
                return case
            self._explain([case])
            back = [at(case, axis, level_of(self.first, axis)) for axis in differing(case, self.first)]
            sound = next((v for v in back if self.runner.verdict(v).passed), None)
            case = sound or back[0]
        return None

    def _try(self, variants: list[Variant]) -> None:
        """Run them, and explain what fails."""
        new = [v for v in dict.fromkeys(variants) if v not in self.runner.known]
        found = self.runner.many(new, lambda v: any(rule.ends_early(v) for rule in self.rules))
        self.not_run += sum(
            verdict is None and not any(r.ends_early(v) for r in self.rules)
            for v, verdict in zip(new, found, strict=True)
        )
        self._explain([v for v, verdict in zip(new, found, strict=True) if verdict is not None and verdict.faults])

    def _explain(self, variants: list[Variant]) -> None:
        """A rule for each fault that none covers yet, of the cases that differ least first."""
        assert self.first is not None
        first = self.first
        for variant in sorted(variants, key=lambda v: len(differing(v, first))):
            for output, fault in self.runner.known[variant].faults.items():
                if any(rule.covers(variant, output, fault) for rule in self.rules):
                    continue
                if self.runner.too_late or len(self.rules) >= _MOST_RULES:
                    self.rules.append(self._as_it_is(variant, output, fault))
                    return
                self._reduced(variant, first, output, fault)

    def _as_it_is(self, variant: Variant, output: str, fault: Fault) -> Rule:
        """A rule of one case that there is no time to reduce."""
        assert self.first is not None
        axes = differing(variant, self.first)
        return Rule({output: fault}, {axis: [level_of(variant, axis)] for axis in axes}, {}, variant)

    def _reduced(self, bad: Variant, good: Variant, output: str | None = None, fault: Fault | None = None) -> None:
        """Make a rule of a failing case: take back every change that it does not need, then see which levels fail."""
        verdict = self.runner.verdict(bad)
        if output is None or fault is None:
            fault = gravest(verdict.faults.values())
            output = next(n for n, found in verdict.faults.items() if found == fault)
        changed = True
        while changed:
            changed = False
            for axis in differing(bad, good):
                simpler = at(bad, axis, level_of(good, axis))
                if same(self.runner.verdict(simpler), output, fault):
                    bad, changed = simpler, True
        faults = {n: f for n, f in self.runner.verdict(bad).faults.items() if not self._covered(bad, n, f)}
        rule = Rule(faults or {output: fault}, {}, {}, bad)
        for axis in differing(bad, good):
            rule.failing[axis], rule.passing[axis] = self._spread(bad, axis, output, fault)
        for known in self.rules:
            alike = known.failing.keys() == rule.failing.keys() and known.outputs.keys() >= rule.outputs.keys()
            if alike and sum(set(known.failing[a]) != set(rule.failing[a]) for a in rule.failing) <= 1:
                for axis, found in rule.failing.items():
                    known.failing[axis] = list(dict.fromkeys([*known.failing[axis], *found]))
                    known.passing[axis] = [x for x in known.passing[axis] if x not in known.failing[axis]]
                return
        self.rules.append(rule)

    def _covered(self, variant: Variant, output: str, fault: Fault) -> bool:
        return any(rule.covers(variant, output, fault) for rule in self.rules)

    def _spread(self, bad: Variant, axis: str, output: str, fault: Fault) -> tuple[list[Level], list[Level]]:
        """Which levels of an axis fail with all else as it is, and which do not."""
        own = level_of(bad, axis)
        ended = fault in _IN_A_ROW
        found = levels(axis, bad, cuda=self.cuda, fixed=self.fixed)
        if axis in self.tried:
            found = [x for x, v in self.tried[axis] if v is None or v.faults or v.passed]
        if ended:
            # Each costs a process, or the limit.
            found = [x for x in found if x in _FEW.get(axis, found)][:4]
        found = list(dict.fromkeys([*found, own]))
        verdicts = self.runner.many([at(bad, axis, x) for x in found], lambda _: False, overtime=True)
        failing = [x for x, v in zip(found, verdicts, strict=True) if v is not None and same(v, output, fault)]
        ran = [x for x, v in zip(found, verdicts, strict=True) if v and (v.passed or (v.faults and not _stopped(v)))]
        passing = [x for x in ran if x not in failing]
        return failing or [own], passing

    def by_axis(self) -> tuple[HuntedAxis, ...]:
        """The table."""
        return tuple(
            HuntedAxis(axis, tuple(_tried_level(level_words(axis, x), v) for x, v in found))
            for axis, found in self.tried.items()
        )


def _work(length: Level) -> int:
    """How many scores a call of a length has."""
    return math.prod(map(int, length))


def _stopped(verdict: CaseVerdict) -> bool:
    return any(fault in _IN_A_ROW for fault in verdict.faults.values())


def _tried_level(words: str, verdict: CaseVerdict | None) -> TriedLevel:
    if verdict is None:
        return TriedLevel(words, "not-run", {})
    if verdict.faults:
        return TriedLevel(words, "failed", dict(verdict.faults), verdict.message)
    # Where the backward alone is refused the forward was judged.
    return TriedLevel(words, "passed" if verdict.passed else "refused", {}, verdict.message)
