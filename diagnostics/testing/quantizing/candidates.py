"""Which quantiser made these values: the declared one, those that differ from it in one thing or two, or none."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import torch
from torch import Tensor

from attn_diag.kernels.formats import Mode, Rounding
from attn_diag.kernels.quantize import Quantized, quantize, spread
from attn_diag.kernels.quantizers import PRESETS, Arithmetic, Integers, Quantizer
from attn_diag.results.quant import QuantizerMatch
from attn_diag.work import Progress, part_of, silent

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
_ARITHMETICS: dict[Arithmetic, str] = {
    "exact": "in exact arithmetic",
    "fp32": "in fp32 arithmetic",
    "fp32-reciprocal": "in fp32 arithmetic with reciprocal scales",
}
_CASTS = {"bf16": torch.bfloat16, "fp16": torch.float16}
# Rows of w on which quantisers are tried whose blocks lie within a row.
_ROWS = 128
_PAIRS_OF = 4
_KEPT = 4
# Of so many sets of candidates at most, one after the other.
_ATTEMPTS = 4


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
    own_format: bool = False
    """Computed in w's own 16-bit format, which the scales have too, and times their reciprocals, as torchao does it."""

    @property
    def declarable(self) -> bool:
        """Whether ``by`` alone says what it is."""
        return not self.zero_shift and self.amax_factor is None and self.gain == 1 and not self.cast

    def values(self, w: Tensor) -> Quantized:
        """What it makes of ``w``."""
        found = self._values(w.to(_CASTS[self.cast]).to(w.dtype) if self.cast else w)
        return found if self.gain == 1 else replace(found, values=found.values * self.gain)

    def _values(self, w: Tensor) -> Quantized:
        if self.own_format:
            return _in_own_format(w, self.by)
        if self.amax_factor is not None:
            own = quantize(w, replace(self.by, scale="fp32", least_scale=0.0))
            target = self.by.largest if self.by.target is None else self.by.target
            return quantize(w, self.by, amax=own.scale * target * self.amax_factor)
        found = quantize(w, self.by)
        if not self.zero_shift:
            return found
        scale = spread(found.scale, (w.shape[0], w.shape[1]), self.by)
        return replace(found, values=found.values - self.zero_shift * scale)


def _in_own_format(w: Tensor, by: Quantizer) -> Quantized:
    """What symmetric integers become in w's format."""
    found, elements = quantize(w, by), by.parsed_elements
    assert isinstance(elements, Integers)
    scale = spread(found.scale, (w.shape[0], w.shape[1]), by).to(w.dtype)
    codes = (w * (1 / scale)).round().clamp(elements.lowest, elements.highest).nan_to_num()
    return replace(found, codes=codes, values=codes * scale)


def _computed_in(w: Tensor, by: Quantizer) -> str:
    """The 16-bit format in which torch may have computed this quantiser; empty: in none."""
    integers = isinstance(by.parsed_elements, Integers) and by.elements.isalnum()
    found = next((name for name, dtype in _CASTS.items() if w.dtype == dtype), "")
    return found if integers and by.symmetric and not by.tensor_scale else ""


def equal_values(candidate: PossibleQuantizer, w: Tensor, observed: Tensor) -> Tensor:
    """Which elements have the candidate's value, bool; drawn ones may have either neighbour's."""
    base, _, mode = candidate.by.elements.partition(":")
    modes = (Mode.UP, Mode.DOWN) if mode == Mode.STOCHASTIC else (mode or Mode.NEAREST_EVEN,)
    equal = torch.zeros_like(observed, dtype=torch.bool)
    for one in modes:
        made = replace(candidate, by=replace(candidate.by, elements=f"{base}:{one}")).values(w).values
        equal |= _alike(candidate, made, observed)
    return equal


def _share(equal: Tensor) -> float:
    return float(equal.double().mean())


def _alike(candidate: PossibleQuantizer, made: Tensor, observed: Tensor) -> Tensor:
    """Where ``observed`` is what the candidate made, bool."""
    if candidate.amax_factor is None and candidate.gain == 1:
        same = made.to(observed.dtype) == observed
        slack = _LAST_BITS if observed.dtype in (torch.float32, torch.float64) else 0.0
    else:
        same = torch.zeros_like(observed, dtype=torch.bool)
        slack = max(_FACTOR_TOLERANCE, torch.finfo(observed.dtype).eps)
    return same | ((made.double() - observed.double()).abs() <= slack * made.double().abs())


