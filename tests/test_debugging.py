"""``break_if``: a program is stopped where its attention goes wrong, and is left as it was."""

from __future__ import annotations

import gc
import logging
import sys
import threading
import weakref
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from builders import rounded_inputs, some, true_o
from tiny_models import hooks_of, nano_gpt, next_token_loss, same, tokens
from torch import Tensor
from torch.nn import functional
from torch.nn.functional import scaled_dot_product_attention
from torch.optim import optimizer

import attn_diag
from attn_diag import Diagnosis, Finding, InputError, break_if
from attn_diag.watching.debugging.breaking import users_frame
from attn_diag.watching.debugging.finding import first_nonfinite
from attn_diag.watching.live.call import AttentionCall, CallPlace

pytestmark = pytest.mark.slow


class Run:
    """A small training run."""

    def __init__(self) -> None:
        self.model = nano_gpt().model.bfloat16()
        self.attentions: Any = [self.model.get_submodule(f"h.{layer}.attn") for layer in range(2)]
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)
        self.x = tokens()
        self.losses: list[Tensor] = []

    def step(self) -> None:
        loss = next_token_loss(self.model, self.x)
        self.optimizer.zero_grad()
        torch.autograd.backward(loss)
        self.optimizer.step()
        self.losses.append(loss.detach())

    def trained(self) -> list[Tensor]:
        return [*self.losses, *self.model.parameters()]


@pytest.fixture
def run() -> Run:
    return Run()


@pytest.fixture
def found() -> list[Finding]:
    """What was found, where its ``append`` is the hook."""
    return []


def fail(found: Finding) -> None:
    pytest.fail(str(found))


def always(diagnosis: Diagnosis) -> bool:
    return bool(diagnosis.captures)


def never(diagnosis: Diagnosis) -> bool:
    return not diagnosis.captures


def test_judged_after_the_backward_where_there_is_one(run: Run, found: list[Finding]) -> None:
    with break_if(predicate=always, model=run.model, hook=found.append) as point:
        run.step()
        with torch.no_grad():
            run.model(run.x)
    assert [f.judged for f in found] == ["after its backward"] * 2, "evaluation in a loop that trains is passed over"
    assert (point.judged, point.found) == (4, 2)
    assert [f.place.layer for f in found] == [1, 0]
    for finding in found:
        assert some(finding.diagnosis).captures[0].observations[0].heads[0].noise_factor is not None
        assert {"do", "dq", "x", "w_q"} <= set(some(finding.capture).tensors)
    assert attn_diag.last_finding() is found[-1]


def test_without_a_backward_o_is_judged(run: Run, found: list[Finding]) -> None:
    with break_if(predicate=always, model=run.model, hook=found.append), torch.no_grad():
        run.model(run.x)
        assert [f.judged for f in found] == ["after its forward"] * 2, "at once"
    with break_if(predicate=always, model=run.model, hook=found.append):
        run.model(run.x)
        assert len(found) == 2, "a backward may come"
    assert [f.judged for f in found[2:]] == ["after its forward, as no backward came"] * 2


def test_plain_tensors_and_no_model(found: list[Finding]) -> None:
    given = rounded_inputs()
    with break_if(predicate=always, hook=found.append):
        functional.scaled_dot_product_attention(given["q"], given["k"], given["v"])
    assert [f.judged for f in found] == ["after its forward"]


CHOICES: dict[str, tuple[dict[str, Any], int]] = {
    "every step": ({}, 6),
    "a predicate that says no": ({"predicate": never}, 0),
    "one layer": ({"layers": {1}}, 3),
    "every other step": ({"every": 2}, 4),
    "a label that nothing carries": ({"predicate": None, "ill_conditioned": True}, 0),
    "a logit that nothing reaches": ({"predicate": None, "max_logit": 1e6}, 0),
    "a logit that all reach": ({"predicate": None, "max_logit": -1.0}, 6),
    "finite": ({"predicate": None, "nonfinite": True}, 0),
}


