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
from attn_diag.captures.merge import merged_over_ranks
from attn_diag.captures.sources import TensorSource
from attn_diag.errors import InputError
from attn_diag.head.read import read_float64, read_head

# So many of the newest tokens of a cache are compared with a sequence's.
_TAIL = 64
# A cache that is stored in fewer bits is off by a few per cent; another token's values by 140 %.
_SAME_TOKENS = 0.25

CallKey = tuple[int, int, int]


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


@dataclass
class TokenSequence:
    """One sequence of a run."""

    parts: list[SequencePart] = field(default_factory=list)
    """In the order of the calls."""
    length: int = 0
    """One more than the number of its last token."""
    chunks: list[Tensor] = field(default_factory=list)
    """v of the guide layer, of the tokens in order: [n, Hk, Dv] each."""

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
    for key, capture in calls[guide].items():
        taken: set[int] = set()
        for item in range(capture.batch):
            part = _part(capture, key, item, device)
            if part is not None:
                _append(sequences, part, partial(_values, capture, item, heads, device), taken)
    if not sequences:
        raise InputError(f"{captures[0].source}: no row of layer {guide} sees a key; expected the rows of a run")
    return TokenRun(calls, tuple(sequences), max(c.q_heads for c in calls[guide].values()), tuple(notes))


def by_layer(captures: Sequence[Capture]) -> tuple[dict[int, dict[CallKey, Capture]], list[str]]:
    """The captures that have an O, by layer and call; and what is to be said. Raises InputError where none has."""
    merged, notes = merged_over_ranks(captures)
    with_o = [c for c in merged if any("o" in outputs for outputs in c.observations.values())]
    if not with_o:
        raise InputError(f"{captures[0].source}: no capture of this run has an O; expected q, k, v and o of its layers")
    if len(with_o) < len(merged):
        notes.append(f"{len(merged) - len(with_o)} captures without an O are left out.")
    stated = {c.metadata.layer is not None for c in with_o}
    if len(stated) > 1:
        raise InputError(f"{with_o[0].source}: only some captures of this run state their layer; state it in all")
    found: dict[int, list[tuple[CallKey, Capture]]] = {}
    for capture in with_o:
        m = capture.metadata
        of_layer = found.setdefault(m.layer or 0, [])
        step, call = m.step or 0, int(m.extra.get("call", "0")) if m.extra.get("call", "0").isdecimal() else 0
        again = sum(key[:2] == (step, call) for key, _ in of_layer)
        of_layer.append(((step, call, again), capture))
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


def bias_of(capture: Capture, item: int, head: int, device: torch.device) -> Tensor:
    """What is added to the scaled scores of one head, -inf where a key is hidden; float64 [Tq, Tk]."""
    inputs = read_head(capture, item, head, device)
    q_length, k_length = len(inputs.head.q), len(inputs.head.k)
    bias = torch.zeros(q_length, k_length, dtype=torch.float64, device=device)
    inputs.head.apply_mask(bias, slice(0, q_length), slice(0, k_length))
    return bias


def _part(capture: Capture, key: CallKey, item: int, device: torch.device) -> SequencePart | None:
    """The rows of a batch item that are tokens; None where none is."""
    visible = bias_of(capture, item, 0, device) > -torch.inf
    seen = visible.any(1)
    if not bool(seen.any()):
        return None
    count = visible.shape[1]
    last = count - 1 - visible.flip(1).int().argmax(1)
    if bool((last[seen] == last[seen][0]).all()) and visible.shape[0] == count and count > 1:
        # Every row sees the last key: a row's own key is then the one in its place.
        last = torch.arange(count, device=device)
        seen = seen & visible.any(0)
    rows = seen.nonzero()[:, 0]
    # Rows of padding behind a sequence see its last token, whose own row comes first.
    fresh = torch.ones_like(rows, dtype=torch.bool)
    fresh[1:] = last[rows][1:] > last[rows][:-1]
    rows = rows[fresh]
    first = int(visible[rows].int().argmax(1).min())
    own = last[rows]
    return SequencePart(key, item, rows.cpu(), own.cpu(), slice(first, int(own[-1]) + 1), -first)


