"""Every way in which code calls attention: torch's functions under any name, flash_attn's, our own."""

from __future__ import annotations

import contextlib
import logging
import math
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from builders import holds, some
from tiny_models import (
    BATCH,
    HEADS,
    LENGTH,
    WIDTH,
    nano_gpt,
    next_token_loss,
    only,
    padding,
    tokens,
    transformer_encoder,
    written,
)
from torch import Tensor, nn
from torch.nn import functional

# The name that nothing but a search of this module's variables finds.
from torch.nn.functional import scaled_dot_product_attention as sdpa

import attn_diag
from attn_diag.captures.capture import Capture

DIM = WIDTH // HEADS


def inputs(seed: int = 0, heads: int = HEADS, layout: str = "BHTD") -> Tensor:
    shape = (BATCH, heads, LENGTH, DIM) if layout == "BHTD" else (BATCH, LENGTH, heads, DIM)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), requires_grad=True)


def weights_of(o: Tensor) -> Tensor:
    """dO: the loss is its inner product with o."""
    return torch.randn(o.shape, generator=torch.Generator().manual_seed(9)).to(o.dtype)


def captured_call(call: Callable[[], Tensor], folder: Path) -> Capture:
    """One call outside any module, with its backward."""
    with attn_diag.capture(None, folder, batch=None) as recorder:
        o = call()
        torch.autograd.backward((o * weights_of(o)).sum())
    return only(recorder)


def assert_gradients(capture: Capture, q: Tensor, k: Tensor, v: Tensor, turn: bool = False) -> None:
    for name, t in (("dq", q), ("dk", k), ("dv", v)):
        assert t.grad is not None
        assert torch.equal(capture.tensors[name][...], t.grad.transpose(1, 2) if turn else t.grad)


def bias() -> Tensor:
    return 2 * torch.randn(BATCH, HEADS, LENGTH, LENGTH, generator=torch.Generator().manual_seed(5))


# Arguments of scaled_dot_product_attention, and of which the key heads are.
SDPA_CALLS: dict[str, tuple[dict[str, Any], int]] = {
    "plain": ({}, HEADS),
    "causal": ({"is_causal": True}, HEADS),
    "scale": ({"scale": 0.7}, HEADS),
    "bool mask": ({"attn_mask": torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(3)}, HEADS),
    "float mask": ({"attn_mask": bias()}, HEADS),
    "mask that learns": ({"attn_mask": bias().requires_grad_()}, HEADS),
    "grouped": ({"enable_gqa": True, "is_causal": True}, 2),
}


@pytest.mark.parametrize("how", ["by name", "of the module"])
@pytest.mark.parametrize("backend", ["default", "math"])
@pytest.mark.parametrize("case", SDPA_CALLS)
def test_scaled_dot_product_attention(case: str, backend: str, how: str, tmp_path: Path) -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    options, key_heads = SDPA_CALLS[case]
    q, k, v = inputs(1), inputs(2, key_heads), inputs(3, key_heads)

    def call() -> Tensor:
        function = sdpa if how == "by name" else functional.scaled_dot_product_attention
        backends = [SDPBackend.MATH] if backend == "math" else list(SDPBackend.__members__.values())
        with sdpa_kernel(backends):
            return function(q, k, v, **options)

    capture = captured_call(call, tmp_path)
    assert holds(capture)
    assert_gradients(capture, q, k, v)
    tensors = capture.tensors
    assert torch.equal(tensors["do"][...], weights_of(tensors["o"][...]))
    assert all(torch.equal(tensors[name][...], t) for name, t in (("q", q), ("k", k), ("v", v)))
    assert torch.equal(tensors["o"][...], call())
    math_path = "math" in str(capture.metadata.kernel)
    assert math_path == ("lse" not in tensors)
    assert capture.metadata.notes is None


