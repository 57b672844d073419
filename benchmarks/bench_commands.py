"""What identify, attribute, what-if and the microscope cost, in units of the emulation of one head.

Each is run once in a fresh process on random tensors of one head; the emulation (forward and backward) is the median
of five runs in that process. Peak memory is that of the whole process, about 350 MB of which are the imports.

    python benchmarks/bench_commands.py --json benchmarks/results/commands_cpu.json
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from attn_diag.analyses.attribution.attribute import attribute
from attn_diag.analyses.identify import identify
from attn_diag.analyses.microscopy.microscope import microscope
from attn_diag.analyses.mitigation.what_if import what_if
from attn_diag.captures.capture import Capture
from attn_diag.head.machine import describe_tool, pick_device
from attn_diag.head.read import NonFiniteCensus, read_head
from attn_diag.kernels import emulate_head, preset

SHAPES = [(1024, 64), (8192, 128)]
RECIPES = ["cudnn", "bf16-forward", "qiu2025"]
COMMANDS = ["attribute", "what-if", "identify", "microscope"]


def random_capture(length: int, width: int, recipe: str) -> Capture:
    """One causal head on N(0,1) inputs with the recipe's own O and dQ."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, do = (torch.randn(1, 1, length, width, generator=generator).bfloat16() for _ in range(4))
    bare = Capture.from_tensors({"q": q, "k": k, "v": v, "do": do}, causal="top-left")
    inputs = read_head(bare, 0, 0, torch.device("cpu"), NonFiniteCensus())
    found = emulate_head(preset(recipe, head_dim=width), inputs.head, key_gradients=False)
    assert found.dq is not None
    tensors = {"q": q, "k": k, "v": v, "do": do, "o": found.o[None, None], "dq": found.dq[None, None]}
    return Capture.from_tensors(tensors, causal="top-left")


def measure(command: str, recipe: str, length: int, width: int) -> dict[str, Any]:
    """Run one command in this process."""
    capture = random_capture(length, width, recipe)
    inputs = read_head(capture, 0, 0, torch.device("cpu"), NonFiniteCensus())
    rounds = preset(recipe, head_dim=width)
    repeats = 5 if length <= 2048 else 1
    emulation = statistics.median(timed(lambda: emulate_head(rounds, inputs.head)) for _ in range(repeats))
    import_free = {
        "attribute": lambda: attribute(capture, recipe=recipe, device="cpu"),
        "what-if": lambda: what_if(capture, recipe=recipe, device="cpu"),
        "identify": lambda: identify(capture, device="cpu"),
        "microscope": lambda: microscope(capture, recipe=recipe, device="cpu"),
    }[command]
    from scipy import stats  # noqa: F401 - imported lazily by the commands: not part of the work

    seconds = timed(import_free)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"command": command, "recipe": recipe, "T": length, "D": width, "emulation_s": emulation,
            "command_s": seconds, "ratio": seconds / emulation, "peak_mb": peak}  # fmt: skip


def timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", nargs=4, metavar=("COMMAND", "RECIPE", "T", "D"), help="measure one, print JSON")
    arguments = parser.parse_args()
    if arguments.one:
        command, recipe, length, width = arguments.one
        print(json.dumps(measure(command, recipe, int(length), int(width))))
        return
    rows = []
    for length, width in SHAPES:
        for command in COMMANDS:
            for recipe in RECIPES if length <= 2048 else RECIPES[:1]:
                call = [sys.executable, __file__, "--one", command, recipe, str(length), str(width)]
                rows.append(json.loads(subprocess.run(call, check=True, capture_output=True, text=True).stdout))
                print(rows[-1], flush=True)
    tool = describe_tool(pick_device("cpu")).__dict__
    result = {"date": datetime.now(UTC).date().isoformat(), "tool": tool, "threads": torch.get_num_threads(),
              "rows": rows}  # fmt: skip
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
