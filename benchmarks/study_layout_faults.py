"""Faults of packed sequences, sinks, ALiBi, dropout, latents, pages on new seeds: wrong, by name? And healthy calls?

The faults are those of the tests (tests/planted_*.py and the tables in test_packed.py, test_sinks_faults.py,
test_alibi_faults.py, test_dropout_faults.py and test_latent.py), on seeds that no test and nobody while building has
used.

    python benchmarks/study_layout_faults.py --seeds 40 --json benchmarks/results/layout_faults_cpu.json
    python benchmarks/study_layout_faults.py --only "pages: " --json …      # these alone; other rows of the file stay
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from measuring import made_by, options_of, save

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
import planted_dropouts
import planted_pages
import planted_sinks
import planted_slopes
import test_alibi_faults as alibi
import test_dropout_faults as dropout
import test_latent as latent
import test_packed as packed
import test_sinks_faults as sinks
import torch
from builders import rounded_inputs

import attn_diag

# What one seed gives: the diagnosis' heads, which of them hold the fault, and the words (a pattern) that name it.
Case = Callable[[int], tuple[Any, str]]


def of_documents(fault: str, causal: bool, seed: int) -> tuple[Any, str]:
    lengths, words, _ = packed.FAULTS[fault]
    inputs = {n: t for n, t in rounded_inputs(1, 128, seed=seed).items() if n in ("q", "k", "v")}
    outputs = packed.computed(inputs, lengths(seed), causal=causal)
    ends = packed.borders(packed.drawn(seed)[1])
    c = packed.capture({**inputs, **outputs, "cu_seqlens": ends}, causal="top-left" if causal else "none")
    return attn_diag.inspect_captures([c], device="cpu").captures[0], words


def of_sinks(fault: str, seed: int) -> tuple[Any, str]:
    call, masking = sinks.setting(seed)
    if fault == "healthy":
        return sinks.inspected(call, planted_sinks.computed(call, call.sinks, call.sinks, masking), masking), ""
    if fault in sinks.GRADIENTS:
        change, words = sinks.GRADIENTS[fault]
        outputs = planted_sinks.computed(call, call.sinks, call.sinks, masking)
        return sinks.inspected(call, {**outputs, "dsinks": change(outputs["dsinks"])}, masking), re.escape(words)
    forward, backward, words = sinks.FORWARD[fault]
    made = forward(call.sinks)
    outputs = planted_sinks.computed(call, made, made if backward is None else backward(call.sinks), masking)
    kept = {n: t for n, t in outputs.items() if n != "dsinks"}
    return sinks.inspected(call, kept, masking), re.escape(words)


def of_slopes(fault: str, seed: int) -> tuple[Any, str]:
    call, masking, origin = alibi.setting(seed)
    if fault == "healthy":
        outputs = planted_slopes.computed(call, call.slopes, call.slopes, masking, origin=origin)
        return alibi.inspected(call, outputs, masking, origin), ""
    forward, backward, words = alibi.FORWARD[fault]
    made = forward(call.slopes)
    other = made if backward is None else backward(call.slopes)
    outputs = planted_slopes.computed(call, made, other, masking, origin=origin)
    return alibi.inspected(call, outputs, masking, origin), re.escape(words)


def of_dropout(fault: str, seed: int) -> tuple[Any, str]:
    call, masking = dropout.setting(seed)
    if fault == "healthy":
        return dropout.inspected(call, planted_dropouts.computed(call, masking), masking), ""
    forward, backward, options, words = dropout.FAULTS[fault]
    outputs = planted_dropouts.computed(call, masking, forward, backward, **options)
    return dropout.inspected(call, outputs, masking), re.escape(words)


def of_latents(fault: str, seed: int) -> tuple[Any, str]:
    call = latent.drawn(seed, heads=1 + seed % 4, rows=64 + 32 * (seed % 3))
    dk, dv = call.dk, latent.padded(call.dv, call.dk)
    change, words = latent.FAULTS[fault] if fault != "healthy" else (torch.add, "")
    return latent.inspected(call, change(dk, dv)), re.escape(words)


def of_pages(fault: str, rows: int, seed: int) -> tuple[Any, str]:
    if fault == "healthy":
        cache = planted_pages.drawn(seed, rows=rows)
        captures, words = [cache.capture(cache.outputs())], ""
    else:
        captures, words = planted_pages.planted(fault, seed, rows)
    return attn_diag.inspect_captures(captures, device="cpu").captures[0], re.escape(words)


def cases() -> Iterator[tuple[str, Case]]:
    """By name; the healthy ones are "healthy"."""
    for causal in (True, False):
        for fault in packed.FAULTS:
            yield f"documents{'' if causal else ', not causal'}: {fault}", partial(of_documents, fault, causal)
    for fault in ("healthy", *sinks.FORWARD, *sinks.GRADIENTS):
        gradient = "dSink " if fault in sinks.GRADIENTS else ""
        yield f"sinks: {gradient}{fault}", partial(of_sinks, fault)
    for fault in ("healthy", *alibi.FORWARD):
        yield f"slopes: {fault}", partial(of_slopes, fault)
    for fault in ("healthy", *dropout.FAULTS):
        yield f"dropout: {fault}", partial(of_dropout, fault)
    for fault in ("healthy", *latent.FAULTS):
        yield f"latent: {fault}", partial(of_latents, fault)
    for rows in (1, 4):
        for fault in ("healthy", *planted_pages.FAULTS):
            yield f"pages, {rows} row{'s' * (rows > 1)}: {fault}", partial(of_pages, fault, rows)


def counted(case: Case, seeds: range) -> dict[str, Any]:
    """How many are called wrong, and how many are named; of the seeds that are not, which."""
    found: dict[str, Any] = {"seeds": len(seeds), "wrong": 0, "named": 0, "other accusations": 0, "missed": []}
    for seed in seeds:
        diagnosis, words = case(seed)
        heads = diagnosis.observations[0].heads
        labels = {label for h in heads if h.verdict is not None for label in h.verdict.labels}
        said = [p.words for h in heads for q in h.quantities for p in q.patterns]
        wrong, named = "wrong" in labels, bool(words) and any(re.search(words, s) for s in said)
        found["wrong"] += wrong
        found["named"] += named
        found["other accusations"] += bool(labels & {"lossy", "biased", "nonfinite"})
        if words and not (wrong and named):
            found["missed"].append(seed)
    return found


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--seeds", type=int, default=40)
    parser.add_argument("--first", type=int, default=20000, help="the first seed")
    parser.add_argument("--only", default="", metavar="TEXT", help="rows that begin with it")
    options = parser.parse_args()
    rows: dict[str, Any] = {}
    if options.json is not None and options.json.exists():
        rows = json.loads(options.json.read_text(encoding="utf-8"))["rows"]
    for name, case in cases():
        if name.startswith(options.only):
            began = time.perf_counter()
            rows[name] = counted(case, range(options.first, options.first + options.seeds))
            print(name, rows[name], f"{time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
            save({**made_by(), "first seed": options.first, "rows": rows}, options.json)


if __name__ == "__main__":
    main()