@pytest.mark.parametrize("backend", ["MATH", "FLASH_ATTENTION"])
def test_an_input_that_others_use_too_has_the_gradient_of_this_call(backend: str, tmp_path: Path) -> None:
    """One query over two sets of keys, as decoupled cross attention has it, and a loss of its own."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v, other = inputs(1), inputs(2), inputs(3), inputs(4)
    optimizer = torch.optim.SGD([q], lr=0.0)
    watching = attn_diag.capture(None, tmp_path, batch=None, calls=None)
    with sdpa_kernel([getattr(SDPBackend, backend)]), watching as recorder:
        with attn_diag.Monitor(None, every=1) as monitor:
            for _ in range(3):
                first, second = sdpa(q, k, v, is_causal=True), sdpa(q, other, v)
                torch.autograd.backward((first * weights_of(first)).sum() + (second**2).sum() + (q**2).sum())
                optimizer.step()
                optimizer.zero_grad()
        assert not monitor.alarms
    captures = written(recorder)
    assert len(captures) == 6
    for capture in captures:
        # torch's own flash node of a CPU has them by itself.
        assert "totals" not in str(capture.metadata.notes)
        exact = [capture.tensors[n][...].double().requires_grad_() for n in "qkv"]
        o = sdpa(exact[0], exact[1], exact[2], is_causal=capture.metadata.causal != "none")
        truth = torch.autograd.grad(o, exact, capture.tensors["do"][...].double())
        for name, gradient in zip(("dq", "dk", "dv"), truth, strict=True):
            torch.testing.assert_close(capture.tensors[name][...].double(), gradient, rtol=1e-4, atol=1e-5)


def test_a_mask_that_was_made_of_an_input_is_not_the_calls(tmp_path: Path) -> None:
    """As Doge of transformers makes it of v: dV is the call's own gradient, and v has another by way of the mask."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v = inputs(1), inputs(2), inputs(3)

    def call() -> Tensor:
        with sdpa_kernel([SDPBackend.MATH]):
            return sdpa(q, k, v, attn_mask=v.sum(-1)[:, :, None, :].expand(*q.shape[:3], -1))

    capture = captured_call(call, tmp_path)
    assert "totals" not in str(capture.metadata.notes)
    exact = [capture.tensors[n][...].double().requires_grad_() for n in "qkv"]
    o = sdpa(exact[0], exact[1], exact[2], attn_mask=capture.tensors["mask"][...].double())
    truth = torch.autograd.grad(o, exact, capture.tensors["do"][...].double())
    for name, gradient in zip(("dq", "dk", "dv"), truth, strict=True):
        torch.testing.assert_close(capture.tensors[name][...].double(), gradient, rtol=1e-4, atol=1e-5)


def test_an_input_that_is_used_in_several_places_has_their_sum(tmp_path: Path) -> None:
    """Attention in blocks of rows, of a q and a k that a regulariser uses too: gradients are the call's."""

    @attn_diag.observe(causal=True)
    def in_blocks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = []
        for first in range(0, q.shape[2], 8):
            rows = torch.arange(first, min(first + 8, q.shape[2]))
            scores = q[:, :, rows] @ k.mT * q.shape[3] ** -0.5
            out.append(scores.masked_fill(torch.arange(k.shape[2]) > rows[:, None], -torch.inf).softmax(-1) @ v)
        return torch.cat(out, 2)

    q, k, v = inputs(1), inputs(2), inputs(3)
    optimizer = torch.optim.SGD([q], lr=0.0)
    with attn_diag.capture(None, tmp_path, batch=None) as recorder:
        o = in_blocks(q, k, v)
        torch.autograd.backward((o * weights_of(o)).sum() + (q**2).sum() + (k**2).sum())
        optimizer.step()
    (capture,) = written(recorder)
    assert "totals" not in str(capture.metadata.notes)
    exact = [capture.tensors[n][...].double().requires_grad_() for n in "qkv"]
    truth = torch.autograd.grad(
        sdpa(exact[0], exact[1], exact[2], is_causal=True), exact, capture.tensors["do"][...].double()
    )
    for name, gradient in zip(("dq", "dk", "dv"), truth, strict=True):
        torch.testing.assert_close(capture.tensors[name][...].double(), gradient, rtol=1e-4, atol=1e-5)


def test_one_tensor_given_twice(tmp_path: Path) -> None:
    # What arrives at it is the sum of two gradients: with the math path neither is known.
    q, k = inputs(1), inputs(2)

    def call() -> Tensor:
        return sdpa(q, k, k, attn_mask=bias().requires_grad_())

    capture = captured_call(call, tmp_path)
    assert {"do", "dq"} <= capture.tensors.keys()
    assert not {"dk", "dv"} & capture.tensors.keys()


