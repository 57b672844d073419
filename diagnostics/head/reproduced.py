"""Of a tensor that a known rounding reproduces nearly bit for bit, the rows and features that it does not."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from attn_diag.head.coarse_paths import EXPLAINED
from attn_diag.head.outlying import GROUP_LIMIT

# A rounding reproduces a row whose error it leaves so much of, squared; and a tensor, with so many of its rows.
_REPRODUCED, _MOST = 1 / 16, 3 / 4
# Of fewer rows no common factor is told.
_ROWS = 8


def not_reproduced(
    observed: Tensor, made: Tensor, truth: Tensor, expected: Tensor
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]] | None:
    """Which rows and which features a rounding does not make, where it makes most of them; None: it does not.

    Sums in fp32 move single casts: no row counts that is no further from the rounding's than such casts leave others
    from the truth.

    Args:
        observed: What a kernel returned, [n, D].
        made: What it would return with that rounding.
        truth: What is true.
        expected: The squared error that a well-rounded kernel is expected to leave.

    Returns:
        Of rows [n] and of features [D].
    """
    squares = tuple((one - other).square() for one, other in ((observed, made), (observed, truth), (made, truth)))

    def groups(dim: int, kept: Tensor) -> Tensor | None:
        left, error, casts, unit = (t.where(kept, 0.0).sum(dim) for t in (*squares, expected))
        there = error > 0
        if (left[there] <= _REPRODUCED * error[there]).sum() < _MOST * there.sum():
            return None
        unit = unit.clamp(min=1e-300)
        casts = torch.maximum(casts, unit * (casts / unit).mean())
        return (left > EXPLAINED * error) & (left > GROUP_LIMIT**2 * casts)

    every = torch.ones_like(observed, dtype=torch.bool)
    for dim in (1, 0):  # a wrong row is in all features, a wrong feature in all rows
        first = groups(dim, every)
        other = None if first is None else groups(1 - dim, every & ~first.unsqueeze(dim))
        if first is not None and other is not None:
            by_row, by_feature = (t.cpu().numpy() for t in ((first, other) if dim else (other, first)))
            return by_row, by_feature
    return None


def common_factor(observed: Tensor, made: Tensor, truth: Tensor) -> tuple[float, float] | None:
    """By what a tensor is multiplied that a known rounding reproduces but for that; None: by nothing, or it does not.

    In most rows the factor leaves little of the difference from the rounding's, and that little of the one from the
    truth.

    Args:
        observed: What a kernel returned, [n, D].
        made: What it would return with that rounding.
        truth: What is true.

    Returns:
        The factor, and what is left with it, squared.
    """
    sizes = made.square().sum(1)
    there = sizes > 0
    if int(there.sum()) < _ROWS:
        return None
    factor = float(((observed * made).sum(1)[there] / sizes[there]).median())
    left, without, unrounded = (
        (observed - other)[there].square().sum(1) for other in (factor * made, made, factor * truth)
    )
    needed = (left <= _REPRODUCED * without).sum() >= _MOST * len(left)
    rounded = float(left.sum()) < EXPLAINED * float(unrounded.sum())
    return (factor, float(left.sum())) if needed and rounded else None
