"""What the microscope returns: plain frozen dataclasses; importing them needs neither torch nor numpy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from attn_diag.plain import Number, Tool
from attn_diag.result import Result

if TYPE_CHECKING:
    from rich.console import RenderableType

Tie = Literal["exact", "broken", "none"]
Direction = Literal["exact", "toward zero", "away from zero"]
Class = Literal["tie", "swamped", "ordinary"]


@dataclass(frozen=True)
class Operand:
    """A term: its value, exponent (of two), own significand bits, and its digits aligned under the sum's exponent.

    ``aligned`` has a bar behind the last bit that the format keeps at the sum's exponent; a "+" at its end says that
    bits follow, "…" at its start that bits precede. ``exponent`` is None and the bits are zero for 0. ``residual``: it
    is counted as part of the residual, not of the main terms.
    """

    label: str
    value: Number
    negative: bool
    exponent: int | None
    significand: str
    aligned: str
    residual: bool


@dataclass(frozen=True)
class Counterfactual:
    """The same rounding of the main terms alone: their exact sum, its nearest-even value, and error."""

    exact: Number
    tie: bool
    rounded: Number
    error: Number


@dataclass(frozen=True, repr=False)
class Addition(Result):
    """One rounding of a sum, examined.

    ``exact`` is the exact sum (rounded to float64 for display only; ``exact_aligned`` shows its bits), ``exponent``
    its exponent, ``carry`` how far that lies above the largest operand's (negative: cancellation). ``kept``: the
    truncated significand's bits; ``guard``, ``round_bit``, ``sticky``: the bits below. ``tie``: "exact"; "broken",
    where the main terms alone tie and the residual decides; or "none". ``from_tie``: exact sum - nearest tie point.
    ``toward_zero`` and ``away``: the neighbours of the sum; ``rounded`` to nearest, ties to even; ``direction``:
    which of them it is; ``error`` = rounded - exact; ``ulp`` the spacing. ``without_residual`` is None where no
    term counts as residual.
    """

    format: str
    operands: tuple[Operand, ...]
    exact: Number
    exact_aligned: str
    exponent: int
    carry: int
    kept: str
    guard: int
    round_bit: int
    sticky: int
    tie: Tie
    from_tie: Number
    residual: Number
    toward_zero: Number
    away: Number
    rounded: Number
    direction: Direction
    error: Number
    ulp: Number
    without_residual: Counterfactual | None
    schema: Literal["attn-diag-addition"] = "attn-diag-addition"
    schema_version: Literal[1] = 1

    def renderables(self) -> Iterator[RenderableType]:
        """The report, piece by piece, for a rich console."""
        from attn_diag.reports.microscope import addition_renderables

        yield from addition_renderables(self)


@dataclass(frozen=True)
class Site:
    """One rounding of the walked element.

    ``name``: the recipe's field (range_pv, accumulator, out); ``step``: which of its roundings (product, rescale,
    addition, numerator, cast). ``keys``: [start, stop) of its key range, None at the last ones. ``error`` = after -
    before; ``contribution``: what that makes of O.
    """

    name: str
    step: str
    format: str
    split: int
    keys: tuple[int, int] | None
    before: Number
    after: Number
    error: Number
    contribution: Number


@dataclass(frozen=True)
class Term:
    """A key's part in the sum: ``position`` counts visible keys in the recipe's order, from 1; ``key`` is its index.

    ``probs``, ``cast_probs``: P_bar before and after its cast, relative to the maximum that far; ``value`` = V;
    ``product`` = cast P_bar V relative to the final maximum; ``unit``: P_bar = 1 there. ``error_before`` and
    ``error_after`` it: the prefix error.
    """

    position: int
    key: int
    probs: Number
    cast_probs: Number
    value: Number
    product: Number
    unit: bool
    error_before: Number
    error_after: Number


@dataclass(frozen=True)
class Point:
    """The prefix error after ``position`` keys (see Curve); ``unit``: P_bar = 1 at this key."""

    position: int
    key: int
    error: Number
    rounding_error: Number
    unit: bool


@dataclass(frozen=True)
class Curve:
    """O_bar_err(t), the prefix error of Figure 6 of Qiu & Yao (arXiv 2510.04212), over the visible keys in order.

    ``error`` at t = held(t) - sum_{j <= t} exp(S_j - m) V_j, S in float64 and m the recipe's final maximum; held(t) is
    O_bar as the recipe would hold it were key t the last: with the roundings of range_pv and accumulator if it has any,
    else the running sum rounded to ``format``, that of O ("what rounding O_bar would do"). ``rounding_error``: the same
    against sum cast(P_bar_j) V_j, the recipe's own terms: without what the scores and the cast of P_bar make.
    ``points``: at most 512, always with those of P_bar = 1 (thinned evenly if they alone are more). ``keys``: all.
    """

    format: str
    keys: int
    unit_keys: int
    points: tuple[Point, ...]


@dataclass(frozen=True)
class Element:
    """The closed form for this element (``attn_diag.closed_form``): its class, base, residual, and the error of O."""

    kind: Class
    unit_keys: int
    base: Number
    residual: Number
    predicted_error: Number


@dataclass(frozen=True)
class Explained:
    """Predicted beside measured signed errors, over ``n`` values; None where nothing was measured to differ.

    ``projection`` = <predicted, measured> / ||measured||^2; ``share`` = 1 - ||measured - predicted||^2 /
    ||measured||^2, the share of the squared error that the closed form explains (negative: it makes it worse).
    """

    n: int
    predicted_sum: Number
    measured_sum: Number
    predicted_rms: Number
    measured_rms: Number
    correlation: Number | None
    projection: Number | None
    share: Number | None


@dataclass(frozen=True)
class ClosedFormTotals:
    """What the closed form says of one head.

    ``site``: "O_bar" or "O", what the recipe rounds, to ``format`` (None: to no nearest-even format, nothing is
    predicted). ``rows`` and ``elements`` by class (a row is a tie where one of its features is, else swamped where one
    is), ``error_share``: of O's squared error, by the elements' class. ``o``, ``delta``: see Explained; delta's needs
    dO. ``before``: likewise, with what the recipe lost before that rounding (scores, P_bar, l) as the prediction.
    ``dq_predicted``, ``dq_measured``: ||alpha Delta_delta (PK)|| / ||dQ_ref|| from either. ``statement``: in words.
    """

    recipe: str
    site: str
    format: str | None
    rows: dict[str, int]
    elements: dict[str, int]
    error_share: dict[str, Number]
    o: Explained
    delta: Explained | None
    before: Explained
    dq_predicted: Number | None
    dq_measured: Number | None
    statement: str


@dataclass(frozen=True)
class ClosedFormRows:
    """Row by row, over the rows that were usable: how many unit keys, tied and swamped features; errors summed over
    features, and through dO into delta (empty without dO)."""

    row: tuple[int, ...]
    unit_keys: tuple[int, ...]
    tied: tuple[int, ...]
    swamped: tuple[int, ...]
    predicted_o: tuple[Number, ...]
    measured_o: tuple[Number, ...]
    predicted_delta: tuple[Number, ...]
    measured_delta: tuple[Number, ...]


@dataclass(frozen=True, repr=False)
class ClosedForm(Result):
    """The closed form for one head: totals, and row by row."""

    source: str
    observation: str | None
    layer: int | None
    batch: int
    head: int
    totals: ClosedFormTotals
    by_row: ClosedFormRows
    schema: Literal["attn-diag-closed-form"] = "attn-diag-closed-form"
    schema_version: Literal[1] = 1

    def renderables(self) -> Iterator[RenderableType]:
        """A paragraph."""
        from attn_diag.reports.microscope import closed_form_renderables

        yield from closed_form_renderables(self.totals)


@dataclass(frozen=True, repr=False)
class Microscope(Result):
    """One element of O under the microscope.

    ``row``, ``feature``, and ``chosen``: how they came to be. ``observed``: captured O (None: there is none);
    ``walked``: as walked here, ``emulated``: as the recipe's emulation has it, ``bit_equal``: whether these two agree;
    ``reference``: float64's; ``rounded_reference``: that rounded once to O's format, with spacing ``ulp``. ``error`` =
    observed (else walked) - reference; ``excess`` = that - rounded_reference. ``sites``: every rounding of the sum, its
    contribution to O; ``before_sum``: what of walked - reference is left: scores, P_bar, l, fp32. ``decisive``: the
    index of the site with the largest contribution (None: the recipe rounds nothing), examined in ``addition`` as if to
    nearest even. ``terms``: the P_bar = 1 and the largest ones, in order. ``closed_form``: of the whole head.
    """

    source: str
    observation: str | None
    recipe: str
    recipe_reason: str
    layer: int | None
    batch: int
    head: int
    row: int
    feature: int
    chosen: str
    keys: int
    ranges: int
    splits: int
    observed: Number | None
    walked: Number
    emulated: Number
    bit_equal: bool
    reference: Number
    rounded_reference: Number
    error: Number
    excess: Number
    ulp: Number
    sites: tuple[Site, ...]
    before_sum: Number
    decisive: int | None
    addition: Addition | None
    terms: tuple[Term, ...]
    curve: Curve
    element: Element
    closed_form: ClosedFormTotals | None
    tool: Tool
    schema: Literal["attn-diag-microscope"] = "attn-diag-microscope"
    schema_version: Literal[1] = 1

    def renderables(self) -> Iterator[RenderableType]:
        """The report, piece by piece, for a rich console."""
        from attn_diag.reports.microscope import microscope_renderables

        yield from microscope_renderables(self)
