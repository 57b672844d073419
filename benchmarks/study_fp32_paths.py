"""FP32 inputs through kernels that go through BF16 or TF32 somewhere, and broken ones: what ``inspect`` says of O.

Two heads, causal, D = 64, plain torch; sums are rounded after each tile of the stated number of keys.

    python benchmarks/study_fp32_paths.py --json benchmarks/results/fp32_paths_cpu.json
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from measuring import made_by, options_of, save
from torch import Tensor

import attn_diag
from attn_diag.kernels.formats import parse, round_to
from attn_diag.results.diagnosis import HeadDiagnosis

DIM, OTHER_KEY, FIRST_ROW, FEATURE = 64, 3, 40, 7
FAMILIES: dict[str, Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]] = {
    "gaussian": lambda q, k, v: (q, k, v),
    "peaked": lambda q, k, v: (4 * q, k, v),
    "near uniform": lambda q, k, v: (0.05 * q, k, v),
    "low rank": lambda q, k, v: (q[..., :4] @ q[0, 0, :4], k[..., :4] @ q[0, 0, :4], v),
    "V with a mean": lambda q, k, v: (q, k, v + 2),
}
# By what is rounded: a format, and after how many keys sums are.
KERNELS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "TF32 operands": {"operands": "e8m10", "probs": "e8m10"},
    "TF32 operands, cut": {"operands": "e8m10:toward-zero", "probs": "e8m10:toward-zero"},
    "FP16 operands and O": {"operands": "fp16", "probs": "fp16", "out": "fp16"},
    "BF16 operands": {"operands": "bf16", "probs": "bf16"},
    "BF16 operands and O": {"operands": "bf16", "probs": "bf16", "out": "bf16"},
    "BF16 operands, S, P and O": {"operands": "bf16", "scores": "bf16", "probs": "bf16", "out": "bf16"},
    "BF16 S": {"scores": "bf16"},
    "BF16 P": {"probs": "bf16"},
    "BF16 sums of O, 1 key": {"sums": "bf16", "tile": 1},
    "BF16 sums of O, 16 keys": {"sums": "bf16", "tile": 16},
    "BF16 sums of O, 64 keys": {"sums": "bf16", "tile": 64},
    "BF16 sums of l, 1 key": {"row_sum": "bf16", "tile": 1},
    "BF16 sums of O and l, 16 keys": {"sums": "bf16", "row_sum": "bf16", "tile": 16},
    "BF16 operands, sums of O in BF16, 16 keys": {"operands": "bf16", "probs": "bf16", "sums": "bf16", "tile": 16},
    "TF32 operands, sums of O in BF16, 16 keys": {"operands": "e8m10", "probs": "e8m10", "sums": "bf16", "tile": 16},
}
# Faults are planted into these.
HOSTS = ("fp32", "TF32 operands", "BF16 operands and O", "BF16 sums of O, 16 keys")
FAULTS = (
    "scale 1 % off", "O 1 % off", "mask one key further", "mask one key earlier", "another head's O", "a key left out",
    "16 keys left out", "a row 5 % off", "a feature 2 % off",
)  # fmt: skip


def kernel(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor, alpha: float, *, operands: str = "fp32", scores: str = "fp32",
    probs: str = "fp32", sums: str = "fp32", row_sum: str = "fp32", out: str = "fp32", tile: int = 2**20,
) -> Tensor:  # fmt: skip
    """Softmax attention, [B, H, T, D] fp32."""

    def low(x: Tensor, fmt: str) -> Tensor:
        return x if fmt == "fp32" else round_to(x.double(), parse(fmt)).float()

    q, k, v = (low(x, operands) for x in (q, k, v))
    s = low(alpha * low(q @ k.mT, scores), scores).masked_fill(~visible, -math.inf)
    p = (s - s.amax(-1, keepdim=True)).exp()
    o, total = torch.zeros_like(v), torch.zeros_like(p[..., :1])
    for some, values in zip(torch.split(p, tile, -1), torch.split(v, tile, -2), strict=True):
        total = low(total + some.sum(-1, keepdim=True), row_sum)
        o = low(o + low(some, probs) @ values, sums)
    return low(o / total, out)


def broken(fault: str, q: Tensor, k: Tensor, v: Tensor, how: dict[str, Any]) -> Tensor:
    """The kernel with a fault."""
    length, alpha = q.shape[2], DIM**-0.5
    visible = torch.ones(length, length).tril().bool()
    if fault in ("mask one key further", "mask one key earlier"):
        visible = torch.ones(length, length).tril(1 if fault.endswith("further") else -1).bool()
        visible[0, 0] = True
    if fault in ("a key left out", "16 keys left out"):
        left = slice(OTHER_KEY, OTHER_KEY + (1 if fault.startswith("a ") else 16))
        visible[FIRST_ROW:, left] = False
    o = kernel(q, k, v, visible, alpha * (1.01 if fault == "scale 1 % off" else 1), **how)
    if fault == "O 1 % off":
        o = 1.01 * o
    elif fault == "another head's O":
        o = o.flip(1)
    elif fault == "a row 5 % off":
        o[:, :, FIRST_ROW] *= 1.05
    elif fault == "a feature 2 % off":
        o[..., FEATURE] *= 1.02
    return o


def judged(q: Tensor, k: Tensor, v: Tensor, o: Tensor) -> Iterator[tuple[str, float, str]]:
    """By head inspect's answer on O, its error and the words."""
    found = attn_diag.inspect(q, k, v, o=o, causal="top-left")
    heads: tuple[HeadDiagnosis, ...] = found.captures[0].observations[0].heads
    for head in heads:
        if head.head is not None:
            (of_o,) = (one for one in head.quantities if one.quantity == "o")
            yield of_o.answer, of_o.relative_error or 0.0, of_o.words


def row(name: str, family: str, fault: str, seeds: int, length: int) -> dict[str, Any]:
    """One kernel on one family."""
    answers: Counter[str] = Counter()
    errors, words = [], []
    for seed in range(seeds):
        generator = torch.Generator().manual_seed(seed)
        q, k, v = FAMILIES[family](*(torch.randn(1, 2, length, DIM, generator=generator) for _ in range(3)))
        for answer, error, said in judged(q, k, v, broken(fault, q, k, v, KERNELS[name])):
            answers[answer] += 1
            errors.append(error)
            words.append(said)
    of = {"kernel": name, "family": family, "fault": fault, "answers": dict(answers), "largest_error": max(errors)}
    return of | {"named": sum("leaves with" in said for said in words), "words": words[0]}


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--length", type=int, default=160)
    options = parser.parse_args()
    cases = [(name, "") for name in KERNELS] + [(host, fault) for fault in FAULTS for host in HOSTS]
    rows = []
    for family in FAMILIES:
        for name, fault in cases:
            rows.append(row(name, family, fault, options.seeds, options.length))
            print(*rows[-1].values(), sep=" | ", flush=True)
            save({**made_by(), "length": options.length, "seeds": options.seeds, "rows": rows}, options.json)


if __name__ == "__main__":
    main()
