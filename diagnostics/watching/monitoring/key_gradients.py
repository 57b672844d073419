"""Whether dK and dV fit dQ and O: over all rows and keys of all heads, without a product of rows and keys.

Every gradient dS_ij of a score is in dQ and in dK, every probability P_ij in O and in dV, so that

    K^T dK = K^T (alpha dS^T Q) = dQ^T Q        V^T dV = V^T P^T dO = O^T dO

whatever hides or biases scores; with softcap's slope in dS, W of dropout in P, sinks, and over the query heads that
share a key head as sums. What makes one side wrong and not the other breaks its equation: a dK of zeros or of another
sign, of another head, without some tiles of rows. An error of delta or of L, which both passes share, does not: dQ's
own error, on sampled rows against float64, tells of that.

Both sides are multiplied by some columns S of random signs, so that of the forward [T, m] numbers are kept instead of
q and O. What rounding leaves of X = K^T dK S - dQ^T (Q S) in a well-rounded kernel, in the mean over S and with sites
independent (eps as in ``rows.cast_error``), squared and summed over the entries:

    m (sum_j k_j^2 eps^2 dK_j^2 (1 + g) + sum_i q_i^2 eps^2 (dQ_i^2 + 2 alpha^2 dS_i^2 K^2))

with g query heads, of which each rounds its part where there are several; the same of dV with v, dO, O and P_bar. Of
dS and P_bar the sampled rows alone are known; they stand for all.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

COLUMNS = 8
# Float64 copies of a tensor are of at most so many elements.
_AT_ONCE = 2**22


class ForwardSketch(NamedTuple):
    """What is kept of q and O of all rows, times random signs, [S, Hq, Tq, COLUMNS] float64."""

    q: Tensor
    o: Tensor

    @classmethod
    def of(cls, q: Tensor, o: Tensor) -> ForwardSketch:
        """Of q [S, Hq, Tq, D] and O [S, Hq, Tq, Dv]."""
        with torch.no_grad():
            return cls(_signed(q.detach()), _signed(o.detach()))


class GradientFit(NamedTuple):
    """How far dK and dV are off dQ and O; squared norms, one a key head, float64 [Hk]."""

    dk_off: Tensor
    dk_size: Tensor
    """Of dQ^T Q S."""
    dk_rounded: Tensor
    """m (sum k^2 dK^2 (1 + g) + sum q^2 dQ^2): times eps^2 what the roundings of dK and dQ leave."""
    dv_off: Tensor
    dv_size: Tensor
    dv_rounded: Tensor

    @classmethod
    def of(
        cls, sketch: ForwardSketch, k: Tensor, v: Tensor, *, do: Tensor, dq: Tensor, dk: Tensor, dv: Tensor
    ) -> GradientFit:
        """Of all rows and keys of some sequences, [S, H, T, D or Dv]."""
        with torch.no_grad(), torch.autocast(k.device.type, enabled=False):
            # V^T dV S = O^T (dO S) would take O whole: the signs are on the other side.
            return cls(*_fit(k, dk.detach(), dq.detach(), sketch.q), *_fit(dv.detach(), v, do.detach(), sketch.o))


def _fit(left: Tensor, signed: Tensor, rows: Tensor, sketch: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of left^T (signed S), over keys, and rows^T sketch, over rows: the difference, the second, what rounding leaves.

    [S, Hk, Tk, D], twice, [S, Hq, Tq, D] and [S, Hq, Tq, m].
    """
    heads = left.shape[1]
    group = rows.shape[1] // heads
    ours, of_keys = _summed(left, signed, drawn=True)
    of_heads = _summed(rows, sketch, drawn=False)
    theirs, of_rows = (t.view(len(t), heads, group, *t.shape[2:]).sum(2) for t in of_heads)
    rounded = of_keys * (COLUMNS * (1 + group if group > 1 else 1)) + of_rows
    return (ours - theirs).square().sum((0, 2, 3)), theirs.square().sum((0, 2, 3)), rounded.sum(0)


def _summed(one: Tensor, other: Tensor, *, drawn: bool) -> tuple[Tensor, Tensor]:
    """one^T other, or, ``drawn``, one^T (other S), and sum one^2 other^2: [S, H, D, m] and [S, H]."""
    products, squares = [], []
    for a, b in _parts(one, other):
        products.append(a.mT @ (b @ _signs(b) if drawn else b))
        squares.append((a.square().sum(-1) * b.square().sum(-1)).sum(2))
    return torch.stack(products).sum(0), torch.stack(squares).sum(0)


def _parts(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The tensors in float64, some of the third axis at a time."""
    size, length = tensors[0].shape, tensors[0].shape[2]
    step = max(1, _AT_ONCE // (size[0] * size[1] * max(t.shape[3] for t in tensors)))
    for start in range(0, length, step):
        yield tuple(t[:, :, start : start + step].double() for t in tensors)


def _signed(x: Tensor) -> Tensor:
    return torch.cat([part @ _signs(part) for (part,) in _parts(x)], 2)


def _signs(x: Tensor) -> Tensor:
    """[D, COLUMNS] of 1 and -1, the same at every check."""
    key = (x.shape[-1], x.device)
    if key not in _SIGNS:
        generator = torch.Generator().manual_seed(x.shape[-1])
        drawn = torch.randint(0, 2, (x.shape[-1], COLUMNS), generator=generator)
        _SIGNS[key] = (drawn * 2 - 1).double().to(x.device)
    return _SIGNS[key]


_SIGNS: dict[tuple[int, torch.device], Tensor] = {}
