"""ALiBi slopes: a bias a head that grows with a key's distance, kept as its slope and never written out."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from attn_diag.captures.metadata import Metadata
from attn_diag.captures.sources import PACKING, TensorSource
from attn_diag.errors import InputError

SLOPES = "alibi_slopes"


def require_slopes(tensors: Mapping[str, TensorSource], metadata: Metadata, heads: int, batch: int) -> None:
    """Raise InputError where ALiBi slopes do not fit the capture.

    Args:
        tensors: By name.
        metadata: What is said of them.
        heads: Hq.
        batch: B; of packed sequences the number of documents counts.
    """
    slopes = tensors.get(SLOPES)
    if slopes is None:
        if metadata.alibi_origin != "row":
            raise InputError(
                f"alibi_origin={metadata.alibi_origin} says where ALiBi's bias is counted from, but there are no "
                f"'{SLOPES}'; add them, [{heads}]"
            )
        return
    items = batch if PACKING[0] not in tensors else tensors[PACKING[0]].shape[0] - 1
    if tuple(slopes.shape) not in ((heads,), (items, heads)):
        raise InputError(
            f"{SLOPES} must have shape [{heads}], one slope a query head, or [{items}, {heads}], got "
            f"{list(slopes.shape)}"
        )
    if slopes.dtype == torch.float64:
        values = slopes[...]
        if bool(((values.float().double() != values) & values.isfinite()).any()):
            raise InputError(f"{SLOPES} are float64 numbers that fp32 cannot hold; cast them to fp32, as kernels do")
