"""Which query heads' parts are in dK and dV of a key head that several share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from attn_diag.analyses.patterns.evidence import Evidence, Guess
from attn_diag.analyses.patterns.slab import Slab, slab_of
from attn_diag.reference.fused import reference_of
from attn_diag.results.wording import together

# Other heads are streamed only if they have at most so many scores.
_MOST_SCORES = 2**22


def parts_of_heads(evidence: Evidence, slabs: list[Slab], rows: Tensor) -> Iterator[Guess]:
    """Guesses that some of the heads stand alone, are left out or counted twice, or are those of other key heads.

    Args:
        evidence: dK or dV; of a single query head there are none.
        slabs: The rows in each query head that makes them.
        rows: Which n keys.
    """
    if len(slabs) < 2:
        return
    parts = torch.stack([s.total(s.weights()) for s in slabs])
    yield from _parts_of_others(evidence, parts, rows)
    rounded = _counts(evidence, parts, rows, own=len(parts))
    if rounded is None:
        return
    said = []
    for times, words in ((0, "leave out"), (2, "count twice")):
        named = [name for name, c in zip(evidence.names, rounded.tolist(), strict=True) if c == times]
        if len(named) == len(slabs) - 1 and times == 0:
            named = []
            alone = next(name for name, c in zip(evidence.names, rounded.tolist(), strict=True) if c)
            said.append(f"hold {alone}'s part alone")
        elif named:
            said.append(f"{words} {', '.join(named)}")
    if said and set(rounded.tolist()) <= {0.0, 1.0, 2.0}:
        prediction = torch.einsum("h,hnd->nd", rounded, parts)
        yield Guess("heads", " and ".join(said), prediction, 1)


def _parts_of_others(evidence: Evidence, parts: Tensor, rows: Tensor) -> Iterator[Guess]:
    """Parts of query heads of which some belong to other key heads."""
    read = [(name, head()) for name, head in evidence.others if len(rows) * len(evidence.truth) <= _MOST_SCORES]
    read = [(n, h) for n, h in read if h.k.shape == evidence.heads[0].k.shape and h.do is not None]
    if not read:
        return
    theirs = [slab_of(h, reference_of(h, key_gradients=False), evidence.quantity, rows) for _, h in read]
    every = torch.cat([parts, torch.stack([s.total(s.weights()) for s in theirs])])
    counts = _counts(evidence, every, rows, own=len(parts))
    if counts is None or not set(counts.tolist()) <= {0.0, 1.0} or not bool(counts[len(parts) :].any()):
        return
    names = [*evidence.names, *(name for name, _ in read)]
    held = sorted((n for n, c in zip(names, counts.tolist(), strict=True) if c), key=_in_order(evidence))
    more = [name for name in held if name not in evidence.names]
    if len(held) - len(more) == len(parts):
        words = f"hold the part{'s' if len(more) > 1 else ''} of {together(more)} besides their own"
    elif key_head := _key_head(evidence, held):
        own = _key_head(evidence, evidence.names)
        words = f"hold what belongs in {key_head}, not in {own} ({together(evidence.names)})"
    else:
        words = f"hold the part{'s' if len(held) > 1 else ''} of {together(held)}, not of {together(evidence.names)}"
    yield Guess("heads", words, torch.einsum("h,hnd->nd", counts, every), 1, 2 ** len(names))


def _in_order(evidence: Evidence) -> Callable[[str], int]:
    order = list(evidence.key_heads)
    return lambda name: order.index(name) if name in order else len(order)


def _key_head(evidence: Evidence, names: Sequence[str]) -> str:
    """The key head of which these are all query heads; "" where there is none."""
    found = {evidence.key_heads.get(name, "") for name in names}
    one = found.pop() if len(found) == 1 else ""
    return one if {n for n, key_head in evidence.key_heads.items() if key_head == one} == set(names) else ""


def _counts(evidence: Evidence, parts: Tensor, rows: Tensor, own: int) -> Tensor | None:
    """How many times the rows hold each of some parts, [heads, n, D]; None where not whole, or of their ``own`` first
    each once, and no other.
    """
    noise = evidence.noise[rows].clamp(min=1e-300).sqrt()[None, :, None]
    matrix = (parts / noise).flatten(1).T
    goal = (evidence.observed[rows] / noise[0]).flatten()[:, None]
    coefficients: Tensor = torch.linalg.lstsq(matrix, goal).solution[:, 0]
    rounded = coefficients.round()
    right = (torch.arange(len(parts), device=rows.device) < own).to(rounded)
    if bool((coefficients - rounded).abs().max() > 0.05) or torch.equal(rounded, right):
        return None
    return rounded
