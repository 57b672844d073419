"""What differs from a quantiser in one thing."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attn_diag.kernels.elements import CodeBook, Integers
from attn_diag.kernels.formats import Mode, Rounding, round_to
from attn_diag.kernels.quantize import quantize, spread
from attn_diag.kernels.quantizers import Arithmetic, Quantizer, name_changed, scale_rounding
from attn_diag.testing.quantizing.mistakes import UNCLIPPED, WRAP, mistakes, of_clipping
from attn_diag.testing.quantizing.own_format import CASTS, computed_in, orders, rounded_logarithms
from attn_diag.testing.quantizing.possible import DECLARED, PossibleQuantizer

EXTREME = "the number of largest magnitude mapped to the lowest integer"
ARITHMETICS: dict[Arithmetic, str] = {
    "exact": "in exact arithmetic",
    "fp32": "in fp32 arithmetic",
    "fp32-reciprocal": "in fp32 arithmetic with reciprocal scales",
}


def changes(
    start: PossibleQuantizer, w: Tensor, observed: Tensor, *, alone: bool = True
) -> Iterator[PossibleQuantizer]:
    """What differs from ``start`` in one thing, the likelier first.

    Args:
        start: A quantiser.
        w: The weight.
        observed: What became of it.
        alone: With mistakes of codes and scales; beside another difference only those of clipping are tried.
    """
    by = start.by

    def changed(words: str, **fields: Any) -> PossibleQuantizer | None:
        try:
            other = replace(by, **fields)
        except ValueError:
            return None
        if (
            other == by
            or (start.amax_factor and "target" in fields)
            or (start.zero_shift and other.symmetric)
            or (start.amax_factor and not other.symmetric)
            or start.gain != 1
            or start.mistake
            or (start.amax is not None and not set(fields) <= {"elements", "arithmetic", "scale"})
        ):
            return None
        return replace(start, by=replace(other, name=name_changed(by.name, fields)), words=_and(start, words))

    found: list[PossibleQuantizer | None] = []
    size = by.block if by.block.isdigit() else "32"
    blocks = ("16", "32", "64", "128", "256", "row", "column", "tensor", "128x128", f"{size}x1")
    found += [changed(blocks_of(block), block=block) for block in blocks]
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
        changed("symmetric", symmetric=True, zero_point="integer")
        if not by.symmetric
        else changed("with a zero point", symmetric=False, target=None, scale_of="amax")
    )
    if not by.symmetric:
        found.append(changed("a zero point that is not rounded", zero_point="float"))
    elif isinstance(by.parsed_elements, Integers):
        plain: dict[str, Any] = {"narrow": False, "target": None}
        others = {field: value for field, value in plain.items() if getattr(by, field) != value}
        found.append(changed(EXTREME, scale_of="extreme", **others))
    if by.tensor_scale:
        # torchao's own (NVFP4Tensor) clamps such scales to E4M3's smallest normal number.
        least = 2.0**-6
        alone_words = "without the tensor's scale"
        found += [
            changed(alone_words, tensor_scale=False),
            changed(f"{alone_words}, scales of at least {least:g}", tensor_scale=False, least_scale=least),
        ]
        if start.amax is None and by.level == 1 and (scales := _in_own_format(w, by)) is not None:
            own, level, amax = scales
            made = changed(f"the scales of tensor and blocks made in {own}", level=level)
            found.append(made and replace(made, amax=amax))
    if start.amax is None and (logarithms := rounded_logarithms(w, by)) is not None:
        said, amax = logarithms
        found.append(replace(start, words=_and(start, said), amax=amax))
    found += [changed(f"values rounded to {fmt}", values=fmt) for fmt in ("bf16", "fp16")]
    found += [changed(words, arithmetic=a) for a, words in ARITHMETICS.items()]
    if own := computed_in(w, by):
        words = f"scales and arithmetic in {own}"
        scaled = changed(words, scale=own) or (start if by.scale == own else None)
        if scaled is not None:
            named = ((order, _and(start, words + rest)) for order, rest in orders(by).items())
            found += [replace(scaled, words=said, own_format=order) for order, said in named]
    if w.dtype in (torch.float32, torch.float64) and not start.cast:
        found += [replace(start, words=_and(start, f"w rounded to {fmt} first"), cast=fmt) for fmt in CASTS]
    if start.gain == 1 and start.amax_factor is None:
        found += [
            replace(start, words=_and(start, f"values multiplied by {gain:.4g} afterwards"), gain=gain)
            for gain in _gains(start, w, observed)
        ]
    if not by.symmetric:
        found += [replace(start, words=_and(start, f"the zero point off by {n:+d}"), zero_shift=n) for n in (1, -1)]
    elif not by.tensor_scale and start.amax is None and start.mistake is None:
        found += [
            replace(start, words=_and(start, f"an amax {factor:.4g} times the data's"), amax_factor=factor)
            for factor in _amax_factors(by, w, observed)
        ]
    if start.mistake is None and start.gain == 1 and not (start.zero_shift or start.cast):
        wrong = mistakes(by, (w.shape[0], w.shape[1])) if alone and not start.amax_factor else of_clipping(by)
        if by.scale_of == "extreme" and not alone:
            wrong = iter(())  # unclipped its numbers are those of amax mapped alike
        # Where amax is a tie between two integers, what wraps may be what is clipped, and so may what is not clipped: a
        # value has to turn over, or to pass the last number.
        seen = {WRAP: not by.symmetric or bool((observed.double() * w.double() < 0).any())}
        seen[UNCLIPPED] = not by.symmetric or _passes_the_last(start, w, observed)
        found += [
            replace(start, words=_and(start, one.words), mistake=one) for one in wrong if seen.get(one.words, True)
        ]
    return (candidate for candidate in found if candidate is not None)


def _passes_the_last(start: PossibleQuantizer, w: Tensor, observed: Tensor) -> bool:
    """Whether some value lies beyond what an integer is clipped to; without a zero point."""
    elements = start.by.parsed_elements
    if not isinstance(elements, Integers):
        return False
    made = start.values(w)
    ends = (made.codes == elements.lowest) | (made.codes == elements.highest)
    further = made.values.double().abs()[ends] * (1 + 2.0**-elements.bits)  # half way to the next integer, about
    return bool((observed.double().abs()[ends] > further).any())


def blocks_of(block: str) -> str:
    """What shares a scale, in words."""
    named = {
        "row": "a scale for each row",
        "column": "a scale for each column",
        "tensor": "one scale for the tensor",
    }
    down, x, one = block.partition("x")
    return named.get(block) or (f"blocks of {down} down the columns" if x and one == "1" else f"blocks of {block}")


def _and(start: PossibleQuantizer, words: str) -> str:
    if start.words.startswith(DECLARED):
        return words + start.words.removeprefix(DECLARED) * bool(start.own_format)
    return f"{start.words}, {words}"


def _in_own_format(w: Tensor, by: Quantizer) -> tuple[str, float, Tensor] | None:
    """Two levels of scales as compressed-tensors makes them of a 16-bit weight (``generate_gparam``), in its format.

    The factor that the blocks' scales are multiplied with is the largest number of both formats over amax. Returned are
    the format, ``Quantizer.level``, and what the blocks' scales are made of.
    """
    own = next((name for name, dtype in CASTS.items() if w.dtype == dtype), "")
    rounding = scale_rounding(by.scale)
    if not own or not isinstance(rounding, Rounding) or not bool(w.any()):
        return None
    largest, whole = by.largest * rounding.format.largest, w.abs().amax()
    factor = largest / whole
    if not bool(factor.isfinite()):
        return None
    plain = replace(by, tensor_scale=False, scale="fp32", target=1.0)
    scale = (quantize(w.double(), plain).scale.to(w.dtype) / by.largest).double() * factor.double()
    stored = round_to(scale.clamp(max=rounding.format.largest), rounding)
    return own, largest / float(whole) / float(factor), stored * by.largest / factor.double()


def _targets(by: Quantizer) -> Iterator[tuple[float | None, str]]:
    """Other numbers that amax may be mapped to."""
    elements = by.parsed_elements
    if isinstance(elements, Integers):
        yield None, f"amax mapped to {elements.highest}"
        yield elements.highest + 0.5, f"amax mapped to {elements.highest + 0.5:g}"
        yield float(elements.highest + 1), f"amax mapped to {elements.highest + 1}"
        return
    if isinstance(elements, CodeBook):
        return
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
    if isinstance(elements, CodeBook):
        upper = [abs(number) for number in elements.numbers if number]
        least = min(upper)
    elif not isinstance(elements, Integers):
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
    # Codes that wrap reach one further below 0.
    upper += [elements.highest + 1.0] if isinstance(elements, Integers) else []
    found = [(unit, size.max()) for unit in upper] + [(least, size[size > 0].min())]
    for unit, extreme in found:
        place = (size == extreme).nonzero()[0]
        scale = float(expected[tuple(place)])
        factor = float(extreme) / unit / scale if scale else 1.0
        if 0.01 < factor < 100 and abs(factor - 1) > 1e-3:
            yield factor
