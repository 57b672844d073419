"""The float64 reference against the mpmath oracle: is every error within its certified bound, and how far below?

    python benchmarks/bench_certificate.py [--rows 10000] [--device cpu|cuda] [--json FILE]

Rows come from families of random and adversarial heads. Per row and output, pessimism = largest bound / largest error
over the features. The median is taken over rows with an error; "of inexact": over rows where some element is not the
correctly rounded truth (elsewhere no float64 could be nearer, and the error is as small as chance has it).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from measuring import made_by, options_of, save
from torch import Tensor

from attn_diag.reference import AttentionHead, BoundCollector, HeadReference, Masking, reference_head
from attn_diag.reference.certify import OUTPUTS, CheckedRow, check_row
from attn_diag.reference.oracle import HeadOracle, OracleRow

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


def gauss(
    seed: int,
    t: int,
    d: int,
    dtype: torch.dtype = BF16,
    scale: float | None = None,
    logits: float = 1.0,
    **options: Any,
) -> AttentionHead:
    """N(0,1) inputs in ``dtype``; q times ``logits``."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v, do = (torch.randn(t, d, generator=generator, dtype=FP64) for _ in range(4))
    q, k, v, do = ((x * f).to(dtype).double() for x, f in ((q, logits), (k, 1.0), (v, 1.0), (do, 1.0)))
    masking = Masking("top-left", window=options.pop("window", None), mask=options.pop("mask", None))
    return AttentionHead(q, k, v, do, scale or d**-0.5, masking, **options)


