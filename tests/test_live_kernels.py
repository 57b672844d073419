"""Attention kernels of other packages: met by their operators, or functions, in eager code and in compiled graphs."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import foreign_functions
import foreign_kernels
import pytest
import torch
from builders import holds
from foreign_functions import sage, transformer_engine
from foreign_kernels import RAN
from foreign_xformers import xformers
from tiny_models import only
from torch import Tensor, nn

import attn_diag
from attn_diag.captures.capture import Capture
from attn_diag.watching.live.recorder import Recorder

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # of the compiler
DIM, HEADS, LENGTH = 16, 4, 128


@dataclass(frozen=True)
class Package:
    """One that is there while a test runs."""

    name: str
    """Of its kernel, in reports."""
    enter: Callable[[], Any]
    traced: bool = True
    """Whether torch can have it in a graph."""
    lacks: str = ""
    """Part of the names of cases that it cannot do."""


PACKAGES = {
    "flash_attn 2": Package("flash_attn 2", foreign_kernels.flash_attn_2),
    "flash_attn 3": Package("flash_attn 3", foreign_kernels.flash_attn_3),
    "flash_attn 3 of 2025": Package("flash_attn 3", partial(foreign_kernels.flash_attn_3, outer=False), traced=False),
    "FlashAttention-4": Package("FlashAttention-4", foreign_functions.flash_attn_4, traced=False),
    "xformers flash": Package("xformers flash", partial(xformers, "flash"), lacks="softcap"),
    "xformers flash 3": Package("xformers flash 3", partial(xformers, "flash3"), lacks="softcap"),
    # torch 2.13 cannot trace the backward of its own: the graph breaks there.
    "xformers cutlass": Package(
        "xformers cutlass", partial(xformers, "cutlass"), traced=False, lacks="softcap|^window|grouped"
    ),
    "xformers' own cutlass": Package(
        "xformers cutlass", partial(xformers, "own cutlass"), traced=False, lacks="softcap|^window|grouped"
    ),
    "Transformer Engine": Package(
        "Transformer Engine fused", partial(transformer_engine, "sbhd_sbhd_sbhd"), traced=False, lacks="softcap|window"
    ),
    "Transformer Engine, packed together": Package(
        "Transformer Engine fused", partial(transformer_engine, "bs3hd"), traced=False, lacks="softcap|window"
    ),
}
# Options of a call, key heads, keys, D.
CASES: dict[str, tuple[dict[str, Any], int, int, int]] = {
    "plain": ({}, HEADS, LENGTH, DIM),
    "causal": ({"causal": True}, HEADS, LENGTH, DIM),
    "grouped, more keys": ({"causal": True, "softmax_scale": 0.3}, 2, LENGTH + 17, DIM),
    "fewer keys": ({"causal": True}, HEADS, LENGTH - 20, DIM),
    "window": ({"window_size": (30, 20)}, HEADS, LENGTH + 5, DIM),
    "causal window, softcap": ({"causal": True, "window_size": (40, 0), "softcap": 2.0}, 2, LENGTH, DIM),
    "causal window": ({"causal": True, "window_size": (9, 0)}, HEADS, LENGTH, DIM),
    "D of 20": ({}, HEADS, LENGTH, 20),
}


@contextlib.contextmanager
def there(package: Package) -> Iterator[Callable[..., Any]]:
    torch._dynamo.reset()
    RAN.forward.clear()
    RAN.backward.clear()
    with package.enter() as function:
        yield function
    torch._dynamo.reset()


def every_case() -> Iterator[Any]:
    for (name, package), case, compiled in product(PACKAGES.items(), CASES, (False, True)):
        # A D that is no multiple of 8 is padded outside its operators by one.
        able = not re.search(package.lacks or "$^", case) and (case != "D of 20" or name == "flash_attn 2")
        # An operator that writes into what it returns cannot be traced at all, nor those of xformers with torch < 2.7.
        traced = name not in ("flash_attn 3 of 2025", "xformers' own cutlass")
        # One package shows what tracing makes of every case, the others what it makes of them.
        traced &= name == "flash_attn 2" or case in ("plain", "grouped, more keys")
        if able and (traced or not compiled):
            yield pytest.param(name, case, compiled, id=f"{name}-{case}-{'compiled' if compiled else 'eager'}")


class Attention(nn.Module):
    """Projections around a kernel that takes [B, T, H, D]."""

    def __init__(
        self, function: Callable[..., Any], dim: int, key_heads: int, keys: int, options: dict[str, Any]
    ) -> None:
        super().__init__()
        self.q_proj = nn.Linear(32, HEADS * dim)
        self.kv = nn.Linear(32, 2 * key_heads * dim)
        self.function, self.dim, self.keys, self.options = function, dim, keys, options

    def forward(self, x: Tensor) -> Tensor:
        q = self.q_proj(x[:, :LENGTH]).unflatten(-1, (-1, self.dim))
        k, v = (t.unflatten(-1, (-1, self.dim)) for t in self.kv(x[:, : self.keys]).chunk(2, -1))
        o: Tensor = self.function(q, k, v, **self.options)
        return o.flatten(-2)


def model(function: Callable[..., Any], case: str) -> tuple[nn.Module, Tensor]:
    options, key_heads, keys, dim = CASES[case]
    torch.manual_seed(0)
    made = Attention(function, dim, key_heads, keys, options).bfloat16()
    return made, torch.randn(2, LENGTH + 20, 32).bfloat16()


def step(run: Callable[[Tensor], Tensor], made: nn.Module, x: Tensor) -> list[Tensor]:
    made.zero_grad()
    o = run(x)
    weights = torch.randn(o.shape, generator=torch.Generator().manual_seed(9))
    torch.autograd.backward((o.float() * weights).sum())
    return [o.detach().clone(), *(p.grad.clone() for p in made.parameters() if p.grad is not None)]


@pytest.mark.parametrize(("name", "case", "compiled"), [*every_case()])
def test_what_ran_is_captured(name: str, case: str, compiled: bool, tmp_path: Path) -> None:
    package = PACKAGES[name]
    with there(package) as function:
        capture = captured(package, function, case, compiled, tmp_path)
    (ran,), (back,) = RAN.forward, RAN.backward
    for quantity, t in (ran | back).items():
        mine = t if quantity == "lse" else t.transpose(1, 2)
        assert torch.equal(capture.tensors[quantity][...], mine), quantity
    assert capture.metadata.kernel == package.name
    assert holds(capture)
    options = CASES[case][0]
    assert capture.metadata.causal == ("bottom-right" if options.get("causal") else "none")
    assert capture.metadata.softcap == (options.get("softcap"))
    # What is padded is no projection's output.
    assert ("w_q" in capture.tensors) == (case != "D of 20")
    heads = attn_diag.inspect_captures([capture]).captures[0].observations[0].heads
    labels = [head.verdict.labels for head in heads if head.verdict is not None]
    # The first keys carry most of a causal dK's error: there a short sequence leaves a head open.
    assert ("clean",) in labels
    assert set(labels) <= {("clean",), ("undecided",)}, labels


def captured(package: Package, function: Callable[..., Any], case: str, compiled: bool, folder: Path) -> Capture:
    """The capture of a step that has the same bits without."""
    made, x = model(function, case)
    # Operators are called by what aot_eager makes as by inductor's code, which takes ten times as long to make.
    backend = "inductor" if case == "plain" and package.name == "flash_attn 2" else "aot_eager"
    run = torch.compile(made, fullgraph=package.traced, backend=backend) if compiled else made
    expected = step(run, made, x)
    RAN.forward.clear()
    RAN.backward.clear()
    with attn_diag.capture(made, folder, batch=None) as recorder:
        found = step(run, made, x)
    assert all(map(torch.equal, found, expected))
    return only(recorder)


def run_once(call: Callable[[], Any], folder: Path) -> Recorder:
    with attn_diag.capture(None, folder, batch=None) as recorder:
        call()
    return recorder


def tensors(length: int = 24, layout: str = "BTHD", grad: bool = True) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    shape = (2, length, HEADS, DIM) if layout == "BTHD" else (2, HEADS, length, DIM)
    return [torch.randn(shape, generator=generator).bfloat16().requires_grad_(grad) for _ in range(3)]


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "dropout": ("flash_attn 2", {"dropout_p": 0.25}, "dropout 0.25 is on"),
    "a score_mod": ("FlashAttention-4", {"score_mod": max}, "score_mod not supported"),
    "half packed": ("FlashAttention-4", {"cu_seqlens_q": torch.tensor([0, 24])}, "not captured yet (cu_seqlens_q)"),
    "padding": ("Transformer Engine", {"attn_mask_type": "padding_causal"}, "not captured yet (cu_seqlens_q"),
    "off by one": ("Transformer Engine", {"softmax_type": "off-by-one"}, "softmax_type off-by-one not supported"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_analysed_is_refused_by_name(
    case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    name, options, reason = REFUSED[case]
    with there(PACKAGES[name]) as function:
        recorder = run_once(lambda: function(*tensors(), **options), tmp_path)
    assert not recorder.written
    assert list(recorder.dropped.values()) == [1]
    assert reason in caplog.text


def test_sinks_of_flash_attention_4_are_captured(tmp_path: Path) -> None:
    package, sinks = PACKAGES["FlashAttention-4"], torch.linspace(-1, 3, HEADS).bfloat16()
    given = tensors()
    with there(package) as function, attn_diag.capture(None, tmp_path, batch=None) as recorder:
        o = function(*given, learnable_sink=sinks)
        torch.autograd.backward(o.float().square().sum())
    capture = only(recorder)
    assert torch.equal(capture.tensors["sinks"][...], sinks)
    diagnosis = attn_diag.inspect_captures([capture]).captures[0]
    assert diagnosis.assumptions.ok
    last = {q.quantity: q for q in diagnosis.observations[0].heads[HEADS - 1].quantities}
    assert last["lse"].answer == "good"
    assert last["o"].answer != "wrong"
    # The function that stands in for its backward makes P again without the sinks.
    assert "no sink (the sink dropped) in the backward alone" in last["dq"].words
    # Without them it is another function.
    bare = replace(capture, tensors={n: t for n, t in capture.tensors.items() if n != "sinks"})
    assert attn_diag.inspect_captures([bare]).captures[0].assumptions.ok is False


def test_paged_operators_are_told_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    q, k, v = (torch.randn(24, HEADS, DIM) for _ in range(3))
    ends, pages = torch.tensor([0, 10, 24]), torch.zeros(2, 1, dtype=torch.int32)

    def call() -> None:
        for _ in range(2):
            torch.ops.flash_attn._flash_attn_varlen_forward(
                q, k, v, ends, ends, 14, 14, 0.0, 0.25, True, block_table=pages
            )

    with there(PACKAGES["flash_attn 2"]):
        recorder = run_once(call, tmp_path)
    assert not recorder.written
    (reason,) = recorder.dropped
    assert "packed or paged sequences are not captured yet (block_table)" in reason
    assert caplog.text.count("packed or paged") == 1


@pytest.mark.parametrize("name", ["flash_attn 2", "FlashAttention-4"])
def test_a_package_that_is_imported_later(name: str, tmp_path: Path) -> None:
    """It is seen from the next step on, and once it is gone nothing is left of it."""
    with attn_diag.capture(None, tmp_path) as recorder:
        recorder.end_step()
        with there(PACKAGES[name]) as function:
            recorder.end_step()
            function(*tensors())
            recorder.end_step()
    assert [capture.metadata.step for capture in map(attn_diag.load, recorder.written)] == [2]


def test_everything_is_put_back() -> None:
    with there(PACKAGES["FlashAttention-4"]):
        with attn_diag.Monitor(nn.Linear(1, 1)):
            pass
        interface = sys.modules["flash_attn.cute.interface"]
        originals = interface._flash_attn_fwd, interface._flash_attn_bwd
        cache = vars(interface._flash_attn_fwd).setdefault("compile_cache", {})
        with attn_diag.Monitor(nn.Linear(1, 1)):
            assert interface._flash_attn_fwd not in originals
            assert interface._flash_attn_fwd.__name__ == "_flash_attn_fwd"
            # The real one keeps what it compiled on itself, under its own name.
            assert interface._flash_attn_fwd.compile_cache is cache
        assert (interface._flash_attn_fwd, interface._flash_attn_bwd) == originals


def test_evaluation_is_passed_over(tmp_path: Path) -> None:
    """An autograd function's forward runs without gradients both times."""
    with there(PACKAGES["flash_attn 2"]) as function:
        made, x = model(function, "plain")
        optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
        with attn_diag.capture(made, tmp_path, calls=None) as recorder:
            for _ in range(2):
                step(made, made, x)
                with torch.no_grad():
                    made(x)
                optimizer.step()
    found = [attn_diag.load(path) for path in recorder.written]
    assert [(c.metadata.step, c.metadata.extra["call"], "dq" in c.tensors) for c in found] == [
        (0, "0", True),
        (1, "0", True),
    ]


