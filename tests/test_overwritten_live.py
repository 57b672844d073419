"""Functions and operators of others that write into what they are given: told of is what they were given."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import attn_diag
from attn_diag.captures.loading import load
from attn_diag.watching.live import kernels

Kernel = Callable[[Tensor, Tensor, Tensor], Tensor]
LIBRARY: Any = torch.library.Library("overwriting", "FRAGMENT")  # type: ignore[no-untyped-call]


def plain(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
    hidden = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(1 + k.shape[2] - q.shape[2])
    scores = q.float() @ k.float().mT * (q.shape[3] ** -0.5 if scale is None else scale)
    return (scores.masked_fill(hidden, -math.inf).softmax(-1) @ v.float()).to(q.dtype)


def behind_torch(t: Tensor, values: Tensor) -> None:
    """As a kernel in CUDA, Triton or NumPy writes."""
    version = t._version
    t.detach().view(torch.int16).numpy()[...] = values.detach().view(torch.int16).numpy()
    assert t._version == version


def mean_of_k(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """SageAttention 1's smoothing, k -= k.mean()."""
    k -= k.mean(2, keepdim=True)
    return plain(q, k, v)


def mean_of_k_behind_torch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    behind_torch(k, k - k.mean(2, keepdim=True))
    return plain(q, k, v)


