"""How far a captured O or LSE is from attention as the metadata describe it, in some rows of some heads."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice, product
from typing import NamedTuple

import torch
from torch import Tensor

from attn_diag.captures.capture import Capture
from attn_diag.head.declared import declared_recipe
from attn_diag.head.quality import LOSSY
from attn_diag.head.read import HeadInputs, HeadTensors, NonFiniteCensus, inputs_of
from attn_diag.head.rounded_scores import expected_of_coarse_kernels, moved_by_scores
from attn_diag.head.stacks import numbers
from attn_diag.kernels import Recipe, emulate_lse, emulate_rows
from attn_diag.reference import FloatFormat, format_of, reference_rows, round_nearest_even
from attn_diag.reference.heads import batches, out_and_lse, stacked

# Rounding errors inside a kernel, even a failing one, stay well below this; a wrong mask or scale exceeds it at once.
# O's own format comes on top: one correct rounding makes 0.17 % in BF16, but 2.6 % in E4M3 (far more where O is
# subnormal there) and 5.5 % in E5M2.
TOLERANCE = 0.05
_ROWS, _FEW = 48, 8  # rows that are compared; of these so few in effect, and no quarter, show nothing
_HEADS = 4
# Up to this size (T * D) the heads are read together.
_SMALL = 2**20
# Scores that are recomputed at once on a GPU, in float64.
_SCORES = 2**24


def sampled_heads(capture: Capture) -> Iterator[tuple[int, int]]:
    """Some heads of the first and the last sequence."""
    heads = torch.linspace(0, capture.q_heads - 1, min(capture.q_heads, _HEADS)).long().tolist()
    yield from product({0, capture.batch - 1}, heads)


class FitSubject(NamedTuple):
    """An observation that is looked at."""

    capture: Capture
    """Where it is."""
    observation: str
    """Its name."""
    tensors: HeadTensors | None = None
    """Heads of the capture that are read already."""
    places: Sequence[tuple[int, int]] | None = None
    """Batch items and heads; None: some of them all."""


@dataclass
class _Sampled:
    """An output of one head in some rows."""

    asked: int
    """For whom."""
    inputs: HeadInputs
    """Without dO."""
    rows: Tensor
    """Indices of the rows, [R]."""
    observed: Tensor
    """As stored, [R, Dv] or [R]."""
    fmt: FloatFormat
    """In which it was."""
    sound: bool
    """Whether all that was read is finite."""
    recipe: Recipe | None
    """The declared one."""

    def compared(self, truth: Tensor, *more: Tensor) -> tuple[Tensor, ...]:
        """Those rows that can be compared: as observed, as recomputed and, where a recipe is declared, as it makes it.

        ``truth`` and ``more``, which comes third: of all of them.
        """
        found = [self.observed, truth, *more]
        if self.recipe is not None:
            emulate = emulate_rows if truth.ndim == 2 else emulate_lse
            found.append(emulate(self.recipe, self.inputs.head, self.rows).double())
        if self.sound and truth.ndim == 2:
            return tuple(found)
        finite = self.observed.isfinite()
        finite = finite.all(1) if truth.ndim == 2 else finite & truth.isfinite()
        usable = ~self.inputs.unusable[self.rows] & finite
        return tuple(x[usable] for x in found)


def _sample(number: int, asked: FitSubject, output: str, device: torch.device) -> Iterator[_Sampled]:
    """Some heads of one capture, one after the other."""
    capture, observation, known, chosen = asked
    places = list(sampled_heads(capture) if chosen is None else chosen)
    recipe, key = declared_recipe(capture), capture.key(observation, output)
    fmt = format_of(capture.tensors[key].dtype)
    # Small heads are read together.
    step = len(places) if max(capture.q_length, capture.k_length) * capture.head_dim <= _SMALL else 1
    for start in range(0, len(places), step):
        some, census = places[start : start + step], NonFiniteCensus()
        tensors = known if known is not None and known.places.issuperset(some) else HeadTensors(capture, some, device)
        for batch, head in some:
            rows = _rows(capture.lengths(batch)[0], device)
            inputs, stored = inputs_of(tensors, batch, head, census), tensors.read(key, batch, head)
            assert stored is not None
            inputs = replace(inputs, head=replace(inputs.head, do=None))
            yield _Sampled(number, inputs, rows, stored[0][rows], fmt, inputs.sound and stored[1], recipe)


@lru_cache(maxsize=32)
def _rows(length: int, device: torch.device) -> Tensor:
    """The rows that are looked at of a sequence of this length; not to be changed."""
    return torch.linspace(0, length - 1, min(length, _ROWS)).long().to(device)


def _recomputed(some: Sequence[_Sampled], output: str) -> Iterator[Tensor]:
    """The output of heads that are alike in these rows; of sound ones side by side."""
    if len(some) > 1 and all(one.sound for one in some):
        out, lse = out_and_lse([one.inputs.head for one in some], some[0].rows)
        yield from out if output == "o" else lse
        return
    for one in some:
        block = reference_rows(one.inputs.head, one.rows)
        one.inputs.mark_rows(block)
        yield block.out if output == "o" else block.lse


def _at_once(first: _Sampled) -> int:
    """How many heads are recomputed side by side: on a CPU one, as more would leave its cache."""
    head = first.inputs.head
    side_by_side = head.q.is_cuda and head.dropout is None
    return max(1, _SCORES // max(len(first.rows) * len(head.k), 1)) if side_by_side else 1


def _sums(
    asked: Sequence[FitSubject], output: str, device: torch.device, sums: Callable[..., list[Tensor]]
) -> list[tuple[int, list[float]]]:
    """For each who asked, how many rows were compared, and sums over its heads; none where there are none.

    ``sums``: from format, observed, true and made values of H heads, [H, ...], several numbers of each, [H].
    """
    sampled = (one for i, of_one in enumerate(asked) for one in _sample(i, of_one, output, device))
    alike: dict[tuple[int, torch.Size, FloatFormat], list[tuple[int, tuple[Tensor, ...]]]] = {}
    for first in sampled:
        some = [first, *islice(sampled, _at_once(first) - 1)]
        for places in batches([one.inputs.head for one in some]):
            beside = [some[i] for i in places]
            for one, truth in zip(beside, _recomputed(beside, output), strict=True):
                compared = one.compared(truth)
                alike.setdefault((len(compared), compared[0].shape, one.fmt), []).append((one.asked, compared))
    found: list[tuple[int, list[float]]] = [(0, []) for _ in asked]
    for (_, shape, fmt), group in alike.items():
        values = [stacked(tensors) for tensors in zip(*(compared for _, compared in group), strict=True)]
        for (i, _), of_head in zip(group, numbers(*sums(fmt, *values)), strict=True):
            count, before = found[i]
            found[i] = count + shape[0], [a + b for a, b in zip(before, of_head, strict=True)] if before else of_head
    return found


@dataclass(frozen=True)
class OutputFit:
    """The error of O (LSE), and of the reference once it is rounded to its format, both over the norm of the reference.

    Where a recipe is declared, the second is that recipe's.

    ``error`` is infinite where O must be 0 and is not; ``few`` says that few rows have all of it, and that what rounded
    scores cannot make of it fits: that shows no other metadata, and is judged as any error is.
    """

    error: float
    rounding: float
    few: bool = False
    declared: bool = False
    """Whether a recipe is declared: kernels with scales of their own are sound up to ``LOSSY`` times its error."""

    @property
    def ok(self) -> bool:
        """Whether roundings can explain the error."""
        return self.few or self.error <= TOLERANCE + (LOSSY if self.declared else 1.0) * self.rounding

    @property
    def fits(self) -> bool:
        """Whether all rows are as the metadata make them: what another reading must show to be named."""
        return self.error <= TOLERANCE + self.rounding


def out_fit(
    capture: Capture, observation: str, device: torch.device, tensors: HeadTensors | None = None
) -> OutputFit | None:
    """How well O fits the metadata, from the sampled rows; None where no row can tell.

    ``tensors``: of heads of this capture that are read already.
    """
    return out_fits([FitSubject(capture, observation, tensors)], device)[0]


def out_fits(asked: Sequence[FitSubject], device: torch.device) -> list[OutputFit | None]:
    """``out_fit`` of several."""

    def sums(fmt: FloatFormat, observed: Tensor, truth: Tensor, made: Tensor | None = None) -> list[Tensor]:
        # A finite O past the largest number was clamped to it.
        rounded = round_nearest_even(truth if made is None else made, fmt, wait=False).clamp(-fmt.largest, fmt.largest)
        squares = (observed - truth).square().sum(2)
        sizes = [x.square().flatten(1).sum(1) for x in (truth, rounded - truth)]
        return [squares.sum(1), squares.sqrt().sum(1), *sizes]

    found = list[OutputFit | None]()
    for one, (compared, of_all) in zip(asked, _sums(asked, "o", device, sums), strict=True):
        if not compared:
            found.append(None)
            continue
        wrong, by_row, right, rounding = of_all
        if not right:
            found.append(OutputFit(math.inf if wrong else 0.0, 0.0))
            continue
        declared = declared_recipe(one.capture) is not None
        fit = OutputFit(math.sqrt(wrong / right), math.sqrt(rounding / right), declared=declared)
        few = 0 < by_row**2 < min(_FEW, compared / 4) * wrong
        if few and not fit.ok:
            few = replace(fit, error=math.sqrt(_beyond_rounded_scores(one, device) / right)).fits
        found.append(replace(fit, few=few))
    return found


def _beyond_rounded_scores(asked: FitSubject, device: torch.device) -> float:
    """The square of O's error that scores in 16 bits cannot make of its rows."""
    inputs_format, found = format_of(asked.capture.tensors["q"].dtype), list[Tensor]()
    for one in _sample(0, asked, "o", device):
        block = reference_rows(one.inputs.head, one.rows)
        one.inputs.mark_rows(block)
        moved = moved_by_scores(one.inputs.head, block, inputs_format)
        observed, truth, most = replace(one, recipe=None).compared(block.out, moved)
        found.append(((observed - truth).norm(dim=1) - most).clamp(min=0.0).square().sum())
    return float(torch.stack(found).sum())


