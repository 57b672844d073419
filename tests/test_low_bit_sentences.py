"""Sentences about attention below 16 bits: metadata and forwards are not blamed for what they do not do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from study_declared import HEALTHY, Plan, inputs, run

import attn_diag


@pytest.mark.parametrize("declared", ["fa3-fp8", None])
def test_a_k_that_became_zeros_in_the_kernel_is_no_other_scale(declared: str | None) -> None:
    """O is then the mean of v; a scale of 0.0005 "fitted" it, and the advice was to correct the metadata."""
    q, k, v, do = inputs("gaussian", 40)
    made = run(Plan(), q, torch.zeros_like(k), v, do)
    named: dict[str, Any] = {n: t[:, :1] for n, t in {"q": q, "k": k, "v": v, "do": do, **made}.items()}
    found = attn_diag.inspect(**named, causal=True, declared=declared)
    report = found.report(200)
    assert report.startswith("WRONG"), report[:400]
    assert "correct the metadata" not in report
    assert "dQ is 100 % off" in report


def test_a_wrong_scale_is_still_found_in_low_bits() -> None:
    q, k, v, do = inputs("gaussian", 41)
    made = run(Plan(), q, k, v, do)
    named: dict[str, Any] = {n: t[:, :1] for n, t in {"q": q, "k": k, "v": v, "o": made["o"]}.items()}
    report = attn_diag.inspect(**named, causal=True, declared="fa3-fp8", scale=0.25).report(200)
    assert "scale=0.125 (1/sqrt(D)) fits" in report


def test_an_undecided_gradient_of_a_sound_kernel_blames_nobody() -> None:
    tensors = inputs("outliers", 300)
    made = run(HEALTHY["FP8, one scale for all heads"], *tensors)
    named: dict[str, Any] = {
        n: t[:, :1] for n, t in {**dict(zip(("q", "k", "v", "do"), tensors, strict=True)), **made}.items()
    }
    found = attn_diag.inspect(**named, causal=True, declared="fa3-fp8")
    report = " ".join(found.report(100).split())
    assert "rows follow from the O and LSE that the kernel returned: its backward adds no error to theirs" in report
    assert "is to blame" not in report
