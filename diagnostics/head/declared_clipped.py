"""Scales of a declared kernel that do not reach the largest numbers of their blocks, each by another part of them.

A stale amax that differs from block to block has too many parts to be tried. They are fitted by Gauss-Newton to what O
is off the recipe's,

    O - O_recipe = O(c) - O(1)        O(c): attention whose x of q, k or v is max(-c_b amax_b, min(x, c_b amax_b))

with c_b the part of block b's amax, in float64, as factors are (``declared_factors``), in every other row that is
looked at. Of most rows between, they must leave no more than the difference of two sound kernels, whose scales differ.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attn_diag.head.declared_beside import BesideRecipe, Culprit
from attn_diag.head.quality import LOSSY
from attn_diag.kernels.emulation_operands import Operands
from attn_diag.reference import AttentionHead, reference_rows
from attn_diag.results.wording import number

# Parts of amax: where the search begins, and between which it stays; below ``_LEAST`` a block is as good as left out.
_FIRST, _FLOOR, _LEAST, _WHOLE = 0.85, 0.05, 0.2, 0.97
_STEPS, _FARTHEST, _STILL = 20, 0.3, 0.999
# How far parts are expected from 1.
_SPREAD = 0.3
# So many blocks are fitted, with at least so many numbers of O for each; fewer are named one by one (``StaleSearch``).
_BLOCKS, _NUMBERS = 512, 8
# Rows that are looked at, and the part of what is off that may be left of those between.
_ROWS, _HALF = 512, 0.5
# Rows times keys times features that are held at once.
_PRODUCTS = 2**24


@dataclass(frozen=True)
class ClippedSearch:
    """O of one head beside the recipe's, q, k or v clipped."""

    beside: BesideRecipe

    def named(self) -> Culprit | None:
        """What explains O; None where nothing does."""
        return min(self._tried(), key=lambda one: one.left, default=None)

    def _tried(self) -> Iterator[Culprit]:
        beside = replace(self.beside, most=_ROWS)
        for name, _, by in beside.quantizers():
            if not by.symmetric or not by.whole_rows:
                continue
            each = beside.blocks(name, by)[:, 0]
            count = int(each.max()) + 1
            fit, between = (_Fit(beside, name, each, beside.rows[first::2]) for first in (0, 1))
            products = len(fit.rows) * len(beside.head.k) * beside.head.v.shape[1]
            if 1 < count <= min(_BLOCKS, fit.off.numel() // _NUMBERS) and products <= _PRODUCTS:
                parts = fit.parts()
                clipped = parts[parts < _WHOLE]
                # A row between may see keys most that no fitted row sees.
                left, off = (
                    float(x.square().mean(1).median()) for x in (between.off - between.moved(parts), between.off)
                )
                explained = left <= min(2 * LOSSY**2, _HALF * off)
                if explained and len(clipped) and float(clipped.min()) >= _LEAST:
                    by_part = f"{number(float(clipped.min()), 2)} to {number(float(clipped.max()), 2)}"
                    yield Culprit(
                        f"the largest number of {name} is taken for {by_part} times what it is in {len(clipped)} of "
                        f"{count} blocks, each by its own, and what lies beyond is clipped (a stale amax)",
                        left,
                    )


class _Fit:
    """One of q, k and v, whose rows are of the blocks ``each`` [T]."""

    def __init__(self, beside: BesideRecipe, name: str, each: Tensor, rows: Tensor) -> None:
        self._name, self._each, self.rows = name, each, rows
        self._head: AttentionHead = replace(beside.head, do=None)
        self._x = Operands(self._head).prepared(beside.recipe).unquantized(beside.recipe, name).double()
        # q may hold the softmax scale.
        self._unit = 1.0
        if name == "q" and beside.recipe.alpha == "in-q":
            at = self._x.abs().argmax()
            self._unit = float(self._x.flatten()[at] / self._head.q.flatten()[at])
        largest = self._x.abs().amax(1)
        self._amax = largest.new_zeros(int(each.max()) + 1).scatter_reduce(0, each, largest, "amax")
        self._units = beside.units[self.rows].sqrt()
        self._plain = self._attention(self._x)
        off = min((x for x, _ in beside.off({})), key=lambda x: float(x.square().sum()))
        self.off = off[torch.isin(beside.rows, rows)] / self._units
        """What O is off the recipe's, [R, Dv], in units of the noise."""

    def parts(self) -> Tensor:
        """The parts of amax, [N]."""
        parts = torch.full_like(self._amax, _FIRST)
        eye = torch.eye(len(parts), dtype=parts.dtype, device=parts.device) / _SPREAD**2
        best = self._cost(parts)
        for _ in range(_STEPS):
            shapes = self._shapes(parts).flatten(0, 1)
            slope = shapes.T @ (self.off - self.moved(parts)).flatten() + (1 - parts) / _SPREAD**2
            step = torch.linalg.solve(shapes.T @ shapes + eye, slope).clamp(-_FARTHEST, _FARTHEST)
            tried = [(parts + step * 0.5**n).clamp(_FLOOR, 1.0) for n in range(4)]
            costs = [self._cost(one) for one in tried]
            if min(costs) > best * _STILL:
                break
            best = min(costs)
            parts = tried[costs.index(best)]
        return parts

    def _cost(self, parts: Tensor) -> float:
        # Blocks that no row feels have all of their amax.
        return float((self.off - self.moved(parts)).square().sum() + ((1 - parts) / _SPREAD).square().sum())

    def moved(self, parts: Tensor) -> Tensor:
        """What O is off with these parts, [R, Dv], in units of the noise."""
        return (self._attention(self._clipped(parts)) - self._plain) / self._units

    def _clipped(self, parts: Tensor) -> Tensor:
        reach = (parts * self._amax)[self._each][:, None]
        return self._x.clamp(-reach, reach)

    def _changed(self, x: Tensor) -> AttentionHead:
        return replace(self._head, **{self._name: x / self._unit})  # type: ignore[arg-type]

    def _attention(self, x: Tensor) -> Tensor:
        return reference_rows(self._changed(x), self.rows).out

    def _shapes(self, parts: Tensor) -> Tensor:
        """The derivatives by the parts, [R, Dv, N], in units of the noise."""
        reach = (parts * self._amax)[self._each][:, None]
        grows = (self._x.sign() * self._amax[self._each][:, None] * (self._x.abs() > reach)) / self._unit
        head = self._changed(self._clipped(parts))
        block = reference_rows(head, self.rows)
        count, keys = len(parts), block.keys
        of = torch.nn.functional.one_hot(self._each, count).to(self._x)  # [T, N]
        if self._name == "v":
            found = torch.einsum("rk,kd,kn->rdn", block.probs, grows[keys], of[keys])
            return found / self._units[:, :, None]
        moved = head.q[self.rows] @ grows[keys].T if self._name == "k" else grows[self.rows] @ head.k[keys].T
        moved = block.probs * moved * head.scale * (1.0 if block.slope is None else block.slope)
        away = head.v[keys][None] - block.out[:, None]  # [R, K, Dv]
        if self._name == "k":
            found = torch.einsum("rk,rkd,kn->rdn", moved, away, of[keys])
        else:
            found = torch.einsum("rk,rkd->rd", moved, away)[:, :, None] * of[self.rows][:, None]
        return found / self._units[:, :, None]
