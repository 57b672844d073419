"""How many times as long as a healthy kernel's the inspection of a coarse or a wrong kernel's capture takes.

    python benchmarks/bench_lossy.py [--device cpu|cuda] [--heads N] [--length T] [--json FILE]

Captures (1, heads, T, 64), causal, of N(0,1) with q four times as large, with O, dQ, dK and dV: of the published
recipe; of a backward that makes P of an L in 16 bits; of a fused kernel that rounds S; of plain torch; and of the
published one with dQ 5 % too large, with a tile of dK 20 % too large, and with delta of the next row. Warm, in turn,
medians of ``RUNS``; and what was said, with how many heads' quantities.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from measuring import captured, made_by, normal, options_of, save, timed
from torch import Tensor

from attn_diag.analyses.inspection.inspect import inspect_captures
from attn_diag.captures.capture import Capture
from attn_diag.head.counterfactual import run_counterfactual
from attn_diag.reference import AttentionHead, Masking
from attn_diag.reference.rounding import BF16

RUNS, WIDTH = 3, 64
HEALTHY = "fa2"
KERNELS = {
    "healthy": HEALTHY,
    "L in 16 bits": "from-l:fused:low",
    "S in 16 bits": "unfused:scores:cast:fused",
    "plain torch": "unfused:scores:cast",
    "dQ 5 % too large": HEALTHY,
    "a tile of dK 20 % too large": HEALTHY,
    "delta of the next row": HEALTHY,
}
OUTPUTS = ("o", "dq", "dk", "dv")


def wrong(name: str, head: AttentionHead, made: dict[str, Tensor]) -> dict[str, Tensor]:
    """What a kernel returned for one head, with its fault."""
    if name == "dQ 5 % too large":
        made["dq"] = 1.05 * made["dq"]
    elif name == "a tile of dK 20 % too large":
        made["dk"][64:128] *= 1.2
    elif name == "delta of the next row":
        assert head.do is not None
        later = torch.ones(len(head.q), len(head.k), device=head.q.device).triu(1).bool()
        scores = (head.q @ head.k.T * head.scale).masked_fill(later, -torch.inf)
        moved = scores.softmax(1) * (made["delta"] - made["delta"].roll(-1))[:, None] * head.scale
        made["dq"], made["dk"] = made["dq"] + moved @ head.k, made["dk"] + moved.T @ head.q
    return made


def capture_of(name: str, heads: int, length: int, device: str) -> Capture:
    """What a kernel makes of every head."""
    q, k, v, do = normal(1, heads, length, WIDTH)
    inputs = [4 * q, k, v, do]
    outputs = {output: torch.empty_like(k) for output in OUTPUTS}
    for h in range(heads):
        q, k, v, do = (t[0, h].to(device).double() for t in inputs)
        head = AttentionHead(q, k, v, do, WIDTH**-0.5, Masking("top-left"))
        made = wrong(name, head, run_counterfactual(head, BF16, {}, recipe=KERNELS[name]))
        for output in OUTPUTS:
            outputs[output][0, h] = made[output].bfloat16().cpu()
    return captured(inputs, **outputs)


def row_of(said: Counter[str], seconds: float, healthy: float) -> dict[str, Any]:
    """Of one kernel."""
    return {"seconds": round(seconds, 4), "over healthy": round(seconds / healthy, 2), "said": dict(said)}


def main() -> None:
    parser = options_of(__doc__, "cpu")
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--length", type=int, default=1024)
    options = parser.parse_args()
    captures = {name: capture_of(name, options.heads, options.length, options.device) for name in KERNELS}
    said, works = dict[str, Counter[str]](), dict[str, Callable[[], object]]()
    for name, capture in captures.items():
        found = inspect_captures([capture], device=options.device)
        words = [f"{q.quantity}: {q.answer}, {q.site}" for h in found.heads if h.head is not None for q in h.quantities]
        said[name], works[name] = Counter(words), partial(inspect_captures, [capture], device=options.device)
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(RUNS):
        for name, work in works.items():
            seconds[name].append(timed(work))
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    rows = {name: row_of(said[name], medians[name], medians["healthy"]) for name in works}
    for name, row in rows.items():
        print(f"{name:30}{row['seconds']:9.3f} s {row['over healthy']:7.1f} x  {row['said']}")
    shape = [1, options.heads, options.length, WIDTH]
    save(made_by(options.device) | {"shape": shape, "kernels": rows}, options.json)


if __name__ == "__main__":
    main()
