"""Patterns in the quantities of a capture: heads are read again, and their references streamed once more."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from attn_diag.analyses.patterns.evidence import Evidence
from attn_diag.analyses.patterns.find import find_patterns
from attn_diag.analyses.patterns.gather import HeadTruths
from attn_diag.analyses.patterns.of_heads import OtherHeads
from attn_diag.analyses.patterns.of_kernel import UndeclaredKernels
from attn_diag.analyses.patterns.of_latent import latent_pattern
from attn_diag.analyses.patterns.of_mistake import redrawn_dropout, unseen_dropout
from attn_diag.analyses.patterns.of_operands import HeldOperands
from attn_diag.analyses.patterns.of_samples import made_by_rounding, rows_outlying, rows_unlike, squared_size
from attn_diag.analyses.patterns.of_stored import stored_below, stored_in
from attn_diag.analyses.patterns.shared_error import shared_error
from attn_diag.analyses.patterns.worded import MERE_PLACES, item_of, with_patterns
from attn_diag.captures.capture import Capture
from attn_diag.captures.paged import PagedKeys
from attn_diag.head.baseline import Recognised
from attn_diag.head.cut_heads import read_cut
from attn_diag.head.measurement import HeadMeasurement
from attn_diag.head.other_documents import merged, near, seen_in_out
from attn_diag.head.other_dropouts import other_dropouts
from attn_diag.head.other_pages import CacheReading, lse_offset, read_otherwise
from attn_diag.head.other_sinks import OtherSink, logit_in_out, other_sinks
from attn_diag.head.other_slopes import other_slopes
from attn_diag.head.quality import AS_GOOD, LOSSY, QuantitySample
from attn_diag.head.read import NonFiniteCensus, read_float64, read_head, read_outputs
from attn_diag.head.row_effect import RowEffect
from attn_diag.reference import AttentionHead, FloatFormat, format_of
from attn_diag.reference.fused import reference_of
from attn_diag.results.quality import BEYOND_FORMAT, Pattern, QuantityVerdict

# Wrong quantities of an observation beyond these keep the plain words: they are mostly wrong in the same way. Coarse
# ones are all looked at, as a pattern decides whether they are wrong.
_MOST_QUANTITIES = 24
# So many other sequences are asked whether they show it too.
_MOST_OTHERS = 8
# Tensors of another head make an error of the size of the quantity, but where heads are alike (V's with a common mean).
_OTHER_HEAD_FROM = 0.1
# A sequence of whose squared error there is no more, over a well-rounded kernel's (of part of LSE's budget), is right.
_RIGHT = AS_GOOD**2
# So much of a merely coarse quantity's squared error a pattern must explain.
_NEARLY_ALL = 0.9
# From so many times a well-rounded kernel's error on what leaves no more than that kernel does can explain it.
_EXPLICABLE = (1 - _NEARLY_ALL) ** -0.5
# Kinds of patterns that say no more than which rows are off.
_VAGUE = ("off", "unrelated", "elements", "factors", "rows")
_OUTPUTS = ("o", "dq", "dk", "dv")


class CapturePatterns:
    """Finds where and how quantities of a capture are wrong."""

    def __init__(self, capture: Capture, device: torch.device, recognised: Mapping[str, Recognised]) -> None:
        """``recognised``: by observation, the published kernel that its first head shows."""
        self.beside: Sequence[Capture] = ()
        self._caches: dict[tuple[str, int], CacheReading | None] = {}
        self._capture, self._device = capture, device
        self._looked_at: Counter[str] = Counter()
        self._shown = defaultdict[tuple[str, str], set[tuple[str, str]]](set)  # by observation and quantity
        self._group = capture.q_heads // capture.kv_heads
        self._other_heads = OtherHeads(capture, device)
        self._kept: tuple[object, HeadTruths] | None = None
        self._held, self._kernels = HeldOperands(), UndeclaredKernels(capture, recognised)

    def explain(
        self,
        observation: str,
        head: int,
        verdict: QuantityVerdict,
        found: Sequence[QuantitySample | RowEffect],
        batches: Sequence[int],
    ) -> QuantityVerdict:
        """The verdict with its patterns, and with their words where they say more; unchanged where nothing fits.

        Args:
            observation: Its name.
            head: The query head's index in the capture.
            verdict: Of one quantity of it.
            found: Of each sequence, what it rests on.
            batches: The sequences.
        """
        if (cache := self._cache(observation, verdict, batches)) is not None:
            return cache
        bad = verdict.answer in ("wrong", "nonfinite")
        coarse = verdict.answer in ("lossy", "undecided") and (verdict.factor or 0.0) > LOSSY
        # An LSE tells its sink to a millionth, however little the sink takes.
        coarse |= verdict.quantity == "lse" and self._capture.has_sinks and verdict.answer not in ("good", "nonfinite")
        named = verdict.declared is not None and any(p.kind in ("factor", "scale") for p in verdict.patterns)
        if (
            named
            or not (bad or coarse)
            or verdict.quantity == "dw_q"
            or (bad and self._looked_at[observation] >= _MOST_QUANTITIES)
        ):
            return verdict
        self._looked_at[observation] += bad
        place, others_right = self._place(observation, head, verdict, found, batches)
        if place is None:
            return verdict
        batch, outlying, features, size = place
        if verdict.quantity == "dkv":
            pattern = self._latent(observation, batch, head)
            return with_patterns(verdict, [] if pattern is None else [pattern])
        own = [one for one, b in zip(found, batches, strict=True) if b == batch]
        sink = next((one.sink for one in own if isinstance(one, RowEffect)), None)
        evidence = self._evidence(observation, batch, head, verdict, outlying, features, sink)
        evidence = replace(evidence, shown=self._shown[observation, verdict.quantity])
        rounded = coarse and all(map(made_by_rounding, found))
        output = verdict.quantity in _OUTPUTS
        low_bit = verdict.declared is None and (output or verdict.quantity == "lse")
        if verdict.declared is None and math.isfinite(size):
            kernel = self._kernels.pattern(observation, batch, head, evidence)
            stored = stored_below(evidence) if verdict.quantity in _OUTPUTS and kernel is None else None
            below = kernel or stored
            if below is not None and below.kind == BEYOND_FORMAT and bad:
                # What rows hold, and which they are, is told more closely by what wrong mathematics makes.
                told = find_patterns(evidence)[:1]
                below = None if told and told[0].kind not in _VAGUE else below
            if below is not None:
                alike = self._alike(below, observation, head, verdict, batch, batches)
                where = "" if alike else self._worst(batch, others_right)
                return with_patterns(verdict, [replace(below, words=f"{where}{below.words}")])
        known = self._held.known(observation, evidence, math.sqrt(size)) if coarse and low_bit else None
        patterns = [known] if known else [] if rounded else find_patterns(evidence)
        rows = [row for one in own for row in rows_unlike(one)]
        no_features = torch.zeros_like(evidence.features)
        # What explains all rows comes before the place of what a rounding does not make.
        for some in ((), rows) if rows else ((),) if coarse and not rounded and outlying else ():
            if not _convinces(patterns):
                marked = torch.zeros_like(evidence.outlying)
                marked[list(some)] = True
                patterns = find_patterns(replace(evidence, outlying=marked, features=no_features))
        if any(isinstance(one, QuantitySample) and one.only_features for one in found):
            patterns = [one for one in patterns if one.features]  # of rows each of them makes all stand out
        by_features = bool(verdict.patterns) and verdict.patterns[0].kind == "features" and not outlying
        if by_features and patterns and all(one.of_few_bits for one in patterns):
            patterns = list(verdict.patterns)  # all rows are off by rounding as well, which says nothing
        # Where the truth is less than a well-rounded kernel's error (dQ and dK of one-hot rows) much looks like it.
        if bad and (not patterns or patterns[0].kind in MERE_PLACES):
            at_random = unseen_dropout if verdict.quantity == "o" else redrawn_dropout
            patterns = at_random(evidence) or patterns
        vanishes = float(evidence.truth.square().sum()) < float(evidence.noise.sum())
        if coarse and (vanishes or not _convinces(patterns)):
            patterns = []
        if low_bit and not (vanishes or _convinces(patterns)):
            shared = shared_error(evidence, math.sqrt(size)) if coarse and output else None
            shared = shared or self._held.pattern(
                observation, batch, head, lambda: evidence, verdict.quantity, math.sqrt(size),
                self._other_heads.largest,
            )  # fmt: skip
            patterns = [shared] if shared else patterns
        if any(isinstance(one, QuantitySample) and one.factors for one in found):
            # What all rows have in common is told by one name, or as it was found beside a rounding.
            one_name = len(patterns) == 1 and patterns[0].kind not in MERE_PLACES
            patterns = patterns if one_name else list(verdict.patterns)
        where = ""
        if len(self._batches(batches)) > 1:
            where, rank = self._worst(batch, others_right), item_of(self._capture.metadata, batch)[1]
            if rank and others_right and (bad or patterns):
                verdict = replace(verdict, ranks=(rank,))
        return with_patterns(verdict, patterns, where)

    def _worst(self, batch: int, others_right: bool) -> str:
        """The sequence that a pattern is of, before its words."""
        item, _ = item_of(self._capture.metadata, batch)
        return f"{item} alone: " if others_right else f"worst in {item}: "

    def _alike(
        self,
        pattern: Pattern,
        observation: str,
        head: int,
        verdict: QuantityVerdict,
        batch: int,
        batches: Sequence[int],
    ) -> bool:
        """Whether all sequences (of many some) show a kernel or format below 16 bits that one of them shows."""
        others = [b for b in self._batches(batches) if b != batch]
        if pattern.kernel is not None:
            return self._kernels.shared(observation, others, head, pattern.kernel)
        some = others[:: -(-len(others) // _MOST_OTHERS)] if others else ()
        if pattern.kind == BEYOND_FORMAT:
            return not others
        return all(
            stored_in(*self._observed(observation, b, head, verdict)) == pattern.formats.get(verdict.quantity)
            for b in some
        )

    def held(self, observation: str, part: HeadMeasurement) -> bool:
        """Whether the O of a head was stored below 16 bits, or is that of q, k or v that were held there."""
        where, o = (observation, part.batch, part.head), part.quality["o"]
        lossy = QuantityVerdict("o", "lossy", "")
        evidence = partial(self._evidence, *where, lossy, (), (), None)
        if o.declared != "":
            return False
        size = math.sqrt(squared_size(o))
        if (found := self._kernels.pattern(*where, evidence()) or stored_below(evidence())) is not None:
            return bool(found.formats)
        return self._held.pattern(*where, evidence, "o", size, self._other_heads.largest) is not None

    def _cache(self, observation: str, verdict: QuantityVerdict, batches: Sequence[int]) -> QuantityVerdict | None:
        """O or LSE as wrong where the sequences' caches were read in another way; None where nothing says so."""
        c, name = self._capture, verdict.quantity
        if not isinstance(c.tensors["k"], PagedKeys) or name not in ("o", "lse") or verdict.answer == "nonfinite":
            return None
        found = []
        for batch in self._batches(batches):
            key = (observation, batch)
            if key not in self._caches and verdict.answer != "good":
                self._caches[key] = read_otherwise(c, observation, batch, self._device, self.beside)
            reading = self._caches.get(key)
            if reading is None and name == "lse" and verdict.answer != "good":
                reading = lse_offset(c, observation, batch, self._device)
            if reading is not None:
                said = f"are what {reading.words} gives" if reading.of_cache else f"are {reading.words}"
                number = c.documents[batch].number if c.documents else batch
                item = f"batch item {batch}" + (f" (sequence {number} of the page table)" if number != batch else "")
                words = f"{item}: all rows {said}"
                found.append(Pattern("cache", words, reading.explained, reading.remaining))
        return with_patterns(verdict, found) if found else None

    def _batches(self, batches: Sequence[int]) -> list[int]:
        return sorted(set(batches))

    def _place(
        self,
        observation: str,
        head: int,
        verdict: QuantityVerdict,
        found: Sequence[QuantitySample | RowEffect],
        batches: Sequence[int],
    ) -> tuple[tuple[int, Collection[int], Collection[int], float] | None, bool]:
        """The sequence that is furthest off, its outlying rows and features and size; and whether no other has any."""
        if verdict.answer == "nonfinite":
            for batch in self._batches(batches):
                tensor = self._observed(observation, batch, head, verdict)[0]
                finite = tensor.isfinite() if tensor.ndim == 1 else tensor.isfinite().all(1)
                if not bool(finite.all()):
                    return (batch, (~finite).nonzero()[:, 0].tolist(), (), math.inf), False
            return None, False
        if len(found) != len(batches) or not found:
            return None, False
        outlying = [rows_outlying(one) for one in found]
        sizes = [squared_size(one) for one in found]
        worst = int(np.argmax(sizes))
        features = one.bad_features.nonzero()[0].tolist() if isinstance(one := found[worst], QuantitySample) else []
        alone = all(not len(outlying[i]) and sizes[i] <= _RIGHT for i in range(len(found)) if i != worst)
        return (batches[worst], outlying[worst], features, sizes[worst]), alone

    def _observed(
        self, observation: str, batch: int, head: int, verdict: QuantityVerdict
    ) -> tuple[Tensor, FloatFormat]:
        c, name = self._capture, verdict.quantity
        key = c.key(observation, name)
        fmt = format_of(c.tensors[key].dtype)
        if name in ("dk", "dv"):
            tensor = read_float64(c, key, batch, head // self._group, self._device)
            assert tensor is not None
            return tensor, fmt
        outputs, _ = read_outputs(c, observation, batch, head, self._device, NonFiniteCensus())
        return outputs[name], fmt

    def _evidence(
        self,
        observation: str,
        batch: int,
        head: int,
        verdict: QuantityVerdict,
        outlying: Collection[int],
        features: Collection[int],
        sink: float | None,
    ) -> Evidence:
        c, name = self._capture, verdict.quantity
        first = head // self._group * self._group
        heads = list(range(first, first + self._group)) if name in ("dk", "dv") else [head]
        stored = {
            n: format_of(c.tensors[k].dtype)
            for n in ("o", "dq", "dk", "dv")
            if (k := c.key(observation, n)) in c.tensors
        }
        key = (observation, batch, tuple(heads))
        if self._kept is None or self._kept[0] != key:
            inputs = [read_head(c, batch, h, self._device) for h in heads]
            self._kept = key, HeadTruths.of(inputs, stored, [self._other_heads.name(h) for h in heads])
        captured = []
        for h in heads:
            outputs, _ = read_outputs(c, observation, batch, h, self._device, NonFiniteCensus())
            captured.append({n: t for n, t in outputs.items() if n in ("o", "lse") and bool(t.isfinite().all())})
        observed, fmt = self._observed(observation, batch, head, verdict)
        large = (verdict.relative_error or 1.0) > _OTHER_HEAD_FROM or (verdict.factor or 0.0) > _EXPLICABLE
        return self._kept[1].evidence(
            name, observed, fmt, outlying, features, captured=captured,
            others=self._elsewhere(batch, heads, head) if large else (),
            key_heads=self._other_heads.key_heads(batch) if len(heads) > 1 else {},
            cuts=self._cuts(observation, batch, head), sinks=[self._sinks(observation, batch, h, sink) for h in heads],
            mistakes=[other_slopes(c, batch, h) + other_dropouts(c, batch, h) for h in heads],
        )  # fmt: skip

    def _elsewhere(self, batch: int, heads: Sequence[int], head: int) -> list[tuple[str, Callable[[], AttentionHead]]]:
        """Heads whose tensors may have been taken instead."""
        others = self._other_heads
        return others.nearest(batch, heads) if len(heads) > 1 else others.others(batch, head)

    def _latent(self, observation: str, batch: int, head: int) -> Pattern | None:
        """The mistake in the gradient of a latent that k and v share."""
        c, first = self._capture, head // self._group * self._group
        heads = [read_head(c, batch, h, self._device).head for h in range(first, first + self._group)]
        found = [reference_of(h) for h in heads]
        observed = read_float64(c, c.key(observation, "dkv"), batch, head // self._group, self._device)
        assert observed is not None
        dk, dv = (torch.stack([getattr(r, n) for r in found]).sum(0) for n in ("dk", "dv"))
        return latent_pattern(observed, dk, dv)

    def _cuts(self, observation: str, batch: int, head: int) -> list[tuple[str, Callable[[], AttentionHead | None]]]:
        """Of packed sequences: the head's rows in documents that are cut in another way."""
        c = self._capture
        if c.documents is None:
            return []
        seen = seen_in_out(c, observation) if "o" in c.observations[observation] else None
        found = [cut for cut in (merged(c), *near(c, batch), seen) if cut is not None]
        return [(cut.words, partial(read_cut, c, cut, batch, head, self._device)) for cut in found]

    def _sinks(self, observation: str, batch: int, head: int, in_lse: float | None) -> list[OtherSink]:
        c, seen = self._capture, None
        if in_lse is not None:
            own = c.sink(head)
            return other_sinks(c, head, in_lse if own is None else float(np.logaddexp(in_lse, own)), 0.0)
        if "o" in c.observations[observation]:
            seen = logit_in_out(c, observation, batch, head, self._device)
        return other_sinks(c, head, seen)


def _convinces(patterns: Sequence[Pattern]) -> bool:
    """Whether the first pattern explains a quantity that is merely coarse: of an error of noise's size a part of it may
    be explained by chance."""
    if not patterns or patterns[0].kind in MERE_PLACES:
        return False
    return patterns[0].kind == "forward" or (patterns[0].explained or 0.0) >= _NEARLY_ALL
