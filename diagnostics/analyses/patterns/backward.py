"""How some rows of dQ, dK or dV may have come about: delta, mask, head, a transposed or another tensor, a lost part."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain

import torch
from torch import Tensor

from attn_diag.analyses.patterns import of_mistake, of_sink, of_softcap
from attn_diag.analyses.patterns.evidence import EXPLAINS, Evidence, Guess, row_limit
from attn_diag.analyses.patterns.lines import FACTOR_FROM
from attn_diag.analyses.patterns.lost_parts import lost_parts
from attn_diag.analyses.patterns.misread import nearest_shift, other_lse, other_references, rows_away
from attn_diag.analyses.patterns.not_cleared import not_cleared
from attn_diag.analyses.patterns.other_scale import other_scale
from attn_diag.analyses.patterns.parts_of_heads import parts_of_heads
from attn_diag.analyses.patterns.readings import (
    Reading,
    first_features,
    other_documents,
    other_heads,
    other_masks,
    other_softcap,
    shifted_keys,
    unstated_windows,
)
from attn_diag.analyses.patterns.slab import Slab, open_slab, slab_of
from attn_diag.reference import AttentionHead, HeadReference, reference_rows
from attn_diag.reference.fused import reference_of
from attn_diag.results.quality import Quantity
from attn_diag.results.wording import number

# A head is streamed again for another reading only if it has at most so many scores.
_MOST_SCORES = 2**22
# An unknown delta is named in so many rows, where it is off by so much of its terms' root mean square sum.
_SEVERAL, _DELTA_FROM = 4, 0.25
# What is said where a right backward, fed with what the forward returned, makes an error.
FORWARD_BLAMED = ": its forward is to blame, not its backward"
# An error of which so little lies in other directions is one of delta.
_ALL_BUT = 0.05
_OTHER_LSE: dict[str, Callable[[HeadReference], Tensor]] = {
    "L in base 2 as if it were natural": lambda r: r.lse * math.log2(math.e),
    "the natural L as if it were in base 2": lambda r: r.lse * math.log(2),
    "the row maximum in the place of L": lambda r: r.row_max,
}
_SWAPPED: dict[Quantity, Quantity] = {"dq": "dk", "dk": "dq"}


def of_gradient(evidence: Evidence, rows: Tensor) -> Iterator[Guess]:
    """Guesses for some rows of dQ, or some keys of dK or dV.

    Args:
        evidence: The gradient.
        rows: Which n rows or keys.
    """
    slabs = [slab_of(h, r, evidence.quantity, rows) for h, r in zip(evidence.heads, evidence.references, strict=True)]
    # First, so that of two guesses that say the same it is taken: a wrong O has a wrong delta.
    yield from _of_captured(evidence, rows)
    yield from _other_delta(evidence, slabs, rows)
    if evidence.quantity == "dq" and len(rows) < _SEVERAL and _is_delta(evidence.error[rows], _along(slabs[0])):
        return  # whatever changes delta in a row or two fits
    yield from _other_formula(evidence, slabs, rows)
    yield from of_softcap.of_gradient(evidence, slabs, rows)
    yield from _other_tensor(evidence, rows)
    yield from parts_of_heads(evidence, slabs, rows)
    yield from lost_parts(evidence, slabs, rows)
    yield from not_cleared(evidence, rows)
    yield from of_sink.of_gradient(evidence, rows)
    yield from of_mistake.of_gradient(evidence, rows)
    yield from of_mistake.in_dscores(evidence, slabs, rows)
    yield from _other_reading(evidence, rows)
    if evidence.quantity == "dq":
        yield from other_lse(evidence, rows)
        yield from _own_delta(evidence, slabs[0], rows)


def _total(slabs: list[Slab], weights: list[Tensor]) -> Tensor:
    return torch.stack([s.total(w) for s, w in zip(slabs, weights, strict=True)]).sum(0)


def _other_delta(evidence: Evidence, slabs: list[Slab], rows: Tensor) -> Iterator[Guess]:
    if evidence.quantity == "dv":
        return
    alpha = evidence.heads[0].scale
    changes: dict[str, Callable[[Tensor], Tensor]] = {
        "are without delta (dS = P o dP)": torch.zeros_like,
        "have delta with the wrong sign": lambda d: -d,
        "have delta multiplied by the scale": lambda d: alpha * d,
        "have delta divided by the scale": lambda d: d / alpha,
        "have delta of the next row": lambda d: d.roll(-1),
        "have delta of the row before": lambda d: d.roll(1),
        "have delta twice": lambda d: 2 * d,
    }
    for words, change in changes.items():
        weights = []
        for slab, reference in zip(slabs, evidence.references, strict=True):
            assert reference.delta is not None
            changed = change(reference.delta)
            weights.append(slab.weights(changed[rows][:, None] if evidence.quantity == "dq" else changed[None, :]))
        yield Guess("delta", words, _total(slabs, weights))


def _other_formula(evidence: Evidence, slabs: list[Slab], rows: Tensor) -> Iterator[Guess]:
    """P not normalised or left out or made with another L, dS transposed."""
    name, sums = evidence.quantity, [r.row_sum for r in evidence.references]
    spread = [s[rows][:, None] if name == "dq" else s[None, :] for s in sums]
    weights = [s.weights() for s in slabs]
    words = "use P before its division by the row sum"
    yield Guess("formula", words, _total(slabs, [w * s for w, s in zip(weights, spread, strict=True)]))
    for words, change in _OTHER_LSE.items():
        opened = [
            open_slab(s.head, name, rows, change(r), r.delta) for s, r in zip(slabs, evidence.references, strict=True)
        ]
        yield Guess("lse", f"use {words}", _total(opened, [s.weights() for s in opened]))
    if name != "dv":
        plain = []
        for slab in slabs:
            assert slab.dprobs is not None
            assert slab.delta is not None
            plain.append(slab.head.scale * (slab.dprobs - slab.delta))
        yield Guess("formula", "are without P (dS = dP - delta)", _total(slabs, plain))
        yield Guess("formula", "have P in the place of dS", _total(slabs, [s.probs * s.head.scale for s in slabs]))
    else:
        scores = [slab_of(s.head, r, "dk", rows) for s, r in zip(slabs, evidence.references, strict=True)]
        plain = [s.weights() / s.head.scale for s in scores]
        yield Guess("formula", "have dS in the place of P", _total(slabs, plain))
    head = evidence.heads[0]
    if len(slabs) == 1 and len(head.q) == len(head.k) and name in ("dq", "dk", "dv"):
        turned = open_slab(head, _turned(name), rows, evidence.references[0].lse, evidence.references[0].delta)
        matrix = turned.weights().masked_fill(~turned.visible, 0.0)
        what = "P" if name == "dv" else "dS"
        yield Guess("transpose", f"have {what} transposed", matrix @ slabs[0].vectors)


def _turned(name: Quantity) -> Quantity:
    # O's weights are P, as dV's are once transposed.
    return _SWAPPED.get(name, "o")


def _other_tensor(evidence: Evidence, rows: Tensor) -> Iterator[Guess]:
    for name, tensor in evidence.outputs.items():
        if name != evidence.name and tensor.shape == evidence.truth.shape:
            yield Guess("tensor", f"hold {name}", tensor[rows])
            yield Guess("tensor", f"hold {name} with the wrong sign", -tensor[rows])


def _of_captured(evidence: Evidence, rows: Tensor) -> Iterator[Guess]:
    """A right backward, fed with the O and LSE that the kernel returned."""
    if len(evidence.captured) < len(evidence.heads) or not all("o" in c for c in evidence.captured):
        return
    parts = []
    for head, reference, captured in zip(evidence.heads, evidence.references, evidence.captured, strict=True):
        assert head.do is not None
        lse, delta = captured.get("lse", reference.lse), (head.do * captured["o"]).sum(1)
        slab = open_slab(head, evidence.quantity, rows, lse, delta)
        parts.append(slab.total(slab.weights()))
    names = "O and LSE" if "lse" in evidence.captured[0] else "O"
    words = f"follow from the {names} that the kernel returned{FORWARD_BLAMED}"
    yield Guess("forward", words, torch.stack(parts).sum(0))


def _other_reading(evidence: Evidence, rows: Tensor) -> Iterator[Guess]:
    """Another mask, softcap or head: in the backward alone (true O, L and delta), or throughout."""
    if len(evidence.heads) > 1:
        yield from _shared_reading(evidence, rows)
        return
    head, reference = evidence.heads[0], evidence.references[0]
    readings = chain(_own_readings(head), other_heads(evidence), other_documents(evidence))
    for reading in readings:
        alone = _weighed(reading.head, evidence.quantity, rows, reference)
        # With one tensor of another head O is wrong as well, which says more than dK or dV would.
        mixed = reading.kind == "head" and reading.head.q is not head.q and reading.head.k is not head.k
        known = evidence.quantity == "dq" or reading.kind != "head" or mixed
        whole = _throughout(reading.head, evidence.quantity, rows) if known else None
        where = " in the backward alone" if whole is not None else ""
        yield Guess(reading.kind, f"are what {reading.words}{where} gives", alone)
        if whole is not None:
            yield Guess(reading.kind, f"are what {reading.words} gives", whole, 1)
    yield from other_scale(
        evidence,
        rows,
        lambda scale, at: _weighed(replace(head, scale=scale), evidence.quantity, at, reference),
        " in the backward alone",
    )
    if evidence.quantity != "dv":
        where = " in the backward's exponent alone"
        yield from other_scale(evidence, rows, partial(_in_exponent, head, evidence.quantity, reference), where)
    if evidence.quantity == "dq":
        yield from other_scale(evidence, rows, lambda scale, at: _dq(replace(head, scale=scale), at))


def _own_readings(head: AttentionHead) -> Iterator[Reading]:
    masks = chain(other_masks(head), unstated_windows(head))
    return chain(masks, other_softcap(head), first_features(head), shifted_keys(head))


def _shared_reading(evidence: Evidence, rows: Tensor) -> Iterator[Guess]:
    """Another reading of all query heads of a key head, in the backward alone."""
    heads, references = evidence.heads, evidence.references

    def total(changed: Sequence[AttentionHead]) -> Tensor:
        parts = [_weighed(h, evidence.quantity, rows, r) for h, r in zip(changed, references, strict=True)]
        return torch.stack(parts).sum(0)

    for readings in zip(*map(_own_readings, heads), strict=False):
        if len({one.words for one in readings}) == 1:
            words = f"are what {readings[0].words} in the backward alone gives"
            yield Guess(readings[0].kind, words, total([one.head for one in readings]))


def _weighed(head: AttentionHead, quantity: Quantity, rows: Tensor, reference: HeadReference) -> Tensor:
    slab = open_slab(head, quantity, rows, reference.lse, reference.delta)
    return slab.total(slab.weights())


def _in_exponent(
    head: AttentionHead, quantity: Quantity, reference: HeadReference, scale: float, rows: Tensor
) -> Tensor:
    """The rows of dQ or dK with P of another scale, and the head's own in the product with K or Q."""
    found = _weighed(replace(head, scale=scale), quantity, rows, reference)
    return found * (head.scale / scale if scale else math.inf)


