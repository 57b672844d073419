"""Which findings of ``attn_diag.probe`` does each planted defect leave, and are its pointers ever wrong?

    python benchmarks/study_probe.py --json benchmarks/results/probe_cpu.json

Kernels are the independent plain torch attention of ``verdicts``: healthy schedules, its forward defects, and the
variants of ``verdicts.held_out``, which were written after the pointers had been fixed. Every one is probed in BF16 and
FP16, with and without a causal mask, with an l that sums P_bar before and after its cast, at as many seeds.
"""

from __future__ import annotations

import json
import multiprocessing
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch
from measuring import made_by, options_of, save
from torch import Tensor
from verdicts.forward_defects import FORWARD
from verdicts.inputs import Causal, Inputs
from verdicts.kernels import HEALTHY, PLAIN, Kernel, Seen, forward, tile_plan
from verdicts.planting import Defect

import attn_diag
from attn_diag.errors import InputError
from attn_diag.results.probe import ProbeFinding, ProbeReport

# Tiles of 128 keys: the first has a partial third tile; the second is for defects of odd sizes and of a padded D.
SHAPES = ((2, 8, 288, 32), (2, 8, 333, 72))
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
# Format, mask, what l sums.
WAYS: tuple[tuple[str, Causal, str], ...] = (
    ("bf16", "none", "uncast"),
    ("bf16", "top-left", "cast"),
    ("fp16", "top-left", "uncast"),
    ("fp16", "none", "cast"),
)


@dataclass(frozen=True)
class Place:
    """One run."""

    planted: str
    """A defect's name, or "healthy: " and the kernel's."""
    way: int
    seed: int


def defects() -> dict[str, Defect]:
    """The planted ones by name."""
    return {defect.name: defect for defect in FORWARD}


def inputs_of(q: Tensor, k: Tensor, v: Tensor, causal: Causal) -> Inputs:
    """The call, without dO."""
    return Inputs(q, k, v, torch.empty(0), q.shape[-1] ** -0.5, causal)


def attention(defect: Defect | None, kernel: Kernel, causal: Causal) -> Callable[..., tuple[Tensor, Tensor]]:
    """fn(q, k, v) -> o, lse of a kernel with a defect, or with none."""

    def fn(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        inputs = inputs_of(q, k, v, causal)
        if defect is None:
            return forward(Seen(inputs, kernel, {}), tile_plan(inputs, kernel))
        inputs = inputs if defect.reads is None else defect.reads(inputs)
        chosen = defect.schedule(kernel)
        plan = tile_plan(inputs, chosen)
        if "forward" in defect.plans:
            plan = defect.plans["forward"](plan)
        return forward(Seen(inputs, chosen, defect.hooks), plan)

    return fn


def shape_of(defect: Defect, dtype: torch.dtype, causal: Causal) -> tuple[int, int, int, int] | None:
    """The first shape on which the defect can act; None where probe has none."""
    for shape in SHAPES:
        empty = torch.empty(shape, dtype=dtype)
        if defect.applies(inputs_of(empty, empty, empty, causal)):
            return shape
    return None


def run(place: Place) -> ProbeReport | str | None:
    """The report; the reason where there is none; None where the defect cannot act in this way."""
    torch.set_num_threads(1)
    dtype, causal, row_sum = WAYS[place.way]
    if place.planted.startswith("healthy: "):
        defect, kernel, shape = None, HEALTHY[place.planted.removeprefix("healthy: ")], SHAPES[0]
    else:
        defect, kernel = defects()[place.planted], PLAIN
        found = shape_of(defect, DTYPES[dtype], causal)
        if found is None:
            return None
        shape = found
    kernel = replace(kernel, row_sum=row_sum)
    fn = attention(defect, kernel, causal)
    try:
        return attn_diag.probe(
            fn, dtype=DTYPES[dtype], shape=shape, causal=causal, seed=place.seed, device="cpu", name="kernel"
        )
    except InputError as error:
        return str(error)
