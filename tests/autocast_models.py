"""A module whose k is promoted under autocast, and halves."""

from __future__ import annotations

import torch
from torch import Tensor, nn

BF16, FP32 = torch.bfloat16, torch.float32


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
        r, k, v = (t.view(2, -1, 4, 16).transpose(1, 2) for t in (r, k, v))
        return r, k, v


def halves(dtype: torch.dtype = BF16) -> list[Tensor]:
    """q, k and v, [1, 2, 8, 16]."""
    return [torch.randn(1, 2, 8, 16).to(dtype) for _ in range(3)]


def promoted() -> Tensor:
    return torch.ones(4, dtype=BF16) * torch.ones(4)
