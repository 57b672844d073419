"""Why released kernels of linear attention leave less error than a well-rounded one, or more: which choice it is.

    python benchmarks/study_linear_kernels.py OUT --unjudged    # needs a GPU; captures of fla 0.6.0 and mamba_ssm 2.3.2
    python benchmarks/study_linear_choices.py OUT [--json FILE] [--unjudged]

Of every capture: the error of each quantity over the yardstick's (a well-rounded kernel in the worst of several
chunks), over a well-rounded kernel's in the kernel's own chunks (those whose emulation comes nearest to O), and over
one's that also rounds as the released kernel's source does (``RELEASED``, the nearest of several); how much of the
squared error that last emulation makes, bit for bit; that emulation's error over its own without each choice, and over
its own with features of q and v in another order (what chance makes of such a ratio); how many rows carry the error;
and what ``inspect`` names where the first is below 0.9, or more than 1.1.
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

from attn_diag.analyses.linear.inspect import inspect_linear
from attn_diag.captures.linear import LinearCapture, load_linear
from attn_diag.head.linear import LinearRun
from attn_diag.reference.linear import OF_HEADS

SHOWN = ("yardstick", "own chunks", "released", "by chance", "explained")


def squares(run: LinearRun, name: str, x: Tensor, other: Tensor) -> list[float]:
    """||x - other||^2 by head."""
    places = [run.place(name, head) for head in range(run.capture.tensors["v"].shape[2])]
    return [float((x[p].double() - other[p]).square().sum()) for p in places if p is not None]


def rows(run: LinearRun, name: str, x: Tensor, other: Tensor) -> list[float]:
    """How many rows (steps, or a state's) carry ||x - other||^2, by head: (sum s)^2 / sum s^2 of their squares s."""
    found = []
    for head in range(run.capture.tensors["v"].shape[2]):
        if (place := run.place(name, head)) is not None:
            off = (x[place].double() - other[place]).square()
            each = off.flatten(0, -2).sum(1) if off.ndim == 3 else off.flatten()
            found.append(float(each.sum().square() / each.square().sum()))
    return found


def figures(capture: LinearCapture, device: str, *, judge: bool) -> dict[str, Any]:
    """Of one capture."""
    run = LinearRun(capture, torch.device(device))
    observed = {name: x.to(run.device) for name, x in capture.observation(None)[1].items()}
    true = run.reference.values
    chunks = [*run.chunks, *([256] if run.chunks[-1] == 128 else [])]
    kernels = {
        (i, chunk): replace(run.recipe, chunk=chunk, **known)
        for i, known in enumerate(run.released())
        for chunk in chunks
    }
    missed = {
        one: sum(squares(run, "o", observed["o"], run.emulated(recipe, forward=True)["o"]))
        for one, recipe in kernels.items()
    }
    best = min(missed, key=lambda one: missed[one])
    released, sound = run.emulated(kernels[best]), run.emulated(replace(run.recipe, chunk=best[1]))
    without = {
        site: run.emulated(replace(kernels[best], **{site: getattr(run.recipe, site)}))
        for site in run.released()[best[0]]
    }
    other = LinearRun(permuted(capture), run.device)
    again = other.emulated(kernels[best])
    heads = inspect_linear(capture, device=device).captures[0].observations[0].heads if judge else ()
    found: dict[str, Any] = {"kernel": best[0], "chunk": best[1]}
    if judge:
        found["labels"] = sorted({label for h in heads for label in h.labels})
    for name in (n for n in observed if n in true and n[1:] not in OF_HEADS):
        left = squares(run, name, observed[name], true[name])
        bits = squares(run, name, observed[name], released[name])
        found[name] = {
            "own chunks": ratios(left, squares(run, name, sound[name], true[name])),
            "released": ratios(left, squares(run, name, released[name], true[name])),
            "by chance": ratios(
                squares(run, name, released[name], true[name]),
                squares(other, name, again[name], other.reference.values[name]),
            ),
            "over without": {
                site: ratios(squares(run, name, released[name], true[name]), squares(run, name, made[name], true[name]))
                for site, made in without.items()
            },
            "rows": rows(run, name, observed[name], true[name]),
            "explained": [1 - m / e for m, e in zip(bits, left, strict=True)],
        }
        if judge:
            judged = [q for h in heads for q in h.quantities if q.quantity == name]
            found[name] |= {
                "yardstick": [q.factor for q in judged],
                "named": [q.cause for q in judged],
                "answers": [q.answer for q in judged],
            }
    return found


def permuted(capture: LinearCapture) -> LinearCapture:
    """It, with features in another order: the same mathematics and roundings, and sums in another order."""
    make = torch.Generator().manual_seed(0)
    of_values, of_keys = (torch.randperm(capture.tensors[n].shape[3], generator=make) for n in "vq")
    given = {**capture.inputs, "do": capture.tensors["do"]}
    for name, x in given.items():
        if name in ("v", "do", "initial_state"):
            given[name] = x[..., of_values]
        elif name in ("q", "k", "a", "b", "g") and x.ndim == 4:
            given[name] = x[..., of_keys]
    if "initial_state" in given:
        given["initial_state"] = given["initial_state"][:, :, of_keys]
    return replace(capture, tensors=given)


def ratios(errors: list[float], others: list[float]) -> list[float]:
    """Of root mean squares."""
    return [math.sqrt(x / y) for x, y in zip(errors, others, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--unjudged", action="store_true", help="neither the yardstick nor what inspect names")
    options = parser.parse_args()
    kept: dict[str, Any] = {}
    for file in sorted(options.folder.glob("*.safetensors")):
        capture = load_linear(file)
        plain = {n: t for n, t in capture.tensors.items() if not n.startswith("recurrent.")}
        kept[file.stem] = one = figures(replace(capture, tensors=plain), options.device, judge=not options.unjudged)
        print(f"{file.stem}: kernel {one['kernel']} in chunks of {one['chunk']}, {one.get('labels', '')}")
        for name in (n for n in one if isinstance(one[n], dict)):
            shown = {k: [round(x, 2) for x in v] for k, v in one[name].items() if k in SHOWN}
            causes = sorted({str(c) for c in one[name].get("named", ())})
            print(f"    {name:15} {shown} {causes}", flush=True)
        if options.json is not None:
            save(made_by() | kept, options.json)


if __name__ == "__main__":
    main()
