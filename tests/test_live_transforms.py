"""What torch does with attention besides running it (transforms, tracing, export) gives the same while a capture is on,
and after it: no bit, no node of a graph and no gradient is another."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import some
from tiny_models import nano_gpt, only, tokens
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import attn_diag
from attn_diag.watching.live import products

pytestmark = pytest.mark.filterwarnings("ignore")  # of tracers and exporters


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def operands() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 2, 6, 8, generator=generator) for _ in range(3))
    return q, k, v


Q, K, V = operands()
WEIGHT, BIAS = torch.eye(8) + Q[0, 0, 0, 0] * torch.ones(8, 8), V[0, 0, 0]


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Behind a linear layer."""
    return functional.scaled_dot_product_attention(functional.linear(q, WEIGHT, BIAS), k, v, is_causal=True)


def loss(q: Tensor) -> Tensor:
    return attention(q, q, q).square().sum()


class Module(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v)


def gradient(how: Callable[[Tensor], Tensor]) -> Tensor:
    q = Q.clone().requires_grad_()
    torch.autograd.backward(how(q))
    return some(q.grad)


def targets(graph: Any) -> list[str]:
    return [str(node.target) for node in graph.nodes]


def forward_mode() -> Any:
    with sdpa_kernel(SDPBackend.MATH):
        return torch.func.jvp(lambda q: attention(q, K, V), (Q,), (K,))


def twice() -> Any:
    q = Q.clone().requires_grad_()
    with sdpa_kernel(SDPBackend.MATH):
        (first,) = torch.autograd.grad(loss(q), q, create_graph=True)
        return torch.autograd.grad(first.square().sum(), q)


def exported() -> Any:
    program = torch.export.export(Module(), (Q, K, V))
    taken_apart = program.run_decompositions()
    return program.module()(Q, K, V), targets(program.graph), targets(taken_apart.graph)


def traced() -> Any:
    how = make_fx(
        lambda q: torch.autograd.grad(loss(q), q)[0], tracing_mode="symbolic", _allow_non_fake_inputs=True
    )  # for the weight
    made = how(Q.clone().requires_grad_())
    return made(Q.clone().requires_grad_()), targets(made.graph)


def of_growing_length() -> Any:
    compiled: Any = torch.compile(loss, backend="aot_eager")
    found = []
    for length in (6, 4, 5):
        q = Q[:, :, :length].clone().requires_grad_()
        torch.autograd.backward(compiled(q))
        found.append(some(q.grad))
    return found


def inferred() -> Any:
    with torch.inference_mode():
        return attention(Q, K, V).clone()


WAYS: dict[str, Callable[[], Any]] = {
    "grad": lambda: torch.func.grad(loss)(Q),
    "vmap": lambda: torch.vmap(torch.func.grad(loss))(torch.stack([Q, K])),
    "forward mode": forward_mode,
    "twice": twice,
    "export": exported,
    "jit": lambda: torch.jit.trace(loss, (Q,))(K),  # type: ignore[no-untyped-call]
    "make_fx": traced,
    "checkpoint": lambda: gradient(lambda q: checkpoint(loss, q, use_reentrant=False)),
    "growing": of_growing_length,
    "inference": inferred,
    "compiled": lambda: gradient(torch.compile(loss, backend="aot_eager")),
}


def same(one: Any, other: Any) -> bool:
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return torch.equal(one, other) if isinstance(one, Tensor) else one == other


@pytest.mark.parametrize("way", WAYS)
def test_it_gives_the_same_before_during_and_after(way: str, tmp_path: Path) -> None:
    expected = WAYS[way]()
    met: list[products.Product] = []
    with attn_diag.capture(None, tmp_path, calls=None):
        products.listen(met.append, wanted=True)
        try:
            assert same(expected, WAYS[way]())
        finally:
            products.listen(met.append, wanted=False)
    assert met
    torch._dynamo.reset()
    assert same(expected, WAYS[way]())


def test_a_model_that_is_compiled_after_a_capture_has_its_gradients(tmp_path: Path) -> None:
    """Lengths that grow have torch remember which operators have an autograd kernel of their own."""
    tiny = nano_gpt()
    with attn_diag.capture(tiny.model, tmp_path):
        compiled: Any = torch.compile(tiny.model, backend="aot_eager")
        for length in (20, 12, 17):
            torch.autograd.backward(compiled(tokens()[:, :length]).mean())
    torch._dynamo.reset()
    one, other = nano_gpt(), nano_gpt()
    torch.autograd.backward(one.loss(one.model))
    run: Any = torch.compile(other.model, backend="aot_eager")
    torch.autograd.backward(other.loss(run))
    for a, b in zip(one.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(some(a.grad), some(b.grad))


def test_under_vmap_the_forward_is_captured_and_gradients_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = nano_gpt(layers=1).model
    parameters: dict[str, Tensor] = dict(model.named_parameters())

    def of_one(parameters: dict[str, Tensor], ids: Tensor) -> Tensor:
        made: Tensor = torch.func.functional_call(model, parameters, (ids[None],))
        return made.square().sum()

    with attn_diag.capture(model, tmp_path) as recorder:
        torch.vmap(torch.func.grad(of_one), in_dims=(None, 0))(parameters, tokens())
    assert not caplog.records
    capture = only(recorder)
    assert set(capture.tensors) == {"q", "k", "v", "o", "lse"}
