"""What ``attn-diag invariance`` finds of kernels that people run: SDPA's backends, FlexAttention, ``varlen_attn``, this
project's own, and, where they are installed, FlashAttention-4 and SageAttention.

Each call is a process of its own, several at a time, as a kernel may end its process.

    python benchmarks/study_invariance.py --json benchmarks/results/invariance_h200.json
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import product
from pathlib import Path
from typing import Any

from measuring import made_by, options_of, save

from attn_diag.testing.libraries import LIBRARIES
from attn_diag.testing.replaying.replay import version_of

CALLS = list(
    product(
        ("none", "top-left"),
        ("3,4,333,64", "2,4,512,128"),
    )
)
# The processes run side by side.
ALONE = os.environ | {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
# How much a status tells, the least first.
STATUSES = ("same", "not-run", "refused", "unsteady", "rounding", "allowed", "bits", "fault")


def call(kernel: str, causal: str, shape: str, device: str, limit: float) -> dict[str, Any]:
    """The report of one call, or how its process ended."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "found.json")
        options = ["--causal", causal, "--shape", shape, "--device", device, "--json", str(file), "--plain"]
        command = [sys.executable, "-m", "attn_diag", "invariance", kernel, *options]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False, env=ALONE)
        except subprocess.TimeoutExpired:
            return {"ended": f"not within {limit:g} s", "seconds": limit}
        took = {"seconds": round(time.monotonic() - started, 1)}
        if not file.exists():
            return took | {"ended": (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1][:300]}
        return took | summary(json.loads(file.read_text(encoding="utf-8")))


def summary(found: dict[str, Any]) -> dict[str, Any]:
    """The outcome, and of each arrangement the gravest status with the largest differences."""
    arrangements: dict[str, dict[str, Any]] = {}
    for path in found["paths"]:
        mine = arrangements.setdefault(
            path["arrangement"], {"status": "same", "paths": 0, "moved": {}, "schedules": []}
        )
        mine["paths"] += 1
        if STATUSES.index(path["status"]) > STATUSES.index(mine["status"]):
            mine |= {"status": path["status"], "words": path["words"]}
        if path["schedule"] is not None and path["schedule"] not in mine["schedules"]:
            mine["schedules"].append(path["schedule"])
        for difference in path["differences"]:
            if difference["differing"]:
                of = mine["moved"].setdefault(difference["quantity"], {"max_ulp": 0.0, "of_noise": 0.0})
                for name in of:
                    of[name] = max(of[name], difference[name] or 0.0)
    whole = ("outcome", "headline", "notes", "schedule", "errors")
    return {name: found[name] for name in whole} | {"arrangements": arrangements}


def main() -> None:
    """Run every kernel in every call and print the headlines."""
    parser = options_of(__doc__, device="cuda")
    parser.add_argument("--kernels", nargs="*", default=[n for n in LIBRARIES if version_of(n) is not None])
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--limit", type=float, default=300.0, metavar="SECONDS", help="of one call")
    options = parser.parse_args()
    todo = [(kernel, causal, shape) for kernel, (causal, shape) in product(options.kernels, CALLS)]
    made, rows = made_by(options.device), []
    with ThreadPoolExecutor(options.processes) as pool:
        running = {pool.submit(call, *one, options.device, options.limit): one for one in todo}
        for done in as_completed(running):
            kernel, causal, shape = running[done]
            result = done.result()
            rows.append({"kernel": kernel, "version": version_of(kernel), "causal": causal, "shape": shape} | result)
            said = f"{result['outcome']}: {result['headline']}" if "outcome" in result else result["ended"]
            print(f"{kernel:26} {causal:9} {shape:12} {result['seconds']:5.0f} s {said}", flush=True)
            save(
                {**made, "rows": sorted(rows, key=lambda r: todo.index((r["kernel"], r["causal"], r["shape"])))},
                options.json,
            )


if __name__ == "__main__":
    main()
