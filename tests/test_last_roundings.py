"""A kernel whose last rounding is stochastic is lossy, not wrong, where a well-rounded kernel is next to exact."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import attn_diag
from attn_diag.kernels.formats import parse, round_to


def near_constants(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """V takes one of two neighbouring BF16 numbers in each feature, mostly the lower in some: ``normaliser-up``."""
    generator = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(2, 2, 160, 32, generator=generator).bfloat16() for _ in range(2))
    base = 1 + torch.randint(0, 128, (2, 2, 1, 32), generator=generator) / 128
    share = torch.rand(2, 2, 1, 32, generator=generator)
    upper = torch.rand(2, 2, 160, 32, generator=generator) < share
    return q, k, (base + upper / 128).bfloat16()


def out(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    found: Tensor = (q.double() @ k.double().mT * q.shape[-1] ** -0.5).softmax(-1) @ v.double()
    return found


def checked(cast: Callable[[Tensor], Tensor], case: str, seed: int = 0, *, pivoting: bool) -> set[str]:
    """Kinds of failures of an attention with P_bar in BF16 and this last cast, in tiles of 64 keys that are scaled to
    the maximum, or (``pivoting``, causal, as flash_attn_triton.py) to the LSE so far where that is larger."""

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s = q.double() @ k.double().mT * q.shape[-1] ** -0.5
        if pivoting:
            s = s.masked_fill(~torch.ones(s.shape[-2:]).tril().bool(), -math.inf)
        o = torch.zeros_like(q).double()
        lse = before = torch.full((*q.shape[:3], 1), -math.inf, dtype=torch.float64)
        for tile in torch.split(torch.arange(k.shape[2]), 64):
            pivot = torch.maximum(s[..., tile].amax(-1, keepdim=True), lse) if pivoting else s.amax(-1, keepdim=True)
            p = (s[..., tile] - pivot).exp()
            o = o * (before - pivot).exp() + p.bfloat16().double() @ v.double()[:, :, tile]
            lse, before = pivot + ((lse - pivot).exp() + p.sum(-1, keepdim=True)).log(), pivot
        return cast(o * (before - lse).exp())

    found = attn_diag.check(
        attention, cases=[case], backward=False, causal="top-left" if pivoting else "none", seed=seed, device="cpu"
    )
    return {f"{f.kind} {f.message}" for f in found.failures}


def rounding(mode: str) -> Callable[[Tensor], Tensor]:
    return lambda o: round_to(o, parse(f"bf16:{mode}"), 5).bfloat16()


@pytest.mark.parametrize("seed", range(3))
def test_a_stochastic_last_rounding_is_not_wrong(seed: int) -> None:
    """Features that are mostly one number, 0.8 ulp off, were: no rounding makes that, it said, and "certain"."""
    assert not checked(rounding("stochastic"), "normaliser-up", seed, pivoting=True)


def test_a_truncation_of_o_is_no_sink() -> None:
    """Of keys that weigh alike, an unstated sink takes as much as a truncation and the casts of P_bar together."""
    failures = checked(rounding("toward-zero"), "normaliser-down", pivoting=False)
    assert any("bias" in f for f in failures)
    assert not any("wrong" in f or "sink" in f for f in failures), failures


@pytest.mark.parametrize("ulps", [2, 4])
def test_a_feature_some_ulp_off_is_still_wrong(ulps: int) -> None:
    q, k, v = near_constants(0)
    o = out(q, k, v)
    o[0, 1, :, 5] += ulps / 128
    assert "wrong" in attn_diag.inspect(q, k, v, o=o.bfloat16()).labels


def test_a_row_or_an_element_some_ulp_off_is_still_wrong() -> None:
    q, k, v = near_constants(1)
    for place in ((0, 1, 70), (0, 1, 70, 5)):
        o = out(q, k, v)
        o[place] += 4 / 128
        assert "wrong" in attn_diag.inspect(q, k, v, o=o.bfloat16()).labels, place
