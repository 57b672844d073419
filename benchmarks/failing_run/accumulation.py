"""How the error of dW_Q accumulates over consecutive steps of a failing run, and by what: bias, size or coherence.

    python benchmarks/failing_run/accumulation.py CAPTURES MOMENTUM --layer 1 --out accumulation.json \
        [--head N] [--until STEP] [--device auto|cpu|cuda]

CAPTURES: captures of consecutive steps of one layer (``attn_diag.capture``), with x, w_q, dO, O, dQ; w_q is the weight
before the step. MOMENTUM: for each step stepSSSSSS_layerLL.safetensors with ``exp_avg`` and ``exp_avg_sq`` [C, C],
Adam's moments of the query rows before the step; a step without one has no momentum. One step is in memory at a time;
of every step three matrices [D, C] are kept. ``--head``: default the one with the largest error (``largest_error``);
``--until``: only steps before this one, such as that at which the run left its trend.

The JSON has ``figures`` (the paper's, of ``paper_figures``), ``steps`` (a ``StepRow`` a step), ``over_steps`` and
``verdict`` (``accumulation_verdict``, whose docstring has the rules).

With E_s = sum_t -alpha Delta_delta_t (P K)_t (x) x_t the part of step s's error of dW_Q that comes through delta (Qiu &
Yao, arXiv 2510.04212, section 3.2), G_s the true dW_Q, W_s the weight and M_s Adam's first moment before the step, all
[D, C] of one head: E is an error of a gradient, so descent moves the weight along -E.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from accumulation_steps import BETA_1, HeadSteps, Moments, Series, StepRow, follow
from accumulation_verdict import OverSteps, Verdict, judge, over_steps
from runlog import plain

import attn_diag
from attn_diag import Capture, InputError, PaperFigures
from attn_diag.analyses.paper.atoms import random_cosine95, thinned
from attn_diag.captures.loading import find_captures
from attn_diag.head.machine import pick_device
from attn_diag.work import Progress

SCHEMA = "attn-diag-accumulation"
# Steps on which the head is chosen.
_PICKED = 8
_CHOSEN = (
    "The head was chosen for the size of its error, for which no test allows; those of the steps' signs, of bias and "
    "coherence across steps, feel it least. All heads' running sums stand in the paper's Figure 5a."
)


@dataclass(frozen=True)
class Accumulation:
    """What the JSON holds. ``chance``: 95 % quantiles of |cosine| of random directions, by side and for matrices."""

    run: str | None
    layer: int
    head: int
    chosen: str
    chance: dict[str, float]
    tool: dict[str, Any]
    notes: tuple[str, ...]
    steps: tuple[StepRow, ...]
    over_steps: OverSteps
    verdict: Verdict
    figures: dict[str, Any]
    schema: str = SCHEMA
    schema_version: int = 2

    def to_json(self) -> str:
        """Numbers with six digits; those that are not finite as strings."""
        found = plain(asdict(self))
        found["figures"] = self.figures
        return json.dumps(found, separators=(",", ":"), allow_nan=False) + "\n"


def captures_of(folder: Path, layer: int, until: int | None = None) -> list[Capture]:
    """The captures of a layer, opened, in order of their steps; those of steps before ``until`` where it is given.

    Raises InputError for two of one step, or fewer than two.
    """
    # Named by their files alone: a result says nothing of where they lay.
    found = [replace(attn_diag.load(path), source=path.name) for path in find_captures([folder])]
    chosen = [c for c in found if c.metadata.layer == layer and c.metadata.step is not None]
    chosen = [c for c in chosen if until is None or (c.metadata.step or 0) < until]
    if len(chosen) < 2:
        raise InputError(f"{folder}: captures of two steps of layer {layer} or more are expected, got {len(chosen)}")
    chosen.sort(key=lambda c: c.metadata.step or 0)
    steps = [c.metadata.step for c in chosen]
    if twice := sorted({s for s in steps if s is not None and steps.count(s) > 1}):
        raise InputError(f"{folder}: several captures of step {twice[0]}; one a step is expected")
    return chosen


def accumulation(
    captures: Sequence[Capture],
    momentum: Path,
    *,
    layer: int,
    head: int | None = None,
    device: str = "auto",
    progress: Progress | None = None,
) -> Accumulation:
    """The whole analysis. ``captures`` of one layer, in order; ``head``: the model's number; None: ``largest_error``.

    Raises InputError where captures lack what the analysis needs, or fewer than three steps have an error.
    """
    reason = "as asked for"
    if head is None:
        head, reason = largest_error(captures, device)
    figures = figures_of(captures, layer, head, device, progress)
    moments = Moments(momentum, layer)
    reader = HeadSteps(layer, head, moments, pick_device(device))
    of = Series()
    for done, found in enumerate(follow(reader, captures), 1):
        if isinstance(found, int):
            of.left_out.append(found)
        else:
            of.add(*found)
        if progress is not None:
            progress(done, len(captures))
    if len(of.rows) < 3:
        raise InputError(f"three steps with an error of dW_Q or more are expected, got {len(of.rows)}")
    over = over_steps(of)
    d, c = of.errors[0].shape
    return Accumulation(
        run=figures.chosen.run,
        layer=layer,
        head=head,
        chosen=reason,
        chance={"left": random_cosine95(d), "right": random_cosine95(c), "matrix": random_cosine95(d * c)},
        tool=asdict(figures.tool),
        notes=(*_notes(captures, moments, of), *([_CHOSEN] if reason != "as asked for" else [])),
        steps=tuple(of.rows),
        over_steps=over,
        verdict=judge(over),
        figures=json.loads(figures.to_json(indent=None)),
    )


def largest_error(captures: Sequence[Capture], device: str) -> tuple[int, str]:
    """The head with the largest ||E|| / ||dW_Q||, in the median over evenly spread steps, and these words.

    Not the worst of any one step: among many heads and steps a few have a bias by chance. Raises InputError where no
    head has a dW_Q.
    """
    picked = [captures[i] for i in thinned(len(captures), _PICKED)]
    found: dict[int, list[float]] = {}
    for capture in picked:
        for _, _, head in attn_diag.inspect_captures([capture], device=device).entries():
            share = head.propagation.dw_q.predicted_relative_error if head.propagation.dw_q is not None else None
            if head.head is not None and share is not None:
                found.setdefault(head.head, []).append(share)
    if not found:
        raise InputError("no head has an error of dW_Q: capture x, w_q, dO and O")
    best = max(found, key=lambda head: median(found[head]))
    return best, f"of {len(found)} heads the largest ‖E‖ / ‖dW_Q‖ in the median over {len(picked)} evenly spread steps"


def figures_of(
    captures: Sequence[Capture], layer: int, head: int, device: str, progress: Progress | None
) -> PaperFigures:
    """The paper's figures of one head, and of all heads of the layer where a figure compares them."""
    whole = attn_diag.paper_figures(captures, layer=layer, device=device, progress=progress)
    if whole.chosen.head == head:
        return whole
    own = attn_diag.paper_figures(captures, layer=layer, head=head, device=device, progress=progress)
    steps, triggers = own.delta_steps, own.triggers
    if steps is not None and whole.delta_steps is not None:
        steps = replace(steps, heads=whole.delta_steps.heads)
    if triggers is not None and whole.triggers is not None and whole.triggers.steps == triggers.steps:
        triggers = replace(triggers, layer=whole.triggers.layer)
    return replace(own, spectral_norms=whole.spectral_norms, delta_steps=steps, triggers=triggers)


