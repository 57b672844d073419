"""Other sinks than a capture states: what a kernel computes that drops them, takes another head's, or has its own."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from attn_diag.captures.capture import Capture
from attn_diag.head.read import read_float64, read_head
from attn_diag.reference import reference_rows

_MOST_HEADS = 16
# Logits this near make one sink: P moves by less than half a unit of BF16.
_SAME = 1e-3
_ROWS = 64
_TILES = (16, 32, 64, 128, 256)
# A logit read off an O is another one from here on; it was within 0.0013 of what the kernel had in 22 heads in BF16.
_FITTED, _NEAR = 0.02, 0.003
_MOST_TIMES = math.log(16)
# Rows in which a sink takes between so much and all but so much of the probability tell its logit.
_TELLING, _FEWEST = 0.004, 3
# A sink is found in an O where a constant factor leaves so many times its error.
_BEATS = 4.0


@dataclass(frozen=True)
class OtherSink:
    """A logit that a head's sink may have had."""

    words: str
    """What follows "are what … gives"."""
    logit: float | None
    """The logit; None: no sink."""


def other_sinks(
    capture: Capture, head: int, seen: float | None = None, nearest_seen: float = _FITTED
) -> list[OtherSink]:
    """The sinks that a faulty kernel may have given a head.

    Args:
        capture: The capture.
        head: Index of the query head in the capture.
        seen: The logit that its O or LSE seems to have seen.
        nearest_seen: From how far off the stated one it is another.

    Returns:
        None at all, those of other heads, and mistakes in the logit; the off-by-one softmax where none is stated.
    """
    own = capture.sink(head)
    if own is None or not math.isfinite(own):
        named = "" if seen is None else f"an unstated sink of logit {_written(seen)}{_or_zeros(capture, seen)}"
        return [OtherSink(named, seen)] * (seen is not None) + [
            OtherSink("the off-by-one softmax (an unstated sink of logit 0)", 0.0)
        ]
    offset = capture.metadata.head_offset
    nearest = sorted((h for h in range(capture.q_heads) if h != head), key=lambda h: abs(h - head))[:_MOST_HEADS]
    found = [OtherSink("no sink (the sink dropped)", None)]
    found += [OtherSink(f"the sink of head {h + offset}", capture.sink(h)) for h in nearest]
    found += [
        OtherSink("the off-by-one softmax (a sink of logit 0)", 0.0),
        OtherSink("a sink of the opposite sign", -own),
        OtherSink("the sink's logit times the scale", own * capture.scale),
        OtherSink("the sink's logit divided by the scale", own / capture.scale),
        OtherSink("a sink in base 2 (exp2 of its logit)", own * math.log(2)),
        OtherSink("a sink whose logit is multiplied by log2(e)", own * math.log2(math.e)),
    ]
    if seen is not None and abs(seen - own) > nearest_seen:
        # Kernels that split the keys have added it once a split.
        times = round(math.exp(min(seen - own, _MOST_TIMES)))
        counted = times > 1 and abs(own + math.log(times) - seen) < _NEAR
        named = (
            f"the sink counted {times} times" if counted else f"a sink of logit {_written(seen)}, not {_written(own)},"
        )
        found.append(OtherSink(named, own + math.log(times) if counted else seen))
    return [s for s in found if s.logit is None or (math.isfinite(s.logit) and abs(s.logit - own) > _SAME)]


def _written(logit: float) -> str:
    """To a thousandth: 0 where a fit leaves 7e-06."""
    return f"{round(logit, 3) + 0.0:.4g}"


def _or_zeros(capture: Capture, seen: float) -> str:
    """What looks like an unstated sink too: n keys of zeros, whose scores of 0 add n = exp(logit) to each row sum."""
    if abs(seen) < _NEAR:
        return " (or one key of zeros that is not masked)"
    for size in _TILES if capture.documents is None else ():
        missing = -capture.k_length % size
        if missing and abs(math.log(missing) - seen) < _NEAR:
            return f" (or {missing} keys of zeros that fill a tile of {size} and are not masked)"
    return ""


