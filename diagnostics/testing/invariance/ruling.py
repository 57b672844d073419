"""What a path's differences mean: which may be, which the same call changes too, which are a fault."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from attn_diag.errors import InputError
from attn_diag.results.invariance import PathDifference, PathFinding, Promise, Status
from attn_diag.results.wording import EVERY_SYMBOL, percent, times, together

# Arrangements in which nothing but time passes; two calls of a kernel that changes by itself are so many times as far
# apart as others of it, at most.
_STEADINESS = ("run-to-run", "other-calls")
_LIKE_ITSELF = 4.0
_FORWARD = ("o", "lse", "final_state")
# What is counted along the third dimension.
_ROWS = {"dk": "key", "dv": "key"}


@dataclass(frozen=True)
class Change:
    """One thing that should not matter."""

    name: str
    shows: str
    """What is changed, in the report's words."""
    fault: str
    """What it means where more than rounding differs, in words that follow the kernel's name."""
    promise: Promise
    """See ``PathFinding``."""


# How often the same call is made again where nothing else is asked for; and where what happens seldom is looked for.
REPEATS, _MANY = 2, 100
# What is said to show does not in so many runs.
_MISSED = 0.05
SAME_CALL = Change("run-to-run", "the same call again", "gives something else for the same call", "bits")


def calls_again(repeats: int) -> list[str]:
    """What the calls after the first are called. Raises InputError where there are none."""
    if not isinstance(repeats, int) or repeats < 1:
        raise InputError(f"repeats must be a positive integer, got {repeats}")
    return [*("the second call", "the third call")[:repeats], *(f"call {n}" for n in range(4, repeats + 2))]


def until_told(item: Change, found: Iterable[PathFinding]) -> Iterator[PathFinding]:
    """An arrangement's paths; of the same call no more than tell something new."""
    for number, path in enumerate(found, 1):
        yield path
        if item.name == SAME_CALL.name and number >= REPEATS and path.status != "same":
            return


def seldom_words(found: Iterable[PathFinding], elements: int, repeats: int) -> str:
    """How seldom a call may go wrong without that showing, of calls that agree.

    What happens in a share p of the calls, whatever they are given, is missed by n calls with probability (1 - p)^n.

    Args:
        found: Every path.
        elements: Of the whole O.
        repeats: How often the same call was made again.
    """
    calls = 1 + sum(d.quantity == "o" and d.elements == elements for p in found for d in p.differences)

    def least(n: int) -> str:
        return percent(1 - _MISSED ** (1 / n), ".2g")

    said = (
        f"The whole O of {calls} calls was compared: what goes wrong beyond rounding in {least(calls)} of a kernel's "
        "calls shows in 95 % of such runs, what is rarer in fewer"
    )
    return said + ("." if repeats >= _MANY else f" (--repeats {_MANY}: {least(calls - repeats + _MANY)}).")


