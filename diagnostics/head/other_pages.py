"""A cache read in another way: wrong, stale or missing pages, another sequence's table, a length off by one.

A sequence that is decoded has few query rows, and a fault of its cache shows in all heads: O of all its heads together
is held against what a kernel returns that reads other keys. Of each page the sums of P_bar and of P_bar V are made
once; O with one page in place of another, or without some, follows from them in closed form.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from attn_diag.captures.capture import Capture
from attn_diag.captures.paged import PagedKeys
from attn_diag.head.read import read_float64, read_head
from attn_diag.reference import AttentionHead, Masking, format_of, reference_rows, ulp

# Heads and rows of a sequence that are looked at, pages that a wrong entry may have named, sequences whose pages it may
# be, and the last pages that may be stale.
_MOST_HEADS, _MOST_ROWS, _MOST_PAGES, _MOST_ITEMS, _MOST_STALE = 8, 16, 256, 64, 32
# A reading is taken where it leaves at most so many times a well-rounded kernel's error, and where the stated one
# leaves so many times its own.
_LEAVES, _BEATS = 2.0, 3.0
# By chance one of so many readings fits so much better with probability exp(-_NATS) at most.
_NATS = 10.0
# What rounding makes of an LSE is less: 2^-9 of scores around 10.
_OFF = 0.04


@dataclass(frozen=True)
class CacheReading:
    """Keys that a kernel has read in place of those of the page table."""

    words: str
    """What follows "are what … gives"."""
    explained: float
    """The part of O's squared error that it explains, over the heads looked at."""
    remaining: float
    """The factor over a well-rounded kernel's error that it leaves."""
    of_cache: bool = True
    """Whether it is of the cache; else the words follow "are"."""


@dataclass(frozen=True)
class _Other:
    """Keys that may have been read."""

    words: str
    pages: tuple[int, ...]
    length: int
    gone: tuple[int, int] = (0, 0)
    """Keys from and up to which none is seen."""
    source: Capture | None = None
    """Another capture, whose pages these are."""
    slot: int | None = None
    """Of these the one that is the other capture's; None: all."""


def read_otherwise(
    capture: Capture, observation: str, batch: int, device: torch.device, beside: Sequence[Capture] = ()
) -> CacheReading | None:
    """Which other reading of its cache explains a sequence's O; None where none does, or the stated one does.

    Args:
        capture: With k and v in pages.
        observation: Whose O.
        batch: Index of the batch item.
        device: Where float64 is computed.
        beside: Captures of other layers, and of earlier steps, whose cache a kernel may have read.

    Returns:
        The reading that leaves least.
    """
    key = capture.key(observation, "o")
    if key not in capture.tensors or not isinstance(capture.tensors["k"], PagedKeys) or capture.documents is None:
        return None
    if "q_positions" in capture.tensors or "alibi_slopes" in capture.tensors:
        return None
    heads = torch.linspace(0, capture.q_heads - 1, min(capture.q_heads, _MOST_HEADS)).round().long().tolist()
    views = [view for h in dict.fromkeys(heads) if (view := _View.of(capture, key, batch, h, device)) is not None]
    if not views:
        return None
    stated, noise = (sum(found) for found in zip(*((v.error(v.head), v.noise) for v in views), strict=True))
    if stated <= _LEAVES**2 * _BEATS * noise:
        return None
    found: list[tuple[float, _Other]] = []
    tried = 0
    for tries, other in _others(capture, batch, views, beside):
        tried += tries
        found.append((sum(view.error(view.with_cache(other)) for view in views), other))
    if not found:
        return None
    left, best = min(found, key=lambda item: item[0])
    numbers = sum(view.numbers for view in views)
    convincing = numbers / 2 * math.log(stated / max(left, noise)) > math.log(max(tried, 1)) + _NATS
    if left > _LEAVES**2 * noise or stated < _BEATS**2 * left or not convincing:
        return None
    return CacheReading(best.words, 1 - left / stated, math.sqrt(left / noise))


