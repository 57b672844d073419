"""Faults of fake quantisers, written by hand in plain torch as programs have them, without ``attn_diag.quantize``."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

Fault = tuple[str, Callable[[Tensor], Tensor], str]


@dataclass(frozen=True)
class ByHand:
    """Integers of so many bits for groups of a row: scales, codes and values in fp32."""

    bits: int
    group: int
    asymmetric: bool = False
    least: float = 1e-12

    @property
    def ends(self) -> tuple[int, int]:
        high = 2 ** (self.bits - 1) - 1
        return (-high - 1 if self.asymmetric else -high), high

    def grouped(self, w: Tensor) -> Tensor:
        return w.reshape(len(w), -1, self.group)

    def scales(self, w: Tensor) -> tuple[Tensor, Tensor]:
        """[R, G, 1] each."""
        low, high = self.ends
        groups = self.grouped(w)
        if not self.asymmetric:
            scale = (groups.abs().amax(-1, keepdim=True) / high).clamp(min=self.least)
            return scale, torch.zeros_like(scale)
        least = groups.amin(-1, keepdim=True).clamp(max=0)
        scale = ((groups.amax(-1, keepdim=True).clamp(min=0) - least) / (high - low)).clamp(min=self.least)
        return scale, low - (least / scale).round()

    def codes(self, w: Tensor, scale: Tensor, zero: Tensor, *, clip: bool = True) -> Tensor:
        codes = (self.grouped(w) / scale).round() + zero
        return codes.clamp(*self.ends) if clip else codes

    def values(self, w: Tensor, codes: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
        return ((codes - zero) * scale).reshape(w.shape)

    def __call__(self, w: Tensor) -> Tensor:
        scale, zero = self.scales(w)
        return self.values(w, self.codes(w, scale, zero), scale, zero)


INT4, INT8 = ByHand(4, 32), ByHand(8, 256)
UINT4, UINT8 = ByHand(4, 32, asymmetric=True), ByHand(8, 256, asymmetric=True)
Move = Callable[[Tensor], Tensor]


def moved(by: ByHand, move: Move, where: str, *, zeros: bool = False) -> Callable[[Tensor], Tensor]:
    """The scales (and zero points) of other groups: where is divided, where is multiplied, or both."""

    def wrong(w: Tensor) -> Tensor:
        scale, zero = by.scales(w)
        other, other_zero = move(scale), move(zero) if zeros else zero
        codes = by.codes(w, *((scale, zero) if where == "multiplied" else (other, other_zero)))
        return by.values(w, codes, *((scale, zero) if where == "divided" else (other, other_zero)))

    return wrong


def before(dim: int) -> Move:
    return lambda s: torch.cat([s.narrow(dim, 0, 1), s.narrow(dim, 0, s.shape[dim] - 1)], dim)


def transposed(s: Tensor) -> Tensor:
    return s.squeeze(-1).T.reshape(s.shape)


def zero_off(by: ByHand, n: int, *, after: bool = False) -> Callable[[Tensor], Tensor]:
    def wrong(w: Tensor) -> Tensor:
        scale, zero = by.scales(w)
        codes = by.codes(w, scale, zero + n)
        return by.values(w, codes, scale, zero + n * after)

    return wrong


def clipped_short(by: ByHand) -> Callable[[Tensor], Tensor]:
    """The largest code is never used."""

    def wrong(w: Tensor) -> Tensor:
        scale, zero = by.scales(w)
        return by.values(w, by.codes(w, scale, zero).clamp(max=by.ends[1] - 1), scale, zero)

    return wrong


def with_zero(by: ByHand, zero: int) -> Callable[[Tensor], Tensor]:
    """The same zero point for all groups."""

    def wrong(w: Tensor) -> Tensor:
        scale, own = by.scales(w)
        other = torch.full_like(own, zero)
        return by.values(w, by.codes(w, scale, other), scale, other)

    return wrong


def unsigned_alone(by: ByHand) -> Callable[[Tensor], Tensor]:
    """Codes from 0 on times their scale: the zero point is lost."""

    def wrong(w: Tensor) -> Tensor:
        scale, zero = by.scales(w)
        return by.values(w, by.codes(w, scale, zero) - by.ends[0], scale, 0 * zero)

    return wrong


def with_scale(by: ByHand, scale_of: Callable[[Tensor], Tensor], **options: bool) -> Callable[[Tensor], Tensor]:
    """With scales of one's own, [R, G, 1] of the groups."""

    def made(w: Tensor) -> Tensor:
        scale = scale_of(by.grouped(w))
        zero = torch.zeros_like(scale)
        return by.values(w, by.codes(w, scale, zero, **options), scale, zero)

    return made


