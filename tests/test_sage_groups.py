"""SageAttention 2.2 and 3 in their kernels' own groups, each against an attention written after its sources."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from test_low_bit_recipes import make_head
from torch import Tensor

import attn_diag
from attn_diag.kernels import RecipeNotSupportedError, emulate_head, preset
from attn_diag.kernels.accumulation import tensor_core_matmul
from attn_diag.kernels.quantize import quantize, spread
from attn_diag.kernels.quantizers import parse_quantizer
from attn_diag.kernels.reciprocals import hopper_quotient
from attn_diag.reference import AttentionHead, reference_head

E4M3 = torch.float8_e4m3fn
BIG = torch.tensor(-torch.inf)


def int8_by_threads(x: Tensor, rows: int, threads: int, held: int) -> Tensor:
    """quant_per_thread.py: of ``rows`` each of ``threads`` programs loads ``held`` neighbours of every eight."""
    out = torch.empty_like(x)
    for block in range(-(-len(x) // rows)):
        for thread in range(threads):
            at = [block * rows + eight * 8 + thread * held + i for eight in range(rows // 8) for i in range(held)]
            at = [row for row in at if row < len(x)]
            if not at:
                continue
            scale = hopper_quotient(x[at].abs().max(), torch.tensor(127.0)) + 0.0000001
            steps = hopper_quotient(x[at], scale)
            out[at] = (steps + 0.5 * torch.where(steps >= 0, 1.0, -1.0)).to(torch.int8).float() * scale
    return out


def sage2_hopper(head: AttentionHead) -> Tensor:
    """per_thread_int8, per_channel_fp8 and qk_int8_sv_f8_attn_kernel for sm90, row by row."""
    q, k, v = (x.float() for x in (head.q, head.k, head.v))
    k = (k - k.mean(0).bfloat16().float()).bfloat16().float()
    q8, k8 = int8_by_threads(q, 16, 8, 1), int8_by_threads(k, 128, 4, 2)
    v_scale = v.abs().amax(0) / 448
    v8 = (v * (1 / v_scale)).to(E4M3).double()
    scores = (q8.double() @ k8.double().T).float() * (head.scale * 1.4426950408889634)
    if head.masking.causal != "none":
        scores = scores.masked_fill(torch.ones(len(q), len(k)).triu(1).bool(), -torch.inf)
    out = torch.zeros(len(q), v.shape[1])
    for row in range(len(q)):
        m, total, acc = BIG, torch.tensor(1.0), torch.zeros(v.shape[1])
        for start in range(0, len(k), 128):
            part = scores[row, start : start + 128]
            new = torch.maximum(m, part.max() - 8.807)
            p, shrink = torch.exp2(part - new), torch.exp2(m - new)
            total, m = total * shrink + p.sum(), new
            sums = tensor_core_matmul(p.to(E4M3).double()[None], v8[start : start + 128], operands="e4m3")
            acc = acc * shrink + sums[0].float()
        out[row] = acc / total * v_scale
    return out.bfloat16()


_E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def e2m1(x: Tensor) -> Tensor:
    """Nearest, ties to the even code, saturating."""
    apart = (x.abs()[..., None] - _E2M1).abs()
    near = apart == apart.amin(-1, keepdim=True)
    even = near & (torch.arange(8) % 2 == 0)
    code = torch.where(near.sum(-1) > 1, even.int().argmax(-1), near.int().argmax(-1))
    return _E2M1[code] * x.sign()


def nvfp4(x: Tensor) -> Tensor:
    """scaled_fp4_quant: E4M3 scales of 16 neighbours in the last axis, codes by their reciprocals."""
    filled = torch.nn.functional.pad(x, (0, -x.shape[-1] % 16))
    parts = filled.reshape(*filled.shape[:-1], -1, 16)
    scale = (parts.abs().amax(-1, keepdim=True) / 6).to(E4M3).float()
    inverse = torch.where(scale == 0, 0.0, 1 / scale)
    values: Tensor = (e2m1(parts * inverse) * scale).flatten(-2)[..., : x.shape[-1]]
    return values


def sage3(head: AttentionHead) -> Tensor:
    """preprocess_qkv, scaled_fp4_quant and online_softmax_with_quant."""
    q, k, v = (x.float() for x in (head.q, head.k, head.v))
    k = (k - k.mean(0).bfloat16().float()).bfloat16().float()
    q4, added = torch.empty_like(q), torch.empty(len(q), len(k))
    for start in range(0, len(q), 128):
        block = q[start : start + 128]
        mean = block.sum(0) / 128
        q4[start : start + 128] = nvfp4((block - mean).bfloat16().float())
        added[start : start + 128] = (mean.bfloat16().double() @ k.double().T).bfloat16().float()
    k4, v4 = nvfp4(k), nvfp4(v.T).T
    scores = ((q4.double() @ k4.double().T).float() + added) * (head.scale * 1.4426950408889634)
    if head.masking.causal != "none":
        scores = scores.masked_fill(torch.ones(len(q), len(k)).triu(1).bool(), -torch.inf)
    scores = torch.nn.functional.pad(scores, (0, -len(k) % 128), value=-torch.inf)
    v4 = torch.nn.functional.pad(v4, (0, 0, 0, -len(k) % 128)).double()
    m, total = torch.full((len(q), 1), -torch.inf), torch.zeros(len(q), 1)
    acc = torch.zeros(len(q), v.shape[1])
    for start in range(0, scores.shape[1], 128):
        part = scores[:, start : start + 128]
        new = torch.maximum(m, part.amax(1, keepdim=True))
        p, shrink = torch.exp2(part - new) * 2688, torch.exp2(m - new)
        total, m = total * shrink + p.sum(1, keepdim=True), new
        groups = p.reshape(len(p), 8, 16)
        scale = groups.amax(-1, keepdim=True) / 6
        codes = e2m1(torch.where(scale == 0, 0.0, groups / scale)) * scale.to(E4M3).float()
        acc = acc * shrink + (codes.flatten(1).double() @ v4[start : start + 128]).float()
    return (acc / total).bfloat16()


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize(
    ("name", "written", "others"),
    [
        (
            "sage2-hopper",
            sage2_hopper,
            [{"quantize_q": "int8 block=16rows"}, {"quantize_k": "int8 block=128rows"}],
        ),
        ("sage3", sage3, [{"smooth_q": "block-mean"}, {"quantize_probs": "nvfp4 tensor_scale=false"}]),
    ],
    ids=["2", "3"],
)
def test_after_its_sources(name: str, written: Any, others: list[dict[str, str]], causal: bool) -> None:
    """Sums of P_bar, exponents and the division round in other orders here: 99 % of O's bits, as of a real kernel."""
    head = replace(make_head(200, causal=causal, offset=3.0), do=None)
    got = emulate_head(preset(name), head).o
    assert float((got == written(head)).double().mean()) > 0.99
    for change in others:
        other = emulate_head(replace(preset(name), **change), head).o  # type: ignore[arg-type]
        assert float((other == got).double().mean()) < 0.97, change


