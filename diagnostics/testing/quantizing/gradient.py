"""The straight-through gradient of a fake quantiser against the gradient of its smoothed forward.

A quantiser is flat almost everywhere, and its straight-through gradient is that of another forward: of E[Q(w + u)], u
a dither of one spacing of the grid, which is smooth. With G = dyᵀ x, a step d along G moves the smoothed loss
<G, Q(w)> by

    D = E[<G, Q(w + u + d) - Q(w + u - d)>] / 2         finite differences in float64, over draws of u

and the straight-through gradient g says <g, d>. The gain is D over <g, d>: 1 where the gradient is right, 0 where what
it moves stays where it is, as clipped elements do. Elements within a spacing of where clipping begins are left out: a
dither takes them across.

A few rows, columns or blocks that are passed something else hardly move that gain. So g is also held against G line by
line, <g, G> over <G, G> where nothing is clipped and without the elements that differ most, as those do of which scales
are made. Straight-through it is the same number in all. Where the gain is 1 only without the elements that become the
grid's first or last number, and these are passed nothing, it is these.

Along G nothing is seen of what lies across it. So elements are counted too: an estimator may weigh them, but by
positive numbers, and turns no sign but that of those of which scales are made. A mask of what is clipped has two sides.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from attn_diag.kernels.elements import CodeBook, Integers
from attn_diag.kernels.quantize import quantize, spread
from attn_diag.kernels.quantizers import Quantizer
from attn_diag.results.quant import OFF, StraightThrough
from attn_diag.results.wording import between, percent
from attn_diag.testing.quantizing.mistakes import extremes
from attn_diag.testing.quantizing.places import place_of
from attn_diag.work import Progress, silent

Values = Callable[[Tensor], Tensor]
DRAWS = 64
# Steps of up to half a spacing: the dithered forward is linear over them away from the ends of the grid.
_REACH = 0.5
# Where the spacing changes, as in FP4, a dither of one spacing is no exact smoothing: gains of up to 1.024 are its own.
_SAME, _SAME_FLOAT = 0.02, 0.05
# A line is apart that is so many typical deviations from the median of all. Estimators that weigh elements by where
# they lie (EWGS, DSQ) have up to 10.5 of rows and 15.3 of blocks (36 tensors each), straight-through ones are off by
# 0.9 % at most.
_DEVIATIONS, _NORMAL = 25.0, 1.4826
# So many times as many elements as elsewhere must have another multiple there: else it is these, and not the place.
_DENSER = 3.0
# What a mask of the clipped elements leaves out beside them where it is made of torch.clamp's gradient (torch 2.14). In
# the function's own format a few elements become other numbers.
_ENDS, _MOST = "elements that become the grid's first or last number", 0.98
_UNDERFLOW = "as where it underflows"
# Of fewer lines there is no typical one; of each line so many elements, and such a part, are left out.
_LINES, _LEFT_OUT, _PART_LEFT_OUT = 8, 4, 0.05


def spacing_of(w: Tensor, by: Quantizer, amax: Tensor | None = None) -> Tensor:
    """The distance of the quantiser's neighbouring numbers at each element of ``w``, [R, C] float64."""
    found = quantize(w, by, amax=amax)
    scale = spread(found.scale, (w.shape[0], w.shape[1]), by).double()
    if found.tensor_scale is not None:
        scale = scale * found.tensor_scale.double()
    elements = by.parsed_elements
    if isinstance(elements, Integers):
        return scale.abs()
    if isinstance(elements, CodeBook):
        return scale * elements.spacing(w.double() / scale.clamp(min=1e-300))
    fmt = elements.format
    size = (w.double().abs() / scale.clamp(min=1e-300)).clamp(min=2.0**fmt.min_exponent, max=fmt.largest)
    return scale * 2.0 ** (torch.floor(torch.log2(size)) - fmt.mantissa_bits)


