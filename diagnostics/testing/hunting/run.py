"""Running variants: each once, several side by side, within the time that there is."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch

from attn_diag.errors import InputError
from attn_diag.results.hunt import FAULTS, Fault, Variant
from attn_diag.testing.hunting.inputs import Material
from attn_diag.testing.hunting.judging import CaseJudge, CaseVerdict
from attn_diag.testing.hunting.workers import Workers
from attn_diag.work import Progress

_NUMBERS: tuple[Fault, ...] = ("nonfinite", "wrong")


def same(verdict: CaseVerdict, output: str, fault: Fault) -> bool:
    """Whether a case fails in the same way: in this output; NaN counts as wrong."""
    found = verdict.faults.get(output)
    return found == fault or (found in _NUMBERS and fault in _NUMBERS)


def as_grave(found: Fault, known: Fault) -> bool:
    """Whether ``known`` says all that ``found`` does."""
    return FAULTS.index(known) <= max(FAULTS.index(found), FAULTS.index("wrong") if found in _NUMBERS else 0)


def gravest(faults: Iterable[Fault]) -> Fault:
    """The gravest of them."""
    return min(faults, key=FAULTS.index)


@dataclass
class Runner:
    """Runs and judges variants, and remembers what came of them."""

    material: Material
    pool: Workers
    judge: CaseJudge
    until: float
    """When (``time.monotonic``) the search has to end."""
    overtime_s: float
    """How much longer what was found may be reduced and shrunk."""
    progress: Progress | None = None
    known: dict[Variant, CaseVerdict] = field(default_factory=dict)
    planned: int = 0

    @property
    def late(self) -> bool:
        """Whether the time is up."""
        return time.monotonic() > self.until

    @property
    def too_late(self) -> bool:
        """Whether what was found must be left as it is."""
        return time.monotonic() > self.until + self.overtime_s

    def verdict(self, variant: Variant, *, limit_s: float | None = None) -> CaseVerdict:
        """Of one variant, run once."""
        if variant not in self.known:
            try:
                case = self.material.build(variant)
            except InputError as error:
                self.known[variant] = CaseVerdict(refused=True, message=str(error))
            else:
                found = self.judge.of(case, self.pool.run(case, variant.layout, limit_s=limit_s))
                # Outputs of hundreds of cases are not looked at again.
                self.known[variant] = found.without_outputs()
            self._count()
        return self.known[variant]

    def many(
        self, variants: Sequence[Variant], skip: Callable[[Variant], bool], *, overtime: bool = False
    ) -> list[CaseVerdict | None]:
        """Of several, as many side by side as there are workers; None where ``skip`` said so, or the time was up."""

        def one(variant: Variant) -> CaseVerdict | None:
            if variant not in self.known and ((self.too_late if overtime else self.late) or skip(variant)):
                return None
            return self.verdict(variant)

        self.planned += len([v for v in variants if v not in self.known])
        with ThreadPoolExecutor(self.pool.count, initializer=torch.set_num_threads, initargs=(1,)) as threads:
            return list(threads.map(one, variants))

    def _count(self) -> None:
        if self.progress is not None:
            self.progress(len(self.known), max(self.planned, len(self.known)))
