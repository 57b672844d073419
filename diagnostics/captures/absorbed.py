"""Absorbed rows (``reference.absorbed_rows``) of a capture count as rows that see no key, as of left-padded batches.

What such a row with a gradient adds to dV is known where the backward's P is the forward's, and uniform: it has q = 0
and the same keys then, and dK is left out. Else dV is, too: a fused kernel's LSE has lost ln l.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from attn_diag.captures.capture import Capture
from attn_diag.captures.mask_gradient import GRADIENT
from attn_diag.captures.sources import FP8, TensorSource
from attn_diag.reference import Masking, absorbed_rows
from attn_diag.results.wording import plural

# Half the fp32 spacing from here on, 64, is more than scores have: P is uniform.
_UNIFORM = -(2.0**30)
# How names of kernels end that are plain torch: transformers' eager attention, SDPA's math, nn.MultiheadAttention's.
_PLAIN = ("eager", "math", "multi_head_attention_forward")
# Of these rows nothing is compared.
_BY_ROW = ("o", "do", "dq", "dq_pre")


def is_fused(kernel: str | None) -> bool:
    """Whether a kernel's backward may take delta from O and make P again; that of plain torch does not."""
    return (kernel or "").rpartition(" ")[2] not in _PLAIN


@dataclass(frozen=True)
class WithoutAbsorbedRows:
    """A capture in which absorbed rows see no key."""

    capture: Capture
    unknown: Mapping[int, frozenset[str]] = field(default_factory=dict)
    """Gradients by key, and of the mask, of which the rows' part is not known, by batch item."""

    def items_by_output(self, batches: Sequence[int]) -> dict[str, list[int]]:
        """Those of some batch items of which a gradient's part is not known, by its name."""
        outputs = {output for batch in batches for output in self.unknown.get(batch, ())}
        return {output: [b for b in batches if output in self.unknown.get(b, ())] for output in outputs}

    @classmethod
    def of(cls, capture: Capture) -> WithoutAbsorbedRows:
        """Look for absorbed rows; a capture without any is itself. One with sinks, to which such rows attend, too."""
        mask = capture.tensors.get("mask")
        if mask is None or not mask.dtype.is_floating_point or mask.dtype in FP8:
            return cls(capture)
        if capture.documents is not None or capture.has_sinks:
            return cls(capture)
        added = _with_four_axes(mask[...])
        hidden = _hidden(capture, added.device)
        absorbed = absorbed_rows(added, hidden)
        if not bool(absorbed.any()):
            return cls(capture)
        absorbed = _of_numbers(capture, absorbed)
        return _without(capture, added, hidden, absorbed)


def _without(capture: Capture, added: Tensor, hidden: Tensor | None, absorbed: Tensor) -> WithoutAbsorbedRows:
    """``added`` has four axes; ``absorbed``: bool [B or 1, Hq or 1, Tq or 1, 1]."""
    tensors, rows = dict(capture.tensors), int(absorbed.expand(-1, -1, capture.q_length, 1).sum())
    mask, unknown = added.masked_fill(absorbed, -torch.inf), frozenset[str]()
    given = _given(capture, absorbed)
    where = given.flatten(1).any(1).nonzero()[:, 0].tolist()
    if where:
        # Whoever shares a mask has the same rows.
        alike = given.amax(tuple(axis for axis in (0, 1) if absorbed.shape[axis] == 1), keepdim=True)
        seen = added if hidden is None else torch.where(hidden, -torch.inf, added)
        top = seen.amax(-1, keepdim=True)
        unknown = frozenset(("dk", "dkv", GRADIENT))
        uniform = not bool((alike & (top > _UNIFORM)).any()) and capture.metadata.softcap is None
        if uniform and "alibi_slopes" not in tensors and not is_fused(capture.metadata.kernel):
            same = torch.zeros_like(seen).masked_fill(seen != top, -torch.inf)
            mask = torch.where(alike, same, mask)
            tensors["q"] = _Filled(tensors["q"], _in_layout(capture, alike), 0.0)
            absorbed = absorbed & ~alike
        else:
            unknown |= {"dv"}
    tensors["mask"] = mask.view(tuple(tensors["mask"].shape)) if mask.shape == added.shape else mask
    for name in list(tensors):
        output = name.rpartition(".")[2]
        if output == GRADIENT and (where or mask.shape != added.shape):
            del tensors[name]
        elif output in ("lse", "delta"):
            tensors[name] = _Filled(tensors[name], absorbed[..., 0], -math.inf if output == "lse" else 0.0)
        elif output in _BY_ROW:
            tensors[name] = _Filled(tensors[name], _in_layout(capture, absorbed), 0.0)
    said = f"{plural(rows, 'row')} to which the mask leaves no key, but for finite numbers, count as rows without keys"
    found = replace(capture, tensors=tensors, assumed=(*capture.assumed, said))
    return WithoutAbsorbedRows(found, dict.fromkeys(where, unknown))


def _of_numbers(capture: Capture, absorbed: Tensor) -> Tensor:
    """Without rows whose O or dQ is NaN or Inf, which a kernel makes of no finite mask."""
    for name in capture.tensors:
        if name.rpartition(".")[2] in ("o", "dq"):
            finite = _in_layout(capture, capture.tensors[name][...]).isfinite().all(-1, keepdim=True)
            if not bool(finite.all()):
                absorbed = absorbed & finite.to(absorbed.device)
    return absorbed


def _given(capture: Capture, absorbed: Tensor) -> Tensor:
    """Which of the rows ``absorbed`` have a gradient, bool [B, Hq, Tq, 1]."""
    if "do" not in capture.tensors:
        return torch.zeros_like(absorbed)
    do = _in_layout(capture, capture.tensors["do"][...].to(absorbed.device))
    return absorbed & (do != 0).any(-1, keepdim=True)


def _hidden(capture: Capture, device: torch.device) -> Tensor | None:
    """What causality and the window hide, bool [Tq, Tk]."""
    m, (q_length, k_length) = capture.metadata, capture.lengths(0)
    masking = Masking(m.causal, m.window, positions=capture.q_positions(0))
    return masking.hidden(masking.row_positions(q_length, k_length, device), slice(0, k_length))


def _with_four_axes(mask: Tensor) -> Tensor:
    return mask[(None,) * (4 - mask.ndim)]


def _in_layout(capture: Capture, rows: Tensor) -> Tensor:
    """From [B, H, T, _] to the capture's layout, or back."""
    return rows if capture.metadata.layout == "BHTD" else rows.transpose(1, 2)


@dataclass(frozen=True)
class _Filled:
    """A tensor with one value in place of what is finite at some places; it may still lie in a file."""

    source: TensorSource
    where: Tensor
    """bool, as wide as the source or broadcast to it."""
    value: float

    @property
    def shape(self) -> tuple[int, ...]:
        return self.source.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.source.dtype

    def __getitem__(self, index: Any) -> Tensor:
        found = self.source[index]
        where = self.where.expand(*self.shape)[index].to(found.device)
        return found.masked_fill(where & found.isfinite(), self.value)
