"""What programs do wrong with a quantiser's codes, scales and zero points, as the values that come of it.

Each is the quantiser's own arithmetic with one thing changed. ``c = clamp(round(w / s) + z)`` and ``y = (c - z) s``
have two scales and two zero points: where a program takes the wrong one only to divide or only to multiply, the values
are others than where it takes it twice, so that each is a mistake of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from attn_diag.kernels.elements import Integers
from attn_diag.kernels.formats import Mode, round_steps
from attn_diag.kernels.quantize import Quantized, coded, quantize, spread
from attn_diag.kernels.quantizers import PRESETS, Quantizer
from attn_diag.testing.quantizing.scales import per_block

# Relative: a quotient in fp32 is off by less.
_TIE = 2.0**-20
WRAP, UNCLIPPED = "codes that wrap around instead of being clipped", "codes that are not clipped"
Where = Literal["both", "divided", "multiplied"]
# A figure of every block, [R / r, C / c], and what is taken for it: either, where the first block has none before.
Move = Callable[[Tensor], list[Tensor]]


@dataclass(frozen=True)
class Grid:
    """A quantiser on one weight: what its mistakes are made of; float64, a number for each element, [R, C]."""

    w: Tensor
    """The weight."""
    by: Quantizer
    """The quantiser."""
    found: Quantized
    """What it makes of the weight."""
    order: str = ""
    """Computed in the format of what it makes, in this order (``own_format``); empty: exactly."""

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return self.w.shape[0], self.w.shape[1]

    @property
    def scale(self) -> Tensor:
        """A scale for each block, [R / r, C / c]."""
        whole = 1.0 if self.found.tensor_scale is None else self.found.tensor_scale.double()
        return self.found.scale.double() * whole

    @property
    def zero(self) -> Tensor:
        """A zero point for each block."""
        return torch.zeros_like(self.scale) if self.found.zero_point is None else self.found.zero_point.double()

    def each(self, per_block: Tensor) -> Tensor:
        """A block's figure for each of its elements."""
        return spread(per_block, self.shape, self.by)

    def codes(self, scale: Tensor, zero: Tensor) -> Tensor:
        """clamp(round(w / scale) + zero); the scale and the zero point of each element."""
        return coded(self.quotient(scale), self.by, 0, None if self.by.symmetric else zero)[0]

    def quotient(self, scale: Tensor) -> Tensor:
        """w / scale; the scale of each element."""
        if self.order:
            w, scale = (x.to(self.found.values.dtype) for x in (self.w, scale))
            divided = self.order in ("divided", "z late")
            return (w / scale if divided else w * (1 / scale)).double().nan_to_num()
        return torch.where(scale == 0, torch.zeros_like(self.w), self.w / scale)

    def steps(self, near: float = 1.0) -> Tensor:
        """round(w / s) + z, of integers, which nothing has clipped; of w times ``near``, for ties."""
        quotient = self.quotient(self.each(self.scale)) * near
        return round_steps(quotient, self.by.parsed_elements.mode, 0) + self.each(self.zero)

    def of(self, codes: Tensor) -> Tensor:
        """(codes - z) s."""
        return (codes - self.each(self.zero)) * self.each(self.scale)


@dataclass(frozen=True)
class QuantizerMistake:
    """What is done wrong."""

    words: str
    """What, for "but with …"."""
    make: Callable[[Grid], list[Tensor]]
    """The values that come of it, [R, C]: each element has one of these."""
    beyond_rows: bool = False
    """Whether rows change with others."""

    def values(self, w: Tensor, by: Quantizer, found: Quantized, order: str = "") -> list[Tensor]:
        """The values, where ``found`` is what ``by`` makes of ``w`` in this order; of the dtype of those."""
        return [v.to(found.values.dtype) for v in self.make(Grid(w.double(), by, found, order))]


