"""Blocks whose values are not the quantiser's, where others are: a scale that is shared too widely, a zero point.

A tie, or the last bit of a quotient, decides single elements, and a scale or zero point that is a tie itself a block.
Neither is counted here: a block is another's where elements differ that no such tie makes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attn_diag.kernels.elements import CodeBook
from attn_diag.kernels.formats import Mode
from attn_diag.kernels.quantize import coded, quantize, spread
from attn_diag.kernels.quantizers import Quantizer
from attn_diag.results.wording import percent
from attn_diag.testing.quantizing.mistakes import extremes, shifted_throughout
from attn_diag.testing.quantizing.own_format import rounded_logarithms
from attn_diag.testing.quantizing.places import place_of
from attn_diag.testing.quantizing.possible import PossibleQuantizer, equal_values, in_filled_blocks
from attn_diag.testing.quantizing.scales import per_block, read_ranges, read_scales, readable

# Relative: a quotient, its scale and the sum with a zero point, in fp32, are off by less.
_TIE = 2.0**-20
# Of a weight in 16 bits a program may compute in those.
_TIE_OF = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
# Elements of a block, and their part of it, that make it another's.
_ELEMENTS, _PART = 3, 0.1
# Scales that are read off the values, and their own, agree to this.
_SAME_SCALE = 1e-3
# Scales that are others in more of the blocks may be meant so; of fewer values ties are no explanation.
_MOST = 0.5
# As many explanations are told beside each other.
_ALIKE = 3


@dataclass(frozen=True)
class _Scales:
    """What a block's codes are divided by and added to; [R / r, C / c] float64."""

    scale: Tensor
    zero: Tensor


@dataclass(frozen=True)
class _Way:
    """How some blocks may have come about."""

    words: str
    of_codes: _Scales
    of_values: _Scales
    mode: str = ""
    """Another rounding of the elements."""


def by_blocks(
    start: PossibleQuantizer,
    w: Tensor,
    observed: Tensor,
    verdict: tuple[str, str, str | None],
    made: PossibleQuantizer | None,
) -> tuple[str, str, str | None]:
    """The verdict, with what single blocks add to it.

    Args:
        start: The declared quantiser, in the arithmetic that fits best.
        w: The weight.
        observed: What became of it.
        verdict: Outcome, headline and what to do next, by all values.
        made: What made the values by that; of scales that were read off all values it is asked what they are of.
    """
    outcome, name = verdict[0], start.by.name
    if outcome == "fail" and not bool(observed.any()):
        return (
            outcome,
            f"not {name}: every value is 0",
            "look at the scales: larger than the weight, or lost in a format",
        )
    if not _known(start) or not (outcome == "pass" or made is None or (made.amax is not None and start.amax is None)):
        return verdict
    bad, tie = _other_blocks(start, w, observed, 1 if outcome == "fail" else _ELEMENTS)
    if outcome == "fail" and start.by.arithmetic == "exact":
        in_fp32 = replace(start, by=replace(start.by, arithmetic="fp32"))
        fewer, its_tie = _other_blocks(in_fp32, w, observed, 1)
        if int(fewer.sum()) < int(bad.sum()):
            start, bad, tie = in_fp32, fewer, its_tie
    if not bool(bad.any()):
        if outcome == "fail" and only_ties(start, w, observed):
            return "pass", f"the values are {name}'s but for ties, which another arithmetic decides", None
        return verdict
    if outcome == "fail" and made is None and w.dtype in _TIE_OF and start.amax_factor is None:
        fmt = str(w.dtype).removeprefix("torch.")
        part = float(equal_values(start, w, observed).double().mean())
        if part >= _MOST and not bool(beyond_ties(start, w, observed, _TIE_OF[w.dtype]).any()):
            return (
                "undecided",
                f"{percent(part, '.1f')} of the values are {name}'s, and the rest are next to ties in {fmt}: it may be "
                f"computed in {fmt} in an order that is not known here, or with scales that are a last bit of it off",
                "to know, give w in fp32 to the same fake quantiser",
            )
    why = _explained(start, w, observed, bad, tie)
    if why is None and (outcome == "pass" or made is None):
        why = _read(start, w, observed, bad, tie)
    if why is None and outcome != "pass":
        return verdict
    where = place_of(bad, start.by, (w.shape[0], w.shape[1]))
    words = f"not {name} in {where}" + (f", but {why}" if why else ", whatever arithmetic decides ties")
    if why and all(one.startswith("with elements rounded") for one in why.split(" or ")):
        return "fail", words, "look at the rounding in these blocks"
    look = f"look at the scales{'' if start.by.symmetric else ' and zero points'} of these blocks"
    of_scales = why is not None and why.startswith(("with scales ", "with an amax ")) and " and zero" not in why
    if of_scales and float(bad.double().mean()) > _MOST:
        look = f"if the scales are meant so (learned, searched, of earlier steps), all else is {name}'s; else {look}"
    return "fail", words, look


