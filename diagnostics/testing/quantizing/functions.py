"""Tensors in block-scaled formats and integers, and fake quantisation with straight-through gradients."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from attn_diag.errors import InputError
from attn_diag.kernels import quantize as kernel
from attn_diag.kernels import quantizers
from attn_diag.kernels.quantize import Quantized
from attn_diag.kernels.quantizers import Quantizer

Gradient = Literal["straight-through", "clipped"]


def quantizer(name: str | Quantizer, **changes: Any) -> Quantizer:
    """A quantiser by its name, with fields of its own changed.

        attn_diag.quantizer("int4", block="128")                       # a scale for 128 elements of a row
        attn_diag.quantizer("mxfp4", target=None, scale="e8m0:up")     # cuBLAS's rule of the scale
        attn_diag.quantizer("nvfp4", elements="e2m1:stochastic")

    The rules, and the source of each, are stated in ``attn_diag.kernels.quantizers``.

    Args:
        name: int8, int8-half-range, int8-asymmetric, int4, int4-half-range, int4-asymmetric, ternary, nf4, bnb-fp4,
            fp8, fp8-row, fp8-blocks, mxfp8, mxfp8-e5m2, mxfp6, mxfp6-e3m2, mxfp4, mxint8, nvfp4; or a Quantizer.
        changes: Fields of ``Quantizer`` by name.

    Returns:
        The quantiser.

    Raises:
        InputError: An unknown name or field, or what cannot be.
    """
    if not isinstance(name, str | Quantizer):
        raise InputError(
            f"expected the name of a quantiser or a Quantizer, got {type(name).__name__}: what it made is observed=…"
        )
    try:
        return quantizers.quantizer(name, **changes)
    except ValueError as error:
        raise InputError(str(error)) from error


def quantize(
    x: Tensor, by: str | Quantizer, *, amax: Tensor | float | None = None, seed: int = 0, **changes: Any
) -> Quantized:
    """A tensor in a quantiser's numbers: what it has become, its codes, scales, zero points and what was clipped.

        found = attn_diag.quantize(weight, "int4", block="128")
        bias = (found.values - weight.float()).mean(1)                 # Q(w) - w, signed, of each output channel

    Args:
        x: [..., R, C] or [C], float64, fp32, BF16 or FP16, on any device. Blocks lie along C; a last block that is not
            full counts as filled with zeros.
        by: A quantiser's name (see ``attn_diag.quantizer``), or a Quantizer.
        amax: max |x| for the scales in place of x's own, as delayed scaling takes it from earlier steps: a number, or a
            tensor of the scale's shape.
        seed: Starts stochastic roundings.
        changes: Fields of ``Quantizer`` by name, in place of the named one's.

    Returns:
        A ``Quantized``; its tensors have no gradients.

    Raises:
        InputError: An unknown quantiser, fields or options that cannot be, or a dtype that is none of the four.
    """
    chosen = quantizer(by, **changes)
    try:
        return kernel.quantize(x, chosen, amax=amax, seed=seed)
    except (ValueError, TypeError) as error:
        raise InputError(str(error)) from error


def fake_quantize(
    x: Tensor,
    by: str | Quantizer,
    *,
    amax: Tensor | float | None = None,
    seed: int = 0,
    gradient: Gradient = "straight-through",
    **changes: Any,
) -> Tensor:
    """``x`` as its quantised self, in its own shape and dtype, with a straight-through gradient.

    Into BF16 and FP16 the values are rounded once more, to nearest-even, as a training step in that format does.

    Args:
        x: As for ``attn_diag.quantize``.
        by: As for ``attn_diag.quantize``.
        amax: As for ``attn_diag.quantize``.
        seed: Starts stochastic roundings.
        gradient: "straight-through" passes dy on as it is (Bengio et al., arXiv 1308.3432); "clipped" leaves it out
            where x was clipped.
        changes: As for ``attn_diag.quantize``.

    Returns:
        The values, of x's shape and dtype.

    Raises:
        InputError: As of ``attn_diag.quantize``, and for an unknown ``gradient``.
    """
    if gradient not in ("straight-through", "clipped"):
        raise InputError(f"gradient is straight-through or clipped, got {gradient!r}")
    found = quantize(x, by, amax=amax, seed=seed, **changes)
    rounded: Tensor = _StraightThrough.apply(  # type: ignore[no-untyped-call]
        x, found.values.to(x.dtype), found.clipped if gradient == "clipped" else None
    )
    return rounded


class _StraightThrough(torch.autograd.Function):
    """The second argument forward, the first one's gradient backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, values: Tensor, clipped: Tensor | None) -> Tensor:
        del x
        ctx.save_for_backward(*(() if clipped is None else (clipped,)))
        return values

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (dy,) = grads
        return (dy.masked_fill(ctx.saved_tensors[0], 0) if ctx.saved_tensors else dy), None, None
