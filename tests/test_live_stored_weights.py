"""Models whose projections store codes instead of numbers are captured like any other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import nano_gpt, only, tokens
from torch import Tensor, nn

import attn_diag
from attn_diag.watching.live.query_projections import STORED_OTHERWISE


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
