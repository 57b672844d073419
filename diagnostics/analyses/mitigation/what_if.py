"""What-if: other recipes and mitigations on one head's inputs, ranked by the error and the bias they leave."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Literal, overload

import torch
from typing_extensions import Unpack

from attn_diag.analyses.mitigation.bench import Bench, Counter
from attn_diag.analyses.mitigation.equivalence import repeated_maxima_as_run
from attn_diag.analyses.mitigation.mitigations import BETAS, SEEDS, WhatIfPlan, plans, stabilised_rule
from attn_diag.analyses.mitigation.ranking import adjust_biases, rank, stabilised_limits, summarise
from attn_diag.analyses.several import answers
from attn_diag.captures.absorbed import WithoutAbsorbedRows
from attn_diag.captures.capture import Capture
from attn_diag.captures.given import Array, CallTensors, Named, One, Source
from attn_diag.captures.selection import select_place
from attn_diag.errors import InputError
from attn_diag.head.baseline import observation_with_o
from attn_diag.head.fidelity import differences
from attn_diag.head.machine import describe_tool, pick_device
from attn_diag.head.open import OpenCapture, OpenHead
from attn_diag.head.read import HeadInputs
from attn_diag.head.row_maxima import plain_scores
from attn_diag.head.truth import observed_sizes
from attn_diag.head.underflow import probs_underflow
from attn_diag.kernels import Recipe
from attn_diag.results.several import Several
from attn_diag.results.what_if import Errors, WhatIf
from attn_diag.results.wording import SYMBOLS
from attn_diag.statistics.means import require_level
from attn_diag.work import Progress

# Largest scaled scores that QK-clip is tried for; 100 is Kimi K2's (arXiv 2507.20534).
CLIP_THRESHOLDS = (100.0, 50.0, 30.0)


@overload
def what_if(
    source: One, k: Array | None = None, v: Array | None = None, *,
    observation: str | None = None, recipe: str | Recipe | None = None,
    batch: int = 0, head: int | None = None, only: Sequence[str] = (), betas: Sequence[float] = BETAS,
    seeds: int = SEEDS, level: float = 0.01, device: str = "auto", progress: Progress | None = None,
    **call: Unpack[CallTensors],
) -> WhatIf: ...  # fmt: skip
@overload
def what_if(
    source: Named | Sequence[Capture | Named], *,
    observation: str | None = None, recipe: str | Recipe | None = None,
    batch: int = 0, head: int | None = None, only: Sequence[str] = (), betas: Sequence[float] = BETAS,
    seeds: int = SEEDS, level: float = 0.01, device: str = "auto", progress: Progress | None = None,
    **call: Unpack[CallTensors],
) -> WhatIf | Several[WhatIf]: ...  # fmt: skip
def what_if(
    source: Source,
    k: Array | None = None,
    v: Array | None = None,
    *,
    observation: str | None = None,
    recipe: str | Recipe | None = None,
    batch: int = 0,
    head: int | None = None,
    only: Sequence[str] = (),
    betas: Sequence[float] = BETAS,
    seeds: int = SEEDS,
    level: float = 0.01,
    device: str = "auto",
    progress: Progress | None = None,
    **call: Unpack[CallTensors],
) -> WhatIf | Several[WhatIf]:
    """Run mitigations, mixed recipes and other kernels' recipes on one head's q, k, v and dO, and rank them.

    Args:
        source: q of a call, [B, H, T, D]; or a Capture, a capture's file, a folder of them, or a list of these.
        k, v: Of the call.
        observation: The one whose captured O's recipe, recognised by its bits, is the baseline; fa2 without one.
        recipe: The baseline instead, a name or a Recipe.
        batch: Index of the batch item.
        head: The model's number of the head; None: the capture's first.
        only: Names of candidates, or patterns such as "stabilised-*".
        betas: Those of the stabilised softmax.
        seeds: How many runs of each stochastic rounding.
        level: Significance after Benjamini-Hochberg over all candidates' biases.
        device: auto, cpu or cuda.
        progress: Called with (done, total), in query rows times recipes.
        **call: What else the call had and returned, as ``attn_diag.inspect`` takes it: o, lse, delta, do, dq, dk, dv,
            x, w_q, dq_pre, mask, causal, scale, window, softcap, layout.

    Returns:
        One answer; of a folder or a list ``Several``, an answer a capture.

    Raises:
        InputError: The capture lacks something, no recipe covers the inputs, or the metadata do not describe the
            captured O; and as ``captures_of``.
    """
    _check_options(betas, seeds, level)
    where = pick_device(device)

    def of(capture: Capture, counted: Progress | None) -> WhatIf:
        return _tried(capture, observation, recipe, batch, head, only, betas, seeds, level, where, counted)

    return answers("what_if", source, k, v, call, of, progress)


def _tried(
    capture: Capture,
    observation: str | None,
    recipe: str | Recipe | None,
    batch: int,
    head: int | None,
    only: Sequence[str],
    betas: Sequence[float],
    seeds: int,
    level: float,
    where: torch.device,
    progress: Progress | None,
) -> WhatIf:
    """One capture's."""
    capture = WithoutAbsorbedRows.of(capture).capture
    batch, index = select_place(capture, batch, head)
    chosen = observation_with_o(capture, observation)
    notes: list[str] = []
    if observation is None and len(capture.observations) > 1:
        notes.append(f"the capture has observations {', '.join(capture.observations)}; {chosen} is looked at")
    opened = OpenCapture(capture, where, [batch], [index])
    if recipe is None and chosen is not None:
        opened.identify_ahead(chosen, [(batch, index)])
    given = opened.open_head(chosen, recipe, batch, index)
    notes += _projection_notes(opened)
    baseline, inputs, truth = given.baseline, given.inputs, given.truth
    if not bool(truth.usable.any()):
        raise InputError(
            f"{capture.source}: head {given.head}: every row is fully masked, or has NaN or Inf in its inputs"
        )
    unit = _score_unit(baseline.recipe, inputs)
    acting = repeated_maxima_as_run(baseline.recipe, truth.head, stabilised_rule(2.0, unit).epsilon)
    if not acting.rows and betas:
        notes.append("stabilised softmax: not run, no row's maximum is repeated among the recipe's own scores")
        betas = ()
    wanted = plans(
        baseline.recipe,
        head_dim=capture.head_dim,
        keys=capture.lengths(batch)[1],
        score_unit=unit,
        betas=betas,
        seeds=seeds,
    )
    max_logit = float(truth.reference.row_max[truth.usable].max())
    clips = _clip_thresholds(inputs, max_logit, notes)
    wanted, clips = _select(wanted, clips, only)
    bench = Bench(truth, Counter(progress))
    found = bench.run(baseline.recipe, wanted, clips, max_logit)
    ranked_by: Literal["o", "dq"] = "o" if truth.reference.dq is None else "dq"
    candidates = rank(found, ranked_by)
    candidates, family = adjust_biases(candidates, level)
    first, rest = candidates[0], tuple(candidates[1:])
    result = WhatIf(
        tool=describe_tool(where),
        source=capture.source,
        layer=capture.metadata.layer,
        batch=batch,
        head=given.head,
        rows=int(truth.usable.sum()),
        observation=chosen,
        recipe=baseline.name,
        baseline_from=baseline.origin,
        agreement=baseline.agreement,
        ranked_by=ranked_by,
        max_logit=max_logit,
        level=level,
        observed=None if chosen is None else Errors(**observed_sizes(given.outputs, truth)),
        baseline=first,
        candidates=rest,
        stabilised=stabilised_limits(baseline.recipe, acting, rest, int(truth.usable.sum())),
        summary=(),
        notes=tuple(notes),
        family_size=family,
        unfit=given.baseline.caution or _unfit(given),
        underflow=probs_underflow(baseline.recipe, truth.head),
    )
    return replace(result, summary=summarise(result))