@pytest.mark.parametrize("choice", CHOICES)
def test_what_is_looked_at(run: Run, choice: str, found: list[Finding]) -> None:
    options, expected = CHOICES[choice]
    given: dict[str, Any] = {"predicate": always, "model": run.model, "hook": found.append}
    with break_if(**(given | options)):
        for _ in range(3):
            run.step()
    assert len(found) == expected


@pytest.mark.parametrize("hook", [fail, None], ids=["hook", "predicate"])
def test_what_the_user_raises_is_raised_in_the_program(run: Run, hook: Any) -> None:
    def wrong(diagnosis: Diagnosis) -> bool:
        raise LookupError(f"of the predicate: {diagnosis.summary.sentence}")

    given: dict[str, Any] = {"predicate": wrong} if hook is None else {"predicate": always, "hook": hook}
    expected = LookupError if hook is None else pytest.fail.Exception
    point = break_if(model=run.model, **given)
    with pytest.raises(expected) as raised, point:
        run.step()
    lines = [f"{entry.frame.code.path}:{entry.lineno}" for entry in raised.traceback]
    assert any(Path(__file__).name in line for line in lines)
    assert not torch.is_grad_enabled() or sys.gettrace() is None
    run.step()
    assert len(run.losses) == 1, "the step it was raised in did not end, the next one did"


def test_nonfinite_stops_where_it_arises(run: Run, found: list[Finding]) -> None:
    with torch.no_grad():
        run.attentions[1].c_attn.weight[70, 3] = torch.inf
    with break_if(nonfinite=True, model=run.model, hook=found.append), torch.no_grad():
        run.model(run.x)
    assert [f.place.layer for f in found] == [1]
    assert found[0].reasons[0].startswith("nonfinite: v holds")
    assert "q, k are finite" in found[0].reasons[0]


def test_nonfinite_gradients(run: Run, found: list[Finding]) -> None:
    with break_if(nonfinite=True, model=run.model, hook=found.append):
        (run.model(run.x) * torch.inf).sum().backward()
    assert {f.place.layer for f in found} == {0, 1}
    assert found[0].reasons[0].startswith("nonfinite: do holds")


# Where a NaN or Inf is put into a call whose rows 0 to 3 and keys 20 to 23 are hidden by its mask; and what is said.
PADDING: dict[str, tuple[str, tuple[Any, ...], float, str]] = {
    "q of a row without keys": ("q", (0, 1, 2), torch.nan, ""),
    "dO of a row without keys": ("do", (0, 1, 2), torch.inf, ""),
    "k of a key that no row sees": ("k", (0, 0, 21), torch.nan, ""),
    "v of a key that no row sees": ("v", (0, 0, 21), torch.inf, ""),
    "LSE -inf of a row without keys": ("lse", (0, 1, 2), -torch.inf, ""),
    "LSE +inf of a row without keys": ("lse", (0, 1, 2), torch.inf, ""),
    "LSE NaN of a row without keys": ("lse", (0, 1, 2), torch.nan, "lse holds 1 NaN or Inf, first at [0, 1, 2]"),
    "LSE -inf of a row with keys": ("lse", (0, 1, 9), -torch.inf, "lse holds 1 NaN or Inf, first at [0, 1, 9]"),
    "O of a row without keys": ("o", (0, 1, 2), torch.nan, "o holds 16 NaN or Inf, all in rows that see no key"),
    "O of a row with keys": ("o", (0, 1, 9, 5), torch.nan, "o holds 1 NaN or Inf, first at [0, 1, 9, 5]; q, k, v are"),
    "v of a visible key": (
        "v",
        (0, 1, 7, 3),
        torch.nan,
        "v holds 1 NaN or Inf, first at [0, 1, 7, 3]; q, k are finite",
    ),
    "dK of a key that no row sees": ("dk", (0, 0, 21), torch.nan, "dk holds 16 NaN or Inf, first at [0, 0, 21, 0]"),
    "dV alone": ("dv", (0, 0, 5, 5), -torch.inf, "dv holds 1 NaN or Inf, first at [0, 0, 5, 5]; do, dq, dk are finite"),
}


