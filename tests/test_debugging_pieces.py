"""What ``break_if`` is made of: the largest logit of a call, and a stop at the next instruction."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from attn_diag.watching.debugging.breaking import at_next_instruction
from attn_diag.watching.debugging.finding import largest_logit
from attn_diag.watching.live.call import AttentionCall, CallPlace

pytestmark = pytest.mark.slow


def masks() -> Iterator[tuple[str, dict[str, Any]]]:
    mask = torch.zeros(24, 40)
    mask[:, 30:] = torch.finfo(torch.float32).min
    yield "none", {}
    yield "causal", {"causal": "bottom-right"}
    yield "top-left", {"causal": "top-left"}
    yield "window", {"window": (5, 3)}
    yield "causal window", {"causal": "bottom-right", "window": (5, 0)}
    yield "bool", {"mask": mask == 0}
    yield "additive", {"mask": mask}
    yield "scale", {"scale": 2.0, "causal": "top-left"}


def dense_logit(call: AttentionCall) -> tuple[float, int]:
    """The same by loops over rows and keys."""
    best, where, shift = -float("inf"), 0, 0 if call.causal == "top-left" else 16
    left, right = call.window or (-1, -1)
    right = 0 if call.causal != "none" else right
    for head in range(4):
        scores = call.q[0, head].double() @ call.k[0, head // 2].double().T
        scores *= 0.25 if call.scale is None else call.scale
        for t in range(24):
            for j in range(40):
                seen = (left < 0 or j >= t + shift - left) and (right < 0 or j <= t + shift + right)
                seen &= call.mask is None or bool(
                    call.mask[t, j] if call.mask.dtype == torch.bool else call.mask[t, j] == 0
                )
                if seen and float(scores[t, j]) > best:
                    best, where = float(scores[t, j]), head
    return best, where


@pytest.mark.parametrize(("name", "options"), list(masks()))
def test_the_largest_logit(name: str, options: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(len(name))
    q, k = torch.randn(1, 4, 24, 16, generator=generator), torch.randn(1, 2, 40, 16, generator=generator)
    call = AttentionCall(CallPlace(0, 0, None, 0, False), "test", q, k, k, q, **options)
    assert largest_logit(call) == pytest.approx(dense_logit(call))
    if options:
        assert largest_logit(replace(call, causal="none", window=None, mask=None, scale=9.0)) != largest_logit(call)


def test_a_trace_function_is_put_back() -> None:
    events: list[str] = []

    def tracer(*event: Any) -> None:
        events.append(event[1])

    def user() -> None:
        at_next_instruction(sys._getframe(), lambda: None)

    before = sys.gettrace()
    sys.settrace(tracer)
    try:
        user()
        assert sys.gettrace() is tracer
    finally:
        sys.settrace(before)
    assert "call" in events
