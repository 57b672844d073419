"""Whether the error of dW_Q adds up over consecutive steps of a failing run, and by what: bias, size or coherence.

    python benchmarks/failing_run/accumulation.py CAPTURES --layer 1 --out accumulation.json \
        [--head N] [--until STEP] [--device auto|cpu|cuda]

CAPTURES: of consecutive steps of one layer (``attn_diag.capture``), with x, w_q, dO, O, dQ. One step is in memory at a
time; of every step one matrix [D, C] is kept. ``--head``: default the one with the largest error; ``--until``: only
steps before this one, such as that at which the run left its trend.

With E_s = sum_t -alpha Delta_delta_t (P K)_t (x) x_t the part of step s's error of dW_Q that comes through delta (Qiu &
Yao, arXiv 2510.04212, section 3.2) and G_s the true dW_Q, both [D, C] of one head, seven tests are made of the steps:

1. bias, spread: Student's t of the steps' mean errors of delta, from their spread alone.
2. bias, band: the running sum of these means against Lévy's band, from each step's clustered standard error.
3. bias, equal weights: Student's t of the steps' mean / standard error. In 1 and 2 a few steps with errors many times
   larger than the others, as at the end of a failing run, decide alone.
4. size: the noise factor is above 2 (sign test over the steps; production kernels have 0.98 to 1.4).
5. coherence within steps: at more steps than chance makes it (5 %, binomial) the rank-1 atoms' coherence lies above the
   95 % quantile of its own null, random signs of the rows.
6. coherence across steps: ||sum E||^2 / sum ||E||^2 against random signs of the steps.
7. coherence across steps, equal weights: the same of E / ||E||, as Adam's division by sqrt(V) weighs steps.

These seven are one family, adjusted by Holm, level 1 %; the same of the first, middle and last third of the steps are a
second one, as a failure changes character while it grows. The verdict, whose rules were fixed before any data:

- **bias** where 1, 2 or 3 is significant. All three take the steps as independent: where neighbouring steps are
  positively correlated beyond chance (``Accumulated.lag1``), the answer is "undecided", not yes.
- **size** where 4 is significant and ||E|| / ||G|| is 0.03 or more in the median: where the monitor's alarm begins.
- **coherence within steps** where 5 is significant, **across steps** where 6 or 7 is.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median

import numpy as np
import torch
from alarms import STEP, drawable
from record import write_json
from scipy import stats
from torch import Tensor

import attn_diag
from attn_diag import Capture, InputError, PaperFigures
from attn_diag.analyses.inspection.capture_job import CaptureJob, Runs
from attn_diag.analyses.inspection.inspect import DEFAULT_LEVEL
from attn_diag.analyses.paper.atoms import thinned
from attn_diag.captures.loading import find_captures
from attn_diag.captures.selection import Selection
from attn_diag.head.machine import pick_device
from attn_diag.head.propagation import add_parts
from attn_diag.reports.charts import Axis, Band, Chart, Section, Series
from attn_diag.reports.paper import paper_gallery
from attn_diag.results.base import Result, Tool
from attn_diag.results.diagnosis import HeadDiagnosis
from attn_diag.results.wording import DASH, number, percent
from attn_diag.statistics.means import holm
from attn_diag.statistics.sums import accumulate, band_p_value, sign_coherence, spread_test
from attn_diag.statistics.welch import degrees_of_freedom
from attn_diag.watching.monitoring.alarm import AlarmRule

LEVEL = 0.01
NOISE = 2.0
SHARE = AlarmRule().level
# Each test, and what its statistic is.
TESTS = {
    "bias, spread": "t of the steps' means of delta's error",
    "bias, band": "largest running sum / 99 % band",
    "bias, equal weights": "t of the steps' mean / error",
    "size": f"steps with noise factor > {NOISE:g}",
    "coherence within steps": "steps above their null's 95 %",
    "coherence across steps": "‖ΣE‖² / Σ‖E‖²",
    "coherence across steps, equal weights": "the same of E / ‖E‖",
}
# Of each of the paper's figures the chart that is its own.
FIGURES = ("figure-3-steps", "figure-4-steps", "figure-5a-total", "figure-5a-heads", "figure-5bc-product", "figure-6",
           "figure-13-head")  # fmt: skip
# Steps on which the head is chosen.
_PICKED = 8
_ANSWERS = {True: "yes", False: "no", None: "undecided, as neighbouring steps are correlated"}


@dataclass(frozen=True)
class Step:
    """One step of the head."""

    step: int
    noise_factor: float | None
    """Size of delta's error in units of what one correct rounding of O leaves."""
    share: float
    """||E|| / ||G||."""


