"""Does a verdict acquit anything broken, or accuse anything healthy? Planted defects and healthy kernels, inspected.

Every kernel is an independent plain torch attention (``verdicts.kernels``), and what a defect really did is measured
without the tool (``verdicts.effects``): per head, the largest factor of a quantity's error over the healthy kernel's
of the same schedule (or over ulp^2 / 12), and the largest of a row.

    python benchmarks/study_verdicts.py --out benchmarks/results/verdicts.json           # all; hours of one core
    python benchmarks/study_verdicts.py --defects missing_tile --families gaussian       # one, printed
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from verdicts.defects import DEFECTS, home
from verdicts.effects import Effect, effects, reference
from verdicts.inputs import FAMILIES, Inputs, draw
from verdicts.kernels import HEALTHY, Kernel, Outputs, attend

import attn_diag
from attn_diag.results.diagnosis import Diagnosis, HeadDiagnosis

# A head is broken where a quantity has this factor, or a row that, or where something is not finite.
BROKEN_FACTOR, BROKEN_ROW = 1.25, 3.0
CLEAR_FACTOR = 1.5
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_ACQUITTED = {"clean", "ill_conditioned"}
_ACCUSED = {"nonfinite", "wrong", "lossy"}


@dataclass(frozen=True)
class Judged:
    """One head: what was planted, what it did, and what was said."""

    planted: str
    """The defect's name; "healthy: " and the kernel's."""
    culprit: str
    """The defect's site or pattern."""
    inputs: str
    dtype: str
    batch: int
    head: int
    factor: float
    """The largest factor of a quantity."""
    row_factor: float
    """The largest factor of a row."""
    quantity: str
    """The quantity with that factor."""
    finite: bool
    labels: tuple[str, ...]
    """Empty: no verdict."""
    reason: str
    """The first reason."""

    @property
    def broken(self) -> bool:
        return not self.finite or self.factor > BROKEN_FACTOR or self.row_factor > BROKEN_ROW

    @property
    def size(self) -> str:
        """How large the effect is, a row of the confusion matrix."""
        if not self.finite:
            return "not finite"
        if self.factor > CLEAR_FACTOR:
            return f"above {CLEAR_FACTOR}"
        if self.factor > BROKEN_FACTOR:
            return f"{BROKEN_FACTOR} to {CLEAR_FACTOR}"
        if self.row_factor > BROKEN_ROW:
            return f"a row above {BROKEN_ROW:g}"
        return "1.1 to 1.25" if self.factor > 1.1 else "below 1.1"

    @property
    def said(self) -> str:
        """The gravest label, a column of the confusion matrix."""
        order = ("nonfinite", "wrong", "lossy", "biased", "undecided", "ill_conditioned", "clean")
        return next((label for label in order if label in self.labels), "no verdict")


def inspected(inputs: Inputs, outputs: Outputs, *, device: str = "cpu", without: Sequence[str] = ()) -> Diagnosis:
    """What the tool says of a call; ``without`` some of its outputs."""
    tensors: dict[str, Any] = {n: tensor for n, tensor in outputs.tensors().items() if n not in without}
    mask = None if inputs.key_mask is None else inputs.key_mask[:, None, None, :]
    causal = inputs.causal if inputs.causal != "none" else False
    return attn_diag.inspect(
        inputs.q, inputs.k, inputs.v, do=inputs.do, causal=causal, scale=inputs.scale, window=inputs.window,
        softcap=inputs.softcap, mask=mask, device=device, **tensors,
    )  # fmt: skip


def judge(planted: str, culprit: str, inputs: Inputs, outputs: Outputs, healthy: Outputs) -> Iterator[Judged]:
    """One entry a head; of several sequences the head's are taken together, as ``inspect`` does."""
    found = inspected(inputs, outputs).captures[0].observations[0]
    did = effects(reference(inputs), outputs, healthy)
    for entry in found.heads:
        if entry.head is not None:
            yield _entry(planted, culprit, inputs, entry, [e for e in did if _concerns(e, entry.head, inputs.group)])


