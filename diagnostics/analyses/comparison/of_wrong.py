"""Errors of wrong quantities: no rounding makes them, and few rows may carry them, of which no test can be made.

On the same inputs both are off the same truth, so that twice the error is more, whatever rows it lies in, and whatever
the other side's is called. On other inputs it may be these: then nothing is said to have changed, and what differs is
told.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from attn_diag.results.comparison import HeadComparison, SizeChange, SizeOutcome
from attn_diag.results.diagnosis import HeadDiagnosis
from attn_diag.results.quality import Answer
from attn_diag.results.wording import SYMBOLS, plural, times

_MORE = 2.0
# What is near a well-rounded kernel's error: beside a lossy quantity "wrong" is a matter of a threshold.
_SOUND: tuple[Answer, ...] = ("good", "undecided")


def judged_where_wrong(
    sizes: Iterable[SizeChange], a: HeadDiagnosis, b: HeadDiagnosis, *, same_inputs: bool
) -> Iterator[SizeChange]:
    """The sizes, and of those that could not be tested, which grew or shrank all the same.

    Args:
        sizes: One head's.
        a: The head in A.
        b: The head in B.
        same_inputs: Whether both ran on the same inputs.
    """
    answers = [{f"{q.quantity}_factor": q.answer for q in head.quantities} for head in (a, b)]
    for size in sizes:
        before, after = (of.get(size.name) for of in answers)
        outcome: SizeOutcome = size.outcome
        if outcome == "unknown" and size.a is not None and size.b is not None:
            more = math.inf if size.ratio is None else size.ratio
            if after == "wrong" and (before in _SOUND or (same_inputs and more > _MORE)):
                outcome = "grew"
            elif before == "wrong" and (after in _SOUND or (same_inputs and more < 1 / _MORE)):
                outcome = "shrank"
        yield replace(size, outcome=outcome)


def untested_words(heads: Sequence[HeadComparison]) -> str:
    """Of heads that are wrong in both, how much is beyond what could be tested; empty: nothing."""
    sizes = [own for e in heads if (own := e.untested)]
    if not sizes:
        return ""
    most = max((s for own in sizes for s in own), key=lambda s: abs(math.log(s.ratio or 1.0)))
    return (
        f"Not tested in {plural(len(sizes), 'head')}, wrong in both, as few rows carry the error: "
        f"{SYMBOLS[most.name.removesuffix('_factor')]} has up to {times(most.b)} times a well-rounded kernel's, was "
        f"{times(most.a)}."
    )
