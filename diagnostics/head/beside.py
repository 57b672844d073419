"""One quantity of a head beside what well-rounded kernels return for it, and coarser ones where it stands out."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from attn_diag.head import cut_off
from attn_diag.head.coarser import COARSEST, DRAWS, SITES, explains
from attn_diag.head.counterfactual import ALTERNATIVES, BACKWARD, CASTS, FROM_CAST_P, RECIPE, Counterfactuals
from attn_diag.head.fp32_in_bf16 import EXPLAINED, explained
from attn_diag.head.from_lse import FROM_LSE, unpublished
from attn_diag.head.no_recipe import TF32
from attn_diag.head.outlying import GROUP_LIMIT
from attn_diag.head.quality import (
    AS_GOOD,
    BEYOND,
    LOSSY,
    Directions,
    QuantitySample,
    sample,
)
from attn_diag.head.reproduced import multiplied, not_reproduced
from attn_diag.head.row_sums import key_variance, without_row_sums
from attn_diag.head.shown_ways import Shown, ShownOfHead
from attn_diag.head.truncated_inputs import TruncatedInputs
from attn_diag.head.unfused import FUSED, ROUNDED_DROPOUT, also_fused, named
from attn_diag.reference import FloatFormat, round_nearest_even, ulp
from attn_diag.statistics.ratios import Carriers

# Of a recipe that is at work rows weighted alike leave less, too: 0.78 at most, in 67 gradients made so; where a coarse
# LSE's few heavy rows looked like a rounded delta, they left 0.99.
_MOST_LEFT = 0.9
# A backward casts nothing of its own that leaves so little of the noise: where dP and delta cancel all of it is O's.
_NO_CAST = 1 / 16
# Truncated sums make errors at most so many times larger (1.8 on one-hot rows).
_TRUNCATED = 2.0
# The coarsest sane kernel is looked at where the error is that of casts to so many bits instead of the format's own.
_EIGHT_BITS = 3
# Heads with more scores are not run again for that.
MOST_SCORES = 2**24
# Relative, of the scale's finite difference.
_STEP = 2.0**-12


def beside_well_rounded(
    quantity: str,
    observed: Tensor,
    reference: Tensor,
    total: Callable[[Sequence[dict[str, Tensor]]], Tensor],
    counterfactuals: Sequence[Counterfactuals | TruncatedInputs],
    *,
    variance: Tensor,
    fmt: FloatFormat,
    rows: Tensor,
    fed: Tensor | None,
    clusters: npt.NDArray[np.int64] | None = None,
    carriers: Carriers | None = None,
    directions: Directions | None = None,
    first: QuantitySample | None = None,
    shown: ShownOfHead | None = None,
    outs: Sequence[Tensor | None] | None = None,
) -> QuantitySample:
    """Compare one quantity with what well-rounded kernels return for it.

    The recipe "fa2" alone where the error is no larger than its own; else whichever of the ``alternatives`` is furthest
    off. What stands out in dQ or dK, and is how a kernel errs whose dS multiplies the cast P, or that rounds one of
    ``BACKWARD``, is its rounding; so is how one errs in dQ, dK and dV whose backward casts P and dS to 8 bits, and in
    all of them whose products cut P and dS off to TF32.

    Args:
        quantity: o, dq, dk or dv.
        observed: [T, D] float64.
        reference: What is true.
        total: The quantity from the outputs of the query heads that make it.
        counterfactuals: Of these heads.
        variance, fmt, rows, fed, clusters, carriers, directions: As in ``sample``.
        first: That with the first of them, where it is made already.
        shown: What the first head of the capture shows, or is to show.
        outs: Of a gradient, the captured O of these heads, where it is known: a forward is said to round S only if they
            are no further from that one's O.
    """
    published = [c for c in counterfactuals if isinstance(c, Counterfactuals)]

    def against(made: Tensor) -> QuantitySample:
        return sample(
            observed, reference, made, variance, fmt, rows,
            fed=fed, clusters=clusters, carriers=carriers, directions=directions,
        )  # fmt: skip

    every_way = unpublished(published[0].head, published[0].fmt, quantity) if published else ()

    def of(recipe: str, *, tensor_core: bool = False) -> Tensor:
        found = total([c.outputs(recipe, tensor_core=tensor_core) for c in published])
        # Plain torch casts the sum over the query heads of a key head.
        return round_nearest_even(found, fmt) if len(published) > 1 and recipe in every_way else found

    def beside(recipe: str, *, tensor_core: bool = False) -> QuantitySample:
        return against(of(recipe, tensor_core=tensor_core))

    def apart(made: Tensor) -> npt.NDArray[np.float64]:
        """What of the observed tensor differs from another: squares by row."""
        found: npt.NDArray[np.float64] = (observed - made)[rows].square().sum(1).cpu().numpy()
        return found

    def expected() -> Tensor:
        return torch.maximum(variance, ulp(reference, fmt).square() / 12)[rows]

    def left_of(made: Tensor, kept: npt.NDArray[np.bool_] | None = None) -> tuple[float, float]:
        """The same of all rows, or of some, and in units of every row's noise."""
        part = slice(None) if kept is None else kept
        by_row = apart(made)[part]
        return float(by_row.sum()), float((by_row / np.maximum(chosen.expected[part], 1e-300)).sum())

    def left(recipe: str, kept: npt.NDArray[np.bool_] | None = None) -> tuple[float, float]:
        return left_of(of(recipe), kept)

    def part_left(way: str, beside: str) -> float:
        """What a way leaves of what a recipe does, the larger one of both kinds."""
        pairs = zip(left(way), left(beside), strict=True)
        return max(one / other if other else math.inf for one, other in pairs)

    def made_by_forward(recipe: str, kept: npt.NDArray[np.bool_] | None = None) -> bool:
        """Whether a right backward of the captured O and LSE is as near, or leaves too little for a cast of its own."""
        if fed is None:
            return False
        given = left_of(fed, kept)
        pairs = zip(left(recipe, kept), given, strict=True)
        return given[1] <= _NO_CAST * len(chosen.error) or any(one >= _MOST_LEFT * other for one, other in pairs)

    def as_good(recipe: str, kept: npt.NDArray[np.bool_] | None = None) -> QuantitySample | None:
        """With this recipe's rounding as its site, where it makes most of the bits and nothing stands out beside it."""
        casting = beside(recipe)
        same = casting.ratio()
        pairs = list(zip(left(recipe, kept), left(RECIPE, kept), strict=True))
        # A few heavy rows may be nearer to it by chance.
        nearer = any(one < EXPLAINED * other for one, other in pairs)
        nearer = nearer and all(one < _MOST_LEFT * other for one, other in pairs)
        nearer = nearer and not made_by_forward(recipe, kept)
        if not nearer or same is None or same.factor > AS_GOOD or casting.outlying.any():
            return None
        site = "dscores_from" if recipe in FROM_CAST_P else recipe
        if recipe in cut_off.CUT_OFF:
            if not cut_off.makes(of(recipe)[rows], observed[rows], reference[rows], fmt):
                return None
            site = cut_off.site(quantity)
        not_zero = chosen.not_zero if recipe in BACKWARD else casting.not_zero
        return replace(casting, site=site, counterfactual=chosen.counterfactual, not_zero=not_zero)

    if len(published) < len(counterfactuals):
        found_alone = replace(first or against(total([c.outputs() for c in counterfactuals])), compared=False)
        way = _through_bf16(found_alone, quantity, observed, reference, total, counterfactuals, rows)
        return replace(found_alone, rounding=way is not None, way=way or "")
    chosen = first or beside(ALTERNATIVES[0])
    found = chosen.ratio()
    if found is not None and found.high > AS_GOOD:
        others = [beside(alternative) for alternative in published[0].alternatives[1:]]
        chosen = max([chosen, *others], key=lambda s: float(s.counterfactual.sum()))
        found = chosen.ratio()
    typical = chosen.typical_ratio
    # Not its lower end: what one sequence leaves open, several together may not.
    above = found is not None and typical is not None and max(found.factor, typical.factor) > LOSSY
    if above and found is not None and found.factor < _TRUNCATED and all(c.small for c in published):
        truncated = beside(RECIPE, tensor_core=True)
        chosen = max(chosen, truncated, key=lambda s: float(s.counterfactual.sum()))
        found = chosen.ratio()
    stands_out = bool(chosen.outlying.any() or chosen.bad_features.any())
    coarse = above or (found is not None and found.high > AS_GOOD) or stands_out
    few = coarse and max(c.scores for c in published) <= MOST_SCORES
    told = shown.look(quantity) if few and shown is not None else None
    if told is not None and (told.way not in every_way or part_left(told.way, RECIPE) > told.limit):
        told = None
    if quantity != "o" and found is not None and coarse and told is None:
        from_cast = FROM_CAST_P[: 1 if all(c.alpha_exact for c in published) else None] if quantity != "dv" else ()
        # Rows of zeros show no bits: those that were never written are as if all of dS had become 0.
        written = (observed[rows] != 0).any(1).cpu().numpy()
        for recipe in (*from_cast, *(CASTS if stands_out else ())):
            if (known := as_good(recipe, written if recipe in CASTS else None)) is not None:
                return known
    if few:
        finer = published[0].fmt.precision >= TF32.precision  # others are rounded more coarsely than a cut makes them
        cut = cut_off.ways(quantity, alpha_exact=all(c.alpha_exact for c in published)) if finer else []
        if cut and found is not None and told is None and (known := as_good(min(cut, key=left))) is not None:
            return known
        rounded = tuple(BACKWARD) if quantity in ("dq", "dk") else ()

        def explains_it(way: str, beside: str = ALTERNATIVES[0]) -> bool:
            return part_left(way, beside) < EXPLAINED

        def is_no_factor(way: str) -> bool:
            """Whether a rounded L is meant: where all rows weigh their keys alike it is a factor, as faults are."""
            usual = of(RECIPE)
            factor = (observed * usual)[rows].sum() / usual[rows].square().sum().clamp(min=1e-300)
            pairs = zip(left(way), left_of(factor * usual), strict=True)
            same = beside(way).ratio()
            return all(one < EXPLAINED * other for one, other in pairs) or (
                same is not None and same.factor <= AS_GOOD and not beside(way).outlying.any()
            )

        def forward_is(way: str) -> bool:
            known = [(c, o) for c, o in zip(published, outs or [None] * len(published), strict=True) if o is not None]
            apart = ([float((c.outputs(r)["o"] - o).square().nansum()) for r in (way, RECIPE)] for c, o in known)
            return all(one <= other for one, other in apart)

        marked = [chosen.bad_rows > 0, chosen.bad_features > 0]
        any_marked = any(one.any() for one in marked)

        def placed() -> QuantitySample | None:
            """With what none of the ways makes of those that reproduce most of it; None where none of them does."""
            unlike = list[npt.NDArray[np.bool_]]()
            for way in rivals if any_marked else ():
                found = not_reproduced(observed[rows], of(way)[rows], reference[rows], expected())
                if found is not None:
                    reproducing.append(way)
                    alike = beside(way)
                    found = found[0] & (alike.bad_rows > 0), found[1] & (alike.bad_features > 0)
                    unlike = [x & y for x, y in zip(unlike or marked, found, strict=True)]
            return replace(chosen, unlike=unlike[0], unlike_features=unlike[1]) if unlike else None

        # A rounded factor alone claims less than plain torch, which leaves the same of dV where its scores are in fp32.
        plain = tuple(way for way in every_way if way not in FROM_LSE)
        ways, rivals, reproducing = every_way, (*every_way, *rounded, *cut), list[str]()
        if told is not None:
            ways = (told.way,)
            if told.reproducing is not None:
                rivals = tuple(way for way in rivals if way in (*ways, *told.reproducing))
        way = min(ways, key=left)
        if way in FROM_LSE and not is_no_factor(way):
            ways = plain
            rivals, way = (*plain, *rounded, *cut), min(plain, key=left)
        if published[0].drops and explains_it(ROUNDED_DROPOUT):
            way = ROUNDED_DROPOUT
        # One rounding claims less than several, unless they leave far less.
        alone = min(rounded, key=left, default="")
        several = explains_it(way) and (not alone or explains_it(way, alone))
        if alone and not several and (known := as_good(alone)) is not None:
            return known
        if explains_it(way) and (":low" in way or not made_by_forward(way)):
            alike = beside(way)
            # Row by row: sums in fp32 move a cast of S or dP here and there, which single elements show. Rows that
            # stand out for that (beside both) have most of their error from the other casts, or are no further from
            # these bits than such casts leave others from the truth.
            units, rest = np.maximum(alike.expected, 1e-300), apart(of(way))
            casts = GROUP_LIMIT**2 * np.mean(alike.counterfactual / units)
            bad = (alike.bad_rows > 0) & (chosen.bad_rows > 0) & (rest / units > casts)
            own = not alike.bad_features.any() and rest[bad].sum() <= EXPLAINED * alike.error[bad].sum()
            made = max(float(alike.error.sum() - rest.sum()), 0.0)
            site = named(way) if way == ROUNDED_DROPOUT or explains_it(way, way + FUSED) else also_fused(way)
            site = None if site == "scores" and not forward_is(way + FUSED) else site
            chosen = placed() or chosen
            if shown is not None:
                reproduce = tuple(reproducing) if any_marked else None
                shown.put(quantity, Shown(way, part_left(way, RECIPE), reproduce))
            return replace(chosen, site=site, made_by_site=made, rounding=own, features_rounding=own)
        # Where few rows are wrong, or few features, most of what is left is theirs.
        if (by_place := placed()) is not None and by_place.has_unlike:
            return by_place
        # Beside a rounded L, which may be a factor, another one would take it back.
        known_ways = (*published[0].alternatives, *rounded), plain
        if words := multiplied(observed[rows], lambda w: of(w)[rows], reference[rows], expected(), *known_ways, fmt):
            every = "all keys" if quantity in ("dk", "dv") else "all rows"
            return replace(chosen, factors=f"{every} are {words}")
    # Where few rows carry the error its factor is hardly known; each row in units of its noise tells more.
    beyond = max((one.low for one in (found, typical) if one is not None), default=0.0)
    if (found is None or found.groups < 2) and len(chosen.error):  # a single row has no ratio with an interval
        beyond = math.sqrt(float(chosen.error.sum()) / max(float(chosen.expected.sum()), 1e-300))
    if beyond > BEYOND * 2.0 ** (fmt.precision - _EIGHT_BITS):
        # A right backward that is fed with a coarse L is as far off.
        fed_with = 0.0 if fed is None else float((fed - reference)[rows].square().sum())
        # Where dP and delta cancel exactly it may be none, and truncated sums break that.
        coarsest = max(float(beside(COARSEST).counterfactual.sum()), fed_with, float(chosen.expected.sum()))
        chosen = replace(chosen, ceiling=BEYOND**2 * coarsest)
    stands_out = bool(chosen.outlying.any() or chosen.bad_features.any())
    open_case = stands_out and float(chosen.error.sum()) <= chosen.ceiling
    open_case = open_case and max(c.scores for c in published) <= MOST_SCORES
    if open_case and quantity in ("dq", "dk") and not published[0].drops:
        heads = [c.head for c in published]
        seen, noise = observed, variance
        if quantity == "dq":
            seen = without_row_sums(
                heads[0], fmt, observed, reference, rows[torch.from_numpy(chosen.outlying).to(rows.device)]
            )
        else:
            noise = variance + sum(key_variance(head, fmt) for head in heads)
        left_over = sample(
            seen, reference, total([c.outputs() for c in published]), noise, fmt, rows, fed=fed, directions=directions
        )  # fmt: skip
        if not (left_over.outlying.any() or left_over.bad_features.any()):
            return replace(chosen, rounding=True, features_rounding=True)
    if open_case:

        def left_by(site: str) -> list[Tensor]:
            runs = [[c.outputs(site, draw=draw) for c in published] for draw in range(DRAWS)]
            return [(total(run) - reference)[rows] for run in runs]

        truth = reference[rows]
        errors, usual = (made[rows] - truth for made in (observed, total([c.outputs() for c in published])))
        noise = expected()
        limits, places, columns = _limits_and_marks(chosen, errors)

        def explained(marked: Tensor) -> bool:
            return bool(marked.any()) and any(
                explains(errors, usual, noise, left_by(site), truth, marked, limits) for site in SITES
            )

        return replace(chosen, rounding=explained(places), features_rounding=explained(columns))
    return chosen


