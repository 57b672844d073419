"""Which recipe made a captured O: the one whose emulation makes its error, bit for bit at best."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from attn_diag.analyses.linear.causes import FAULT_EXPLAINS, MOST_STEPWISE
from attn_diag.analyses.linear.recipes import (
    head_index,
    opened,
    parse_recipe,
    recipe_words,
)
from attn_diag.captures.linear import LinearCapture
from attn_diag.errors import InputError
from attn_diag.head.linear import LinearRun, recipe_name
from attn_diag.head.machine import describe_tool
from attn_diag.kernels.linear_recipe import GRADIENT_SITES, LINEAR_SITES, LinearFormat, LinearRecipe
from attn_diag.reference import format_of
from attn_diag.reference.linear import OF_HEADS
from attn_diag.results.linear_recipes import LinearIdentification, LinearRecipeMatch
from attn_diag.results.wording import percent, together
from attn_diag.statistics.ratios import paired_ratio

_BLOCK = 16


def identify_linear(
    source: LinearCapture | str | Path, *, observation: str | None = None, head: int | None = None,
    device: str = "auto", progress: Callable[[int, int], object] | None = None,
) -> LinearIdentification:  # fmt: skip
    """Rank recipes by how much of the captured O's error they make.

    Args:
        source: A LinearCapture, or its file.
        observation: Its name, not needed where there is one only.
        head: The model's number of the head (of v's); None: the first.
        device: auto, cpu or cuda.
        progress: Called with (done, total) after each recipe.

    Raises:
        InputError: O was not captured, or the inputs are neither BF16 nor FP16.
    """
    run, capture = opened(source, device)
    name, outputs = capture.observation(observation)
    if "o" not in outputs:
        raise InputError(f"{capture.source}: nothing to identify a recipe by: o was not captured")
    index = head_index(capture, head)
    place = run.place("o", index)
    observed, true = outputs["o"].to(run.device), run.reference.values["o"]
    if not observed[place].isfinite().all():
        raise InputError(f"{capture.source}: o holds NaN or Inf in this head: look at it with inspect first")
    error = (observed[place].double() - true[place]).square()
    tried: list[tuple[LinearRecipe, float, Tensor]] = []
    seen: list[tuple[int, Tensor]] = []
    recipes = _recipes(run, "fp32" if observed.dtype == torch.float32 else run.recipe.out)
    for done, recipe in enumerate(recipes, 1):
        made = run.emulated(recipe, forward=True)["o"][place].to(observed.dtype)
        if progress is not None:
            progress(done, len(recipes))
        # What a site leaves as it is was tried without it; other chunks are another kernel all the same.
        if any(chunk == recipe.chunk and torch.equal(made, other) for chunk, other in seen):
            continue
        seen.append((recipe.chunk, made))
        missed = (observed[place].double() - made.double()).square()
        tried.append((recipe, float((made == observed[place]).double().mean()), missed))
    tried.sort(key=lambda one: (float(one[2].sum()), -one[1]))
    best, total = tried[0][2], float(error.sum())
    # Of a rounding's error: fp32 sums in another order move a value by 2^-22 or so, over a rounding's edge in
    # 2^(p - 22) of cases, p the format's precision, each by one spacing: twelve times the mean square of a rounding.
    by_order = math.sqrt(12 * 2.0 ** (format_of(capture.tensors["q"].dtype).precision - 22))
    matches, fitting = [], []
    for recipe, bits, missed in tried:
        factor, apart = _beside(missed, best)
        left = math.sqrt(float(missed.sum()) / total) if total else 0.0
        apart = apart and left > by_order
        named = recipe_name(recipe, run)
        matches.append(LinearRecipeMatch(named, recipe_words(recipe, run), bits, left, factor, apart))
        if left**2 <= 1 - FAULT_EXPLAINS and not apart:
            fitting.append(named)
    outcome: Literal["identified", "ambiguous", "unknown"] = "unknown"
    first = matches[0]
    made_by = f"{percent(max(0.0, 1 - first.left**2))} of O's squared error and {percent(first.bits)} of its bits"
    verdict = f"No recipe makes O's error; the nearest, {first.words}, makes {made_by}."
    if fitting:
        outcome = "identified" if len(fitting) == 1 else "ambiguous"
        verdict = f"{first.words[:1].upper()}{first.words[1:]}: this makes {made_by}."
        if outcome == "ambiguous":
            verdict = f"{verdict[:-1]}; these inputs do not tell it from {together(fitting[1:4])}."
    return LinearIdentification(
        describe_tool(run.device), capture.source, name, capture.operator, capture.metadata.layer,
        index + capture.metadata.head_offset, outcome, tuple(fitting), verdict, len(tried), tuple(matches),
    )  # fmt: skip


def recipe_of(
    run: LinearRun, text: str | None, observation: str | None, head: int | None, device: str
) -> tuple[LinearRecipe, Literal["given", "recognised", "assumed"]]:
    """The recipe that is given, or the one that has made O, or a well-rounded kernel's."""
    if text is not None:
        return parse_recipe(text, run), "given"
    if run.capture.observations and "o" in (outputs := run.capture.observation(observation)[1]):
        found = identify_linear(run.capture, observation=observation, head=head, device=device)
        if found.recipes:
            forward = parse_recipe(found.recipes[0], run)
            return _with_backward(forward, run, outputs, head_index(run.capture, head)), "recognised"
    return run.recipe, "assumed"


