"""Does a verdict acquit anything broken, or accuse anything healthy? Planted defects and healthy kernels, inspected.

Every kernel is an independent plain torch attention (``verdicts.kernels``), and what a defect really did is measured
without the tool (``verdicts.effects``): per head, the largest factor of a quantity's error over that of the worst of
sixteen healthy kernels (or over ulp²/12), and the largest of a row. Where the healthy ones differ as much among
themselves, that much is no effect.

    python benchmarks/study_verdicts.py --json benchmarks/results/verdicts.json          # all; an hour of two cores
    python benchmarks/study_verdicts.py defects --defects missing_tile --families gaussian   # one, printed
"""

from __future__ import annotations

import random
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache
from itertools import groupby, product
from pathlib import Path
from typing import Any

import torch
from measuring import CAPTURES, Keeper, made_by, options_of, save
from verdicts.culprits import named
from verdicts.defects import DEFECTS, home, other_roundings
from verdicts.effects import Effect, effects, reference
from verdicts.inputs import FAMILIES, Inputs, captures, draw
from verdicts.kernels import HEALTHY, Outputs, attend
from verdicts.planting import Defect

import attn_diag
from attn_diag.results.diagnosis import Diagnosis, HeadDiagnosis

# A head is broken where a quantity has this factor, or a row that, or where something is not finite.
BROKEN_FACTOR, BROKEN_ROW = 1.25, 3.0
CLEAR_FACTOR = 1.5
# Wrong mathematics with such an effect should not be called a coarse rounding.
HUGE_FACTOR = 10.0
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
SETTINGS = (
    "plain", "full", "odd", "d32", "d72", "gqa", "window", "softcap", "padded", "independent", "shared_prompt",
    "copies", "loss_2_percent", "loss_two_rows", "training_gradients",
)  # fmt: skip
ACQUITTED = {"clean", "ill_conditioned"}
ACCUSED = {"nonfinite", "wrong", "lossy", "not as stated"}
# It has a documented factor on dQ and dK (torch's efficient kernel), so that it is no yardstick.
DOCUMENTED = "dS of cast P"
# Defects of one call that one process does one after the other.
_TOGETHER = 12
_NOISY = 16


@dataclass(frozen=True)
class Place:
    """One call, and what runs on it."""

    part: str
    """defects, healthy."""
    family: str
    """One of ``FAMILIES``, or a capture's name."""
    setting: str
    dtype: str
    seed: int
    names: tuple[str, ...]
    """Of defects, or of healthy kernels."""

    @property
    def inputs(self) -> Inputs:
        if self.family in FAMILIES:
            return draw(self.family, self.setting, dtype=DTYPES[self.dtype], seed=self.seed)
        return _captures()[self.family]


@dataclass(frozen=True)
class Judged:
    """One head: what was planted, what it did, and what was said."""

    planted: str
    """The defect's name, or the healthy kernel's."""
    inputs: str
    dtype: str
    head: int
    factor: float
    """The largest factor of a quantity, over the worst healthy kernel's and over what these show of each other."""
    row_factor: float
    """The largest of a row, likewise; 3 where this one reaches what chance gives a row, if that is more than 3."""
    small_row_factor: float
    """The largest of rows whose error is less than a typical row's."""
    quantity: str
    """The quantity with ``factor``."""
    finite: bool
    labels: tuple[str, ...]
    """Empty: no verdict, because O is what another mask or scale gives."""
    reason: str
    """The first reason, or what O is."""
    named: bool
    """The culprit is named."""
    false: tuple[str, ...]
    """Statements about the culprit that are not so."""

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
        if self.small_row_factor > BROKEN_ROW:
            return f"a small row above {BROKEN_ROW:g}"
        return "1.1 to 1.25" if self.factor > 1.1 else "below 1.1"

    @property
    def said(self) -> str:
        """The gravest label, a column of the confusion matrix."""
        order = ("nonfinite", "wrong", "lossy", "biased", "undecided", "ill_conditioned", "clean")
        return next((label for label in order if label in self.labels), "not as stated")


@cache
def _captures() -> dict[str, Inputs]:
    # What one training run left, and GQA: the others are of the families.
    chosen = ("gpt2_step731_L2H4", "gpt2_step637_L2H6", "gqa_T200")
    return {name: x for name, x in captures(CAPTURES).items() if name in chosen}


