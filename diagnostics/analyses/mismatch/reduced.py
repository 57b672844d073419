"""One output projection's sum over ranks: how it was added up, and what is wrong where nothing adds up to it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median

import torch
from torch import Tensor

from attn_diag.analyses.mismatch.merges import NARROW
from attn_diag.analyses.mismatch.outputs import ProjectionCall
from attn_diag.analyses.mismatch.reductions import AllReduced, reduction_of
from attn_diag.reference import format_of, ulp
from attn_diag.results.mismatch import MismatchLabel
from attn_diag.results.wording import listed, number, percent

# A part is not the product of its rank's O where it is so far off (of its norm): no format of 8 bits leaves that.
_NO_PRODUCT = 0.25
# Or so many times what its rounding leaves, and what those of the other ranks have.
_PART_OFF = 4.0
# So many numbers of another format are no chance.
_BY_CHANCE = 0.5
# Ranks are so much off alike.
_ALIKE = 2.0
# Up to rounding to 8 bits parts are a multiple of their products, and multiples are the same.
_MULTIPLE = 0.02
# Products are sums in fp32, off by some units of 2^-24 of their size where they cancel to nothing.
_FP32_SUM = 2.0**-21
# Rows from which a bias can be told as what all of them have in common.
_ROWS = 8
# Of what is off, so many elements tell which parts it is made of.
_FITTED = 2**17
# Nearly all rows are all of it: what is small in some of them is within rounding there.
_WHOLE = 0.9
# A part is named as what is missing where its own weight in the error is so near to -1, and all others' to 0.
_NEAR = 0.15


@dataclass(frozen=True)
class SumFault:
    """Something that no order and no format makes."""

    words: str
    """What is wrong."""
    label: MismatchLabel
    off: float | None = None
    """By how much of the norm of what is right."""
    explained: float | None = None
    """The part of the squared error of the sum that it takes away."""


@dataclass(frozen=True)
class JudgedSum:
    """What is known of one sum."""

    call: ProjectionCall
    how: AllReduced
    """The format and order whose bits it has."""
    squares: dict[str, float]
    """Of the parts added up exactly (exact), of the sum's error (error), and of one cast's (once)."""
    faults: list[SumFault] = field(default_factory=list)


def judged(call: ProjectionCall, before: Sequence[ProjectionCall], usual: float | None = None) -> JudgedSum:
    """Judge a sum.

    Args:
        call: Whose.
        before: Other calls of the same layer and ranks, whose parts a stale one may be.
        usual: How many times O times its weight the other run's layer gives; None: not known.
    """
    exact, total = call.exact, call.total
    once = exact.to(total.dtype).double()
    squares = {
        "exact": float(exact.square().sum()),
        "error": float((total.double() - exact).square().sum()),
        "once": float((once - exact).square().sum()),
    }
    parts = [call.as_it_lay(call.part(place)) for place in range(len(call.captures))]
    how = _reduction(parts, call.as_it_lay(total))
    faults = [*_products(call, before, usual)]
    faults += _of_total(call, call.ranks[0], total, how, before)
    for rank, other in call.others:
        faults += _of_total(call, rank, other, _reduction(parts, call.as_it_lay(other)), before)
    unique = {fault.words: fault for fault in faults}
    return JudgedSum(call, how, squares, [*unique.values()])


def _reduction(parts: Sequence[Tensor], total: Tensor) -> AllReduced:
    """Its order and format, where these are of the kinds that are told."""
    told = total.dtype in (torch.float32, *NARROW.values()) and {part.dtype for part in parts} == {total.dtype}
    return reduction_of(parts, total) if told and total.numel() else AllReduced("", 0.0, in_fp32=False)


def multiple_of(call: ProjectionCall) -> float | None:
    """How many times O times its weight all ranks give alike, as a layer's own multiplier makes it; None: not so."""
    found: list[float] = []
    for place in range(len(call.captures)):
        right, part = call.product(place), call.part(place)
        if right is None or not bool(right.any()):
            return None
        part = part[:, call.rows].double()
        factor = _times(part, right)
        if not float((part - factor * right).norm()) <= _MULTIPLE * abs(factor) * float(right.norm()):
            return None
        found.append(factor)
    return found[0] if max(found) - min(found) <= _MULTIPLE * abs(found[0]) else None


