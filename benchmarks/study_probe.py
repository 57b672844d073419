"""Which findings of ``attn_diag.probe`` does each planted defect leave, and are its pointers ever wrong?

    python benchmarks/study_probe.py --json benchmarks/results/probe_cpu.json

Kernels are the independent plain torch attention of ``verdicts``: healthy schedules, its forward defects, and the
variants of ``verdicts.held_out``, which were written after the pointers had been fixed. (The first set of 39 found one
wrong pointer, for which a condition was added; the second was written after that, and is run on another shape.) Every
one is probed in BF16 and FP16, with and without a causal mask, with an l that sums P_bar before and after its cast.
"""

from __future__ import annotations

import json
import multiprocessing
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch
from measuring import made_by, options_of, save
from torch import Tensor
from verdicts.forward_defects import FORWARD
from verdicts.held_out import HELD_OUT, SECOND
from verdicts.inputs import Causal, Inputs
from verdicts.kernels import HEALTHY, PLAIN, Kernel, Seen, forward, tile_plan
from verdicts.planting import Defect

import attn_diag
from attn_diag.errors import InputError
from attn_diag.results.probe import ProbeFinding, ProbeReport
from attn_diag.testing.probing.pointers import TABLE

# Tiles of 128 keys: the first has a partial third tile; the second is for defects of odd sizes and of a padded D.
SHAPES = ((2, 8, 288, 32), (2, 8, 333, 72))
SECOND_SHAPE = (2, 8, 300, 48)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
# Format, mask, what l sums.
WAYS: tuple[tuple[str, Causal, Literal["uncast", "cast"]], ...] = (
    ("bf16", "none", "uncast"),
    ("bf16", "top-left", "cast"),
    ("fp16", "top-left", "uncast"),
    ("fp16", "none", "cast"),
)


@dataclass(frozen=True)
class Place:
    """One run."""

    planted: str
    """A defect's name, or "healthy: " and the kernel's."""
    way: int
    seed: int


def defects() -> dict[str, Defect]:
    """The planted ones by name."""
    return {defect.name: defect for defect in (*FORWARD, *HELD_OUT, *SECOND)}


def inputs_of(q: Tensor, k: Tensor, v: Tensor, causal: Causal) -> Inputs:
    """The call, without dO."""
    return Inputs(q, k, v, torch.empty(0), q.shape[-1] ** -0.5, causal)