def mistakes(by: Quantizer, shape: tuple[int, int]) -> Iterator[QuantizerMistake]:
    """Those that a quantiser can be made with, the likelier first."""
    elements = by.parsed_elements
    if elements.mode is Mode.STOCHASTIC or by.row_groups > 1 or by.search:
        return
    if by.zero_point == "float" and not by.symmetric:
        return  # codes and zero points do not part: each is the other's last bits
    if not by.symmetric:
        yield from _zero_points()
    if isinstance(elements, Integers):
        yield from of_clipping(by)
        yield from _codes(elements, shape)
    yield from _moved_scales(by, shape)
    yield QuantizerMistake("codes that no scale is multiplied with", lambda grid: [grid.found.codes.double()])
    yield QuantizerMistake("codes divided by their scales", lambda grid: [grid.found.codes / grid.each(grid.scale)])
    yield from _quantised_twice(by)


def _zero_points() -> Iterator[QuantizerMistake]:
    def shifted(by: int, *, again: bool) -> Callable[[Grid], list[Tensor]]:
        def make(grid: Grid) -> list[Tensor]:
            zero = grid.each(grid.zero)
            codes = grid.codes(grid.each(grid.scale), zero + by)
            return [(codes - zero - by * again) * grid.each(grid.scale)]

        return make

    for n in (1, -1):
        yield QuantizerMistake(f"the zero point off by {n:+d} before clipping", shifted(n, again=False))
        yield QuantizerMistake(shifted_throughout(n), shifted(n, again=True))

    def left_out(grid: Grid) -> list[Tensor]:
        return [grid.found.codes * grid.each(grid.scale)]

    def left_out_unsigned(grid: Grid) -> list[Tensor]:
        return [(grid.found.codes - _ends(grid.by)[0]) * grid.each(grid.scale)]

    def none(start: Callable[[Grid], float]) -> Callable[[Grid], list[Tensor]]:
        def make(grid: Grid) -> list[Tensor]:
            zero, scale = torch.full_like(grid.w, start(grid)), grid.each(grid.scale)
            return [(grid.codes(scale, zero) - zero) * scale]

        return make

    def of_maximum(grid: Grid) -> list[Tensor]:
        """z = lowest - round(max / s), as it is or within the integers."""
        lowest, highest = _ends(grid.by)
        zero = lowest - torch.where(grid.scale == 0, 0.0, extremes(grid.w, grid.by)[1] / grid.scale).round()
        out = []
        for one in (zero, zero.clamp(lowest, highest)):
            each = grid.each(one)
            out.append((grid.codes(grid.each(grid.scale), each) - each) * grid.each(grid.scale))
        return out

    def rounded(how: Callable[[Tensor], Tensor]) -> Callable[[Grid], list[Tensor]]:
        def make(grid: Grid) -> list[Tensor]:
            lowest, highest = _ends(grid.by)
            low = torch.where(grid.scale == 0, 0.0, extremes(grid.w, grid.by)[0] / grid.scale)
            zero = grid.each((lowest + how(-low)).clamp(lowest, highest))
            return [(grid.codes(grid.each(grid.scale), zero) - zero) * grid.each(grid.scale)]

        return make

    def wide_range(grid: Grid) -> list[Tensor]:
        """s = (max - min) / 2**bits, one more than there are spacings."""
        lowest, highest = _ends(grid.by)
        scale = grid.scale * (highest - lowest) / (highest - lowest + 1)
        low = extremes(grid.w, grid.by)[0]
        zero = (lowest - torch.where(scale == 0, 0.0, low / scale).round()).clamp(lowest, highest)
        each, by_each = grid.each(scale), grid.each(zero)
        return [(grid.codes(each, by_each) - by_each) * each]

    yield QuantizerMistake("no zero point subtracted", left_out)
    yield QuantizerMistake("no zero point subtracted from unsigned codes", left_out_unsigned)
    yield QuantizerMistake("a zero point of 0", none(lambda _: 0.0))
    yield QuantizerMistake("a zero point of 0, of unsigned codes", none(lambda grid: float(_ends(grid.by)[0])))
    yield QuantizerMistake("a zero point made of the maximum instead of the minimum", of_maximum)
    yield QuantizerMistake("a zero point that is rounded down", rounded(torch.floor))
    yield QuantizerMistake("a zero point that is rounded up", rounded(torch.ceil))
    yield QuantizerMistake("scales of the range over 2^bits, not over 2^bits - 1", wide_range)


