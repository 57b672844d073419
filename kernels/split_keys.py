"""What independent splits of the keys are merged to, after the forward kernel."""

from __future__ import annotations

import torch
from torch import Tensor


def merge_splits(
    o: Tensor, lse: Tensor, rows: Tensor, factor: float, dtype: torch.dtype, sinks: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Independent splits (first dimension) weighted by exp(L_i - L), in fp32; ``near`` becomes an upper bound."""
    merged_lse = torch.logsumexp(lse, 0)
    weights = torch.where(lse == -torch.inf, 0.0, torch.exp(lse - merged_lse))
    merged = (weights[..., None] * o).sum(0)
    if sinks is not None:  # one more split, whose O is 0
        keys_lse, merged_lse = merged_lse, torch.logaddexp(merged_lse, sinks[:, None])
        seen = merged_lse > -torch.inf  # not so without keys, where the sink is -inf too
        merged *= torch.where(seen, torch.exp(keys_lse - merged_lse), 0.0)[..., None]
    if rows.numel():
        m = rows[0].amax(0)
        rescale = torch.where(lse == -torch.inf, 0.0, torch.exp((rows[0] - m) * factor))
        rounding_error = (merged.to(dtype).float() - merged).sum(-1)
        row_sum, near, cast_sum = ((rescale * rows[1]).sum(0), rows[2].sum(0), (rescale * rows[3]).sum(0))
        row_sum = row_sum if sinks is None else row_sum + torch.exp(sinks[:, None] - m * factor)
        rows = torch.stack([m, row_sum, near, cast_sum, rounding_error])
    return merged, merged_lse, rows
