"""One element O[t, i] walked through a recipe: every rounding of its sum, term by term in the recipe's key order.

    per key range:  product = sum_j cast(P_bar_j) V_j                 rounded to range_pv
                    O_bar   = round(O_bar * rescale) + product        rounded to accumulator
    per split:      O = O_bar / l                                     merged over the splits by exp(L_s - L)
    at last:        O rounded to out

Under dropout P_bar in the product is 0 where it is dropped, and O = O_bar / (1 - p) / l; l is that of all keys.

Products are added one after the other in the recipe's arithmetic ("fp32-nearest"; other accumulation models as in
``attn_diag.kernels.accumulation``). A site's error reaches O multiplied by every later rescale, 1/l and its split's
weight: its *contribution*.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attn_diag.errors import InputError
from attn_diag.head.row_maxima import plain_scores
from attn_diag.kernels import RangeTrace, Recipe, RowTrace
from attn_diag.kernels.accumulation import matmul
from attn_diag.kernels.formats import Mode, parse, round_to
from attn_diag.reference import AttentionHead
from attn_diag.results.microscope import SumSite

Array = NDArray[Any]
_FORWARD_SITES = ("scores", "difference", "row_max", "probs", "row_sum", "range_pv", "accumulator", "out")


@dataclass(frozen=True)
class WalkParts:
    """What a site rounds: earlier results by name, and the products [N] of keys with their P_bar = 1 marks; float64."""

    earlier: tuple[tuple[str, float], ...] = ()
    keys: Array = field(default_factory=lambda: np.empty(0))
    products: Array = field(default_factory=lambda: np.empty(0))
    unit: Array = field(default_factory=lambda: np.empty(0))


@dataclass(frozen=True)
class Walk:
    """The walked element; arrays [N], float64, over the visible keys in the recipe's order.

    ``unrounded``, ``out``: O before and after its last rounding. ``keys``: their indices (int64). ``probs``,
    ``cast_probs``: P_bar as the recipe had it, relative to the maximum that far; ``products`` = cast P_bar V brought to
    the final maximum; ``unit``: cast P_bar, brought there, is 1; ``held``: O_bar, brought there, as the recipe holds it
    were this key the last. ``maximum``: the final maximum times the exponent's factor. ``parts``: of every site.
    """

    sites: tuple[SumSite, ...]
    parts: tuple[WalkParts, ...]
    unrounded: float
    out: float
    maximum: float
    keys: Array
    probs: Array
    cast_probs: Array
    products: Array
    unit: Array
    held: Array


def rounds_accumulator(recipe: Recipe) -> bool:
    """Whether O_bar is rounded to less than the recipe's own arithmetic while it is added up."""
    return any(parse(text) for text in (recipe.range_pv, recipe.accumulator))


def rounds_numerator(recipe: Recipe) -> bool:
    """Likewise before it is divided."""
    return rounds_accumulator(recipe) or recipe.division == "after-last-cast"


def exponent_factor(recipe: Recipe, head: AttentionHead) -> float:
    """What S - m is multiplied by in the exponent: alpha, where the recipe leaves it there; else 1."""
    return head.scale if recipe.alpha == "in-exponent" and plain_scores(head) else 1.0


def require_walkable(recipe: Recipe) -> None:
    """Raise InputError for a recipe that rounds at random in its forward: no single walk is its walk."""
    for name in _FORWARD_SITES:
        rounding = parse(getattr(recipe, name))
        if rounding is not None and rounding.mode in (Mode.STOCHASTIC, Mode.RANDOM_SIGN):
            raise InputError(
                f"recipe {recipe.name} rounds {name} at random ({getattr(recipe, name)}), and the microscope follows "
                "one definite rounding; choose a recipe with nearest-even or directed rounding"
            )


def walk_element(recipe: Recipe, trace: RowTrace, values: Tensor, factor: float) -> Walk:
    """Follow one feature of a traced row. ``values`` [Tk]: that feature of V, float64. ``factor``: exponent_factor's.

    A row that sees no key gives O = 0 and no terms.
    """
    # What overflows is shown as such.
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        return _Walker(recipe, values.cpu().numpy(), factor).run(trace)


@dataclass
class _Pending:
    """A rounding whose reach is known only at the end. ``place``: index of its range; -1 past the ranges of a split,
    None for the last cast."""

    site: SumSite
    parts: WalkParts
    place: int | None