def test_gradients_of_the_lse_leave_those_of_o_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def call() -> None:
        q, k, v = tensors()
        o, lse = foreign_functions.flash_attn_4_func(q, k, v, return_lse=True)
        torch.autograd.backward(o.float().sum() + lse.sum())

    with there(PACKAGES["FlashAttention-4"]):
        capture = only(run_once(call, tmp_path))
    assert "dq" not in capture.tensors
    assert "where the LSE has one too" in caplog.text


def test_a_bias_of_xformers(tmp_path: Path) -> None:
    bias = 2 * torch.randn(2, HEADS, 24, 24)
    with there(PACKAGES["xformers cutlass"]) as function:
        capture = only(run_once(lambda: function(*tensors(), bias=bias), tmp_path))
    assert torch.equal(capture.tensors["mask"][...], bias)
    assert capture.tensors["lse"].shape == (2, HEADS, 24)
    assert holds(capture)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_sage_attention(layout: str, compiled: bool, tmp_path: Path) -> None:
    q, k, v = tensors(layout="BTHD" if layout == "NHD" else "BHTD", grad=False)
    with there(Package("SageAttention", sage)) as function:
        call = torch.compile(function, backend="aot_eager") if compiled else function
        options = {"tensor_layout": layout, "is_causal": True, "sm_scale": 0.3, "return_lse": True}
        o, lse = call(q, k, v, **options)
        capture = only(run_once(lambda: call(q, k, v, **options), tmp_path))
    assert capture.metadata.kernel == "SageAttention sageattn"
    assert torch.equal(capture.tensors["o"][...], o.transpose(1, 2) if layout == "NHD" else o)
    assert torch.equal(capture.tensors["lse"][...], lse)
    assert (capture.metadata.causal, capture.metadata.scale) == ("top-left", 0.3)
    assert holds(capture)


def test_sage_attention_in_the_place_of_torchs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As its authors propose. It hands no mask on: the capture has none either."""
    mask = torch.ones(24, 24, dtype=torch.bool).tril()
    with there(Package("SageAttention", sage)):
        monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", foreign_functions.sageattn)
        q, k, v = tensors(layout="BHTD", grad=False)
        plain = only(
            run_once(lambda: nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask), tmp_path / "a")
        )
        triton = sys.modules["sageattention.core"]
        masked = only(run_once(lambda: triton.sageattn_qk_int8_pv_fp16_triton(q, k, v, attn_mask=mask), tmp_path / "b"))
        monkeypatch.undo()
    assert holds(plain)
    assert "mask" not in plain.tensors
    assert holds(masked)
    assert "mask" in masked.tensors
