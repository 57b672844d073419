"""Linear attention judged: defects and healthy kernels that nobody had in mind while the limits were chosen.

    python benchmarks/study_linear_unseen.py [--seeds 20] [--first 1000] [--only NAME …] [--json FILE]

Two limits are silence, not calibration: a factor below 2 without a site that makes it is undecided
(``analyses.linear.inspect._UNNAMED``), a mean below a quarter of the error's size is no bias
(``analyses.linear.findings._MATTERS``). This counts what they cost: per kernel how often it is accused (nonfinite,
wrong, lossy, biased), how often only undecided, how often clean; and how often it would be accused without the two,
from the same intervals and p-values. The study that chose the limits used seeds 0 to 39. An emulated chunked kernel
(BF16, chunks of 64, 160 steps, width 32), spoilt after the fact.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from study_linear import ACCUSED, inputs_of

from attn_diag.analyses.linear.inspect import inspect_linear
from attn_diag.captures.linear import LinearCapture
from attn_diag.head.linear import LinearRun
from attn_diag.head.quality import LOSSY
from attn_diag.kernels.linear_recipe import LinearRecipe
from attn_diag.results.linear import LinearDiagnosis

OPERATORS = ("rwkv7", "gated_delta_rule", "kda", "gla", "simple_gla")
STEPS = 160
Outputs = dict[str, Tensor]


def healthy(run: LinearRun, recipe: LinearRecipe | None = None) -> Outputs:
    """What the kernel returns, float64; o not rounded yet."""
    return run.emulated(replace(recipe or run.recipe, out="fp32"))


def truncated(run: LinearRun) -> Outputs:
    """o is cut off instead of rounded."""
    found = healthy(run)
    bits = found["o"].float().view(torch.int32) & -65536
    return found | {"o": bits.view(torch.float32).double()}


def stochastic(run: LinearRun) -> Outputs:
    """o is rounded at random, up or down."""
    found = healthy(run)
    make = torch.Generator().manual_seed(0)
    noise = torch.randint(0, 65536, found["o"].shape, generator=make, dtype=torch.int32)
    bits = (found["o"].float().view(torch.int32) + noise) & -65536
    return found | {"o": bits.view(torch.float32).double()}


def two_roundings(run: LinearRun) -> Outputs:
    """The terms of o from within a chunk and from before it are rounded each, and their sum."""
    found = healthy(run)
    within = run.emulated(replace(run.recipe, out="fp32"), "no_inter_chunk", forward=True)["o"]
    return found | {"o": within.bfloat16().double() + (found["o"] - within).bfloat16().double()}


def scaled(run: LinearRun) -> Outputs:
    """o is 0.4 % too large: a scale that was rounded to BF16."""
    found = healthy(run)
    return found | {"o": found["o"] * (1 + 2.0**-8)}


def coarse_exp(run: LinearRun) -> Outputs:
    """Every step's decay is 0.1 % too large."""
    g = run.capture.tensors["g"]
    other = replace(run.capture, tensors={**run.capture.tensors, "g": g + 2.0**-10})
    return healthy(LinearRun(other, run.device))


def state_lost(run: LinearRun) -> Outputs:
    """The state is lost once, in the middle of the sequence."""
    half = STEPS // 2
    given = {n: t for n, t in run.capture.tensors.items() if n != "initial_state"}
    found = healthy(run)
    rest = replace(run.capture, tensors={name: t[:, half:] for name, t in given.items()})
    later = healthy(LinearRun(rest, run.device))
    return found | {"o": torch.cat([found["o"][:, :half], later["o"]], 1)}


def values_in_8_bits(run: LinearRun) -> Outputs:
    """v is rounded to E4M3 inside."""
    v = run.capture.tensors["v"]
    coarse = v.float().to(torch.float8_e4m3fn).to(v.dtype)
    return healthy(LinearRun(replace(run.capture, tensors={**run.capture.tensors, "v": coarse}), run.device))


def gradient_halved(run: LinearRun) -> Outputs:
    """dK comes from within the chunk alone in every other feature."""
    found = healthy(run)
    within = run.emulated(run.recipe, "no_inter_chunk")["dk"]
    dk = found["dk"].clone()
    dk[..., ::2] = within[..., ::2]
    return found | {"dk": dk}


