"""A kernel that writes into what is its caller's is told so by name, and is not judged on what it left there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import attn_diag
from attn_diag.captures.lent import Lent
from attn_diag.testing.case_inputs import CaseInputs
from attn_diag.testing.target import MisfitError, Returned, Target

Fn = Callable[[Tensor, Tensor, Tensor], Tensor]
ELEMENTS = 16 * 192 * 64


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scaled_dot_product_attention(q, k, v, is_causal=True)


def one_of_q(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    o = sdpa(q, k, v)
    q.data[3, 0, 5, 7] = 3.0
    return o


def nan_in_k(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    o = sdpa(q, k, v)
    k.data[:, :, -24:] = torch.nan
    return o


def scales_q(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Autograd refuses this of a leaf, and of no other tensor."""
    q *= 0.25
    return scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.5)


def scales_q_where_autograd_needs_it(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    o = sdpa(q, k, v)
    q.detach().mul_(0.25)
    return o


def with_backward(after: Callable[[Any, Tensor], object]) -> Fn:
    """sdpa, and something that its backward does when it has made the gradients."""

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with torch.enable_grad():
                ctx.leaves = [x.detach().requires_grad_() for x in (q, k, v)]
                ctx.inner = sdpa(*ctx.leaves)
            returned: Tensor = ctx.inner.detach().clone()
            ctx.returned = returned.detach()
            return returned

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
            made: tuple[Tensor, ...] = torch.autograd.grad(ctx.inner, ctx.leaves, gradients[0].clone())
            after(ctx, gradients[0])
            return made

    return Attention.apply


def restore(_: Any, do: Tensor) -> None:
    kept = do.clone()
    do.zero_().copy_(kept)


def scales_a_copy(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q = q * 1.0
    q *= 0.25
    return scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.5)


def puts_q_back(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    kept = q.data.clone()
    q.data.zero_()
    q.data.copy_(kept)
    return sdpa(q, k, v)


ALL = f"100 % of its {ELEMENTS} elements, first at [0, 0, 0, 0]"
WRITERS: Mapping[str, tuple[Fn, str]] = {
    "one of q": (one_of_q, f"its input q (1 of its {ELEMENTS} elements, first at [3, 0, 5, 7])"),
    "NaN in k": (nan_in_k, f"its input k (12.5 % of its {ELEMENTS} elements, first at [0, 0, 168, 0])"),
    "scales q": (scales_q, f"its input q ({ALL})"),
    "where autograd needs it": (scales_q_where_autograd_needs_it, f"its input q ({ALL})"),
    "dO": (with_backward(lambda _, do: do.mul_(2)), f"its input dO (in its backward; {ALL})"),
    "v": (with_backward(lambda ctx, _: ctx.leaves[2].data.neg_()), f"its input v (in its backward; {ALL})"),
    "O": (with_backward(lambda ctx, _: ctx.returned.neg_()), f"the O that it returned (in its backward; {ALL})"),
}
HARMLESS = (sdpa, scales_a_copy, puts_q_back, with_backward(restore), with_backward(lambda _, do: do * 2))


def called(fn: Fn) -> Returned:
    """One call, forward and backward."""
    make = torch.Generator().manual_seed(1)
    q, k, v, do = (torch.randn(16, 1, 192, 64, generator=make).bfloat16() for _ in range(4))
    case = CaseInputs("normal", q, k, v, do, 0.125, "top-left")
    before = case.fingerprint
    target = Target.of(fn, dtype=q.dtype, head_dim=64, device=torch.device("cpu"))
    found = target.call(case, gradients=True)
    assert case.fingerprint == before  # the next call gets what it should
    return found


@pytest.mark.parametrize(("fn", "words"), WRITERS.values(), ids=WRITERS)
def test_a_kernel_that_writes_into_what_is_its_callers_is_told_so(fn: Fn, words: str) -> None:
    with pytest.raises(MisfitError) as told:
        called(fn).require_untouched()
    assert str(told.value) == f"it writes into {words}, which its caller still needs"


@pytest.mark.parametrize("fn", HARMLESS)
def test_what_holds_the_same_bits_afterwards_is_no_failure(fn: Fn) -> None:
    called(fn).require_untouched()


def test_nan_that_was_there_is_not_the_kernels() -> None:
    given = torch.tensor([torch.nan, 1.0])
    lent = Lent()
    lent.out("q", given, given.clone())
    lent.look()
    assert not lent.written


@pytest.mark.parametrize("name", WRITERS)
def test_check_fails_with_it(name: str) -> None:
    fn, words = WRITERS[name]
    found = attn_diag.check(fn, causal=True, cases=["normal"], device="cpu")
    assert [f.message for f in found.failures] == [f"normal: it writes into {words}, which its caller still needs"]


@pytest.mark.parametrize("name", ["dO", "scales q"])
def test_invariance_tells_it_first(name: str) -> None:
    fn, words = WRITERS[name]
    found = attn_diag.invariance(fn, causal=True, device="cpu", only=["run-to-run"])
    assert not found.passed
    assert found.headline.startswith(f"it writes into {words.partition('(')[0]}(")
