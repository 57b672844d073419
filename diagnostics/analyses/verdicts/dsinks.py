"""The gradient of attention sinks judged: one number a head, summed over the rows of all sequences."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, MutableSequence, Sequence
from dataclasses import dataclass

from attn_diag.captures.capture import Capture
from attn_diag.head.sink_gradients import SinkTerms
from attn_diag.reference import format_of
from attn_diag.results.quality import Pattern, QuantityVerdict
from attn_diag.results.wording import number, percent

# So many standard deviations are beyond rounding, in any of the heads of a model.
_LIMIT = 8.0
# fp32 sums of n terms, pairwise or by atomics: so much of the sum of their sizes.
_FP32_SUM = 2.0**-18
_FACTORS = {2.0: "is twice the true one", 0.5: "is half of the true one", math.log(2): "is ln 2 times the true one",
            math.log2(math.e): "is log2(e) times the true one"}  # fmt: skip


@dataclass(frozen=True)
class _Sink:
    """One head's."""

    observed: float
    parts: Sequence[SinkTerms]
    """One a sequence."""
    fine: bool
    """Whether O is as good as a well-rounded kernel's, so that scores and P are."""
    precision: int
    """Of the format in which it was stored."""

    @property
    def total(self) -> float:
        return sum(p.total for p in self.parts)

    @property
    def limit(self) -> float:
        """How far any sane kernel may be off, of the total or of another sum of such terms."""
        variance = sum(p.variance + (0.0 if self.fine else p.coarse) for p in self.parts)
        size = sum(p.size for p in self.parts)
        stored = 2.0**-self.precision * max(abs(self.total), abs(self.observed))
        return _LIMIT * math.sqrt(variance) + stored + _FP32_SUM * size

    @property
    def error(self) -> float:
        return abs(self.observed - self.total)


def judge_dsinks(
    capture: Capture,
    observation: str,
    terms: Mapping[int, Sequence[SinkTerms | None]],
    quantities: Mapping[int, MutableSequence[QuantityVerdict]],
) -> str | None:
    """Add the verdict of dSink to those of every head.

    Args:
        capture: The capture.
        observation: The observation's name.
        terms: By head (its index in the capture), one a sequence.
        quantities: By head, the verdicts of the other quantities; changed.

    Returns:
        Why it was not judged; None where it was, and where there is no sink.
    """
    if not capture.has_sinks:
        return None
    source = capture.tensors.get(capture.key(observation, "dsinks"))
    if source is None:
        return "no dO" if "do" not in capture.tensors else "not captured"
    values = source[...].double()
    precision = format_of(source.dtype).precision
    found: dict[int, _Sink] = {}
    for head, parts in terms.items():
        known = [p for p in parts if p is not None]
        if len(known) != capture.batch:
            continue  # a sum of which a part is unknown
        fine = any(q.quantity == "o" and q.answer == "good" for q in quantities[head])
        found[head] = _Sink(float(values[head]), known, fine, precision)
    wrong = {head: sink for head, sink in found.items() if not sink.error <= sink.limit}
    fitting = {head: list(_fitting(capture, head, sink, found)) for head, sink in wrong.items()}
    # A kernel makes one mistake: what fits most heads comes first.
    common = Counter(name for names in fitting.values() for name in {n for n, _, _ in names})
    for head, sink in found.items():
        quantities[head].append(_verdict(sink, fitting.get(head), common, capture))
    return None if found else "all sequences and rows are needed, it is one sum over them"


def _verdict(
    sink: _Sink, fitting: list[tuple[str, str, float]] | None, common: Counter[str], capture: Capture
) -> QuantityVerdict:
    relative = sink.error / abs(sink.total) if sink.total else None
    off = f"{number(sink.error)} off" if relative is None else f"{percent(relative)} off"
    rows = sum(p.rows for p in sink.parts)
    if not math.isfinite(sink.observed):
        return QuantityVerdict("dsinks", "nonfinite", "dSink is NaN or Inf.", rows=rows)
    if fitting is None:
        words = f"dSink is {off}, no more than rounding makes of its sum."
        return QuantityVerdict("dsinks", "good", words, relative_error=relative, rows=rows)
    words = f"dSink is {off}, which no rounding makes"
    if not fitting:
        of = f"of {number(sink.observed)}, where {number(sink.total)} is right"
        pattern = Pattern("sink", f"it is one sum over the rows of {capture.batch} sequences, {of}")
    else:
        name, said, _ = min(fitting, key=lambda f: (-common[f[0]], f[2]))
        pattern = Pattern("sign" if name == "sign" else "sink", f"it {said}")
    return QuantityVerdict(
        "dsinks", "wrong", f"{words}: {pattern.words}.", relative_error=relative, rows=rows, patterns=(pattern,)
    )


def _fitting(capture: Capture, head: int, sink: _Sink, heads: Mapping[int, _Sink]) -> Iterator[tuple[str, str, float]]:
    """The mistakes that make the number observed: the mistake's name, what is said, and how far off it is."""
    for name, said, value in _mistakes(capture, head, sink, heads):
        limit = sink.limit * max(1.0, abs(value / sink.total)) if sink.total else sink.limit
        if (left := abs(sink.observed - value)) <= limit:
            yield name, said, left


def _mistakes(capture: Capture, head: int, sink: _Sink, heads: Mapping[int, _Sink]) -> Iterator[tuple[str, str, float]]:
    total, parts, scale = sink.total, sink.parts, abs(capture.scale)
    if not sink.observed:  # what is merely small is another mistake
        yield "zero", "is zero, as if never written", 0.0
    yield "sign", "has the wrong sign", -total
    for factor, said in _FACTORS.items():
        yield said, said, factor * total
    yield "scale", "is multiplied by the scale", scale * total
    yield "over scale", "is divided by the scale", total / scale
    yield "mean", "is a mean over the rows, not their sum", total * len(parts) / sum(p.rows for p in parts)
    if len(parts) > 1:
        yield "mean of items", "is a mean over the batch, not a sum", total / len(parts)
        for b, part in enumerate(parts):
            yield f"without {b}", f"leaves out batch item {b}", total - part.total
            yield f"only {b}", f"is that of batch item {b} alone", part.total
    for said in parts[0].others:
        yield said, said, sum(p.others.get(said, math.nan) for p in parts)
    for other, its in heads.items():
        if other != head:
            by = other - head
            yield f"head {by:+d}", f"is that of head {other + capture.metadata.head_offset}", its.total
