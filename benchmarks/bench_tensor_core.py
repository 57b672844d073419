"""Is the model of the tensor core's sums bit-identical to this GPU's? Adversarial sums of products, counted.

Every case, K from 16 to 4096, BF16 and FP16, by wgmma (64x64 tiles), mma.sync (16x16 tiles) and cuBLAS, against
``attn_diag.kernels.accumulation.tensor_core_matmul``. Any NaN equals any NaN; zeros of different signs are counted.
cuBLAS splits K = 4096 into parts that it adds afterwards: another order, shown apart.

    python benchmarks/bench_tensor_core.py --json benchmarks/results/tensor_core_h200.json
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from measuring import made_by, options_of, save
from torch import Tensor

from attn_diag.head.machine import pick_device
from attn_diag.kernels.accumulation import tensor_core_matmul

LENGTHS = (16, 32, 48, 64, 128, 256, 512, 1024, 2048, 4096)
M, N = 128, 64
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
MANTISSA = {"bf16": 7, "fp16": 10}
EXPONENT = {"bf16": 8, "fp16": 5}
# Exponents of both operands, BF16 and FP16; below the normal numbers they are subnormal.
SPANS = {
    "unit": ((-4, 0), (-4, 0)),
    "positive": ((-4, 0), (-4, 0)),
    "wide": ((-20, 20), (-7, 4)),
    "wider": ((-60, 60), (-14, 7)),
    "cancelling": ((-6, 2), (-6, 2)),
    "cancelling exactly": ((-6, 2), (-6, 2)),
    "subnormal operands": ((-127, -120), (-15, -10)),
    "subnormal results": ((-76, -60), (-15, -12)),
    "least results": ((-82, -72), (-15, -13)),
    "overflow": ((56, 63), (8, 15)),
    "accumulators": ((-6, 1), (-6, 1)),
    "accumulators, wide": ((-14, 6), (-14, 6)),
    "subnormal accumulators": ((-80, -60), (-15, -12)),
    "zeros": ((-60, 60), (-14, 7)),
    "zeros times large": ((-6, 1), (-6, 1)),
    "infinities and NaN": ((-4, 0), (-4, 0)),
}
OTHER_CASES = ("bit patterns", "signed zeros")
# Exponents of the accumulators.
ACCUMULATORS = {"accumulators": (-30, 10), "accumulators, wide": (-60, 40), "subnormal accumulators": (-127, -110)}

Array = npt.NDArray[Any]
Sums = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Row:
    """One case, length and path; ``zeros``: mismatches that are zeros of the other sign."""

    operands: str
    case: str
    length: int
    path: str
    sums: int
    mismatches: int
    zeros: int
    infinite: int
    nan: int


def compose(rng: np.random.Generator, fmt: str, shape: tuple[int, ...], span: tuple[int, int], signed: bool) -> Array:
    """16-bit patterns: exponents uniform on ``span``, clipped to what is finite; any mantissa."""
    bias = 2 ** (EXPONENT[fmt] - 1) - 1
    field = np.clip(rng.integers(span[0], span[1] + 1, shape) + bias, 0, 2 * bias)
    sign = rng.integers(0, 2 if signed else 1, shape)
    mantissa = rng.integers(0, 2 ** MANTISSA[fmt], shape)
    patterns: Array = ((sign << 15) | (field << MANTISSA[fmt]) | mantissa).astype(np.uint16)
    return patterns


def inputs(fmt: str, case: str, length: int, seed: int) -> tuple[Array, Array, Array]:
    """a [M, K], b [K, N] as 16-bit patterns, c [M, N] fp32."""
    cases = (*SPANS, *OTHER_CASES)
    rng = np.random.default_rng([seed, list(DTYPES).index(fmt), cases.index(case), length])
    c = np.zeros((M, N), np.float32)
    infinity = (2 ** EXPONENT[fmt] - 1) << MANTISSA[fmt]
    if case == "bit patterns":
        a, b = (rng.integers(0, 2**16, shape).astype(np.uint16) for shape in ((M, length), (length, N)))
        for x in (a, b):
            x[(x & infinity) == infinity] &= np.uint16(0xFFFF ^ (1 << (MANTISSA[fmt] + EXPONENT[fmt] - 1)))
        return a, b, c
    if case == "signed zeros":
        # Sums in which everything is a zero, or cancels, or is cut off.
        values = np.array([0, 0x8000, 1, 0x8001], np.uint16)
        a, b = (rng.choice(values, shape) for shape in ((M, length), (length, N)))
        a[rng.random(M) < 0.5] &= 0x8000
        a[rng.random(M) < 0.1], b[:, rng.random(N) < 0.2] = 0, 0x8000  # all products and perhaps the accumulator -0
        return a, b, np.where(rng.random((M, N)) < 0.5, -0.0, 0.0).astype(np.float32)
    span = SPANS[case][0 if fmt == "bf16" else 1]
    a, b = (compose(rng, fmt, shape, span, case != "positive") for shape in ((M, length), (length, N)))
    if case == "subnormal operands":
        b = compose(rng, fmt, (length, N), (110, 126) if fmt == "bf16" else (4, 12), True)
    if case.startswith("cancelling"):
        half = length // 2
        order = rng.permutation(half) if case == "cancelling" else np.arange(half)
        a[:, half:] = a[:, order] ^ 0x8000
        b[half:] = b[order]
        if case == "cancelling":
            b[half:] ^= (rng.random((half, N)) < 0.05).astype(np.uint16)
    if case == "zeros":
        for x in (a, b):
            x[rng.random(x.shape) < 0.4] &= 0x8000
    if case == "zeros times large":
        # Do products that are 0 have an exponent?
        a[:, ::2] &= 0x8000
        b[::2] = compose(rng, fmt, b[::2].shape, (8, 15), True)
    if case == "infinities and NaN":
        for x in (a, b):
            chosen = rng.random(x.shape) < 0.5 / length
            special = np.array([infinity, infinity | 0x8000, infinity | 1, 0, 0x8000])
            x[chosen] = rng.choice(special, int(chosen.sum()), p=[0.3, 0.3, 0.1, 0.15, 0.15]).astype(np.uint16)
        c[rng.random(c.shape) < 0.1] = np.inf
        c[rng.random(c.shape) < 0.05] = -np.inf
    if case in ACCUMULATORS:
        low, high = ACCUMULATORS[case]
        exponent = rng.integers(low, high + 1, c.shape) + 127
        bits = (rng.integers(0, 2, c.shape) << 31) | (exponent << 23) | rng.integers(0, 2**23, c.shape)
        c = bits.astype(np.uint32).view(np.float32)
    return a, b, c


def paths(device: torch.device) -> dict[str, Sums]:
    """What adds, by name."""
    from attn_diag.kernels import triton_probes

    found: dict[str, Sums] = {}
    for tile in range(len(triton_probes.TILES)):
        zeros = torch.zeros(16, 16, dtype=torch.bfloat16, device=device)
        name = triton_probes.dot(zeros, zeros, zeros.float(), tile)[1]
        found[name] = lambda a, b, c, tile=tile: triton_probes.dot(a, b, c, tile)[0]  # type: ignore[misc]
    found["cublas"] = lambda a, b, _: torch.mm(a, b, out_dtype=torch.float32)
    return found


def compared(found: dict[str, Sums], device: torch.device, seed: int) -> Iterator[Row]:
    """Every case by every path."""
    for fmt, dtype in DTYPES.items():
        for case in (*SPANS, *OTHER_CASES):
            for length in LENGTHS:
                patterns = inputs(fmt, case, length, seed)
                a, b = (torch.from_numpy(x.view(np.int16)).to(device).view(dtype) for x in patterns[:2])
                c = torch.from_numpy(patterns[2]).to(device)
                model = tensor_core_matmul(a, b, c).float()
                for name, path in found.items():
                    if name == "cublas" and bool((c.view(torch.int32) != 0).any()):
                        continue  # it adds the accumulator afterwards
                    got = path(a, b, c)
                    wrong = (got.view(torch.int32) != model.view(torch.int32)) & ~(got.isnan() & model.isnan())
                    zeros = wrong & (got == 0) & (model == 0)
                    counts = (int(x.sum()) for x in (wrong, zeros, got.isinf(), got.isnan()))
                    yield Row(fmt, case, length, name, got.numel(), *counts)


def table(rows: list[Row]) -> str:
    """Markdown: mismatches over all K by operands, case and path."""
    columns: dict[str, Callable[[Row], bool]] = {
        name: lambda r, name=name: r.path == name and (r.path != "cublas" or r.length < 4096)  # type: ignore[misc]
        for name in dict.fromkeys(r.path for r in rows)
    }
    columns["cublas, K = 4096"] = lambda r: r.path == "cublas" and r.length == 4096
    lines = [f"| operands | case | {' | '.join(columns)} |", "|---" * (2 + len(columns)) + "|"]
    for fmt in DTYPES:
        for case in (*SPANS, *OTHER_CASES):
            here = [r for r in rows if (r.operands, r.case) == (fmt, case)]
            cells = []
            for chosen in columns.values():
                some = [r for r in here if chosen(r)]
                cells.append(f"{sum(r.mismatches for r in some)} of {sum(r.sums for r in some)}" if some else "")
            lines.append(f"| {fmt} | {case} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--seed", type=int, default=2026)
    arguments = parser.parse_args()
    device = pick_device("cuda")
    started = time.monotonic()
    rows = list(compared(paths(device), device, arguments.seed))
    seconds = time.monotonic() - started
    print(table(rows))
    totals: dict[str, Counter[str]] = {}
    for row in rows:
        totals.setdefault(row.path, Counter()).update(sums=row.sums, mismatches=row.mismatches)
    print(json.dumps(totals), f"{seconds:.0f} s")
    for row in rows:
        if row.mismatches and not (row.path == "cublas" and row.length == 4096):
            print(row)
    found = {"seed": arguments.seed, "seconds": seconds, "totals": totals, "rows": [asdict(row) for row in rows]}
    save(made_by(device) | found, arguments.json)


if __name__ == "__main__":
    main()
