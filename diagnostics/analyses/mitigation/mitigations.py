"""What a kernel could do otherwise, as changes of its recipe, and what each would cost."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from attn_diag.head import recipe_changes as known
from attn_diag.head.recipe_changes import RecipeChange
from attn_diag.kernels import Recipe, SoftmaxRule, preset
from attn_diag.kernels.formats import base
from attn_diag.kernels.quantizers import NO_QUANTIZER

Kind = Literal["mitigation", "mix", "other recipe"]

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
class WhatIfPlan:
    """A candidate to run: one recipe, or one for every seed. ``price`` is None for another kernel altogether."""

    name: str
    description: str
    kind: Kind
    recipes: tuple[Recipe, ...]
    price: Price | None


# delta needs its products and sum in fp32 as well, or nothing is won.
_FP32_O = known.DELTA_FROM_FP32_O.with_exact("delta_products", "delta")
_DELTA_FROM_DP = known.DELTA_FROM_DP.with_exact("delta")
_FP32_THROUGHOUT = (known.FP32_SCORES, known.FP32_SUMS, known.FP32_BACKWARD)
_FREE = Price(words="no bytes and no products (registers of a fused kernel)")
_PRICES = {
    _FP32_O.words: Price(bytes_per_feature=6, words="O is also written in fp32, and read in place of the rounded one"),
    _DELTA_FROM_DP.words: Price(products=2, words="S and dP are made once more before dS"),
    known.UNCAST_DS.words: Price(
        products=2, words="dS in two parts of the input format: one product more for dQ and for dK"
    ),
    known.UNCAST_P.words: Price(products=1, words="P_bar in two parts of the input format: one product more"),
}
# Several changes at once, by name.
_FIELD_CHANGES: dict[str, tuple[RecipeChange, ...]] = {
    "fp32-o-delta": (_FP32_O,),
    "fp32-o-delta+uncast-ds": (_FP32_O, known.UNCAST_DS),
    "fp32-o-delta+uncast-p": (_FP32_O, known.UNCAST_P),
    "fp32-o-delta+uncast-p+uncast-ds": (_FP32_O, known.UNCAST_P, known.UNCAST_DS),
    "delta-from-dp": (_DELTA_FROM_DP,),
    "delta-from-dp+uncast-ds": (_DELTA_FROM_DP, known.UNCAST_DS),
    "pv-fp32": (known.UNCAST_P,),
    "uncast-ds": (known.UNCAST_DS,),
    "fp32-scores": (known.FP32_SCORES,),
    "fp32-sums": (known.FP32_SUMS,),
    "fp32-scores+fp32-sums": (known.FP32_SCORES, known.FP32_SUMS),
    "fp32-backward": (known.FP32_BACKWARD,),
    "fp32-throughout": _FP32_THROUGHOUT,
    "fp32-throughout+fp32-o-delta": (*_FP32_THROUGHOUT, _FP32_O),
    "fp32-throughout+delta-from-dp": (*_FP32_THROUGHOUT, _DELTA_FROM_DP),
    "fp32-throughout+fp32-o-delta+uncast-p+uncast-ds": (
        *_FP32_THROUGHOUT,
        _FP32_O,
        known.UNCAST_P,
        known.UNCAST_DS,
    ),
}
_OPERANDS = {
    "quantize_q": "q", "quantize_k": "k", "quantize_v": "v", "quantize_probs": "P_bar", "quantize_do": "dO of dV",
    "quantize_backward_probs": "P of dV", "quantize_dscores": "dS",
}  # fmt: skip
_SCALES = {
    "quantize_q": {"token": "row", "32-tokens": "32rows"},
    "quantize_k": {"token": "row", "64-tokens": "64rows"},
    "quantize_v": {"channel": "column", "64-tokens": "64rows"},
}
_WHOLE_PRICE = Price(words="slower products: 16 bits, or fp32 sums outside the tensor core")
_SMOOTH_Q_PRICE = Price(words="one row more of products a query block: its mean times k")
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

    Args:
        baseline: The recipe that is changed.
        head_dim: D of q and k.
        keys: The length of K; where one key range holds them all there is no order to change.
        score_unit: What a score of 1 is in the unit of the stored scores (1/alpha where they are stored unscaled), in
            which the rules' thresholds are given.
        betas: Of the stabilised softmax.
        seeds: How many runs of random roundings.
    """
    found: dict[str, WhatIfPlan] = {}
    for plan in _all(baseline, head_dim, keys, score_unit, betas, seeds):
        found.setdefault(content(plan.recipes[0]), plan)
    found.pop(content(baseline), None)
    return list(found.values())


