"""What heads share: findings over layers, heads and steps, as plain frozen dataclasses.

``attn_diag.results.grouping`` makes them of heads that are judged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from attn_diag.results.base import Number
from attn_diag.results.estimates import Label
from attn_diag.results.quality import Pattern, Quantity

Kind = Label | Literal["unjudged"]
"""The label of a finding; unjudged: the metadata of the capture do not fit its tensors."""

# The gravest first.
KINDS: tuple[Kind, ...] = (
    "nonfinite", "wrong", "unjudged", "lossy", "biased", "ill_conditioned", "undecided",
)  # fmt: skip


@dataclass(frozen=True)
class FindingPlace:
    """Layers in which a finding holds in the same heads at the same steps."""

    layers: tuple[int, ...]
    """The model's numbers of the layers; none where captures do not state them."""
    heads: tuple[int, ...]
    """The model's numbers of the heads in which it was found at any of the steps."""
    all_heads: bool
    """Whether these are all heads of the layers that were looked at, and more than one."""
    steps: tuple[int, ...]
    """The steps at which it was found, in order: the first is its onset; none where captures do not state them."""
    steps_looked: tuple[int, ...]
    """The steps at which these layers were looked at."""


@dataclass(frozen=True)
class FindingAtStep:
    """A finding at one step: the worst of its heads there; where none has it, of its layers' heads."""

    step: int
    """The training step."""
    label: Kind | None
    """The gravest label of the finding's heads there; null: they carry none."""
    heads: int
    """Heads with the finding at this step."""
    of: int
    """Heads of its layers looked at there."""
    factor: Number | None
    """Largest factor over a well-rounded kernel's error; null: not compared."""
    dq_error: Number | None
    """Largest relative error of dQ, or of its prediction; null: unknown."""
    dw_q_error: Number | None
    """The same of dW_Q."""


@dataclass(frozen=True)
class WorstHead:
    """The head that shows a finding best, to look at closely."""

    source: str
    """The capture's file, or "memory"."""
    observation: str
    """The observation's name."""
    layer: int | None
    """The model's number of the layer; null: not stated."""
    head: int | None
    """The model's number of the head; null: all heads of the capture."""
    batch: int | None
    """The batch item, where one of several was looked at; null otherwise."""
    step: int | None
    """The training step; null: not stated."""


@dataclass(frozen=True)
class OtherCause:
    """What heads of a finding show whose cause is known, and not the worst head's."""

    heads: int
    """How many."""
    layer: int | None
    """The layer of the worst of them; null: not stated."""
    head: int | None
    """Which head it is."""
    words: str
    """What it shows, in words with numbers."""


