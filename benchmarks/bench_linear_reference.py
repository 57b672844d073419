"""The float64 reference of linear attention against mpmath, and against fla's own naive functions where there are any.

    python benchmarks/bench_linear_reference.py [--steps 10000] [--fla FOLDER] [--json FILE]

First: random and adversarial sequences of 100 steps a setting; per setting the largest error over its proven bound (of
o, the last state and every gradient), and the least part of the elements that has a bound. FOLDER is one into which
flash-linear-attention was installed (``pip install --no-deps --target FOLDER fla-core einops``); its naive functions
run in fp32, so they may part from float64 by fp32's rounding, some 1e-6.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from test_linear_reference import largest_ratio

from attn_diag.reference.linear import LINEAR_OPERATORS, LinearCall, linear_reference
from attn_diag.testing.linear.inputs import KINDS, linear_inputs

LENGTH = 100


SETTINGS: tuple[tuple[str, dict[str, bool]], ...] = (
    *((operator, {}) for operator in LINEAR_OPERATORS),
    ("kda", {"l2norm": True}), ("gated_delta_rule", {"l2norm": True}), ("linear_attn", {"normalize": True}),
)  # fmt: skip
"""Every operator, and those that have a normalisation with it."""


def against_mpmath(steps: int) -> dict[str, dict[str, float]]:
    table = {}
    for operator, options in SETTINGS:
        named = " ".join([operator, *options])
        begun, worst, known = time.perf_counter(), 0.0, 1.0
        for seed in range(-(-steps // LENGTH)):
            tensors = linear_inputs(operator, (1, LENGTH, 1, 3, 2), seed, kind=KINDS[seed % len(KINDS)])
            tensors["initial_state"] = torch.randn(1, 1, 3, 2, generator=torch.Generator().manual_seed(seed))
            ratio, part = largest_ratio(operator, tensors, seed=seed, **options)
            worst, known = max(worst, ratio), min(known, part)
        seconds = time.perf_counter() - begun
        print(f"{named}: {worst:.3f} of the bound, {known:.1%} of the elements bounded, {seconds:.0f} s", flush=True)
        steps_made = -(-steps // LENGTH) * LENGTH
        table[named] = {"steps": steps_made, "largest_of_bound": worst, "least_part_bounded": known}
    return table


def naive(folder: Path, name: str) -> Any:
    """One module of fla's naive functions, without importing fla (which wants a GPU)."""
    spec = importlib.util.spec_from_file_location(
        f"naive_{name.replace('/', '_')}", folder / "fla" / "ops" / name / "naive.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def against_fla(folder: Path) -> dict[str, dict[str, float]]:
    sys.path.insert(0, str(folder))
    modules = {
        n: naive(folder, n) for n in ("kda", "gated_delta_rule", "delta_rule", "gla", "simple_gla", "linear_attn")
    }
    modules["dplr"] = naive(folder, "generalized_delta_rule/dplr")
    modules["retention"] = naive(folder, "retention")

    def heads_first(f: Any, *names: str) -> Any:
        def call(x: dict[str, Tensor]) -> Any:
            found = f(*(x[n].transpose(1, 2) for n in names))
            found = found if isinstance(found, tuple) else (found, None)
            return found[0].transpose(1, 2), found[1]

        return call

    m, final = modules, {"output_final_state": True}
    functions: dict[str, Any] = {
        "kda": lambda x: m["kda"].naive_recurrent_kda(**x, **final),
        "gated_delta_rule": lambda x: m["gated_delta_rule"].naive_recurrent_gated_delta_rule(**x, **final),
        "gla": lambda x: m["gla"].naive_recurrent_gla(x["q"], x["k"], x["v"], x["g"], **final),
        "simple_gla": lambda x: m["simple_gla"].naive_recurrent_simple_gla(**x),
        "linear_attn": lambda x: m["linear_attn"].naive_recurrent_linear_attn(**x, **final),
        "delta_rule": heads_first(m["delta_rule"].delta_rule_recurrence, "q", "k", "v", "beta"),
        "dplr": heads_first(m["dplr"].dplr_recurrence, "q", "k", "v", "a", "b", "g"),
        "retention": heads_first(m["retention"].naive_retention, "q", "k", "v"),
    }
    table = {}
    for operator, function in functions.items():
        leaves = {n: t.requires_grad_() for n, t in linear_inputs(operator, (2, 100, 3, 16, 8), 0).items()}
        make = torch.Generator().manual_seed(0)
        do, dfinal = torch.randn(2, 100, 3, 8, generator=make), torch.randn(2, 3, 16, 8, generator=make)
        o, state = function(leaves)
        loss = (o * do).sum() + (0 if state is None else (state * dfinal).sum())
        gradients = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
        inputs = {n: t.detach() for n, t in leaves.items()}
        call = LinearCall(LINEAR_OPERATORS[operator], inputs)
        true = linear_reference(call, do, None if state is None else dfinal).values
        observed = {"o": o, **{f"d{n}": g for n, g in gradients.items()}}
        apart = {n: float((x.detach() - true[n]).norm() / true[n].norm()) for n, x in observed.items()}
        print(f"{operator} beside fla: {', '.join(f'{n} {a:.1e}' for n, a in apart.items())}")
        table[operator] = apart
    return table


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--fla", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = {} if options.fla is None else {"beside_fla": against_fla(options.fla)}
    found["against_mpmath"] = against_mpmath(options.steps)
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=2) + "\n")