def _notes(captures: Sequence[Capture], moments: Moments, of: Series) -> tuple[str, ...]:
    first = captures[0]
    steps = [row.step for row in of.rows]
    notes = [
        f"Errors and gradients are of the sequences captured, {first.batch} of a step's batch; weight and momentum "
        "come of the whole batch. A share of dW_Q is therefore that of these sequences' own gradient.",
        "E is an error of a gradient: descent moves the weight along -E.",
        "W_Q as captured, in " + str(first.tensors["w_q"].dtype).removeprefix("torch.") + ", before each step.",
        "Past sums of errors begin with the first step captured; Adam's momentum remembers steps before it, at most "
        f"{BETA_1:g}^n of it after n steps.",
    ]
    gaps = [b for a, b in pairwise(steps) if b != a + 1]
    if gaps:
        notes.append(f"The steps are not consecutive: gaps before {', '.join(map(str, gaps))}.")
    if moments.missing:
        notes.append(f"No momentum of {len(moments.missing)} steps, the first of them {moments.missing[0]}.")
    if of.left_out:
        notes.append(f"Left out, without a finite error and gradient: steps {', '.join(map(str, of.left_out))}.")
    if misfits := [row.step for row in of.rows if row.o_misfit is not None]:
        notes.append(
            f"At {len(misfits)} steps, the first of them {misfits[0]}, O is more than 5 % off the reference: the "
            "paper's figures leave them out, the steps here keep them."
        )
    return tuple(notes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("captures", type=Path)
    parser.add_argument("momentum", type=Path)
    parser.add_argument("--layer", type=int, required=True)
    parser.add_argument("--head", type=int, help="default: the one with the largest error")
    parser.add_argument("--until", type=int, metavar="STEP", help="steps before this one only")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    o = parser.parse_args()

    def tell(done: int, total: int) -> None:
        print(f"\r{done}/{total}", end="", file=sys.stderr, flush=True)

    captures = captures_of(o.captures, o.layer, o.until)
    found = accumulation(captures, o.momentum, layer=o.layer, head=o.head, device=o.device, progress=tell)
    o.out.write_text(found.to_json())
    print(file=sys.stderr)
    print("\n".join([found.verdict.sentence, *(f.sentence for f in found.verdict.findings)]))


if __name__ == "__main__":
    main()
