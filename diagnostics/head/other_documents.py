"""Packed sequences cut in another way: what a kernel computes that merges documents, or has other borders."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attn_diag.captures.alibi import SLOPES
from attn_diag.captures.capture import Capture
from attn_diag.captures.documents import Document
from attn_diag.captures.sources import PACKING

# Borders are read off O in so many heads.
_HEADS = 4
# A row that sees itself alone has its own V as O, but for a rounding or two in BF16.
_SAME = 2.0**-7


@dataclass(frozen=True)
class OtherDocuments:
    """Another way to cut the same rows and keys into documents."""

    words: str
    """What follows "are what … gives"."""
    short: str
    """The same as a sentence's subject."""
    documents: tuple[Document, ...]
    """The documents, in order."""

    def of(self, capture: Capture) -> Capture:
        """The capture with these documents in place of its own."""
        ends = [[0, *(d.rows.stop for d in self.documents)], [0, *(d.keys.stop for d in self.documents)]]
        borders = {name: torch.tensor(end) for name, end in zip(PACKING, ends, strict=True)}
        slopes: dict[str, Tensor] = {}
        if SLOPES in capture.tensors and len(capture.tensors[SLOPES].shape) == 2 and capture.documents is not None:
            # Each takes the slopes of the document that its first row belongs to.
            first = [max(o.number for o in capture.documents if o.rows.start <= d.rows.start) for d in self.documents]
            slopes[SLOPES] = capture.tensors[SLOPES][...][first]
        return replace(capture, tensors={**capture.tensors, **borders, **slopes})


def merged(capture: Capture) -> OtherDocuments | None:
    """All documents as one; None where there is one alone.

    Args:
        capture: Of packed sequences.

    Returns:
        The one document.
    """
    documents = capture.documents or ()
    if len(documents) < 2:
        return None
    one = Document(0, slice(0, documents[-1].rows.stop), slice(0, documents[-1].keys.stop))
    words = "one sequence of all documents (documents merged)"
    return OtherDocuments(words, "documents merged: O fits one sequence of all documents", (one,))


def joined(capture: Capture) -> Capture:
    """The capture with all its documents as one, whatever that means for its outputs.

    Args:
        capture: Of packed sequences.

    Returns:
        A capture of one document.
    """
    whole = merged(capture)
    return capture if whole is None else whole.of(capture)


def seen_in_out(capture: Capture, observation: str) -> OtherDocuments | None:
    """The documents that O itself shows.

    Under a causal mask the first row of each has its own V as O. Without one it sees the keys from its own on, up to
    where the next document begins: the end is taken that fits its O best.

    Args:
        capture: Of packed sequences.
        observation: The observation with an O.

    Returns:
        The documents; None where they are the stated ones, or cannot be told.
    """
    whole, key = merged(capture), capture.key(observation, "o")
    square = all(d.rows == d.keys for d in capture.documents or ())
    if whole is None or not square or is_masked(capture):
        return None
    every, length = whole.of(capture), whole.documents[0].rows.stop
    starts = _begin_unseen(every, key) if capture.metadata.causal == "none" else _begin_alone(every, key)
    stated = [d.rows.start for d in capture.documents or ()]
    if starts == stated or starts[:1] != [0] or 2 * len(starts) > length:
        return None
    ends = [*starts[1:], length]
    found = tuple(Document(i, slice(*e), slice(*e)) for i, e in enumerate(zip(starts, ends, strict=True)))
    changed = sorted({*starts} ^ {*stated})
    listed = ", ".join(map(str, starts[:8])) + (", …" if len(starts) > 8 else "")
    off = len(changed) == 2 and changed[1] - changed[0] == 1 and len(starts) == len(stated)
    why = "a border is off by one" if off else "other borders"
    words = f"a cut into documents that begin at rows {listed} ({why})"
    return OtherDocuments(words, f"{why}: O fits documents that begin at rows {listed}", found)


