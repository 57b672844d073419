"""Where an inspection's time goes: which functions wait or compute, and what the GPU does meanwhile.

    python benchmarks/profile_inspect.py --shape NAME [--device cpu|cuda] [--threads N] [--folder FOLDER] [--json FILE]
    python benchmarks/profile_inspect.py --shape NAME --host [--keys] [--device cpu|cuda] [--json FILE]

``NAME`` is one of ``bench_inspect.FLOORS`` or ``OPERATIONS``. O is that of the published recipe, dQ the true one
rounded, and with ``--keys`` dK and dV. After a first inspection others are timed, one is profiled by Python function
(printed, and kept in FOLDER), and, on CUDA, one by kernel: kernels launched, milliseconds that they run, and the
largest. With ``CUDA_LAUNCH_BLOCKING=1`` in the environment a kernel's time is that of the function that launches it:
for long heads, where launches cost nothing.

``--host``: one table instead, by the innermost function of this package: milliseconds (sampled, so that looking costs
next to nothing), torch's operations without views, how often the host waits for the GPU or copies from it, and the
milliseconds of the function with all that it calls.
"""

from __future__ import annotations

import cProfile
import importlib.util
import io
import os
import pstats
import re
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from bench_inspect import FLOORS, OPERATIONS, head_of
from measuring import captured, made_by, normal, options_of, save, timed
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

import attn_diag
from attn_diag.analyses.inspection.inspect import inspect_captures
from attn_diag.captures.capture import Capture
from attn_diag.kernels import emulate_head, preset
from attn_diag.kernels.attention import attention
from attn_diag.reference.fused import reference_of

LINES = 70
# Runs that are sampled, and seconds between samples.
SAMPLED, EVERY = 8, 2e-3
# Folders of the package, which an editable installation takes from several places.
OURS = tuple(str(Path(module.__file__ or "").parent) for module in (attn_diag, attn_diag.kernels, attn_diag.reference))


def captures_of(name: str, device: str, *, keys: bool = False) -> list[Capture]:
    """The captures of a shape, each of inputs of its own; ``keys``: with dK and dV."""
    count, (batch, heads, length, width) = (FLOORS | OPERATIONS)[name]
    found = []
    for seed in range(count):
        inputs = normal(batch, heads, length, width, seed=seed)
        outputs = {n: torch.empty_like(inputs[0]) for n in ("o", "dq", *(("dk", "dv") if keys else ()))}
        if device == "cuda":
            outputs["o"] = attention(*(t.cuda() for t in inputs[:3]), causal="top-left").cpu()
        for b in range(batch):
            for h in range(heads):
                head = head_of([t[b : b + 1] for t in inputs], h, device)
                if device == "cpu":
                    outputs["o"][b, h] = emulate_head(preset("fa2", "bf16", width), head).o
                true = reference_of(head, key_gradients=keys)
                for n in [n for n in outputs if n != "o"]:
                    outputs[n][b, h] = getattr(true, n).bfloat16().cpu()
        found.append(captured(inputs, **outputs))
    return found


def by_function(run: Callable[[], object], name: str, folder: Path | None) -> None:
    """One call, by Python function: the callers first, then what takes the time itself."""
    profiler = cProfile.Profile()
    profiler.runcall(timed, run)
    if folder is not None:
        profiler.dump_stats(folder / f"{re.sub(r'[^0-9a-z]+', '_', name)}.pstats")
    for order in ("cumulative", "tottime"):
        text = io.StringIO()
        pstats.Stats(profiler, stream=text).strip_dirs().sort_stats(order).print_stats(LINES)
        print(text.getvalue())