def _with_backward(recipe: LinearRecipe, run: LinearRun, outputs: Mapping[str, Tensor], index: int) -> LinearRecipe:
    """The recipe with what the released kernel of this forward rounds in its backward, where that is nearer."""
    observed = {n: t for n, t in outputs.items() if n[1:] in run.capture.inputs and n[1:] not in OF_HEADS}
    both = [
        recipe,
        *(
            replace(recipe, **known)  # type: ignore[arg-type]
            for known in run.released()
            if all(getattr(recipe, site) == fmt for site, fmt in _forward_of(known).items())
        ),
    ]

    def missed(one: LinearRecipe) -> float:
        made, total = run.emulated(one) if observed else {}, 0.0
        for name, tensor in observed.items():
            if (place := run.place(name, index)) is not None:
                seen, true = tensor.to(run.device).double()[place], run.reference.values[name][place]
                total += float((seen - made[name][place]).norm() / (seen - true).norm().clamp(min=1e-300))
        return total

    return min(both, key=missed)


def _forward_of(known: Mapping[str, LinearFormat]) -> dict[str, LinearFormat]:
    return {site: fmt for site, fmt in known.items() if site not in GRADIENT_SITES}


def _recipes(run: LinearRun, out: LinearFormat) -> list[LinearRecipe]:
    """A well-rounded kernel in chunks of each size, and with one site other than that; and kernels step by step."""
    own, fmt = replace(run.recipe, out=out), run.format
    assert fmt is not None
    found, sites = [], [site for site in LINEAR_SITES if run.has_site(site) and site not in GRADIENT_SITES]
    released = [_forward_of(known) for known in run.released()]
    for chunk in run.chunks:
        found += [replace(own, chunk=chunk, **known) for known in released if known]
        found.append(replace(own, chunk=chunk))
        found += [replace(found[-1], **{site: fmt}) for site in sites]  # type: ignore[arg-type]
        each = replace(own, chunk=chunk)
        found.append(replace(each, operands="fp32", inter=fmt))
        for site in ("operands", "inter", "stored", "inverse"):
            if run.has_site(site):
                found.append(replace(each, **{site: "fp32"}))  # type: ignore[arg-type]
    if run.capture.tensors["q"].shape[1] * len(run.capture.call.sequences) <= MOST_STEPWISE:
        step = replace(own, chunk=1, operands="fp32")
        found += [step, replace(step, state=fmt)]
        found += [replace(step, decay=fmt), replace(step, log_decay=fmt)] if run.has_site("decay") else []
    return found


def _beside(missed: Tensor, best: Tensor) -> tuple[float | None, bool]:
    """What a recipe misses over what the best does, and whether that is more than chance."""
    if missed is best:
        return None, False
    rows = [x.reshape(-1, x.shape[-1]).sum(1).cpu().numpy() for x in (missed, best)]
    if not rows[1].any():
        return None, bool(rows[0].any())
    ratio = paired_ratio(rows[0], rows[1], np.arange(len(rows[0])) // _BLOCK)
    return (None, False) if ratio is None else (ratio.factor, ratio.low > 1)
