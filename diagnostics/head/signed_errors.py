"""Signed errors as ``statistics.means`` tests them, summed from tensors on their device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from attn_diag.head.stacks import inner, numbers
from attn_diag.statistics.means import FeatureSums, SignedErrors


def of_elements(errors: Tensor, ulp_sum: float) -> SignedErrors:
    """Signed errors from elementwise errors [n, D] and the sum of their spacings: the mean in ulp is mean(e) /
    mean(ulp).
    """
    return each_of_elements(errors[None], [ulp_sum])[0]


def each_of_elements(errors: Tensor, ulp_sums: Sequence[float]) -> list[SignedErrors]:
    """The same of H heads: [H, n, D] and [H]."""
    totals = errors.sum(2).cpu().numpy()
    in_units = [(float(total.sum()), ulp_sum) for total, ulp_sum in zip(totals, ulp_sums, strict=True)]
    return _signed(errors, totals, in_units, errors.shape[2])


def of_rows(errors: Tensor, units: Tensor) -> SignedErrors:
    """Signed errors from one error a row in units of one scale a row, both [n]: the mean in units is mean(e / unit)."""
    return each_of_rows(errors[None], units[None])[0]


def each_of_rows(errors: Tensor, units: Tensor) -> list[SignedErrors]:
    """The same of H heads, both [H, n]."""
    usable = (units > 0) & units.isfinite()
    in_units = numbers(torch.where(usable, errors / units, 0.0).sum(1), usable.sum(1))
    return _signed(errors, errors.cpu().numpy(), in_units, 1)


def by_feature(signed: SignedErrors, contributions: Tensor, keys: Tensor) -> SignedErrors:
    """``signed`` of one head, with what the features of O contribute to them, [n, D]; ``keys`` [n] of the rows.

    Unchanged where that is not most of them: a kernel's delta need not come from the O that it returns.
    """
    return each_by_feature([signed], contributions[None], keys[None])[0]


def each_by_feature(signed: Sequence[SignedErrors], contributions: Tensor, keys: Tensor) -> list[SignedErrors]:
    """The same of H heads, [H, n, D] and [H, n]."""
    heads, _, features = contributions.shape
    present = int(keys.max()) + 1 if keys.numel() else 0
    places = keys + torch.arange(heads, device=keys.device)[:, None] * present
    cells = contributions.new_zeros(heads * present, features)
    cells.index_add_(0, places.flatten(), contributions.flatten(0, 1))
    return _each_by_cell(signed, cells.view(heads, present, features), keys)


def by_cell(signed: SignedErrors, cells: Tensor, keys: Tensor) -> SignedErrors:
    """The same from the contributions' sums by key and feature, [K, D], 0 <= key < K."""
    return _each_by_cell([signed], cells[None], keys[None])[0]


def _each_by_cell(signed: Sequence[SignedErrors], cells: Tensor, keys: Tensor) -> list[SignedErrors]:
    heads, present, features = cells.shape
    total = torch.from_numpy(np.stack([s.total for s in signed])).to(cells)
    own, rows = (cells.new_zeros(heads, present).scatter_add_(1, keys, t) for t in (total, torch.ones_like(total)))
    of_keys, sizes = cells.sum(2), rows * (signed[0].count / features)
    unlike = own - of_keys
    of_cells = numbers(
        inner(unlike, unlike), inner(own, own), inner(cells, cells), inner(of_keys, sizes), inner(sizes, sizes),
        sizes.sum(1),
    )  # fmt: skip
    return [
        s
        if apart > size / 4
        else replace(
            s, features=FeatureSums(sums, np.full(features, whole), squares, products, square_sizes * features)
        )
        for s, sums, (apart, size, squares, products, square_sizes, whole) in zip(
            signed, cells.sum(1).cpu().numpy(), of_cells, strict=True
        )
    ]


def _signed(
    errors: Tensor, totals: npt.NDArray[np.float64], in_units: Iterable[Sequence[float]], count: int
) -> list[SignedErrors]:
    """Of each head: ``totals`` [H, n] by row, their sum in units and the units', and how many errors a row has."""
    return [
        SignedErrors(
            total=total,
            square=square,
            positive=positive,
            nonzero=nonzero,
            unit_total=unit_total,
            unit_scale=unit_scale,
            count=count,
        )
        for total, (unit_total, unit_scale), (square, positive, nonzero) in zip(
            totals, in_units, _sizes(errors), strict=True
        )
    ]


def _sizes(values: Tensor) -> list[tuple[float, int, int]]:
    """Of each head's numbers the sum of the squares, how many are positive, and how many not zero.

    Sums of signs are exact, and a quarter of the cost of comparing.
    """
    signs = values.sign()
    found = numbers(inner(values, values), inner(signs, signs), signs.flatten(1).sum(1))
    return [(square, (int(nonzero) + int(balance)) // 2, int(nonzero)) for square, nonzero, balance in found]
