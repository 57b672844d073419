"""What other chunk sizes and formats would leave of the errors of linear attention."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from attn_diag.analyses.linear.identify import recipe_of
from attn_diag.analyses.linear.recipes import (
    head_index,
    opened,
    recipe_words,
    site_formats,
    squares_of,
    with_sites,
)
from attn_diag.captures.linear import LinearCapture
from attn_diag.head.linear import recipe_name
from attn_diag.head.machine import describe_tool
from attn_diag.kernels.linear_recipe import LinearFormat, LinearRecipe
from attn_diag.results.linear_recipes import LinearCandidate, LinearWhatIf
from attn_diag.results.wording import between, number, percent

_BYTES: dict[LinearFormat, int] = {"bf16": 2, "fp16": 2, "tf32": 4, "fp32": 4}


def what_if_linear(
    source: LinearCapture | str | Path, *, recipe: str | None = None, observation: str | None = None,
    head: int | None = None, device: str = "auto", progress: Callable[[int, int], object] | None = None,
) -> LinearWhatIf:  # fmt: skip
    """Say what other chunk sizes and formats would leave of a head's errors.

    Args:
        source, recipe, observation, device, progress: As for ``attribute_linear``.
        head: The model's number of the head; None: the first.

    Raises:
        InputError: As ``attribute_linear``.
    """
    run, capture = opened(source, device)
    used, used_from = recipe_of(run, recipe, observation, head, device)
    index, formats = head_index(capture, head), site_formats(used, run)
    assert run.format is not None
    changes: list[tuple[str, LinearRecipe]] = [
        (f"chunk={chunk}", replace(used, chunk=chunk)) for chunk in run.chunks if chunk != used.chunk
    ]
    for site, fmt in formats.items():
        other: LinearFormat = "fp32" if fmt != "fp32" else run.format
        changes.append((f"{site}={other}", with_sites(used, {**formats, site: other}, frozenset(formats))))
    swapped: LinearFormat = "fp16" if run.format == "bf16" else "bf16"
    if formats["operands"] != "fp32":
        low = {s: swapped if f == run.format and s != "out" else f for s, f in formats.items()}
        changes.append((f"{swapped} for {run.format} inside", with_sites(used, low, frozenset(formats))))
    base = squares_of(run, run.emulated(used), [index])[index]
    k, v = capture.tensors["q"].shape[3], capture.tensors["v"].shape[3]

    def candidate(name: str, words: str, changed: LinearRecipe, squares: Mapping[str, float]) -> LinearCandidate:
        ratios = [math.log(squares[q] / base[q]) / 2 for q in base if base[q] > 0 and squares[q] > 0]
        finite = all(math.isfinite(x) for x in squares.values())
        left = math.exp(sum(ratios) / len(ratios)) if finite and ratios else math.inf if not finite else 1.0
        kept = 0.0 if changed.chunk == 1 else k * v * _BYTES[changed.state] / changed.chunk
        return LinearCandidate(name, words, {q: math.sqrt(x) for q, x in squares.items()}, left, kept)

    made = []
    for done, (name, changed) in enumerate(changes, 1):
        squares = squares_of(run, run.emulated(changed), [index])[index]
        made.append(candidate(name, recipe_words(changed, run), changed, squares))
        if progress is not None:
            progress(done, len(changes))
    made.sort(key=lambda c: (c.left, c.state_bytes))
    baseline = candidate(recipe_name(used, run), recipe_words(used, run), used, base)
    observed: dict[str, float] = {}
    if capture.observations:
        outputs = capture.observation(observation)[1]
        found = squares_of(run, {n: t.to(run.device).double() for n, t in outputs.items()}, [index])[index]
        observed = {q: math.sqrt(x) for q, x in found.items()}
    return LinearWhatIf(
        describe_tool(run.device), capture.source, capture.operator, capture.metadata.layer,
        index + capture.metadata.head_offset, baseline.name, used_from, observed, baseline, tuple(made),
        tuple(_summary(baseline, made, used_from)),
    )  # fmt: skip


def _summary(baseline: LinearCandidate, made: list[LinearCandidate], used_from: str) -> list[str]:
    said = []
    if used_from == "assumed":
        said.append("No recipe was recognised: the baseline is a well-rounded kernel, not the captured one.")
    best = made[0]
    mean = "in the geometric mean over all quantities"
    if best.left < 0.9:
        said.append(f"{best.name} would leave {percent(best.left)} of the error of {baseline.name}, {mean}.")
        if "fp16" in best.name:
            said.append("FP16 ends at 65,504: that nothing overflows is known of these inputs alone.")
    else:
        said.append(f"Nothing that was tried leaves less than 90 % of the error of {baseline.name}, {mean}.")
    sizes = [c for c in made if c.name.startswith("chunk=")]
    if sizes:
        low, high = min(c.left for c in sizes), max(c.left for c in sizes)
        said.append(f"Other chunk sizes leave {between(number(low), number(high))} times as much.")
    worst = made[-1]
    if worst.left > 1.1:
        said.append(f"{worst.name} would leave {number(worst.left)} times as much.")
    return said