def _concerns(effect: Effect, head: int, group: int) -> bool:
    return effect.head == (head // group if effect.quantity in ("dk", "dv") else head)


def _entry(planted: str, culprit: str, inputs: Inputs, entry: HeadDiagnosis, did: Sequence[Effect]) -> Judged:
    # LSE is a number of fp32: what matters of it is what it does to the gradients.
    sized = [e for e in did if e.quantity != "lse"]
    worst = max(sized, key=lambda e: e.floored)
    verdict = entry.verdict
    return Judged(
        planted=planted, culprit=culprit, inputs=inputs.name, dtype=str(inputs.q.dtype).removeprefix("torch."),
        batch=inputs.q.shape[0], head=entry.head or 0, factor=worst.floored,
        row_factor=max(e.row_ratio for e in sized), quantity=worst.quantity,
        finite=all(e.floored == e.floored and e.floored < float("inf") for e in sized),
        labels=() if verdict is None else verdict.labels,
        reason="" if verdict is None or not verdict.reasons else verdict.reasons[0],
    )  # fmt: skip


def of_defect(place: tuple[str, str, str, int]) -> list[Judged]:
    """A defect on one family of inputs: (name, family, dtype, seed)."""
    name, family, dtype, seed = place
    torch.set_num_threads(1)
    defect = DEFECTS[name]
    inputs = draw(family, home(defect), dtype=_DTYPES[dtype], seed=seed)
    planted, healthy = defect.run(inputs), defect.healthy(inputs)
    return list(judge(name, defect.culprit, inputs, planted, healthy))


def of_healthy(place: tuple[str, str, str, str, int]) -> list[Judged]:
    """A healthy kernel: (its name, family, setting, dtype, seed)."""
    name, family, setting, dtype, seed = place
    torch.set_num_threads(1)
    inputs = draw(family, setting, dtype=_DTYPES[dtype], seed=seed)
    outputs = attend(inputs, HEALTHY[name])
    return list(judge(f"healthy: {name}", "", inputs, outputs, attend(inputs, Kernel())))


def matrix(found: Iterable[Judged]) -> dict[str, dict[str, int]]:
    """Heads by the size of the effect, and by what was said."""
    table: dict[str, Counter[str]] = {}
    for judged in found:
        table.setdefault(judged.size, Counter())[judged.said] += 1
    return {size: dict(counts) for size, counts in sorted(table.items())}


def main() -> None:
    """Run the study, or a part of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--defects", nargs="*", default=list(DEFECTS))
    parser.add_argument("--families", nargs="*", default=list(FAMILIES))
    parser.add_argument("--dtypes", nargs="*", default=list(_DTYPES))
    parser.add_argument("--healthy", nargs="*", default=None, help="settings of healthy kernels, instead of defects")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so long")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    work: Callable[[tuple[Any, ...]], list[Judged]] = of_defect if options.healthy is None else of_healthy
    seeds = range(options.seeds)
    names: tuple[Iterable[Any], ...] = (options.defects, options.families, options.dtypes, seeds)
    if options.healthy is not None:
        names = (HEALTHY, options.families, options.healthy, options.dtypes, seeds)
    places = list(product(*names))
    random.Random(0).shuffle(places)
    start = time.perf_counter()
    found: list[Judged] = []
    with ProcessPoolExecutor(options.processes) as pool:
        for done, part in enumerate(pool.map(work, places), 1):
            found += part
            print(f"\r{done}/{len(places)}, {time.perf_counter() - start:.0f} s", end="", file=sys.stderr)
            if time.perf_counter() - start > options.seconds:
                print(f"stopped after {done} of {len(places)} calls, drawn at random")
                pool.shutdown(cancel_futures=True)
                break
    print(file=sys.stderr)
    if options.out:
        options.out.write_text(json.dumps([asdict(j) for j in found]))
    for size, counts in matrix(found).items():
        print(f"{size:14} {counts}")
    for j in found:
        wrongly = (j.broken and j.said in _ACQUITTED) if options.healthy is None else j.said in _ACCUSED
        if wrongly:
            did = f"{j.quantity} {j.factor:.3g}, a row {j.row_factor:.3g}"
            print(f"{j.planted} | {j.culprit} | {j.inputs} {j.dtype} H{j.head} | {did} | {j.labels} {j.reason[:150]}")


if __name__ == "__main__":
    main()
