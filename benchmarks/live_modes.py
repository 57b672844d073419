"""What a watch costs a training step in each way to run a model: a part of ``bench_live``, for a GPU.

GPT-2 small, 64 sequences of 1,024 in one batch, BF16, SDPA's flash kernel: eager, compiled whole, and compiled with
mode="reduce-overhead", whose CUDA graphs are recorded anew for each watch, as they hold copies for it.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from statistics import median
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).with_name("failing_run")))
import train

import attn_diag

MODES: dict[str, Any] = {
    "eager": None,
    "compiled": {},
    "CUDA graphs": {"mode": "reduce-overhead"},
}
_SIZES = ["--sequences", "64", "--micro-batch", "64"]
_WARM_UP = 5


def bench_modes(tokens: Path, steps: int, modes: Sequence[str] = tuple(MODES)) -> dict[str, Any]:
    """Milliseconds of a step: without a watch, with one that does not look, and with one that does."""
    run = train.parser().parse_args(["--arm", "healthy", "--tokens", str(tokens), "--out", "unused", *_SIZES])
    corpus = train.load_tokens(run.tokens, run.vocabulary)
    return {name: _of_mode(train.Trainer(run, corpus), MODES[name], steps) for name in modes}


def _of_mode(trainer: train.Trainer, options: dict[str, Any] | None, steps: int) -> dict[str, Any]:
    def times(around: Callable[[], AbstractContextManager[Any]], looks: Callable[[int], bool]) -> dict[bool, float]:
        """By whether the step is looked at."""
        if options is not None:
            torch._dynamo.reset()
            trainer.run = torch.compile(trainer.model, dynamic=False, **options)
        found: dict[bool, list[float]] = {True: [], False: []}
        with around():
            for number in range(_WARM_UP + 2 * steps):
                torch.cuda.synchronize()
                began = time.perf_counter()
                trainer.train_step()
                torch.cuda.synchronize()
                if number >= _WARM_UP:
                    found[looks(number)].append((time.perf_counter() - began) * 1e3)
        return {looked: median(ms) for looked, ms in found.items() if ms}

    def odd(number: int) -> bool:
        return number % 2 == 1

    with tempfile.TemporaryDirectory() as folder:
        before = times(nullcontext, lambda _: False)[False]
        never = times(lambda: attn_diag.Monitor(trainer.model, every=10**9, first_step=1), lambda _: False)[False]
        monitor = times(lambda: attn_diag.Monitor(trainer.model, every=2, first_step=1), odd)
        every = range(1, 10**6, 2)
        capture = times(lambda: attn_diag.capture(trainer.model, folder, steps=every, layers={2}), odd)
        after = times(nullcontext, lambda _: False)[False]
    plain = (before + after) / 2
    looked = monitor[True] - monitor[False]
    return {
        "plain step ms": {"before": round(before, 2), "after": round(after, 2)},
        "a monitor that does not look, extra ms": round(never - plain, 2),
        "between looks, extra ms": {
            "monitor": round(monitor[False] - plain, 2), "capture": round(capture[False] - plain, 2)
        },
        "a step that is looked at, extra ms": {
            "monitor": round(looked, 2), "capture of one layer": round(capture[True] - capture[False], 2)
        },
        "share of a step at every=50": round(looked / 50 / plain, 5),
    }  # fmt: skip
