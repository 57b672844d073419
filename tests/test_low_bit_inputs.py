"""Kernels that hold q, k or v below 16 bits, though given them in 16: a cache in FP8, keys in INT4."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import attn_diag
from attn_diag import inspect
from attn_diag.analyses.patterns.of_operands import held_words
from attn_diag.head.low_bit_inputs import find_held
from attn_diag.kernels.quantize import quantize
from attn_diag.kernels.quantizers import PRESETS, quantizer
from attn_diag.reference import AttentionHead, Masking, reference_rows

T, D = 256, 64


Change = Callable[[Tensor], Tensor]


def fp8(x: Tensor, scale: float = 1.0) -> Tensor:
    """By torch's own cast."""
    return (x / scale).float().to(torch.float8_e4m3fn).to(x.dtype) * scale


def by(name: str, **changes: Any) -> Change:
    """By this project's quantisers, which have tests of their own against released libraries."""
    return lambda x: quantize(x, quantizer(PRESETS[name], **changes)).values


def inputs(seed: int = 0, shape: tuple[int, ...] = (T, D), dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for _ in range(3)]


def attention(q: Tensor, k: Tensor, v: Tensor, out: torch.dtype) -> Tensor:
    """Causal attention with P_bar cast to ``out``."""
    scores = (q @ k.mT * D**-0.5).masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), -torch.inf)
    probs = (scores - scores.amax(-1, keepdim=True)).exp()
    made: Tensor = (probs.to(out).to(v) @ v / probs.sum(-1, keepdim=True)).to(out)
    return made


