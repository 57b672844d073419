"""``quant`` on many weights: planted faults of quantisers and of attention's scales are named, sound ones not accused.

Weights are fp32 matrices of 64 x 256 with rows of other sizes, of four families, a new seed a trial. A trial counts as
named where the headline has the planted fault's own words, as misnamed where it names another quantiser. "future
tokens" is an attention with INT8 blocks of keys, asked by ``invariance``.

    python benchmarks/study_quant_faults.py --trials 200 --processes 16 --json benchmarks/results/quant_faults_cpu.json
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from measuring import made_by, options_of, save
from scipy.stats import binom
from torch import Tensor

import attn_diag

sys.path.append(str(Path(__file__).parent.parent / "tests"))
from fake_quantisers import weight
from planted_quantisers import BY_HAND, INT4, INT8, learned
from test_quant import FAULTS, made

FAULTS = FAULTS | BY_HAND

FAMILIES = ("gaussian", "heavy-tailed", "outlying columns", "sparse")
SOUND = ("int4", "int8", "int4-asymmetric", "int8-asymmetric", "fp8", "fp8-row", "mxfp8", "mxfp4", "nvfp4")
# With scales that are declared by their amax, as learned ones are.
LEARNED = {"int4 learned scales": INT4, "int8 learned scales": INT8}
LEVEL = 0.05
KINDS = ("fault", "sound", "engine", "dithered", "future")
# A scale that is rounded down clips, which is a bias; these do not. Clusters: 512 and 64 blocks, 8 rows, 512 blocks, 64
# rows.
DITHERED: tuple[tuple[str, dict[str, Any], tuple[int, int]], ...] = (
    ("int4", {"elements": "int4:stochastic"}, (64, 256)),
    ("int4", {"elements": "int4:stochastic"}, (16, 128)),
    ("int8", {"elements": "int8:stochastic"}, (8, 512)),
    ("mxfp4", {"elements": "e2m1:stochastic", "scale": "e8m0:up"}, (64, 256)),
    ("fp8", {"elements": "e4m3:stochastic"}, (64, 256)),
)


def weights(family: str, seed: int) -> Tensor:
    """[64, 256] fp32."""
    w, g = weight(10_000 + seed), torch.Generator().manual_seed(seed)
    if family == "heavy-tailed":
        w = w * torch.randn(w.shape, generator=g).square()
    if family == "outlying columns":
        w[:, ::37] *= 8
    if family == "sparse":
        w = w * (torch.rand(w.shape, generator=g) < 0.5)
    return w


def named(declared: str, said: str, quantised: Callable[[Tensor], Tensor], w: Tensor) -> tuple[str, str]:
    """named, misnamed (another quantiser is), unnamed (none is), acquitted; or unchanged, where nothing was done."""
    values = quantised(w)
    if torch.equal(values, attn_diag.quantize(w, declared).values):
        return "unchanged", ""
    found = attn_diag.quant(w, declared, observed=values)
    if found.outcome != "fail":
        return "acquitted", found.headline
    if f"but with {said}" in found.headline:
        return "named", ""
    return ("misnamed" if "but with" in found.headline else "unnamed"), found.headline


def future(leaks: bool, seed: int) -> bool:
    """Whether ``invariance`` says that later tokens change earlier rows of an attention with INT8 keys."""
    block = 64 if leaks else 1

    def kernel(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = torch.nn.functional.pad(k.float(), (0, 0, 0, -k.shape[2] % block))
        parts = parts.reshape(*k.shape[:2], -1, block, k.shape[3])
        scale = parts.abs().amax((3, 4), keepdim=True).clamp(min=1e-30) / 127
        k8 = ((parts / scale).round() * scale).flatten(2, 3)[:, :, : k.shape[2]]
        s = q.float() @ k8.mT * q.shape[3] ** -0.5
        hidden = torch.ones(s.shape[2:], dtype=torch.bool).triu(1)
        o: Tensor = (s.masked_fill(hidden, -torch.inf).softmax(-1) @ v.float()).to(q.dtype)
        return o

    found = attn_diag.invariance(
        kernel, causal="top-left", only=["future-token"], shape=(1, 1, 150, 64), seed=seed, backward=False, device="cpu"
    )
    return not found.passed and "later tokens" in found.report()


def of_fault(name: str, seeds: range) -> dict[str, Any]:
    """A row of planted faults."""
    declared, quantised, said = FAULTS[name]
    counts = Counter[str]()
    others: list[object] = []
    for seed in seeds:
        family = FAMILIES[seed % len(FAMILIES)]
        answer, headline = named(declared, said, quantised, weights(family, seed))
        counts[answer] += 1
        if headline:
            others.append({"family": family, "seed": seed, "headline": headline})
    return {"kind": "fault", "name": name, "declared": declared, **counts, "others": others[:5]}


def of_sound(name: str, seeds: range) -> dict[str, Any]:
    """A row of sound quantisers."""
    accused = 0
    for seed in seeds:
        w = weights(FAMILIES[seed % len(FAMILIES)], seed)
        if by := LEARNED.get(name):
            fake, amax = learned(by)
            found = attn_diag.quant(w, f"int{by.bits}", observed=fake(w), amax=amax(w))
        else:
            found = attn_diag.quant(w, name, observed=made(name)(w))
        accused += found.outcome == "fail"
    return {"kind": "sound", "name": name, "trials": len(seeds), "accused": accused}


def of_engine(blocks: str, seeds: range) -> dict[str, Any]:
    """A row of engines beside a trainer with groups of 128."""
    answers = Counter[str]()
    for seed in seeds:
        w = weights(FAMILIES[seed % len(FAMILIES)], seed)
        trained, runs = (made("int4", block=block)(w) for block in ("128", blocks))
        found = attn_diag.quant(w, attn_diag.quantizer("int4", block="128"), observed=trained, engine=runs)
        named_so = found.outcome == "fail" and "the engine runs other weights: blocks of 32" in found.headline
        answers["named" if named_so else "accused" if found.outcome == "fail" else "passed"] += 1
    return {"kind": "engine", "name": f"int4 blocks of {blocks} beside a trainer's 128", **answers}


def of_dithered(number: int, seeds: range) -> dict[str, Any]:
    """A row of unbiased dithering."""
    name, changes, shape = DITHERED[number]
    by, families = attn_diag.quantizer(name, **changes), Counter[str]()
    for seed in seeds:
        family = FAMILIES[seed % len(FAMILIES)]
        w = weights(family, seed).flatten()[: shape[0] * shape[1]].reshape(shape)
        values = made(name, seed=20_000 + seed, **changes)(w)
        families[family] += attn_diag.quant(w, by, observed=values, level=LEVEL).outcome == "fail"
    accused = families.total()
    chance = float(binom.sf(accused - 1, len(seeds), LEVEL))
    return {"kind": "dithered", "name": by.name, "shape": shape, "level": LEVEL, "trials": len(seeds),
            "accused": accused, "by family": dict(families), "chance of so many": round(chance, 4)}  # fmt: skip


def of_future(leaks: bool, seeds: range) -> dict[str, Any]:
    """A row of attention whose scales of blocks hold future tokens, or do not."""
    hits = sum(future(leaks, seed) for seed in seeds)
    name = f"{'' if leaks else 'no '}future tokens in a block's scale"
    return {"kind": "future", "name": name, "trials": len(seeds), "named": hits}


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, help="the first seed of planted faults and sound quantisers")
    parser.add_argument("--dithered", type=int, default=3000, help="trials of unbiased dithering; a rate takes many")
    parser.add_argument("--kinds", nargs="*", default=KINDS, help="of what; other rows of the file stay")
    parser.add_argument("--only", default="", help="names that hold this; other rows of the file stay")
    parser.add_argument("--future", type=int, default=20, help="trials of attention's scales")
    parser.add_argument("--processes", type=int, default=1)
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    if arguments.json and arguments.json.exists():
        kept = json.loads(arguments.json.read_text())["rows"]
        rows = [r for r in kept if r["kind"] not in arguments.kinds or arguments.only not in r["name"]]
    seeds = range(arguments.first, arguments.first + arguments.trials)
    jobs: dict[str, list[tuple[str, Callable[..., dict[str, Any]], tuple[Any, range]]]] = {
        "fault": [(name, of_fault, (name, seeds)) for name in FAULTS],
        "sound": [(name, of_sound, (name, seeds)) for name in (*SOUND, *LEARNED)],
        "engine": [(f"int4 blocks of {b}", of_engine, (b, seeds)) for b in ("32", "128")],
        "dithered": [
            (attn_diag.quantizer(name, **changes).name, of_dithered, (number, range(arguments.dithered)))
            for number, (name, changes, _) in enumerate(DITHERED)
        ],
        "future": [("future tokens", of_future, (leaks, range(arguments.future))) for leaks in (True, False)],
    }
    with ProcessPoolExecutor(arguments.processes, get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        chosen = [job for kind in arguments.kinds for job in jobs[kind] if arguments.only in job[0]]
        for call in [pool.submit(work, *given) for _, work, given in chosen]:
            rows.append(call.result())
            print({k: v for k, v in rows[-1].items() if k != "others"}, flush=True)
            save(made_by() | {"first seed": arguments.first, "families": FAMILIES, "rows": rows}, arguments.json)


if __name__ == "__main__":
    main()
