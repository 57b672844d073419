"""Rows that see a single key, and single rows: a decoder's first token, T5's start token, one step of decoding."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from test_monitor_metrics import head_metrics, made_call
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import attn_diag
from attn_diag.reference import AttentionHead, Masking, reference_head
from attn_diag.results.diagnosis import HeadDiagnosis


def inspected(tensors: dict[str, Tensor]) -> tuple[attn_diag.Diagnosis, list[HeadDiagnosis]]:
    found = attn_diag.inspect_captures([attn_diag.Capture.from_tensors(tensors)])
    return found, list(found.captures[0].observations[0].heads)


def one_row(keys: int, seed: int, batch: int = 1) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(batch, 2, t, 64, generator=generator).bfloat16() for t in (1, keys, keys))
    return {"q": q, "k": k, "v": v, "do": torch.randn(q.shape, generator=generator).bfloat16()}


def test_the_reference_has_no_dq_and_dk_of_a_single_key() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v, do = (torch.randn(9, 24, generator=generator, dtype=torch.float64) for _ in range(4))
    head = AttentionHead(q, k, v, do, 0.2, Masking(window=(0, 0)))
    found = reference_head(head)
    assert found.dq is not None
    assert found.dk is not None
    assert not found.dq.any()
    assert not found.dk.any()
    with_sinks = reference_head(replace(head, sink=0.0))
    assert with_sinks.dq is not None
    assert with_sinks.dq.abs().amax(1).gt(1e-6).all()  # the sink is a key more


def test_the_monitor_has_no_share_of_a_dq_that_is_zero() -> None:
    """Chronos-Bolt's decoder has one token: its dQ of 1e-16 alarmed as "more than the gradient itself"."""
    call = made_call(window=(0, 0))
    assert call.do is not None
    wide = call.do * 2.0 ** torch.arange(-40, 40, 2.5)  # whose products with V no float64 sum holds
    found = head_metrics(replace(call, do=wide.bfloat16()))
    for name in ("dq_share", "dw_q_share", "conditioning", "dq_error"):
        assert getattr(found, name).isnan().all(), name
    assert head_metrics(made_call()).dq_share.isfinite().all()


def test_a_dq_that_should_be_zero_is_told_so_and_judged() -> None:
    x = one_row(1, 3)
    found, heads = inspected({**x, "o": x["v"], "dq": torch.randn(x["q"].shape).bfloat16()})
    assert all(head.verdict is not None and head.verdict.labels == ("wrong",) for head in heads)
    words = " ".join(str(attn_diag.explain(found, 0)).split())
    assert "The true dQ is 0" in words
    assert "where the true dQ is 0" in words
    assert "needs dO" not in words
    assert "without dO" not in words
    assert "the error of the kernel's own dQ" not in words


@pytest.mark.parametrize("seed", [100, 101, 102])
def test_one_row_is_no_bias(seed: int) -> None:
    """Plain torch casts P, whose error all features of a row share: they are no independent clusters of its mean."""
    for keys in (2, 3):
        x = one_row(keys, seed)
        scores = (x["q"] @ x["k"].mT) * 0.125
        _, heads = inspected({**x, "o": scores.softmax(-1) @ x["v"]})
        assert not any("biased" in head.verdict.labels for head in heads if head.verdict is not None)


def test_one_row_of_a_sound_kernel_is_not_wrong() -> None:
    for seed in range(4):
        x = one_row(5, seed)
        q, k, v = (x[name].requires_grad_() for name in "qkv")
        o = scaled_dot_product_attention(q, k, v)
        dq, dk, dv = torch.autograd.grad(o, (q, k, v), x["do"])
        given = {name: t.detach() for name, t in x.items()} | {"o": o.detach(), "dq": dq, "dk": dk, "dv": dv}
        assert all(head.verdict is None or "wrong" not in head.verdict.labels for head in inspected(given)[1])


