"""What every defect does to every family, in healthy kernels' errors: a Markdown table.

    PYTHONPATH=benchmarks python -m verdicts.table [--dtype fp16] [--captures FOLDER] > FILE

A cell is the largest, over heads and over O, dQ, dK and dV, of the error over the larger of the healthy kernel's and of
the inputs' format's own (ulp²/12 in each element); the largest row's ratio follows after a slash. "=": no bit changed.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from verdicts.defects import DEFECTS, home
from verdicts.effects import Effect, effects, reference
from verdicts.inputs import FAMILIES, Inputs, captures, draw
from verdicts.kernels import Outputs
from verdicts.planting import Defect

Known = dict[tuple[str, str], tuple[Inputs, Outputs, Outputs]]


def measure(defect: Defect, name: str, inputs: Inputs, known: Known) -> list[Effect]:
    """The defect's effects; reference and healthy run are kept in ``known`` for the next defect."""
    key = name, str(defect.kernel)
    if key not in known:
        known[key] = inputs, reference(inputs), defect.healthy(inputs)
    inputs, truth, healthy = known[key]
    return effects(truth, defect.run(inputs), [healthy])


def cell(found: list[Effect]) -> str:
    """The largest ratio and the largest row's, LSE left out."""
    if not any(e.changed for e in found):
        return "="
    judged = [e for e in found if e.quantity != "lse"]
    return f"{max(e.factor for e in judged):.3g} / {max(e.row_factor for e in judged):.3g}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dtype", choices=("bf16", "fp16"), default="bf16")
    parser.add_argument("--captures", type=Path)
    options = parser.parse_args()
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[options.dtype]
    real = captures(options.captures) if options.captures else {}
    known: Known = {}
    print("| defect | where | culprit | makes wrong | setting |", " | ".join((*FAMILIES, *real)), "|")
    print("|---" * (5 + len(FAMILIES) + len(real)), "|", sep="")
    for defect in DEFECTS.values():
        setting = home(defect)
        calls = {f"{family}/{setting}": draw(family, setting, dtype=dtype) for family in FAMILIES} | real
        cells = [cell(measure(defect, n, x, known)) if defect.applies(x) else "" for n, x in calls.items()]
        about = (defect.name, defect.where, defect.culprit, ", ".join(defect.quantities), setting)
        print("|", " | ".join((*about, *cells)), "|", flush=True)


if __name__ == "__main__":
    main()
