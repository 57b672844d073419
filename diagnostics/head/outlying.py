"""Groups of elements (rows, features) whose error is beyond what any sane kernel leaves, or this one, coarse or not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from attn_diag.head.shared import hash_rows

Array = npt.NDArray[np.float64]

# Measured on healthy kernels: rows of O at most 1.9, and 3.1 where V has one direction; a row that sees one key too
# many 4.0 (benchmarks/study_verdicts.py).
GROUP_LIMIT = 2.5
# One of so many healthy groups may exceed the quantile of its noise.
_CHANCE = 1e-9
# A kernel may be coarse everywhere. A group is too far off for it too where its error is so large a part of itself and
# of the median group, and so many times the median group's error, each in units of its yardstick; among so many groups.
# Few rows of dK can carry the error of a coarse delta (14 % of themselves, where V has a mean); features share it.
OF_ROW, OF_FEATURE, _OTHERS, _GROUPS = 1.0, 1 / 8, 16.0, 16
# float64 sums of the same terms in another order differ by less; a value that rounds otherwise, by more.
_SAME = 2.0**-40


def too_far_off(sums: Array, sizes: Array, part: float) -> npt.NDArray[np.bool_]:
    """Which groups' errors are too large for this kernel, however coarse it is; bool [H, groups].

    Args:
        sums: As of ``times_limit``.
        sizes: [H, groups], the groups' squares.
        part: Of its squares a group's error is as large at least.
    """
    ratio, there = sums[0] / np.maximum(sums[1:].max(0), 1e-300), sizes > 0
    found = np.zeros(ratio.shape, bool)
    for h in np.flatnonzero((there.sum(1) >= _GROUPS) & (ratio > _OTHERS**2).any(1)):
        # The median counts as 1 at least.
        usual, size = max(_median(ratio[h][there[h]]), 1.0), np.maximum(sizes[h], _median(sizes[h][there[h]]))
        found[h] = (ratio[h] > _OTHERS**2 * usual) & (sums[0, h] > part**2 * size)
    return found


def rows_that_are_one(truth: Tensor, counterfactual: Tensor) -> npt.NDArray[np.int64] | None:
    """Of a head (both [n, D]) [n], from 0, one number for rows that are one row; None: none are.

    Where all scores are equal (q = 0, one key repeated) every key of dV has the same value, and the same error; where
    keys come again, every copy of one.
    """
    order = hash_rows(counterfactual + 0.0, 0).argsort()
    true, other = truth[order], counterfactual[order]
    near = (true[1:] - true[:-1]).abs_() <= _SAME * true[1:].abs().amax(1, keepdim=True)
    near &= other[1:] == other[:-1]
    same = (near.all(1) & (true[1:] != 0).any(1)).cpu().numpy()
    if not same.any():
        return None
    found = np.empty(len(same) + 1, dtype=np.int64)
    found[order.cpu().numpy()] = np.concatenate([[0], np.cumsum(~same)])
    return found


def _median(values: Array) -> float:
    """The lower of the two in the middle."""
    middle = (len(values) - 1) // 2
    return float(np.partition(values, middle)[middle])


def times_limit(
    sums: Array, directions: Callable[[int, Tensor], Tensor | Array], device: torch.device, draws: Sequence[int | None]
) -> Array:
    """How many times its limit each group's error is, where that is above 1; else 0; [H, groups].

    Args:
        sums: [5, H, groups], each group's squared error, and those that any sane kernel may leave there.
        directions: How many directions the noise of some groups of a head has.
        device: Where that is asked.
        draws: Of each head as of ``quantile``.
    """
    ratio = np.sqrt(sums[0] / np.maximum(sums[1:].max(0), 1e-300))
    result, beyond = np.zeros(ratio.shape), ratio > GROUP_LIMIT
    for h in np.flatnonzero(beyond.any(1)).tolist():
        found = np.flatnonzero(beyond[h])
        counts = directions(h, torch.from_numpy(found).to(device)).tolist()
        limits = np.maximum(GROUP_LIMIT, [quantile(max(1, round(n)), draws[h]) for n in counts])
        times = ratio[h, found] / limits
        result[h, found] = np.where(times > 1, times, 0.0)
    return result


@cache
def quantile(directions: int, draws: int | None = None) -> float:
    """Above it the root mean square of so many normal numbers lies with probability ``_CHANCE``.

    Their standard deviation is 1 or, with ``draws``, what so many draws of them make of it.
    """
    from scipy.special import chdtri, fdtri

    if draws is not None:
        return float(np.sqrt(fdtri(directions, draws * directions, 1 - _CHANCE)))
    return float(np.sqrt(chdtri(directions, _CHANCE) / directions))