def strays(candidate: PossibleQuantizer, w: Tensor, observed: Tensor) -> Tensor:
    """Where values are farther from the candidate's than a tie or a last bit takes them, bool: more than a number."""
    made = candidate.values(w)
    shape = w.shape[0], w.shape[1]
    scale = spread(made.scale, shape, candidate.by).double() * candidate.gain
    if made.tensor_scale is not None:
        scale = scale * made.tensor_scale.double()
    elements = candidate.by.parsed_elements
    step = torch.ones_like(made.codes, dtype=torch.float64)
    if isinstance(elements, Rounding):
        fmt = elements.format
        least = 2.0 ** (fmt.min_exponent - fmt.mantissa_bits)
        step = (made.codes.double().abs() * 2.0**-fmt.mantissa_bits).clamp(min=least)
    apart = (made.values.double() - observed.double()).abs()
    slack = torch.finfo(observed.dtype).eps * made.values.double().abs()
    # Where a block's own scale becomes 0, others keep their smallest one.
    return (apart > step * scale * (1 + _FACTOR_TOLERANCE) + slack) & (scale > 0)


def identify(
    w: Tensor, observed: Tensor, declared: Quantizer | None, progress: Progress = silent
) -> tuple[list[QuantizerMatch], PossibleQuantizer | None]:
    """The declared quantiser and those that come nearest, best first, and the one that made the values, if one did.

    Args:
        w: The weight, [R, C].
        observed: What became of it, of its shape.
        declared: The quantiser that should have done it; None: any preset may have.
        progress: Called with (done, total) after each candidate.
    """
    starts = _presets() if declared is None else _as_declared(declared, w)
    tried: dict[str, tuple[float, PossibleQuantizer]] = {}
    attempts = count()

    def attempt(candidates: Sequence[PossibleQuantizer]) -> float:
        listen = part_of(progress, next(attempts), _ATTEMPTS) or silent
        for number, candidate in enumerate(candidates):
            listen(number, len(candidates))
            if candidate.words not in tried:
                rows = slice(None) if _looks_beyond_rows(candidate.by) else slice(_ROWS)
                share = _share(equal_values(candidate, w[rows], observed[rows]))
                if share >= SAME and rows.stop is not None and len(w) > _ROWS:
                    share = _share(equal_values(candidate, w, observed))
                if _is_drawn(candidate) and candidate not in starts:
                    # Whatever else lies on this grid fits it too.
                    share = min(share, SAME) if _looks_drawn(candidate, w[rows], observed[rows]) else 0.0
                tried[candidate.words] = share, candidate
        return max((share for share, _ in tried.values()), default=0.0)

    def best(most: int) -> list[PossibleQuantizer]:
        return [c for _, c in sorted(tried.values(), key=lambda found: -found[0])[:most]]

    if attempt(starts) < 1:
        bases, meant = best(_PAIRS_OF if declared is None else 1), list[PossibleQuantizer]()
        if declared is not None:
            # Of as many bits, as somebody may have meant it.
            bits = declared.elements.partition(":")[0]
            meant = [c for c in _presets() if c.by.elements.partition(":")[0] == bits]
            attempt(meant)
        if attempt([c for base in bases for c in _changes(base, w, observed)]) < SAME:
            again = {c.words: c for c in (*best(_PAIRS_OF), *meant)}
            attempt([c for base in again.values() for c in _changes(base, w, observed)])
    order = sorted(tried.values(), key=lambda found: -found[0])
    share, winner = order[0]
    shown = order[:_KEPT]
    if declared is not None:
        own = max((tried[c.words] for c in starts), key=lambda found: found[0])
        if own[0] >= SAME and share < 1:
            winner = own[1]  # nothing else explains the rest
        if own not in shown:
            shown = [*shown[: _KEPT - 1], own]
    matches = [QuantizerMatch(c.by.name, c.words, part) for part, c in shown]
    return matches, winner if share >= SAME else None


