"""The formats below 16 bits in which q, k and v may be held, with scales of their own or none."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from attn_diag.head.declared_ways import block_words
from attn_diag.kernels.elements import Integers
from attn_diag.kernels.formats import Rounding
from attn_diag.kernels.quantize import quantize
from attn_diag.kernels.quantizers import PRESETS, Arithmetic, Quantizer, quantizer

# BF16 over a scale often lies halfway between two codes, and then by how the quotient is made in one or the other.
_ARITHMETICS: tuple[Arithmetic, ...] = "exact", "fp32", "fp32-reciprocal", "fp32-inverse", "fp32-torch-inverse"

OF_ALL_HEADS = "a scale for all heads"
UP_TO_TWO = " up to a power of two"
"""Of a scale of floats: twice or half of it moves nothing but what underflows."""


@dataclass(frozen=True)
class LowBitFormat:
    """What q, k or v was rounded to."""

    format: str
    """In words, "FP8 (E4M3)"."""
    scales: str
    """In words, "a scale a row"."""
    by: Quantizer
    """How."""
    amax: float | None = None
    """What scales are made of in place of x's own largest number."""
    smooth: bool = False
    """Without the mean of all rows, which is added again."""

    @property
    def words(self) -> str:
        """Both, "FP8 (E4M3, a scale a row)"."""
        head, bracket, rest = self.format.partition(")")
        if not self.scales:
            return self.format
        return f"{head}, {self.scales}{bracket}{rest}" if bracket else f"{self.format} ({self.scales})"

    @property
    def own_scale(self) -> bool:
        """Whether it has one scale that is no head's, nor 1."""
        return self.amax not in (None, self.by.mapped) and self.scales != OF_ALL_HEADS

    def at(self, factor: float) -> LowBitFormat:
        """With a scale so many times as large."""
        assert self.amax is not None
        amax = factor * self.amax
        known = UP_TO_TWO if isinstance(self.by.parsed_elements, Rounding) else ""
        return replace(self, amax=amax, scales=f"one scale, {amax / self.by.mapped:.5g}{known}")

    def of(self, x: Tensor) -> Tensor:
        """x [n, D] in it."""
        mean = x.mean(0) if self.smooth else 0.0
        return quantize(x - mean, self.by, amax=self.amax).values + mean


def _unscaled(words: str, elements: str, scales: str) -> LowBitFormat:
    by = quantizer("fp8", elements=elements)
    return LowBitFormat(words, scales, by, by.mapped)


UNSCALED = {
    "FP8 (E4M3)": _unscaled("FP8 (E4M3)", "e4m3", f"scale 1{UP_TO_TWO}"),
    "FP8 (E5M2)": _unscaled("FP8 (E5M2)", "e5m2", f"scale 1{UP_TO_TWO}"),
    "BF16": _unscaled("BF16", "bf16", ""),
}
"""Formats without scales, by their words; BF16 is one of what was given in FP16."""


def expected_square(x: Tensor, by: Quantizer) -> float:
    """About what the mean square of an element's error is, within a few times, from blocks' largest numbers alone."""
    elements = by.parsed_elements
    if isinstance(elements, Rounding) and by.scale == "fp32":
        return float(x.square().mean()) * 4.0 ** -(elements.format.mantissa_bits + 1) / 3
    levels = by.largest - (elements.lowest if isinstance(elements, Integers) else -by.largest)
    whole = by.block == "tensor" or (by.whole_rows and by.block != "row")
    down = by.block == "column" or by.block.endswith("x1")
    largest = x.abs().amax() if whole else x.abs().amax(0 if down else 1)
    return float((2 * largest / levels).square().mean()) / 12


def arithmetics_of(by: Quantizer) -> tuple[Arithmetic, ...]:
    """The arithmetics in which a quantiser can be computed."""
    every = by.plain and by.scale == "fp32"
    return tuple(one for one in _ARITHMETICS if every or "inverse" not in one)


# Whether x is divided by the scale as it is stored, where ties go, and how it is divided; llama.cpp's way first.
_CODED: tuple[tuple[str, str, Arithmetic], ...] = (
    ("unrounded", "away", "fp32-reciprocal"),
    ("unrounded", "even", "fp32-reciprocal"),
    ("unrounded", "even", "exact"),
    ("stored", "even", "exact"),
)


