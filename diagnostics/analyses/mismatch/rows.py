"""The rows of one head of one sequence, gathered from the calls of a run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attn_diag.analyses.mismatch.tokens import SequencePart, TokenRun, TokenSequence, own_bias, own_keys
from attn_diag.captures.capture import Capture
from attn_diag.head.read import read_float64, read_head

# What is left of the difference of q where it is the scale's.
_FOLDED = 0.1


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
    """Which of the T tokens have a key, without NaN or infinity, bool [T]."""
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
    """The keys that the rows' own calls wrote, [n, D]; NaN, as in v, where either is not finite."""
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


def with_scale_of(a: RunRows, b: RunRows) -> RunRows:
    """b with a's scale, if what that lacks is in its q: an engine may multiply q by it, and state another."""
    factor = b.scale / a.scale
    moved = b.q * factor
    if factor == 1 or float((moved - a.q).norm()) > _FOLDED * float((b.q - a.q).norm()):
        return b
    return replace(b, q=moved, scale=a.scale)


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
    broken = known.clone()
    blocks: list[tuple[list[int], Tensor, Tensor]] = []
    queries: list[Tensor] = []
    outs: list[Tensor] = []
    biases: list[Tensor] = []
    tokens: list[Tensor] = []
    cached: list[Tensor] = []
    count = 0
    for part, piece in known_pieces:
        at = torch.arange(piece.keys.start, piece.keys.stop, device=device) + piece.offset + shift
        inside = (at >= 0) & (at < length)
        own = part.tokens.to(device) + shift
        # A row that sees a key which is not compared cannot be either.
        kept = (own >= 0) & (own < length) & ~(piece.bias[:, ~inside] > -torch.inf).any(1)
        at, k_new, v_new = at[inside], piece.k[inside], piece.v[inside]
        again = known[at]
        same = bool((k[at][again] == k_new[again]).all()) and bool((v[at][again] == v_new[again]).all())
        if not same:
            k, v = k.clone(), v.clone()
        broken[at] = ~piece.finite[inside]
        k[at], v[at], known[at] = k_new, v_new, piece.finite[inside]
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
        cached.append(own.new_full((len(rows),), piece.offset + shift))
    every = torch.cat(tokens)
    of_broken = broken[every][:, None]
    of_blocks = [(torch.tensor(rows, dtype=torch.int64, device=device), k, v) for rows, k, v in blocks]
    return RunRows(
        tokens=every, q=torch.cat(queries), o=torch.cat(outs), bias=torch.cat(biases), known=known,
        cached=torch.cat(cached),
        blocks=tuple(of_blocks), scale=first.scale, softcap=first.softcap, sink=first.sink,
        k=torch.cat([k[every[rows]] for rows, k, _ in of_blocks]).masked_fill(of_broken, torch.nan),
        v=torch.cat([v[every[rows]] for rows, _, v in of_blocks]).masked_fill(of_broken, torch.nan),
    )  # fmt: skip


@dataclass(frozen=True)
class _Piece:
    q: Tensor
    o: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor
    keys: slice
    finite: Tensor
    """Which of the keys hold no NaN and no infinity, in k and v."""
    offset: int
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
    rows, h = part.rows.to(device), inputs.head
    bias = own_bias(capture, part.item, head, h)
    # Layers with a window have let keys go that others still hold: the same token is another index there.
    visible = bias > -torch.inf
    own, bias = own_keys(visible)[rows], bias[rows]
    if not bool(visible[rows].any(1).all()):
        return None
    seen = int(own[-1])
    if len(h.k) == part.held and abs(off := int(part.tokens[0]) - part.offset - int(own[0])) == 1:
        own = own + off  # a mask that is one key off: its own key is where it is in the layer that was put together
    keys = slice(int(visible[rows].int().argmax(1).min()), max(int(own[-1]), seen) + 1)
    offset = int(part.tokens[0]) - int(own[0])
    finite = torch.ones(len(h.k), dtype=torch.bool, device=device)
    finite[inputs.bad_keys] = False
    return _Piece(
        _with_nan(h.q, capture, part.item, head)[rows], o[rows], h.k[keys], h.v[keys], bias[:, keys], keys,
        finite[keys], offset, h.scale, h.softcap, h.sink,
    )  # fmt: skip


def _with_nan(q: Tensor, capture: Capture, item: int, head: int) -> Tensor:
    """q as it was read, in whose place ``read_head`` has zeros where it is not finite."""
    stored = read_float64(capture, "q", item, head, q.device)
    return q if stored is None else q.masked_fill(~stored.isfinite(), torch.nan)


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
