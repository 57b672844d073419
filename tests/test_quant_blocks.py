"""Blocks of a large weight that are not the declared quantiser's: found, told with their place, and named."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import attn_diag

ROW, BLOCK = 300, 5  # columns 160-191


def weight(seed: int, rows: int = 320) -> Tensor:
    return 0.02 * torch.randn(rows, 512, generator=torch.Generator().manual_seed(seed))


def int4(w: Tensor, fault: str = "") -> Tensor:
    """Groups of 32, with a fault in one of them."""
    groups = w.float().reshape(len(w), -1, 32)
    amax = groups.abs().amax(2, keepdim=True)
    if fault == "shared":
        amax[ROW, BLOCK] = amax[ROW, BLOCK : BLOCK + 2].max()
    if fault == "stale":
        amax[ROW, BLOCK] *= 1.3
    scale = amax / 7
    codes = (groups / scale).round()
    if fault == "floor":
        codes[ROW, BLOCK] = (groups / scale)[ROW, BLOCK].floor()
    return (codes.clamp(-7, 7) * scale).reshape(w.shape)


def uint4(w: Tensor, fault: str = "", part: float = 1.0, *, by_reciprocal: bool = False) -> Tensor:
    """The same with a zero point."""
    groups = w.float().reshape(len(w), -1, 32)
    low, high = groups.amin(2, keepdim=True) * part, groups.amax(2, keepdim=True) * part
    scale = (high - low) / 15
    inverse = 1 / scale
    zero = (-low * inverse if by_reciprocal else -low / scale).round()
    codes = (groups * inverse + zero).round() if by_reciprocal else (groups / scale).round() + zero
    if fault == "zero point":
        zero[ROW, BLOCK] += 1
    return ((codes.clamp(0, 15) - zero) * scale).reshape(w.shape)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("shared", "one scale for the block and the block behind"),
        ("stale", "an amax 1.3 times the weight's own"),
        ("floor", "elements rounded down"),
    ],
)
def test_one_group_among_thousands_is_named(fault: str, said: str) -> None:
    w = weight(1)
    found = attn_diag.quant(w, "int4", observed=int4(w, fault))
    assert found.headline.startswith(f"not int4 in row 300, columns 160-191, but with {said}")
    assert found.next == f"look at the {'rounding in' if fault == 'floor' else 'scales of'} these blocks"
    assert attn_diag.quant(w, "int4", observed=int4(w)).passed


def test_one_zero_point_that_is_off_is_named() -> None:
    w = weight(2)
    found = attn_diag.quant(w, "int4-asymmetric", observed=uint4(w, "zero point"))
    assert "in row 300, columns 160-191, but with the zero point off by +1" in found.headline


def test_a_stale_range_is_named() -> None:
    w = weight(3, 64)
    w[:, 7] *= 30
    found = attn_diag.quant(w, "int4-asymmetric", observed=uint4(w, part=0.7))
    assert "but with an amax 0.7 times the weight's own" in found.headline


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shared_nvfp4_scales_are_named(dtype: torch.dtype) -> None:
    w = weight(4, 64).to(dtype)
    amax = w.float().reshape(64, -1, 16).abs().amax(2)
    amax[:, 2:4] = amax[:, 2:4].amax(1, keepdim=True)
    values = attn_diag.quantize(w, "nvfp4", amax=amax, arithmetic="fp32").values
    found = attn_diag.quant(w, "nvfp4", observed=values)
    assert "blocks, but with one scale for pairs of blocks" in found.headline
    assert attn_diag.quant(w, "nvfp4", observed=attn_diag.quantize(w, "nvfp4", arithmetic="fp32").values).passed


def test_ties_of_bf16_weights_are_no_fault() -> None:
    w = weight(5, 64).bfloat16()
    away = w.float().reshape(64, -1, 32)
    scale = away.abs().amax(2, keepdim=True) / 7
    steps = away / scale
    values = (torch.copysign((steps.abs() + 0.5).floor(), steps).clamp(-7, 7) * scale).reshape(w.shape)
    assert attn_diag.quant(w, "int4", observed=values).passed
    assert attn_diag.quant(w, "int4-asymmetric", observed=uint4(w, by_reciprocal=True)).passed


@pytest.mark.parametrize("kept", [1.0, 0.2])
def test_clipping_by_a_zero_point_is_no_bias_of_dithering(kept: float) -> None:
    by = attn_diag.quantizer("int4-asymmetric", elements="int4:stochastic")
    for seed in range(4):
        w = weight(seed, 64) * (torch.rand(64, 512, generator=torch.Generator().manual_seed(seed)) < kept)
        assert attn_diag.quant(w, by, observed=attn_diag.quantize(w, by, seed=seed).values, level=1e-3).passed


def test_values_that_are_all_zero_have_no_other_culprit() -> None:
    w = weight(6, 64)
    found = attn_diag.quant(w, "int4", observed=torch.zeros_like(w))
    assert found.headline == "not int4: every value is 0"


def test_a_tensor_scale_beside_a_wide_format_of_the_blocks_is_no_overflow() -> None:
    w = weight(7, 16)
    found = attn_diag.quantize(w, "nvfp4", scale="bf16", arithmetic="fp32")
    assert bool(found.values.isfinite().all())


def mxfp6(w: Tensor, power: Tensor) -> Tensor:
    """MXFP6 with scales of the blocks' powers of two, by the formula of OCP MX 1.0."""
    blocks, scale = w.double().reshape(len(w), -1, 32), (power.double() - 2).exp2()
    codes = attn_diag.round_to((blocks / scale).clamp(-7.5, 7.5), "e2m3")
    return (codes * scale).reshape(w.shape).to(w.dtype)


@pytest.mark.parametrize("seed", range(3))
def test_logarithms_in_16_bits_are_no_scale_of_another_block(seed: int) -> None:
    """As microxcaling has it (mx_ops.py): floor(log2(amax)) in the weight's format."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(64, 1, generator=generator)
    w = (torch.randn(64, 256, generator=generator) * 0.02 * torch.exp(0.3 * rows)).bfloat16()
    amax = w.reshape(64, -1, 32).abs().amax(-1, keepdim=True)
    found = attn_diag.quant(w, "mxfp6", observed=mxfp6(w, amax.log2().floor()))
    assert found.headline.endswith("but with log2 of amax in bf16")
    shared = amax.double().log2().floor()
    shared[:8] = shared[:8].amax(1, keepdim=True)
    found = attn_diag.quant(w, "mxfp6", observed=mxfp6(w, shared))
    assert "with one scale for the row" in found.headline
    assert "log2" not in found.headline