def straight_through(
    w: Tensor, by: Quantizer, x: Tensor, dy: Tensor, *, values: Values | None = None, progress: Progress = silent,
    amax: Tensor | None = None,
) -> StraightThrough:  # fmt: skip
    """Compare them.

    Args:
        w: The weight, [R, C] float64.
        by: The quantiser; its spacing is the dither's.
        x: Inputs, [N, C] float64.
        dy: The gradient of y = x Q(w)ᵀ, [N, R] float64.
        values: The fake quantiser as a function, differentiable by its own rule; None: ``by`` and dy xᵀ as it is.
        progress: Called with (done, total) after each draw.
        amax: What the scales are made of, for each block; None: w's own.
    """
    gradient = dy.T @ x
    given = gradient
    if by.scale_of != "amax" and amax is None:  # as of any scale that leaves something beyond
        amax = quantize(w, replace(by, scale="fp32", target=1.0)).scale * by.mapped
    if values is None:

        def values(weight: Tensor) -> Tensor:
            return quantize(weight, by, amax=amax).values
    else:
        given = _by_autograd(values, w, gradient)
    spacing = spacing_of(w, by, amax)
    found = quantize(w, by, amax=amax)
    clipped, counted = found.clipped, torch.ones_like(w, dtype=torch.bool)
    if amax is not None:  # of the weight's own there is nothing beyond
        for way in (-1, 1):
            counted &= quantize(w + way * spacing, by, amax=amax).clipped == clipped
    inside = counted & ~clipped
    clipped = counted & clipped
    step = spacing * _REACH * gradient / gradient.abs().amax().clamp(min=1e-300)
    generator = torch.Generator(w.device).manual_seed(0)
    said = given * step * counted
    moved = torch.zeros_like(w)
    gains = []
    whole = float(said.sum())
    for draw in range(DRAWS):
        progress(draw, DRAWS)
        u = (torch.rand(w.shape, generator=generator, device=w.device, dtype=torch.float64) - 0.5) * spacing
        with torch.no_grad():
            difference = counted * (values(w + u + step).double() - values(w + u - step).double()) / 2
        moved += gradient * difference / DRAWS
        gains.append(float((gradient * difference).sum()) / whole if whole else math.nan)
    gain, error = float(np.mean(gains)), float(np.std(gains, ddof=1) / math.sqrt(DRAWS))
    of_clipped = float(said[clipped].sum()) / whole if whole else 0.0
    own, of_inside = float(said[clipped].sum()), float(said[inside].sum())
    same = _SAME if isinstance(by.parsed_elements, Integers) else _SAME_FLOAT
    inner = float(moved[inside].sum()) / of_inside if of_inside else None
    inner_right = inner is not None and abs(inner - 1) <= max(same, 4 * error)
    if not isinstance(by.parsed_elements, Integers) and not inner_right and of_inside:
        # What smoothing leaves of its own is no fault of a gradient that is nearly the straight-through one.
        inner_right = abs(float((gradient * step)[inside].sum()) / of_inside - 1) <= same
    at_ends = None
    if not inner_right or amax is not None:
        # Under scales of something else than w's amax these lie within a spacing of where clipping begins.
        ends = (inside if amax is None else ~found.clipped) & _at_ends(found.codes, by)
        rest = inside & ~ends
        lost, kept = given[ends] == 0, (given - gradient).abs() <= _SAME * gradient.abs()
        left = float(said[rest].sum())
        right = bool(left) and abs(float(moved[rest].sum()) / left - 1) <= max(same, 4 * error)
        # A dither takes the first and the last number's elements across the end, where the quantiser clips at its own.
        inner_right |= right and all(float(kept[part].double().mean()) >= _MOST for part in (inside, ends))
        if right and lost.double().mean() >= _MOST and kept[rest].double().mean() >= _MOST:
            at_ends, inside = f"in {_ENDS} its gradient is 0 times dyᵀ x where nothing is clipped, elsewhere 1", rest
    turned = _turned(w, given, gradient, inside, by)
    not_reached = _lost(w, given, gradient, inside, found.values)
    one_side = _one_side(given, clipped, w) if inner_right else None
    return StraightThrough(
        rows=len(x),
        gain=gain,
        standard_error=error,
        right=abs(gain - 1) <= max(same, 4 * error),
        inner_gain=inner,
        inner_right=inner_right,
        clipped=of_clipped,
        clipped_gain=float(moved[clipped].sum()) / own if own else None,
        draws=DRAWS,
        apart=_lines_apart(given, gradient, inside, by) or at_ends or one_side or turned or not_reached,
        off=math.sqrt(_part((given - gradient).square() * inside, gradient.square() * inside)),
    )