def _through_bf16(
    found: QuantitySample,
    quantity: str,
    observed: Tensor,
    reference: Tensor,
    total: Callable[[Sequence[dict[str, Tensor]]], Tensor],
    counterfactuals: Sequence[Counterfactuals | TruncatedInputs],
    rows: Tensor,
) -> str | None:
    """What is in BF16 where that explains what stands out of inputs that are finer; see ``fp32_in_bf16.explained``."""
    heads = [c for c in counterfactuals if isinstance(c, TruncatedInputs)]
    if not (found.outlying.any() or (found.bad_features > 0).any()) or len(heads) < len(counterfactuals):
        return None
    ways = heads[0].ways(observed, reference) if quantity == "o" else heads[0].ways()
    runs = [(way, (total([head.along(way) for head in heads]) - reference)[rows]) for way in ways]

    def by_scale() -> Tensor:
        up, down = (total([head.at_scale(1 + step) for head in heads]) for step in (_STEP, -_STEP))
        return (up - down)[rows] / (2 * _STEP)

    expected = torch.from_numpy(np.maximum(found.expected, 1e-300)).to(rows.device)[:, None] / reference.shape[1]
    return explained((observed - reference)[rows], expected, reference[rows], by_scale, runs)


def _limits_and_marks(found: QuantitySample, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Each row's limit, [n]; rows and elements that stand out, and features that do, bool [n, D]."""
    yardstick = np.maximum(np.maximum(found.counterfactual, found.expected), found.floor)
    times = np.where(found.bad_rows > 0, found.bad_rows, np.inf)
    limits = np.maximum(np.sqrt(found.error / np.maximum(yardstick, 1e-300)) / times, GROUP_LIMIT)
    places = np.broadcast_to(found.bad_rows[:, None] > 0, like.shape).copy()
    places[np.searchsorted(found.rows, found.bad_elements[:, 0]), found.bad_elements[:, 1]] = True
    columns = np.broadcast_to(found.bad_features > 0, like.shape).copy()
    on_device = [torch.from_numpy(a).to(like.device) for a in (limits, places, columns)]
    return on_device[0], on_device[1], on_device[2]
