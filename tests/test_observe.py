"""Attention functions that nobody knows, under ``attn_diag.observe``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from builders import holds, some
from tiny_models import only
from torch import Tensor, nn

import attn_diag


def plain(q: Tensor, k: Tensor, v: Tensor, scale: float, hidden: Tensor) -> Tensor:
    return (q @ k.mT * scale).masked_fill(hidden, -torch.inf).softmax(-1) @ v


@attn_diag.observe(causal=True)
def of_heads(query: Tensor, key: Tensor, value: Tensor, *, softmax_scale: float) -> Tensor:
    rows = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril()
    return plain(query, key, value, softmax_scale, ~rows)


@attn_diag.observe(layout="BTHD")
def of_tokens(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> tuple[Tensor, Tensor]:
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    rows = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(0 if is_causal else k.shape[2])
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~rows, -torch.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2), scores.logsumexp(-1).detach()


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(32, 96, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (4, 8)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return of_heads(q, k, v, softmax_scale=0.25)


def operands(*shape: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator).requires_grad_() for _ in range(3)]


def test_a_plain_attention_of_a_model_is_captured(tmp_path: Path) -> None:
    torch.manual_seed(0)
    layer, x = Layer(), torch.randn(2, 12, 32)
    alone = layer(x)
    with attn_diag.capture(layer, tmp_path) as recorder:
        watched = layer(x)
        torch.autograd.backward(watched.square().sum())
    assert torch.equal(alone, watched)
    capture = only(recorder)
    assert (capture.metadata.causal, capture.metadata.scale) == ("top-left", 0.25)
    assert "of_heads" in str(capture.metadata.kernel)
    assert {"q", "k", "v", "o", "do", "dq", "dk", "dv", "x", "w_q"} <= capture.tensors.keys()
    assert holds(capture)


@pytest.mark.parametrize("is_causal", [False, True])
def test_tokens_first_and_an_lse(is_causal: bool, tmp_path: Path) -> None:
    q, k, v = operands(2, 12, 4, 8)
    with attn_diag.capture(None, tmp_path, batch=None) as recorder:
        o, lse = of_tokens(q, k, v, is_causal=is_causal)
        torch.autograd.backward(o.square().sum())
    capture = only(recorder)
    assert capture.metadata.causal == ("top-left" if is_causal else "none")
    assert torch.equal(capture.tensors["lse"][...], lse)
    assert torch.equal(capture.tensors["dk"][...], some(k.grad).transpose(1, 2))
    assert holds(capture)


def test_what_runs_inside_is_told_of_instead(tmp_path: Path) -> None:
    @attn_diag.observe
    def wrapped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v)

    with attn_diag.capture(None, tmp_path) as recorder:
        wrapped(*operands(1, 2, 8, 8))
    assert "SDPA" in str(only(recorder).metadata.kernel)


@pytest.mark.parametrize("lost", ["detached", "returned None", ""])
def test_a_gradient_that_does_not_come_is_told(lost: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A k that was detached inside left a capture without dK, and no word."""

    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            ctx.save_for_backward(q, k, v)
            return plain(q, k, v, 0.3, torch.zeros(8, 8, dtype=torch.bool))

        @staticmethod
        def backward(ctx: Any, do: Tensor) -> Any:
            with torch.enable_grad():
                q, k, v = (t.detach().requires_grad_() for t in ctx.saved_tensors)
                o = plain(q, k, v, 0.3, torch.zeros(8, 8, dtype=torch.bool))
            dq, dv = torch.autograd.grad(o, (q, v), do)
            return dq, None, dv

    @attn_diag.observe
    def theirs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if lost == "returned None":
            return Own.apply(q, k, v)  # type: ignore[no-untyped-call, no-any-return]
        return plain(q, k.detach() if lost else k, v, 0.3, torch.zeros(8, 8, dtype=torch.bool))

    with attn_diag.capture(None, tmp_path) as recorder:
        torch.autograd.backward(theirs(*operands(1, 2, 8, 8)).square().sum())
    assert ("dk" in only(recorder).tensors) == (not lost)
    assert ("no gradient came to k from an attention call whose O has one" in caplog.text) == bool(lost)
    frozen = [t.detach() if n == 1 else t for n, t in enumerate(operands(1, 2, 8, 8))]
    caplog.clear()
    with attn_diag.capture(None, tmp_path / "frozen"):
        torch.autograd.backward(of_heads(*frozen, softmax_scale=0.3).square().sum())
    assert not caplog.text
    # q's alone were asked for, of a call that is as it should be.
    q, k, v = operands(1, 2, 8, 8)
    with attn_diag.capture(None, tmp_path / "of q"):
        torch.autograd.grad(of_heads(q, k, v, softmax_scale=0.3).square().sum(), [q])
    assert "no gradient came to k and v" in caplog.text
    assert "or gradients of other tensors alone be asked for (torch.autograd.grad," in caplog.text


