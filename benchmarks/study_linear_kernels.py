"""flash-linear-attention's chunked kernels judged on a GPU; captures and verdicts are kept.

    pip install fla-core==0.6.0 flash-linear-attention==0.6.0 einops
    python benchmarks/study_linear_kernels.py OUT [--operators rwkv7 kda …] [--steps 1024] [--heads 4] [--seeds 1]
    python benchmarks/study_linear_kernels.py OUT --judge    # the captures that are in OUT, again, without a GPU

OUT gets a capture and the verdict (JSON) of every operator, and summary.json: per quantity answer, factor, error. The
first call of a kernel is autotuned, a minute or two for all. The backward of the gated delta rule refuses Triton 3.4 to
3.7.0 on Hopper, where its gradients are wrong (fla #640); here the refusal is lifted, to see whether the verdict names
it. Inputs: N(0,1) with k of length 1, decays as linear attention's models have them (log decay about -0.05 and -0.003).
"""

from __future__ import annotations

import argparse
import inspect
import json
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from measuring import made_by, save

from attn_diag.analyses.linear import inspect_linear
from attn_diag.captures.linear import LinearCapture, load_linear
from attn_diag.testing.linear.inputs import LONG, linear_inputs, rounded

# Operator -> module and function of fla, and what it calls our arguments.
KERNELS: dict[str, tuple[str, str, dict[str, str]]] = {
    "rwkv7": ("fla.ops.rwkv7", "chunk_rwkv7", {"q": "r", "g": "w"}),
    "gated_delta_rule": ("fla.ops.gated_delta_rule", "chunk_gated_delta_rule", {}),
    "kda": ("fla.ops.kda", "chunk_kda", {}),
    "gla": ("fla.ops.gla", "chunk_gla", {}),
    "simple_gla": ("fla.ops.simple_gla", "chunk_simple_gla", {}),
    "delta_rule": ("fla.ops.delta_rule", "chunk_delta_rule", {}),
    "retention": ("fla.ops.retention", "chunk_retention", {}),
}


def lift_the_refusal() -> None:
    """Let the gated backward run on every Triton."""
    module: Any = import_module("fla.ops.common.chunk_o")
    module.TRITON_ABOVE_3_7_1 = True


def run(
    function: Callable[..., Any], tensors: dict[str, Tensor], do: Tensor, names: dict[str, str]
) -> dict[str, Tensor]:
    """What the kernel returns, and its gradients."""
    leaves = {name: t.detach().clone().requires_grad_() for name, t in tensors.items()}
    given = {names.get(name, name): t for name, t in leaves.items()}
    known = inspect.signature(function).parameters
    o, state = function(**{n: t for n, t in given.items() if n in known}, output_final_state=True)
    (o * do).sum().backward()
    found = {"o": o.detach(), "final_state": state.detach()}
    return found | {f"d{name}": t.grad for name, t in leaves.items() if t.grad is not None}


def captured(operator: str, kind: str, seed: int, options: argparse.Namespace) -> LinearCapture:
    """One call of the kernel, kept."""
    module, name, names = KERNELS[operator]
    shape = (1, options.steps, options.heads, 64, 64)
    make = torch.Generator().manual_seed(seed)
    tensors = {n: t.cuda() for n, t in rounded(linear_inputs(operator, shape, seed, kind=kind)).items()}
    tensors["initial_state"] = (torch.randn(1, options.heads, 64, 64, generator=make) * 0.1).cuda()
    do = torch.randn(1, options.steps, options.heads, 64, generator=make).bfloat16().cuda()
    found = run(getattr(import_module(module), name), tensors, do, names)
    torch.cuda.synchronize()
    capture = LinearCapture.from_tensors(operator, {**tensors, "do": do, **found}, kernel=f"fla {name}")
    capture.save(options.out / f"{operator}_{kind}_{seed}.safetensors")
    return capture


def judged(capture: LinearCapture, name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Its verdict, kept and printed."""
    begun = time.perf_counter()
    verdict = inspect_linear(capture)
    seconds = time.perf_counter() - begun
    (options.out / f"{name}.json").write_text(verdict.to_json())
    head = [q for h in verdict.heads for q in h.quantities]
    by_name = {n: [q for q in head if q.quantity == n] for n in dict.fromkeys(q.quantity for q in head)}
    rows: dict[str, dict[str, Any]] = {
        n: {
            "answers": sorted({q.answer for q in qs}),
            "causes": sorted({str(q.cause) for q in qs if q.cause}),
            "factor": [q.factor for q in qs],
            "relative_error": [q.relative_error for q in qs],
        }
        for n, qs in by_name.items()
    }
    print(f"{name}: {verdict.sentence} ({seconds:.1f} s)", flush=True)
    for n, row in rows.items():
        worst = max((f for f in row["factor"] if f is not None), default=float("nan"))
        error = max((f for f in row["relative_error"] if f is not None), default=float("nan"))
        print(
            f"    {n:15} {'/'.join(row['answers']):12} factor {worst:.3g}, off {error:.2e} {row['causes'] or ''}",
            flush=True,
        )
    return {"sentence": verdict.sentence, "labels": sorted(verdict.labels), "quantities": rows, "seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--operators", nargs="*", default=list(KERNELS))
    parser.add_argument("--kinds", nargs="*", default=["normal", LONG])
    parser.add_argument("--steps", type=int, default=1024)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--judge", action="store_true", help="judge the captures that are there")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.judge:
        found = {p.stem: judged(load_linear(p), p.stem, options) for p in sorted(options.out.glob("*.safetensors"))}
        save(made_by() | found, options.out / "summary.json")
        return
    lift_the_refusal()
    summary: dict[str, Any] = {"torch": torch.__version__, "device": torch.cuda.get_device_name()}
    for operator in options.operators:
        for kind in options.kinds:
            for seed in range(options.seeds):
                try:
                    name = f"{operator}_{kind}_{seed}"
                    summary[name] = judged(captured(operator, kind, seed, options), name, options)
                except Exception as error:
                    summary[name] = {"raised": f"{type(error).__name__}: {error}"}
                    print(f"{operator} {kind} {seed}: {type(error).__name__}: {error}", flush=True)
                (options.out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")


if __name__ == "__main__":
    main()
