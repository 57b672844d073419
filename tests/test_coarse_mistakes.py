"""Mistakes whose errors are no larger than coarse rounding's are named where nothing but they can have made them."""

from __future__ import annotations

import re

import pytest
import torch
from builders import some
from torch import Tensor

import attn_diag
from attn_diag.kernels.formats import Mode, parse, round_to
from attn_diag.results.diagnosis import HeadDiagnosis

ROWS, WIDTH = 96, 32


def call(seed: int, apart: float = 1.0) -> dict[str, Tensor]:
    """q, k, v, dO, O and the gradients of three heads in BF16, whose V have as much of their own as ``apart``."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v, do = (torch.randn(1, 3, ROWS, WIDTH, generator=generator) for _ in range(4))
    v = torch.randn(WIDTH, generator=generator) + apart * v
    x = {"q": q, "k": k, "v": v, "do": do}
    x = {name: tensor.bfloat16().double() for name, tensor in x.items()}
    probs = probs_of(x)
    o = exact_out(x).bfloat16().double()
    delta = (x["do"] * o).sum(-1, keepdim=True)
    ds = (probs * (x["do"] @ x["v"].mT - delta)).bfloat16().double() / WIDTH**0.5
    return x | {"o": o, "dq": ds @ x["k"], "dk": ds.mT @ x["q"], "dv": probs.bfloat16().double().mT @ x["do"]}


def probs_of(x: dict[str, Tensor]) -> Tensor:
    """P of the causal call."""
    scores = x["q"] @ x["k"].mT / WIDTH**0.5
    probs: Tensor = scores.masked_fill(torch.ones(ROWS, ROWS).triu(1) > 0, -torch.inf).softmax(-1)
    return probs


def exact_out(x: dict[str, Tensor]) -> Tensor:
    """O before its last rounding."""
    return probs_of(x).bfloat16().double() @ x["v"]


def inspected(x: dict[str, Tensor]) -> attn_diag.Diagnosis:
    given = {name: tensor if name == "delta" else tensor.bfloat16() for name, tensor in x.items()}
    return attn_diag.inspect(causal=True, device="cpu", **given)  # type: ignore[arg-type]


def heads(x: dict[str, Tensor]) -> tuple[HeadDiagnosis, ...]:
    return tuple(h for h in inspected(x).captures[0].observations[0].heads if h.head is not None)


def test_the_o_of_another_head_is_named_where_heads_are_alike() -> None:
    x = {name: tensor for name, tensor in call(0, 0.05).items() if name in ("q", "k", "v", "o")}
    assert [some(h.verdict).labels for h in heads(x)] == [("clean",)] * 3
    x["o"][:, 1] = x["o"][:, 0]
    words = [q.words for q in heads(x)[1].quantities if q.answer == "wrong"]
    assert len(words) == 1
    assert words[0].endswith("which no rounding makes: all rows are what head 0 gives.")


def test_a_delta_of_a_wrong_o_is_not_called_right() -> None:
    x = call(0)
    x["o"][:, 1] = x["o"][:, 0]
    found = inspected(x | {"delta": (x["do"].bfloat16() * x["o"].bfloat16()).float().sum(-1)})
    (finding,) = [f for f in found.findings if f.label == "wrong"]
    assert finding.right == ("dv",)


def test_whether_a_coarse_head_is_wrong_does_not_depend_on_the_heads_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scale 3 % off is as coarse as roundings are, and is told from them in every head of a layer of many."""
    monkeypatch.setattr("attn_diag.analyses.patterns.of_capture._MOST_QUANTITIES", 1)
    x = {name: tensor for name, tensor in call(0).items() if name in ("q", "k", "v")}
    scaled = torch.nn.functional.scaled_dot_product_attention(1.03 * x["q"], x["k"], x["v"], is_causal=True)
    found = heads(x | {"o": scaled})
    assert [some(h.verdict).labels for h in found] == [("wrong",)] * 3
    assert all("are what the scale 0.182" in h.quantities[0].words for h in found)


def test_a_factor_near_one_is_named() -> None:
    x = call(0)
    coarse = x | {"dv": x["dv"] * (1 + 0.01 * torch.randn(x["dv"].shape, generator=torch.Generator().manual_seed(1)))}
    said = {q.quantity: q.words for q in heads(coarse | {"dq": x["dq"] * (1 + 2.0**-8)})[0].quantities}
    assert re.search(r"dQ has .*; all rows are 1\.00\d+ times the true ones, and but for that as good as a", said["dq"])
    assert "times the true ones" not in said["dv"]
    assert "times the true ones" not in said["dk"]