def attention(defect: Defect | None, kernel: Kernel, causal: Causal) -> Callable[..., tuple[Tensor, Tensor]]:
    """fn(q, k, v) -> o, lse of a kernel with a defect, or with none."""

    def fn(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        inputs = inputs_of(q, k, v, causal)
        if defect is None:
            return forward(Seen(inputs, kernel, {}), tile_plan(inputs, kernel))
        inputs = inputs if defect.reads is None else defect.reads(inputs)
        chosen = defect.schedule(kernel)
        plan = tile_plan(inputs, chosen)
        if "forward" in defect.plans:
            plan = defect.plans["forward"](plan)
        return forward(Seen(inputs, chosen, defect.hooks), plan)

    return fn


def shape_of(defect: Defect, dtype: torch.dtype, causal: Causal) -> tuple[int, int, int, int] | None:
    """The first shape on which the defect can act; None where probe has none."""
    for shape in [SECOND_SHAPE] if defect in SECOND else SHAPES:
        empty = torch.empty(shape, dtype=dtype)
        if defect.applies(inputs_of(empty, empty, empty, causal)):
            return shape
    return None


def run(place: Place) -> ProbeReport | str | None:
    """The report; the reason where there is none; None where the defect cannot act in this way."""
    torch.set_num_threads(1)
    dtype, causal, row_sum = WAYS[place.way]
    if place.planted.startswith("healthy: "):
        defect, kernel, shape = None, HEALTHY[place.planted.removeprefix("healthy: ")], SHAPES[0]
    else:
        defect, kernel = defects()[place.planted], PLAIN
        found = shape_of(defect, DTYPES[dtype], causal)
        if found is None:
            return None
        shape = found
    kernel = replace(kernel, row_sum=row_sum)
    fn = attention(defect, kernel, causal)
    try:
        return attn_diag.probe(
            fn, dtype=DTYPES[dtype], shape=shape, causal=causal, seed=place.seed, device="cpu", name="kernel"
        )
    except InputError as error:
        return str(error)


@dataclass(frozen=True)
class Outcome:
    """What one run left, and what was said of it."""

    planted: str
    site: str
    """The defect's site or pattern; "healthy"."""
    held_out: str
    """no, first or second."""
    way: str
    seed: int
    left: dict[str, str]
    """Probe: what it found, where it found anything; a refusal under "refused"."""
    said: tuple[str, ...]
    """Sites of ``pointers.TABLE``, and "LSE base", "other function"."""
    wrong: tuple[str, ...]
    """Those that are not so."""


def outcome(place: Place) -> Outcome | None:
    """One run, judged; None where the defect cannot act in this way."""
    found = run(place)
    if found is None:
        return None
    defect = defects().get(place.planted)
    dtype, causal, row_sum = WAYS[place.way]
    site, way = defect.culprit if defect else "healthy", f"{dtype}, mask {causal}, l of {row_sum} P"
    held_out = ("no", "first", "second")[(defect in HELD_OUT) + 2 * (defect in SECOND)]
    if isinstance(found, str):
        return Outcome(place.planted, site, held_out, way, place.seed, {"refused": found}, (), ())
    said = spoken(found)
    wrong = tuple(s for s in said if not _is_so(s, place, defect))
    return Outcome(place.planted, site, held_out, way, place.seed, signature(found), tuple(said), wrong)


def spoken(found: ProbeReport) -> list[str]:
    """Every cause that the report names."""
    if not found.assumptions.ok:
        return ["other function"] if found.assumptions.fits else []
    by_name = {f.name: f for f in found.findings}
    said = [p.site for p in TABLE if (words := p.speaks(by_name)) is not None and words in found.summary]
    return [*said, *(["LSE base"] if "L ln 2 fits" in " ".join(found.summary) else [])]


def _is_so(said: str, place: Place, defect: Defect | None) -> bool:
    """Whether the kernel is as it was said to be."""
    row_sum = WAYS[place.way][2]
    site = defect.site if defect else ""
    nearest = site not in ("P̄", "P̄ not cast") or place.planted == "probs_flushed_below_2^-14"
    if said == "l sums P̄ uncast":
        return row_sum == "uncast" and nearest
    if said == "l sums P̄ cast":
        # A P_bar that is rounded before either takes it is cast for both.
        return (row_sum == "cast" and nearest) or (place.planted == "exp_fp16" and WAYS[place.way][0] == "fp16")
    if said == "other function":
        # A scale applied twice is 1/D.
        return place.planted in ("scale_missing", "scale_twice", "causal_ignored", "causal_ignored_forward_only")
    if said == "LSE base":
        return place.planted == "lse_base_2"
    # O's cast, in some rows or in all.
    return defect is not None and said == ("O" if site == "O in some rows" else site)


def signature(found: ProbeReport) -> dict[str, str]:
    """What every probe that found anything found: mean excess in ulp, factors of bounds, L's mean."""
    return {f.name: words for f in found.findings if (words := " ".join(_left(f)))}


def _left(f: ProbeFinding) -> Iterator[str]:
    for test in f.tests:
        if test.biased:
            yield f"{'up' if test.direction == 'upward' else 'away'} {test.mean_ulp or 0:+.2f}"
    if f.nonfinite:
        yield f"nonfinite {f.nonfinite}"
    if (f.of_budget or 0) > 1:
        yield f"bound x {f.of_budget:.2g}"
    if f.lse is not None and f.lse.biased:
        yield f"L {f.lse.error.mean or 0:+.1g}"
    if f.lse is not None and f.lse.of_budget > 1:
        yield f"L bound x {f.lse.of_budget:.2g}"
    if f.kind == "invariance" and f.differing:
        yield "differs"


def places(names: Sequence[str], seeds: int) -> list[Place]:
    """Every way of every kernel, each with inputs of its own."""
    known = {"healthy": [f"healthy: {name}" for name in HEALTHY], "planted": [d.name for d in FORWARD],
             "held-out": [d.name for d in HELD_OUT], "second": [d.name for d in SECOND]}  # fmt: skip
    chosen = [name for group in names for name in known.get(group, [group])]
    ways = range(len(WAYS))
    return [Place(n, way, len(WAYS) * seed + way) for seed in range(seeds) for n in chosen for way in ways]


def summed(found: Sequence[Outcome]) -> dict[str, Any]:
    """Runs and pointers by group; of every pointer how often it spoke, where it was so, and where it was not."""
    groups = {
        "healthy": [o for o in found if o.site == "healthy"],
        "planted": [o for o in found if o.site != "healthy" and o.held_out == "no"],
        "first held out": [o for o in found if o.held_out == "first"],
        "second held out": [o for o in found if o.held_out == "second"],
    }
    result = {}
    for name, part in groups.items():
        said = Counter((s, o.site, s not in o.wrong) for o in part for s in o.said)
        result[name] = {
            "kernels": len({o.planted for o in part}),
            "runs": len(part),
            "with a pointer": sum(bool(o.said) for o in part),
            "wrong pointers": sum(len(o.wrong) for o in part),
            "said": [{"said": s, "of": of, "so": so, "runs": n} for (s, of, so), n in sorted(said.items())],
        }
    return result


def main() -> None:
    """Run the study, or a part of it."""
    parser = options_of(__doc__)
    parser.add_argument(
        "--kernels", nargs="+", default=["healthy", "planted", "held-out", "second"], help="groups, or names"
    )
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    started, found = time.perf_counter(), []
    work = places(options.kernels, options.seeds)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.processes, mp_context=context) as pool:
        for done, one in enumerate(pool.map(outcome, work), 1):
            if one is not None:
                found.append(one)
            if done % 20 == 0 or done == len(work):
                print(f"{time.perf_counter() - started:7.0f} s  {done} of {len(work)}", flush=True)
                save(made_by() | {"shapes": SHAPES, "summary": summed(found)} | _by_kernel(found), options.json)
    print(json.dumps(summed(found), indent=1, ensure_ascii=False))
    for one in found:
        if one.wrong:
            print(f"WRONG {one.wrong} {one}")


def _by_kernel(found: Sequence[Outcome]) -> dict[str, Any]:
    """What is kept: of the first seed what every probe found, of all what was said."""
    runs = [asdict(o) for o in found]
    for one in runs:
        if one["seed"] >= len(WAYS):
            del one["left"]
    return {"runs": runs}


if __name__ == "__main__":
    main()