def test_a_name_imported_meanwhile(tmp_path: Path) -> None:
    def call() -> Tensor:
        from torch.nn.functional import scaled_dot_product_attention as late

        return late(inputs(1), inputs(2), inputs(3))

    assert holds(captured_call(call, tmp_path))


def test_dropout_is_refused_by_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with attn_diag.capture(None, tmp_path) as recorder:
        sdpa(inputs(1), inputs(2), inputs(3), dropout_p=1.0)  # nothing is kept
    assert not recorder.written
    assert "attention dropout 1 is on" in caplog.text
    assert list(recorder.dropped.values()) == [1]


MASKS: dict[str, dict[str, Any]] = {
    "none": {},
    "bool": {"attn_mask": torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(2)},
    "float": {"attn_mask": bias()[0, 0]},
    "per head": {"attn_mask": bias().flatten(0, 1)},
    "padding": {"key_padding_mask": padding() == 0},
    "bool and padding": {
        "attn_mask": torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(2),
        "key_padding_mask": padding() == 0,
    },
}


@pytest.mark.parametrize("batch_first", [True, False], ids=["batch first", "batch second"])
@pytest.mark.parametrize("need_weights", [True, False], ids=["weights", "no weights"])
@pytest.mark.parametrize("mask", MASKS)
def test_multi_head_attention(mask: str, need_weights: bool, batch_first: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=batch_first)
    nn.init.normal_(attention.in_proj_bias)
    x = torch.randn(BATCH, LENGTH, WIDTH, requires_grad=True)
    optimizer = torch.optim.SGD(attention.parameters(), lr=0.0)
    with attn_diag.capture(attention, tmp_path, batch=None) as recorder:
        given = x if batch_first else x.transpose(0, 1)
        o, _ = attention(given, given, given, need_weights=need_weights, **MASKS[mask])
        torch.autograd.backward(o.square().sum())
        optimizer.step()
    capture = only(recorder)
    assert holds(capture)
    # dW_Q from what was captured is the projection's own gradient, whatever q is multiplied by before its products.
    tensors = {name: t[...] for name, t in capture.tensors.items()}
    gradient = torch.einsum("bhtd,btc->hdc", tensors["dq_pre"], tensors["x"]).flatten(0, 1)
    weight = attention.in_proj_weight
    factor = float(tensors["w_q"].norm() / weight.detach()[:WIDTH].norm())
    assert weight.grad is not None
    torch.testing.assert_close(gradient * factor, weight.grad[:WIDTH], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(tensors["w_q"], weight.detach()[:WIDTH] * factor)
    # q is x w_q^T and a bias, which is the same in all rows.
    q = tensors["q"].transpose(1, 2).flatten(2)
    constant = q - tensors["x"] @ tensors["w_q"].T
    torch.testing.assert_close(constant, constant[:1, :1].expand_as(constant), rtol=1e-4, atol=1e-5)
    assert factor == pytest.approx(DIM**-0.5 if need_weights else 1.0)


def test_the_encoder_of_torch(tmp_path: Path) -> None:
    tiny = transformer_encoder()
    with attn_diag.capture(tiny.model, tmp_path) as recorder:
        torch.autograd.backward(tiny.loss(tiny.model))
    captures = written(recorder)
    assert [c.metadata.extra["module"] for c in captures] == list(tiny.attentions)
    assert all(holds(c) for c in captures)
    assert all({"x", "w_q", "dq_pre", "mask"} <= c.tensors.keys() for c in captures)


def test_the_fast_path_stays_and_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = transformer_encoder().model.eval()
    x = torch.randn(BATCH, LENGTH, WIDTH)
    with torch.no_grad():
        fast = model(x)
        with attn_diag.capture(model, tmp_path) as recorder:
            watched = model(x)
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            slow = model(x)
        finally:
            torch.backends.mha.set_fastpath_enabled(True)
    assert torch.equal(fast, watched)
    assert not torch.equal(fast, slow), "the two paths agree: this test shows nothing"
    assert not recorder.written
    assert "fast path of nn.TransformerEncoder" in caplog.text


@pytest.mark.parametrize("checkpointing", [None, False, True], ids=["plain", "checkpoint", "reentrant"])
def test_a_nano_gpt_loop(checkpointing: bool | None, tmp_path: Path) -> None:
    """Autocast, accumulation over two micro-batches, evaluation before and in between: its calls count for nothing."""
    model = nano_gpt(checkpointing).model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def evaluate() -> None:
        model.eval()
        # Reentrant checkpointing warns where nothing has a gradient.
        with torch.no_grad(), warnings.catch_warnings(action="ignore"):
            next_token_loss(model, tokens(99))
        model.train()

    with attn_diag.capture(model, tmp_path, steps={1, 2}, calls=None, batch=None) as recorder:
        evaluate()
        for step in range(4):
            if step in (0, 2):
                evaluate()
            for micro in range(2):
                with torch.autocast("cpu", torch.bfloat16):
                    loss = next_token_loss(model, tokens(2 * step + micro))
                torch.autograd.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    captures = written(recorder)
    found = [(c.metadata.step, c.metadata.layer, c.metadata.extra["call"]) for c in captures]
    assert found == [(step, layer, call) for step in (1, 2) for layer in (0, 1) for call in ("0", "1")]
    for capture in captures:
        assert capture.tensors["q"].dtype == torch.bfloat16
        assert {"lse", "do", "dq", "dk", "dv", "x", "w_q", "dq_pre"} <= capture.tensors.keys()
        assert holds(capture)
    # Each call of a layer is another batch.
    assert not torch.equal(captures[0].tensors["q"][...], captures[1].tensors["q"][...])


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("options", ["plain", "block mask", "bias"])
def test_flex_attention(options: str, tmp_path: Path) -> None:
    from torch.nn.attention import flex_attention as flex

    def score_mod(score: Tensor, *at: Tensor) -> Tensor:
        _, h, q, k = at
        return score + (h + 1) * (k - q) / 10

    given: dict[str, Any] = {}
    if options == "bias":
        given["score_mod"] = score_mod
    if options == "block mask":
        given["block_mask"] = flex.create_block_mask(
            lambda _b, _h, q, k: (q >= k) & (q - k < 5), BATCH, None, LENGTH, LENGTH, device="cpu"
        )
    q, k, v = (t.detach() for t in (inputs(1), inputs(2, 2), inputs(3, 2)))
    with torch.no_grad(), attn_diag.capture(None, tmp_path, batch=None) as recorder:
        flex.flex_attention(q, k, v, enable_gqa=True, **given)
    assert holds(only(recorder))
    assert ("mask" in only(recorder).tensors) == (options != "plain")


def textbook(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """O [B, T, H, D] and LSE [B, H, T] of tensors [B, T, H, D]."""
    scores = scale * torch.einsum("bqhd,bkhd->bhqk", q, k)
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -math.inf)
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v), scores.logsumexp(-1)


