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
from attn_diag.head.output_fit import (
    MOST_ROWS,
    FitSubject,
    SampledOutput,
    sampled_heads,
    sampled_outputs,
    sampled_rows,
)
from attn_diag.head.read import HeadTensors, NonFiniteCensus, inputs_of
from attn_diag.kernels import emulate_rows
from attn_diag.reference import RowBlock, format_of, reference_rows, ulp
from attn_diag.reference.rounding import BF16


def lse_shift(asked: FitSubject, device: torch.device) -> tuple[float, float] | None:
    """How far off the middle one of LSE's rows is, and the most that rounding makes of it; None where it is within.

    None too where a recipe is declared, and of inputs in FP8, whose P may underflow.
    """
    found = list[Tensor]()
    for one in sampled_outputs(0, asked, "lse", device):
        if one.recipe is not None or one.inputs.input_format.precision < BF16.precision:
            return None
        block = reference_rows(one.inputs.head, one.rows)
        one.inputs.mark_rows(block)
        observed, truth, most = one.compared(block.lse, _most_rounded(one, block))
        found.append(torch.stack([observed - truth, most]))
    if not found or not torch.cat(found, 1).numel():
        return None
    off, most = torch.cat(found, 1)
    middle = int((off.abs() / most).median(0).indices)
    return (float(off[middle]), float(most[middle])) if abs(off[middle]) > most[middle] else None


def _most_rounded(one: SampledOutput, block: RowBlock) -> Tensor:
    """How far off an LSE may be whose kernel rounds scores and P to its inputs' format, those of FP32 to BF16, [R].

    A score is rounded as q k, times alpha, in three steps more under softcap, and once more beside a bias: each takes
    half of ``unit``, at most, of it or of what it was before the bias. Scores off by at most a_j take L no further than
    ln sum_j p_j exp(a_j). A sum of casts of P is off by one part in 1 / unit, also of truncated ones. An LSE to base 2
    may be stored with a spacing of nearly twice that of L; half of it is lost.
    """
    head, fmt = one.inputs.head, one.inputs.input_format
    unit = 2.0 ** -(fmt if covers(fmt) else BF16).precision
    bias = torch.zeros_like(block.scores)
    head.apply_mask(bias, block.rows, block.keys)
    visible = block.unnormalised_probs > 0
    size = (block.scores.abs() + bias.abs()).masked_fill(~visible, 0.0)
    steps = 2 + 3 * (head.softcap is not None) + bool((bias.masked_fill(~visible, 0.0) != 0).any())
    by_scores = (block.probs * (unit * steps / 2 * size).expm1()).sum(1).log1p()
    return unit + by_scores + ulp(block.lse.nan_to_num(0.0, 0.0, 0.0), one.fmt)


def zeroed_rows(capture: Capture, device: torch.device) -> list[tuple[int, int, list[int], int]]:
    """Batch items and heads with rows of O that are zero in every element and ought not to be; how many were tried.

    Rows that see no key are zero, and so are those of which subnormal numbers, of O or of a cast P, are all. Of a head
    ``MOST_ROWS`` rows of zeros are tried at most.
    """
    found, recipe = [], declared_recipe(capture)
    key = capture.key(DEFAULT_OBSERVATION, "o")
    fmt = format_of(capture.tensors[key].dtype)
    for batch, head in product(range(capture.batch), range(capture.q_heads)):
        tensors = HeadTensors(capture, [(batch, head)], device)
        stored = tensors.read(key, batch, head)
        assert stored is not None
        zeros = (stored[0][: capture.lengths(batch)[0]] == 0).all(1).nonzero()[:, 0]
        if not len(zeros):
            continue
        inputs = inputs_of(tensors, batch, head, NonFiniteCensus())
        inputs = replace(inputs, head=replace(inputs.head, do=None))
        at = zeros[torch.linspace(0, len(zeros) - 1, min(len(zeros), MOST_ROWS)).long()]
        block = reference_rows(inputs.head, at)
        inputs.mark_rows(block)
        made = block.out if recipe is None else emulate_rows(recipe, inputs.head, at).double()
        cast = inputs.input_format  # of P_bar without its subnormal numbers, or of P
        lost_probs = (cast.smallest_normal * block.inverse_row_sum).clamp(
            min=cast.smallest_normal * 2.0**-cast.precision
        )
        lost_probs = lost_probs[:, None].minimum(block.probs) @ inputs.head.v[block.keys].abs()
        lost = (made.abs() > fmt.smallest_normal + lost_probs).any(1) & ~inputs.unusable[at] & ~block.fully_masked
        if bool(lost.any()):
            found.append((batch, head, at[lost].tolist(), len(at)))
    return found


def gradient_fit(capture: Capture, device: torch.device) -> tuple[float, float] | None:
    """How far dQ is from what q, k, v and dO make of it in some rows, and how far rounding is expected to take it.

    Both over its norm; None where no row can tell. Of inputs in 16 bits, and where no recipe is declared.
    """
    key, fmt = capture.key(DEFAULT_OBSERVATION, "dq"), format_of(capture.tensors["q"].dtype)
    stored_in = format_of(capture.tensors[key].dtype)
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
        expected += float((noise.variance["dq"][rows] + ulp(block.dq, stored_in).square() / 12)[good].sum())
    return (math.sqrt(off / size), math.sqrt(expected / size)) if size else None
