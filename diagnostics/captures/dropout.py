"""Dropout of attention's probabilities: which of them a kernel kept, one bool a score."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from attn_diag.captures.metadata import Metadata
from attn_diag.captures.sources import PACKING, TensorSource
from attn_diag.errors import InputError

KEPT = "dropout_mask"


def require_dropout(tensors: Mapping[str, TensorSource], metadata: Metadata, shape: Sequence[int]) -> None:
    """Raise InputError where what is said of dropout does not fit the capture.

    Args:
        tensors: By name.
        metadata: What is said of them.
        shape: [B, Hq, Tq, Tk].
    """
    kept, p = tensors.get(KEPT), metadata.dropout_p
    if kept is None:
        if p:
            raise InputError(
                f"dropout_p={p:g} without '{KEPT}': which probabilities were kept cannot be told from p, nor from a "
                f"seed; add '{KEPT}', bool {list(shape)} (True: kept), or capture with dropout 0 (model.eval())"
            )
        return
    if not p:
        raise InputError(f"'{KEPT}' without dropout_p: state in the metadata how many are dropped in the mean")
    if kept.dtype != torch.bool:
        raise InputError(
            f"{KEPT} must be bool, True where a probability is kept, got {str(kept.dtype).removeprefix('torch.')}; "
            "of FlashAttention's S_dmask it is S_dmask >= 0"
        )
    if PACKING[0] in tensors:
        raise InputError(f"{KEPT}: not supported beside packed sequences or pages; give each sequence by itself")
    if tuple(kept.shape) != tuple(shape):
        raise InputError(f"{KEPT} must have shape [B, Hq, Tq, Tk] = {list(shape)}, got {list(kept.shape)}")
