"""The alarm: its stated rate holds on simulated healthy runs, and growth like the known failure's is found in time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import attn_diag
from attn_diag.watching.monitoring.alarm import AlarmRule, LayerState, replay
from attn_diag.watching.monitoring.record import LayerCheck, MonitorCheck, Values, with_growth

HEADS = 144
# Worst head's share in the failing arm A of our own runs, by step; loss and gradient norm leave their trend at 600.
FAILING = {0: 0.001, 200: 0.018, 300: 0.05, 400: 0.15, 500: 0.40, 600: 60.0}
# The healthy one's.
HEALTHY = {0: 0.0008, 400: 0.008, 1000: 0.035, 1800: 0.07, 2000: 0.10, 2500: 0.16}


def course(known: dict[int, float], steps: Values) -> Values:
    return np.exp(np.interp(steps, list(known), np.log(list(known.values()))))


def checks(steps: Values, **values: Values) -> Iterator[MonitorCheck]:
    """One layer; every metric [checks, heads]."""
    for i, step in enumerate(steps):
        yield MonitorCheck(int(step), (LayerCheck(2, "h.2.attn", {name: v[i] for name, v in values.items()}),))


def run(
    seed: int, every: int, until: int, *, failing: bool, lossy: bool, noise: float = 0.1
) -> tuple[Values, dict[str, Values]]:
    """Streams of a model's heads; of a failing one head 7 grows. ``lossy``: errors ten times those of rounding O."""
    rng = np.random.default_rng(seed)
    steps = np.arange(0, until, every, dtype=np.float64)
    share = course(HEALTHY, steps)[:, None] * np.exp(rng.normal(-1, 0.5, HEADS).clip(max=0))
    if failing:
        share[:, 7] = course(FAILING, steps)
    shape = share.shape
    over = np.abs(rng.normal(0, 1, shape)) * math.sqrt(2) * (10.0 if lossy else 1.0)
    return steps, {
        "dw_q_share": share * np.exp(rng.normal(0, noise, shape)),
        "dw_q_over_floor": over,
        "past_z": rng.normal(0, 1, shape),
    }


@pytest.mark.parametrize("every", [25, 50])
@pytest.mark.parametrize("noise", [0.05, 0.1, 0.15])
def test_growth_like_the_known_failure_is_found_150_steps_ahead(every: int, noise: float) -> None:
    for seed in range(3):
        steps, values = run(seed, every, 550, failing=True, lossy=True, noise=noise)
        found = replay(checks(steps, **values))
        assert {(a.kind, a.layer, a.head, a.module) for a in found} == {("rounding", 2, 7, "h.2.attn")}
        assert 250 < found[0].step <= 450


@pytest.mark.parametrize("seed", range(3))
def test_healthy_runs_stay_silent(seed: int) -> None:
    steps, values = run(seed, 25, 2500, failing=False, lossy=False)
    assert replay(checks(steps, **values)) == ()


@pytest.mark.parametrize("missing", ["growth", "witness", "level", None])
def test_each_of_the_three_conditions_is_needed(missing: str | None) -> None:
    steps, values = run(0, 25, 550, failing=True, lossy=missing != "witness")
    share = values["dw_q_share"]
    # All but the failing head are too small to matter.
    share[:, np.arange(HEADS) != 7] = 1e-3
    if missing == "growth":
        share[:, 7] = 0.3
    if missing == "level":
        share[:, 7] *= 0.029 / share[:, 7].max()
    assert bool(replay(checks(steps, **values))) == (missing is None)


def test_a_share_that_is_unknown_at_the_alarm_is_told_by_its_average() -> None:
    steps, values = run(0, 25, 550, failing=True, lossy=True)
    (first,) = replay(checks(steps, **values))
    values["dw_q_share"][list(steps).index(first.step), 7] = math.nan
    assert [a.head for a in replay(checks(steps, **values))] == [7]


# The stated rate. 10,000 streams that are tested as if each were alone: a rate of RATE false alarms in 1,000 checks of
# one head is that of 10,000 RATE in 1,000 checks of all.
STREAMS, CHECKS, RATE = 10_000, 60, 1.0
BOUND = STREAMS * CHECKS / 1000 * RATE


def limit(expected: float) -> float:
    """What a Poisson number of this mean exceeds once in 30,000."""
    return expected + 4 * math.sqrt(expected)