def _other_blocks(candidate: PossibleQuantizer, w: Tensor, observed: Tensor, least: int) -> tuple[Tensor, float]:
    """Which blocks have ``least`` values that are not the candidate's, bool, and how far off a tie may be."""
    by, tie = candidate.by, _TIE
    of_all = per_block((w != 0).double(), by, torch.sum).clamp(min=1)
    for tie in dict.fromkeys((_TIE, _TIE_OF.get(w.dtype, _TIE))):
        many = per_block(_apart(candidate, w, observed, tie).double(), by, torch.sum)
        bad = (many >= least) & (many >= _PART * of_all * (least > 1))
        if bool((many[~bad] == 0).all()):
            break  # the others are all its own: computed so
    return bad & ~_at_a_tie(candidate, w), tie


def only_ties(candidate: PossibleQuantizer, w: Tensor, observed: Tensor) -> bool:
    """Whether the arithmetic alone makes the values others than the candidate's: all of them are ties."""
    return not bool(beyond_ties(candidate, w, observed).any())


def beyond_ties(candidate: PossibleQuantizer, w: Tensor, observed: Tensor, tie: float = _TIE) -> Tensor:
    """Which elements have a value that is not the candidate's, whatever arithmetic decides ties: bool, [R, C].

    Of a candidate with a mistake, or in a format of its own, ties are not known and count.
    """
    if not _known(candidate):
        return ~equal_values(candidate, w, observed)
    at_a_tie = spread(_at_a_tie(candidate, w), (w.shape[0], w.shape[1]), candidate.by)
    return _apart(candidate, w, observed, tie) & ~at_a_tie


def _apart(candidate: PossibleQuantizer, w: Tensor, observed: Tensor, tie: float) -> Tensor:
    """Which elements have a value that is not the candidate's, nor would be if w were off by ``tie``: bool."""
    own = _scales(candidate, w)
    same = equal_values(candidate, w, observed)
    for mode in _modes(candidate.by):
        same |= _alike(_Way("", own, own, mode), candidate.by, w, observed, tie)
    return ~same & in_filled_blocks(w, candidate.by)


def _explained(candidate: PossibleQuantizer, w: Tensor, observed: Tensor, bad: Tensor, tie: float) -> str | None:
    """What makes the blocks ``bad`` what they are, in words; None: no one thing that is known."""

    def explains(way: _Way) -> bool:
        same = torch.zeros_like(observed, dtype=torch.bool)
        for mode in [way.mode] if way.mode else _modes(candidate.by):
            same |= _alike(replace(way, mode=mode), candidate.by, w, observed, tie)
        wrong = per_block((~same).double(), candidate.by, torch.sum)
        return bool((wrong[bad] == 0).all())

    # Twice a block's scale is also that of any larger block: that is not said where logarithms of 16 bits make it.
    logarithms = None if candidate.other_scales else rounded_logarithms(w, candidate.by)
    if logarithms is not None:
        scales = _of_range(candidate.by, -logarithms[1], logarithms[1])
        if explains(_Way("", scales, scales)):
            return f"with {logarithms[0]}"
    return " or ".join([way.words for way in _ways(candidate, w) if explains(way)][:_ALIKE]) or None


