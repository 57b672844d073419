"""The scales that values were made with, read off the values where no rule of the data gives them.

A block's largest value is one of the elements' numbers times its scale. Each of them is tried, and the scale kept with
which rounding the weight gives most of the block's values: that of an amax of another step, a learned scale, a searched
one. Where two do alike (E4M3's numbers are the same at half the scale) it is the one next to the data's own.

A value in 16 bits tells it to half its last bit alone. But each value of the block does, and which code each element of
the weight has: the scale lies in all these intervals.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attn_diag.kernels.elements import CodeBook, Integers
from attn_diag.kernels.formats import Mode, Rounding, round_to
from attn_diag.kernels.quantize import coded, quantize, spread
from attn_diag.kernels.quantizers import Quantizer, scale_rounding

# How far a read scale may lie from the data's own: a search of wider ones fits grids that nobody used.
_REACH = 16.0
_REACH_OF_RANGES = 4.0
# Relative: a quotient in fp32, and what decides its ties.
_TIE = 2.0**-20
# What an observed value's own rounding leaves of a scale that is read off it, beside fp32's.
_SLACK = 2.0**-18


def readable(by: Quantizer) -> bool:
    """Whether scales can be read off what ``by`` makes: one level, no zero point, no draws, any fp32 number."""
    drawn = by.parsed_elements.mode is Mode.STOCHASTIC
    return (
        by.symmetric and not by.tensor_scale and not drawn and by.row_groups == 1 and scale_rounding(by.scale) is None
    )


def read_scales(w: Tensor, observed: Tensor, by: Quantizer) -> Tensor:
    """The scale of each block, [R / r, C / c] float64; the data's own of a block of zeros.

    Args:
        w: The weight, [R, C].
        observed: What became of it, [R, C].
        by: The quantiser, as ``readable`` has it.
    """
    shape = w.shape[0], w.shape[1]
    exact, values = w.double(), observed.double()
    own = quantize(exact, by).scale.double()
    top = per_block(values.abs(), by)
    best, hits, near = own.clone(), torch.full_like(own, -1.0), torch.full_like(own, torch.inf)
    slack = max(_SLACK, torch.finfo(observed.dtype).eps)
    ways = (1.0, -1.0) if by.scale_of == "extreme" else (1.0,)
    for number in (way * n for n in _numbers(by) for way in ways):
        scale = top / number * own.sign()
        apart = (scale / own).abs().log2().abs().nan_to_num(torch.inf, torch.inf, torch.inf)
        usable = apart <= torch.log2(torch.tensor(_REACH))
        if not bool(usable.any()):
            continue
        each = spread(scale, shape, by)
        quotient = torch.where(each == 0, 0.0, exact / each)
        made = coded(quotient, by, 0)[0] * each
        same = ((made - values).abs() <= slack * made.abs()).double()
        found = per_block(same, by, torch.sum)
        better = usable & ((found > hits) | ((found == hits) & (apart < near)))
        best, hits, near = (torch.where(better, a, b) for a, b in ((scale, best), (found, hits), (apart, near)))
    return best if observed.itemsize > 2 else _narrowed(best, exact, observed, by)


def _narrowed(scale: Tensor, w: Tensor, observed: Tensor, by: Quantizer) -> Tensor:
    """Scales that were read off one value of each block, as all its values in 16 bits allow: the middle of that."""
    shape, half = (w.shape[0], w.shape[1]), torch.finfo(observed.dtype).eps / 2
    values, elements, found = observed.double(), by.parsed_elements, scale.abs()
    of_range = not by.symmetric
    largest = 2.0**elements.bits if of_range and isinstance(elements, Integers) else by.largest + 1
    # The larger a code, the closer its neighbour: they are read once the small ones have narrowed the scale.
    for part in (8, 2, 1):
        quotient = (values / spread(found * scale.sign(), shape, by)).nan_to_num()
        codes = quotient.round() if of_range else coded(quotient, by, 0)[0]
        told = (codes != 0) & (codes.abs() <= largest / part)
        size = values.abs() / codes.abs()
        low = per_block(torch.where(told, size * (1 - half), 0.0), by)
        high = -per_block(torch.where(told, -size * (1 + half), -torch.inf), by)
        found = torch.where((low > 0) & (low <= high), (low + high) / 2, found)
    if isinstance(elements, Integers) and elements.mode is Mode.NEAREST_EVEN:
        lowest, highest = (spread(per_block(codes, by, how), shape, by) for how in (torch.amin, torch.amax))
        clipped = (codes == lowest) | (codes == highest)
        if not of_range:
            clipped = codes.abs() >= min(elements.highest, -elements.lowest)
        size, codes = w.abs(), codes.abs()
        least = torch.maximum(low, per_block(torch.where(clipped, 0.0, size / (codes + 0.5)), by))
        most = torch.minimum(high, -per_block(torch.where(codes > 0, -size / (codes - 0.5), -torch.inf), by))
        found = torch.where((least > 0) & (least <= most), (least + most) / 2, found)
    return found * scale.sign()


def _numbers(by: Quantizer) -> list[float]:
    """The elements' numbers above 0, the largest first."""
    elements = by.parsed_elements
    if isinstance(elements, Integers):
        return [float(n) for n in range(max(elements.highest, -elements.lowest), 0, -1)]
    if isinstance(elements, CodeBook):
        return sorted(
            {abs(n) for n in elements.tensor(torch.ones((), dtype=torch.float64)).tolist() if n}, reverse=True
        )
    fmt, found = elements.format, set[float]()
    grid = torch.arange(1, 2 ** (fmt.mantissa_bits + 1), dtype=torch.float64)
    exponent = fmt.min_exponent - fmt.mantissa_bits
    while 2.0**exponent <= fmt.largest:
        found |= set((grid * 2.0**exponent).tolist())
        exponent += 1
    exact = round_to(torch.tensor(sorted(found), dtype=torch.float64), Rounding(fmt))
    return sorted({n for n in exact.tolist() if 0 < n <= fmt.largest}, reverse=True)