@pytest.mark.parametrize("case", PADDING)
def test_nonfinite_counts_where_something_reads_it(case: str) -> None:
    name, where, value, said = PADDING[case]
    of_rows, of_keys = torch.ones(1, 4, 24, 16), torch.ones(1, 2, 24, 16)
    tensors: dict[str, Any] = {n: of_rows.clone() for n in ("q", "o", "do", "dq")} | {
        n: of_keys.clone() for n in ("k", "v", "dk", "dv")
    }
    tensors["lse"] = torch.ones(1, 4, 24)
    tensors[name][where] = value
    mask = torch.ones(24, 24, dtype=torch.bool)
    mask[:4], mask[:, 20:] = False, False
    additive = torch.zeros(24, 24).masked_fill_(~mask, torch.finfo(torch.float32).min)
    for hiding in (mask, additive):
        call = AttentionCall(CallPlace(0, 0, None, 0, False), "test", **tensors, mask=hiding)
        found = [first_nonfinite(call, n) for n in (("q", "k", "v", "o", "lse"), ("do", "dq", "dk", "dv"))]
        assert [f for f in found if f] == [f for f in found if f and f.startswith(f"nonfinite: {said}")]
        assert len([f for f in found if f]) == bool(said)
    # Guard: of a call without that mask everything counts.
    unmasked = replace(call, mask=None)
    said_of_all = [
        first_nonfinite(unmasked, ("q", "k", "v", "o", "lse")),
        first_nonfinite(unmasked, ("do", "dq", "dk", "dv")),
    ]
    assert any(said_of_all)


def test_a_wrong_kernel_is_stopped_at(monkeypatch: pytest.MonkeyPatch, found: list[Finding]) -> None:
    """A lost tile of keys is wrong, not lossy; the same kernel without it stops nowhere."""
    given = rounded_inputs(rows=256)
    exact = true_o(given["q"], given["k"], given["v"])
    outputs = {"wrong": exact.clone().index_fill(2, torch.arange(200, 256), 0.0), "right": exact}
    module: Any = sys.modules["torch.nn.functional"]
    for kind, o in outputs.items():
        monkeypatch.setattr(module, "scaled_dot_product_attention", lambda *_, o=o, **__: o.bfloat16())
        found.clear()
        with break_if(wrong=True, lossy=True, hook=found.append):
            module.scaled_dot_product_attention(given["q"], given["k"], given["v"], is_causal=True)
        assert [f.reasons[0].partition(":")[0] for f in found] == (["wrong"] if kind == "wrong" else []), kind


def test_dropout_is_not_analysed_but_its_tensors_are_seen(
    run: Run, caplog: pytest.LogCaptureFixture, found: list[Finding]
) -> None:
    run.attentions[0].dropout = 1.0
    with (
        caplog.at_level(logging.WARNING, "attn_diag"),
        break_if(predicate=always, max_logit=-1.0, model=run.model, layers={0}, hook=found.append),
        torch.no_grad(),
    ):
        run.model(run.x)
    assert len(found) == 1
    assert found[0].diagnosis is None
    assert "dropout" in (found[0].refused or "")
    assert "dropout" in str(found[0])


def planted(q: Tensor, k: Tensor, v: Tensor, rounding: str) -> Tensor:
    """A kernel whose O is rounded once, in a mode of choice; its gradient is that of exact attention."""
    exact = true_o(q, k, v)
    rounded = attn_diag.round_to(exact.detach(), rounding)
    o: Tensor = (exact + (rounded - exact.detach())).bfloat16()
    return o


