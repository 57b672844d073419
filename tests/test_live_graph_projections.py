"""The query projection in compiled graphs: x, w_q and dq_pre give the weight's own gradient, and nothing changes."""

from __future__ import annotations

import _thread
import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import some
from tiny_models import HEADS, WIDTH, Tiny, nano_gpt, next_token_loss, tokens, transformers_model
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn import functional

import attn_diag
from attn_diag.captures.capture import Capture
from attn_diag.watching.live import products
from attn_diag.watching.live.query_projections import NO_PROJECTION

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # of the compiler
PROJECTION = ("x", "w_q", "dq_pre")
DIM = WIDTH // HEADS


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
    assert not products._kernels.there


def whole(model: nn.Module) -> Any:
    return torch.compile(model, fullgraph=True)


def not_lowered(model: nn.Module) -> Any:
    return torch.compile(model, fullgraph=True, backend="aot_eager")


def dynamic(model: nn.Module) -> Any:
    return torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")


def traced_alone(model: nn.Module) -> Any:
    return torch.compile(model, fullgraph=True, backend="eager")


def by_blocks(model: nn.Module, **options: Any) -> nn.Module:
    for module in list(model.modules()):
        if type(module).__name__.endswith(("Block", "DecoderLayer")) or type(module) is Attention:
            module.compile(**options)
    return model


def blocks(model: nn.Module) -> nn.Module:
    return by_blocks(model, fullgraph=True)


def blocks_not_lowered(model: nn.Module) -> nn.Module:
    return by_blocks(model, fullgraph=True, backend="aot_eager")


def captures(folder: Path) -> dict[tuple[int | None, int | None], Capture]:
    found = [attn_diag.load(path) for path in sorted(folder.glob("*.safetensors"))]
    return {(c.metadata.step, c.metadata.layer): c for c in found}


Gradients = dict[str, Tensor]


def train(
    tiny: Tiny, run: Any, watching: contextlib.AbstractContextManager[Any], *, autocast: bool, count: int = 6
) -> tuple[list[Tensor], list[Gradients]]:
    """Losses and parameters of all steps, and their gradients; one step runs before anything is watched."""
    optimizer = torch.optim.AdamW(tiny.model.parameters(), lr=1e-2)
    bits: list[Tensor] = []
    gradients: list[Gradients] = []

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = tiny.loss(run)
        torch.autograd.backward(loss)
        gradients.append({name: p.grad.clone() for name, p in tiny.model.named_parameters() if p.grad is not None})
        optimizer.step()
        bits.extend([loss.detach().clone(), *(p.detach().clone() for p in tiny.model.parameters())])

    step()
    with watching:
        for _ in range(count):
            step()
    return bits, gradients[1:]


def weight_gradient(gradients: Gradients, module: str) -> Tensor:
    """That of w_q [Hq * D, C], out of the gradients of a model's weights."""
    for name, gradient in gradients.items():
        if name.startswith(f"{module}.") and name.endswith(".weight"):
            match name.removeprefix(f"{module}.").removesuffix(".weight"):
                case "q_proj":
                    return gradient
                case "c_attn":
                    return (gradient if "transformer" not in name else gradient.T)[:WIDTH]
                case "query_key_value":
                    return gradient.view(HEADS, 3, DIM, WIDTH)[:, 0].flatten(0, 1)
    raise AssertionError(module)


def assert_made(capture: Capture, layer: nn.Linear) -> None:
    """The rows of q are as long as those of the layer's output for x: a rotation lies between."""
    there = {name: capture.tensors[name][...] for name in ("x", "w_q", "q")}
    assert torch.equal(there["w_q"], layer.weight.detach())
    y = functional.linear(there["x"], there["w_q"], layer.bias)
    length = y.view(*y.shape[:2], HEADS, DIM).norm(dim=-1)
    assert torch.allclose(length, there["q"].transpose(1, 2).norm(dim=-1), rtol=1e-4)


def explained(capture: Capture) -> Tensor:
    """dq_pre^T x, [Hq * D, C]."""
    after, x = capture.tensors["dq_pre"][...], capture.tensors["x"][...]
    return after.transpose(1, 2).flatten(2).flatten(0, 1).double().T @ x.flatten(0, 1).double()


