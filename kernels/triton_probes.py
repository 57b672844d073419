"""The smallest kernels that show a GPU's own arithmetic: sums of products, exp2, multiplication, casts."""

from __future__ import annotations

from typing import Any, Literal

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad

from attn_diag.kernels.backend import COMPILED, check_backend
from attn_diag.kernels.triton_math import dot_add

# Rows and columns of a tile, and its warps: the first is a wgmma where the GPU has one, the second an mma.sync.
TILES = ((64, 4), (16, 1))
Instruction = Literal["wgmma", "mma.sync", "mma.sync of fp16", "other", "interpreter"]

# Products of one tl.dot: one instruction of 16-bit operands.
_BLOCK_K = 16
_BLOCK = 1024
_FORMATS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


@triton.jit
def dot_kernel(a_ptr, b_ptr, c_ptr, out_ptr, K, N, FORMAT: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr):
    """out = a @ b + c, all contiguous, [M, K] @ [K, N]; sizes are multiples of the blocks."""
    offs_m = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    offs_n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    offs_k = tl.arange(0, BLOCK_K)
    accumulator = tl.load(c_ptr + offs_m[:, None] * N + offs_n[None, :])
    for start in range(0, K, BLOCK_K):
        a = tl.load(a_ptr + offs_m[:, None] * K + (start + offs_k)[None, :])
        b = tl.load(b_ptr + (start + offs_k)[:, None] * N + offs_n[None, :])
        accumulator = dot_add(a, b, accumulator, FORMAT)
    tl.store(out_ptr + offs_m[:, None] * N + offs_n[None, :], accumulator)


@triton.jit
def fp8_dot_kernel(
    a_ptr, b_ptr, c_ptr, out_ptr, K, N, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr, IMPRECISE: tl.constexpr
):
    """out = a @ b + c of E4M3 operands, a [M, K] and b [K, N] with K contiguous; sizes are multiples of the blocks."""
    offs_m = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    offs_n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    offs_k = tl.arange(0, BLOCK_K)
    accumulator = tl.load(c_ptr + offs_m[:, None] * N + offs_n[None, :])
    for start in range(0, K, BLOCK_K):
        a = tl.load(a_ptr + offs_m[:, None] * K + (start + offs_k)[None, :])
        b = tl.load(b_ptr + offs_n[None, :] * K + (start + offs_k)[:, None])
        accumulator = tl.dot(a, b, accumulator, max_num_imprecise_acc=IMPRECISE)
    tl.store(out_ptr + offs_m[:, None] * N + offs_n[None, :], accumulator)


@triton.jit
def exp2_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    """y = 2**x, fp32."""
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs, mask=offs < n, other=0.0)
    tl.store(y_ptr + offs, tl.exp2(x), mask=offs < n)


@triton.jit
def multiply_kernel(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    """out = x * y, fp32."""
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs, mask=offs < n, other=0.0)
    y = tl.load(y_ptr + offs, mask=offs < n, other=0.0)
    tl.store(out_ptr + offs, x * y, mask=offs < n)


@triton.jit
def divide_kernel(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    """out = x / y, fp32."""
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs, mask=offs < n, other=0.0)
    y = tl.load(y_ptr + offs, mask=offs < n, other=1.0)
    tl.store(out_ptr + offs, x / y, mask=offs < n)


@triton.jit
def cast_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    """y = x, fp32, in the element type of y."""
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs, mask=offs < n, other=0.0)
    tl.store(y_ptr + offs, x.to(y_ptr.dtype.element_ty), mask=offs < n)


