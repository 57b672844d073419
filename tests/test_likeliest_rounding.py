"""Kernels whose errors look like those of several roundings: what they do not round is not named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import attn_diag
from attn_diag.head.read_lse import backwards_of_read_lse
from attn_diag.kernels.formats import parse, round_to
from attn_diag.reference import AttentionHead, Masking, format_of, round_nearest_even
from attn_diag.reference.rounding import BF16
from attn_diag.results.quality import QuantityVerdict

T, D, ALPHA, TILE = 128, 64, 0.125, 32


def inputs(dtype: torch.dtype, seed: int) -> list[Tensor]:
    """q, k, v and dO, [T, D]."""
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(T, D, generator=g).to(dtype) for _ in range(4)]


def judged(tensors: list[Tensor], rounded: str = "") -> dict[str, QuantityVerdict]:
    """What is said of a causal kernel that goes through tiles of keys.

    Args:
        tensors: q, k, v and dO.
        rounded: What it rounds to their format that others do not: "dprobs", "shifted" (S - L), "inverse" (1 / l) or
            "terms" (m and ln l, of which it makes the L of its backward); "cut": P_bar is cut off.
    """
    q, k, v, do = (x.float() for x in tensors)
    dtype = tensors[0].dtype
    scores = (q @ k.T * ALPHA).masked_fill(torch.ones(len(q), len(q), dtype=torch.bool).triu(1), -torch.inf)
    m, row_sum, out = torch.full_like(q[:, :1], -torch.inf), torch.zeros_like(q[:, :1]), torch.zeros_like(q)
    for s, values in zip(torch.split(scores, TILE, 1), torch.split(v, TILE), strict=True):
        largest = torch.maximum(m, s.amax(1, keepdim=True))
        p, rescale = (s - largest).exp(), (m - largest).exp()
        cast = round_to(p, parse("fp16:toward-zero")) if rounded == "cut" else p.to(dtype).float()
        out = rescale * out + cast @ values
        row_sum, m = rescale * row_sum + p.sum(1, keepdim=True), largest
    o = (out * (1 / row_sum).to(dtype).float() if rounded == "inverse" else out / row_sum).to(dtype)
    terms = [x.to(dtype).float() if rounded == "terms" else x for x in (m, row_sum.log())]
    shifted, dprobs = scores - sum(terms), do @ v.T
    shifted = shifted.to(dtype).float() if rounded == "shifted" else shifted
    dprobs = dprobs.to(dtype).float() if rounded == "dprobs" else dprobs
    probs = shifted.exp()
    dscores = (probs * (dprobs - (do * o).sum(1, keepdim=True))).to(dtype).float()
    gradients = {"dq": dscores @ k * ALPHA, "dk": dscores.T @ q * ALPHA, "dv": probs.to(dtype).float().T @ do}
    made = {"o": o, "do": tensors[3]} | {name: x.to(dtype) for name, x in gradients.items()}
    given: dict[str, Any] = {name: x[None, None] for name, x in made.items()}
    first, second, third = (x[None, None] for x in tensors[:3])
    found = attn_diag.inspect(first, second, third, **given, causal="top-left", device="cpu")
    return {one.quantity: one for one in found.captures[0].observations[0].heads[0].quantities}


def test_errors_that_follow_from_o_are_no_cut_of_ds() -> None:
    """V is nearly one number, and dS of the rounding of O: dK was 'as where dS is cut off to 10 bits'."""
    for seed in range(2):
        q, k, v, do = inputs(torch.float16, seed)
        found = judged([q, k, 0.1 * v + 3, do])
        assert [one.site for one in found.values()] == [None] * 4


def test_errors_of_a_cut_o_are_no_cut_of_ds() -> None:
    """Where V is one number dP and delta cancel, but for the error of O."""
    for seed in range(3):
        q, k, v, do = (x[:30] for x in inputs(torch.float16, seed))
        found = judged([q, k, torch.full_like(v, 1.7), do], "cut")
        assert [one.site for one in found.values()] == ["cut-off-probs", None, None, None]


def test_s_is_rounded_only_where_o_shows_it() -> None:
    """Heavy rows of dQ alone looked like it, of which L was made of rounded terms."""
    g = torch.Generator().manual_seed(68001)
    _, _, v, do = (torch.randn(heads, 96, D, generator=g) for heads in (4, 1, 1, 4))
    u, *low_rank = (torch.randn(size, 4, generator=g) for size in (D, 4 * 96, 96))
    q, k = (x @ u.T for x in low_rank)
    found = judged([x.half() for x in (q[96:192], k, v[0], do[1])], "terms")
    assert found["o"].answer == "good"
    assert found["dq"].site is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_rounded_dp_is_not_called_all_steps_of_plain_torch(dtype: torch.dtype) -> None:
    q, k, v, do = inputs(dtype, 1)
    found = judged([q, k, v.abs() + 0.5, do.abs() + 0.5], "dprobs")
    assert (found["dq"].site, found["dk"].site) == ("rounded-dprobs", "rounded-dprobs")


@pytest.mark.parametrize("heat", [1, 16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_rounded_difference_is_named(dtype: torch.dtype, heat: int) -> None:
    """Keys that no row sees but with a small P were 'off, which no rounding makes'."""
    q, k, v, do = inputs(dtype, 2)
    found = judged([heat * q, k, v, do], "shifted")
    assert (found["dv"].answer, found["dv"].site) == ("lossy", "backward_shifted")
    assert "wrong" not in {one.answer for one in found.values()}


def test_an_ulp_where_others_are_exact_is_rounding() -> None:
    """O is V where V is one number: rows that were an ulp off were 'off, which no rounding makes'."""
    q, k, v, do = inputs(torch.bfloat16, 1)
    found = judged([q, k, torch.full_like(v, 1.7), do], "inverse")
    assert (found["o"].answer, found["o"].rows_outlying > 0) == ("undecided", True)


@pytest.mark.parametrize("of", ["a factor", "BF16"])
def test_an_l_that_is_on_the_grid_for_another_reason(of: str) -> None:
    """All rows have one L, and a factor of dV that brings it to the grid; or an FP16 kernel keeps L in BF16."""
    fmt, (q, k, v, do) = format_of(torch.float16), inputs(torch.float16, 3)
    if of == "a factor":
        q = 0 * q
    else:  # of scores far below L
        q[:, 0], k[:, 0] = 4, -16.0 * (torch.arange(T) % 3 > 0)
    masking = Masking(window=(8, 0)) if of == "a factor" else Masking()
    head = AttentionHead(q.double(), k.double(), v.double(), do.double(), ALPHA, masking)
    scores = head.q @ head.k.T * ALPHA
    head.apply_mask(scores, slice(0, T), slice(0, T))
    lse = scores.logsumexp(1)
    used = lse - 1e-4 if of == "a factor" else round_nearest_even(lse, BF16)
    dv = round_nearest_even((scores - used[:, None]).exp().T @ do.double(), fmt)
    o = (scores - lse[:, None]).exp() @ head.v
    assert backwards_of_read_lse([head], fmt, [o], dv=dv) == [{}]
