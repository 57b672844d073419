"""Sums of products as different hardware makes them."""

from __future__ import annotations

import torch
from torch import Tensor

# Measured on an H200 with BF16 operands: products of 16 keys at a time, and the accumulator, are aligned to the
# largest exponent and cut off after 25 fractional bits. The exponent of a product is the sum of its operands' (its
# significand lies in [1, 4)). General form: MMA-Sim, arXiv 2511.10909.
_BLOCK = 16
_FRACTION_BITS = 25
# Elements of a block's products held at a time.
_CHUNK = 2**21
_EXPONENT_FIELD = 0x7FF << 52  # of a float64
# Below the quantum of any product of fp32 numbers, 2**(-149 - 149 - 25); its reciprocal is finite.
_LEAST_QUANTUM = 2.0**-400


def matmul(a: Tensor, b: Tensor, model: str, accumulator: Tensor | None = None) -> Tensor:
    """``a @ b`` (+ ``accumulator``) under an accumulation model; [M, K] @ [K, N], in the dtype of ``a``.

    "fp32-nearest": fp32 products and sums in the library's own order. "exact": one rounding to fp32 at the end where
    ``a`` is fp32, none where it is float64. "nvidia-tensor-core": see ``tensor_core_matmul``.
    """
    if model == "nvidia-tensor-core":
        return tensor_core_matmul(a, b, accumulator).to(a.dtype)
    if model == "exact":
        product = a.double() @ b.double()
        return (product if accumulator is None else product + accumulator.double()).to(a.dtype)
    product = (a.float() @ b.float()).to(a.dtype)
    return product if accumulator is None else product + accumulator


def tensor_core_matmul(a: Tensor, b: Tensor, accumulator: Tensor | None = None) -> Tensor:
    """``a @ b`` (+ ``accumulator``) as a Hopper tensor core adds; [M, K] @ [K, N] -> [M, N], float64 holding fp32.

    16 products at a time and the running fp32 sum: each term is cut off (toward zero) 25 bits below the largest
    exponent among them, their exact sum is cut off to fp32.
    """
    a, b = a.double(), b.double()
    total = a.new_zeros(len(a), b.shape[1]) if accumulator is None else accumulator.double()
    rows = max(1, _CHUNK // (_BLOCK * max(b.shape[1], 1)))
    parts = []
    for part, start in zip(torch.split(a, rows), torch.split(total, rows), strict=True):
        running = start
        for k in range(0, a.shape[1], _BLOCK):
            running = _add_block(part[:, k : k + _BLOCK], b[k : k + _BLOCK], running)
        parts.append(running)
    return torch.cat(parts) if parts else total


def _add_block(a: Tensor, b: Tensor, total: Tensor) -> Tensor:
    """One instruction: a [M, <= 16], b [<= 16, N], total [M, N]."""
    scale_a, scale_b = _power_of_two(a), _power_of_two(b)
    largest = torch.amax(scale_a[:, :, None] * scale_b[None], 1)
    largest = torch.maximum(largest, _power_of_two(total))
    quantum = (largest * 2.0**-_FRACTION_BITS).clamp_(min=_LEAST_QUANTUM)
    inverse = quantum.reciprocal()
    aligned = (a[:, :, None] * b[None] * inverse[:, None]).trunc_().sum(1)
    aligned += (total * inverse).trunc_()
    return _toward_zero_fp32(aligned * quantum)


def _power_of_two(x: Tensor) -> Tensor:
    """2**floor(log2 |x|); 0 for 0 (and for float64 subnormals)."""
    return (x.view(torch.int64) & _EXPONENT_FIELD).view(torch.float64)


def _toward_zero_fp32(x: Tensor) -> Tensor:
    """The fp32 number next to ``x`` (float64, in fp32's normal range) toward zero: 29 bits are cut off."""
    return (x.view(torch.int64) & ~((1 << 29) - 1)).view(torch.float64)