def _is_drawn(candidate: PossibleQuantizer) -> bool:
    return candidate.by.elements.endswith(Mode.STOCHASTIC)


def _looks_drawn(candidate: PossibleQuantizer, w: Tensor, observed: Tensor) -> bool:
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


def _as_declared(by: Quantizer, w: Tensor) -> list[PossibleQuantizer]:
    """In any arithmetic: that is no other quantiser."""
    own = _computed_in(w, by)
    others = [(a, words) for a, words in _ARITHMETICS.items() if a != by.arithmetic]
    return [
        PossibleQuantizer(by, DECLARED),
        *(PossibleQuantizer(replace(by, arithmetic=a), f"{DECLARED}, {words}") for a, words in others),
        *([PossibleQuantizer(by, f"{DECLARED}, in {own} arithmetic", own_format=True)] if own == by.scale else []),
    ]


def _presets() -> list[PossibleQuantizer]:
    return [PossibleQuantizer(by, f"the rules of {name}") for name, by in PRESETS.items()]


def _looks_beyond_rows(by: Quantizer) -> bool:
    return by.tensor_scale or by.block in ("tensor", "column") or "x" in by.block


def _changes(start: PossibleQuantizer, w: Tensor, observed: Tensor) -> Iterator[PossibleQuantizer]:
    """What differs from ``start`` in one thing, the likelier first."""
    by = start.by

    def changed(words: str, **changes: Any) -> PossibleQuantizer | None:
        try:
            other = replace(by, **changes)
        except ValueError:
            return None
        if (
            other == by
            or (start.amax_factor and "target" in changes)
            or (start.zero_shift and other.symmetric)
            or (start.amax_factor and not other.symmetric)
            or start.gain != 1
        ):
            return None
        name = " ".join([by.name, *(f"{k}={v}" for k, v in changes.items())])
        return replace(start, by=replace(other, name=name), words=_and(start, words))

    found: list[PossibleQuantizer | None] = []
    size = by.block if by.block.isdigit() else "32"
    for block in ("16", "32", "64", "128", "256", "row", "column", "tensor", "128x128", f"{size}x1"):
        what = {
            "row": "a scale for each row",
            "column": "a scale for each column",
            "tensor": "one scale for the tensor",
            f"{size}x1": f"blocks of {size} down the columns",
        }
        found.append(changed(what.get(block, f"blocks of {block}"), block=block))
    elements = by.elements.partition(":")[0]
    modes = (Mode.NEAREST_EVEN, Mode.TOWARD_ZERO, Mode.DOWN, Mode.UP, Mode.STOCHASTIC)
    found += [changed(f"elements rounded {mode}", elements=f"{elements}:{mode}") for mode in modes]
    for other, target in _other_elements(by):
        mapped = "" if target is None else f", amax mapped to {target:g}"
        found.append(changed(f"elements in {other}{mapped}", elements=other, target=target))
    found += [changed(words, target=target) for target, words in _targets(by)]
    for scale in ("fp32", "bf16", "fp16", "e8m0", "e8m0:up", "e8m0:down", "e4m3", "e5m2"):
        found.append(changed(f"scales rounded to {scale}", scale=scale))
        if by.target is not None:
            found.append(
                changed(f"scales rounded to {scale} of amax over the largest number", scale=scale, target=None)
            )
    found.append(
        changed("with the lowest integer" if by.narrow else "without the lowest integer", narrow=not by.narrow)
    )
    found.append(
        changed("symmetric", symmetric=True)
        if not by.symmetric
        else changed("with a zero point", symmetric=False, target=None)
    )
    found += [changed(words, arithmetic=a) for a, words in _ARITHMETICS.items()]
    if own := _computed_in(w, by):
        computed = changed(f"scales and arithmetic in {own}", scale=own) or (start if by.scale == own else None)
        found.append(
            computed and replace(computed, words=_and(start, f"scales and arithmetic in {own}"), own_format=True)
        )
    if w.dtype in (torch.float32, torch.float64) and not start.cast:
        found += [replace(start, words=_and(start, f"w rounded to {fmt} first"), cast=fmt) for fmt in _CASTS]
    if start.gain == 1 and start.amax_factor is None:
        found += [
            replace(start, words=_and(start, f"values multiplied by {gain:.4g} afterwards"), gain=gain)
            for gain in _gains(start, w, observed)
        ]
    if not by.symmetric:
        found += [replace(start, words=_and(start, f"the zero point off by {n:+d}"), zero_shift=n) for n in (1, -1)]
    elif not by.tensor_scale:
        found += [
            replace(start, words=_and(start, f"an amax {factor:.4g} times the data's"), amax_factor=factor)
            for factor in _amax_factors(by, w, observed)
        ]
    return (candidate for candidate in found if candidate is not None)


