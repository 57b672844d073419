"""Whether what ``attn-diag mismatch`` predicts of a repair is what is left when the repair is done.

Random models of three layers (``mismatch_runs``): the difference of log-probabilities is explained, every repair of the
list is carried out on the engine (or, FP16, on both), and the rms difference of the sampled tokens is measured again.

    python benchmarks/study_mismatch_repairs.py --seeds 6 --json benchmarks/results/mismatch_repairs_cpu.json
"""

from __future__ import annotations

import argparse
import copy
import math
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from measuring import made_by, save
from mismatch_runs import (  # fmt: skip
    FAULTS,
    LAYERS,
    LAYOUTS,
    PROMPT,
    Engine,
    Kernel,
    both_runs,
    engines,
    logprobs,
    rollout,
    tokens_of,
    train_forward,
)
from torch import Tensor

import attn_diag
from attn_diag.analyses.mismatch.repairs import FP16, SAME_KERNEL

WITHIN = 1.5


def done(what: str, seed: int, fault: str | None, layer: int, layout: str) -> float:
    """The rms difference of the sampled tokens' log-probabilities once the repair is done."""
    train, other = engines(seed, fault, layer, dtype=torch.float16 if what == FP16 else torch.bfloat16)
    if what == SAME_KERNEL:
        # What the kernels compute stays; how they split and round is the trainer's.
        _use(other, [replace(kernel, split=None, lse=torch.float32) for kernel in other.kernels])
    elif what != FP16:
        other = _repaired(train, other)
    ids = tokens_of(seed)
    train.hidden, other.hidden = train_forward(train, ids), rollout(other, ids, layout)
    return _rms(logprobs(other, ids) - logprobs(train, ids))


def _use(engine: Engine, kernels: list[Kernel]) -> None:
    engine.kernels = kernels
    for block, kernel in zip(engine.model.model.layers, kernels, strict=True):
        block.self_attn.planted = kernel


def _repaired(train: Engine, other: Engine) -> Engine:
    """The trainer's model under the engine's schedule."""
    model = copy.deepcopy(train.model)
    for block, theirs in zip(model.model.layers, train.model.model.layers, strict=True):
        # A copied partial still calls the trainer's module.
        forward = theirs.self_attn.forward
        block.self_attn.forward = partial(type(block.self_attn).forward, block.self_attn, **forward.keywords)
    fixed = Engine(model, [])
    _use(fixed, [Kernel(split=kernel.split) for kernel in other.kernels])
    return fixed


def _rms(apart: Tensor) -> float:
    return math.sqrt(float(apart.detach()[:, PROMPT - 1 :].square().mean()))


def case(seed: int, fault: str | None) -> list[dict[str, Any]]:
    """Every repair of one pair of runs."""
    layer, layout = seed % LAYERS, LAYOUTS[seed // LAYERS % len(LAYOUTS)]
    with tempfile.TemporaryDirectory() as folder:
        train, other, given, (a, b) = both_runs(seed, fault, layer, layout, Path(folder))
        assert a.hidden is not None
        assert b.hidden is not None
        mask = torch.zeros(given[0].shape)
        mask[:, PROMPT - 1 :] = 1
        found = attn_diag.explain_logprobs(
            a.model, tokens_of(seed), train, other, logprobs=given, mask=mask, hidden=(a.hidden, b.hidden)
        )
    before = _rms(given[1] - given[0])
    return [
        {
            "seed": seed, "fault": fault, "layer": layer, "layout": layout, "repair": repair.what, "before": before,
            "predicted": repair.left, "done": done(repair.what, seed, fault, layer, layout),
        }
        for repair in found.repairs
    ]  # fmt: skip


def _told(mine: list[dict[str, Any]]) -> str:
    """Done over predicted, of each seed and of the rms over all seeds; both 0 is as predicted."""
    ratios = [one["done"] / one["predicted"] if one["predicted"] else 1.0 + one["done"] / 1e-12 for one in mine]
    within = sum(1 / WITHIN <= ratio <= WITHIN for ratio in ratios)
    before, predicted, left = (
        math.sqrt(sum(one[name] ** 2 for one in mine) / len(mine)) for name in ("before", "predicted", "done")
    )
    pooled = f"rms {before:.4f}, {predicted:.4f} predicted, {left:.4f} left"
    return f"within {WITHIN} in {within}/{len(mine)}, {min(ratios):.2f} to {max(ratios):.2f}; {pooled}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--faults", nargs="*", default=["none", *FAULTS])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    started = time.monotonic()
    cases: list[dict[str, Any]] = []
    for fault in options.faults:
        mine = [one for seed in range(options.seeds) for one in case(seed, None if fault == "none" else fault)]
        cases += mine
        for what in dict.fromkeys(one["repair"] for one in mine):
            print(f"{fault:9} {what}: {_told([one for one in mine if one['repair'] == what])}", flush=True)
    if options.json is not None:
        save(
            {**made_by(), "seconds": round(time.monotonic() - started), "within": WITHIN, "cases": cases}, options.json
        )


if __name__ == "__main__":
    main()
