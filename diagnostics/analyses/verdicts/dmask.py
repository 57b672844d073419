"""The gradient of an additive mask judged: sums over the axes along which the mask is broadcast."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, MutableSequence, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attn_diag.analyses.verdicts.dsinks import judge_dsinks
from attn_diag.captures.capture import Capture
from attn_diag.head.mask_gradients import MaskTerms, summed
from attn_diag.head.quality import LOSSY
from attn_diag.head.read import read_head
from attn_diag.head.sink_gradients import SinkTerms
from attn_diag.reference import format_of, ulp
from attn_diag.results.quality import Pattern, QuantityVerdict
from attn_diag.results.wording import number, percent

# So many standard deviations are beyond rounding, in any of many elements.
_LIMIT = 8.0
# fp32 sums of n terms, pairwise or by atomics: so much of the sum of their sizes.
_FP32_SUM = 2.0**-18
# A mistake is named where it leaves so little of the squared error.
_LEAVES = 0.05
_MOST_PARTS = 8
_FACTORS = {2.0: "is twice the true one", 0.5: "is half of the true one", math.log(2): "is ln 2 times the true one",
            math.log2(math.e): "is log2(e) times the true one"}  # fmt: skip


def judge_sums(
    capture: Capture,
    observation: str,
    sinks: Mapping[int, Sequence[SinkTerms | None]],
    batches: Sequence[int],
    device: torch.device,
    quantities: Mapping[int, MutableSequence[QuantityVerdict]],
) -> tuple[str, ...]:
    """Add the verdicts of gradients that are sums over sequences: dSink and dMask.

    Args:
        capture: The capture.
        observation: The observation's name.
        sinks: By head, as of ``judge_dsinks``.
        batches: The sequences that are looked at.
        device: Where the reference runs once more.
        quantities: By head, the verdicts of the other quantities; changed.

    Returns:
        What was not judged, and why.
    """
    of_sinks = judge_dsinks(capture, observation, sinks, quantities)
    of_mask = judge_dmask(capture, observation, list(sinks), batches, device, quantities)
    return tuple(f"{n} ({why})" for n, why in (("dSink", of_sinks), ("dMask", of_mask)) if why is not None)


def judge_dmask(
    capture: Capture,
    observation: str,
    heads: Sequence[int],
    batches: Sequence[int],
    device: torch.device,
    quantities: Mapping[int, MutableSequence[QuantityVerdict]],
) -> str | None:
    """Add the verdict of dMask to those of every head.

    Args:
        capture: The capture.
        observation: The observation's name.
        heads: Those that are looked at.
        batches: Likewise.
        device: Where the reference runs once more.
        quantities: By head, the verdicts of the other quantities; changed.

    Returns:
        Why it was not judged; None where it was, and where none was captured.
    """
    source = capture.tensors.get(capture.key(observation, "dmask"))
    if source is None:
        return None
    if capture.documents is not None:
        return "of packed sequences it is not judged"
    lead = (1,) * (4 - len(source.shape)) + tuple(source.shape)
    if lead[0] == 1 and len(batches) < capture.batch:
        return "all sequences are needed, it is one sum over them"
    if lead[1] == 1 and len(heads) < capture.q_heads:
        return "all heads are needed, it is one sum over them"
    known = 0
    for of_heads in [[h] for h in heads] if lead[1] > 1 else [list(heads)]:
        verdicts = []
        for of_batches in [[b] for b in batches] if lead[0] > 1 else [list(batches)]:
            parts = _parts(capture, of_batches, of_heads, lead, device)
            if parts is None:
                continue
            at = (of_batches[0] if lead[0] > 1 else 0, of_heads[0] if lead[1] > 1 else 0)
            values = source[at[4 - len(source.shape) :] or ...].to(device)
            fine = all(any(q.quantity == "o" and q.answer == "good" for q in quantities[h]) for h in of_heads)
            verdicts.append(_judged(_Gradient(values, parts, fine, abs(capture.scale)), of_batches))
        if verdicts:
            known += 1
            for head in of_heads:
                quantities[head].append(max(verdicts, key=lambda v: (_ORDER.index(v.answer), v.factor or 0.0)))
    return None if known else "a row with NaN or Inf, or beyond float64, is part of every sum"


_ORDER = ("good", "lossy", "wrong", "nonfinite")


def _parts(
    capture: Capture, batches: Sequence[int], heads: Sequence[int], lead: Sequence[int], device: torch.device
) -> list[MaskTerms] | None:
    """One a sequence; None where the truth of some row is not known."""
    found = []
    for batch in batches:
        terms = MaskTerms((lead[2], lead[3]), device)
        for head in heads:
            if not terms.add(read_head(capture, batch, head, device)):
                return None
        found.append(terms)
    return found


@dataclass(frozen=True)
class _Gradient:
    """One gradient that was captured, and what is true of it."""

    stored: Tensor
    """[Tq or 1, Tk or 1]."""
    parts: Sequence[MaskTerms]
    """One a sequence."""
    fine: bool
    """Whether O is as good as a well-rounded kernel's."""
    scale: float
    """alpha."""

    def noise(self, terms: MaskTerms, observed: Tensor) -> Tensor:
        """A well-rounded kernel's expected squared error of every element."""
        fmt = format_of(self.stored.dtype)
        return terms.variance + torch.maximum(ulp(terms.total, fmt), ulp(observed, fmt)).square() / 12

    def limit(self, terms: MaskTerms, observed: Tensor) -> Tensor:
        """How far any sane kernel may be off."""
        fmt = format_of(self.stored.dtype)
        stored = 2.0**-fmt.precision * torch.maximum(terms.total.abs(), observed.abs()).clamp(min=fmt.smallest_normal)
        spread = (terms.variance + terms.coarse).sqrt()
        return _LIMIT * spread + stored + _FP32_SUM * terms.size + terms.bound