def times_coarse(asked: FitSubject, device: torch.device) -> float | None:
    """How many times O's error is what is expected of a kernel that rounds all that it stores to 16 bits.

    None where a recipe is declared, under dropout, where no row can be compared, and of inputs of more than 16 bits.
    """
    inputs_format, seen = format_of(asked.capture.tensors["q"].dtype), [0.0, 0.0]
    if inputs_format.name not in ("bf16", "fp16"):
        return None
    for one in _sample(0, asked, "o", device):
        if one.recipe is not None or one.inputs.head.dropout is not None:
            return None
        block = reference_rows(one.inputs.head, one.rows)
        one.inputs.mark_rows(block)
        expected = expected_of_coarse_kernels(one.inputs.head, block, inputs_format, one.fmt)
        observed, truth, made = one.compared(block.out, expected)
        seen = [seen[0] + float((observed - truth).square().sum()), seen[1] + float(made.sum())]
    return math.sqrt(seen[0] / seen[1]) if seen[1] > 0 else None


def lse_fit(
    capture: Capture, observation: str, device: torch.device, tensors: HeadTensors | None = None
) -> OutputFit | None:
    """As ``out_fit``, of LSE, over its norm."""
    return lse_fits([FitSubject(capture, observation, tensors)], device)[0]


def lse_fits(asked: Sequence[FitSubject], device: torch.device) -> list[OutputFit | None]:
    """How well the LSE of several fits, over its norm, the latter at least 1: LSE may well be near 0. None as for O.

    What fp32 rounds is nothing; of a declared recipe its LSE's error counts as O's does.
    """

    def sums(_: FloatFormat, observed: Tensor, truth: Tensor, made: Tensor | None = None) -> list[Tensor]:
        return [x.square().sum(1) for x in (observed - truth, truth, (truth if made is None else made) - truth)]

    found = list[OutputFit | None]()
    for one, (compared, of_all) in zip(asked, _sums(asked, "lse", device, sums), strict=True):
        if not compared:
            found.append(None)
            continue
        wrong, right, rounding = of_all
        declared, size = declared_recipe(one.capture) is not None, max(right, 1.0)
        found.append(OutputFit(math.sqrt(wrong / size), math.sqrt(rounding / size), declared=declared))
    return found
