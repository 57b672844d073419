"""The monitor over linear attention: a healthy model in peace, a planted defect alarmed, its log read again."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from linear_models import LinearModel, chunked, train
from torch import Tensor

import attn_diag
from attn_diag import Monitor
from attn_diag.captures.linear import LinearCapture
from attn_diag.kernels.linear_recipe import LinearRecipe
from attn_diag.testing.linear.inputs import LONG, linear_inputs, rounded
from attn_diag.watching.live.linear_records import LinearRecorder
from attn_diag.watching.monitoring.alarm import replay
from attn_diag.watching.monitoring.linear import said_of
from attn_diag.watching.monitoring.record import read_log

HEALTHY = LinearRecipe(chunk=16)


@pytest.fixture
def fla(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A module of flash-linear-attention's, whose kernel can be spoilt."""
    ops: Any = ModuleType("fla.ops.kda")
    ops.recipe, ops.drop = HEALTHY, False

    def chunk_kda(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        return chunked("kda", {"q": q, "k": k, "v": v, "g": g, "beta": beta}, ops.recipe, drop=ops.drop)

    ops.chunk_kda = chunk_kda
    monkeypatch.setitem(sys.modules, "fla.ops.kda", ops)
    yield ops
    assert ops.chunk_kda is chunk_kda


def model_of(fla: Any) -> LinearModel:
    torch.manual_seed(0)
    return LinearModel("kda", [lambda x: fla.chunk_kda(**x)] * 2)


def test_a_defect_is_alarmed_from_the_step_that_brings_it(fla: Any, tmp_path: Path) -> None:
    def at(step: int) -> None:
        if step == 2:
            fla.drop = True

    model, log = model_of(fla), tmp_path / "log"
    with Monitor(model, every=1, log=log) as monitor:
        train(model, 4, length=48, at=at)
        found = monitor.metrics(wait=True)
    assert {(a.kind, a.step, a.layer) for a in monitor.alarms} == {("wrong", 3, 0), ("wrong", 3, 1)}
    assert "The log decay's gradient is 100 % off" in monitor.alarms[0].reason
    assert "it is zero" in monitor.alarms[0].reason
    assert [c.step for c in monitor.history] == [0, 1, 2, 3]
    assert monitor.history[0].layers[1].module == "layers.1"
    assert found["attn/wrong/max"] == 1
    assert 0.5 < found["attn/o_factor/max"] < 1.1
    assert "x well-rounded" in monitor.table()
    assert [str(a) for a in replay(read_log(log))] == [str(a) for a in monitor.alarms]


def test_a_healthy_model_trains_the_same_bits_without_an_alarm(fla: Any) -> None:
    watched, other = model_of(fla), model_of(fla)
    with Monitor(watched, every=2) as monitor:
        loss = train(watched, 3, length=48)
        assert fla.chunk_kda.__name__ == "chunk_kda"
    assert not monitor.alarms
    assert [len(c.layers) for c in monitor.history] == [2, 2]
    assert train(other, 3, length=48) == loss
    assert all(torch.equal(p, q) for p, q in zip(watched.parameters(), other.parameters(), strict=True))


def test_other_functions_are_met_and_what_cannot_be_judged_is_said(fla: Any, caplog: pytest.LogCaptureFixture) -> None:
    def mine(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, gv: Tensor | None = None) -> Tensor:
        del gv
        return chunked("kda", {"q": q, "k": k, "v": v, "g": g, "beta": beta}, HEALTHY)

    fla.mine = mine
    torch.manual_seed(0)
    model = LinearModel("kda", [lambda x: fla.mine(**x), lambda x: fla.mine(**x, gv=x["v"])])
    with Monitor(model, every=1, functions={"kda": mine}) as monitor:
        train(model, 2, length=48)
    assert [[layer.layer for layer in c.layers] for c in monitor.history] == [[0], [0]]
    assert "a decay of v" in caplog.text
    with pytest.raises(attn_diag.InputError, match="operator must be"):
        Monitor(model, functions={"softmax": mine})


def test_sums_that_autocast_rounds_are_said_to_be_its(fla: Any) -> None:
    given = rounded(linear_inputs("kda", (1, 40, 1, 8, 8), 0, kind=LONG))
    made = chunked("kda", given, HEALTHY)
    ran = [LinearRecorder(lambda: True) for _ in range(2)]
    for recorder, enabled in zip(ran, (True, False), strict=True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            recorder.wrapped("kda", fla.chunk_kda)(**given)
    assert [recorder.calls[0].autocast for recorder in ran] == [torch.bfloat16, None]
    (head,) = attn_diag.inspect_linear(LinearCapture("kda", {**given, "o": made})).heads
    coarse = replace(head.quantities[0], answer="lossy", cause="accumulator", words="O is coarse.")
    head = replace(head, labels=("lossy",), reasons=("O is coarse.",), quantities=(coarse,))
    said = said_of(head, torch.bfloat16)
    assert said.startswith("O is coarse; the call ran under autocast to bfloat16, where plain torch rounds")
    assert said_of(head, None) == "O is coarse."
    assert said_of(replace(head, quantities=(replace(coarse, cause="state"),)), torch.bfloat16) == "O is coarse."


def test_a_gradient_that_sums_the_whole_batch_is_not_held_against_its_first_sequence(fla: Any) -> None:
    def scan(q: Tensor, k: Tensor, v: Tensor, dt: Tensor, A: Tensor) -> Tensor:
        return chunked("mamba2", {"q": q, "k": k, "v": v, "dt": dt, "A": A}, HEALTHY)

    fla.scan = scan
    torch.manual_seed(0)
    model = LinearModel("mamba2", [lambda x: fla.scan(**x)])
    for batch in (1, 2):
        with Monitor(model, every=1, functions={"mamba2": scan}) as monitor:
            train(model, 1, batch=batch, length=48)
            found = monitor.metrics(wait=True)
        assert found["attn/ddt_error/max"] < 0.02
        assert found.get("attn/dA_error/max", 0.0) < 0.02
        assert ("attn/dA_error/max" in found) == (batch == 1)
