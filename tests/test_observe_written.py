"""An observed function that writes into its inputs: told so, and judged on what it was given."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import attn_diag
from attn_diag.captures.loading import load

WORDS = "writes into its input k (3.12 % of its 384 elements, first at [0, 0, 11, 0]), which its caller still needs"


def plain(q: Tensor, k: Tensor, v: Tensor, scale: float = 8**-0.5) -> Tensor:
    hidden = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(1)
    return (q @ k.mT * scale).masked_fill(hidden, -torch.inf).softmax(-1) @ v


@attn_diag.observe(causal=True)
def nan_in_k(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    o = plain(q, k, v)
    k.data[:1, :, 11:, :3] = torch.nan
    return o


@attn_diag.observe(causal=True)
def puts_k_back(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    kept = k.data.clone()
    k.data.zero_()
    k.data.copy_(kept)
    return plain(q, k, v)


@attn_diag.observe(causal=True)
def scales_a_copy(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q = q * 1.0
    q *= 8**-0.5
    return plain(q, k, v, 1.0)


def operands() -> list[Tensor]:
    make = torch.Generator().manual_seed(1)
    return [torch.randn(1, 4, 12, 8, generator=make).requires_grad_() for _ in range(3)]


def test_a_breakpoint_on_what_is_wrong_stops_behind_it() -> None:
    found: list[attn_diag.Finding] = []
    with attn_diag.break_if(wrong=True, hook=found.append):
        torch.autograd.backward(nan_in_k(*operands()).sum())
    (one,) = found
    assert one.reasons == (f"wrong: {__name__}.nan_in_k {WORDS}",)
    assert one.diagnosis is not None
    assert not {"wrong", "lossy"} & one.diagnosis.labels


def test_a_capture_holds_what_it_was_given_and_says_so(tmp_path: Path) -> None:
    with attn_diag.capture(None, tmp_path) as recorder:
        torch.autograd.backward(nan_in_k(*operands()).sum())
    assert not recorder.dropped
    (path,) = recorder.written
    capture = load(path)
    assert capture.tensors["k"][...].isfinite().all()
    assert f"{WORDS}: held is what it was given" in (capture.metadata.notes or "")


@pytest.mark.parametrize("function", [puts_k_back, scales_a_copy])
def test_what_holds_the_same_bits_afterwards_is_captured(tmp_path: Path, function: Callable[..., Tensor]) -> None:
    with attn_diag.capture(None, tmp_path) as recorder:
        torch.autograd.backward(function(*operands()).sum())
    assert not recorder.dropped
    assert len(list(tmp_path.glob("*.safetensors"))) == 1
