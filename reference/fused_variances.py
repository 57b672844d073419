"""Variances of many heads' roundings, by the kernels of ``triton_variances``: on BF16's tensor cores, not in float64.

What a well-rounded kernel may be off need not be known to float64's last digits, nor the little that delta's error
makes of dQ. Of scores up to ``_MOST`` they are found to some 1e-5 of themselves, as a rule to 1e-6.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from attn_diag.reference.fused_inputs import Filled, FusedInputs, LaunchGrid
from attn_diag.reference.fused_products import TileWeight

# fp32 holds P of scores up to that, whose products sum to no more than the other, with what cancels.
_MOST, _MOST_SUMMED = 2.0**9, 2.0**12
_OF_OUT, _OF_DQ = TileWeight("probs_squared"), TileWeight("dscores_squared")


class FusedVariances(FusedInputs):
    """The heads of ``FusedHeads``, as that kernel takes them."""

    @cached_property
    def _largest(self) -> Tensor:
        """What no |dP - delta| is above, [H, Tq]; 0 where dO is."""
        assert self.do is not None
        keys = self.v.norm(dim=2).amax(1)
        largest: Tensor = keys.masked_fill(keys == 0.0, 1.0)[self._owners.long(), None] * (2 * self.do.norm(dim=2))
        return largest

    def _in_fp32(self, m: Tensor) -> bool:
        """Whether fp32 holds P well enough."""
        if self._ahead:
            return True
        summed = self.q.norm(dim=2).amax(1) * self.k.norm(dim=2).amax(1)[self._owners.long()] * abs(self.head.scale)
        return bool((m.abs().max() < _MOST) & (summed.max() < _MOST_SUMMED))

    def through(self, m: Tensor) -> Tensor | None:
        """(P_bar o slope) K, [H, Tq, D] float64, through which delta's error reaches dQ; as ``variances``."""
        if self.narrow is None or not self._in_fp32(m):
            return None
        from attn_diag.reference.triton_variances import through_kernel

        count, length, width = self.q.shape
        out = torch.empty_like(self.q, dtype=torch.float32)
        tiling = self._tiling("through", width)
        self._launch(
            through_kernel, LaunchGrid(length, tiling.block_m, count, 1), tiling,
            [*self.narrow[:2], self._positions, self._owners, self._numbers.float(), *self._mask, m.float()],
            [Filled(out, 1)], [length, self.k.shape[1], width, *self._reach],
        )  # fmt: skip
        return out.double()

    def variances(
        self, m: Tensor, delta: Tensor | None, a: Tensor, of_out: Tensor, of_dq: Tensor
    ) -> list[Tensor] | None:
        """What the errors of P and dS make of O and dQ; None where the kernel cannot tell.

        Args:
            m: The largest score of every row, finite, [H, Tq].
            delta: delta, [H, Tq]; None without dO.
            a, of_out, of_dq: diag(a) P_bar^2 + of_out [P_bar > 0] is the variance of P, diag(a) dS_bar^2 + of_dq
                [P_bar > 0] that of dS; [H, Tq] each. a may be 0, as of_out is then.

        Returns:
            The variance of P times V^2, [H, Tq, Dv], and with dO that of dS times K^2, [H, Tq, D]; float64.
        """
        if self.narrow is None or not self._in_fp32(m):
            return None
        from attn_diag.reference.triton_variances import variances_kernel

        (count, length, width), value_width = self.q.shape, self.v.shape[2]
        q, k, v, do = (*self.narrow, self.narrow[0])[:4]
        (v2, v_scale), (k2, k_scale) = (_parts(t.square()) for t in (self.v, self.k))
        size, weights = of_dq, [_OF_OUT]
        if self.do is not None:
            size, weights = torch.maximum(a * self._largest.square(), of_dq), [_OF_OUT, _OF_DQ]
        shrink = (a / size).sqrt().clamp(max=2.0**120)
        rows = torch.stack([of_out / a.masked_fill(a == 0.0, 1.0), shrink, of_dq / size]).float()
        made = [q.new_empty(count, length, t.shape[2], dtype=torch.float32) for t in (self.v, self.k)[: len(weights)]]
        tiling = self._tiling("variances", value_width, *weights)
        self._launch(
            variances_kernel, LaunchGrid(length, tiling.block_m, count, 1), tiling,
            [q, k, v, do, v2, k2, self._positions, self._owners, self._numbers.float(), *self._mask, m.float(),
             m.float() if delta is None else delta.float(), rows],
            [Filled(made[0], 1), Filled(made[-1], 1)],
            [length, self.k.shape[1], width, value_width, *self._reach, v2[0].numel(), k2[0].numel()],
        )  # fmt: skip
        rows_scales = a[..., None], size[..., None]
        scales = [t[self._owners.long()] * of_rows for t, of_rows in zip((v_scale, k_scale), rows_scales, strict=True)]
        return [t.double() * scale for t, scale in zip(made, scales, strict=False)]

    def key_variances(
        self, m: Tensor, delta: Tensor, a: Tensor, of_out: Tensor, of_dq: Tensor, of_delta: Tensor
    ) -> tuple[Tensor, Tensor]:
        """What the errors of P and dS make of dK and dV, of heads with dO whose ``variances`` the kernel tells.

        Args:
            m, delta, a, of_out, of_dq: As of ``variances``.
            of_delta: of_delta (P_bar o slope)^2 is added to the variance of dS, [H, Tq].

        Returns:
            The variance of dS, transposed, times Q^2, [H, Tk, D], and that of P times dO^2, [H, Tk, Dv]; float64.
        """
        from attn_diag.reference.triton_variances import key_variances_kernel

        assert self.narrow is not None
        assert self.do is not None
        (count, length, width), (_, k_length, value_width) = self.q.shape, self.v.shape
        q, k, v, do = self.narrow
        size = torch.maximum(a * self._largest.square(), of_delta)
        powers = _half(size)
        shrunk, grown = torch.ldexp(a, -2 * powers), torch.ldexp(1 / a, 2 * powers)
        # dO of such rows is 0, or they are fully masked.
        least = torch.stack([of_dq, of_out * grown.masked_fill(a * self._largest == 0.0, 0.0)])
        floor = _half(least.amax((0, 2)))
        rows = torch.stack([
            powers.masked_fill(size == 0.0, -torch.inf), shrunk.sqrt().clamp(max=2.0**120),
            torch.ldexp(of_delta, -2 * powers), *torch.ldexp(least, -2 * floor[:, None]),
        ]).float()  # fmt: skip
        (q2, q_scale), (do2, do_scale) = _parts(self.q.square()), _parts(self.do.square() * shrunk[..., None])
        made = [q.new_empty(count, k_length, n, dtype=torch.float32) for n in (width, value_width)]
        found = q.new_empty(count, k_length, dtype=torch.float32)
        tiling = self._tiling("key_variances", value_width, _OF_OUT, _OF_DQ)
        self._launch(
            key_variances_kernel, LaunchGrid(k_length, tiling.block_n, count, 1, last_first=False), tiling,
            [q, k, v, do, q2, do2, self._positions, self._owners, self._numbers.float(), *self._mask, m.float(),
             delta.float(), rows, floor.float()],
            [Filled(made[0], 1), Filled(made[1], 1), Filled(found, 1)],
            [length, k_length, width, value_width, *self._reach, self.head.masking.shift(length, k_length),
             q2[0].numel(), do2[0].numel()],
        )  # fmt: skip
        of_keys = torch.exp2(2 * found.double())[..., None]
        return made[0] * (of_keys * q_scale), made[1] * (of_keys * do_scale)


def _half(x: Tensor) -> Tensor:
    """An integer n for which 4^n is above x and 4^(n - 1) is not, but -500 at least; float64."""
    return torch.frexp(x).exponent.double().div(2).ceil().clamp(min=-500)


def _parts(x: Tensor) -> tuple[Tensor, Tensor]:
    """Two BF16 parts of numbers [H, T, D] float64 that are not negative, and what their sum is times, [H, 1, D]."""
    exponents = torch.frexp(x.amax(1, keepdim=True)).exponent.double()
    scaled = torch.ldexp(x, -exponents)
    first = scaled.bfloat16()
    parts = torch.stack([first, (scaled - first.double()).bfloat16()])
    return parts, torch.ldexp(torch.ones_like(x[:, :1]), exponents)
