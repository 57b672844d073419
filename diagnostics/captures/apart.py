"""One of a capture's packed or paged sequences as a capture of its own, for kernels that are run on one."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from attn_diag.captures.capture import Capture
from attn_diag.captures.sources import CACHE, KEYED, PACKING

ITEM = "batch_item"
"""The key of the metadata that says which it was."""
_KEYS = ("k", "v", *KEYED)
_HEADS = ("q", "o", "do", "dq", "dq_pre", "lse", "delta", *_KEYS)


def alone(capture: Capture, batch: int) -> Capture:
    """One document, or one sequence of a cache in pages, by itself.

    Args:
        capture: Of packed sequences.
        batch: Index of the batch item.

    Returns:
        A capture of one sequence, [1, H, T, D]; the same one where there are no packed sequences.
    """
    if capture.documents is None:
        return capture
    document, tensors = capture.documents[batch], dict[str, Tensor]()
    for name, source in capture.tensors.items():
        base = name.rpartition(".")[2]
        if base in (*PACKING, *CACHE):
            continue
        if base in _HEADS:
            heads = capture.kv_heads if base in _KEYS else capture.q_heads
            parts = [found for h in range(heads) if (found := capture.read(name, batch, h)) is not None]
            tensors[name] = torch.stack(parts)[None]
        elif base == "x":
            tensors[name] = capture.read_x(batch)[None]
        elif base == "mask":
            lead = source.shape[-3] if len(source.shape) > 2 else 1
            masks = [mask[0] for h in range(lead) if (mask := capture.mask(batch, h)) is not None]
            tensors[name] = torch.stack(masks)[None]
        elif base == "q_positions":
            tensors[name] = source[document.rows]
        elif (base.endswith("_descale") or base == "alibi_slopes") and len(source.shape) == 2 and source.shape[0] > 1:
            tensors[name] = source[document.number : document.number + 1]
        elif base != "dsinks":  # a sum over all sequences
            tensors[name] = source[...]
    metadata = replace(capture.metadata, layout="BHTD", extra={**capture.metadata.extra, ITEM: str(batch)})
    return Capture(tensors, metadata, capture.source, capture.assumed)
