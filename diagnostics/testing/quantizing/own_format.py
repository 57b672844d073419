"""Quantising as torch computes it where the weight is in a 16-bit format: its scales, quotients and products are too.

Libraries take these steps in different orders, and a rounding to 16 bits behind each makes other numbers of them:

    reciprocal    x (1 / s)                                               torchao
    divided       x / s                                                   compressed-tensors, quanto, SmoothQuant, AWQ
    factor        f = target / amax; x f; code / f                        BitNet b1.58, ModelOpt's INT4QTensor
    codes apart   s and z in 16 bits, codes and values in fp32            torchao, with a zero point
    z late        z = round(lowest - min / s), rounded twice              compressed-tensors, with a zero point
    restored      codes in fp32, s and z rounded for the product          HQQ, with a zero point that is no integer
"""

from __future__ import annotations

import torch
from torch import Tensor

from attn_diag.kernels.elements import Integers
from attn_diag.kernels.quantize import Quantized, coded, quantize, spread
from attn_diag.kernels.quantizers import Quantizer
from attn_diag.testing.quantizing.mistakes import extremes
from attn_diag.testing.quantizing.scales import per_block

CASTS = {"bf16": torch.bfloat16, "fp16": torch.float16}
# What each order is called behind "scales and arithmetic in bf16"; the likelier first.
_SYMMETRIC = {"reciprocal": "", "divided": ", dividing", "factor": ", times largest number over amax"}
_ASYMMETRIC = {
    "reciprocal": "",
    "divided": ", dividing",
    "z late": ", with zero points rounded twice",
    "codes apart": " but for the codes",
}
_REAL = {"restored": " but for the codes", "divided": ", dividing"}


def computed_in(w: Tensor, by: Quantizer) -> str:
    """The 16-bit format in which torch may have computed this quantiser; empty: in none."""
    found = next((name for name, dtype in CASTS.items() if w.dtype == dtype), "")
    plain = by.elements.isalnum() and by.divisor == "stored" and not by.tensor_scale and by.row_groups == 1
    return found if plain and not by.search else ""


def orders(by: Quantizer) -> dict[str, str]:
    """The orders in which it may have been computed, each with its words."""
    return _SYMMETRIC if by.symmetric else _ASYMMETRIC if by.zero_point == "integer" else _REAL


def in_own_format(w: Tensor, by: Quantizer, order: str, amax: Tensor | None = None) -> Quantized:
    """What ``by`` makes of ``w``, [R, C], where it is computed in w's format in this order.

    Args:
        w: The weight, BF16 or FP16.
        by: The quantiser, as ``computed_in`` has it.
        order: One of ``orders``.
        amax: What the scales are made of, for each block; None: w's own.
    """
    found = quantize(w, by, amax=amax)
    if by.symmetric or by.zero_point == "float":
        codes, values = _symmetric(w, by, order, found, amax) if by.symmetric else _real(w, by, order)
        return Quantized(values, codes, found.scale, found.zero_point, None, found.clipped)
    codes, values, scale, zero = _asymmetric(w, by, order)
    return Quantized(values, codes, scale.float(), zero.float(), None, found.clipped)


def rounded_logarithms(w: Tensor, by: Quantizer) -> tuple[str, Tensor] | None:
    """Scales of floor(log2(amax)) computed in w's 16 bits, as microxcaling does: just below a power of two, that one's.

    Returned are words, and what makes these scales if they are made of it in place of amax, for each block; None:
    w is in no such format, or the scales are no powers of two of amax.
    """
    own = next((name for name, dtype in CASTS.items() if w.dtype == dtype), "")
    if not own or not by.symmetric or by.scale != "e8m0:down":
        return None
    low, high = (x.double() for x in extremes(w.double(), by))
    size = torch.maximum(high, -low)
    power = size.log2().to(w.dtype).double().floor()
    return f"log2 of amax in {own}", torch.where(power > size.log2().floor(), power.exp2(), size)


def _symmetric(w: Tensor, by: Quantizer, order: str, found: Quantized, amax: Tensor | None) -> tuple[Tensor, Tensor]:
    shape = w.shape[0], w.shape[1]
    if order == "factor":
        size = quantize(w, Quantizer("amax", "int8", by.block, target=1.0, scale_of=by.scale_of)).scale
        factor = spread((by.mapped / (size if amax is None else amax).to(w.dtype)).to(w.dtype), shape, by)
        codes = coded((w * factor).double().nan_to_num(), by, 0)[0].to(w.dtype)
        return codes, (codes / factor).nan_to_num()
    scale = spread(found.scale, shape, by).to(w.dtype)
    quotient = w / scale if order == "divided" else w * (1 / scale)
    codes = coded(quotient.double().nan_to_num(), by, 0)[0].to(w.dtype)
    return codes, codes * scale


def _asymmetric(w: Tensor, by: Quantizer, order: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes and values, and the blocks' scales and zero points."""
    elements, shape = by.parsed_elements, (w.shape[0], w.shape[1])
    assert isinstance(elements, Integers)
    lowest, highest = elements.lowest, elements.highest
    low, high = extremes(w, by)
    own = (high - low) / float(highest - lowest)
    steps = (low / own).nan_to_num()
    zeros = (lowest - steps).clamp(lowest, highest).round() if order == "z late" else lowest - steps.round()
    zeros = zeros.clamp(lowest, highest)
    zero, scale = spread(zeros, shape, by), spread(own, shape, by)
    zero, scale = (x.float() if order == "codes apart" else x for x in (zero, scale))
    quotient = w * (1 / scale) if order in ("reciprocal", "codes apart") else w / scale
    codes = ((quotient + zero).round() if order == "z late" else quotient.round() + zero).nan_to_num()
    codes = codes.clamp(lowest, highest)
    return codes, (codes - zero) * scale, own, zeros


def _real(w: Tensor, by: Quantizer, order: str) -> tuple[Tensor, Tensor]:
    """With a zero point that is no integer, of codes from 0 on, as HQQ and quanto count them."""
    elements, shape = by.parsed_elements, (w.shape[0], w.shape[1])
    assert isinstance(elements, Integers)
    many = elements.highest - elements.lowest
    low, high = (per_block(w, by, how) for how in (torch.amin, torch.amax))
    if order == "divided":
        shift, scale = spread(-low, shape, by), spread((high - low) / float(many), shape, by)
        codes = ((w + shift) / scale).nan_to_num().round().clamp(0, many)
        return codes + elements.lowest, scale * codes - shift
    factor = many / (high.float() - low.float())
    zero = -low.float() * factor
    codes = (w.float() * spread(factor, shape, by) + spread(zero, shape, by)).nan_to_num().round().clamp(0, many)
    scale = spread(1 / factor, shape, by).to(w.dtype)
    return codes + elements.lowest, (codes.to(w.dtype) - spread(zero, shape, by).to(w.dtype)) * scale
