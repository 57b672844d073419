"""Faults of scales in declared kernels below 16 bits: named, acquitted or put down to another culprit.

The kernels are plain torch (``scale_faults``). A fault acts where it changes a bit of O or L; only those count. The
kinds are those of the demand: one group shared too widely, floor instead of nearest, a stale amax, a zero point off by
one, later tokens in a block's scale; and what smoothing took off k that is not added back to L.

    python benchmarks/study_scale_faults.py --first 5000 --seeds 11 --json benchmarks/results/scale_faults_cpu.json
"""

from __future__ import annotations

import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import torch
from measuring import made_by, options_of, save
from scale_faults import FAMILIES, SOUND, Fault, Kernel, inputs

import attn_diag

WIDE, FLOOR, STALE, ZERO, LATER, BESIDES = (
    "one group shared too widely", "floor instead of nearest", "stale amax", "zero point off by one",
    "later tokens in a block's scale", "besides",
)  # fmt: skip


def faults_of(recipe: str) -> dict[str, Fault]:
    """The faults that are planted in one kernel, by name."""
    found: dict[str, Fault] = {}
    head, row = "256 rows|the head", "64 of a row|a row"
    every: dict[str, dict[str, tuple[str, ...]]] = {
        "kv-int8": {"k": ("2 rows", "4 rows"), "v": ("2 rows", "4 rows")},
        "sage1": {"q": (head,), "k": ("128 rows", head)},
        "sage2": {"q": ("64 rows", "128 rows"), "k": ("128 rows", head), "v": ("2 features", "4 features")},
        "mxfp8-attention": {"q": (row,), "k": (row,), "v": ("64 rows", "128 rows")},
        "nvfp4-attention": {"q": ("32 of a row",), "k": ("32 of a row", row), "v": ("32 rows", "64 rows")},
    }
    blocks = every.get(recipe, {})
    integers = {"kv-int8": "kv", "sage1": "qk", "sage2": "qk"}.get(recipe, "")
    for of, several in blocks.items():
        along = "wide along rows" if (of in "qk" and recipe[:2] in ("mx", "nv")) or "features" in several[0] else "wide"
        for step, words in enumerate(several):
            said = tuple(f"{of} has a scale for {each}" for each in words.split("|"))
            found[f"{of} for {words.split('|')[0]}"] = Fault(WIDE, of, along, 2 ** (step + 1), said)
        if "features" not in several[0]:
            said = (f"{of} has scales of", "has the scale of the block after it")
            found[f"{of} with the next block"] = Fault(LATER, of, "next", 0, said)
            said = (f"{of} has scales of the largest number from there on", f"{of} has a scale for the head",
                    "which is the head's", f"{of} has a scale for a feature", f"{of} in",
                    "or all after it (later ones)")  # fmt: skip
            found[f"{of} with all later blocks"] = Fault(LATER, of, "all later", 0, said)
    letters = {"kv-int8": "kv", "sage1": "qk"}.get(recipe, "qkv")
    for of in letters:
        down = of in integers
        mode = "rounded down" if down else "rounded toward zero"
        found[f"{of} {mode}"] = Fault(FLOOR, of, "floor", 0, (f"{of} is {mode}",))
        part = 0.45 if recipe[:2] == "mx" else 0.6
        found[f"{of} stale"] = Fault(STALE, of, "stale", part, (f"largest number of {of}", f"number of {of}'s blocks"))
        if recipe == "nvfp4-attention":
            found[f"{of} stale as a whole"] = Fault(STALE, of, "stale level", 0.6, (f"largest number of {of}",))
            found[f"scales of {of} cut"] = Fault(FLOOR, of, "scale cut", 0, (f"{of}'s scales are rounded down",))
        if recipe == "kv-int8":
            found[f"{of} stale by block"] = Fault(STALE, of, "stale by block", 0, (f"largest number of {of}",))
        for by_one, said_one in ((1, "large"), (-1, "small")) if of in integers else ():
            words = f"{of}'s integers are multiplied back one too {said_one}"
            found[f"{of} by {by_one}"] = Fault(ZERO, of, "zero point", by_one, (words,))
    if recipe[:2] in ("mx", "nv"):
        found["P with masked keys"] = Fault(LATER, "p", "masked", 0, ("keys that are masked as well",))
    if recipe in ("sage1", "sage2", "nvfp4-attention"):
        found["L without k's mean"] = Fault(BESIDES, "", "mean not added", 0, ("is not added back to it",))
    return found


