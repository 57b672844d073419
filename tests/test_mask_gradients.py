"""The gradient of an additive mask: its float64 reference, captured ones judged, mistakes by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import only
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

import attn_diag
from attn_diag.captures.capture import Capture
from attn_diag.captures.loading import load
from attn_diag.captures.selection import Selection
from attn_diag.errors import InputError
from attn_diag.reference import Alibi, AttentionHead, BoundCollector, Masking, reference_head, row_blocks
from attn_diag.reference.bias_gradient import bias_gradient
from attn_diag.reference.oracle import HeadOracle
from attn_diag.results.quality import QuantityVerdict

BATCH, HEADS, ROWS, KEYS, D = 2, 4, 24, 32, 16
SHAPES = {
    "a learned bias": (1, HEADS, ROWS, KEYS),
    "of every sequence": (BATCH, HEADS, ROWS, KEYS),
    "by key": (HEADS, 1, KEYS),
    "one for all": (ROWS, KEYS),
    "by row": (BATCH, 1, ROWS, 1),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_reference_is_within_its_bound_of_the_oracle(dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(0)
    q, k, v, do = (torch.randn(n, D, generator=g).to(dtype).double() for n in (ROWS, KEYS, KEYS, ROWS))
    masking = Masking("bottom-right", mask=torch.randn(ROWS, KEYS, generator=g), alibi=Alibi(0.25))
    head = AttentionHead(q, k, v, do, D**-0.5, masking)
    collector = BoundCollector(head)
    bounds = collector.bounds(reference_head(head, collector.add, gradient_sums=True))
    oracle = HeadOracle(head)
    for block in row_blocks(head, keep_dprobs=True, block_rows=7):
        found, bound = bias_gradient(head, bounds, block)
        assert isinstance(block.rows, slice)
        for i, row in enumerate(range(block.rows.start, block.rows.stop)):
            own = oracle.row(row)
            truth = torch.tensor(own.dscores(), dtype=torch.float64)
            error = (found[i, own.keys] - truth).abs()
            assert bool((error <= bound[i, own.keys] + 2.0**-53 * truth.abs()).all())
            assert bool((bound[i] < 1e-11).all())


def attended(
    seed: int, shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16, softcap: float | None = None
) -> dict[str, Tensor]:
    """A call by autograd in float64 on BF16 inputs, its outputs rounded once."""
    g = torch.Generator().manual_seed(seed)
    sizes = {"q": (BATCH, HEADS, ROWS, D), "k": (BATCH, 2, KEYS, D), "v": (BATCH, 2, KEYS, D), "mask": shape}
    given = {n: torch.randn(s, generator=g).to(dtype) for n, s in sizes.items()}
    do = torch.randn(BATCH, HEADS, ROWS, D, generator=g).to(dtype)
    wide = {n: t.double().requires_grad_() for n, t in given.items()}
    k, v = (wide[n].repeat_interleave(2, 1) for n in "kv")
    scores = wide["q"] @ k.mT * D**-0.5
    scores = scores if softcap is None else softcap * (scores / softcap).tanh()
    o = (scores + wide["mask"]).softmax(-1) @ v
    grads = torch.autograd.grad(o, list(wide.values()), do.double())
    out = {f"d{n}": t.to(dtype) for n, t in zip(wide, grads, strict=True)}
    return {**given, **out, "o": o.detach().to(dtype), "do": do}


def verdicts(tensors: dict[str, Tensor], **metadata: Any) -> list[QuantityVerdict]:
    capture = Capture.from_tensors(tensors, **metadata)
    heads = attn_diag.inspect_captures([capture], device="cpu").captures[0].observations[0].heads
    return [q for h in heads if h.head is not None for q in h.quantities if q.quantity == "dmask"]


@pytest.mark.parametrize("hidden", [-89.0, -100.0, -1e4])
def test_keys_that_a_large_number_hides_have_a_gradient_that_underflows(hidden: float) -> None:
    """Shifted windows (Swin) add -100: P is e-44 there, 0 in fp32, and so is its gradient."""
    g = torch.Generator().manual_seed(7)
    q, k, v, do = (torch.randn(BATCH, HEADS, KEYS, D, generator=g).bfloat16() for _ in range(4))
    mask = torch.zeros(BATCH, HEADS, KEYS, KEYS, dtype=torch.bfloat16)
    mask[..., 16:] = hidden
    made = [t.requires_grad_() for t in (q, k, v, mask)]
    o = sdpa(made[0], made[1], made[2], attn_mask=made[3])
    given = dict(zip(("q", "k", "v", "mask"), (t.detach() for t in made), strict=True))
    grads = dict(zip(("dq", "dk", "dv", "dmask"), torch.autograd.grad(o, made, do), strict=True))
    assert bool((grads["dmask"][..., 16:].abs() < 1e-37).all())
    found = verdicts({**given, **grads, "o": o.detach(), "do": do})
    assert {q.answer for q in found} == {"good"}, found[0].words


@pytest.mark.parametrize("shape", SHAPES)
def test_a_right_one_is_good(shape: str) -> None:
    found = verdicts(attended(1, SHAPES[shape]), softcap=None)
    assert len(found) == HEADS
    assert {q.answer for q in found} == {"good"}
    assert all(q.relative_error is None if shape == "by row" else (q.relative_error or 1) < 0.01 for q in found)


def test_under_softcap_it_lacks_the_slope() -> None:
    tensors = attended(2, SHAPES["a learned bias"], softcap=1.0)
    assert {q.answer for q in verdicts(tensors, softcap=1.0)} == {"good"}
    scores = (tensors["q"].double() @ tensors["k"].double().repeat_interleave(2, 1).mT * D**-0.5).tanh()
    sloped = attended(2, SHAPES["of every sequence"], softcap=1.0)
    del sloped["dmask"]
    same = {**sloped, "mask": tensors["mask"].expand(BATCH, -1, -1, -1).contiguous()}
    same["dmask"] = ((1 - scores.square()) * _per_item(tensors)).bfloat16()
    found = verdicts({**tensors, "mask": same["mask"], "dmask": same["dmask"]}, softcap=1.0)
    assert {q.answer for q in found} == {"wrong"}
    assert "has the softcap's derivative in it" in found[0].words


def _per_item(t: dict[str, Tensor]) -> Tensor:
    """dS before the slope of every batch item, float64."""
    q, k, v, do, mask = (t[n].double() for n in ("q", "k", "v", "do", "mask"))
    k, v = (x.repeat_interleave(2, 1) for x in (k, v))
    p = ((q @ k.mT * D**-0.5).tanh() + mask).softmax(-1)
    dp = do @ v.mT
    found: Tensor = p * (dp - (p * dp).sum(-1, keepdim=True))
    return found


FAULTS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "sign": (lambda d: -d, "has the wrong sign"),
    "twice": (lambda d: 2 * d, "is twice the true one"),
    "scaled": (lambda d: d * D**-0.5, "is multiplied by the scale"),
    "zero": (torch.zeros_like, "is zero, as if never written"),
    "a mean": (lambda d: d / BATCH, "is a mean over the batch"),
}


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("fault", FAULTS)
def test_mistakes_are_wrong_by_name(fault: str, seed: int) -> None:
    change, words = FAULTS[fault]
    tensors = attended(seed, SHAPES[("a learned bias", "by key")[seed]])
    found = verdicts({**tensors, "dmask": change(tensors["dmask"])})
    assert {q.answer for q in found} == {"wrong"}
    assert all(words in q.words for q in found)


def test_a_lost_batch_item_and_a_wrong_element_are_named() -> None:
    tensors = attended(3, SHAPES["a learned bias"])
    alone = {n: t[:1] for n, t in tensors.items()}
    first = {**alone, "dmask": tensors["dmask"]}
    wide = {n: t.double() for n, t in first.items()}
    k, v = (wide[n].repeat_interleave(2, 1) for n in "kv")
    p = (wide["q"] @ k.mT * D**-0.5 + wide["mask"]).softmax(-1)
    dp = wide["do"] @ v.mT
    lost = (p * (dp - (p * dp).sum(-1, keepdim=True))).bfloat16()
    found = verdicts({**tensors, "dmask": lost})
    assert all(q.answer == "wrong" and "batch item" in q.words for q in found)
    spoilt = tensors["dmask"].clone()
    spoilt[0, 2, 5, 7] += 1
    found = verdicts({**tensors, "dmask": spoilt})
    assert [q.answer for q in found] == ["good", "good", "wrong", "good"]
    assert "1 of 768 elements are beyond what rounding makes" in found[2].words
    spoilt[0, 1, 0, 0] = torch.nan
    assert verdicts({**tensors, "dmask": spoilt})[1].answer == "nonfinite"


def test_shapes_versions_and_what_is_missing(tmp_path: Path) -> None:
    tensors = attended(0, SHAPES["by key"])
    capture = Capture.from_tensors(tensors)
    assert capture.format_version == "1.1"
    again = load(capture.save(tmp_path / "c.safetensors"))
    assert torch.equal(again.tensors["dmask"][...], tensors["dmask"])
    for change, why in (
        ({"dmask": tensors["dmask"][:1]}, "must have the shape of mask"),
        ({"mask": torch.ones(HEADS, 1, KEYS, dtype=torch.bool)}, "no additive 'mask'"),
        ({"do": None, "dq": None, "dk": None, "dv": None}, "'do' is missing"),
    ):
        with pytest.raises(InputError, match=why):
            Capture.from_tensors({**tensors, **change})
    found = attn_diag.inspect_captures([capture], selection=Selection(batches=frozenset([0])), device="cpu").captures[0]
    assert any("dMask (all sequences are needed" in w for w in found.observations[0].heads[0].not_judged)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("expanded", [False, True])
def test_sdpa_with_a_learned_bias_is_captured(expanded: bool, dtype: torch.dtype, tmp_path: Path) -> None:
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(BATCH, HEADS, n, D, generator=g).to(dtype).requires_grad_() for n in (ROWS, KEYS, KEYS))
    bias = torch.randn(1, HEADS, ROWS, KEYS, generator=g).to(dtype).requires_grad_()
    with attn_diag.capture(None, tmp_path, batch=None) as recorder:
        o = sdpa(q, k, v, attn_mask=bias.expand(BATCH, -1, -1, -1) if expanded else bias)
        torch.autograd.backward(o, torch.randn(o.shape, generator=g).to(dtype))
    capture = only(recorder)
    assert bias.grad is not None
    assert tuple(capture.tensors["dmask"].shape) == tuple(capture.tensors["mask"].shape) == tuple(bias.shape)
    torch.testing.assert_close(capture.tensors["dmask"][...], bias.grad, rtol=2**-6, atol=1e-2)
    heads = attn_diag.inspect_captures([capture], device="cpu").captures[0].observations[0].heads
    answers = {q.answer for h in heads for q in h.quantities if q.quantity == "dmask"}
    assert answers <= ({"good"} if dtype == torch.float32 else {"good", "lossy"})


def test_a_bias_that_calls_share_has_no_gradient_of_its_own(tmp_path: Path) -> None:
    q, k, v = (torch.randn(1, HEADS, ROWS, D).requires_grad_() for _ in range(3))
    bias = torch.randn(HEADS, ROWS, ROWS).requires_grad_()
    with attn_diag.capture(None, tmp_path, calls=[0, 1]) as recorder:
        torch.autograd.backward((sdpa(q, k, v, attn_mask=bias) + sdpa(q, k, 2 * v, attn_mask=bias)).sum())
    for path in recorder.written:
        assert "dmask" not in load(path).tensors


def test_of_a_part_of_the_batch_there_is_none(tmp_path: Path) -> None:
    q, k, v = (torch.randn(2, HEADS, ROWS, D).requires_grad_() for _ in range(3))
    bias = torch.randn(HEADS, ROWS, ROWS).requires_grad_()
    with attn_diag.capture(None, tmp_path, batch=[0]) as recorder:
        torch.autograd.backward(sdpa(q, k, v, attn_mask=bias).sum())
    capture = only(recorder)
    assert "dmask" not in capture.tensors
    assert "wrong" not in {
        q.answer
        for h in attn_diag.inspect_captures([capture], device="cpu").captures[0].observations[0].heads
        for q in h.quantities
    }


def test_ranks_that_share_a_mask_add_its_gradient_up() -> None:
    from attn_diag.captures.merge import merged_over_ranks

    tensors, parts = attended(0, SHAPES["a learned bias"]), []
    per = _halves(tensors)
    for rank in range(2):
        own = {n: t if n == "mask" else t[rank : rank + 1] for n, t in tensors.items()}
        parts.append(Capture.from_tensors({**own, "dmask": per[rank]}, rank=rank, step=1, layer=0,
                                          extra={"run": "r", "world_size": "2", "call": "0"}))  # fmt: skip
    (capture,), said = merged_over_ranks(parts)
    assert not said
    found = attn_diag.inspect_captures([capture], device="cpu").captures[0].observations[0].heads
    assert {q.answer for h in found for q in h.quantities if q.quantity == "dmask"} == {"good"}
    replaced = replace(capture, tensors={**capture.tensors, "dmask": per[0]})
    found = attn_diag.inspect_captures([replaced], device="cpu").captures[0].observations[0].heads
    assert {q.answer for h in found for q in h.quantities if q.quantity == "dmask"} == {"wrong"}


def _halves(t: dict[str, Tensor]) -> list[Tensor]:
    q, k, v, do, mask = (t[n].double() for n in ("q", "k", "v", "do", "mask"))
    k, v = (x.repeat_interleave(2, 1) for x in (k, v))
    p = (q @ k.mT * D**-0.5 + mask).softmax(-1)
    dp = do @ v.mT
    found = p * (dp - (p * dp).sum(-1, keepdim=True))
    return [found[b : b + 1].float() for b in range(BATCH)]


def t5(implementation: str, dtype: torch.dtype) -> Any:
    transformers = pytest.importorskip("transformers")
    config = transformers.T5Config(
        vocab_size=61, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, dropout_rate=0.0,
        attn_implementation=implementation, decoder_start_token_id=0, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.T5ForConditionalGeneration(config).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.15)
    return model


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("implementation", "dtype"), [("sdpa", torch.bfloat16), ("eager", torch.float32)])
def test_t5_is_captured_with_its_relative_position_bias(
    implementation: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    model, ids = t5(implementation, dtype), torch.randint(61, (2, 14), generator=torch.Generator().manual_seed(1))
    with attn_diag.capture(model, tmp_path, batch=None) as recorder:
        torch.autograd.backward(model(input_ids=ids, labels=ids).loss)
    assert len(recorder.written) == 6
    for path in recorder.written:
        capture = load(path)
        learned = implementation == "sdpa" and "SelfAttention" in capture.metadata.extra["module"]
        assert ("dmask" in capture.tensors) == learned
        found = attn_diag.inspect_captures([capture], device="cpu").captures[0]
        assert found.assumptions.ok
        heads = found.observations[0].heads
        assert not any("wrong" in h.verdict.labels for h in heads if h.verdict)
        assert {q.answer for h in heads for q in h.quantities if q.quantity == "dmask"} == (
            {"good"} if learned else set()
        )


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_t5s_eager_softmax_in_bf16_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ids = torch.randint(61, (2, 14))
    model = t5("eager", torch.bfloat16)
    with attn_diag.capture(model, tmp_path) as recorder:
        model(input_ids=ids, labels=ids)
    assert not recorder.written
    assert "position_bias not supported in torch.bfloat16 eager attention, sdpa is" in caplog.text


def test_a_small_gradient_is_not_called_zero() -> None:
    tensors = attended(0, SHAPES["a learned bias"])
    found = verdicts({**tensors, "dmask": tensors["dmask"] / 64})
    assert {q.answer for q in found} == {"wrong"}
    assert not any("is zero" in q.words for q in found)