def _score_unit(recipe: Recipe, inputs: HeadInputs) -> float:
    """What a scaled score of 1 is among the recipe's stored scores."""
    units = {"in-exponent": 1 / inputs.head.scale, "in-q": 1 / math.log(2)}
    return units.get(recipe.alpha, 1.0) if plain_scores(inputs.head) else 1.0


def _clip_thresholds(inputs: HeadInputs, max_logit: float, notes: list[str]) -> list[float]:
    if not plain_scores(inputs.head) or inputs.head.masking.alibi is not None:
        notes.append("QK-clip: not run, softcap, ALiBi or an additive mask acts on the scores")
        return []
    known = CLIP_THRESHOLDS[0]
    if max_logit <= known:
        notes.append(f"QK-clip at {known:g} (Kimi K2) would not act: the largest score is {max_logit:.4g}")
    return [tau for tau in CLIP_THRESHOLDS if max_logit > tau]


def _select(wanted: list[WhatIfPlan], clips: list[float], only: Sequence[str]) -> tuple[list[WhatIfPlan], list[float]]:
    """What ``only`` names, or everything."""
    if not only:
        return wanted, clips
    names = [plan.name for plan in wanted] + [f"qk-clip-{tau:g}" for tau in clips]
    for pattern in only:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise InputError(f"no candidate {pattern!r} changes this baseline; there are {', '.join(names)}")

    def named(name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in only)

    return [plan for plan in wanted if named(plan.name)], [tau for tau in clips if named(f"qk-clip-{tau:g}")]


def _check_options(betas: Sequence[float], seeds: int, level: float) -> None:
    require_level(level)
    if any(not 1 < beta < math.inf for beta in betas):
        raise InputError(f"beta must be a finite number above 1, got {', '.join(map(str, betas))}; 2 to 8 is published")
    if seeds < 0:
        raise InputError(f"seeds must not be negative, got {seeds}; 0 leaves stochastic rounding out")


def _unfit(given: OpenHead) -> str:
    """In what the captured kernel does otherwise than the recipe; empty: in nothing that is known."""
    if given.observation is None:
        return ""
    differing = "; ".join(f"{SYMBOLS[q]}: {words}" for q, words in differences(given).items())
    return f"The captured kernel does otherwise than {given.baseline.name} ({differing})." if differing else ""


def _projection_notes(opened: OpenCapture) -> list[str]:
    """What lies between dQ and dW_Q, or why the latter does not follow."""
    if opened.projection is None:
        return ["no dO was captured: candidates are ranked by O's error, and nothing is said of gradients"]
    return [] if opened.projection.note is None else [opened.projection.note]
