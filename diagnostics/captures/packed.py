"""The ways in which packed sequences are said to be packed, made into one: cu_seqlens_q and cu_seqlens_k."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attn_diag.captures.documents import first_of, require_integers
from attn_diag.captures.sources import CACHE, OBSERVED, PACKING, TensorSource
from attn_diag.errors import InputError

# [total, H, D], as flash_attn's varlen functions have them; of the others the first axis is the batch, or lacks.
_TOKENS = ("q", "k", "v", "do", "o", "dq", "dk", "dv", "dkv", "dq_pre")


@dataclass(frozen=True)
class Lifted:
    """A tensor with a first axis of one place in front."""

    source: TensorSource

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of all axes."""
        return (1, *self.source.shape)

    @property
    def dtype(self) -> torch.dtype:
        """Type of the stored values."""
        return self.source.dtype

    def __getitem__(self, index: Any) -> Tensor:
        if isinstance(index, tuple) and len(index) > 1 and index[0] in (0, -1):
            return self.source[index[1:]]
        return self.source[...][None][index]


def is_packed(tensors: Mapping[str, TensorSource]) -> bool:
    """Whether these tensors of a capture hold several documents along one axis."""
    return any(name in tensors for name in PACKING)


def with_cu_seqlens(tensors: Mapping[str, TensorSource]) -> Mapping[str, TensorSource]:
    """The tensors with ``cu_seqlens_q`` and ``cu_seqlens_k`` where they are packed, each with a batch axis.

    Args:
        tensors: By name. ``cu_seqlens`` stands for both; ``cu_seqlens_q`` alone is that of the keys too; so do
            ``position_ids`` [total] or [1, total] that restart at 0.

    Raises:
        InputError: The position_ids restart, and yet do not count 0, 1, 2, … in every document.
    """
    found = dict(tensors)
    both = found.pop("cu_seqlens", None)
    if both is None and not is_packed(found) and "q" in found and "position_ids" in found:
        both = _of_positions(found["position_ids"])
        if both is not None:
            del found["position_ids"]
    if both is not None:
        found = {"cu_seqlens_q": both, "cu_seqlens_k": both, **found}
    if not is_packed(found):
        return tensors
    if "cu_seqlens_q" in found:
        found.setdefault("cu_seqlens_k", found["cu_seqlens_q"])
    for name, tensor in found.items():
        base = name.rpartition(".")[2]
        axes = 4 if base in _TOKENS else 3 if base in (*OBSERVED, "x") else 0
        if len(tensor.shape) == axes - 1:
            found[name] = tensor[None] if isinstance(tensor, Tensor) else Lifted(tensor)
    return found


def may_be_packed(tensors: Mapping[str, TensorSource]) -> bool:
    """Whether q [total, H, D], a layout of its own whatever is stated, may stand for documents."""
    return is_packed(tensors) or any(name in tensors for name in ("cu_seqlens", "position_ids", *CACHE, "block_table"))


def _of_positions(source: TensorSource) -> Tensor | None:
    """cu_seqlens of position_ids; None where they do not restart, or are those of several batch items."""
    if len(source.shape) not in (1, 2) or (len(source.shape) == 2 and source.shape[0] != 1):
        return None
    positions = source[...].flatten()
    require_integers("position_ids", positions.dtype)
    starts = (positions == 0).nonzero()[:, 0]
    if not len(positions) or not bool((starts > 0).any()):
        return None
    steps = positions.diff()
    if int(positions[0]) != 0 or not bool(((steps == 1) | (positions[1:] == 0)).all()):
        raise InputError(
            "position_ids must count 0, 1, 2, … and begin again at 0 with every document, got "
            f"{first_of(positions.tolist())}; give cu_seqlens_q and cu_seqlens_k, or leave them out"
        )
    return torch.cat([starts, starts.new_tensor([len(positions)])]).to(torch.int64)