def content(recipe: Recipe) -> str:
    """What a recipe does, without its name: equal for recipes that cannot be told apart."""
    return replace(recipe, name="", summary="").json


def changed_fields(baseline: Recipe, recipe: Recipe) -> dict[str, str]:
    """What differs, field by field: "before -> after"."""
    before, after = (json.loads(r.json) for r in (baseline, recipe))
    differing = [n for n in before if before[n] != after[n] and n not in ("name", "summary", "seed")]
    return {name: f"{getattr(baseline, name)} -> {getattr(recipe, name)}" for name in differing}


def stabilised_rule(beta: float, score_unit: float) -> SoftmaxRule:
    """The published rule; its epsilon of 1e-3 counts in scaled scores."""
    return SoftmaxRule("stabilised", beta=beta, epsilon=1e-3 * score_unit)


def _all(
    baseline: Recipe, head_dim: int, keys: int, score_unit: float, betas: Sequence[float], seeds: int
) -> Iterator[WhatIfPlan]:
    yield from _field_changes(baseline)
    yield from _mixes(baseline)
    yield from _quantisers(baseline)
    yield from _rules(baseline, keys, score_unit, betas)
    yield from _orders(baseline, keys)
    yield from _random(baseline, seeds)
    for name in _KERNELS:
        recipe = preset(name, baseline.input, head_dim)
        yield WhatIfPlan(name, recipe.summary, "other recipe", (recipe,), None)


def _field_changes(baseline: Recipe) -> Iterator[WhatIfPlan]:
    for name, changes in _FIELD_CHANGES.items():
        if acting := [change for change in changes if change.acts_on(baseline)]:
            yield _changed(name, baseline, acting)
    if baseline.probs != "fp32":
        if known.CAST_ROW_SUM.acts_on(baseline):
            yield _changed("cast-row-sum", baseline, [known.CAST_ROW_SUM])
        else:
            yield _changed("fp32-row-sum", baseline, [known.FP32_ROW_SUM])


def _quantisers(baseline: Recipe) -> Iterator[WhatIfPlan]:
    """Of recipes below 16 bits: operands left whole, other scales, smoothing, rotation and sums."""
    for field in baseline.quantized:
        name, words = field.removeprefix("quantize_"), _OPERANDS[field]
        change = RecipeChange(f"{words} not quantised", {field: NO_QUANTIZER})
        yield _changed(f"whole-{name}", baseline, [change], price=_WHOLE_PRICE)
        for label, block in _SCALES.get(field, {}).items():
            if other := known.requantised(baseline, field, f"a scale of {words} for every {label}", block=block):
                yield _changed(f"{name}-scale-{label}", baseline, [other])
    if {"quantize_q", "quantize_k"} & set(baseline.quantized):
        for name, on in (("smooth-k", known.SMOOTH_K), ("smooth-q", known.SMOOTH_Q), ("hadamard", known.ROTATED)):
            (site,) = on.fields
            off = RecipeChange(f"without {name}", {site: "none"})
            change, label = (on, name) if getattr(baseline, site) == "none" else (off, f"no-{name}")
            price = _SMOOTH_Q_PRICE if label == "smooth-q" else None
            yield _changed(label, baseline, [change], price=price)
    if base(baseline.probs) in ("e4m3", "e5m2"):
        for factor in (1.0, 256.0, 448.0):
            if factor != baseline.probs_scale:
                change = RecipeChange(f"P_bar times {factor:g} before its cast", {"probs_scale": factor})
                yield _changed(f"p-scale-{factor:g}", baseline, [change])
    if baseline.accumulation == "nvidia-tensor-core":
        if known.TWO_LEVELS.acts_on(baseline):
            yield _changed("two-level-sums", baseline, [known.TWO_LEVELS])
        yield _changed("exact-sums", baseline, [known.EXACT_SUMS, known.FP32_PV_SUMS], price=_WHOLE_PRICE)