def permuted(run: LinearRun) -> Outputs:
    """Healthy: features of q and k in another order."""
    width = run.capture.tensors["q"].shape[3]
    order = torch.randperm(width, generator=torch.Generator().manual_seed(0))
    by_channel = [n for n, t in run.capture.tensors.items() if n in ("q", "k", "a", "b", "g") and t.ndim == 4]
    tensors = dict(run.capture.tensors) | {n: run.capture.tensors[n][..., order] for n in by_channel}
    tensors["initial_state"] = run.capture.tensors["initial_state"][:, :, order]
    found = healthy(LinearRun(replace(run.capture, tensors=tensors), run.device))
    back = order.argsort()
    turned = {f"d{n}": found[f"d{n}"][..., back] for n in by_channel}
    states = {n: found[n][:, :, back] for n in ("final_state", "dinitial_state")}
    return found | turned | states


def as_released(run: LinearRun) -> LinearRecipe:
    """The recipe of flash-linear-attention's kernel."""
    chunk = 16 if run.capture.operator == "rwkv7" else 64
    return replace(run.recipe, chunk=chunk, **run.released()[0])


KERNELS: dict[str, Callable[[LinearRun], Outputs]] = {
    "o truncated": truncated,
    "o rounded at random": stochastic,
    "o rounded twice": two_roundings,
    "scale 0.4 % off": scaled,
    "decays 0.1 % off": coarse_exp,
    "state lost once": state_lost,
    "v in 8 bits": values_in_8_bits,
    "half of dK without the later chunks": gradient_halved,
    "healthy: chunks of 48": lambda run: healthy(run, replace(run.recipe, chunk=48)),
    "healthy: products with the state in fp32": lambda run: healthy(run, replace(run.recipe, inter="fp32")),
    "healthy: features permuted": permuted,
    "healthy: nothing rounded but the outputs": lambda run: healthy(
        run, replace(run.recipe, operands="fp32", chunk=32)
    ),
    "healthy: with the released kernel's choices": lambda run: healthy(run, as_released(run)),
}


def without_limits(found: LinearDiagnosis) -> bool:
    """Whether a head would be accused without the two limits."""
    quantities = [q for head in found.heads for q in head.quantities]
    lossy = any(q.factor_ci95 is not None and q.factor_ci95[0] > LOSSY for q in quantities)
    biased = any(q.p_adjusted is not None and q.p_adjusted < found.level for q in quantities)
    return lossy or biased or bool(found.labels & ACCUSED)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--first", type=int, default=1000, help="the first seed")
    parser.add_argument("--only", nargs="*", default=KERNELS, help="Kernels whose names begin so.")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    table: dict[str, dict[str, int]] = {}
    for name, kernel in KERNELS.items():
        if not name.startswith(tuple(options.only)):
            continue
        begun, counts, causes = time.perf_counter(), Counter[str](), Counter[str]()
        for seed in range(options.first, options.first + options.seeds):
            operator = OPERATORS[seed % len(OPERATORS)]
            tensors, do = inputs_of(operator, seed, STEPS, "long")
            capture = LinearCapture(operator, {**tensors, "do": do})
            made = kernel(LinearRun(capture, torch.device("cpu")))
            kept = {}
            for output, value in made.items():
                like = torch.bfloat16 if output == "o" else torch.float32
                if output[1:] in tensors:
                    like = tensors[output[1:]].dtype
                kept[output] = value.to(like)
            found = inspect_linear(replace(capture, tensors={**capture.tensors, **kept}))
            accused = found.labels & ACCUSED
            counts["accused"] += bool(accused)
            counts["only undecided"] += not accused and "undecided" in found.labels
            counts["clean"] += found.labels == {"clean"}
            counts["accused without the limits"] += without_limits(found)
            counts.update(accused)
            causes.update({str(f.cause) for f in found.findings if f.label in accused})
        table[name] = {"seeds": options.seeds, **counts, **{f"named: {c}": n for c, n in causes.items()}}
        print(f"{name}: {table[name]}, {time.perf_counter() - begun:.0f} s", flush=True)
        if options.json is not None:
            options.json.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