def ties(seed: int, t: int, d: int) -> AttentionHead:
    """Keys that repeat, and small whole numbers: many equal scores, dP and V."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v, do = (torch.randint(-2, 3, (t, d), generator=generator).double() for _ in range(4))
    period = 2 + seed % 5
    index = torch.arange(t) // period * period
    return AttentionHead(q, k[index], v if seed % 2 else v[index], do, 0.125, Masking("top-left"))


def one_hot(seed: int, t: int, d: int) -> AttentionHead:
    """One key takes all but exp(-5) to exp(-60) of every row."""
    head = gauss(seed, t, d)
    head.q[:, 0], head.k[:, 0] = 8.0, 0.0
    head.k[0, 0] = 5.0 + 55.0 * (seed % 8) / 7
    return head


def subnormal(seed: int, t: int, d: int) -> AttentionHead:
    """Unnormalised probabilities down to 1e-323 beside 1; V so large there that they count."""
    head = gauss(seed, t, d)
    head.q[:, 0], head.k[:, 0] = 8.0, 0.0
    head.k[1:, 0] = -torch.linspace(700 - 5 * (seed % 3), 746, t - 1).double()
    head.v[0] = 0.0
    head.v[1:] *= 2.0**60
    return head


def wide_gaps(seed: int, t: int, d: int) -> AttentionHead:
    """One-hot rows whose other keys have exp(-360) to exp(-600): squares of their dS underflow."""
    head = gauss(seed, t, d)
    head.q[:, 0], head.k[:, 0] = 8.0, 0.0
    head.k[0, 0] = (360 + 60 * (seed % 5)) * d**0.5 / 8
    return head


def near_underflow(seed: int, t: int, d: int) -> AttentionHead:
    """Float64 inputs so small that products, or they themselves, underflow."""
    head = gauss(seed, t, d, FP64)
    for x, exponent in zip(
        (head.v, head.do), ((-1060, 0), (-540, -500), (0, -1060), (-1060, 400))[seed % 4], strict=True
    ):
        assert x is not None
        x.mul_(2.0**exponent)
    return head


def without_keys(seed: int, t: int, d: int) -> AttentionHead:
    """Rows that see no key: a third of them by a mask, or the first ones of more queries than keys."""
    head = gauss(seed, t, d)
    if seed % 2:
        return replace(head, k=head.k[: t // 2], v=head.v[: t // 2], masking=Masking("bottom-right"))
    mask = torch.randn(t, t, generator=torch.Generator().manual_seed(seed)) > 0
    mask[::3] = False
    return replace(head, masking=Masking("top-left", mask=mask))


def cancelling(seed: int, t: int, d: int) -> AttentionHead:
    """V and dO of 20 binades and opposite signs in pairs of nearly equal weight."""
    head = gauss(seed, t, d)
    exponents = torch.randint(-10, 11, (t, 1), generator=torch.Generator().manual_seed(seed)).double()
    head.v.mul_(2**exponents)
    head.v[1::2] = -head.v[: t - 1 : 2] if t % 2 else -head.v[::2]
    head.k[1::2] = head.k[: t - 1 : 2] if t % 2 else head.k[::2]
    return head


def additive(seed: int, t: int, kind: int) -> Tensor:
    mask = torch.randn(t, t, generator=torch.Generator().manual_seed(seed))
    if kind == 0:
        return mask * 3
    hidden = mask > 0.5
    hidden.fill_diagonal_(False)
    return torch.zeros(t, t).masked_fill_(hidden, (-1e9, -torch.inf, float(torch.finfo(FP32).min))[kind - 1])


Make = Callable[[int], AttentionHead]
# name -> (weight: share of the rows, rows taken of each head, head by seed)
FAMILIES: dict[str, tuple[int, int, Make]] = {
    "bf16, T <= 16": (10, 16, lambda s: gauss(s, 1 + s % 16, 16)),
    "bf16, T = 64": (10, 32, lambda s: gauss(s, 64, 64)),
    "bf16, T = 256": (10, 32, lambda s: gauss(s, 256, 64)),
    "bf16, T = 1024": (6, 40, lambda s: gauss(s, 1024, 64)),
    "bf16, T = 4096": (1, 25, lambda s: gauss(s, 4096, 64)),
    "fp16, D = 128": (6, 32, lambda s: gauss(s, 256, 128, FP16)),
    "odd scales": (8, 32, lambda s: gauss(s, 200, 80, scale=(0.1, 80**-0.5, 1 / 3)[s % 3])),
    "fp32": (6, 32, lambda s: gauss(s, 200, 64, FP32)),
    "float64": (4, 32, lambda s: gauss(s, 150, 32, FP64)),
    "logits to 1e4": (8, 32, lambda s: gauss(s, 200, 64, logits=10.0 ** (1 + s % 4 * 0.75))),
    "fp32, logits to 1e4": (4, 32, lambda s: gauss(s, 150, 64, FP32, logits=10.0 ** (1 + s % 4 * 0.75))),
    "ties": (8, 32, lambda s: ties(s, 96, 16)),
    "one-hot": (6, 32, lambda s: one_hot(s, 128, 32)),
    "subnormal P": (4, 32, lambda s: subnormal(s, 128, 16)),
    "cancelling V": (4, 32, lambda s: cancelling(s, 128, 32)),
    "wide gaps": (2, 32, lambda s: wide_gaps(s, 128, 32)),
    "near underflow": (2, 32, lambda s: near_underflow(s, 64, 16)),
    "rows without keys": (2, 32, lambda s: without_keys(s, 96, 32)),
    "softcap": (6, 32, lambda s: gauss(s, 128, 32, softcap=(2.0, 30.0, 50.0)[s % 3], logits=(1.0, 20.0)[s % 2])),
    "additive mask": (8, 32, lambda s: gauss(s, 128, 32, mask=additive(s, 128, s % 4))),
    "mask and softcap": (3, 32, lambda s: gauss(s, 96, 32, softcap=5.0, mask=additive(s, 96, s % 4))),
    "window": (3, 32, lambda s: gauss(s, 256, 64, window=(40, 0))),
}


def rows_of(name: str, count: int) -> Iterator[tuple[AttentionHead, list[int]]]:
    """Heads of one family with the rows to take, until there are ``count``; by seed, so always the same."""
    _, each, make = FAMILIES[name]
    seed = 0
    while count > 0:
        head = make(seed)
        taken = min(count, each, len(head.q))
        yield head, sorted(set(np.linspace(0, len(head.q) - 1, taken).round().astype(int).tolist()))
        count, seed = count - taken, seed + 1


def compute(head: AttentionHead) -> tuple[HeadReference, Any]:
    """The reference and its bounds."""
    collector = BoundCollector(head)
    reference = reference_head(head, collector.add, key_gradients=False, gradient_sums=True)
    return reference, collector.bounds(reference)


def checked_rows(
    name: str, count: int, compute: Callable[[AttentionHead], tuple[HeadReference, Any]] = compute, device: str = "cpu"
) -> Iterator[tuple[OracleRow, CheckedRow, HeadReference]]:
    """``count`` rows of a family against the oracle, one by one."""
    for head, rows in rows_of(name, count):
        placed = head if device == "cpu" else moved(head, device)
        reference, bounds = compute(placed)
        oracle = HeadOracle(head)
        for t in rows:
            row = oracle.row(t)
            yield row, check_row(row, reference, bounds), reference


def moved(head: AttentionHead, device: str) -> AttentionHead:
    mask = head.masking.mask
    masking = Masking(head.masking.causal, head.masking.window, None if mask is None else mask.to(device))
    q, k, v, do = (x.to(device) for x in (head.q, head.k, head.v, head.do) if x is not None)
    return AttentionHead(q, k, v, do, head.scale, masking, head.softcap)


def is_rounded(row: OracleRow, output: str, reference: HeadReference) -> bool:
    """Whether every element is the correctly rounded truth."""
    got = getattr(reference, output)[row.t].reshape(-1).tolist()
    true = getattr(row, output)()
    return bool(got == (true if isinstance(true, list) else [true]))


def median(values: list[float]) -> float | None:
    return float(f"{np.median(values):.3g}") if values else None


def run_family(name: str, count: int, device: str) -> tuple[dict[str, Any], dict[str, list[float]]]:
    found: dict[str, list[float]] = {output: [] for output in OUTPUTS}
    inexact: dict[str, list[float]] = {output: [] for output in OUTPUTS}
    worst = dict.fromkeys(OUTPUTS, 0.0)
    violated = rows = 0
    for row, checked, reference in checked_rows(name, count, device=device):
        rows += 1
        violated += not checked.held
        for output, result in checked.outputs.items():
            worst[output] = max(worst[output], result.ratio)
            if result.error > 0:
                found[output].append(result.bound / result.error)
                if not is_rounded(row, output, reference):
                    inexact[output].append(result.bound / result.error)
    table = {
        "rows": rows,
        "violated": violated,
        "largest error / bound": {o: float(f"{w:.3g}") for o, w in worst.items()},
        "median bound / error": {o: median(v) for o, v in found.items()},
        "median of inexact": {o: median(v) for o, v in inexact.items()},
        "inexact rows": {o: len(v) for o, v in inexact.items()},
    }
    return table, found


def main() -> None:
    parser = options_of(__doc__, device="cpu")
    parser.add_argument("--rows", type=int, default=10_000)
    options = parser.parse_args()
    share = options.rows / sum(weight for weight, _, _ in FAMILIES.values())
    everything: dict[str, list[float]] = {output: [] for output in OUTPUTS}
    families: dict[str, Any] = {}
    start = time.perf_counter()
    for name, (weight, _, _) in FAMILIES.items():
        families[name], found = run_family(name, math.ceil(weight * share), options.device)
        for output in OUTPUTS:
            everything[output] += found[output]
        print(f"{name:22}", families[name], flush=True)
    result = made_by(options.device) | {
        "seconds": round(time.perf_counter() - start),
        "rows": sum(f["rows"] for f in families.values()),
        "violated": sum(f["violated"] for f in families.values()),
        "median bound / error": {o: median(v) for o, v in everything.items()},
        "median over all outputs": median([x for v in everything.values() for x in v]),
        "families": families,
    }
    print({k: v for k, v in result.items() if k != "families"})
    save(result, options.json)


if __name__ == "__main__":
    main()
