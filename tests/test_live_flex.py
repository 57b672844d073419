"""FlexAttention inside compiled graphs: operators behind its nodes, forward and backward, that change nothing.

On a CPU inductor makes code of FlexAttention's forward alone. So training runs here what inductor would be given: the
graphs that it would lower, after our pass, with torch's own dense FlexAttention for the kernel (``lowered_as_is``).
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import holds
from flex_models import (
    BATCH,
    DIM,
    HEADS,
    LENGTH,
    QUANTITIES,
    FlexSelfAttention,
    Layers,
    alibi,
    block_mask,
    documents,
    gradient_errors,
    masked,
    near,
    train,
    x_of,
)
from tiny_models import same, written
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor import config
from torch.nn.attention import flex_attention as flex

import attn_diag
from attn_diag.watching.live.unseen import FLEX as FLEX_UNSEEN

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # of the compiler


@pytest.fixture(autouse=True)
def _on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """FlexAttention refuses gradients on a CPU, though its dense code has them, and keeps no LSE there."""
    options = flex._apply_kernel_options

    def with_lse(*args: Any, **kwargs: Any) -> Any:
        return {**options(*args, **kwargs), "OUTPUT_LOGSUMEXP": torch.is_grad_enabled()}

    monkeypatch.setattr(flex, "_validate_device", lambda *_: None)
    monkeypatch.setattr(flex, "_apply_kernel_options", with_lse)
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()
    assert config.post_grad_custom_pre_pass is None


def graphs(seen: list[torch.fx.Graph]) -> Any:
    """A backend that does what inductor does until its own passes begin, and runs what it is then given."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch._aot_autograd.utils import make_boxed_func
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    def compile_(module: torch.fx.GraphModule, inputs: Any) -> Any:  # noqa: ARG001 - what a compiler is given
        run: Any = config.post_grad_custom_pre_pass
        if run is not None:
            run(module.graph)
            module.graph.lint()
            module.recompile()
        seen.append(module.graph)
        return make_boxed_func(module)

    return aot_autograd(
        fw_compiler=compile_, decompositions=select_decomp_table, partition_fn=min_cut_rematerialization_partition
    )


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": dict,
    "scale": lambda: {"scale": 0.3},
    "block mask": lambda: {"block_mask": block_mask(near)},
    "captured mask": lambda: {"block_mask": block_mask(documents("cpu", LENGTH), BATCH)},
    "score_mod": lambda: {"score_mod": alibi, "block_mask": block_mask(near)},
}


@pytest.mark.parametrize(
    ("case", "key_heads"),
    [
        ("plain", HEADS), ("plain", 2), ("scale", 2), ("block mask", HEADS), ("captured mask", HEADS), ("score_mod", 2),
    ],
)  # fmt: skip
def test_a_compiled_model_is_captured_and_trains_as_it_did(case: str, key_heads: int, tmp_path: Path) -> None:
    options = CASES[case]()
    alone = Layers(key_heads)
    expected = train(alone, torch.compile(alone, backend=graphs([]), fullgraph=True), options)
    torch._dynamo.reset()
    model = Layers(key_heads)
    seen: list[torch.fx.Graph] = []
    run = torch.compile(model, backend=graphs(seen), fullgraph=True)
    recorder = attn_diag.capture(model, tmp_path, steps={1, 3}, batch=None)
    assert same(train(model, run, options, recorder), expected)
    assert not counters["graph_break"]
    assert len(seen) == 2
    found = written(recorder)
    assert [(c.metadata.step, c.metadata.layer) for c in found] == [(1, 0), (1, 1), (3, 0), (3, 1)]
    for capture in found:
        assert capture.tensors.keys() >= QUANTITIES
        assert capture.metadata.extra["module"] == f"blocks.{capture.metadata.layer}"
        assert capture.metadata.kernel == "torch FlexAttention"
        assert not capture.metadata.notes
        assert capture.scale == pytest.approx(options.get("scale", DIM**-0.5))
        assert holds(capture)
        assert max(gradient_errors(capture).values()) < 1e-5
    if "block_mask" in options:
        given = options["block_mask"]
        batch, heads = given.shape[:2]
        seen_keys = flex.create_mask(given.mask_mod, batch, heads, LENGTH, LENGTH, device="cpu")
        for capture in found:
            kept = masked(capture)
            assert kept is not None
            assert torch.equal(kept if kept.dtype == torch.bool else kept.isfinite(), seen_keys.expand(kept.shape))
    else:
        assert all(masked(capture) is None for capture in found)