@dataclass(frozen=True)
class Test:
    """One of ``TESTS``; what is None had no data."""

    name: str
    statistic: float | None
    limit: float | None
    """What its null keeps below (|t| for t) in 95 % of cases, or 99 % for the band."""
    p_value: float | None
    """Its own."""
    p_adjusted: float | None = None
    """Holm's, in its family."""

    @property
    def significant(self) -> bool:
        """At the level of the verdict."""
        return self.p_adjusted is not None and self.p_adjusted < LEVEL

    @property
    def words(self) -> str:
        """Statistic, limit and p on one line of a table's cell."""
        if self.p_adjusted is None:
            return DASH
        limit = "" if self.limit is None else f" ({self.limit:.3g})"
        return f"{number(self.statistic)}{limit}, p\u00a0=\u00a0{self.p_adjusted:.2g}".replace("-", "\u2011")


@dataclass(frozen=True)
class Window:
    """Some consecutive steps."""

    name: str
    first: int
    last: int
    count: int
    noise_factor: float | None
    """The median over the steps."""
    share: float
    """The median of ||E|| / ||G||."""
    coherent_steps: int
    """Those whose coherence is above its null's 95 % quantile."""
    bias_energy: float | None
    """The median of mean^2 / mean square of delta's error: what its mean makes of it."""
    correlated: bool
    """Whether neighbouring steps' means of delta's error are, beyond chance."""
    tests: tuple[Test, ...]
    """In the order of ``TESTS``."""


@dataclass(frozen=True)
class Accumulation(Result):
    """What the JSON holds."""

    run: str | None
    """The captures' random identity; None where they state none."""
    layer: int
    """The model's number of the layer."""
    head: int
    """The model's number of the head."""
    chosen: str
    """Why this one."""
    tool: Tool
    notes: tuple[str, ...]
    """What was assumed or is missing."""
    steps: tuple[Step, ...]
    windows: tuple[Window, ...]
    """All steps together, then thirds of them."""
    figures: PaperFigures
    """The paper's, as the tool makes them."""


def judge(w: Window) -> dict[str, bool | None]:
    """The verdict by the rules above; None: undecided."""
    spread, band, equal, size, within, across, across_equal = (test.significant for test in w.tests)
    biased = spread or band or equal
    return {
        "bias": None if biased and w.correlated else biased,
        "size": size and w.share >= SHARE,
        "coherence within steps": within,
        "coherence across steps": across or across_equal,
    }


def captures_of(folder: Path, layer: int, until: int | None = None) -> list[Capture]:
    """The captures of a layer, opened, in order of their steps; those of steps before ``until`` where it is given.

    Raises InputError for two of one step, or fewer than two.
    """
    # Named by their files alone: a result says nothing of where they lay.
    found = [replace(attn_diag.load(path), source=path.name) for path in find_captures([folder])]
    by_step: dict[int, Capture] = {}
    for capture in found:
        step = capture.metadata.step
        if capture.metadata.layer == layer and step is not None and (until is None or step < until):
            if step in by_step:
                raise InputError(f"{folder}: several captures of step {step}; one a step is expected")
            by_step[step] = capture
    if len(by_step) < 2:
        raise InputError(f"{folder}: captures of two steps of layer {layer} or more are expected, got {len(by_step)}")
    return [capture for _, capture in sorted(by_step.items())]


def accumulation(
    captures: Sequence[Capture], *, layer: int, head: int | None = None, device: str = "auto"
) -> Accumulation:  # fmt: skip
    """The whole analysis. ``captures`` of one layer, in order; ``head``: the model's number; None: ``largest_error``.

    Raises InputError where captures lack what the analysis needs, or fewer than three steps have an error.
    """
    reason = "as asked for"
    if head is None:
        head, reason = largest_error(captures, device)
    figures = figures_of(captures, layer, head, device)
    steps, errors, heads, left_out = list[Step](), list[Tensor](), list[HeadDiagnosis](), list[int]()
    for capture in captures:
        error, reference, found = gradient_error(capture, head, pick_device(device))
        step = capture.metadata.step or 0
        if all(bool(x.isfinite().all()) and bool(x.any()) for x in (error, reference)):
            steps.append(Step(step, found.noise_factor, float(error.norm() / reference.norm())))
            errors.append(error)
            heads.append(found)
        else:
            left_out.append(step)
    if len(steps) < 3:
        raise InputError(f"three steps with an error of dW_Q or more are expected, got {len(steps)}")
    windows = windows_of(steps, torch.stack(errors), heads)
    notes = _notes(captures, [row.step for row in steps], left_out)
    return Accumulation(
        figures.chosen.run, layer, head, reason, figures.tool, notes, tuple(steps), windows, figures,
    )  # fmt: skip


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


