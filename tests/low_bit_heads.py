"""Heads whose P_bar underflows in E4M3: made ones, and those of captures."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from attn_diag.captures.loading import load
from attn_diag.head.read import read_head
from attn_diag.kernels import Schedule, preset
from attn_diag.reference import AttentionHead, Masking

FORWARD = replace(
    preset("fa3-fp8"), probs_scale=1.0, schedule=Schedule(128, 64), quantize_q="none", quantize_k="none",
    accumulation="fp32-nearest",
)  # fmt: skip


def sink_head(gap: float, length: int = 256, seed: int = 0) -> AttentionHead:
    """Scores of deviation 1, those of the first four keys higher by ``gap`` (arXiv 2606.06521)."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(length, 64, generator=generator) for _ in range(3))
    q[:, 0], k[:, 0] = 8.0, 0.0
    k[:4, 0] = gap
    q, k, v = (x.bfloat16().double() for x in (q, k, v))
    return AttentionHead(q, k, v, None, 64**-0.5, Masking("none"))


def real_head(name: str) -> AttentionHead:
    """The first head of a capture of ``tests/captures``."""
    capture = load(Path(__file__).parent / "captures" / f"{name}.safetensors")
    return replace(read_head(capture, 0, 0, torch.device("cpu")).head, do=None)
