"""A model whose attention is FlexAttention, masks for it, and what its captures have to hold."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import flex_attention as flex
from torch.utils.checkpoint import checkpoint

from attn_diag.captures.capture import Capture

QUANTITIES = {"q", "k", "v", "o", "lse", "do", "dq", "dk", "dv"}
BATCH, LENGTH, HEADS, DIM = 2, 20, 4, 16


class FlexSelfAttention(nn.Module):
    def __init__(self, key_heads: int) -> None:
        super().__init__()
        self.sizes = [HEADS * DIM, key_heads * DIM, key_heads * DIM]
        self.qkv = nn.Linear(HEADS * DIM, sum(self.sizes))

    def forward(self, x: Tensor, options: dict[str, Any]) -> Tensor:
        q, k, v = (t.unflatten(-1, (-1, DIM)).transpose(1, 2) for t in self.qkv(x).split(self.sizes, -1))
        o: Any = flex.flex_attention(q, k, v, enable_gqa=k.shape[1] != HEADS, **options)
        made: Tensor = x + o.transpose(1, 2).flatten(-2)
        return made


class Layers(nn.Module):
    def __init__(self, key_heads: int = HEADS, *, checkpointed: bool = False, layers: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(FlexSelfAttention(key_heads) for _ in range(layers))
        self.checkpointed = checkpointed

    def forward(self, x: Tensor, options: dict[str, Any]) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, options, use_reentrant=False) if self.checkpointed else block(x, options)
        return x


def near(_b: Tensor, _h: Tensor, row: Tensor, key: Tensor) -> Tensor:
    return (row >= key) & (row - key < 7)


def alibi(score: Tensor, _b: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
    return score + (key - row) * torch.exp2(-(head.float() + 1))


def documents(device: str, length: int) -> Any:
    """A mask_mod that captured a tensor, and whose second sequence is another than the first."""
    number = torch.arange(length, device=device) // 6

    def inside(b: Tensor, _h: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return (row >= key) & ((number[row] == number[key]) | (b == 1))

    return inside


def block_mask(of: Any, batch: int | None = None, *, device: str = "cpu", length: int = LENGTH) -> Any:
    return flex.create_block_mask(of, batch, None, length, length, device=device)


def x_of(step: int, length: int = LENGTH, device: str = "cpu") -> Tensor:
    return torch.randn(BATCH, length, HEADS * DIM, generator=torch.Generator().manual_seed(step)).to(device)


def train(
    model: nn.Module, run: Any, options: dict[str, Any], watching: Any = None, steps: int = 4, length: int = LENGTH
) -> list[Tensor]:
    """Losses and gradients of all steps; in BF16 autocast on a GPU."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    device = next(model.parameters()).device.type
    bits: list[Tensor] = []
    with watching or contextlib.nullcontext():
        for step in range(steps):
            optimizer.zero_grad()
            with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
                made = run(x_of(step, length, device), options)
            loss = made.float().square().mean()
            torch.autograd.backward(loss)
            optimizer.step()
            bits += [loss.detach().clone(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
    return bits


def masked(capture: Capture) -> Tensor | None:
    return capture.tensors["mask"][...] if "mask" in capture.tensors else None


def gradient_errors(capture: Capture) -> dict[str, float]:
    """Relative errors of dQ, dK and dV and, absolute, of the LSE, against float64 under the capture's mask."""
    q, k, v = (capture.tensors[name][...].double().requires_grad_() for name in "qkv")
    keys, values = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores = q @ keys.mT * capture.scale
    if (slopes := capture.tensors.get("alibi_slopes")) is not None:
        places = torch.arange(q.shape[2], dtype=torch.float64)
        scores = scores - slopes[...].double()[..., None, None] * (places[:, None] - places).abs()
    if (mask := masked(capture)) is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    do, lse = (capture.tensors[name][...].double() for name in ("do", "lse"))
    exact = torch.autograd.grad(scores.softmax(-1) @ values, (q, k, v), do)
    found = {"lse": float((scores.logsumexp(-1) - lse).abs().max())}
    for name, truth in zip(("dq", "dk", "dv"), exact, strict=True):
        found[name] = float((capture.tensors[name][...].double() - truth).norm() / truth.norm())
    return found