def wrapped(w: Tensor) -> Tensor:
    """INT8 of an amax that is too small, stored by a cast that keeps the last eight bits."""
    scale = w.abs().amax(1, keepdim=True) * 0.6 / 127
    return (w / scale).round().int().to(torch.int8).float() * scale


def nibbles(w: Tensor) -> Tensor:
    scale, zero = INT4.scales(w)
    codes = INT4.codes(w, scale, zero).reshape(len(w), -1, 2).flip(-1).reshape(len(w), -1, 32)
    return INT4.values(w, codes, scale, zero)


def unsigned(w: Tensor) -> Tensor:
    scale, zero = INT4.scales(w)
    return INT4.values(w, INT4.codes(w, scale, zero) % 16, scale, zero)


def earlier(groups: Tensor) -> Tensor:
    """Scales of a weight some steps ago: each group's amax between 0.9 and 1.15 times today's."""
    g = torch.Generator().manual_seed(int(groups.abs().sum() * 1e4) % 2**31)
    return groups.abs().amax(-1, keepdim=True) * (0.9 + 0.25 * torch.rand(*groups.shape[:2], 1, generator=g))


def of_history(by: ByHand) -> Callable[[Tensor], Tensor]:
    high = by.ends[1]
    return with_scale(by, lambda groups: earlier(groups) / high)


def maximum_for_minimum(w: Tensor) -> Tensor:
    scale, _ = UINT8.scales(w)
    zero = -128 - (UINT8.grouped(w).amax(-1, keepdim=True) / scale).round()
    return UINT8.values(w, UINT8.codes(w, scale, zero), scale, zero)


def range_over_256(w: Tensor) -> Tensor:
    scale, _ = UINT8.scales(w)
    scale = scale * 255 / 256
    zero = -128 - (UINT8.grouped(w).amin(-1, keepdim=True).clamp(max=0) / scale).round()
    return UINT8.values(w, UINT8.codes(w, scale, zero), scale, zero)


def biased_dither(w: Tensor) -> Tensor:
    """Up with a probability that is too large by a fifth of a step."""
    scale, _ = INT4.scales(w)
    steps = INT4.grouped(w) / scale
    g = torch.Generator().manual_seed(int(w.abs().sum() * 1e4) % 2**31)
    draws = torch.rand(steps.shape, generator=g) - 0.2
    return ((steps.floor() + (draws < steps - steps.floor())).clamp(-7, 7) * scale).reshape(w.shape)