def _values(capture: Capture, item: int, heads: int, device: torch.device, keys: slice) -> Tensor:
    """v of these keys and so many heads, [keys, Hk, Dv]: of those that were repeated for GQA one each."""
    every = range(0, capture.kv_heads, capture.kv_heads // heads)
    found = [read_float64(capture, "v", item, head, device) for head in every]
    return torch.stack([v[keys] for v in found if v is not None], 1)


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
        away = float((cached - known).norm() / known.norm().clamp(min=1e-300))
        same_item = sequence.parts[-1].item == part.item
        if away < distance or (best >= 0 and away == distance and same_item):
            best, distance = i, away
    if best < 0:
        best = len(sequences)
        begun = replace(part, tokens=part.tokens + part.offset)
        sequences.append(TokenSequence([begun], stop + part.offset, [read(part.keys)]))
    else:
        # The cache ends where the sequence did.
        sequence = sequences[best]
        offset = sequence.length - own
        sequence.parts.append(replace(part, tokens=part.tokens + offset, offset=offset))
        sequence.length += stop - own
        sequence.chunks.append(values[own - begin :])
    taken.add(best)


@dataclass(frozen=True)
class RunRows:
    """The rows of one head of one sequence in one run; float64."""

    tokens: Tensor
    """Their tokens, int64 [n], increasing."""
    q: Tensor
    """[n, D]."""
    o: Tensor
    """What the run's kernel returned, [n, Dv]."""
    bias: Tensor
    """What is added to the scaled scores, -inf where a key is hidden, [n, T]: the run's own mask."""
    known: Tensor
    """Which of the T tokens have a key, bool [T]."""
    cached: Tensor
    """The first token whose key was in the cache of the row's call, int64 [n]: older ones had been let go."""
    blocks: tuple[tuple[Tensor, Tensor, Tensor], ...]
    """Rows [m], with the keys and values that they saw, [T, D] and [T, Dv]: one block, unless the cache's values
    changed from call to call."""
    scale: float
    """alpha."""
    softcap: float | None
    """c; None for none."""
    sink: float | None
    """The logit of a sink; None for none."""
    k: Tensor
    """The keys that the rows' own calls wrote, [n, D]."""
    v: Tensor
    """The values likewise, [n, Dv]."""

    def select(self, rows: Tensor) -> RunRows:
        """Some of the rows, [m] indices in increasing order."""
        place = torch.full((len(self.tokens),), -1, device=rows.device)
        place[rows] = torch.arange(len(rows), device=rows.device)
        blocks = tuple((place[r][place[r] >= 0], k, v) for r, k, v in self.blocks)
        return replace(
            self, tokens=self.tokens[rows], q=self.q[rows], o=self.o[rows], bias=self.bias[rows], k=self.k[rows],
            v=self.v[rows], cached=self.cached[rows], blocks=tuple(b for b in blocks if len(b[0])),
        )  # fmt: skip


def head_rows(
    run: TokenRun, sequence: TokenSequence, layer: int, head: int, *, shift: int, length: int, device: torch.device
) -> RunRows | None:
    """The rows of one head.

    Args:
        run: The run.
        sequence: One of its sequences.
        layer: Number of the layer.
        head: Index of the query head.
        shift: What is added to the numbers of the tokens.
        length: T, tokens of both runs together.
        device: Where they are put.

    Returns:
        None where the layer has none of the calls.
    """
    pieces = [_piece(run, part, layer, head, device) for part in sequence.parts]
    known_pieces = [(part, piece) for part, piece in zip(sequence.parts, pieces, strict=True) if piece is not None]
    if not known_pieces:
        return None
    first = known_pieces[0][1]
    k = first.k.new_zeros(length, first.k.shape[1])
    v = first.v.new_zeros(length, first.v.shape[1])
    known = torch.zeros(length, dtype=torch.bool, device=device)
    blocks: list[tuple[list[int], Tensor, Tensor]] = []
    queries: list[Tensor] = []
    outs: list[Tensor] = []
    biases: list[Tensor] = []
    tokens: list[Tensor] = []
    cached: list[Tensor] = []
    count = 0
    for part, piece in known_pieces:
        at = torch.arange(part.keys.start, part.keys.stop, device=device) + part.offset + shift
        inside = (at >= 0) & (at < length)
        own = part.tokens.to(device) + shift
        # A row that sees a key which is not compared cannot be either.
        kept = (own >= 0) & (own < length) & ~(piece.bias[:, ~inside] > -torch.inf).any(1)
        at, k_new, v_new = at[inside], piece.k[inside], piece.v[inside]
        again = known[at]
        same = bool((k[at][again] == k_new[again]).all()) and bool((v[at][again] == v_new[again]).all())
        if not same:
            k, v = k.clone(), v.clone()
        k[at], v[at], known[at] = k_new, v_new, True
        rows = list(range(count, count + int(kept.sum())))
        if blocks and same:
            blocks[-1][0].extend(rows)
        else:
            blocks.append((rows, k, v))
        count += len(rows)
        bias = piece.bias.new_full((len(rows), length), -torch.inf)
        bias[:, at] = piece.bias[kept][:, inside]
        for held, new in ((queries, piece.q[kept]), (outs, piece.o[kept]), (biases, bias), (tokens, own[kept])):
            held.append(new)
        cached.append(own.new_full((len(rows),), part.offset + shift))
    every = torch.cat(tokens)
    of_blocks = [(torch.tensor(rows, dtype=torch.int64, device=device), k, v) for rows, k, v in blocks]
    return RunRows(
        tokens=every, q=torch.cat(queries), o=torch.cat(outs), bias=torch.cat(biases), known=known,
        cached=torch.cat(cached),
        blocks=tuple(of_blocks), scale=first.scale, softcap=first.softcap, sink=first.sink,
        k=torch.cat([k[every[rows]] for rows, k, _ in of_blocks]),
        v=torch.cat([v[every[rows]] for rows, _, v in of_blocks]),
    )  # fmt: skip


@dataclass(frozen=True)
class _Piece:
    q: Tensor
    o: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor
    scale: float
    softcap: float | None
    sink: float | None


def _piece(run: TokenRun, part: SequencePart, layer: int, head: int, device: torch.device) -> _Piece | None:
    capture = run.calls[layer].get(part.call)
    if capture is None or part.item >= capture.batch:
        return None
    inputs = read_head(capture, part.item, head, device)
    o = read_float64(capture, capture.key(observation_of(capture), "o"), part.item, head, device)
    assert o is not None
    rows = part.rows.to(device)
    bias = torch.zeros(len(inputs.head.q), len(inputs.head.k), dtype=torch.float64, device=device)
    inputs.head.apply_mask(bias, slice(0, len(bias)), slice(0, bias.shape[1]))
    h = inputs.head
    return _Piece(
        h.q[rows], o[rows], h.k[part.keys], h.v[part.keys], bias[rows][:, part.keys], h.scale, h.softcap, h.sink
    )


def observation_of(capture: Capture) -> str:
    """The first observation that has an O."""
    return next(name for name, outputs in capture.observations.items() if "o" in outputs)


def stream_rows(run: TokenRun, sequence: TokenSequence, layer: int, shift: int, device: torch.device) -> Iterator[
    tuple[Tensor, Tensor]
]:  # fmt: skip
    """x of the calls that have it: the rows' tokens, int64 [n], and x, float64 [n, C]."""
    for part in sequence.parts:
        capture = run.calls[layer].get(part.call)
        if capture is not None and "x" in capture.tensors and part.item < capture.batch:
            x = capture.read_x(part.item).to(device).double()
            yield part.tokens.to(device) + shift, x[part.rows.to(device)]