class _Flash(torch.autograd.Function):
    """Attention in flash_attn's way: one node, and the LSE kept for the backward."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
        o, lse = textbook(q, k, v, *options)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.options = options
        ctx.mark_non_differentiable(lse)
        return o, lse

    @staticmethod
    def backward(ctx: Any, do: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        given = [t.detach().requires_grad_() for t in ctx.saved_tensors[:3]]
        with torch.enable_grad():
            o, _ = textbook(*given, *ctx.options)
        return *torch.autograd.grad(o, given, do), None, None


def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """The signature of flash_attn 2.8."""
    assert (dropout_p, window_size, softcap, alibi_slopes, deterministic) == (0.0, (-1, -1), 0.0, None, False)
    o, lse = _Flash.apply(q, k, v, softmax_scale or q.shape[-1] ** -0.5, causal)  # type: ignore[no-untyped-call]
    return (o, lse, None) if return_attn_probs else o


# What follows the packed argument, or q and kv, is the same.
def flash_attn_qkvpacked_func(
    qkv: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    rest = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    q, k, v = qkv.unbind(2)
    return flash_attn_func(q, k, v, *rest)


def flash_attn_kvpacked_func(
    q: Tensor, kv: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    rest = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    k, v = kv.unbind(2)
    return flash_attn_func(q, k, v, *rest)


@pytest.fixture
def flash_attn(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    package, interface = ModuleType("flash_attn"), ModuleType("flash_attn.flash_attn_interface")
    for module in (package, interface):
        for function in (flash_attn_func, flash_attn_qkvpacked_func, flash_attn_kvpacked_func):
            setattr(module, function.__name__, function)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    yield package
    assert vars(package)["flash_attn_func"] is flash_attn_func


@pytest.mark.parametrize("probs", [False, True], ids=["o", "o and lse"])
@pytest.mark.parametrize("packing", ["", "qkvpacked_", "kvpacked_"], ids=["separate", "qkv", "kv"])
def test_flash_attn(packing: str, probs: bool, flash_attn: ModuleType, tmp_path: Path) -> None:
    q, k, v = (inputs(seed, layout="BTHD") for seed in (1, 2, 3))

    def call() -> Tensor:
        function = getattr(flash_attn, f"flash_attn_{packing}func")
        parts = {"": (q, k, v), "qkvpacked_": (torch.stack([q, k, v], 2),), "kvpacked_": (q, torch.stack([k, v], 2))}
        result = function(*parts[packing], softmax_scale=0.3, causal=True, return_attn_probs=probs)
        o: Tensor = result[0] if probs else result
        return o

    capture = captured_call(call, tmp_path)
    assert holds(capture)
    assert (capture.metadata.kernel, capture.metadata.causal) == ("flash_attn", "bottom-right")
    assert_gradients(capture, q, k, v, turn=True)
    assert capture.tensors["lse"].shape == (BATCH, HEADS, LENGTH)
    o = capture.tensors["o"][...].transpose(1, 2)
    assert torch.equal(capture.tensors["do"][...].transpose(1, 2), weights_of(o))


@pytest.mark.parametrize("packed", [False, True])
def test_our_own_operator(packed: bool, tmp_path: Path, device: str) -> None:
    q, k, v = (torch.randn(1, 2, 32, 16, device=device).bfloat16().requires_grad_() for _ in range(3))
    borders = torch.tensor([0, 20, 32], dtype=torch.int32, device=device) if packed else None
    slopes = torch.tensor([[0.5, 0.25], [0.125, 1.0]], device=device) if packed else None
    with attn_diag.capture(None, tmp_path) as recorder:
        for _ in range(2):
            o = attn_diag.attention(
                q, k, v, recipe="fa2", causal="top-left", cu_seqlens_q=borders, alibi_slopes=slopes
            )  # fmt: skip
            k.grad = None
            torch.autograd.backward(o.sum())
            recorder.end_step()
    _, capture = written(recorder)
    assert {"q", "k", "v", "o", "lse", "do", "dq", "dk", "dv"} <= capture.tensors.keys()
    assert torch.equal(capture.tensors["dk"][...], some(k.grad).cpu())
    assert "fa2" in str(capture.metadata.kernel)
    assert len(capture.documents or []) == 2 * packed
    assert ("alibi_slopes" in capture.tensors) == packed
    assert holds(capture)


def test_a_call_that_cannot_be_read_is_named_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from attn_diag.watching.live.tap import Tap

    def broken(*_: object) -> None:
        raise RuntimeError("not today")

    monkeypatch.setattr(Tap, "fused", broken)
    with caplog.at_level(logging.WARNING), attn_diag.capture(None, tmp_path):
        for _ in range(3):
            sdpa(inputs(1), inputs(2), inputs(3))
    assert caplog.text.count("not today") == 1


@pytest.mark.parametrize("default_device", [False, True], ids=["", "in a mode"])
@pytest.mark.parametrize(
    ("variant", "keys"),
    [("upper_left", LENGTH), ("upper_left", 7), ("upper_left", 29), ("lower_right", LENGTH), ("lower_right", 29)],
)
def test_a_bias_that_is_no_mask(variant: str, keys: int, default_device: bool, tmp_path: Path) -> None:
    """torch.nn.attention.bias asks whether the function that is called is the one of torch.nn.functional."""
    from torch.nn.attention import bias as biases

    causal = getattr(biases, f"causal_{variant}")(LENGTH, keys)
    q, k, v = inputs(1), inputs(2)[:, :, :1].repeat(1, 1, keys, 1), torch.randn(BATCH, HEADS, keys, DIM)
    k = k + torch.randn(k.shape)
    alone = sdpa(q, k, v, causal)
    mode = torch.device("cpu") if default_device else contextlib.nullcontext()
    with mode, attn_diag.capture(None, tmp_path, batch=None) as recorder:
        watched = functional.scaled_dot_product_attention(q, k, v, causal)
        assert functional.scaled_dot_product_attention is torch._C._nn.scaled_dot_product_attention
    assert torch.equal(alone, watched)
    capture = only(recorder)
    if variant == "upper_left" or keys == LENGTH:
        assert capture.metadata.causal == "top-left"
    else:  # on a CPU torch writes it out
        assert torch.equal(capture.tensors["mask"][...].squeeze(), causal._materialize())
    assert holds(capture)


class Table(torch.Tensor):
    """A subclass that finds its implementations in a table, as many do."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in TABLE:
            return torch.zeros(1)
        return torch.Tensor.__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


