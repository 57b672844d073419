"""What the microscope returns: plain frozen dataclasses; importing them needs neither torch nor numpy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from attn_diag.results.base import Number, Result, Tool
from attn_diag.results.several import OneHead
from attn_diag.results.wording import head_name

Tie = Literal["exact", "broken", "none"]
Direction = Literal["exact", "toward zero", "away from zero"]
Class = Literal["tie", "swamped", "ordinary"]


@dataclass(frozen=True)
class Operand:
    """A term of a sum, and its digits aligned under the sum's exponent."""

    label: str
    """What it is."""
    value: Number
    """Its value."""
    negative: bool
    """Whether it is below 0."""
    exponent: int | None
    """Its exponent of two; null for 0."""
    significand: str
    """Its own significand's bits; zero for 0."""
    aligned: str
    """Its digits under the sum's, with a bar behind the last bit that the format keeps at the sum's exponent; a "+" at
    the end says that bits follow, "…" at the start that bits precede."""
    residual: bool
    """Whether it is counted as part of the residual, not of the main terms."""


@dataclass(frozen=True)
class Counterfactual:
    """The same rounding of the main terms alone."""

    exact: Number
    """Their exact sum."""
    tie: bool
    """Whether that lies half-way between two neighbours."""
    rounded: Number
    """Its nearest-even value."""
    error: Number
    """rounded - exact."""


@dataclass(frozen=True, repr=False)
class Addition(Result):
    """One rounding of a sum, examined."""

    format: str
    """The format that is rounded to."""
    operands: tuple[Operand, ...]
    """The terms; they add up to the sum exactly."""
    exact: Number
    """The exact sum (rounded to float64 for display only; ``exact_aligned`` shows its bits)."""
    exact_aligned: str
    """Its digits, as those of the operands."""
    exponent: int
    """Its exponent of two."""
    carry: int
    """How far that lies above the largest operand's (negative: cancellation)."""
    kept: str
    """The truncated significand's bits."""
    guard: int
    """The first bit below."""
    round_bit: int
    """The second bit below."""
    sticky: int
    """Whether any later bit is set."""
    tie: Tie
    """The sum is one: "exact"; "broken", where the main terms alone tie and the residual decides; or "none"."""
    from_tie: Number
    """Exact sum - nearest tie point."""
    residual: Number
    """The sum of the residual's terms."""
    toward_zero: Number
    """The sum's neighbour toward zero."""
    away: Number
    """The sum's neighbour away from zero."""
    rounded: Number
    """The sum rounded to nearest, ties to even."""
    direction: Direction
    """Which of the neighbours that is."""
    error: Number
    """rounded - exact."""
    ulp: Number
    """The format's spacing at the sum."""
    without_residual: Counterfactual | None
    """What the main terms alone round to; null where no term counts as residual."""
    schema: Literal["attn-diag-addition"] = "attn-diag-addition"
    schema_version: Literal[1] = 1


@dataclass(frozen=True)
class SumSite:
    """One rounding of the walked element."""

    name: str
    """The recipe's field: range_pv, accumulator, out."""
    step: str
    """Which of its roundings: product, rescale, addition, numerator, cast."""
    format: str
    """What is rounded to."""
    split: int
    """The independent part of the keys it belongs to."""
    keys: tuple[int, int] | None
    """[start, stop) of its key range; null at the last ones."""
    before: Number
    """The value before."""
    after: Number
    """The value after."""
    error: Number
    """after - before."""
    contribution: Number
    """What that makes of O."""


@dataclass(frozen=True)
class Term:
    """A key's part in the sum."""

    position: int
    """Counts visible keys in the recipe's order, from 1."""
    key: int
    """The key's index."""
    probs: Number
    """P_bar before its cast, relative to the maximum that far."""
    cast_probs: Number
    """P_bar after its cast."""
    value: Number
    """V."""
    product: Number
    """cast P_bar V, relative to the final maximum."""
    unit: bool
    """Whether P_bar = 1 there."""
    error_before: Number
    """The prefix error before it (see Curve)."""
    error_after: Number
    """The prefix error after it."""


