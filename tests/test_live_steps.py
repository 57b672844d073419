"""Which steps calls belong to, in loops whose optimizers are not the plain one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import Tiny, nano_gpt, next_token_loss, same, tokens, written
from torch import Tensor, nn

import attn_diag
from attn_diag.watching.live.clock import BY_PARAMETERS, BY_PASSES, UNSTEPPED
from attn_diag.watching.live.watch import UNFINISHED

QUANTITIES = {"q", "k", "v", "o", "do", "dq", "dk", "dv"}
STEPS = 4
Step = Callable[[nn.Module, Tensor], None]


def as_soon_as_there_are_gradients(model: nn.Module) -> Step:
    """Each parameter has an optimizer, that steps in the backward."""
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

    def step(parameter: Tensor) -> None:
        optimizers[parameter].step()  # type: ignore[index]
        optimizers[parameter].zero_grad()  # type: ignore[index]

    for parameter in optimizers:
        parameter.register_post_accumulate_grad_hook(step)  # type: ignore[no-untyped-call]
    return lambda model, ids: torch.autograd.backward(next_token_loss(model, ids))


def compiled(model: nn.Module) -> Step:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    update: Any = torch.compile(optimizer.step, backend="eager")

    def step(model: nn.Module, ids: Tensor) -> None:
        optimizer.zero_grad()
        torch.autograd.backward(next_token_loss(model, ids))
        update()

    return step


def several_calls(model: nn.Module) -> Step:
    """LBFGS, which changes the parameters between the calls of a step."""
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

    def step(model: nn.Module, ids: Tensor) -> None:
        def closure() -> float:
            optimizer.zero_grad()
            loss = next_token_loss(model, ids)
            torch.autograd.backward(loss)
            return loss.item()

        optimizer.step(closure)  # type: ignore[no-untyped-call]

    return step


WAYS = {way.__name__: way for way in (as_soon_as_there_are_gradients, compiled, several_calls)}


def trained(tiny: Tiny, step: Step, watching: Any) -> list[Tensor]:
    with watching:
        for number in range(STEPS):
            step(tiny.model, tokens(number))
    return [p.detach().clone() for p in tiny.model.parameters()]


@pytest.mark.filterwarnings("ignore")  # of the compiler
@pytest.mark.parametrize("way", WAYS)
def test_steps_are_counted(way: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    torch._dynamo.reset()
    alone = nano_gpt()
    expected = trained(alone, WAYS[way](alone.model), contextlib.nullcontext())
    torch._dynamo.reset()
    tiny = nano_gpt()
    step = WAYS[way](tiny.model)
    recorder = attn_diag.capture(tiny.model, tmp_path, batch=None)
    monitor = attn_diag.Monitor(tiny.model, every=2)
    assert same(expected, trained(tiny, step, recorder))
    monitor.close()
    assert [check.step for check in monitor.history] == [0, 2]
    found = {(c.metadata.step, c.metadata.layer): c for c in written(recorder)}
    assert sorted(found) == [(number, layer) for number in range(STEPS) for layer in (0, 1)]
    assert all(capture.tensors.keys() >= QUANTITIES for capture in found.values())
    said = caplog.text
    assert (BY_PARAMETERS in said) == (way == "compiled")
    assert UNSTEPPED not in said
    assert UNFINISHED not in said


def test_a_generator_whose_critic_steps_first(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its first call of a step has gradients that nobody asks for; the critic's optimizer ends no step of its."""
    generator, critic = nano_gpt().model, nn.Linear(61, 1)
    theirs, ours = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (critic, generator))
    recorder = attn_diag.capture(generator, tmp_path, batch=None, calls=None)
    with recorder, attn_diag.Monitor(generator, every=1) as monitor:
        for number in range(STEPS):
            torch.autograd.backward(critic(generator(tokens(number)).detach()).mean())
            theirs.step()
            torch.autograd.backward(-critic(generator(tokens(number))).mean())
            ours.step()
    found = [(c.metadata.step, int(c.metadata.extra["call"]), "dq" in c.tensors) for c in written(recorder)]
    assert found == [(step, call, call == 1) for step in range(STEPS) for _ in (0, 1) for call in (0, 1)]
    # What it waits for in vain is known after the first check.
    assert [check.step for check in monitor.history] == [1, 2, 3]
    assert all({layer.layer for layer in check.layers} == {0, 1} for check in monitor.history)
    assert caplog.text.count(UNFINISHED) == 1
    assert monitor.metrics()["attn/dq_share/max"] > 0


def test_parameters_that_others_stand_in_for_have_not_changed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = nano_gpt().model
    others = {name: p.detach().clone().mul_(2) for name, p in model.named_parameters()}
    with attn_diag.capture(model, tmp_path, calls=None):
        for number in range(2):
            torch.func.functional_call(model, others, (tokens(number),))
            model(tokens(number))
    assert BY_PARAMETERS not in caplog.text


PASSES = 24


@pytest.mark.parametrize("cleared", [True, False])
def test_a_loop_whose_optimizer_is_no_torch_optimizer_is_told_so_or_counted(
    cleared: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model = nano_gpt().model
    with attn_diag.Monitor(model, every=2) as monitor:
        for number in range(PASSES):
            torch.autograd.backward(next_token_loss(model, tokens(number)))
            for p in model.parameters():
                assert p.grad is not None
                p.data -= 0.1 * p.grad  # no version of p changes
                p.grad = None if cleared else p.grad
        assert (BY_PASSES in caplog.text) == cleared
        assert (UNSTEPPED in caplog.text) == (not cleared)
        assert len(caplog.records) == 1
    assert [check.step for check in monitor.history] == ([0, 2] if cleared else [])


def test_gradients_of_many_passes_are_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    model = nano_gpt().model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attn_diag.Monitor(model, every=1) as monitor:
        for number in range(PASSES):
            torch.autograd.backward(next_token_loss(model, tokens(number)))
        optimizer.step()
    assert [check.step for check in monitor.history] == [0]
    assert not caplog.records
