"""Variances of many heads' roundings, by the kernel of ``triton_variances``: on BF16's tensor cores, not in float64.

What a well-rounded kernel may be off need not be known to float64's last digits: of scores up to ``_MOST`` it is found
to about 1e-5, of itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attn_diag.reference.fused_inputs import Filled, FusedInputs, LaunchGrid
from attn_diag.reference.fused_products import TileWeight

# fp32 holds P of scores up to that.
_MOST = 2.0**9
_OF_OUT, _OF_DQ = TileWeight("probs_squared"), TileWeight("dscores_squared")


class FusedVariances(FusedInputs):
    """The heads of ``FusedHeads``, as that kernel takes them."""

    def variances(
        self, m: Tensor, delta: Tensor | None, a: Tensor, of_out: Tensor, of_dq: Tensor
    ) -> list[Tensor] | None:
        """What the errors of P and dS make of O and dQ; None where the kernel cannot tell.

        Args:
            m: The largest score of every row, finite, [H, Tq].
            delta: delta, [H, Tq]; None without dO.
            a, of_out, of_dq: diag(a) P_bar^2 + of_out [P_bar > 0] is the variance of P, diag(a) dS_bar^2 + of_dq
                [P_bar > 0] that of dS; [H, Tq] each. Only in fully masked rows a may be 0.

        Returns:
            The variance of P times V^2, [H, Tq, Dv], and with dO that of dS times K^2, [H, Tq, D]; float64.
        """
        if self.narrow is None or not (m.abs().max() < _MOST or self._ahead):
            return None
        from attn_diag.reference.triton_variances import variances_kernel

        (count, length, width), value_width = self.q.shape, self.v.shape[2]
        q, k, v, do = (*self.narrow, self.narrow[0])[:4]
        (v2, v_scale), (k2, k_scale) = (_parts(t.square(), self._owners) for t in (self.v, self.k))
        a = a.masked_fill(a == 0.0, 1.0)
        largest, weights = torch.ones_like(a), [_OF_OUT]
        if self.do is not None:
            largest = 2 * self.do.norm(dim=2) * self.v.norm(dim=2).amax(1)[self._owners.long(), None]
            largest, weights = largest.masked_fill(largest == 0.0, 1.0), [_OF_OUT, _OF_DQ]
        rows = torch.stack([of_out / a, 1 / largest, of_dq / (a * largest.square())]).float()
        made = [q.new_empty(count, length, t.shape[2], dtype=torch.float32) for t in (self.v, self.k)[: len(weights)]]
        tiling = self._tiling("variances", value_width, *weights)
        self._launch(
            variances_kernel, LaunchGrid(length, tiling.block_m, count, 1), tiling,
            [q, k, v, do, v2, k2, self._positions, self._owners, self._numbers.float(), *self._mask, m.float(),
             m.float() if delta is None else delta.float(), rows],
            [Filled(made[0], 1), Filled(made[-1], 1)],
            [length, self.k.shape[1], width, value_width, *self._reach, v2[0].numel(), k2[0].numel()],
        )  # fmt: skip
        scales = v_scale * a[..., None], k_scale * (a * largest.square())[..., None]
        return [t.double() * scale for t, scale in zip(made, scales, strict=False)]


def _parts(x: Tensor, owners: Tensor) -> tuple[Tensor, Tensor]:
    """Two BF16 parts of numbers [Hk, T, D] float64 that are not negative, and what their sum is times, [H, 1, D]."""
    exponents = torch.frexp(x.amax(1, keepdim=True)).exponent
    scaled = torch.ldexp(x, -exponents)
    first = scaled.bfloat16()
    parts = torch.stack([first, (scaled - first.double()).bfloat16()])
    return parts, torch.ldexp(torch.ones_like(x[:, :1]), exponents)[owners.long()]
