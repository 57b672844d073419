"""RWKV-LM's operators of RWKV-7, met in the dispatcher: stand-ins of their names and arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from linear_kernels import recurrent
from linear_watchers import ended_in_either_order
from torch import Tensor, nn

import attn_diag
from attn_diag import Monitor
from attn_diag.reference.linear import linear_reference
from attn_diag.testing.linear.inputs import LONG, linear_inputs, rounded
from attn_diag.watching.live.rwkv_operators import listen

DECAYS: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "wind_backstepping": ("gqkvab", lambda w: -w.exp()),
    "rwkv7_clampw": ("qgkvab", lambda w: -0.6065306597 * w.sigmoid()),
}
LIBRARIES: dict[str, Any] = {}


class Planted:
    """What the stand-ins do."""

    defect: str | None = None


def library(name: str) -> Any:
    """An operator as RWKV-LM's C++ declares it: no schema but the arguments, which it writes into."""
    if name in LIBRARIES:
        return getattr(torch.ops, name)
    order, decay = DECAYS[name]

    def ran(given: tuple[Tensor, ...]) -> Tensor:
        x = {n: decay(t.double()) if n == "g" else t for n, t in zip(order, given, strict=True)}
        return recurrent(x, scale=1.0, defect=Planted.defect)[0]

    def forward(*args: Tensor) -> None:
        args[6].copy_(ran(args[:6]))

    def backward(*args: Tensor) -> None:
        with torch.enable_grad():
            leaves = [t.detach().double().requires_grad_() for t in args[:6]]
            made = torch.autograd.grad(ran(tuple(leaves)), leaves, args[6].double())
        for into, gradient in zip(args[9:], made, strict=True):
            into.copy_(gradient)

    made: Any = torch.library.Library(name, "DEF")  # type: ignore[no-untyped-call]
    LIBRARIES[name] = made
    for function, read, write in ((forward, 6, 3), (backward, 9, 6)):
        names = [f"Tensor x{i}" for i in range(read)] + [f"Tensor({chr(97 + i)}!) y{i}" for i in range(write)]
        made.define(f"{function.__name__}({', '.join(names)}) -> ()")
        made.impl(function.__name__, function, "CPU")
    return getattr(torch.ops, name)


class Wkv(torch.autograd.Function):
    """As RWKV-LM's, in the order of ``wind_backstepping``."""

    @staticmethod
    def forward(ctx: Any, name: str, *given: Tensor) -> Tensor:
        o, states, more = torch.empty_like(given[3]), torch.empty(1, dtype=torch.float32), torch.empty(1)
        library(name).forward(*given, o, states, more)
        ctx.name = name
        ctx.save_for_backward(*given, states, more)
        return o

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        *given, states, more = ctx.saved_tensors
        made = [torch.empty_like(t) for t in given]
        library(ctx.name).backward(*given, gradients[0].contiguous(), states, more, *made)
        return None, *made


@pytest.fixture(params=list(DECAYS))
def given(request: pytest.FixtureRequest) -> Iterator[tuple[str, list[Tensor]]]:
    """An operator, and its arguments in its order: BF16, with what the decay is made of as it is there."""
    name, order = request.param, DECAYS[request.param][0]
    library(name)
    x = rounded(linear_inputs("rwkv7", (2, 48, 2, 16, 16), 0, kind=LONG))
    rate = -x["g"].double()
    x["g"] = (rate.log() if name == "wind_backstepping" else (rate / 0.6065306597).clamp(1e-6, 0.99).logit()).bfloat16()
    yield name, [x[n].detach().requires_grad_() for n in order]
    Planted.defect = None


def test_a_call_is_captured_with_its_decay_and_gradients(given: tuple[str, list[Tensor]]) -> None:
    name, arguments = given
    with attn_diag.capture_linear() as calls:
        Wkv.apply(name, *arguments).float().square().sum().backward()  # type: ignore[no-untyped-call]
    (call,) = calls
    assert (call.operator, call.metadata.kernel) == ("rwkv7", name)
    assert {"do", "dq", "dk", "dv", "da", "db"} <= set(call.tensors)
    assert "dg" not in call.tensors
    true = linear_reference(call.call).values["o"]
    assert (call.tensors["o"].double() - true).norm() < 2**-8 * true.norm()
    assert attn_diag.inspect_linear(call).labels == {"clean"}


def run_rwkv7(name: str, *given: Tensor) -> Tensor:
    made: Tensor = Wkv.apply(name, *given)  # type: ignore[no-untyped-call]
    return made


@pytest.mark.filterwarnings("ignore:`torch.jit.*` is deprecated:DeprecationWarning")
def test_torchscript_calls_them_too() -> None:
    def attend(w: Tensor, q: Tensor, o: Tensor, more: Tensor) -> Tensor:
        torch.ops.wind_backstepping.forward(w, q, q, q, q, q, o, more, more)
        return o

    library("wind_backstepping")
    scripted: Any = torch.jit.script(attend)
    q = torch.nn.functional.normalize(torch.randn(1, 8, 2, 16, generator=torch.Generator().manual_seed(0)), dim=-1)
    with attn_diag.capture_linear() as calls:
        o = scripted(torch.zeros(1, 8, 2, 16), q, torch.empty_like(q), torch.empty(1))
    assert [torch.equal(call.tensors["o"], o) for call in calls] == [True]


class Mixing(nn.Module):
    """A layer, whose arguments are parameters."""

    def __init__(self, name: str, arguments: list[Tensor]) -> None:
        super().__init__()
        self.name, self.given = name, nn.ParameterList(arguments)

    def forward(self, x: Tensor) -> Tensor:
        return run_rwkv7(self.name, *(t * x for t in self.given))


@pytest.mark.parametrize("given", ["wind_backstepping"], indirect=True)
def test_the_monitor_alarms_where_the_state_is_kept_in_16_bits(given: tuple[str, list[Tensor]]) -> None:
    model = Mixing(*given)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    kinds = []
    for defect in (None, "state_bf16"):
        Planted.defect = defect
        with Monitor(model, every=1) as monitor:
            for _ in range(2):
                model(torch.ones((), dtype=torch.bfloat16)).float().square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            monitor.metrics(wait=True)
        assert [layer.module for check in monitor.history for layer in check.layers] == ["", ""]
        kinds.append({alarm.kind for alarm in monitor.alarms})
    assert kinds == [set(), {"rounding"}]


def test_capture_names_what_captures_it(
    given: tuple[str, list[Tensor]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Sequential(Mixing(*given))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with attn_diag.capture(model, tmp_path):
        model(torch.ones((), dtype=torch.bfloat16)).float().square().mean().backward()
        optimizer.step()
    assert f"0 (Mixing); it calls {__name__}.run_rwkv7 (linear attention): attn_diag.capture_linear" in caplog.text


def test_two_that_watch_end_in_any_order(given: tuple[str, list[Tensor]]) -> None:
    name, arguments = given

    def call() -> None:
        run_rwkv7(name, *arguments).float().sum().backward()  # type: ignore[no-untyped-call]

    for going, recorded in ended_in_either_order(listen, call):
        assert recorded == going
        assert all("dq" in call.gradients for recorder in going for call in recorder.calls)
