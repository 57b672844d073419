"""Wrong derivatives of the softcap are wrong mathematics and named, not coarse rounding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from builders import some
from torch import Tensor

import attn_diag
from attn_diag.results.quality import QuantityVerdict

CAP, ROWS, WIDTH = 10.0, 40, 16


def judged(derivative: Callable[[Tensor], Tensor], factor: float = 1.0, seed: int = 0) -> dict[str, QuantityVerdict]:
    """What is said of the first of two query heads with one key head, whose backward has this function of tanh."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v, do = (torch.randn(1, n, ROWS, WIDTH, generator=generator).bfloat16() for n in (2, 1, 1, 2))
    q = 3 * q
    x = {n: t.double().expand(1, 2, -1, -1) for n, t in {"q": q, "k": k, "v": v, "do": do}.items()}
    tanh = (x["q"] @ x["k"].mT / WIDTH**0.5 / CAP).tanh()
    probs = (CAP * tanh).masked_fill(torch.ones(ROWS, ROWS).triu(1) > 0, -torch.inf).softmax(-1)
    cast = probs.bfloat16().double()
    o = (cast @ x["v"]).bfloat16()
    ds = probs * (x["do"] @ x["v"].mT - (x["do"] * o).sum(-1, keepdim=True)) * derivative(tanh)
    ds = ds.bfloat16().double() * factor / WIDTH**0.5
    found = attn_diag.inspect(
        q, k, v, do=do, o=o, dq=(ds @ x["k"]).bfloat16(), dk=(ds.mT @ x["q"]).sum(1, keepdim=True).bfloat16(),
        dv=(cast.mT @ x["do"]).sum(1, keepdim=True).bfloat16(), causal=True, softcap=CAP, device="cpu",
    )  # fmt: skip
    head = found.captures[0].observations[0].heads[0]
    some(head.verdict)
    return {one.quantity: one for one in head.quantities}


@pytest.mark.parametrize(
    ("derivative", "words"),
    [
        (torch.ones_like, "without the softcap's derivative"),
        (lambda t: (1 - t.square()).square(), "have the softcap's derivative twice"),
        (lambda t: 1 - t.abs(), "have 1 - |tanh| for the softcap's derivative"),
        (lambda t: 1 - t.square() / 4, "have another function of the score for the softcap's derivative"),
    ],
    ids=["none", "twice", "first power", "half the score"],
)
def test_another_derivative_is_wrong_and_named(derivative: Callable[[Tensor], Tensor], words: str) -> None:
    found = judged(derivative)
    for name in ("dq", "dk"):
        assert found[name].answer == "wrong"
        assert words in found[name].words
    assert found["dv"].answer != "wrong"


@pytest.mark.parametrize(("factor", "seed"), [(1.0, 0), (1.0, 1), (1 + 2.0**-7, 0)])
def test_the_right_derivative_is_not_accused(factor: float, seed: int) -> None:
    found = judged(lambda t: 1 - t.square(), factor, seed)
    assert "softcap" not in found["dq"].words + found["dk"].words
    if factor == 1:
        assert {one.answer for one in found.values()} <= {"good", "undecided", "stated"}


def test_a_backward_is_not_said_to_be_wrong_alone_where_o_is_wrong_too() -> None:
    """Of a mask before the softcap dV was "a sink … in the backward alone (O has the right one)", beside a wrong O."""
    draw = torch.Generator().manual_seed(0)
    q, k, v, do = (torch.randn(1, 1, 160, 32, generator=draw).bfloat16() for _ in range(4))
    hidden = torch.ones(160, 160, dtype=torch.bool).triu(1)
    inputs = [t.float().requires_grad_() for t in (q, k, v)]
    scores = (inputs[0] @ inputs[1].mT / 32**0.5).masked_fill(hidden, -1e30)
    o = (5 * torch.tanh(scores / 5)).softmax(-1) @ inputs[2]
    made = dict(zip(("dq", "dk", "dv"), torch.autograd.grad(o, inputs, do.float()), strict=True))
    outputs: dict[str, Any] = {name: t.detach().bfloat16() for name, t in {"o": o, **made}.items()}
    told = attn_diag.inspect(q, k, v, do=do, causal=True, softcap=5.0, **outputs).report()
    assert "applied before the softcap" in " ".join(told.split())
    assert "O has the right one" not in " ".join(told.split())
