"""``attn_diag.check`` with inputs of another length, as a kernel asks for that takes whole tiles alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from invariance_kernels import plain, plain_causal
from torch import Tensor

import attn_diag
from attn_diag.errors import InputError
from attn_diag.testing.regression import cases as suite
from attn_diag.testing.stated import Stated

pytestmark = pytest.mark.slow


def whole_tiles(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    if q.shape[2] % 128:
        raise ValueError("T must be a multiple of 128")
    return plain_causal(q, k, v)


class OffBehind192Keys(torch.autograd.Function):
    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, k: Tensor) -> Tensor:  # noqa: ARG004 - autograd's
        return k.view_as(k)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, dk: Tensor) -> Tensor:  # noqa: ARG004
        return torch.cat([dk[:, :, :192], dk[:, :, 192:] * 0.9], 2)


def off_behind_192_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k = OffBehind192Keys.apply(k)  # type: ignore[no-untyped-call]
    scores = q.float() @ k.float().mT * q.shape[-1] ** -0.5
    o: Tensor = (scores.softmax(-1) @ v.float()).to(q.dtype)
    return o


def test_a_kernel_of_whole_tiles_is_asked_with_a_length_that_it_takes() -> None:
    options: dict[str, Any] = {"causal": "top-left", "head_dim": 16, "device": "cpu", "backward": False}
    refused = attn_diag.check(whole_tiles, cases=["normal"], **options)
    assert "T must be a multiple of 128" in refused.failures[0].message
    assert refused.notes == ("the suite has inputs of other lengths and head sizes too: --length, --head-dim",)
    found = attn_diag.check(whole_tiles, cases=["normal", "arrangements"], length=128, **options)
    assert found.passed, found.report()
    assert [case.shape for case in found.cases] == [(16, 1, 128, 16), (2, 4, 128, 16)]
    assert "128 rows of 16 features" in " ".join(found.report().split())


def test_a_fault_behind_the_usual_length_is_found_and_asked_about_again() -> None:
    assert attn_diag.check(off_behind_192_keys, cases=["normal"], head_dim=16, device="cpu").passed
    found = attn_diag.check(off_behind_192_keys, cases=["normal"], length=256, head_dim=16, device="cpu")
    told = " ".join(found.report().split())
    assert "keys 192-255 are 0.9 times the true ones" in told
    assert "length=256" in told


def test_baselines_of_two_lengths_are_two(tmp_path: Path) -> None:
    file = tmp_path / "baseline.json"
    options: dict[str, Any] = {"baseline": file, "cases": ["ones"], "device": "cpu", "backward": False}
    for length in (192, 128):
        assert attn_diag.check(plain, length=length, save=True, **options).saved == "saved"
    for length in (192, 128):
        found = attn_diag.check(plain, length=length, exact=True, **options)
        assert found.passed, found.report()
        assert found.baseline_key == found.key
    other = attn_diag.check(plain, length=64, **options)
    assert other.baseline_key is None


def test_the_real_head_is_cut_and_never_stretched() -> None:
    def drawn(length: int) -> Tensor:
        return suite.Asked(torch.bfloat16, Stated("top-left", 0.125), 64, 0, length).draw(suite.REAL_HEAD).k

    assert torch.equal(drawn(128), drawn(192)[:, :, :128])
    with pytest.raises(InputError, match="real-head has 192 rows, and no 256: leave it out"):
        attn_diag.check("fa2", cases=[suite.REAL_HEAD], length=256, device="cpu")
    with pytest.raises(InputError, match="length must be at least 64, got 63"):
        attn_diag.check("fa2", length=63, device="cpu")