def by_kernel(run: Callable[[], object]) -> None:
    """One call, by what runs on the GPU."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        timed(run)
    every = found.key_averages()
    on_device = sorted((e for e in every if e.self_device_time_total), key=lambda e: -e.self_device_time_total)
    on_device = [e for e in on_device if e.device_type.name == "CUDA"]
    print("on the GPU:", sum(e.count for e in on_device), "launches,")
    print(f"{sum(e.self_device_time_total for e in on_device) / 1e3:.1f} ms")
    for event in on_device[:25]:
        print(f"{event.self_device_time_total / 1e3:10.2f} ms {event.count:7d} {event.key[:110]}")
    print("on the host:")
    for event in sorted(every, key=lambda e: -e.self_cpu_time_total)[:30]:
        print(f"{event.self_cpu_time_total / 1e3:10.2f} ms {event.count:7d} {event.key[:110]}")


def ours(frame: FrameType | None) -> Iterator[str]:
    """The functions of this package on the stack, the innermost first."""
    while frame is not None:
        if frame.f_code.co_filename.startswith(OURS):
            yield place_of(frame.f_code)
        frame = frame.f_back


@cache
def place_of(code: CodeType) -> str:
    """Where a function is, and its name."""
    folder = max((f for f in OURS if code.co_filename.startswith(f)), key=len)
    return f"{Path(folder).name}{code.co_filename[len(folder) :]}:{code.co_firstlineno} {code.co_name}"


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts torch's operations by the function that calls them; views launch nothing and are left out."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            self.calls[next(ours(sys._getframe(1)), "elsewhere")] += 1
        return func(*args, **(kwargs or {}))


class Compilations:
    """What Triton compiles, or finds compiled on disk, from now on: kernel, and its seconds."""

    def __init__(self) -> None:
        self.found: list[tuple[str, float]] = []
        self.on_disk = 0
        if importlib.util.find_spec("triton") is not None:
            from triton import knobs

            knobs.compilation.listener = self._add

    def _add(self, *, src: Any, times: Any, cache_hit: bool, **_: Any) -> None:
        if cache_hit:
            self.on_disk += 1
        else:
            self.found.append((src.fn.__name__, (times.ir_initialization + times.total_lowering) / 1e6))

    def told(self) -> dict[str, Any]:
        """How many there were and how long they took, by kernel."""
        kernels = sorted({name for name, _ in self.found})
        seconds = {n: [round(s, 2) for name, s in self.found if name == n] for n in kernels}
        total = round(sum(s for _, s in self.found), 1)
        return {"compiled": len(self.found), "on disk": self.on_disk, "compiling [s]": total, "each [s]": seconds}


def waits_of(run: Callable[[], object]) -> Counter[str]:
    """How often each function makes the host wait for the GPU."""
    found = Counter[str]()

    def count(*_: object) -> None:
        found[next(ours(sys._getframe(1)), "elsewhere")] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = count  # type: ignore[assignment]
        torch.cuda.set_sync_debug_mode("warn")
        run()
        torch.cuda.set_sync_debug_mode("default")
    return found


def by_host(run: Callable[[], object], device: str) -> dict[str, Any]:
    """The table of ``--host``."""
    own, whole, samples, looking = Counter[str](), Counter[str](), 0, False

    def sample(_: int, frame: FrameType | None) -> None:
        nonlocal samples, looking
        if looking:  # a signal may come while the last one is dealt with
            return
        looking = True
        samples += 1
        stack = list(ours(frame))
        own[stack[0] if stack else "elsewhere"] += 1
        whole.update(set(stack))
        looking = False

    signal.signal(signal.SIGALRM, sample)
    signal.setitimer(signal.ITIMER_REAL, EVERY, EVERY)
    seconds = timed(lambda: [run() for _ in range(SAMPLED)])
    signal.setitimer(signal.ITIMER_REAL, 0)
    each = seconds * 1e3 / SAMPLED / max(samples, 1)
    with Operations() as counted:
        run()
    calls, waits = counted.calls, waits_of(run) if device == "cuda" else Counter[str]()
    print(f"{seconds / SAMPLED:.3f} s a run, {calls.total()} operations, {waits.total()} waits")
    rows = {
        place: {
            "own [ms]": round(own[place] * each, 1),
            "whole [ms]": round(whole[place] * each, 1),
            "operations": calls[place],
            "waits": waits[place],
        }
        for place in sorted(whole | calls | waits, key=lambda place: -own[place])
    }
    for title, key in (("own time", "own [ms]"), ("with all that it calls", "whole [ms]")):
        print(f"{title}:\n      own    whole  operations  waits")
        for place in sorted(rows, key=lambda place: -rows[place][key])[:LINES]:
            row = rows[place]
            print(f"{row['own [ms]']:9.1f} {row['whole [ms]']:8.1f} {row['operations']:11d} {row['waits']:6d}  {place}")
    return {"a run [s]": round(seconds / SAMPLED, 4), "operations": calls.total(), "waits": waits.total(), "by": rows}


def main() -> None:
    parser = options_of(__doc__, device="cuda")
    parser.add_argument("--host", action="store_true", help="one table of host time, operations and waits instead")
    parser.add_argument("--shape", required=True, choices=[*FLOORS, *OPERATIONS])
    parser.add_argument("--keys", action="store_true", help="captures have dK and dV too")
    parser.add_argument("--threads", type=int, help="of torch, on a CPU")
    parser.add_argument("--folder", type=Path, help="keep the profile by function there")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    start = time.perf_counter()
    captures = captures_of(options.shape, options.device, keys=options.keys)
    print(options.shape, f"made in {time.perf_counter() - start:.1f} s", flush=True)
    run = partial(inspect_captures, captures, device=options.device)
    compiled = Compilations()
    result: dict[str, Any] = made_by(options.device) | {options.shape: {"first [s]": round(timed(run), 3)}}
    result[options.shape] |= compiled.told()
    result[options.shape]["warm [s]"] = [round(timed(run), 3) for _ in range(3)]
    print(result[options.shape], flush=True)
    if options.host:
        result[options.shape] |= by_host(run, options.device)
        save(result, options.json)
        return
    save(result, options.json)
    by_function(run, options.shape, options.folder)
    if options.device == "cuda" and os.environ.get("CUDA_LAUNCH_BLOCKING") != "1":
        by_kernel(run)


if __name__ == "__main__":
    main()
