"""Sums of products as different hardware makes them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attn_diag.kernels.backend import compiles_for
from attn_diag.kernels.formats import Format, Mode, NumberFormat, Rounding, parse, round_to

# Elements of a block's products held at a time; on a CPU as many as stay in its cache.
_CHUNK = {"cuda": 2**21, "cpu": 2**16}
_EXPONENT_FIELD = 0x7FF << 52  # of a float64
_FP32 = NumberFormat(8, 23)
_FP32_SMALLEST = 2.0**-126  # normal number
# Exponent of the least scale that terms are aligned to: of -126 to -159, only this gives an H200's sums of 2**-164 to
# 2**-144.
_LEAST = -133
# From here on fp32 overflows; sums of terms that stay below half of it cannot get there.
_OVERFLOW = 2.0**128


# Roundings to integers, which may overwrite their argument. On a CPU torch's trunc takes five times as long as this.
_TO_INTEGER = {
    Mode.TOWARD_ZERO: Tensor.long,
    Mode.NEAREST_EVEN: Tensor.round_,
    Mode.DOWN: Tensor.floor_,
    Mode.UP: Tensor.ceil_,
}


@dataclass(frozen=True)
class TensorCore:
    """How a matrix unit adds: ``block`` products and the running fp32 sum at a time, in fixed point.

    1. Products are exact. Each has the exponent of its first operand plus that of its second (its significand lies
       in [1, 4)); the running sum has its own. A subnormal has the exponent of its format's smallest normal number.
       Zeros have none, but the largest exponent counts as -133 at least.
    2. Every term is rounded (``alignment``) to a multiple of 2**(largest exponent - ``fraction_bits``).
    3. The exact sum of these is rounded (``result``) to fp32, with subnormals. From 2**128 on it is infinite, toward
       zero too; a result of 0 is +0, whatever was cut off.
    4. Infinities and NaN go through as in IEEE 754: an infinite sum stays, inf - inf and 0 * inf are NaN.

    5. With ``promotion``, after so many products the sum is added to a second one in fp32 (nearest-even, on the
       ordinary cores) and begins again at 0; an accumulator that was given is this second sum.

    General form and what is known of other GPUs: MMA-Sim, arXiv 2511.10909, "T-FDPA".
    """

    block: int = 16
    """Products added at a time."""
    fraction_bits: int = 25
    """Bits that a term keeps below the largest exponent."""
    alignment: Mode = Mode.TOWARD_ZERO
    """How terms are rounded to these; not at random."""
    result: Mode = Mode.TOWARD_ZERO
    """How a block's sum is rounded to fp32."""
    subnormals: bool = True
    """False: operands and results below the smallest normal number count as 0."""
    sums: Format = "e8m23"
    """The format of a block's sum and the running one."""
    promotion: int | None = None
    """Products, a multiple of ``block``, after which the sum is added outside; None: never."""
    pairs: bool = False
    """Of twice ``block`` products the first pair of every four comes first, then the second; such twos are whole."""


# Measured on an H200 (BF16 and FP16 operands; wgmma and mma.sync): no bit is missed in 1,966,080 sums of 16 to 4,096
# adversarial products; benchmarks/bench_tensor_core.py repeats it with others.
HOPPER = TensorCore()
# Of an mma.sync m16n8k8 (CUTLASS's kernels for Turing and later: torch's memory-efficient attention on an H100).
HOPPER_K8 = TensorCore(block=8)
# FP8 operands: 32 products an instruction, 13 bits, sums kept in E8M13 ("FP22"); MMA-Sim, arXiv 2511.10909, wgmma of
# Hopper. Measured on an H200: 2**-13 beside 1 is kept, 2**-14 lost, and this model's errors on positive data.
HOPPER_FP8 = TensorCore(block=32, fraction_bits=13, sums="e8m13")
# FP16 sums of FP16 operands, rounded to nearest after every instruction (MMA-Sim, as above).
HOPPER_FP16_SUMS = TensorCore(result=Mode.NEAREST_EVEN, sums="fp16")
# E4M3 operands of an mma.sync on Hopper: Triton widens them to FP16, two numbers of every four for an instruction (of
# 32 products, which a thread holds by fours). Operands are "fp16" then.
HOPPER_WIDENED_FP8 = TensorCore(pairs=True)
# FP8 without ``use_fast_accum``: four instructions, then fp32 outside (CUTLASS's default interval).
HOPPER_FP8_PROMOTED = replace(HOPPER_FP8, promotion=128)
_FP8 = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}