def _allowed(size: Tensor, dtype: torch.dtype, ranks: int) -> Tensor:
    """What so many additions leave at most, in any order, each rounded to ``dtype``, with a cast at the end."""
    fmt = format_of(dtype)
    unit = 2.0 ** -(fmt.precision + 1)
    # Each rounds a sum of some of the parts, at most size (1 + unit)^ranks. What is below the normal numbers is off by
    # one step, or 0 where a device flushes it.
    step = max(float(ulp(torch.zeros(1, dtype=torch.float64), fmt)), float(torch.finfo(torch.float32).tiny))
    return size * ranks * unit * (1 + unit) ** ranks + ranks * step


def _of_total(
    call: ProjectionCall, rank: int, total: Tensor, how: AllReduced, before: Sequence[ProjectionCall]
) -> Iterator[SumFault]:
    """What is wrong with the sum that a rank got."""
    # In float64 what is held to be exact is rounded as often.
    size, ranks = _magnitude(call), len(call.ranks) * (2 if total.dtype == torch.float64 else 1)
    error = total.double() - call.exact
    largest = torch.finfo(total.dtype).max / 2
    # Where a sum may overflow, nothing is said.
    judged = size < largest
    bad = judged & ~(error.abs() <= _allowed(size, total.dtype, ranks))
    if not bool(bad.any()):
        return
    who = f"the sum that rank {rank} gets" if call.others and rank != call.ranks[0] else "the sum"
    narrow = next((name for name in NARROW if how.words.startswith(f"in {name}")), None)
    if narrow is not None and not bool((judged & ~(error.abs() <= _allowed(size, NARROW[narrow], ranks))).any()):
        name = str(total.dtype)[6:]
        yield SumFault(f"{who} of {name} parts is rounded {how.words}", "rounding", _relative(error, call), 1.0)
        return
    if (cast := _cast_first(call, total)) is not None:
        words = f"{who} of {str(total.dtype)[6:]} parts is one of parts cast to {cast}"
        yield SumFault(words, "rounding", _relative(error, call), 1.0)
        return
    share = float(bad.any(-1).double().mean())
    where = "" if share > _WHOLE else f" (in {percent(share)} of its rows)"
    error = torch.where(judged & error.isfinite(), error, 0.0)
    if not bool(total[judged].isfinite().all()):
        yield SumFault(f"{who} is NaN or infinite, its parts are not", "unnamed")
        return
    off = _relative(error, call)
    fitted = _weights(call, error, bad)
    counted = [round(w) for w in fitted]
    if any(counted):
        left = error - _combined(call, counted)
        wider = _allowed(size + _magnitude(call, counted), total.dtype, ranks + sum(map(abs, counted)))
        if bool((left.abs() <= wider)[bad].all()):
            yield SumFault(f"{who} is {_in_words(call, counted)}{where}", "semantics", off, 1.0)
            return
    for place, of in enumerate(call.ranks):
        if (older := _stale(call, place, error, bad, before)) is not None:
            words = f"{who} has rank {of}'s part of {older} in place of its own{where}"
            yield SumFault(words, "semantics", off, 1.0)
            return
    replaced = [i for i, w in enumerate(fitted) if abs(w + 1) < _NEAR]
    if len(replaced) == 1 and all(abs(w) < _NEAR for i, w in enumerate(fitted) if i != replaced[0]):
        of = call.ranks[replaced[0]]
        words = f"{who} has something else in place of rank {of}'s part{where}"
        yield SumFault(words, "semantics", off)
        return
    yield SumFault(f"{who} is no sum of its parts in any order and format{where}", "unnamed", off)