def test_a_graph_that_checkpoints_has_no_gradients_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    alone = Layers(checkpointed=True)
    expected = train(alone, torch.compile(alone, backend=graphs([]), fullgraph=True), {})
    torch._dynamo.reset()
    model = Layers(checkpointed=True)
    recorder = attn_diag.capture(model, tmp_path, steps={1}, batch=None)
    assert same(train(model, torch.compile(model, backend=graphs([]), fullgraph=True), {}, recorder), expected)
    assert caplog.text.count("block.compile()") == 1
    for capture in written(recorder):
        assert not {"do", "dq", "dk", "dv"} & capture.tensors.keys()
        assert holds(capture)
    caplog.clear()
    torch._dynamo.reset()
    model = Layers(checkpointed=True)
    for block in model.blocks:
        block.compile(backend=graphs([]), fullgraph=True)
    recorder = attn_diag.capture(model, tmp_path / "blocks", steps={1}, batch=None)
    assert same(train(model, model, {}, recorder), expected)
    assert all(capture.tensors.keys() >= QUANTITIES for capture in written(recorder))
    assert "FlexAttention" not in caplog.text


def test_numbers_of_a_closure_and_dynamic_shapes(tmp_path: Path) -> None:
    model = Layers()

    def call(x: Tensor, window: int) -> Tensor:
        def within(_b: Tensor, _h: Tensor, row: Tensor, key: Tensor) -> Tensor:
            return (row >= key) & (row - key < window)

        mask = flex.create_block_mask(within, None, None, x.shape[1], x.shape[1], device="cpu")
        made: Tensor = model(x, {"block_mask": mask})
        return made

    run = torch.compile(call, backend=graphs([]), fullgraph=True, dynamic=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attn_diag.capture(model, tmp_path, layers={1}) as recorder:
        for length, window in ((20, 4), (33, 9)):
            torch.autograd.backward(run(x_of(0, length), window).sum())
            optimizer.step()
    for capture, window in zip(written(recorder), (4, 9), strict=True):
        row = torch.arange(capture.tensors["q"].shape[2])
        distance = row[:, None] - row
        kept = masked(capture)
        assert kept is not None
        assert torch.equal(kept[0, 0], (distance >= 0) & (distance < window))
        assert holds(capture)
        assert capture.metadata.extra["module"] == "blocks.1"


def test_blocks_compiled_alone_have_their_own_names(tmp_path: Path) -> None:
    model = Layers()
    for block in model.blocks:
        block.compile(backend=graphs([]), fullgraph=True)
    with attn_diag.capture(model, tmp_path, batch=None) as recorder:
        for _ in range(2):
            torch.autograd.backward(model(x_of(0), {}).sum())
            torch.optim.SGD(model.parameters(), lr=0.1).step()
    found = written(recorder)
    assert [(c.metadata.step, c.metadata.extra["module"]) for c in found] == [
        (step, f"blocks.{layer}") for step in (0, 1) for layer in (0, 1)
    ]
    assert all(c.tensors.keys() >= QUANTITIES for c in found)


def test_a_function_around_the_model(tmp_path: Path) -> None:
    """Two models in one graph: whose weights make a q is known, also where both have the same values in them."""
    model, other = Layers(), Layers()
    run = torch.compile(lambda x: model(x, {}), backend=graphs([]))
    with attn_diag.capture(model, tmp_path) as recorder:
        torch.autograd.backward(run(x_of(0)).sum())
    assert [c.metadata.extra["module"] for c in written(recorder)] == ["blocks.0", "blocks.1"]
    torch._dynamo.reset()
    expected = {c.metadata.extra["module"]: c.tensors["do"][...] for c in written(recorder)}
    both = torch.compile(lambda x: 2 * other(x, {}) + model(x, {}), backend=graphs([]))
    with attn_diag.capture(model, tmp_path / "both") as recorder:
        torch.autograd.backward(both(x_of(0)).sum())
    found = [(c.metadata.extra.get("module") or "", c.tensors["do"][...]) for c in written(recorder)]
    assert sorted(name for name, _ in found) == ["", "", "blocks.0", "blocks.1"]
    for name, do in found:
        # Only the other's are twice as large.
        assert any(torch.equal(do, 2 * t) for t in expected.values()) if not name else torch.equal(do, expected[name])


def test_gradients_are_left_out_where_the_lse_has_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Sunk(FlexSelfAttention):
        """Rescales O by the LSE, as attention sinks are made."""

        def forward(self, x: Tensor, options: dict[str, Any]) -> Tensor:
            q, k, v = (t.unflatten(-1, (-1, DIM)).transpose(1, 2) for t in self.qkv(x).split(self.sizes, -1))
            o, aux = flex.flex_attention(q, k, v, return_aux=flex.AuxRequest(lse=True), **options)
            made: Tensor = (o * torch.sigmoid(aux.lse)[..., None]).transpose(1, 2).flatten(-2)
            return made

    model = Sunk(HEADS)
    with attn_diag.capture(model, tmp_path) as recorder:
        torch.autograd.backward(torch.compile(model, backend=graphs([]))(x_of(0), {}).sum())
    (capture,) = written(recorder)
    assert capture.tensors.keys() >= {"q", "o", "lse"}
    assert "dq" not in capture.tensors
    assert "the LSE has one too" in caplog.text


@pytest.mark.parametrize("case", ["block mask", "score_mod"])
def test_a_monitor_checks(case: str) -> None:
    model = Layers()
    with attn_diag.Monitor(model, every=2) as monitor:
        train(model, torch.compile(model, backend=graphs([])), CASES[case](), steps=3)
        found = monitor.metrics(wait=True)
    # In units of one rounding to fp32: without the bias it would be a million.
    assert found["attn/noise_factor/max"] < 10
    assert [check.step for check in monitor.history] == [0, 2]
    assert [layer.module for layer in monitor.history[0].layers] == ["blocks.0", "blocks.1"]


# What inductor itself makes of it: forward alone, on a CPU.


def inference(run: Any, options: dict[str, Any], count: int = 3) -> list[Tensor]:
    with torch.no_grad():
        return [run(x_of(step), options) for step in range(count)]


def test_inductor_keeps_the_operators_also_in_what_it_reads_from_disk(tmp_path: Path) -> None:
    model = Layers(2).eval()
    options = {"block_mask": block_mask(documents("cpu", LENGTH), BATCH), "score_mod": alibi}
    expected = inference(torch.compile(model), options)
    for again in range(2):
        torch._dynamo.reset()
        counters.clear()
        with attn_diag.capture(model, tmp_path / str(again), batch=None, steps={0, 2}) as recorder:
            assert same(inference(torch.compile(model), options), expected)
        assert counters["inductor"]["fxgraph_cache_hit"] >= again
        found = written(recorder)
        assert [(c.metadata.step, c.metadata.layer) for c in found] == [(0, 0), (0, 1), (2, 0), (2, 1)]
        for capture in found:
            assert holds(capture)
            assert "mask" in capture.tensors
            assert capture.metadata.extra["module"] == f"blocks.{capture.metadata.layer}"


def test_a_graph_compiled_before_says_what_to_do(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = Layers().eval()
    run = torch.compile(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def steps(folder: str) -> Any:
        with attn_diag.capture(model, tmp_path / folder) as recorder:
            for _ in range(2):
                inference(run, {}, count=1)
                optimizer.step()
        return recorder

    inference(run, {})
    assert not steps("before").written
    assert caplog.text.count(FLEX_UNSEEN) == 1
    caplog.clear()
    torch._dynamo.reset()
    assert steps("after").written
    assert FLEX_UNSEEN not in caplog.text


def test_the_users_own_pass_goes_first_and_stays(tmp_path: Path) -> None:
    calls: list[str] = []

    def theirs(graph: torch.fx.Graph) -> None:
        calls.append("theirs")
        assert not any("flex_forward" in str(node.target) for node in graph.nodes)

    model = Layers().eval()
    with config.patch(post_grad_custom_pre_pass=theirs):
        with attn_diag.capture(model, tmp_path) as recorder:
            assert config.post_grad_custom_pre_pass is not theirs
            inference(torch.compile(model), {}, count=1)
        assert config.post_grad_custom_pre_pass is theirs
    assert calls
    assert len(recorder.written) == 2


def test_a_capture_that_never_began_gives_inductor_back_its_pass(tmp_path: Path) -> None:
    recorder = attn_diag.capture(Layers(), tmp_path)
    assert config.post_grad_custom_pre_pass is not None
    del recorder
    gc.collect()
    assert config.post_grad_custom_pre_pass is None


def test_a_function_that_is_compiled_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its graph returns the LSE, and cannot know that nobody differentiates it."""
    monkeypatch.setitem(globals(), "compiled_flex", torch.compile(flex.flex_attention, backend=graphs([])))
    q, k, v = (torch.randn(BATCH, HEADS, LENGTH, DIM, requires_grad=True) for _ in range(3))
    with attn_diag.capture(None, tmp_path, batch=None) as recorder:
        o, _ = globals()["compiled_flex"](q, k, v, return_lse=True)
        torch.autograd.backward(o.square().sum())
    (capture,) = written(recorder)
    assert capture.tensors.keys() >= QUANTITIES
    assert max(gradient_errors(capture).values()) < 1e-5


def test_a_region_compiled_once_for_all_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Layers().eval()
    region = torch.compiler.nested_compile_region(FlexSelfAttention.forward)
    monkeypatch.setattr(FlexSelfAttention, "forward", region)
    with attn_diag.capture(model, tmp_path) as recorder:
        inference(torch.compile(model), {}, count=2)
    found = written(recorder)
    assert [(c.metadata.step, c.metadata.layer) for c in found] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert not any(torch.equal(a.tensors["q"][...], b.tensors["q"][...]) for a, b in pairwise(found))


# Training by inductor, with operators that stand for the kernels that it has for GPUs alone.


@torch.library.custom_op("attn_diag_tests::flex", mutates_args=())
def stand_in(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores = q @ k.mT * scale
    return (scores.softmax(-1) @ v).contiguous(), scores.logsumexp(-1) / math.log(2)


@stand_in.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:  # noqa: ARG001 - a signature
    return q.new_empty(q.shape), q.new_empty(q.shape[:3])


@torch.library.custom_op("attn_diag_tests::flex_backward", mutates_args=())
def stand_in_backward(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    heads, groups = k.shape[1], q.shape[1] // k.shape[1]
    keys, values = (t.repeat_interleave(groups, 1) for t in (k, v))
    p = torch.exp(q @ keys.mT * scale - lse[..., None] * math.log(2))
    ds = p * (do @ values.mT - (do * o).sum(-1, keepdim=True)) * scale
    each: list[Any] = [ds.mT @ q, p.mT @ do]
    dk, dv = (t.unflatten(1, (heads, groups)).sum(2) for t in each)
    return (ds @ keys).contiguous(), dk, dv


@stand_in_backward.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor, scale: float  # noqa: ARG001
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def stand_ins(graph: torch.fx.Graph) -> None:
    for node in list(graph.nodes):
        for target, operator, count, scale in (
            (torch.ops.higher_order.flex_attention, stand_in, 3, 5),
            (torch.ops.higher_order.flex_attention_backward, stand_in_backward, 6, 10),
        ):
            if node.target is target:
                with graph.inserting_before(node):
                    made = graph.call_function(operator._opoverload, (*node.args[:count], node.args[scale]))
                made.meta["val"] = node.meta["val"][:3]
                node.replace_all_uses_with(made)
                graph.erase_node(node)


@pytest.mark.parametrize("dynamic", [None, True], ids=["", "dynamic"])
def test_training_by_inductor(dynamic: bool | None, tmp_path: Path) -> None:
    def run(watching: Any) -> list[Tensor]:
        torch._dynamo.reset()
        model = Layers(2)
        compiled = torch.compile(model, fullgraph=True, dynamic=dynamic)
        return train(model, compiled, {}, watching(model) if watching else None)

    with config.patch(post_grad_custom_post_pass=stand_ins):
        expected = run(None)
        recorders = []

        def watching(model: nn.Module) -> Any:
            recorders.append(attn_diag.capture(model, tmp_path, steps={0, 1, 3}, batch=None))
            return recorders[0]

        assert same(run(watching), expected)
    found = written(recorders[0])
    assert [(c.metadata.step, c.metadata.layer) for c in found] == [(s, layer) for s in (0, 1, 3) for layer in (0, 1)]
    for capture in found:
        assert capture.tensors.keys() >= QUANTITIES
        assert capture.metadata.extra["module"] == f"blocks.{capture.metadata.layer}"
        assert holds(capture)
        assert max(gradient_errors(capture).values()) < 1e-5
