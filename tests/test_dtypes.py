"""Dtype drift: the line at which a tensor became wider, under autocast on the CPU."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import Tensor, nn

import attn_diag
from attn_diag import InputError, check_qkv, trace_dtypes

HALVES = [torch.bfloat16, torch.float16]


class TimeMix(nn.Module):
    """The part of RWKV-7 in which k is promoted: k_a is an fp32 parameter, and addcmul follows the widest operand."""

    def __init__(self, size: int = 64) -> None:
        super().__init__()
        self.r, self.k, self.v, self.w = (nn.Linear(size, size, bias=False) for _ in range(4))
        self.k_a = nn.Parameter(torch.ones(size))
        self.cast = False

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        r, k, v = self.r(x), self.k(x), self.v(x)
        a = torch.sigmoid(self.w(x))
        k = k.addcmul(k * (a - 1), self.k_a.to(k.dtype) if self.cast else self.k_a)  # the line
        return tuple(t.view(2, -1, 4, 16).transpose(1, 2) for t in (r, k, v))  # type: ignore[return-value]


def line_of(text: str) -> int:
    lines, start = inspect.getsourcelines(TimeMix)
    return start + next(i for i, line in enumerate(lines) if text in line)


@pytest.fixture
def model() -> TimeMix:
    torch.manual_seed(0)
    return TimeMix()


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_the_line_that_promotes_k(model: TimeMix, dtype: torch.dtype) -> None:
    with torch.autocast("cpu", dtype), trace_dtypes() as trace:
        q, k, v = model(torch.randn(2, 8, 64))
    (event,) = trace.findings
    assert (event.kind, event.operation, event.result) == ("widened", "torch.Tensor.addcmul", "float32")
    assert event.source is not None
    assert (event.source.file, event.source.line) == (__file__, line_of("# the line"))
    assert [o.name for o in event.operands] == ["k", None, "self.k_a"]
    assert "self.k_a" in event.fix()
    assert trace.cause(k) == event
    assert trace.cause(q) != event
    assert [step.split()[0] for step in trace.path(k)] == [
        "torch.Tensor.addcmul", "torch.Tensor.view", "torch.Tensor.transpose",
    ]  # fmt: skip
    with pytest.raises(InputError, match=r"(?s)k: float32.*test_dtypes.py:.*addcmul.*Cast self.k_a"):
        check_qkv(q, k, v, trace)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_the_fix_leaves_nothing_to_find(model: TimeMix, dtype: torch.dtype) -> None:
    model.cast = True
    with torch.autocast("cpu", dtype), trace_dtypes() as trace:
        check_qkv(*model(torch.randn(2, 8, 64)))
    assert trace.findings == ()


def test_values_are_not_touched(model: TimeMix) -> None:
    x = torch.randn(2, 8, 64)
    with torch.autocast("cpu", torch.bfloat16):
        plain = model(x)
        with trace_dtypes():
            traced = model(x)
    assert all(torch.equal(a, b) for a, b in zip(plain, traced, strict=True))


def test_nothing_stays_behind_after_an_exception() -> None:
    def fails() -> None:
        with trace_dtypes():
            raise RuntimeError("of the user's")

    with pytest.raises(RuntimeError, match="of the user's"):
        fails()
    assert torch.overrides._get_current_function_mode() is None


def test_scalars_promote_nothing() -> None:
    with trace_dtypes() as trace:
        torch.ones(3, dtype=torch.bfloat16) * torch.tensor(2.0)
    assert trace.events == ()


def test_repeated_lines_are_counted(model: TimeMix) -> None:
    with torch.autocast("cpu", torch.bfloat16), trace_dtypes() as trace:
        for _ in range(3):
            model(torch.randn(2, 8, 64))
    assert [e.count for e in trace.findings] == [3]


def test_check_qkv_without_a_trace() -> None:
    q, k, v = (torch.ones(1, 1, 2, 4, dtype=d) for d in (torch.float16, torch.float32, torch.float16))
    with pytest.raises(InputError, match=r"got q: float16, k: float32, v: float16\. Cast k \(k.to\(q.dtype\)\)"):
        check_qkv(q, k, v)
    check_qkv(q, q, v)
    with pytest.raises(InputError, match="floating-point"):
        attn_diag.check_qkv(q.long(), k, v)
