"""Attention below 16 bits in the Triton forward: codes of q and k, of P_bar and v, and the scales beside them.

    S = (q_codes k_codes^T) s_q s_k        INT8 or E4M3; a scale for every row of q and k (of a block, a head)
    O_bar = cast(c P_bar) v_codes          E4M3, c the recipe's ``probs_scale``; or P_bar and v in 16 bits
    O = (O_bar / c) s_v / l                a scale a feature of v

as FlashAttention-3 (FP8: arXiv 2407.08608, section 3.3) and SageAttention (INT8 q and smoothed k: arXiv 2410.02367 and
2411.10958) have it. The codes are made before the kernel, by the emulation's own rules. A tensor core sums INT8
products exactly, FP8 products with 13 bits below the largest, and FP16 products in FP16 where ``pv_sums`` says so; the
backward is the 16-bit one, on the tensors that were given.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from attn_diag.kernels.elements import Integers
from attn_diag.kernels.emulation import RecipeNotSupportedError
from attn_diag.kernels.emulation_operands import Factor, PreparedOperands
from attn_diag.kernels.geometry import Geometry, Operands
from attn_diag.kernels.quantizers import Quantizer, parse_quantizer
from attn_diag.kernels.recipe import Recipe
from attn_diag.kernels.triton_interpreter import INTERPRETED
from attn_diag.kernels.triton_math import as_operand, dot, dot_in_halves
from attn_diag.kernels.triton_rounding import round_bits

# A tensor core's products of 8 bits take 32 features at a time.
LEAST_WIDTH, MOST_WIDTH = 32, 256
_STORED = {"int8": torch.int8, "e4m3": torch.float8_e4m3fn}


@triton.jit
def cast_probs(p, R: tl.constexpr, G: tl.constexpr):
    """P_bar as it is multiplied with v."""
    if G.values_of == "given":
        p = as_operand(p, tl.constexpr(R.probs))
    elif INTERPRETED:
        p = round_bits(p * R.probs_scale, 0, 4, 3, "nan", "nearest-even")
    else:
        p = (p * R.probs_scale).to(tl.float8e4nv)
    return p


@triton.jit
def scales_of(scales_ptr, b, h, heads, offs, dims, q_length, k_length, G: tl.constexpr):
    """s_q of a block's rows [M], where those of the head's keys begin, s_v [Dv]; not used without codes."""
    found = (0, scales_ptr, 0)
    if G.scores_of != "given" or G.values_of != "given":
        at = scales_ptr + (b * heads + h).to(tl.int64) * (q_length + k_length + G.value_dim)
        rows = tl.load(at + offs, mask=offs < q_length, other=0.0)
        columns = tl.load(at + q_length + k_length + dims, mask=dims < G.value_dim, other=0.0)
        found = (rows, at + q_length, columns)
    return found


@triton.jit
def rescaled_products(products, scales, cols, k_length, G: tl.constexpr):
    """q k^T of the codes, times both scales."""
    if G.scores_of != "given":
        of_keys = tl.load(scales[1] + cols, mask=cols < k_length, other=0.0)
        products = products * scales[0][:, None] * of_keys[None, :]
    return products


@triton.jit
def range_product(cast, v, R: tl.constexpr):
    """P_bar V of a tile by itself, in fp32."""
    if R.pv_sums == "fp16":
        product = dot_in_halves(cast, v)
    else:
        product = dot(cast, v, tl.constexpr(R.probs))
    return product


@triton.jit
def rescaled_sums(acc, scales, R: tl.constexpr, G: tl.constexpr):
    """O_bar of the codes, in v's unit."""
    if G.values_of != "given":
        acc = acc / R.probs_scale * scales[2][None, :]
    return acc


def operands_of(recipe: Recipe) -> tuple[Operands, Operands]:
    """What q k^T and P_bar V multiply: codes that a tensor core has products of, or the numbers as they are given."""
    q, k, v = (_codes(getattr(recipe, f"quantize_{name}"), columns=name == "v") for name in "qkv")
    return q if q == k else "given", "e4m3" if v == recipe.probs == "e4m3" else "given"


def low_bit_sites(recipe: Recipe) -> dict[str, tuple[object, ...]]:
    """What ``check_kernels_support`` allows besides, of a recipe whose operands are codes; empty for others."""
    scores_of, values_of = operands_of(recipe)
    if scores_of == "given" and values_of == "given":
        return {}
    known: dict[str, tuple[object, ...]] = {
        "exp": ("exact", "exp2-fma", "exp2"),
        "row_sum_of": ("fp32-probs",),
        **dict.fromkeys(("row_sum", "range_pv", "accumulator"), ("fp32",)),
    }
    if scores_of != "given":
        known |= {name: (getattr(recipe, name),) for name in ("quantize_q", "quantize_k", "rotation")}
        known["smooth_k"] = ("none", "mean", "rounded-mean")
        known["alpha"] = ("before-rounding", "after-rounding", "in-exponent", "in-q")
    if values_of != "given":
        known |= {"quantize_v": (recipe.quantize_v,), "probs": ("e4m3",), "probs_scale": (recipe.probs_scale,)}
        known["pv_levels"] = ("one", "two")
    else:
        known |= {"probs": ("fp16", recipe.input), "pv_levels": ("one", "two")}
        halves = recipe.probs == "fp16" and recipe.pv_levels == "two"
        known["pv_sums"] = ("fp32", "fp16") if halves else ("fp32",)
    return known


