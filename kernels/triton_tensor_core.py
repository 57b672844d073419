"""A matrix unit's sums, block by block, in one launch: the first three rules of ``accumulation.TensorCore``."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

import attn_diag.kernels.triton_interpreter  # noqa: F401  # mended before it runs
from attn_diag.kernels.backend import launching_on

_ROWS, _COLUMNS = 8, 32
# Compiled once, not for each kind of number that these happen to be.
_NUMBERS = ["M", "N", "K", *(f"stride_{name}" for name in ("am", "ak", "bk", "bn", "cm", "cn"))]
_EXPONENT_FIELD = tl.constexpr(0x7FF << 52)  # of a float64
_FP32_SMALLEST = tl.constexpr(2.0**-126)


@triton.jit
def _scale(x, smallest):
    """2**floor(log2 |x|), at least ``smallest``; 0 for 0."""
    magnitude = tl.abs(x)
    bits = tl.maximum(magnitude, smallest).to(tl.int64, bitcast=True) & _EXPONENT_FIELD
    return tl.where(magnitude > 0, bits.to(tl.float64, bitcast=True), 0.0)


@triton.jit
def _toward_zero(x):
    return x.to(tl.int64).to(tl.float64)


@triton.jit(do_not_specialize=_NUMBERS)
def tensor_core_kernel(
    a_ptr, b_ptr, c_ptr, out_ptr, M, N, K, stride_am, stride_ak, stride_bk, stride_bn, stride_cm, stride_cn,
    SMALLEST: tl.constexpr, LEAST: tl.constexpr, BLOCK: tl.constexpr, FRACTION: tl.constexpr, MANTISSA: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """out [M, N] = c + a @ b, all float64; ``SMALLEST``, ``LEAST``, ...: see ``tensor_core_sums``."""
    blocks = tl.cdiv(M, BLOCK_M)  # on one axis: others end at 65,535
    rows = (tl.program_id(0) % blocks * BLOCK_M + tl.arange(0, BLOCK_M))[:, None].to(tl.int64)
    columns = (tl.program_id(0) // blocks * BLOCK_N + tl.arange(0, BLOCK_N))[None, :].to(tl.int64)
    inside = (rows < M) & (columns < N)
    total = tl.load(c_ptr + rows * stride_cm + columns * stride_cn, mask=inside, other=0.0)
    for start in range(0, K, BLOCK):
        largest = tl.maximum(_scale(total, _FP32_SMALLEST), 2.0**LEAST)
        for i in tl.static_range(BLOCK):
            k = start + i
            a = tl.load(a_ptr + rows * stride_am + k * stride_ak, mask=(rows < M) & (k < K), other=0.0)
            b = tl.load(b_ptr + k * stride_bk + columns * stride_bn, mask=(columns < N) & (k < K), other=0.0)
            largest = tl.maximum(largest, _scale(a, 2.0**SMALLEST) * _scale(b, 2.0**SMALLEST))
        quantum = largest * 2.0**-FRACTION
        inverse = 1.0 / quantum
        # Integers of at most FRACTION + 3 bits: their sum is exact.
        aligned = _toward_zero(total * inverse)
        for i in tl.static_range(BLOCK):
            k = start + i
            a = tl.load(a_ptr + rows * stride_am + k * stride_ak, mask=(rows < M) & (k < K), other=0.0)
            b = tl.load(b_ptr + k * stride_bk + columns * stride_bn, mask=(columns < N) & (k < K), other=0.0)
            aligned += _toward_zero(a * b * inverse)
        found = aligned * quantum
        spacing = _scale(tl.maximum(tl.abs(found), _FP32_SMALLEST), _FP32_SMALLEST) * 2.0**-MANTISSA
        total = _toward_zero(found / spacing) * spacing
    tl.store(out_ptr + rows * N + columns, total, mask=inside)


def tensor_core_sums(
    a: Tensor, b: Tensor, c: Tensor, *, smallest: int, least: int, block: int, fraction: int, mantissa: int
) -> Tensor:
    """c + a @ b, ``block`` products at a time, of terms cut off and sums rounded toward zero.

    Args:
        a: [M, K] float64.
        b: [K, N] float64.
        c: [M, N] float64, where the sums begin. Nothing on the way may overflow fp32.
        smallest: Exponent of the operands' smallest normal number.
        least: Least exponent that terms are aligned to.
        block: Products added at a time.
        fraction: Bits that a term keeps below the largest exponent.
        mantissa: Explicit bits of the sums.

    Returns:
        [M, N] float64.
    """
    (rows, depth), columns = a.shape, b.shape[1]
    out = a.new_empty(rows, columns)
    if out.numel():
        with launching_on(out.device):
            tensor_core_kernel[(triton.cdiv(rows, _ROWS) * triton.cdiv(columns, _COLUMNS),)](
                a, b, c, out, rows, columns, depth, *a.stride(), *b.stride(), *c.stride(), SMALLEST=smallest,
                LEAST=least, BLOCK=block, FRACTION=fraction, MANTISSA=mantissa, BLOCK_M=_ROWS, BLOCK_N=_COLUMNS,
                enable_fp_fusion=False,
            )  # fmt: skip
    return out
