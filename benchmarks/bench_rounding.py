"""Every rounding function on every fp32 input: all 2**32 bit patterns, in every mode that does not draw.

Judged are torch (``kernels.formats``), the reference (nearest-even), Triton, the device's own cast (torch's
``x.to(dtype)``, nearest-even), numpy and ml_dtypes' casts, against the table of the format's numbers
(``reference.rounding_table``). The first four run on the device, in chunks of 2**26 patterns; the last two run on the
CPU's cores at the same time.

    python benchmarks/bench_rounding.py --device cuda --json benchmarks/results/rounding_h200.json
    TRITON_INTERPRET=1 python benchmarks/bench_rounding.py --device cpu --stride 4001      # a sample, half a minute

A mismatch is a result whose bits differ from the table's; NaN must become NaN, any NaN. The casts make NaN of what
overflows E4M3, where the rule of ``kernels.formats`` is to saturate, and FP4 and FP6 have no pattern for NaN: those
inputs are left out of their columns, and counted.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.metadata import version
from multiprocessing import get_context

import ml_dtypes
import numpy as np
import torch
from measuring import made_by, options_of, save
from torch import Tensor

from attn_diag.head.machine import pick_device
from attn_diag.kernels.formats import Rounding, parse, round_to
from attn_diag.kernels.rounding_numpy import round_array
from attn_diag.reference.rounding import BF16, E2M1, E2M3, E3M2, E4M3, E5M2, FP16, FloatFormat, round_nearest_even
from attn_diag.reference.rounding_table import RoundingTable, TableMode

PATTERNS = 2**32
# Each in the reference's terms, with the dtype that the device casts to, if there is one, and the cast of ml_dtypes.
FORMATS: dict[str, tuple[FloatFormat, torch.dtype | None, type]] = {
    "bf16": (BF16, torch.bfloat16, ml_dtypes.bfloat16),
    "fp16": (FP16, torch.float16, np.float16),
    "e4m3": (E4M3, torch.float8_e4m3fn, ml_dtypes.float8_e4m3fn),
    "e5m2": (E5M2, torch.float8_e5m2, ml_dtypes.float8_e5m2),
    "e3m2": (E3M2, None, ml_dtypes.float6_e3m2fn),
    "e2m3": (E2M3, None, ml_dtypes.float6_e2m3fn),
    "e2m1": (E2M1, None, ml_dtypes.float4_e2m1fn),
}
# What makes NaN of overflow, or of infinity a number.
CASTS = ("device cast", "ml_dtypes")
MODES: tuple[TableMode, ...] = ("nearest-even", "toward-zero", "up", "down")
# The implementations, by name, of a format and mode, as functions of fp32 tensors.
Roundings = Callable[[str, TableMode], Iterator[tuple[str, Callable[[Tensor], Tensor]]]]


@dataclass
class Count:
    """What one implementation made of the inputs of one format and mode."""

    implementation: str
    format: str
    mode: str
    inputs: int = 0
    mismatches: int = 0
    nan_inputs: int = 0
    nan_mismatches: int = 0
    left_out: int = 0
    first_mismatches: list[str] = field(default_factory=list)

    def add(self, other: Count) -> None:
        for name in ("inputs", "mismatches", "nan_inputs", "nan_mismatches", "left_out"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.first_mismatches = (self.first_mismatches + other.first_mismatches)[:4]


def rounding_of(name: str, mode: str) -> Rounding:
    rounding = parse(f"{name}:{mode}")
    assert rounding is not None
    return rounding


def table_of(name: str, device: torch.device | str) -> RoundingTable:
    fmt = rounding_of(name, "nearest-even").format
    return RoundingTable.of(fmt.exponent_bits, fmt.mantissa_bits, top=fmt.top, device=device)


def judge(count: Count, got: Tensor, expected: Tensor, x: Tensor, left_out: Tensor | None = None) -> None:
    """Add to ``count`` what ``got`` says of the fp32 inputs ``x``."""
    wrong = (got.view(torch.int32) != expected.view(torch.int32)) & ~(got.isnan() & expected.isnan())
    if left_out is not None:
        wrong &= ~left_out
        count.left_out += int(left_out.sum())
    count.inputs += x.numel()
    count.nan_inputs += int(x.isnan().sum())
    if found := int(wrong.sum()):
        count.mismatches += found
        count.nan_mismatches += int((wrong & x.isnan()).sum())
        shown = x[wrong][: 4 - len(count.first_mismatches)].view(torch.int32).tolist()
        count.first_mismatches += [f"0x{word & 0xFFFFFFFF:08x}" for word in shown]


def device_roundings(triton: bool, name: str, mode: TableMode) -> Iterator[tuple[str, Callable[[Tensor], Tensor]]]:
    """Those that run on the device."""
    rounding, (fmt, dtype, _) = rounding_of(name, mode), FORMATS[name]
    yield "torch", lambda x: round_to(x, rounding)
    if triton:
        from attn_diag.kernels.triton_rounding import round_tensor

        yield "triton", lambda x: round_tensor(x, rounding)
    if mode == "nearest-even":
        yield "reference", lambda x: round_nearest_even(x.double(), fmt).float()
        if dtype is not None:
            yield "device cast", lambda x: x.to(dtype).float()


def numpy_rounding(name: str, mode: TableMode) -> Iterator[tuple[str, Callable[[Tensor], Tensor]]]:
    """Those of the CPU's cores."""
    yield "numpy", lambda x: torch.from_numpy(round_array(x.numpy(), rounding_of(name, mode)))
    if mode == "nearest-even":
        cast = FORMATS[name][2]

        def with_cast(x: Tensor) -> Tensor:
            with np.errstate(all="ignore"):
                return torch.from_numpy(x.numpy().astype(cast).astype(np.float32))

        yield "ml_dtypes", with_cast