@dataclass(frozen=True)
class SharedFinding:
    """What was found in a group of heads that share it."""

    label: Kind
    """What it is: the gravest label of its heads."""
    also: tuple[Label, ...]
    """Labels that heads among them carry besides."""
    observations: tuple[str, ...]
    """The observations in which it was found; several only of heads that are fragile whatever kernel runs them."""
    captured: bool
    """Whether a kernel returned them; false: a recipe was run on the captured inputs."""
    kernel: str | None
    """The kernel that the captures state; null: none."""
    places: tuple[FindingPlace, ...]
    """Where, layers with the same heads and steps together, the earliest first."""
    ranks: tuple[str, ...]
    """The ranks in whose captures it was found, where several ranks have captures of their own; else none."""
    heads: int
    """Heads (a head at each step counts) with the finding."""
    of: int
    """Heads of the same observation and kernel that were looked at."""
    site: str | None
    """What the kernel's recipe, recognised by its bits, rounds more coarsely than published kernels, or what its dK and
    dV show of that; null: unknown."""
    quantities: tuple[Quantity, ...]
    """The captured quantities that have it, in the order of the computation."""
    right: tuple[Quantity, ...]
    """Of the worst head, the captured quantities that are as good as a well-rounded kernel's."""
    factors: dict[Quantity, Number]
    """Of the worst head, how many times a well-rounded kernel's error each of them has, the largest first."""
    factor_ci95: tuple[Number, Number] | None
    """The 95 % interval of the first of these; null where there is none."""
    p_adjusted: Number | None
    """Smallest adjusted p-value of a mean's test among its heads; null: nothing was tested."""
    dq_error: Number | None
    """Largest relative error of dQ; where dQ was not captured, of its prediction from delta; null: unknown."""
    dq_error_well_rounded: Number | None
    """The relative error of a well-rounded kernel's dQ in the head of ``dq_error``; null: not compared."""
    dw_q_error: Number | None
    """Largest relative error of dW_Q, or of its prediction; null: unknown."""
    gradients: Literal["observed", "predicted"] | None
    """Whether dQ was captured, or its error predicted from that of delta; null: neither."""
    biased_mean: Literal["delta", "delta_excess", "o_away_excess", "o_excess"] | None
    """Of a biased head, the mean that is furthest beyond chance; null: the finding is another."""
    biased_by: Number | None
    """That mean, in ulp (of delta: in units of what one correct rounding of O makes of delta); null: as before."""
    earlier: dict[Label, int]
    """Graver at last: lesser labels that the same heads had at other steps, each with the first of these."""
    by_step: tuple[FindingAtStep, ...]
    """Step by step, where captures state steps: does it grow?"""
    worst: WorstHead
    """The head that shows it best."""
    words: str
    """Why, of that head, in words with numbers."""
    pattern: str | None = None
    """Of that head, where and how it is off, in words; null: no pattern was found."""
    typical_factor_ci95: tuple[Number, Number] | None = None
    """As ``factor_ci95``, with every row's errors in units of its own noise: of O and gradients either shows lossy."""
    other_ranks: tuple[str, ...] | None = None
    """With ``ranks``: other ranks whose captures hold the same heads, and in which it was not found; none: theirs are
    other heads; null: not known, in older documents."""
    declared: str | None = None
    """The recipe below 16 bits that the worst head is declared to be and is held against, in the place of a
    well-rounded kernel; null: none."""
    carrier: str | None = None
    """Of fragile heads, the part of dQ's error that carries most of it in the worst head: delta, lse, ds_cast or
    dq_cast; null: unknown, or the finding is another."""

    errors: dict[Quantity, Number] | None = None
    """Of ``quantities``, the largest relative error of each among the heads; null: not known, in older documents."""
    cause: Pattern | None = None
    """The pattern that ``pattern`` says; null: none was found, or it is not known, in older documents."""
    otherwise: tuple[OtherCause, ...] = ()
    """Causes that other heads of the finding show, the commonest first; none: none is known that differs."""
    unexplained: tuple[Quantity, ...] = ()
    """Wrong quantities of the worst head that its ``cause``, a format below 16 bits, does not explain."""
    alike: int | None = None
    """Heads that show the worst head's cause; null: it is not known."""

    @property
    def layers(self) -> tuple[int, ...]:
        """All its layers."""
        return tuple(sorted({layer for place in self.places for layer in place.layers}))

    @property
    def formats(self) -> dict[str, str]:
        """Operands that lost their bits below 16, as in its ``cause``."""
        return {} if self.cause is None else self.cause.formats

    @property
    def of_few_bits(self) -> bool:
        """Whether operands of fewer than 8 bits might make what is wrong: it is only known how far off it is."""
        # Older documents have a pattern's words alone.
        few = self.pattern is None if self.cause is None else self.cause.of_few_bits
        return self.label == "wrong" and few

    @property
    def rounding_known(self) -> bool:
        """Whether what rounds is named, or where and how it is off."""
        return bool(self.site or self.pattern) or "as where" in self.words

    @property
    def onset(self) -> int | None:
        """The first step at which it was found; None where captures do not state steps."""
        return min((place.steps[0] for place in self.places if place.steps), default=None)