@pytest.mark.parametrize("lost", ["the last key is stale", "the last key is missing"])
def test_a_cache_that_lacks_its_last_key_is_wrong_by_name(lost: str) -> None:
    """One row a head: its 64 errors of one key were counted as a single number, and called lossy, 20 to 70 times."""
    x = one_row(60, 5)
    seen = [*range(59), 58] if "stale" in lost else list(range(59))
    o = scaled_dot_product_attention(x["q"].double(), x["k"][:, :, seen].double(), x["v"][:, :, seen].double())
    capture = attn_diag.Capture.from_tensors({**x, "do": None, "o": o.bfloat16()}, causal="bottom-right")
    heads = attn_diag.inspect_captures([capture], device="cpu").captures[0].observations[0].heads
    words = "last key is the one before it" if "stale" in lost else "a causal border one key earlier"
    assert all(h.verdict is not None and h.verdict.labels == ("wrong",) for h in heads)
    assert all(words in next(q.words for q in h.quantities if q.quantity == "o") for h in heads)


@pytest.mark.parametrize("keys", [24, 60, 300])
@pytest.mark.parametrize("coarse", ["scores", "keys in 8 bits", "values in 8 bits"])
def test_single_rows_of_coarse_kernels_are_not_wrong(coarse: str, keys: int) -> None:
    x = one_row(keys, keys + 1)
    q, k, v = (x[name].double() for name in "qkv")
    k = k.to(torch.float8_e4m3fn).double() if "keys" in coarse else k
    v = v.to(torch.float8_e4m3fn).double() if "values" in coarse else v
    scores = 3 * q @ k.mT / 8
    o = (scores.bfloat16().double() if coarse == "scores" else scores).softmax(-1) @ v
    capture = attn_diag.Capture.from_tensors({**x, "do": None, "o": o.bfloat16()}, causal="bottom-right", scale=3 / 8)
    heads = attn_diag.inspect_captures([capture], device="cpu").captures[0].observations[0].heads
    assert not any(h.verdict is not None and "wrong" in h.verdict.labels for h in heads)


def test_an_out_with_nan_in_rows_that_see_no_key_is_not_said_to_be_right() -> None:
    generator = torch.Generator().manual_seed(2)
    q, k, v, do = (torch.randn(1, 1, t, 16, generator=generator).bfloat16() for t in (40, 24, 24, 40))
    single = [t[0, 0].double() for t in (q, k, v, do)]
    head = AttentionHead(single[0], single[1], single[2], single[3], 0.25, Masking("bottom-right"))
    found = reference_head(head)
    assert found.dq is not None
    o, dq = (t.bfloat16()[None, None] for t in (found.out, found.dq))
    o[:, :, :16], dq[:, :, :16] = torch.nan, torch.nan
    capture = attn_diag.Capture.from_tensors(
        {"q": q, "k": k, "v": v, "do": do, "o": o, "dq": dq}, causal="bottom-right"
    )
    diagnosis = attn_diag.inspect_captures([capture], device="cpu")
    assert diagnosis.findings[0].right == ()
    verdict = diagnosis.captures[0].observations[0].heads[0].verdict
    assert verdict is not None
    assert any("O has 16 rows with NaN or Inf among the rows that see no key" in reason for reason in verdict.reasons)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("what", ["q = 0", "one key", "two keys"])
def test_rows_that_are_one_row_are_not_counted_as_independent(what: str, dtype: torch.dtype) -> None:
    """Such keys of dV have one value and one error: no feature stands out because each of them repeats it."""
    answers = []
    for length in (80, 112, 191, 256):
        g = torch.Generator().manual_seed(0)
        q, k, v, do = (torch.randn(1, 1, length, 24, generator=g) for _ in range(4))
        q = q * 0 if what == "q = 0" else q
        k = k if what == "q = 0" else k[:, :, torch.arange(length) % (1 if what == "one key" else 2)]
        q, k, v, do = (x.to(dtype).contiguous() for x in (q, k, v, do))
        leaves = [x.requires_grad_() for x in (q, k, v)]
        o = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        dv = torch.autograd.grad(o, leaves, do)[2]
        given = [x.detach() for x in (q, k, v)]
        found = attn_diag.inspect(*given, o=o.detach(), do=do, dv=dv, device="cpu")
        answers.append("wrong" in found.labels)
        bad = dv.clone()
        bad[..., bad[0, 0, 0].abs().argmax()] *= -1
        assert "wrong" in attn_diag.inspect(*given, o=o.detach(), do=do, dv=bad, device="cpu").labels
    assert not any(answers)
