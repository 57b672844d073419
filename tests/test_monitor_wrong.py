"""What no rounding makes: measured in O, dQ, dK and dV at every check, looked at again, and an alarm at once."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from planted_operators import replaced
from test_monitor_metrics import head_metrics
from tiny_models import nano_gpt, next_token_loss, tokens
from torch import Tensor, nn
from torch.nn import functional

import attn_diag
from attn_diag import Monitor
from attn_diag.watching.live.call import AttentionCall, CallPlace
from attn_diag.watching.live.pending import TOTALS
from attn_diag.watching.monitoring.alarm import AlarmState, replay
from attn_diag.watching.monitoring.own_nonfinite import SCALER_STEPS
from attn_diag.watching.monitoring.record import LayerCheck, MonitorCheck, read_log
from attn_diag.watching.monitoring.second_looks import SecondLooks
from attn_diag.watching.monitoring.standing_out import standing_out

pytestmark = pytest.mark.filterwarnings("ignore:Warning only once for all operators")
QUANTITIES = ("o", "dq", "dk", "dv")


def trained(model: nn.Module, steps: int = 7, **options: Any) -> Monitor:
    """A monitor of so many steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with Monitor(model, every=5, **options) as monitor:
        for step in range(steps):
            with torch.autocast("cpu", torch.bfloat16):
                loss = next_token_loss(model, tokens(step))
            torch.autograd.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    return monitor


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("dQ negated", "dQ is 200 % off, which no rounding makes: all rows have the wrong sign"),
        ("dK of a head zero", "dK is 100 % off, which no rounding makes: all keys are zero"),
        ("O a tenth too large", "which no rounding makes: all rows are 1.1 times the true ones"),
    ],
)
def test_a_fused_kernel_that_is_wrong_from_the_first_step_alarms(fault: str, words: str, tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    with replaced(fault, "cpu"):
        monitor = trained(nano_gpt().model, log=log)
    wrong = [alarm for alarm in monitor.alarms if alarm.kind == "wrong"]
    assert [(alarm.step, alarm.layer) for alarm in wrong] == [(2, 0), (2, 1)]
    assert all(words in alarm.reason for alarm in wrong)
    # One alarm names all heads of the layer that stand out.
    assert ("stand out as well (step 0)" in wrong[0].reason) == (fault != "dK of a head zero")
    assert [(check.step, check.again) for check in monitor.history] == [(0, False), (2, True), (5, False)]
    # The log has the second look, and what is read back alarms again.
    checks = list(read_log(log))
    assert [check.again for check in checks] == [False, True, False]
    again = [alarm for alarm in replay(checks) if alarm.kind == "wrong"]
    assert [str(a) for a in again] == [str(a) for a in wrong]
    # What is shown is the last check, not the look at two heads.
    assert monitor.metrics()["attn/step"] == 5
    table = monitor.table()
    assert "x well-rounded" in table
    assert "ALARM step 2" in table


def test_a_sound_one_is_measured_and_neither_looked_at_again_nor_accused() -> None:
    monitor = trained(nano_gpt().model)
    assert [check.again for check in monitor.history] == [False, False]
    for name in QUANTITIES:
        factors = np.concatenate([layer.values[f"{name}_factor"] for layer in monitor.history[0].layers])
        assert (factors > 0.2).all(), name
        assert (factors < 2.0).all(), name
    assert not monitor.alarms


@attn_diag.observe(causal=True)
def sound(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True)


class NoDelta(torch.autograd.Function):
    """Causal attention whose backward leaves delta out."""

    @staticmethod
    def forward(context: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        context.save_for_backward(q, k, v)
        return (NoDelta.probs(q, k) @ v.float()).to(q.dtype)

    @staticmethod
    def backward(context: Any, *given: Any) -> Any:
        q, k, v = context.saved_tensors
        scale, do, probs = q.shape[3] ** -0.5, given[0].float(), NoDelta.probs(q, k)
        dscores = probs * (do @ v.float().mT)
        made = dscores @ k.float() * scale, dscores.mT @ q.float() * scale, probs.mT @ do
        return tuple(t.to(q.dtype) for t in made)

    @staticmethod
    def probs(q: Tensor, k: Tensor) -> Tensor:
        hidden = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(1)
        scores = q.shape[3] ** -0.5 * q.float() @ k.float().mT
        probs: Tensor = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        return probs


@attn_diag.observe(causal=True)
def without_delta(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    o: Tensor = NoDelta.apply(q, k, v)  # type: ignore[no-untyped-call]
    return o


class Layer(nn.Module):
    def __init__(self, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.qkv, self.out, self.attend = nn.Linear(32, 96), nn.Linear(32, 32), attend

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (4, 8)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y: Tensor = x + self.out(self.attend(q, k, v).transpose(1, 2).flatten(2))
        return y


class Two(nn.Module):
    """A layer that is sound, and one that is given."""

    def __init__(self, second: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(61, 32), nn.Linear(32, 61)
        self.layers = nn.ModuleList([Layer(sound), Layer(second)])

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        result: Tensor = self.head(x)
        return result


def test_an_observed_function_whose_backward_alone_is_wrong_alarms() -> None:
    assert not trained(Two(sound)).alarms
    wrong = [alarm for alarm in trained(Two(without_delta)).alarms if alarm.kind == "wrong"]
    assert [alarm.layer for alarm in wrong] == [1]
    assert wrong[0].step <= 2
    assert "dQ" in wrong[0].reason


def called(
    rows: int = 300, *, heads: int = 4, key_heads: int = 2, change: Callable[[dict[str, Tensor]], object] | None = None
) -> AttentionCall:
    """A call of torch's kernel in BF16, with what a fault makes of its results."""
    g = torch.Generator().manual_seed(rows)
    q, do = (torch.randn(1, heads, rows, 32, generator=g).bfloat16() for _ in range(2))
    k, v = (torch.randn(1, key_heads, rows, 32, generator=g).bfloat16() for _ in range(2))
    inputs = q.requires_grad_(), k.requires_grad_(), v.requires_grad_()
    o = functional.scaled_dot_product_attention(*inputs, is_causal=True, enable_gqa=True)
    dq, dk, dv = torch.autograd.grad(o, inputs, do)
    found: dict[str, Any] = {"o": o.detach(), "dq": dq, "dk": dk, "dv": dv}
    if change is not None:
        change(found)
    q, k, v = (t.detach() for t in inputs)
    return AttentionCall(CallPlace(0, 0, "m", 0, True), "test", q, k, v, causal="top-left", do=do, **found)


@pytest.mark.parametrize("sampled", [1024, 50], ids=["all rows", "some rows"])
def test_a_key_of_many_shows_where_rows_are_left_out_too(sampled: int) -> None:
    def one_key(found: dict[str, Tensor]) -> None:
        found["dk"][:, 1, 7] = 0

    def some_of_dv(found: dict[str, Tensor]) -> None:
        found["dv"][:, 0, 100:140] *= 0.5

    right = head_metrics(called(), rows=sampled)
    for name in QUANTITIES:
        factors = getattr(right, f"{name}_factor")
        assert ((factors > 0.3) & (factors < 2)).all(), name
    key, part = (head_metrics(called(change=change), rows=sampled) for change in (one_key, some_of_dv))
    # The query heads of the key head, and no others; 1 of 300 keys.
    assert (key.dk_factor[2:] > 5).all()
    assert torch.equal(key.dk_factor[:2], right.dk_factor[:2])
    assert torch.equal(key.dv_factor, right.dv_factor)
    assert (part.dv_factor[:2] > 20).all()
    assert (part.dv_factor[2:] < 2).all()
    assert torch.equal(part.dq_factor, right.dq_factor)


def test_what_all_rows_and_some_of_them_say_of_dk_and_dv_is_the_same() -> None:
    whole, some = (head_metrics(called(), rows=rows) for rows in (300, 299))
    for name in ("dk", "dv"):
        torch.testing.assert_close(getattr(some, f"{name}_error"), getattr(whole, f"{name}_error"), rtol=1e-9, atol=0)
        torch.testing.assert_close(getattr(some, f"{name}_factor"), getattr(whole, f"{name}_factor"), rtol=0.1, atol=0)


def test_gradients_that_are_totals_are_not_measured() -> None:
    call = replace(called(), notes=[TOTALS])
    found = head_metrics(call)
    for name in ("dq", "dk", "dv"):
        assert getattr(found, f"{name}_factor").isnan().all(), name
    assert (found.o_factor < 2).all()


def test_without_a_loss_nothing_stands_out() -> None:
    call = called()
    zero: dict[str, Any] = {name: torch.zeros_like(getattr(call, name)) for name in ("do", "dq", "dk", "dv")}
    found = head_metrics(replace(call, **zero))
    layer = LayerCheck(0, "m", {n: getattr(found, n).numpy() for n in vars(found)})
    assert all((scores <= 1).all() for scores in standing_out(layer).values())
    broken = head_metrics(replace(call, **zero | {"dq": torch.full_like(call.q, 2.0**-20)}))
    layer = LayerCheck(0, "m", {n: getattr(broken, n).numpy() for n in vars(broken)})
    assert (standing_out(layer)["dq"] > 1).all()


def check_of(step: int, **factors: float) -> MonitorCheck:
    """One layer of two heads, whose second has the factors."""
    values = {f"{name}_factor": np.array([1.0, factor]) for name, factor in factors.items()}
    return MonitorCheck(step, (LayerCheck(0, "m", values),))


def looked(looks: SecondLooks, call: AttentionCall) -> LayerCheck | None:
    """What a step with that call shows."""
    place = call.place
    assert looks.wants(place)
    looks.forward(replace(call, awaits_backward=True, do=None, dq=None, dk=None, dv=None))
    assert not looks.wants(place), "once a step"
    looks.backward(call)
    found, unknown = looks.finish()
    assert not unknown
    return found[0] if found else None


def test_what_is_not_wrong_is_asked_again_only_where_more_stands_out() -> None:
    looks, call = SecondLooks(1, 0.01), called(100, heads=2)
    looks.consider(check_of(0, dq=2.4))
    assert not looks.wanted, "below the limit of a verdict"
    looks.consider(check_of(5, dq=4.0))
    layer = looked(looks, call)
    assert layer is not None
    assert layer.again
    assert layer.values["wrong"][1] == 0
    assert np.isnan(layer.values["wrong"][0]), "not looked at"
    assert not AlarmState().update(MonitorCheck(7, (layer,)))
    looks.consider(check_of(10, dq=7.5))
    assert not looks.wanted
    looks.consider(check_of(15, dq=8.5))
    assert looks.wanted


def test_what_hardly_a_rounding_leaves_is_asked_of_every_head() -> None:
    looks, call = SecondLooks(1, 0.01), called(100, heads=2)
    values = {"dq_factor": np.array([200.0, 300.0])}
    looks.consider(MonitorCheck(0, (LayerCheck(0, "m", values),)))
    assert looked(looks, call) is not None
    looks.consider(MonitorCheck(5, (LayerCheck(0, "m", values),)))
    layer = looked(looks, call)
    assert layer is not None
    assert not np.isnan(layer.values["wrong"][0]), "the other head"
    looks.consider(MonitorCheck(10, (LayerCheck(0, "m", values),)))
    assert not looks.wanted


def test_a_step_without_a_gradient_does_not_answer() -> None:
    looks, call = SecondLooks(1, 0.01), called(100, heads=2)
    zero: dict[str, Any] = {name: torch.zeros_like(getattr(call, name)) for name in ("do", "dq", "dk", "dv")}
    looks.consider(check_of(0, dq=300.0))
    assert looked(looks, replace(call, **zero)) is None
    assert looks.wanted
    assert call.dq is not None
    layer = looked(looks, replace(call, dq=-call.dq))
    assert layer is not None
    assert layer.values["wrong"][1] == 1
    state = AlarmState()
    state.update(check_of(0, dq=300.0))
    (alarm,) = state.update(MonitorCheck(2, (layer,)))
    assert (alarm.kind, alarm.head) == ("wrong", 1)
    assert not state.update(MonitorCheck(7, (layer,))), "once"
    looks.consider(check_of(5, dq=1000.0))
    assert not looks.wanted, "an alarm has named it"


def nonfinite_at(which: tuple[int, ...], fault: str, steps: int = 2) -> Monitor:
    """A monitor of every step of a loop that keeps NaN from the weights; the backward calls that are spoilt."""
    count = itertools.count()
    model = nano_gpt().model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with replaced(fault, "cpu", lambda: next(count) in which), Monitor(model, every=1) as monitor:
        for step in range(steps):
            with torch.autocast("cpu", torch.bfloat16):
                loss = next_token_loss(model, tokens(step))
            torch.autograd.backward(loss)
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad.nan_to_num_(0.0, 0.0, 0.0)
            optimizer.step()
            optimizer.zero_grad()
    return monitor


@pytest.mark.parametrize(
    ("calls", "fault", "layer", "words"),
    [
        ((1,), "dK of a head NaN", 0, "dK holds NaN or Inf, made here: what went in (q, k, v, O and dO) is finite"),
        ((1,), "dV of a head Inf", 0, "dV holds NaN or Inf, made here"),
        # Of two layers the upper one's backward comes first; what it makes goes on to the lower one.
        ((0, 2), "dQ of a head NaN", 1, "dQ holds NaN or Inf, made here"),
    ],
)
def test_what_a_kernel_makes_nan_alarms_at_that_check_in_its_layer_alone(
    calls: tuple[int, ...], fault: str, layer: int, words: str
) -> None:
    monitor = nonfinite_at(calls, fault)
    assert [(a.kind, a.step, a.layer, a.head) for a in monitor.alarms] == [("nonfinite", 0, layer, 1)]
    assert words in monitor.alarms[0].reason
    below = monitor.history[0].layers[0].values["came_nonfinite"]
    assert (below == layer).all(), "of the lower layer, what came in with dO"


def test_nan_that_came_in_and_rows_without_keys_are_not_the_kernels() -> None:
    call = called(100, heads=2)
    assert call.do is not None
    call.do[0, 1, 3] = math.nan
    for gradient in (call.dq, call.dk, call.dv):
        assert gradient is not None
        gradient[0, 1, 5] = math.nan
    found = head_metrics(call, rows=10)
    assert found.came_nonfinite.tolist() == [0, 1]
    for name in QUANTITIES:
        assert getattr(found, f"{name}_nonfinite").tolist() == [0, 0], name
    # A mask leaves rows without keys, and these may hold anything.
    padded = called(100, heads=2)
    hidden = torch.ones(1, 1, 100, 100, dtype=torch.bool)
    hidden[..., 7, :] = False
    assert padded.dq is not None
    padded.o[0, :, 7], padded.dq[0, :, 7] = math.nan, math.nan
    found = head_metrics(replace(padded, mask=hidden))
    assert not found.o_nonfinite.any()
    assert not found.dq_nonfinite.any()
    assert head_metrics(padded).o_nonfinite.all()


def test_fp16_gradients_may_overflow_where_a_scaler_is_at_work() -> None:
    call = called(100, heads=2)
    names = ("q", "k", "v", "o", "do", "dq", "dk", "dv")
    half = replace(call, **{name: getattr(call, name).half() for name in names})
    assert half.dk is not None
    half.dk[0, 1, 5] = math.inf
    found = head_metrics(half)
    assert found.dk_nonfinite.tolist() == [0, 0.5]
    layer = LayerCheck(0, "m", {name: getattr(found, name).numpy() for name in vars(found)})
    state = AlarmState()
    assert not state.update(MonitorCheck(0, (layer,)))
    assert not state.update(MonitorCheck(1, (layer,)))
    assert [(a.kind, a.head) for a in state.update(MonitorCheck(SCALER_STEPS, (layer,)))] == [("nonfinite", 1)]
