"""Decoding from a cache in pages as a correctly rounding kernel does it, and with mistakes in what is read."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attn_diag.captures.capture import Capture

SIZE, HEADS, KV_HEADS, D = 16, 4, 2, 32


@dataclass(frozen=True)
class Cache:
    """Pages, and which of them a kernel reads."""

    q: Tensor
    k: Tensor
    v: Tensor
    table: list[list[int]]
    lengths: list[int]
    gone: tuple[int, int, int] = (0, 0, 0)
    """Sequence, first key and the one after the last that are not seen."""

    def outputs(self) -> dict[str, Tensor]:
        """O and LSE, bottom-right causal, each rounded once."""
        rows, lse = self.q.shape[2], torch.empty(self.q.shape[:3])
        o = torch.zeros_like(self.q)
        for b, (pages, length) in enumerate(zip(self.table, self.lengths, strict=True)):
            keys, values = (x[pages].flatten(0, 1)[:length].double() for x in (self.k, self.v))
            hidden = torch.arange(length) > torch.arange(rows)[:, None] + length - rows
            if self.gone[0] == b:
                hidden[:, slice(*self.gone[1:])] = True
            for h in range(HEADS):
                kv = h * KV_HEADS // HEADS
                scores = (self.q[b, h].double() @ keys[:, kv].T * D**-0.5).masked_fill(hidden, -torch.inf)
                lse[b, h] = scores.logsumexp(1).float()
                o[b, h] = (scores.softmax(1).nan_to_num(0.0) @ values[:, kv]).to(o.dtype)
        return {"o": o, "lse": lse}

    def tensors(self) -> dict[str, Tensor]:
        """As a capture has them, with garbage behind each sequence's last page."""
        width = max(map(len, self.table)) + 1
        table = torch.full((len(self.table), width), -1, dtype=torch.int32)
        for b, pages in enumerate(self.table):
            table[b, : len(pages)] = torch.tensor(pages)
        table[0, -1] = 2**30
        lengths = torch.tensor(self.lengths, dtype=torch.int32)
        return {"q": self.q, "k": self.k, "v": self.v, "page_table": table, "cache_seqlens": lengths}

    def capture(self, outputs: dict[str, Tensor], **metadata: Any) -> Capture:
        return Capture.from_tensors({**self.tensors(), **outputs}, **{"causal": "bottom-right", **metadata})


def drawn(seed: int = 0, *, rows: int = 1, lengths: tuple[int, ...] = (137, 90, 65, 200), pages: int = 60) -> Cache:
    g = torch.Generator().manual_seed(seed)
    k, v = (torch.randn(pages, SIZE, KV_HEADS, D, generator=g).bfloat16() for _ in "kv")
    order = torch.randperm(pages, generator=g).tolist()
    table = [[order.pop() for _ in range(-(-length // SIZE))] for length in lengths]
    q = torch.randn(len(lengths), HEADS, rows, D, generator=g).bfloat16()
    return Cache(q, k, v, table, list(lengths))


FAULTS = {
    "wrong page": "(a wrong page)",
    "another row": "(another row of the page table)",
    "missing split": "or a split missing)",
    "one key less": "a cache 1 key shorter (cache_seqlens off by one)",
    "one key more": "a cache 1 key longer (cache_seqlens off by one)",
    "LSE off by ln 2": "off by ln 2",
    "stale page": "(a stale page)",
    "another layer": "layer 4 (a cache of another layer)",
}


def planted(fault: str, seed: int, rows: int = 1) -> tuple[list[Capture], str]:
    """The capture with the fault, and those beside it; and what is to be said of it."""
    cache, g = drawn(seed, rows=rows), torch.Generator().manual_seed(1000 + seed)

    def any_of(count: int) -> int:
        return int(torch.randint(count, (1,), generator=g))

    b = any_of(3) if fault == "another row" else any_of(4)
    table, beside, words = [list(pages) for pages in cache.table], list[Capture](), FAULTS[fault]
    place = any_of(len(table[b]))
    if fault == "wrong page":
        own, table[b][place] = table[b][place], (table[b][place] + 1 + any_of(58)) % 60
        other = replace(cache, table=table)
        words = f"page {table[b][place]} in place of page {own}, number {place} of the sequence's (a wrong page)"
    elif fault == "another row":
        table[b] = table[3][: len(table[b])]
        other, words = replace(cache, table=table), "the pages of sequence 3 (another row of the page table)"
    elif fault == "missing split":
        first = any_of(len(table[b]) - 2)
        last = min(first + any_of(3), len(table[b]) - 2)
        other = replace(cache, gone=(b, first * SIZE, (last + 1) * SIZE))
        words = f"the cache without its keys {first * SIZE}-{(last + 1) * SIZE - 1} ("
    elif fault in ("one key less", "one key more"):
        by = -1 if fault.endswith("less") else 1
        other = replace(cache, lengths=[n + by * (i == b) for i, n in enumerate(cache.lengths)])
    elif fault == "stale page":
        k, v = cache.k.clone(), cache.v.clone()
        for x in (k, v):
            x[table[b][place]] = torch.randn(x.shape[1:], generator=g).bfloat16()
        other = replace(cache, k=k, v=v)
        before = replace(other, lengths=[n - 1 for n in cache.lengths])
        beside.append(before.capture(before.outputs(), layer=3, step=9))
        words = f"page {table[b][place]} as of step 9 (a stale page)"
    elif fault == "another layer":
        away = replace(drawn(seed + 500, rows=rows), table=cache.table)
        other = replace(cache, k=away.k, v=away.v)
        beside.append(away.capture(away.outputs(), layer=4, step=10))
    else:
        other = cache
    outputs = other.outputs()
    if fault == "LSE off by ln 2":
        outputs["lse"] = outputs["lse"] + math.log(2) * (torch.arange(4) == b)[:, None, None]
    return [cache.capture(outputs, layer=3, step=10), *beside], words
