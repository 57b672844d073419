"""For tests of kernels in Triton's Gluon: where they run, and how they are compiled without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import triton

# As ``has_hopper_products`` has it: elsewhere Triton's own kernels run.
written_for = pytest.mark.skipif(
    not triton.__version__.startswith(("3.6", "3.7")),
    reason="these kernels are written in the Gluon of Triton 3.6 and 3.7",
)

_AS_ON_HOPPER = """
import sys, torch, triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

class Hopper:
    get_current_target = lambda self: GPUTarget("cuda", 90, 32)
    get_current_device = get_current_stream = lambda self, *_: 0
    get_active_torch_device = lambda self: torch.device("cpu")

driver.set_active(Hopper())
made, run = [], JITFunction.run
JITFunction.run = lambda self, *a, grid, warmup, **k: made.append(run(self, *a, grid=grid, warmup=True, **k))
"""


def told_of_compiled(script: str, *arguments: str) -> list[list[str]]:
    """The words of each line that ``script`` prints, in a process in which kernels are compiled for Hopper instead of
    launched, and kept in the list ``made``."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", _AS_ON_HOPPER + script, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr
    return [line.split() for line in done.stdout.splitlines()]