def _begin_alone(every: Capture, key: str) -> list[int]:
    """Rows whose O is their own V, in every head that is looked at."""
    group, alone = every.q_heads // every.kv_heads, list[Tensor]()
    for head in range(min(every.q_heads, _HEADS)):
        out, v = every.read(key, 0, head), every.read("v", 0, head // group)
        if out is None or v is None or out.shape != v.shape:
            return []
        v = v.float() * every.descale("v", 0, head // group)
        alone.append(((out.float() - v).abs() <= _SAME * v.abs()).all(1))
    found: list[int] = torch.stack(alone).all(0).nonzero()[:, 0].tolist()
    return found


def _begin_unseen(every: Capture, key: str) -> list[int]:
    """Where documents begin, each behind the last key that the first row of the one before sees; [] unless all fit."""
    m, group, heads = every.metadata, every.q_heads // every.kv_heads, list[tuple[Tensor, ...]]()
    for head in range(min(every.q_heads, _HEADS)):
        given = [every.read(n, 0, h) for n, h in (("q", head), ("k", head // group), ("v", head // group), (key, head))]
        factors = [every.descale("q", 0, head), *(every.descale(n, 0, head // group) for n in "kv"), 1.0]
        if any(t is None for t in given) or m.window is not None or every.has_sinks or SLOPES in every.tensors:
            return []
        heads.append(tuple(t.double() * f for t, f in zip(given, factors, strict=True) if t is not None))
    starts, length = [0], len(heads[0][1])
    while True:
        row, errors = starts[-1], torch.zeros(length - starts[-1], dtype=torch.float64)
        for q, k, v, out in heads:
            scores = k[row:] @ q[row] * every.scale
            scores = scores if m.softcap is None else m.softcap * (scores / m.softcap).tanh()
            probs = (scores - scores.amax()).exp()[:, None]
            made = (probs * v[row:]).cumsum(0) / probs.cumsum(0)
            errors += (made - out[row]).square().sum(1) / out[row].square().sum()
        best = int(errors.argmin())
        if not float(errors[best]) <= len(heads) * _SAME**2:
            return []
        if row + best + 1 == length:
            return starts
        starts.append(row + best + 1)


def near(capture: Capture, batch: int) -> Iterator[OtherDocuments]:
    """Cuts in which one document is merged with a neighbour, or has a border one row off.

    Args:
        capture: Of packed sequences.
        batch: Index of the document.

    Yields:
        Each of them.
    """
    documents = capture.documents or ()
    for way, i in (("before", batch - 1), ("after", batch)):
        if not 0 <= i < len(documents) - 1:
            continue
        one, two = documents[i : i + 2]
        if len(documents) > 2:
            both = Document(i, slice(one.rows.start, two.rows.stop), slice(one.keys.start, two.keys.stop))
            words = f"this document with the one {way} (documents merged)"
            yield OtherDocuments(words, words, (*documents[:i], both, *documents[i + 2 :]))
        for by in (-1, 1):
            moved = _moved(one, two, by)
            if moved is not None:
                end = "begins" if way == "before" else "ends"
                words = f"a document that {end} one row {'later' if by > 0 else 'earlier'} (a border off by one)"
                yield OtherDocuments(words, words, (*documents[:i], *moved, *documents[i + 2 :]))


def _moved(one: Document, two: Document, by: int) -> tuple[Document, Document] | None:
    ends = [(one.rows.stop + by, one.rows, two.rows), (one.keys.stop + by, one.keys, two.keys)]
    if any(not before.start < end < after.stop for end, before, after in ends):
        return None
    (row, *rows), (key, *keys) = ends
    return (
        Document(one.number, slice(rows[0].start, row), slice(keys[0].start, key)),
        Document(two.number, slice(row, rows[1].stop), slice(key, keys[1].stop)),
    )


def is_masked(capture: Capture) -> bool:
    """Whether masks or positions of its rows say more of who sees whom than the documents do."""
    return "mask" in capture.tensors or "q_positions" in capture.tensors
