"""Which way of a kernel that is not published makes a quantity that is off, as plain torch does or by an L."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from attn_diag.head.compared import Compared
from attn_diag.head.counterfactual import BACKWARD, RECIPE
from attn_diag.head.fp32_in_bf16 import EXPLAINED
from attn_diag.head.from_lse import FROM_LSE
from attn_diag.head.key_by_key import SUMMED
from attn_diag.head.low_sums import LOW_SUMS
from attn_diag.head.outlying import GROUP_LIMIT
from attn_diag.head.quality import AS_GOOD, QuantitySample
from attn_diag.head.reproduced import multiplied, not_reproduced
from attn_diag.head.shown_ways import Shown, ShownOfHead
from attn_diag.head.unfused import FUSED, ROUNDED_DROPOUT, also_fused, named


def by_unpublished_ways(
    compared: Compared, chosen: QuantitySample, cut: Sequence[str], told: Shown | None, shown: ShownOfHead | None
) -> QuantitySample | None:
    """A quantity with the way that makes most of its error as its site, or that of ``BACKWARD`` which does.

    Else with what a way that reproduces most of it does not make, or with the factor that all of it is off by.

    Args:
        compared: The quantity.
        chosen: Beside a well-rounded kernel.
        cut: Recipes whose products cut P or dS off, which may reproduce it as well.
        told: What the first head showed, where that is tried here alone.
        shown: Where the first head shows it.

    Returns:
        None where nothing is known of it.
    """
    search = _Search(compared, chosen, cut, told)
    # One rounding claims less than several, unless they leave far less.
    alone = min(search.rounded, key=compared.left, default="")
    several = search.explains() and (not alone or search.explains(alone))
    if alone and not several and (known := compared.as_good(alone, chosen)) is not None:
        return known
    if search.explains() and search.is_own():
        found = search.explained()
        if shown is not None:
            shown.put(compared.quantity, search.shown())
        return found
    # Where few rows are wrong, or few features, most of what is left is theirs.
    if (by_place := search.placed()) is not None and by_place.has_unlike:
        return by_place
    # Beside a rounded L, which may be a factor, another one would take it back.
    published = *compared.kernels[0].alternatives, *search.rounded
    observed, reference = (t[compared.rows] for t in (compared.observed, compared.reference))
    words = multiplied(
        observed, lambda way: compared.of(way)[compared.rows], reference, compared.expected, published,
        (*search.plain, *compared.late_ways), compared.fmt,
    )  # fmt: skip
    every = "all keys" if compared.quantity in ("dk", "dv") else "all rows"
    return replace(chosen, factors=f"{every} are {words}") if words else None


class _Search:
    """The search for one quantity's way."""

    def __init__(self, compared: Compared, chosen: QuantitySample, cut: Sequence[str], told: Shown | None) -> None:
        self._compared, self._chosen = compared, chosen
        self.rounded = tuple(BACKWARD) if compared.quantity in ("dq", "dk") else ()
        # A rounded factor alone claims less than plain torch, which leaves the same of dV where its scores are in fp32.
        self.plain = tuple(way for way in compared.ways if way not in FROM_LSE)
        self._marked = [chosen.bad_rows > 0, chosen.bad_features > 0]
        self._any_marked, self._reproducing = any(one.any() for one in self._marked), list[str]()
        ways, self._rivals = compared.ways, (*compared.ways, *self.rounded, *cut)
        if told is not None:
            ways = (told.way,)
            if told.reproducing is not None:
                self._rivals = tuple(way for way in self._rivals if way in (*ways, *told.reproducing))
        self._way = min(ways, key=compared.left)
        if self._way in FROM_LSE and not self._is_no_factor():
            self._way, self._rivals = min(self.plain, key=compared.left), (*self.plain, *self.rounded, *cut)
        if compared.kernels[0].drops and compared.part_left(ROUNDED_DROPOUT) < EXPLAINED:
            self._way = ROUNDED_DROPOUT
        if compared.late_ways and told is None and not self.explains():
            self._way = min((self._way, *compared.late_ways), key=compared.left)
            self._rivals = (*self._rivals, *(way for way in compared.late_ways if way == self._way))

    def explains(self, beside: str = RECIPE) -> bool:
        """Whether the way leaves little of what a recipe does."""
        return self._compared.part_left(self._way, beside) < EXPLAINED

    def is_own(self) -> bool:
        """Whether the error is not one that a right backward makes of the captured O and LSE; a rounded L may be it."""
        return ":low" in self._way or not self._compared.made_by_forward(self._way)

    def _is_no_factor(self) -> bool:
        """Whether a rounded L is meant: where all rows weigh their keys alike it is a factor, as faults are."""
        compared, way = self._compared, self._way
        rows, usual = compared.rows, compared.of(RECIPE)
        factor = (compared.observed * usual)[rows].sum() / usual[rows].square().sum().clamp(min=1e-300)
        pairs = zip(compared.left(way), compared.left_of(factor * usual), strict=True)
        if all(one < EXPLAINED * other for one, other in pairs):
            return True
        beside = compared.beside(way)
        same = beside.ratio()
        return same is not None and same.factor <= AS_GOOD and not beside.outlying.any()

    def placed(self) -> QuantitySample | None:
        """With what none of the ways makes of those that reproduce most of it; None where none of them does."""
        compared, unlike = self._compared, list[npt.NDArray[np.bool_]]()
        observed, reference = (t[compared.rows] for t in (compared.observed, compared.reference))
        for way in self._rivals if self._any_marked else ():
            found = not_reproduced(observed, compared.of(way)[compared.rows], reference, compared.expected)
            if found is not None:
                self._reproducing.append(way)
                alike = compared.beside(way)
                found = found[0] & (alike.bad_rows > 0), found[1] & (alike.bad_features > 0)
                unlike = [x & y for x, y in zip(unlike or self._marked, found, strict=True)]
        return replace(self._chosen, unlike=unlike[0], unlike_features=unlike[1]) if unlike else None

    def explained(self) -> QuantitySample:
        """With the way as its site."""
        compared, way, alike = self._compared, self._way, self._compared.beside(self._way)
        # Row by row: sums in fp32 move a cast of S or dP here and there, which single elements show. Rows that
        # stand out for that (beside both) have most of their error from the other casts, or are no further from
        # these bits than such casts leave others from the truth.
        units, rest = np.maximum(alike.expected, 1e-300), compared.apart(compared.of(way))
        casts = GROUP_LIMIT**2 * np.mean(alike.counterfactual / units)
        bad = (alike.bad_rows > 0) & (self._chosen.bad_rows > 0) & (rest / units > casts)
        own = not alike.bad_features.any() and rest[bad].sum() <= EXPLAINED * alike.error[bad].sum()
        made = max(float(alike.error.sum() - rest.sum()), 0.0)
        site = (
            named(way) if way in (ROUNDED_DROPOUT, SUMMED, *LOW_SUMS) or self.explains(way + FUSED) else also_fused(way)
        )
        # A loop over tiles keeps scores and O in 16 bits: much of its O is what such powers leave.
        looped = way.endswith(":powers") and compared.quantity == "o"
        site = None if site == "scores" and (looped or not compared.forward_is(way + FUSED)) else site
        found = self.placed() or self._chosen
        return replace(found, site=site, made_by_site=made, rounding=own, features_rounding=own)

    def shown(self) -> Shown:
        """What other heads are told."""
        reproducing = tuple(self._reproducing) if self._any_marked else None
        return Shown(self._way, self._compared.part_left(self._way), reproducing)
