"""Inputs of the Triton kernels, and the same in float64 for the emulation and the reference."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attn_diag.reference import AttentionHead, Masking


def kernel_inputs(device: str, *, T: int, Tk: int | None = None, D: int = 64, Dv: int | None = None, H: int = 2,
                  Hk: int = 1, dtype: torch.dtype = torch.bfloat16,
                  **_: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Normal q, k, v and dO, one sequence each; the rest of a case are options of attention."""
    generator = torch.Generator().manual_seed(0)
    sizes = ((1, H, T, D), (1, Hk, Tk or T, D), (1, Hk, Tk or T, Dv or D), (1, H, T, Dv or D))
    return tuple(torch.randn(s, generator=generator).to(device, dtype) for s in sizes)  # type: ignore[return-value]


def options(case: dict[str, Any]) -> dict[str, Any]:
    """What of a case are options of attention."""
    return {name: case[name] for name in ("causal", "window", "softcap") if name in case}


def head_of(q: Tensor, k: Tensor, v: Tensor, h: int, case: dict[str, Any], do: Tensor | None = None) -> AttentionHead:
    """One head in float64 on the CPU."""
    hk = h * k.shape[1] // q.shape[1]
    queries, keys, values = (t.detach().cpu().double() for t in (q[0, h], k[0, hk], v[0, hk]))
    gradient = None if do is None else do[0, h].detach().cpu().double()
    masking = Masking(case.get("causal", "none"), case.get("window"))
    return AttentionHead(queries, keys, values, gradient, q.shape[-1] ** -0.5, masking, case.get("softcap"))
