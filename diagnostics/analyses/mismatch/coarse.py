"""How a run rounds beside a well-rounded kernel on its own inputs, and which coarser rounding leaves its O.

The published recipe of the inputs' format, emulated on the same rows, is what "nothing but rounding" means. A coarser
site is named where its emulation takes most of the error away and no other site does as well. What depends on the
order of the keys (sums between tiles) is tried in usual tiles and splits: in others it is not found.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Literal

import torch
from torch import Tensor

from attn_diag.analyses.mismatch.hypotheses import Partials, Stated, split_sizes
from attn_diag.analyses.mismatch.rows import RunRows
from attn_diag.analyses.mismatch.split import HeadSemantics, blocks_of, heads_of, out_of_few
from attn_diag.head.counterfactual import RECIPE, covers, returned_by
from attn_diag.head.low_bit_formats import UNSCALED, LowBitFormat
from attn_diag.head.recipe_candidates import describe_schedule, schedules, variants
from attn_diag.head.recipe_changes import LATE_DIVISION, CastMode, RecipeChange, cast, coarse_scores, rounded
from attn_diag.head.unfused import WORDS, forwards, named, unfused
from attn_diag.kernels import Recipe, RecipeNotSupportedError, preset
from attn_diag.kernels.formats import parse, round_to
from attn_diag.kernels.quantizers import quantizer
from attn_diag.reference import FloatFormat, Masking, format_of, round_nearest_even, ulp

# Where so much of the squared error is left, the site is not what makes it; the next one must leave so many times more.
_EXPLAINS, _BEATS = 0.25, 2.0
# What leaves no more than this is sure, and merges, which take long, are not looked at.
_SURE = 0.02
# Sites are compared on so many rows of so many heads first.
_ROWS, _HEADS = 64, 2
# Of the nearest so many are tried with other exponentials and row sums.
_LEADERS = 3
_SCORES = "scores"
_SMALLEST_SPLIT = 32
_FP8 = {"FP8 (E4M3)": "e4m3", "FP8 (E5M2)": "e5m2"}

Order = Literal["together", "ascending", "descending"]
Predict = Callable[[RunRows, HeadSemantics], Tensor]


@dataclass(frozen=True)
class CoarseSite:
    """A rounding, and the O that a kernel has which rounds there."""

    kind: str
    """Sites of one kind are no rivals: the best of them is named."""
    words: str
    """What is rounded."""
    where: str
    """In which order of the keys; empty: whatever it is."""
    predict: Predict
    """O of some rows, [n, Dv]."""
    again: tuple[Predict, ...] = ()
    """The same with another exponential, or with another row sum."""


def well_rounded_square(stated: Stated, fmt: FloatFormat, out: FloatFormat, truth: Tensor) -> Tensor | None:
    """By row the squared error of a well-rounded kernel on the same inputs, [n]; None: no recipe is published for them.

    Args:
        stated: Some rows of some heads, n in all.
        fmt: The inputs' format.
        out: O's.
        truth: The n rows of O in float64, [n, Dv].
    """
    if not covers(fmt):
        return None
    made = [_returned(preset(RECIPE, fmt.name, rows.q.shape[1]), rows, s, fmt, out) for rows, s in stated]
    found = (torch.cat(made) - truth).square().sum(1)
    floor = ulp(truth, out).square().sum(1) / 12
    usable = found.isfinite()
    return found if float(found[usable].sum()) > float(floor[usable].sum()) else floor


def coarse_site(stated: Stated, fmt: FloatFormat, out: FloatFormat) -> tuple[CoarseSite, float] | None:
    """The coarser rounding that makes these rows, and how much of the squared error it explains; None: none does.

    Args:
        stated: Some rows of some heads.
        fmt: The inputs' format.
        out: O's.
    """
    if not covers(fmt):
        return None
    few = [_few(rows, semantics) for rows, semantics in stated[:_HEADS]]
    before = _left(few, out_of_few_of)
    found = [(_left(few, site.predict), site) for site in _sites(stated, fmt, out)]
    if min(left for left, _ in found) > _SURE * before:
        found += [(_left(few, site.predict), site) for site in _merges(stated, fmt, out)]
    found.sort(key=lambda one: one[0])
    again = [replace(site, predict=predict) for _, site in found[:_LEADERS] for predict in site.again]
    found = sorted([*found, *((_left(few, site.predict), site) for site in again)], key=lambda one: one[0])
    left, best = found[0]
    other = next((one for one, site in found if site.kind != best.kind), before)
    if left > _EXPLAINS * before or other < _BEATS * left:
        return None
    whole = _left(stated, best.predict) / _left(stated, out_of_few_of)
    return (best, 1 - whole) if whole <= _EXPLAINS else None


def out_of_few_of(rows: RunRows, semantics: HeadSemantics) -> Tensor:
    """Float64 O, [n, Dv]."""
    return out_of_few(semantics, rows)


def _few(rows: RunRows, semantics: HeadSemantics) -> tuple[RunRows, HeadSemantics]:
    at = torch.linspace(0, len(rows.tokens) - 1, min(_ROWS, len(rows.tokens)), device=rows.tokens.device).long()
    return rows.select(at), semantics.of_rows(at)


def _left(stated: Stated, predict: Predict) -> float:
    """The squared error that a prediction leaves; infinite where these heads are none of the recipe's."""
    total = 0.0
    for rows, semantics in stated:
        try:
            square = (rows.o - predict(rows, semantics)).square().sum(1)
        except RecipeNotSupportedError:
            return math.inf
        total += float(square[square.isfinite()].sum())
    return total


