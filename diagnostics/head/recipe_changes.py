"""The vocabulary of recipe changes: what a kernel may round otherwise, each declared once.

Attribution undoes the rounding sites one by one; what-if names what a kernel could do instead; ``check`` suspects what
it does now; ``identify`` mixes sites that no published kernel has together. All take fields and words from here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Literal

from attn_diag.kernels import Recipe
from attn_diag.kernels.formats import Format, base, parse
from attn_diag.kernels.quantizers import NO_QUANTIZER, parse_quantizer

CastMode = Literal["toward-zero", "up", "down"]
_CASTS: dict[CastMode, str] = {"toward-zero": "truncates", "up": "rounds up", "down": "rounds down"}


@dataclass(frozen=True)
class RecipeChange:
    """One change of a recipe."""

    words: str
    """What a kernel would do that had it."""
    fields: Mapping[str, Any]
    """The recipe's fields that it sets."""
    seen_as: str = ""
    """The same of a kernel that is suspected of it; empty: ``words``."""

    def acts_on(self, recipe: Recipe) -> bool:
        """Whether it changes anything there."""
        return any(getattr(recipe, name) != value for name, value in self.fields.items())

    def apply(self, recipe: Recipe) -> Recipe:
        """The recipe with it."""
        return replace(recipe, **self.fields)

    def with_exact(self, *sites: str) -> RecipeChange:
        """The same, and these sites round no longer."""
        return replace(self, fields={**self.fields, **exact(*sites)})


@dataclass(frozen=True)
class Site:
    """A place where a recipe loses precision; its name is the recipe's field."""

    words: str
    """What is lost there."""
    value: str = ""
    """What is rounded there, for kernels that round it to a narrow format."""
    short: str = ""
    """The same in a list of such sites."""
    cast: str = ""
    """The cast itself, for sites where every kernel casts."""
    undone: Mapping[str, str] | None = None
    """The fields that make it exact; None: the field itself in fp32."""
    takes: Mapping[str, str] = field(default_factory=dict)
    """Fields that rounding it to a narrow format takes along."""


# In the order of the computation.
SITES: dict[str, Site] = {
    "quantize_q": Site("quantisation of q", undone={"quantize_q": NO_QUANTIZER}),
    "quantize_k": Site("quantisation of k", undone={"quantize_k": NO_QUANTIZER, "smooth_k": "none"}),
    "scores": Site(
        "rounding of the scores S", "the scores S", "scores", takes={"alpha": "before-rounding", "exp": "exact"}
    ),
    "difference": Site("rounding of S - m", "S - m", "S - m", takes={"exp": "exact"}),
    "row_max": Site("rounding of the row maximum m", "the row maximum", "maximum"),
    "exp": Site("polynomial exp2", undone={"exp": "exact"}),
    "probs": Site("cast of P̄ for PV", cast="the cast of P̄"),
    "dropout_factor": Site("rounding of 1 / (1 - p) of dropout, and of P̄ times it"),
    "quantize_probs": Site("quantisation of P̄", undone={"quantize_probs": NO_QUANTIZER}),
    "quantize_v": Site("quantisation of v", undone={"quantize_v": NO_QUANTIZER}),
    "row_sum": Site("rounding of the row sum l", "the row sum l", "row sum"),
    "pv_sums": Site("sums of P̄V inside the tensor core", "P̄V in the tensor core"),
    "range_pv": Site("rounding of P̄V per key range", "P̄V of every tile", "PV of a range"),
    "accumulator": Site("rounding of Ō between key ranges", "the accumulator of O", "O's accumulator"),
    "accumulation": Site("truncation in the sums of products", undone={"accumulation": "exact"}),
    "out": Site("last rounding of O", cast="the last cast of O"),
    "delta_products": Site("rounding of dO∘O before it is summed", "the products dO∘O of delta"),
    "delta": Site("rounding of delta", "delta"),
    "backward_probs": Site("cast of P in dS"),
    "dprobs": Site("rounding of dP", "dP"),
    "dscores": Site("cast of dS", cast="the cast of dS"),
    "quantize_dscores": Site("quantisation of dS", undone={"quantize_dscores": NO_QUANTIZER}),
    "backward_operands": Site("quantised q and k of dS K and dSᵀQ", undone={"backward_operands": "given"}),
    "gradient_accumulator": Site("rounding of dQ between key ranges", "the gradients' accumulator"),
    "dq": Site("last rounding of dQ", cast="the last cast of the gradients"),
    "arithmetic": Site("fp32 arithmetic between the sites", undone={"arithmetic": "fp64"}),
}


def exact(*sites: str) -> dict[str, str]:
    """The fields that make these sites exact."""
    found: dict[str, str] = {}
    for site in sites:
        undone = SITES[site].undone
        found |= {site: "fp32"} if undone is None else undone
    return found


def rounded(site: str, fmt: Format) -> RecipeChange:
    """A site that rounds to a narrow format, which published kernels keep in fp32."""
    found = SITES[site]
    return RecipeChange(f"{found.value} in {base(fmt).upper()}", {site: fmt, **found.takes})


