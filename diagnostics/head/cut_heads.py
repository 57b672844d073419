"""A document's rows with the keys that another cut into documents lets them see."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from attn_diag.captures.capture import Capture
from attn_diag.captures.documents import Document
from attn_diag.head.other_documents import OtherDocuments, is_masked, merged
from attn_diag.head.read import read_head
from attn_diag.reference import AttentionHead, Masking

# Of a mask that is written out.
_MOST_SCORES = 2**27


def read_cut(
    capture: Capture, cut: OtherDocuments, batch: int, head: int, device: torch.device
) -> AttentionHead | None:
    """The rows of one document with the keys that another cut lets them see.

    Args:
        capture: Of packed sequences.
        cut: The other documents.
        batch: Index of the document in the capture.
        head: Index of the query head.
        device: Where it is to be.

    Returns:
        The head; None where masks or positions make it unknown, or it is too large.
    """
    assert capture.documents is not None
    own, whole = capture.documents[batch], merged(capture)
    if whole is None or is_masked(capture):
        return None
    parts = [d for d in cut.documents if d.rows.start < own.rows.stop and own.rows.start < d.rows.stop]
    span = slice(parts[0].keys.start, parts[-1].keys.stop)
    rows, width = own.lengths[0], span.stop - span.start
    masking = Masking(capture.metadata.causal, capture.metadata.window)
    first = own.rows.start
    if len(parts) == 1:
        shift = masking.shift(*parts[0].lengths)
        at = torch.arange(rows, device=device) + (first - parts[0].rows.start + shift)
        masking = replace(masking, positions=at)
    elif rows * width > _MOST_SCORES or "alibi_slopes" in capture.tensors:
        return None
    else:
        masking = Masking(mask=torch.cat([_visible(masking, part, own, span, device) for part in parts]))
    inputs, kv = read_head(capture, batch, head, device).head, head // (capture.q_heads // capture.kv_heads)
    every = whole.of(capture)
    k, v = (_read(every, name, kv, span, device) * capture.descale(name, batch, kv) for name in "kv")
    return replace(inputs, k=k, v=v, masking=replace(masking, alibi=inputs.masking.alibi))


def _visible(masking: Masking, part: Document, own: Document, span: slice, device: torch.device) -> Tensor:
    """Which keys of the ``span`` the rows of ``own`` in this ``part`` see, bool [rows, keys]."""
    rows = torch.arange(max(part.rows.start, own.rows.start), min(part.rows.stop, own.rows.stop), device=device)
    found = torch.zeros(len(rows), span.stop - span.start, dtype=torch.bool, device=device)
    hidden = masking.hidden(rows - part.rows.start + masking.shift(*part.lengths), slice(0, part.lengths[1]))
    inside = slice(part.keys.start - span.start, part.keys.stop - span.start)
    found[:, inside] = True if hidden is None else ~hidden
    return found


def _read(capture: Capture, name: str, head: int, span: slice, device: torch.device) -> Tensor:
    stored = capture.read(name, 0, head)
    assert stored is not None
    part = stored[span]
    return (part.float() if part.dtype.itemsize == 1 else part).to(device).double().contiguous()
