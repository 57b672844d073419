"""Why the decay's gradient of fla's gated delta rule and KDA is further off than a well-rounded kernel's: one line.

    python benchmarks/study_linear_kernels.py OUT/released --operators gated_delta_rule kda --inputs gaussian --heads 8
    python benchmarks/study_linear_kernels.py OUT/fp32 …the same… --sums-in-fp32
    python benchmarks/study_linear_decay_sums.py OUT/released OUT/fp32 [--json FILE]

The first two need a GPU. fla 0.6.0's backward adds to the gradient of a chunk's whole decay ``tl.sum(b_h * b_dh)`` of
16-bit tiles, which Triton multiplies and adds in 16 bits. Of the decay's gradient, of heads with short memory (the
first half) and long (the second), stated is the error over an emulated kernel's in chunks of 64: a well-rounded one's;
one's whose score gradients are fp32 in it; one's with that sum in 16 bits. Beside it how much more the error changes at
chunk boundaries, and within chunks, than a well-rounded kernel's.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from measuring import made_by, save
from torch import Tensor

from attn_diag.analyses.linear.boundaries import Jumps
from attn_diag.analyses.linear.inspect import inspect_linear
from attn_diag.captures.linear import LinearCapture, load_linear
from attn_diag.head.linear import LinearRun

CHUNK = 64


def squares(error: Tensor) -> list[float]:
    """Summed squares, by head."""
    return [float(x) for x in error.square().flatten(3).sum((0, 1, 3))]


def figures(capture: LinearCapture) -> dict[str, Any]:
    """Of one capture, by head."""
    run = LinearRun(capture, torch.device("cpu"))
    fmt, true = run.format, run.reference.values["dg"]
    assert fmt is not None
    own = replace(run.recipe, chunk=CHUNK)
    recipes = {
        "well rounded": own,
        "score gradients in fp32": replace(own, score_gradients="fp32"),
        "sums in 16 bits": replace(own, decay_sums=fmt),
    }
    error = capture.tensors["dg"].double() - true
    sound, found = run.emulated(own)["dg"] - true, {"captured": squares(error[..., None])}
    found |= {name: squares((run.emulated(recipe)["dg"] - true)[..., None]) for name, recipe in recipes.items()}
    jumps: dict[str, list[float]] = {"at boundaries": [], "within chunks": []}
    for head in range(true.shape[2]):
        one, other = (Jumps.of(x[:, :, head], run, CHUNK) for x in (error, sound))
        jumps["at boundaries"].append(math.sqrt(float(one.at.mean() / other.at.mean())))
        jumps["within chunks"].append(math.sqrt(float(one.within.mean() / other.within.mean())))
    verdict = inspect_linear(capture, device="cpu")
    named = [
        [q.factor, q.answer, q.cause]
        for head in verdict.captures[0].observations[0].heads
        for q in head.quantities
        if q.quantity == "dg"
    ]
    return {"squares": found, "jumps": jumps, "verdict": named}


def ratios(several: list[dict[str, Any]], heads: slice) -> dict[str, float]:
    """Of these heads of all captures together."""
    total = {n: sum(sum(one["squares"][n][heads]) for one in several) for n in several[0]["squares"]}
    return {name: math.sqrt(total["captured"] / total[name]) for name in total if name != "captured"}


def mean_ratios(several: list[dict[str, Any]], heads: slice) -> dict[str, float]:
    """The geometric mean over these heads, each of which weighs the same."""
    found = {}
    for name in several[0]["squares"]:
        logs = [
            math.log(x / y) / 2
            for one in several
            for x, y in zip(one["squares"]["captured"][heads], one["squares"][name][heads], strict=True)
        ]
        found[name] = math.exp(sum(logs) / len(logs))
    del found["captured"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("released", type=Path)
    parser.add_argument("fp32", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    kept: dict[str, Any] = {}
    for kind, folder in (("released", options.released), ("sums in fp32", options.fp32)):
        for operator in ("gated_delta_rule", "kda"):
            files = sorted(folder.glob(f"{operator}_gaussian_*.safetensors"))
            captures = [load_linear(file) for file in files]
            plain = [
                replace(c, tensors={n: t for n, t in c.tensors.items() if not n.startswith("recurrent.")})
                for c in captures
            ]
            several = [figures(capture) for capture in plain]
            half = plain[0].tensors["v"].shape[2] // 2
            one: dict[str, Any] = {
                "short memory": mean_ratios(several, slice(half)),
                "long memory": mean_ratios(several, slice(half, None)),
                "long memory, pooled": ratios(several, slice(half, None)),
                "by capture": several,
            }
            kept[f"{operator}, {kind}"] = one
            print(f"{operator}, {kind}, {len(files)} captures")
            for name in ("short memory", "long memory", "long memory, pooled"):
                print(f"    {name}: { ({n: round(x, 3) for n, x in one[name].items()}) }")
            for figure in several:
                print("    jumps", {n: [round(x, 2) for x in v[half:]] for n, v in figure["jumps"].items()})
                print("    verdict", figure["verdict"][half:], flush=True)
    if options.json is not None:
        save(made_by() | kept, options.json)


if __name__ == "__main__":
    main()
