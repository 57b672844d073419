"""Which single change of a recipe makes these bits: the culprit's name in a failure.

The quantity that failed is compared with published recipes and with each of them changed in one place (delta, which is
made from O, by O). A change is named where it has 99 % of that quantity's elements bit for bit, or as many as the
unchanged recipe had of the baseline's O (whose exp or sums no recipe here may model), where no unchanged recipe has as
many, and where it explains most of the elements that are in dispute and most of the squared difference: a few wrong
rows are no change of rounding, whatever the rest of the bits says. A quantity of which an unchanged recipe makes the
bits has no suspect: any change that hardly touches it would do. Nor has one that two changes explain equally well.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attn_diag.head.recipe_changes import (
    CAST_ROW_SUM,
    CUBIC_EXP2,
    DELTA_FROM_DP,
    DELTA_FROM_FP32_O,
    DS_FROM_CAST_P,
    EARLY_ALPHA,
    FP32_ROW_SUM,
    LATE_DIVISION,
    UNCAST_P,
    RecipeChange,
    cast,
    rounded,
    scheduled,
)
from attn_diag.kernels import PRESETS, Recipe, RecipeNotSupportedError, Schedule, preset
from attn_diag.kernels.formats import Format
from attn_diag.results.wording import SYMBOLS, share
from attn_diag.testing.case_inputs import CaseInputs
from attn_diag.testing.target import DTYPES, GRADIENTS, emulate

# Elements that the right recipe has: what is not modelled moves up to 0.2 % of BF16 outputs (``identification``).
AGREEMENT = 0.99
# Of 16 sequences so many are emulated; their fraction may fall short of the baseline's, on other inputs, by so much.
_SEQUENCES, _SHORT = 2, 0.02
# A baseline that no published recipe has so much of is not modelled at all: nothing can be said of what changed in it.
_MODELLED = 0.9
# Unchanged recipes that are tried where a gradient failed: those whose O is closest.
_LIKELIEST = 2
_MADE_FROM = {"delta": "o"}
_PUBLISHED = ("fa2", "cudnn", "efficient", "flex", "lowp-row-sum")


@dataclass(frozen=True)
class _Likeness:
    """How near a recipe comes to what was observed of one output."""

    bits: float = 0.0
    """The fraction of its elements that are the same bit for bit."""
    apart: float = math.inf
    """The sum of squared differences."""


def published(dtype: torch.dtype, head_dim: int) -> list[Recipe]:
    """What an unchanged kernel may be: presets, and those that take all keys at once, with exp2 as they or with exp."""
    found = [preset(name, DTYPES[dtype], head_dim) for name in _PUBLISHED]
    whole = replace(found[1], name="cudnn, all keys at once", schedule=Schedule(key_tile=2**20))
    # P_bar is exactly 1 at the maximum then, which a cast that truncates shows. Of equals the likelier comes first.
    return [*found, replace(whole, name="plain torch, all keys at once", exp="exact"), whole]


def by_name(name: str, dtype: torch.dtype, head_dim: int) -> Recipe | None:
    """One of ``published``, or any preset."""
    if name in PRESETS:
        return preset(name, DTYPES[dtype], head_dim)
    return next((r for r in published(dtype, head_dim) if r.name == name), None)


def closest(case: CaseInputs, o: Tensor, recipes: Sequence[Recipe], device: torch.device) -> tuple[Recipe, float]:
    """The recipe that has most elements of ``o`` [B, H, T, D] bit for bit (the first of equals), and which fraction."""
    return max(
        ((r, _likeness(r, case, {"o": o}, ["o"], device)["o"].bits) for r in recipes), key=lambda found: found[1]
    )


def suspects(
    case: CaseInputs, observed: dict[str, Tensor], failed: Collection[str], unchanged: Sequence[Recipe],
    expected: float | None, device: torch.device, only: str | None = None,
) -> dict[str, tuple[str, str]]:  # fmt: skip
    """Find the one change of a recipe that makes the bits of each quantity that failed.

    Args:
        case: The inputs.
        observed: What the kernel returned, by name.
        failed: The quantities that failed.
        unchanged: Recipes that the kernel may have had.
        expected: The agreement of the baseline's O with its own recipe.
        device: Where recipes are emulated.
        only: Try this change alone.

    Returns:
        By quantity: the change in words, and the same with what speaks for it; none where no single change does.
    """
    if expected is not None and expected < _MODELLED:
        return {}
    outputs = {name: _MADE_FROM.get(name, name) for name in failed}
    outputs = {n: o for n, o in outputs.items() if o in observed and (o == "lse" or observed[o].dtype == case.q.dtype)}
    enough = AGREEMENT if expected is None else min(AGREEMENT, expected - _SHORT)
    backward = any(o in GRADIENTS for o in outputs.values())
    if backward and "o" in outputs.values() and only is None:
        # Of O first: its recipe is not among the likeliest where it is changed.
        of_o = [name for name, output in outputs.items() if output == "o"]
        forward = suspects(case, observed, of_o, unchanged, expected, device)
        rest = [name for name in outputs if name not in of_o]
        named = next((words for words, _ in forward.values()), None)
        return suspects(case, observed, rest, unchanged, expected, device, named) | forward
    if backward and len(unchanged) > _LIKELIEST:
        # A backward takes long, and what changed rarely hides which schedule the kernel has.
        unchanged = sorted(unchanged, key=lambda r: -_likeness(r, case, observed, ["o"], device)["o"].bits)[:_LIKELIEST]
    wanted = sorted(set(outputs.values()))
    plain = [_likeness(r, case, observed, wanted, device) for r in unchanged]
    # Where the baseline's every bit was modelled, every other bit is in dispute.
    disputed = [o for o in wanted if max(p[o].bits for p in plain) < (1.0 if expected == 1.0 else enough)]
    if not disputed:
        return {}
    tried = [
        (_likeness(changed, case, observed, disputed, device), words, recipe.name)
        for recipe in unchanged
        for words, changed in changes(recipe, case.k.shape[2], backward=backward)
        if only is None or words == only
    ]
    found = {}
    for name, output in outputs.items():
        if output not in disputed or not tried:
            continue
        best, nearest = max(p[output].bits for p in plain), min(p[output].apart for p in plain)
        likeness, words, recipe_name = max(tried, key=lambda one: one[0][output].bits)
        agreement, apart = likeness[output].bits, likeness[output].apart
        if any(other[output].bits == agreement and change != words for other, change, _ in tried):
            continue
        # A change that leaves over half of the difference unexplained is none.
        if agreement >= enough and 1 - agreement <= (1 - best) / 2 and apart <= nearest / 2:
            shares = f"{share(agreement)} of {SYMBOLS[output]}'s elements bit for bit, unchanged {share(best)}"
            found[name] = words, f"{words} (recipe {recipe_name} so changed has {shares})"
    return found


def changes(recipe: Recipe, keys: int, *, backward: bool = False) -> Iterator[tuple[str, Recipe]]:
    """Every change of one place, of the forward alone or of both passes, in words; those that change nothing are left
    out."""
    for change in _forward(recipe, keys) + (_backward(recipe.input) if backward else []):
        changed = change.apply(recipe)
        if replace(changed, name=recipe.name, summary=recipe.summary) != recipe:
            yield change.seen_as or change.words, changed


def sound(words: str, keys: int) -> bool:
    """Whether a change of the forward in these words, as of ``changes``, makes no kernel worse: a schedule, an uncast
    P_bar."""
    known = (c for recipe in PRESETS for c in _forward(preset(recipe), keys))
    return any(words == (c.seen_as or c.words) and (c is UNCAST_P or set(c.fields) == {"schedule"}) for c in known)


def _forward(recipe: Recipe, keys: int) -> list[RecipeChange]:
    low = recipe.input
    opposite = "ascending" if recipe.schedule.order == "descending" else "descending"
    return [
        cast("out", low, "toward-zero"),
        cast("out", low, "up"),
        cast("out", low, "down"),
        scheduled(recipe, "keys in reversed order", order=opposite),
        rounded("row_sum", low),
        CAST_ROW_SUM,
        FP32_ROW_SUM,
        cast("probs", low, "toward-zero"),
        UNCAST_P,
        *(rounded(site, low) for site in ("scores", "difference", "row_max", "accumulator", "range_pv")),
        LATE_DIVISION,
        CUBIC_EXP2,
        scheduled(recipe, "the diagonal tile first", order="diagonal-first"),
        *(scheduled(recipe, f"tiles of {n} keys", key_tile=n) for n in (32, 64, 128, 256) if n < keys),
        scheduled(recipe, "all keys in one tile", key_tile=2**20),
    ]


def _backward(low: Format) -> list[RecipeChange]:
    return [
        cast("dq", low, "toward-zero"),
        cast("dscores", low, "toward-zero"),
        rounded("delta", low),
        rounded("delta_products", low),
        DELTA_FROM_FP32_O,
        DELTA_FROM_DP,
        rounded("dprobs", low),
        rounded("gradient_accumulator", low),
        DS_FROM_CAST_P,
        EARLY_ALPHA,
    ]


def _likeness(
    recipe: Recipe, case: CaseInputs, observed: dict[str, Tensor], outputs: Sequence[str], device: torch.device
) -> dict[str, _Likeness]:
    """How near a recipe comes to each output."""
    gradients = any(o in GRADIENTS for o in outputs)
    try:
        made = emulate(recipe, case, device, with_gradients=gradients, sequences=_SEQUENCES)
    except RecipeNotSupportedError:
        return dict.fromkeys(outputs, _Likeness())
    found = {}
    for name in outputs:
        one, other = made[name], observed[name][: len(made[name])]
        apart = float((one.double() - other.double()).square().sum())
        found[name] = _Likeness(float((one == other).double().mean()), math.inf if math.isnan(apart) else apart)
    return found
