"""Diagnoses of drawn heads, and what ``diff`` says of two of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from functools import cache

import torch
from builders import true_o
from made_once import made_once
from torch import Tensor

import attn_diag
from attn_diag.analyses.comparison.diff import compare
from attn_diag.results.comparison import HeadComparison
from attn_diag.results.diagnosis import Diagnosis, HeadDiagnosis

HEADS = 300


@cache
def inputs(seed: int, heads: int, rows: int, gain: float) -> tuple[Tensor, ...]:
    """q, k, v, dO in BF16 and the true O in float64."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v, do = (torch.randn(1, heads, rows, 16, generator=generator) for _ in range(4))
    q, k, v, do = (x.bfloat16() for x in (q * gain, k, v, do))
    return q, k, v, do, true_o(q, k, v)


@made_once
def diagnosed(
    rounding: str, draw: int = 0, *, seed: int = 0, heads: int = HEADS, rows: int = 64, gain: float = 2.0
) -> Diagnosis:
    """Heads whose O was rounded as stated, and nothing else was."""
    q, k, v, do, o = inputs(seed, heads, rows, gain)
    rounded = attn_diag.round_to(o, rounding, seed=draw).bfloat16()
    return attn_diag.inspect(q, k, v, o=rounded, do=do, causal=True, device="cpu")


def with_heads(diagnosis: Diagnosis, heads: Iterable[HeadDiagnosis]) -> Diagnosis:
    """With other heads in its one observation."""
    (capture,) = diagnosis.captures
    (observation,) = capture.observations
    observation = dataclasses.replace(observation, heads=tuple(heads))
    return dataclasses.replace(diagnosis, captures=(dataclasses.replace(capture, observations=(observation,)),))


def heads_of(diagnosis: Diagnosis) -> tuple[HeadDiagnosis, ...]:
    return diagnosis.captures[0].observations[0].heads


def single(diagnosis: Diagnosis) -> Iterator[Diagnosis]:
    """Each head as a diagnosis of its own."""
    for head in heads_of(diagnosis):
        if head.head is not None:
            yield with_heads(diagnosis, [head, dataclasses.replace(head, head=None)])


def entries(a: Diagnosis, b: Diagnosis, level: float) -> list[HeadComparison]:
    """The one entry of each head's own comparison."""
    return [compare(x, y, level=level).entries[0] for x, y in zip(single(a), single(b), strict=True)]


def moved(entry: HeadComparison) -> bool:
    return any(m.outcome not in ("none", "untested") for m in entry.means)
