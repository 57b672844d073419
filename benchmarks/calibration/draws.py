"""Redraws of one head: fresh inputs with a capture's structure, and kernels that are unbiased on them by construction.

Everything is batched over redraws: tensors are [B, T, ...] float64, on any device.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from measuring import CAPTURES
from torch import Tensor

from attn_diag.captures.loading import load
from attn_diag.head.read import NonFiniteCensus, read_head
from attn_diag.kernels.formats import parse, round_to
from attn_diag.reference import AttentionHead, Masking, format_of, round_nearest_even, ulp

BF16 = format_of(torch.bfloat16)
GAUSSIAN = "gaussian"
_STOCHASTIC = {"bf16": parse("bf16:stochastic"), "fp32": parse("e8m23:stochastic")}
# Share of the elements that the null "flips" moves by one spacing.
FLIPPED = 0.05
# Ways to plant a bias, and its size in spacings of O.
DIRECTIONS = ("away", "constant", "along_do")
SIZES = (0.005, 0.01, 0.02, 0.05, 0.1)


def capture_names() -> list[str]:
    """The real captures, and the Gaussian one made here."""
    return [*sorted(p.stem for p in CAPTURES.glob("*.safetensors")), GAUSSIAN]


def read_heads(name: str, device: torch.device) -> list[tuple[int, AttentionHead]]:
    """The heads of a capture with the number of their key head; "gaussian": two heads of N(0,1), T = 256, D = 64."""
    if name == GAUSSIAN:
        generator = torch.Generator().manual_seed(5)
        draws = [
            [torch.randn(256, 64, generator=generator).bfloat16().double().to(device) for _ in "qkvo"] for _ in "ab"
        ]
        return [(i, AttentionHead(q, k, v, do, 64**-0.5, Masking("top-left"))) for i, (q, k, v, do) in enumerate(draws)]
    capture = load(CAPTURES / f"{name}.safetensors")
    if format_of(capture.tensors["q"].dtype) != BF16 or capture.batch != 1 or capture.metadata.softcap is not None:
        raise ValueError(f"{name}: the study redraws single BF16 sequences without softcap; choose another capture")
    group = capture.q_heads // capture.kv_heads
    heads = [read_head(capture, 0, h, device, NonFiniteCensus()).head for h in range(capture.q_heads)]
    return [(h // group, head) for h, head in enumerate(heads)]


def stochastic(x: Tensor, seed: int) -> Tensor:
    """``x`` rounded up or down to BF16 so that its mean is kept."""
    return round_to(x, _STOCHASTIC["bf16"], seed)


@dataclass(frozen=True)
class Sample:
    """B redraws of a head: inputs and true O, [B, T, D]; row sum, LSE, argmax key [B, T]; P_bar, "probs" [B, T, T]."""

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    probs: Tensor
    row_sum: Tensor
    lse: Tensor
    top_key: Tensor
    out: Tensor

    @cached_property
    def rounded(self) -> Tensor:
        """RN(O), what a correctly rounding kernel returns."""
        return round_nearest_even(self.out, BF16)


def forward(head: AttentionHead, q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> Sample:
    """The true attention of B redraws of ``head``'s inputs, each [B, T, D], under its scale and mask."""
    scores = (q * head.scale) @ k.mT
    hidden = torch.zeros(scores.shape[1:], dtype=torch.float64, device=q.device)
    head.apply_mask(hidden, slice(0, len(hidden)), slice(0, hidden.shape[1]))
    scores += hidden
    row_max, top_key = scores.max(-1)
    probs = scores.sub_(row_max[..., None]).exp_()
    row_sum = probs.sum(-1)
    return Sample(q, k, v, do, probs, row_sum, row_max + row_sum.log(), top_key, probs @ v / row_sum[..., None])


def original(head: AttentionHead) -> Sample:
    """The head as captured: one redraw that changes nothing."""
    assert head.do is not None
    return forward(head, head.q[None], head.k[None], head.v[None], head.do[None])


def rotations(count: int, size: int, generator: torch.Generator, device: torch.device) -> Tensor:
    """Haar-distributed orthogonal matrices [count, size, size] (Mezzadri, Notices AMS 54 (2007) 592)."""
    # Drawn and factored where the generator lives, so that every device sees the same inputs.
    q, r = torch.linalg.qr(torch.randn(count, size, size, generator=generator, dtype=torch.float64))
    signs: Tensor = r.diagonal(dim1=-2, dim2=-1).sign()
    turns: Tensor = (q * signs[:, None, :]).to(device)
    return turns