def check_low_bit(recipe: Recipe, width: int, *, plain: bool, biased: bool) -> None:
    """Raise RecipeNotSupportedError unless the kernels can run a recipe that has ``low_bit_sites`` on such a call.

    ``plain``: without instruments, packed sequences and pages; ``biased``: with a softcap, sinks or slopes.
    """
    if not plain or not LEAST_WIDTH <= width <= MOST_WIDTH:
        raise RecipeNotSupportedError(
            "kernels below 16 bits have no instruments, no packed sequences and no D outside "
            f"{LEAST_WIDTH} to {MOST_WIDTH}: use the emulation"
        )
    if biased and (recipe.alpha == "in-q" or recipe.smooth_k != "none"):
        raise RecipeNotSupportedError(
            f"recipe {recipe.name}: a softcap, a sink or slopes need the scores themselves, k not smoothed and alpha "
            "not in q: use the emulation"
        )


class Codes(NamedTuple):
    """What a kernel is given in place of q, k and v."""

    geometry: Geometry
    q: Tensor
    k: Tensor
    v: Tensor
    scales: Tensor
    """[B, Hq, Tq + Tk + Dv] fp32: of q's rows, of k's, of v's features."""
    lse_shift: Tensor | None
    """What smoothing k took off L, [B, Hq, Tq]."""


def in_codes(geometry: Geometry, q: Tensor, k: Tensor, v: Tensor, recipe: Recipe, scale: float) -> Codes:
    """q, k and v in the recipe's codes (interpreted: fp32 that holds them)."""
    (batch, heads), group = q.shape[:2], q.shape[1] // k.shape[1]
    made: list[list[Factor]] = []
    shifts = []
    for b in range(batch):
        for h in range(heads):
            of = {"q": q[b, h].float(), "k": k[b, h // group].float(), "v": v[b, h // group].float()}
            prepared = PreparedOperands(of, scale)
            made.append([prepared.get(recipe, name) for name in "qkv"])
            if recipe.smooth_k != "none":
                shifts.append(prepared.shift(recipe, torch.arange(q.shape[2], device=q.device)))
    columns = list(zip(*made, strict=True))
    scales = [torch.cat([_spread(factor, axis) for factor, axis in zip(row, (0, 0, 1), strict=True)]) for row in made]
    scores_of, values_of = operands_of(recipe)
    formats = (scores_of, scores_of, values_of)
    stored = []
    for factors, given, form in zip(columns, (q, k, v), formats, strict=True):
        kept = factors if given is q else factors[::group]
        values = torch.stack([factor.values for factor in kept]).view(given.shape)
        on_cpu = given.device.type == "cpu"
        of_floats = torch.float16 if recipe.probs == "fp16" else given.dtype
        values = values.to(_STORED.get(form, of_floats))
        stored.append(values.float() if on_cpu else values)
    if values_of != "given":
        # An FP8 product takes both operands along the summed axis: keys, of v.
        stored[2] = stored[2].mT.contiguous().mT
    return Codes(
        replace(geometry, scores_of=scores_of, values_of=values_of, tma=False), stored[0], stored[1], stored[2],
        torch.stack(scales).view(batch, heads, -1),
        torch.stack(shifts).view(q.shape[:3]) if shifts else None,
    )  # fmt: skip


def _spread(factor: Factor, axis: int) -> Tensor:
    """A factor's scale for each of its rows (axis 0) or columns."""
    length = factor.values.shape[axis]
    if factor.scale is None:
        return factor.values.new_ones(length)
    return factor.scale.flatten().expand(length) if factor.scale.numel() == 1 else factor.scale.flatten()


def _codes(text: str, *, columns: bool) -> Operands:
    """The codes of a quantiser whose scale leaves the sum; "given" for others."""
    by = parse_quantizer(text)
    if by is None or not (by.plain and _leaves_the_sum(by, columns=columns)):
        return "given"
    return "int8" if isinstance(by.parsed_elements, Integers) else "e4m3" if by.elements == "e4m3" else "given"


def _leaves_the_sum(by: Quantizer, *, columns: bool) -> bool:
    """Whether the scale is constant along q's and k's features, or v's keys (``columns``)."""
    long = 1 << 20
    rows, width = by.block_shape((long, long))
    return rows >= long if columns else width >= long
