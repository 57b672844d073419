"""Calls whose tensors have another number of axes than four, or nothing in them."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from builders import holds, some
from tiny_models import written
from torch.nn.functional import scaled_dot_product_attention as sdpa

import attn_diag
from attn_diag.watching.live.pending import _trimmed
from attn_diag.watching.live.sites import _read_sdpa
from attn_diag.watching.live.tap import Tap


def test_two_axes_and_three(tmp_path: Path) -> None:
    """Calls without a head axis: one head of each sequence."""
    with attn_diag.capture(None, tmp_path, batch=None, calls=None) as recorder:
        for axes in (2, 3):
            q, k, v = (torch.randn(2, 5, 4)[(0,) * (3 - axes)].requires_grad_() for _ in range(3))
            torch.autograd.backward(sdpa(q, k, v).sum())
    captures = written(recorder)
    assert [tuple(c.tensors["q"].shape) for c in captures] == [(1, 1, 5, 4), (2, 1, 5, 4)]
    assert all(holds(c) for c in captures)
    assert all({"do", "dq", "dk", "dv"} <= c.tensors.keys() for c in captures)


def test_three_axes_in_a_fused_kernel() -> None:
    """From 2.15 on torch gives them to one as heads of one sequence; they are sequences of one head all the same."""
    q, k, v, o, dq = (torch.randn(2, 5, 4) for _ in range(5))
    fused = {"kernel": "flash", "q": q[None], "k": k[None], "v": v[None], "o": o[None], "lse": torch.randn(1, 2, 5)}
    tap = cast("Tap", SimpleNamespace(fused=lambda *_: fused, operator=None))
    given = {"query": q, "key": k, "value": v, "attn_mask": None, "is_causal": False, "scale": None, "dropout_p": 0.0}
    found = some(_read_sdpa(given, o, tap))
    assert found["kernel"] == "flash"
    assert [tuple(found[name].shape) for name in ("q", "o", "lse")] == [(2, 1, 5, 4), (2, 1, 5, 4), (2, 1, 5)]
    assert torch.equal(found["q"][:, 0], q)
    assert torch.equal(some(_trimmed(dq[None], found["q"]))[:, 0], dq)


OF_WINDOWS = {
    "none": None,
    "of a window": torch.arange(8.0).reshape(2, 1, 4, 1).sin(),
    "of a sequence": torch.arange(3 * 5).reshape(3, 1, 1, 1, 5) % 4 > 0,
    "of a head": torch.arange(8.0).reshape(2, 4, 1).cos(),
}


@pytest.mark.parametrize("mask", OF_WINDOWS)
def test_more_than_four_axes(mask: str, tmp_path: Path) -> None:
    """Windows of images: 3 sequences of 2 windows, 2 heads."""
    with attn_diag.capture(None, tmp_path, batch=None) as recorder:
        q, k, v = (torch.randn(3, 2, 2, n, 8).requires_grad_() for n in (4, 5, 5))
        torch.autograd.backward(sdpa(q, k, v, attn_mask=OF_WINDOWS[mask]).sum())
    (capture,) = written(recorder)
    assert tuple(capture.tensors["q"].shape) == (6, 2, 4, 8)
    assert holds(capture)
    for name, given in (("dq", q), ("dk", k), ("dv", v)):
        assert torch.equal(capture.tensors[name][...], some(given.grad).flatten(0, 1))


@pytest.mark.parametrize("shape", [(0, 2, 5, 4), (1, 2, 0, 4)], ids=["sequences", "tokens"])
def test_a_call_of_nothing_is_told(shape: tuple[int, ...], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), attn_diag.capture(None, tmp_path, batch=None) as recorder:
        q = torch.zeros(shape)
        sdpa(q, q, q)
    assert not recorder.written
    assert f"nothing was attended to: q has the shape {shape}" in caplog.text
