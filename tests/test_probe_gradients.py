"""``probe`` of kernels whose O is right: what it says of one backward of them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import attn_diag
from attn_diag.results.probe import ProbeReport

Gradients = Callable[[Tensor, tuple[Tensor, Tensor, Tensor]], tuple[Tensor, Tensor, Tensor]]


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q.float() @ k.float().mT * q.shape[-1] ** -0.5
    o: Tensor = (scores.softmax(-1) @ v.float()).to(q.dtype)
    return o


def with_backward(change: Gradients) -> Callable[[Tensor, Tensor, Tensor], Any]:
    """Attention in fp32 that hands its right gradients to ``change``."""

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            ctx.save_for_backward(q, k, v)
            return attention(q, k, v)

        @staticmethod
        def backward(ctx: Any, do: Tensor) -> tuple[Tensor, ...]:
            leaves = [x.detach().requires_grad_() for x in ctx.saved_tensors]
            with torch.enable_grad():
                dq, dk, dv = torch.autograd.grad(attention(*leaves), leaves, do)
            return change(do, (dq, dk, dv))

    return lambda q, k, v: Attention.apply(q, k, v)  # type: ignore[no-untyped-call]


def run(fn: Callable[..., Any], **options: Any) -> ProbeReport:
    return attn_diag.probe(fn, shape=(2, 2, 32, 16), name="fn", **options)


def test_a_wrong_backward_behind_a_right_forward_fails() -> None:
    found = run(with_backward(lambda _, g: (g[0] * 1.5, g[1], g[2])))
    assert (found.outcome, found.certainty) == ("fail", "certain")
    assert str(found.suspect).startswith("dQ is 50 % off, which no rounding makes")
    assert "all rows are 1.5 times the true ones" in str(found.suspect)
    # The check can fail, and only where all is probed.
    sound = run(attention)
    assert sound.outcome == "ok"
    assert "They show no fault. " in str(sound.gradients)
    # A kernel that maps query heads to the wrong key heads has no fault here.
    assert str(sound.gradients).endswith(
        "fewer key heads than query heads (GQA), were not tried: attn-diag check does."
    )
    assert run(attention, probes=["repeat"]).gradients is None


def raising(_: Tensor, g: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    raise RuntimeError(f"no {len(g)} gradients")


@pytest.mark.parametrize(
    ("fn", "why"),
    [
        (torch.no_grad()(attention), "does not depend on q, k, v for autograd"),
        (with_backward(raising), "it raised RuntimeError in its backward .*: no 3 gradients"),
    ],
    ids=["forward-only", "raising"],
)
def test_a_kernel_without_gradients_is_told_so(fn: Callable[..., Any], why: str) -> None:
    found = run(fn)
    assert found.outcome == "ok"
    assert re.search(f"Gradients were not judged: .*{why}", str(found.gradients))


def test_a_backward_that_writes_into_its_do_is_refused() -> None:
    with pytest.raises(attn_diag.InputError, match="fn writes into its input dO"):
        run(with_backward(lambda do, g: (do.mul_(2) * 0 + g[0], g[1], g[2])))
