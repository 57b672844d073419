"""Recipes that an unknown kernel might have: the roundings of the presets in many schedules, and how to name them."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import cache, lru_cache
from itertools import product
from typing import Any

from attn_diag.head.recipe_changes import CAST_ROW_SUM, FP32_ROW_SUM, SITES, coarse_scores
from attn_diag.kernels import LOW_BIT, PRESETS, RECIPES, Recipe, Schedule, preset
from attn_diag.kernels.formats import Format
from attn_diag.kernels.recipe import BACKWARD

# What does not tell forwards apart here: the exponential changes less than 0.1 % of O's elements, a clamp on l acts on
# rows that underflow only, and few heads have dropout.
_LEFT_OUT = {
    "name", "summary", "exp", "exp_degree", "rescaling", "row_sum_clamp", "lse_from", "seed", "schedule",
    "dropout_factor", "mma_k", *BACKWARD,
}  # fmt: skip
_SITES = tuple(f.name for f in fields(Recipe) if f.init and f.name not in _LEFT_OUT)
ALL_KEYS = 2**20
"""Of a tile that no row has more keys than."""
TILES = (16, 32, 48, 64, 80, 96, 112, 128, 144, 160, 176, 192, 224, 256, 512)
"""Keys that kernels take at once, FlashAttention-3's 80 to 192 among them."""
_FIRST_TILES = (16, 32, 64, 128, 256, 512)
# (query block, key tile) of kernels that take the diagonal first; a smaller block than the tile changes nothing.
_DIAGONAL = ((64, 64), (128, 64), (128, 128))
_FIRST_SPLIT = 64
_MOST_SPLITS = 32


def split_tile(head_dim: int) -> int:
    """Keys of a tile where FlashAttention-2 splits the keys; a split is a multiple of it."""
    return 256 if head_dim <= 64 else 128 if head_dim <= 128 else 64


@cache
def known_recipes(fmt: Format, head_dim: int) -> tuple[Recipe, ...]:
    """The presets with distinct forwards, the first of each; FlashAttention-2 with split keys; and, as of kernels in
    Triton, 64-key tiles ascending with instructions of 16 products, under the name of torch's kernel."""
    forwards: dict[tuple[object, ...], Recipe] = {}
    for name in PRESETS:
        recipe = preset(name, fmt, head_dim)
        forwards.setdefault((_forward(recipe), recipe.schedule), recipe)
    tile = split_tile(head_dim)
    splitting = replace(preset("fa2", fmt, head_dim), schedule=Schedule(key_tile=tile, split_keys=tile))
    ascending = replace(preset("efficient", fmt, 64), alpha="in-exponent", mma_k=16)
    return *forwards.values(), splitting, ascending


