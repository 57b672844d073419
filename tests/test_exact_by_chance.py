"""Gradients that cancel: a well-rounded kernel is exact on such numbers by chance, and its factor tells nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import attn_diag
from attn_diag.reports.opening import headline, next_command
from attn_diag.results.quality import QuantityVerdict

ROWS, KEYS_AT_ONCE = 100, 32


def online(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Blocks of keys, P_bar cast for its product and summed uncast, as fused kernels have it; gradients by autograd."""
    total, normaliser, most = q.new_zeros(()).float(), q.new_zeros(()).float(), torch.full((*q.shape[:3], 1), -1e30)
    for keys, values in zip(torch.split(k, KEYS_AT_ONCE, 2), torch.split(v, KEYS_AT_ONCE, 2), strict=True):
        scores = q.float() @ keys.float().mT * q.shape[-1] ** -0.5
        new = torch.maximum(most, scores.amax(-1, keepdim=True)).detach()
        p_bar = (scores - new).exp()
        total = total * (most - new).exp() + p_bar.to(q.dtype).float() @ values.float()
        normaliser = normaliser * (most - new).exp() + p_bar.sum(-1, keepdim=True)
        most = new
    return (total / normaliser).to(q.dtype)


def inputs(kind: str, seed: int, keys: int = ROWS) -> list[Tensor]:
    """q, k, v and dO; ``kind``: what makes dS zero."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v, do = (torch.randn(1, 1, n, 64, generator=generator) for n in (ROWS, keys, keys, ROWS))
    if kind == "one value":
        v = torch.full_like(v, 1.7)
    else:
        q, k, v, do = (t[:, :, :1].expand_as(t).clone() for t in (q, k, v, do))
    return [t.bfloat16() for t in (q, k, v, do)]


def judged(q: Tensor, k: Tensor, v: Tensor, do: Tensor, *, doubled: bool = False) -> list[QuantityVerdict]:
    """What is said of dQ and dK; ``doubled``: dP's part of them twice, as of a lost delta."""
    q, k, v = (t.clone().requires_grad_() for t in (q, k, v))
    o = online(q, k, v)
    torch.autograd.backward(o, do)
    assert q.grad is not None
    dq, dk = q.grad, k.grad
    if doubled:
        probs = (q.float() @ k.float().mT * q.shape[-1] ** -0.5).softmax(-1)
        dq = (dq + (probs * (do.float() @ v.float().mT)) @ k.float() * q.shape[-1] ** -0.5).bfloat16().detach()
    found = attn_diag.inspect(*(t.detach() for t in (q, k, v)), o=o.detach(), do=do, dq=dq, dk=dk, device="cpu")
    return [one for head in found.heads for one in head.quantities if one.quantity in ("dq", "dk")]


@pytest.mark.parametrize("kind", ["one value", "equal tokens"])
def test_a_kernel_that_rounds_well_is_not_lossy_where_another_is_exact(kind: str) -> None:
    """dQ was called 4,624 times, and with equal tokens 1e33 times, a well-rounded kernel's error."""
    found = [one for seed in range(3) for one in judged(*inputs(kind, seed))]
    assert {one.answer for one in found} <= {"undecided", "good"}, [one.words for one in found]
    assert any("next to none on these very numbers" in one.words for one in found)


def test_errors_of_more_query_rows_than_keys_add_up() -> None:
    """dK was 'off, which no rounding makes: all keys should be zero'."""
    found = [one for seed in (2, 4, 8, 10) for one in judged(*inputs("equal tokens", seed, keys=8))]
    assert {one.answer for one in found} <= {"undecided", "good"}, [one.words for one in found]


@pytest.mark.parametrize("kind", ["one value", "equal tokens"])
def test_what_no_rounding_leaves_is_found_there_too(kind: str) -> None:
    found = [one for one in judged(*inputs(kind, 0), doubled=True) if one.quantity == "dq"]
    assert {one.answer for one in found} <= {"wrong", "lossy"}, [one.words for one in found]


def test_where_no_gradient_comes_nothing_is_said_of_the_backward() -> None:
    """Of a dO of zeros (a compiler's backward that lost them) it was "PASS: O, dQ, dK and dV are as good as …"."""
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 96, 32, generator=draw).bfloat16() for _ in range(3))
    o = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    zeros: dict[str, Any] = {name: torch.zeros_like(q) for name in ("do", "dq", "dk", "dv")}
    found = attn_diag.inspect(q, k, v, o=o, causal=True, **zeros)
    line = headline(found)
    assert "O is as good as a well-rounded kernel's" in line
    assert "Not judged: LSE and delta (not captured), dQ, dK and dV (dO is zero in every row: no gradient" in line
    assert "no gradient comes to this head, and nothing is said of its backward" in found.report()
    assert next_command(found).said.startswith("see where the gradient is lost")
    # What is made of no gradient is still held to be zero.
    wrong = attn_diag.inspect(q, k, v, o=o, causal=True, **(zeros | {"dk": k}))
    assert headline(wrong).startswith("WRONG")
