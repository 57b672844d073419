"""What else a kernel may compute than its capture states: other semantics, and merges of splits that round.

Each is a way to predict O from the captured q, k and v. It is named only where it leaves what rounding leaves, and
nothing of another kind leaves as little; see ``fit``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from attn_diag.analyses.mismatch.rows import RunRows
from attn_diag.analyses.mismatch.split import Blocks, HeadSemantics, blocks_of, out_of_few
from attn_diag.head.bounded_mask import Leak, words_of
from attn_diag.head.scale_fit import scale_derivative
from attn_diag.head.usual_readings import USUAL_SOFTCAPS, usual_windows
from attn_diag.reference import format_of, round_nearest_even
from attn_diag.results.mismatch import CauseKind
from attn_diag.results.wording import number, plural

_STEPS = 6
_SPLIT_SIZES = (8, 16, 32, 64, 128, 256, 512)
_SPLIT_COUNTS = (2, 3, 4, 8, 16)
_FORMATS = {"BF16": torch.bfloat16, "FP16": torch.float16}

Stated = Sequence[tuple[RunRows, HeadSemantics]]
"""Some heads of a layer in one run, with what the capture states of each."""


@dataclass(frozen=True)
class SplitMerge:
    """Splits of keys with their own softmax, merged through their L in a narrow format."""

    size: int | None
    """Keys of a split, counted from the first key of the call's cache; None: as ``count``."""
    count: int
    """So many splits of the keys of each row."""
    lse: str
    """What L is rounded to before it weighs a split; base 2: it is multiplied by log2(e), base e: divided by that."""
    order: Literal["together", "in turn"]
    """Whether all L are rounded and then summed, or the running one is rounded after each split, as in a ring."""

    @property
    def words(self) -> str:
        """In a sentence."""
        what = f"splits of {self.size} keys" if self.size else f"{self.count} splits of each row's keys"
        how = "" if self.order == "together" else ", one after the other"
        other = {"base 2": "base e", "base e": "base 2"}
        taken = f"in {self.lse}" if self.lse in _FORMATS else f"to {self.lse} that is taken as one to {other[self.lse]}"
        return f"{what} merged through an LSE {taken}{how}"

    def out(self, partials: Partials) -> Tensor:
        """O without any other rounding, [n, Dv]."""
        if self.order == "together":
            kept = self._kept(partials.lse)
            weights = (kept - kept.logsumexp(0)).exp().nan_to_num(0.0)
            return (weights[:, :, None] * partials.o).sum(0)
        total, running = torch.zeros_like(partials.o[0]), torch.full_like(partials.lse[0], -torch.inf)
        for o, lse in zip(partials.o, self._kept(partials.lse), strict=True):
            both = torch.logaddexp(running, lse)
            total = total + (lse - both).exp().nan_to_num(0.0)[:, None] * (o - total)
            # To the wrong base is taken what a split gives, not what is running.
            running = self._kept(both) if self.lse in _FORMATS else both
        return total

    def _kept(self, lse: Tensor) -> Tensor:
        """L as it is kept."""
        if self.lse not in _FORMATS:
            return lse * (math.log2(math.e) if self.lse == "base 2" else math.log(2))
        rounded = round_nearest_even(lse.nan_to_num(neginf=0.0), format_of(_FORMATS[self.lse]))
        return rounded.where(lse.isfinite(), lse)


