"""``invariance_linear`` on functions that others wrote: sound ones in every arrangement, and variants that mind one.

    python benchmarks/study_linear_invariance.py [--seeds 5] [--first 0] [--only sound variants] [--fla FOLDER]
        [--json FILE]

Sound: transformers' chunked and recurrent gated delta rule and Mamba-2, flash-linear-attention's naive functions (of
FOLDER, where it is installed), and emulated kernels. Variants (``linear_variants.py``): a recurrence in torch that
keeps, shares, skips or forgets something; each must fail in an arrangement that its fault is about.
``compiled`` is left out: it takes a minute each.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from linear_variants import VARIANTS
from measuring import made_by, save
from study_linear_check import healthy

import attn_diag
from attn_diag.testing.linear.arrangements import LINEAR_ARRANGEMENTS

ONLY = [name for name in LINEAR_ARRANGEMENTS if name != "compiled"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--only", nargs="*", default=["sound", "variants"])
    parser.add_argument("--names", nargs="*", help="parts of the names of those to run")
    parser.add_argument("--fla", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    seeds = range(options.first, options.first + options.seeds)
    table: dict[str, Any] = made_by() | {"seeds": [*seeds], "sound": {}, "variants": {}}

    def wanted(name: str) -> bool:
        return not options.names or any(part in name for part in options.names)

    for name, (operator, function) in healthy(options.fla).items() if "sound" in options.only else ():
        if not wanted(name):
            continue
        begun, failed, ran = time.perf_counter(), list[str](), Counter[str]()
        for seed in seeds:
            report = attn_diag.invariance_linear(function, operator, only=ONLY, seed=seed)
            failed += [] if report.passed else [f"seed {seed}: {report.headline}"]
            ran.update({p.status: 1 for p in report.paths})
            ran["paths"] += len(report.paths)
        table["sound"][name] = {"runs": len(seeds), "failed": failed, "paths": dict(ran)}
        took = f"{time.perf_counter() - begun:.0f} s"
        print(f"{name}: {len(failed)} of {len(seeds)} failed, {took} {failed[:2]}", flush=True)
        save(table, options.json)
    for name, (function, decoder, must) in VARIANTS.items() if "variants" in options.only else ():
        if not wanted(name):
            continue
        begun, counts, arrangements = time.perf_counter(), Counter[str](), Counter[str]()
        for seed in seeds:
            torch.manual_seed(seed)
            report = attn_diag.invariance_linear(
                function, "gated_delta_rule", only=ONLY, seed=seed, shape=(3, 2, 52, 16), name=name, recurrent=decoder
            )
            failed_in = {p.arrangement for p in report.paths if p.status in ("bits", "fault")}
            arrangements.update(failed_in)
            counts["found"] += bool(failed_in & must) if must else report.passed
            counts["first is one of them"] += bool(report.failed) and report.failed[0] in must
            counts["also in another"] += bool(failed_in - must)
        table["variants"][name] = {**counts, "must": sorted(must), "failed in": dict(arrangements)}
        print(f"{name}: {table['variants'][name]}, {time.perf_counter() - begun:.0f} s", flush=True)
        save(table, options.json)


if __name__ == "__main__":
    main()
