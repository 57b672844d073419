"""What is recorded into a CUDA graph is told of at its replays: played on a CPU, where no CUDA graph is.

A stand-in for torch.cuda.CUDAGraph runs the graph again for a replay, and then fills the copies that were made when it
was recorded, as a real replay would. ``test_live_gpu.py`` has the real ones.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from builders import holds, some
from tiny_models import Tiny, nano_gpt, same, train, train_watched, written
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func

import attn_diag
from attn_diag.watching.live import cuda_graphs, intercept, products, watch
from attn_diag.watching.live.operator_calls import OperatorBackward, OperatorCall

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # of the compiler
QUANTITIES = {"q", "k", "v", "o", "lse", "do", "dq", "dk", "dv"}


class Graph:
    """Stands in for torch.cuda.CUDAGraph."""

    recording: Graph | None = None

    def __init__(self) -> None:
        self.copies: list[Tensor] = []
        self.work: Callable[[], None] = lambda: None

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:  # noqa: ARG002
        Graph.recording = self

    def capture_end(self) -> None:
        Graph.recording = None

    def replay(self) -> None:
        recorded, self.copies = self.copies, []
        # Its operators are met once more, for the copies of what they give now; nothing of that is told.
        intercept.recordings._records[-1] = cuda_graphs._Record()
        Graph.recording = self
        intercept.meet_operators()
        self.work()
        del intercept.recordings._records[-1]
        Graph.recording = None
        intercept.meet_operators()
        for then, now in zip(recorded, self.copies, strict=True):
            then.copy_(now)
        self.copies = recorded


@pytest.fixture(autouse=True)
def _played(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    make = cuda_graphs._Copies.make

    def made(copies: Any) -> None:
        if Graph.recording is not None:
            Graph.recording.copies += [copy for those, _ in copies._pairs.values() for copy in those]
        make(copies)

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(cuda_graphs, "_outside_the_graphs_memory", torch.empty_like)
    monkeypatch.setattr(cuda_graphs._Copies, "make", made)
    for module in (cuda_graphs, intercept, products, watch):
        monkeypatch.setattr(module, "in_cuda_graph", lambda: Graph.recording is not None)
    for kind in (OperatorCall, OperatorBackward):
        monkeypatch.setattr(kind, "is_cuda", True)
    monkeypatch.setitem(sys.modules, "torch._inductor.cudagraph_trees", ModuleType("cudagraph_trees"))
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    assert not intercept.recordings._theirs


def graphed(graph: Any, _: Any) -> Any:
    """As torch's cudagraph_trees: a warm-up, a recording and its replay, then replays with other inputs."""
    space: dict[str, Any] = {}
    exec(compile("def run(call, *args): return call(*args)", "torch/_inductor/cudagraph_trees.py", "exec"), space)
    runs, recorded = 0, Graph()
    static: list[Any] = []
    outputs: list[Any] = []

    def call(*args: Any) -> Any:
        nonlocal runs
        runs += 1
        if runs == 1:
            return graph(*args)
        if runs == 2:
            static.extend(args)
            recorded.capture_begin(capture_error_mode="thread_local")
            graph(*args)
            recorded.capture_end()

            def work() -> None:
                outputs[:] = graph(*static)

            recorded.work = work
        static[:] = args
        recorded.replay()
        return list(outputs)

    return make_boxed_func(lambda *args: space["run"](call, *args))


@pytest.mark.parametrize("checkpointing", [None, False], ids=["", "checkpointed"])
def test_replays_are_told_of(checkpointing: bool | None, tmp_path: Path) -> None:
    def run(folder: Path | None) -> tuple[list[Tensor], Any]:
        torch._dynamo.reset()
        tiny = nano_gpt(checkpointing)
        compiled: Any = torch.compile(tiny.model, fullgraph=True, backend=aot_autograd(fw_compiler=graphed))
        return train_watched(
            tiny, lambda _: tiny.loss(compiled), folder, count=6, micro_batches=2, steps={0, 3, 5}, every=2
        )

    watched, recorder = run(tmp_path)
    assert same(run(None)[0], watched)
    found = written(recorder)
    assert not recorder.dropped
    where = [(c.metadata.step, c.metadata.layer, int(c.metadata.extra["call"])) for c in found]
    assert sorted(where) == [(s, layer, m) for s in (0, 3, 5) for layer in (0, 1) for m in (0, 1)]
    eager = nano_gpt(checkpointing)
    with attn_diag.capture(eager.model, tmp_path / "eager", steps={0}, batch=(1,)) as alone:
        train(Tiny(eager.model, eager.loss, ()), attn_diag.capture(None, tmp_path / "unused", steps=()))
    first = {c.metadata.layer: c for c in written(alone)}
    for capture in found:
        assert capture.tensors.keys() >= QUANTITIES
        assert capture.metadata.extra["module"] == f"h.{capture.metadata.layer}.attn"
        assert holds(capture)
        if capture.metadata.step == 0 and capture.metadata.extra["call"] == "0":
            for name in QUANTITIES - {"lse"}:
                a, b = (c.tensors[name][...] for c in (capture, first[some(capture.metadata.layer)]))
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", ["global", "thread_local"])
def test_a_whole_step_of_ones_own_steps_when_it_is_replayed(mode: str, tmp_path: Path) -> None:
    tiny = nano_gpt()
    optimizer = torch.optim.SGD(tiny.model.parameters(), lr=0.1)

    def work() -> None:
        optimizer.zero_grad()
        torch.autograd.backward(tiny.loss(tiny.model))
        optimizer.step()

    with attn_diag.capture(tiny.model, tmp_path, steps={1, 3}, batch=None) as recorder:
        work()
        graph = Graph()
        graph.work = work
        graph.capture_begin(capture_error_mode=mode)
        work()
        graph.capture_end()
        assert recorder.step == 1
        for _ in range(4):
            graph.replay()
        assert recorder.step == 5
    found = written(recorder)
    assert not recorder.dropped
    assert [(c.metadata.step, c.metadata.layer) for c in found] == [(1, 0), (1, 1), (3, 0), (3, 1)]
    for capture in found:
        assert capture.tensors.keys() >= QUANTITIES
        assert capture.metadata.extra["module"] == f"h.{capture.metadata.layer}.attn"
        assert holds(capture)
