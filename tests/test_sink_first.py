"""Kernels whose maximum starts at an attention sink, as the Triton kernel of vLLM has it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import attn_diag
from attn_diag.captures.capture import Capture
from attn_diag.kernels import RecipeNotSupportedError, Schedule, emulate_head, preset, trace_row
from attn_diag.kernels.attention import check_kernels_support
from attn_diag.kernels.emulation import emulate_rows_of_several
from attn_diag.reference import AttentionHead, Masking

# With alpha by itself in fp32, as a kernel written in PyTorch has it.
LAST = replace(preset("cudnn", "bf16", 64), alpha="before-rounding", exp="exact", schedule=Schedule(key_tile=32))
FIRST = replace(LAST, name="first", sink_joins="first")
LENGTH = 192


def attend(q: Tensor, k: Tensor, v: Tensor, sink: float, tile: int = 32, window: int = LENGTH) -> tuple[Tensor, Tensor]:
    """O and L of one head in BF16, causal: m starts at the sink and l at 1, P_bar is cast, sums are fp32."""
    places = torch.arange(LENGTH)
    hidden = (places > places[:, None]) | (places <= places[:, None] - window)
    m, row_sum = torch.full((LENGTH, 1), sink), torch.ones(LENGTH, 1)
    out = torch.zeros(LENGTH, v.shape[1])
    for start in range(0, LENGTH, tile):
        keys = slice(start, start + tile)
        scores = (q.float() @ k[keys].float().T * q.shape[1] ** -0.5).masked_fill(hidden[:, keys], -math.inf)
        top = torch.maximum(m, scores.amax(1, keepdim=True))
        probs, rescale = (scores - top).exp(), (m - top).exp()
        row_sum = row_sum * rescale + probs.sum(1, keepdim=True)
        out = out * rescale + probs.bfloat16().float() @ v[keys].float()
        m = top
    return (out / row_sum).bfloat16(), (m + row_sum.log())[:, 0]


def drawn(seed: int, spread: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(LENGTH, 64, generator=g) for _ in range(3))
    return (spread * q).bfloat16(), k.bfloat16(), v.bfloat16()


def opened(q: Tensor, k: Tensor, v: Tensor, sink: float, window: int = LENGTH) -> AttentionHead:
    masking = Masking("top-left", (window - 1, 0))
    return AttentionHead(q.double(), k.double(), v.double(), None, 64**-0.5, masking, sink=sink)


@pytest.mark.parametrize("window", [LENGTH, 40])
@pytest.mark.parametrize(("spread", "sink"), [(1.0, -8.0), (1.0, 1.5), (4.0, 6.0), (1.0, 40.0)])
def test_the_emulation_has_the_kernels_bits(spread: float, sink: float, window: int) -> None:
    tensors = drawn(0, spread)
    out, lse = attend(*tensors, sink, window=window)
    found = emulate_head(FIRST, opened(*tensors, sink, window))
    # The order in which products add moves few elements across a rounding boundary.
    assert (found.o == out).double().mean() >= 0.998
    assert torch.allclose(found.lse, lse, rtol=1e-6, atol=1e-6)
    last = emulate_head(LAST, opened(*tensors, sink, window)).o
    assert ((last == out).double().mean() < 0.998) == (sink > -8)


@pytest.mark.parametrize("window", [LENGTH, 64])
@pytest.mark.parametrize(("spread", "sink"), [(1.0, 1.0), (4.0, 8.0), (1.0, 12.0), (1.0, 80.0)])
def test_identify_names_it_and_accuses_nobody(spread: float, sink: float, window: int) -> None:
    q, k, v = drawn(1, spread)
    out, _ = attend(q, k, v, sink, window=window)
    q, k, v, out = (x[None, None] for x in (q, k, v, out))
    seen = None if window == LENGTH else (window - 1, 0)
    found = attn_diag.identify(q, k, v, o=out, sinks=torch.tensor([sink]), causal="top-left", device="cpu", window=seen)
    assert found.outcome == "unnamed"
    assert found.flaw is None
    assert "fa2 with m starting at the sink" in found.verdict


@pytest.mark.parametrize(("sink", "window"), [(6.0, LENGTH), (4.0, 64), (30.0, LENGTH)])
def test_inspect_takes_it_for_a_well_rounded_kernel(sink: float, window: int) -> None:
    q, k, v = drawn(7)
    out, lse = attend(q, k, v, sink, window=window)
    tensors = {"q": q, "k": k, "v": v, "o": out, "lse": lse}
    capture = Capture.from_tensors(
        {name: x[None, None] for name, x in tensors.items()} | {"sinks": torch.tensor([sink])},
        causal="top-left", window=(window - 1, 0),
    )  # fmt: skip
    (head,) = attn_diag.inspect(capture, device="cpu").heads
    assert head.verdict is not None
    assert head.verdict.labels == ("clean",)


def test_a_flaw_beside_such_a_sink_is_found() -> None:
    q, k, v = drawn(2)
    out, _ = attend(q, k, v, 2.0)
    out[32::64] = (out[32::64].float() * 1.1).bfloat16()
    q, k, v, out = (x[None, None] for x in (q, k, v, out))
    found = attn_diag.identify(q, k, v, o=out, sinks=torch.tensor([2.0]), causal="top-left", device="cpu")
    assert found.outcome == "flawed"
    assert found.flaw is not None
    assert set(found.flaw.rows) == {32, 96, 160}


def test_recipes_that_differ_in_it_alone_share_no_softmax() -> None:
    head = opened(*drawn(3), 3.0)
    rows = torch.arange(LENGTH)
    together = emulate_rows_of_several([LAST, FIRST], head, rows)
    assert all(torch.equal(o, emulate_head(r, head).o) for r, o in zip((LAST, FIRST), together, strict=True))
    assert not torch.equal(*together)


def test_without_a_sink_it_changes_nothing() -> None:
    head = replace(opened(*drawn(4), 0.0), sink=None)
    plain = emulate_head(LAST, head).o
    assert torch.equal(plain, emulate_head(FIRST, head).o)


def test_of_split_keys_the_first_has_the_sink() -> None:
    head = opened(*drawn(5), 3.0)
    split = replace(FIRST, schedule=Schedule(key_tile=32, split_keys=64))
    whole = emulate_head(replace(LAST, arithmetic="fp64", probs="fp32"), head)
    found = emulate_head(replace(split, arithmetic="fp64", probs="fp32"), head)
    assert torch.allclose(found.lse, whole.lse, rtol=1e-6)
    assert (found.o == whole.o).double().mean() > 0.999


def test_a_rows_trace_has_what_the_sink_adds() -> None:
    head = opened(*drawn(6), 3.0)
    first, last = (trace_row(recipe, head, 100) for recipe in (FIRST, LAST))
    top = first.ranges[-1].row_max
    assert first.ranges[-1].sink == pytest.approx(math.exp(3.0 - top))
    assert math.log(first.ranges[-1].row_sum) + top == pytest.approx(last.lse, rel=1e-6)


def test_the_triton_kernels_refuse_it() -> None:
    with pytest.raises(RecipeNotSupportedError, match="sink_joins=first"):
        check_kernels_support(FIRST)