def _returned(recipe: Recipe, rows: RunRows, semantics: HeadSemantics, fmt: FloatFormat, out: FloatFormat) -> Tensor:
    """What a recipe returns, [n, Dv]."""
    found = rows.o.new_full(rows.o.shape, torch.nan)
    for at, head in heads_of(semantics, rows):
        # What only hides keys leaves the scale to the exponent, as causality does.
        if not bool((semantics.bias[at][semantics.visible[at]] != 0).any()):
            head = replace(head, masking=Masking(mask=semantics.visible[at]))
        found[at] = returned_by(recipe, head, fmt, {"o": out}, key_gradients=False)["o"]
    return found


def _sites(stated: Stated, fmt: FloatFormat, out: FloatFormat) -> Iterator[CoarseSite]:
    """Everything that is tried."""
    low, rows = fmt.name, stated[0][0]
    fa2 = preset(RECIPE, low, rows.q.shape[1])

    def site_of(words: str, where: str, recipe: Recipe, cast_by: str = "") -> CoarseSite:
        def of(one: Recipe) -> Predict:
            return partial(_cast_otherwise, recipe=one, fmt=fmt, out=out, how=cast_by)

        return CoarseSite(_kind(words), words, where, of(recipe), tuple(map(of, variants(recipe))))

    one, scores = low.upper(), rounded("scores", low)
    plain = [
        RecipeChange(f"the scores S and S - m in {one}", coarse_scores(low)),
        scores,
        replace(scores, fields={**scores.fields, "alpha": "after-rounding"}),
        rounded("row_max", low),
        LATE_DIVISION,
        *(cast("probs", low, mode) for mode in ("toward-zero", "up")),
        *(RecipeChange(f"P̄ in {name}", {"probs": of_name}) for name, of_name in _FP8.items()),
    ]
    for change in plain:
        yield site_of(change.words, "", change.apply(fa2))
    modes: tuple[CastMode, ...] = ("toward-zero", "up", "down")
    for mode in modes:
        words = cast("out", low, mode).words
        yield site_of(words, "", fa2, f"{low}:{mode}")
    for way in forwards(heads_of(stated[0][1], rows)[0][1]):
        yield CoarseSite(_SCORES, WORDS[named(way)], "", partial(_unfused, fmt=fmt, way=way))
    for site in ("row_sum", "accumulator", "range_pv"):
        change = rounded(site, low)
        for schedule in schedules(len(rows.known), diagonal=False):
            recipe = replace(change.apply(fa2), schedule=replace(schedule, query_block=2**20))
            yield site_of(change.words, describe_schedule(schedule), recipe)
    of_fa2 = partial(_cast_otherwise, recipe=fa2, fmt=fmt, out=out, how="")
    wide = partial(_cast_otherwise, recipe=fa2, fmt=fmt, out=format_of(torch.float32), how="")
    for before, name in product((of_fa2, wide), _FP8):
        words = f"O in {name}"
        yield CoarseSite(words, words, "", partial(_out_in_fp8, of=before, name=name))
    for names, how in product(("v", "k", "q", "kv", "qk"), _STORED):
        words = f"{' and '.join(names)} in {how}"
        each = dict.fromkeys(names, _STORED[how])
        yield CoarseSite(words, words, "", partial(_stored, of=of_fa2, fmt=fmt, formats=each))
    for kind, by in _WHOLE.items():
        for names in ("v", "k", "kv"):
            each = {name: LowBitFormat(kind, "a scale a tensor", by, _largest(stated, name)) for name in names}
            predict = partial(_stored, of=of_fa2, fmt=fmt, formats=each)
            words = f"{' and '.join(names)} in {kind} (a scale a tensor)"
            yield CoarseSite(words, words, "", predict)


