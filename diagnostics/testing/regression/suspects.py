"""Which single change of a recipe makes these bits: the culprit's name in a failure.

A failing case's O (or dQ, where the gradients alone are off) is compared with published recipes and with each of them
changed in one place. A change is named where it has 99 % of the elements bit for bit, or as many as the unchanged
recipe had of the baseline's O (whose exp or sums no recipe here may model), and the unchanged one has fewer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
from attn_diag.kernels.recipe import Order
from attn_diag.results.wording import SYMBOLS, share
from attn_diag.testing.target import DTYPES, CaseInputs, emulate

# Elements that the right recipe has: what is not modelled moves up to 0.2 % of BF16 outputs (``identification``).
AGREEMENT = 0.99
# Sequences that are emulated, and by how much a fraction of their elements may fall short of the baseline's: those are
# 2 of 16 sequences of other inputs.
_SEQUENCES, _SHORT = 2, 0.02
# A baseline that no published recipe has so much of is not modelled at all: nothing can be said of what changed in it.
_MODELLED = 0.9
_PUBLISHED = ("fa2", "cudnn", "efficient", "flex", "lowp-row-sum")


@dataclass(frozen=True)
class Lookalike:
    """A recipe and the fraction of elements that it has bit for bit."""

    recipe: Recipe
    agreement: float


def published(dtype: torch.dtype, head_dim: int) -> list[Recipe]:
    """What an unchanged kernel may be: presets, and one that takes all keys at once."""
    found = [preset(name, DTYPES[dtype], head_dim) for name in _PUBLISHED]
    whole = replace(found[1], name="cudnn, all keys at once", schedule=Schedule(key_tile=2**20))
    return [*found, whole]


def by_name(name: str, dtype: torch.dtype, head_dim: int) -> Recipe | None:
    """One of ``published``, or any preset."""
    known = {r.name: r for r in published(dtype, head_dim)}
    if name not in known and name in PRESETS:
        return preset(name, DTYPES[dtype], head_dim)
    return known.get(name)


def closest(case: CaseInputs, observed: Tensor, recipes: Sequence[Recipe], device: torch.device) -> Lookalike:
    """Of ``recipes`` the one that has most elements of O ([B, H, T, D]); the first of equals."""
    return max((Lookalike(r, _agreement(r, case, observed, "o", device)) for r in recipes), key=lambda a: a.agreement)


def suspect(
    case: CaseInputs, observed: dict[str, Tensor], output: str, unchanged: Sequence[Recipe], expected: float | None,
    device: torch.device, only: str | None = None,
) -> tuple[str, str] | None:  # fmt: skip
    """The one change that makes the bits of ``output`` ("o" or "dq"), in words, and that with what speaks for it.

    None where no single change does. ``unchanged``: recipes that the kernel may have had; ``expected``: the agreement
    of the baseline's O with its own; ``only``: try this change alone.
    """
    seen = observed[output]
    if seen.dtype != case.q.dtype or (expected is not None and expected < _MODELLED):
        return None
    plain = max(_agreement(r, case, seen, output, device) for r in unchanged)
    enough = AGREEMENT if expected is None else min(AGREEMENT, expected - _SHORT)
    best: tuple[float, str, str] | None = None
    for recipe in unchanged:
        for words, changed in changes(recipe, case.k.shape[2], backward=output != "o"):
            if only is not None and words != only:
                continue
            agreement = _agreement(changed, case, seen, output, device)
            if best is None or agreement > best[0]:
                best = agreement, words, recipe.name
    # A change that leaves over half of the difference unexplained is none.
    if best is None or best[0] < enough or 1 - best[0] > (1 - plain) / 2:
        return None
    shares = f"{share(best[0])} of {SYMBOLS[output]}'s elements bit for bit, unchanged {share(plain)}"
    return best[1], f"{best[1]} (recipe {best[2]} so changed has {shares})"


def changes(recipe: Recipe, keys: int, *, backward: bool = False) -> Iterator[tuple[str, Recipe]]:
    """Every change of one place, in words; those that change nothing are left out."""
    for change in _backward(recipe.input) if backward else _forward(recipe, keys):
        changed = change.apply(recipe)
        if replace(changed, name=recipe.name, summary=recipe.summary) != recipe:
            yield change.seen_as or change.words, changed


def _forward(recipe: Recipe, keys: int) -> list[RecipeChange]:
    low = recipe.input
    opposite: Order = "ascending" if recipe.schedule.order == "descending" else "descending"
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


def _agreement(recipe: Recipe, case: CaseInputs, observed: Tensor, output: str, device: torch.device) -> float:
    try:
        made = emulate(recipe, case, device, with_gradients=output != "o", sequences=_SEQUENCES)[output]
    except RecipeNotSupportedError:
        return 0.0
    return float((made == observed[: len(made)]).double().mean())