def lse_offset(capture: Capture, observation: str, batch: int, device: torch.device) -> CacheReading | None:
    """A constant, or base 2, by which LSE is off in all heads and rows of a sequence; None where there is none.

    Args:
        capture: With k and v in pages.
        observation: Whose LSE.
        batch: Index of the batch item.
        device: Where float64 is computed.
    """
    key = capture.key(observation, "lse")
    if key not in capture.tensors:
        return None
    errors, truths = [], []
    for head in range(min(capture.q_heads, _MOST_HEADS)):
        inputs, seen = read_head(capture, batch, head, device), read_float64(capture, key, batch, head, device)
        assert seen is not None
        truth = reference_rows(replace(inputs.head, do=None), _all_rows(inputs.head)).lse
        kept = ~inputs.unusable & truth.isfinite() & seen.isfinite()
        errors.append((seen - truth)[kept])
        truths.append(truth[kept])
    error, truth = torch.cat(errors), torch.cat(truths)
    if len(error) < 2 or float(error.abs().max()) < _OFF:
        return None
    known = {"off by ln 2": math.log(2), "off by -ln 2": -math.log(2)}
    ways = {words: error - offset for words, offset in known.items()}
    ways |= {
        "in base 2": error - truth * (math.log2(math.e) - 1),
        "in base e, though base 2 is stated": error - truth * (math.log(2) - 1),
    }
    words, left = min(ways.items(), key=lambda item: float(item[1].abs().max()))
    if float(left.abs().max()) > _OFF / 4:
        return None
    return CacheReading(words, 1 - float(left.square().sum() / error.square().sum()), 1.0, of_cache=False)


