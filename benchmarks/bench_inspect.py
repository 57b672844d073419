"""Time and memory of an inspection beside a naive float64 attention, as ratios in one run.

    python benchmarks/bench_inspect.py [--device cpu|cuda] [--json FILE]
    python benchmarks/bench_inspect.py --folders [NAME …] [--json FILE]
    python benchmarks/bench_inspect.py --floors [NAME …] [--json FILE]
    python benchmarks/bench_inspect.py --operations [NAME …] [--before PYTHON] [--json FILE]

Naive: softmax(Q K^T) V with autograd in float64, forward and backward, T x T matrices and all. Time: once in a fresh
process, imports and inputs aside, as a command or a breakpoint does it (median over processes); and the median of
alternating runs in one process, where the allocator has kept the pages of the T x T matrices. Memory: peak resident
size of a process of its own, less what it had after its imports (on CUDA: the allocator's peak). With --device cuda
every real capture is also analysed on both devices, and the figures are compared.

``--folders``: the command ``attn-diag inspect FOLDER --json … --html …`` on whole folders of captures instead: its
seconds, those of all cores, and the peak resident size of its largest process, with all imports. Every capture has O,
dO and dQ, correctly rounded, of inputs of its own.

``--floors``, on CUDA: how many times as long as the float64 products that they need take, at the rate of a product of
matrices measured in the same run, the fused reference takes (forward alone: two products, with the gradients seven,
with all that ``inspect`` asks for where dK and dV were captured sixteen: five of predictions, four of variances), the
streamed reference (the same seven), and ``inspect_captures`` of captures with O and dQ, warm, over those seven. O is
that of ``attn_diag.attention``, and so recognised.

``--operations``, on one thread of a CPU: how many of torch's operations an inspection calls, how many of them hand one
number to Python (on a GPU the host waits there), and the seconds of one core that it takes, by head. ``--before`` names
the Python of another installation, which is measured in turn with this one.
"""

from __future__ import annotations

import json
import math
import resource
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
from measuring import CAPTURES, captured, in_fresh_process, made_by, normal, options_of, save, timed
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from attn_diag.analyses.inspection.inspect import inspect_captures
from attn_diag.captures.capture import Capture
from attn_diag.captures.loading import load
from attn_diag.kernels.attention import attention
from attn_diag.reference import AttentionHead, Masking, fused_inputs, reference_head
from attn_diag.reference.fused import FusedHeads, reference_of
from attn_diag.reference.fused_products import TileWeight
from attn_diag.results.diagnosis import Diagnosis

SHAPES = {"12x1024x64": (1, 12, 1024, 64), "8x4096x128": (1, 8, 4096, 128), "1x16384x128": (1, 1, 16384, 128)}
# Layers, steps, and the shape of each layer's capture.
FOLDERS = {
    **{f"144 heads x {steps} steps": (12, steps, (1, 12, 128, 64)) for steps in (1, 5, 10, 20, 50)},
    "720 heads of T = 256": (12, 5, (1, 12, 256, 64)),
    "5000 small captures": (1, 5000, (1, 1, 32, 16)),
}
# Captures, and the shape of each.
FLOORS = {
    "12 x (1,12,1024,64)": (12, (1, 12, 1024, 64)),
    "(4,16,4096,64)": (1, (4, 16, 4096, 64)),
    "(4,16,4096,128)": (1, (4, 16, 4096, 128)),
    "(1,8,4096,128)": (1, (1, 8, 4096, 128)),
    "(1,1,32768,64)": (1, (1, 1, 32768, 64)),
    "(1,1,32768,128)": (1, (1, 1, 32768, 128)),
    "(1,1,131072,128)": (1, (1, 1, 131072, 128)),
}
# Captures, and the shape of each.
OPERATIONS = {"2 x (1,12,256,64)": (2, (1, 12, 256, 64)), "(1,12,1024,64)": (1, (1, 12, 1024, 64))}
RUNS = 5
WORKS = ("analysis", "streamed reference", "naive")


