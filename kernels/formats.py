"""Number formats of rounding sites, and rounding to them.

A site is written as ``format`` or ``format:rounding``: "bf16", "e4m3", "e8m11:toward-zero", "fp16:stochastic".
``e<x>m<y>`` names any format with x exponent and y mantissa bits. "fp32" and "fp64" at a site mean the
arithmetic's own precision: nothing is rounded there. (A rounding to fp32 inside float64 arithmetic is "e8m23".)

The rules, for torch tensors (here), numpy arrays (``rounding_numpy``), inside Triton kernels (``triton_rounding``) and
for ``attn_diag.reference.round_nearest_even``:

- **Numbers.** IEEE 754's, with subnormals and infinities, but for four. e4m3 is OCP OFP8's: its largest number is 448,
  the one pattern after it is NaN, and there is no infinity. e2m1 (FP4), e2m3 and e3m2 (FP6) are OCP MX 1.0's: every
  pattern is a number, the largest are 6, 7.5 and 28.
- **One rounding.** float64 goes to the format directly, never through fp32.
- **Modes.** nearest-even, toward-zero, up and down as in IEEE 754-2019, section 4.3. stochastic: to the upper of the
  two neighbours with probability (x - lower) / (upper - lower). random-sign: x + e or x - e by the toss of a coin,
  where e is the error of nearest-even; the result need not be a number of the format. In every mode the format's own
  numbers stay.
- **Subnormals.** Below the smallest normal number the spacing stays what it is there; nothing is flushed to zero.
- **Overflow** is what passes the largest number when rounded as if larger ones followed. It becomes infinity in
  nearest-even, stochastic and random-sign, and in up and down where they lead away from zero; else the largest number.
  Without infinities it becomes the largest number in every mode (.satfinite of NVIDIA's PTX; for e4m3 torch 2.13 on a
  CPU, where older torch's and ml_dtypes' casts make NaN of it; OCP MX 1.0, 5.3).
- **Infinities** stay, in these formats too: -inf marks what is masked.
- **Zero**, given or underflowed to, has the sign of x in every mode.
- **NaN** stays NaN; its sign and payload are not specified.
"""

from __future__ import annotations

import re
import zlib
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import Literal

import torch
from torch import Tensor

# "bf16" and so on, or e<exponent bits>m<mantissa bits>, each with an optional ":rounding".
Format = str
# What the patterns with the largest exponent hold: infinity and NaN (IEEE 754), numbers and, all ones, NaN (E4M3), or
# numbers alone (OCP MX's FP4 and FP6).
Top = Literal["infinity", "nan", "numbers"]

_EXPONENT_FIELD = 0x7FF << 52  # of a float64
_BIAS = 1023


class Mode(StrEnum):
    """How a value between two numbers of the format is rounded.

    STOCHASTIC goes up or down with probabilities that make the mean right. RANDOM_SIGN is the sham of a repair: the
    nearest-even error keeps its size and gets a random sign, so that its mean vanishes and its variance stays.
    """

    NEAREST_EVEN = "nearest-even"
    TOWARD_ZERO = "toward-zero"
    UP = "up"
    DOWN = "down"
    STOCHASTIC = "stochastic"
    RANDOM_SIGN = "random-sign"


@dataclass(frozen=True)
class NumberFormat:
    """A binary format with subnormals."""

    exponent_bits: int
    """Bits of the exponent."""
    mantissa_bits: int
    """Explicit bits of the significand."""
    top: Top = "infinity"
    """What its top exponent holds."""

    @property
    def finite(self) -> bool:
        """It has no infinity: what is too large becomes its largest number."""
        return self.top != "infinity"

    @property
    def min_exponent(self) -> int:
        """Exponent of the smallest normal number."""
        return 2 - (1 << (self.exponent_bits - 1))

    @property
    def largest(self) -> float:
        """The largest finite number. Of E4M3 (OCP OFP8) the all-ones pattern is NaN, so 448."""
        top = 2 ** (self.exponent_bits - 1) - 1 + self.finite
        return float((2 - (2 if self.top == "nan" else 1) * 2.0**-self.mantissa_bits) * 2.0**top)


@dataclass(frozen=True)
class Rounding:
    """A parsed site."""

    format: NumberFormat
    """What is rounded to."""
    mode: Mode = Mode.NEAREST_EVEN
    """How."""


_NAMED = {
    "bf16": NumberFormat(8, 7),
    "fp16": NumberFormat(5, 10),
    "tf32": NumberFormat(8, 10),
    "e4m3": NumberFormat(4, 3, "nan"),
    "e5m2": NumberFormat(5, 2),
    "e3m2": NumberFormat(3, 2, "numbers"),
    "e2m3": NumberFormat(2, 3, "numbers"),
    "e2m1": NumberFormat(2, 1, "numbers"),
}
# Formats that torch can store and round to itself.
STORED = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
_NATIVE = {_NAMED["bf16"]: torch.bfloat16, _NAMED["fp16"]: torch.float16}
_GENERIC = re.compile(r"e(\d{1,2})m(\d{1,2})")


@cache
def parse(text: Format) -> Rounding | None:
    """What a site's text asks for; None for "fp32" and "fp64". Raises ValueError for anything else unknown."""
    name, colon, mode = text.partition(":")
    if name in ("fp32", "fp64") and not colon:
        return None
    fmt = _NAMED.get(name)
    if fmt is None and (found := _GENERIC.fullmatch(name)):
        exponent, mantissa = int(found[1]), int(found[2])
        if 2 <= exponent <= 8 and 1 <= mantissa <= 23:
            fmt = NumberFormat(exponent, mantissa)
    if fmt is None or (colon and mode not in set(Mode)):
        raise ValueError(
            f"a format is one of {', '.join([*_NAMED, 'fp32', 'fp64'])} or e<2..8>m<1..23>, with an optional "
            f":rounding out of {', '.join(Mode)}, got {text!r}"
        )
    return Rounding(fmt, Mode(mode) if colon else Mode.NEAREST_EVEN)


