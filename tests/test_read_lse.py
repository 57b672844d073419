"""The L that a backward read is found again in its gradients: in 16 bits it is named, whatever made it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import attn_diag
from attn_diag.head.read_lse import backwards_of_read_lse
from attn_diag.reference import AttentionHead, Masking, format_of, round_nearest_even, ulp
from attn_diag.results.quality import QuantityVerdict

T, D, ALPHA = 128, 64, 0.125
FORMATS = {dtype: format_of(dtype) for dtype in (torch.bfloat16, torch.float16)}


def inputs(dtype: torch.dtype, seed: int, times: float) -> list[Tensor]:
    """q, k, v and dO, [T, D]."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v, do = (torch.randn(T, D, generator=generator) for _ in range(4))
    return [x.to(dtype) for x in (times * q, k, v, do)]


def scores_of(q: Tensor, k: Tensor, *, wide: bool) -> Tensor:
    """Causal S, in fp32 or in the inputs' format."""
    s = (q.float() @ k.float().T) * ALPHA if wide else (q @ k.T) * ALPHA
    return s.masked_fill(torch.ones_like(s, dtype=torch.bool).triu(1), -torch.inf)


def first_flash_attention(q: Tensor, k: Tensor, v: Tensor, *, wide: bool, tile: int = 32) -> tuple[Tensor, Tensor]:
    """O and L of FlashAttention-1's loop, which divides O by l in every tile; m, l and O in the inputs' format."""
    scores, rows = scores_of(q, k, wide=wide), len(q)
    m, total, out = q.new_full((rows, 1), -torch.inf), q.new_zeros(rows, 1), torch.zeros_like(q)
    for j in range(0, rows, tile):
        s = scores[:, j : j + tile]
        largest = torch.maximum(m, s.amax(1, keepdim=True).to(q.dtype))
        p, rescale = (s - largest).exp(), (m - largest).exp()
        new = (rescale * total + p.sum(1, keepdim=True)).to(q.dtype)
        out = ((rescale * total * out + p.to(q.dtype) @ v[j : j + tile]) / new).to(q.dtype)
        m, total = largest, new
    return out, (m + total.log())[:, 0]


def backward(tensors: list[Tensor], o: Tensor, lse: Tensor, *, wide: bool) -> list[Tensor]:
    """dQ, dK and dV; ``wide``: in fp32 but for the casts of P and dS."""
    q, k, v, do = tensors
    dtype = q.dtype
    s = scores_of(q, k, wide=wide)
    if wide:
        q, k, v, do, o, lse = (x.float() for x in (q, k, v, do, o, lse))
    p = (s - lse[:, None]).exp()
    ds = p * (do @ v.T - (do * o).sum(1, keepdim=True))
    p, ds = (x.to(dtype).to(do.dtype) for x in (p, ds))
    return [x.to(dtype) for x in (ds @ k * ALPHA, ds.T @ q * ALPHA, p.T @ do)]


def judged(tensors: list[Tensor], o: Tensor, gradients: list[Tensor]) -> dict[str, QuantityVerdict]:
    q, k, v, do, o, dq, dk, dv = (x[None, None] for x in (*tensors, o, *gradients))
    found = attn_diag.inspect(q, k, v, o=o, do=do, dq=dq, dk=dk, dv=dv, causal="top-left", device="cpu")
    return {one.quantity: one for one in found.captures[0].observations[0].heads[0].quantities}


@pytest.mark.parametrize("wide", [True, False])
@pytest.mark.parametrize("dtype", FORMATS)
def test_of_any_loop(dtype: torch.dtype, *, wide: bool) -> None:
    """No way of the forward makes such an O: of these gradients 'lossy' alone was said."""
    tensors = inputs(dtype, 3, 4.0)
    o, lse = first_flash_attention(*tensors[:3], wide=wide)
    found = judged(tensors, o, backward(tensors, o, lse, wide=wide))
    for name in ("dq", "dk", "dv"):
        assert (found[name].answer, found[name].site) == ("lossy", "lse" if wide else "lse_steps"), found[name]


def test_a_wrong_row_beside_it_is_no_rounding() -> None:
    tensors = inputs(torch.float16, 3, 4.0)
    o, lse = first_flash_attention(*tensors[:3], wide=True)
    dq, dk, dv = backward(tensors, o, lse, wide=True)
    dq[70] = (1.2 * dq[70].float()).half()
    found = judged(tensors, o, [dq, dk, dv])
    assert found["dq"].site is None
    assert found["dv"].site == "lse"


