"""What a kernel could do otherwise, as changes of its recipe, and what each would cost."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from attn_diag.kernels import Recipe, Schedule, SoftmaxRule, preset
from attn_diag.kernels.formats import base

Kind = Literal["mitigation", "mix", "other recipe", "clip"]

# Products of Tq x Tk x D that attention makes: S and P V forward; S, dP, dV, dQ and dK backward.
PRODUCTS = 7
# FlashAttention-4 (arXiv 2603.05451, section 3) keeps the maximum until P_bar would exceed 2^8.
STALE_LOG2 = 8
# 2 to 8 is published; a smaller one reaches larger maxima.
BETAS = (1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0)
SEEDS = 4
# Other kernels; the remaining presets are fa2 with one of the changes below.
_KERNELS = (
    "fa2", "cudnn", "efficient", "qiu2025", "qiu2025-stabilised", "qiu2025-stabilised-unclamped", "bf16-forward",
    "bf16-scores",
)  # fmt: skip


@dataclass(frozen=True)
class Price:
    """What a change costs on top of fused attention, forward and backward: an estimate, not a measurement.

    ``bytes_per_feature``: written and read besides, for every element of O; ``products``: matrix products of
    Tq x Tk x D, of which attention makes 7; ``vector_ops``: elementwise operations on every score.
    """

    bytes_per_feature: float = 0.0
    products: float = 0.0
    vector_ops: float = 0.0
    words: str = ""

    def __add__(self, other: Price) -> Price:
        return Price(
            self.bytes_per_feature + other.bytes_per_feature,
            self.products + other.products,
            self.vector_ops + other.vector_ops,
            "; ".join(words for words in (self.words, other.words) if words),
        )


@dataclass(frozen=True)
class RecipeChange:
    """One change of a recipe: the fields it sets, what it is in words, and its price."""

    words: str
    fields: dict[str, Any]
    price: Price = Price()

    def acts_on(self, recipe: Recipe) -> bool:
        """Whether it changes anything there."""
        return any(getattr(recipe, name) != value for name, value in self.fields.items())

    def apply(self, recipe: Recipe) -> Recipe:
        """The recipe with it."""
        return replace(recipe, **self.fields)


@dataclass(frozen=True)
class WhatIfPlan:
    """A candidate to run: one recipe, or one for every seed. ``price`` is None for another kernel altogether."""

    name: str
    description: str
    kind: Kind
    recipes: tuple[Recipe, ...]
    price: Price | None


_FREE = Price(words="no bytes and no products (registers of a fused kernel)")
FP32_O = RecipeChange(
    "delta from O before its last rounding",
    {"delta_from": "fp32-o", "delta_products": "fp32", "delta": "fp32"},
    Price(bytes_per_feature=6, words="O is also written in fp32, and read in place of the rounded one"),
)
DELTA_FROM_DP = RecipeChange(
    "delta = rowsum(P o dP)",
    {"delta_from": "dp", "delta": "fp32"},
    Price(products=2, words="S and dP are made once more before dS"),
)
UNCAST_DS = RecipeChange(
    "dS not cast",
    {"dscores": "fp32"},
    Price(products=2, words="dS in two parts of the input format: one product more for dQ and for dK"),
)
UNCAST_P = RecipeChange(
    "P_bar not cast for PV",
    {"probs": "fp32"},
    Price(products=1, words="P_bar in two parts of the input format: one product more"),
)
FP32_SCORES = RecipeChange(
    "scores, S - m and the row maximum in fp32", {"scores": "fp32", "difference": "fp32", "row_max": "fp32"}, _FREE
)
FP32_SUMS = RecipeChange(
    "row sum, PV of a range and O's accumulator in fp32",
    {"row_sum": "fp32", "range_pv": "fp32", "accumulator": "fp32", "lse_from": "unrounded-l"},
    _FREE,
)
FP32_BACKWARD = RecipeChange(
    "dO o O, delta, dP and the gradients' sums in fp32",
    {"delta_products": "fp32", "delta": "fp32", "dprobs": "fp32", "gradient_accumulator": "fp32"},
    _FREE,
)
CAST_ROW_SUM = RecipeChange("l sums the cast P_bar", {"row_sum_of": "cast-probs"}, _FREE)
SAME_SCORES = RecipeChange(
    "the backward recomputes P from scores rounded as in the forward", {"backward_scores": "as-forward"}, _FREE
)
# Several changes at once, by name.
_FIELD_CHANGES: dict[str, tuple[RecipeChange, ...]] = {
    "fp32-o-delta": (FP32_O,),
    "fp32-o-delta+uncast-ds": (FP32_O, UNCAST_DS),
    "fp32-o-delta+uncast-p": (FP32_O, UNCAST_P),
    "fp32-o-delta+uncast-p+uncast-ds": (FP32_O, UNCAST_P, UNCAST_DS),
    "delta-from-dp": (DELTA_FROM_DP,),
    "delta-from-dp+uncast-ds": (DELTA_FROM_DP, UNCAST_DS),
    "pv-fp32": (UNCAST_P,),
    "uncast-ds": (UNCAST_DS,),
    "fp32-scores": (FP32_SCORES,),
    "fp32-sums": (FP32_SUMS,),
    "fp32-scores+fp32-sums": (FP32_SCORES, FP32_SUMS),
    "fp32-backward": (FP32_BACKWARD,),
    "fp32-throughout": (FP32_SCORES, FP32_SUMS, FP32_BACKWARD),
    "fp32-throughout+fp32-o-delta": (FP32_SCORES, FP32_SUMS, FP32_BACKWARD, FP32_O),
    "fp32-throughout+delta-from-dp": (FP32_SCORES, FP32_SUMS, FP32_BACKWARD, DELTA_FROM_DP),
    "fp32-throughout+fp32-o-delta+uncast-p+uncast-ds": (
        FP32_SCORES,
        FP32_SUMS,
        FP32_BACKWARD,
        FP32_O,
        UNCAST_P,
        UNCAST_DS,
    ),
}
_STABILISED_PRICE = Price(
    vector_ops=3, words="every score is compared with its row's maximum and counted before the exponential"
)
_RANDOM_P_PRICE = Price(vector_ops=10, words="a random number for every score")
_RANDOM_O_PRICE = Price(words="a random number for every element of O")


def plans(
    baseline: Recipe,
    *,
    head_dim: int,
    keys: int,
    score_unit: float,
    betas: Sequence[float] = BETAS,
    seeds: int = SEEDS,
) -> list[WhatIfPlan]:
    """Everything to be tried on a baseline: what changes nothing is left out, as are second copies.

    ``keys``: the length of K; where one key range holds them all there is no order to change.
    ``score_unit``: what a score of 1 is in the unit of the stored scores (1/alpha where they are stored unscaled),
    in which the rules' thresholds are given. ``betas`` of the stabilised softmax; ``seeds`` of random roundings.
    """
    found: list[WhatIfPlan] = []
    seen = {content(baseline)}
    for plan in _all(baseline, head_dim, keys, score_unit, betas, seeds):
        key = content(plan.recipes[0])
        if key not in seen:
            seen.add(key)
            found.append(plan)
    return found


def content(recipe: Recipe) -> str:
    """What a recipe does, without its name: equal for recipes that cannot be told apart."""
    return replace(recipe, name="", summary="").json


def changed_fields(baseline: Recipe, recipe: Recipe) -> dict[str, str]:
    """What differs, field by field: "before -> after"."""
    before, after = (json.loads(r.json) for r in (baseline, recipe))
    differing = [n for n in before if before[n] != after[n] and n not in ("name", "summary", "seed")]
    return {name: f"{_shown(baseline, name)} -> {_shown(recipe, name)}" for name in differing}


def stale_rule(score_unit: float) -> SoftmaxRule:
    """The maximum is kept until P_bar would exceed 2^8."""
    return SoftmaxRule("stale", threshold=STALE_LOG2 * math.log(2) * score_unit)


def stabilised_rule(beta: float, score_unit: float) -> SoftmaxRule:
    """The published rule; its epsilon of 1e-3 counts in scaled scores."""
    return SoftmaxRule("stabilised", beta=beta, epsilon=1e-3 * score_unit)


def _all(
    baseline: Recipe, head_dim: int, keys: int, score_unit: float, betas: Sequence[float], seeds: int
) -> Iterator[WhatIfPlan]:
    yield from _field_changes(baseline)
    yield from _mixes(baseline)
    yield from _rules(baseline, keys, score_unit, betas)
    yield from _orders(baseline, keys)
    yield from _random(baseline, seeds)
    for name in _KERNELS:
        recipe = preset(name, baseline.input, head_dim)
        yield WhatIfPlan(name, recipe.summary, "other recipe", (recipe,), None)


def _field_changes(baseline: Recipe) -> Iterator[WhatIfPlan]:
    for name, changes in _FIELD_CHANGES.items():
        if acting := [change for change in changes if change.acts_on(baseline)]:
            yield _changed(name, baseline, acting, "mitigation")
    if baseline.probs != "fp32":
        if CAST_ROW_SUM.acts_on(baseline):
            yield _changed("cast-row-sum", baseline, [CAST_ROW_SUM], "mitigation")
        else:
            fp32_sum = RecipeChange("l sums the fp32 P_bar", {"row_sum_of": "fp32-probs"}, _FREE)
            yield _changed("fp32-row-sum", baseline, [fp32_sum], "mitigation")


def _mixes(baseline: Recipe) -> Iterator[WhatIfPlan]:
    """Forward and backward recomputing P from scores that are rounded differently, or no longer so."""
    if baseline.scores != "fp32":
        if baseline.backward_scores == "fp32":
            yield _changed("same-scores", baseline, [SAME_SCORES], "mitigation")
        else:
            words = "the forward's scores as they are, the backward recomputes P from fp32 scores"
            change = RecipeChange(words, {"backward_scores": "fp32"}, _FREE)
            yield _changed("backward-fp32-scores", baseline, [change], "mix")
        return
    fmt = base(baseline.input)
    coarse = {"scores": fmt, "difference": fmt, "alpha": "before-rounding", "exp": "exact"}
    words = f"scores and S - m of the forward in {fmt}, the backward recomputes P from"
    for name, scores, rest in (
        ("coarse-forward-scores", "fp32", "fp32 scores"),
        ("coarse-scores", "as-forward", "the same rounded scores"),
    ):
        change = RecipeChange(f"{words} {rest}", {**coarse, "backward_scores": scores}, _FREE)
        yield _changed(name, baseline, [change], "mix")


def _rules(baseline: Recipe, keys: int, score_unit: float, betas: Iterable[float]) -> Iterator[WhatIfPlan]:
    if baseline.softmax.kind != "safe":
        safe = RecipeChange("the running maximum itself is subtracted", {"softmax": SoftmaxRule()}, _FREE)
        yield _changed("safe-softmax", baseline, [safe], "mitigation")
    if baseline.softmax.kind != "stale" and baseline.schedule.key_tile < keys:
        words = f"the old maximum is kept until P_bar would exceed 2^{STALE_LOG2}"
        saved = Price(words="saves most rescalings of O's accumulator")
        yield _changed(
            "stale-maximum", baseline, [RecipeChange(words, {"softmax": stale_rule(score_unit)}, saved)], "mitigation"
        )
    for beta in betas:
        words = f"a repeated maximum r > 0 is replaced by {beta:g} r"
        change = RecipeChange(words, {"softmax": stabilised_rule(beta, score_unit)}, _STABILISED_PRICE)
        yield _changed(f"stabilised-{beta:g}", baseline, [change], "mitigation")


def _orders(baseline: Recipe, keys: int) -> Iterator[WhatIfPlan]:
    schedule = baseline.schedule
    for order in ("ascending", "descending", "diagonal-first") if schedule.key_tile < keys else ():
        yield _scheduled(f"order-{order}", baseline, replace(schedule, order=order), f"key ranges {order}")
    if schedule.split_keys is not None:
        yield _scheduled("no-splits", baseline, replace(schedule, split_keys=None), "keys in one split")
    for tile in (64, 128, 256):
        if min(tile, keys) == min(schedule.key_tile, keys):
            continue
        yield _scheduled(f"tile-{tile}", baseline, replace(schedule, key_tile=tile), f"{tile} keys a range")


def _random(baseline: Recipe, seeds: int) -> Iterator[WhatIfPlan]:
    """Stochastic rounding where O, or P_bar, is rounded to nearest."""
    for name, site, words, price in (
        ("stochastic-o", "out", "O", _RANDOM_O_PRICE),
        ("stochastic-p", "probs", "P_bar", _RANDOM_P_PRICE),
    ):
        fmt = getattr(baseline, site)
        if seeds and fmt not in ("fp32", "fp64") and ":" not in fmt:
            change: dict[str, Any] = {site: f"{fmt}:stochastic"}
            recipes = tuple(replace(baseline, name=name, seed=seed, **change) for seed in range(seeds))
            yield WhatIfPlan(
                name, f"{words} rounded stochastically (mean of {seeds} seeds)", "mitigation", recipes, price
            )


def _changed(name: str, baseline: Recipe, changes: Sequence[RecipeChange], kind: Kind) -> WhatIfPlan:
    recipe, price = baseline, Price()
    for change in changes:
        recipe = change.apply(recipe)
        price = price if change.price.words in price.words.split("; ") else price + change.price
    words = "; ".join(change.words for change in changes)
    return WhatIfPlan(name, words, kind, (replace(recipe, name=name, summary=words),), price)


def _scheduled(name: str, baseline: Recipe, schedule: Schedule, words: str) -> WhatIfPlan:
    return _changed(name, baseline, [RecipeChange(words, {"schedule": schedule}, Price(words="none"))], "mitigation")


def _shown(recipe: Recipe, name: str) -> str:
    return str(getattr(recipe, name))