def in_16_bits(one: LowBitFormat) -> list[LowBitFormat]:
    """The same integers with scales that are stored in FP16 or BF16, in the same order of every one; none of others."""
    if not isinstance(one.by.parsed_elements, Integers) or one.by.scale != "fp32" or not one.scales.startswith("a "):
        return []
    return [
        replace(
            one,
            by=quantizer(
                one.by, arithmetic=how, scale=fmt, ties=ties, divisor=divisor if one.by.symmetric else "stored"
            ),
            scales=f"{article}{one.scales[1:]}",
        )
        for fmt, article in (("fp16", "an FP16"), ("bf16", "a BF16"))
        for divisor, ties, how in _CODED
    ]


def formats_of(x: Tensor, name: str, of_all: float = 0.0) -> Iterator[LowBitFormat]:
    """What x [n, D] may have been held in with scales of its own, FP8 without any, and integers with all heads' scale.

    Args:
        x: Of one head.
        name: q, k or v.
        of_all: The largest number of all heads; 0: not known.
    """
    if of_all > float(x.abs().amax()):
        for bits in (8, 4):
            yield LowBitFormat(
                f"INT{bits}", OF_ALL_HEADS, quantizer("int8", elements=f"int{bits}", block="tensor"), of_all
            )
    shape = len(x), x.shape[1]
    for one in UNSCALED.values():
        yield one
        if one.scales:
            yield from _blocks(one.format, one.by, ("tensor", "row", "column", "64rows", "128rows"), shape)
    if name == "v":
        for words, preset, block in (("MXFP8", "mxfp8", 32), ("MXFP4", "mxfp4", 32), ("NVFP4", "nvfp4", 16)):
            yield from _blocks(words, PRESETS[preset], (f"{block}x1",), shape)
    for words, preset in (("MXFP8", "mxfp8"), ("MXFP4", "mxfp4"), ("NVFP4", "nvfp4"), ("NF4", "nf4")):
        yield from _blocks(words, PRESETS[preset], (PRESETS[preset].block,), shape)
    rows = ("tensor", "row", *(f"{n}rows" for n in (16, 32, 64, 128)))
    groups = ("row", "column", *(f"{n}{of}" for n in (32, 64, 128) for of in ("", "x1")))
    for bits in (8, 4, 2):
        by = quantizer("int8", elements=f"int{bits}")
        if bits > 2:
            yield from _blocks(f"INT{bits}", by, (*rows, *groups[1:]), shape)
            half = quantizer(by, narrow=False, target=(2**bits - 1) / 2)
            yield from _blocks(
                f"INT{bits}", half, ("tensor", *groups), shape, f", the largest number over {half.target:g}"
            )
        if bits > 2 and name == "k":
            yield from _blocks(f"INT{bits}", by, rows, shape, ", without the mean of k", smooth=True)
        for zero, how in (("integer", ""), ("float", " that is not rounded")):
            asymmetric = quantizer(by, narrow=False, symmetric=False, zero_point=zero)
            yield from _blocks(f"INT{bits}", asymmetric, groups, shape, f" and a zero point{how}")
    for bits in (4, 5):  # llama.cpp's Q4_0 and Q5_0, and its Q5_1
        by = quantizer("int8", elements=f"int{bits}", narrow=False)
        lowest = f", the number of largest magnitude over -{2 ** (bits - 1)}"
        yield from _blocks(f"INT{bits}", quantizer(by, scale_of="extreme"), ("32",), shape, lowest)
    by = quantizer("int8", elements="int5", narrow=False, symmetric=False, zero_point="float")
    yield from _blocks("INT5", by, ("32",), shape, " and a zero point that is not rounded")


def _blocks(
    words: str, by: Quantizer, blocks: Sequence[str], shape: tuple[int, int], more: str = "", *, smooth: bool = False
) -> Iterator[LowBitFormat]:
    """A format with a scale for each of these blocks, of each shape once."""
    seen = set[tuple[int, int]]()
    for block in blocks:
        one = quantizer(by, block=block)
        rows, columns = one.block_shape(shape)
        size = min(rows, shape[0]), min(columns, shape[1])
        if size not in seen:
            seen.add(size)
            yield LowBitFormat(words, f"a scale for {block_words(block)}{more}", one, smooth=smooth)