def shifted_throughout(n: int) -> str:
    """What a zero point that is off by ``n`` before clipping and after does: it moves the range, and nothing else."""
    end = "below the largest" if n > 0 else "above the lowest"
    return f"the zero point off by {n:+d} before clipping and after, or codes clipped one {end}"


def of_clipping(by: Quantizer) -> Iterator[QuantizerMistake]:
    """Of integers that pass the last one, as under an amax that is too small."""
    elements = by.parsed_elements
    if not isinstance(elements, Integers) or elements.mode is Mode.STOCHASTIC:
        return
    half = 2 ** (elements.bits - 1)

    nearly = 1.0, 1 - _TIE, 1 + _TIE

    def wrapped(grid: Grid) -> list[Tensor]:
        # Of a target between two integers amax itself is a tie, which the arithmetic decides.
        steps = grid.steps()
        out = []
        for near in nearly:
            other = grid.steps(near)
            steps = torch.where((steps.abs() >= half) | (other.abs() >= half), other, steps)
            out.append(grid.of((steps + half).remainder(2 * half) - half))
        return out

    yield QuantizerMistake(WRAP, wrapped)
    yield QuantizerMistake(UNCLIPPED, lambda grid: [grid.of(grid.steps(near)) for near in nearly])
    if by.symmetric:
        low, high = elements.lowest + 1.0, elements.highest - 1.0
        yield QuantizerMistake(
            "codes clipped one below the largest", lambda grid: [grid.of(grid.found.codes.double().clamp(max=high))]
        )
        yield QuantizerMistake(
            "codes clipped one above the lowest", lambda grid: [grid.of(grid.found.codes.double().clamp(min=low))]
        )
        if low < high:
            yield QuantizerMistake(
                "codes clipped one short at both ends",
                lambda grid: [grid.of(grid.found.codes.double().clamp(low, high))],
            )