def naive(q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> tuple[Tensor, Tensor]:
    q, k, v = (t.double().requires_grad_() for t in (q, k, v))
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    out = torch.softmax(scores.masked_fill(hidden, -torch.inf), -1) @ v
    return out.detach(), torch.autograd.grad(out, (q, k, v), do.double())[0]


def head_of(tensors: list[Tensor], index: int, device: str) -> AttentionHead:
    q, k, v, do = (t[0, index].to(device).double() for t in tensors)
    return AttentionHead(q, k, v, do, q.shape[1] ** -0.5, Masking("top-left"))


def make_capture(name: str, device: str) -> tuple[Capture, list[Tensor]]:
    """N(0,1) inputs; o and dq are the true ones rounded once (made by the streamed reference: no T x T matrix)."""
    inputs = normal(*SHAPES[name])
    o, dq = torch.empty_like(inputs[0]), torch.empty_like(inputs[0])
    for h in range(o.shape[1]):
        found = reference_head(head_of(inputs, h, device), key_gradients=False)
        assert found.dq is not None
        o[0, h], dq[0, h] = found.out.cpu(), found.dq.cpu()
    return captured(inputs, o=o, dq=dq), [t.to(device) for t in inputs]


def works_of(name: str, device: str) -> dict[str, Callable[[], object]]:
    """The analysis, the streamed reference alone, and the naive computation, on the same tensors."""
    capture, tensors = make_capture(name, device)

    def stream() -> None:
        for h in range(capture.q_heads):
            reference_head(head_of(tensors, h, device), key_gradients=False)

    return {
        "analysis": lambda: inspect_captures([capture], device=device),
        "streamed reference": stream,
        "naive": lambda: naive(*tensors),
    }


def compare(name: str, device: str) -> dict[str, float]:
    """Median times of the three, each once in a process of its own, and in turn in this one, and their ratios."""
    works = works_of(name, device)
    once: dict[str, list[float]] = {work: [] for work in WORKS}
    warm: dict[str, list[float]] = {work: [] for work in WORKS}
    for _ in range(RUNS):
        for work in WORKS:
            once[work].append(in_fresh_process(__file__, "--device", device, "--once", name, work))
    for _ in range(RUNS + 1):
        for work in WORKS:
            warm[work].append(timed(works[work]))
    row = dict[str, float]()
    for suffix, times in ((", once", once), ("", {work: values[1:] for work, values in warm.items()})):
        medians = {work: statistics.median(values) for work, values in times.items()}
        row |= {f"{work}{suffix} [s]": round(m, 4) for work, m in medians.items()}
        row |= {f"{work} / naive{suffix}": round(medians[work] / medians["naive"], 3) for work in WORKS[:2]}
    return row


def product_rate(n: int = 4096) -> float:
    """Float64 operations a second of a product of two n x n matrices."""
    a = torch.randn(n, n, dtype=torch.float64, device="cuda")
    return 2 * n**3 / min(timed(lambda: a @ a) for _ in range(RUNS))


def row_products(fused: FusedHeads) -> list[torch.Tensor | None]:
    """What ``inspect`` takes of query rows: dQ, what delta's error and a cast of dS make of it, and variances."""
    some = torch.ones_like(fused.inverse)
    made = fused.variances(fused.finite_max, fused.delta, some, some, some)
    asked = [fused.ask(TileWeight("dscores"), sums=some.new_empty(2, *some.shape))]
    asked += [fused.ask(TileWeight("dscores_cast", "bf16"), None, some, some)]
    if made is None:
        asked += [fused.ask(TileWeight("probs_squared"), fused.v.square(), some, some)]
        asked += [fused.ask(TileWeight("dscores_squared"), fused.k.square(), some, some, some)]
    through = fused.through(fused.finite_max)
    if through is None:
        asked += [fused.ask(TileWeight("sloped"))]
    return [*(fused.take(one) for one in asked), *(made or []), through]


def key_products(fused: FusedHeads) -> list[torch.Tensor]:
    """What it takes of keys where dK and dV were captured: them, what errors make of them, and variances."""
    some, do = torch.ones_like(fused.inverse), fused.do
    assert do is not None
    assert fused.delta is not None
    asked = [fused.ask_keys(TileWeight("dscores"), fused.q, times=some)]
    asked += [fused.ask_keys(TileWeight("probs"), do, times=some)]
    asked += [fused.ask_keys(TileWeight("dscores_cast", "bf16"), fused.q, some, some)]
    asked += [fused.ask_keys(TileWeight("probs_cast", "bf16"), do, some)]
    asked += [fused.ask_keys(TileWeight("sloped"), fused.q, times=some)]
    found = [fused.take_keys(one) for one in asked]
    if fused.narrow is not None:
        return [*found, *fused.key_variances(fused.finite_max, fused.delta, some, some, some, some)]
    asked = [fused.ask_keys(TileWeight("dscores_squared"), fused.q.square(), some, some, some)]
    asked += [fused.ask_keys(TileWeight("probs_squared"), do.square(), some, some)]
    return [*found, *(fused.take_keys(one) for one in asked)]


def forward_of(fused: FusedHeads) -> object:
    """The forward once more."""
    return fused.make_forward(details=True)


def in_triton(work: Callable[[], object]) -> object:
    """Float64 products in Triton alone, as of inputs that BF16 does not hold."""
    with patch.object(fused_inputs, "WORTH_NARROW", math.inf):
        return work()


def floors(name: str) -> dict[str, float]:
    """Median times of one of ``FLOORS``, over those of its float64 products."""
    count, (batch, heads, length, width) = FLOORS[name]
    tensors = [normal(batch, heads, length, width, seed=seed) for seed in range(count)]
    places = [(one, b, h) for one in tensors for b in range(batch) for h in range(heads)]
    opened = [head_of([t[b : b + 1] for t in one], h, "cuda") for one, b, h in places]
    captures = []
    for i, one in enumerate(tensors):
        found = [reference_of(h, key_gradients=False) for h in opened[i * batch * heads : (i + 1) * batch * heads]]
        # As a kernel returns them, so that its recipe is recognised.
        o = attention(*(t.cuda() for t in one[:3]), causal="top-left").cpu()
        dq = torch.stack([some.dq for some in found if some.dq is not None]).view(one[0].shape).bfloat16().cpu()
        captures.append(captured(one, o=o, dq=dq))
    fused = FusedHeads(opened)
    works: dict[str, tuple[int, Callable[[], object]]] = {
        "forward": (2, lambda: FusedHeads(opened, details=False).forward),
        "forward, with what bounds need": (2, lambda: FusedHeads(opened).forward),
        "gradients": (7, lambda: FusedHeads(opened).references()),
        "products of query rows": (7, lambda: row_products(fused)),
        "forward and all products": (16, lambda: (forward_of(fused), row_products(fused), key_products(fused))),
        "gradients in Triton": (7, lambda: in_triton(lambda: FusedHeads(opened).references())),
        "streamed gradients": (7, lambda: [reference_head(head) for head in opened]),
        "inspect": (7, partial(inspect_captures, captures, device="cuda")),
    }
    product = count * batch * heads * length**2 * width / product_rate()  # half of it is masked
    row: dict[str, float] = {}
    for work, (products, run) in works.items():
        first, again = timed(run), timed(run)
        # What takes long, once its kernels are compiled, is measured once, not several times.
        seconds = again if again > 3 else statistics.median(timed(run) for _ in range(RUNS))
        row |= {f"{work} [ms]": round(seconds * 1e3, 2), f"{work} / floor": round(seconds / products / product, 2)}
        print(name, work, f"first {first:.2f} s", row[f"{work} [ms]"], "ms", row[f"{work} / floor"], flush=True)
    return row


def measure_floors(names: list[str], file: Path | None) -> None:
    """One entry a shape, saved as they come."""
    result: dict[str, Any] = made_by("cuda")
    result["float64 product [TFLOP/s]"] = round(product_rate() / 1e12, 1)
    for name in names or FLOORS:
        result[name] = floors(name)
        save(result, file)


class _Counted(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts torch's operations on this thread by name."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[str(func)] += 1
        return func(*args, **(kwargs or {}))


def operations_of(name: str) -> dict[str, float]:
    """What inspecting one of ``OPERATIONS`` takes in this process, by head."""
    torch.set_num_threads(1)
    count, shape = OPERATIONS[name]
    captures = []
    for seed in range(count):
        inputs = normal(*shape, seed=seed)
        o, dq = (found.bfloat16() for found in naive(*inputs))
        captures.append(captured(inputs, o=o, dq=dq))
    work, heads = partial(inspect_captures, captures, device="cpu"), count * shape[0] * shape[1]
    timed(work)
    seconds = statistics.median(timed(work, time.process_time) for _ in range(RUNS))
    with _Counted() as counted:
        work()
    calls = counted.calls
    return {
        "operations": round(calls.total() / heads, 1),
        "numbers read": round(calls["aten._local_scalar_dense.default"] / heads, 1),
        "core [ms]": round(seconds / heads * 1e3, 2),
    }


def measure_operations(names: list[str], before: str | None, file: Path | None) -> None:
    """One entry a shape: of this installation, of the other, and the ratios."""
    result: dict[str, Any] = made_by()
    pythons = {"now": sys.executable} | ({"before": before} if before else {})
    for name in names or OPERATIONS:
        found: dict[str, dict[str, float]] = {}
        for which, python in pythons.items():
            command = [python, __file__, "--operations-of", name]
            found[which] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
        if before:
            found["now / before"] = {k: round(v / found["before"][k], 3) for k, v in found["now"].items()}
        result[name] = found
        print(name, found, flush=True)
        save(result, file)


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
        device: statistics.median(timed(partial(inspect_captures, [capture], device=device)) for _ in range(RUNS))
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


def time_once(name: str, work: str, device: str) -> float:
    """The seconds that one piece of work takes in this process, which has imported all it needs."""
    from scipy import special  # noqa: F401 - imported by the analysis

    return timed(works_of(name, device)[work])


def peak_mb(name: str, work: str, device: str) -> float:
    """The peak of one piece of work, MB. The inputs, made beforehand by streaming, count as part of it."""
    from scipy import special  # noqa: F401 - imported by the analysis; a library, not its memory

    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    before = resident("VmRSS")
    works_of(name, device)[work]()
    if device == "cuda":
        return torch.cuda.max_memory_allocated() / 1e6
    return (resident("VmHWM") - before) * 1024 / 1e6


def write_captures(folder: Path, layers: int, steps: int, shape: tuple[int, int, int, int]) -> int:
    """Fill a folder; returns how many bytes the files have."""
    for number in range(layers * steps):
        step, layer = divmod(number, layers)
        inputs = normal(*shape, seed=number)
        o, dq = (found.bfloat16() for found in naive(*inputs))
        tensors = dict(zip(("q", "k", "v", "do"), inputs, strict=True)) | {"o": o, "dq": dq}
        capture = Capture.from_tensors(tensors, causal="top-left", layer=layer, step=step)
        capture.save(folder / f"step{step:06d}_layer{layer:02d}.safetensors")
    return sum(file.stat().st_size for file in folder.iterdir())


def inspect_folder(folder: Path) -> dict[str, float]:
    """What the command takes of a folder, and what it writes beside it."""
    written = [folder.with_name("out.json"), folder.with_name("out.html")]
    line = [sys.executable, "-m", "attn_diag", "inspect", str(folder), "--device", "cpu"]
    line += ["--json", str(written[0]), "--html", str(written[1])]

    def run() -> None:
        if (code := subprocess.run(line, stdout=subprocess.DEVNULL, check=False).returncode) != 0:
            raise SystemExit(f"the command ended with {code}")

    seconds, spent = timed(run), resource.getrusage(resource.RUSAGE_CHILDREN)
    sizes = {f"{file.suffix[1:]} [MB]": round(file.stat().st_size / 1e6, 2) for file in written}
    return {
        "inspect [s]": round(seconds, 1),
        "of all cores [s]": round(spent.ru_utime + spent.ru_stime, 1),
        "peak of a process [MB]": round(spent.ru_maxrss * 1024 / 1e6),
        **sizes,
    }


def measure_folders(names: list[str], file: Path | None) -> None:
    """One entry a folder, saved as they come."""
    result: dict[str, Any] = made_by()
    for name in names or FOLDERS:
        layers, steps, shape = FOLDERS[name]
        with TemporaryDirectory() as place:
            (folder := Path(place) / "captures").mkdir()
            size = write_captures(folder, layers, steps, shape)
            found = in_fresh_process(__file__, "--folder", folder)
        result[name] = {"captures": layers * steps, "files [MB]": round(size / 1e6, 1), **found}
        print(name, result[name], flush=True)
        save(result, file)


def resident(field: str) -> int:
    """VmRSS (now) or VmHWM (peak) of this process in KiB; ru_maxrss would inherit the parent's peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1])


def main() -> None:
    parser = options_of(__doc__, device="cpu")
    for what in ("--peak", "--once"):
        parser.add_argument(what, nargs=2, metavar=("SHAPE", "WORK"), help="print this of one piece of work, and stop")
    parser.add_argument("--folders", nargs="*", choices=FOLDERS, metavar="NAME", help="measure whole folders instead")
    parser.add_argument("--floors", nargs="*", choices=FLOORS, metavar="NAME", help="measure against float64's floor")
    parser.add_argument("--operations", nargs="*", choices=OPERATIONS, metavar="NAME", help="count operations instead")
    parser.add_argument("--before", metavar="PYTHON", help="the Python of an installation to compare --operations with")
    parser.add_argument("--operations-of", choices=OPERATIONS, metavar="NAME", help="print these of one, and stop")
    parser.add_argument("--folder", type=Path, help="print what inspecting this folder takes, and stop")
    options = parser.parse_args()
    if options.folder:
        print(json.dumps(inspect_folder(options.folder)))
        return
    if options.operations_of:
        print(json.dumps(operations_of(options.operations_of)))
        return
    if options.operations is not None:
        measure_operations(options.operations, options.before, options.json)
        return
    if options.folders is not None:
        measure_folders(options.folders, options.json)
        return
    if options.floors is not None:
        measure_floors(options.floors, options.json)
        return
    if options.peak or options.once:
        name, work = options.peak or options.once
        print((peak_mb if options.peak else time_once)(name, work, options.device))
        return
    result = made_by(options.device)

    def peak(name: str, work: str) -> int:
        return round(float(in_fresh_process(__file__, "--device", options.device, "--peak", name, work)))

    for name in SHAPES:
        row: dict[str, float] = {}
        if name != "1x16384x128":
            row |= compare(name, options.device) | {"naive peak [MB]": peak(name, "naive")}
        result[name] = row | {"analysis peak [MB]": peak(name, "analysis")}
        print(name, result[name], flush=True)
    if options.device == "cuda":
        for path in sorted(CAPTURES.glob("*.safetensors")):
            result[path.stem] = compare_devices(path)
            print(path.stem, result[path.stem], flush=True)
    save(result, options.json)


if __name__ == "__main__":
    main()