def dot(a: Tensor, b: Tensor, c: Tensor, tile: int = 0) -> tuple[Tensor, Instruction]:
    """``a @ b + c`` by the tensor core of ``TILES[tile]``: [M, N] fp32, and the instruction that did it.

    a [M, K], b [K, N] in BF16 or FP16 (fp32: the ordinary cores), c [M, N] fp32. Padded with zeros to whole tiles.
    Raises BackendError where the tensors are not on a GPU (or, interpreted, not on a CPU and fp32).
    """
    _check(a)
    size, warps = TILES[tile]
    (m, k), n = a.shape, b.shape[1]
    padded = [-extent % block for extent, block in ((m, size), (k, _BLOCK_K), (n, size))]
    a, b, c = (
        pad(a, (0, padded[1], 0, padded[0])),
        pad(b, (0, padded[2], 0, padded[1])),
        pad(c, (0, padded[2], 0, padded[0])),
    )
    a, b, c = a.contiguous(), b.contiguous(), c.float().contiguous()
    out = torch.full_like(c, torch.nan)
    grid = (a.shape[0] // size, b.shape[1] // size)
    compiled = dot_kernel[grid](
        a, b, c, out, a.shape[1], b.shape[1], FORMAT=_FORMATS[a.dtype], BLOCK=size, BLOCK_K=_BLOCK_K, num_warps=warps,
        **COMPILED,
    )  # fmt: skip
    return out[:m, :n], _instruction(getattr(compiled, "asm", None))


def fp8_dot(a: Tensor, b: Tensor, c: Tensor, tile: int = 0, *, promoted: bool = False) -> tuple[Tensor, Instruction]:
    """As ``dot``, of E4M3 operands on a GPU; their sizes are multiples of the tile, K of 32 (``promoted``: of 128).

    Below 64 rows or four warps Triton multiplies by mma.sync on Hopper, which it gives the operands in FP16 ("mma.sync
    of fp16"): exact numbers, and the sums of FP16 products.

    ``promoted``: Triton adds to the accumulator outside the tensor core, every 128 products.

    Raises:
        BackendError: The tensors are not on a GPU.
        TypeError: Operands other than E4M3.
        ValueError: Other sizes.
    """
    check_backend(a.device)
    if a.dtype != torch.float8_e4m3fn or b.dtype != torch.float8_e4m3fn:
        raise TypeError(f"fp8_dot expects torch.float8_e4m3fn, got {a.dtype} and {b.dtype}")
    (size, warps), block_k = TILES[tile], 128 if promoted else 32
    (m, k), n = a.shape, b.shape[1]
    if m % size or n % size or k % block_k:
        raise ValueError(f"fp8_dot expects M and N in multiples of {size} and K of {block_k}, got {m}, {n}, {k}")
    out = torch.full((m, n), torch.nan, device=a.device)
    compiled = fp8_dot_kernel[(m // size, n // size)](
        a.contiguous(), b.T.contiguous(), c.float().contiguous(), out, k, n, BLOCK=size, BLOCK_K=block_k,
        IMPRECISE=block_k if promoted else None, num_warps=warps, **COMPILED,
    )  # fmt: skip
    asm = getattr(compiled, "asm", None)
    found = _instruction(asm)
    widened = found == "mma.sync" and asm is not None and "e4m3.e4m3" not in asm["ptx"]
    return out, "mma.sync of fp16" if widened else found


def exp2(x: Tensor) -> Tensor:
    """2**x of fp32 ``x`` [n], as Triton kernels evaluate it. Raises BackendError as ``dot`` does."""
    return _elementwise(exp2_kernel, torch.full_like(x, torch.nan), x)


def multiply(x: Tensor, y: Tensor) -> Tensor:
    """x * y of fp32 tensors [n], as Triton kernels multiply. Raises BackendError as ``dot`` does."""
    return _elementwise(multiply_kernel, torch.full_like(x, torch.nan), x, y)


def divide(x: Tensor, y: Tensor) -> Tensor:
    """x / y of fp32 tensors, broadcast, as Triton divides on this GPU. Raises BackendError as ``dot`` does."""
    x, y = torch.broadcast_tensors(x, y)
    return _elementwise(divide_kernel, torch.full_like(x, torch.nan).flatten(), x.flatten(), y.flatten()).view_as(x)


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """fp32 ``x`` [n] in ``dtype``, as Triton kernels cast. Raises BackendError as ``dot`` does."""
    return _elementwise(cast_kernel, torch.zeros_like(x, dtype=dtype), x)


def _elementwise(kernel: Any, out: Tensor, *inputs: Tensor) -> Tensor:
    _check(inputs[0])
    kernel[(triton.cdiv(len(out), _BLOCK),)](*inputs, out, len(out), BLOCK=_BLOCK, **COMPILED)
    return out


def _check(x: Tensor) -> None:
    check_backend(x.device)
    if x.device.type == "cpu" and x.dtype != torch.float32:
        raise TypeError(f"interpreted, these kernels are right for fp32 alone, got {x.dtype}")


def _instruction(asm: object) -> Instruction:
    if not isinstance(asm, dict) or "ptx" not in asm:
        return "interpreter" if asm is None else "other"
    text = asm["ptx"]
    return "wgmma" if "wgmma.mma_async" in text else "mma.sync" if "mma.sync" in text else "other"