def _dq(head: AttentionHead, rows: Tensor) -> Tensor:
    found = reference_rows(head, rows).dq
    assert found is not None
    return found


def _throughout(head: AttentionHead, quantity: Quantity, rows: Tensor) -> Tensor | None:
    """The rows under another reading of the whole attention; None where that costs too much."""
    if quantity == "dq":
        return _dq(head, rows)
    if len(head.q) * len(head.k) > _MOST_SCORES:
        return None
    assert head.do is not None
    # Of the other rows only L and delta are needed.
    forward = reference_of(replace(head, do=None))
    slab = open_slab(head, quantity, rows, forward.lse, (head.do * forward.out).sum(1))
    return slab.total(slab.weights())


def _along(slab: Slab) -> Tensor:
    """alpha P K, [n, D]."""
    return slab.total(slab.weights(0.0)) - slab.total(slab.weights(1.0))


def _is_delta(error: Tensor, along: Tensor) -> bool:
    """Whether some delta in each row explains the errors."""
    share = (error * along).sum(1, keepdim=True) / along.square().sum(1, keepdim=True).clamp(min=1e-300)
    return float((error - share * along).square().sum()) <= _ALL_BUT * float(error.square().sum())


def _own_delta(evidence: Evidence, slab: Slab, rows: Tensor) -> Iterator[Guess]:
    """dQ with a delta of its own in every row, projected from the error: alpha (P o (dP - d)) K for any d."""
    assert slab.delta is not None
    along = _along(slab)
    size = along.square().sum(1).clamp(min=1e-300)
    error = evidence.error[rows]
    found = slab.delta[:, 0] - (error * along).sum(1) / size
    # Where all rows of P K point one way and dQ too, any error is of this kind.
    other = along.roll(len(along) // 3 + 1, 0)
    share = (error * other).sum(1, keepdim=True) / other.square().sum(1, keepdim=True).clamp(min=1e-300)
    limit = row_limit(evidence.truth.shape[1]) * evidence.noise[rows]
    vacuous = (error - share * other).square().sum(1) <= torch.maximum(limit, (1 - EXPLAINS) * error.square().sum(1))
    if len(rows) < 2 or float(vacuous.double().mean()) > 0.2 or evidence.truth.shape[1] < 4:
        return
    own = found - slab.delta[:, 0]
    for guess in _known_deltas(evidence, found, size, rows):
        words, delta = guess
        changed = evidence.truth[rows] - (delta - slab.delta[:, 0])[:, None] * along
        yield Guess("delta", words, changed, 1)
    assert evidence.heads[0].do is not None
    size_of_delta = (evidence.heads[0].do * evidence.references[0].out).square().sum(1).sqrt()[rows]
    if len(rows) < _SEVERAL or float(own.abs().median()) < _DELTA_FROM * float(size_of_delta.median()):
        return  # coarse O does that
    yield Guess("delta", "have a delta that is off", evidence.truth[rows] - own[:, None] * along, len(rows))


def _known_deltas(evidence: Evidence, found: Tensor, weight: Tensor, rows: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The multiple of the true delta, and the other row's delta, that is nearest to those found."""
    true = evidence.references[0].delta
    assert true is not None
    factor = float((weight * found * true[rows]).sum() / (weight * true[rows].square()).sum().clamp(min=1e-300))
    # None, and the opposite, are guesses of their own.
    if abs(factor - 1) >= FACTOR_FROM and min(abs(factor), abs(factor + 1)) > 2 * FACTOR_FROM:
        yield f"have delta multiplied by {number(factor, 2)}", factor * true[rows]
    head, reference = evidence.heads[0], evidence.references[0]
    assert head.do is not None
    half = torch.arange(head.do.shape[1], device=rows.device) < head.do.shape[1] // 2
    products = head.do[rows] * reference.out[rows]
    yield "have a delta of the first half of the features alone", (products * half).sum(1)
    yield "have a delta of the second half of the features alone", (products * ~half).sum(1)
    yield "have a delta of O before its division by the row sum", true[rows] * reference.row_sum[rows]
    for name, other in other_references(evidence):
        if other.delta is not None:
            yield f"have the delta of {name}", other.delta[rows]
    if shift := nearest_shift(true, found, weight, rows):
        yield f"have the delta {rows_away(shift)}", true[(rows + shift).clamp(0, len(true) - 1)]