def scaled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention without a mask with P_bar and O in BF16."""
    scores = q.float() @ k.float().mT * D**-0.5
    probs = (scores - scores.amax(-1, keepdim=True)).exp()
    found: Tensor = (probs.bfloat16().float() @ v.float() / probs.sum(-1, keepdim=True)).bfloat16()
    return found


def same(x: Tensor) -> Tensor:
    return x


@pytest.mark.parametrize(
    ("of_q", "of_k", "of_v", "words"),
    [
        (same, fp8, fp8, "k and v held in FP8 (E4M3, scale 1 up to a power of two)"),
        (
            same, by("fp8"), by("fp8-row"),
            "k held in FP8 (E4M3, a scale for the head) and v held in FP8 (E4M3, a scale for a row)",
        ),
        (same, same, lambda x: fp8(x, 0.0217), "v held in FP8 (E4M3, one scale, 0.010851 up to a power of two)"),
        (same, by("int8"), by("int8"), "k and v held in INT8 (a scale for a row)"),
        (same, by("int4-asymmetric"), same, "k held in INT4 (a scale for 32 of a row and a zero point)"),
        (
            same, by("int4-asymmetric", elements="int2", block="32x1"),
            by("int4-asymmetric", elements="int2", block="32"),
            "k held in INT2 (a scale for 32 rows and a zero point) and v held in INT2 (a scale for 32 of a row and "
            "a zero point)",
        ),
        (by("int8"), by("int8"), same, "k and q held in INT8 (a scale for a row)"),
        (same, lambda x: fp8(x, 0.25), same, "k held in FP8 (E4M3, scale 1 up to a power of two)"),
        (fp8, same, same, "q held in FP8 (E4M3, scale 1 up to a power of two)"),
        (same, same, by("mxfp4", block="32x1"), "v held in MXFP4 (a scale for 32 rows)"),
        (same, same, same, ""),
    ],
)  # fmt: skip
def test_what_was_held_is_read_off_o(of_q: Change, of_k: Change, of_v: Change, words: str) -> None:
    q, k, v = (x.double() for x in inputs())
    rows = torch.linspace(0, T - 1, 64).long()
    out = attention(of_q(q), of_k(k), of_v(v), torch.bfloat16).double()[rows]
    head = AttentionHead(q, k, v, None, D**-0.5, Masking("top-left"))
    noise = float(
        (attention(q, k, v, torch.bfloat16).double()[rows] - attention(q, k, v, q.dtype)[rows]).square().sum()
    )
    found = find_held(head, out, rows, 1000.0, 1.5 * noise)
    assert (held_words(found[:1]) if found else "") == words


def test_a_scale_of_all_heads_and_bf16_inside_an_fp16_kernel() -> None:
    q, k, v = (x.double() for x in inputs(dtype=torch.float16))
    rows = torch.linspace(0, T - 1, 64).long()
    head = AttentionHead(q, k, v, None, D**-0.5, Masking("top-left"))
    out = attention(q, (k / 0.07).round() * 0.07, v.bfloat16().double(), torch.float16).double()[rows]
    rounding = float((attention(q, k, v, torch.float16).double() - attention(q, k, v, q.dtype))[rows].square().sum())
    (found,) = find_held(head, out, rows, 1000.0, 1.5 * rounding)
    assert found["v"].words == "BF16"
    assert float(found["k"].words.split()[-1][:-1]) == pytest.approx(0.07, rel=2e-4)


def test_no_scale_is_fitted_to_what_else_is_wrong() -> None:
    """Of a cache in groups of 16 keys, which are not tried, with its last 112 in 16 bits, in 16 rows."""
    generator = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(n, D, generator=generator, dtype=torch.float64) for n in (16, 512, 512))
    k[:, 3] *= 8
    k[:, 17] *= 5
    q, k, v = (x.bfloat16().double() for x in (q, k, v))
    group = {"elements": "int4", "symmetric": False, "zero_point": "float"}
    of_k, of_v = (quantizer("int8-asymmetric", block=block, **group) for block in ("16x1", "32"))
    kept = [torch.cat([quantize(x[:400], of).values, x[400:]]) for x, of in ((k, of_k), (v, of_v))]
    head, rows = AttentionHead(q, k, v, None, D**-0.5, Masking("bottom-right")), torch.arange(16)
    out = reference_rows(replace(head, k=kept[0], v=kept[1]), rows).out
    assert not any("q" in found for found in find_held(head, out, rows, 800.0, 4e-6 * float(out.square().sum())))


@pytest.mark.parametrize("what", ["scores", "probs", "truncated v", "accumulator"])
def test_other_roundings_are_no_format_of_inputs(what: str) -> None:
    q, k, v = (x.float()[None, None] for x in inputs(3))
    scores = q @ k.mT * D**-0.5
    scores = scores.bfloat16().float() if what == "scores" else scores
    probs = (scores - scores.amax(-1, keepdim=True)).exp()
    total = probs.sum(-1, keepdim=True)
    probs = fp8(probs) if what == "probs" else probs.bfloat16().float()
    values = (v.view(torch.int32) & -(2**19)).view(torch.float32) if what == "truncated v" else v
    out = torch.zeros_like(q)
    for start in range(0, T, 32):
        out = out + probs[..., start : start + 32] @ values[..., start : start + 32, :]
        out = out.bfloat16().float() if what == "accumulator" else out
    q, k, v = (x.bfloat16() for x in (q, k, v))
    (verdict,) = inspect(q, k, v, o=(out / total).bfloat16()).captures[0].observations[0].heads[0].quantities
    assert verdict.answer == "lossy"
    assert not [p for p in verdict.patterns if p.formats.keys() - {"p"}]


class Fp8Cache(torch.autograd.Function):
    """Attention whose k and v go through FP8, and gradients of that."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = fp8(k.float()), fp8(v.float())
        scores = q.float() @ k.mT * q.shape[-1] ** -0.5
        lse = scores.logsumexp(-1, keepdim=True)
        largest = scores.amax(-1, keepdim=True)
        out: Tensor = ((scores - largest).exp().to(q.dtype).float() @ v / (lse - largest).exp()).to(q.dtype)
        ctx.save_for_backward(q, k, v, (scores - lse).exp(), out)
        return out

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor, ...]:
        q, k, v, probs, out = ctx.saved_tensors
        do, scale = do.float(), q.shape[-1] ** -0.5
        dv = probs.to(q.dtype).float().mT @ do
        dscores = (probs * (do @ v.mT - (do * out.float()).sum(-1, keepdim=True))).to(q.dtype).float()
        return tuple(x.to(q.dtype) for x in (scale * dscores @ k, scale * dscores.mT @ q.float(), dv))


def test_an_fp8_cache_is_named_of_o_and_of_the_gradients_behind_it() -> None:
    q, k, v = (x.requires_grad_() for x in inputs(1, (1, 2, T, D)))
    do = inputs(2, (1, 2, T, D))[0]
    out = Fp8Cache.apply(q, k, v)  # type: ignore[no-untyped-call]
    out.backward(do)
    tensors = {"o": out.detach(), "do": do, "dq": q.grad, "dk": k.grad, "dv": v.grad}
    found = inspect(*(x.detach() for x in (q, k, v)), **tensors)
    assert "the fault of a kernel or cache below 16 bits" in found.report()
    head = found.captures[0].observations[0].heads[0]
    told = {v.quantity: v.patterns[0].words for v in head.quantities if v.answer == "lossy"}
    assert set(told) == {"o", "dq", "dk", "dv"}
    for quantity, words in told.items():
        unit = "keys" if quantity in ("dk", "dv") else "rows"
        assert words.startswith(f"all {unit} are ")
        assert "what k and v held in FP8 (E4M3, scale 1 up to a power of two) give, " in words
    assert head.verdict is not None
    assert any("give them as the kernel multiplies them" in text for text in head.verdict.suggestions)
    assert not any("wrong mathematics" in text for text in head.verdict.suggestions)