def power(how: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return with_scale(INT4, lambda groups: how((groups.abs().amax(-1, keepdim=True) / 7).log2()).exp2())


# What is declared, what was done, and the words that must name it.
BY_HAND: dict[str, Fault] = {
    "zero point one too high before clipping": (
        "int4-asymmetric", zero_off(UINT4, 1), "the zero point off by +1 before clipping:"),
    "zero point one too low before clipping": (
        "int8-asymmetric", zero_off(UINT8, -1), "the zero point off by -1 before clipping:"),
    "zero point one too high throughout": (
        "int4-asymmetric", zero_off(UINT4, 1, after=True), "the zero point off by +1 before clipping and after, "
        "or codes clipped one below the largest:"),
    "clipped one below the largest": ("int8", clipped_short(INT8), "codes clipped one below the largest:"),
    "a zero point that is lost": (
        "int4-asymmetric", with_zero(UINT4, 0), "a zero point of 0:"),
    "a zero point of unsigned codes that is lost": (
        "int4-asymmetric", with_zero(UINT4, UINT4.ends[0]), "a zero point of 0, of unsigned codes:"),
    "unsigned codes without their zero point": (
        "int4-asymmetric", unsigned_alone(UINT4), "no zero point subtracted from unsigned codes:"),
    "multiplied by the scales of the row before": (
        "int4", moved(INT4, before(0), "multiplied"), "multiplied by the scales of the row before:"),
    "scales of the row before": ("int8", moved(INT8, before(0), "both"), "the scales of the row before:"),
    "scales of the group before": ("int4", moved(INT4, before(1), "both"), "the scales of the block before:"),
    "divided by the scales of the group before": (
        "int4", moved(INT4, before(1), "divided"),
        "divided by the scales of the block before, multiplied by their own:"),
    "multiplied by transposed scales": (
        "int4", moved(INT4, transposed, "multiplied"), "multiplied by transposed scales:"),
    "transposed scales": ("int4", moved(INT4, transposed, "both"), "transposed scales:"),
    "scales and zero points of the group before": (
        "int4-asymmetric", moved(UINT4, before(1), "multiplied", zeros=True),
        "multiplied by the scales and zero points of the block before:"),
    "a running amax": (
        "int4", moved(INT4, lambda s: s.cummax(1).values, "both"), "the largest scale of the blocks so far:"),
    "amax of a history, groups": ("int4", of_history(INT4), "scales that are 0.9"),
    "amax of a history, rows": ("int8", of_history(INT8), "scales that are 0.9"),
    "codes that wrap": (
        "int8", wrapped, "an amax 0.6 times the data's, codes that wrap around instead of being clipped:"),
    "codes that are not clipped": (
        "int4", with_scale(INT4, lambda groups: groups.abs().amax(-1, keepdim=True) / 8, clip=False),
        "amax mapped to 8, "),
    "qmax 128 for 127": (
        "int8", with_scale(INT8, lambda groups: groups.abs().amax(-1, keepdim=True) / 128), "amax mapped to 128:"),
    "qmax 8 for 7": (
        "int4", with_scale(INT4, lambda groups: groups.abs().amax(-1, keepdim=True) / 8), "amax mapped to 8:"),
    "maximum for the minimum": (
        "int8-asymmetric", maximum_for_minimum, "a zero point made of the maximum instead of the minimum:"),
    "range over 256": ("int8-asymmetric", range_over_256, "scales of the range over 2^bits, not over 2^bits - 1:"),
    "two nibbles swapped": ("int4", nibbles, "the two codes of a byte swapped:"),
    "unsigned codes": ("int4", unsigned, "codes read as unsigned:"),
    "quantised in groups of 128 before": (
        "int4", lambda w: INT4(replace(INT4, group=128)(w)), "w quantised before, by blocks of 128:"),
    "quantised to INT8 before": ("int4", lambda w: INT4(INT8(w)), "w quantised before, by int8:"),
    "power of two above": ("int4", power(torch.ceil), "scales rounded to e8m0:up:"),
    "power of two below": ("int4", power(torch.floor), "scales rounded to e8m0:down:"),
}  # fmt: skip


def learned(by: ByHand) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    """LSQ as it begins (Esser et al., arXiv 1902.08153): clipping beyond scales of 2 mean|w| / sqrt(largest), and these
    scales times the largest number, [R, G]."""

    def scale_of(groups: Tensor) -> Tensor:
        size = groups.abs().mean(-1, keepdim=True).clamp(min=by.least)
        return 2 * size / math.sqrt(by.ends[1])

    return with_scale(by, scale_of), lambda w: scale_of(by.grouped(w)).squeeze(-1) * by.ends[1]
