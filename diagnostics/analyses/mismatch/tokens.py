"""The captures of one run, put together to sequences of tokens, however the run was laid out.

A training forward is one call with all rows of a sequence; chunked prefill is several, each with the keys so far;
decoding is one call a token, on a cache that grows, has a fixed size, is paged, or has let old keys go. What belongs
together shows in the values: the keys that a call finds in its cache are those that earlier calls of the same sequence
left there. The number of a token counts from the first one that any row of the sequence saw, so that padding on the
left does not count.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from attn_diag.captures.capture import Capture
from attn_diag.captures.dropout import KEPT
from attn_diag.captures.merge import left_apart, merged_over_ranks, ranks_of
from attn_diag.captures.sources import TensorSource
from attn_diag.errors import InputError
from attn_diag.head.read import read_float64, read_head
from attn_diag.reference import AttentionHead, hides

# So many of the newest tokens of a cache are compared with a sequence's.
_TAIL = 64
# A cache that is stored in fewer bits is off by a few per cent; another token's values by 140 %.
_SAME_TOKENS = 0.25
# A token is the same where its v points the same way: of two tokens directions are 140 % apart, 50 % is far from both.
_SAME_DIRECTION = 0.5
# Additive masks hide keys by -1e4 or less, where scores are far smaller: below -104 exp is 0 in fp32.
_HIDING, _NOTHING = -9000.0, 104.0
# So many first tokens are the same by no chance.
_TELLING = 4

# Step, call and rank, and which of the captures that state these.
CallKey = tuple[int, int, int, int]


@dataclass(frozen=True)
class SequencePart:
    """Rows of one sequence in one call."""

    call: CallKey
    """Which call of a layer."""
    item: int
    """The batch item, or document."""
    rows: Tensor
    """Its query rows that are tokens, int64 [n]: none of padding."""
    tokens: Tensor
    """Number of the token of each, int64 [n]."""
    keys: slice
    """Its keys that some row sees."""
    offset: int
    """Number of a key's token, less the key's index."""
    held: int
    """Tk: the keys of the call, whoever sees them."""


@dataclass(frozen=True)
class LostKeys:
    """That a call finds more or fewer keys in its cache than the calls before it put there, and not those."""

    call: CallKey
    """The call."""
    held: int
    """Keys that it finds."""
    put: int
    """Keys that were put there."""
    token: int
    """The first one that is another."""


@dataclass
class TokenSequence:
    """One sequence of a run."""

    parts: list[SequencePart] = field(default_factory=list)
    """In the order of the calls."""
    length: int = 0
    """One more than the number of its last token."""
    chunks: list[Tensor] = field(default_factory=list)
    """v of the guide layer, of the tokens in order: [n, Hk, Dv] each."""
    lost: LostKeys | None = None
    """Its first call should have found the keys of the sequence before it, and did not; None: otherwise."""

    @property
    def values(self) -> Tensor:
        """The chunks as one, [length, Hk, Dv]."""
        return torch.cat(self.chunks)

    def tail(self, most: int) -> Tensor:
        """The values of the last tokens, at most so many."""
        found: list[Tensor] = []
        while len(found) < len(self.chunks) and sum(map(len, found)) < most:
            found.append(self.chunks[-1 - len(found)])
        return torch.cat(found[::-1])[-most:]

    @property
    def tokens(self) -> Tensor:
        """The tokens that have a query row, in order, int64."""
        return torch.tensor(sorted({t for part in self.parts for t in part.tokens.tolist()}))


@dataclass(frozen=True)
class TokenRun:
    """One of the two runs."""

    calls: dict[int, dict[CallKey, Capture]]
    """Of every layer its captures by call, in order."""
    sequences: tuple[TokenSequence, ...]
    """What was put together."""
    q_heads: int
    """Hq of a layer."""
    notes: tuple[str, ...]
    """What was left out, in sentences."""


def read_run(captures: Sequence[Capture], guide: int, device: torch.device) -> TokenRun:
    """Put the captures of a run together.

    Args:
        captures: All of them; ranks are merged first.
        guide: The layer by whose values the calls of a sequence are found: the lowest that both runs have.
        device: Where they are compared.

    Raises:
        InputError: No capture of that layer has an O.
    """
    calls, notes = by_layer(captures)
    sequences: list[TokenSequence] = []
    heads = math.gcd(*(c.kv_heads for c in calls[guide].values()))
    before: Capture | None = None
    for key, capture in calls[guide].items():
        taken: set[int] = set()
        for item in range(capture.batch):
            values = partial(_values, capture, item, heads, device)
            then = None if before is None or item >= before.batch else partial(_values, before, item, heads, device)
            for part in _parts(capture, key, item, device, _written(values, then) if capture.q_length == 1 else None):
                _append(sequences, part, values, taken)
        before = capture
    if not sequences:
        raise InputError(f"{captures[0].source}: no row of layer {guide} sees a key; expected the rows of a run")
    return TokenRun(calls, tuple(sequences), max(c.q_heads for c in calls[guide].values()), tuple(notes))


def by_layer(captures: Sequence[Capture]) -> tuple[dict[int, dict[CallKey, Capture]], list[str]]:
    """The captures that have an O, by layer and call; and what is to be said. Raises InputError where none has."""
    merged, notes = merged_over_ranks(captures)
    if any(c.metadata.head_offset or "sequence_ranks" in c.metadata.extra for c in captures):
        if left_apart(merged):
            raise InputError(f"ranks share sequences, and cannot be put together: {'; '.join(notes)}")
    elif len(set(map(ranks_of, merged))) > 1:
        # Where some calls alone are of all ranks, a sequence would be another item of the batch in the others.
        merged = list(captures)
    with_o = [c for c in merged if any("o" in outputs for outputs in c.observations.values())]
    if not with_o:
        raise InputError(f"{captures[0].source}: no capture of this run has an O; expected q, k, v and o of its layers")
    if len(with_o) < len(merged):
        notes.append(f"{len(merged) - len(with_o)} captures without an O are left out.")
    stated = {c.metadata.layer is not None for c in with_o}
    if len(stated) > 1:
        raise InputError(f"{with_o[0].source}: only some captures of this run state their layer; state it in all")
    if dropping := next((c for c in with_o if KEPT in c.tensors), None):
        raise InputError(
            f"{dropping.source}: captured with attention dropout (p = {dropping.metadata.dropout_p:g}): what it drops "
            "would drown every other difference, and no engine drops; expected both runs without it: capture after "
            "model.eval(), or with an attention dropout of 0"
        )
    found: dict[int, list[tuple[CallKey, Capture]]] = {}
    for capture in with_o:
        m = capture.metadata
        of_layer = found.setdefault(m.layer or 0, [])
        step, call = m.step or 0, int(m.extra.get("call", "0")) if m.extra.get("call", "0").isdecimal() else 0
        stated_call = step, call, m.rank or 0
        again = sum(key[:3] == stated_call for key, _ in of_layer)
        of_layer.append(((*stated_call, again), capture))
    heads = {layer: max(c.q_heads for _, c in calls) for layer, calls in found.items()}
    return {
        layer: {key: _unfolded(capture, heads[layer]) for key, capture in sorted(calls, key=lambda one: one[0])}
        for layer, calls in sorted(found.items())
    }, notes


def _unfolded(capture: Capture, q_heads: int) -> Capture:
    """The capture with one row a query head where those of a key head were passed as its rows, as decoding may."""
    group = q_heads // max(capture.q_heads, 1)
    folded = capture.q_heads == capture.kv_heads and group > 1 and capture.q_length == group
    if not folded or capture.documents is not None or capture.metadata.layout != "BHTD":
        return capture
    mask = capture.tensors.get("mask")
    if mask is not None and (len(mask.shape) < 2 or mask.shape[-2] != 1):
        return capture
    tensors: dict[str, TensorSource] = {}
    for name, source in capture.tensors.items():
        base = name.rpartition(".")[2]
        if base in ("q", "o"):
            tensors[name] = source[...].reshape(source.shape[0], q_heads, 1, source.shape[3])
        elif base == "lse":
            tensors[name] = source[...].reshape(source.shape[0], q_heads, 1)
        elif base in ("k", "v", "mask", "sinks"):
            tensors[name] = source
    return replace(capture, tensors=tensors)


def own_bias(capture: Capture, item: int, head: int, read: AttentionHead) -> Tensor:
    """What is added to the scaled scores of one head, -inf where a key is hidden; float64 [Tq, Tk]."""
    q_length, k_length = len(read.q), len(read.k)
    bias = torch.zeros(q_length, k_length, dtype=torch.float64, device=read.q.device)
    read.apply_mask(bias, slice(0, q_length), slice(0, k_length))
    if (mask := capture.mask(item, head)) is not None:
        added = mask[0].to(bias.device)
        bias.masked_fill_(hides(added), -torch.inf)
        if added.dtype != torch.bool and bool((low := added <= _HIDING).any()):
            largest = abs(read.scale) * float(read.q.norm(dim=1).amax() * read.k.norm(dim=1).amax())
            if 2 * largest + _NOTHING < -_HIDING:
                bias.masked_fill_(low, -torch.inf)
    return bias


def _written(now: Callable[[slice], Tensor], then: Callable[[slice], Tensor] | None) -> int | None:
    """The key that a call of one row wrote, whether it sees it or not: what its cache has more, or otherwise, than that
    of the call before; None: not known."""
    if then is None:
        return None
    values, old = now(slice(None)), then(slice(None))
    if len(values) == len(old) + 1:
        return len(old)
    if values.shape != old.shape:
        return None
    changed = (values != old).flatten(1).any(1).nonzero()[:, 0].tolist()
    return int(changed[0]) if len(changed) == 1 else None


def _parts(
    capture: Capture, key: CallKey, item: int, device: torch.device, written: int | None
) -> Iterator[SequencePart]:
    """The rows of a batch item that are tokens: one sequence's, or several's that a mask keeps apart.

    ``written``: see ``_written``.
    """
    visible = own_bias(capture, item, 0, read_head(capture, item, 0, device).head) > -torch.inf
    seen = visible.any(1)
    if not bool(seen.any()):
        return
    last = own_keys(visible)
    if written is not None and abs(written - int(last[0])) == 1:  # a mask that is one key off
        last = torch.full_like(last, written)
    rows = seen.nonzero()[:, 0]
    # Rows of padding behind a sequence see its last token, whose own row comes first.
    fresh = torch.ones_like(rows, dtype=torch.bool)
    fresh[1:] = last[rows][1:] > last[rows][:-1]
    rows = rows[fresh]
    first, own = visible[rows].int().argmax(1), last[rows]
    # A sequence begins where a row sees its own key alone, before which no later row sees any.
    earliest = first.flip(0).cummin(0).values.flip(0)
    begins = ((first == own) & (earliest == own)).nonzero()[:, 0].tolist()
    ends = [begin for begin in begins if begin] + [len(rows)]
    for begin, end in zip([0, *ends], ends, strict=False):
        of = slice(begin, end)
        start = int(first[of].min())
        keys = slice(start, int(own[of][-1]) + 1)
        yield SequencePart(key, item, rows[of].cpu(), own[of].cpu(), keys, -start, visible.shape[1])


def own_keys(visible: Tensor) -> Tensor:
    """Index of every row's own key, int64 [Tq]: the last one that it sees."""
    count = visible.shape[1]
    last = count - 1 - visible.flip(1).int().argmax(1)
    seen = visible.any(1)
    if bool((last[seen] == last[seen][0]).all()) and visible.shape[0] == count > 1:
        # Every row sees the last key: a row's own key is then the one in its place.
        return torch.arange(count, device=visible.device)
    return last