@dataclass(frozen=True)
class Point:
    """The prefix error after some keys (see Curve)."""

    position: int
    """How many keys."""
    key: int
    """The last of them."""
    error: Number
    """The prefix error."""
    rounding_error: Number
    """Without what the scores and the cast of P_bar make."""
    unit: bool
    """Whether P_bar = 1 at this key."""


@dataclass(frozen=True)
class Curve:
    """O_bar_err(t), the prefix error of Figure 6 of Qiu & Yao (arXiv 2510.04212), over the visible keys in order.

    ``error`` at t = held(t) - sum_{j <= t} exp(S_j - m) V_j, S in float64 and m the recipe's final maximum; held(t) is
    O_bar as the recipe would hold it were key t the last: with the roundings of range_pv and accumulator if it has any,
    else the running sum rounded to ``format``, that of O ("what rounding O_bar would do"). ``rounding_error``: the same
    against sum cast(P_bar_j) V_j, the recipe's own terms: without what the scores and the cast of P_bar make.
    """

    format: str
    """What held(t) is rounded to."""
    keys: int
    """How many keys there are."""
    unit_keys: int
    """At how many P_bar = 1."""
    points: tuple[Point, ...]
    """At most 512, always with those of P_bar = 1 (thinned evenly if they alone are more)."""


@dataclass(frozen=True)
class Element:
    """The closed form for this element (``attn_diag.closed_form``)."""

    kind: Class
    """What the closed form takes it for."""
    unit_keys: int
    """Keys whose cast P_bar is 1."""
    base: Number
    """What these keys make of it."""
    residual: Number
    """What the other keys add."""
    predicted_error: Number
    """The error of O that follows; 0 for "ordinary"."""


@dataclass(frozen=True)
class Explained:
    """Predicted beside measured signed errors; null where nothing was measured to differ."""

    n: int
    """How many values."""
    predicted_sum: Number
    """Sum of the predicted errors."""
    measured_sum: Number
    """Sum of the measured errors."""
    predicted_rms: Number
    """Root mean square of the predicted errors."""
    measured_rms: Number
    """Root mean square of the measured errors."""
    correlation: Number | None
    """Of both."""
    projection: Number | None
    """<predicted, measured> / ||measured||^2."""
    share: Number | None
    """1 - ||measured - predicted||^2 / ||measured||^2, the explained share of the squared error (below 0: worse)."""


@dataclass(frozen=True)
class ClosedFormTotals:
    """What the closed form says of one head."""

    recipe: str
    """The recipe that is followed."""
    site: str
    """What the recipe rounds: "O_bar" or "O"."""
    format: str | None
    """What that is rounded to; null: to no nearest-even format, nothing is predicted."""
    rows: dict[str, int]
    """Rows by class (a row is a tie where one of its features is, else swamped where one is)."""
    elements: dict[str, int]
    """Elements of O by class."""
    error_share: dict[str, Number]
    """Of O's squared error, by the elements' class."""
    o: Explained
    """O's errors."""
    delta: Explained | None
    """delta's errors; null without dO."""
    before: Explained
    """O's errors, with what the recipe lost before that rounding (scores, P_bar, l) as the prediction."""
    dq_predicted: Number | None
    """||alpha Delta_delta (PK)|| / ||dQ_ref|| from the predicted errors of delta; null without dO."""
    dq_measured: Number | None
    """The same from the measured ones."""
    statement: str
    """In words."""


@dataclass(frozen=True)
class ClosedFormRows:
    """The closed form row by row, over the rows that were usable; one number a row."""

    row: tuple[int, ...]
    """The query row."""
    unit_keys: tuple[int, ...]
    """Keys whose cast P_bar is 1."""
    tied: tuple[int, ...]
    """Features that are ties."""
    swamped: tuple[int, ...]
    """Features that are swamped."""
    predicted_o: tuple[Number, ...]
    """Sum over the features of O's predicted signed errors."""
    measured_o: tuple[Number, ...]
    """Sum over the features of O's measured signed errors."""
    predicted_delta: tuple[Number, ...]
    """delta's error that follows from the predicted ones; empty without dO."""
    measured_delta: tuple[Number, ...]
    """delta's error that follows from the measured ones; empty without dO."""


