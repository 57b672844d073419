"""A cache of keys in pages: read as packed sequences, whose keys are gathered from the pages when they are needed.

``page_table`` [B, pages of a sequence] says in which pages of k and v, [pages, page size, Hk, D] whatever the layout of
q, a sequence's keys lie, and ``cache_seqlens`` [B] how many it has; entries behind those are not looked at. Layouts:
flash_attn_with_kvcache of flash_attn/flash_attn_interface.py, docs/tutorials/kv_layout.rst ("NHD") of FlashInfer,
csrc/flash_attn/flash_api.cpp (mha_varlen_fwd with block_table) of vllm-project/flash-attention.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from attn_diag.captures.documents import first_of, require_integers
from attn_diag.captures.sources import CACHE, OBSERVED, PACKING, TensorSource
from attn_diag.errors import InputError

_ALIASES = {
    **dict.fromkeys(("block_table", "block_tables", "page_tables"), "page_table"),
    **dict.fromkeys(("seqused_k", "context_lens", "cache_lens"), "cache_seqlens"),
}
_ROWS = ("q", "o", "do", "dq", "dq_pre", "lse", "delta", "x")


@dataclass(frozen=True)
class PagedKeys:
    """k or v of all sequences one after the other, [1, H, keys, D] or [1, keys, H, D], read from pages."""

    pool: TensorSource
    """[pages, page size, Hk, D]."""
    pages: tuple[tuple[int, ...], ...]
    """Of each sequence, the pages that hold its keys."""
    lengths: tuple[int, ...]
    """Of each sequence, how many keys it has."""
    head_axis: int
    """1 or 2, where the heads are."""

    @property
    def page_size(self) -> int:
        """Keys of a page."""
        return self.pool.shape[1]

    @property
    def span(self) -> tuple[int, int]:
        """The fewest and the most keys of a sequence."""
        return min(self.lengths), max(self.lengths)

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of all axes."""
        _, _, heads, features = self.pool.shape
        total = sum(self.lengths)
        return (1, heads, total, features) if self.head_axis == 1 else (1, total, heads, features)

    @property
    def dtype(self) -> torch.dtype:
        """Type of the stored values."""
        return self.pool.dtype

    def __getitem__(self, index: Any) -> Tensor:
        place = index if isinstance(index, tuple) else (index,)
        token_axis = 3 - self.head_axis
        plain = len(place) == 3 and isinstance(place[0], int) and isinstance(place[self.head_axis], int)
        if plain and isinstance(place[token_axis], slice) and place[token_axis].step is None:
            return self._keys(place[self.head_axis], *place[token_axis].indices(sum(self.lengths))[:2])
        every = torch.stack(
            [self._keys(h, 0, sum(self.lengths)) for h in range(self.pool.shape[2])], self.head_axis - 1
        )
        return every[None] if index is Ellipsis else every[None][index]

    def page(self, number: int, head: int) -> Tensor:
        """One page of one head, [page size, D]."""
        return self.pool[number, :, head]

    def _keys(self, head: int, first: int, last: int) -> Tensor:
        """Keys first to last - 1 of all, [keys, D]."""
        found, start = [], 0
        for pages, length in zip(self.pages, self.lengths, strict=True):
            begin, end = max(first - start, 0), min(last - start, length)
            for slot in range(begin // self.page_size, -(-end // self.page_size) if end > begin else 0):
                inside = slice(max(begin - slot * self.page_size, 0), min(end - slot * self.page_size, self.page_size))
                found.append(self.pool[pages[slot], inside, head])
            start += length
        return torch.cat(found) if found else self.pool[0, :0, head]


def with_pages(tensors: Mapping[str, TensorSource], layout: str) -> Mapping[str, TensorSource]:
    """The tensors as packed sequences where their keys lie in pages, or fill a part of a cache.

    Args:
        tensors: By name; ``block_table`` and ``seqused_k`` (vLLM) stand for ``page_table`` and ``cache_seqlens``.
            Without a page table each sequence of k and v, laid out as q, has so many keys. q [B, Hq, D] has one row a
            sequence, and its LSE is [B, Hq] then (FlashInfer).
        layout: Of q: "BHTD" or "BTHD".

    Returns:
        The tensors by name, k and v as ``PagedKeys``.

    Raises:
        InputError: The table and the lengths do not fit each other or the pages, or there are gradients of k and v.
    """
    if "q" not in tensors or not {"k", "v"} <= tensors.keys() or isinstance(tensors["k"], PagedKeys):
        return tensors
    found = dict(tensors)
    for alias, name in _ALIASES.items():
        if alias in found:
            if name in found:
                raise InputError(f"{alias!r} and {name!r} are one thing; expected one of them")
            found[name] = found.pop(alias)
    if not any(name in found for name in CACHE):
        return tensors
    _refuse(found)
    if "cache_seqlens" not in found:
        raise InputError("page_table is there but 'cache_seqlens' is missing: how many keys each sequence has, [B]")
    count = found[PACKING[0]].shape[0] - 1 if PACKING[0] in found else found["q"].shape[0]
    lengths = _integers(found["cache_seqlens"], "cache_seqlens").flatten()
    lengths = lengths.expand(count) if lengths.numel() == 1 else lengths
    if len(lengths) != count:
        raise InputError(f"cache_seqlens must have shape [{count}], one length a sequence, got [{len(lengths)}]")
    if "page_table" not in found:
        _make_pool(found, layout, count)
    pages = _pages(found, lengths.tolist(), count)
    head_axis = 1 if layout == "BHTD" else 2
    for name in ("k", "v"):
        found[name] = PagedKeys(found[name], pages, tuple(lengths.tolist()), head_axis)
    _one_after_the_other(found, layout, count)
    found["cache_seqlens"] = lengths.clone()
    found["cu_seqlens_k"] = torch.tensor([0, *accumulate(lengths.tolist())])
    return found


def stored(tensors: Mapping[str, TensorSource]) -> dict[str, TensorSource]:
    """The tensors as a file holds them: the pages themselves, and no borders of keys that follow from lengths."""
    if not isinstance(tensors.get("k"), PagedKeys):
        return dict(tensors)
    whole = {name: t.pool if isinstance(t, PagedKeys) else t for name, t in tensors.items()}
    return {name: t for name, t in whole.items() if name != "cu_seqlens_k"}


def _refuse(found: Mapping[str, TensorSource]) -> None:
    """Raise InputError for what a cache in pages cannot have beside it."""
    for name in found:
        if name.rpartition(".")[2] in ("dk", "dv"):
            raise InputError(
                f"{name}: gradients of a cache are not supported; leave dk and dv out, or give k and v of each "
                "sequence without page_table and cache_seqlens"
            )
    if "mask" in found:
        raise InputError("mask: not supported beside page_table and cache_seqlens; give contiguous k and v with it")


def _integers(source: TensorSource, name: str) -> Tensor:
    require_integers(name, source.dtype)
    return source[...].to("cpu", torch.int64)


def _make_pool(found: dict[str, TensorSource], layout: str, count: int) -> None:
    """Each sequence's part of k and v as one page."""
    for name in ("k", "v"):
        shape = found[name].shape
        if len(shape) != 4 or shape[0] != count:
            raise InputError(
                f"{name} must have shape [{', '.join(layout)}] with B = {count} where cache_seqlens come without a "
                f"page_table, got {list(shape)}"
            )
        if layout == "BHTD":
            found[name] = found[name][...].transpose(1, 2)
    found["page_table"] = torch.arange(count)[:, None]


def _pages(found: Mapping[str, TensorSource], lengths: Sequence[int], count: int) -> tuple[tuple[int, ...], ...]:
    """Of each sequence, its pages. Raises InputError where they are not there."""
    table, k, v = _integers(found["page_table"], "page_table"), found["k"].shape, found["v"].shape
    if table.dim() != 2 or len(table) != count:
        raise InputError(f"page_table must have shape [{count}, pages of a sequence], got {list(table.shape)}")
    if len(k) != 4 or len(v) != 4 or k[:3] != v[:3] or 0 in (*k, *v):
        raise InputError(
            f"k and v in pages must have shape [pages, page size, Hk, D], got {list(k)} and {list(v)}; FlashInfer's "
            'kv_layout "HND" is permuted by .transpose(1, 2)'
        )
    rows = []
    for item, length in enumerate(lengths):
        used = -(-length // k[1])
        if length < 0 or used > table.shape[1]:
            room = table.shape[1] * k[1]
            raise InputError(f"cache_seqlens[{item}] is {length}; page_table has room for 0 to {room} keys")
        row = table[item, :used].tolist()
        for slot, page in enumerate(row):
            if not 0 <= page < k[0]:
                raise InputError(
                    f"page_table[{item}, {slot}] is {page}, and sequence {item} has {length} keys in pages of {k[1]}: "
                    f"expected a page from 0 to {k[0] - 1}"
                )
        rows.append(tuple(row))
    if not any(lengths):
        raise InputError(f"cache_seqlens are all 0: {first_of(list(lengths))}; no sequence has a key")
    return tuple(rows)


def _one_after_the_other(found: dict[str, TensorSource], layout: str, count: int) -> None:
    """Put the sequences' rows one after the other, as packed ones are."""
    if PACKING[0] in found:
        return
    single = len(found["q"].shape) == 3
    places = list(found["q"].shape[:-1])
    rows = 1 if single else places[layout.index("T")]
    for name, source in list(found.items()):
        base = name.rpartition(".")[2]
        if base not in _ROWS or (base in OBSERVED and len(source.shape) < 2) or source.shape[0] != count:
            continue
        t = source[...]
        if base in ("o", "do", "dq") and list(t.shape[:-1]) != places:
            axes = "B, H, D" if single else ", ".join(layout)
            raise InputError(f"{name} must be laid out as q, [{axes}] = {[*places, t.shape[-1]]}, got {list(t.shape)}")
        if single:
            found[name] = t.T if base in ("lse", "delta") else t
        elif base in ("lse", "delta") or (layout == "BHTD" and base != "x"):
            found[name] = t.transpose(0, 1).flatten(1, 2)[None]
        else:
            found[name] = t.flatten(0, 1)[None]
    found["cu_seqlens_q"] = torch.arange(count + 1) * rows