def scaled_q(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q *= 8**-0.5
    return plain(q, k, v, 1.0)


def o_in_q(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """An attention in place."""
    o = plain(q, k, v)
    q.copy_(o)
    return q


def rotated(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """RoPE of what it is given, in place."""
    with torch.no_grad():
        for x in (q, k):
            angle = torch.arange(x.shape[2])[:, None] * torch.ones(x.shape[3] // 2)
            (a, b), c, s = x.chunk(2, -1), angle.cos(), angle.sin()
            x.copy_(torch.cat([a * c - b * s, a * s + b * c], -1))
    return plain(q, k, v)


class WritesIntoDo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.enable_grad():
            ctx.leaves = [x.detach().requires_grad_() for x in (q, k, v)]
            ctx.inner = plain(*ctx.leaves)
        returned: Tensor = ctx.inner.detach().clone()
        return returned

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        made: tuple[Tensor, ...] = torch.autograd.grad(ctx.inner, ctx.leaves, gradients[0].clone())
        gradients[0].mul_(2)
        return made


def writes_into_do(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    o: Tensor = WritesIntoDo.apply(q, k, v)  # type: ignore[no-untyped-call]
    return o


def sound(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return plain(q, k, v)


NOW: dict[str, Kernel] = {"kernel": sound}


@attn_diag.observe(causal="bottom-right")
def observed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return NOW["kernel"](q, k, v)


def in_place_of_sdpa(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool = False) -> Tensor:
    assert is_causal
    return NOW["kernel"](query, key, value)


def registered(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **_: Any
) -> tuple[Tensor, None]:
    del module, mask
    return NOW["kernel"](query, key, value).transpose(1, 2), None


def operator(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    found: Tensor = torch.ops.overwriting.attention(q, k, v)
    return found


class Model(nn.Module):
    is_causal, layer_idx = True, 0

    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.way, self.qkv = way, nn.Linear(16, 48, bias=False).bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2).contiguous() for t in self.qkv(x).chunk(3, -1))
        self.given = [t.detach().clone() for t in (q, k, v)]
        if self.way == "observed":
            return observed(q, k, v)
        if self.way == "operator":
            return operator(q, k, v)
        if self.way == "sdpa":
            return functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        o: Tensor = ALL_ATTENTION_FUNCTIONS["overwriting"](self, q, k, v, None)[0]
        return o.transpose(1, 2)


@pytest.fixture(autouse=True, scope="module")
def ways() -> Iterator[None]:
    """All ways in which a kernel of somebody's own is met."""
    from transformers import AttentionInterface

    LIBRARY.define("attention(Tensor(a!) q, Tensor(b!) k, Tensor v) -> Tensor")
    LIBRARY.impl("attention", lambda q, k, v: NOW["kernel"](q, k, v).clone(), "CPU")
    attn_diag.observe("overwriting::attention", causal=True)
    AttentionInterface.register("overwriting", registered)
    yield
    AttentionInterface._global_mapping.pop("overwriting")
    kernels._declared.clear()


WAYS = ("observed", "operator", "sdpa", "registered")


def x() -> Tensor:
    make = torch.Generator().manual_seed(1)
    return (torch.randn(2, 40, 16, generator=make) + 0.5).bfloat16()


def captured(
    folder: Path, kernel: Kernel, way: str, monkeypatch: pytest.MonkeyPatch, *, backward: bool = False
) -> tuple[attn_diag.Capture, list[Tensor]]:
    """What is captured of one call, and what it was given."""
    monkeypatch.setitem(NOW, "kernel", kernel)
    if way == "sdpa":
        monkeypatch.setattr(functional, "scaled_dot_product_attention", in_place_of_sdpa)
    model = Model(way)
    with torch.set_grad_enabled(backward), attn_diag.capture(model, folder) as recorder:
        o = model(x())
        if backward:
            torch.autograd.backward((o.float() * torch.linspace(-1, 1, o.numel()).view(o.shape)).sum())
    (path,) = recorder.written
    return load(path), model.given


def accused(capture: attn_diag.Capture) -> bool:
    return bool({"wrong", "lossy", "biased", "nonfinite"} & attn_diag.inspect(capture, device="cpu").labels)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kernel", [mean_of_k, mean_of_k_behind_torch, scaled_q, o_in_q])
def test_what_is_captured_is_what_it_was_given(
    kernel: Kernel, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    capture, given = captured(tmp_path, kernel, way, monkeypatch)
    for name, t in zip("qkv", given, strict=True):
        assert torch.equal(capture.tensors[name][...], t[:1])
    notes = capture.metadata.notes or ""
    assert notes.endswith("held is what it was given")
    if kernel is o_in_q and way != "operator":
        assert notes.startswith("O lies in the memory of an input")
    else:
        assert "writes into its input" in notes
    assert not accused(capture)


@pytest.mark.parametrize("way", ["observed", "sdpa", "registered"])
def test_a_gradient_of_what_it_has_left_there_is_no_gradient_of_what_it_was_given(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    capture, _ = captured(tmp_path, scaled_q, way, monkeypatch, backward=True)
    assert "dq" not in capture.tensors
    assert {"do", "dk", "dv"} <= capture.tensors.keys()
    assert "the gradient of q is left out" in (capture.metadata.notes or "")
    assert not accused(capture)


@pytest.mark.parametrize("way", ["observed", "sdpa", "registered"])
def test_what_it_writes_into_do_is_not_taken_for_do(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    capture, _ = captured(tmp_path, writes_into_do, way, monkeypatch, backward=True)
    assert "its backward writes into dO" in (capture.metadata.notes or "")
    assert not accused(capture)


@pytest.mark.parametrize("way", WAYS)
def test_where_o_is_that_of_what_it_left_there_nothing_is_judged(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(NOW, "kernel", rotated)
    if way == "sdpa":
        monkeypatch.setattr(functional, "scaled_dot_product_attention", in_place_of_sdpa)
    with (
        caplog.at_level(logging.WARNING),
        torch.no_grad(),
        attn_diag.capture(model := Model(way), tmp_path) as recorder,
    ):
        model(x())
    assert not recorder.written
    assert "and O is the attention of what it left in" in caplog.text


@pytest.mark.parametrize("way", WAYS)
def test_a_sound_one_has_no_note(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    capture, _ = captured(tmp_path, sound, way, monkeypatch)
    assert capture.metadata.notes is None


@pytest.mark.parametrize("filled", [0, 20])
@pytest.mark.parametrize("stale", [0.0, math.nan])
def test_a_cache_that_grows_is_no_fault(filled: int, stale: float, tmp_path: Path) -> None:
    """The call puts its own keys into the cache that it is given: they are what it attends to."""
    make = torch.Generator().manual_seed(2)
    new, held = (torch.randn(2, 1, 2, 40, 8, generator=make).bfloat16() for _ in range(2))
    q = torch.randn(1, 2, 40 - filled, 8, generator=make).bfloat16()
    k, v = (torch.cat([t[:, :, :filled], torch.full_like(t[:, :, filled:], stale)], 2) for t in held)

    @attn_diag.observe(causal="bottom-right")
    def with_cache(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        for cache, own in ((k, new[0]), (v, new[1])):
            cache[:, :, filled:] = own[:, :, filled:]
        return plain(q, k, v)

    found: list[attn_diag.Finding] = []
    with attn_diag.capture(None, tmp_path) as recorder, attn_diag.break_if(wrong=True, hook=found.append):
        with_cache(q, k, v)
    assert not found
    (path,) = recorder.written
    assert torch.equal((capture := load(path)).tensors["k"][...], k)
    assert f"the call has put {40 - filled} of k's and v's keys there itself" in (capture.metadata.notes or "")
    assert not accused(capture)


@pytest.mark.parametrize("all_rows", [False, True])
def test_a_ring_in_which_tokens_are_alike_is_no_fault(all_rows: bool, tmp_path: Path) -> None:
    """A first layer's v is that of its token alone: where a slot gets the token that it had, k alone is another."""
    make = torch.Generator().manual_seed(4)
    q, k, v, new_k, new_v = (torch.randn(1, 2, 24, 8, generator=make).bfloat16() for _ in range(5))
    slots = slice(0, 24) if all_rows else slice(6, 14)
    new_v[:, :, 8:12] = v[:, :, 8:12]

    @attn_diag.observe(causal="none")
    def with_ring(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        for cache, own in ((k, new_k), (v, new_v)):
            cache[:, :, slots] = own[:, :, slots]
        return ((q.float() @ k.float().mT * 8**-0.5).softmax(-1) @ v.float()).to(q.dtype)

    found: list[attn_diag.Finding] = []
    with attn_diag.capture(None, tmp_path) as recorder, attn_diag.break_if(wrong=True, hook=found.append):
        with_ring(q, k, v)
    assert not found
    (path,) = recorder.written
    assert "keys there itself, as into a cache" in (load(path).metadata.notes or "")


@pytest.mark.parametrize("how", ["resized", "set"])
def test_what_lets_go_of_its_inputs_is_captured(how: str, tmp_path: Path) -> None:
    """To look at memory that is gone ended the process."""
    make = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(1, 2, 24, 8, generator=make).bfloat16() for _ in range(3))
    given = k.clone()

    @attn_diag.observe(causal="bottom-right")
    def lets_go(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        o = plain(q, k, v)
        for x in (k, v):
            if how == "set":
                x.set_(torch.zeros(1, dtype=x.dtype))  # type: ignore[call-overload]
            else:
                x.untyped_storage().resize_(0)
        return o

    with attn_diag.capture(None, tmp_path) as recorder:
        lets_go(q, k, v)
    (path,) = recorder.written
    assert torch.equal((capture := load(path)).tensors["k"][...], given)
    assert capture.metadata.notes is None
    assert not accused(capture)


def test_a_breakpoint_tells_of_do_and_not_of_o_in_q(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[attn_diag.Finding] = []
    monkeypatch.setitem(NOW, "kernel", writes_into_do)
    with attn_diag.break_if(wrong=True, hook=found.append):
        torch.autograd.backward(Model("observed")(x()).float().square().sum())
    assert [one.reasons for one in found] == [
        ("wrong: its backward writes into dO, which its caller still needs; dO is held as it was given",)
    ]
    monkeypatch.setitem(NOW, "kernel", o_in_q)
    with torch.no_grad(), attn_diag.break_if(wrong=True, hook=found.append):
        Model("observed")(x())
    assert len(found) == 1


@pytest.mark.parametrize("way", WAYS)
def test_the_monitor_checks_with_what_it_was_given(
    way: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(NOW, "kernel", scaled_q)
    if way == "sdpa":
        monkeypatch.setattr(functional, "scaled_dot_product_attention", in_place_of_sdpa)
    model = Model(way)
    with caplog.at_level(logging.WARNING), torch.no_grad(), attn_diag.Monitor(model, every=1) as monitor:
        model(x())
        monitor.end_step()
        found = monitor.metrics(wait=True)
    assert found["attn/o_error/max"] < 0.004
    assert caplog.text.count("checked with what it was given") == 1


def test_the_monitor_takes_do_as_it_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(NOW, "kernel", writes_into_do)
    model = Model("observed")
    with attn_diag.Monitor(model, every=1) as monitor:
        for _ in range(2):
            torch.autograd.backward(model(x()).float().square().sum())
            monitor.end_step()
        assert monitor.metrics(wait=True)["attn/dq_error/max"] < 0.02


def test_the_backward_of_an_operator(tmp_path: Path) -> None:
    lib: Any = torch.library.Library("overwriting_back", "FRAGMENT")  # type: ignore[no-untyped-call]
    lib.define("attention(Tensor q, Tensor k, Tensor v) -> Tensor")
    lib.define("backward(Tensor q, Tensor k, Tensor v, Tensor o, Tensor(a!) do) -> (Tensor, Tensor, Tensor)")

    def backward(q: Tensor, k: Tensor, v: Tensor, o: Tensor, do: Tensor) -> tuple[Tensor, ...]:
        del o
        with torch.enable_grad():
            leaves = [t.detach().requires_grad_() for t in (q, k, v)]
            made = torch.autograd.grad(plain(leaves[0], leaves[1], leaves[2]), leaves, do.clone())
        do.mul_(2)
        return made

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *qkv: Tensor) -> Tensor:
            o: Tensor = torch.ops.overwriting_back.attention(*qkv)
            ctx.save_for_backward(*qkv, o)
            return o

        @staticmethod
        def backward(ctx: Any, *do: Tensor) -> Any:
            return torch.ops.overwriting_back.backward(*ctx.saved_tensors, do[0].contiguous())

    lib.impl("attention", plain, "CPU")
    lib.impl("backward", backward, "CPU")
    attn_diag.observe("overwriting_back::attention", backward="overwriting_back::backward", causal=True)
    make = torch.Generator().manual_seed(3)
    q, k, v, do = (torch.randn(1, 2, 40, 8, generator=make).bfloat16() for _ in range(4))
    with attn_diag.capture(None, tmp_path) as recorder:
        o: Any = Attention.apply(*(t.requires_grad_() for t in (q, k, v)))  # type: ignore[no-untyped-call]
        torch.autograd.backward(o, do.clone())
    (path,) = recorder.written
    assert torch.equal((capture := load(path)).tensors["do"][...], do)
    assert "its backward writes into dO" in (capture.metadata.notes or "")


@pytest.mark.parametrize("way", WAYS)
def test_where_nothing_can_be_held_the_call_runs_all_the_same(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def out_of_memory(*_: Any) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr("attn_diag.watching.live.overwritten.Held.hold", out_of_memory)
    capture, given = captured(tmp_path, sound, way, monkeypatch)
    assert torch.equal(capture.tensors["k"][...], given[1][:1])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kernel", [mean_of_k, sound])
def test_under_inference_mode(kernel: Kernel, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(NOW, "kernel", kernel)
    if way == "sdpa":
        monkeypatch.setattr(functional, "scaled_dot_product_attention", in_place_of_sdpa)
    with torch.inference_mode(), attn_diag.capture(model := Model(way), tmp_path) as recorder:
        model(x())
    (path,) = recorder.written
    assert torch.equal(load(path).tensors["k"][...], model.given[1][:1])


@pytest.mark.parametrize("way", ["observed", "sdpa"])
@pytest.mark.parametrize("transform", ["vmap", "grad"])
def test_transforms_are_left_alone(
    transform: str, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if way == "sdpa":
        monkeypatch.setattr(functional, "scaled_dot_product_attention", in_place_of_sdpa)
    q, k, v = (torch.randn(3, 1, 2, 12, 8) for _ in range(3))

    def call(q: Tensor) -> Tensor:
        args = (k[0], v[0])
        o = (
            observed(q, *args)
            if way == "observed"
            else functional.scaled_dot_product_attention(q, *args, is_causal=True)
        )
        return o if transform == "vmap" else o.sum()

    with caplog.at_level(logging.WARNING), attn_diag.capture(None, tmp_path):
        if transform == "vmap":
            torch.func.vmap(call)(q)
        else:
            torch.func.grad(call)(q[0])
    assert "a call was not recorded" not in caplog.text
