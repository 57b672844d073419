"""Kernels that multiply P_bar in 8 bits, as FlashAttention-3's FP8 does: O tells it, and q, k and v beside it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from test_low_bit_inputs import Fp8Cache
from torch import Tensor

from attn_diag import inspect
from attn_diag.analyses.patterns import of_capture
from attn_diag.analyses.patterns.evidence import Evidence
from attn_diag.analyses.patterns.of_operands import held_words
from attn_diag.head.low_bit_inputs import find_held
from attn_diag.reference import AttentionHead, Masking, reference_rows
from attn_diag.reports.following import commands

T, D = 192, 32
Change = Callable[[Tensor], Tensor]


def fp8(x: Tensor, factor: Tensor | float = 1.0) -> Tensor:
    """x times a factor by torch's own cast."""
    made: Tensor = (x * factor).to(torch.float8_e4m3fn).float() / factor
    return made


def e5m2(x: Tensor) -> Tensor:
    return x.to(torch.float8_e5m2).float()


def by_amax(*over: int) -> Change:
    return lambda x: fp8(x, 448 / x.abs().amax(over, keepdim=True))


def int8(x: Tensor) -> Tensor:
    scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-30) / 127
    return (x / scale).round() * scale


def bf16(x: Tensor) -> Tensor:
    return x.bfloat16().float()


def same(x: Tensor) -> Tensor:
    return x


def cut(x: Tensor) -> Tensor:
    """Toward zero, to four bits."""
    return (x.view(torch.int32) & -(2**20)).view(torch.float32)


def drawn(x: Tensor) -> Tensor:
    """To four bits, stochastically."""
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(0, 2**20, x.shape, generator=generator, dtype=torch.int32)
    return ((x.view(torch.int32) + bits) & -(2**20)).view(torch.float32)


TIMES_256 = "P̄ cast to FP8 (E4M3, times 256 up to a power of two, in 128-key tiles descending)"


def inputs(seed: int = 0, heads: int = 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(1, heads, T, D, generator=generator).bfloat16() for _ in range(3)]


def tiled(
    qkv: Sequence[Tensor], cast: Change, tile: int = T, *, descending: bool = False, coarse: Change = same
) -> Tensor:
    """O of a causal kernel that takes ``tile`` keys at once, in BF16."""
    q, k, v = (x.float() for x in qkv)
    scores = coarse(q @ k.mT * D**-0.5).masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), -math.inf)
    largest, total = torch.full_like(scores[..., :1], -math.inf), torch.zeros_like(scores[..., :1])
    out = torch.zeros_like(v)
    starts = range(0, T, tile)
    for start in reversed(starts) if descending else starts:
        part = scores[..., start : start + tile]
        now = torch.maximum(largest, part.amax(-1, keepdim=True))
        shift = now.masked_fill(now == -math.inf, 0.0)
        probs, rescale = (part - shift).exp(), (largest - shift).exp()
        total = rescale * total + probs.sum(-1, keepdim=True)
        out = rescale * out + cast(probs) @ v[..., start : start + tile, :]
        largest = now
    return (out / total).bfloat16()


def said(out: Tensor, q: Tensor, k: Tensor, v: Tensor) -> str:
    """What is found in the O of one head."""
    q, k, v, out = (x[0, 0].double() for x in (q, k, v, out))
    head, rows = AttentionHead(q, k, v, None, D**-0.5, Masking("top-left")), torch.linspace(0, T - 1, 64).long()
    sound = tiled([x[None, None] for x in (q, k, v)], bf16)[0, 0].double()
    noise = float((sound - reference_rows(head, torch.arange(T)).out)[rows].square().sum())
    return held_words(found) if (found := find_held(head, out[rows], rows, 1000.0, 1.5 * noise)) else ""