@dataclass(frozen=True)
class _View:
    """One head of the sequence, with its O."""

    capture: Capture
    batch: int
    head_number: int
    head: AttentionHead
    observed: Tensor
    noise: float
    """A well-rounded kernel's squared error: of O's last rounding, and of P_bar's."""
    numbers: float
    """How many numbers its O is."""

    @classmethod
    def of(cls, capture: Capture, key: str, batch: int, number: int, device: torch.device) -> _View | None:
        inputs, out = read_head(capture, batch, number, device), read_float64(capture, key, batch, number, device)
        assert out is not None
        if not bool(out.isfinite().all()) or bool(inputs.unusable.any()) or len(inputs.bad_keys):
            return None
        whole, count = inputs.head, len(inputs.head.q)
        rows = torch.arange(count, device=device)[:: -(-count // _MOST_ROWS)]
        masking = replace(whole.masking, positions=whole.positions[rows])
        head, out = replace(whole, q=whole.q[rows], do=None, masking=masking), out[rows]
        block = reference_rows(head, _all_rows(head))
        fmt, unit = format_of(capture.tensors[key].dtype), 2.0**-inputs.input_format.precision
        probs = block.probs
        cast = (probs.square() @ head.v[block.keys].square()) * unit**2 / 3
        noise = float((ulp(block.out, fmt).square() / 12 + cast).sum())
        features = (1 / probs.square().sum(1).clamp(min=1e-12)).clamp(max=head.v.shape[1])
        return cls(capture, batch, number, head, out, max(noise, 1e-300), float(features.sum()))

    def error(self, head: AttentionHead) -> float:
        """O's squared error beside a head's."""
        out = reference_rows(head, _all_rows(head)).out
        return float((out - self.observed).square().sum())

    @property
    def kv_head(self) -> int:
        return self.head_number // (self.capture.q_heads // self.capture.kv_heads)

    def keys(self, name: str, pages: Sequence[int], source: Capture | None = None) -> Tensor:
        """K or V of these pages, [pages, page size, D] float64."""
        pool = (source or self.capture).tensors[name]
        assert isinstance(pool, PagedKeys)
        parts = torch.stack([pool.page(page, self.kv_head) for page in pages])
        parts = parts.float() if parts.dtype.itemsize == 1 else parts
        return parts.to(self.observed.device).double() * self.capture.descale(name, self.batch, self.kv_head)

    def with_cache(self, other: _Other) -> AttentionHead:
        """The head as a kernel computes it that reads the cache so."""
        k, v = (self._read(name, other).flatten(0, 1)[: other.length] for name in "kv")
        if other.gone == (0, 0):
            masking = self.head.masking
            moved = 0 if masking.causal == "top-left" else other.length - len(self.head.k)
            return replace(self.head, k=k, v=v, masking=replace(masking, positions=self.head.positions + moved))
        hidden = self.head.masking.hidden(self.head.positions, slice(0, len(k)))
        shown = torch.ones(len(self.head.q), len(k), dtype=torch.bool, device=k.device) if hidden is None else ~hidden
        shown[:, slice(*other.gone)] = False
        return replace(self.head, masking=Masking(mask=shown))

    def _read(self, name: str, other: _Other) -> Tensor:
        if other.slot is None:
            return self.keys(name, other.pages, other.source)
        found = self.keys(name, other.pages)
        found[other.slot] = self.keys(name, other.pages[other.slot : other.slot + 1], other.source)[0]
        return found


def _others(
    capture: Capture, batch: int, views: Sequence[_View], beside: Sequence[Capture]
) -> Iterator[tuple[int, _Other]]:
    """The readings that are tried, and of how many each is the best."""
    pool, documents = capture.tensors["k"], capture.documents
    assert isinstance(pool, PagedKeys)
    assert documents is not None
    item, rows, size = documents[batch].number, capture.lengths(batch)[0], pool.page_size
    own, length = pool.pages[item], pool.lengths[item]
    for other in dict.fromkeys((length - 1, length + 1, length - rows)):
        if rows <= other <= len(own) * size or 0 < other < length:
            by = abs(other - length)
            way = "shorter" if other < length else "longer"
            off = "cache_seqlens off by one" if by == 1 else "cache_seqlens off: the newest keys are not seen"
            yield 1, _Other(f"a cache {by} key{'s' if by > 1 else ''} {way} ({off})", own, other)
    for number, pages in list(enumerate(pool.pages))[:_MOST_ITEMS]:
        if number != item and len(pages) >= len(own) and pages[: len(own)] != own:
            words = f"the pages of sequence {number} (another row of the page table)"
            yield 1, _Other(words, pages[: len(own)], length)
    for source, what in _caches(capture, beside):
        if source.metadata.layer == capture.metadata.layer:
            for slot, page in list(enumerate(own))[-_MOST_STALE:]:
                words = f"page {page} as of step {source.metadata.step} (a stale page)"
                yield 1, _Other(words, own, length, source=source, slot=slot)
        # Of readings that leave as little the first is taken.
        yield 1, _Other(f"the same pages of {what}", own, length, source=source)
    sums = [_Sums.of(view, own, length, size) for view in views]
    used = list(dict.fromkeys(page for pages in pool.pages for page in pages))
    named = (used + [p for p in range(pool.pool.shape[0]) if p not in set(used)])[:_MOST_PAGES]
    swapped = torch.stack([s.swapped(named) for s in sums]).sum(0)  # [slots, pages]
    for slot, page in enumerate(own):
        if page in named:
            swapped[slot, named.index(page)] = torch.inf
    slot, at = divmod(int(swapped.argmin()), len(named))
    if bool(swapped[slot, at].isfinite()):
        words = f"page {named[at]} in place of page {own[slot]}, number {slot} of the sequence's (a wrong page)"
        yield swapped.numel(), _Other(words, (*own[:slot], named[at], *own[slot + 1 :]), length)
    if len(own) > 1:
        dropped = torch.stack([s.dropped() for s in sums]).sum(0)  # [first, last]
        first, last = divmod(int(dropped.argmin()), len(own))
        ends = first * size, min((last + 1) * size, length)
        what = "a page" if first == last else f"{last - first + 1} pages"
        words = f"the cache without its keys {ends[0]}-{ends[1] - 1} ({what} or a split missing)"
        yield dropped.numel(), _Other(words, own, length, ends)


def _caches(capture: Capture, beside: Sequence[Capture]) -> Iterator[tuple[Capture, str]]:
    """Other captures whose pages are as many and as large, and what they are."""
    m, shape = capture.metadata, [tuple(capture.tensors[n].shape[3:]) for n in "kv"]
    for other in beside:
        k = other.tensors["k"]
        own = capture.tensors["k"]
        if other is capture or not isinstance(k, PagedKeys) or not isinstance(own, PagedKeys):
            continue
        if k.pool.shape != own.pool.shape or [tuple(other.tensors[n].shape[3:]) for n in "kv"] != shape:
            continue
        if other.metadata.layer != m.layer and other.metadata.step == m.step:
            yield other, f"layer {other.metadata.layer} (a cache of another layer)"
        elif other.metadata.layer == m.layer and (other.metadata.step or 0) < (m.step or 0):
            yield other, f"step {other.metadata.step} (a stale cache)"


@dataclass(frozen=True)
class _Sums:
    """Sums over the keys of each of a sequence's pages, by row, all from one maximum."""

    view: _View
    size: int
    length: int
    top: Tensor
    """[R], the maximum that they are taken from."""
    mass: Tensor
    """[R, pages], sums of P_bar."""
    out: Tensor
    """[R, pages, Dv], sums of P_bar V."""
    sink: Tensor
    """[R], the sink's P_bar."""

    @classmethod
    def of(cls, view: _View, own: tuple[int, ...], length: int, size: int) -> _Sums:
        head = view.head
        scores = _raw_scores(head, head.k)
        if (hidden := head.masking.hidden(head.positions, slice(0, length))) is not None:
            scores = scores.masked_fill(hidden, -torch.inf)
        top = scores.amax(1).clamp(min=-1e300)
        probs, rest = torch.exp(scores - top[:, None]), len(own) * size - length
        wide = pad(probs, (0, rest)).view(len(top), len(own), size)
        values = pad(head.v, (0, 0, 0, rest)).view(len(own), size, -1)
        sink = torch.zeros_like(top) if head.sink is None else torch.exp(head.sink - top)
        return cls(view, size, length, top, wide.sum(2), torch.einsum("rps,psd->rpd", wide, values), sink)

    def swapped(self, pages: Sequence[int]) -> Tensor:
        """O's squared error with one page in place of another, [slots, pages]."""
        head, rows = self.view.head, len(self.top)
        k, v = (self.view.keys(name, pages) for name in "kv")
        scores = _raw_scores(head, k.flatten(0, 1)) - self.top[:, None]
        probs = torch.exp(scores.clamp(max=600.0)).view(rows, len(pages), self.size)
        total, whole = self.mass.sum(1) + self.sink, self.out.sum(1)
        everything = probs.sum(2), torch.einsum("rps,psd->rpd", probs, v)
        found = []
        for slot in range(self.mass.shape[1]):
            begin, end = slot * self.size, min((slot + 1) * self.size, self.length)
            hidden = head.masking.hidden(head.positions, slice(begin, end))
            mass, out = everything
            if end - begin < self.size or (hidden is not None and bool(hidden.any())):
                shown = probs.new_zeros(rows, self.size)
                shown[:, : end - begin] = 1.0 if hidden is None else (~hidden).double()
                seen = probs * shown[:, None]
                mass, out = seen.sum(2), torch.einsum("rps,psd->rpd", seen, v)
            mass = (total - self.mass[:, slot])[:, None] + mass
            out = (whole - self.out[:, slot])[:, None] + out
            found.append(self._error(out, mass))
        return torch.stack(found)

    def dropped(self) -> Tensor:
        """O's squared error without pages from first to last, [first, last]; infinite where first > last."""
        count = self.mass.shape[1]
        mass, out = (torch.cat([torch.zeros_like(x[:, :1]), x.cumsum(1)], 1) for x in (self.mass, self.out))
        found = self.mass.new_full((count, count), torch.inf)
        for first in range(count):
            gone = mass[:, first + 1 :] - mass[:, first : first + 1], out[:, first + 1 :] - out[:, first : first + 1]
            left = (mass[:, -1] + self.sink)[:, None] - gone[0]
            found[first, first:] = self._error(out[:, -1][:, None] - gone[1], left)
        found[0, -1] = torch.inf  # not all of them
        return found

    def _error(self, out: Tensor, mass: Tensor) -> Tensor:
        """[n] from O_bar [R, n, Dv] and l [R, n]."""
        return (out / mass.clamp(min=1e-300)[..., None] - self.view.observed[:, None]).square().sum((0, 2))


def _raw_scores(head: AttentionHead, k: Tensor) -> Tensor:
    scores = head.q @ k.T * head.scale
    return scores if head.softcap is None else head.softcap * torch.tanh(scores / head.softcap)


def _all_rows(head: AttentionHead) -> Tensor:
    return torch.arange(len(head.q), device=head.q.device)