def test_the_debugger_stops_behind_a_wrong_one() -> None:
    found: list[Any] = []

    @attn_diag.observe
    def wrong(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        o: Tensor = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v
        return o.index_fill(2, torch.arange(40, 64), 0.0)

    with attn_diag.break_if(wrong=True, hook=found.append):
        wrong(*(t.detach().bfloat16() for t in operands(1, 2, 64, 16)))
    assert len(found) == 1


def test_it_stays_itself_and_is_passed_by_in_a_graph() -> None:
    assert of_heads.__name__ == "of_heads"
    compiled: Any = torch.compile(of_heads, fullgraph=True, backend="eager")
    q, k, v = operands(1, 2, 8, 8)
    assert torch.equal(compiled(q, k, v, softmax_scale=0.5), of_heads(q, k, v, softmax_scale=0.5))


def test_what_cannot_be_observed_says_what_is_missing() -> None:
    def packed(qkv: Tensor) -> Tensor:
        return qkv

    with pytest.raises(attn_diag.InputError, match=r"it has qkv, and none for q, k, v"):
        attn_diag.observe(packed)
    with pytest.raises(attn_diag.InputError, match="does not say which arguments it has"):
        attn_diag.observe(torch.nn.functional.scaled_dot_product_attention)  # of C: it was a ValueError of inspect's
    with pytest.raises(attn_diag.InputError, match="layout must be"):
        attn_diag.observe(layout="HTD")(of_heads)  # type: ignore[call-overload]
    with pytest.raises(attn_diag.InputError, match="causal must be"):
        attn_diag.observe(causal="left")(of_heads)  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("options", "given", "returned"),
    [({"returns_layout": "BTHD"}, "bhtd", "bthd"), ({}, "bhtd", "bt(hd)"), ({"layout": "BTHD"}, "bthd", "bt(hd)"),
     ({"layout": "BTHD", "returns_layout": "BHTD"}, "bthd", "bhtd")],
)  # fmt: skip
def test_o_is_laid_out_otherwise(options: dict[str, Any], given: str, returned: str, tmp_path: Path) -> None:
    """As where heads are put side by side before the output projection (nanoGPT), or turned (transformers, litgpt)."""

    @attn_diag.observe(**options, scale=0.25)
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t if given == "bhtd" else t.transpose(1, 2) for t in (q, k, v))
        o = plain(q, k, v, 0.25, torch.zeros(12, 12, dtype=torch.bool))
        if returned == "bhtd":
            return o
        return o.transpose(1, 2) if returned == "bthd" else o.transpose(1, 2).flatten(2)

    inputs = operands(*((2, 4, 12, 8) if given == "bhtd" else (2, 12, 4, 8)))
    with attn_diag.capture(None, tmp_path, batch=None) as recorder:
        torch.autograd.backward(attend(*inputs).square().sum())
    capture = only(recorder)
    assert capture.tensors["o"].shape == capture.tensors["do"].shape == (2, 4, 12, 8)
    assert holds(capture)


def test_an_o_that_fits_no_layout_says_what_was_expected(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    @attn_diag.observe
    def turned(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return plain(q, k, v, 1, torch.zeros(12, 12, dtype=torch.bool)).transpose(1, 2)

    with attn_diag.capture(None, tmp_path) as recorder:
        turned(*operands(2, 4, 12, 8))
    assert list(recorder.dropped.values()) == [1]
    assert [one.getMessage() for one in caplog.records] == [
        f"a call was not recorded: {turned.__module__}.{turned.__qualname__} returned O of shape [2, 12, 4, 8] for q "
        "of [2, 4, 12, 8]; expected [B, H, Tq, Dv] or [B, Tq, H * Dv]; "
        'state returns_layout="BTHD"'
    ]


def test_heads_that_are_sequences(tmp_path: Path) -> None:
    """[B * H, T, D], as for torch.bmm, with a mask each."""

    @attn_diag.observe(scale=0.25)
    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return plain(q, k, v, 0.25, ~mask)

    (q, k, v), draw = operands(6, 12, 8), torch.Generator().manual_seed(2)
    mask = torch.rand(6, 12, 12, generator=draw) < 0.7
    mask |= torch.eye(12, dtype=torch.bool)
    with attn_diag.capture(None, tmp_path, batch=None) as recorder:
        torch.autograd.backward(attend(q, k, v, mask).square().sum())
    capture = only(recorder)
    assert capture.tensors["q"].shape == (6, 1, 12, 8)
    assert holds(capture)


def test_that_known_attention_inside_is_judged_alone_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Heads of k in the wrong order, or a scale applied twice, around SDPA passed without a word."""

    @attn_diag.observe(causal=True)
    def scaled_twice(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(q * q.shape[-1] ** -0.5, k, v, is_causal=True)

    q, k, v = operands(1, 2, 12, 8)
    with attn_diag.capture(None, tmp_path, calls=None) as recorder:
        for _ in range(2):
            scaled_twice(q, k, v)
        of_heads(q, k, v, softmax_scale=0.25)
    assert ["SDPA" in str(attn_diag.load(p).metadata.kernel) for p in recorder.written] == [True, True, False]
    (said,) = (r.getMessage() for r in caplog.records if "is observed" in r.getMessage())
    assert "scaled_twice is observed, and calls attention that is known: that is captured and judged" in said
