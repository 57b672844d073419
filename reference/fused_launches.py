"""The launches of ``fused`` that make products of tiles: in Triton, or in Gluon, which takes less time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attn_diag.reference.attention import RowBlock, reference_rows
from attn_diag.reference.fused_inputs import Filled, LaunchGrid
from attn_diag.reference.fused_products import (
    MOST_FEATURES,
    FusedRows,
    KeyProduct,
    RowProduct,
    key_launches,
    launches,
    pairs_of,
)
from attn_diag.reference.fused_variances import FusedVariances

if TYPE_CHECKING:
    from attn_diag.reference.triton_tiles import Tiling

# Why this process takes no kernel in Gluon, if it does not.
_REFUSED = list[Exception]()
# Of another Triton than the one with which they were tested on a GPU the first forward and product are looked at.
_TESTED, _LOOKED_AT = "3.6.", set[str]()


class FusedLaunches(FusedVariances):
    """The heads of ``FusedHeads``, and their products."""

    @property
    def _in_gluon(self) -> bool:
        """Whether Gluon's kernels are to make what they can."""
        widths = self.q.shape[2], self.v.shape[2]
        return not (_REFUSED or self.narrow is None or any(width % 16 for width in widths)) and has_gluon()

    @cached_property
    def _made_pairs(self) -> dict[int, Tensor]:
        return {}

    def _pairs(self, number: int) -> Tensor:
        """q, k, v or dO, by number, as ``bf16_pairs``."""
        assert self.narrow is not None
        if number not in self._made_pairs:
            self._made_pairs[number] = bf16_pairs(self.narrow[number])
        return self._made_pairs[number]

    @property
    def sum_keys(self) -> tuple[int, int]:
        """Keys of a tile, whose numbers a row sums before it adds them to those of earlier tiles: of l, and of dS."""
        width, value_width = self.q.shape[2], self.v.shape[2]
        of_dscores = "gluon" if self._in_gluon else "rows"
        of_keys = max(width, value_width) <= MOST_FEATURES
        return self._tiling("forward", value_width).block_n, self._tiling(of_dscores, width, of_keys=of_keys).block_n

    def make_forward(self, *, details: bool) -> FusedRows:
        """The forward; ``details`` as of ``Tiling``."""
        if self._in_gluon:
            with _where_it_compiles():
                found = self._forward_in_gluon(details=details)
                self._compare("rows", found.unnormalised_out[0], lambda block: block.unnormalised_out)
                return found
        from attn_diag.reference.triton_attention import forward_kernel

        tiling = self._tiling("forward", self.v.shape[2], details=details)
        return self._launch_forward(forward_kernel, self.q, tiling)

    def _forward_in_gluon(self, *, details: bool) -> FusedRows:
        from attn_diag.reference.gluon_forward import forward_kernel

        tiling = self._tiling("gluon_forward", self.v.shape[2], details=details)
        return self._launch_forward(forward_kernel, self._pairs(0), tiling)

    def _launch_forward(self, kernel: object, q: Tensor, tiling: Tiling) -> FusedRows:
        (count, length, width), value_width = self.q.shape, self.v.shape[2]
        out = self.q.new_empty(count, length, value_width)
        rows = self.q.new_empty(5, count, length)
        places = self._empty_integers(3, count, length)
        self._launch(
            kernel, LaunchGrid(length, tiling.block_m, count, -(-value_width // tiling.block_x)), tiling,
            [q, self.k, self.v, self._positions, self._owners, self._numbers, *self._mask],
            [Filled(out, 1), Filled(rows, 2), Filled(places, 2)],
            [length, self.k.shape[1], width, value_width, *self._reach],
        )  # fmt: skip
        row_max, row_sum, second, squares, bias = rows.unbind()
        if self.sinks is not None:
            row_sum = row_sum + (self.sinks - row_max).exp()
        top_key, visible, rises = places.long().unbind()
        return FusedRows(out, row_max, row_sum, second, squares, bias, top_key, visible, rises)

    def make_rows(self, asked: Sequence[RowProduct], m: Tensor, delta: Tensor | None) -> None:
        """Make products of query rows.

        Args:
            asked: Which.
            m: The largest score of every row, finite, [H, Tq].
            delta: delta, [H, Tq]; None without dO.
        """
        if self._in_gluon and delta is not None:
            for some in pairs_of([one for one in asked if one.x is None]):
                if _REFUSED:
                    break
                with _where_it_compiles():
                    self._rows_in_gluon(some, m, delta)
                    self._look_at(some)
        rest = [one for one in asked if one.found is None]
        for some in launches(rest, self.q.shape[2], self.v.shape[2]):
            self._rows_in_triton(some, m, delta)

    def _look_at(self, some: Sequence[RowProduct]) -> None:
        """Raise RuntimeError where this Triton makes another dS K in Gluon than torch does of a few rows; once."""
        of_dscores = next((one for one in some if one.weight.name == "dscores"), None)
        if of_dscores is None:
            return
        assert of_dscores.found is not None
        try:
            self._compare("products", of_dscores.found[0], self._true_dscores_keys)
        except RuntimeError:
            for one in some:
                one.found = None
            raise

    def _true_dscores_keys(self, block: RowBlock) -> Tensor:
        assert block.unnormalised_dscores is not None
        return block.unnormalised_dscores @ self.head.k[block.keys]

    def _compare(self, what: str, found: Tensor, true_of: Callable[[RowBlock], Tensor]) -> None:
        """Raise RuntimeError where these rows [Tq, D] of the first head are not those of torch; once."""
        import triton

        if self._ahead or triton.__version__.startswith(_TESTED) or what in _LOOKED_AT:
            return
        rows = torch.linspace(0, self.q.shape[1] - 1, min(self.q.shape[1], 16), device=self.q.device).long()
        true = true_of(reference_rows(self.head, rows))
        if not (found[rows] - true).norm() <= 1e-9 * true.norm():
            raise RuntimeError(f"Triton {triton.__version__} makes other {what} in Gluon than torch")
        _LOOKED_AT.add(what)

    def _rows_in_gluon(self, some: Sequence[RowProduct], m: Tensor, delta: Tensor) -> None:
        from attn_diag.reference.gluon_products import rows_kernel

        assert self.narrow is not None
        (count, length, width), value_width = self.q.shape, self.v.shape[2]
        sums = next((one.sums for one in some if one.sums is not None), None)
        out = self.q.new_empty(len(some), count, length, width)
        tiling = self._tiling("gluon", width, *(one.weight for one in some), details=sums is not None)
        self._launch(
            rows_kernel, LaunchGrid(length, tiling.block_m, count, 1), tiling,
            [self._pairs(0), self.k, self.v, self._pairs(3), self.narrow[1], self._positions, self._owners,
             self._numbers, *self._mask, *_row_numbers([one.numbers for one in some], m, delta)],
            [Filled(out, 2), Filled(out if sums is None else sums, 2)],
            [length, self.k.shape[1], width, value_width, *self._reach],
        )  # fmt: skip
        for one, found in zip(some, out, strict=True):
            one.found = found

    def _rows_in_triton(self, some: Sequence[RowProduct], m: Tensor, delta: Tensor | None) -> None:
        from attn_diag.reference.triton_attention import rows_kernel

        (count, length, width), value_width = self.q.shape, self.v.shape[2]
        factors = [(self.k if one.x is None else one.x).contiguous() for one in some]
        sums = next((one.sums for one in some if one.sums is not None), None)
        x_width, of_keys = factors[0].shape[2], some[0].x is None and max(width, value_width) <= MOST_FEATURES
        out = self.q.new_empty(len(some), count, length, x_width)
        tiling = self._tiling("rows", x_width, *(one.weight for one in some), details=sums is not None, of_keys=of_keys)
        self._launch(
            rows_kernel, LaunchGrid(length, tiling.block_m, count, -(-x_width // tiling.block_x)), tiling,
            [self.q, self.k, self.v, self.q if self.do is None else self.do, factors[0], factors[-1], self._positions,
             self._owners, self._numbers, *self._mask, *_row_numbers([one.numbers for one in some], m, delta)],
            [Filled(out, 2), Filled(out if sums is None else sums, 2)],
            [length, self.k.shape[1], width, value_width, x_width, *self._reach],
        )  # fmt: skip
        for one, found in zip(some, out, strict=True):
            one.found = found

    def make_keys(self, asked: Sequence[KeyProduct], m: Tensor, delta: Tensor | None) -> None:
        """Make products of keys; the arguments as of ``make_rows``."""
        if self._in_gluon and delta is not None:
            for some in pairs_of([one for one in asked if one.y is self.q or one.y is self.do]):
                # In this order registers suffice.
                ordered = sorted(some, key=lambda one: not one.weight.needs_dprobs)
                if _REFUSED:
                    break
                with _where_it_compiles():
                    self._keys_in_gluon(ordered, m, delta)
        rest = [one for one in asked if one.found is None]
        for several in key_launches(rest, self.q.shape[2], self.v.shape[2]):
            self._keys_in_triton(several, m, delta)

    def _keys_in_gluon(self, some: Sequence[KeyProduct], m: Tensor, delta: Tensor) -> None:
        from attn_diag.reference.gluon_products import keys_kernel

        assert self.do is not None
        (count, length, width), k_length, value_width = self.q.shape, self.k.shape[1], self.v.shape[2]
        outs = [self.q.new_empty(count, k_length, one.y.shape[2]) for one in some]
        tiling = self._tiling("gluon", width, *(one.weight for one in some))
        tiling = replace(tiling, of_dout=tuple(one.y is not self.q for one in some))
        times = [torch.ones_like(m) if one.times is None else one.times for one in some]
        numbers = [n for one, last in zip(some, times, strict=True) for n in (*(*one.numbers, m, m, m)[:3], last)]
        self._launch(
            keys_kernel, LaunchGrid(k_length, tiling.block_m, count, 1, last_first=False), tiling,
            [self.q, self._pairs(1), self._pairs(2), self.do, self._positions, self._owners, self._numbers, *self._mask,
             m, delta, torch.stack(numbers)],
            [Filled(outs[0], 1), Filled(outs[-1], 1)],
            [length, k_length, width, value_width, *self._reach, self.head.masking.shift(length, k_length)],
        )  # fmt: skip
        for one, found in zip(some, outs, strict=True):
            one.found = found

    def _keys_in_triton(self, some: Sequence[KeyProduct], m: Tensor, delta: Tensor | None) -> None:
        from attn_diag.reference.triton_attention import keys_kernel

        (count, length, width), k_length, value_width = self.q.shape, self.k.shape[1], self.v.shape[2]
        factors = [(one.y if one.times is None else one.y * one.times[..., None]).contiguous() for one in some]
        y_width, third = factors[0].shape[2], factors[2:] or factors[:1]
        out = self.q.new_empty(len(some), count, k_length, y_width)
        tiling = self._tiling("keys", y_width, *(one.weight for one in some))
        self._launch(
            keys_kernel,
            LaunchGrid(k_length, tiling.block_n, count, -(-y_width // tiling.block_x), last_first=False), tiling,
            [self.q, self.k, self.v, self.q if self.do is None else self.do, factors[0], (factors * 2)[1], *third,
             self._positions, self._owners, self._numbers, *self._mask,
             *_row_numbers([one.numbers for one in some], m, delta)],
            [Filled(out, 2)],
            [length, k_length, width, value_width, y_width, *self._reach, self.head.masking.shift(length, k_length)],
        )  # fmt: skip
        for one, found in zip(some, out, strict=True):
            one.found = found


def bf16_pairs(x: Tensor) -> Tensor:
    """BF16 [H, T, D] as int32 [H, T, D / 2]: of every 8 numbers the first and the fifth, and so on."""
    pairs = x.view(*x.shape[:2], -1, 2, 4).transpose(3, 4).contiguous()
    return pairs.view(torch.int32).flatten(2)


def has_gluon() -> bool:
    """Whether this Triton has what Gluon's kernels are written in; the interpreter has not."""
    import triton

    if triton.knobs.runtime.interpret:
        return False
    try:
        import attn_diag.reference.gluon_products  # noqa: F401
    except (ImportError, AttributeError, TypeError):
        return False
    return True


@contextmanager
def _where_it_compiles() -> Iterator[None]:
    """Leave products to Triton's kernels where this Triton does not compile Gluon's, whose language still changes."""
    from triton.runtime.errors import TritonError

    try:
        yield
    except (TritonError, RuntimeError) as error:
        # A compiler's pass that fails raises RuntimeError itself; memory that does not suffice, one of its kinds.
        if not isinstance(error, TritonError) and type(error) is not RuntimeError:
            raise
        _REFUSED.append(error)


def _row_numbers(numbers: Sequence[Sequence[Tensor]], m: Tensor, delta: Tensor | None) -> list[Tensor]:
    """m, delta, and a, b and c of each weight, [W, 3, H, Tq]; any numbers in place of what W has not."""
    every = [n for of_weight in numbers for n in (*of_weight, *[m] * (3 - len(of_weight)))]
    return [m, m if delta is None else delta, torch.stack(every)]
