"""States of linear attention rounded to 16 bits between chunks, and sound kernels of every make: who is accused.

    python benchmarks/study_linear_states.py [--seeds 5] [--first 0] [--only NAME …] [--json FILE]

O and the last state of emulated kernels in BF16 (160 steps, a width of 16, an initial state, decays of trained models):
with the released kernel's roundings or a well-rounded one's, in chunks of several sizes, with operands in fp32 or TF32;
some of them with the state in BF16. A state's rounding is not always the larger part of the error: then its bits tell.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace
from typing import Any

import torch
from measuring import made_by, options_of, save

from attn_diag.analyses.linear.inspect import inspect_linear
from attn_diag.captures.linear import LinearCapture
from attn_diag.head.linear import LinearRun
from attn_diag.testing.linear.inputs import LONG, linear_inputs, rounded

OPERATORS = ("rwkv7", "gated_delta_rule", "kda", "gla", "simple_gla", "mamba2")
CPU = torch.device("cpu")
ACCUSED = {"nonfinite", "wrong", "lossy", "biased"}
# In words -> sites, and whether the rest is as the released kernel rounds.
KERNELS: dict[str, tuple[dict[str, Any], bool]] = {
    "sound: released": ({"chunk": 64}, True),
    "sound: released, chunks of 128": ({"chunk": 128}, True),
    "sound: well-rounded, chunks of 32": ({"chunk": 32}, False),
    "sound: fp32 operands": ({"chunk": 64, "operands": "fp32"}, False),
    "sound: TF32 operands": ({"chunk": 64, "operands": "tf32"}, False),
    "BF16 state every 16 steps, released": ({"chunk": 16, "state": "bf16"}, True),
    "BF16 state every 64 steps, released": ({"chunk": 64, "state": "bf16"}, True),
    "BF16 state every 16 steps, well-rounded": ({"chunk": 16, "state": "bf16"}, False),
}


def forward_of(operator: str, seed: int, steps: Any = 96, **sites: Any) -> LinearCapture:
    """O and the last state of an emulated kernel, without gradients."""
    given = rounded(linear_inputs(operator, (1, steps, 1, 16, 16), seed, kind=LONG))
    given["initial_state"] = torch.randn(1, 1, 16, 16, generator=torch.Generator().manual_seed(seed)) * 0.3
    run = LinearRun(LinearCapture(operator, given), CPU)
    made = run.emulated(replace(run.recipe, **sites), forward=True)
    return replace(
        run.capture, tensors={**given, "o": made["o"].bfloat16(), "final_state": made["final_state"].float()}
    )


def judged(kernel: str, operator: str, seed: int) -> dict[str, Any]:
    sites, released = KERNELS[kernel]
    known = LinearRun(forward_of(operator, seed), CPU).released() if released else []
    found = inspect_linear(forward_of(operator, seed, 160, **(known[0] if known else {}), **sites), device="cpu")
    (head,) = found.heads
    return {
        "operator": operator,
        "seed": seed,
        "labels": sorted(found.labels),
        "quantities": {q.quantity: (q.answer, q.factor, q.cause) for q in head.quantities},
        "named": any(q.cause == "state" for q in head.quantities),
    }


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--only", nargs="*", choices=list(KERNELS))
    options = parser.parse_args()
    kept: dict[str, Any] = made_by() | {"first_seed": options.first, "seeds": options.seeds, "kernels": {}}
    for kernel in options.only or KERNELS:
        begun = time.perf_counter()
        seeds = range(options.first, options.first + options.seeds)
        calls = [judged(kernel, operator, seed) for operator in OPERATORS for seed in seeds]
        labels = Counter("/".join(c["labels"]) for c in calls)
        accused = [c for c in calls if ACCUSED & set(c["labels"])]
        found: dict[str, Any] = {
            "calls": len(calls), "accused": len(accused), "named": sum(c["named"] for c in calls), "labels": labels,
        }  # fmt: skip
        print(f"{kernel}: {found} ({time.perf_counter() - begun:.0f} s)", flush=True)
        coarse = "state" in KERNELS[kernel][0]
        found["otherwise"] = [c for c in calls if (c not in accused if coarse else c["labels"] != ["clean"])]
        kept["kernels"][kernel] = found
        save(kept, options.json)


if __name__ == "__main__":
    main()