def _judged(gradient: _Gradient, batches: Sequence[int]) -> QuantityVerdict:
    stored = gradient.stored.float() if gradient.stored.dtype.itemsize == 1 else gradient.stored
    observed, terms = stored.double(), summed(gradient.parts)
    if not bool(observed.isfinite().all()):
        bad = int((~observed.isfinite()).sum())
        return QuantityVerdict("dmask", "nonfinite", f"dMask is NaN or Inf in {bad} elements.", rows=terms.rows)
    error = observed - terms.total
    size, off = float(terms.total.norm()), float(error.norm())
    expected = math.sqrt(float(gradient.noise(terms, observed).sum()) or 1e-300)
    # Of a mask that all keys of a row share the gradient is 0, but for rounding.
    relative = off / size if size > expected else None
    said = f"{number(off)} off in norm, where 0 is right" if relative is None else f"{percent(relative)} off"
    factor = off / expected
    beyond = int((~(error.abs() <= gradient.limit(terms, observed))).sum())
    if beyond:
        fitting = [
            (float((observed - value).square().sum()) / max(float(error.square().sum()), 1e-300), words)
            for words, value in _mistakes(gradient, terms, batches)
        ]
        left, words = min(fitting)
        pattern = Pattern("mask", f"it {words}") if left <= _LEAVES else None
        where = f"{beyond} of {error.numel()} elements are beyond what rounding makes of their sums"
        told = f"dMask is {said}, which no rounding makes: {pattern.words if pattern else where}."
        return QuantityVerdict(
            "dmask", "wrong", told, factor=factor, relative_error=relative, rows=terms.rows, rows_outlying=beyond,
            patterns=() if pattern is None else (pattern,),
        )  # fmt: skip
    if factor > LOSSY:
        told = f"dMask is {said}, {factor:.3g} times what one rounding of dS and a last one make."
        return QuantityVerdict("dmask", "lossy", told, factor=factor, relative_error=relative, rows=terms.rows)
    told = f"dMask is {said}, no more than rounding makes of its sums."
    return QuantityVerdict("dmask", "good", told, factor=factor, relative_error=relative, rows=terms.rows)


def _mistakes(gradient: _Gradient, terms: MaskTerms, batches: Sequence[int]) -> Iterator[tuple[str, Tensor]]:
    total, parts = terms.total, gradient.parts
    if not bool(gradient.stored.double().any()):  # what is merely small is another mistake
        yield "is zero, as if never written", torch.zeros_like(total)
    yield "has the wrong sign", -total
    for factor, words in _FACTORS.items():
        yield words, factor * total
    yield "is multiplied by the scale", gradient.scale * total
    yield "is divided by the scale", total / gradient.scale
    for words, value in terms.others.items():
        yield words, value
    if total.shape[0] == total.shape[1] > 1:
        yield "is transposed", total.T
    if len(parts) > 1:
        yield "is a mean over the batch, not a sum", total / len(parts)
        for batch, part in list(zip(batches, parts, strict=True))[:_MOST_PARTS]:
            yield f"leaves out batch item {batch}", total - part.total
            yield f"is that of batch item {batch} alone", part.total