def fresh(heads: list[tuple[int, AttentionHead]], count: int, generator: torch.Generator) -> Iterator[Sample]:
    """``count`` redraws of every head: q, k, v and dO rotated at random and rounded to BF16 again.

    Q and K turn together, so P keeps its structure and only its last bits are new. Heads that share keys turn alike.
    """
    turns: dict[int, tuple[Tensor, Tensor]] = {}
    for group, head in heads:
        device, d, dv = head.q.device, head.q.shape[1], head.v.shape[1]
        if group not in turns:
            turns[group] = (rotations(count, d, generator, device), rotations(count, dv, generator, device))
        qk, v = turns[group]
        assert head.do is not None
        do = rotations(count, dv, generator, device)
        yield forward(head, *(round_nearest_even(x @ turn, BF16) for x, turn in
                              ((head.q, qk), (head.k, qk), (head.v, v), (head.do, do))))  # fmt: skip


def kernels_on_fresh(sample: Sample, seed: int) -> dict[str, Tensor]:
    """O of kernels without bias on fresh inputs, and of one that has it ("probs_mismatched": the control)."""
    total = sample.row_sum[..., None]
    drawn, cast = stochastic(sample.probs, seed), round_nearest_even(sample.probs, BF16)
    product = cast @ sample.v
    return {
        "rounded": sample.rounded,
        "probs_stochastic": round_nearest_even(drawn @ sample.v / total, BF16),
        "probs_nearest": round_nearest_even(product / cast.sum(-1)[..., None], BF16),
        "probs_mismatched": round_nearest_even(product / total, BF16),
    }


def kernels_on_real(sample: Sample, count: int, seed: int) -> dict[str, Tensor]:
    """``count`` redraws of O on the captured inputs: stochastically rounded, and RN(O) moved by random spacings."""
    out = sample.out.expand(count, -1, -1)
    draw = torch.rand(out.shape, generator=torch.Generator(out.device).manual_seed(seed), device=out.device)
    steps = (draw < FLIPPED / 2).double() - (draw >= 1 - FLIPPED / 2).double()
    return {"o_stochastic": stochastic(out, seed + 1), "o_flips": sample.rounded + steps * ulp(sample.out, BF16)}


def gradient_errors(head: AttentionHead, sample: Sample, count: int, seed: int) -> dict[str, Tensor]:
    """Errors of dQ [B, T, D], dS and dQ stochastically rounded, and of LSE [B, T, 1], so rounded to fp32."""
    dprobs = sample.do @ sample.v.mT
    delta = (sample.do * sample.out).sum(-1, keepdim=True)
    dscores = (sample.probs / sample.row_sum[..., None] * (dprobs - delta)).expand(count, -1, -1)
    dq = head.scale * (stochastic(dscores, seed) @ sample.k)
    truth = head.scale * (dscores[:1] @ sample.k)
    lse = sample.lse.expand(count, -1)
    return {
        "dq": stochastic(dq, seed + 1) - truth,
        "lse": (round_to(lse, _STOCHASTIC["fp32"], seed + 2) - lse)[..., None],
    }


def planted(out: Tensor, sample: Sample, direction: str, size: float, seed: int) -> Tensor:
    """``out``, each element moved by one spacing along ``direction`` with probability ``size``: so much mean bias.

    The spacing is that of the true O, as in the product's ulp; past a power of two the result may be no BF16 number.
    """
    ones = torch.ones_like(sample.out)
    towards = {"away": sample.out.sign(), "constant": ones, "along_do": sample.do.sign()}[direction]
    draw = torch.rand(out.shape, generator=torch.Generator(out.device).manual_seed(seed), device=out.device)
    return out + (draw < size) * towards * ulp(sample.out, BF16)


def row_totals(out: Tensor, sample: Sample) -> dict[str, Tensor]:
    """The signed errors of O and delta summed by row, [B, T], as ``attn_diag.head.measure`` forms them."""
    error, excess = out - sample.out, out - sample.rounded
    return {
        "o": error.sum(-1),
        "delta": (sample.do * error).sum(-1),
        "delta_excess": (sample.do * excess).sum(-1),
        "o_excess": excess.sum(-1),
        "o_away_excess": (excess * sample.out.sign()).sum(-1),
    }


def feature_totals(out: Tensor, sample: Sample, test: str) -> tuple[Tensor, Tensor]:
    """The errors of "o" or "delta" by feature, [B, D], and the sums over cells that ``two_way`` takes, [B, 3]."""
    error = out - sample.out
    if test == "delta":
        error = sample.do * error
    batch, rows, features = error.shape
    keys = sample.top_key.expand(batch, rows)
    each = 1.0 if test == "o" else 1 / features
    cells = error.new_zeros(batch, sample.k.shape[1], features)
    cells.scatter_add_(1, keys[..., None].expand(-1, -1, features), error)
    sizes = error.new_zeros(batch, sample.k.shape[1]).scatter_add_(1, keys, error.new_full(keys.shape, each))
    sums = cells.square().sum((1, 2)), (cells.sum(2) * sizes).sum(1), sizes.square().sum(1) * features
    return error.sum(1), torch.stack(sums, -1)