def witnesses(rule: AlarmRule, over: Values, **measured: Values) -> int:
    """How many streams' witnesses pass their threshold."""
    state, passed = LayerState(STREAMS, rule), np.zeros(STREAMS, dtype=bool)
    values = {"dw_q_share": np.ones_like(over), "dw_q_over_floor": over, **measured}
    for check in checks(np.arange(len(over), dtype=np.float64), **values):
        state.update(check.step, check.layers[0], rule.log_odds(STREAMS))
        passed |= state.witnessed
    return int(passed.sum())


@pytest.mark.parametrize("known", [False, True], ids=["expected before it was measured", "expected measured"])
@pytest.mark.parametrize("mutant", [None, "twice the floor"])
def test_the_witnesses_rate_under_correct_rounding(mutant: str | None, known: bool) -> None:
    rng = np.random.default_rng(1)
    rule = AlarmRule(false_alarm_rate=RATE * STREAMS)
    # The worst case of the derivation: all atoms along one direction, where errors are as large as they are expected.
    expected = rng.uniform(1, 4, STREAMS) if known else np.full(STREAMS, math.sqrt(2))
    over = expected * np.abs(rng.normal(0, 1, (CHECKS, STREAMS))) * (2 if mutant == "twice the floor" else 1)
    measured = {"dw_q_expected_over_floor": np.broadcast_to(expected, over.shape)} if known else {}
    found = witnesses(rule, over, **measured)
    assert (found <= limit(BOUND)) == (mutant is None), f"{found} of {STREAMS}, at most {BOUND:.0f} were stated"
    if mutant is None:
        assert found > 0, "a rate so far above what happens says nothing"


def test_the_average_is_of_the_logarithm_and_the_lowest_comes_after_the_start() -> None:
    state = LayerState(1, AlarmRule(weight=0.5, warm_up=2))
    shares = [0.4, 0.1, 0.05, math.nan, 0.2]
    for step, share in enumerate(shares):
        state.update(step, LayerCheck(0, None, {"dw_q_share": np.array([share])}), math.inf)
    # Means of ln: 0.4; (0.4 0.1)^(1/2); from then on half of the newest.
    expected = math.sqrt(math.sqrt(math.sqrt(0.4 * 0.1) * 0.05) * 0.2)
    assert math.exp(state.average[0]) == pytest.approx(expected)
    assert math.exp(state.lowest[0]) == pytest.approx(math.sqrt(math.sqrt(0.4 * 0.1) * 0.05))
    assert state.lowest_at[0] == 2


def test_missing_metrics_do_no_harm() -> None:
    steps, values = run(0, 25, 550, failing=True, lossy=True)
    unknown = np.full_like(values["dw_q_share"], math.nan)
    renamed = {
        "dq_share": values["dw_q_share"], "dq_over_floor": values["dw_q_over_floor"], "dw_q_share": unknown,
        "dw_q_over_floor": unknown, "past_z": unknown,
    }  # fmt: skip
    found = replay(checks(steps, **renamed))
    assert [(a.kind, a.head) for a in found] == [("rounding", 7)]
    assert "dQ's norm" in found[0].reason
    assert replay(checks(steps, max_logit=unknown)) == ()
    # A layer, or one head, that is not seen at some checks; and none at all.
    values["dw_q_share"][5:8] = math.nan
    seen = [c if c.step != 200 else MonitorCheck(200, ()) for c in checks(steps, **values)]
    assert [(a.kind, a.head) for a in replay(seen)] == [("rounding", 7)]


@pytest.mark.parametrize(
    ("share", "of_delta", "alarms"),
    [(0.05, 0.05, True), (0.05, 0.02, False), (0.16, 0.002, False), (0.18, 0.002, True), (0.05, math.nan, True)],
    ids=["all of delta", "some of delta", "of all signs", "of all signs, large", "a log of before"],
)
def test_of_a_measured_error_what_is_of_delta_counts_and_the_square_of_all(
    share: float, of_delta: float, alarms: bool
) -> None:
    grown = np.array([[0.001]] * 6 + [[1.0]] * 8)
    values = {"dq_share": share * grown, "dq_share_delta": of_delta * grown, "dq_over_floor": 1e3 * grown}
    values["measured"] = np.ones_like(grown)
    found = replay(checks(np.arange(14.0) * 5, **values))
    assert [a.kind for a in found] == ["rounding"] * alarms
    if alarms and of_delta == share:
        assert "dQ is off by 0.05 of its norm, by 0.05 as an error of delta makes it" in found[0].reason