@dataclass
class Rulings:
    """Judges paths one after the other, those of the steadiness first."""

    allowed: frozenset[str]
    """Arrangements that may change bits within the noise."""
    unsteady: dict[str, float] = field(default_factory=dict)
    """By quantity that the same call changes: the largest of its differences' ``of_limit``."""

    once: list[PathFinding] = field(default_factory=list)
    """What an arrangement changed once, and not when it was made again."""

    def note(self, item: Change, found: Iterable[PathFinding]) -> None:
        """Remember what the same call changes."""
        if item.name not in _STEADINESS:
            return
        for d in (d for f in found for d in f.differences if d.differing):
            reach = math.inf if d.nonfinite or d.of_limit is None else d.of_limit
            self.unsteady[d.quantity] = max(self.unsteady.get(d.quantity, 0.0), reach)

    def status(self, item: Change, differences: Sequence[PathDifference]) -> Status:
        """What differences of an arrangement are."""
        moved = [d for d in differences if d.differing]
        if not moved:
            return "same"
        own = item.name == SAME_CALL.name
        if any(self._beyond(item, d) for d in moved):
            return "fault"
        # What the same call changes shows in every other comparison too.
        if not own and not any(self._steady(d.quantity) for d in moved):
            return "unsteady"
        if item.promise == "rounding":
            return "rounding"
        return "allowed" if item.name in self.allowed else "bits"

    def failed(self, item: Change, differences: Sequence[PathDifference]) -> bool:
        """Whether they are what may not be."""
        return self.status(item, differences) in ("bits", "fault")

    def lasting(
        self, item: Change, path: str, found: Sequence[PathDifference], again: Iterator[Sequence[PathDifference]]
    ) -> list[PathDifference]:
        """Of each quantity the least that was found: what an arrangement changes, it changes every time.

        Where that is nothing to blame, what was found at first is the same call's own, and kept in ``once``.

        Args:
            item: The arrangement.
            path: The path's name.
            found: Its differences.
            again: Those of the same calls made again; asked for until nothing is left to blame.
        """
        least = list(found)
        while self.failed(item, least) and (more := next(again, None)) is not None:
            pairs = zip(least, more, strict=True)
            least = [min(pair, key=lambda d: (d.nonfinite, d.of_limit or 0.0, d.differing)) for pair in pairs]
        if self.failed(item, found) and not self.failed(item, least):
            own, where = SAME_CALL, f"once in {item.name} ({path})"
            status = self.status(own, found)
            words = words_of(own, status, found)
            self.once.append(PathFinding(own.name, own.shows, where, own.promise, status, words, tuple(found)))
            self.note(own, self.once[-1:])
        return least

    def with_once(self, found: Iterable[PathFinding]) -> list[PathFinding]:
        """All that was found, what the same call changes first."""
        return sorted([*found, *self.once], key=lambda path: path.arrangement != SAME_CALL.name)

    def notes(self) -> list[str]:
        """What is said of a kernel that changes by itself."""
        if not self.unsteady:
            return []
        names = [n for n in EVERY_SYMBOL if n in self.unsteady]
        changes = "changes" if len(names) == 1 else "change"
        return [
            f"{together([EVERY_SYMBOL[n] for n in names])} {changes} from call to call: no other arrangement is blamed "
            "for as much."
        ]

    def _beyond(self, item: Change, found: PathDifference) -> bool:
        """Whether it is more than rounding, and more than the same call changes."""
        same = 0.0 if item.name == SAME_CALL.name else _LIKE_ITSELF * self.unsteady.get(found.quantity, 0.0)
        if found.nonfinite and (item.name == "uninitialised" or not math.isinf(same)):
            return True
        return (found.of_limit or 0.0) > max(1.0, same)

    def _steady(self, quantity: str) -> bool:
        """Whether the same call gives the same bits; of gradients, all of them, as few calls show few changes."""
        of_forward = bool(self.unsteady.keys() & {*_FORWARD})
        return not (of_forward if quantity in _FORWARD else self.unsteady)


def worst_of(differences: Sequence[PathDifference]) -> PathDifference:
    """The one that moves furthest beyond rounding."""
    return max(differences, key=lambda d: (d.nonfinite > 0, d.of_limit or 0.0))


def words_of(item: Change, status: Status, differences: Sequence[PathDifference]) -> str:
    """What a path shows, in words.

    Args:
        item: The arrangement.
        status: As ``Rulings.status`` has it.
        differences: The path's.
    """
    moved = [d for d in differences if d.differing]
    if not moved:
        return "same bits" if differences else "nothing to compare"
    if status == "unsteady":
        return "no more than the same call again changes"
    worst = worst_of(moved)
    (b, h, row), name = worst.first or (0, 0, 0), EVERY_SYMBOL[worst.quantity]
    place = f"item {b}, head {h}, {_ROWS.get(worst.quantity, 'row')} {row}"
    if status == "fault" and worst.nonfinite:
        bad = f"NaN or Inf in {worst.nonfinite} of {worst.elements} elements of {name}"
        return f"it {item.fault}: {bad}, the first in {place}"
    if status == "fault":
        far = f"{times(worst.of_limit)} times as far as adding in another order can"
        return f"it {item.fault}: {name} moves {far}, most in {place}"
    share = percent(max(d.differing / d.elements for d in moved))
    words = f"other bits in {together([EVERY_SYMBOL[d.quantity] for d in moved])} ({share} of the elements), by"
    return f"{words} {times(worst.of_noise)} of a well-rounded kernel's error: rounding alone"
