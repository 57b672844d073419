"""Time and memory of an inspection beside a naive float64 attention, as ratios in one run.

    python benchmarks/bench_inspect.py [--device cpu|cuda] [--json FILE]

Naive: softmax(Q K^T) V with autograd in float64, forward and backward, T x T matrices and all. Time: once in a fresh
process, imports and inputs aside, as a command or a breakpoint does it (median over processes); and the median of
alternating runs in one process, where the allocator has kept the pages of the T x T matrices. Memory: peak resident
size of a process of its own, less what it had after its imports (on CUDA: the allocator's peak). With --device cuda
every real capture is also analysed on both devices, and the figures are compared.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import date
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from attn_diag.analyses.inspection.inspect import inspect_captures
from attn_diag.captures.capture import Capture
from attn_diag.captures.loading import load
from attn_diag.reference import AttentionHead, Masking, reference_head
from attn_diag.results.diagnosis import Diagnosis

SHAPES = {"12x1024x64": (1, 12, 1024, 64), "8x4096x128": (1, 8, 4096, 128), "1x16384x128": (1, 1, 16384, 128)}
RUNS = 5
Inputs = tuple[Tensor, Tensor, Tensor, Tensor]


def naive(q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> tuple[Tensor, Tensor]:
    q, k, v = (t.double().requires_grad_() for t in (q, k, v))
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    out = torch.softmax(scores.masked_fill(hidden, -torch.inf), -1) @ v
    return out.detach(), torch.autograd.grad(out, (q, k, v), do.double())[0]


def head_of(tensors: Inputs, index: int, device: str) -> AttentionHead:
    q, k, v, do = (t[0, index].to(device).double() for t in tensors)
    return AttentionHead(q, k, v, do, q.shape[1] ** -0.5, Masking("top-left"))


def make_capture(name: str, device: str) -> tuple[Capture, Inputs]:
    """N(0,1) inputs; o and dq are the true ones rounded once (made by the streamed reference: no T x T matrix)."""
    shape = SHAPES[name]
    generator = torch.Generator().manual_seed(0)
    q, k, v, do = (torch.randn(shape, generator=generator).bfloat16() for _ in range(4))
    o, dq = torch.empty_like(q), torch.empty_like(q)
    for h in range(shape[1]):
        found = reference_head(head_of((q, k, v, do), h, device), key_gradients=False)
        assert found.dq is not None
        o[0, h], dq[0, h] = found.out.cpu(), found.dq.cpu()
    tensors = {"q": q, "k": k, "v": v, "do": do, "o": o, "dq": dq}
    return Capture.from_tensors(tensors, causal="top-left"), (q.to(device), k.to(device), v.to(device), do.to(device))


def timed(work: Callable[[], object], device: str) -> float:
    start = time.perf_counter()
    work()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def works_of(name: str, device: str) -> dict[str, Callable[[], object]]:
    """The analysis, the streamed reference alone, and the naive computation, on the same tensors."""
    capture, tensors = make_capture(name, device)
    heads = [head_of(tensors, h, device) for h in range(capture.q_heads)]

    def stream() -> None:
        for head in heads:
            reference_head(head, key_gradients=False)

    return {
        "analysis": lambda: inspect_captures([capture], device=device),
        "streamed reference": stream,
        "naive": lambda: naive(*tensors),
    }


def compare(name: str, device: str) -> dict[str, float]:
    """Median times of the analysis, of the streamed reference alone, and of the naive computation."""
    works = works_of(name, device)
    times: dict[str, list[float]] = {n: [] for n in works}
    for _ in range(RUNS + 1):
        for label, work in works.items():
            seconds = timed(work, device)
            times[label].append(seconds)
    medians = {label: statistics.median(values[1:]) for label, values in times.items()}
    return {f"{label} [s]": round(m, 4) for label, m in medians.items()} | {
        f"{label} / naive": round(medians[label] / medians["naive"], 3) for label in ("analysis", "streamed reference")
    }


def compare_once(name: str, device: str) -> dict[str, float]:
    """The same, each once in a process of its own: medians over processes."""
    works = ("analysis", "streamed reference", "naive")
    times: dict[str, list[float]] = {work: [] for work in works}
    for _ in range(RUNS):
        for work in works:
            times[work].append(in_fresh_process(name, work, "--once", device))
    medians = {work: statistics.median(values) for work, values in times.items()}
    return {f"{work}, once [s]": round(m, 4) for work, m in medians.items()} | {
        f"{work} / naive, once": round(medians[work] / medians["naive"], 3) for work in works[:2]
    }


def figures(diagnosis: Diagnosis) -> list[float]:
    """The figures of every observation's pooled entry, in a fixed order."""
    found: list[float | None] = []
    for observation in diagnosis.captures[0].observations:
        head = observation.pooled
        found += [head.noise_factor, head.conditioning, head.row_maxima.exact.fraction]
        for estimate in (head.bias.o, head.bias.delta, head.bias.dq):
            found += [estimate.rms, estimate.standard_error] if estimate else []
        for gradient in (head.propagation.dq, head.propagation.dw_q):
            if gradient:
                found += [gradient.relative_error, gradient.predicted_relative_error, gradient.unexplained_fraction]
                found += [gradient.unexplained_with_casts, gradient.coherence, gradient.participation]
    return [f for f in found if f is not None]


