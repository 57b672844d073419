"""The rounding sites of a recipe that act, and recipes in which only some of them round."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

from attn_diag.kernels import Recipe
from attn_diag.kernels.formats import Mode, base, parse

_WORDS = {
    "scores": "rounding of the scores S",
    "difference": "rounding of S - m",
    "row_max": "rounding of the row maximum m",
    "exp": "polynomial exp2",
    "probs": "cast of P̄ for PV",
    "row_sum": "rounding of the row sum l",
    "range_pv": "rounding of P̄V per key range",
    "accumulator": "rounding of Ō between key ranges",
    "accumulation": "truncation in the sums of products",
    "out": "last rounding of O",
    "delta_products": "rounding of dO∘O before it is summed",
    "delta": "rounding of delta",
    "backward_probs": "cast of P in dS",
    "dprobs": "rounding of dP",
    "dscores": "cast of dS",
    "gradient_accumulator": "rounding of dQ between key ranges",
    "dq": "last rounding of dQ",
    "arithmetic": "fp32 arithmetic between the sites",
}
_FORMAT_SITES = tuple(site for site in _WORDS if site not in ("exp", "accumulation", "arithmetic"))
_ARITHMETIC = {"arithmetic": "fp64", "accumulation": "exact"}


@dataclass(frozen=True)
class RoundingSite:
    """A place where a recipe loses precision: ``exact`` holds the fields that undo it, ``format`` what it rounds to.

    ``format`` is None for sites that do not round to a format (arithmetic, accumulation, exp).
    """

    name: str
    words: str
    exact: dict[str, Any]
    format: str | None = None


def rounding_sites(recipe: Recipe) -> tuple[RoundingSite, ...]:
    """Every site at which the recipe does less than float64 would, in the order of the computation."""
    sites = []
    for name, words in _WORDS.items():
        value = getattr(recipe, name)
        if name in _FORMAT_SITES:
            if parse(value) is not None and _acts(recipe, name):
                sites.append(RoundingSite(name, words, {name: "fp32"}, value))
        elif name == "exp":
            if value == "polynomial":
                sites.append(RoundingSite(name, f"{words} of degree {recipe.exp_degree}", {"exp": "exact"}))
        elif name == "accumulation":
            if value == "nvidia-tensor-core":
                sites.append(RoundingSite(name, words, {"accumulation": "exact"}))
        elif value == "fp32":
            undone = _ARITHMETIC if recipe.accumulation == "fp32-nearest" else {"arithmetic": "fp64"}
            sites.append(RoundingSite(name, words, dict(undone)))
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
    exact = {key: value for site in sites if site.name not in low for key, value in site.exact.items()}
    return replace(recipe, **exact)


def with_mode(recipe: Recipe, sites: Collection[RoundingSite], mode: Mode, seed: int = 0) -> Recipe:
    """The recipe with these sites' roundings in another mode; sites without a format stay."""
    changes: dict[str, Any] = {site.name: f"{base(site.format)}:{mode}" for site in sites if site.format is not None}
    return replace(recipe, seed=seed, **changes)


def _acts(recipe: Recipe, name: str) -> bool:
    """Whether a site that rounds is reached at all."""
    if name == "difference":
        return recipe.exp == "exact"
    if name == "backward_probs":
        return recipe.dscores_from == "cast-probs"
    if name == "delta_products":
        return recipe.delta_from != "dp"
    return True
