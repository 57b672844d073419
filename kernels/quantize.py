"""Quantising a tensor, after the rules of ``kernels.quantizers``."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attn_diag.kernels.elements import CodeBook, Integers
from attn_diag.kernels.formats import Mode, Rounding, parse, round_steps, round_to
from attn_diag.kernels.quantizers import FRAGMENT_ROWS, Quantizer, scale_rounding
from attn_diag.kernels.reciprocals import hopper_quotient

_POWERS = (2.0**-127, 2.0**127)  # what E8M0 reaches


@dataclass(frozen=True)
class Quantized:
    """A tensor [..., R, C] in a quantiser's numbers; of a vector R is 1.

    Scales have one entry a block, or of a block of ``row_groups`` so many rows of them.
    """

    values: Tensor
    """y, of x's shape, in x's dtype (fp32 where x is a 16-bit float) and on its device."""
    codes: Tensor
    """The elements, of x's shape, fp32: integers as numbers, zero point included."""
    scale: Tensor
    """s as codes are multiplied back with, [..., R / r, C / c] rounded up, fp32."""
    zero_point: Tensor | None
    """z, integers in fp32 of the scale's shape; None for symmetric ones."""
    tensor_scale: Tensor | None
    """t, fp32 []; None for one level."""
    clipped: Tensor
    """Where x / s lies past the last number, to nearest by more than half a spacing: bool, of x's shape."""


def quantize(x: Tensor, by: Quantizer, *, amax: Tensor | float | None = None, seed: int = 0) -> Quantized:
    """``x`` in a quantiser's numbers, after the rules above.

    Args:
        x: [..., R, C] or [C], float64, fp32, BF16 or FP16. A last block that is not full counts as filled with zeros.
        by: The quantiser.
        amax: max |x| for the scales instead of x's own, for delayed scaling: a number, or of the scale's shape.
        seed: Starts stochastic roundings; scales draw with seed + 1.

    Raises:
        TypeError: Another dtype.
        ValueError: ``amax`` beside a zero point, a search or stale blocks; none where ``masked``; a stale block that
            is not there.
    """
    if x.dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        raise TypeError(f"quantize expects float64, fp32, BF16 or FP16, got {x.dtype}; convert it first")
    if amax is not None and (not by.symmetric or by.search or by.stale):
        raise ValueError(f"quantizer {by.name}: amax is given only without a zero point, a search and stale blocks")
    if by.masked and amax is None:
        raise ValueError(f"quantizer {by.name}: masked wants the amax of P_bar before its mask; only P_bar has one")
    # Data made with the generator's own seed 0 would go with the draws of seed 0.
    seed = zlib.crc32(f"quantize {seed}".encode())
    wide = x.detach().to(torch.float64 if by.arithmetic == "exact" else torch.float32)
    blocks = _Blocks.of(wide, by)
    if amax is None:
        found = _best(blocks, by, seed)
    else:
        given = torch.as_tensor(amax, dtype=wide.dtype, device=x.device)
        found = _of_amax(
            blocks, by, given.reshape(given.shape or (1, 1)).expand(blocks.scales)[..., None, :, None], seed
        )
    out = x.dtype if x.dtype in (torch.float64, torch.float32) else torch.float32
    whole = blocks.joined
    values = whole(found.values)
    return Quantized(
        values=(values if by.values == "fp32" else round_to(values, parse(by.values))).to(out),
        codes=whole(found.codes).float(),
        scale=found.scale[..., 0, :, 0].float(),
        zero_point=None if found.zero_point is None else found.zero_point[..., 0, :, 0].float(),
        tensor_scale=None if found.tensor_scale is None else found.tensor_scale.float(),
        clipped=whole(found.clipped),
    )


def spread(per_block: Tensor, shape: tuple[int, int], by: Quantizer) -> Tensor:
    """A figure of every block of a matrix, such as a scale, for each of its elements: [R, C]."""
    rows, columns = shape
    across = torch.arange(columns, device=per_block.device) // by.block_shape(shape)[1]
    return per_block[_block_of_rows(rows, by, shape, per_block.device)][:, across]