TABLE = {functional.scaled_dot_product_attention}


def test_a_table_of_functions_finds_it(tmp_path: Path) -> None:
    q = inputs(1).detach().as_subclass(Table)
    with attn_diag.capture(None, tmp_path):
        assert sdpa(q, q, q).shape == (1,)


def test_a_loop_without_an_optimizer_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tiny = nano_gpt()
    with attn_diag.capture(tiny.model, tmp_path / "told"):
        for _ in range(2):
            torch.autograd.backward(tiny.loss(tiny.model))
    assert "call end_step()" in caplog.text
    caplog.clear()
    with attn_diag.capture(tiny.model, tmp_path / "stepped") as recorder:
        for _ in range(2):
            torch.autograd.backward(tiny.loss(tiny.model))
            recorder.end_step()
    assert not caplog.text
    assert {c.metadata.step for c in written(recorder)} == {0, 1}


class Assisted(nn.Module):
    """As generate() of transformers with an assistant: a method calls another model, and this one."""

    def __init__(self, model: nn.Module, other: nn.Module) -> None:
        super().__init__()
        self.model, self.other = model, [other]  # not one of its modules

    def forward(self, ids: Tensor) -> Tensor:
        made: Tensor = self.model(ids)
        return made

    def generate(self, ids: Tensor) -> Tensor:
        self.other[0](ids)
        made: Tensor = self(ids)
        return made


