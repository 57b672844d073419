"""Sums that are carried from key range to key range, in one launch: torch would be told of every range by itself."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

import attn_diag.kernels.triton_interpreter  # noqa: F401  # mended before it runs
from attn_diag.kernels.backend import launching_on

_BLOCK = 128
# Compiled once, not for each kind of number that these happen to be.
_NUMBERS = [f"stride_{name}" for name in ("fh", "fs", "fr", "fn", "th", "tn", "tr", "td")]
_NUMBERS += ["rows", "width", "splits", "steps"]


@triton.jit(do_not_specialize=_NUMBERS)
def carried_kernel(
    factors_ptr, terms_ptr, order_ptr, out_ptr, stride_fh, stride_fs, stride_fr, stride_fn, stride_th, stride_tn,
    stride_tr, stride_td, rows, width, splits, steps, BLOCK: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Elements of the sums of one split of one head; ``AHEAD`` steps are loaded at a time."""
    blocks = tl.cdiv(rows * width, BLOCK)
    part = tl.program_id(0) // blocks  # on one axis: others end at 65,535
    head, split = (part // splits).to(tl.int64), part % splits
    offs = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    here = offs < rows * width
    row, feature = (offs // width).to(tl.int64), (offs % width).to(tl.int64)
    factors = factors_ptr + head * stride_fh + split.to(tl.int64) * stride_fs + row * stride_fr
    terms = terms_ptr + head * stride_th + row * stride_tr + feature * stride_td
    total = tl.zeros([BLOCK], out_ptr.dtype.element_ty)
    for first in range(0, steps, AHEAD):
        for i in tl.static_range(AHEAD):
            step = first + i
            known = here & (step < steps)
            place = split * steps + step
            if order_ptr is not None:
                place = tl.load(order_ptr + place, mask=step < steps, other=0)
            factor = tl.load(factors + step * stride_fn, mask=known, other=0.0)
            term = tl.load(terms + place.to(tl.int64) * stride_tn, mask=known, other=0.0)
            total = tl.where(step < steps, total * factor + term, total)
    tl.store(out_ptr + part.to(tl.int64) * rows * width + offs, total, mask=here)


def carried(factors: Tensor, terms: Tensor, order: Tensor | None) -> Tensor:
    """x after x <- x factor + term, step by step from 0; rounded after the product and after the sum.

    Args:
        factors: What the sums so far are multiplied by, [..., S, R, N] of N steps, fp32 or float64.
        terms: What is added, [..., S N, R, D] as they lie, in the same dtype.
        order: Where the term of each step lies, int64 [S, N]; None: in order.

    Returns:
        [..., S, R, D].
    """
    *heads, splits, rows, steps = factors.shape
    width = terms.shape[-1]
    out = terms.new_empty(*heads, splits, rows, width)
    factors, terms = factors.reshape(-1, splits, rows, steps), terms.reshape(-1, splits * steps, rows, width)
    grid = (triton.cdiv(rows * width, _BLOCK) * len(terms) * splits,)
    if out.numel():
        with launching_on(out.device):
            carried_kernel[grid](
                factors, terms, order, out, *factors.stride(), *terms.stride(), rows, width, splits, steps,
                BLOCK=_BLOCK, AHEAD=8, enable_fp_fusion=False,
            )  # fmt: skip
    return out