def per_block(x: Tensor, by: Quantizer, how: object = torch.amax) -> Tensor:
    """A figure of every block, [R / r, C / c], of one for each element; not for groups of rows."""
    r, c = by.block_shape((x.shape[0], x.shape[1]))
    filled = torch.nn.functional.pad(x, (0, -x.shape[1] % c, 0, -x.shape[0] % r))
    return how(filled.reshape(filled.shape[0] // r, r, filled.shape[1] // c, c), dim=(1, 3))  # type: ignore[operator, no-any-return]


def read_ranges(w: Tensor, observed: Tensor, by: Quantizer) -> tuple[Tensor, Tensor, Tensor]:
    """As ``read_scales``, of integers with a zero point: the scale of each block, by how much the zero point that codes
    are multiplied back with is off, and whether all its values are explained so; each [R / r, C / c].

    Args:
        w: The weight, [R, C].
        observed: What became of it, [R, C].
        by: The quantiser, of integers and with a zero point.
    """
    elements = by.parsed_elements
    assert isinstance(elements, Integers)
    shape, many = (w.shape[0], w.shape[1]), elements.highest - elements.lowest
    exact, values = w.double(), observed.double()
    own = quantize(exact, by).scale.double()
    top = per_block(values.abs(), by)
    scale, off, fits = own.clone(), torch.zeros_like(own), torch.zeros_like(own, dtype=torch.bool)
    slack = max(_SLACK, torch.finfo(observed.dtype).eps)
    for number in range(many, 0, -1):
        tried = top / number
        usable = (tried > own / _REACH_OF_RANGES) & (tried < own * _REACH_OF_RANGES)
        if not bool((usable & ~fits).any()):
            continue
        if observed.itemsize <= 2:
            tried = _narrowed(tried, exact, observed, by)
        each = spread(torch.where(usable, tried, 1.0), shape, by)
        codes = (values / each).round()
        on_grid = (codes * each - values).abs() <= slack * values.abs()
        low, high = (spread(per_block(codes, by, how), shape, by) for how in (torch.amin, torch.amax))
        for shift in (0, -1, 1):
            steps = [(exact / each * near).round() - shift for near in (1 - _TIE, 1 + _TIE)]
            same = on_grid & torch.stack([one.clamp(low, high).eq(codes) for one in steps]).any(0)
            found = usable & (per_block(same.logical_not().double(), by) == 0)
            found &= per_block(codes, by) - per_block(codes, by, torch.amin) <= many
            found &= per_block(((codes > low) & (codes < high)).double(), by) > 0  # what is all clipped fits any
            better = found & ~(fits & ((scale / own).log2().abs() <= (tried / own).log2().abs()))
            scale, off = torch.where(better, tried, scale), torch.where(better, float(shift), off)
            fits |= found
    return scale, off, fits