def test_so_large_an_error_that_nothing_explains_may_be_a_fault() -> None:
    """Every second row has a fifth of the row before it: 70 times, but no more than 8-bit operands may leave."""
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, 256, 64, generator=draw).bfloat16() for _ in range(3))
    o = (q.double() @ k.double().mT / 8).softmax(-1) @ v.double()
    o[:, :, 1::2] = 0.8 * o[:, :, 1::2] + 0.2 * o[:, :, ::2]
    verdict = attn_diag.inspect(q, k, v, o=o.bfloat16(), device="cpu").captures[0].observations[0].heads[0].verdict
    assert verdict is not None
    assert "wrong" in verdict.labels or any("may also be wrong mathematics" in s for s in verdict.suggestions)
    scores = q.double() @ k.double().mT / 8
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    coarse = weights.to(torch.float8_e4m3fn).double() @ v.double() / weights.sum(-1, keepdim=True)
    found = attn_diag.inspect(q, k, v, o=coarse.bfloat16(), device="cpu").captures[0].observations[0].heads[0].verdict
    assert found is not None
    assert not any("wrong mathematics" in s for s in found.suggestions)


@pytest.mark.parametrize("name", ["o", "dv"])
def test_a_last_cast_that_truncates_is_no_factor(name: str) -> None:
    """What is rounded toward zero is 0.997 times the true one in the mean: no constant that is a little off."""
    x = call(0)
    x[name] = round_to(x[name] if name == "dv" else exact_out(x), parse(f"bf16:{Mode.TOWARD_ZERO}"))
    for head in heads(x):
        words = {q.quantity: q.words for q in head.quantities if q.answer == "lossy"}
        assert name in words
        assert "true ones, as a last cast that rounds toward zero leaves them" in words[name]


def test_a_truncated_p_makes_a_factor_of_truncation() -> None:
    x = call(0)
    x["dv"] = round_to(probs_of(x), parse(f"bf16:{Mode.TOWARD_ZERO}")).mT @ x["do"]
    (words,) = [q.words for q in heads(x)[0].quantities if q.quantity == "dv"]
    assert "all keys are 0.99722 times the true ones, as a cast that truncates makes them" in words


