"""False alarms and power of ``attn_diag.check``.

    python benchmarks/study_check.py --seeds 200 --processes 16 --json benchmarks/results/check_cpu.json
    python benchmarks/study_check.py --planted --json benchmarks/results/check_planted_cpu.json

Every seed draws the whole suite anew (forward and backward). Healthy kernels: emulations and torch's SDPA; each run is
judged without a baseline, and against the baseline of another seed (a ring: seed s against s + 1), by the very rules of
``check``. A run that fails anything is a false alarm. Also: how much two seeds' sizes differ beside the limit of
growth, and how often planted biases (a fraction of O's elements is rounded away from zero one step further) are found.
``--planted``: which cases of the suite find which coarse site of an independent kernel (``verdicts``), without a
baseline; and that they accuse none of its healthy schedules.
"""

from __future__ import annotations

import json
import multiprocessing
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Executor, ProcessPoolExecutor
from functools import partial
from statistics import mean, median, stdev
from typing import Any

import torch
from measuring import made_by, options_of, save
from scipy import stats
from torch import Tensor
from verdicts.defects import DEFECTS
from verdicts.inputs import Inputs
from verdicts.kernels import HEALTHY, attend

import attn_diag
from attn_diag.captures.metadata import Causal
from attn_diag.results.baseline import BaselineCase, BaselineSize
from attn_diag.results.check import CheckedBias, CheckedCase, Size
from attn_diag.testing.regression import cases as suite
from attn_diag.testing.regression import judge
from attn_diag.testing.regression.figures import Measured, measure_case
from attn_diag.testing.stated import Stated
from attn_diag.testing.target import Target, emulate

LEVEL = 0.01
DEVICE = torch.device("cpu")
KERNELS = ("fa2", "sdpa", "efficient")
PLANTED = (0.02, 0.05, 0.1, 0.2)


# One kernel on the suite of one seed, by case.
Run = dict[str, Measured]


def known(measured: Measured) -> BaselineCase:
    """One run's case as the baseline of another."""
    sizes = {n: BaselineSize(s.error, s.yardstick, s.log_ratio) for n, s in measured.sizes.items()}
    return BaselineCase("", "", (), True, measured.biases, sizes)


def checked(name: str, measured: Measured, biases: dict[str, CheckedBias], sizes: dict[str, Size]) -> CheckedCase:
    return CheckedCase(
        name, (), "", biases=biases, sizes=sizes, quantities=measured.quantities, documented=measured.documented
    )


def alarms(run: Run, baseline: Run | None) -> list[str]:
    """What ``check`` would call failures: "case: kind quantity"."""
    cases = []
    for name, measured in run.items():
        before = None if baseline is None else known(baseline[name])
        biases = judge.biases_of(measured, suite.LENGTH, before, same_key=True, same_inputs=False)
        sizes = judge.sizes_of(measured, before, same_inputs=False)
        cases.append(checked(name, measured, biases, sizes))
    judged, _ = judge.adjusted(cases)
    return [f"{f.case}: {f.kind} {f.quantity}" for c in judged for f in judge.failures_of(c, LEVEL)]


def growth(run: Run, baseline: Run) -> float:
    """The largest error over its limit, over all sizes of the suite."""
    sizes = [judge.sizes_of(m, known(baseline[n]), same_inputs=False) for n, m in run.items()]
    return max(s.error / s.limit for found in sizes for s in found.values() if s.limit)


def nudged(o: Tensor, ulps: float, generator: torch.Generator) -> Tensor:
    """O with that mean bias away from zero: a fraction ``ulps`` of its elements one number further out."""
    chosen = torch.rand(o.shape, generator=generator) < ulps
    return (o.view(torch.int16) + chosen.to(torch.int16) * (o != 0)).view(o.dtype)


def run_of(kernel: str, names: list[str], plant: float, seed: int) -> Run:
    subject = Target.of(kernel, dtype=torch.bfloat16, head_dim=64, device=DEVICE)
    recipe = attn_diag.preset("fa2")
    found = {}
    for name in names:
        case = suite.draw(name, seed, dtype=torch.bfloat16, head_dim=64, stated=Stated("none", 0.125))
        outputs, _ = subject.run(case)
        if plant:
            outputs = {"o": nudged(outputs["o"], plant, torch.Generator().manual_seed(seed))}
        yardstick = emulate(recipe, case, DEVICE, with_gradients=not plant)
        yardstick = {n: x for n, x in yardstick.items() if n in outputs or n == "lse"}
        found[name] = measure_case(case, outputs, yardstick, recipe, "cpu")
    return found


def planted_kernels() -> list[str]:
    """Healthy schedules, and every site that is too coarse in both masks, everywhere."""
    sites = [d.name for d in DEFECTS.values() if d.site and d.extent == "everywhere" and d.needs <= {"bf16"}]
    return [*(f"healthy: {name}" for name in HEALTHY), *sites]