@pytest.mark.parametrize(
    ("cast", "tile", "descending", "words"),
    [
        *((lambda p, by=by: fp8(p, by), 128, True, TIMES_256) for by in (256.0, 128.0)),
        (
            lambda p: fp8(p, 448.0), 64, False,
            "P̄ cast to FP8 (E4M3, times 448 up to a power of two, in 64-key tiles ascending)",
        ),
        (fp8, 80, True, "P̄ cast to FP8 (E4M3, as it is, in 80-key tiles descending)"),
        (e5m2, 64, True, "P̄ cast to FP8 (E5M2, as it is up to a power of two, in 64-key tiles descending)"),
        (int8, 64, False, "P̄ cast to INT8 (a scale for a row, in 64-key tiles)"),
        # A width that is not tried.
        (lambda p: fp8(p, 256.0), 56, False, "P̄ cast to FP8 (E4M3)"),
        # Not to nearest, and what is not known.
        (cut, 64, False, ""),
        (drawn, 64, False, ""),
        (lambda p: (p * 2**8).round() / 2**8, 64, False, ""),
        (lambda p: p.where(p > 0.01, 0.0), 64, False, ""),
    ],
)  # fmt: skip
def test_a_cast_of_p_is_read_off_o(cast: Change, tile: int, descending: bool, words: str) -> None:
    q, k, v = inputs()
    out = tiled((q, k, v), cast, tile, descending=descending)
    assert said(out, q, k, v) == words


@pytest.mark.parametrize(
    ("of_qk", "of_v", "cast", "words"),
    [
        (
            by_amax(-1, -2), by_amax(-1, -2), lambda p: fp8(p, 256.0),
            "k, v and q held in FP8 (E4M3, a scale for the head) and P̄ cast to FP8 (E4M3, times 256 up to a power of "
            "two, in 64-key tiles descending)",
        ),
        # Other scores, of q and k in INT8, fall between other numbers: neither shows without the other.
        (
            int8, by_amax(-2), lambda p: fp8(p, 448.0),
            "k and q held in INT8 (a scale for a row), v held in FP8 (E4M3, a scale for a feature) and P̄ cast to FP8 "
            "(E4M3, times 448 up to a power of two, in 64-key tiles descending)",
        ),
        (by_amax(-1, -2), by_amax(-1, -2), bf16, "k, v and q held in FP8 (E4M3, a scale for the head)"),
    ],
)  # fmt: skip
def test_q_k_and_v_are_told_beside_it(of_qk: Change, of_v: Change, cast: Change, words: str) -> None:
    q, k, v = inputs(1)
    out = tiled((of_qk(q.float()), of_qk(k.float()), of_v(v.float())), cast, 64, descending=True)
    assert said(out, q, k, v) == words


@pytest.mark.parametrize(("hot", "coarse"), [(1.0, lambda s: (16 * s).round() / 16), (3.0, bf16)])
def test_coarse_scores_are_no_cast_of_p(hot: float, coarse: Change) -> None:
    """Exponentials of multiples of 1/16 are near numbers of E4M3 below 1."""
    q, k, v = inputs(2)
    q, k = (hot * x for x in (q, k))
    out = tiled((q, k, v), bf16, 64, coarse=coarse)
    assert "P̄" not in said(out, q, k, v)


def test_inspect_says_what_to_do_about_it() -> None:
    q, k, v = inputs(3, 2)
    out = tiled((q, k, v), lambda p: fp8(p, 256.0), 128, descending=True)
    found = inspect(q, k, v, o=out, causal="top-left")
    report = " ".join(found.report().split())
    assert f"all rows are what {TIMES_256} gives, and but for that as good as a well-rounded kernel's" in report
    assert "Next where 8 bits are meant, inspect it as the kernel that it is: --declared fa3-fp8" in report
    assert "P̄ lost its bits before it was multiplied with v" in report
    assert "q, k or v lost their bits" not in report
    assert "look for" not in report.lower()


def test_what_a_cache_is_told_to_do_next_is_no_command() -> None:
    q, k, v = inputs(4)
    out = tiled((q, fp8(k.float()), fp8(v.float())), bf16, 64)
    found = inspect(q, k, v, o=out, causal="top-left")
    report = " ".join(found.report().split())
    assert "Next inspect it again with q, k and v as the kernel multiplies them, code times scale." in report
    assert "explain(" not in report
    assert not commands(found)


def test_gradients_of_a_cache_that_o_shows_are_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def find(evidence: Evidence) -> list[object]:
        asked.append(evidence.quantity)
        return []

    monkeypatch.setattr(of_capture, "find_patterns", find)
    q, k, v = (x.requires_grad_() for x in inputs(5))
    do = inputs(6)[0]
    out = Fp8Cache.apply(q, k, v)  # type: ignore[no-untyped-call]
    out.backward(do)
    given = {"o": out.detach(), "do": do, "dq": q.grad, "dk": k.grad, "dv": v.grad}
    heads = inspect(*(x.detach() for x in (q, k, v)), **given).captures[0].observations[0].heads
    assert {one.quantity for one in heads[0].quantities if one.answer == "lossy"} == {"o", "dq", "dk", "dv"}
    assert not asked
