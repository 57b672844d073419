"""Models whose projections store codes instead of numbers are captured like any other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import nano_gpt, only, tokens
from torch import Tensor, nn

import attn_diag
from attn_diag.watching.live.query_projections import NO_LAYER, STORED_OTHERWISE


class Codes(nn.Linear):
    """As bitsandbytes keeps 8 bits: the weight is integers, the scales lie elsewhere."""

    def __init__(self, of: nn.Linear) -> None:
        super().__init__(of.in_features, of.out_features, bias=of.bias is not None)
        weight = of.weight.detach()
        self.scale = weight.abs().amax() / 127
        self.weight = nn.Parameter((weight / self.scale).round().to(torch.int8), requires_grad=False)
        self.bias = of.bias

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.scale * self.weight.to(x.dtype), self.bias)


def captured(model: nn.Module, folder: Path) -> attn_diag.Capture:
    with torch.no_grad(), attn_diag.capture(model, folder) as recorder:
        model(tokens())
    return only(recorder)


def test_integers_are_no_weight(tmp_path: Path) -> None:
    model: Any = nano_gpt(layers=1).model.eval()
    attention = model.h[0].attn
    attention.c_attn = Codes(attention.c_attn)
    capture = captured(model, tmp_path)
    assert "x" in capture.tensors
    assert "w_q" not in capture.tensors
    assert STORED_OTHERWISE in (capture.metadata.notes or "")


def test_torchaos_tensors_are_the_numbers_that_they_stand_for(tmp_path: Path) -> None:
    quantization = pytest.importorskip("torchao.quantization")
    model: Any = nano_gpt(layers=1).model.bfloat16().eval()
    nn.init.zeros_(model.h[0].attn.c_attn.bias)
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    capture = captured(model, tmp_path)
    x, w_q, q = (capture.tensors[name][...].double() for name in ("x", "w_q", "q"))
    again = (x @ w_q.T).view(*x.shape[:2], *q.shape[1::2]).transpose(1, 2)
    assert float((again - q).norm() / q.norm()) < 0.01


class Attend(nn.Module):
    """Attention without weights, in a module that has them: x-transformers', for one."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


class Outer(nn.Module):
    """``own``: its projection is a linear layer, and not a parameter."""

    def __init__(self, *, own: bool) -> None:
        super().__init__()
        self.to_q, self.to_kv, self.attend = nn.Linear(32, 32, bias=False), nn.Linear(32, 64), Attend()
        self.own = own

    def forward(self, x: Tensor) -> Tensor:
        q = self.to_q(x) if self.own else nn.functional.linear(x, self.to_q.weight)
        q, k, v = (t.unflatten(-1, (2, 16)).transpose(1, 2) for t in (q, *self.to_kv(x).chunk(2, -1)))
        return x + self.attend(q, k, v).transpose(1, 2).flatten(2)  # type: ignore[no-any-return]


@pytest.mark.parametrize("own", [True, False])
def test_a_projection_in_the_module_around_is_found_or_said_to_be_missing(own: bool, tmp_path: Path) -> None:
    """Both were left out without a word."""
    model: Any = nn.Sequential(*(Outer(own=own) for _ in range(2)))
    with attn_diag.capture(model, tmp_path, layers={1}) as recorder:
        model(torch.randn(1, 8, 32)).sum().backward()
    capture = only(recorder)
    assert ("w_q" in capture.tensors) == own
    if own:
        assert torch.equal(capture.tensors["w_q"][...], model[1].to_q.weight)
    assert (NO_LAYER in (capture.metadata.notes or "")) == (not own)