def _cast_first(call: ProjectionCall, total: Tensor) -> str | None:
    """The narrower format to which all parts were cast before they were added up there; None: none."""
    for name, dtype in NARROW.items():
        narrower = format_of(dtype).precision < format_of(total.dtype).precision
        if not narrower or not bool((total.to(dtype).to(total.dtype) == total).all()):
            continue
        cast = [call.part(place).to(dtype).double() for place in range(len(call.captures))]
        exact, size = torch.stack(cast).sum(0), torch.stack(cast).abs().sum(0)
        if bool(((total.double() - exact).abs() <= _allowed(size, dtype, len(call.ranks))).all()):
            return f"{name} first, and added up in {name}"
    return None


def _weights(call: ProjectionCall, error: Tensor, bad: Tensor) -> list[float]:
    """How often every part is in the error, by least squares over the pieces that are off."""
    at = bad.flatten().nonzero()[:, 0]
    at = at[torch.linspace(0, len(at) - 1, min(len(at), _FITTED), device=at.device).long()]
    columns = [call.part(place).double().flatten()[at] for place in range(len(call.captures))]
    matrix = torch.stack(columns, 1)
    if not bool(matrix.isfinite().all()):
        return [0.0] * len(columns)
    gram = matrix.T @ matrix
    scale = gram.diagonal().clamp(min=1e-300).sqrt()
    normal = gram / scale[:, None] / scale
    if float(torch.linalg.eigvalsh(normal)[0]) < 1e-9:
        return [0.0] * len(columns)  # parts that are alike, or zero, cannot be told from each other
    solved: list[float] = (torch.linalg.solve(normal, (matrix.T @ error.flatten()[at]) / scale) / scale).tolist()
    return solved


def _combined(call: ProjectionCall, counted: Sequence[int]) -> Tensor:
    """The sum of every part so many times."""
    found = torch.zeros_like(call.exact)
    for place, count in enumerate(counted):
        if count:
            found += count * call.part(place).double()
    return found


def _magnitude(call: ProjectionCall, counted: Sequence[int] | None = None) -> Tensor:
    """The sum of their magnitudes; None: of every part once."""
    found = torch.zeros_like(call.exact)
    for place, count in enumerate(counted or [1] * len(call.captures)):
        if count:
            found += abs(count) * call.part(place).double().abs()
    return found


def _relative(error: Tensor, call: ProjectionCall) -> float:
    return float(error.norm() / call.exact.norm().clamp(min=1e-300))


def _in_words(call: ProjectionCall, counted: Sequence[int]) -> str:
    told = []
    for rank, count in zip(call.ranks, counted, strict=True):
        if count == -1:
            told.append(f"without rank {rank}'s part")
        elif count == 1:
            told.append(f"with rank {rank}'s part twice")
        elif count:
            told.append(f"with rank {rank}'s part {1 + count} times")
    return " and ".join(told)


def _stale(
    call: ProjectionCall, place: int, error: Tensor, bad: Tensor, before: Sequence[ProjectionCall]
) -> str | None:
    """Which other call's part stands in place of a rank's; None: none that was captured."""
    own = call.part(place).double()
    for other in before:
        if other.part(place).shape != own.shape:
            continue
        older = other.part(place).double()
        left = (error - (older - own))[bad]
        allowed = _allowed(_magnitude(call) + older.abs(), call.total.dtype, len(call.ranks) + 1)
        if bool((left.abs() <= allowed[bad]).all()):
            return _named(call, other)
    return None


def _named(call: ProjectionCall, other: ProjectionCall) -> str:
    (step, number), (own_step, _) = other.call, call.call
    return f"step {step}" if step != own_step else f"call {number} of the same step"