def split_recipes(fmt: Format, head_dim: int, k_length: int) -> list[Recipe]:
    """FlashAttention-2 with its keys in 2 to ``_MOST_SPLITS`` splits, each of as many tiles as that number asks for."""
    fa2, tile = preset("fa2", fmt, head_dim), split_tile(head_dim)
    tiles = -(-k_length // tile)
    lengths = dict.fromkeys(-(-tiles // splits) * tile for splits in range(2, _MOST_SPLITS + 1))
    return [replace(fa2, schedule=Schedule(128, tile, "descending", n)) for n in lengths if tile < n < k_length]


@cache
def low_bit_recipes(fmt: Format, head_dim: int) -> tuple[Recipe, ...]:
    """The published kernels below 16 bits, each in its own schedule."""
    return tuple(preset(name, fmt, head_dim) for name in LOW_BIT)


@cache
def families(fmt: Format, head_dim: int) -> tuple[Recipe, ...]:
    """The first preset of each set of rounding sites, whatever its schedule and what its row sum adds."""
    found: dict[tuple[object, ...], Recipe] = {}
    for recipe in known_recipes(fmt, head_dim):
        found.setdefault(_forward(FP32_ROW_SUM.apply(recipe)), recipe)
    return tuple(found.values())


def sink_first(recipe: Recipe) -> Recipe:
    """The recipe with the maximum and the row sum starting at an attention sink."""
    return replace(recipe, name=f"{recipe.name} with m starting at the sink", sink_joins="first")


# What torch's autograd makes of softmax(Q K^T) V where q, k and v were widened before, and O and the gradients are
# rounded back.
_WIDENED: dict[str, Any] = {
    "name": "plain attention in fp32", "summary": "operands widened to fp32, O and the gradients rounded once",
    "exp": "exact", "probs": "fp32", "delta_from": "dp", "backward_probs": "fp32", "dscores": "fp32",
    "alpha_in_backward": "before-cast", "schedule": Schedule(key_tile=ALL_KEYS),
}  # fmt: skip
# Sites that some kernels keep in fp32 and others round, beside the scores.
_OPTIONAL = ("row_max", "row_sum", "range_pv", "accumulator")


@cache
def mixtures(fmt: Format, head_dim: int) -> tuple[Recipe, ...]:
    """Forwards that no preset has: plain attention of operands widened to fp32; and every choice of what is rounded to
    ``fmt`` among scores (and S - m with them), maximum, row sum, PV of a range and O's accumulator, all else as fa2."""
    known = {_forward(FP32_ROW_SUM.apply(r)) for r in families(fmt, head_dim)}
    fa2 = preset("fa2", fmt, head_dim)
    before, after = (coarse_scores(fmt, alpha) for alpha in ("before-rounding", "after-rounding"))
    short = SITES["scores"].short
    scores: dict[str, dict[str, Any]] = {"": {}, short: before, f"{short} (also before alpha)": after}
    found = [replace(fa2, **_WIDENED)]
    for (of_scores, fields_of_scores), choice in product(scores.items(), product((False, True), repeat=len(_OPTIONAL))):
        rounded = [site for site, chosen in zip(_OPTIONAL, choice, strict=True) if chosen]
        words = ", ".join(filter(None, (of_scores, *(SITES[site].short for site in rounded))))
        changes = {**fields_of_scores, **dict.fromkeys(rounded, fmt)}
        recipe = replace(fa2, name=f"fa2 with {words} in {fmt}", **changes)
        if _forward(recipe) not in known:
            found.append(recipe)
    return tuple(found)


def schedules(k_length: int, *, diagonal: bool, every_tile: bool = False) -> list[Schedule]:
    """Every schedule tried: tiles of 16 to 512 keys and all of them, either way; split keys; ``diagonal`` first.

    ``every_tile``: of keys that are not split also tiles of no power of two.
    """
    tiles = [t for t in (TILES if every_tile else _FIRST_TILES) if t < k_length]
    found = [Schedule(key_tile=ALL_KEYS)]
    found += [Schedule(key_tile=t, order=order) for t in tiles for order in ("ascending", "descending")]
    if diagonal:
        found += [Schedule(block, t, "diagonal-first") for block, t in _DIAGONAL if t < k_length]
    split = _FIRST_SPLIT
    while split < k_length:
        found.append(Schedule(key_tile=split, split_keys=split))
        for tile in (t for t in _FIRST_TILES if 64 <= t < split):
            found += [Schedule(128, tile, order, split) for order in ("ascending", "descending")]
        split *= 2
    return found


def variants(recipe: Recipe) -> list[Recipe]:
    """The recipe with the other ways to take the exponential and to sum the row."""
    return [
        changed
        for exp in ("exp2-fma", "exact")
        for row_sum in (FP32_ROW_SUM, CAST_ROW_SUM)
        if (changed := row_sum.apply(replace(recipe, exp=exp))) != recipe
    ]


@lru_cache(1024)
def known_name(recipe: Recipe, head_dim: int) -> str | None:
    """The preset with this forward and schedule, up to how it takes the exponential; None if there is none."""
    wanted = _forward(recipe), recipe.mma_k
    for forward, known in _known_forwards(recipe.input, head_dim):
        if forward == wanted and _same_order(known.schedule, recipe.schedule, head_dim):
            return known.name
    return None


@lru_cache(64)
def _known_forwards(fmt: Format, head_dim: int) -> list[tuple[object, Recipe]]:
    """The presets, each behind what ``known_name`` compares first."""
    presets = *known_recipes(fmt, head_dim), *low_bit_recipes(fmt, head_dim)
    return [((_forward(known), known.mma_k), known) for known in presets]


def family_name(recipe: Recipe, head_dim: int) -> str:
    """The first preset with these rounding sites, in whatever schedule."""
    every = (*known_recipes(recipe.input, head_dim), *low_bit_recipes(recipe.input, head_dim))
    named = (known.name for known in (*every, *map(sink_first, every)) if _forward(known) == _forward(recipe))
    return next(named, recipe.name)


@lru_cache(1024)
def same_forward(name: str, fmt: Format, head_dim: int) -> tuple[Recipe, ...]:
    """All presets with the forward and schedule of preset ``name``: they differ, if at all, in their backward."""
    wanted, presets = preset(name, fmt, head_dim), [preset(n, fmt, head_dim) for n in RECIPES]
    return tuple(p for p in presets if _forward(p) == _forward(wanted) and p.schedule == wanted.schedule)


def describe_schedule(schedule: Schedule) -> str:
    """The schedule in a few words."""
    tile, split = schedule.key_tile, schedule.split_keys
    if split is not None:
        inside = "" if tile >= split else f", each in {tile}-key tiles {schedule.order}"
        return f"independent splits of {split} keys{inside}"
    if tile >= ALL_KEYS:
        return "all keys at once"
    if schedule.order == "diagonal-first":
        return f"last visible {tile}-key tile of {schedule.query_block} rows first, the others ascending"
    return f"{tile}-key tiles {schedule.order}"


def _forward(recipe: Recipe) -> tuple[object, ...]:
    # A product with alpha that is rounded to fp32 by itself is a part of how the exponential is taken.
    in_exponent = recipe.scores == "fp32" and recipe.alpha == "before-rounding"
    return tuple("in-exponent" if in_exponent and site == "alpha" else getattr(recipe, site) for site in _SITES)


def _same_order(known: Schedule, other: Schedule, head_dim: int) -> bool:
    """Whether keys come in one order: a query block matters only where the diagonal comes first."""
    if known.split_keys is not None and other.split_keys is not None:
        # FlashAttention-2 makes its splits as many tiles long as the number of its blocks asks for.
        whole = other.key_tile == other.split_keys or other.order == "descending"
        return other.key_tile == split_tile(head_dim) and whole
    if known.order != "diagonal-first":
        known = replace(known, query_block=other.query_block)
    return known == other