def _mixes(baseline: Recipe) -> Iterator[WhatIfPlan]:
    """Forward and backward recomputing P from scores that are rounded differently, or no longer so."""
    if baseline.scores != "fp32":
        if baseline.backward_scores == "fp32":
            yield _changed("same-scores", baseline, [known.SAME_SCORES])
        else:
            yield _changed("backward-fp32-scores", baseline, [known.BACKWARD_FP32_SCORES], "mix")
        return
    fmt = base(baseline.input)
    words = f"scores and S - m of the forward in {fmt}, the backward recomputes P from"
    for name, scores, rest in (
        ("coarse-forward-scores", known.BACKWARD_FP32_SCORES, "fp32 scores"),
        ("coarse-scores", known.SAME_SCORES, "the same rounded scores"),
    ):
        change = RecipeChange(f"{words} {rest}", {**known.coarse_scores(fmt), **scores.fields})
        yield _changed(name, baseline, [change], "mix")


def _rules(baseline: Recipe, keys: int, score_unit: float, betas: Iterable[float]) -> Iterator[WhatIfPlan]:
    if baseline.softmax.kind != "safe":
        safe = RecipeChange("the running maximum itself is subtracted", {"softmax": SoftmaxRule()})
        yield _changed("safe-softmax", baseline, [safe])
    if baseline.softmax.kind != "stale" and baseline.schedule.key_tile < keys:
        words = f"the old maximum is kept until P_bar would exceed 2^{STALE_LOG2}"
        saved = Price(words="saves most rescalings of O's accumulator")
        rule = SoftmaxRule("stale", threshold=STALE_LOG2 * math.log(2) * score_unit)
        stale = RecipeChange(words, {"softmax": rule})
        yield _changed("stale-maximum", baseline, [stale], price=saved)
    for beta in betas:
        words = f"a repeated maximum r > 0 is replaced by {beta:g} r"
        change = RecipeChange(words, {"softmax": stabilised_rule(beta, score_unit)})
        yield _changed(f"stabilised-{beta:g}", baseline, [change], price=_STABILISED_PRICE)


def _orders(baseline: Recipe, keys: int) -> Iterator[WhatIfPlan]:
    def tried(name: str, words: str, **changes: object) -> WhatIfPlan:
        return _changed(name, baseline, [known.scheduled(baseline, words, **changes)], price=Price(words="none"))

    schedule = baseline.schedule
    for order in ("ascending", "descending", "diagonal-first") if schedule.key_tile < keys else ():
        yield tried(f"order-{order}", f"key ranges {order}", order=order)
    if schedule.split_keys is not None:
        yield tried("no-splits", "keys in one split", split_keys=None)
    for tile in (64, 128, 256):
        if min(tile, keys) != min(schedule.key_tile, keys):
            yield tried(f"tile-{tile}", f"{tile} keys a range", key_tile=tile)


def _random(baseline: Recipe, seeds: int) -> Iterator[WhatIfPlan]:
    """Stochastic rounding where O, or P_bar, is rounded to nearest."""
    for name, site, words, price in (
        ("stochastic-o", "out", "O", _RANDOM_O_PRICE),
        ("stochastic-p", "probs", "P_bar", _RANDOM_P_PRICE),
    ):
        fmt = getattr(baseline, site)
        if seeds and fmt not in ("fp32", "fp64") and ":" not in fmt:
            change: dict[str, Any] = {site: known.in_mode(fmt, "stochastic")}
            recipes = tuple(replace(baseline, name=name, seed=seed, **change) for seed in range(seeds))
            yield WhatIfPlan(
                name, f"{words} rounded stochastically (mean of {seeds} seeds)", "mitigation", recipes, price
            )


def _changed(
    name: str,
    baseline: Recipe,
    changes: Sequence[RecipeChange],
    kind: Kind = "mitigation",
    price: Price | None = None,
) -> WhatIfPlan:
    """The baseline with these changes, for what they cost by themselves unless ``price`` says otherwise."""
    recipe, total = baseline, Price() + (price or Price())
    for change in changes:
        recipe = change.apply(recipe)
        own = _PRICES.get(change.words, _FREE)
        if price is None and own.words not in total.words.split("; "):
            total += own
    words = "; ".join(change.words for change in changes)
    return WhatIfPlan(name, words, kind, (replace(recipe, name=name, summary=words),), total)
