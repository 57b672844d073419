"""Attention inside compiled graphs: the same captures as of the model that runs eagerly, and nothing compiled anew."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders import holds, some
from tiny_models import Tiny, nano_gpt, steps, transformers_model
from torch import Tensor, nn
from torch._dynamo import compiled_autograd
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._functorch._aot_autograd.utils import make_boxed_func

import attn_diag
from attn_diag.captures.capture import Capture
from attn_diag.watching.live.watch import BY_ORDER

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # of the compiler

QUANTITIES = ("q", "k", "v", "o", "lse", "do", "dq", "dk", "dv")
Compile = Callable[[nn.Module], Any]


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    # With several, inductor's gradients of embeddings differ from run to run in their last bits.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    torch._dynamo.reset()


def whole(model: nn.Module) -> Any:
    return torch.compile(model, fullgraph=True)


def in_place(model: nn.Module) -> nn.Module:
    model.compile(fullgraph=True, backend="aot_eager")
    return model


def dynamic(model: nn.Module) -> Any:
    return torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")


def function(model: nn.Module) -> Any:
    def call(ids: Tensor) -> Any:
        return model(ids)

    compiled: Any = torch.compile(call, fullgraph=True, backend="aot_eager")
    compiled.parameters = model.parameters
    return compiled


def blocks(model: nn.Module) -> nn.Module:
    for name, child in list(model.named_modules()):
        if name.startswith("h.") and name.count(".") == 1:
            child.compile(fullgraph=True)
    return model


def not_lowered(model: nn.Module) -> Any:
    return torch.compile(model, fullgraph=True, backend="aot_eager")


def traced_alone(model: nn.Module) -> Any:
    return torch.compile(model, fullgraph=True, backend="eager")


WAYS: dict[str, Compile] = {
    way.__name__: way for way in (whole, in_place, dynamic, function, blocks, not_lowered, traced_alone)
}


def train(
    tiny: Tiny, run: Any, watching: contextlib.AbstractContextManager[Any], count: int = 6, *, autocast: bool = False
) -> list[Tensor]:
    """Losses, gradients and parameters of all steps; the first step runs before anything is watched."""
    optimizer = torch.optim.AdamW(tiny.model.parameters(), lr=1e-2)
    found: list[Tensor] = []

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = tiny.loss(run)
        torch.autograd.backward(loss)
        optimizer.step()
        found.append(loss.detach().clone())
        found.extend(p.grad.clone() for p in tiny.model.parameters() if p.grad is not None)
        found.extend(p.detach().clone() for p in tiny.model.parameters())

    step()
    with watching:
        for _ in range(count):
            step()
    return found


def captures(folder: Path) -> dict[tuple[int | None, int | None], Capture]:
    found = [attn_diag.load(path) for path in sorted(folder.glob("*.safetensors"))]
    return {(c.metadata.step, c.metadata.layer): c for c in found}


@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "autocast"])
@pytest.mark.parametrize("way", WAYS)
def test_a_compiled_model_is_captured_and_trains_as_it_did(way: str, autocast: bool, tmp_path: Path) -> None:
    alone = nano_gpt()
    expected = train(alone, WAYS[way](alone.model), contextlib.nullcontext(), autocast=autocast)
    torch._dynamo.reset()
    counters.clear()
    tiny = nano_gpt()
    run = WAYS[way](tiny.model)
    recorder = attn_diag.capture(tiny.model, tmp_path, steps={1, 3, 5}, batch=None)
    with torch._dynamo.config.patch(error_on_recompile=True):
        watched = train(tiny, run, recorder, autocast=autocast)
    assert len(watched) == len(expected)
    assert all(map(torch.equal, watched, expected))
    assert not counters["graph_break"]
    found = captures(tmp_path)
    assert sorted(found) == [(step, layer) for step in (1, 3, 5) for layer in (0, 1)]
    assert not recorder.dropped
    for (step, layer), capture in found.items():
        assert set(QUANTITIES) <= capture.tensors.keys(), (step, layer)
        assert capture.metadata.extra["module"] == f"h.{layer}.attn"
        assert (BY_ORDER in str(capture.metadata.notes)) == (way != "blocks")


@pytest.mark.parametrize("way", ["whole", "blocks", "not_lowered"])
def test_the_tensors_are_those_of_the_eager_model(way: str, tmp_path: Path) -> None:
    """Up to what a compiler may round otherwise; the backward of one layer never goes to another."""
    found = []
    for compiled in (False, True):
        tiny = nano_gpt()
        run = WAYS[way](tiny.model) if compiled else tiny.model
        with attn_diag.capture(tiny.model, tmp_path / str(compiled), batch=None):
            torch.autograd.backward(tiny.loss(run))
        found.append(captures(tmp_path / str(compiled)))
    assert sorted(found[0]) == sorted(found[1]) == [(0, 0), (0, 1)]
    for key, eager in found[0].items():
        for name in QUANTITIES:
            one, other = (c.tensors[name][...].double() for c in (eager, found[1][key]))
            assert torch.allclose(one, other, rtol=1e-3, atol=1e-5 * float(one.abs().max())), (key, name)


def test_inspect_explains_dq(tmp_path: Path) -> None:
    """In BF16 from O, LSE and the casts of the backward; so forward and backward belong together."""
    tiny = nano_gpt()
    run = whole(tiny.model)
    with attn_diag.capture(tiny.model, tmp_path), torch.autocast("cpu", torch.bfloat16):
        torch.autograd.backward(tiny.loss(run))
    found = attn_diag.inspect_captures(captures(tmp_path).values())
    for head in (h for entry in found.captures for h in entry.observations[0].heads):
        assert head.propagation.dq is not None
        assert some(head.propagation.dq.relative_error) > 1e-4
        assert some(head.propagation.dq.unexplained_with_casts) < 0.01
        assert head.verdict is not None
        assert "wrong" not in head.verdict.labels


@pytest.mark.parametrize("given", ["the module", "the compiled object"])
def test_either_may_be_watched(given: str, tmp_path: Path) -> None:
    tiny = nano_gpt()
    compiled = not_lowered(tiny.model)
    watched = tiny.model if given == "the module" else compiled
    with attn_diag.capture(watched, tmp_path, steps={1}):
        train(tiny, compiled, contextlib.nullcontext(), count=2)
    assert sorted(captures(tmp_path)) == [(1, 0), (1, 1)]


def test_micro_batches_are_calls(tmp_path: Path) -> None:
    tiny = nano_gpt()
    run = not_lowered(tiny.model)
    optimizer = torch.optim.SGD(tiny.model.parameters(), lr=0.1)
    with attn_diag.capture(tiny.model, tmp_path, calls=None) as recorder:
        for _ in range(2):
            for _ in range(3):
                torch.autograd.backward(tiny.loss(run))
            optimizer.step()
    read = map(attn_diag.load, recorder.written)
    places = [(c.metadata.step, c.metadata.layer, c.metadata.extra["call"]) for c in read]
    assert sorted(places) == [(s, layer, str(call)) for s in (0, 1) for layer in (0, 1) for call in (0, 1, 2)]


def test_inference_makes_a_step_of_every_forward(tmp_path: Path) -> None:
    tiny = nano_gpt()
    run = not_lowered(tiny.model.eval())
    with torch.no_grad(), attn_diag.capture(tiny.model, tmp_path, steps={0, 2}):
        for _ in range(3):
            tiny.loss(run)
    assert sorted(captures(tmp_path)) == [(0, 0), (0, 1), (2, 0), (2, 1)]


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant: bool, tmp_path: Path) -> None:
    """The backward is given what was made again, at other addresses."""
    tiny = nano_gpt(reentrant)
    with attn_diag.capture(tiny.model, tmp_path):
        train(tiny, not_lowered(tiny.model), contextlib.nullcontext(), count=1)
    found = captures(tmp_path)
    assert sorted(found) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert all(set(QUANTITIES) <= c.tensors.keys() for c in found.values())


def test_what_is_not_this_models_training_is_passed_over(tmp_path: Path) -> None:
    """Neither evaluation nor a compiled teacher."""
    tiny, teacher = nano_gpt(), nano_gpt()
    run, taught = not_lowered(tiny.model), not_lowered(teacher.model)
    optimizer = torch.optim.SGD(tiny.model.parameters(), lr=0.1)
    with attn_diag.capture(tiny.model, tmp_path, calls=None) as recorder:
        for _ in range(2):
            torch.autograd.backward(tiny.loss(run) + teacher.loss(taught))
            optimizer.step()
            with torch.no_grad():
                tiny.loss(run)
    assert len(recorder.written) == 4
    assert {c.metadata.extra["call"] for c in map(attn_diag.load, recorder.written)} == {"0"}


class Attention(nn.Module):
    """Calls it so often."""

    def __init__(self, calls: int) -> None:
        super().__init__()
        self.qkv, self.calls = nn.Linear(16, 48), calls

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        for _ in range(self.calls):
            q = nn.functional.scaled_dot_product_attention(q, k, v)
        o: Tensor = q.transpose(1, 2).flatten(-2)
        return o


class Mixer(Attention):
    """Its name tells nothing."""


# The second call of a module has no projection of its own that tells whose it is.
@pytest.mark.parametrize(
    ("kind", "calls", "names"), [(Attention, 1, ["0", "1"]), (Attention, 2, ["0", "1", "", ""]), (Mixer, 1, ["", ""])]
)
def test_a_layer_has_a_name_only_where_it_is_known(
    kind: type[Attention], calls: int, names: list[str], tmp_path: Path
) -> None:
    model = nn.Sequential(*(kind(calls) for _ in range(2)))
    run = not_lowered(model)
    with attn_diag.capture(model, tmp_path, calls=None) as recorder:
        for _ in range(2):
            torch.autograd.backward(run(torch.ones(2, 6, 16)).sum())
    found = [attn_diag.load(path).metadata for path in recorder.written]
    assert sorted((c.layer, c.extra["call"], c.extra["module"]) for c in found) == [
        (layer, call, names[layer]) for layer in range(2 * calls) for call in "01"
    ]


@pytest.mark.parametrize("kind", ["gpt2", "llama", "qwen3"])
def test_transformers(kind: str, tmp_path: Path) -> None:
    tiny = transformers_model(kind, "sdpa")
    with attn_diag.capture(tiny.model, tmp_path, steps={1}):
        train(tiny, torch.compile(tiny.model, backend="aot_eager"), contextlib.nullcontext(), count=1)
    found = captures(tmp_path)
    assert sorted(found) == [(1, 0), (1, 1)]
    assert tuple(c.metadata.extra["module"] for _, c in sorted(found.items())) == tiny.attentions


@pytest.mark.parametrize("way", ["whole", "not_lowered"])
def test_a_monitor_checks_a_compiled_model(way: str) -> None:
    histories = []
    for compile_ in (None, WAYS[way]):
        tiny = nano_gpt()
        with attn_diag.Monitor(tiny.model, every=2) as monitor:
            train(tiny, tiny.model if compile_ is None else compile_(tiny.model), contextlib.nullcontext(), count=5)
            monitor.metrics(wait=True)
        histories.append(monitor.history)
    eager, compiled = histories
    assert [check.step for check in compiled] == [check.step for check in eager] == [0, 2, 4]
    for one, other in zip(eager, compiled, strict=True):
        assert [layer.module for layer in one.layers] == [layer.module for layer in other.layers]
        for a, b in zip(one.layers, other.layers, strict=True):
            for name in ("max_logit", "conditioning"):
                assert np.allclose(a.values[name], b.values[name], rtol=1e-2, equal_nan=True), name


def test_nothing_is_kept_of_what_runs_in_a_cuda_graphs_memory(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """torch raises where anything but the graph's own outputs lives there after a warm-up."""
    space: dict[str, Any] = {}
    exec(compile("def run(call, *args): return call(*args)", "torch/_inductor/cudagraph_trees.py", "exec"), space)

    def warming_up(graph: Any, _: Any) -> Any:
        return make_boxed_func(lambda *args: space["run"](graph, *args))

    tiny = nano_gpt()
    compiled: Any = torch.compile(tiny.model, fullgraph=True, backend=aot_autograd(fw_compiler=warming_up))
    with attn_diag.capture(tiny.model, tmp_path) as recorder:
        steps(Tiny(tiny.model, lambda _: tiny.loss(compiled), ()), 2)
    assert not recorder.written
    assert "no attention call was seen" in caplog.text