def _said_of_o(times: float, seed: int, softcap: float | None = None, **fault: float | str) -> list[str]:
    """What is said of O of two heads of a fused kernel with other scores."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, 2, 256, 32, generator=generator) for _ in range(3))
    q, k, v = ((times * q).bfloat16(), k.bfloat16(), v.bfloat16())
    scores = q.double() @ k.double().mT / 32**0.5 * float(fault.get("factor", 1.0))
    if "cap" in fault:
        scores = float(fault["cap"]) * (scores / float(fault["cap"])).tanh()
    if "rounded" in fault:
        scores = round_to(scores, parse(str(fault["rounded"])))
    scores = scores.masked_fill(torch.ones(256, 256).triu(1) > 0, -torch.inf)
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    o = (weights.bfloat16().double() @ v.double() / weights.sum(-1, keepdim=True)).bfloat16()
    found = attn_diag.inspect(q, k, v, o=o, causal=True, softcap=softcap, device="cpu")
    heads = [h for h in found.captures[0].observations[0].heads if h.head is not None]
    return [quantity.words for h in heads for quantity in h.quantities if quantity.quantity == "o"]


def test_a_softcap_that_is_a_little_off_is_no_other_scale() -> None:
    """33.3 in BF16: a larger scale makes an error like it, and was said to be it."""
    for words in _said_of_o(20, 1, softcap=33.3, cap=33.25):
        assert re.search(r"all rows are what a softcap 0\.99\d+ \(± [\d.e-]+\) times the stated one", words), words


@pytest.mark.parametrize(
    ("factor", "constant"),
    [(1.4453125 / 1.4426950408889634, "log2(e) in BF16 makes 1.00181"), (1.004, ""), (0.9975, "truncates")],
    ids=["log2(e) in BF16", "larger", "smaller"],
)
def test_a_scale_that_is_a_little_off_is_measured(factor: float, constant: str) -> None:
    """It was lossy, with the advice to look for a rounding; a truncation that may make it too is told."""
    for words in _said_of_o(2, 1, factor=factor):
        said = re.search(
            r"a softmax scale ([\d.]+) \(± ([\d.e-]+)\) times the stated one gives(.*), and but for", words
        )
        assert said is not None, words
        assert float(said[1]) == pytest.approx(factor, abs=float(said[2]))
        assert constant in said[3]


def test_a_softcap_that_hardly_shows_is_named() -> None:
    for words in _said_of_o(1.0, 3, softcap=30.0):
        assert "times a well-rounded kernel's error" in words
        assert "; all rows are what attention without the softcap gives, and but for that" in words


@pytest.mark.parametrize("rounded", ["bf16", f"bf16:{Mode.TOWARD_ZERO}"])
@pytest.mark.parametrize("times", [1.0, 3.0])
def test_rounded_scores_are_no_other_scale(times: float, rounded: str) -> None:
    """Truncated ones are smaller, too; where nothing tells them apart, that is said."""
    for words in _said_of_o(times, 3, rounded=rounded):
        assert "softcap" not in words
        assert "softmax scale" not in words or "truncates" in words


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_stale_key_is_wrong_where_all_rows_before_it_are_right(dtype: torch.dtype) -> None:
    """Once O is off by more than 8 bits make it, and 37 rows by nothing, no rounding is the cause: it was lossy."""
    generator = torch.Generator().manual_seed(6)
    q, k, v = (torch.randn(1, 1, ROWS, 64, generator=generator).to(dtype) for _ in range(3))
    stale = [x.clone() for x in (k, v)]
    for x in stale:
        x[:, :, 37] = x[:, :, 36]
    scores = (q.float() @ stale[0].float().mT / 8).masked_fill(torch.ones(ROWS, ROWS).triu(1) > 0, -torch.inf)
    o = (scores.softmax(-1) @ stale[1].float()).to(dtype)
    found = attn_diag.inspect(q, k, v, o=o, causal=True, device="cpu").captures[0].observations[0].heads[0]
    (verdict,) = found.quantities
    assert verdict.answer == "wrong"
    assert "rows 0-36 are right; rows 37-95 are" in verdict.words


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("of_k", [4, 8], ids=["k in INT4", "k in INT8"])
@pytest.mark.parametrize("kept", [20, 37])
def test_a_cache_in_four_bits_whose_first_keys_are_in_16_is_not_wrong(dtype: torch.dtype, of_k: int, kept: int) -> None:
    """As of KVQuant or IntactKV: 'rows 0-19 are right; rows 20-95 are 6.7 % off' was no rounding's doing."""
    generator = torch.Generator().manual_seed(9)
    q, k, v = (torch.randn(1, 1, ROWS, 64, generator=generator).to(dtype) for _ in range(3))
    held = [x.clone() for x in (k, v)]
    for x, bits in zip(held, (of_k, 4), strict=True):
        step = x.float().abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 1)
        x[:, :, kept:] = ((x.float() / step).round() * step).to(dtype)[:, :, kept:]
    scores = (q.float() @ held[0].float().mT / 8).masked_fill(torch.ones(ROWS, ROWS).triu(1) > 0, -torch.inf)
    o = (scores.softmax(-1) @ held[1].float()).to(dtype)
    found = attn_diag.inspect(q, k, v, o=o, causal=True, device="cpu").captures[0].observations[0].heads[0]
    assert found.quantities[0].answer == "lossy"


@pytest.mark.parametrize("tile", [16, 32])
def test_sums_that_begin_behind_the_first_tile_are_no_wrong_mathematics(tile: int) -> None:
    """The first rows have a single tile, in which nothing is rounded; here they are cast to 8 bits between tiles."""
    generator = torch.Generator().manual_seed(7)
    q, k, v = (torch.randn(1, 1, ROWS, 64, generator=generator).half() for _ in range(3))
    scores = (q.float() @ k.float().mT / 8).masked_fill(torch.ones(ROWS, ROWS).triu(1) > 0, -torch.inf)
    probs = (scores - scores.amax(-1, keepdim=True)).exp()
    o = torch.zeros(1, 1, ROWS, 64)
    for start in range(0, ROWS, tile):
        more = probs[..., start : start + tile] @ v.float()[:, :, start : start + tile]
        o = more if start == 0 else round_to((o + more).double(), parse("e8m3")).float()
        o[:, :, :tile] = (probs @ v.float())[:, :, :tile]
    o = (o / probs.sum(-1, keepdim=True)).half()
    found = attn_diag.inspect(q, k, v, o=o, causal=True, device="cpu").captures[0].observations[0].heads[0]
    assert found.quantities[0].answer == "lossy"