def _products(call: ProjectionCall, before: Sequence[ProjectionCall], usual: float | None) -> Iterator[SumFault]:
    """Parts that are not their rank's O times its weight, or that hold fewer bits than what they are made of."""
    offs: list[tuple[float, float]] = []
    factors: list[str] = []
    if broken := [rank for place, rank in enumerate(call.ranks) if _is_broken(call, place)]:
        who = listed([f"rank {rank}" for rank in broken], 8)
        yield SumFault(f"NaN or infinity comes from {who}, whose O and weight are finite", "unnamed")
        return
    own = None if call.biased else multiple_of(call)
    if own is not None and abs(own - 1) > _MULTIPLE:
        # A multiplier of the layer's own is healthy, unless the other run's has another one.
        if usual is not None and abs(own - usual) > _MULTIPLE * abs(usual):
            yield SumFault(f"every rank gives {number(own)} times its O times its weight", "semantics", abs(own - 1))
        return
    for place in range(len(call.captures)):
        right, part = call.product(place), call.part(place)
        if right is None or (call.biased and part[..., 0].numel() < _ROWS):
            return
        part = part[:, call.rows]
        error = part.double() - right
        if call.biased:
            error -= error.mean((0, 1), keepdim=True)
        size = float(right.norm()) or 1.0
        # A bias may make what is rounded larger.
        rounded = part.double() if call.biased else right
        last = float(ulp(rounded, format_of(part.dtype)).square().sum()) / 12
        noise = math.sqrt(last + (_FP32_SUM * call.product_size(place)) ** 2)
        offs.append((float(error.norm()) / size, noise / size))
        factors.append(_factor(part.double(), right, noise))
    every = [off for off, _ in offs]
    # What is so far off on all ranks alike is a layer that multiplies by something else: few bits of its weight, say.
    together = len(every) > 1 and max(every) < _ALIKE * min(every)
    for place, (off, noise) in enumerate(offs):
        rank, others = call.ranks[place], [other for i, (other, _) in enumerate(offs) if i != place]
        alone = bool(others) and off > _PART_OFF * max(noise, median(others))
        if off <= _NO_PRODUCT and not alone:
            continue
        same = [other for other in before if torch.equal(other.part(place), call.part(place))]
        if same:
            yield SumFault(f"rank {rank} gives its part of {_named(call, same[0])} again", "semantics", off)
        elif factors[place]:
            yield SumFault(f"rank {rank} gives {factors[place]}", "semantics", off, 1.0)
        elif together:
            continue
        elif off > _NO_PRODUCT:
            yield SumFault(f"what rank {rank} gives is not its O times its weight", "unnamed", off)
        else:
            words = f"what rank {rank} gives is further from its O times its weight than rounding and the other ranks'"
            yield SumFault(words, "unnamed", off)
    narrower = [name for place in range(len(call.captures)) if (name := _narrower(call, place)) is not None]
    if len(narrower) == len(call.captures):
        made = str(call.captures[0].tensors["o"].dtype)[6:]
        words = f"what the ranks give is cast to {narrower[0]} before it is added up, of {made} O"
        yield SumFault(words, "rounding")


def _is_broken(call: ProjectionCall, place: int) -> bool:
    """Whether a rank gives NaN or infinity where its O times its weight is finite."""
    right, part = call.product(place), call.part(place)[:, call.rows]
    return right is not None and bool((right.isfinite() & ~part.isfinite()).any())


def _times(part: Tensor, right: Tensor) -> float:
    return float((part * right).sum() / right.square().sum().clamp(min=1e-300))


def _factor(part: Tensor, right: Tensor, noise: float) -> str:
    """That a part is so many times what it should be, in words; empty: it is something else."""
    factor = _times(part, right)
    if not bool(part.any()):
        return "zeros"
    whole = float((part - factor * right).norm()) <= _PART_OFF * max(1.0, abs(factor)) * noise
    return f"{number(factor)} times its O times its weight" if whole else ""


def _narrower(call: ProjectionCall, place: int) -> str | None:
    """The format below that of O, and of what is returned, whose numbers alone a rank gives."""
    o, part, right = call.captures[place].tensors.get("o"), call.part(place), call.product(place)
    if o is None or right is None or not call.returns:
        return None
    returned = getattr(torch, call.returns)
    least = min(format_of(o.dtype).precision, format_of(returned).precision)
    for name, dtype in NARROW.items():
        if format_of(dtype).precision >= least or not bool((part.to(dtype).to(part.dtype) == part).all()):
            continue
        # Where what is right has such numbers itself (zeros, of a projection that begins with them) nothing was cast.
        if float((right.to(dtype).double() == right).double().mean()) < _BY_CHANCE:
            return name
    return None
