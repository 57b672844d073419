"""Linear attention judged: planted defects found and named, healthy kernels left in peace.

    python benchmarks/study_linear.py [--seeds 40] [--first 0] [--steps 128] [--json FILE]

Per seed one head of a kernel, its operator in turn: RWKV-7, gated delta rule, KDA, GLA, simple GLA; decays of trained
models. Defective: recurrent in float64 with one defect (tests/linear_kernels.py). Healthy: the same without, and an
emulated chunked kernel with chunks of 16, 32, 64 and 128, BF16 and FP16.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from linear_kernels import DEFECTS, observed

from attn_diag.analyses.linear.inspect import inspect_linear
from attn_diag.captures.linear import LinearCapture
from attn_diag.head.linear import LinearRun
from attn_diag.results.linear import LinearDiagnosis
from attn_diag.testing.linear.inputs import KINDS, LONG, linear_inputs, rounded

OPERATORS = ("rwkv7", "gated_delta_rule", "kda", "gla", "simple_gla")
RIGHT = {
    "state_bf16": ("state_step", "state"), "decay_bf16": ("decay_step", "decay"), "boundary": ("boundary_write",),
    "no_inter_chunk": ("no_inter_chunk",), "no_initial_state": ("no_initial_state",), "no_decay_gradient": ("zero",),
}  # fmt: skip
ACCUSED = {"nonfinite", "wrong", "lossy", "biased"}


def inputs_of(
    operator: str, seed: int, steps: int, kind: str, dtype: torch.dtype = torch.bfloat16
) -> tuple[dict[str, Tensor], Tensor]:
    make = torch.Generator().manual_seed(seed)
    tensors = rounded(linear_inputs(operator, (1, steps, 1, 32, 32), seed, kind=kind), dtype)
    tensors["initial_state"] = torch.randn(1, 1, 32, 32, generator=make) * 0.3
    return tensors, torch.randn(1, steps, 1, 32, generator=make).to(dtype)


def defective(operator: str, seed: int, steps: int, defect: str | None) -> LinearDiagnosis:
    tensors, do = inputs_of(operator, seed, steps, LONG)
    scale = LinearCapture(operator, tensors).call.used_scale
    found = observed(tensors, do, scale=scale, defect=defect)
    return inspect_linear(LinearCapture(operator, {**tensors, "do": do, **found}))


def healthy(operator: str, seed: int, steps: int, chunk: int, dtype: torch.dtype) -> LinearDiagnosis:
    kind = [LONG, *(k for k in KINDS if k not in ("growing", "mixed_sizes"))][seed % 6]
    tensors, do = inputs_of(operator, seed, steps, kind, dtype)
    run = LinearRun(LinearCapture(operator, {**tensors, "do": do}), torch.device("cpu"))
    # Other products than the counterfactual's: what is handed on between them in fp32, or not.
    recipe = replace(run.recipe, chunk=chunk, stored="fp32" if seed % 2 else None)
    kept = {}
    for name, value in run.emulated(recipe).items():
        like = dtype if name == "o" else torch.float32 if name == "final_state" else tensors[name[1:]].dtype
        kept[name] = value.to(like)
    return inspect_linear(LinearCapture(operator, {**tensors, "do": do, **kept}))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=40)
    parser.add_argument("--first", type=int, default=0, help="The first seed.")
    parser.add_argument("--steps", type=int, default=128)
    parser.add_argument("--only", nargs="*", help="These defects alone.")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    table: dict[str, dict[str, Any]] = {}
    for defect in options.only or (None, *DEFECTS):
        begun, counts, missed = time.perf_counter(), Counter[str](), dict[int, Any]()
        for seed in range(options.first, options.first + options.seeds):
            operator = OPERATORS[seed % len(OPERATORS)]
            found = defective(operator, seed, options.steps, defect)
            causes = {f.cause for f in found.findings if f.label in ACCUSED}
            counts["found"] += bool(found.labels & ACCUSED)
            counts["named"] += bool(causes & {*RIGHT.get(str(defect), ())})
            counts["misnamed"] += bool(causes - {*RIGHT.get(str(defect), ()), None})
            if defect is not None and not found.labels & ACCUSED:
                quantities = found.captures[0].observations[0].heads[0].quantities
                missed[seed] = [operator, max(q.factor or 0.0 for q in quantities)]
                print(f"missed: {defect} of {operator}, seed {seed}: {missed[seed][1]:.3g} times at most", flush=True)
        table[str(defect)] = {**counts, "missed": missed}
        print(f"{defect}: {dict(counts)} of {options.seeds}, {time.perf_counter() - begun:.0f} s", flush=True)
    counts = Counter[str]()
    for seed in range(options.first, options.first + 2 * options.seeds):
        operator, chunk = OPERATORS[seed % len(OPERATORS)], (16, 32, 64, 128)[seed % 4]
        found = healthy(operator, seed, options.steps, chunk, torch.float16 if seed % 3 == 2 else torch.bfloat16)
        counts["accused"] += bool(found.labels & ACCUSED)
        counts["undecided"] += "undecided" in found.labels
        counts["clean"] += found.labels == {"clean"}
        for finding in found.findings:
            if finding.label in ACCUSED:
                print(f"accused: {operator}, chunk {chunk}, seed {seed}: {finding.words}")
    table["healthy"] = dict(counts)
    print(f"healthy chunked: {dict(counts)} of {2 * options.seeds}")
    if options.json is not None:
        options.json.write_text(json.dumps(table, indent=2) + "\n")


if __name__ == "__main__":
    main()
