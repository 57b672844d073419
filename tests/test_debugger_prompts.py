"""``inspect`` and ``break_if`` at the prompt of a debugger, in programs of their own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from command_line import Programs
from prompts import too_much

pytestmark = pytest.mark.slow

PROGRAM = """
import sys
import torch, attn_diag
from builders import rounded_inputs
from tiny_models import nano_gpt

tiny = nano_gpt()
model = tiny.model.bfloat16()
optimizer = torch.optim.SGD(model.parameters(), 0.1)

def train(steps):
    for step in range(steps):
        loss = tiny.loss(model)
        loss.backward()
        after = "the backward"
        optimizer.step()
    print("trained")
"""


@pytest.fixture
def at_prompt(programs: Programs) -> Callable[..., str]:
    """What a program and pdb print that is told these commands."""

    def call(program: str, *commands: object, breakpoint_: str = "") -> str:
        stdin = "\n".join([*map(str, commands), ""])
        done = programs.run(PROGRAM + program, stdin=stdin, COLUMNS="80", PYTHONBREAKPOINT=breakpoint_)
        return done.out + done.err

    return call


def answers(output: str) -> list[str]:
    """What was printed after each prompt."""
    return [part.strip("\n") for part in output.split("(Pdb) ")[1:]]


def test_inspect_at_a_pdb_prompt(at_prompt: Callable[..., str]) -> None:
    program = """
heads = rounded_inputs(heads=144)
with attn_diag.capture(model, sys.argv[0] + ".captures"):
    train(2)
breakpoint()
print("end")
"""
    output = at_prompt(
        program,
        "attn_diag.inspect(**heads, causal=True)",
        "attn_diag.last()",
        "attn_diag.inspect_captures(attn_diag.last())",
        "found = attn_diag.inspect(**heads, causal=True)",
        "print(attn_diag.explain(found, 3))",
        "c",
    )
    inspected, listed, of_run, nothing, explained = answers(output)[:5]
    assert "of 144 heads" in inspected.splitlines()[0], output
    assert not too_much(inspected)
    assert len(inspected.splitlines()) > 8
    assert listed.startswith("2 captures:")
    assert not too_much(listed)
    assert "8 heads" in of_run.splitlines()[0]
    assert not too_much(of_run)
    assert nothing == ""
    assert explained.startswith("observed, head 3:")


def test_break_if_stops_in_the_users_frame(at_prompt: Callable[..., str]) -> None:
    output = at_prompt(
        "with attn_diag.break_if(max_logit=0.01, model=model):\n    train(1)\nprint(sys.gettrace())",
        "p width, q.shape",
        "attn_diag.last_finding()",
        "attn_diag.last_finding().disarm()",
        "c",
    )
    opened, variables, finding, _, end = [output.split("(Pdb) ")[0], *answers(output)]
    assert not too_much("\n".join(opened.splitlines()[:-3])), "pdb adds three lines"
    assert "-> result: Tensor = self.c_proj(y" in opened, "the line after the call"
    assert variables == "(32, torch.Size([2, 4, 20, 8]))"
    assert finding.startswith("<Finding: max_logit: ")
    assert end == "trained\nNone"


def test_break_if_stops_behind_the_backward(at_prompt: Callable[..., str]) -> None:
    output = at_prompt(
        "with attn_diag.break_if(predicate=lambda d: True, model=model):\n    train(2)",
        "n",
        "p after",
        "len(attn_diag.last_finding().also)",
        "attn_diag.last_finding().capture",
        "c",
        "q",
    )
    opened, found = output.split("(Pdb) ")[0], answers(output)
    assert "judged after its backward" in " ".join(opened.split())
    assert '-> after = "the backward"' in opened
    assert found[1] == "'the backward'"
    assert found[2] == "1", "both layers were found in this backward"
    assert " do dq dk dv x w_q" in " ".join(found[3].split())
    assert "step 1" in found[4], "it goes on to the next step"
    assert "BdbQuit" in found[5], "quitting ends the program"
    assert "trained" not in output


def test_break_if_honours_pythonbreakpoint(at_prompt: Callable[..., str]) -> None:
    program = "with attn_diag.break_if(max_logit=0.01, model=model):\n    train(1)"
    output = at_prompt(program, breakpoint_="0")
    assert "trained" in output
    assert "attn_diag.break_if: max_logit" in output
