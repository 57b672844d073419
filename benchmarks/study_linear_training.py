"""Models of linear attention trained under the monitor: healthy ones in peace, a planted defect alarmed.

    pip install fla-core==0.6.0 einops
    python benchmarks/study_linear_training.py [--steps 300] [--every 10] [--only kda …] [--json FILE]

A model of each operator has two layers: the first calls flash-linear-attention's naive operator (of Mamba-2, which has
none, a recurrence in torch), the second an emulated chunked kernel with chunks of 32. Defects begin in the second
layer in the middle of a run.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from linear_models import OPERATORS, LinearModel, chunked, train

from attn_diag import Monitor
from attn_diag.kernels.linear_recipe import LinearRecipe

HEALTHY = LinearRecipe(chunk=32)
DEFECTS: dict[str, tuple[LinearRecipe, dict[str, bool]]] = {
    "state_bf16_every_step": (LinearRecipe(chunk=1, operands="fp32", state="bf16"), {}),
    "decay_bf16_every_step": (HEALTHY, {"coarse": True}),
    "no_decay_gradient": (HEALTHY, {"drop": True}),
    # A kernel that rounds its products' operands has about as much error already.
    "state_bf16_between_chunks": (LinearRecipe(chunk=32, state="bf16"), {}),
    "exponentials_bf16": (LinearRecipe(chunk=32, decay="bf16"), {}),
}


class Kernels:
    """What the second layer's kernel does now, under fla's name of it."""

    def __init__(self, operator: str) -> None:
        self.recipe, self.faults = HEALTHY, dict[str, bool]()
        self.module = sys.modules["fla.ops.emulated"] = ModuleType("fla.ops.emulated")

        def kernel(
            q: Tensor, k: Tensor, v: Tensor, g: Any = None, beta: Any = None, a: Any = None, b: Any = None,
            dt: Any = None, A: Any = None,
        ) -> Tensor:  # fmt: skip
            given = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "a": a, "b": b, "dt": dt, "A": A}
            return chunked(operator, {n: t for n, t in given.items() if t is not None}, self.recipe, **self.faults)

        self.name = f"chunk_{operator}"
        kernel.__name__ = self.name
        setattr(self.module, self.name, kernel)

    def __call__(self, x: dict[str, Tensor]) -> Tensor:
        made: Tensor = getattr(self.module, self.name)(**x)
        return made


def ssd_recurrence(C: Tensor, B: Tensor, x: Tensor, dt: Tensor, A: Tensor) -> Tensor:
    """Mamba-2's, in fp32."""
    q, k, v = (t.float() for t in (C, B, x))
    state, outs = q.new_zeros(*q.shape[::2], q.shape[3], v.shape[3]), []
    for t in range(q.shape[1]):
        write = k[:, t, :, :, None] * (v[:, t] * dt[:, t, :, None])[:, :, None]
        state = state * (dt[:, t] * A).exp()[..., None, None] + write
        outs.append((q[:, t, :, :, None] * state).sum(2))
    return torch.stack(outs, 1).to(x.dtype)


def naive_recurrent_rwkv7(r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """fla's naive recurrence of diagonal plus low rank, in RWKV-7's layout and with its scale."""
    recurrence = import_module("fla.ops.generalized_delta_rule.dplr.naive").dplr_recurrence
    r, w, k, v, a, b = (t.transpose(1, 2) for t in (r, w, k, v, a, b))
    o: Tensor = recurrence(r.float() * r.shape[3] ** 0.5, k, v, a, b, w)[0]
    return o.transpose(1, 2).to(v.dtype)


def naive(operator: str) -> tuple[Callable[[dict[str, Tensor]], Tensor], dict[str, Callable[..., Any]]]:
    """The first layer's kernel, and what the monitor must be told of it."""
    here = sys.modules[__name__]
    if operator == "mamba2":
        call = lambda x: here.ssd_recurrence(x["q"], x["k"], x["v"], x["dt"], x["A"])  # noqa: E731
        return call, {"mamba2": ssd_recurrence}
    if operator == "rwkv7":
        return (
            lambda x: here.naive_recurrent_rwkv7(x["q"], x["g"], x["k"], x["v"], x["a"], x["b"]),
            {"rwkv7": naive_recurrent_rwkv7},
        )
    module = import_module(f"fla.ops.{operator}.naive")
    name = f"naive_recurrent_{operator}"
    renamed = {"g": "gk"} if operator == "gla" else {}
    return lambda x: getattr(module, name)(**{renamed.get(n, n): t for n, t in x.items()})[0], {}


def run(operator: str, defect: str | None, steps: int, every: int, seed: int) -> dict[str, Any]:
    """One training run, monitored."""
    torch.manual_seed(seed)
    kernels = Kernels(operator)
    first, functions = naive(operator)
    model = LinearModel(operator, [first, kernels])

    def at(step: int) -> None:
        if defect is not None and step == steps // 2:
            kernels.recipe, kernels.faults = DEFECTS[defect]

    begun = time.perf_counter()
    with Monitor(model, every, functions=functions) as monitor:
        loss = train(model, steps, batch=1, at=at)
        monitor.metrics(wait=True)
    factors = {
        f"layer{layer.layer}": {
            name.removesuffix("_factor"): round(max(float(c.values[name].max()) for c in _of(monitor, layer.layer)), 3)
            for name in layer.values if name.endswith("_factor")
        }
        for layer in monitor.history[-1].layers
    }  # fmt: skip
    return {
        "loss": round(loss, 4), "checks": len(monitor.history), "layers": len(monitor.history[-1].layers),
        "largest_factors": factors, "seconds": round(time.perf_counter() - begun),
        "alarms": [{"step": a.step, "layer": a.layer, "head": a.head, "kind": a.kind, "why": a.reason}
                   for a in monitor.alarms],
    }  # fmt: skip


def _of(monitor: Monitor, layer: int) -> list[Any]:
    return [one for check in monitor.history for one in check.layers if one.layer == layer]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", default=OPERATORS)
    parser.add_argument("--defects", nargs="*", default=[None, *DEFECTS], help="none: healthy")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    table: dict[str, Any] = {"versions": {n: version(n) for n in ("torch", "fla-core")}, "steps": options.steps}
    for defect in (None if d == "none" else d for d in options.defects):
        for operator in options.only:
            steps = options.steps if defect is None else min(options.steps, 80)
            found = run(operator, defect, steps, options.every, options.seed)
            table.setdefault(operator, {})[str(defect)] = found
            alarms = [(a["step"], a["layer"], a["kind"]) for a in found["alarms"]]
            print(
                f"{operator}, {defect}: {steps} steps, {found['seconds']} s, loss {found['loss']}, {alarms}", flush=True
            )
            print(f"    {found['largest_factors']}", flush=True)
            if options.json is not None:
                options.json.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