@dataclass(frozen=True, repr=False)
class ClosedForm(Result):
    """The closed form for one head: totals, and row by row."""

    source: str
    """The capture; "memory" for a head that was given as tensors."""
    observation: str | None
    """Whose O is explained; null: the recipe's own."""
    layer: int | None
    """The model's number of the layer; null where it is not stated."""
    batch: int
    """Batch item."""
    head: int
    """The model's number of the head."""
    totals: ClosedFormTotals
    """Over the whole head."""
    by_row: ClosedFormRows
    """Row by row."""
    schema: Literal["attn-diag-closed-form"] = "attn-diag-closed-form"
    schema_version: Literal[1] = 1


@dataclass(frozen=True, repr=False)
class Microscope(OneHead, Result):
    """One element of O under the microscope."""

    source: str
    """The capture."""
    observation: str | None
    """Whose O is looked at; null: the recipe's own, none was captured."""
    recipe: str
    """The recipe that is followed."""
    recipe_reason: str
    """Where it comes from."""
    layer: int | None
    """The model's number of the layer; null where it is not stated."""
    batch: int
    """Batch item."""
    head: int
    """The model's number of the head."""
    row: int
    """Query row."""
    feature: int
    """Feature of O."""
    chosen: str
    """How row and feature came to be chosen."""
    keys: int
    """Visible keys."""
    ranges: int
    """Key ranges that the recipe adds up one after the other."""
    splits: int
    """Independent parts of the keys, merged at the end."""
    observed: Number | None
    """Captured O; null: there is none."""
    walked: Number
    """O as walked here."""
    emulated: Number
    """O as the recipe's emulation has it."""
    bit_equal: bool
    """Whether these two agree."""
    reference: Number
    """O in float64."""
    rounded_reference: Number
    """That rounded once to O's format."""
    error: Number
    """observed (else walked) - reference."""
    excess: Number
    """observed (else walked) - rounded_reference."""
    ulp: Number
    """The spacing of O's format at the reference."""
    sites: tuple[SumSite, ...]
    """Every rounding of the sum, with its contribution to O."""
    before_sum: Number
    """What of walked - reference is left: scores, P_bar, l, fp32."""
    decisive: int | None
    """The index of the site with the largest contribution; null: the recipe rounds nothing."""
    addition: Addition | None
    """That site, examined as if to nearest even."""
    terms: tuple[Term, ...]
    """The P_bar = 1 and the largest terms, in order."""
    curve: Curve
    """The prefix error over the keys."""
    element: Element
    """The closed form for this element."""
    closed_form: ClosedFormTotals | None
    """The closed form of the whole head; null where it was not asked for."""
    tool: Tool
    """Versions and device of what produced the numbers."""
    unfit: str = ""
    """Why nothing here is about the captured kernel: no recipe made its O, or it is wrong in places; else empty."""
    schema: Literal["attn-diag-microscope"] = "attn-diag-microscope"
    schema_version: Literal[1] = 1

    @property
    def findings(self) -> tuple[str, ...]:
        """What was found, in sentences."""
        place = f"O[{self.row}, {self.feature}] of {head_name(self.layer, self.head)}"
        found = [f"{place} is off by {self.error / self.ulp:+.3g} ulp ({self.chosen})."]
        if self.decisive is not None:
            site = self.sites[self.decisive]
            found.append(f"The rounding that adds most is {site.name} to {site.format}: {site.contribution:+.3g}.")
        return (*([self.unfit] if self.unfit else []), *found, *_stated(self.closed_form))


def _stated(totals: ClosedFormTotals | None) -> list[str]:
    return [] if totals is None else [totals.statement]