def run_chunk(words: Tensor, tables: dict[str, RoundingTable], counts: dict[str, Count], roundings: Roundings) -> None:
    """All formats, modes and implementations on the fp32 numbers with the bit patterns ``words`` (int64)."""
    x = torch.where(words < 2**31, words, words - PATTERNS).to(torch.int32).view(torch.float32)
    for name, table in tables.items():
        bracket = table.bracket(x.double())
        beyond = (x.abs() > table.numbers[-2:].mean()) if table.finite else None
        if beyond is not None and rounding_of(name, "nearest-even").format.top == "numbers":
            beyond |= x.isnan()
        for mode in MODES:
            expected = bracket.round(mode).float()
            for implementation, rounds in roundings(name, mode):
                key = f"{implementation} {name} {mode}"
                count = counts.setdefault(key, Count(implementation, name, mode))
                judge(count, rounds(x), expected, x, beyond if implementation in CASTS else None)


def numpy_part(start: int, stop: int, stride: int) -> dict[str, Count]:
    """Every ``stride``-th pattern of start ... stop - 1 by numpy."""
    counts: dict[str, Count] = {}
    tables = {name: table_of(name, "cpu") for name in FORMATS}
    run_chunk(torch.arange(start, stop, stride), tables, counts, numpy_rounding)
    return counts


def submit_numpy(pool: ProcessPoolExecutor, stride: int) -> list[Future[dict[str, Count]]]:
    """The whole range in parts of at most 2**20 inputs."""
    step = stride << 20
    parts = [(start, min(start + step, PATTERNS), stride) for start in range(0, PATTERNS, step)]
    return [pool.submit(numpy_part, *part) for part in parts]


def main() -> None:
    parser = options_of(__doc__, device="auto")
    parser.add_argument("--stride", type=int, default=1, help="take every n-th bit pattern (odd, for a sample)")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes for numpy")
    arguments = parser.parse_args()
    device, stride = pick_device(arguments.device), arguments.stride
    from attn_diag.kernels.backend import interpreted

    on_device = partial(device_roundings, interpreted() == (device.type == "cpu"))
    begun = time.perf_counter()
    counts: dict[str, Count] = {}
    # CUDA does not survive a fork.
    with ProcessPoolExecutor(arguments.workers, get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        parts = submit_numpy(pool, stride)
        tables = {name: table_of(name, device) for name in FORMATS}
        chunk = (1 << 26) * stride if device.type == "cuda" else (1 << 20) * stride
        for start in range(0, PATTERNS, chunk):
            words = torch.arange(start, min(start + chunk, PATTERNS), stride, device=device)
            run_chunk(words, tables, counts, on_device)
            report(f"device {min(start + chunk, PATTERNS) / PATTERNS:4.0%}", begun)
        for n, part in enumerate(parts, 1):
            for key, found in part.result().items():
                counts.setdefault(key, Count(found.implementation, found.format, found.mode)).add(found)
            if n % max(1, len(parts) // 20) == 0:
                report(f"numpy {n / len(parts):4.0%}", begun)
    rows = sorted(counts.values(), key=lambda c: (c.implementation, c.format, MODES.index(c.mode)))
    for c in rows:
        print(f"{c.implementation:12} {c.format} {c.mode:12} {c.inputs:>10} inputs  {c.mismatches} mismatches", end="")
        print(f"  ({c.left_out} left out)" if c.left_out else "")
    result = made_by(device) | {
        "numpy": version("numpy"),
        "stride": stride,
        "seconds": round(time.perf_counter() - begun, 1),
        "rows": [asdict(row) for row in rows],
    }
    save(result, arguments.json)
    if wrong := sum(row.mismatches for row in rows):
        sys.exit(f"{wrong} mismatches")


def report(text: str, begun: float) -> None:
    print(f"{text}  {time.perf_counter() - begun:.0f} s", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