class _Walker:
    def __init__(self, recipe: Recipe, values: Array, factor: float) -> None:
        self.recipe, self.values, self.factor = recipe, values, factor
        self.real: Any = np.float64 if recipe.arithmetic == "fp64" else np.float32
        self.dropped = 1.0
        self.pending: list[_Pending] = []

    def run(self, trace: RowTrace) -> Walk:
        self.dropped = trace.factor
        splits: dict[int, list[RangeTrace]] = {}
        for part in trace.ranges:
            if bool((part.scores > -torch.inf).any()):
                splits.setdefault(part.split, []).append(part)
        final = max((ranges[-1].row_max for ranges in splits.values()), default=-math.inf)
        outs, lses, columns = [], [], []
        total = done = 0.0
        for ranges in splits.values():
            to_final = math.exp((ranges[-1].row_max - final) * self.factor)
            held, numerator, exact_sum = self._split(ranges)
            reach = [factor * to_final for factor in _later(ranges)]
            columns += [self._columns(part, done + h * r, r) for part, h, r in zip(ranges, held, reach, strict=True)]
            done += float(numerator) * to_final
            total += ranges[-1].row_sum * to_final
            out, lse = self._divide(ranges[-1], numerator, exact_sum)
            outs.append(out)
            lses.append(lse)
        weights = self._weights(lses)
        unrounded = self.real(sum((w * o for w, o in zip(weights, outs, strict=True)), self.real(0)))
        joined = {n: np.concatenate([c[n] for c in columns]) if columns else np.empty(0) for n in _COLUMNS}
        if rounds_numerator(self.recipe) or not total:
            parts = WalkParts((("O_bar / l", float(unrounded)),))
        else:
            parts = WalkParts((), joined["keys"], joined["products"] * trace.factor / total, joined["unit"])
        out = self._site("out", "cast", unrounded, parts)
        scales = {
            split: (_later(ranges), float(weight) / ranges[-1].row_sum if ranges[-1].row_sum else math.nan)
            for (split, ranges), weight in zip(splits.items(), weights, strict=True)
        }
        return Walk(
            sites=tuple(_reaching_o(p, scales, trace.factor) for p in self.pending),
            parts=tuple(p.parts for p in self.pending),
            unrounded=float(unrounded),
            out=float(out),
            maximum=final * self.factor,
            **joined,
        )

    def _split(self, ranges: list[RangeTrace]) -> tuple[list[Array], Any, Any]:
        """Per range what is held after each visible key; O_bar; the unrounded l."""
        real = self.real
        numerator, exact_sum = real(0), real(0)
        held = []
        for place, part in enumerate(ranges):
            after_keys, numerator = self._range(part, place, numerator)
            held.append(after_keys)
            added = part.probs if self.recipe.row_sum_of == "fp32-probs" else part.cast_probs
            exact_sum = real(part.rescale) * exact_sum + real(max(float(added.sum()), self.recipe.row_sum_clamp or 0.0))
            exact_sum += real(part.sink)
        numerator = real(numerator * real(self.dropped))
        if self.recipe.division == "after-last-cast":
            parts = WalkParts((("O_bar", float(numerator)),))
            numerator = self._site("out", "numerator", numerator, parts, ranges[-1])
        return held, numerator, exact_sum

    def _range(self, part: RangeTrace, place: int, numerator: Any) -> tuple[Array, Any]:
        """O_bar as held after each visible key of the range, and after all of it; relative to the maximum so far."""
        recipe, real = self.recipe, self.real
        cast, values, visible = part.kept_probs.cpu().numpy(), self.values[part.keys], _visible(part)
        exact = cast * values
        # Invisible keys add 0.
        running = np.cumsum(exact.astype(np.float32)).astype(real) if recipe.accumulation != "exact" else None
        if running is None:
            running = np.cumsum(exact).astype(real)
        terms = WalkParts((), _keys(part)[visible], exact[visible], cast[visible] == 1.0)
        scaled = real(numerator * real(part.rescale))
        hardware = recipe.accumulation == "nvidia-tensor-core"
        if hardware and recipe.range_pv == recipe.accumulator == "fp32":
            after = self._product(part.kept_probs, values, scaled)
            return (scaled + running)[visible], after
        product = self._product(part.kept_probs, values, None) if hardware else running[-1]
        rounded_product = self._site("range_pv", "product", product, terms, part, place)
        kept = scaled
        if numerator:
            kept = self._site(
                "accumulator", "rescale", scaled, WalkParts((("O_bar rescaled", float(scaled)),)), part, place
            )
        earlier = (("O_bar so far", float(kept)),) if kept else ()
        if parse(recipe.range_pv) is None:
            parts = WalkParts(earlier, terms.keys, terms.products, terms.unit)
        else:
            parts = WalkParts((*earlier, ("P_bar V of the range", float(rounded_product))))
        after = self._site("accumulator", "addition", real(kept + rounded_product), parts, part, place)
        prefixes = (kept + _round(running[visible], recipe.range_pv)).astype(real)
        return _round(prefixes, recipe.accumulator), after

    def _product(self, cast: Tensor, values: Array, start: Any) -> Any:
        """One range's product under the recipe's accumulation model."""
        accumulator = None if start is None else torch.tensor([[float(start)]], dtype=torch.float64)
        a, b = cast.cpu()[None], torch.from_numpy(values)[:, None]
        product = matmul(a, b, self.recipe.accumulation, accumulator, operands=self.recipe.input)
        return self.real(float(product))

    def _divide(self, last: RangeTrace, numerator: Any, exact_sum: Any) -> tuple[Any, Any]:
        """(O, L) of a split."""
        real = self.real
        row_sum = real(last.row_sum)
        used = row_sum if self.recipe.lse_from == "rounded-l" else exact_sum
        return numerator * (real(1) / row_sum), real(last.row_max) * real(self.factor) + np.log(used)

    def _weights(self, lses: list[Any]) -> list[Any]:
        if len(lses) < 2:
            return [self.real(1)] * len(lses)
        stacked = torch.from_numpy(np.array(lses, dtype=self.real))
        return list(torch.exp(stacked - torch.logsumexp(stacked, 0)).numpy())

    def _columns(self, part: RangeTrace, held: Array, reach: float) -> dict[str, Array]:
        visible = _visible(part)
        cast = part.kept_probs.cpu().numpy()[visible]
        keys = _keys(part)[visible]
        return {
            "keys": keys,
            "probs": part.probs.cpu().numpy()[visible],
            "cast_probs": cast,
            "products": cast * self.values[keys] * reach,
            "unit": _round(cast * reach, self.recipe.probs) == 1.0,
            "held": held.astype(np.float64),
        }

    def _site(
        self,
        name: str,
        step: str,
        before: Any,
        parts: WalkParts,
        part: RangeTrace | None = None,
        place: int | None = None,
    ) -> Any:
        """Round, and note it; nothing where the format is that of the arithmetic."""
        text = getattr(self.recipe, name)
        if parse(text) is None:
            return before
        after = self.real(_round(np.array([before]), text)[0])
        error = float(after) - float(before)
        keys = None if part is None or place is None else (part.keys.start, part.keys.stop)
        split = 0 if part is None else part.split
        site = SumSite(name, step, text, split, keys, float(before), float(after), error, error)
        self.pending.append(_Pending(site, parts, -1 if part is not None and place is None else place))
        return after


_COLUMNS = ("keys", "probs", "cast_probs", "products", "unit", "held")


def _reaching_o(pending: _Pending, scales: dict[int, tuple[list[float], float]], dropped: float) -> SumSite:
    """The site with what its error makes of O: place None is O itself, -1 (the last range's end) only divided.

    ``dropped``: 1 / (1 - p), by which errors of what came before that end are multiplied.
    """
    site = pending.site
    if pending.place is None:
        return site
    later, weight = scales[site.split]
    reach = 1.0 if pending.place == -1 else dropped
    return replace(site, contribution=site.error * later[pending.place] * weight * reach)


def _later(ranges: list[RangeTrace]) -> list[float]:
    """For every range: the product of the rescalings after it."""
    factors = [1.0]
    for part in reversed(ranges[1:]):
        factors.append(factors[-1] * part.rescale)
    return factors[::-1]


def _visible(part: RangeTrace) -> Array:
    return part.scores.cpu().numpy() > -np.inf


def _keys(part: RangeTrace) -> Array:
    return np.arange(part.keys.start, part.keys.stop)


def _round(x: Array, text: str) -> Array:
    return round_to(torch.from_numpy(np.ascontiguousarray(x)), parse(text)).numpy()