def found_in(kernel: str, causal: Causal, names: list[str], seed: int = 0) -> dict[str, list[str]]:
    """Without a baseline: case -> "kind quantity" of each failure of a planted kernel."""
    found = {}
    for name in names:
        case = suite.draw(name, seed, dtype=torch.bfloat16, head_dim=64, stated=Stated(causal, 0.125))
        assert case.do is not None
        inputs = Inputs(case.q, case.k, case.v, case.do, scale=case.scale, causal=causal, name=name)
        plan = kernel.removeprefix("healthy: ")
        made = attend(inputs, HEALTHY[plan]) if plan in HEALTHY else DEFECTS[plan].run(inputs)
        recipe = attn_diag.preset("fa2")
        measured = measure_case(case, made.tensors(), emulate(recipe, case, DEVICE), recipe, "cpu")
        if measured.misfit is not None:
            found[name] = ["fit"]
            continue
        biases = judge.biases_of(measured, case.q.shape[2], None, same_key=False, same_inputs=True)
        sizes = judge.sizes_of(measured, None, same_inputs=False)
        (adjusted,), _ = judge.adjusted([checked(name, measured, biases, sizes)])
        failures = judge.failures_of(adjusted, LEVEL / len(names))  # Holm over the cases, to the safe side
        found[name] = [
            f"{f.kind} {f.quantity}" + (f" {f.factor:.3g}" if f.factor is not None else "") for f in failures
        ]
    return found


def rate(found: list[list[str]]) -> dict[str, Any]:
    """Runs with an alarm, with the upper 95 % bound of Clopper & Pearson."""
    hits, n = sum(bool(f) for f in found), len(found)
    upper = 1.0 if hits == n else float(stats.beta.ppf(0.95, hits + 1, n - hits))
    which = Counter(alarm for alarms in found for alarm in alarms)
    return {"runs": n, "alarms": hits, "upper95": upper, "which": which}


def false_alarms(
    kernel: str, seeds: int, names: list[str], pool: Executor, keep: Callable[[str, dict[str, Any]], None]
) -> dict[str, Any]:
    runs: list[Run] = []
    for run in pool.map(partial(run_of, kernel, names, 0.0), range(1000, 1000 + seeds)):
        runs.append(run)
        if len(runs) % 20 == 0:
            keep(kernel, summarised(runs, names))
    return summarised(runs, names)


def summarised(runs: list[Run], names: list[str]) -> dict[str, Any]:
    others = runs[1:] + runs[:1]
    ratios = [growth(a, b) for a, b in zip(runs, others, strict=True)]
    true_bias = {
        name: {
            b: [mean(v := [r[name].biases[b].mean for r in runs]), stdev(v) / len(v) ** 0.5 if len(v) > 1 else 0.0]
            for b in runs[0][name].biases
        }
        for name in names
    }
    return {
        "without_baseline": rate([alarms(r, None) for r in runs]),
        "against_another_seed": rate([alarms(a, b) for a, b in zip(runs, others, strict=True)]),
        "error_over_growth_limit": {"median": median(ratios), "largest": max(ratios)},
        "true_bias": true_bias,
    }


def power(seeds: int, names: list[str], pool: Executor, say: Callable[[str], None]) -> dict[str, Any]:
    """How often a planted bias of fa2's O is found, without a baseline and against fa2's at another seed."""
    found: dict[str, Any] = {}
    healthy = list(pool.map(partial(run_of, "fa2", names, 0.0), range(5000, 5000 + seeds)))
    for ulps in PLANTED:
        planted = list(pool.map(partial(run_of, "fa2", names, ulps), range(7000, 7000 + seeds)))
        without = sum(any("bias" in a for a in alarms(p, None)) for p in planted)
        against = sum(any("bias" in a for a in alarms(p, h)) for p, h in zip(planted, healthy, strict=True))
        found[f"{ulps:g} ulp"] = {"without_baseline": without / seeds, "against_another_seed": against / seeds}
        say(f"planted {ulps:g} ulp: {found[f'{ulps:g} ulp']}")
    return found


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--power-seeds", type=int, default=20)
    parser.add_argument("--kernels", nargs="+", default=list(KERNELS))
    parser.add_argument("--cases", nargs="+", default=list(suite.NAMES))
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--planted", action="store_true")
    parser.add_argument("--masks", nargs="+", default=["top-left", "none"])
    parser.add_argument("--only", default="", help="planted kernels whose name holds this")
    arguments = parser.parse_args()
    started = time.perf_counter()

    def say(words: str) -> None:
        print(f"{time.perf_counter() - started:7.0f} s  {words}", flush=True)

    result = made_by(DEVICE) | {"level": LEVEL, "cases": arguments.cases, "kernels": {}}

    def keep(kernel: str, found: dict[str, Any]) -> None:
        result["kernels"][kernel] = found
        runs = found["without_baseline"]["runs"]
        say(f"{kernel}, {runs} seeds: {[found[n]['alarms'] for n in ('without_baseline', 'against_another_seed')]}")
        save(result, arguments.json)

    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(
        arguments.processes, mp_context=context, initializer=torch.set_num_threads, initargs=(1,)
    ) as pool:
        if arguments.planted:
            jobs = [(k, m) for k in planted_kernels() if arguments.only in k for m in arguments.masks]
            rows = pool.map(partial(found_in, names=arguments.cases), *zip(*jobs, strict=True))
            table: dict[str, Any] = {}
            for (kernel, mask), row in zip(jobs, rows, strict=True):
                table.setdefault(kernel, {})[mask] = {case: kinds for case, kinds in row.items() if kinds}
                say(f"{kernel}, {mask}: found in {', '.join(table[kernel][mask]) or 'no case'}")
                save(made_by(DEVICE) | {"level": LEVEL, "cases": arguments.cases, "planted": table}, arguments.json)
            return
        for kernel in arguments.kernels:
            keep(kernel, false_alarms(kernel, arguments.seeds, arguments.cases, pool, keep))
        if arguments.power_seeds:
            found = power(arguments.power_seeds, arguments.cases, pool, say)
            result["power"] = {"seeds": arguments.power_seeds, "found": found}
    print(json.dumps(result, indent=1))
    save(result, arguments.json)


if __name__ == "__main__":
    main()