RECIPES = ("kv-int8", "sage1", "sage2", "mxfp8-attention", "nvfp4-attention", "fa3-fp8")
ACCUSED = {"nonfinite", "wrong", "lossy", "biased"}


def call(recipe: str, name: str, fault: Fault, family: str, seed: int) -> dict[str, Any]:
    """One call, inspected as declared."""
    q, k, v = inputs(family, seed)
    tile = (64, 128, 32)[seed % 3]
    wide = [x.float() for x in (q, k, v)]
    out, lse = Kernel(recipe, fault, tile, seed)(*wide)
    plain, plain_lse = Kernel(recipe, SOUND, tile, seed)(*wide)
    differ = float((out.bfloat16() != plain.bfloat16()).float().mean())
    acts = differ > 0 or not torch.equal(lse, plain_lse)
    begun = time.process_time()
    shaped = [x[None, None] for x in (q, k, v, out.bfloat16(), lse)]
    found = attn_diag.inspect(
        *shaped[:3], o=shaped[3], lse=shaped[4], causal=True, declared=recipe, device="cpu"
    )  # fmt: skip
    verdicts = [x for head in found.heads for x in head.quantities]
    words = [p.words for x in verdicts for p in x.patterns if p.kind in ("scale", "factor")]
    truth = [w for w in words if any(said in w for said in fault.said)]
    return {
        "recipe": recipe, "fault": name, "kind": fault.kind or "sound", "family": family, "seed": seed,
        "bits of O": round(differ, 5), "acts": acts, "labels": sorted(found.labels),
        "accused": bool(ACCUSED & set(found.labels)), "named": bool(truth), "hedged": any(", or " in w for w in truth),
        "misnamed": bool(words) and not truth, "words": words[:2], "seconds": round(time.process_time() - begun, 2),
    }  # fmt: skip


def odd(x: dict[str, Any]) -> bool:
    """Whether a call is not said to be what it is."""
    if x["kind"] == "sound":
        return bool(x["accused"] or x["words"])
    return bool(x["acts"] and (not x["named"] or x["misnamed"]))


def counts_of(found: list[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """Of each kind: calls, those that act, and what is said of these (of sound ones, of all)."""
    counts: dict[str, Counter[str]] = {}
    for x in found:
        of_kind = counts.setdefault(x["kind"], Counter())
        of_kind["calls"] += 1
        for name in ("acts", "accused", "named", "hedged", "misnamed"):
            of_kind[name] += x[name] and (x["acts"] or x["kind"] == "sound")
    return {kind: dict(counted) for kind, counted in counts.items()}


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--seeds", type=int, default=11)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--sound", type=int, default=2, help="sound calls of each kernel and seed")
    parser.add_argument("--only", default="", help="recipes, faults or kinds that hold this, or one of several: a|b")
    parser.add_argument("--processes", type=int, default=1)
    arguments = parser.parse_args()
    parts = arguments.only.split("|")
    seeds = range(arguments.first, arguments.first + arguments.seeds)
    calls = []
    for place, recipe in enumerate(RECIPES):
        sound = {f"sound {n}": SOUND for n in range(arguments.sound)}
        for at, (name, fault) in enumerate((sound | faults_of(recipe)).items()):
            if any(part in f"{recipe}: {name} ({fault.kind})" for part in parts):
                # Few seeds have all families between the faults.
                calls += [(recipe, name, fault, FAMILIES[(place + at + s) % len(FAMILIES)], s + at) for s in seeds]
    found: list[dict[str, Any]] = []
    said = made_by() | {"families": FAMILIES, "first seed": arguments.first}
    with ProcessPoolExecutor(arguments.processes, get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        for one in [pool.submit(call, *each) for each in calls]:
            found.append(one.result())
            if odd(found[-1]):
                print(found[-1], flush=True)
            save(
                said | {"counts": counts_of(found), "not as it should be": [x for x in found if odd(x)]}, arguments.json
            )
    for kind, counted in counts_of(found).items():
        print(kind, counted, flush=True)


if __name__ == "__main__":
    main()