def assert_explains(capture: Capture, gradients: Gradients) -> None:
    """dq_pre^T x is the weight's gradient, up to the order of an FP32 sum and one rounding to the working format."""
    there = {name: t[...] for name, t in capture.tensors.items()}
    assert set(PROJECTION) <= there.keys()
    expected = weight_gradient(gradients, str(capture.metadata.extra["module"])).double()
    found = explained(capture)
    after, x = there["dq_pre"].transpose(1, 2).flatten(2).flatten(0, 1).double(), there["x"].flatten(0, 1).double()
    # n terms in FP32, in any order, are off by at most n 2**-24 of the sum of their sizes.
    slack = len(x) * 2.0**-24 * (after.abs().T @ x.abs())
    if there["x"].dtype == torch.bfloat16:
        slack += 2.0**-8 * found.abs()  # half an ulp, at most
    assert ((found - expected).abs() <= slack * (1 + 2.0**-8)).all()


MODELS: dict[str, Callable[[], Tiny]] = {
    "nano": nano_gpt,
    "checkpointed": lambda: nano_gpt(False),
    "reentrant": lambda: nano_gpt(True),
    **{kind: lambda kind=kind: transformers_model(kind, "sdpa") for kind in ("llama", "qwen3", "gpt_neox", "gpt2")},  # type: ignore[misc]
}
# In BF16 where True.
CASES: list[tuple[str, Callable[[nn.Module], Any], bool]] = [
    ("nano", whole, True), ("nano", blocks, False), ("nano", dynamic, True), ("nano", traced_alone, True),
    ("checkpointed", whole, True), ("checkpointed", not_lowered, False), ("reentrant", blocks_not_lowered, False),
    ("llama", whole, True), ("llama", blocks, True),
    ("llama", traced_alone, False), ("qwen3", not_lowered, True), ("qwen3", blocks_not_lowered, False),
    ("gpt_neox", not_lowered, True), ("gpt2", blocks_not_lowered, True),
]  # fmt: skip


@contextlib.contextmanager
def nothing_compiled(recorder: Any) -> Iterator[None]:
    with torch._dynamo.config.patch(error_on_recompile=True), recorder:
        yield


@pytest.mark.parametrize(
    ("model", "way", "autocast"), CASES, ids=[f"{m}-{way.__name__}-{'bf16' if a else 'fp32'}" for m, way, a in CASES]
)
def test_the_weights_gradient_is_explained(
    model: str, way: Callable[[nn.Module], Any], autocast: bool, tmp_path: Path
) -> None:
    alone = MODELS[model]()
    expected = train(alone, way(alone.model), contextlib.nullcontext(), autocast=autocast)[0]
    breaks = dict(counters["graph_break"])
    torch._dynamo.reset()
    counters.clear()
    tiny = MODELS[model]()
    run = way(tiny.model)
    recorder = attn_diag.capture(tiny.model, tmp_path, steps={1, 3, 5}, batch=None)
    bits, gradients = train(tiny, run, nothing_compiled(recorder), autocast=autocast)
    assert len(bits) == len(expected)
    assert all(map(torch.equal, bits, expected))
    assert counters["graph_break"] == breaks
    found = captures(tmp_path)
    assert sorted(found) == [(step, layer) for step in (1, 3, 5) for layer in (0, 1)]
    for (step, _), capture in found.items():
        assert_explains(capture, gradients[some(step)])
        assert NO_PROJECTION not in str(capture.metadata.notes)


def test_the_tensors_are_those_of_the_eager_model(tmp_path: Path) -> None:
    """Up to what a compiler may round otherwise; the weight exactly, in its own dtype."""
    for autocast in (False, True):
        found = []
        for compiled in (False, True):
            tiny = transformers_model("llama", "sdpa")
            folder = tmp_path / f"{autocast}{compiled}"
            run = not_lowered(tiny.model) if compiled else tiny.model
            train(tiny, run, attn_diag.capture(tiny.model, folder, batch=None), autocast=autocast, count=1)
            found.append(captures(folder))
        for key, eager in found[0].items():
            for name in PROJECTION:
                one, other = (c.tensors[name][...] for c in (eager, found[1][key]))
                assert one.dtype == other.dtype
                off = (one.double() - other.double()).norm() / one.double().norm()
                assert off < (2.0**-6 if autocast else 1e-4), (key, name)


