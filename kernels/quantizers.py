"""Block-scaled formats and integers below 16 bits: one scale for a block of elements, and rounding to them.

    s = round_scale(amax / target)          one for each block; amax = max |x| of the block
    code = clamp(round(x / s))              the element's format or integer
    y = s code                              what x has become

Asymmetric integers have a zero point z = lowest - round(min / s), s = round_scale((max - min) / (highest - lowest))
with 0 between min and max, code = clamp(round(x / s) + z) and y = s (code - z); a zero point that is not rounded is
added to x / s before that is. A second level (NVFP4) divides the blocks' scales by one of the whole tensor, t = amax of
the tensor / (target * largest scale), before they are rounded.

``target`` is the number that amax is mapped to: the elements' largest number (6 for E2M1, 7 for narrow INT4), the power
of two below it with the scale rounded down (OCP MX 1.0, section 6.3: 4), or half the range of the integers (7.5). So
the rules of the field are one rule:

    OCP floor                  target 2**emax,                        scale e8m0:down
    ceil                       target 2**emax,                        scale e8m0:up
    even                       target 2**emax (1 - 2**-(m + 2)),      scale e8m0:down, m mantissa bits of the elements
    round up (RCEIL, cuBLAS)   target the largest number,             scale e8m0:up

Sources: OCP Microscaling Formats (MX) 1.0; NVIDIA, "Pretraining Large Language Models with NVFP4", arXiv 2509.25149,
appendix C; Jacob et al., "Quantization and Training of Neural Networks", arXiv 1712.05877, for the zero point.

What is rounded follows the rules of ``kernels.formats``; beyond them:

- **One rounding.** With arithmetic "exact" a block's scale, each quotient and each product are correctly rounded, each
  once. "fp32" divides and multiplies in fp32 first, as most kernels do; "fp32-reciprocal" multiplies by fp32(1 / s)
  instead of dividing x; "fp32-inverse" multiplies x by fp32(target / amax), and codes by its reciprocal, and
  "fp32-torch-inverse" x by fp32(target * fp32(1 / amax)), which is what torch makes of 448 / amax; "fp32-triton"
  multiplies by Hopper's approximate reciprocals, as Triton's kernels do where they divide
  (``kernels.reciprocals``), also for the scale.
- **Clamping.** A code that passes the largest number becomes it.
- **NaN** makes its block NaN (all blocks, under a tensor's scale), and so does an infinity, whose scale is infinite;
  but of E8M0 the scale is then 2**127.
- **E8M0** holds 2**-127 to 2**127; a scale beyond them becomes the nearest, also that of a block of zeros. A tie
  between two powers goes up (1.5 to 2), as in torch's and ml_dtypes' casts.
- **Blocks of zeros** stay zeros, and a block whose scale underflows to 0 becomes zeros.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any, Literal, get_args

from attn_diag.kernels.elements import CodeBook, Integers, code_book
from attn_diag.kernels.formats import Mode, Rounding, parse

Arithmetic = Literal["exact", "fp32", "fp32-reciprocal", "fp32-inverse", "fp32-torch-inverse", "fp32-triton"]
_ARITHMETICS = get_args(Arithmetic)
_INTEGER = re.compile(r"int([2-8])")
_BLOCK = re.compile(r"(?:(\d+)x)?(\d+)")
_ROWS = re.compile(r"([1-9]\d*)rows(?:/([248]))?")
# Rows of a matrix that a warp's threads hold side by side (PTX's mma fragments).
FRAGMENT_ROWS = 8


def scale_rounding(text: str) -> Rounding | Mode | None:
    """What a scale is rounded to: None for fp32, a mode for a power of two. Raises ValueError."""
    base, colon, mode = text.partition(":")
    if base == "e8m0":
        if colon and mode not in (Mode.NEAREST_EVEN, Mode.UP, Mode.DOWN, Mode.STOCHASTIC):
            raise ValueError(f"a scale of e8m0 is rounded nearest-even, up, down or stochastic, got {mode!r}")
        return Mode(mode) if colon else Mode.NEAREST_EVEN
    if text == "fp32":
        return None
    rounding = parse(text)
    if rounding is None:
        raise ValueError(f"a scale's format is fp32, bf16, fp16, e4m3, e5m2 or e8m0, got {text!r}")
    return rounding


@dataclass(frozen=True)
class Quantizer:
    """A declared quantiser. Raises ValueError on what cannot be."""

    name: str
    """Its name."""
    elements: str
    """int2 to int8, or a format of ``kernels.formats`` without infinity (e2m1, e2m3, e3m2, e4m3) or e5m2; with an
    optional :rounding; or a list of numbers of ``kernels.elements`` (nf4, bnb-fp4)."""
    block: str
    """What shares a scale: "tensor", "row" (an output channel of a weight, a token of activations), "column", "32" (so
    many elements of a row), "128x128" (rows by columns), "128rows" (so many whole rows) or "64rows/4" (of so many whole
    rows those that one thread of a tensor core's fragments holds: row r is in group (r mod 8) // (8 / 4) of 4)."""
    scale: str = "fp32"
    """The scale's format, with an optional :rounding: fp32, bf16, fp16, e4m3, e5m2, e8m0 (a power of two)."""
    target: float | None = None
    """What amax is mapped to; None: the elements' largest number."""
    scale_of: Literal["amax", "mean", "extreme"] = "amax"
    """What scales are made of: a block's largest magnitude, the mean of its magnitudes (BitNet b1.58), or the number of
    the largest magnitude with its sign: it becomes the lowest integer, under a scale below 0 where it is above 0
    (llama.cpp's Q4_0, AutoRound). Where a block's smallest and largest number are as far from 0 it is the smallest."""
    symmetric: bool = True
    """Without a zero point."""
    zero_point: Literal["integer", "float"] = "integer"
    """What a zero point is rounded to: an integer, or nothing (HQQ, quanto); 0 need not lie between min and max then.
    """
    narrow: bool = False
    """Integers without the lowest one."""
    tensor_scale: bool = False
    """A second scale, fp32, of the whole tensor."""
    least_scale: float = 0.0
    """The blocks' scales are at least this."""
    scale_offset: float = 0.0
    """What is added to every scale before it is rounded."""
    divisor: Literal["stored", "unrounded"] = "stored"
    """What x is divided by: its block's scale as it is stored, or before that was rounded (SageAttention 3's P_bar)."""
    search: tuple[float, ...] = ()
    """Factors of amax that are tried in this order; the one with the least squared error of its block is taken."""
    stale: tuple[tuple[int, float], ...] = ()
    """Blocks, by number along the rows of scales, whose amax is taken for so many times what it is: a planted fault."""
    descale: tuple[tuple[int, float], ...] = ()
    """Blocks, likewise, whose codes are multiplied back with so many times their scale: a planted fault."""
    wraps: bool = False
    """Integers that pass the largest wrap around (two's complement) instead of becoming it: a planted fault."""
    values: str = "fp32"
    """What codes times scales are rounded to, to nearest: fp32, or the bf16 or fp16 in which a cache is multiplied."""
    code_offset: float = 0.0
    """What is added to integers before they are multiplied back, such as 1 of a zero point off by one: a planted fault.
    """
    level: float = 1.0
    """So many times the tensor's amax is taken for it in its second scale; blocks' scales stay as large as their format
    has them: a planted fault."""
    masked: bool = False
    """Of P_bar: its blocks' amax is made before scores are masked: a planted fault."""
    arithmetic: Arithmetic = "exact"
    """How is divided and multiplied."""
    ties: Literal["even", "away"] = "even"
    """Where integers are rounded to nearest: "away" truncates x / s + 0.5 sign(x), as C casts make it."""

    def __post_init__(self) -> None:
        elements = self.parsed_elements
        if not self.symmetric and not isinstance(elements, Integers):
            raise ValueError(f"quantizer {self.name}: a zero point is for integers, got elements {self.elements!r}")
        if self.narrow and not isinstance(elements, Integers):
            raise ValueError(f"quantizer {self.name}: narrow is for integers, got elements {self.elements!r}")
        if not self.symmetric and self.target is not None:
            raise ValueError(f"quantizer {self.name}: target is for symmetric ones; the others use their whole range")
        if self.target is not None and not 0 < self.target < float("inf"):
            raise ValueError(f"quantizer {self.name}: target must be a finite number above 0, got {self.target}")
        if self.scale_of not in ("amax", "mean", "extreme") or (self.scale_of != "amax" and not self._one_level):
            raise ValueError(
                f"quantizer {self.name}: scale_of is amax or, of one level without a zero point, mean or extreme, got "
                f"{self.scale_of!r}"
            )
        if self.scale_of == "extreme" and not (
            isinstance(elements, Integers) and not elements.narrow and self.scale in ("fp32", "bf16", "fp16")
            and not (self.least_scale or self.scale_offset or self.stale or self.masked)
        ):  # fmt: skip
            raise ValueError(
                f"quantizer {self.name}: scale_of=extreme is for integers with the lowest one and scales in fp32, bf16 "
                "or fp16 that are divided by as they are"
            )
        if self.zero_point not in ("integer", "float") or (self.zero_point == "float" and self.symmetric):
            raise ValueError(
                f"quantizer {self.name}: zero_point is integer or, where symmetric is false, float, got "
                f"{self.zero_point!r}"
            )
        if self.divisor not in ("stored", "unrounded") or (self.divisor == "unrounded" and not self._one_level):
            raise ValueError(
                f"quantizer {self.name}: divisor is stored or, of one level without a zero point, unrounded"
            )
        if not 0 <= self.scale_offset < float("inf"):
            raise ValueError(f"quantizer {self.name}: scale_offset must be 0 or more, got {self.scale_offset}")
        if self.arithmetic not in _ARITHMETICS:
            raise ValueError(f"quantizer {self.name}: arithmetic is one of {', '.join(_ARITHMETICS)}")
        if "inverse" in self.arithmetic and not (self._one_level and self.scale == "fp32"):
            raise ValueError(
                f"quantizer {self.name}: an inverse scale is one of fp32, of one level without a zero point"
            )
        if not all(0 < factor <= 1 for factor in self.search):
            raise ValueError(f"quantizer {self.name}: search wants factors above 0 and at most 1, got {self.search}")
        for field, of, parts in (("stale", "parts of amax", self.stale), ("descale", "factors", self.descale)):
            if parts and not (self.symmetric and all(block >= 0 and part > 0 for block, part in parts)):
                raise ValueError(
                    f"quantizer {self.name}: {field} wants numbers of blocks from 0 and {of} above 0, without a zero "
                    f"point, got {parts}"
                )
        if self.wraps and not (self.symmetric and isinstance(elements, Integers)):
            raise ValueError(f"quantizer {self.name}: what wraps are integers without a zero point")
        if self.values not in ("fp32", "bf16", "fp16"):
            raise ValueError(f"quantizer {self.name}: values are fp32, bf16 or fp16, got {self.values!r}")
        if self.code_offset and not isinstance(elements, Integers):
            raise ValueError(f"quantizer {self.name}: code_offset is for integers, got elements {self.elements!r}")
        if not (0 < self.level < float("inf")) or (self.level != 1.0 and not self.tensor_scale):
            raise ValueError(f"quantizer {self.name}: level is a number above 0, of two levels, got {self.level}")
        if self.masked and not self.symmetric:
            raise ValueError(f"quantizer {self.name}: masked is without a zero point")
        if self.ties not in ("even", "away") or (self.ties == "away" and not self._nearest_integers):
            raise ValueError(f"quantizer {self.name}: ties are even, or of integers rounded to nearest away")
        self.block_shape((1, 1))
        rounding = scale_rounding(self.scale)
        if self.tensor_scale and not isinstance(rounding, Rounding):
            raise ValueError(
                f"quantizer {self.name}: beside a tensor's scale blocks have one of e4m3, e5m2, bf16 or fp16"
            )

    @property
    def plain(self) -> bool:
        """Whether an element is an unchanged code times its block's scale, of one level without a zero point."""
        return self._one_level and self.values == "fp32" and not self.code_offset

    @property
    def _one_level(self) -> bool:
        return self.symmetric and not self.tensor_scale

    @property
    def _nearest_integers(self) -> bool:
        elements = self.parsed_elements
        return isinstance(elements, Integers) and elements.mode is Mode.NEAREST_EVEN

    @property
    def parsed_elements(self) -> Integers | Rounding | CodeBook:
        """What is rounded to. Raises ValueError."""
        base, colon, mode = self.elements.partition(":")
        if book := code_book(self.elements):
            return book
        if found := _INTEGER.fullmatch(base):
            if colon and mode not in set(Mode) - {Mode.RANDOM_SIGN}:
                raise ValueError(f"quantizer {self.name}: no rounding {mode!r} to integers")
            return Integers(int(found[1]), self.narrow, Mode(mode) if colon else Mode.NEAREST_EVEN)
        try:
            rounding = parse(self.elements)
        except ValueError:
            rounding = None
        if rounding is None or rounding.mode is Mode.RANDOM_SIGN:
            raise ValueError(f"quantizer {self.name}: elements are int2 to int8 or a format, got {self.elements!r}")
        return rounding

    @property
    def largest(self) -> float:
        """The elements' largest number."""
        elements = self.parsed_elements
        if isinstance(elements, CodeBook):
            return elements.numbers[-1]
        return float(elements.highest if isinstance(elements, Integers) else elements.format.largest)

    @property
    def mapped(self) -> float:
        """What a block's amax, or what its scale is made of, is mapped to."""
        elements = self.parsed_elements
        if self.target is None and self.scale_of == "extreme" and isinstance(elements, Integers):
            return -float(elements.lowest)
        return self.largest if self.target is None else self.target

    @property
    def row_groups(self) -> int:
        """Into how many groups of rows, each with a scale, ``block_shape`` is divided."""
        found = _ROWS.fullmatch(self.block)
        return int(found[2]) if found and found[2] else 1

    @property
    def whole_rows(self) -> bool:
        """Whether blocks are of whole rows, whatever their number."""
        return self.block in ("tensor", "row") or _ROWS.fullmatch(self.block) is not None

    def block_shape(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Rows and columns of a block, of all its ``row_groups``, in a matrix of ``shape``. Raises ValueError."""
        rows, columns = shape
        whole = {"tensor": (rows, columns), "row": (1, columns), "column": (rows, 1)}
        if self.block in whole:
            return whole[self.block]
        if found := _ROWS.fullmatch(self.block):
            if found[2] and int(found[1]) % FRAGMENT_ROWS:
                raise ValueError(f"quantizer {self.name}: threads share a multiple of 8 rows, got {self.block!r}")
            return int(found[1]), columns
        found = _BLOCK.fullmatch(self.block)
        if found is None or not int(found[2]) or found[1] == "0":
            raise ValueError(
                f"quantizer {self.name}: block is tensor, row, column, a number of columns such as 32, whole rows "
                f"such as 128rows or 64rows/4, or rows x columns such as 128x128, got {self.block!r}"
            )
        return int(found[1] or 1), int(found[2])


PRESETS: dict[str, Quantizer] = {
    found.name: found
    for found in (
        Quantizer("int8", "int8", "row", narrow=True),
        # torchao's weights: amax / 127.5, and -128 too.
        Quantizer("int8-half-range", "int8", "row", target=127.5),
        Quantizer("int8-asymmetric", "int8", "row", symmetric=False),
        # What INT4 training by fake quantisation uses (amax / 7); engines often divide by 7.5 and use -8 too.
        Quantizer("int4", "int4", "32", narrow=True),
        Quantizer("int4-half-range", "int4", "32", target=7.5),
        Quantizer("int4-asymmetric", "int4", "32", symmetric=False),
        # -1, 0, 1 times the mean of |w| (BitNet b1.58, arXiv 2402.17764, equations 1 to 3).
        Quantizer("ternary", "int2", "tensor", narrow=True, scale_of="mean"),
        # bitsandbytes' 4-bit types, in its blocks.
        Quantizer("nf4", "nf4", "64"),
        Quantizer("bnb-fp4", "bnb-fp4", "64"),
        Quantizer("fp8", "e4m3", "tensor"),
        Quantizer("fp8-row", "e4m3", "row"),
        # Weights in 128 x 128; "1x128" is for activations (DeepSeek-V3, arXiv 2412.19437, section 3.3).
        Quantizer("fp8-blocks", "e4m3", "128x128"),
        Quantizer("mxfp8", "e4m3", "32", "e8m0:down", 256.0),
        Quantizer("mxfp8-e5m2", "e5m2", "32", "e8m0:down", 32768.0),
        Quantizer("mxfp6", "e2m3", "32", "e8m0:down", 4.0),
        Quantizer("mxfp6-e3m2", "e3m2", "32", "e8m0:down", 16.0),
        Quantizer("mxfp4", "e2m1", "32", "e8m0:down", 4.0),
        Quantizer("mxint8", "int8", "32", "e8m0:down", 64.0, narrow=True),
        Quantizer("nvfp4", "e2m1", "16", "e4m3", tensor_scale=True),
    )
}


def quantizer(name: str | Quantizer, **changes: Any) -> Quantizer:
    """A preset, with fields of its own changed.

    Args:
        name: One of ``PRESETS``, or a quantiser.
        changes: Fields of ``Quantizer`` by name: ``quantizer("int4", block="128")``.

    Returns:
        The quantiser; changed, its name says how.

    Raises:
        ValueError: An unknown preset or field, or what cannot be.
    """
    if isinstance(name, str) and name not in PRESETS:
        raise ValueError(f"unknown quantizer {name!r}; there are {', '.join(PRESETS)}")
    found = PRESETS[name] if isinstance(name, str) else name
    known = {item.name for item in fields(Quantizer)} - {"name"}
    if unknown := set(changes) - known:
        raise ValueError(f"a quantizer has no {', '.join(sorted(unknown))}; it has {', '.join(sorted(known))}")
    if not changes:
        return found
    return replace(found, **{"name": name_changed(found.name, changes), **changes})


def name_changed(name: str, changes: Mapping[str, Any]) -> str:
    """A quantiser's name with ``changes`` of its fields: each field once, as it is in the end."""
    kept = [part for part in name.split(" ") if part.partition("=")[0] not in changes]
    return " ".join([*kept, *(f"{field}={value}" for field, value in changes.items())])


NO_QUANTIZER = "none"
_NUMBERS = ("target", "least_scale", "scale_offset", "code_offset", "level")


@cache
def parse_quantizer(text: str) -> Quantizer | None:
    """A quantiser as recipes write it: a preset and fields, "int8 block=128rows ties=away"; None for "none".

    Raises:
        ValueError: An unknown preset, field or value.
    """
    if text == NO_QUANTIZER:
        return None
    name, *parts = text.split()
    return quantizer(name, **dict(map(parse_field, parts)))


def parse_field(text: str) -> tuple[str, Any]:
    """A field of ``Quantizer`` and its value, of "field=value" as names have it.

    Raises:
        ValueError: It is not of that form, or the value is none of the field's.
    """
    field, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"a quantizer's field is field=value, such as block=128, got {text!r}")
    if field in ("symmetric", "narrow", "tensor_scale", "wraps", "masked"):
        if value.lower() not in ("true", "false"):
            raise ValueError(f"{field} is true or false, got {value!r}")
        return field, value.lower() == "true"
    if field in ("stale", "descale"):
        found = [re.fullmatch(r"(\d+):([\d.e+-]+)", each) for each in value.split(",")]
        if None in found:
            of = "a part of amax" if field == "stale" else "a factor"
            raise ValueError(f"{field} is a block's number and {of}, such as '3:0.5,7:0.6', got {value!r}")
        return field, tuple((int(each[1]), float(each[2])) for each in found if each)
    try:
        if field == "search":
            return field, tuple(float(part) for part in value.split(",") if part)
        if field in _NUMBERS:
            return field, None if value.lower() == "none" else float(value)
    except ValueError:
        raise ValueError(f"{field} is a number{' or several' * (field == 'search')}, got {value!r}") from None
    return field, value