def test_facts_that_need_no_statistics() -> None:
    share = np.array([[0.1, 1.5], [0.1, 0.9], [0.1, 1.1], [0.1, 1.2], [0.1, 3.0]])
    broken = np.array([[0, 0], [0, 0], [0.25, 0], [0.5, 0], [0, 0]])
    found = replay(checks(np.arange(5.0) * 50, dw_q_share=share, nonfinite_rate=broken))
    assert [(a.kind, a.step, a.head) for a in found] == [("overwhelmed", 150, 1), ("nonfinite", 150, 0)]
    assert "more than the gradient itself" in found[0].reason
    assert "50.0 %" in found[1].reason


def test_an_alarm_says_what_where_and_what_to_do(tmp_path: Any) -> None:
    steps, values = run(0, 25, 550, failing=True, lossy=True)
    values |= {n: np.full_like(values["past_z"], v) for n, v in (("max_logit", 57.25), ("noise_factor", 11.0))}
    stream = list(checks(steps, **values))
    (alarm,) = replay(stream)
    text = str(alarm)
    known = ("layer 2 head 7 (h.2.attn)", "dW_Q's norm", "max logit 57.2", "noise factor 11", "inspect")
    for part in (f"step {alarm.step}", *known):
        assert part in text
    assert alarm.values["excess_cusum"] >= alarm.values["witness_threshold"]
    path = tmp_path / "log.jsonl"
    path.write_text("".join(c.to_json() + "\n" for c in stream) + '{"step": 6')
    assert list(map(str, replay(attn_diag.read_log(path)))) == [text]


def test_an_alarm_compares_averages_and_blames_no_rounding_for_a_wrong_o() -> None:
    # A fault, not a rounding, from the first check on at which the lowest average is taken.
    share = np.array([[1e-3]] * 4 + [[0.4]] * 3)
    (alarm,) = replay(checks(np.arange(7.0) * 5, dw_q_share=share, dw_q_over_floor=share * 1e3))
    assert "rounding of O is" not in alarm.reason
    # That check alone was off by 0.4: 0.02 is an average, and so is what it is compared with.
    assert "averaged over checks 0.089, lowest 0.02 at step 20" in alarm.reason


def test_a_check_survives_its_log() -> None:
    layer = LayerCheck(1, None, {"max_logit": np.array([1.25, math.nan, math.inf])})
    back = MonitorCheck.from_json(MonitorCheck(50, (layer,)).to_json())
    assert back.step == 50
    assert back.layers[0].module is None
    np.testing.assert_array_equal(back.layers[0].values["max_logit"], layer.values["max_logit"])


def test_growth_is_the_logarithms_per_step() -> None:
    def check(step: int, logits: list[float]) -> MonitorCheck:
        values = {"max_logit": np.array(logits), "dw_q_share": np.array([math.nan, 0.1])}
        return MonitorCheck(step, (LayerCheck(0, "a", values),))

    found = with_growth(check(100, [2.0, -1.0]), check(50, [1.0, 3.0])).layers[0].values
    assert found["max_logit_growth"][0] == pytest.approx(math.log(2) / 50)
    assert math.isnan(found["max_logit_growth"][1])
    assert found["dw_q_share_growth"][1] == 0
    assert np.isnan(with_growth(check(100, [2.0, -1.0]), None).layers[0].values["max_logit_growth"]).all()


@pytest.mark.parametrize("name", ["dk_nonfinite", "came_nonfinite"])
def test_what_a_loss_scaler_may_overflow_alarms_once_it_has_lasted_longer_than_any_tries(name: str) -> None:
    halves, rate = np.full((60, 2), 0.5), np.full((60, 2), 0.1)
    every_step = replay(checks(np.arange(60.0), **{name: halves, "nonfinite_rate": rate}))
    assert {(a.kind, a.step) for a in every_step} == {("nonfinite", 40)}
    assert not replay(checks(np.arange(39.0), **{name: halves, "nonfinite_rate": rate}))
    assert {a.step for a in replay(checks(np.arange(3.0) * 50, **{name: halves, "nonfinite_rate": rate}))} == {50}
    forward = replay(checks(np.arange(3.0), **{name: np.ones((3, 2)), "nonfinite_rate": rate}))
    assert {a.step for a in forward} <= {0, 1}


def test_a_predicted_error_that_is_not_in_the_measured_dq_raises_nothing() -> None:
    steps, values = run(0, 25, 550, failing=True, lossy=True)
    predicted = {**values, "dq_share": values["dw_q_share"]}
    assert replay(checks(steps, **predicted, dq_error=values["dw_q_share"] * 1.05))
    quiet = course(HEALTHY, steps)[:, None] * np.ones_like(values["dw_q_share"])
    assert not replay(checks(steps, **predicted, dq_error=quiet * 0.1))
