"""Signed errors as ``statistics.means`` tests them, summed from tensors on their device."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from attn_diag.statistics.means import FeatureSums, SignedErrors


def of_elements(errors: Tensor, ulp_sum: float) -> SignedErrors:
    """Signed errors from elementwise errors [n, D] and the sum of their spacings: the mean in ulp is mean(e) /
    mean(ulp).
    """
    total = errors.sum(1).cpu().numpy()
    positive, nonzero = _count_signs(errors)
    return SignedErrors(
        total=total,
        square=_sum_of_squares(errors),
        positive=positive,
        nonzero=nonzero,
        unit_total=float(total.sum()),
        unit_scale=ulp_sum,
        count=errors.shape[1],
    )


def of_rows(errors: Tensor, units: Tensor) -> SignedErrors:
    """Signed errors from one error a row in units of one scale a row, both [n]: the mean in units is mean(e / unit)."""
    usable = (units > 0) & units.isfinite()
    positive, nonzero = _count_signs(errors)
    return SignedErrors(
        total=errors.cpu().numpy(),
        square=_sum_of_squares(errors),
        positive=positive,
        nonzero=nonzero,
        unit_total=float((errors[usable] / units[usable]).sum()),
        unit_scale=float(usable.count_nonzero()),
        count=1,
    )


def by_feature(signed: SignedErrors, contributions: Tensor, keys: Tensor) -> SignedErrors:
    """``signed`` of one head, with what the features of O contribute to them, [n, D]; ``keys`` [n] of the rows.

    Unchanged where that is not most of them: a kernel's delta need not come from the O that it returns.
    """
    present = int(keys.max()) + 1 if len(keys) else 0
    cells = contributions.new_zeros(present, contributions.shape[1]).index_add_(0, keys, contributions)
    return by_cell(signed, cells, keys)


def by_cell(signed: SignedErrors, cells: Tensor, keys: Tensor) -> SignedErrors:
    """The same from the contributions' sums by key and feature, [K, D], 0 <= key < K."""
    total = torch.as_tensor(signed.total, dtype=cells.dtype, device=cells.device)
    own = cells.new_zeros(len(cells)).index_add_(0, keys, total)
    if _sum_of_squares(own - cells.sum(1)) > _sum_of_squares(own) / 4:
        return signed
    rows = torch.bincount(keys, minlength=len(cells)).to(cells.dtype)
    return replace(signed, features=feature_sums(cells, rows, signed.count))


def feature_sums(cells: Tensor, rows: Tensor, count: int) -> FeatureSums:
    """Errors by feature and cell of one head: ``cells`` [K, D] the errors' sums, ``rows`` [K] each key's rows,
    ``count`` elements a row.
    """
    features = cells.shape[1]
    sizes = rows * (count / features)
    return FeatureSums(
        sums=cells.sum(0).cpu().numpy(),
        sizes=np.full(features, float(sizes.sum())),
        cell_squares=_sum_of_squares(cells),
        cell_products=float(cells.sum(1) @ sizes),
        cell_sizes=_sum_of_squares(sizes) * features,
    )


def _sum_of_squares(values: Tensor) -> float:
    flat = values.reshape(-1)
    return float(torch.dot(flat, flat))


def _count_signs(values: Tensor) -> tuple[int, int]:
    """How many are positive, and how many not zero. Sums of signs are exact, and a quarter of the cost of comparing."""
    signs = values.sign()
    nonzero = int(_sum_of_squares(signs))
    return (nonzero + int(signs.sum())) // 2, nonzero
