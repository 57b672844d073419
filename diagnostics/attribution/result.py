"""What ``attribute`` returns: every rounding site's part in the errors of O, delta, dQ and dW_Q."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from attn_diag.plain import Number, Tool
from attn_diag.result import Result

if TYPE_CHECKING:
    from rich.console import RenderableType

Quantity = Literal["o", "delta", "dq", "dw_q"]
QUANTITIES = ("o", "delta", "dq", "dw_q")


@dataclass(frozen=True)
class MeanError:
    """A mean signed error and its uncertainty: O's away from zero in ulp (clustered by the row's top key), delta's in
    noise floors and dQ's in ulp (by row). dW_Q has no rows: the error's part along it, <error, dW_Q> / ||dW_Q||^2.

    ``n_eff``: how many clusters or rows carry it in effect; below 4 the test leans on few of them. ``p_adjusted``:
    Benjamini-Hochberg over the sites of one quantity.
    """

    mean: Number
    standard_error: Number | None = None
    n_eff: Number | None = None
    p_value: Number | None = None
    p_adjusted: Number | None = None


@dataclass(frozen=True)
class Effect:
    """What one site does to one quantity.

    Sizes are ||error|| / ||reference|| (delta: the noise factor): ``alone`` with this site as the only one that rounds
    (besides fp32 arithmetic, which comes first), ``repaired`` with it exact and all others as they are, ``sham`` with
    its rounding errors' signs drawn at random (equal variance, no bias). ``share``: the site's Shapley value of the
    squared size over the total; shares of a quantity add up to 1. ``share_error``: its standard error where orders
    were sampled. ``bias``: its Shapley value of the mean signed error; ``bias_repaired`` and ``bias_sham`` are what is
    left of the total.
    """

    share: Number
    share_error: Number | None
    alone: Number
    repaired: Number
    sham: Number | None
    bias: MeanError | None = None
    bias_alone: Number | None = None
    bias_repaired: Number | None = None
    bias_sham: Number | None = None


@dataclass(frozen=True)
class SiteAttribution:
    """One rounding site and its effects by quantity (o, delta, dq, dw_q)."""

    site: str
    words: str
    format: str | None
    effects: dict[str, Effect]


@dataclass(frozen=True)
class Total:
    """One quantity's error under the whole recipe, with every site exact, and as captured (None: not captured)."""

    error: Number
    exact: Number
    captured: Number | None
    bias: MeanError | None = None


@dataclass(frozen=True)
class Repair:
    """Sites made exact one after the other, the guiltiest of dQ (or O) first: what is left after each."""

    site: str
    left: dict[str, Number]


@dataclass(frozen=True)
class Twin:
    """The recipe with every rounding to a format stochastic, over ``seeds`` draws; sums and exp stay as they are.

    A bias that vanishes came from the rounding mode, one that stays from elsewhere, such as the curvature of exp.
    """

    seeds: int
    sizes: dict[str, Number]
    bias: dict[str, MeanError]


@dataclass(frozen=True)
class RowKind:
    """Rows of one kind: how many, and their shares of dQ's (without dO: O's) squared error and squared norm."""

    rows: int
    error_share: Number | None
    reference_share: Number | None


@dataclass(frozen=True)
class HeadAttribution:
    """One head's errors, attributed. ``orders``: how many orders were sampled, None where all subsets were run.

    ``inert``: a site that reaches none of the quantities, and the largest change that repairing it made (the other
    sham). ``guilty``: by quantity, the site with the largest share; ``biased``: by quantity, the site with the
    largest significant mean error. ``reasons``: all of it in words.
    """

    layer: int | None
    batch: int | None
    head: int
    rows: int
    recipe: str
    recipe_json: str
    agreement: Number | None
    runs: int
    orders: int | None
    noise_factor: Number | None
    conditioning: Number | None
    totals: dict[str, Total]
    sites: tuple[SiteAttribution, ...]
    inert: tuple[str, Number]
    repairs: tuple[Repair, ...]
    twin: Twin
    row_kinds: dict[str, RowKind]
    guilty: dict[str, str]
    biased: dict[str, str]
    notes: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True, repr=False)
class Attribution(Result):
    """The result of ``attn_diag.attribute``."""

    tool: Tool
    source: str
    observation: str | None
    level: Number
    backend: str
    heads: tuple[HeadAttribution, ...]
    schema: Literal["attn-diag-attribution"] = "attn-diag-attribution"
    schema_version: Literal[1] = 1

    def renderables(self) -> Iterator[RenderableType]:
        """The report, piece by piece, for a rich console."""
        from attn_diag.reports.attribution import attribution_renderables

        yield from attribution_renderables(self)
