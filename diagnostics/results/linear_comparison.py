"""What ``diff`` says of two kernels of linear attention on the same inputs: plain frozen dataclasses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from attn_diag.results.base import Number, Result, Tool

DifferenceAnswer = Literal["same bits", "rounding", "lossy", "undecided", "stated", "semantics", "nonfinite"]


@dataclass(frozen=True)
class LinearDifference:
    """How one quantity of B differs from that of A."""

    quantity: str
    """Its name in the capture: o, final_state, dq, …"""
    answer: DifferenceAnswer
    """rounding: both are as good as a well-rounded kernel, which is all that parts them. lossy: one rounds more than
    that. semantics: one is wrong, as ``inspect`` says. undecided, stated, nonfinite: one is."""
    words: str
    """Why, in words with numbers."""
    difference: Number | None
    """||B - A|| / ||reference||; null where the reference is zero or something is not finite."""
    beside: Number | None
    """||B - A|| over what two well-rounded kernels with independent errors differ by; null: not compared."""
    of_a: Number | None
    """The part of the squared difference that A's error makes, <A - B, A - reference> / ||A - B||^2; B's is the rest.
    Null where nothing differs."""
    semantics: Number | None
    """The part that wrong mathematics makes: of the sides that are wrong; the rest is rounding. Null likewise."""


@dataclass(frozen=True)
class LinearHeadDifference:
    """One head."""

    head: int
    """The model's number of the head."""
    quantities: tuple[LinearDifference, ...]
    """Those that both have."""


@dataclass(frozen=True, repr=False)
class LinearComparison(Result):
    """Two kernels of linear attention on the same inputs: their difference split into rounding and semantics."""

    tool: Tool
    """Versions and device of what produced the numbers."""
    a: str
    """The first capture, and its observation where it has several."""
    b: str
    """The second."""
    operator: str
    """Which operator."""
    sequence: int | None
    """Which sequence of the one capture is the other's only one; null: both have the same."""
    sentence: str
    """The comparison in one sentence."""
    heads: tuple[LinearHeadDifference, ...]
    """One entry a head."""
    schema: Literal["attn-diag-linear-comparison"] = "attn-diag-linear-comparison"
    schema_version: Literal[1] = 1

    @property
    def answers(self) -> frozenset[str]:
        """Every answer that any quantity has."""
        return frozenset(q.answer for head in self.heads for q in head.quantities)

    @property
    def findings(self) -> tuple[str, ...]:
        """What was found, in sentences."""
        return tuple(
            f"head {head.head}: {q.words}"
            for head in self.heads
            for q in head.quantities
            if q.answer in ("semantics", "nonfinite", "lossy")
        )