def inspected(inputs: Inputs, outputs: Outputs, *, device: str = "cpu", without: Sequence[str] = ()) -> Diagnosis:
    """What the tool says of a call; ``without`` some of its outputs."""
    tensors: dict[str, Any] = {n: tensor for n, tensor in outputs.tensors().items() if n not in without}
    mask = None if inputs.key_mask is None else inputs.key_mask[:, None, None, :]
    causal = inputs.causal if inputs.causal != "none" else False
    return attn_diag.inspect(
        inputs.q, inputs.k, inputs.v, do=inputs.do, causal=causal, scale=inputs.scale, window=inputs.window,
        softcap=inputs.softcap, mask=mask, device=device, **tensors,
    )  # fmt: skip


def judge(
    name: str, defect: Defect | None, inputs: Inputs, outputs: Outputs, did: Sequence[Effect]
) -> Iterator[Judged]:
    """One entry a head; of several sequences the head's are taken together, as ``inspect`` does."""
    found = inspected(inputs, outputs).captures[0]
    for entry in found.observations[0].heads:
        if entry.head is not None:
            mine = [e for e in did if _concerns(e, entry.head, inputs.group)]
            yield _entry(name, defect, inputs, entry, mine, found.assumptions.message)


def _concerns(effect: Effect, head: int, group: int) -> bool:
    return effect.head == (head // group if effect.quantity in ("dk", "dv") else head)


def _entry(
    name: str, defect: Defect | None, x: Inputs, entry: HeadDiagnosis, did: Sequence[Effect], assumed: str
) -> Judged:
    # LSE is a number of fp32: what matters of it is what it does to the gradients.
    sized = [e for e in did if e.quantity != "lse"]
    worst = max(sized, key=_factor)
    verdict = entry.verdict
    said = None if defect is None else named(defect, entry.quantities, did)
    refused = verdict is None and defect is not None and "o" in defect.quantities
    return Judged(
        planted=name, inputs=x.name, dtype=str(x.q.dtype).removeprefix("torch."), head=entry.head or 0,
        factor=_factor(worst), row_factor=max(_row_factor(e, e.row_factor) for e in sized),
        small_row_factor=max(_row_factor(e, e.small_row_factor) for e in sized), quantity=worst.quantity,
        finite=all(e.finite for e in sized), labels=() if verdict is None else verdict.labels,
        reason=assumed if verdict is None else verdict.reasons[0] if verdict.reasons else "",
        named=refused or (said is not None and said.right),
        false=() if said is None else said.false,
    )  # fmt: skip


def _factor(effect: Effect) -> float:
    return effect.factor / max(1.0, effect.healthy_factor)


def _row_factor(effect: Effect, factor: float) -> float:
    return BROKEN_ROW * factor / max(BROKEN_ROW, effect.healthy_row_factor)


def of_place(place: Place) -> list[Judged]:
    """Everything that runs on one call."""
    torch.set_num_threads(1)
    inputs = place.inputs
    truth = reference(inputs)
    plain = {name: attend(inputs, kernel) for name, kernel in HEALTHY.items()}
    noisy = other_roundings(inputs, _NOISY)
    found: list[Judged] = []
    for name in place.names:
        others = [x for other, x in plain.items() if other not in (name, DOCUMENTED)]
        if place.part == "healthy":
            did = effects(truth, plain[name], others, noisy)
            found += judge(name, None, inputs, plain[name], did)
            continue
        defect = DEFECTS[name]
        planted = defect.run(inputs)
        did = effects(truth, planted, [defect.healthy(inputs), *others], noisy)
        found += judge(name, defect, inputs, planted, did)
    return found


def places(parts: Sequence[str], chosen: Sequence[str], families: Sequence[str], seeds: int) -> Iterator[Place]:
    """All calls, with what runs on each."""
    if "defects" in parts:
        for family, dtype, seed in product(families, DTYPES, range(seeds)):
            if family not in FAMILIES:
                x = _captures()[family]
                fitting = (
                    [n for n in chosen if DEFECTS[n].applies(x)] if DTYPES[dtype] == x.q.dtype and not seed else []
                )
                yield from _in_turn("defects", family, "", dtype, seed, fitting)
                continue
            for setting, names in groupby(sorted(chosen, key=lambda n: home(DEFECTS[n])), lambda n: home(DEFECTS[n])):
                yield from _in_turn("defects", family, setting, dtype, seed, list(names))
    if "healthy" in parts:
        drawn = [family for family in families if family in FAMILIES]
        for family, setting, dtype, seed in product(drawn, SETTINGS, DTYPES, range(seeds)):
            yield Place("healthy", family, setting, dtype, seed, tuple(HEALTHY))


def _in_turn(part: str, family: str, setting: str, dtype: str, seed: int, names: Sequence[str]) -> Iterator[Place]:
    for start in range(0, len(names), _TOGETHER):
        yield Place(part, family, setting, dtype, seed, tuple(names[start : start + _TOGETHER]))


def matrix(found: Iterable[Judged]) -> dict[str, dict[str, int]]:
    """Heads by the size of the effect, and by what was said."""
    table: dict[str, Counter[str]] = {}
    for judged in found:
        table.setdefault(judged.size, Counter())[judged.said] += 1
    return {size: dict(counts) for size, counts in sorted(table.items())}


def summary(part: str, found: Sequence[Judged]) -> dict[str, Any]:
    """The confusion matrix of one part, and every head that was judged wrongly."""
    if part == "healthy":
        accused = [j for j in found if j.said in ACCUSED]
        biased = sum(j.said == "biased" for j in found)
        return {"heads": len(found), "matrix": matrix(found), "biased": biased, "accused": [asdict(j) for j in accused]}
    acquitted = [j for j in found if j.broken and j.said in ACQUITTED]
    convicted = [j for j in found if j.broken and j.said in ACCUSED]
    false = [j for j in found if j.false]
    by_defect = {
        name: {
            "culprit": DEFECTS[name].culprit, "heads": len(mine), "broken": sum(j.broken for j in mine),
            "accused": sum(j.said in ACCUSED for j in mine), "named": sum(j.named for j in mine),
        }
        for name, part_ in groupby(sorted(found, key=lambda j: j.planted), lambda j: j.planted)
        for mine in [list(part_)]
    }  # fmt: skip
    clear = [j for j in found if not j.finite or j.factor > CLEAR_FACTOR]
    coarse = [j for j in clear if DEFECTS[j.planted].pattern and j.factor > HUGE_FACTOR and j.said == "lossy"]
    return {
        "heads": len(found),
        "matrix": matrix(found),
        "clear_effects": len(clear),
        "clear_effects_found": sum(j.said not in ACQUITTED for j in clear),
        "accused": len(convicted),
        "culprit_named": sum(j.named for j in convicted),
        "false_statement": len(false),
        "mathematics_called_lossy": len(coarse),
        "acquitted": [asdict(j) for j in acquitted],
        "false_statements": [asdict(j) for j in false],
        "called_lossy": [asdict(j) for j in coarse],
        "by_defect": by_defect,
    }


def main() -> None:
    """Run the study, or a part of it."""
    parser = options_of(__doc__)
    parser.add_argument("parts", nargs="*", default=["defects", "healthy"], help="defects, healthy or both")
    parser.add_argument("--defects", nargs="*", default=list(DEFECTS))
    parser.add_argument("--families", nargs="*", default=[*FAMILIES, *_captures()])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so long, calls drawn at random")
    parser.add_argument("--skip", type=int, default=0, help="leave out so many of the calls drawn: an earlier run's")
    parser.add_argument("--rows", type=Path, help="write every head there")
    options = parser.parse_args()
    todo = list(places(options.parts, options.defects, options.families, options.seeds))
    random.Random(0).shuffle(todo)
    skipped = 0
    while skipped < options.skip and todo:
        skipped += len(todo.pop(0).names)
    start, made = time.perf_counter(), made_by()
    found: dict[str, list[Judged]] = {part: [] for part in options.parts}
    calls, total = 0, skipped + sum(len(place.names) for place in todo)

    def write() -> dict[str, Any]:
        result = {part: summary(part, heads) for part, heads in found.items()}
        save({**made, "calls": calls, "calls skipped": skipped, "calls in all": total, **result}, options.json)
        save({part: [asdict(j) for j in heads] for part, heads in found.items()}, options.rows)
        return result

    keeper = Keeper(write, options.seconds)
    with ProcessPoolExecutor(options.processes) as pool:
        for place, judged in zip(todo, pool.map(of_place, todo), strict=False):
            found[place.part] += judged
            calls += len(place.names)
            print(f"\r{calls} calls, {time.perf_counter() - start:.0f} s", end="", file=sys.stderr)
            if not keeper.goes_on():
                print(f"stopped after {calls} of {total} calls")
                pool.shutdown(cancel_futures=True)
                break
    print(file=sys.stderr)
    result = write()
    for part, numbers in result.items():
        print(part, {n: x for n, x in numbers.items() if isinstance(x, int)})
        for size, counts in numbers["matrix"].items():
            print(f"  {size:14} {counts}")
        for what in ("acquitted", "accused", "false_statements", "called_lossy"):
            for j in numbers[what] if isinstance(numbers.get(what), list) else []:
                did = f"{j['quantity']} {j['factor']:.3g}, a row {j['row_factor']:.3g}"
                said = f"{j['labels']} {'; '.join(j['false']) or j['reason'][:150]}"
                print(f"  {what}: {j['planted']} | {j['inputs']} {j['dtype']} H{j['head']} | {did} | {said}")


if __name__ == "__main__":
    main()
