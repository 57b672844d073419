"""What the monitor and a capture cost a training run on a GPU (GPT-2 small, 160 sequences of 1,024 a step, BF16).

    python benchmarks/bench_live.py --tokens tokens.npy.xz [--steps 12] [--json FILE]
    python benchmarks/bench_live.py --tokens tokens.npy.xz --modes [--json FILE]
    python benchmarks/bench_live.py --calls cuda [--json FILE]

One process trains with SDPA's flash kernel; steps with and without follow each other, each ended by a synchronisation.

- monitor: a monitored step beside its unmonitored neighbours; a fiftieth of the difference is what ``every=50`` costs a
  step. Memory: the peak of a monitored step above that of an unmonitored one, and what stays allocated.
- capture: a step of which one layer is captured (the first: it finds the projections) beside its neighbours, and the
  time between two events around it on the training stream.
- synchronisations: those that PyTorch reports (``torch.cuda.set_sync_debug_mode``) in a step of a run under ``capture``
  and ``Monitor`` that neither wants.
- modes: with ``--modes``, and alone: the same eager, compiled and in CUDA graphs; see ``live_modes``.
- calls: with ``--calls``, and alone, on a CPU too: what a call of attention costs the host; see ``live_calls``.
"""

from __future__ import annotations

import json
import logging
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from live_calls import bench_calls
from live_modes import MODES, bench_modes
from measuring import made_by, options_of, save

sys.path.insert(0, str(Path(__file__).with_name("failing_run")))
import train

import attn_diag


def timed(step: Callable[[], object]) -> tuple[float, float]:
    """Milliseconds of one step: on the wall, until all streams are done, and on the training stream alone."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    began = time.perf_counter()
    start.record()
    step()
    end.record()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) * 1e3, start.elapsed_time(end)


def peak_mib(step: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() / 2**20


def synchronisations(step: Callable[[], object]) -> int:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(w.message) for w in seen)


def costs(pairs: list[tuple[tuple[float, float], tuple[float, float]]]) -> dict[str, Any]:
    """Of (plain, watched) pairs of ``timed``."""
    plain = median(p[0] for p, _ in pairs)
    extra = [w[0] - p[0] for p, w in pairs]
    on_stream = [w[1] - p[1] for p, w in pairs]
    return {
        "plain step ms": round(plain, 1),
        "extra ms": {"median": round(median(extra), 1), "all": [round(x, 1) for x in extra]},
        "extra ms on the training stream": {"median": round(median(on_stream), 1), "max": round(max(on_stream), 1)},
    }


def bench_monitor(trainer: train.Trainer, pairs: int) -> dict[str, Any]:
    base, kept = peak_mib(trainer.train_step), torch.cuda.memory_allocated()
    monitor = attn_diag.Monitor(trainer.model, every=2)
    for _ in range(4):
        trainer.train_step()
    peaks = [peak_mib(trainer.train_step) for _ in range(2)]
    torch.cuda.synchronize()
    stays = (torch.cuda.memory_allocated() - kept) / 2**20
    both = [(timed(trainer.train_step), timed(trainer.train_step)) for _ in range(pairs)]
    # Which of the two was monitored depends on where its steps began.
    if median(a[0] for a, _ in both) > median(b[0] for _, b in both):
        both = [(b, a) for a, b in both]
    found = costs(both)
    monitor.close()
    share = found["extra ms"]["median"] / 50 / found["plain step ms"]
    return found | {
        "share of a step at every=50": round(share, 5),
        "peak MiB above a plain step": round(max(peaks) - base, 1),
        "MiB that stay": round(stays, 1),
    }


def bench_capture(trainer: train.Trainer, pairs: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        recorder = attn_diag.capture(trainer.model, Path(folder) / "one", layers={2}, steps=range(1, 1000, 2))
        with recorder:
            first = timed(trainer.train_step), timed(trainer.train_step)
            recorder.drain()
            both = []
            for _ in range(pairs):
                both.append((timed(trainer.train_step), timed(trainer.train_step)))
                recorder.drain()
            found = costs(both)
            found["first, which finds the projection"] = costs([first])["extra ms"]["median"]
            found["MiB of a file"] = round(recorder.written[0].stat().st_size / 2**20, 1)
        assert not recorder.dropped, recorder.dropped
        with attn_diag.capture(trainer.model, Path(folder) / "two", layers={2}, batch=None, steps={1}) as recorder:
            whole = costs([(timed(trainer.train_step), timed(trainer.train_step))])
            recorder.drain()
            size = round(recorder.written[0].stat().st_size / 2**20, 1)
            found["all 32 sequences, the first time"] = whole | {"MiB of a file": size}
    return found


def bench_synchronisations(trainer: train.Trainer) -> dict[str, int]:
    plain = synchronisations(trainer.train_step)
    with tempfile.TemporaryDirectory() as folder:
        monitor = attn_diag.Monitor(trainer.model, every=1000)
        with attn_diag.capture(trainer.model, folder, steps={0, 1}, layers={2}):
            for _ in range(3):
                trainer.train_step()
            watched = synchronisations(trainer.train_step)
        monitor.close()
    return {"plain": plain, "watched, not wanted": watched}


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--tokens", type=Path, help="needed unless --calls is given")
    parser.add_argument("--modes", nargs="*", metavar="MODE", help=f"only steps of a model: {', '.join(MODES)} (all)")
    parser.add_argument("--calls", choices=["cpu", "cuda"], help="only the host's cost of a call, on this device")
    parser.add_argument("--steps", type=int, default=12, help="pairs of steps for each figure")
    options = parser.parse_args()
    if options.calls:
        torch.set_num_threads(1)
        logging.disable()  # that no call was chosen
        calls = made_by(options.calls) | {"host's cost of a call": bench_calls(options.calls)}
        print(json.dumps(calls, indent=1))
        save(calls, options.json)
        return
    if options.tokens is None:
        parser.error("give --tokens, or --calls")
    if options.modes is not None:
        named = options.modes or list(MODES)
        modes = made_by("cuda") | {"steps of a model": bench_modes(options.tokens, options.steps, named)}
        print(json.dumps(modes, indent=1))
        save(modes, options.json)
        return
    sizes = ["--sequences", "160", "--micro-batch", "32"]
    run = train.parser().parse_args(["--arm", "healthy", "--tokens", str(options.tokens), "--out", "unused", *sizes])
    torch.set_float32_matmul_precision("high")
    trainer = train.Trainer(run, train.load_tokens(run.tokens, run.vocabulary))
    for _ in range(4):
        trainer.train_step()
    result = made_by("cuda") | {
        "capture of one layer": bench_capture(trainer, options.steps),
        "monitor": bench_monitor(trainer, options.steps),
        "synchronisations in a step": bench_synchronisations(trainer),
    }
    print(json.dumps(result, indent=1))
    save(result, options.json)


if __name__ == "__main__":
    main()