@lru_cache(maxsize=64)  # asked for every head
def coarse_words(*recipes: Recipe | None) -> str | None:
    """What of its forward a recipe rounds that published kernels keep in fp32; None where that is nothing.

    Of several what all of them round, and of what they round beside it, each something, one or the other: "row sum, PV
    of a range (or O's accumulator) in BF16".
    """
    every = [
        {name: fmt for name, site in SITES.items() if r and site.short and parse(fmt := getattr(r, name)) is not None}
        for r in recipes
    ]
    for one in every:
        if "scores" in one:  # those of whose differences no more is told
            one.pop("difference", None)
    common = dict(set.intersection(*(set(one.items()) for one in every)))
    left = [{name: fmt for name, fmt in one.items() if name not in common} for one in every]
    # In a single tile P V and O's accumulator are the same number.
    either = {name: fmt for one in left if len(one) == 1 for name, fmt in one.items()}
    if len(set(either.values())) != 1 or not all(one.keys() & either for one in left):
        either = {}
    of_format: dict[str, list[str]] = {}
    for name, site in SITES.items():
        if name in common:
            of_format.setdefault(base(common[name]).upper(), []).append(site.short)
    if either:
        first, *others = (site.short for name, site in SITES.items() if name in either)
        words = f"{first} (or {' or '.join(others)})"
        of_format.setdefault(base(next(iter(either.values()))).upper(), []).append(words)
    return "; ".join(f"{', '.join(names)} in {fmt}" for fmt, names in of_format.items()) or None


def cast(site: str, fmt: Format, mode: CastMode) -> RecipeChange:
    """A cast in another mode than to nearest."""
    return RecipeChange(f"{SITES[site].cast} {_CASTS[mode]}", {site: in_mode(fmt, mode)})


def in_mode(fmt: Format, mode: str) -> Format:
    """A format, rounded to in another mode."""
    return f"{base(fmt)}:{mode}"


def scheduled(recipe: Recipe, words: str, **changes: Any) -> RecipeChange:
    """The recipe's own schedule with fields changed."""
    return RecipeChange(words, {"schedule": replace(recipe.schedule, **changes)})


def coarse_scores(fmt: Format, alpha: str = "before-rounding") -> dict[str, str]:
    """The fields of scores, and S - m with them, in a narrow format."""
    return {**rounded("scores", fmt).fields, **rounded("difference", fmt).fields, "alpha": alpha}


DELTA_FROM_FP32_O = RecipeChange(
    "delta from O before its last rounding", {"delta_from": "fp32-o"}, "delta from O before its cast"
)
DELTA_FROM_DP = RecipeChange("delta = rowsum(P o dP)", {"delta_from": "dp"}, "delta = rowsum(P∘dP)")
CAST_ROW_SUM = RecipeChange("l sums the cast P_bar", {"row_sum_of": "cast-probs"}, "l sums the cast P̄")
FP32_ROW_SUM = RecipeChange("l sums the fp32 P_bar", {"row_sum_of": "fp32-probs"}, "l sums P̄ before its cast")
UNCAST_P = RecipeChange("P_bar not cast for PV", exact("probs"), "P̄ is not cast")
UNCAST_DS = RecipeChange("dS not cast", exact("dscores"))
FP32_SCORES = RecipeChange("scores, S - m and the row maximum in fp32", exact("scores", "difference", "row_max"))
FP32_SUMS = RecipeChange(
    "row sum, PV of a range and O's accumulator in fp32",
    {**exact("row_sum", "range_pv", "accumulator"), "lse_from": "unrounded-l"},
)
FP32_BACKWARD = RecipeChange(
    "dO o O, delta, dP and the gradients' sums in fp32",
    exact("delta_products", "delta", "dprobs", "gradient_accumulator"),
)
SAME_SCORES = RecipeChange(
    "the backward recomputes P from scores rounded as in the forward", {"backward_scores": "as-forward"}
)
BACKWARD_FP32_SCORES = RecipeChange(
    "the forward's scores as they are, the backward recomputes P from fp32 scores", {"backward_scores": "fp32"}
)
LATE_DIVISION = RecipeChange("O is cast before the division by l", {"division": "after-last-cast"})
CUBIC_EXP2 = RecipeChange("a degree-3 polynomial for exp2", {"exp": "polynomial", "exp_degree": 3})
DS_FROM_CAST_P = RecipeChange("dS from the cast P", {"dscores_from": "cast-probs"})
EARLY_ALPHA = RecipeChange("alpha before the cast of dS", {"alpha_in_backward": "before-cast"})
SMOOTH_K = RecipeChange("k's mean over the keys is taken off before it is quantised", {"smooth_k": "mean"})
SMOOTH_Q = RecipeChange(
    "q's mean over a query block is taken off before it is quantised, its product added", {"smooth_q": "block-mean"}
)
ROTATED = RecipeChange("q and k times a Hadamard matrix before they are quantised", {"rotation": "hadamard"})
TWO_LEVELS = RecipeChange("sums of P_barV of a key range are added in fp32 outside", {"pv_levels": "two"})
FP32_PV_SUMS = RecipeChange("the tensor core sums P_barV in fp32", exact("pv_sums"))
EXACT_SUMS = RecipeChange("sums of products without truncation", exact("accumulation"))


def requantised(recipe: Recipe, field_name: str, words: str, **changes: Any) -> RecipeChange | None:
    """An operand's quantiser with fields changed; None where nothing is quantised there, or nothing changes."""
    text = getattr(recipe, field_name)
    by = parse_quantizer(text)
    if by is None or all(getattr(by, name) == value for name, value in changes.items()):
        return None
    name, *parts = text.split()
    kept = [part for part in parts if part.partition("=")[0] not in changes]
    return RecipeChange(words, {field_name: " ".join([name, *kept, *(f"{n}={v}" for n, v in changes.items())])})
