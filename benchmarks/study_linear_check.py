"""``check_linear`` on functions that others wrote: whole, and with faults planted in their text.

    python benchmarks/study_linear_check.py [--seeds 10] [--first 0] [--only healthy delta mamba] [--fla FOLDER]
        [--json FILE]

Hugging Face's gated delta rule (chunked, recurrent) and Mamba-2 in plain torch, flash-linear-attention's naive
functions (of FOLDER, as for ``bench_linear_reference.py``), and the emulated kernel; healthy ones with every seed and
format, planted faults (``tests/planted_linear.py``) with every seed. Found: the check fails. Named: a failure's cause
is the fault's. Misnamed: another is named.
"""

from __future__ import annotations

import argparse
import inspect
import json
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from bench_linear_reference import naive
from planted_linear import DELTA_RULE, MAMBA, Fault, foreign, planted

import attn_diag
from attn_diag.analyses.linear.words import CAUSES
from attn_diag.results.check import CheckReport


def causes(report: CheckReport) -> set[str]:
    """What is named, by its key."""
    said = {f.suspect for f in report.failures} - {None}
    found = {name for name, words in CAUSES.items() if words in said}
    return found | {q.cause for c in report.cases for q in c.linear if q.answer == "wrong" and q.cause}


def healthy(folder: Path | None) -> dict[str, tuple[str, Callable[..., Any] | str]]:
    from transformers.models.qwen3_next import modeling_qwen3_next as qwen

    found: dict[str, tuple[str, Callable[..., Any] | str]] = {
        "transformers, chunked gated delta rule": ("gated_delta_rule", foreign("gated_delta_rule")),
        "transformers, recurrent gated delta rule": (
            "gated_delta_rule", inspect.unwrap(qwen.torch_recurrent_gated_delta_rule),
        ),
        "transformers, Mamba-2": ("mamba2", foreign("mamba2")),
    }  # fmt: skip
    found |= {f"emulated {operator}": (operator, "recipe") for operator in ("rwkv7", "kda", "retention", "dplr")}
    found["emulated gla, chunks of 16"] = "gla", "recipe:16"
    if folder is not None:
        sys.path.insert(0, str(folder))
        modules = {n: naive(folder, n) for n in ("kda", "gated_delta_rule", "gla", "simple_gla")}
        found |= {
            "fla, recurrent KDA": ("kda", modules["kda"].naive_recurrent_kda),
            "fla, chunked KDA": ("kda", modules["kda"].naive_chunk_kda),
            "fla, chunked gated delta rule": (
                "gated_delta_rule", modules["gated_delta_rule"].naive_chunk_gated_delta_rule,
            ),
            "fla, recurrent GLA": ("gla", modules["gla"].naive_recurrent_gla),
            "fla, recurrent simple GLA": ("simple_gla", modules["simple_gla"].naive_recurrent_simple_gla),
        }  # fmt: skip
    return found


def of_fault(operator: str, fault: Fault, seeds: range) -> dict[str, Any]:
    counts, function = Counter[str](), planted(operator, fault)
    named: Counter[str] = Counter()
    for seed in seeds:
        report = attn_diag.check_linear(function, operator, seed=seed)
        own = causes(report)
        named.update(own)
        counts["found"] += not report.passed
        counts["named"] += bool(own & {*fault.cause})
        counts["misnamed"] += bool(own - {*fault.cause, "zero", "factor"})
    return {**counts, "causes": dict(named), "must": list(fault.cause)}


def kept(file: Path | None, table: dict[str, Any]) -> None:
    """What is measured so far."""
    if file is not None:
        file.write_text(json.dumps(table, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--only", nargs="*", default=["healthy", "delta", "mamba"])
    parser.add_argument("--faults", nargs="*", help="These faults alone, by a part of their names.")
    parser.add_argument("--fla", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    seeds = range(options.first, options.first + options.seeds)
    table: dict[str, Any] = {"seeds": [*seeds], "healthy": {}, "planted": {}}
    for name, (operator, function) in healthy(options.fla).items() if "healthy" in options.only else ():
        begun, failures, runs = time.perf_counter(), list[str](), 0
        for seed in seeds:
            for dtype in (torch.bfloat16, torch.float16):
                report = attn_diag.check_linear(function, operator, seed=seed, dtype=dtype)
                failures += [f"seed {seed} {dtype}: {f.message}" for f in report.failures]
                runs += 1
        table["healthy"][name] = {"runs": runs, "accusations": failures}
        kept(options.json, table)
        print(f"{name}: {len(failures)} accusations in {runs} runs, {time.perf_counter() - begun:.0f} s", flush=True)
        print("".join(f"    {f}\n" for f in failures[:4]), end="", flush=True)
    for operator, faults in (("gated_delta_rule", DELTA_RULE), ("mamba2", MAMBA)):
        if {"gated_delta_rule": "delta", "mamba2": "mamba"}[operator] not in options.only:
            continue
        for fault in faults:
            if options.faults and not any(part in fault.name for part in options.faults):
                continue
            found = of_fault(operator, fault, seeds)
            table["planted"][f"{operator}: {fault.name}"] = found
            kept(options.json, table)
            print(f"{operator}: {fault.name}: {found}", flush=True)


if __name__ == "__main__":
    main()
