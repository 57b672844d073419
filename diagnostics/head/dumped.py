"""What the norm of an output hides in a dump: an LSE off by a constant, rows that were not written, another dO."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import torch
from torch import Tensor

from attn_diag.captures.capture import Capture
from attn_diag.captures.sources import DEFAULT_OBSERVATION
from attn_diag.head.counterfactual import NoiseCollector, covers
from attn_diag.head.declared import declared_recipe
from attn_diag.head.output_fit import MOST_ROWS, FitSubject, sampled_heads, sampled_outputs, sampled_rows
from attn_diag.head.read import HeadTensors, NonFiniteCensus, inputs_of
from attn_diag.reference import format_of, reference_rows, round_nearest_even, ulp


def lse_shift(asked: FitSubject, device: torch.device) -> tuple[float, float] | None:
    """How far off half of LSE's rows are, at least, and the most that 16-bit kernels leave; None where it is within.

    A kernel may sum the cast P and round scores: l is off by one part in 2^p then, and L by as much of the largest
    score's size, and by half an ulp where it is stored. Given with the sign of the median error.
    """
    found = list[Tensor]()
    fmt = format_of(asked.capture.tensors["q"].dtype)
    unit = 2.0**-fmt.precision
    for one in sampled_outputs(0, asked, "lse", device):
        if one.recipe is not None:
            return None
        block = reference_rows(one.inputs.head, one.rows)
        one.inputs.mark_rows(block)
        largest = block.scores.masked_fill(block.scores == -torch.inf, 0.0).abs().amax(1)
        most = unit * (1 + largest) + ulp(block.lse.nan_to_num(0.0, 0.0, 0.0), one.fmt) / 2
        observed, truth, allowed = one.compared(block.lse, most)
        found.append(torch.stack([observed - truth, allowed]))
    if not found or not torch.cat(found, 1).numel():
        return None
    off, allowed = torch.cat(found, 1)
    middle = float(off.median())
    return (middle, float(allowed.max())) if bool((off.abs() > allowed).double().mean() > 1 / 2) else None


def zeroed_rows(capture: Capture, device: torch.device) -> list[tuple[int, int, list[int]]]:
    """Batch items and heads with rows of O that are zero in every element, where attention on q, k and v is not.

    Rows that see no key are zero, and so are those that round to it. Of a head ``MOST_ROWS`` of such at most are tried.
    """
    found = []
    key = capture.key(DEFAULT_OBSERVATION, "o")
    fmt = format_of(capture.tensors[key].dtype)
    for batch, head in product(range(capture.batch), range(capture.q_heads)):
        tensors = HeadTensors(capture, [(batch, head)], device)
        stored = tensors.read(key, batch, head)
        assert stored is not None
        count = capture.lengths(batch)[0]
        zeros = (stored[0][:count] == 0).all(1).nonzero()[:, 0]
        if not len(zeros):
            continue
        inputs = inputs_of(tensors, batch, head, NonFiniteCensus())
        inputs = replace(inputs, head=replace(inputs.head, do=None))
        at = zeros[torch.linspace(0, len(zeros) - 1, min(len(zeros), MOST_ROWS)).long()]
        block = reference_rows(inputs.head, at)
        inputs.mark_rows(block)
        lost = (round_nearest_even(block.out, fmt) != 0).any(1) & ~inputs.unusable[at] & ~block.fully_masked
        if bool(lost.any()):
            every = len(at) < len(zeros) and bool(lost.all())
            found.append((batch, head, (zeros if every else at[lost]).tolist()))
    return found


def gradient_fit(capture: Capture, device: torch.device) -> tuple[float, float] | None:
    """How far dQ is from what q, k, v and dO make of it in some rows, and how far rounding is expected to take it.

    Both over its norm; None where no row can tell, where a recipe is declared, and of inputs not in 16 bits.
    """
    key, fmt = capture.key(DEFAULT_OBSERVATION, "dq"), format_of(capture.tensors["q"].dtype)
    if not covers(fmt) or declared_recipe(capture) is not None:
        return None
    off = size = expected = 0.0
    for batch, head in sampled_heads(capture):
        tensors = HeadTensors(capture, [(batch, head)], device)
        inputs, stored = inputs_of(tensors, batch, head, NonFiniteCensus()), tensors.read(key, batch, head)
        assert stored is not None
        rows = sampled_rows(capture.lengths(batch)[0], device)
        block = reference_rows(inputs.head, rows)
        inputs.mark_rows(block)
        if block.dq is None:
            return None
        noise = NoiseCollector(inputs.head, fmt, fmt)
        noise.add(block)
        good = ~inputs.unusable[rows] & stored[0][rows].isfinite().all(1) & block.dq.isfinite().all(1)
        off += float((stored[0][rows] - block.dq)[good].square().sum())
        size += float(block.dq[good].square().sum())
        expected += float(noise.variance["dq"][rows][good].sum())
    return (math.sqrt(off / size), math.sqrt(expected / size)) if size else None
