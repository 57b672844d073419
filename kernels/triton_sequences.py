"""The sequences of a call beyond its tensors' shapes: borders of packed documents, keys in pages, ALiBi's slopes.

Packed documents are rows of one tensor, q [1, H, total, D]; document i has the rows cu_seqlens[i] to
cu_seqlens[i + 1] - 1. A grid has as many blocks of rows as documents can have in all, whatever their lengths, so that
the host need not know these; a block finds its document by itself. Rows behind the last document count as one more,
which sees nothing of the other tensor, so that they are written too (0; L = -inf).

Keys in pages are those of documents of query rows: k is [pages, Hk, page size, D], and instead of borders a document
has a number of keys, and a row of the page table.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from attn_diag.kernels.geometry import Geometry, Visibility
from attn_diag.kernels.recipe import Recipe


@triton.jit
def sequence_of(block, b, length, other_length, cu_ptr, other_ptr, documents, BLOCK: tl.constexpr,
                G: tl.constexpr):  # fmt: skip
    """The sequence that a block of BLOCK rows is of, and where it lies; of a list of blocks, that of number ``block``.

    ``cu_ptr``: documents' borders in the tensor with the blocks (of all that documents can have, see ``first_block``),
    of ``length`` rows; ``other_ptr``: in the other one; their numbers of keys, where these lie in pages. A row counts
    once for each head of G.group, in what is returned too.

    Returns (batch item or document, block in it, its first row, its rows, its first row in the other tensor, its rows
    there); no rows where the document has fewer blocks.
    """
    if G.listed:
        block = tl.load(cu_ptr + block)
    item = b
    length *= G.group
    first = 0
    other = 0
    if G.documents:
        item = -1
        for chunk in range(0, documents + 1, G.documents):
            i = chunk + tl.arange(0, G.documents)
            begin = tl.load(cu_ptr + i, mask=i <= documents, other=0) * G.group
            item += tl.sum(((i <= documents) & (first_block(begin, i, BLOCK) <= block)).to(tl.int32), 0)
        # Borders on a GPU are not checked: whatever they are, nothing is written outside.
        item = tl.maximum(item, 0)
        first = tl.load(cu_ptr + item) * G.group
        end = tl.load(cu_ptr + tl.minimum(item + 1, documents)) * G.group
        length = tl.where(item == documents, length, tl.minimum(end, length)) - first
        block -= first_block(first, item, BLOCK)
        length = tl.where((block >= 0) & (block * BLOCK < length), length, 0)
        if G.page_size:
            other_length = tl.load(other_ptr + item, mask=item < documents, other=0)
        else:
            other = tl.load(other_ptr + item)
            other_end = tl.load(other_ptr + tl.minimum(item + 1, documents))
            other_length = tl.maximum(tl.minimum(other_end, other_length) - other, 0)
    return item, block, first, length, other, other_length


@triton.jit
def first_block(begin, document, BLOCK: tl.constexpr):
    """Of the blocks of all documents, the first that may be of the one that begins at row ``begin``.

    A document has at most one block more than its rows fill, so that those before it have no more than this in all.
    """
    return begin // BLOCK + document


@triton.jit
def head_slope(slopes_ptr, item, documents, h, stride, G: tl.constexpr):
    """ALiBi's slope of one head of a sequence; 0 where there is none, and for rows behind the last document."""
    slope = 0.0
    if G.alibi != "none":
        if G.documents:
            slope = tl.load(slopes_ptr + item * stride + h, mask=item < documents, other=0.0)
        else:
            slope = tl.load(slopes_ptr + item * stride + h)
    return slope


