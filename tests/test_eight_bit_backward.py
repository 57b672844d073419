"""Kernels whose backward alone casts P and dS to 8 bits as they are, which makes whole rows of dV and dK zero."""

from __future__ import annotations

import math

import pytest
import torch

import attn_diag
from attn_diag.results.diagnosis import Diagnosis

LENGTH = 192
FORMATS = {"e5m2": torch.float8_e5m2, "e4m3": torch.float8_e4m3fn}


def diagnosed(fmt: str, *, fault: str = "", spread: float = 12.0, seed: int = 0) -> Diagnosis:
    g = torch.Generator().manual_seed(seed)
    q, k, v, do = (torch.randn(1, 1, LENGTH, 64, generator=g).bfloat16() for _ in range(4))
    q = spread * q
    hidden = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    scores = (q.float() @ k.float().mT / 8).masked_fill(hidden, -math.inf)
    lse, top = scores.logsumexp(-1, keepdim=True), scores.amax(-1, keepdim=True)
    powers, probs = (scores - top).exp(), (scores - lse).exp()
    o = ((powers.bfloat16().float() @ v.float()) / powers.sum(-1, keepdim=True)).bfloat16()
    delta = (do.float() * o.float()).sum(-1, keepdim=True)
    dscores = probs * (do.float() @ v.float().mT - delta)
    fine, low = ([x.to(dtype).float() for x in (probs, dscores)] for dtype in (torch.bfloat16, FORMATS[fmt]))
    probs, dscores = low
    if fault == "key lost":
        probs[..., 5], dscores[..., 5] = 0, 0
    if fault == "tile lost":
        probs[..., 64:128, :64], dscores[..., 64:128, :64] = 0, 0
    dq, dk, dv = dscores @ k.float() / 8, dscores.mT @ q.float() / 8, probs.mT @ do.float()
    if fault == "zeros alone":  # of a kernel that is well rounded else
        lost_dk, lost_dv = ((x.bfloat16() == 0).all(3) for x in (dk, dv))
        probs, dscores = fine
        dq, dk, dv = dscores @ k.float() / 8, dscores.mT @ q.float() / 8, probs.mT @ do.float()
        dk[lost_dk], dv[lost_dv] = 0, 0
    if fault == "rows of zeros":
        dq[:, :, 7], dk[:, :, 7], dv[:, :, 7] = 0, 0, 0
    return attn_diag.inspect(
        q, k, v, o=o, lse=lse[..., 0], do=do, dq=dq.bfloat16(), dk=dk.bfloat16(), dv=dv.bfloat16(),
        causal="top-left", device="cpu",
    )  # fmt: skip


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("fmt", FORMATS)
def test_they_are_lossy_and_the_cast_is_named(fmt: str, seed: int) -> None:
    head = diagnosed(fmt, seed=seed).heads[0]
    assert head.verdict is not None
    assert head.verdict.labels == ("lossy",)
    found = {q.quantity: q for q in head.quantities}
    assert found["dv"].site == fmt
    assert f"as where P and dS are cast to {fmt.upper()} in the backward" in found["dv"].words


@pytest.mark.parametrize("fault", ["key lost", "tile lost", "rows of zeros", "zeros alone"])
@pytest.mark.parametrize("fmt", FORMATS)
def test_faults_beside_such_casts_stay_wrong(fmt: str, fault: str) -> None:
    verdict = diagnosed(fmt, fault=fault).heads[0].verdict
    assert verdict is not None
    assert "wrong" in verdict.labels