def test_where_a_graph_breaks_ours_is_not_compiled(tmp_path: Path) -> None:
    """Neither an operator's kernel of ours nor a hook: no frame, no break and no graph more than without us."""

    def run(watching: contextlib.AbstractContextManager[Any]) -> tuple[list[Tensor], dict[str, dict[str, int]]]:
        torch._dynamo.reset()
        counters.clear()
        tiny = nano_gpt(layers=3)
        mlp, attention = tiny.model.get_submodule("h.0.mlp"), tiny.model.get_submodule("h.1.attn")
        own, own_mlp = attention.forward, mlp.forward

        def broken(x: Tensor) -> Any:
            torch._dynamo.graph_break()
            y = own(x)
            torch._dynamo.graph_break()
            return y

        def looked_at(x: Tensor) -> Any:
            y = own_mlp(x)
            y.sum().item()
            return y

        attention.forward, mlp.forward = broken, looked_at
        bits = train(tiny, torch.compile(tiny.model, backend="aot_eager"), watching, count=3)
        return bits, {name: dict(counters[name]) for name in ("frames", "graph_break", "stats", "recompiles")}

    alone, expected = run(contextlib.nullcontext())
    recorder = attn_diag.capture(None, tmp_path, batch=None)
    watched, counted = run(recorder)
    assert counted == expected
    assert all(map(torch.equal, watched, alone))
    assert len(recorder.written) == 3 * 3