def figures_of(captures: Sequence[Capture], layer: int, head: int, device: str) -> PaperFigures:
    """The paper's figures of one head, and of all heads of the layer where a figure compares them."""
    whole = attn_diag.paper_figures(captures, layer=layer, device=device)
    if whole.chosen.head == head:
        return whole
    own = attn_diag.paper_figures(captures, layer=layer, head=head, device=device)
    steps = own.delta_steps
    if steps is not None and whole.delta_steps is not None:
        steps = replace(steps, heads=whole.delta_steps.heads)
    return replace(own, spectral_norms=whole.spectral_norms, delta_steps=steps)


def gradient_error(capture: Capture, head: int, device: torch.device) -> tuple[Tensor, Tensor, HeadDiagnosis]:
    """E and G of one head, float64 [D, C] on the CPU, and its inspection.

    Raises InputError where dW_Q or delta's part of its error does not follow from the capture.
    """
    job = CaptureJob(capture, Selection(heads=frozenset({head})), Runs((), "emulation", {}), device, DEFAULT_LEVEL)
    for _ in job.run():
        pass
    if len(job.entries) != 1:
        raise InputError(f"{capture.source}: one observation is expected, got {', '.join(job.entries)}")
    ((name, measured),) = job.measured.items()
    ((_, parts),) = measured.items()
    projected = [part.dw_q for part in parts if part.dw_q is not None]
    if len(projected) < len(parts):
        raise InputError(f"{capture.source}: no dW_Q: {'; '.join(job.notes)}")
    total = add_parts(projected)
    error = total.parts["delta"]
    if error is None:
        raise InputError(f"{capture.source}: delta's error is not known: capture O and dO")
    return error.cpu(), total.reference.cpu(), job.entries[name][0].diagnosis


def _notes(captures: Sequence[Capture], steps: Sequence[int], left_out: Sequence[int]) -> tuple[str, ...]:
    notes = [
        f"Errors and gradients are of the sequences captured, {captures[0].batch} of a step's batch. E is an error of "
        "a gradient: descent moves the weight along -E.",
        "Where the head was chosen for the size of its error no test allows for that; those of the steps' signs, of "
        "bias and coherence across steps, feel it least. The figures have all heads' running sums.",
    ]
    if gaps := [b for a, b in pairwise(steps) if b != a + 1]:
        notes.append(f"The steps are not consecutive: gaps before {', '.join(map(str, gaps))}.")
    if left_out:
        notes.append(f"Left out, without a finite error and gradient: steps {', '.join(map(str, left_out))}.")
    return tuple(notes)


def windows_of(steps: Sequence[Step], errors: Tensor, heads: Sequence[HeadDiagnosis]) -> tuple[Window, ...]:
    """All steps, and thirds of three steps or more each; ``errors``: E [S, D, C]."""
    n, flat = len(steps), errors.flatten(1)
    gram = (flat @ flat.T).numpy()
    parts = [("all steps", slice(0, n))]
    if n >= 9:
        cuts = [round(i * n / 3) for i in range(4)]
        names = ("first third", "middle third", "last third")
        parts += [(name, slice(a, b)) for name, (a, b) in zip(names, pairwise(cuts), strict=True)]
    whole, *thirds = (_window(name, steps[at], gram[at, at], heads[at]) for name, at in parts)
    of_thirds = iter(_adjusted([test for w in thirds for test in w.tests]))
    return (
        replace(whole, tests=tuple(_adjusted(whole.tests))),
        *(replace(w, tests=tuple(next(of_thirds) for _ in w.tests)) for w in thirds),
    )


def _window(name: str, steps: Sequence[Step], gram: np.ndarray, heads: Sequence[HeadDiagnosis]) -> Window:
    noise = [step.noise_factor for step in steps if step.noise_factor is not None]
    sums = [head.propagation.dw_q for head in heads if head.propagation.dw_q is not None]
    judged = [(s.coherence, s.coherence_null95) for s in sums]
    known = [c > null for c, null in judged if c is not None and null is not None]
    deltas = [head.bias.delta for head in heads if head.bias.delta is not None]
    energy = [d.mean**2 / d.rms**2 for d in deltas if d.mean is not None and d.rms]
    delta, norms = accumulate(deltas), np.sqrt(gram.diagonal())
    bias: list[tuple[float | None, float | None, float | None]] = [(None, None, None)] * 3
    correlated = False
    if delta is not None and delta.band99:
        reached, errors = max(map(abs, delta.sums)), np.array(delta.standard_errors)
        p = band_p_value(reached, errors, np.array([degrees_of_freedom(d) for d in deltas]))
        t, of_t = spread_test(np.array([d.t for d in deltas if d.t is not None]))
        limit = float(stats.t.ppf(0.975, len(deltas) - 1))
        bias = [(delta.t_over_steps, limit, delta.p_over_steps), (reached / delta.band99, 1.0, p), (t, limit, of_t)]
        correlated = delta.lag1 is not None and delta.lag1_limit is not None and delta.lag1 > delta.lag1_limit
    found = [
        *bias, _sign_test([f > NOISE for f in noise], 0.5), _sign_test(known, 0.05),
        sign_coherence(gram), sign_coherence(gram / np.outer(norms, norms)),
    ]  # fmt: skip
    return Window(
        name=name,
        first=steps[0].step,
        last=steps[-1].step,
        count=len(steps),
        noise_factor=median(noise) if noise else None,
        share=median(step.share for step in steps),
        coherent_steps=sum(known),
        bias_energy=median(energy) if energy else None,
        correlated=correlated,
        tests=tuple(Test(test, *numbers) for test, numbers in zip(TESTS, found, strict=True)),
    )


