"""``check`` on production kernels: does it pass on them, do their bits repeat, and is a planted truncation found?

    python benchmarks/bench_check.py --device cuda --json benchmarks/results/check_h200.json

Each kernel, causal and not, D 64 and 128: checked without a baseline; saved on seed 0, compared bit for bit on seed 0,
compared on seed 1; and, for callables, with half of O's elements moved by one number toward zero, which has the mean
bias of a truncating cast.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measuring import made_by, options_of, save
from torch import Tensor

import attn_diag
from attn_diag.results.check import CheckReport

Attention = Callable[[Tensor, Tensor, Tensor], Any]


def kernels(causal: bool, device: str) -> dict[str, Attention | str]:
    found: dict[str, Attention | str] = {"sdpa": "sdpa", "fa2 (emulated)": "fa2"}
    if device != "cuda":
        return found
    found |= {"sdpa:flash": "sdpa:flash", "sdpa:cudnn": "sdpa:cudnn", "sdpa:efficient": "sdpa:efficient"}

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attn_diag.attention(q, k, v, causal="top-left" if causal else "none", recipe="fa2")

    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    compiled = torch.compile(flex_attention, dynamic=False)

    def visible(_b: Tensor, _h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return i >= j

    def flex(q: Tensor, k: Tensor, v: Tensor) -> Any:
        mask = create_block_mask(visible, None, None, q.shape[2], k.shape[2]) if causal else None
        return compiled(q, k, v, block_mask=mask)

    return found | {"attn_diag.attention": ours, "FlexAttention": flex}


def shrunk(fn: Attention) -> Attention:
    """Half of O's elements one number nearer to zero; no gradients."""

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.no_grad():
            found = fn(q, k, v)
            o: Tensor = (found[0] if isinstance(found, tuple) else found).contiguous()
            half = (torch.arange(o.numel(), device=o.device) % 2).view(o.shape).to(torch.int16)
            return (o.view(torch.int16) - half * (o != 0)).view(o.dtype)

    return run


def short(found: CheckReport) -> dict[str, Any]:
    return {
        "passed": found.passed,
        "failures": [f"[{f.kind}] {f.message}" for f in found.failures],
        "suspects": sorted({f.suspect for f in found.failures if f.suspect}),
        "notes": list(found.notes),
        "same_bits": None if found.cases[0].same_bits is None else all(c.same_bits for c in found.cases),
        "deterministic": all(c.deterministic for c in found.cases),
        "bias_o_away_ulp": {c.name: c.biases["o_away_excess"].mean for c in found.cases if c.biases},
        "error_over_limit": {
            c.name: max((s.error / m for s in c.sizes.values() if (m := s.limit or s.budget)), default=None)
            for c in found.cases
        },
    }


def main() -> None:
    parser = options_of(__doc__, device="cuda")
    parser.add_argument("--cases", nargs="+", default=None)
    arguments = parser.parse_args()
    result = made_by(arguments.device) | {"cases": arguments.cases, "kernels": {}}
    for causal in (False, True):
        for head_dim in (64, 128):
            for name, fn in kernels(causal, arguments.device).items():
                place = f"{name}, D {head_dim}{', causal' if causal else ''}"
                started = time.perf_counter()
                result["kernels"][place] = one(name, fn, arguments, causal=causal, head_dim=head_dim)
                passed = {n: r["passed"] for n, r in result["kernels"][place].items()}
                print(f"{time.perf_counter() - started:6.1f} s  {place}: {passed}", flush=True)
                save(result, arguments.json)


def one(
    name: str, fn: Attention | str, arguments: argparse.Namespace, *, causal: bool, head_dim: int
) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "baseline.json"

        def run(target: Attention | str, **options: Any) -> dict[str, Any]:
            return short(
                attn_diag.check(
                    target, name=name, causal=causal, head_dim=head_dim, cases=arguments.cases,
                    device=arguments.device, **options,
                )
            )  # fmt: skip

        found = {
            "without_baseline": run(fn),
            "saved": run(fn, baseline=path, save=True),
            "same_bits": run(fn, baseline=path, exact=True),
            "other_seed": run(fn, baseline=path, seed=1),
        }
        if callable(fn):
            found["planted"] = run(shrunk(fn), backward=False)
        return found


if __name__ == "__main__":
    main()