def _read(candidate: PossibleQuantizer, w: Tensor, observed: Tensor, bad: Tensor, tie: float) -> str | None:
    """How the scales of the blocks ``bad``, as their values have them, differ from the quantiser's own."""
    by, own = candidate.by, _scales(candidate, w).scale
    if not by.symmetric:
        scale, off, fits = read_ranges(w, observed, by)
        if not bool(fits[bad].all()):
            return None
        shifts = sorted(set(off[bad].tolist()))
        told = [] if shifts == [0.0] else ["zero points off by " + " and ".join(f"{n:+.0f}" for n in shifts)]
    else:
        plain = replace(by, scale="fp32", target=None, tensor_scale=False, arithmetic="exact", ties="even")
        if not readable(plain):
            return None
        scale, told = read_scales(w, observed, plain), []
        read = _Scales(scale, torch.zeros_like(scale))
        same = _alike(_Way("", read, read, by.parsed_elements.mode), by, w, observed, tie)
        if not bool((per_block((~same).double(), by, torch.sum)[bad] == 0).all()):
            return None
    part = (scale / own)[bad & (own > 0)]
    if not part.numel():
        return None
    least, most = float(part.min()), float(part.max())
    if not candidate.other_scales and by.scale == "fp32":
        # A block's values often fit several scales: one factor for all of them is the likelier.
        factor = float(part.median())
        low, high = extremes(w.double(), by)
        high = torch.maximum(high, -low) if by.symmetric else high
        scales = _of_range(by, (-high if by.symmetric else low) * factor, high * factor)
        same = _alike(_Way("", scales, scales, by.parsed_elements.mode), by, w, observed, tie)
        if abs(factor - 1) > _SAME_SCALE and bool((per_block((~same).double(), by, torch.sum)[bad] == 0).all()):
            return f"with an amax {factor:.3g} times the weight's own"
    if max(abs(least - 1), abs(most - 1)) > _SAME_SCALE:
        size = f"{least:.3g}" if most / least < 1 + _SAME_SCALE else f"{least:.4g} to {most:.4g}"
        told.insert(0, f"scales {size} times as large as the weight gives them")
    return "with " + " and ".join(told) if told else None


def _known(candidate: PossibleQuantizer) -> bool:
    by = candidate.by
    plain = not (candidate.mistake or candidate.own_format or candidate.cast or candidate.zero_shift)
    by_amax = by.scale_of == "amax" and by.zero_point == "integer" and not by.search
    return plain and candidate.gain == 1 and by.row_groups == 1 and by.divisor == "stored" and by_amax


def _modes(by: Quantizer) -> list[str]:
    mode = by.parsed_elements.mode
    return [Mode.UP, Mode.DOWN] if mode is Mode.STOCHASTIC else [mode]


def _scales(candidate: PossibleQuantizer, w: Tensor) -> _Scales:
    found = candidate.values(w)
    scale = found.scale.double() * (1.0 if found.tensor_scale is None else found.tensor_scale.double())
    return _Scales(scale, torch.zeros_like(scale) if found.zero_point is None else found.zero_point.double())


def _alike(way: _Way, by: Quantizer, w: Tensor, observed: Tensor, tie: float) -> Tensor:
    """Which elements are what ``way`` makes of w, or of a number beside it: bool."""
    shape = w.shape[0], w.shape[1]
    scale, zero, by_scale, by_zero = (
        spread(x, shape, by) for x in (way.of_codes.scale, way.of_codes.zero, way.of_values.scale, way.of_values.zero)
    )
    rounded = replace(by, elements=f"{by.elements.partition(':')[0]}:{way.mode}", ties="even")
    slack = max(2.0**-18, torch.finfo(observed.dtype).eps)
    quotient = torch.where(scale == 0, 0.0, w.double() / scale)
    same = torch.zeros_like(observed, dtype=torch.bool)
    # What draws leave where it is, a number of the grid, no last bit takes to the next one.
    tie = 0.0 if by.parsed_elements.mode is Mode.STOCHASTIC else tie
    for factor in (1.0, 1 - tie, 1 + tie):
        codes = coded(quotient * factor, rounded, 0, None if by.symmetric else zero)[0]
        made = (codes - by_zero) * by_scale
        same |= (made - observed.double()).abs() <= slack * made.abs()
    return same


def _at_a_tie(candidate: PossibleQuantizer, w: Tensor) -> Tensor:
    """Which blocks' scale or zero point the arithmetic decides: bool, [R / r, C / c]."""
    by, own = candidate.by, _scales(candidate, w)
    low, high = extremes(w.double(), by)
    found = torch.zeros_like(own.scale, dtype=torch.bool)
    for factor in (1 - _TIE, 1 + _TIE):
        if by.symmetric:
            amax = torch.maximum(high, -low) if candidate.amax is None else candidate.amax
            near = replace(candidate, amax=amax * factor * (candidate.amax_factor or 1.0))
            scale = _scales(near, w.double()).scale
        else:
            scale = _scales(candidate, w.double() * factor).scale
        found |= ((scale / own.scale / factor - 1).abs().nan_to_num() > 2.0**-18) & (by.scale != "fp32")
    if not by.symmetric:
        steps = torch.where(own.scale == 0, 0.0, low / own.scale).abs()
        found |= ((steps - steps.floor()) - 0.5).abs() <= 2 * _TIE * steps.clamp(min=1)
    return found


