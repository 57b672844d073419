"""What a kernel of 16-bit inputs multiplies in fp32, and a tensor core cuts off to TF32, is told by ``inspect``."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import attn_diag
from attn_diag.results.diagnosis import HeadDiagnosis

Cast = Callable[[Tensor], Tensor]


def cut(x: Tensor, kept: int = 10) -> Tensor:
    bits: Tensor = x.contiguous().view(torch.int32) & -(2 ** (23 - kept))
    return bits.view(torch.float32)


def nearest(x: Tensor) -> Tensor:
    """TF32 to nearest."""
    return cut(x * (1 + 2.0**-11))


def kept(x: Tensor) -> Tensor:
    return x


def low(x: Tensor) -> Tensor:
    return x.half().float()


def heads(
    dtype: torch.dtype, probs: Cast, dscores: Cast | None = None, *, tile: int = 32, factor: float = 1.0,
    hidden: bool = False, seed: int = 0, t: int = 192, d: int = 64,
) -> list[HeadDiagnosis]:  # fmt: skip
    """Two heads of an fp32 kernel in key tiles, ``probs`` done to P and ``dscores`` to dS before their products."""
    torch.manual_seed(seed)
    q, k, v, do = (torch.randn(1, 2, t, d).to(dtype) for _ in range(4))
    scores = (q.double() @ k.double().mT).float() * d**-0.5
    if hidden:
        scores[..., t // 2 : t // 2 + 8, :4] = -torch.inf
    top, total, out = scores[..., :1] - torch.inf, torch.zeros(1, 2, t, 1), torch.zeros(1, 2, t, d)
    for start in range(0, t, tile):
        keys = slice(start, start + tile)
        new = torch.maximum(top, scores[..., keys].amax(-1, keepdim=True)).clamp(min=-1e30)
        p, rescaled = (scores[..., keys] - new).exp(), (top - new).exp()
        total = total * rescaled + p.sum(-1, keepdim=True)
        out = (out * rescaled + probs(p).double() @ v[..., keys, :].double()).float()
        top = new
    o = (factor * out / total).to(dtype)
    gradients = {}
    if dscores is not None:
        p = (scores - top - total.log()).exp()
        delta = (do.float() * o.float()).sum(-1, keepdim=True)
        ds = dscores(p * ((do.double() @ v.double().mT).float() - delta)).double()
        made = (ds @ k.double() * d**-0.5, ds.mT @ q.double() * d**-0.5, probs(p).double().mT @ do.double())
        gradients = {name: x.to(dtype) for name, x in zip(("dq", "dk", "dv"), made, strict=True)} | {"do": do}
    found = attn_diag.inspect(q, k, v, o=o, **gradients)
    return [h for h in found.captures[0].observations[0].heads if h.head is not None]


def sites(head: HeadDiagnosis) -> dict[str, str | None]:
    return {q.quantity: q.site for q in head.quantities if q.answer == "lossy"}


def is_named(head: HeadDiagnosis) -> bool:
    assert head.verdict is not None
    return any("P is cut off to 10 bits" in reason and "O errs" in reason for reason in head.verdict.reasons)


@pytest.mark.parametrize("tile", [16, 64])
def test_the_bias_of_a_cut_off_p_is_named_in_bf16(tile: int) -> None:
    for head in heads(torch.bfloat16, cut, tile=tile):
        assert head.verdict is not None
        assert head.verdict.labels == ("biased",)
        assert is_named(head)
        assert "tl.dot" in head.verdict.suggestions[0]


def test_and_in_fp16_what_makes_o_and_the_gradients_lossy() -> None:
    for head in heads(torch.float16, cut, cut):
        assert sites(head) == {
            "o": "cut-off-probs",
            "dq": "cut-off-dscores",
            "dk": "cut-off-dscores",
            "dv": "cut-off-probs",
        }
        assert head.verdict is not None
        assert head.verdict.labels == ("lossy", "biased")
        assert is_named(head)
        assert all("tl.dot" in said for said in head.verdict.suggestions)


def test_of_a_backward_alone_ds() -> None:
    for head in heads(torch.float16, low, cut):
        assert sites(head) == {"dq": "cut-off-dscores", "dk": "cut-off-dscores"}
        assert not is_named(head)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("probs", "factor"),
    [(kept, 1.0), (nearest, 1.0), (kept, 0.99965), (lambda x: cut(x, 12), 1.0)],
    ids=["fp32", "to nearest", "a factor as biased", "to 12 bits"],
)
def test_other_kernels_are_not_called_so(dtype: torch.dtype, probs: Cast, factor: float) -> None:
    for head in heads(dtype, probs, probs, factor=factor, seed=1, t=96):
        assert not is_named(head)
        assert not any(site is not None and site.startswith("cut-off") for site in sites(head).values())


def test_a_fault_beside_it_is_told_first() -> None:
    for head in heads(torch.float16, cut, hidden=True):
        assert head.verdict is not None
        assert head.verdict.labels == ("wrong",)
