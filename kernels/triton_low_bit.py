"""FP8 attention in the Triton forward: E4M3 codes of q, k and v with a scale a head, P_bar in E4M3, FP8 products.

    S = (q_codes k_codes^T) s_q s_k        O_bar = cast(c P_bar) v_codes        O = (O_bar / c) s_v / l

with c the recipe's ``probs_scale``, as FlashAttention-3 has it (arXiv 2407.08608, section 3.3). A GPU's tensor cores
sum FP8 products with 13 bits below the largest; the backward is the 16-bit one, on the tensors that were given.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from attn_diag.kernels.geometry import Geometry
from attn_diag.kernels.quantize import quantize
from attn_diag.kernels.quantizers import parse_quantizer
from attn_diag.kernels.recipe import Recipe
from attn_diag.kernels.triton_math import INTERPRETED, as_operand
from attn_diag.kernels.triton_rounding import round_bits

QUANTIZER, ELEMENTS = "fp8", "e4m3"
# Products of FP8 on a tensor core take 32 features at a time.
LEAST_WIDTH, MOST_WIDTH = 32, 256


@triton.jit
def cast_probs(p, R: tl.constexpr, G: tl.constexpr):
    """P_bar as it is multiplied with v."""
    if not G.fp8:
        p = as_operand(p, tl.constexpr(R.probs))
    elif INTERPRETED:
        p = round_bits(p * R.probs_scale, 0, 4, 3, "nan", "nearest-even")
    else:
        p = (p * R.probs_scale).to(tl.float8e4nv)
    return p


@triton.jit
def head_scales(scales_ptr, b, h, heads, G: tl.constexpr):
    """s_q, s_k and s_v of a query head; 1 without."""
    found = (1.0, 1.0, 1.0)
    if G.fp8:
        at = scales_ptr + (b * heads + h) * 3
        found = (tl.load(at), tl.load(at + 1), tl.load(at + 2))
    return found


@triton.jit
def rescaled_products(products, units, G: tl.constexpr):
    """q k^T of the codes, times both scales."""
    if G.fp8:
        products = products * units[0] * units[1]
    return products


@triton.jit
def rescaled_sums(acc, units, R: tl.constexpr, G: tl.constexpr):
    """O_bar of the codes, in v's unit."""
    if G.fp8:
        acc = acc / R.probs_scale * units[2]
    return acc


def is_fp8(recipe: Recipe) -> bool:
    """Whether the kernels multiply E4M3 codes for it."""
    quantized = (recipe.quantize_q, recipe.quantize_k, recipe.quantize_v)
    return quantized == (QUANTIZER,) * 3 and recipe.probs == ELEMENTS


def in_codes(geometry: Geometry, q: Tensor, k: Tensor, v: Tensor) -> tuple[Geometry, Tensor, Tensor, Tensor, Tensor]:
    """The geometry, E4M3 codes of q, k and v (interpreted: fp32 that holds them), and their scales [B, Hq, 3].

    Raises ValueError below ``LEAST_WIDTH`` features of q.
    """
    if q.shape[3] < LEAST_WIDTH:
        raise ValueError(f"FP8 kernels take D from {LEAST_WIDTH} on, got {q.shape[3]}; use the emulation")
    (q, of_q), (k, of_k), (v, of_v) = (_codes(t) for t in (q, k, v))
    group = q.shape[1] // k.shape[1]
    scales = torch.stack([of_q, of_k.repeat_interleave(group, 1), of_v.repeat_interleave(group, 1)], 2)
    # An FP8 product takes both operands along the summed axis: keys, of v.
    v = v.mT.contiguous().mT
    return replace(geometry, fp8=True, tma=False), q, k, v, scales.contiguous()


def _codes(x: Tensor) -> tuple[Tensor, Tensor]:
    by = parse_quantizer(QUANTIZER)
    assert by is not None
    found = [quantize(head.float(), by) for head in x.flatten(0, 1)]
    codes = torch.stack([one.codes for one in found]).view(x.shape)
    scales = torch.stack([one.scale.flatten()[0] for one in found]).view(x.shape[:2])
    return codes.to(torch.float32 if x.device.type == "cpu" else torch.float8_e4m3fn), scales.float()