@pytest.mark.parametrize("given", ["dq", "dv"])
@pytest.mark.parametrize("dtype", FORMATS)
def test_l_is_read_to_the_bit(dtype: torch.dtype, given: str) -> None:
    fmt, tensors = FORMATS[dtype], inputs(dtype, 5, 4.0)
    q, k, v, do = tensors
    head = AttentionHead(q.double(), k.double(), v.double(), do.double(), ALPHA, Masking("top-left"))
    scores = scores_of(head.q, head.k, wide=False)
    lse = scores.logsumexp(1)
    o = ((scores - lse[:, None]).exp() @ head.v).to(dtype)
    # Off by up to one and a half spacings, and stored.
    noise = torch.rand(T, generator=torch.Generator().manual_seed(1)).double() - 0.5
    stored = round_nearest_even(lse + 2 * noise * ulp(lse, fmt), fmt)

    def read(given_lse: Tensor) -> dict[str, dict[str, Tensor]]:
        dq, _, dv = (x.double() for x in backward(tensors, o, given_lse, wide=True))
        of = {"dq": dq, "dv": None} if given == "dq" else {"dq": None, "dv": dv}
        (made,) = backwards_of_read_lse([head], fmt, [o.double()], dq=of["dq"], dv=of["dv"])
        return made

    found = read(stored)
    assert "from-l:fused:low" in found
    expected = backward(tensors, o, stored, wide=True)
    for name, seen in zip(("dq", "dk", "dv"), expected, strict=True):
        left, error = ((found[way][name] - seen).square().sum() for way in ("from-l:fused:low", ""))
        assert left < 0.05 * error, name
    assert read(lse) == {}, "an L in fp32"
    assert read(stored + ulp(lse, fmt)) == {}, "an L to which something is added"
    assert read(lse + 0.3 * noise) == {}, "an L that is off, on no grid"


def test_of_query_heads_that_share_a_key_head() -> None:
    """Of their dV together; dK is then the sum of what each makes."""
    one, other = (inputs(torch.float16, seed, 4.0) for seed in (3, 4))
    made = []
    for q, do in ((one[0], one[3]), (other[0], other[3])):
        tensors = [q, *one[1:3], do]
        o, lse = first_flash_attention(*tensors[:3], wide=True)
        dq, dk, dv = backward(tensors, o, lse, wide=True)
        made.append((q, do, o, dq, dk.float(), dv.float()))
    q, do, o, dq, dk, dv = (torch.stack(x)[None] for x in zip(*made, strict=True))
    k, v = (x[None, None] for x in one[1:3])
    dk, dv = (x.sum(1, keepdim=True).half() for x in (dk, dv))
    found = attn_diag.inspect(q, k, v, o=o, do=do, dq=dq, dk=dk, dv=dv, causal="top-left", device="cpu")
    for head in found.captures[0].observations[0].heads[:2]:
        sites = {one.quantity: one.site for one in head.quantities if one.quantity != "o"}
        assert sites == dict.fromkeys(("dq", "dk", "dv"), "lse")


def test_a_short_sequence_shows_nothing_and_says_nothing_of_others() -> None:
    """Of 16 rows no L is read; of the next sequence's 128 it is."""
    short, long = [x[:16] for x in inputs(torch.float16, 4, 4.0)], inputs(torch.float16, 3, 4.0)
    made = []
    for tensors in (short, long):
        o, lse = first_flash_attention(*tensors[:3], wide=True)
        made.append([*tensors, o, *backward(tensors, o, lse, wide=True)])
    q, k, v, do, o, dq, dk, dv = (torch.cat(x)[None, None] for x in zip(*made, strict=True))
    borders = torch.tensor([0, 16, 16 + T], dtype=torch.int32)
    found = attn_diag.inspect(
        q, k, v, o=o, do=do, dq=dq, dk=dk, dv=dv, causal="top-left", device="cpu",
        cu_seqlens_q=borders, cu_seqlens_k=borders,
    )  # fmt: skip
    quantities = found.captures[0].observations[0].heads[0].quantities
    assert {one.quantity: one.site for one in quantities}["dv"] == "lse"