def _block_of_rows(rows: int, by: Quantizer, shape: tuple[int, int], device: torch.device) -> Tensor:
    """The number of the block of each row, int64 [rows], of a matrix of ``shape``."""
    at, threads = torch.arange(rows, device=device), FRAGMENT_ROWS // by.row_groups
    return at // by.block_shape(shape)[0] * by.row_groups + at % FRAGMENT_ROWS // threads * (by.row_groups > 1)


@dataclass(frozen=True)
class _Blocks:
    """x cut into blocks: [..., R / r, r, C / c, c], filled up with zeros."""

    x: Tensor
    shape: torch.Size
    scales: tuple[int, ...]
    order: Tensor | None
    """Which row each is, where those of one block are not neighbours."""

    @classmethod
    def of(cls, x: Tensor, by: Quantizer) -> _Blocks:
        matrix = x if x.dim() > 1 else x.reshape(1, -1)
        if by.block == "tensor":
            matrix = matrix.reshape(1, -1)
        rows, columns = matrix.shape[-2:]
        r, c = (max(n, 1) for n in by.block_shape((rows, columns)))
        filled = torch.nn.functional.pad(matrix, (0, -columns % c, 0, -rows % r))
        order = None
        if by.row_groups > 1:
            blocks = _block_of_rows(filled.shape[-2], by, (rows, columns), x.device)
            order, r = blocks.argsort(stable=True), r // by.row_groups
            filled = filled.index_select(-2, order)
        scales = (*filled.shape[:-2], filled.shape[-2] // r, filled.shape[-1] // c)
        return cls(filled.reshape(*scales[:-1], r, scales[-1], c), x.shape, scales, order)

    def joined(self, values: Tensor) -> Tensor:
        """Values of x's blocks in x's shape."""
        *outer, down, r, across, c = values.shape
        matrix = values.reshape(*outer, down * r, across * c)
        if self.order is not None:
            matrix = matrix.index_select(-2, self.order.argsort())
        if len(self.shape) < 2 or matrix.numel() == self.shape.numel():
            return matrix.reshape(-1)[: self.shape.numel()].reshape(self.shape)
        return matrix[..., : self.shape[-2], : self.shape[-1]]


@dataclass(frozen=True)
class _Found:
    """The parts of a ``Quantized``, in blocks."""

    values: Tensor
    codes: Tensor
    scale: Tensor
    zero_point: Tensor | None
    tensor_scale: Tensor | None
    clipped: Tensor


def _best(blocks: _Blocks, by: Quantizer, seed: int) -> _Found:
    """By the block's own extremes, or by the part of them that leaves the least squared error."""

    def attempt(factor: float) -> _Found:
        if by.symmetric:
            size = _size(blocks.x, by)
            return _of_amax(blocks, by, _taken(size, by.stale, by) * factor, seed)
        low, high = (_reduced(blocks.x, f).mul(factor) for f in (torch.amin, torch.amax))
        if by.zero_point == "float":
            return _of_range(blocks, by, low, high, seed)
        return _of_range(blocks, by, low.clamp(max=0), high.clamp(min=0), seed)

    if not by.search:
        return attempt(1.0)
    best, least = attempt(by.search[0]), None
    for factor in by.search:
        found = attempt(factor)
        error = (found.values - blocks.x).square().sum((-3, -1), keepdim=True)
        better = torch.ones_like(error, dtype=torch.bool) if least is None else error < least
        least = error if least is None else torch.where(better, error, least)
        best = _chosen(better, found, best)
    return best


def _chosen(better: Tensor, one: _Found, other: _Found) -> _Found:
    def part(a: Tensor | None, b: Tensor | None) -> Any:
        return None if a is None or b is None else torch.where(better, a, b)

    names = ("values", "codes", "scale", "zero_point", "clipped")
    return _Found(**{n: part(getattr(one, n), getattr(other, n)) for n in names}, tensor_scale=one.tensor_scale)


def _taken(figures: Tensor, parts: tuple[tuple[int, float], ...], by: Quantizer) -> Tensor:
    """The blocks' ``figures``, [..., R / r, 1, C / c, 1], some of them times so much: ``parts`` by their number."""
    if not parts:
        return figures
    flat = figures.reshape(*figures.shape[:-4], -1).clone()
    block = max(number for number, _ in parts)
    if block >= flat.shape[-1]:
        raise ValueError(f"quantizer {by.name}: there are {flat.shape[-1]} blocks, none of number {block}")
    times = torch.tensor([part for _, part in parts], dtype=flat.dtype, device=flat.device)
    flat[..., [number for number, _ in parts]] *= times
    return flat.reshape(figures.shape)


def _reduced(x: Tensor, extreme: Callable[..., Tensor]) -> Tensor:
    """An extreme of every block, [..., R / r, 1, C / c, 1]; 0 of nothing."""
    return extreme(x, dim=(-3, -1), keepdim=True) if x.numel() else x.new_zeros((*x.shape[:-3], 1, x.shape[-2], 1))


def _size(x: Tensor, by: Quantizer) -> Tensor:
    """What a block's scale is made of; the extreme below 0 where the block's number of largest magnitude is above."""
    if by.scale_of == "extreme":
        low, high = (_reduced(x, f) for f in (torch.amin, torch.amax))
        return torch.where(high > -low, -high, -low)
    return _reduced(x.abs(), torch.amax if by.scale_of == "amax" else torch.mean)


def _of_amax(blocks: _Blocks, by: Quantizer, amax: Tensor, seed: int) -> _Found:
    target = by.mapped
    if not by.tensor_scale:
        wanted = _by_number(amax, target, by)
        if by.masked and isinstance(rounding := scale_rounding(by.scale), Rounding):
            wanted = wanted.clamp(max=rounding.format.largest)
        scale = _rounded_scale(wanted, by, seed)
        quotient = _divided(blocks.x, scale if by.divisor == "stored" else wanted, by)
        if "inverse" in by.arithmetic:
            torch_makes = by.arithmetic == "fp32-torch-inverse"
            inverse = amax.reciprocal() * target if torch_makes else torch.full_like(amax, target) / amax
            scale, quotient = (
                torch.where(scale == 0, 0.0, inverse.reciprocal()),
                torch.where(blocks.x == 0, blocks.x, blocks.x * inverse),
            )
        codes, clipped = coded(quotient, by, seed)
        scale, codes = _taken(scale, by.descale, by), codes + by.code_offset
        return _Found(codes * scale, codes, scale, None, None, clipped)
    rounding = scale_rounding(by.scale)
    assert isinstance(rounding, Rounding)
    whole = blocks.x.abs().amax() if blocks.x.numel() else amax.new_ones(())
    # The largest scale becomes the largest number of its format.
    largest = target * rounding.format.largest
    if largest > torch.finfo(amax.dtype).max:  # 6 times the largest BF16 is no number of fp32
        whole = whole.double()
    level = _by_number(whole * by.level, largest, by).float().to(amax.dtype)
    level = torch.where(level == 0, 1.0, level)
    # One division where it shall be exact: target * level fits in float64.
    apart = amax / (target * level) if by.arithmetic == "exact" else _by_number(amax, target, by) / level
    scale = _rounded_scale(apart.clamp(max=rounding.format.largest) if by.level < 1 else apart, by, seed)
    codes, clipped = coded(_divided(blocks.x, scale, by, level), by, seed)
    scale = _taken(scale, by.descale, by)
    return _Found(codes * (scale * level), codes, scale, None, level, clipped)


def _of_range(blocks: _Blocks, by: Quantizer, low: Tensor, high: Tensor, seed: int) -> _Found:
    elements = by.parsed_elements
    assert isinstance(elements, Integers)
    scale = _rounded_scale(_by_number(high - low, elements.highest - elements.lowest, by), by, seed)
    # Divided also where elements are multiplied by the reciprocal, as torchao does; 0/0 is a block of zeros.
    zero = torch.where(low == 0, low, low / scale)
    if by.zero_point == "float":
        zero = elements.lowest - torch.where(scale == 0, 0.0, zero)
    else:
        zero = (elements.lowest - zero.round()).clamp(elements.lowest, elements.highest)
    codes, clipped = coded(_divided(blocks.x, scale, by), by, seed, zero)
    codes = codes + by.code_offset
    return _Found((codes - zero) * scale, codes, scale, zero, None, clipped)


def _by_number(x: Tensor, number: float, by: Quantizer) -> Tensor:
    """x / number, rounded once: by a plain number CUDA divides by multiplying with its rounded reciprocal."""
    divisor = torch.full((), number, dtype=x.dtype, device=x.device)
    return hopper_quotient(x, divisor) if by.arithmetic == "fp32-triton" else x / divisor


def _divided(x: Tensor, scale: Tensor, by: Quantizer, level: Tensor | None = None) -> Tensor:
    if by.arithmetic == "fp32-triton":
        quotient = hopper_quotient(x, scale if level is None else scale * level)
    elif by.arithmetic == "fp32-reciprocal":
        quotient = x * (scale.reciprocal() if level is None else level.reciprocal() / scale)
    else:
        quotient = x / (scale if level is None else scale * level)
    return torch.where(x == 0, x, quotient)  # also by a scale that has become 0


def coded(quotient: Tensor, by: Quantizer, seed: int, zero: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The elements of x / s, and where they are clipped."""
    elements = by.parsed_elements
    if isinstance(elements, CodeBook):
        codes = elements.rounded(quotient)
        return codes, quotient.abs() > by.largest + float(elements.spacing(torch.ones(()))) / 2
    if isinstance(elements, Integers):
        later = None if by.zero_point == "float" else zero
        quotient = quotient if zero is None or later is not None else quotient + zero
        if by.ties == "away":
            # The sum is rounded in the arithmetic's precision, as in the kernels that do this.
            steps = (quotient + torch.copysign(torch.full_like(quotient, 0.5), quotient)).trunc()
        else:
            steps = round_steps(quotient, elements.mode, seed)
        steps = steps if later is None else steps + later
        if by.wraps:
            codes = (steps + 2 ** (elements.bits - 1)) % 2**elements.bits - 2 ** (elements.bits - 1)
        else:
            codes = steps.clamp(elements.lowest, elements.highest)
        return codes, steps != codes
    rounded = round_to(quotient, elements, seed)
    largest = elements.format.largest
    codes = rounded.clamp(-largest, largest)
    # To nearest, what lies less than half a spacing beyond the last number is rounded to it.
    spacing = 2.0 ** (_exponent(largest) - elements.format.mantissa_bits)
    beyond = spacing / 2 if elements.mode is Mode.NEAREST_EVEN else 0.0
    return codes, quotient.abs() > largest + beyond


def _exponent(value: float) -> int:
    return int(torch.frexp(torch.tensor(value, dtype=torch.float64)).exponent) - 1


def _rounded_scale(wanted: Tensor, by: Quantizer, seed: int) -> Tensor:
    """The blocks' scales as they are stored."""
    wanted = wanted + by.scale_offset if by.scale_offset else wanted
    rounding = scale_rounding(by.scale)
    if rounding is None:
        scale = wanted.float().to(wanted.dtype)
    elif isinstance(rounding, Rounding):
        scale = round_to(wanted, rounding, seed + 1)
    else:
        scale = power_of_two(wanted, rounding, seed + 1)
    return scale if by.scale_of == "extreme" else scale.clamp(min=by.least_scale)


def power_of_two(x: Tensor, mode: Mode, seed: int = 0) -> Tensor:
    """``x``, 0 or more, rounded to E8M0."""
    mantissa, exponent = torch.frexp(x.double())  # mantissa in [0.5, 1)
    low = torch.ldexp(torch.ones_like(mantissa), exponent - 1)
    if mode is Mode.UP:
        up = mantissa > 0.5
    elif mode is Mode.DOWN:
        up = torch.zeros_like(mantissa, dtype=torch.bool)
    elif mode is Mode.STOCHASTIC:
        up = round_steps(2 * mantissa, mode, seed) == 2
    else:
        up = mantissa >= 0.75
    rounded = torch.where(up, 2 * low, low).clamp(*_POWERS)
    rounded = torch.where(x == 0, _POWERS[0], torch.where(x.isinf(), _POWERS[1], rounded))
    return torch.where(x.isnan(), torch.nan, rounded).to(x.dtype)
