"""Heads whose absorbed rows (``reference.absorbed_rows``) count as rows that see no key. The host waits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from attn_diag.reference import Masking, absorbed_rows

# Half the fp32 spacing from here on, 64, is more than scores have: P is uniform.
_UNIFORM = -(2.0**30)
# What such rows are not described with.
_OTHERS = frozenset({"lse", "sinks", "alibi_slopes"})


def without_absorbed_rows(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, Any], *, fused: bool
) -> dict[str, Tensor]:
    """The tensors of a call, where absorbed rows see no key.

    What such a row with a gradient adds to dV is known where the backward's P is the forward's, and uniform: it has
    q = 0 and the same keys then, and dK is left out. Else dV is, too: a fused kernel's LSE has lost ln l.

    Args:
        tensors: By name, as in a capture.
        metadata: The call's.
        fused: See ``AttentionCall.fused``.
    """
    found, mask = dict(tensors), tensors.get("mask")
    if mask is None or mask.dtype == torch.bool or "cu_seqlens_k" in tensors:
        return found
    q, k_length = tensors["q"], tensors["k"].shape[2]
    masking = Masking(metadata["causal"], metadata["window"], positions=tensors.get("q_positions"))
    hidden = masking.hidden(masking.row_positions(q.shape[2], k_length, q.device), slice(0, k_length))
    absorbed = absorbed_rows(mask, hidden)
    found["mask"] = mask.masked_fill(absorbed, -torch.inf)
    absorbed = absorbed.expand(*q.shape[:3], 1)
    if "do" in tensors and bool((given := absorbed & (tensors["do"] != 0).any(-1, keepdim=True)).any()):
        found.pop("dk", None)
        added = mask if hidden is None else torch.where(hidden, -torch.inf, mask)
        top = added.amax(-1, keepdim=True)
        beyond = bool((given & (top > _UNIFORM)).any())
        if fused or beyond or metadata["softcap"] is not None or _OTHERS & tensors.keys():
            found.pop("dv", None)
        else:
            uniform = torch.zeros_like(added).masked_fill(added != top, -torch.inf)
            found["mask"] = torch.where(given, uniform, found["mask"])
            found["q"] = q.masked_fill(given, 0.0)
            absorbed = absorbed & ~given
    for name in ("o", "do", "dq"):
        if name in found:
            found[name] = found[name].masked_fill(absorbed, 0.0)
    if "lse" in found and "sinks" not in found:
        found["lse"] = found["lse"].masked_fill(absorbed[..., 0], -torch.inf)
    return found
