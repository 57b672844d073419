"""Models with attention below 16 bits trained under ``Monitor(declared=…)``: sound in peace, faults alarmed and named.

The kernels are those of ``study_declared``, plain torch that shares no code with the recipes, in both layers of a small
language model (2 heads of 32, 192 tokens). A fault begins in the second layer at step 20.

    python benchmarks/study_declared_monitor.py --json benchmarks/results/declared_monitor_cpu.json
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from measuring import made_by, options_of, save
from study_declared import DECLARED, FAULTS, HEALTHY, Plan

sys.path.append(str(Path(__file__).parent.parent / "tests"))
from declared_models import DeclaredModel, train

from attn_diag import Monitor

FAULTY_STEPS, BEGINS, EVERY = 60, 20, 10


def monitored(sound: Plan, fault: Plan | None, seed: int, steps: int) -> Mapping[str, Any]:
    """One run, with a fault or none."""
    torch.manual_seed(seed)
    model = DeclaredModel(sound)

    def at(step: int) -> None:
        if fault is not None and step == BEGINS:
            model.change(1, fault)

    begun = time.perf_counter()
    with Monitor(model, EVERY, declared=DECLARED[sound.form]) as monitor:
        loss = train(model, steps, at=at)
        monitor.metrics(wait=True)
    factors: dict[str, float] = {}
    for layer in (layer for check in monitor.history for layer in check.layers):
        for name, values in layer.values.items():
            if name.endswith("_factor") and layer.layer == 0:
                factors[name] = max(factors.get(name, 0.0), round(float(values.max()), 3))
    return {
        "seed": seed, "steps": steps, "checks": len(monitor.history), "loss": round(loss, 3),
        "seconds": round(time.perf_counter() - begun), "largest factors of the first layer": factors,
        "alarms": [{"step": a.step, "layer": a.layer, "head": a.head, "kind": a.kind, "why": a.reason}
                   for a in monitor.alarms],
    }  # fmt: skip


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--steps", type=int, default=200, help="of sound runs")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--only", default="", help="names that hold this; other rows of the file stay")
    parser.add_argument("--processes", type=int, default=1)
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    if arguments.json and arguments.json.exists():
        rows = [r for r in json.loads(arguments.json.read_text())["rows"] if arguments.only not in r["name"]]
    runs: dict[str, tuple[Plan, Plan | None, int]] = {
        f"sound, {name}": (plan, None, arguments.steps) for name, plan in HEALTHY.items()
    }
    runs |= {f"fault, {name}": (Plan(plan.form), plan, FAULTY_STEPS) for name, plan in FAULTS.items()}
    with ProcessPoolExecutor(arguments.processes, get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        calls = [
            (name, pool.submit(monitored, sound, fault, seed, steps))
            for name, (sound, fault, steps) in runs.items() if arguments.only in name
            for seed in range(arguments.seeds)
        ]  # fmt: skip
        for name, call in calls:
            found = call.result()
            rows.append({"name": name, **found})
            alarms = [(a["step"], a["layer"], a["head"], a["kind"]) for a in found["alarms"]]
            print(f"{name}: {found['checks']} checks, {found['seconds']} s, loss {found['loss']}, {alarms}", flush=True)
            for why in sorted({a["why"] for a in found["alarms"]})[:2]:
                print(f"    {why}", flush=True)
            save(made_by() | {"every": EVERY, "rows": rows}, arguments.json)


if __name__ == "__main__":
    main()
