"""Roundings and exponentials inside the kernels.

The interpreter computes BF16 wrongly (it truncates casts, and multiplies bit patterns), so interpreted kernels
never hold a BF16 value: their operands are fp32 tensors that contain BF16 numbers, and a rounding to BF16 is
nearest-even on the fp32 bits. On a GPU the same rounding is the hardware's own cast, bit for bit the same.
"""

import triton
import triton.language as tl

from attn_diag.kernels.triton_interpreter import INTERPRETED

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def round_bits_to_bf16(x):
    """fp32 ``x`` rounded to BF16, nearest-even, by integer operations; a NaN stays one. Returns fp32."""
    bits = x.to(tl.uint32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    # The carry of a NaN's payload would make it infinite or zero.
    return tl.where(x != x, x, rounded.to(tl.float32, bitcast=True))


@triton.jit
def round_to(x, FORMAT: tl.constexpr):
    """fp32 ``x`` rounded to FORMAT ("fp32", "bf16", "fp16"), nearest-even; returned in fp32."""
    if FORMAT == "bf16":
        if INTERPRETED:
            x = round_bits_to_bf16(x)
        else:
            x = x.to(tl.bfloat16).to(tl.float32)
    elif FORMAT == "fp16":
        x = x.to(tl.float16).to(tl.float32)
    return x


@triton.jit
def rounding_error(x, cast, FORMAT: tl.constexpr, PAIRS: tl.constexpr):
    """``cast``, which is fp32 ``x`` rounded to FORMAT, minus ``x``. PAIRS: whether the device rounds two at once.

    A cast with a second use is compiled to conversions of single numbers, at an eighth of the speed: it is made again.
    """
    if PAIRS and FORMAT == "bf16":
        rounded = tl.inline_asm_elementwise(
            "{ .reg .b32 t; cvt.rn.bf16x2.f32 t, $3, $2; shl.b32 $0, t, 16; and.b32 $1, t, 0xffff0000; }",
            "=f,=f,f,f", [x], dtype=tl.float32, is_pure=True, pack=2
        )  # fmt: skip
    else:
        rounded = cast.to(tl.float32)
    return rounded - x


@triton.jit
def as_operand(x, FORMAT: tl.constexpr):
    """fp32 ``x`` as an operand of ``dot``: in FORMAT on a GPU, rounded to it but held in fp32 when interpreted."""
    if INTERPRETED or FORMAT == "fp32":
        x = round_to(x, FORMAT)
    elif FORMAT == "bf16":
        x = x.to(tl.bfloat16)
    else:
        x = x.to(tl.float16)
    return x


@triton.jit
def dot(a, b, FORMAT: tl.constexpr):
    """``a @ b`` with operands in FORMAT, summed in fp32: tensor cores for 16-bit operands on a GPU.

    Interpreted, the sum is float64's, rounded once: a BLAS adds in another order at the edge of a block, so that one
    score computed in two places, for S and for its multiplicity, would differ in its last bit.
    """
    if INTERPRETED:
        product = tl.dot(a.to(tl.float64), b.to(tl.float64), out_dtype=tl.float64).to(tl.float32)
    elif FORMAT == "fp32":
        product = tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        product = tl.dot(a, b).to(tl.float32)  # of INT8 codes an INT32
    return product


@triton.jit
def dot_in_halves(a, b):
    """``a @ b`` of FP16 operands, summed in FP16; interpreted, rounded to it once."""
    if INTERPRETED:
        product = dot(a, b, "fp16").to(tl.float16).to(tl.float32)
    else:
        product = tl.dot(a, b, out_dtype=tl.float16).to(tl.float32)
    return product


@triton.jit
def dot_more(a, b, products, FORMAT: tl.constexpr):
    """``products + a @ b``, of ``products`` that ``dot`` made: the sum goes on over more features."""
    if INTERPRETED:
        products = products + dot(a, b, FORMAT)
    else:
        products = dot_add(a, b, products, FORMAT)
    return products


@triton.jit
def dot_add(a, b, accumulator, FORMAT: tl.constexpr):
    """``accumulator + a @ b``; on a GPU the tensor core adds into the accumulator."""
    if INTERPRETED or FORMAT == "fp32":
        accumulator = tl.dot(a.to(tl.float32), b.to(tl.float32), accumulator, input_precision="ieee")
    else:
        accumulator = tl.dot(a, b, accumulator)
    return accumulator


@triton.jit
def fused(a, b, c):
    """``a * b + c`` in fp32, rounded once; interpreted, the product is exact in float64."""
    if INTERPRETED:
        found = (a.to(tl.float64) * b + c.to(tl.float64)).to(tl.float32)
    else:
        found = tl.fma(a, b, c)
    return found


@triton.jit
def product(a, b):
    """``a * b`` in fp32, rounded by itself: a compiler fuses a plain product with the sum that follows."""
    if INTERPRETED:
        found = (a.to(tl.float64) * b).to(tl.float32) + 0.0
    else:
        found = tl.fma(a, b, 0.0)  # Gluon makes no zeros without being told where they lie
    return found


@triton.jit
def tanh(x):
    """Hyperbolic tangent in fp32 through exp; absolute error about 2**-23."""
    e = tl.exp(-2.0 * tl.abs(x))
    t = (1.0 - e) / (1.0 + e)
    return tl.where(x < 0, -t, t)
