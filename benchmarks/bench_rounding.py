"""Every rounding function on every fp32 input: all 2**32 bit patterns, in every mode that does not draw.

Judged are torch (``kernels.formats``), the reference (nearest-even), Triton, the device's own cast (torch's
``x.to(dtype)``, nearest-even) and numpy, against the table of the format's numbers (``reference.rounding_table``). The
first four run on the device, in chunks of 2**26 patterns, and are compared with the table value by value. numpy runs on
the CPU's cores at the same time; ascending inputs have ascending results, so that there the table only says at which
pattern each result begins.

    python benchmarks/bench_rounding.py --device cuda --json benchmarks/results/rounding_h200.json
    TRITON_INTERPRET=1 python benchmarks/bench_rounding.py --device cpu --stride 4001      # a sample, half a minute

A mismatch is a result whose bits differ from the table's; NaN must become NaN, any NaN. The device's cast makes NaN of
what overflows E4M3, where the rule of ``kernels.formats`` is to saturate: those inputs are left out of its column, and
counted.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import version
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from attn_diag.head.machine import describe_tool, pick_device
from attn_diag.kernels.formats import Rounding, parse, round_to
from attn_diag.kernels.rounding_numpy import round_array
from attn_diag.reference.rounding import BF16, E4M3, E5M2, FP16, FloatFormat, round_nearest_even
from attn_diag.reference.rounding_table import RoundingTable, TableMode

PATTERNS = 2**32
FORMATS: dict[str, tuple[FloatFormat, torch.dtype]] = {
    "bf16": (BF16, torch.bfloat16),
    "fp16": (FP16, torch.float16),
    "e4m3": (E4M3, torch.float8_e4m3fn),
    "e5m2": (E5M2, torch.float8_e5m2),
}
MODES: tuple[TableMode, ...] = ("nearest-even", "toward-zero", "up", "down")
Words = npt.NDArray[np.uint32]


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
    return RoundingTable.of(fmt.exponent_bits, fmt.mantissa_bits, finite=fmt.finite, device=device)


# On the device


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


def device_roundings(name: str, mode: TableMode, triton: bool) -> Iterator[tuple[str, Callable[[Tensor], Tensor]]]:
    """The implementations that run on the device, as functions of an fp32 tensor."""
    rounding, (fmt, dtype) = rounding_of(name, mode), FORMATS[name]
    yield "torch", lambda x: round_to(x, rounding)
    if triton:
        from attn_diag.kernels.triton_rounding import round_tensor

        yield "triton", lambda x: round_tensor(x, rounding)
    if mode == "nearest-even":
        yield "reference", lambda x: round_nearest_even(x.double(), fmt).float()
        yield "device cast", lambda x: x.to(dtype).float()


def run_chunk(words: Tensor, tables: dict[str, RoundingTable], counts: dict[str, Count], triton: bool) -> None:
    """All formats, modes and implementations on the fp32 numbers with the bit patterns ``words`` (int64)."""
    x = torch.where(words < 2**31, words, words - PATTERNS).to(torch.int32).view(torch.float32)
    for name, table in tables.items():
        bracket = table.bracket(x.double())
        beyond = (x.abs() > table.numbers[-2:].mean()) if table.finite else None
        for mode in MODES:
            expected = bracket.round(mode).float()
            for implementation, rounds in device_roundings(name, mode, triton):
                key = f"{implementation} {name} {mode}"
                count = counts.setdefault(key, Count(implementation, name, mode))
                judge(count, rounds(x), expected, x, beyond if implementation == "device cast" else None)


# numpy, on the CPU's cores


@cache
def steps(name: str, mode: TableMode, negative: bool) -> tuple[npt.NDArray[np.int64], Words]:
    """At which bit patterns of one sign, ascending to infinity's, each result of the table begins; and the results.

    By bisection: a result begins at the first pattern from which on the magnitude is at least the result's.
    """
    table = table_of(name, "cpu")
    sign = -1.0 if negative else 1.0

    def results(patterns: Tensor) -> Tensor:
        values = patterns.to(torch.int32).view(torch.float32).double() * sign
        return table.bracket(values).round(mode)

    infinity = 0xFF << 23
    candidates = (
        table.numbers[:-1] if table.finite else torch.cat([table.numbers[:-1], torch.tensor([torch.inf]).double()])
    )
    low, high = torch.zeros_like(candidates, dtype=torch.int64), torch.full_like(candidates, infinity).long()
    while bool((low < high).any()):
        middle = (low + high) // 2
        reached = results(middle).abs() >= candidates
        high, low = torch.where(reached, middle, high), torch.where(reached, low, torch.minimum(middle + 1, high))
    values = results(low)
    return low.numpy(), values.float().numpy().view(np.uint32)


def expected_words(words: Words, stride: int, name: str, mode: TableMode) -> Words:
    """The table's results for bit patterns of one sign, ``stride`` apart, as bit patterns; NaN as it came."""
    negative = bool(words[0] >> 31)
    starts, results = steps(name, mode, negative)
    magnitude = int(words[0] & np.uint32(0x7FFFFFFF))
    at = -((magnitude - starts) // stride)  # rounded up
    first = int(np.searchsorted(starts, magnitude, side="right")) - 1
    inside = (at > 0) & (at < len(words))
    edges = np.concatenate([[0], at[inside], [len(words)]])
    values = np.concatenate([results[first : first + 1], results[inside]])
    expected = np.repeat(values, np.diff(edges))
    infinity = np.uint32(0xFF << 23) | (words[0] & np.uint32(1 << 31))
    return np.where(words >= infinity, words, expected) if words[-1] >= infinity else expected


def numpy_part(start: int, stop: int, stride: int) -> list[Count]:
    """Every ``stride``-th pattern of start ... stop - 1, which have one sign, by numpy."""
    words = np.arange(start, stop, stride, dtype=np.int64).astype(np.uint32)
    x = words.view(np.float32)
    nan = int(np.isnan(x).sum())
    counts = []
    for name in FORMATS:
        for mode in MODES:
            got = round_array(x, rounding_of(name, mode)).view(np.uint32)
            wrong = np.flatnonzero(got != expected_words(words, stride, name, mode))
            wrong = wrong[~(np.isnan(x[wrong]) & np.isnan(got[wrong].view(np.float32)))]
            count = Count("numpy", name, mode, len(words), len(wrong), nan, int(np.isnan(x[wrong]).sum()))
            count.first_mismatches = [f"0x{word:08x}" for word in words[wrong][:4]]
            counts.append(count)
    return counts


def start_worker() -> None:
    torch.set_num_threads(1)


def submit_numpy(pool: ProcessPoolExecutor, stride: int) -> list[Future[list[Count]]]:
    """The whole range in parts of at most 2**20 inputs and one sign."""
    step = stride << 20
    ends = sorted({*range(0, PATTERNS, step), -(-(2**31) // stride) * stride, PATTERNS})
    return [pool.submit(numpy_part, start, stop, stride) for start, stop in pairwise(ends)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--stride", type=int, default=1, help="take every n-th bit pattern (odd, for a sample)")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes for numpy")
    arguments = parser.parse_args()
    device, stride = pick_device(arguments.device), arguments.stride
    from attn_diag.kernels.backend import interpreted

    triton = interpreted() == (device.type == "cpu")
    begun = time.perf_counter()
    counts: dict[str, Count] = {}
    # CUDA does not survive a fork.
    with ProcessPoolExecutor(arguments.workers, get_context("spawn"), start_worker) as pool:
        parts = submit_numpy(pool, stride)
        tables = {name: table_of(name, device) for name in FORMATS}
        chunk = (1 << 26) * stride if device.type == "cuda" else (1 << 20) * stride
        for start in range(0, PATTERNS, chunk):
            run_chunk(torch.arange(start, min(start + chunk, PATTERNS), stride, device=device), tables, counts, triton)
            report(f"device {min(start + chunk, PATTERNS) / PATTERNS:4.0%}", begun)
        for n, part in enumerate(parts, 1):
            for found in part.result():
                key = f"numpy {found.format} {found.mode}"
                counts.setdefault(key, Count("numpy", found.format, found.mode)).add(found)
            if n % max(1, len(parts) // 20) == 0:
                report(f"numpy {n / len(parts):4.0%}", begun)
    rows = sorted(counts.values(), key=lambda c: (c.implementation, c.format, MODES.index(c.mode)))
    for c in rows:
        print(f"{c.implementation:12} {c.format} {c.mode:12} {c.inputs:>10} inputs  {c.mismatches} mismatches", end="")
        print(f"  ({c.left_out} left out)" if c.left_out else "")
    result: dict[str, Any] = {
        "date": datetime.now(UTC).date().isoformat(),
        "tool": describe_tool(device).__dict__,
        "numpy": version("numpy"),
        "stride": stride,
        "seconds": round(time.perf_counter() - begun, 1),
        "rows": [asdict(row) for row in rows],
    }
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")
    if wrong := sum(row.mismatches for row in rows):
        sys.exit(f"{wrong} mismatches")


def report(text: str, begun: float) -> None:
    print(f"{text}  {time.perf_counter() - begun:.0f} s", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