def test_blocks_that_a_reentrant_checkpoint_makes_again_are_seen(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And nothing else is said of them: the first run of a checkpoint has no gradients, and is not counted."""
    tiny = nano_gpt(checkpointing=True)
    for name in ("h.0", "h.1"):
        tiny.model.get_submodule(name).compile(backend="aot_eager")
    with attn_diag.capture(tiny.model, tmp_path, batch=None):
        steps(tiny, 2)
    found = captures(tmp_path)
    assert sorted(found) == [(step, layer) for step in (0, 1) for layer in (0, 1)]
    assert all(set(QUANTITIES) <= capture.tensors.keys() for capture in found.values())
    assert "not seen" not in caplog.text


def test_a_layer_that_a_graph_calls_thrice_is_one(tmp_path: Path) -> None:
    """As ALBERT's: which module makes q is read off each product, not off the order of calls."""
    tiny = nano_gpt(layers=1)
    tiny.model.h = nn.ModuleList([tiny.model.get_submodule("h.0")] * 3)
    run: Any = torch.compile(tiny.model, backend="aot_eager")
    with attn_diag.capture(tiny.model, tmp_path, batch=None, calls=None):
        steps(Tiny(tiny.model, lambda _: tiny.loss(run), tiny.attentions))
    found = [attn_diag.load(path).metadata for path in sorted(tmp_path.glob("*.safetensors"))]
    assert [(m.layer, m.extra["module"], m.extra["call"]) for m in found] == [
        (0, "h.0.attn", str(call)) for call in range(3)
    ]


def test_compiled_autograd_around_an_eager_model(tmp_path: Path) -> None:
    """Its graph holds nothing of ours: it is compiled as often as without, and gradients come from the operators."""

    def run(watch: Callable[[nn.Module], Any]) -> tuple[list[Tensor], dict[str, dict[str, int]]]:
        torch._dynamo.reset()
        counters.clear()
        tiny = nano_gpt(layers=1)
        optimizer = torch.optim.SGD(tiny.model.parameters(), lr=0.1)
        with watch(tiny.model):
            for _ in range(3):
                optimizer.zero_grad()
                with compiled_autograd._enable(torch.compile(backend="eager")):
                    torch.autograd.backward(tiny.loss(tiny.model))
                optimizer.step()
        bits = [p.detach().clone() for p in tiny.model.parameters()]
        return bits, {name: dict(counters[name]) for name in ("compiled_autograd", "stats", "graph_break")}

    alone, expected = run(contextlib.nullcontext)
    watched, counted = run(lambda model: attn_diag.capture(model, tmp_path, steps={1, 2}, batch=None))
    assert expected["compiled_autograd"] == {"captures": 1}
    assert counted == expected
    assert all(map(torch.equal, watched, alone))
    found = captures(tmp_path)
    assert sorted(found) == [(1, 0), (2, 0)]
    assert all(capture.tensors.keys() >= {*QUANTITIES, "x", "w_q", "dq_pre"} for capture in found.values())
    assert all(map(holds, found.values()))
