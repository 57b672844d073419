"""Outputs that a wider tensor holds than the kernel made: captured after ``.float()``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from builders import some

import attn_diag
from attn_diag.kernels import preset
from attn_diag.testing.case_inputs import CaseInputs
from attn_diag.testing.target import emulate


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_outputs_that_were_widened_for_the_capture_are_held_against_their_own_format(dtype: torch.dtype) -> None:
    """``o=o.float()`` makes no kernel coarse; a kernel whose O is FP32 is held against FP32 still."""
    q, k, v, do = (torch.randn(1, 1, 128, 32, generator=torch.Generator().manual_seed(i)).to(dtype) for i in range(4))
    case = CaseInputs("normal", q, k, v, do, 32**-0.5, "top-left")
    made = emulate(preset("fa2", "fp16" if dtype == torch.float16 else "bf16"), case, torch.device("cpu"))
    wide: dict[str, Any] = {name: made[name].float() for name in ("o", "lse", "dq", "dk", "dv")}
    found = attn_diag.inspect(q, k, v, do=do, causal=True, device="cpu", **wide)
    assert {q.quantity: q.answer for q in found.heads[0].quantities} == dict.fromkeys(wide, "good")
    assert all(0.9 < some(q.factor) <= 1.1 for q in found.heads[0].quantities)
    finer = torch.nextafter(wide["o"], wide["o"] + 1)
    found = attn_diag.inspect(q, k, v, o=finer, causal=True, device="cpu")
    assert some(found.heads[0].quantities[0].factor) > 1.25
