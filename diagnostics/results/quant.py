"""The result of ``attn_diag.quant``: what a fake quantiser does to a weight, and whether it is the declared one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from attn_diag.results.base import Number, Result, Tool


@dataclass(frozen=True)
class QuantizerMatch:
    """A quantiser beside the values that were observed."""

    quantizer: str
    """Its name, with what is changed."""
    words: str
    """How it differs from the declared one, in words; "as declared" where it does not."""
    equal: Number
    """The part of the elements that have the observed value, or with stochastic rounding one of the two next to w."""


@dataclass(frozen=True)
class MeanOfErrors:
    """The mean of a signed error over the elements, with its uncertainty; blocks are the clusters."""

    mean: Number
    """In units of w's root mean square."""
    standard_error: Number | None
    """Of ``mean``; null below eight clusters, and where the errors are all zero."""
    p_value: Number | None
    """Two-sided, adjusted for the tests of this report (Benjamini & Hochberg); null as ``standard_error``."""
    clusters: int
    """Blocks, or rows where there are fewer than eight."""


@dataclass(frozen=True)
class ErrorPart:
    """The elements that one thing happens to."""

    part: Literal["clipped", "dead-zone", "grid"]
    """clipped: they lie past the last number; dead-zone: they became 0; grid: all others."""
    elements: int
    """How many."""
    of_square: Number
    """Their part of the squared error; 0 where there is no error."""
    away: Number
    """What they add to the mean of error times sign(w), over the mean of |w|: below 0 they shrink the weight."""


@dataclass(frozen=True)
class OutputShift:
    """The error of y = x wᵀ that the quantised weight makes."""

    rows: int
    """Rows of x."""
    error: Number
    """Root mean square of the error, over that of y."""
    constant: Number
    """The part of its square that is the same in every row: a shift of the channels' means."""
    worst_channel: int
    """The output channel whose mean moves most."""
    worst_shift: Number
    """By how much, over y's root mean square."""


@dataclass(frozen=True)
class Alternative:
    """What another quantiser would leave of the same weight."""

    quantizer: str
    """Its name, with what is changed."""
    words: str
    """What is changed, in words."""
    error: Number
    """Root mean square of Q(w) - w over that of w."""
    away: Number
    """Mean of the error times sign(w) over the mean of |w|: below 0 it shrinks the weight."""
    output_error: Number | None
    """As ``OutputShift.error``; null without x."""
    output_constant: Number | None
    """As ``OutputShift.constant``; null without x."""


# A gradient that is less off dyᵀ x is one, but for roundings: as a gain is right to 2 %.
OFF = 0.02


@dataclass(frozen=True)
class StraightThrough:
    """The straight-through gradient beside the gradient of the smoothed forward, along dyᵀ x."""

    rows: int
    """Rows of x and dy."""
    gain: Number
    """How far the smoothed forward's loss moves, over how far the gradient says; 1: right."""
    standard_error: Number
    """Of ``gain``, over draws of the dither."""
    right: bool
    """Whether it is 1, to 2 % (of floating-point elements 5 %) or within four standard errors."""
    clipped: Number
    """What clipped elements have of the gradient's say."""
    clipped_gain: Number | None
    """Their own gain: 0 where they stay where they are; null where none is clipped."""
    inner_gain: Number | None
    """The gain of what is not clipped; null where nothing of the gradient is there."""
    inner_right: bool
    """Whether it is 1, to 2 % (of floating-point elements 5 %) or within four standard errors; of floating-point
    elements also where the gradient is dyᵀ x to 5 %, along it."""
    draws: int
    """Of the dither."""
    apart: str | None = None
    """The rows, columns, blocks, ends of the grid or clipped side that are passed another gradient, in words."""
    off: Number = 0.0
    """How far the gradient is off dyᵀ x where nothing is clipped: root mean square, over that of dyᵀ x."""


@dataclass(frozen=True)
class EngineWeights:
    """What another program, an inference engine, makes of the same weight."""

    quantizer: str | None
    """Whose values they are; null: of none that is known."""
    words: str
    """How it differs from the trainer's, in words."""
    equal: Number
    """The part of the elements that have the trainer's value."""
    difference: Number
    """Root mean square of engine less trainer, over that of w."""
    away: Number
    """Mean of engine less trainer times sign(w), over the mean of |w|."""
    output: Number | None
    """Root mean square of the outputs' difference over that of y; null without x."""
    same: bool
    """Whether both have the same values, but for last bits."""


@dataclass(frozen=True, repr=False)
class Quant(Result):
    """The result of ``attn_diag.quant``."""

    tool: Tool
    """Versions and device of what produced the numbers."""
    source: str
    """Where the tensors come from."""
    shape: tuple[int, int]
    """[output channels, input channels] of w."""
    dtype: str
    """w's."""
    declared: str | None
    """The declared quantiser; null: none was."""
    judged: str
    """Whose errors the figures are: "observed", or the declared quantiser, computed here."""
    outcome: Literal["pass", "fail", "undecided"]
    """fail: the observed values are not the declared quantiser's, dithered ones are biased, or the function that made
    them passes on another gradient where nothing is clipped; undecided: nothing was
    observed, no quantiser was declared and none fits, or values are others only next to ties in w's 16 bits."""
    headline: str
    """The result in a sentence."""
    notes: tuple[str, ...]
    """What else is to be known, in sentences."""
    matches: tuple[QuantizerMatch, ...]
    """The declared quantiser and those that come nearest, best first; empty where nothing was observed."""
    error: Number
    """Root mean square of Q(w) - w over that of w."""
    mean: MeanOfErrors
    """Of the error."""
    away: MeanOfErrors
    """Of the error times sign(w)."""
    channels_tested: int
    """Output channels with at least eight blocks, whose own mean error was tested."""
    channels_biased: int
    """How many of them are biased at ``level``, adjusted."""
    level: Number
    """Significance level."""
    parts: tuple[ErrorPart, ...]
    """What the error is made of."""
    output: OutputShift | None
    """The layer's output; null without x."""
    alternatives: tuple[Alternative, ...]
    """What others would leave, the declared one first."""
    next: str | None = None
    """What to do next."""
    gradient: StraightThrough | None = None
    """The straight-through gradient; null without x and dy, or a quantiser."""
    engine: EngineWeights | None = None
    """What an engine makes of the weight; null where that was not given."""
    schema: Literal["attn-diag-quant"] = "attn-diag-quant"
    schema_version: Literal[1] = 1

    @property
    def passed(self) -> bool:
        """Whether nothing failed."""
        return self.outcome != "fail"
