"""``QuantMonitor``: figures of live fake quantisers, drift found, steady ones and dithering left alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization

import attn_diag
from attn_diag import InputError, QuantMonitor


class IntFakeQuantizer(nn.Module):
    """As torchao's, a module in a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = "int4"

    def forward(self, w: Tensor) -> Tensor:
        return attn_diag.fake_quantize(w, "int4", elements=self.elements)


class QuantisedLinear(nn.Linear):
    def __init__(self, width: int) -> None:
        super().__init__(width, width, bias=False)
        self.quantiser = IntFakeQuantizer()

    def forward(self, x: Tensor) -> Tensor:
        weight: Tensor = self.quantiser(self.weight)
        return x @ weight.T


@pytest.fixture
def model() -> Any:
    torch.manual_seed(3)
    return nn.Sequential(QuantisedLinear(64), QuantisedLinear(64))


def train(model: nn.Module, steps: int, *, rate: float = 1e-3, after: Callable[[int], None] | None = None) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    for step in range(steps):
        x = torch.randn(8, 64)
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if after is not None:
            after(step)


@pytest.fixture
def watched(model: Any) -> Iterator[QuantMonitor]:
    with QuantMonitor(model, quantizer="int4") as monitor:
        yield monitor


def test_figures_are_those_of_quant(model: Any, watched: QuantMonitor) -> None:
    w = model[0].weight.detach().clone()
    train(model, 1)
    check = watched.checks[0]
    found = attn_diag.quant(w, "int4")
    assert (check.step, check.name) == (0, "0.quantiser")
    assert check.error == pytest.approx(found.error)
    assert check.dead_zone == pytest.approx(found.parts[1].elements / w.numel())
    away = sum(part.away for part in found.parts)
    assert check.away == pytest.approx(away)
    assert check.saturated == 0
    assert check.flips is None
    assert len(watched.checks) == 2
    assert "0.quantiser" in watched.table()
    assert watched.metrics()["quant/1.quantiser/error"] == watched.checks[1].error


def test_flips_and_oscillation(model: Any) -> None:
    """Weights that move by a spacing and back: every second check takes back what the one before did."""
    layer = model[0].quantiser
    w = torch.full((4, 64), 0.3)
    w[:, ::32] = 0.7
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.0)
    with QuantMonitor(model, modules=["0.quantiser"], quantizer="int4") as monitor:
        for step in range(4):
            moved = w.clone()
            moved[:, 1] += 0.1 * (step % 2)
            layer(moved)
            optimizer.step()
    flips = [check.flips for check in monitor.checks]
    assert flips == [None, 1 / 64, 1 / 64, 1 / 64]
    assert [check.oscillating for check in monitor.checks] == [None, 0.0, 1.0, 1.0]


def test_a_drift_alarms_and_names_the_quantiser(model: Any, watched: QuantMonitor) -> None:
    """Nearest becomes toward-zero at step 12 in one of two layers."""

    def fault(step: int) -> None:
        if step == 12:
            model[1].quantiser.elements = "int4:toward-zero"

    seen: list[object] = []
    watched._on_alarm = seen.append
    train(model, 20, after=fault)
    (alarm,) = watched.alarms
    assert seen == [alarm]
    assert alarm.check.name == "1.quantiser"
    assert alarm.check.step == 14, "the second check that it is seen in"
    assert "has drifted from" in str(alarm)


@pytest.mark.parametrize("elements", ["int4", "int4:stochastic"])
def test_a_healthy_run_is_silent(model: Any, elements: str) -> None:
    for layer in model:
        layer.quantiser.elements = elements
    with QuantMonitor(model, quantizer="int4") as monitor:
        train(model, 150, rate=0.05)
    assert len(monitor.checks) == 300
    assert not monitor.alarms, monitor.table()


def test_saturation_of_a_stale_amax() -> None:
    w = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
    amax = float(w.abs().max()) / 3
    with QuantMonitor() as monitor:
        fake = monitor.wrap(lambda t: attn_diag.fake_quantize(t, "int8", block="tensor", amax=amax), "w")
        out = fake(w.requires_grad_())
    torch.autograd.backward(out.sum())
    assert w.grad is not None
    assert monitor.checks[0].saturated == pytest.approx(float((w.abs() > amax).double().mean()), abs=0.02)


def test_parametrizations_and_every_nth_step() -> None:
    plain = nn.Linear(64, 64, bias=False)
    register_parametrization(plain, "weight", IntFakeQuantizer())
    bits = plain(torch.ones(1, 64))
    with QuantMonitor(plain, every=3) as monitor:
        train(plain, 7, rate=0.0)
        assert torch.equal(plain(torch.ones(1, 64)), bits)
    assert [check.step for check in monitor.checks] == [0, 3, 6]
    train(plain, 3)
    assert len(monitor.checks) == 3, "closed"


def test_torchaos_fake_quantisers() -> None:
    qat = pytest.importorskip("torchao.quantization.qat")
    config = qat.IntxFakeQuantizeConfig(torch.int4, group_size=32)  # type: ignore[attr-defined]
    layer = qat.FakeQuantizedLinear.from_linear(nn.Linear(64, 32, bias=False), weight_config=config)
    with QuantMonitor(layer, quantizer="int4-half-range") as monitor:
        layer(torch.randn(2, 64))
    (check,) = monitor.checks
    assert check.name == "weight_fake_quantizer"
    assert 0.01 < check.error < 0.2


def test_what_cannot_be_says_so(model: Any) -> None:
    with pytest.raises(InputError, match="no fake quantisers"):
        QuantMonitor(nn.Linear(4, 4))
    with pytest.raises(InputError, match="no module nothing"):
        QuantMonitor(model, modules=["nothing"])
    with pytest.raises(InputError, match="unknown quantizer 'int9'"):
        QuantMonitor(model, quantizer="int9")
    with pytest.raises(InputError, match="every must be at least 1"):
        QuantMonitor(model, every=0)
