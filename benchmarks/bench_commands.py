"""What identify, attribute, what-if and the microscope cost, in units of the emulation of one head.

Each is run once in a fresh process on random tensors of one head; the emulation (forward and backward) is the median
of five runs in that process. Peak memory is that of the whole process, about 350 MB of which are the imports.

    python benchmarks/bench_commands.py --json benchmarks/results/commands_cpu.json
"""

from __future__ import annotations

import json
import resource
import statistics
from collections.abc import Callable
from typing import Any

import torch
from measuring import captured, in_fresh_process, made_by, normal, options_of, save, timed

from attn_diag.analyses.attribution.attribute import attribute
from attn_diag.analyses.identify import identify
from attn_diag.analyses.microscopy.microscope import microscope
from attn_diag.analyses.mitigation.what_if import what_if
from attn_diag.captures.capture import Capture
from attn_diag.head.read import NonFiniteCensus, read_head
from attn_diag.kernels import emulate_head, preset

SHAPES = [(1024, 64), (8192, 128)]
RECIPES = ["cudnn", "bf16-forward", "qiu2025"]
COMMANDS: dict[str, Callable[..., object]] = {
    "attribute": attribute,
    "what-if": what_if,
    "identify": identify,
    "microscope": microscope,
}


def random_capture(length: int, width: int, recipe: str) -> Capture:
    """One causal head on N(0,1) inputs with the recipe's own O and dQ."""
    inputs = normal(1, 1, length, width)
    head = read_head(captured(inputs), 0, 0, torch.device("cpu"), NonFiniteCensus()).head
    found = emulate_head(preset(recipe, head_dim=width), head, key_gradients=False)
    assert found.dq is not None
    return captured(inputs, o=found.o[None, None], dq=found.dq[None, None])


def measure(command: str, recipe: str, length: int, width: int) -> dict[str, Any]:
    """Run one command in this process."""
    capture = random_capture(length, width, recipe)
    inputs = read_head(capture, 0, 0, torch.device("cpu"), NonFiniteCensus())
    rounds = preset(recipe, head_dim=width)
    repeats = 5 if length <= 2048 else 1
    emulation = statistics.median(timed(lambda: emulate_head(rounds, inputs.head)) for _ in range(repeats))
    known = {} if command == "identify" else {"recipe": recipe}
    from scipy import stats  # noqa: F401 - imported lazily by the commands: not part of the work

    seconds = timed(lambda: COMMANDS[command](capture, device="cpu", **known))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"command": command, "recipe": recipe, "T": length, "D": width, "emulation_s": emulation,
            "command_s": seconds, "ratio": seconds / emulation, "peak_mb": peak}  # fmt: skip


def main() -> None:
    parser = options_of(__doc__)
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
                rows.append(in_fresh_process(__file__, "--one", command, recipe, length, width))
                print(rows[-1], flush=True)
    save(made_by() | {"rows": rows}, arguments.json)


if __name__ == "__main__":
    main()
