"""Why released kernels of linear attention leave less error than a well-rounded one, or more: which choice it is.

    python benchmarks/study_linear_kernels.py OUT --unjudged    # needs a GPU; captures of fla 0.6.0 and mamba_ssm 2.3.2
    python benchmarks/study_linear_choices.py OUT [--json FILE]

Of every capture: the error of each quantity over the yardstick's (a well-rounded kernel in the worst of several
chunks), over a well-rounded kernel's in the kernel's own chunks (those whose emulation comes nearest to O), and over
one's that also rounds as the released kernel's source does (``RELEASED``, the nearest of several); how much of the
squared error that last emulation makes, bit for bit; and what ``inspect`` names where the first is below 0.9, or more
than 1.1.
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

from attn_diag.analyses.linear import inspect_linear
from attn_diag.captures.linear import LinearCapture, load_linear
from attn_diag.head.linear import LinearRun
from attn_diag.reference.linear import OF_HEADS


def squares(run: LinearRun, name: str, x: Tensor, other: Tensor) -> list[float]:
    """||x - other||^2 by head."""
    places = [run.place(name, head) for head in range(run.capture.tensors["v"].shape[2])]
    return [float((x[p].double() - other[p]).square().sum()) for p in places if p is not None]


def figures(capture: LinearCapture) -> dict[str, Any]:
    """Of one capture."""
    run = LinearRun(capture, torch.device("cpu"))
    observed, true = capture.observation(None)[1], run.reference.values
    chunks = [*run.chunks, *([256] if run.chunks[-1] == 128 else [])]
    sound = {chunk: run.emulated(replace(run.recipe, chunk=chunk)) for chunk in chunks}
    released = {
        (i, chunk): run.emulated(replace(run.recipe, chunk=chunk, **known))
        for i, known in enumerate(run.released())
        for chunk in chunks
    }
    best = min(released, key=lambda one: sum(squares(run, "o", observed["o"], released[one]["o"])))
    own = best[1]
    verdict = inspect_linear(capture, device="cpu").captures[0].observations[0]
    found: dict[str, Any] = {
        "kernel": best[0],
        "chunk": own,
        "labels": sorted({label for h in verdict.heads for label in h.labels}),
    }
    for name in (n for n in observed if n in true and n[1:] not in OF_HEADS):
        left = squares(run, name, observed[name], true[name])
        missed = squares(run, name, observed[name], released[best][name])
        judged = [q for h in verdict.heads for q in h.quantities if q.quantity == name]
        found[name] = {
            "yardstick": [q.factor for q in judged],
            "own chunks": ratios(left, squares(run, name, sound[own][name], true[name])),
            "released": ratios(left, squares(run, name, released[best][name], true[name])),
            "explained": [1 - m / e for m, e in zip(missed, left, strict=True)],
            "named": [q.cause for q in judged],
            "answers": [q.answer for q in judged],
        }
    return found


def ratios(errors: list[float], others: list[float]) -> list[float]:
    """Of root mean squares."""
    return [math.sqrt(x / y) for x, y in zip(errors, others, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    kept: dict[str, Any] = {}
    for file in sorted(options.folder.glob("*.safetensors")):
        capture = load_linear(file)
        plain = {n: t for n, t in capture.tensors.items() if not n.startswith("recurrent.")}
        kept[file.stem] = one = figures(replace(capture, tensors=plain))
        print(f"{file.stem}: chunks of {one['chunk']}, {one['labels']}")
        for name in (n for n in one if n not in ("kernel", "chunk", "labels")):
            shown = {k: [round(x, 2) for x in v] for k, v in one[name].items() if k not in ("named", "answers")}
            print(f"    {name:15} {shown} {sorted({str(c) for c in one[name]['named']})}", flush=True)
        if options.json is not None:
            save(made_by() | kept, options.json)


if __name__ == "__main__":
    main()