def _merges(stated: Stated, fmt: FloatFormat, out: FloatFormat) -> Iterator[CoarseSite]:
    """Splits of keys whose O is stored before they are merged, as a ring's hops are; each takes a run a split."""
    one, rows = fmt.name.upper(), stated[0][0]
    fa2 = preset(RECIPE, fmt.name, rows.q.shape[1])
    merges: dict[str, Order] = {
        f"the O of each split of keys in {one} before they are merged": "together",
        f"the O of each split of keys, and the merged O after each, in {one}": "ascending",
        f"the O of each split, and the merged O after each, the last keys first, in {one}": "descending",
    }
    for size, (words, order) in product(split_sizes(len(rows.known)), merges.items()):
        if size >= _SMALLEST_SPLIT:
            predict = partial(_partials_rounded, recipe=fa2, size=size, fmt=fmt, out=out, order=order)
            yield CoarseSite(words, words, f"splits of {size} keys", predict)


def _kind(words: str) -> str:
    return _SCORES if words.startswith("the scores S") else words


def _cast_otherwise(
    rows: RunRows, semantics: HeadSemantics, *, recipe: Recipe, fmt: FloatFormat, out: FloatFormat, how: str
) -> Tensor:
    """A recipe's O with another last cast, where one is given."""
    if not how:
        return _returned(recipe, rows, semantics, fmt, out)
    return round_to(_returned(recipe, rows, semantics, fmt, format_of(torch.float32)), parse(how))


def _unfused(rows: RunRows, semantics: HeadSemantics, *, fmt: FloatFormat, way: str) -> Tensor:
    found = rows.o.new_full(rows.o.shape, torch.nan)
    for at, head in heads_of(semantics, rows):
        found[at] = unfused(head, fmt, way)["o"]
    return found


def _partials_rounded(
    rows: RunRows, semantics: HeadSemantics, *, recipe: Recipe, size: int, fmt: FloatFormat, out: FloatFormat,
    order: Order,
) -> Tensor:  # fmt: skip
    lse = Partials.of(rows, semantics, blocks_of(semantics, rows), size, 0).lse
    place = torch.arange(semantics.bias.shape[1], device=rows.o.device)
    numbers = (place - rows.cached[:, None]).clamp(min=0).div(size, rounding_mode="floor")
    splits = list(range(int(numbers.max()) + 1))
    total, running = torch.zeros_like(rows.o), torch.full_like(lse[0], -torch.inf)
    if semantics.sink is not None:
        running = lse[-1]  # it is the last of the splits, and adds nothing to O
    for split in splits[::-1] if order == "descending" else splits:
        own = replace(semantics, bias=semantics.bias.masked_fill(numbers != split, -torch.inf), sink=None)
        part = _returned(recipe, rows, own, fmt, fmt).nan_to_num(0.0)
        both = torch.logaddexp(running, lse[split])
        total = total + (lse[split] - both).exp().nan_to_num(0.0)[:, None] * (part - total)
        total, running = total if order == "together" else round_nearest_even(total, fmt), both
    return round_nearest_even(total, out)


def _out_in_fp8(rows: RunRows, semantics: HeadSemantics, *, of: Predict, name: str) -> Tensor:
    return UNSCALED[name].of(of(rows, semantics))


_STORED = {
    "FP8 (E4M3)": UNSCALED["FP8 (E4M3)"],
    "FP8 (E5M2)": UNSCALED["FP8 (E5M2)"],
    "FP8 (E4M3, a scale a head)": LowBitFormat("FP8 (E4M3)", "a scale a head", quantizer("fp8")),
    "FP8 (E4M3, a scale a token)": LowBitFormat("FP8 (E4M3)", "a scale a token", quantizer("fp8-row")),
    "INT8 (a scale a head)": LowBitFormat("INT8", "a scale a head", quantizer("int8", block="tensor")),
    "INT8 (a scale a token)": LowBitFormat("INT8", "a scale a token", quantizer("int8")),
}
_WHOLE = {"FP8 (E4M3)": quantizer("fp8"), "INT8": quantizer("int8", block="tensor")}


def _largest(stated: Stated, name: str) -> float:
    """The largest key or value of all heads."""
    every = [k if name == "k" else v for rows, _ in stated for _, k, v in rows.blocks]
    return max(float(x.abs().amax()) for x in every)


def _stored(
    rows: RunRows, semantics: HeadSemantics, *, of: Predict, fmt: FloatFormat, formats: Mapping[str, LowBitFormat]
) -> Tensor:
    """With these of q, k and v quantised, each head by itself, and widened to the inputs' format again."""

    def stored(name: str, x: Tensor) -> Tensor:
        return round_nearest_even(formats[name].of(x), fmt) if name in formats else x

    blocks = tuple((at, stored("k", k), stored("v", v)) for at, k, v in rows.blocks)
    return of(replace(rows, q=stored("q", rows.q), blocks=blocks), semantics)
