"""How far a captured O or LSE is from attention as the metadata describe it, in some rows of some heads."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import Tensor

from attn_diag.captures.capture import Capture
from attn_diag.head.declared import declared_recipe
from attn_diag.head.quality import LOSSY
from attn_diag.head.read import HeadTensors, NonFiniteCensus, inputs_of
from attn_diag.head.rounded_scores import moved_by_scores
from attn_diag.kernels import emulate_lse, emulate_rows
from attn_diag.reference import format_of, reference_rows, round_nearest_even

# Rounding errors inside a kernel, even a failing one, stay well below this; a wrong mask or scale exceeds it at once.
# O's own format comes on top: one correct rounding makes 0.17 % in BF16, but 2.6 % in E4M3 (far more where O is
# subnormal there) and 5.5 % in E5M2.
TOLERANCE = 0.05
_ROWS, _FEW = 48, 8  # rows that are compared; of these so few in effect, and no quarter, show nothing
_HEADS = 4
# Up to this size (T * D) the heads are read together.
_SMALL = 2**20


def sampled_heads(capture: Capture) -> Iterator[tuple[int, int]]:
    """Some heads of the first and the last sequence."""
    heads = torch.linspace(0, capture.q_heads - 1, min(capture.q_heads, _HEADS)).long().tolist()
    yield from product({0, capture.batch - 1}, heads)


def _sample(
    capture: Capture,
    observation: str,
    output: str,
    device: torch.device,
    known: HeadTensors | None,
    *,
    coarse: bool = False,
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]:
    """Head by head the output as observed and as recomputed, in those sampled rows where both can be compared.

    Third the output as the declared recipe makes it; None where none is declared. ``coarse``: instead how far scores in
    16 bits may move each row of O, [n].
    """
    recipe, emulate = declared_recipe(capture), emulate_rows if output == "o" else emulate_lse
    places, key = list(sampled_heads(capture)), capture.key(observation, output)
    inputs_format = format_of(capture.tensors["q"].dtype)
    # Small heads are read together.
    step = len(places) if max(capture.q_length, capture.k_length) * capture.head_dim <= _SMALL else 1
    for start in range(0, len(places), step):
        some, census = places[start : start + step], NonFiniteCensus()
        tensors = known if known is not None and known.places.issuperset(some) else HeadTensors(capture, some, device)
        for batch, head in some:
            length = capture.lengths(batch)[0]
            rows = torch.linspace(0, length - 1, min(length, _ROWS)).long().to(device)
            inputs, stored = inputs_of(tensors, batch, head, census), tensors.read(key, batch, head)
            assert stored is not None
            block = reference_rows(replace(inputs.head, do=None), rows)
            inputs.mark_rows(block)
            observed, truth = stored[0][rows], block.out if output == "o" else block.lse
            made = None
            if coarse:
                made = moved_by_scores(inputs.head, block, inputs_format)
            elif recipe is not None:
                made = emulate(recipe, replace(inputs.head, do=None), rows).double()
            if not (output == "o" and inputs.sound and stored[1]):  # else all rows can be compared
                finite = observed.isfinite().all(1) if output == "o" else observed.isfinite() & truth.isfinite()
                usable = ~inputs.unusable[rows] & finite
                observed, truth, made = observed[usable], truth[usable], None if made is None else made[usable]
            yield observed, truth, made


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
    fmt = format_of(capture.tensors[capture.key(observation, "o")].dtype)
    sums, compared = list[Tensor](), 0
    for observed, truth, made in _sample(capture, observation, "o", device, tensors):
        # A finite O past the largest number was clamped to it.
        rounded = round_nearest_even(truth if made is None else made, fmt, wait=False).clamp(-fmt.largest, fmt.largest)
        squares = (observed - truth).square().sum(1)
        sums += [squares.sum(), squares.sqrt().sum(), truth.square().sum(), (rounded - truth).square().sum()]
        compared += len(truth)
    if not compared:
        return None
    wrong, by_row, right, rounding = _added(sums, 4)
    if not right:
        return OutputFit(math.inf if wrong else 0.0, 0.0)
    declared = declared_recipe(capture) is not None
    fit = OutputFit(math.sqrt(wrong / right), math.sqrt(rounding / right), declared=declared)
    if not 0 < by_row**2 < min(_FEW, compared / 4) * wrong:
        return fit
    if fit.ok:
        return replace(fit, few=True)
    beyond = [
        ((observed - truth).square().sum(1).sqrt() - moved).clamp(min=0.0).square().sum()
        for observed, truth, moved in _sample(capture, observation, "o", device, tensors, coarse=True)
        if moved is not None
    ]
    return replace(fit, few=replace(fit, error=math.sqrt(_added(beyond, 1)[0] / right)).fits)


def lse_fit(
    capture: Capture, observation: str, device: torch.device, tensors: HeadTensors | None = None
) -> OutputFit | None:
    """How well LSE fits, over its norm, the latter at least 1: LSE may well be near 0. None as for O.

    What fp32 rounds is nothing; of a declared recipe its LSE's error counts as O's does.
    """
    sums, compared = list[Tensor](), 0
    for observed, truth, made in _sample(capture, observation, "lse", device, tensors):
        sums += [x.square().sum() for x in (observed - truth, truth, (truth if made is None else made) - truth)]
        compared += len(truth)
    if not compared:
        return None
    wrong, right, rounding = _added(sums, 3)
    declared, size = declared_recipe(capture) is not None, max(right, 1.0)
    return OutputFit(math.sqrt(wrong / size), math.sqrt(rounding / size), declared=declared)


def _added(sums: Sequence[Tensor], each: int) -> list[float]:
    """Sums over heads, from ``each`` of every head one after the other; copied from their device at once."""
    return [sum(of_heads) for of_heads in zip(*torch.stack(list(sums)).view(-1, each).tolist(), strict=True)]