@dataclass(frozen=True)
class Partials:
    """O and L of every split of a head's keys, in float64."""

    o: Tensor
    """[splits, n, Dv]; 0 where a row sees no key of a split."""
    lse: Tensor
    """[splits, n]; -inf there. A sink is one more split."""

    @classmethod
    def of(cls, rows: RunRows, semantics: HeadSemantics, blocks: Blocks, size: int | None, count: int) -> Partials:
        """Of splits of ``size`` keys, or of ``count`` splits of every row's keys; ``blocks`` of these semantics."""
        visible = semantics.visible
        if size is not None:
            place = torch.arange(visible.shape[1], device=visible.device)
            numbers = (place - rows.cached[:, None]).clamp(min=0).div(size, rounding_mode="floor")
        else:
            per_split = (visible.sum(1, keepdim=True) + count - 1).div(count, rounding_mode="floor").clamp(min=1)
            numbers = (visible.cumsum(1) - 1).clamp(min=0).div(per_split, rounding_mode="floor")
        splits = int(numbers.max()) + 1
        sunk = semantics.sink is not None
        o = rows.o.new_zeros((splits + sunk, *rows.o.shape))
        lse = rows.o.new_full((splits + sunk, len(rows.o)), -torch.inf)
        for at, head, block in blocks:
            scores = block.scores.new_full((len(at), visible.shape[1]), -torch.inf)
            scores[:, block.keys] = block.scores
            first = int(rows.cached[at[0]]) if len(at) else 0
            # A cache that begins before the first token, with padding or another document, is cut within the tokens.
            whole = size is not None and first >= 0 and bool((rows.cached[at] == first).all())
            if whole and size is not None and not bool(visible[at, :first].any()):
                several = -(-(visible.shape[1] - first) // size)
                o[:several, at], lse[:several, at] = _in_runs(scores[:, first:], head.v[first:], size)
                continue
            for split in range(splits):
                part = scores.masked_fill(numbers[at] != split, -torch.inf)
                own = part.logsumexp(1)
                lse[split, at] = own
                o[split, at] = (part - own[:, None]).exp().nan_to_num(0.0) @ head.v
        if semantics.sink is not None:
            lse[-1] = semantics.sink
        return cls(o, lse)


def _in_runs(scores: Tensor, v: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """O [splits, n, Dv] and L [splits, n] of runs of ``size`` keys, the same for all rows."""
    short = -scores.shape[1] % size
    parts = functional.pad(scores, (0, short), value=-torch.inf).view(len(scores), -1, size)
    own = parts.logsumexp(2)
    probs = (parts - own[:, :, None]).exp().nan_to_num(0.0)
    values = functional.pad(v, (0, 0, 0, short)).view(-1, size, v.shape[1])
    return probs.transpose(0, 1) @ values, own.T


Change = Callable[[RunRows, HeadSemantics], HeadSemantics]


@dataclass(frozen=True)
class OtherComputation:
    """One way to predict O."""

    kind: CauseKind
    """What it changes."""
    words: str
    """In words that follow "computes with"."""
    applied: Change
    """What one head then computes, from its rows and what is stated."""
    merge: SplitMerge | None = None
    """How splits are merged; None: exactly."""


def hypotheses(stated: Stated) -> Iterator[tuple[OtherComputation, list[Tensor]]]:
    """Everything that is tried on a layer of one run, with the O that it predicts of each head, [n, Dv]."""
    for hypothesis in _semantics(stated):
        yield hypothesis, [out_of_few(hypothesis.applied(rows, s), rows) for rows, s in stated]
    yield from _merges(stated)


def _semantics(stated: Stated) -> Iterator[OtherComputation]:
    if (scale := fitted_scale(stated)) is not None:
        words = f"a softmax scale of {number(scale, 6)} where {number(stated[0][1].scale, 6)} is stated"
        yield OtherComputation("scale", words, _set(scale=scale))
    yield from _windows(stated)
    if (value := _fitted_mask(stated)) is not None:
        yield OtherComputation("mask", f"a mask that hides keys by {words_of(value)}", partial(_hidden_by, value=value))
    yield from _sinks(stated)
    caps = {s.softcap for _, s in stated}
    for cap in (None, *USUAL_SOFTCAPS):
        if cap not in caps:
            named = "no softcap" if cap is None else f"a softcap of {cap:g}"
            yield OtherComputation("softcap", f"{named}, which is not what is stated", _set(softcap=cap))
    if any(bool((s.bias[s.visible] != 0).any()) for _, s in stated):
        yield OtherComputation("mask", "none of the stated additive mask (keys are hidden as stated)", _flat)


def _set(**changes: float | None) -> Change:
    return lambda _, stated: replace(stated, **changes)  # type: ignore[arg-type]


def _flat(rows: RunRows, stated: HeadSemantics) -> HeadSemantics:
    del rows
    return replace(stated, bias=torch.where(stated.visible, 0.0, stated.bias))


def fitted_scale(stated: Stated) -> float | None:
    """The scale that the O of all these heads fit best, by Gauss-Newton; None where it cannot be found."""
    scale = stated[0][1].scale
    for _ in range(_STEPS):
        along = size = 0.0
        for rows, semantics in stated:
            for at, head, block in blocks_of(replace(semantics, scale=scale), rows):
                slopes, off = scale_derivative(head, block), rows.o[at] - block.out
                good = slopes.isfinite().all(1) & off.isfinite().all(1)
                along += float((off * slopes)[good].sum())
                size += float(slopes[good].square().sum())
        if not size or not math.isfinite(along / size):
            return None
        scale *= 1 + max(-0.5, min(along / size, 0.5))
        if abs(along / size) < 1e-7:
            break
    return scale


def window_of(semantics: HeadSemantics, rows: RunRows) -> int | None:
    """How many keys before its own a row sees at most; None where rows see all there are."""
    first = semantics.visible.int().argmax(1)
    lowest = int(rows.known.int().argmax())
    cut = first > lowest
    return int((rows.tokens - first)[cut].max()) if bool(cut.any()) else None


def _windows(stated: Stated) -> Iterator[OtherComputation]:
    window = window_of(stated[0][1], stated[0][0])
    length = stated[0][1].bias.shape[1]
    if window is None:
        tried = list[int | None](usual_windows(length))
        was = "no window"
    else:
        tried = [*(window + by for by in (-2, -1, 1, 2) if window + by >= 0), 2 * window, None]
        was = f"a window of {plural(window + 1, 'key')}"
    for left in tried:
        named = "no window" if left is None else f"a window of {plural(left + 1, 'key')}"
        yield OtherComputation("window", f"{named} where {was} is stated", partial(_seeing, left=left, right=0))
    for right, words in (
        (length, "no causal mask: each row sees all keys after its own"),
        (1, "one key more: each row sees the token after it"),
        (-1, "one key less: no row sees its own"),
    ):
        yield OtherComputation("mask", words, partial(_seeing, left=window, right=right))


def _seeing(rows: RunRows, semantics: HeadSemantics, *, left: int | None, right: int) -> HeadSemantics:
    """The keys from ``left`` before a row's own to ``right`` after it."""
    place = torch.arange(semantics.bias.shape[1], device=rows.tokens.device)
    distance = place - rows.tokens[:, None]
    seen = (distance <= right) & rows.known & (place >= rows.cached[:, None])
    seen = seen if left is None else seen & (distance >= -left)
    # A row that would see nothing keeps what it saw.
    seen = torch.where(seen.any(1, keepdim=True), seen, semantics.visible)
    bias = torch.where(semantics.visible, semantics.bias, 0.0).masked_fill(~seen, -torch.inf)
    return replace(semantics, bias=bias)


def _hidden_by(rows: RunRows, semantics: HeadSemantics, *, value: float) -> HeadSemantics:
    """All keys, those that are hidden with a number added to their scores."""
    return replace(semantics, bias=torch.where(semantics.visible | ~rows.known, semantics.bias, value))


def _fitted_mask(stated: Stated) -> float | None:
    """The finite number in place of -inf that the O of all these heads fit best."""
    parts: list[Leak] = []
    for rows, semantics in stated:
        seen, every = (_out_and_lse(s, rows) for s in (semantics, _hidden_by(rows, semantics, value=0.0)))
        parts.append(Leak(*seen, *every))
    names = ("out", "lse", "out_all", "lse_all")
    whole = Leak(*(torch.cat([getattr(part, name) for part in parts]) for name in names))
    return whole.fitted(torch.cat([rows.o for rows, _ in stated]))


def _out_and_lse(semantics: HeadSemantics, rows: RunRows) -> tuple[Tensor, Tensor]:
    out, lse = torch.zeros_like(rows.o), rows.o.new_zeros(len(rows.o))
    for at, _, block in blocks_of(semantics, rows):
        out[at], lse[at] = block.out, block.lse
    return out, lse


def _sinks(stated: Stated) -> Iterator[OtherComputation]:
    sinks = [s.sink for _, s in stated]
    if any(sink is not None for sink in sinks):
        yield OtherComputation("sink", "no sink where one is stated", _set(sink=None))
        yield OtherComputation("sink", "a sink of the opposite sign", _flipped)
        yield OtherComputation("sink", "a sink of logit 0 where another is stated", _set(sink=0.0))
        return
    found = [_seen_sink(rows, semantics) for rows, semantics in stated]
    if any(sink is not None for sink in found):
        named = ", ".join(number(sink, 2) for sink in found[:4] if sink is not None)
        words = f"a sink that is not stated (logits {named}{', …' if len(found) > 4 else ''})"
        yield OtherComputation("sink", words, lambda rows, s: replace(s, sink=_seen_sink(rows, s)))


def _flipped(rows: RunRows, stated: HeadSemantics) -> HeadSemantics:
    del rows
    return replace(stated, sink=None if stated.sink is None else -stated.sink)


def _seen_sink(rows: RunRows, semantics: HeadSemantics) -> float | None:
    """The logit of the sink that one head's O seems to have seen: O = sigmoid(L - s) R, by Gauss-Newton."""
    truth, lse = _out_and_lse(semantics, rows)
    share = ((rows.o * truth).sum(1) / truth.square().sum(1).clamp(min=1e-300)).clamp(1e-3, 1 - 1e-3)
    logit = float((lse - share.logit()).nanmedian())
    for _ in range(_STEPS):
        gate = torch.sigmoid(lse - logit)
        slope = -(gate * (1 - gate))[:, None] * truth
        off = rows.o - gate[:, None] * truth
        size = float(slope.square().sum())
        if not size > 0:
            return None
        logit += max(-2.0, min(float((off * slope).sum()) / size, 2.0))
    return logit if math.isfinite(logit) and logit > float(lse.min()) - 12 else None


def split_sizes(length: int) -> list[int]:
    """Keys of a split that are tried: usual sizes, and what divides ``length`` into usual numbers of them."""
    counts = {-(-length // count) for count in _SPLIT_COUNTS if count < length}
    return sorted({size for size in _SPLIT_SIZES if size < length} | counts)


def _merges(stated: Stated) -> Iterator[tuple[OtherComputation, list[Tensor]]]:
    length = stated[0][1].bias.shape[1]
    counts = [count for count in _SPLIT_COUNTS if count < length]
    sizes = split_sizes(length)
    blocks = [blocks_of(s, rows) for rows, s in stated]
    for size, count in [(size, 0) for size in sizes] + [(None, count) for count in counts]:
        partials = [Partials.of(rows, s, b, size, count) for (rows, s), b in zip(stated, blocks, strict=True)]
        for lse, order in product((*_FORMATS, "base 2", "base e"), ("together", "in turn")):
            merge = SplitMerge(size, count, lse, order)  # type: ignore[arg-type]
            kind: CauseKind = "merge" if lse in _FORMATS else "lse-base"
            yield OtherComputation(kind, merge.words, _set(), merge), [merge.out(p) for p in partials]
