"""The monitor over attention that is declared to run below 16 bits: sound in peace, a planted fault is alarmed."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from declared_models import DeclaredModel, train
from study_declared import Plan

import attn_diag
from attn_diag import Monitor
from attn_diag.results.quality import Pattern, QuantityVerdict
from attn_diag.watching.monitoring.alarm import AlarmState, replay
from attn_diag.watching.monitoring.record import JUDGED_FLAGS, LayerCheck, MonitorCheck, read_log
from attn_diag.watching.monitoring.whole_heads import _verdict

FA3, LENGTH = "fa3-fp8", 64


def model_of(plan: Plan) -> DeclaredModel:
    torch.manual_seed(0)
    return DeclaredModel(plan, layers=1)


def test_a_sound_model_trains_the_same_bits_without_an_alarm(tmp_path: Path) -> None:
    watched, other, log = model_of(Plan()), model_of(Plan()), tmp_path / "log"
    with Monitor(watched, every=2, declared=FA3, log=log) as monitor:
        loss = train(watched, 3, LENGTH)
        found = monitor.metrics(wait=True)
    assert not monitor.alarms
    assert [[c.module for c in check.layers] for check in monitor.history] == [["layers.0"]] * 2
    assert found["attn/wrong/max"] == found["attn/lossy/max"] == 0
    # Of O 0.9 to 1.1 times what the format leaves, which is 15 times what 16 bits do.
    assert 0.8 < found["attn/o_factor/mean"] < 1.15
    assert found["attn/o_error/max"] > 0.02
    assert f"x {FA3}" in monitor.table()
    assert train(other, 3, LENGTH) == loss
    assert all(torch.equal(p, q) for p, q in zip(watched.parameters(), other.parameters(), strict=True))
    assert [check.layers[0].declared for check in read_log(log)] == [FA3, FA3]


def test_undeclared_the_same_model_has_the_metrics_of_16_bits() -> None:
    with Monitor(model := model_of(Plan()), every=2) as monitor:
        train(model, 1, LENGTH)
    assert "dq_share" in monitor.history[0].layers[0].values


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("wrong descale of v", r"multiplied by 1\.0[678]"),
        ("stale amax", "the largest number of . is taken for 0.6 times|times the recipe fa3-fp8's error|no rounding"),
    ],
)
def test_a_fault_is_alarmed_from_the_second_look_on(fault: str, said: str, tmp_path: Path) -> None:
    model, log = model_of(Plan()), tmp_path / "log"

    def at(step: int) -> None:
        if step == 1:
            model.change(0, replace(Plan(), fault=fault))

    with Monitor(model, every=1, declared=FA3, log=log) as monitor:
        train(model, 3, LENGTH, at)
    assert {(a.step, a.layer) for a in monitor.alarms} == {(2, 0)}
    assert all(re.search(said, alarm.reason) for alarm in monitor.alarms)
    assert f"attn-diag inspect --declared {FA3}" in monitor.alarms[0].advice
    assert [str(a) for a in replay(read_log(log))] == [str(a) for a in monitor.alarms]


def test_what_is_no_recipe_below_16_bits_is_refused() -> None:
    with pytest.raises(attn_diag.InputError, match="declared must be a recipe below 16 bits"):
        Monitor(None, declared="fa2")


def looked(step: int, lossy: list[float]) -> MonitorCheck:
    """A check in which each head was lossy (1), was not (0), or was not looked at (NaN)."""
    values = {name: np.where(np.isnan(lossy), np.nan, 0.0) for name in ("o_error", *JUDGED_FLAGS.values())}
    values["lossy"] = np.array(lossy)
    return MonitorCheck(step, (LayerCheck(0, None, values, (), FA3),))


def test_wrong_after_lossy_is_found_twice() -> None:
    first, second = looked(0, [1, 1]), looked(1, [0, 0])
    second.layers[0].values["wrong"][0] = 1
    state = AlarmState()
    assert not state.update(first)
    assert [(a.head, a.kind) for a in state.update(second)] == [(0, "wrong")]


def test_a_head_that_is_not_looked_at_keeps_what_its_last_look_found() -> None:
    state, nan = AlarmState(), float("nan")
    checks = [looked(0, [1, nan]), looked(1, [nan, 1]), looked(2, [nan, 0]), looked(3, [1, nan]), looked(4, [nan, 1])]
    alarms = [[(a.head, a.kind) for a in state.update(check)] for check in checks]
    assert alarms == [[], [], [], [(0, "rounding")], []]


def test_the_reason_is_not_that_of_a_quantity_which_is_as_good_as_the_recipes() -> None:
    """Of a dQ that was 14 times as far off an alarm said that "O has 1.03 times the recipe sage1's error"."""
    sound = QuantityVerdict("o", "good", "O has 1.03 times.", patterns=(Pattern("scale", "as where k's integers …"),))
    off = QuantityVerdict("dq", "lossy", "dQ has 14.2 times.")
    verdict = SimpleNamespace(labels=("lossy",), reasons=("dQ has 14.2 times.",))
    head: Any = SimpleNamespace(verdict=verdict, quantities=(sound, off))
    found: Any = SimpleNamespace(assumptions=SimpleNamespace(checks=()))
    assert _verdict(head, found) == ({"lossy"}, "dQ has 14.2 times.")
