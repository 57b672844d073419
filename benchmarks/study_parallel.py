"""What ring attention and tensor parallelism add to the errors of attention, by size, format and order, on a CPU.

Ring attention as ring-flash-attention does it: rank r holds a share of the queries, keys and values; the keys go round;
each hop gives a partial O and L, merged in turn, O <- O - sigmoid(L_hop - L) (O - O_hop); the backward runs hop by hop
from the merged O and L, dQ is added up on its rank, dK and dV travel with their keys. Every hop rounds as
FlashAttention-2 does: cast P for its products, sums in fp32. Errors are against float64 on the same BF16 inputs,
relative to the norm. A tensor-parallel output projection adds up what each rank's heads give, one rank after the other.

    python benchmarks/study_parallel.py --json benchmarks/results/parallel_cpu.json
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from measuring import made_by, save
from torch import Tensor

HEADS, LENGTH, DIM = 4, 512, 64
SIZES = (1, 2, 4, 8, 16)
FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16}
INPUTS = ("gaussian", "peaked")

Bits = torch.dtype


def inputs_of(kind: str, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and dO in BF16, [H, T, D]; peaked: scores of four times the size."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v, do = (torch.randn(HEADS, LENGTH, DIM, generator=generator) for _ in range(4))
    return (q * (4 if kind == "peaked" else 1)).bfloat16(), k.bfloat16(), v.bfloat16(), do.bfloat16()


def exact(q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> dict[str, Tensor]:
    """O, dQ, dK and dV in float64."""
    a, b, c = (one.double().requires_grad_() for one in (q, k, v))
    scores = (a @ b.mT * DIM**-0.5).masked_fill(_future(0, 0, LENGTH, LENGTH), -torch.inf)
    out = scores.softmax(-1) @ c
    dq, dk, dv = torch.autograd.grad(out, (a, b, c), do.double())
    return {"o": out.detach(), "dq": dq, "dk": dk, "dv": dv}


def _future(row: int, key: int, rows: int, keys: int) -> Tensor:
    return torch.arange(key, key + keys)[None, :] > torch.arange(row, row + rows)[:, None]


def ring(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, size: int, partial: Bits, merged: Bits, lse: Bits, grads: Bits,
    *, descending: bool,
) -> dict[str, Tensor]:  # fmt: skip
    """O, dQ, dK and dV of a ring.

    Args:
        q: [H, T, D] BF16, as k, v and do.
        k: Keys.
        v: Values.
        do: dO.
        size: Ranks.
        partial: What a hop's O is rounded to.
        merged: What the running O is kept in.
        lse: What the running L is kept in.
        grads: What dQ, and the dK and dV that travel, are kept in between hops.
        descending: Whether a rank begins with its own keys, as rings do; else with the first.
    """
    width = LENGTH // size
    found = {name: torch.zeros(HEADS, LENGTH, DIM) for name in ("o", "dq", "dk", "dv")}
    for rank in range(size):
        rows = slice(rank * width, (rank + 1) * width)
        out, total = torch.zeros(HEADS, width, DIM), torch.full((HEADS, width, 1), -torch.inf)
        hops = range(rank, -1, -1) if descending else range(rank + 1)
        for hop in hops:
            keys = slice(hop * width, (hop + 1) * width)
            scores = _scores(q[:, rows], k[:, keys], rank, hop, width)
            top = scores.amax(-1, keepdim=True)
            weights = (scores - top).exp()
            own = top + weights.sum(-1, keepdim=True).log()
            o = (weights.bfloat16().float() @ v[:, keys].float() / weights.sum(-1, keepdim=True)).to(partial).float()
            step = torch.sigmoid(own - total)
            out = (out - step * (out - o)).to(merged).float()
            total = torch.logaddexp(total, own).to(lse).float()
        out = out.bfloat16().float()
        found["o"][:, rows] = out
        delta = (do[:, rows].float() * out).sum(-1, keepdim=True)
        for hop in hops:
            keys = slice(hop * width, (hop + 1) * width)
            weights = (_scores(q[:, rows], k[:, keys], rank, hop, width) - total).exp()
            ds = (weights * (do[:, rows].float() @ v[:, keys].float().mT - delta)).bfloat16().float()
            scale = DIM**-0.5
            for name, at, new in (
                ("dq", rows, ds @ k[:, keys].float() * scale),
                ("dk", keys, ds.mT @ q[:, rows].float() * scale),
                ("dv", keys, weights.bfloat16().float().mT @ do[:, rows].float()),
            ):
                # A hop's backward returns the inputs' format, which is then added to what there is.
                one = new.bfloat16().float() if size > 1 else new
                found[name][:, at] = (found[name][:, at] + one).to(grads).float()
    return {name: one.bfloat16() for name, one in found.items()}


def _scores(q: Tensor, k: Tensor, rank: int, hop: int, width: int) -> Tensor:
    scores: Tensor = q.float() @ k.float().mT * DIM**-0.5
    return scores.masked_fill(_future(rank * width, hop * width, width, width), -torch.inf)


_FP32 = dict.fromkeys(("partial", "merged", "lse", "grads"), torch.float32)
RECIPES: dict[str, dict[str, Any]] = {
    "partials fp32": _FP32,
    "partials bf16": _FP32 | {"partial": torch.bfloat16},
    "merged o bf16": _FP32 | dict.fromkeys(("partial", "merged"), torch.bfloat16),
    "lse bf16": _FP32 | dict.fromkeys(("partial", "lse"), torch.bfloat16),
    "grads bf16": _FP32 | dict.fromkeys(("partial", "grads"), torch.bfloat16),
}


def ring_rows(seeds: int) -> Iterator[dict[str, Any]]:
    """Relative errors by input, recipe, order and size; the rms over seeds."""
    for kind, (name, recipe), descending in itertools.product(INPUTS, RECIPES.items(), (True, False)):
        for size in SIZES:
            sums: dict[str, float] = {}
            for seed in range(seeds):
                given = inputs_of(kind, seed)
                truth = exact(*given)
                for key, one in ring(*given, size, descending=descending, **recipe).items():
                    error = float((one.double() - truth[key]).square().sum() / truth[key].square().sum())
                    sums[key] = sums.get(key, 0.0) + error / seeds
            order = "own keys first" if descending else "first keys first"
            errors = {key: value**0.5 for key, value in sums.items()}
            yield {"inputs": kind, "recipe": name, "order": order, "size": size, **errors}


def projection_rows(seeds: int) -> Iterator[dict[str, Any]]:
    """Relative errors of an output projection over tensor-parallel ranks, beside one product."""
    channels, rows = 1024, 256
    for size, (name, fmt), order in itertools.product((1, 2, 4, 8), FORMATS.items(), ("ascending", "tree")):
        total = 0.0
        for seed in range(seeds):
            generator = torch.Generator().manual_seed(seed)
            o = torch.randn(rows, channels, generator=generator).bfloat16()
            w = (torch.randn(channels, channels, generator=generator) * channels**-0.5).bfloat16()
            truth = o.double() @ w.double().T
            parts = [
                (a.float() @ b.float().T).to(fmt).float()
                for a, b in zip(o.chunk(size, 1), w.chunk(size, 1), strict=True)
            ]
            while len(parts) > 1:
                pairs = list(zip(parts[::2], parts[1::2], strict=True)) if order == "tree" else [(parts[0], parts[1])]
                rest = [] if order == "tree" else parts[2:]
                parts = [(a + b).to(fmt).float() for a, b in pairs] + rest
            total += float((parts[0].bfloat16().double() - truth).square().sum() / truth.square().sum()) / seeds
        yield {"ranks": size, "sums": name, "order": order, "error": total**0.5}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    started = time.monotonic()
    rings, projections = [], []
    for row in ring_rows(options.seeds):
        rings.append(row)
        print({key: round(value, 5) if isinstance(value, float) else value for key, value in row.items()}, flush=True)
    for row in projection_rows(options.seeds):
        projections.append(row)
        print({key: round(value, 5) if isinstance(value, float) else value for key, value in row.items()}, flush=True)
    if options.json is not None:
        seconds = round(time.monotonic() - started)
        save({**made_by(), "seconds": seconds, "ring": rings, "projection": projections}, options.json)


if __name__ == "__main__":
    main()