def _part(of: Tensor, whole: Tensor) -> float:
    size = float(whole.sum())
    return float(of.sum()) / size if size else 0.0


def _turned(w: Tensor, given: Tensor, gradient: Tensor, inside: Tensor, by: Quantizer) -> str | None:
    """In how much of the gradient the sign is turned, beside what scales are made of; None: in none, or in all."""
    if by.row_groups > 1:
        return None
    low, high = (spread(end, (w.shape[0], w.shape[1]), by) for end in extremes(w, by))
    size = gradient.abs() * (inside & (w != low) & (w != high))
    part = _part((given * gradient < 0) * size, size)
    if not _SAME < part < _MOST:
        return None
    return f"in elements with {percent(part)} of dyᵀ x its gradient has the other sign where nothing is clipped"


def _lost(w: Tensor, given: Tensor, gradient: Tensor, inside: Tensor, values: Tensor) -> str | None:
    """In which elements no gradient arrives where nothing is clipped; None: in hardly any, or in nearly all.

    Weights of 0 are left out, which are pruned ones perhaps.
    """
    counted = inside & (gradient != 0) & (w != 0)
    lost = counted & (given == 0)
    part = int(lost.sum()) / max(int(counted.sum()), 1)
    if not _SAME < part < _MOST:
        return None
    zeros = counted & (values == 0)
    if int((lost & zeros).sum()) >= _MOST * max(int(lost.sum()), int(zeros.sum())):
        return "in elements that become 0 its gradient is 0 times dyᵀ x where nothing is clipped"
    kept = gradient[counted & ~lost].abs().median()
    small = f", mostly the smaller ones, {_UNDERFLOW}" if gradient[lost].abs().median() < kept / 2 else ""
    return f"in {percent(part)} of the elements its gradient is 0 where nothing is clipped{small}"


def _one_side(given: Tensor, clipped: Tensor, w: Tensor) -> str | None:
    """Whether the gradient reaches what is clipped on one side alone, and which; None: on both or on neither."""
    sides = {"below": clipped & (w < 0), "above": clipped & (w > 0)}
    if min(int(side.sum()) for side in sides.values()) < _LINES:
        return None
    passed = {name: float((given[side] != 0).double().mean()) for name, side in sides.items()}
    (least, less), (most, more) = sorted(passed.items(), key=lambda one: one[1])
    if less > 1 - _MOST or more < _MOST:
        return None
    return f"of what is clipped its gradient reaches what lies {most} and not what lies {least}"


def _at_ends(codes: Tensor, by: Quantizer) -> Tensor:
    """Which elements become the first or the last number of the grid."""
    elements = by.parsed_elements
    if isinstance(elements, Integers):
        return (codes == elements.lowest) | (codes == elements.highest)
    return codes.abs() == by.largest


