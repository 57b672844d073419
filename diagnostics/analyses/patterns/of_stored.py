"""O or a gradient that was stored below 16 bits and widened again, as an output that is quantised for the next product.

Nothing is searched for: all numbers are then codes of the format times a scale, a property that 16 bits have by chance
with a probability that is counted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from attn_diag.analyses.patterns.evidence import Evidence
from attn_diag.analyses.patterns.of_beyond import beyond
from attn_diag.head.quality import AS_GOOD
from attn_diag.reference import FloatFormat, ulp
from attn_diag.results.quality import Pattern
from attn_diag.results.wording import number, share

# Formats by the bits of their mantissa, or their largest code; what has fewer numbers first.
_INT4, _INT8 = ("INT4", 7), ("INT8", 127)
_FLOATS = (("FP4 (E2M1)", 1), ("FP8 (E5M2)", 2), ("FP8 (E4M3)", 3))
_UP_TO_TWO = "scale 1 up to a power of two"
# So many groups, and the square of it of numbers, are looked at before the others.
_FEW = 64
# What shares a scale, beside a head's and a row's numbers.
_BLOCK = 16
# By chance numbers are codes with probability exp(-_NATS) at most.
_NATS = 20.0
# Of a group so many numbers fit its scale, which leaves a part of a rounding.
_FITTED, _ROUNDINGS = 2, 1.5
# So much of the squared error storing explains, at least.
_EXPLAINED = 0.5
# Numbers are further off than that to a whole spacing, and so many times a well-rounded kernel's error, by no cast; and
# if more than this part of the rows hold such numbers, something else makes the error.
_CLEARLY, _MOST_BEYOND = 8.0, 0.1
# A kernel of FP16 may round to BF16 before the cast (P̄, say): its error is held against that of one of BF16.
_FP16_BITS, _BF16_BITS = 11, 8
# So many numbers share the largest size where a cast clips.
_MANY_CLIPPED = 8


@dataclass(frozen=True)
class StoredNumbers:
    """Which numbers a format has."""

    format: str
    """Its name."""
    words: str
    """The same with its scale, after "stored"."""
    step: Tensor
    """[n, D], the spacing of its numbers at each that was stored."""


def stored_below(evidence: Evidence) -> Pattern | None:
    """What O, dQ, dK or dV was stored in, where that is below 16 bits.

    Args:
        evidence: One of them that is lossy or wrong.
    """
    rows = evidence.usable.nonzero()[:, 0]
    observed, truth = evidence.observed[rows], evidence.truth[rows]
    grid = next(_grids(observed, evidence.fmt.precision, evidence.fmt.smallest_normal), None)
    if grid is None:
        return None
    away, last_bit = (observed - truth).abs(), ulp(observed, evidence.fmt)
    clipped = _clipped(observed, truth)
    # To nearest, and widened again, it is half a spacing of both further off than a well-rounded kernel at most; to
    # either side a whole one.
    far = away - _spacing(grid, observed, truth) - last_bit
    clearly = _CLEARLY * 2.0 ** (min(evidence.fmt.precision, _FP16_BITS) - _BF16_BITS)
    far = far > clearly * (evidence.noise[rows, None] / truth.shape[1]).sqrt()
    beyond_it = (far & ~clipped).any(1)
    if float(beyond_it.double().mean()) > _MOST_BEYOND:
        return None
    left_of = (away - (grid.step + last_bit) / 2).clamp(min=0.0).square()
    own = ~beyond_it
    before, noise = (away.square() * ~clipped)[own].sum(), evidence.noise[rows][own].sum()
    left_over = (left_of * ~clipped)[own].sum()
    explained = 1 - float(left_over / before.clamp(min=1e-300))
    if not explained >= _EXPLAINED:
        return None
    numbers = f"are stored {grid.words}"
    if bool(clipped.any()):
        largest, clips = number(float(observed.abs().max())), share(float(clipped.double().mean()))
        numbers += f", {clips} of their numbers clipped at {largest}"
    left = math.sqrt(float(left_over / noise.clamp(min=1e-300)))
    if bool(beyond_it.any()):
        if left > AS_GOOD:
            return None  # a factor, or what else all rows have
        others = f"all {evidence.unit} {numbers}"
        return beyond(evidence, rows[beyond_it], away[beyond_it], ", more than storing makes", others)
    words = f"all {evidence.unit} {numbers}, and but for that as good as a well-rounded kernel's"
    if left > AS_GOOD:
        off_them = f"{number(left)} times a well-rounded kernel's error off the nearest such numbers"
        words = f"all {evidence.unit} {numbers}, {off_them}"
    return Pattern("stored", words, explained, left, formats={evidence.quantity: grid.format})


def stored_in(observed: Tensor, fmt: FloatFormat) -> str | None:
    """The format below 16 bits that all numbers [n, D] are codes of; None: of none."""
    grid = next(_grids(observed, fmt.precision, fmt.smallest_normal), None)
    return None if grid is None else grid.format


def _spacing(grid: StoredNumbers, observed: Tensor, truth: Tensor) -> Tensor:
    """How far a cast of any kind may move numbers, [n, D].

    Where scales are powers of two the largest of a block may be clipped by two of its spacings; the smallest number of
    FP4 is an eighth of the largest.
    """
    step, width = grid.step, observed.shape[1]
    for size in (_BLOCK, 2 * _BLOCK):
        if width % size == 0:
            blocks = observed.abs().reshape(-1, size)
            largest = blocks.amax(1, keepdim=True).expand_as(blocks).reshape(observed.shape)
            step = torch.where(
                (observed.abs() == largest) & (truth.abs() > largest), torch.maximum(step, 2 * grid.step), step
            )
            if grid.format == _FLOATS[0][0]:
                step = torch.maximum(step, largest / 8)
    return step


def _clipped(observed: Tensor, truth: Tensor) -> Tensor:
    """Which numbers are the largest there is though they should be larger still; none where they are few."""
    largest = observed.abs() == observed.abs().amax()
    found = largest & (truth.abs() > observed.abs()) & (truth.sign() == observed.sign())
    return found if int(found.sum()) >= _MANY_CLIPPED else torch.zeros_like(found)


def _grids(x: Tensor, precision: int, smallest: float = 0.0) -> Iterator[StoredNumbers]:
    """Formats of which all numbers [n, D] of 16 bits, with ``precision`` bits of significand, are codes.

    Below ``smallest`` the numbers of 16 bits are evenly spaced.
    """
    groups = [("a scale for the head", x.reshape(1, -1)), ("a scale for each row", x)]
    if x.shape[1] % _BLOCK == 0:
        groups.append((f"a scale for {_BLOCK} numbers", x.reshape(-1, _BLOCK)))
    yield from _integers(x, groups, precision, *_INT4)
    for (name, bits), (scale, group) in product(_FLOATS, groups):
        if bits >= precision or _float_step(_few(group), bits, precision, smallest) is None:
            continue
        if (found := _float_step(group, bits, precision, smallest)) is not None:
            step, exact = found
            how = f"{name[:-1]}, {_UP_TO_TWO if exact else scale})"
            bits_words = "1 bit" if bits == 1 else f"{bits} bits"
            yield StoredNumbers(name, f"with {bits_words} of mantissa, as in {how}", step.reshape(x.shape))
    yield from _integers(x, groups, precision, *_INT8)


def _integers(
    x: Tensor, groups: Sequence[tuple[str, Tensor]], precision: int, name: str, largest: int
) -> Iterator[StoredNumbers]:
    for scale, group in groups:
        ends = group.abs().amax(1, keepdim=True)
        if _integer_step(_few(group), _few(ends), precision, largest) is None:
            continue
        if (step := _integer_step(group, ends, precision, largest)) is not None:
            yield StoredNumbers(name, f"in {name} ({scale})", step.expand(group.shape).reshape(x.shape))


def _float_step(groups: Tensor, bits: int, precision: int, smallest: float) -> tuple[Tensor, bool] | None:
    """The spacing of a format with so many bits at numbers [G, N], each group with a scale, and whether all scales are
    powers of two; None: these are not its numbers."""
    zero = groups == 0
    size = torch.where(zero, 1.0, groups.abs())
    codes = 1 + torch.arange(2**bits + 1, dtype=groups.dtype, device=groups.device) / 2**bits
    # A number of each group is its scale times one of the codes: which one, is tried.
    first = size.gather(1, torch.where(zero, 0.0, size).argmax(1, keepdim=True))
    scales = first / codes[:-1]  # [G, codes]
    # Scale and number were rounded, the one that the scale is taken of too.
    tolerance = 2.0**-precision * (smallest / size).clamp(min=1.0)
    tried = []
    for scale in scales.mT[..., None]:
        exponent = (size / scale).log2().floor()
        off = (size[..., None] / (scale * exponent.exp2())[..., None] / codes - 1).abs().min(-1)
        tried.append(((off.values / tolerance).masked_fill(zero, 0.0).amax(1), off.indices, exponent))
    furthest, best = torch.stack([one[0] for one in tried]).min(0)  # [G]
    if bool((furthest > 1).any()):
        return None
    code, exponent = (torch.stack([one[i] for one in tried])[best, torch.arange(len(best))] for i in (1, 2))
    # Numbers that are all the same, as where V is, are codes of any format.
    if len(torch.unique((code % 2**bits)[~zero])) <= 2**bits // 2:
        return None
    by_chance = (2 ** (bits + 1) * tolerance / math.log(2.0)).clamp(max=1.0).masked_fill(zero, 1.0)
    telling = (~zero).sum(1)
    if not float((-by_chance.log().sum(1) * (1 - _FITTED / telling.clamp(min=_FITTED))).sum()) > _NATS:
        return None
    scale = scales.gather(1, best[:, None])
    step = scale * (exponent - bits + (code == 2**bits)).exp2()
    # Next to zero the spacing is the smallest number.
    least = torch.where(zero, math.inf, size).amin(1, keepdim=True)
    least = torch.where(zero.any(1, keepdim=True) & least.isfinite(), least, 0.0)
    return torch.maximum(torch.where(zero, 0.0, step), least), bool((scale.frexp().mantissa == 0.5).all())


def _few(groups: Tensor) -> Tensor:
    """Some of the groups [G, N], and of long ones some of their numbers."""
    count, length = groups.shape
    return groups[:: -(-count // _FEW), :: -(-length // _FEW**2)]


def _integer_step(groups: Tensor, ends: Tensor, precision: int, largest: int) -> Tensor | None:
    """The step [G, 1] of integers in numbers [G, N] of which ``ends`` [G, 1] is the last code; None: they are none."""
    step = ends / largest
    # Codes, each with its rounding, are apart as long as they are small; the largest was rounded as well.
    telling = min(largest, 2 ** (precision - 1))
    for most in (telling // 4, telling // 2, telling):
        code = (groups / step.clamp(min=1e-300)).round()
        small = torch.where(code.abs() <= most, code, 0.0)
        fitted = (groups * small).sum(1, keepdim=True) / small.square().sum(1, keepdim=True).clamp(min=1.0)
        step = torch.where(fitted > 0, fitted, step)
    code = (groups / step.clamp(min=1e-300)).round()
    within = _ROUNDINGS * 2.0 ** -(precision + 1) * (groups.abs() + step)
    tells = (4 * within < step) & (code.abs() <= telling)
    # Means of equal numbers are codes too, but few.
    if bool(((groups - code * step).abs() > within)[tells].any()) or len(torch.unique(code[tells])) <= largest // 2:
        return None
    by_chance = torch.where(tells, 2 * within / step.clamp(min=1e-300), 1.0)
    told = (-by_chance.log().sum(1) * (1 - _FITTED / tells.sum(1).clamp(min=_FITTED))).sum()
    return step if float(told) > _NATS else None