def compare_devices(path: Path) -> dict[str, float]:
    """One real capture on the CPU and on CUDA: median times, and how far their figures lie apart."""
    capture = load(path)
    results = {device: inspect_captures([capture], device=device) for device in ("cpu", "cuda")}
    times = {
        device: statistics.median(
            timed(partial(inspect_captures, [capture], device=device), device) for _ in range(RUNS)
        )
        for device in results
    }
    pairs = zip(figures(results["cpu"]), figures(results["cuda"]), strict=True)
    apart = max(abs(a - b) / max(abs(a), abs(b)) for a, b in pairs if a or b)
    return {
        "cpu [s]": round(times["cpu"], 4),
        "cuda [s]": round(times["cuda"], 4),
        "cuda / cpu": round(times["cuda"] / times["cpu"], 3),
        "largest relative difference of a figure": float(f"{apart:.1e}"),
    }


def in_fresh_process(name: str, work: str, what: str, device: str) -> float:
    """Seconds ("--once"), or MB above the imported libraries ("--peak"), of one piece of work."""
    command = [sys.executable, __file__, "--device", device, what, name, work]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def measure_once(name: str, work: str, device: str) -> None:
    """Print the seconds that one piece of work takes in this process, which has imported all it needs."""
    from scipy import special, stats  # noqa: F401 - imported by the analysis

    print(timed(works_of(name, device)[work], device))


def measure_peak(name: str, what: str, device: str) -> None:
    """Print the peak of one piece of work. The inputs, made beforehand by streaming, count as part of it."""
    from scipy import stats  # noqa: F401 - imported by the analysis; a library, not its memory

    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    before = resident("VmRSS")
    capture, tensors = make_capture(name, device)
    if what == "naive":
        naive(*tensors)
    else:
        inspect_captures([capture], device=device)
    if device == "cuda":
        print(torch.cuda.max_memory_allocated() / 1e6)
    else:
        print((resident("VmHWM") - before) * 1024 / 1e6)


def resident(field: str) -> int:
    """VmRSS (now) or VmHWM (peak) of this process in KiB; ru_maxrss would inherit the parent's peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--json", type=Path)
    for what in ("--peak", "--once"):
        parser.add_argument(what, nargs=2, metavar=("SHAPE", "WORK"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peak:
        measure_peak(options.peak[0], options.peak[1], options.device)
        return
    if options.once:
        measure_once(options.once[0], options.once[1], options.device)
        return
    device = torch.cuda.get_device_name() if options.device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    result: dict[str, object] = {
        "date": date.today().isoformat(),
        "device": device,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    for name in SHAPES:
        row: dict[str, float] = {}
        if name != "1x16384x128":
            row |= compare_once(name, options.device) | compare(name, options.device)
            row["naive peak [MB]"] = round(in_fresh_process(name, "naive", "--peak", options.device))
        row["analysis peak [MB]"] = round(in_fresh_process(name, "analysis", "--peak", options.device))
        result[name] = row
        print(name, row, flush=True)
    if options.device == "cuda":
        for path in sorted((Path(__file__).parent.parent / "tests" / "captures").glob("*.safetensors")):
            result[path.stem] = compare_devices(path)
            print(path.stem, result[path.stem], flush=True)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
