"""The monitor on running models: its numbers are those of a capture, and the training run does not notice it."""

from __future__ import annotations

import logging
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders import some
from command_line import Programs
from tiny_models import HEADS, WIDTH, hooks_of, nano_gpt, next_token_loss, tokens
from torch import Tensor, nn
from torch.nn import functional

import attn_diag
from attn_diag import Monitor
from attn_diag.watching.live.call import AttentionCall
from attn_diag.watching.monitoring import measuring as measuring_module
from attn_diag.watching.monitoring import monitor as monitor_module
from attn_diag.watching.monitoring.alarm import Alarm, replay
from attn_diag.watching.monitoring.figures import METRICS
from attn_diag.watching.monitoring.record import MonitorCheck, read_log
from attn_diag.watching.monitoring.sample import Sample


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return next_token_loss(model, ids)


def train(model: nn.Module, steps: int = 5, micro: int = 1, first: int = 0) -> list[float]:
    """Losses, and at the end the gradients' and weights' sums, as exact numbers."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    seen = []
    for step in range(first, first + steps):
        optimizer.zero_grad()
        for i in range(micro):
            loss = loss_of(model, tokens(100 * step + i))
            loss.backward()  # type: ignore[no-untyped-call]
            seen.append(float(loss.detach()))
        optimizer.step()
    tensors = [t.detach() for p in model.parameters() for t in (p, p.grad) if t is not None]
    return [*seen, *(float(t.double().sum()) for t in tensors)]


def same(a: MonitorCheck, b: MonitorCheck, rel: float = 1e-9) -> bool:
    """Whether two checks say the same of all heads."""
    return len(a.layers) == len(b.layers) and all(
        math.isclose(x, y, rel_tol=rel, abs_tol=1e-12) or (math.isnan(x) and math.isnan(y))
        for one, other in zip(a.layers, b.layers, strict=True)
        for name in METRICS
        for x, y in zip(one.values[name], other.values[name], strict=True)
    )


def watched(model: nn.Module, steps: int = 4, micro: int = 1, **options: Any) -> list[MonitorCheck]:
    with Monitor(model, every=2, **options) as monitor:
        train(model, steps, micro)
        monitor.metrics(wait=True)
    return list(monitor.history)


def test_its_numbers_are_those_of_a_capture_inspected(tmp_path: Path) -> None:
    model = nano_gpt().model
    with attn_diag.capture(model, tmp_path, steps=[2]), Monitor(model, every=2) as monitor:
        train(model, 3)
        found = monitor.metrics(per_head=True)
    assert found["attn/step"] == 2
    for layer in range(2):
        capture = attn_diag.load(next(tmp_path.glob(f"*layer{layer:02d}*")))
        diagnosis = attn_diag.inspect_captures([capture])
        for i, head in enumerate(diagnosis.captures[0].observations[0].heads[:HEADS]):
            assert head.propagation.dw_q is not None
            for name, value in {
                "noise_factor": head.noise_factor,
                "dw_q_share": head.propagation.dw_q.predicted_relative_error,
                "coherence": head.propagation.dw_q.coherence,
                "tie_rate": head.row_maxima.exact.fraction,
            }.items():
                assert found[f"attn/layer{layer:02d}/head{i:02d}/{name}"] == pytest.approx(value, rel=1e-9)


def test_losses_gradients_and_weights_are_the_same_bits() -> None:
    bare = train(nano_gpt().model)
    model = nano_gpt().model
    with Monitor(model, every=1) as monitor:
        assert train(model) == bare
    assert len(monitor.history) == 5
    assert train(nano_gpt().model, first=1) != bare, "the comparison can fail"


def test_nothing_stays_behind() -> None:
    before = functional.multi_head_attention_forward
    model = nano_gpt().model
    monitor = Monitor(model)
    assert functional.multi_head_attention_forward is not before
    assert hooks_of(model)
    train(model, 1)
    monitor.close()
    monitor.close()
    assert functional.multi_head_attention_forward is before
    assert not hooks_of(model)
    assert monitor.metrics()["attn/step"] == 0


def test_only_the_first_micro_batch_counts() -> None:
    whole = watched(nano_gpt().model, micro=1, steps=1)[0]
    assert same(watched(nano_gpt().model, micro=3, steps=1)[0], whole)
    # Where another micro-batch comes first, the check says otherwise.
    other = nano_gpt().model
    with Monitor(other, every=2) as monitor:
        loss_of(other, tokens(1)).backward()  # type: ignore[no-untyped-call]
        train(other, 1)
    assert not same(monitor.history[0], whole)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_gives_the_same(reentrant: bool) -> None:
    plain, checkpointed = watched(nano_gpt().model), watched(nano_gpt(reentrant).model)
    assert [c.step for c in checkpointed] == [0, 2]
    for a, b in zip(plain, checkpointed, strict=True):
        assert same(a, b)


def test_options_choose_steps_layers_and_samples() -> None:
    model = nano_gpt(layers=3).model
    with Monitor(model, every=3, layers={1}, rows=7, sequences=2, first_step=5) as monitor:
        assert monitor.step == 5
        train(model, 6)
        assert monitor.step == 11
    assert monitor.step == 11, "closed, it is where it was"
    assert [c.step for c in monitor.history] == [6, 9]
    assert [layer.layer for layer in monitor.history[0].layers] == [1]
    assert monitor.history[0].layers[0].module == "h.1.attn"


def test_names_for_loggers() -> None:
    model = nano_gpt().model
    with Monitor(model, every=2) as monitor:
        assert monitor.metrics() == {}
        assert "no check yet" in repr(monitor) + monitor.table()
        train(model, 3)
        flat, heads = monitor.metrics(), monitor.metrics(per_head=True)
    assert all(isinstance(v, float) and not math.isnan(v) for v in heads.values())
    assert {
        "attn/max_logit/max",
        "attn/dw_q_share/mean",
        "attn/alarm",
        "attn/step",
        "attn/max_logit_growth/max",
    } <= set(flat)
    values = [heads[f"attn/layer{i:02d}/head{h:02d}/w_q_norm"] for i in range(2) for h in range(HEADS)]
    assert flat["attn/w_q_norm/max"] == max(values)
    assert flat["attn/w_q_norm/mean"] == pytest.approx(sum(values) / len(values))
    weight = model.get_parameter("h.0.attn.c_attn.weight").detach()[:WIDTH]
    assert max(values[:HEADS]) < float(torch.linalg.matrix_norm(weight, 2)) * 1.1
    assert len(monitor.table().splitlines()) == 7
    assert "step 2" in repr(monitor)
    monitor.close()
    assert f"closed at step {monitor.step}, newest check of step 2" in repr(monitor)


def test_a_log_is_replayed(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "monitor.jsonl"
    history = watched(nano_gpt().model, log=path)
    logged = list(read_log(path))
    assert [c.step for c in logged] == [0, 2]
    assert all(same(a, b, rel=1e-7) for a, b in zip(logged, history, strict=True))
    assert replay(logged) == ()
    with pytest.raises(attn_diag.InputError, match="cannot write"):
        Monitor(nano_gpt().model, log=path / "under a file")


def test_a_resumed_run_goes_on_with_its_history(tmp_path: Path) -> None:
    path, model = tmp_path / "monitor.jsonl", nano_gpt().model
    with Monitor(model, every=1, log=path) as monitor:
        train(model, 3)
    for history, steps in ((list(read_log(path)), [0, 1, 2]), ([], [2])):
        with Monitor(model, every=1, first_step=2, history=history) as monitor:
            train(model, 1, first=2)
        assert [c.step for c in monitor.history] == steps
        growth = monitor.history[-1].layers[0].values["max_logit_growth"]
        assert bool(np.isfinite(growth).all()) == bool(history)
    with pytest.raises(attn_diag.InputError, match="give first_step"):
        Monitor(model, history=read_log(path))


def test_an_alarm_remembers_what_was_before_a_restart(tmp_path: Path) -> None:
    path, model = tmp_path / "monitor.jsonl", broken_model()
    with Monitor(model, every=1, log=path) as monitor:
        train(model, 2)
    assert monitor.alarms  # at the second check that is not finite
    checks = list(read_log(path))
    for first, history, alarms in ((1, checks, True), (1, [], False), (2, checks, False)):
        model = broken_model()
        with Monitor(model, every=1, first_step=first, history=history) as monitor:
            train(model, 1, first=first)
        # Raised before the restart, it is not raised again.
        assert bool(monitor.alarms) == alarms


def broken_model() -> nn.Module:
    model = nano_gpt().model
    with torch.no_grad():
        model.get_parameter("h.1.attn.c_attn.weight")[0, 0] = math.nan
    return model


def test_an_alarm_is_told_logged_and_makes_captures_write(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    told: list[Alarm] = []

    def listen(alarm: Alarm) -> None:
        told.append(alarm)
        raise ValueError("of the user")

    model = broken_model()
    with (
        caplog.at_level(logging.WARNING, logger="attn_diag"),
        attn_diag.capture(model, tmp_path, ring=2, layers={0}) as recorder,
        Monitor(model, every=1, on_alarm=listen) as monitor,
    ):
        train(model, 1)
        assert monitor.metrics()["attn/alarm"] == 0
        train(model, 1)
        assert monitor.metrics()["attn/alarm"] == monitor.metrics()["attn/alarms"] > 0
        recorder.drain()
        assert len(list(tmp_path.glob("*.safetensors"))) == 2
    assert told == monitor.alarms
    assert {(a.kind, a.layer) for a in told if a.layer == 1} == {("nonfinite", 1)}
    assert "attention alarm: step 1, layer 1 head 0 (h.1.attn): NaN or Inf" in caplog.text
    assert "on_alarm raised ValueError: of the user" in caplog.text
    assert "ALARM step 1, layer 0" in monitor.table()


def failing(*_: Any, **__: Any) -> Any:
    raise RuntimeError("of ours")


@pytest.mark.parametrize(
    ("owner", "name"),
    [(measuring_module, "head_sums"), (Sample, "of"), (Monitor, "_read"), (monitor_module, "Sent")],
)
def test_its_own_failures_never_reach_the_training_loop(
    owner: Any, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bare, model = train(nano_gpt().model, 2), nano_gpt().model
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, failing)
        monitor = Monitor(model, every=1)
        with caplog.at_level(logging.WARNING, logger="attn_diag"):
            assert train(model, 2) == bare
    monitor.close()
    assert "RuntimeError: of ours" in caplog.text


def test_what_cannot_be_analysed_is_named(caplog: pytest.LogCaptureFixture) -> None:
    model = nano_gpt().model
    for name in ("h.0.attn", "h.1.attn"):
        model.get_submodule(name).dropout = 1.0  # type: ignore[assignment]
    with caplog.at_level(logging.WARNING, logger="attn_diag"):
        assert watched(model) == []
    assert "is not monitored" in caplog.text
    assert "dropout" in caplog.text
    assert "no attention call" not in caplog.text


def test_a_loop_that_does_not_train() -> None:
    model = nano_gpt().model.eval()
    with Monitor(model, every=2) as monitor, torch.no_grad():
        for step in range(4):
            model(tokens(step))
    (first, *_) = monitor.history
    assert first.step == 0
    assert (first.layers[0].values["max_logit"] > 0).all()
    assert (first.layers[1].values["w_q_norm"] > 0).all()
    assert all(map(math.isnan, first.layers[0].values["dw_q_share"]))


def test_evaluation_between_steps_changes_nothing() -> None:
    plain, model = watched(nano_gpt().model, steps=3), nano_gpt().model
    with Monitor(model, every=2) as monitor:
        train(model, 1)
        model.eval()
        with torch.no_grad():
            model(tokens(7))
        model.train()
        assert [c.step for c in monitor.history] == [0]
    assert same(monitor.history[0], plain[0])


@pytest.mark.parametrize("forwards", [1, 4])
def test_an_evaluation_before_training_counts_for_nothing(forwards: int, tmp_path: Path) -> None:
    """As a framework's sanity check: its checks are of an evaluation, and the training's steps are counted anew."""
    plain, model, log = watched(nano_gpt().model, steps=3), nano_gpt().model, tmp_path / "log.jsonl"
    log.write_text("a line of an earlier run\n")
    with Monitor(model, every=2, log=log) as monitor:
        model.eval()
        with torch.no_grad():
            for step in range(forwards):
                model(tokens(step))
        model.train()
        train(model, 3)
    assert len(monitor.history) == len(plain) == 2
    assert all(map(same, monitor.history, plain))
    first, *lines = log.read_text().splitlines()
    assert first == "a line of an earlier run"
    assert lines == [check.to_json() for check in monitor.history]


def test_the_call_lets_go_of_what_autograd_does_not_keep() -> None:
    model, calls = nano_gpt().model, list[AttentionCall]()
    with Monitor(model, every=1) as monitor:
        real: Callable[[AttentionCall], None] = monitor.forward

        def forward(call: AttentionCall) -> None:
            real(call)
            calls.append(call)

        monitor.forward = forward  # type: ignore[method-assign]
        train(model, 1)
    assert calls
    assert all(c.x is None and c.mask is None and c.lse is None for c in calls)


# Two processes.


CASES = ("ddp", "missing", "silent")


def one_rank(rank: int, folder: Path) -> None:
    """All cases, one after the other, each training with its own model and monitor."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    for case in CASES:
        model = nano_gpt().model
        parallel = nn.parallel.DistributedDataParallel(model) if case == "ddp" else model
        layers = {0} if case == "missing" and rank else None
        with Monitor(parallel, every=2, layers=layers, log=folder / f"{case}.jsonl") as monitor:
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
            for step in range(3):
                if case == "silent" and rank and step:
                    monitor._layers = ()
                loss_of(parallel, tokens(step)[rank : rank + 1]).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
        lines = "".join(c.to_json() + "\n" for c in monitor.history)
        (folder / f"{case}{rank}.jsonl").write_text(lines)
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory, programs: Programs) -> Path:
    """What two processes left: CASE.jsonl their common log, CASE0.jsonl and CASE1.jsonl what each has seen."""
    folder = tmp_path_factory.mktemp("ranks")
    programs.ranks(__file__, folder)
    return folder


