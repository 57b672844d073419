"""The triangular inverse of a delta rule's chunk (UT transform), and its gradient, with what kernels round."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from attn_diag.kernels.linear_products import blocks, rounded_to
from attn_diag.kernels.linear_recipe import LinearFormat


class _Inverse(torch.autograd.Function):
    """(I + L)^-1 of strictly lower triangular L, in fp32; its gradient by two products, from the left first or not.

    ``joined`` is the format of the operands of products that put it together out of blocks of 16 steps.
    """

    @staticmethod
    def forward(ctx: Any, lower: Tensor, operands: LinearFormat, joined: LinearFormat, left_first: bool) -> Tensor:
        inverse = _solved(lower) if joined == "fp32" else _joined(lower, joined)
        ctx.save_for_backward(rounded_to(inverse, operands))
        ctx.operands, ctx.left_first = operands, left_first
        return inverse

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (inverse,) = ctx.saved_tensors
        given = rounded_to(gradients[0], ctx.operands)
        if ctx.left_first:
            made = rounded_to(inverse.mT @ given, ctx.operands) @ inverse.mT
        else:
            made = inverse.mT @ rounded_to(given @ inverse.mT, ctx.operands)
        return -made.tril(-1), None, None, None


def _solved(lower: Tensor) -> Tensor:
    one = torch.eye(lower.shape[-1], device=lower.device).expand_as(lower)
    inverse: Tensor = torch.linalg.solve_triangular(one + lower, one, upper=False, unitriangular=True)
    return inverse


def _joined(lower: Tensor, fmt: LinearFormat) -> Tensor:
    """(I + L)^-1 in blocks, by products whose operands are rounded; in FP16 the blocks' own inverses are products."""

    def times(x: Tensor, y: Tensor) -> Tensor:
        return rounded_to(x, fmt) @ rounded_to(y, fmt)

    made, steps = torch.zeros_like(lower), blocks(lower)
    for i, row in enumerate(steps):
        block = lower[..., row, row]
        made[..., row, row] = own = _by_powers(block, times) if fmt == "fp16" else _solved(block)
        for j in range(i - 1, -1, -1):
            column = steps[j]
            if j == i - 1 and fmt == "tf32":
                made[..., row, column] = -times(times(own, lower[..., row, column]), made[..., column, column])
                continue
            between = torch.stack([times(lower[..., row, b], made[..., b, column]) for b in steps[j:i]]).sum(0)
            made[..., row, column] = -times(own, between)
    return made


def _by_powers(lower: Tensor, times: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """(I - L)(I + L^2)(I + L^4)(I + L^8), of 16 steps."""
    one = torch.eye(lower.shape[-1], device=lower.device)
    made, power = one - lower, times(lower, lower)
    for _ in range(3):
        made, power = times(made, one + power), times(power, power)
    return made


inverse: Callable[[Tensor, LinearFormat, LinearFormat, bool], Tensor] = _Inverse.apply
