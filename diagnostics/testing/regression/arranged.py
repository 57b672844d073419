"""The case "arrangements" of the suite: one call in every arrangement that should not matter, as ``invariance`` has it.

What more than rounding changes is a failure, and so is any bit that later tokens, other batch items or other heads
change. Other bits for another batch size or order are none: kernels choose their schedule by it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from attn_diag.errors import InputError
from attn_diag.head.quality import ELEMENT_LIMIT
from attn_diag.kernels import Recipe
from attn_diag.results.check import ARRANGED, CheckedCase, Failure, Kind
from attn_diag.results.invariance import ITSELF, Invariance, PathFinding
from attn_diag.results.wording import SYMBOLS, listed, times
from attn_diag.testing.invariance.arrangements import ARRANGEMENTS, MOVES
from attn_diag.testing.invariance.invariance import LARGE, invariance
from attn_diag.testing.next_command import Again
from attn_diag.testing.regression.cases import Asked
from attn_diag.testing.target import DTYPES, Attention

# Items on both sides of an edge, two groups of query heads, and a length off the tiles of every kernel we know.
_SHAPE = (2, 4, 173)
# Compiling takes longer than all the others.
_LEFT_OUT = ("compiled",)


@dataclass(frozen=True)
class Arranged:
    """What came of the case."""

    case: CheckedCase
    failures: list[Failure] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    paths: tuple[PathFinding, ...] = ()
    """Every way to make the call; none where it could not be made at all."""


@dataclass(frozen=True)
class Arranging:
    """The case, ready to run."""

    kernel: Attention | str | Recipe
    name: str | None
    """What reports call it."""
    asked: Asked
    backward: bool | None
    device: torch.device

    def run(self, usual: Mapping[str, float | None]) -> Arranged:
        """Make the calls and say what is wrong.

        Args:
            usual: How many times a well-rounded kernel's error each quantity has in a call of one head, where known.
        """
        started, asked, refused = time.perf_counter(), self.asked, list[str]()
        dtype = str(asked.dtype).removeprefix("torch.")
        # A kernel that takes no such length is asked with the suite's own.
        batch, heads = _SHAPE[0], asked.stated.heads or _SHAPE[1]
        for shape in ((batch, heads, length, asked.head_dim) for length in (_SHAPE[2], asked.length)):
            try:
                found = invariance(
                    self.kernel, name=self.name, dtype=asked.dtype, shape=shape, causal=asked.stated.causal,
                    scale=asked.stated.scale, window=asked.stated.window, softcap=asked.stated.softcap,
                    alibi_slopes=asked.stated.alibi_slopes, sinks=asked.stated.sinks,
                    backward=self.backward, only=[n for n in ARRANGEMENTS if n not in _LEFT_OUT],
                    allow=MOVES, schedules=False, seed=asked.seed, device=self.device.type,
                )  # fmt: skip
            except InputError as error:
                refused.append(f"{ARRANGED}: {error}")
                continue
            outputs = tuple(e.quantity for e in found.errors)
            case = CheckedCase(ARRANGED, shape, dtype, outputs, seconds=time.perf_counter() - started)
            notes = [f"{words}; made with {shape[2]} rows instead" for words in refused]
            return Arranged(case, self._failures(found, usual), notes + self._notes(found), found.paths)
        case = CheckedCase(ARRANGED, (batch, heads, _SHAPE[2], asked.head_dim), dtype)
        return Arranged(case, [Failure("fit", ARRANGED, "o", refused[0])])

    def _failures(self, found: Invariance, usual: Mapping[str, float | None]) -> list[Failure]:
        """One an arrangement, as its worst path has it, the likeliest cause first."""
        failures = []
        first = _first_beyond(found)
        for name in found.failed:
            paths = [p for p in found.paths if p.arrangement == name and p.status in ("bits", "fault")]
            path = next((p for p in paths if p.status == "fault"), paths[0])
            words = f"{ARRANGED}: {name}, {path.path}: {path.words}"
            failures.append(Failure("invariance", ARRANGED, first, words, look_closer=self._closer(found, name)))
        if found.wrong_itself:
            far = (e.quantity for e in found.errors if e.of_noise is None or e.of_noise > ELEMENT_LIMIT)
            quantity = next(far, "o")
            kind: Kind = "fit" if quantity == "o" else "wrong"
            failures.insert(0, Failure(kind, ARRANGED, quantity, f"{ARRANGED}: {found.headline}"))
        elif not failures and not found.passed:
            failures.append(Failure("fit", ARRANGED, "o", f"{ARRANGED}: {found.headline}"))
        return failures or self._far(found, usual)

    def _far(self, found: Invariance, usual: Mapping[str, float | None]) -> list[Failure]:
        """The first quantity that is much further off in this call than in a call of one head, if one is."""
        b, h, t, _ = found.shape
        for name, times_usual, here in ((e.quantity, usual.get(e.quantity), e.of_noise) for e in found.errors):
            if times_usual is not None and here is not None and here > LARGE * max(times_usual, 1.0):
                words = (
                    f"{ARRANGED}: {ITSELF}, of {b} sequences with {h} heads and {t} rows: {SYMBOLS[name]} has "
                    f"{times(here)} times a well-rounded kernel's error, with one head {times(times_usual)} times"
                )
                closer = self._closer(found, "head-order")
                return [Failure("invariance", ARRANGED, name, words, factor=here, look_closer=closer)]
        return []

    def _notes(self, found: Invariance) -> list[str]:
        notes = []
        refused = list(dict.fromkeys(p.words for p in found.paths if p.status == "refused"))
        if refused:
            notes.append(f"{ARRANGED}: not every call was taken: {listed(refused, 2)}")
        if moved := list(dict.fromkeys(p.arrangement for p in found.paths if p.status == "allowed")):
            notes.append(
                f"{ARRANGED}: other bits, by rounding alone, in {listed(moved, 5)} (no failure here; "
                f"{self._closer(found, *moved)} names the schedules)"
            )
        return notes

    def _closer(self, found: Invariance, *names: str) -> str:
        named = self.kernel if isinstance(self.kernel, str) else None
        asked = self.asked
        again = Again(named, DTYPES[asked.dtype], asked.stated, found.shape)
        return again.command("invariance", [f"--only {','.join(names)}"])


def _first_beyond(found: Invariance) -> str:
    """The quantity from which the others are made, of those that move further than rounding; else that moves at all."""
    failed = [d for p in found.paths if p.status in ("bits", "fault") for d in p.differences if d.differing]
    beyond = [d for d in failed if d.nonfinite or (d.of_limit or 0.0) > 1.0] or failed
    order = [e.quantity for e in found.errors]
    return min((d.quantity for d in beyond), key=lambda name: order.index(name) if name in order else 0, default="o")
