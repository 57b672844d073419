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
from attn_diag.head.coarser import BEYOND_ROW, COARSEST, DRAWS, ROWS, SITES, explains, of_later_keys
from attn_diag.head.compared import Compared
from attn_diag.head.counterfactual import ALTERNATIVES, CASTS, FROM_CAST_P, RECIPE, Counterfactuals
from attn_diag.head.fp32_in_bf16 import explained
from attn_diag.head.no_recipe import TF32
from attn_diag.head.outlying import GROUP_LIMIT
from attn_diag.head.quality import AS_GOOD, BEYOND, LOSSY, Directions, QuantitySample, sample
from attn_diag.head.row_sums import key_variance, without_row_sums
from attn_diag.head.shown_ways import ShownOfHead
from attn_diag.head.truncated_inputs import TruncatedInputs
from attn_diag.head.unpublished_ways import by_unpublished_ways
from attn_diag.reference import FloatFormat
from attn_diag.statistics.ratios import Carriers

# Truncated sums make errors at most so many times larger (1.8 on one-hot rows).
_TRUNCATED = 2.0
# The coarsest sane kernel is looked at where the error is that of casts to so many bits instead of the format's own.
_EIGHT_BITS = 3
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
    outs: Sequence[Tensor | None] = (),
    known: bool = False,
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
        outs: Of a gradient, the captured O of these heads.
        known: Whether its rounding is known, and not looked for.
    """
    published = [c for c in counterfactuals if isinstance(c, Counterfactuals)]
    compared = Compared(
        quantity, observed, reference, total, published, variance, fmt, rows, fed, clusters, carriers, directions, outs
    )
    if len(published) < len(counterfactuals):
        found_alone = replace(first or compared.against(total([c.outputs() for c in counterfactuals])), compared=False)
        way = _through_bf16(found_alone, quantity, observed, reference, total, counterfactuals, rows)
        return replace(found_alone, rounding=way is not None, way=way or "")
    chosen = first or compared.beside(ALTERNATIVES[0])
    found = chosen.ratio()
    if found is not None and found.high > AS_GOOD:
        others = [compared.beside(alternative) for alternative in published[0].alternatives[1:]]
        chosen = max([chosen, *others], key=lambda s: float(s.counterfactual.sum()))
        found = chosen.ratio()
    typical = chosen.typical_ratio
    # Not its lower end: what one sequence leaves open, several together may not.
    above = found is not None and typical is not None and max(found.factor, typical.factor) > LOSSY
    if above and found is not None and found.factor < _TRUNCATED and all(c.small for c in published):
        truncated = compared.beside(RECIPE, tensor_core=True)
        chosen = max(chosen, truncated, key=lambda s: float(s.counterfactual.sum()))
        found = chosen.ratio()
    coarse = above or (found is not None and found.high > AS_GOOD) or _stands_out(chosen)
    if coarse and not known and (by_rounding := _by_rounding(compared, chosen, shown)) is not None:
        return by_rounding
    # Where few rows carry the error its factor is hardly known; each row in units of its noise tells more.
    beyond = max((one.low for one in (found, typical) if one is not None), default=0.0)
    if (found is None or found.groups < 2) and len(chosen.error):  # a single row has no ratio with an interval
        beyond = math.sqrt(float(chosen.error.sum()) / max(float(chosen.expected.sum()), 1e-300))
    if beyond > BEYOND * 2.0 ** (fmt.precision - _EIGHT_BITS):
        # A right backward that is fed with a coarse L is as far off.
        fed_with = 0.0 if fed is None else float((fed - reference)[rows].square().sum())
        # Where dP and delta cancel exactly it may be none, and truncated sums break that.
        coarsest = float(compared.beside(COARSEST).counterfactual.sum())
        chosen = replace(chosen, ceiling=BEYOND**2 * max(coarsest, fed_with, float(chosen.expected.sum())))
    if not (_stands_out(chosen) and float(chosen.error.sum()) <= chosen.ceiling and compared.few_scores):
        return chosen
    if quantity in ("dq", "dk") and not published[0].drops and _made_by_row_sums(compared, chosen):
        return replace(chosen, rounding=True, features_rounding=True)
    return _beside_coarser(compared, chosen)


def _stands_out(chosen: QuantitySample) -> bool:
    return bool(chosen.outlying.any() or chosen.bad_features.any())


def _by_rounding(compared: Compared, chosen: QuantitySample, shown: ShownOfHead | None) -> QuantitySample | None:
    """A coarse quantity with its rounding as its site, or beside it; None where it is not known."""
    quantity, kernels = compared.quantity, compared.kernels
    known, alpha_exact = chosen.ratio() is not None, all(kernel.alpha_exact for kernel in kernels)
    told = shown.look(quantity) if compared.few_scores and shown is not None else None
    if told is not None and (told.way not in compared.ways or compared.part_left(told.way) > told.limit):
        told = None
    if quantity != "o" and known and told is None:
        from_cast = FROM_CAST_P[: 1 if alpha_exact else None] if quantity != "dv" else ()
        # Rows of zeros show no bits: those that were never written are as if all of dS had become 0.
        written = (compared.observed[compared.rows] != 0).any(1).cpu().numpy()
        for recipe in (*from_cast, *(CASTS if _stands_out(chosen) else ())):
            if (found := compared.as_good(recipe, chosen, written if recipe in CASTS else None)) is not None:
                return found
    if not compared.few_scores:
        return None
    finer = kernels[0].fmt.precision >= TF32.precision  # others are rounded more coarsely than a cut makes them
    cut = cut_off.ways(quantity, alpha_exact=alpha_exact) if finer else []
    if cut and known and told is None:
        found = compared.as_good(min(cut, key=compared.left), chosen)
        if found is not None:
            return found
    return by_unpublished_ways(compared, chosen, cut, told, shown)


def _made_by_row_sums(compared: Compared, chosen: QuantitySample) -> bool:
    """Whether nothing of dQ or dK stands out without what a rounded rowsum(P o dP) makes."""
    heads, fmt = [kernel.head for kernel in compared.kernels], compared.fmt
    seen, noise, rows = compared.observed, compared.variance, compared.rows
    if compared.quantity == "dq":
        outlying = rows[torch.from_numpy(chosen.outlying).to(rows.device)]
        seen = without_row_sums(heads[0], fmt, seen, compared.reference, outlying)
    else:
        noise = noise + sum(key_variance(head, fmt) for head in heads)
    usual = compared.of(RECIPE)
    left = sample(
        seen, compared.reference, usual, noise, fmt, rows, fed=compared.fed, directions=compared.directions
    )  # fmt: skip
    return not _stands_out(left)


def _beside_coarser(compared: Compared, chosen: QuantitySample) -> QuantitySample:
    """With whether a coarser rounding of one of ``SITES`` explains what stands out, of rows and of features."""
    kernels, truth = compared.kernels, compared.reference[compared.rows]

    def left_by(site: str) -> list[Tensor]:
        runs = [[kernel.outputs(site, draw=draw) for kernel in kernels] for draw in range(DRAWS)]
        return [compared.total(run)[compared.rows] - truth for run in runs]

    errors, usual = (made[compared.rows] - truth for made in (compared.observed, compared.of(RECIPE)))
    limits, places, columns = _limits_and_marks(chosen, errors)

    of_o = compared.quantity == "o"

    def explained(marked: Tensor) -> bool:
        return bool(marked.any()) and (
            any(
                explains(errors, usual, compared.expected, left_by(one), truth, marked, limits, of_o=of_o)
                for one in SITES
            )
            or later_keys(int(marked.any(1).nonzero()[0]))
        )

    def later_keys(first: int) -> bool:
        left = left_by(f"{BEYOND_ROW}{int(compared.rows[first])}") if of_o and first > ROWS else []
        behind = [one[first:] for one in left]
        return bool(left) and of_later_keys(errors[first:], usual[first:], behind, truth[first:])

    return replace(chosen, rounding=explained(places), features_rounding=explained(columns))


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
