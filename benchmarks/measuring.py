"""What the benchmarks share: options, inputs, clocks, and a result that says what made it."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attn_diag import Monitor
from attn_diag.captures.capture import Capture
from attn_diag.captures.files import write_atomically
from attn_diag.head.machine import describe_tool

CAPTURES = Path(__file__).parent.parent / "tests" / "captures"


def options_of(description: str | None, device: str = "") -> ArgumentParser:
    """A parser with ``--json FILE``, and ``--device`` where it has a default."""
    parser = ArgumentParser(description=description, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    if device:
        parser.add_argument("--device", default=device, choices=["cpu", "cuda"])
    return parser


def made_by(device: torch.device | str = "cpu") -> dict[str, Any]:
    """What a result begins with: date, versions, device, and the threads of this process."""
    tool = asdict(describe_tool(torch.device(device)))
    return {"date": datetime.now(UTC).date().isoformat(), "tool": tool, "threads": torch.get_num_threads()}


def save(result: Mapping[str, Any], file: Path | None) -> None:
    """Write a result as JSON, whole or not at all, where there is a file for it."""
    if file is not None:
        text = json.dumps(result, indent=1) + "\n"
        write_atomically(file, lambda temporary: Path(temporary).write_text(text, encoding="utf-8"))


class Keeper:
    """Keeps what a long run has found so far, so that one that is cut off loses a minute at most."""

    def __init__(self, write: Callable[[], object], seconds: float = math.inf, every: float = 60.0) -> None:
        """``write`` saves what there is; after ``seconds`` there is to be no more; it is saved ``every`` so often."""
        self._write, self._every = write, every
        self._saved = time.monotonic()
        self.end = self._saved + seconds

    def goes_on(self) -> bool:
        """Whether there is time for more; to be asked after every piece of work."""
        if time.monotonic() - self._saved >= self._every:
            self.save()
        return time.monotonic() < self.end

    def save(self) -> None:
        """Save now."""
        self._write()
        self._saved = time.monotonic()


def normal(*shape: int, seed: int = 0) -> list[Tensor]:
    """q, k, v and dO of N(0,1), rounded to BF16."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).bfloat16() for _ in range(4)]


def captured(qkv_do: list[Tensor], **observed: Tensor) -> Capture:
    """A causal capture of these inputs and of what was ``observed``, [B, H, T, D] each."""
    return Capture.from_tensors(dict(zip(("q", "k", "v", "do"), qkv_do, strict=True)) | observed, causal="top-left")


def timed(work: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds of one call, until the device has done it."""
    start = clock()
    work()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
    return clock() - start


def in_fresh_process(file: str, *arguments: object) -> Any:
    """The JSON that a script prints which is given these arguments, in a process of its own."""
    command = [sys.executable, file, *map(str, arguments)]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def watched(monitor: Monitor) -> dict[str, Any]:
    """What a monitor saw: checks, layers, the largest factor of each quantity, alarms."""
    layers = [layer for check in monitor.history for layer in check.layers]
    factors: dict[str, float] = {}
    for layer in layers:
        for key, values in layer.values.items():
            if key.endswith("_factor"):
                largest = max((v for v in values.tolist() if v == v), default=0.0)
                factors[key] = round(max(factors.get(key, 0.0), largest), 3)
    alarms = [
        {"step": a.step, "layer": a.layer, "head": a.head, "kind": a.kind, "why": a.reason} for a in monitor.alarms
    ]
    return {"checks": len(monitor.history), "layers": len(layers), "largest_factors": factors, "alarms": alarms}
