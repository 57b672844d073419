"""Fused kernels whose backward rounds delta, the products it is the sum of (JAX's Pallas kernel), or dP to 16 bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import attn_diag
from attn_diag.results.diagnosis import HeadDiagnosis

LENGTH = 256


def diagnosed(
    rounded: str, dtype: torch.dtype, *, fault: str = "", causal: bool = False, heat: int = 4
) -> HeadDiagnosis:
    g = torch.Generator().manual_seed(3)
    q, k, v, do = (torch.randn(1, 1, LENGTH, 64, generator=g).to(dtype) for _ in range(4))
    q, v = heat * q, v + 1
    scores = q.float() @ k.float().mT / 8
    if causal:
        scores = scores.masked_fill(torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1), -torch.inf)
    powers, probs = (scores - scores.amax(-1, keepdim=True)).exp(), scores.softmax(-1)
    o = ((powers.to(dtype).float() @ v.float()) / powers.sum(-1, keepdim=True)).to(dtype)
    products = do * o if rounded == "products" else do.float() * o.float()
    delta = products.float().sum(-1, keepdim=True)
    delta = delta.to(dtype).float() if rounded in ("delta", "products") else delta
    dprobs = do.float() @ v.float().mT
    dprobs = dprobs.to(dtype).float() if rounded == "dprobs" else dprobs
    dscores = (probs * (dprobs - delta)).to(dtype).float()
    dq, dk = dscores @ k.float() / 8, dscores.mT @ q.float() / 8
    if fault == "rows":
        dq[..., dq.norm(dim=-1).flatten().topk(12).indices, :] *= 1.5
    if fault == "key":
        dk[..., 7, :] *= 1.5
    gradients = {"dq": dq, "dk": dk, "dv": probs.to(dtype).float().mT @ do.float()}
    made: dict[str, Any] = {name: x.to(dtype) for name, x in gradients.items()}
    found = attn_diag.inspect(q, k, v, o=o, do=do, **made, causal=causal or None, device="cpu")
    return next(h for h in found.captures[0].observations[0].heads if h.head == 0)


@pytest.mark.parametrize(
    ("rounded", "dtype"),
    [(r, torch.bfloat16) for r in ("delta", "products", "dprobs")]
    + [(r, torch.float16) for r in ("products", "dprobs")],
)
def test_what_leads_to_ds_is_named_where_it_is_rounded(rounded: str, dtype: torch.dtype) -> None:
    head = diagnosed(rounded, dtype)
    assert {q.site for q in head.quantities if q.quantity in ("dq", "dk")} == {f"rounded-{rounded}"}
    assert head.verdict is not None
    assert head.verdict.labels[0] in ("lossy", "undecided")


def test_it_is_not_said_of_a_backward_that_does_not() -> None:
    assert all(q.site is None and q.answer == "good" for q in diagnosed("", torch.bfloat16).quantities)


@pytest.mark.parametrize("fault", ["rows", "key"])
def test_a_fault_beside_it_stays_wrong(fault: str) -> None:
    head = diagnosed("products", torch.bfloat16, fault=fault)
    assert head.verdict is not None
    assert head.verdict.labels == ("wrong",)
    other = "dk" if fault == "rows" else "dq"
    assert [q.site for q in head.quantities if q.quantity == other] == ["rounded-products"]


@pytest.mark.parametrize(("rounded", "words"), [("delta", "delta"), ("dprobs", "dP")])
def test_a_row_that_should_be_zero_is_still_told(rounded: str, words: str) -> None:
    found = diagnosed(rounded, torch.bfloat16, causal=True, heat=2)
    dq = next(q for q in found.quantities if q.quantity == "dq")
    said = f"as where {words} is rounded to the inputs' format; it should be zero in row 0: dP and delta do not cancel"
    assert (dq.answer, said in dq.words) == ("undecided", True)
