"""``capture`` inside of a function that torch.compile runs: dynamo leaves it alone, and what runs in it is seen."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import attn_diag


class Attention(nn.Module):
    """One head of 8 features."""

    def __init__(self, *, fused: bool) -> None:
        super().__init__()
        self.q_proj, self.fused = nn.Linear(8, 8), fused

    def forward(self, x: Tensor) -> Tensor:
        q = self.q_proj(x)[:, None]
        if self.fused:
            o: Tensor = nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
        else:
            o = (q @ q.mT).softmax(-1) @ q
        return o


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")
def test_a_capture_inside_of_a_compiled_function_captures(tmp_path: Path) -> None:
    model = Attention(fused=True).bfloat16()

    def step(x: Tensor) -> Tensor:
        with attn_diag.capture(model, tmp_path):
            found: Tensor = model(x)
        return found

    torch.compile(step, backend="eager")(torch.randn(1, 16, 8).bfloat16())
    assert len(list(tmp_path.glob("*.safetensors"))) == 1


def test_plain_products_in_a_graph_are_said_not_to_be_seen(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = Attention(fused=False).bfloat16()
    with attn_diag.capture(model, tmp_path):
        torch.compile(model, backend="aot_eager")(torch.randn(1, 16, 8).bfloat16())
    assert "be plain products and softmax, or a Triton kernel, inside a compiled graph" in caplog.text