def _and(start: PossibleQuantizer, words: str) -> str:
    return words if start.words.startswith(DECLARED) else f"{start.words}, {words}"


def _targets(by: Quantizer) -> Iterator[tuple[float | None, str]]:
    """Other numbers that amax may be mapped to."""
    elements = by.parsed_elements
    if isinstance(elements, Integers):
        yield None, f"amax mapped to {elements.highest}"
        yield elements.highest + 0.5, f"amax mapped to {elements.highest + 0.5:g}"
        yield float(elements.highest + 1), f"amax mapped to {elements.highest + 1}"
        return
    assert isinstance(elements, Rounding)
    fmt = elements.format
    power = 2.0 ** (torch.frexp(torch.tensor(fmt.largest, dtype=torch.float64)).exponent.item() - 1)
    yield None, f"amax mapped to {fmt.largest:g}"
    yield power, f"amax mapped to {power:g}"
    yield power * (1 - 2.0 ** -(fmt.mantissa_bits + 2)), "amax rounded to the elements before its power of two is taken"
    if by.elements.partition(":")[0] == "e4m3":
        yield 240.0, "amax mapped to 240, the largest number of E4M3 FNUZ"


def _other_elements(by: Quantizer) -> Iterator[tuple[str, float | None]]:
    """Integers of fewer bits, and the other FP8 format in its own scale or in this one's."""
    elements = by.parsed_elements
    if isinstance(elements, Integers):
        yield from ((f"int{bits}", by.target) for bits in range(elements.bits - 1, 1, -1) if by.target is None)
        return
    other = {"e4m3": "e5m2", "e5m2": "e4m3"}.get(by.elements.partition(":")[0])
    if other is not None and by.target is None:
        yield other, None
        yield other, by.largest


def _gains(start: PossibleQuantizer, w: Tensor, observed: Tensor) -> Iterator[float]:
    """What all values are multiplied by beside what ``start`` makes: their ratio's median, if it is not 1."""
    made = start.values(w).values.double()
    both = (made != 0) & (observed != 0)
    if bool(both.any()):
        gain = float((observed.double()[both] / made[both]).median())
        if abs(gain - 1) > 1e-3:
            yield gain


def _amax_factors(by: Quantizer, w: Tensor, observed: Tensor) -> Iterator[float]:
    """By how much amax may be another than the data's, if by the same in all blocks.

    The smallest observed number is the elements' smallest times its block's scale, if that occurs, and the largest one
    is their largest, if something is clipped. Of a floating-point format it may be any of the upper ones: their grid
    looks the same at another scale.
    """
    elements = by.parsed_elements
    least, upper = 1.0, [by.largest]
    if not isinstance(elements, Integers):
        fmt = elements.format
        least = 2.0 ** (fmt.min_exponent - fmt.mantissa_bits)
        power = 2.0 ** (math.frexp(fmt.largest)[1] - 2)
        steps = 2**fmt.mantissa_bits
        upper = [p * (1 + m / steps) for p in (2 * power, power) for m in range(steps - 1, -1, -1)]
        upper = [unit for unit in upper if unit <= fmt.largest]
    expected = spread(quantize(w, by).scale, (w.shape[0], w.shape[1]), by).double()
    size = observed.double().abs()
    if not bool((size > 0).any()):
        return
    found = [(unit, size.max()) for unit in upper] + [(least, size[size > 0].min())]
    for unit, extreme in found:
        place = (size == extreme).nonzero()[0]
        scale = float(expected[tuple(place)])
        factor = float(extreme) / unit / scale if scale else 1.0
        if 0.01 < factor < 100 and abs(factor - 1) > 1e-3:
            yield factor
