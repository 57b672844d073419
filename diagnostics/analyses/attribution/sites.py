"""The rounding sites of a recipe, and the recipe with some of them exact or rounded in another mode."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

from attn_diag.head.recipe_changes import SITES, exact, in_mode
from attn_diag.kernels import Recipe
from attn_diag.kernels.formats import Mode, parse
from attn_diag.kernels.quantizers import NO_QUANTIZER
from attn_diag.kernels.recipe import QUANTIZERS


@dataclass(frozen=True)
class RoundingSite:
    """A place where a recipe loses precision: ``exact`` holds the fields that undo it, ``format`` what it rounds to.

    ``format`` is None for sites that do not round to a format (arithmetic, accumulation, exp).
    """

    name: str
    words: str
    exact: dict[str, Any]
    format: str | None = None


def rounding_sites(recipe: Recipe, *, dropout: bool = False) -> tuple[RoundingSite, ...]:
    """Every site at which the recipe does less than float64 would, in the order of the computation.

    ``dropout``: whether the head has it.
    """
    sites = []
    for name, site in SITES.items():
        value, words, undone, fmt = getattr(recipe, name), site.words, exact(name), None
        if name == "exp":
            loses, words = value == "polynomial", f"{words} of degree {recipe.exp_degree}"
        elif name == "accumulation":
            loses = value == "nvidia-tensor-core"
        elif name in QUANTIZERS:
            loses = value != NO_QUANTIZER
        elif name == "backward_operands":
            loses = value == "quantized" and ("quantize_k" in recipe.quantized or "quantize_q" in recipe.quantized)
        elif name == "dropout_factor":
            loses = dropout and value != "fp32"
        elif name == "arithmetic":
            loses = value == "fp32"
            if recipe.accumulation == "fp32-nearest":
                undone |= exact("accumulation")
        else:
            loses, fmt = parse(value) is not None and _acts(recipe, name), value
        if loses:
            sites.append(RoundingSite(name, words, undone, fmt))
    return tuple(sites)


def inert_change(recipe: Recipe) -> tuple[str, Recipe]:
    """A sham: a site that reaches none of O, delta, dQ and dW_Q, and the recipe with it changed.

    The cast of P, where only dV sees it; else a lower limit on l that no row comes near.
    """
    if _acts(recipe, "backward_probs"):
        return "row_sum_clamp", replace(recipe, row_sum_clamp=recipe.row_sum_clamp or 1e-30)
    changed = recipe.input if recipe.backward_probs == "fp32" else "fp32"
    return "backward_probs", replace(recipe, backward_probs=changed)


def with_low(recipe: Recipe, sites: Collection[RoundingSite], low: Collection[str]) -> Recipe:
    """The recipe with only the sites named ``low`` as they are, all others exact."""
    undone = {key: value for site in sites if site.name not in low for key, value in site.exact.items()}
    return replace(recipe, **undone)


def with_mode(recipe: Recipe, sites: Collection[RoundingSite], mode: Mode) -> Recipe:
    """The recipe with these sites' roundings in another mode; sites without a format stay."""
    changes: dict[str, Any] = {site.name: in_mode(site.format, mode) for site in sites if site.format is not None}
    return replace(recipe, seed=0, **changes)


def _acts(recipe: Recipe, name: str) -> bool:
    """Whether a site that rounds is reached at all."""
    if name == "difference":
        return recipe.exp == "exact"
    if name == "backward_probs":
        return recipe.dscores_from == "cast-probs"
    if name == "delta_products":
        return recipe.delta_from != "dp"
    return True