def _values(capture: Capture, item: int, heads: int, device: torch.device, keys: slice) -> Tensor:
    """v of these keys and so many heads, [keys, Hk, Dv]: of those that were repeated for GQA one each."""
    every = range(0, capture.kv_heads, capture.kv_heads // heads)
    found = [read_float64(capture, "v", item, head, device) for head in every]
    return torch.stack([v[keys] for v in found if v is not None], 1)


def _lost(before: TokenSequence, part: SequencePart, values: Tensor) -> LostKeys | None:
    """What is lost where a decoding step finds other keys than the step before it left; None: none, or another's.

    Args:
        before: The newest sequence of the same batch item.
        part: A call that fits no sequence.
        values: v of its keys.
    """
    held, put = int(part.tokens[0]) + part.offset, before.values
    step, call = (part.call[i] - before.parts[-1].call[i] for i in (0, 1))
    follows = step == 1 or (step == 0 and call == 1)
    both = min(held, len(put))
    if len(part.tokens) != 1 or not follows or both <= _TELLING or put.shape[1:] != values.shape[1:]:
        return None
    one, other = (unit_rows(v[:both].flatten(1)) for v in (values, put))
    apart = _other_tokens(one, other)
    token = int(apart.int().argmax())
    # All the same: the sequence was rewound, or went on without being captured. Few: another sequence.
    if not bool(apart.any()) or token < _TELLING:
        return None
    # What follows was put there too, in other places. Else it is new: of a draft that was rejected, or of another beam.
    # Where nothing but the beginning is missing a window let it go, whose keys repeat.
    moved = len(put) - held
    one, other = (unit_rows(v.flatten(1)) for v in (values[max(-moved, 0) : held], put[max(moved, 0) :]))
    same = ~_other_tokens(one, other)
    return LostKeys(part.call, held, len(put), token) if bool(same[token:].all()) and not bool(same.all()) else None


def _rewound(before: TokenSequence, part: SequencePart, read: Callable[[slice], Tensor]) -> TokenSequence | None:
    """The first tokens of a sequence, where a part finds them alone: a draft behind them was rejected. None: others."""
    held = int(part.tokens[0]) + part.offset
    if not _TELLING < held < before.length:
        return None
    put = before.values[:held]
    # Bit for bit: rows of earlier weights with the same tokens would be taken for this sequence's.
    if not torch.equal(read(slice(part.keys.start, int(part.tokens[0]))), put):
        return None
    kept = ((one, one.tokens < held) for one in before.parts)
    parts = [replace(one, rows=one.rows[of], tokens=one.tokens[of]) for one, of in kept if bool(of.any())]
    return TokenSequence(parts, held, [put])


def _other_tokens(one: Tensor, other: Tensor) -> Tensor:
    """Which of these directions [n, N] are other tokens', bool [n]."""
    apart: Tensor = (one - other).norm(dim=1)
    return apart > _SAME_DIRECTION


def unit_rows(x: Tensor) -> Tensor:
    """The rows [n, D], each divided by its norm."""
    unit: Tensor = x / x.norm(dim=1, keepdim=True).clamp(min=1e-300)
    return unit


def _append(
    sequences: list[TokenSequence], part: SequencePart, read: Callable[[slice], Tensor], taken: set[int]
) -> None:
    """Add a part to the sequence whose keys it finds in its cache, or begin one with it.

    Args:
        sequences: What there is.
        part: The part, its tokens numbered as its keys.
        read: Gives the values of some of its keys.
        taken: The sequences that a part of the same call was added to; one more afterwards.
    """
    own, stop = int(part.tokens[0]), part.keys.stop
    # Of a long cache its end is enough.
    begin = max(part.keys.start, own - _TAIL)
    values = read(slice(begin, stop))
    best, distance = -1, _SAME_TOKENS
    for i, sequence in enumerate(sequences if begin < own else ()):
        known = sequence.tail(own - begin)
        if i in taken or known.shape[1:] != values.shape[1:]:
            continue
        cached = values[: own - begin][-len(known) :]
        if bool(_other_tokens(*(unit_rows(v.flatten(1)) for v in (cached, known))).any()):
            continue  # few of many tokens, as of a draft that was rejected, hardly move the norm
        away = float((cached - known).norm() / known.norm().clamp(min=1e-300))
        same_item = sequence.parts[-1].item == part.item
        if away < distance or (best >= 0 and away == distance and same_item):
            best, distance = i, away
    of_item = [i for i, s in enumerate(sequences) if s.parts[-1].item == part.item and i not in taken]
    newest = max(of_item, key=lambda i: sequences[i].parts[-1].call, default=-1)
    if best < 0 and begin < own and newest >= 0 and (kept := _rewound(sequences[newest], part, read)) is not None:
        best = len(sequences)
        sequences.append(kept)
    if best < 0 and begin < own and newest >= 0:
        # As many keys as the call before left in its place: whatever became of them, they are that sequence's.
        as_many = sequences[newest].length == own + part.offset
        if as_many and sequences[newest].chunks[0].shape[1:] == values.shape[1:]:
            best = newest
    if best < 0:
        best = len(sequences)
        begun = replace(part, tokens=part.tokens + part.offset)
        every = read(part.keys)
        lost = _lost(sequences[newest], part, every) if newest >= 0 else None
        sequences.append(TokenSequence([begun], stop + part.offset, [every], lost))
    else:
        # The cache ends where the sequence did.
        sequence = sequences[best]
        offset = sequence.length - own
        sequence.parts.append(replace(part, tokens=part.tokens + offset, offset=offset))
        sequence.length += stop - own
        sequence.chunks.append(values[own - begin :])
    taken.add(best)