@pytest.mark.parametrize("model", ["nano", "llama"])
def test_inspect_gives_dw_q(model: str, tmp_path: Path) -> None:
    tiny = MODELS[model]()
    train(tiny, not_lowered(tiny.model), attn_diag.capture(tiny.model, tmp_path, steps={1}), autocast=True, count=2)
    found = attn_diag.inspect_captures(captures(tmp_path).values())
    for head in (head for entry in found.captures for head in entry.observations[0].heads):
        assert some(some(head.propagation.dw_q).relative_error) > 0


def test_products_are_met_on_wanted_steps_alone(tmp_path: Path) -> None:
    tiny = nano_gpt()
    run = not_lowered(tiny.model)
    optimizer = torch.optim.SGD(tiny.model.parameters(), lr=0.1)
    torch.autograd.backward(tiny.loss(run))
    met = []
    with attn_diag.capture(tiny.model, tmp_path, steps={1, 3}):
        for _ in range(5):
            torch.autograd.backward(tiny.loss(run))
            met.append(products._kernels.there)
            optimizer.step()
    assert met == [False, True, False, True, False]


def test_a_product_that_no_python_calls() -> None:
    """As in autograd's threads for a GPU, whose stacks begin in torch."""
    met: list[products.Product] = []
    a, b, made = torch.ones(2, 3), torch.ones(3, 2), torch.zeros(2, 2)
    products.listen(met.append, wanted=True)
    try:
        _thread.start_new_thread(torch.mm, (a, b), {"out": made})
        for _ in range(1000):
            if met:
                break
            time.sleep(0.01)
    finally:
        products.listen(met.append, wanted=False)
    assert [one.site for one in met] == [None]
    assert bool((made == 3).all())