def _sign_test(holds: Sequence[bool], chance: float) -> tuple[float | None, float | None, float | None]:
    """At more than ``chance`` of the steps? The statistic and its limit are fractions of the steps."""
    if not holds:
        return None, None, None
    n, count = len(holds), sum(holds)
    return count / n, float(stats.binom.ppf(0.95, n, chance)) / n, float(stats.binom.sf(count - 1, n, chance))


def _adjusted(tests: Sequence[Test]) -> list[Test]:
    """Holm's p-values; tests without one are no members of the family."""
    known = iter(holm([t.p_value for t in tests if t.p_value is not None]))
    return [t if t.p_value is None else replace(t, p_adjusted=next(known)) for t in tests]


def section(found: Accumulation, run: str) -> Section:
    """All of it; ``run``: what the captured run is called, such as "arm A, seed 0"."""
    windows, (w, *_), answers = found.windows, found.windows, judge(found.windows[0])
    table = [("test", "statistic", *(f"{w.name}, {w.first} to {w.last}" for w in windows))]
    table += [(name, words, *(w.tests[i].words for w in windows)) for i, (name, words) in enumerate(TESTS.items())]
    said = "; ".join(f"{name}: {_ANSWERS[answer]}" for name, answer in answers.items())
    verdict = (
        f"Steps {w.first} to {w.last} of {run}, layer {found.layer}, head {found.head} ({found.chosen}). What E, the "
        f"error of dW_Q through delta, shows: {said}. The square of delta's mean error is {percent(w.bias_energy)} of "
        f"its mean square in the median; the noise factor is {number(w.noise_factor)} (correct rounding: about 1), "
        f"‖E‖ {number(w.share)} times ‖dW_Q‖; within a step the rows' errors add up beyond chance at "
        f"{w.coherent_steps} of {w.count} steps. The paper's explanation (Qiu & Yao, arXiv 2510.04212) needs a mean of "
        f"delta's error of one sign: {'there is one' if answers['bias'] else 'these steps do not show one'}."
    )
    about = (
        "In the table: statistic (what its null stays below; for t its |value|), p after Holm; all steps are one "
        f"family of {len(TESTS)} tests at level {LEVEL:g}, the thirds another. Figures 3, 4, 5, 6 and 13 of the paper "
        "are drawn of these steps, as attn-diag figures draws them; their p-values are not adjusted, figures of one "
        "step show the step named, and M in Figure 4 is E. Figure 11 is not drawn."
    )
    steps, noise = (float(s.step) for s in found.steps), (drawable(s.noise_factor) for s in found.steps)
    chart = Chart(
        "accumulation-noise", "Noise factor of delta's error",
        "rms of delta's error over what one correct rounding of O leaves; production kernels have 0.98 to 1.4.",
        STEP, Axis("noise factor"), (Series("noise factor", tuple(steps), tuple(noise)),),
        (Band("not lossy", 0.0, NOISE),),
    )  # fmt: skip
    drawn = {c.name: c for s in paper_gallery(found.figures).sections for c in s.charts}
    charts = (chart, *(drawn[name] for name in FIGURES if name in drawn))
    return Section("Bias, size or coherence?", (verdict, f"{about} {' '.join(found.notes)}"), tuple(table), charts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("captures", type=Path)
    parser.add_argument("--layer", type=int, required=True)
    parser.add_argument("--head", type=int, help="default: the one with the largest error")
    parser.add_argument("--until", type=int, metavar="STEP", help="steps before this one only")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    o = parser.parse_args()

    captures = captures_of(o.captures, o.layer, o.until)
    found = accumulation(captures, layer=o.layer, head=o.head, device=o.device)
    write_json(o.out, json.loads(found.to_json()))
    print(judge(found.windows[0]))


if __name__ == "__main__":
    main()