@torch.no_grad()
def test_another_model_that_a_method_calls_is_another_model(tmp_path: Path) -> None:
    model = Assisted(nano_gpt(layers=1).model, nano_gpt(layers=2).model)
    with attn_diag.capture(model, tmp_path, calls=None) as recorder:
        model.generate(tokens())
    assert only(recorder).metadata.layer == 0
    assert only(recorder).metadata.extra["module"] == "model.h.0.attn"


class OneHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.projections = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(*(project(x)[:, None] for project in self.projections))


def test_a_batch_of_nothing_is_told_and_the_next_one_is_seen(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model = OneHead()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attn_diag.capture(model, tmp_path) as recorder, attn_diag.Monitor(model, every=1) as monitor:
        for batch in (0, BATCH, BATCH):
            torch.autograd.backward(model(torch.randn(batch, LENGTH, WIDTH)).square().sum())
            optimizer.step()
    assert "not captured: attention: nothing was attended to: q has the shape (0, 1, 20, 32)" in caplog.text
    assert "attention is not monitored: nothing was attended to" in caplog.text
    assert "Error" not in caplog.text
    assert ["w_q" in capture.tensors for capture in written(recorder)] == [True, True]
    assert len(monitor.history) == 2


def test_a_number_below_zero_is_no_layers(tmp_path: Path) -> None:
    """Zamba2's shared blocks state -1, all of them."""

    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer_idx = -1

        def forward(self, x: Tensor) -> Tensor:
            return sdpa(x, x, x)

    model = nn.Sequential(nn.Identity(), Attending(), nn.Identity(), Attending())
    with attn_diag.capture(model, tmp_path):
        model(torch.randn(1, 2, 16, 16))
    assert [f.name.split("_")[1] for f in sorted(tmp_path.iterdir())] == ["layer01", "layer03"]
