"""FP4, FP6 and E8M0 on every fp32 input: all 2**32 bit patterns, ours beside ml_dtypes and torchao (E8M0: torch).

Ours are ``kernels.formats.round_to`` and, of E8M0, the scales of ``kernels.quantize``. One process; about a quarter of
an hour of one core, or with ``--stride N`` every N-th pattern.

    python benchmarks/bench_rounding_codes.py --json benchmarks/results/rounding_codes_cpu.json

A mismatch is a result with other bits; NaN must be NaN. Left out are the inputs for which an implementation has no
number: NaN, in formats without one, and what E8M0 does not hold (zeros, negative numbers, what rounds past 2**127).
So are, of E8M0, the numbers between 2**-127 and 1.5 * 2**-127, subnormal in fp32: both others make 2**-126 of them, to
which they are not nearest.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from importlib.metadata import version

import ml_dtypes
import numpy as np
import torch
from measuring import made_by, options_of, save
from torch import Tensor
from torchao.prototype.mx_formats import kernels as torchao

from attn_diag.kernels.formats import Mode, parse, round_to
from attn_diag.kernels.quantize import power_of_two

PATTERNS, CHUNK = 2**32, 2**20
# The casts of ml_dtypes, and torchao's to codes and back.
SMALL: dict[str, tuple[type, Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "e2m1": (ml_dtypes.float4_e2m1fn, torchao.f32_to_f4_unpacked, torchao.f4_unpacked_to_f32),
    "e2m3": (ml_dtypes.float6_e2m3fn, torchao.f32_to_f6_e2m3_unpacked, torchao.f6_e2m3_unpacked_to_f32),
    "e3m2": (ml_dtypes.float6_e3m2fn, torchao.f32_to_f6_e3m2_unpacked, torchao.f6_e3m2_unpacked_to_f32),
}
LARGEST = {"e2m1": 6.0, "e2m3": 7.5, "e3m2": 28.0}


def cast(x: Tensor, dtype: type) -> Tensor:
    """ml_dtypes' cast and back."""
    with np.errstate(all="ignore"):
        return torch.from_numpy(x.numpy().astype(dtype).astype(np.float32))


def unlike(a: Tensor, b: Tensor) -> Tensor:
    """Where the bits differ; NaN is NaN."""
    return (a.view(torch.int32) != b.view(torch.int32)) & ~(a.isnan() & b.isnan())


def compare(x: Tensor, rows: dict[tuple[str, str], dict[str, int]]) -> None:
    """All formats on the fp32 numbers ``x``."""
    nan = x.isnan()
    infinite = x.isinf()
    for name, (dtype, encode, decode) in SMALL.items():
        ours = round_to(x, parse(name))
        # Infinities stay in ours, by rule; the others saturate.
        largest = torch.full_like(x, LARGEST[name])
        ours = torch.where(infinite, torch.copysign(largest, x), ours)
        for other, values in (("ml_dtypes", cast(x, dtype)), ("torchao", decode(encode(x)))):
            add(rows, name, other, x, unlike(ours, values), nan)
    ours = power_of_two(x, Mode.NEAREST_EVEN)
    outside = ~(x > 0) & ~nan | (x >= 1.5 * 2.0**127) | ((x > 2.0**-127) & (x < 1.5 * 2.0**-127))
    casts = (("ml_dtypes", cast(x, ml_dtypes.float8_e8m0fnu)), ("torch", x.to(torch.float8_e8m0fnu).float()))
    for other, values in casts:
        add(rows, "e8m0", other, x, unlike(ours, values), outside)


def add(
    rows: dict[tuple[str, str], dict[str, int]], name: str, other: str, x: Tensor, wrong: Tensor, left_out: Tensor
) -> None:
    row = rows.setdefault((name, other), {"inputs": 0, "left_out": 0, "mismatches": 0})
    wrong = wrong & ~left_out
    row["inputs"] += x.numel()
    row["left_out"] += int(left_out.sum())
    if bool(wrong.any()):
        row.setdefault("first", int(x[wrong][0].view(torch.int32)) & 0xFFFFFFFF)
        row["mismatches"] += int(wrong.sum())


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--stride", type=int, default=1, help="take every n-th bit pattern (odd, for a sample)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    begun, stride = time.perf_counter(), arguments.stride
    rows: dict[tuple[str, str], dict[str, int]] = {}
    for start in range(0, PATTERNS, CHUNK * stride):
        words = torch.arange(start, min(start + CHUNK * stride, PATTERNS), stride)
        compare(torch.where(words < 2**31, words, words - PATTERNS).to(torch.int32).view(torch.float32), rows)
        if start % (2**28) == 0:
            print(f"{start / PATTERNS:4.0%} {time.perf_counter() - begun:.0f} s", file=sys.stderr, flush=True)
    found = [{"format": name, "against": other, **row} for (name, other), row in rows.items()]
    for row in found:
        print(row)
    versions = {name: version(name) for name in ("ml_dtypes", "torchao", "numpy")}
    seconds = round(time.perf_counter() - begun, 1)
    result = made_by(torch.device("cpu")) | versions | {"stride": stride, "seconds": seconds, "rows": found}
    save(result, arguments.json)
    if wrong := sum(row["mismatches"] for row in rows.values()):
        sys.exit(f"{wrong} mismatches")


if __name__ == "__main__":
    main()