@pytest.mark.parametrize(("block", "threads", "held"), [("16rows/8", 8, 1), ("64rows/4", 4, 2), ("32rows/2", 2, 4)])
def test_rows_of_a_thread_share_a_scale(block: str, threads: int, held: int) -> None:
    by = parse_quantizer(f"int8 block={block} arithmetic=fp32-triton ties=away scale_offset=1e-7")
    assert by is not None
    x = torch.randn(150, 32, generator=torch.Generator().manual_seed(1)) * torch.arange(1.0, 151.0)[:, None]
    found, rows = quantize(x, by), int(block.partition("rows")[0])
    assert torch.equal(found.values, int8_by_threads(x, rows, threads, held))
    assert found.scale.shape == (-(-150 // rows) * threads, 1)
    assert torch.equal(found.codes * spread(found.scale, (150, 32), by), found.values)


def test_threads_hold_eight_rows() -> None:
    with pytest.raises(attn_diag.InputError, match="threads share a multiple of 8 rows"):
        attn_diag.quantizer("int8", block="12rows/4")


def test_smoothed_values_leave_the_mathematics() -> None:
    """v's mean is taken off and added again: of a v with a large mean FP8's error falls with it."""
    head = make_head(130, offset=1.0)
    head = replace(head, v=(head.v + 8).bfloat16().double(), do=None)
    truth = reference_head(head).out

    def off(**change: Any) -> float:
        got = emulate_head(replace(preset("sage2-ada"), out="fp32", **change), head).o.double()
        return float((got - truth).norm() / truth.norm())

    exact: dict[str, Any] = dict.fromkeys(("quantize_q", "quantize_k", "quantize_v"), "none") | {"probs": "fp32"}
    assert off(smooth_v="mean", accumulation="exact", probs_scale=1.0, smooth_k="none", **exact) < 1e-5
    assert off(smooth_v="mean") < off() / 4
    with pytest.raises(RecipeNotSupportedError, match="smooth_v, which needs probabilities that add up to 1"):
        emulate_head(replace(preset("sage2-ada"), smooth_v="mean", smooth_k="none"), replace(head, sink=0.5))