def _codes(elements: Integers, shape: tuple[int, int]) -> Iterator[QuantizerMistake]:
    many = 2**elements.bits

    def unsigned(grid: Grid) -> list[Tensor]:
        return [grid.of(grid.found.codes.double().remainder(many))]

    def swapped(grid: Grid) -> list[Tensor]:
        return [grid.of(grid.found.codes.double().reshape(len(grid.w), -1, 2).flip(-1).reshape(grid.shape))]

    yield QuantizerMistake("codes read as unsigned", unsigned)
    for n in (many // 2, -many // 2):
        yield QuantizerMistake(f"codes off by {n:+d}", lambda grid, n=n: [grid.of(grid.found.codes.double() + n)])  # type: ignore[misc]
    if elements.bits == 4 and shape[1] % 2 == 0:
        yield QuantizerMistake("the two codes of a byte swapped", swapped)


def _moved_scales(by: Quantizer, shape: tuple[int, int]) -> Iterator[QuantizerMistake]:
    r, c = by.block_shape(shape)
    down, across = -(-shape[0] // r), -(-shape[1] // c)

    def beside(dim: int, n: int) -> Move:
        def move(figure: Tensor) -> list[Tensor]:
            # The outermost have none beside them: a program takes their own, or the one from the other end.
            size = figure.shape[dim]
            at = (torch.arange(size, device=figure.device) + n).clamp(0, size - 1)
            return [figure.roll(-n, dim), figure.index_select(dim, at)]

        return move

    moves: list[tuple[str, Move, bool]] = []
    row = "row" if r == 1 else "row of blocks"
    for dim, many, what in ((1, across, "block"), (0, down, row)):
        if many > 1:
            moves += [(f"the scales of the {what} {side}", beside(dim, n), dim == 0) for n, side in
                      ((-1, "before"), (1, "behind"))]  # fmt: skip
            moves.append(
                (f"the largest scale of the {what}s so far", lambda f, dim=dim: [f.cummax(dim).values], dim == 0)  # type: ignore[misc]
            )
    if down > 1 and across > 1:
        moves.append(("transposed scales", lambda f: [f.T.reshape(f.shape), f.reshape(f.shape[::-1]).T], True))
    for words, move, beyond in moves:
        yield from _used(words, move, beyond, with_zero=not by.symmetric)
    if max(down, across) == down * across == shape[0] == shape[1] > 1:
        yield from _across(down > 1)


def _used(words: str, move: Move, beyond: bool, *, with_zero: bool) -> Iterator[QuantizerMistake]:
    """A move of the scales (and of the zero points) where is divided, where is multiplied, and in both places."""

    def made(where: Where, scales: bool, zeros: bool) -> Callable[[Grid], list[Tensor]]:
        def make(grid: Grid) -> list[Tensor]:
            scale, zero = grid.each(grid.scale), grid.each(grid.zero)
            other_scales = [grid.each(s) for s in move(grid.scale)] if scales else [scale] * 2
            other_zeros = [grid.each(z) for z in move(grid.zero)] if zeros else [zero] * 2
            out = []
            for one_scale, one_zero in zip(other_scales, other_zeros, strict=False):
                of_codes = (scale, zero) if where == "multiplied" else (one_scale, one_zero)
                of_values = (scale, zero) if where == "divided" else (one_scale, one_zero)
                out.append((grid.codes(*of_codes) - of_values[1]) * of_values[0])
            return out

        return make

    places: tuple[tuple[Where, str], ...] = (("multiplied", "multiplied by {}"), ("both", "{}"),
                                             ("divided", "divided by {}, multiplied by their own"))  # fmt: skip
    kinds = [(words, True, False)]
    if with_zero and "so far" not in words:
        kinds += [
            (words.replace("scales", "scales and zero points"), True, True),
            (words.replace("scales", "zero points"), False, True),
        ]
    for said, scales, zeros in kinds:
        for where, how in places:
            sentence = how.format(said)
            if zeros and not scales:
                sentence = {"both": said, "multiplied": f"{said} subtracted", "divided": f"{said} added"}[where]
            yield QuantizerMistake(sentence, made(where, scales, zeros), beyond)


def _across(of_rows: bool) -> Iterator[QuantizerMistake]:
    """A square weight whose scales are laid along the other axis, as broadcasting does it without complaint."""

    def made(where: Where) -> Callable[[Grid], list[Tensor]]:
        def make(grid: Grid) -> list[Tensor]:
            scale, zero = grid.each(grid.scale), grid.each(grid.zero)
            other, other_zero = scale.T, zero.T
            codes = grid.codes(scale, zero) if where == "multiplied" else grid.codes(other, other_zero)
            used = (scale, zero) if where == "divided" else (other, other_zero)
            return [(codes - used[1]) * used[0]]

        return make

    said = "the rows' scales laid along the columns" if of_rows else "the columns' scales laid along the rows"
    yield QuantizerMistake(f"multiplied by {said}", made("multiplied"), beyond_rows=True)
    yield QuantizerMistake(said, made("both"), beyond_rows=True)


def _quantised_twice(by: Quantizer) -> Iterator[QuantizerMistake]:
    def twice(first: Quantizer) -> Callable[[Grid], list[Tensor]]:
        def make(grid: Grid) -> list[Tensor]:
            # The first one's numbers often lie half way between the second one's: the arithmetic decides.
            both = [(replace(first, arithmetic=a), replace(grid.by, arithmetic=a)) for a in ("exact", "fp32")]
            return [quantize(quantize(grid.w, one).values, other).values for one, other in both]

        return make

    firsts = [("itself", by)]
    if isinstance(by.parsed_elements, Integers):
        firsts += [(f"blocks of {n}", replace(by, block=n)) for n in ("32", "64", "128") if n != by.block]
        firsts += [("a scale for each row", replace(by, block="row"))] if by.block != "row" else []
    firsts += [(name, PRESETS[name]) for name in ("int8", "fp8", "fp8-row", "mxfp8")]
    for words, first in firsts:
        beyond = first.block == "tensor" or "x" in first.block
        yield QuantizerMistake(f"w quantised before, by {words}", twice(first), beyond)


def _ends(by: Quantizer) -> tuple[int, int]:
    elements = by.parsed_elements
    assert isinstance(elements, Integers)
    return elements.lowest, elements.highest


def extremes(w: Tensor, by: Quantizer) -> tuple[Tensor, Tensor]:
    """The smallest and the largest number of every block, and 0, [R / r, C / c]; not for groups of rows."""
    return per_block(w, by, torch.amin).clamp(max=0), per_block(w, by).clamp(min=0)
