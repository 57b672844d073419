"""A quantiser that may have made some values, what it makes, and how much of the values that is."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from attn_diag.kernels.elements import CodeBook
from attn_diag.kernels.formats import Mode, Rounding
from attn_diag.kernels.quantize import Quantized, quantize, spread
from attn_diag.kernels.quantizers import Quantizer
from attn_diag.testing.quantizing.mistakes import QuantizerMistake
from attn_diag.testing.quantizing.own_format import CASTS, in_own_format
from attn_diag.testing.quantizing.scales import per_block

# Fewer elements that differ than this are last bits and ties that an order of operations decides.
SAME = 0.999
# A drawn value is the farther neighbour as often as it is the nearer one's distance over the gap: a rule makes it so
# never (to nearest) or twice as often (directed, or on every second number). Half way between is the limit.
_DRAWN = 0.5
# The same of numbers that are counted: four standard deviations.
_DRAWN_DEVIATIONS = 4.0
# Bins of the distance from the nearer neighbour: values that lie on every second number are farther in each alike.
_BINS = 4
# What a factor that is read off the values leaves of its own rounding.
_FACTOR_TOLERANCE = 2.0**-18
# Two roundings to fp32: of a code times a scale, and of the scale, which others keep in float64.
_LAST_BITS = 2.0**-22
DECLARED = "as declared"


@dataclass(frozen=True)
class PossibleQuantizer:
    """A quantiser that may have made the values."""

    by: Quantizer
    words: str
    """How it differs from the declared one."""
    zero_shift: int = 0
    """The zero point is off by so much."""
    amax_factor: float | None = None
    """The scales are those of so many times the data's amax."""
    gain: float = 1.0
    """The values are so many times what it makes."""
    cast: str = ""
    """w is rounded to this 16-bit format first; empty: it is not."""
    amax: Tensor | None = field(default=None, compare=False)
    """What the scales are made of in place of the data's amax, for each block."""
    mistake: QuantizerMistake | None = field(default=None, compare=False)
    """What is done wrong with its codes or scales."""
    own_format: str = ""
    """Computed in w's own 16-bit format, which the scales have too, in this order (``own_format``); empty: it is not.
    """

    @property
    def declarable(self) -> bool:
        """Whether ``by`` alone says what it is."""
        return not (self.at_fault or self.other_scales or self.cast)

    @property
    def fitted(self) -> bool:
        """Whether a number of it was read off the values."""
        return self.gain != 1 or self.amax_factor is not None

    @property
    def at_fault(self) -> bool:
        """Whether nobody would mean it so."""
        return bool(self.zero_shift or self.mistake or self.gain != 1)

    @property
    def other_scales(self) -> bool:
        """Whether its scales are not made of the data's amax."""
        return self.amax_factor is not None or self.amax is not None

    def made_of(self, w: Tensor) -> Tensor | None:
        """What its scales are made of, for each block; None: w's own amax."""
        if self.amax_factor is None:
            return self.amax
        own = quantize(w, replace(self.by, scale="fp32", least_scale=0.0))
        return own.scale * self.by.mapped * self.amax_factor

    def values(self, w: Tensor) -> Quantized:
        """What it makes of ``w``."""
        w = w.to(CASTS[self.cast]).to(w.dtype) if self.cast else w
        found = self._values(w)
        if self.mistake is not None:
            found = replace(found, values=self.either(w)[0])
        return found if self.gain == 1 else replace(found, values=found.values * self.gain)

    def either(self, w: Tensor) -> list[Tensor]:
        """The values that a mistake can make: each element has one of these."""
        assert self.mistake is not None
        return self.mistake.values(w, self.by, self._values(w), self.own_format)

    def _values(self, w: Tensor) -> Quantized:
        rows = self.by.block_shape((w.shape[0], w.shape[1]))[0]
        amax = self.made_of(w) if self.amax is None else self.amax[: -(-len(w) // max(rows, 1))]
        order = self.own_format
        found = in_own_format(w, self.by, order, amax) if order else quantize(w, self.by, amax=amax)
        if not self.zero_shift or found.zero_point is None:
            return found
        zero, scale = (spread(x, (w.shape[0], w.shape[1]), self.by).double() for x in (found.zero_point, found.scale))
        values = (found.codes.double() - zero - self.zero_shift) * scale
        return replace(found, values=values.to(found.values.dtype))


def equal_values(candidate: PossibleQuantizer, w: Tensor, observed: Tensor) -> Tensor:
    """Which elements have the candidate's value, bool; drawn ones may have either neighbour's."""
    if candidate.mistake is not None:
        either = [_alike(candidate, made, w, observed) for made in candidate.either(w)]
        return torch.stack(either).any(0)
    base, _, mode = candidate.by.elements.partition(":")
    modes = (Mode.UP, Mode.DOWN) if mode == Mode.STOCHASTIC else (mode or Mode.NEAREST_EVEN,)
    equal = torch.zeros_like(observed, dtype=torch.bool)
    for one in modes:
        made = replace(candidate, by=replace(candidate.by, elements=f"{base}:{one}")).values(w).values
        equal |= _alike(candidate, made, w, observed)
    return equal


def share_of(candidate: PossibleQuantizer, w: Tensor, observed: Tensor) -> float:
    """The part of the elements that have the candidate's value, of those that tell.

    Blocks of zeros do not, whose scale is whatever the program keeps for them, nor do zeros that stay zeros.
    """
    equal = equal_values(candidate, w, observed)
    tells = in_filled_blocks(w, candidate.by) & ~((w == 0) & (observed == 0))
    return float((equal[tells] if bool(tells.any()) else equal).double().mean())


def in_filled_blocks(w: Tensor, by: Quantizer) -> Tensor:
    """Which elements share a scale with one that is not 0, bool: of the others' scale nothing is known."""
    if bool((w != 0).all()):
        return torch.ones_like(w, dtype=torch.bool)
    plain = Quantizer("amax", "int8", by.block)
    return spread(quantize((w != 0).float(), plain).scale, (w.shape[0], w.shape[1]), by) > 0


def _alike(candidate: PossibleQuantizer, made: Tensor, w: Tensor, observed: Tensor) -> Tensor:
    """Where ``observed`` is what the candidate made, bool."""
    same = torch.zeros_like(observed, dtype=torch.bool)
    if not candidate.other_scales and candidate.gain == 1 and candidate.by.scale_of == "amax":
        same = made.to(observed.dtype) == observed
        slack = _LAST_BITS if observed.dtype in (torch.float32, torch.float64) else 0.0
    elif candidate.by.scale_of == "mean" and observed.dtype in CASTS.values():
        same, slack = made.to(observed.dtype) == observed, 0.0
    else:
        slack = max(_FACTOR_TOLERANCE, torch.finfo(observed.dtype).eps)
    if observed.dtype == w.dtype and w.dtype in CASTS.values():
        # w + (Q(w) - w).detach(), as programs write a straight-through gradient, rounds twice more.
        same |= w + (made.to(w.dtype) - w) == observed
    size = made.double().abs()
    if candidate.by.zero_point == "float":  # the difference of two numbers that are as large as the block's
        size = spread(per_block(size, candidate.by), (made.shape[0], made.shape[1]), candidate.by) * 2
    return same | ((made.double() - observed.double()).abs() <= slack * size)


def strays(candidate: PossibleQuantizer, w: Tensor, observed: Tensor) -> Tensor:
    """Where values are farther from the candidate's than a tie or a last bit takes them, bool: more than a number."""
    made = candidate.values(w)
    shape = w.shape[0], w.shape[1]
    scale = spread(made.scale, shape, candidate.by).double().abs() * candidate.gain
    if made.tensor_scale is not None:
        scale = scale * made.tensor_scale.double()
    elements = candidate.by.parsed_elements
    step = torch.ones_like(made.codes, dtype=torch.float64)
    if isinstance(elements, CodeBook):
        step = elements.spacing(made.codes.double())
    elif isinstance(elements, Rounding):
        fmt = elements.format
        least = 2.0 ** (fmt.min_exponent - fmt.mantissa_bits)
        step = (made.codes.double().abs() * 2.0**-fmt.mantissa_bits).clamp(min=least)
    apart = (made.values.double() - observed.double()).abs()
    # The other number of a tie may be the larger of the two, and is rounded to its own format.
    slack = torch.finfo(observed.dtype).eps * torch.maximum(made.values.double().abs(), observed.double().abs())
    # Where a block's own scale becomes 0, others keep their smallest one; but of zeros any scale makes zeros.
    lost = (apart > step * scale * (1 + _FACTOR_TOLERANCE) + slack) & (scale > 0)
    return lost | (~in_filled_blocks(w, candidate.by) & (observed != 0))


def is_drawn(candidate: PossibleQuantizer) -> bool:
    """Whether its elements are rounded stochastically."""
    return candidate.by.elements.endswith(Mode.STOCHASTIC)


def looks_drawn(candidate: PossibleQuantizer, w: Tensor, observed: Tensor) -> bool:
    """Whether values are the farther neighbour about as often as drawn ones are."""
    base = candidate.by.elements.partition(":")[0]
    up, down = (
        replace(candidate, by=replace(candidate.by, elements=f"{base}:{mode}")).values(w).values.double()
        for mode in (Mode.UP, Mode.DOWN)
    )
    between = up > down
    part = ((w.double() - down) / (up - down))[between].clamp(0, 1)
    near = torch.minimum(part, 1 - part)
    upward = ((observed - up).abs() < (observed - down).abs())[between]
    farther = (upward != (part > 0.5)).double()
    bins = (near * 2 * _BINS).long().clamp(max=_BINS - 1)
    expected, counted = (torch.zeros(_BINS, dtype=torch.float64).index_add_(0, bins.cpu(), x.cpu()) for x in
                         (near, farther))  # fmt: skip
    off = (counted - expected).abs()
    allowed = torch.maximum(_DRAWN * expected, _DRAWN_DEVIATIONS * expected.sqrt())
    total = float(expected.sum())
    return total > 0 and abs(float(counted.sum()) / total - 1) < _DRAWN and bool((off <= allowed).all())
