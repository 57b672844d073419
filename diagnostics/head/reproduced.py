"""Of a tensor that a known rounding reproduces nearly bit for bit, the rows and features that it does not."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from attn_diag.head.fp32_in_bf16 import EXPLAINED
from attn_diag.head.outlying import GROUP_LIMIT
from attn_diag.head.unfused import WORDS, named
from attn_diag.reference import FloatFormat

# A rounding reproduces a row whose error it leaves so much of, squared; and a tensor, with so many of its rows.
_REPRODUCED, _MOST = 1 / 16, 3 / 4
# Of fewer rows no common factor is told; of several roundings that leave up to so many times the least, the first is.
_ROWS, _AS_NEAR = 8, 2.0
# A row whose square is so many times its noise's is clear.
_CLEAR = 25.0


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


def multiplied(
    observed: Tensor,
    of: Callable[[str], Tensor],
    truth: Tensor,
    expected: Tensor,
    published: Sequence[str],
    unfused: Sequence[str],
    fmt: FloatFormat,
) -> str:
    """By what a tensor is multiplied that a well-rounded kernel or plain torch reproduces but for that, in words.

    Args:
        observed: What a kernel returned, [n, D].
        of: What it would be by a recipe, or a way of plain torch.
        truth: What is true.
        expected: The squared error that a well-rounded kernel is expected to leave: of rows that are not clearly larger
            all of it may be noise, which is no factor of anything.
        published: These recipes, which round as well as each other.
        unfused: These ways.
        fmt: The format in which it was stored: a constant that is rounded to it, as alpha or 1 / l, is a factor too,
            and none that is told.
    """
    found = dict[str, tuple[float, float]]()
    clear = truth.square().sum(1) > _CLEAR * expected.sum(1)
    if int(clear.sum()) < _ROWS:
        return ""
    for way in (*published, *unfused):
        known = _common_factor(observed[clear], of(way)[clear], truth[clear])
        if known is not None and abs(known[0] - 1) > 2.0**-fmt.precision:
            found[way] = known
    if not found:
        return ""
    least = min(left for _, left in found.values())
    # The first that is about as near: a well-rounded kernel claims least.
    way, factor = next((way, factor) for way, (factor, left) in found.items() if left <= _AS_NEAR * least)
    by = "the true ones" if way in published else f"those of a kernel where {WORDS[named(way)]}"
    return f"{factor:.4g} times {by}"


def _common_factor(observed: Tensor, made: Tensor, truth: Tensor) -> tuple[float, float] | None:
    """The factor, and what is left with it, squared; None: it is none, or what is ``made`` does not reproduce the rest.

    In most rows the factor leaves little of the difference from what is made, and in all little of the one that is
    left of the truth with it.
    """
    sizes = made.square().sum(1).clamp(min=1e-300)
    factor = float(((observed * made).sum(1) / sizes).median())
    left, without, unrounded = ((observed - other).square().sum(1) for other in (factor * made, made, factor * truth))
    needed = (left <= _REPRODUCED * without).sum() >= _MOST * len(left)
    rounded = float(left.sum()) < EXPLAINED * float(unrounded.sum())
    return (factor, float(left.sum())) if needed and rounded else None