def _lines_apart(given: Tensor, gradient: Tensor, inside: Tensor, by: Quantizer) -> str | None:
    """Which rows, columns or blocks are passed another multiple of the gradient than most, and which; None: none."""
    shape = given.shape[0], given.shape[1]
    found = list[tuple[float, str]]()
    for kind in (replace(by, block="row"), replace(by, block="column"), *([by] if by.row_groups == 1 else [])):
        r, c = kind.block_shape(shape)
        # Padded as in per_block: [R / r, C / c, r c].
        height, width = -(-shape[0] // r), -(-shape[1] // c)
        passed, own = (
            torch.nn.functional.pad(torch.where(inside, x, 0.0), (0, width * c - shape[1], 0, height * r - shape[0]))
            .reshape(height, r, width, c).transpose(1, 2).flatten(2)
            for x in (given, gradient)
        )  # fmt: skip
        off = ((passed - own) * own).abs()
        most = off.topk(min(max(_LEFT_OUT, math.ceil(_PART_LEFT_OUT * r * c)), r * c)).indices
        size = own.square().scatter(2, most, 0.0).sum(2)
        gain = (passed * own).scatter(2, most, 0.0).sum(2) / size
        known = size > 0
        if int(known.sum()) < _LINES:
            continue
        typical = float(gain[known].median())
        deviation = float((gain[known] - typical).abs().median()) * _NORMAL
        apart = known & ((gain - typical).abs() > max(_SAME, _DEVIATIONS * deviation))
        right = bool(((gain[apart] - 1).abs() <= _SAME).all())
        # Where most are passed nothing, a few crumbs of scales' gradients are no place.
        if not bool(apart.any()) or (abs(typical) <= _SAME and not right):
            continue
        other = ((passed - typical * own).abs() > _SAME * own.abs()).double().mean(2)
        if float(other[apart].mean()) < _DENSER * float(other[known & ~apart].mean()):
            continue
        away = float((gain[apart] - typical).abs().mean())
        if right:
            apart = known & ~apart  # as many are wrong as right
        times = between(*(f"{float(x):.3g}" for x in (gain[apart].min(), gain[apart].max())))
        words = f"in {place_of(apart, kind, shape)} its gradient is {times} times dyᵀ x where nothing is clipped"
        found.append((away, f"{words}, elsewhere {float(gain[known & ~apart].median()):.3g}"))
    return max(found, key=lambda one: round(one[0], 2))[1] if found else None


def with_gradient(found: StraightThrough, verdict: tuple[str, str, str | None]) -> tuple[str, str, str | None]:
    """The verdict of a function's values, which are right, and of its own gradient where nothing is clipped."""
    if found.apart is not None:
        where = found.apart.partition(" its")[0]
        why = ": since torch 2.14 torch.clamp has no gradient at its own limits" if _ENDS in where else ""
        why = ": in 8 or 16 bits a gradient needs a scale of its own" if _UNDERFLOW in found.apart else why
        return "fail", f"{verdict[1]}, but {found.apart}", f"look at the backward {where}{why}"
    if found.inner_right:
        return verdict
    what = "no gradient of it arrives at w"
    if found.inner_gain is not None:
        times = 1 / found.inner_gain if found.inner_gain else math.inf
        what = f"where nothing is clipped its gradient is {times:.3g} times that of the smoothed forward, along dyᵀ x"
    return "fail", f"{verdict[1]}, but {what}", "pass the gradient straight through to w where values are not clipped"


def notes_of(found: StraightThrough | None) -> Iterator[str]:
    """What is to be known of a gradient that is right along dyᵀ x."""
    if found is not None and found.off > OFF and found.inner_right and found.apart is None:
        yield (
            f"its gradient is {percent(found.off)} off dyᵀ x where nothing is clipped: rounded, or another estimator "
            "than the straight-through one, and right along dyᵀ x on the whole"
        )


def _by_autograd(values: Values, w: Tensor, gradient: Tensor) -> Tensor:
    """What the function's own backward returns; zeros where it has none."""
    weight = w.detach().clone().requires_grad_()
    with torch.enable_grad():
        out = values(weight)
        if not out.requires_grad:
            return torch.zeros_like(w)
        (found,) = torch.autograd.grad(out, weight, gradient.to(out.dtype), allow_unused=True)
    return torch.zeros_like(w) if found is None else found.double()