def with_other_sinks(capture: Capture, observation: str, device: torch.device) -> Iterator[tuple[str, Capture]]:
    """The capture with other sinks in all its heads, and what is to be said where its O fits them.

    Args:
        capture: The capture.
        observation: The observation with an O, from which unknown sinks are read.
        device: Where they are computed.

    Yields:
        Words and capture.
    """
    bare = replace(
        capture, tensors={n: t for n, t in capture.tensors.items() if n != "sinks" and not n.endswith("dsinks")},
        metadata=replace(capture.metadata, softmax_offset=None, lse_sink="included"),
    )  # fmt: skip
    heads = range(capture.q_heads)
    if not capture.has_sinks:
        found = [logit_in_out(capture, observation, 0, head, device) for head in heads]
        known = [s for s in found if s is not None]
        if known:
            listed = ", ".join(f"{s:.2g}" for s in known[:4]) + (", …" if len(known) > 4 else "")
            alike = _or_zeros(capture, known[0]) if max(known) - min(known) < _FITTED else ""
            yield f"sinks that the capture does not state (logits {listed}){alike}: O fits them", _with(bare, found)
        return
    yield "sinks dropped: O fits attention without them", bare
    stated = [capture.sink(head) for head in heads]
    for by in (1, -1):
        if len(stated) > 1:
            way = "before" if by > 0 else "further on"
            yield f"sinks off by one head: O fits those of the head {way}", _with(bare, stated[-by:] + stated[:-by])
    for sink in other_sinks(capture, 0):
        if "head" in sink.words or sink.logit is None:
            continue
        others = [next((s.logit for s in other_sinks(capture, h) if s.words == sink.words), stated[h]) for h in heads]
        yield f"other sinks: O fits {sink.words}", _with(bare, others)


def _with(bare: Capture, logits: list[float | None]) -> Capture:
    sinks = torch.tensor([-math.inf if s is None else s for s in logits], dtype=torch.float64)
    return replace(bare, tensors={**bare.tensors, "sinks": sinks})


def logit_in_out(capture: Capture, observation: str, batch: int, head: int, device: torch.device) -> float | None:
    """The logit of the sink that a head's O seems to have seen; None where no sink explains it."""
    inputs, out = (
        read_head(capture, batch, head, device),
        read_float64(capture, capture.key(observation, "o"), batch, head, device),
    )
    if out is None:
        return None
    rows = torch.linspace(0, len(out) - 1, min(len(out), _ROWS)).long().to(device)
    block = reference_rows(replace(inputs.head, do=None, sink=None), rows)
    inputs.mark_rows(block)
    truth, observed = block.out, out[rows]
    kept = ~inputs.unusable[rows] & ~block.fully_masked & observed.isfinite().all(1) & (truth.square().sum(1) > 0)
    truth, observed, lse = truth[kept], observed[kept], block.lse[kept]
    share = (observed * truth).sum(1) / truth.square().sum(1)
    # Where the sink takes next to nothing, or all, a rounding of O moves its logit far.
    telling = (share > _TELLING) & (share < 1 - _TELLING)
    if int(telling.sum()) < _FEWEST:
        return None
    share, weight = share[telling], (truth.square().sum(1).sqrt()[telling] * share[telling] * (1 - share[telling]))
    logits, order = (lse[telling] + (1 / share - 1).log()).sort()
    passed = weight[order].cumsum(0)
    logit = float(logits[int((passed >= passed[-1] / 2).nonzero()[0, 0])])
    factor = float((observed * truth).sum() / truth.square().sum())
    left = float((observed - truth * torch.sigmoid(lse - logit)[:, None]).square().sum())
    other = min(float((observed - f * truth).square().sum()) for f in (1.0, factor))
    return None if _BEATS * left > other else logit
