"""Trainer against engine where few rows are wrong, or O is cut, or nothing is: what is said of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import attn_diag
from attn_diag.kernels import preset
from attn_diag.testing.case_inputs import CaseInputs
from attn_diag.testing.target import emulate

CPU, FA2 = torch.device("cpu"), preset("fa2")


def mismatch(folder: Path, case: CaseInputs, engine: Callable[[CaseInputs], Tensor]) -> str:
    """The first sentence on a trainer that runs fa2, and an engine on the same inputs."""
    for run, o in (("train", emulate(FA2, case, CPU)["o"]), ("rollout", engine(case))):
        (folder / run).mkdir()
        tensors = {"q": case.q, "k": case.k, "v": case.v, "o": o}
        attn_diag.Capture.from_tensors(tensors, causal="top-left", layer=0).save(folder / run / "layer0.safetensors")
    found = attn_diag.mismatch(folder / "train", folder / "rollout")
    return " ".join(found.report().partition("\n\n")[0].split())


def normal(seed: int, *, saturated: bool = False) -> CaseInputs:
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, 2, 192, 32, generator=g) for _ in range(3))
    if saturated:
        k[:, :, 0] *= 4
        q = q + 0.4 * k[:, :, :1]
        v[:, :, 0] *= 0.01
    return CaseInputs("normal", q.bfloat16(), k.bfloat16(), v.bfloat16(), None, 32**-0.5, "top-left")


def _stale_row(case: CaseInputs) -> Tensor:
    o = emulate(FA2, case, CPU)["o"].clone()
    o[0, 1, 128] = o[0, 1, 127]
    return o


def _cut(case: CaseInputs) -> Tensor:
    return emulate(replace(FA2, out="bf16:toward-zero"), case, CPU)["o"]


def _other_tiles(case: CaseInputs) -> Tensor:
    return emulate(replace(FA2, schedule=replace(FA2.schedule, key_tile=32)), case, CPU)["o"]


@pytest.mark.parametrize("seed", range(2))
def test_one_stale_row_is_found(seed: int, tmp_path: Path) -> None:
    said = mismatch(tmp_path, normal(seed), _stale_row)
    assert "rollout's O is off in few rows, most at token 128 in head 1" in said


@pytest.mark.parametrize("seed", range(2))
def test_truncation_is_no_other_scale(seed: int, tmp_path: Path) -> None:
    said = mismatch(tmp_path, normal(seed), _cut)
    assert said.startswith("FAIL")
    assert "softmax scale" not in said.partition(";")[0], said


@pytest.mark.parametrize("saturated", [False, True])
def test_other_tiles_are_rounding(tmp_path: Path, *, saturated: bool) -> None:
    said = mismatch(tmp_path, normal(510, saturated=saturated), _other_tiles)
    assert said.startswith("OK "), said