def base(text: Format) -> str:
    """The format's name without its rounding."""
    return text.partition(":")[0]


def rounds_monotonically(text: Format) -> bool:
    """Whether larger values never round to smaller ones: in every mode that does not draw."""
    rounding = parse(text)
    return rounding is None or rounding.mode not in (Mode.STOCHASTIC, Mode.RANDOM_SIGN)


def round_to(x: Tensor, rounding: Rounding | None, seed: int = 0, heads: int = 0) -> Tensor:
    """``x`` (fp32 or float64) rounded once, in ``x``'s own dtype, after the rules above; None changes nothing.

    Nearest-even and directed roundings are correct for every input. ``seed`` (of which torch's CPU generator looks at
    32 bits) starts the random modes. They draw 24 bits an element: no mean is off by 2**-24 of a spacing for it. What
    lies side by side on the first ``heads`` axes draws the same numbers.
    """
    if rounding is None or x.numel() == 0:
        return x
    native = _NATIVE.get(rounding.format)
    if native is not None and rounding.mode is Mode.NEAREST_EVEN and x.dtype == torch.float32:
        return x.to(native).float()
    fmt, mode = rounding.format, rounding.mode
    wide = x.double()
    if mode in (Mode.NEAREST_EVEN, Mode.RANDOM_SIGN):
        unlimited = _nearest_even(wide, fmt)
        rounded = _limited(unlimited, wide, fmt, mode)
        if mode is Mode.RANDOM_SIGN:
            flips = (_draw(wide, seed, heads) >= 0.5) & (unlimited.abs() <= fmt.largest)  # false for NaN
            rounded = torch.where(flips, (wide - (rounded - wide)).copysign_(wide), rounded)
        return rounded.to(x.dtype)
    quantum = _spacing(wide, fmt)
    steps = wide / quantum  # exact: a power of two
    steps = round_steps(steps, mode, seed, heads)
    return _limited(steps.mul_(quantum), wide, fmt, mode).copysign_(wide).to(x.dtype)


def round_steps(steps: Tensor, mode: Mode, seed: int = 0, heads: int = 0) -> Tensor:
    """``steps`` rounded to integers, of its dtype, in any mode but random-sign; zero need not keep its sign.

    NaN and infinities stay. ``seed`` and ``heads`` as for ``round_to``.
    """
    if mode is Mode.STOCHASTIC:
        # The draw is compared with the fraction alone: a sum with many steps would be rounded itself.
        whole = steps.floor()
        return whole + (_draw(steps, seed, heads) < steps - whole)
    rules = {Mode.NEAREST_EVEN: torch.round, Mode.TOWARD_ZERO: torch.trunc, Mode.UP: torch.ceil, Mode.DOWN: torch.floor}
    return rules[mode](steps)


def _nearest_even(x: Tensor, fmt: NumberFormat) -> Tensor:
    """``x`` float64. C = 1.5 * 2**52 * spacing: the addition x + C itself rounds to the spacing, ties to even."""
    constant = _spacing(x, fmt).mul_(1.5 * 2.0**52)
    return torch.add(x, constant).sub_(constant).copysign_(x)


def _draw(x: Tensor, seed: int, heads: int) -> Tensor:
    """Uniform on [0, 1), in the shape of ``x`` after its first ``heads`` axes, and on its device."""
    generator = torch.Generator(x.device).manual_seed(seed)
    # 24 bits are enough, and half as many bits take half the time.
    return torch.rand(x.shape[heads:], generator=generator, device=x.device, dtype=torch.float32)


def site_seed(seed: int, site: str, row: int, key: int) -> int:
    """A seed that depends on nothing but the recipe's, the site and the place, so that variants share their draws."""
    return zlib.crc32(f"{seed} {site} {row} {key}".encode())


def _spacing(x: Tensor, fmt: NumberFormat) -> Tensor:
    """Distance of neighbouring numbers of ``fmt`` at |x| (that of its smallest normal below it); ``x`` float64."""
    exponent = (x.view(torch.int64) & _EXPONENT_FIELD).clamp_(
        (fmt.min_exponent + _BIAS) << 52, (_BIAS + 2**fmt.exponent_bits) << 52
    )
    exponent -= fmt.mantissa_bits << 52
    return exponent.view(torch.float64)


def _limited(rounded: Tensor, x: Tensor, fmt: NumberFormat, mode: Mode) -> Tensor:
    """Overflow of what was rounded from ``x``."""
    # (A GPU's host would wait for the answer.)
    if not x.is_cuda:
        lowest, highest = map(float, rounded.detach().aminmax())
        if lowest >= -fmt.largest and highest <= fmt.largest:  # false for NaN
            return rounded
    over = rounded.abs() > fmt.largest
    stays = torch.full_like(over, fmt.finite or mode is Mode.TOWARD_ZERO)
    if mode is Mode.UP:
        stays = stays | (x < 0)
    elif mode is Mode.DOWN:
        stays = stays | (x > 0)
    limit = torch.where(stays & x.isfinite(), fmt.largest, torch.inf)
    return torch.where(over, limit.copysign(rounded), rounded)