def _ways(candidate: PossibleQuantizer, w: Tensor) -> Iterator[_Way]:
    """The likelier first."""
    by = candidate.by
    own = _scales(candidate, w)
    if not candidate.other_scales:
        low, high = (x.double() for x in extremes(w.double(), by))
        if by.symmetric:
            high = torch.maximum(high, -low)
            low = -high
        for words, one, other in _shared(low, high, "row" if by.block == "row" else "block"):
            scales = _of_range(by, one, other)
            yield _Way(words, scales, scales)
        for words, scale in _scale_formats(by):
            scales = _of_range(replace(by, scale=scale), low, high)
            yield _Way(words, scales, scales)
    if not by.symmetric:
        for n in (1, -1):
            shifted = replace(own, zero=own.zero + n)
            yield _Way(f"with the zero point off by {n:+d}", own, shifted)
            yield _Way(f"with the zero point off by {n:+d} before clipping", shifted, own)
            yield _Way(f"with {shifted_throughout(n)}", shifted, shifted)
        none = replace(own, zero=torch.zeros_like(own.zero))
        yield _Way("with no zero point subtracted", own, none)
    for mode in () if isinstance(by.parsed_elements, CodeBook) else (Mode.DOWN, Mode.TOWARD_ZERO, Mode.UP):
        if mode is not by.parsed_elements.mode and by.parsed_elements.mode is not Mode.STOCHASTIC:
            yield _Way(f"with elements rounded {mode}", own, own, mode)


def _scale_formats(by: Quantizer) -> Iterator[tuple[str, str]]:
    """Other roundings of scales that are rounded."""
    base, _, mode = by.scale.partition(":")
    for other in (Mode.NEAREST_EVEN, Mode.DOWN, Mode.UP):
        if base != "fp32" and (mode or Mode.NEAREST_EVEN) != other:
            yield f"with scales rounded {other}", f"{base}:{other}"


def _shared(low: Tensor, high: Tensor, block: str) -> Iterator[tuple[str, Tensor, Tensor]]:
    """The blocks' ends, where each is taken together with others."""
    for dim, noun in ((1, "block"), (0, "row" if low.shape[1] > 1 else block)):
        size = low.shape[dim]
        if size < 2:
            continue
        at = torch.arange(size, device=low.device)
        for side, n in (("behind", 1), ("before", -1)):
            beside = (at + n).clamp(0, size - 1)
            words = f"with one scale for the {noun} and the {noun} {side}" if noun == block or dim else (
                f"with one scale for the block and that of the row {side}"
            )  # fmt: skip
            yield (
                words,
                torch.minimum(low, low.index_select(dim, beside)),
                torch.maximum(high, high.index_select(dim, beside)),
            )
        pair = (at ^ 1).clamp(max=size - 1)
        yield (
            f"with one scale for pairs of {noun}s",
            torch.minimum(low, low.index_select(dim, pair)),
            torch.maximum(high, high.index_select(dim, pair)),
        )
    if low.shape[1] > 1:
        yield (
            "with one scale for the row",
            low.amin(1, keepdim=True).expand_as(low),
            high.amax(1, keepdim=True).expand_as(high),
        )
    if low.shape[0] > 1:
        said = "with one scale for the column of blocks" if low.shape[1] > 1 else "with one scale for all blocks"
        yield said, low.amin(0, keepdim=True).expand_as(low), high.amax(0, keepdim=True).expand_as(high)
    if min(low.shape) > 1:
        yield "with one scale for the tensor", low.amin().expand_as(low), high.amax().expand_as(high)


def _of_range(by: Quantizer, low: Tensor, high: Tensor) -> _Scales:
    """The scales of blocks whose smallest and largest numbers are these."""
    pairs = torch.stack([low, high], -1).reshape(1, -1)
    found = quantize(pairs, replace(by, block="2", stale=(), descale=()))
    scale = found.scale.double().reshape(low.shape)
    if found.tensor_scale is not None:
        scale = scale * found.tensor_scale.double()
    zero = torch.zeros_like(scale) if found.zero_point is None else found.zero_point.double().reshape(low.shape)
    return _Scales(scale, zero)