@pytest.mark.parametrize(("rounding", "stops"), [("bf16:toward-zero", 1), ("bf16", 0)])
@pytest.mark.parametrize("gradients", [True, False], ids=["trained", "inference"])
def test_a_directed_rounding_is_stopped_at_and_the_right_one_is_not(
    monkeypatch: pytest.MonkeyPatch, rounding: str, stops: int, gradients: bool, found: list[Finding]
) -> None:
    def kernel(query: Tensor, key: Tensor, value: Tensor, is_causal: bool = True) -> Tensor:
        assert is_causal
        return planted(query, key, value, rounding)

    module: Any = sys.modules["torch.nn.functional"]
    monkeypatch.setattr(module, "scaled_dot_product_attention", kernel)
    given = rounded_inputs(rows=256)
    q, k, v = (given[name].requires_grad_(gradients) for name in "qkv")
    with break_if(biased=True, hook=found.append):
        o = module.scaled_dot_product_attention(q, k, v, is_causal=True)
        if gradients:
            (o * given["do"]).sum().backward()
    assert len(found) == stops
    if stops:
        assert found[0].reasons[0].startswith("biased: head ")
        assert (found[0].judged == "after its backward") == gradients


def test_another_thread_waits_for_the_users_own(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on CUDA, where gradients come in threads that have no frame of the user's."""
    found: list[tuple[str, Finding]] = []
    point = break_if(predicate=always, layers={0}, hook=lambda f: found.append((threading.current_thread().name, f)))
    with point:
        calls: list[AttentionCall] = []
        original = point.backward
        monkeypatch.setattr(point, "backward", calls.append)
        torch.autograd.backward(next_token_loss(run.model, run.x))
        (call,) = calls
        foreign = threading.Thread(target=original, args=(call,), name="autograd")
        foreign.start()
        foreign.join()
        assert point.found == 1
        assert not found, "nothing of the user's to stop in"
        run.optimizer.step()
        assert [name for name, _ in found] == [threading.main_thread().name]
    assert len(found) == 1


@pytest.mark.gpu
def test_on_cuda_the_program_stops_in_its_own_thread() -> None:
    plain, watched = Run(), Run()
    for run in (plain, watched):
        run.model.cuda()
        run.x = run.x.cuda()
    found: list[tuple[str, str]] = []

    def note(finding: Finding) -> None:
        found.append((threading.current_thread().name, finding.judged))

    plain.step()
    with break_if(predicate=always, model=watched.model, hook=note):
        watched.step()
        # Behind the optimizer's step at the latest.
        assert found == [(threading.main_thread().name, "after its backward")] * 2
    assert same(plain.trained(), watched.trained())


def state(run: Run) -> tuple[Any, ...]:
    return (
        functional.scaled_dot_product_attention,
        scaled_dot_product_attention,
        hooks_of(run.model),
        len(optimizer._global_optimizer_post_hooks),
        sys.gettrace(),
        sys._getframe(1).f_trace,
        threading.active_count(),
    )


@pytest.mark.parametrize("how", ["judged", "stopped", "raised"])
def test_same_bits_and_nothing_stays_behind(how: str) -> None:
    plain, watched = Run(), Run()
    before = state(watched)
    torch.manual_seed(1)
    for _ in range(2):
        plain.step()
    generator = torch.get_rng_state()
    torch.manual_seed(1)
    predicate = never if how == "judged" else always
    with break_if(predicate=predicate, max_logit=1e9, nonfinite=True, model=watched.model, hook=str):
        for _ in range(2):
            watched.step()
    assert torch.equal(generator, torch.get_rng_state())
    if how == "raised":
        with (
            pytest.raises(ZeroDivisionError),
            break_if(predicate=always, model=watched.model, hook=lambda f: 1 / (f is None)),
        ):
            watched.model(watched.x).sum().backward()
        watched.optimizer.zero_grad()
    assert same(plain.trained(), watched.trained())
    assert state(watched) == before


def test_what_stays_behind_would_be_seen(run: Run) -> None:
    before = state(run)
    point = break_if(predicate=never, model=run.model).start()
    assert state(run) != before
    point.close()
    point.close()
    assert state(run) == before


def test_disarmed_it_stops_no_more(run: Run, found: list[Finding]) -> None:

    def stop_once(finding: Finding) -> None:
        found.append(finding)
        finding.disarm()

    with break_if(predicate=always, model=run.model, hook=stop_once) as point:
        for _ in range(3):
            run.step()
    assert len(found) == 2, "what one backward found is handed over together"
    assert point.found == 2


@pytest.mark.usefixtures("fresh_heap")
def test_the_last_finding_keeps_no_model() -> None:
    run = Run()
    with break_if(predicate=always, model=run.model, hook=str):
        run.step()
    kept = weakref.ref(run.model)
    del run
    gc.collect()
    assert kept() is None
    assert attn_diag.last_finding() is not None


def test_calls_without_a_verdict_are_said_once(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    """A label that cannot be given must not look like one that does not hold."""
    run.attentions[0].dropout = 1.0
    with caplog.at_level(logging.WARNING, "attn_diag"), break_if(lossy=True, model=run.model, hook=fail):
        for _ in range(3):
            run.step()
    said = [r.message for r in caplog.records]
    assert len(said) == 1
    assert "a call of h.0.attn is not judged: attention dropout 1 is on" in said[0]


def test_a_kernel_of_another_function_is_wrong_and_a_breakpoint_that_does_not_ask_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, found: list[Finding]
) -> None:
    def wrong(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return query * 3 + key - value

    module: Any = functional
    monkeypatch.setattr(module, "scaled_dot_product_attention", wrong)
    given = rounded_inputs()
    with caplog.at_level(logging.WARNING, "attn_diag"), break_if(lossy=True, biased=True, hook=fail):
        for _ in range(2):
            module.scaled_dot_product_attention(given["q"], given["k"], given["v"])
    assert len(caplog.records) == 1
    assert "attention is wrong, for which this breakpoint does not stop: give wrong=True" in caplog.text
    with break_if(wrong=True, hook=found.append):
        module.scaled_dot_product_attention(given["q"], given["k"], given["v"])
    assert [f.reasons for f in found] == [("wrong: head 0, 1",)]


def test_in_inference_mode(run: Run, found: list[Finding]) -> None:
    with break_if(predicate=always, model=run.model, hook=found.append), torch.inference_mode():
        run.model(run.x)
    assert len(found) == 2


def test_the_capture_is_a_copy(run: Run, found: list[Finding]) -> None:
    with break_if(predicate=always, model=run.model, layers={0}, hook=found.append):
        run.step()
    assert found[0].capture is not None
    kept = found[0].capture.tensors["w_q"][...].clone()
    run.step()
    assert torch.equal(found[0].capture.tensors["w_q"][...], kept)
    assert not torch.equal(run.attentions[0].c_attn.weight[:32], kept)


def test_seen_by_a_debugger_of_ones_own(run: Run, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """sys.breakpointhook is what is called, as if the user's frame had called breakpoint()."""
    frames: list[FrameType | None] = []
    monkeypatch.setattr(sys, "breakpointhook", lambda: frames.append(users_frame()))
    with break_if(predicate=always, model=run.model, layers={0}):
        run.step()
    (frame,) = frames
    assert frame is not None
    assert capsys.readouterr().out.startswith(
        "attn_diag.break_if: always(diagnosis) holds\nLayer 0 (h.0.attn), call 0 of step 0"
    )


def test_nothing_seen_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    with caplog.at_level(logging.WARNING, "attn_diag"), break_if(nonfinite=True):
        for _ in range(3):
            optimizer.step()
    assert caplog.text.count("no attention call was seen") == 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "nothing to break on: give nonfinite, wrong, lossy"),
        ({"biased": True, "level": 0.0}, "level must lie between 0 and 1"),
        ({"biased": True, "every": 0}, "every must be 1"),
        ({"max_logit": float("nan")}, "max_logit must be a number"),
        ({"biased": True, "model": "gpt2"}, "model must be a torch.nn.Module"),
    ],
    ids=lambda x: str(x)[:40],
)
def test_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        break_if(**options)