@dataclass(frozen=True)
class Sequences:
    """What a call's kernels are told of its sequences; nothing for dense ones."""

    cu_q: Tensor | None = None
    """Borders of q's documents, int32 [documents + 1], contiguous."""
    cu_k: Tensor | None = None
    """Of k's and v's; where these lie in pages, how many keys each document has, int32 [documents]."""
    slopes: Tensor | None = None
    """ALiBi's, fp32 [Hq], or [B, Hq] ([documents, Hq])."""
    table: Tensor | None = None
    """Of keys in pages: which pages each document's keys lie in, int32 [documents, most pages], contiguous."""
    listed: Tensor | None = None
    """Of dense sequences, the only blocks of rows that are run, int32, ascending; None: all."""

    @property
    def packed(self) -> bool:
        """Whether there are documents."""
        return self.cu_q is not None

    @property
    def documents(self) -> int:
        """How many there are; 1 of dense sequences."""
        return 1 if self.cu_q is None else max(len(self.cu_q) - 1, 1)

    @property
    def _at_once(self) -> int:
        """Documents that a block of rows looks at at once to find its own: a warp's threads do, if there are so few."""
        if self.cu_q is None:
            return 0
        return 32 if len(self.cu_q) <= 32 else 512

    def extended(self, geometry: Geometry, recipe: Recipe, visibility: Visibility, *keys: Tensor) -> Geometry:
        """The geometry of a kernel for these sequences; ``keys``: k, and v where it is read, which may be in pages."""
        geometry = replace(geometry, documents=self._at_once)
        if self.table is not None:
            size = keys[0].shape[2]
            # A descriptor finds a page by its first row.
            rows = all(t.stride(0) % t.stride(2) == 0 for t in keys)
            geometry = replace(geometry, page_size=size, tma=geometry.tma and size % geometry.block_n == 0 and rows)
        if self.slopes is None:
            return geometry
        alibi: Any = visibility.alibi_origin
        if alibi == "row":
            alibi = "behind" if visibility.reach()[1] == 0 else "distance"
        # A bias comes after the scores' rounding: rounded, m is not their maximum any more.
        near = geometry.track_near and recipe.row_max == "fp32"
        return replace(geometry, alibi=alibi, track_near=near)

    def most_keys(self, k: Tensor) -> int:
        """The keys of k [B, Hk, Tk, D]; of one in pages, how many a document can have."""
        return k.shape[2] if self.table is None else k.shape[2] * self.table.shape[1]

    def pages(self, k: Tensor) -> tuple[Tensor, int]:
        """What the kernels take as "table_ptr" and "stride_table"."""
        if self.table is None:
            return torch.empty(0, dtype=torch.int32, device=k.device), 0
        return self.table, self.table.stride(0)

    def blocks(self, length: int, block: int) -> int:
        """Blocks of rows (at most) of a tensor of ``length`` rows, the rest behind the last document included."""
        if self.listed is not None:
            return len(self.listed)
        if self.cu_q is None:
            return -(-length // block)
        return length // block + len(self.cu_q)

    def arguments(
        self, recipe: Recipe, visibility: Visibility, q: Tensor, k: Tensor, *, scale: float, softcap: float | None
    ) -> tuple[Any, ...]:
        """What the kernels take from "q_length" to "stride_slopes"."""
        lengths = q.shape[2], self.most_keys(k)
        # Of documents a kernel knows the lengths itself: it multiplies their difference by this shift.
        view = visibility.arguments(*((0, 1) if self.packed else lengths))
        unused = torch.empty(0, device=q.device)
        slopes, stride = unused, 0
        if self.slopes is not None:
            slopes = self.slopes
            if recipe.alpha == "in-exponent" and softcap is None:
                slopes = (slopes.double() / scale).float()  # the scores still lack alpha
            slopes = slopes.contiguous()
            stride = q.shape[1] if slopes.ndim == 2 else 0
        documents = 0 if self.cu_q is None else len(self.cu_q) - 1
        listed = unused if self.listed is None else self.listed
        borders = (listed, unused) if self.cu_q is None else (self.cu_q, self.cu_k)
        return *lengths, *view, *borders, documents, slopes, stride


DENSE = Sequences()