class Attention(nn.Module):
    """Rotates q, and has its projection made in one of several ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.q_proj, self.kv = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        angles = torch.rand(20, DIM // 2)
        self.angles = angles.cos(), angles.sin()

    def project(self, x: Tensor) -> Tensor:
        match self.way:
            case "a bias that is added later":
                # What inductor makes of a layer with a bias that is used in pointwise operations, on a GPU.
                return functional.linear(x, self.q_proj.weight) + self.q_proj.bias
            case "a weight that is computed":
                return functional.linear(x, self.q_proj.weight * 2)
            case _:
                return self.q_proj(x)  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        q, (k, v) = self.project(x), self.kv(x).chunk(2, -1)
        q, k, v = (t.unflatten(-1, (HEADS, DIM)).transpose(1, 2) for t in (q, k, v))
        left, right = q.chunk(2, -1)
        cos, sin = self.angles
        q = torch.cat([left * cos - right * sin, left * sin + right * cos], -1)
        return self.attend(q, k, v).transpose(1, 2).flatten(2)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True)


class Stack(nn.Module):
    def __init__(self, way: str, *, shared: bool = False) -> None:
        super().__init__()
        self.wte, self.head = nn.Embedding(61, WIDTH), nn.Linear(WIDTH, 61)
        self.h = nn.ModuleList([Attention(way) for _ in range(1 if shared else 2)])
        self.repeats = 2 if shared else 1

    def forward(self, ids: Tensor) -> Tensor:
        x = self.wte(ids)
        for layer in list(self.h) * self.repeats:
            x = x + layer(x)
        return self.head(x)  # type: ignore[no-any-return]


def stack(way: str, *, shared: bool = False) -> Tiny:
    torch.manual_seed(0)
    model = Stack(way, shared=shared)
    return Tiny(model, lambda run: next_token_loss(run, tokens()), ())


WAYS = ("a layer", "a bias that is added later", "a weight that is computed")


@pytest.mark.parametrize("way", WAYS)
def test_where_it_is_not_found_the_file_says_so(way: str, tmp_path: Path) -> None:
    """Never another layer's x: what is there explains the weight's gradient."""
    tiny = stack(way)
    capture = attn_diag.capture(tiny.model, tmp_path, batch=None)
    gradients = train(tiny, not_lowered(tiny.model), capture, autocast=False, count=2)[1]
    found = captures(tmp_path)
    assert len(found) == 4
    for (step, _), one in found.items():
        if way == "a weight that is computed":
            assert not set(PROJECTION) & one.tensors.keys()
            assert NO_PROJECTION in str(one.metadata.notes)
        else:
            assert_explains(one, gradients[some(step)])


def test_a_layer_that_is_called_twice_has_the_x_of_each_call(tmp_path: Path) -> None:
    """Both calls have the same weight, code and places in it."""
    tiny = stack("a layer", shared=True)
    by_blocks(tiny.model, fullgraph=True, backend="aot_eager")
    recorder = attn_diag.capture(tiny.model, tmp_path, batch=None, calls=None)
    _, (gradients,) = train(tiny, tiny.model, recorder, autocast=False, count=1)
    first, second = (attn_diag.load(path) for path in sorted(recorder.written))
    assert [c.metadata.extra["call"] for c in (first, second)] == ["0", "1"]
    found = sum(explained(c) for c in (first, second))
    expected = weight_gradient(gradients, "h.0").double()
    assert (found - expected).norm() < 1e-5 * expected.norm()
    assert (explained(first) - expected).norm() > 0.1 * expected.norm()


@pytest.mark.parametrize("frozen", ["wte", "q_proj"])
def test_one_of_the_two_gradients_is_enough(frozen: str, tmp_path: Path) -> None:
    """That of x is not computed above a frozen embedding, that of a weight not where it is frozen itself."""
    found: list[dict[tuple[int | None, int | None], Capture]] = []
    for name in ("", frozen):
        tiny = stack("a layer")
        if name:
            for other, parameter in tiny.model.named_parameters():
                parameter.requires_grad_(name not in other)
        run = not_lowered(tiny.model)
        with attn_diag.capture(tiny.model, tmp_path / f"at {name}", batch=None):
            torch.autograd.backward(tiny.loss(run))
        found.append(captures(tmp_path / f"at {name}"))
    for key, capture in found[0].items():
        here, there = (c.tensors["dq_pre"][...] for c in (capture, found[1][key]))
        assert torch.allclose(here, there, atol=1e-6 * float(here.abs().max()))


def test_attention_between_two_graphs(tmp_path: Path) -> None:
    """What makes q is compiled, and attention is not."""
    tiny = stack("a layer")
    for module in tiny.model.modules():
        if isinstance(module, Attention):
            module.attend = torch.compiler.disable(module.attend)  # type: ignore[method-assign, no-untyped-call]
    run = torch.compile(tiny.model, backend="aot_eager")
    _, (gradients,) = train(tiny, run, attn_diag.capture(tiny.model, tmp_path, batch=None), autocast=False, count=1)
    for capture in captures(tmp_path).values():
        assert_explains(capture, gradients)


def test_without_gradients(tmp_path: Path) -> None:
    """Where every forward is a step, a step ends when the next one's first attention call comes."""
    tiny = stack("a layer")
    run = not_lowered(tiny.model.eval())
    with torch.no_grad(), attn_diag.capture(tiny.model, tmp_path, batch=None):
        for _ in range(3):
            tiny.loss(run)
    found = captures(tmp_path)
    assert sorted(found) == [(step, layer) for step in range(3) for layer in (0, 1)]
    for (_, layer), capture in found.items():
        assert_made(capture, tiny.model.h[some(layer)].q_proj)  # type: ignore[index, union-attr]


def test_training_after_evaluation(tmp_path: Path) -> None:
    tiny = stack("a layer")
    run = not_lowered(tiny.model)
    with torch.no_grad():
        tiny.loss(run)
    tiny.loss(run)
    with attn_diag.capture(tiny.model, tmp_path, batch=None):
        with torch.no_grad():
            tiny.loss(run)
        torch.autograd.backward(tiny.loss(run))
    found = [c for c in captures(tmp_path).values() if "do" in c.tensors]
    assert len(found) == 2
    assert all(set(PROJECTION) <= c.tensors.keys() for c in found)