def alone(rows: slice, sequences: int) -> list[MonitorCheck]:
    """The same training steps in one process."""
    model = nano_gpt().model
    with Monitor(model, every=2, sequences=sequences) as monitor:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
        for step in range(3):
            loss_of(model, tokens(step)[rows]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    return list(monitor.history)


def seen_by(folder: Path, case: str) -> list[MonitorCheck]:
    """What both ranks say, which must be the same."""
    first, second = ((folder / f"{case}{rank}.jsonl").read_text() for rank in range(2))
    assert first == second
    return list(read_log(folder / f"{case}0.jsonl"))


def test_two_ranks_say_what_one_process_says_of_both_sequences(two_ranks: Path) -> None:
    found, both = seen_by(two_ranks, "ddp"), alone(slice(0, 2), 2)
    assert [c.step for c in found] == [0, 2]
    # W_Q's matrices pass through fp32 on their way; what is added in float64 is exact up to its order.
    assert all(same(a, b, rel=1e-4) for a, b in zip(found, both, strict=True))
    assert not same(found[0], alone(slice(0, 1), 1)[0], rel=1e-4), "the comparison can fail"
    assert len(list(read_log(two_ranks / "ddp.jsonl"))) == 2, "rank 0 alone writes the log"


def test_a_rank_that_misses_a_layer_does_not_stop_the_other(two_ranks: Path) -> None:
    found, one, both = seen_by(two_ranks, "missing"), alone(slice(0, 1), 1), alone(slice(0, 2), 2)
    assert [layer.layer for layer in found[0].layers] == [0, 1]
    for a, b in zip(found, both, strict=True):
        assert same(MonitorCheck(0, a.layers[:1]), MonitorCheck(0, b.layers[:1]), rel=1e-4)
    for a, b in zip(found, one, strict=True):
        assert same(MonitorCheck(0, a.layers[1:]), MonitorCheck(0, b.layers[1:]), rel=1e-4)
    assert [len(c.layers) for c in seen_by(two_ranks, "silent")] == [2, 2]


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature")
@pytest.mark.gpu
def test_on_a_gpu_nothing_waits_and_memory_is_bounded() -> None:
    from attn_diag.watching.live.call import CallPlace
    from attn_diag.watching.monitoring.metrics import head_sums

    g = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(1, 1024, 768, generator=g, device="cuda").bfloat16()
    w_q = torch.randn(768, 768, generator=g, device="cuda") * 0.05
    q = (x.float() @ w_q.T).bfloat16().view(1, 1024, 12, 64).transpose(1, 2)
    k, v, do = (torch.randn(1, 12, 1024, 64, generator=g, device="cuda").bfloat16() for _ in range(3))
    o = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    place = CallPlace(0, 0, "h.0.attn", 0, True)
    call = AttentionCall(place, "test", q, k, v, o, causal="top-left", do=do, x=x, w_q=w_q)
    past = some(head_sums(Sample.of(call)).sketches)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.cuda.set_sync_debug_mode("error")
    try:
        sums = head_sums(Sample.of(call), past[0])
        sums.metrics(past[0])
        with pytest.raises(RuntimeError, match="synchroniz"):
            float(sums.sums[0, 0])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    # Blocks of 64 MB, k, v and row quantities in float64 about as much again.
    assert torch.cuda.max_memory_allocated() - before < 200e6


def test_a_monitor_that_sees_nothing_says_so(caplog: pytest.LogCaptureFixture) -> None:
    watched, trained = nn.Linear(4, 4), nn.Linear(4, 4)
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
    with Monitor(watched, every=1):
        for step in range(4):
            torch.autograd.backward(trained(torch.ones(2, 4)).sum())
            optimizer.step()
            assert ("no attention call" in caplog.text) == (step >= 2)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"every": 0}, "1 or more"),
        ({"rows": 0}, "1 or more"),
        ({"sequences": -1}, "1 or more"),
        ({"false_alarm_rate": 0}, "above 0"),
        ({"layers": 1}, "layers"),
        ({"every": 2.5}, "every"),
        ({"every": "50"}, "every"),
    ],
    ids=str,
)
def test_choices_that_cannot_be_are_refused(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(attn_diag.InputError, match=said):
        Monitor(nn.Linear(2, 2), **wrong)


if __name__ == "__main__":
    one_rank(int(os.environ["RANK"]), Path(sys.argv[1]))