def matmul(
    a: Tensor,
    b: Tensor,
    model: str,
    accumulator: Tensor | None = None,
    *,
    operands: Format = "bf16",
    core: TensorCore | None = None,
) -> Tensor:
    """``a @ b`` (+ ``accumulator``) under an accumulation model; [M, K] @ [K, N], in the dtype of ``a``.

    "fp32-nearest": fp32 products and sums in the library's own order. "exact": one rounding to fp32 at the end where
    ``a`` is fp32, none where it is float64. "nvidia-tensor-core": see ``tensor_core_matmul``, also for the rest.
    """
    if model == "nvidia-tensor-core":
        return tensor_core_matmul(a, b, accumulator, core, operands=operands).to(a.dtype)
    if model == "exact":
        product = a.double() @ b.double()
        return (product if accumulator is None else product + accumulator.double()).to(a.dtype)
    product = (a.float() @ b.float()).to(a.dtype)
    return product if accumulator is None else product + accumulator


def tensor_core_matmul(
    a: Tensor,
    b: Tensor,
    accumulator: Tensor | None = None,
    core: TensorCore | None = None,
    *,
    operands: Format | None = None,
) -> Tensor:
    """``a @ b`` (+ ``accumulator``) as a tensor core adds.

    Args:
        a: [M, K], of values that 16 bits (or FP8) hold.
        b: [K, N], likewise.
        accumulator: [M, N], what the products are added to.
        core: How the unit adds; by default ``HOPPER_FP8`` for FP8 operands, else ``HOPPER``.
        operands: The format of ``a`` and ``b``, which says where their subnormals begin; by default that of FP16 and
            FP8 tensors, else BF16 (whose range fp32 shares).

    Returns:
        [M, N], float64 holding fp32.
    """
    if operands is None:
        operands = "fp16" if a.dtype == torch.float16 else _FP8.get(a.dtype, "bf16")
    if core is None:
        core = HOPPER_FP8 if operands in _FP8.values() else HOPPER
    if core.promotion is not None and core.promotion % core.block:
        raise ValueError(f"promotion must be a multiple of block ({core.block}), got {core.promotion}")
    rounding = parse(operands)
    least = (_FP32 if rounding is None else rounding.format).min_exponent
    smallest = 2.0**least
    a, b = a.double(), b.double()
    if core.pairs:
        a, b = _by_pairs(a, 2 * core.block), _by_pairs(b.T, 2 * core.block).T
    total = a.new_zeros(len(a), b.shape[1]) if accumulator is None else accumulator.double()
    if not core.subnormals:
        a, b, total = _flushed(a, smallest), _flushed(b, smallest), _flushed(total, _FP32_SMALLEST)
    finite = _stays_finite(a, b, total)
    if finite and _in_one_launch(core, a.device):
        from attn_diag.kernels.triton_tensor_core import tensor_core_sums

        bits = {"fraction": core.fraction_bits, "mantissa": _sums_of(core).mantissa_bits}
        return tensor_core_sums(a, b, total, smallest=least, least=_LEAST, block=core.block, **bits)
    left, right = _Operand(a, _scale(a, smallest)), _Operand(b, _scale(b, smallest))
    rows = max(1, _CHUNK[a.device.type] // (core.block * max(b.shape[1], 1)))
    parts = []
    for start in range(0, len(a), rows):
        running = outside = total[start : start + rows]
        if core.promotion is not None:
            running = torch.zeros_like(outside)
        for k in range(0, a.shape[1], core.block):
            if core.promotion is not None and k and k % core.promotion == 0:
                outside, running = _added_outside(outside, running), torch.zeros_like(running)
            block = slice(k, k + core.block)
            x, y = left.part(slice(start, start + rows), block), right.part(block, slice(None))
            added = _add_block(x, y, running, core)
            running = added if finite else _with_infinities(added, x.values, y.values, running)
        parts.append(running if core.promotion is None else _added_outside(outside, running))
    return torch.cat(parts) if parts else total


def _in_one_launch(core: TensorCore, device: torch.device) -> bool:
    """Whether a kernel of Triton's makes these sums: those of Nvidia's tensor cores, without a second sum outside."""
    modes, wide = (core.alignment, core.result), _sums_of(core).exponent_bits >= _FP32.exponent_bits
    usual = core.subnormals and core.promotion is None and modes == (Mode.TOWARD_ZERO, Mode.TOWARD_ZERO)
    return usual and wide and compiles_for(device)


def _sums_of(core: TensorCore) -> NumberFormat:
    rounding = parse(core.sums)
    return _FP32 if rounding is None else rounding.format


def _by_pairs(x: Tensor, width: int) -> Tensor:
    """The columns of ``x`` [M, K] with the first two of every four of ``width`` before the others."""
    x = torch.nn.functional.pad(x, (0, -x.shape[1] % width))
    fours = x.view(len(x), -1, width // 4, 2, 2)
    return fours.transpose(2, 3).reshape(x.shape)


@dataclass(frozen=True)
class _Operand:
    """A matrix, float64, and the powers of two that are the exponents of its elements (0 for 0)."""

    values: Tensor
    scales: Tensor

    def part(self, rows: slice, columns: slice) -> _Operand:
        return _Operand(self.values[rows, columns], self.scales[rows, columns])


def _add_block(a: _Operand, b: _Operand, total: Tensor, core: TensorCore) -> Tensor:
    """One instruction: a [M, <= block], b [<= block, N], total [M, N]; right where nothing overflows."""
    largest = torch.amax(a.scales[:, :, None] * b.scales[None], 1)
    largest = torch.maximum(largest, _scale(total, _FP32_SMALLEST)).clamp_(min=2.0**_LEAST)
    quantum = largest.mul_(2.0**-core.fraction_bits)
    inverse = quantum.reciprocal()
    # Integers of at most fraction_bits + 3 bits: their sum is exact.
    if (align := _TO_INTEGER.get(core.alignment)) is None:
        raise ValueError(f"alignment must be toward-zero, nearest-even, down or up, got {core.alignment}")
    aligned = align((a.values[:, :, None] * b.values[None]).mul_(inverse[:, None])).sum(1)
    aligned += align(total * inverse)
    result = _to_fp32(aligned * quantum, core).add_(0.0)  # -0 + 0 is +0
    return result if core.subnormals else _flushed(result, _FP32_SMALLEST)


def _with_infinities(added: Tensor, a: Tensor, b: Tensor, total: Tensor) -> Tensor:
    """The sum ``added`` where it overflows, or where a term is infinite or NaN."""
    added = torch.where(added.abs() >= _OVERFLOW, torch.inf * added.sign(), added)
    terms = torch.cat([a[:, :, None] * b[None], total[:, None]], 1)
    # Finite products are far from overflow in float64, so that this sum is finite where all its terms are.
    return torch.where(terms.isfinite().all(1), added, terms.sum(1))


def _stays_finite(a: Tensor, b: Tensor, total: Tensor) -> bool:
    """Whether no sum on the way can overflow; false where an operand is infinite or NaN."""
    left, right, start = (x.abs().max() if x.numel() else x.new_zeros(()) for x in (a, b, total))
    # Twice: roundings other than toward zero may add to every sum.
    return bool(2 * (left * right * a.shape[1] + start) < _OVERFLOW / 2)


def _scale(x: Tensor, smallest: float) -> Tensor:
    """2**floor(log2 |x|), at least ``smallest``; 0 for 0."""
    magnitude = x.abs()
    scale = magnitude.clamp(min=smallest)
    scale.view(torch.int64).bitwise_and_(_EXPONENT_FIELD)
    return scale.mul_(magnitude > 0)


def _flushed(x: Tensor, smallest: float) -> Tensor:
    return x.masked_fill(x.abs() < smallest, 0.0)


def _to_fp32(x: Tensor, core: TensorCore) -> Tensor:
    """``x`` (float64) rounded to the core's sums; what overflows is only right after ``_with_infinities``."""
    fmt = _sums_of(core)
    if core.result is not Mode.TOWARD_ZERO or fmt.exponent_bits < _FP32.exponent_bits:
        return round_to(x, Rounding(fmt, core.result))
    spacing = x.abs().clamp_(min=_FP32_SMALLEST)
    spacing.view(torch.int64).bitwise_and_(_EXPONENT_FIELD)
    spacing *= 2.0**-fmt.mantissa_bits
    return x.div(spacing).long() * spacing


def _added_outside(a: Tensor, b: Tensor) -> Tensor:
    """The fp32 sum of float64 tensors that hold fp32."""
    return (a.float() + b.float()).double()