def test_check_says_what_o_of_two_bits_is() -> None:
    two_bits = by("int4-asymmetric", elements="int2")

    def kernel(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (x + (two_bits(x.detach().double()).to(x.dtype) - x).detach() for x in (k, v))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v)

    found = attn_diag.check(kernel, cases=["normal"], device="cpu")
    (failure,) = found.failures
    assert "k and v held in INT2 (a scale for 32 of a row and a zero point)" in failure.message


def test_codes_between_two_are_those_of_a_kernel_that_divides_in_fp32() -> None:
    q, k, v = inputs(0, (1, 2, 512, D))
    wide = k.float()
    scale = wide.abs().amax(-1, keepdim=True) / 448
    out = scaled(q[:, :, :64], fp8(wide / scale) * scale, v)
    for head in inspect(q[:, :, :64], k, v, o=out).captures[0].observations[0].heads:
        (found,) = head.quantities[0].patterns
        assert found.words == (
            "all rows are what k held in FP8 (E4M3, a scale for a row) gives, and but for that as good as a "
            "well-rounded kernel's"
        )


def test_lse_and_the_mean_of_o_are_not_blamed_for_a_cache() -> None:
    q, k, v = inputs(0, (1, 2, T, D))
    lse = (q.float() @ fp8(k.float()).mT * D**-0.5).logsumexp(-1)
    given = {"o": scaled(q, fp8(k.float()), fp8(v.float())), "lse": lse}
    verdict = None
    for head in inspect(q, k, v, **given).captures[0].observations[0].heads:
        told = {one.quantity: one.patterns[0].words for one in head.quantities}
        assert told["lse"].startswith(
            "all rows are what k held in FP8 (E4M3, scale 1 up to a power of two) gives, and but for that as good"
        )
        verdict = head.verdict
        assert verdict is not None
        assert not any("Look for the site" in text or "look for scores" in text for text in verdict.suggestions)
    assert verdict is not None
    assert "biased" in verdict.labels


def test_one_row_is_no_reason_to_ask_for_more_where_its_format_is_known() -> None:
    q, k, v = inputs(0, (1, 4, 1024, D))
    out = scaled(q[:, :, :1], by("int4-asymmetric")(k.double()).float(), v)
    heads = inspect(q[:, :, :1], k, v, o=out).captures[0].observations[0].heads
    named = [one.verdict for one in heads if one.quantities[0].patterns]
    assert named
    for verdict in named:
        assert verdict is not None
        assert verdict.labels == ("undecided",)
        assert verdict.suggestions[0].startswith("q, k or v lost their bits")


def test_a_second_fault_behind_a_cache_is_not_passed_over() -> None:
    q, k, v = inputs(0, (1, 1, T, D))
    out = scaled(1.02 * q.float(), fp8(k.float()), fp8(v.float()))
    (verdict,) = inspect(q, k, v, o=out).captures[0].observations[0].heads[0].quantities
    assert verdict.answer == "lossy"
    assert verdict.patterns[0].words.startswith(
        "all rows are near what k and v held in FP8 (E4M3, scale 1 up to a power of two) give, "
    )
    assert verdict.patterns[0].words.endswith(" times a well-rounded kernel's error off that")


def test_a_head_is_not_told_what_another_one_holds_besides() -> None:
    q, k, v = inputs(0, (1, 2, T, D))
    q = 0.5 * q  # so that k's bits are the smaller part of O's error
    held = fp8(k.float())
    held[:, 1] = k[:, 1].float()
    heads = inspect(q, k, v, o=scaled(q, held, fp8(v.float()))).captures[0].observations[0].heads
    told = [one.quantities[0].patterns[0].words.partition(" what ")[2] for one in heads if one.head is not None]
    assert [words.partition(" give")[0] for words in told] == [
        "k and v held in FP8 (E4M3, scale 1 up to a power of two)",
        "v held in FP8 (E4M3, scale 1 up to a power of two)",
    ]
