"""Float64 attention of several heads at once, by the kernels of ``triton_attention``: what ``reference_head`` streams.

The formulas are those of ``attention``, the masking and the results too. What ``fuses`` refuses is streamed, and so is
whatever looks at single scores.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from attn_diag.reference.attention import AttentionHead, HeadReference, lse_of, reference_head
from attn_diag.reference.fused_inputs import Filled, LaunchGrid
from attn_diag.reference.fused_launches import FusedLaunches
from attn_diag.reference.fused_products import (
    FusedRows,
    HighScores,
    KeyProduct,
    RowProduct,
    TileProduct,
    TileWeight,
)

# Set to 0, everything is streamed: to compare, or where a Triton to come miscompiles them.
SWITCH = "ATTN_DIAG_FUSED"
# Fewer scores, of all heads together, are streamed in some hundredths of a second. The kernels are compiled when they
# are first called, which takes a second or two each and is kept on disk.
WORTH = 2**22


def switched_on() -> bool:
    """Whether the user leaves them on."""
    return os.environ.get(SWITCH) != "0"


def fuses(heads: Sequence[AttentionHead]) -> bool:
    """Whether the kernels compute these heads, of one shape: on a Hopper GPU, without dropout, of ``WORTH`` scores.

    And unless they are switched off. Triton 3.6 compiles them for sm_90; for sm_100 it fails to, and before sm_90 their
    tiles do not fit.
    """
    head = heads[0]
    if not (switched_on() and head.q.is_cuda) or head.dropout is not None:
        return False
    if len(heads) * len(head.q) * len(head.k) < WORTH:
        return False
    hopper = torch.version.hip is None and torch.cuda.get_device_capability(head.q.device) == (9, 0)
    return hopper and head.v.numel() > 0 and head.q.numel() > 0 and importlib.util.find_spec("triton") is not None


def reference_of(head: AttentionHead, *, key_gradients: bool = True) -> HeadReference:
    """What ``reference_head`` keeps of a head, by the kernels where they compute it."""
    if fuses([head]):
        return FusedHeads([head], details=False).references(key_gradients=key_gradients)[0]
    return reference_head(head, key_gradients=key_gradients)


# So many of a row's scores ``scores_above`` keeps.
KEPT_SCORES = 32
# What this process has compiled, or found on disk.
_COMPILED = set[object]()


class FusedHeads(FusedLaunches):
    """Heads of one shape, scale and masking (``batches``); every launch is for all of them."""

    def __init__(self, heads: Sequence[AttentionHead], *, details: bool = True) -> None:
        """``details``: whether the forward also tells what bounds and repeated maxima need beside m, l and O_bar."""
        super().__init__(heads)
        self._details = details
        self._asked: list[RowProduct] = []
        self._asked_keys: list[KeyProduct] = []

    @cached_property
    def forward(self) -> FusedRows:
        """The forward; once."""
        return self.make_forward(details=self._details)

    def compile_ahead(self, launches: Sequence[Sequence[TileProduct]]) -> None:
        """Compile the forward and these products, each sequence asked for at once, where that is still to be done: most
        of it is ptxas, a process apart. What cannot be compiled is met again by whoever computes it."""
        key = (self.q.shape[1:], self.k.shape[1:], self.v.shape, str(self._tiling("forward", 1)), str(launches))
        mode = None if key in _COMPILED or not self.q.is_cuda else _async_mode()
        if mode is None:
            return
        _COMPILED.add(key)
        with ThreadPoolExecutor() as pool, mode(pool, ignore_errors=True):
            self._rehearse(launches)

    def _rehearse(self, launches: Sequence[Sequence[TileProduct]]) -> None:
        """Go through the forward and these products without launching anything."""
        tensors = {"q": self.q, "k": self.k, "v": self.v, "do": self.do}
        numbers = self.q.new_ones(6, *self.q.shape[:2])
        self._ahead = True
        try:
            self.make_forward(details=self._details)
            one = self.head.positions.new_zeros(1)
            self.scores_above(self.q.new_zeros(1), one, one)
            if self.variances(*numbers[:5]) and any(one.way == "keys" for some in launches for one in some):
                self.key_variances(*numbers)
            if self.do is not None:
                self.through(numbers[0])
            for products in launches:
                for way, weight, of, summed in products:
                    x = tensors.get(of)
                    if way == "keys":
                        assert x is not None
                        self.ask_keys(weight, x)
                    else:
                        self.ask(weight, x, sums=self.q.new_empty(2, *self.q.shape[:2]) if summed else None)
                self._make()
                self._make_keys()
        finally:
            self._ahead = False

    @property
    def finite_max(self) -> Tensor:
        """m, [H, Tq]; 0 in fully masked rows."""
        return self.forward.row_max.masked_fill(self.forward.row_max == -torch.inf, 0.0)

    @cached_property
    def inverse(self) -> Tensor:
        """1/l, [H, Tq]; 0 in fully masked rows."""
        return self.forward.row_sum.reciprocal().masked_fill_(self.forward.row_max == -torch.inf, 0.0)

    @cached_property
    def lse(self) -> Tensor:
        """L, [H, Tq]."""
        return lse_of(self.forward.row_max, self.forward.row_sum, self.sinks)

    @cached_property
    def out(self) -> Tensor:
        """O, [H, Tq, Dv]; zero in fully masked rows."""
        return self.forward.unnormalised_out * self.inverse[..., None]

    @cached_property
    def products(self) -> Tensor | None:
        """(P_bar o slope) K, [H, Tq, D]; None without dO."""
        if self.do is None:
            return None
        return self.take(self._sloped) if self._through is None else self._through

    @cached_property
    def _through(self) -> Tensor | None:
        return self.through(self.finite_max)

    @cached_property
    def probs_k(self) -> Tensor | None:
        """(P o slope) K, [H, Tq, D]; None without dO."""
        return None if self.products is None else self.products * self.inverse[..., None]

    @cached_property
    def delta(self) -> Tensor | None:
        """rowsum(dO o O), [H, Tq]; None without dO."""
        return None if self.do is None else (self.do * self.forward.unnormalised_out).sum(2).mul_(self.inverse)

    def ask_gradient(self) -> None:
        """Ask for what dQ and ``products`` are made of, so that it is made with what else is asked for."""
        if self.do is not None:
            _ = self._dscores
            if self._through is None:
                _ = self._sloped

    def ask_key_gradients(self) -> None:
        """Ask for dK and dV, so that they are made with what else is asked for of keys."""
        if self.do is not None:
            _ = self._key_gradients

    @cached_property
    def _key_gradients(self) -> tuple[KeyProduct, KeyProduct]:
        """dK and dV."""
        assert self.do is not None
        dk = self.ask_keys(TileWeight("dscores"), self.q, times=self.inverse * self.head.scale)
        return dk, self.ask_keys(TileWeight("probs"), self.do, times=self.inverse)

    @cached_property
    def _dscores(self) -> RowProduct:
        """dS_bar K, with the sums that the bound of delta needs."""
        return self.ask(TileWeight("dscores"), sums=self.q.new_empty(2, *self.q.shape[:2]))

    @cached_property
    def _sloped(self) -> RowProduct:
        """(P_bar o slope) K."""
        return self.ask(TileWeight("sloped"))

    @cached_property
    def _gradient(self) -> tuple[Tensor, Tensor]:
        """dQ, [H, Tq, D], and the sums that the bound of delta needs, [2, H, Tq]."""
        dscores = self.take(self._dscores)
        assert self._dscores.sums is not None
        return dscores * (self.inverse * self.head.scale)[..., None], self._dscores.sums

    @property
    def gradient_sums(self) -> tuple[Tensor, Tensor]:
        """As of ``RowBlock``, [H, Tq] each."""
        assert self.delta is not None
        total, norm = self._gradient[1][0], self._gradient[1][1].sqrt()
        if self.sinks is None:
            return total, norm
        own = (self.sinks - self.forward.row_max).exp() * self.delta.neg()
        own = own.masked_fill_(self.forward.row_sum == torch.inf, 0.0)
        return total + own, torch.hypot(norm, own)

    @cached_property
    def sloped_squares(self) -> Tensor:
        """Row sums of (P_bar o slope)^2, [H, Tq]."""
        if self.head.softcap is None:
            return self.forward.squares
        ones, zero = torch.ones_like(self.k[..., :1]), torch.zeros_like(self.inverse)
        return self.rows(TileWeight("dscores_squared"), ones, zero, zero, torch.ones_like(zero))[..., 0]

    def rows(self, weight: TileWeight, x: Tensor | None = None, *numbers: Tensor) -> Tensor:
        """W X, [H, Tq, Dx]; the arguments as of ``ask``."""
        return self.take(self.ask(weight, x, *numbers))

    def ask(
        self, weight: TileWeight, x: Tensor | None = None, *numbers: Tensor, sums: Tensor | None = None
    ) -> RowProduct:
        """Ask for W X: it is made, with what else was asked for, when one of them is taken.

        Args:
            weight: W.
            x: [key heads, Tk, Dx] float64, in the order of ``k``; None: k.
            numbers: a, b and c of W, [H, Tq] each, as far as W has them.
            sums: See ``RowProduct``.
        """
        self._asked.append(RowProduct(weight, x, numbers, sums))
        return self._asked[-1]

    def take(self, product: RowProduct) -> Tensor:
        """What was asked for."""
        if product.found is None:
            self._make()
        assert product.found is not None
        return product.found

    def _make(self) -> None:
        """Make what was asked for."""
        asked, self._asked = self._asked, []
        self.make_rows(asked, *self._fed)

    @property
    def _fed(self) -> tuple[Tensor, Tensor | None]:
        """m, finite, and delta, [H, Tq] each; without meaning where nothing is launched."""
        return (self.q[..., 0], self.q[..., 0]) if self._ahead else (self.finite_max, self.delta)

    def keys(self, weight: TileWeight, y: Tensor, *numbers: Tensor) -> Tensor:
        """W^T Y, [H, Tk, Dy]; the arguments as of ``ask_keys``."""
        return self.take_keys(self.ask_keys(weight, y, *numbers))

    def ask_keys(self, weight: TileWeight, y: Tensor, *numbers: Tensor, times: Tensor | None = None) -> KeyProduct:
        """Ask for W^T Y, of ``y`` [H, Tq, Dy] float64, whose rows are times ``times`` [H, Tq]: as ``ask``."""
        self._asked_keys.append(KeyProduct(weight, y, numbers, times))
        return self._asked_keys[-1]

    def take_keys(self, product: KeyProduct) -> Tensor:
        """What was asked for."""
        if product.found is None:
            self._make_keys()
        assert product.found is not None
        return product.found

    def _make_keys(self) -> None:
        """Make what was asked for of keys."""
        asked, self._asked_keys = self._asked_keys, []
        self.make_keys(asked, *self._fed)

    def scores_above(self, thresholds: Tensor, heads: Tensor, rows: Tensor) -> HighScores:
        """The scores of some rows above a threshold of each.

        Args:
            thresholds: [N] float64, of each row.
            heads: Its head, int64 [N], ascending.
            rows: Its index, int64 [N].
        """
        from attn_diag.reference.triton_attention import scores_kernel

        (count, length, width), device = self.q.shape, rows.device
        starts = torch.searchsorted(heads, torch.arange(count + 1, device=device))
        most, place = int(starts.diff().max()), torch.arange(len(rows), device=device) - starts[heads]
        at = torch.full((count, most), length, dtype=torch.int32, device=device)
        at[heads, place] = rows.to(torch.int32)
        above = torch.zeros_like(at, dtype=torch.float64)
        above[heads, place] = thresholds
        keys, scores = self._empty_integers(count, most, KEPT_SCORES), self.q.new_empty(count, most, KEPT_SCORES)
        counts = self._empty_integers(count, most)
        tiling = self._tiling("scores", width)
        self._launch(
            scores_kernel, LaunchGrid(most, tiling.block_m, count, 1), tiling,
            [self.q, self.k, at, above, self._positions, self._owners, self._numbers, *self._mask],
            [Filled(keys, 1), Filled(scores, 1), Filled(counts, 1)],
            [length, self.k.shape[1], width, *self._reach, most, KEPT_SCORES],
        )  # fmt: skip
        keys, scores, counts = (t[heads, place] for t in (keys, scores, counts))
        return HighScores(counts.long(), keys, scores)

    def references(self, *, key_gradients: bool = True) -> list[HeadReference]:
        """What ``reference_head`` keeps of every head; dK and dV with ``key_gradients``, where there is dO."""
        found, dq, dk, dv = self.forward, None, None, None
        if self.do is not None:
            dq = self._gradient[0]
            if key_gradients:
                dk, dv = (self.take_keys(one) for one in self._key_gradients)

        def of(tensor: Tensor | None, i: int) -> Tensor | None:
            return None if tensor is None else tensor[i]

        references = [
            HeadReference(
                found.row_max[i], found.row_sum[i], found.unnormalised_out[i],
                of(self.delta, i), of(dq, i), of(dk, i), of(dv, i), head.sink,
            )
            for i, head in enumerate(self.heads)
        ]  # fmt: skip
        # What each of them would make by itself.
        alone = self.out, self.lse, found.row_max == -torch.inf
        for one, out, lse, masked in zip(references, *alone, strict=True):
            one.out, one.lse, one.fully_masked = out, lse, masked
        return references


def _async_mode() -> Any | None:
    """Triton's way of compiling several kernels at once; None before it had one."""
    import triton

    return getattr(triton, "AsyncCompileMode", None)
