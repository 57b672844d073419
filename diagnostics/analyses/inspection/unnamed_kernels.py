"""What a kernel rounds that has no name here: in its forward, from the bits of an O that is lossy; in its backward,
from the L that its gradients show."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from attn_diag.analyses.patterns.of_capture import CapturePatterns
from attn_diag.analyses.patterns.of_scales import known_by_bits
from attn_diag.head.baseline import Recognised, compared_rows, has_bits
from attn_diag.head.fp32_in_bf16 import EXPLAINED
from attn_diag.head.from_lse import backwards_from_lse
from attn_diag.head.measurement import HeadMeasurement
from attn_diag.head.open import OpenCapture
from attn_diag.head.quality import LOSSY, QuantitySample
from attn_diag.head.read_lse import WAYS, backwards_of_read_lse
from attn_diag.head.recipe_changes import coarse_words
from attn_diag.head.recipe_search import SearchedHead, read_subject
from attn_diag.head.tiled_loops import MOST_KEYS, KnownLoops, backwards, find_loops
from attn_diag.head.unfused import OF_BACKWARD, named
from attn_diag.kernels import Recipe
from attn_diag.results.quality import Quantity

# It is made on the first heads that ask and have nothing that others showed: some are broken, or show little.
_MOST_ASKED = 3
# Gradients are made in all rows at once, in seven ways.
_MOST_SCORES = 2**20
# Equations in as many unknowns are solved. That a sequence of so many rows shows none counts for all others.
_MOST_ROWS, _ENOUGH_ROWS = 2**11, 2**6


class UnnamedKernels:
    """The roundings of the kernels of one capture: each looked for on few heads, by ``identify``'s whole search, and
    then among loops in plain torch."""

    def __init__(self, opened: OpenCapture) -> None:
        """Of a capture that is being inspected."""
        self._opened = opened
        self._found = defaultdict[str, list[list[Recipe]]](list)
        self._loops = defaultdict[str, list[KnownLoops]](list)
        self._asked = Counter[str]()
        self._backwards = dict[tuple[str, int, int], dict[str, dict[str, Tensor]]]()
        self._read = dict[tuple[str, int, int], dict[str, dict[str, Tensor]]]()
        self._group: tuple[str, int] | None = None  # whose gradients ``_read`` has
        self._ways = dict[str, Sequence[str]]()

    def coarse(
        self,
        observation: str,
        parts: Sequence[HeadMeasurement],
        first: Recognised | None,
        patterns: CapturePatterns,
    ) -> str | None:
        """What O of one head rounds, in words (``coarse_words``); None: it is not lossy, or nobody knows.

        Of recipes, or loops, that its bits do not tell apart, what all of them round. The search is made on the first
        heads of an observation that ask; of others O must have the same bits.

        Args:
            observation: Which.
            parts: Of the head in each sequence.
            first: The recipe that the capture's first head has, which may have the bits of several: another head that
                is lossy need not have it.
            patterns: Tells whether O is that of q, k or v that were held below 16 bits: then nothing is looked for.
        """
        capture, part = self._opened.capture, next((p for p in parts if _unexplained(p)), None)
        if first is not None:
            words, one = coarse_words(first.recipe), parts[0] if part is None else part
            certain = first.agreement is None or first.cut_off or (words is None and part is None)
            if certain or has_bits(first.recipe, capture, observation, one.batch, one.head):
                return words
        if part is None or (first is not None and _stands_out(part.quality["o"])):
            return None
        if capture.lengths(part.batch)[1] > MOST_KEYS:
            return None
        if patterns.held(observation, part):
            return None
        asked = self._asked[observation] < _MOST_ASKED
        for recipes in self._recipes(observation, part, ask=asked):
            if has_bits(recipes[0], capture, observation, part.batch, part.head):
                return coarse_words(*recipes)
        return self._of_loops(observation, part, ask=asked)

    def _recipes(self, observation: str, part: HeadMeasurement, *, ask: bool) -> Iterator[list[Recipe]]:
        """Those that earlier heads showed, each with what has the same bits, and those that this one shows."""
        yield from self._found[observation]
        if ask:
            self._asked[observation] += 1
            found = self._opened.fitting(observation, part.batch, part.head)
            if found is not None and found.outcome != "flawed" and found.recipe is not None:
                self._found[observation].append([found.recipe, *(trial.recipe for trial in found.as_good)])
                yield self._found[observation][-1]

    def _of_loops(self, observation: str, part: HeadMeasurement, *, ask: bool) -> str | None:
        """What plain torch's loops round that have O's bits."""
        capture, device = self._opened.capture, torch.device("cpu")
        subject = read_subject(capture, observation, part.batch, part.head, device)
        if subject is None:
            return None
        rows = compared_rows(*capture.lengths(part.batch), device)
        known = next((one for one in self._loops[observation] if one.have_bits(subject, rows)), None)
        if known is None and ask and (known := find_loops(subject, rows)) is not None:
            self._loops[observation].append(known)
        if known is None:
            return None
        head = subject.inputs.head
        if backwards_from_lse(head) and len(head.q) * len(head.k) <= _MOST_SCORES:
            made = backwards(known.every[0], head, subject.inputs.input_format, subject.observed.dtype)
            self._backwards[observation, part.batch, part.head] = made
        return known.words(subject.fmt)

    def known(
        self,
        observation: str,
        head: int,
        quantity: Quantity,
        found: Sequence[tuple[int, QuantitySample]],
        coarse: str | None,
        parts: Sequence[HeadMeasurement],
    ) -> list[QuantitySample]:
        """A quantity's samples with what the bits show of their sites: as ``known_by_bits``, and what the backward
        makes P of, behind loops in plain torch or of an L that a gradient shows.

        Args:
            observation: Which.
            head: Index of the query head.
            quantity: Of dK and dV that several query heads share nothing is said behind loops.
            found: Indices of the batch items, each with its sample.
            coarse, parts: As in ``known_by_bits``.
        """
        capture, samples = self._opened.capture, []
        group = 1 if quantity == "dq" else capture.q_heads // capture.kv_heads
        for batch, given in found:
            sample = known_by_bits(given, quantity, coarse, parts)
            ratio = sample.ratio()
            asked = quantity in ("dq", "dk", "dv") and sample.site in (None, *OF_BACKWARD)
            asked = asked and ratio is not None and ratio.factor > LOSSY
            observed = capture.read(capture.key(observation, quantity), batch, head // group) if asked else None
            if observed is not None:  # None, too: of a recipe that was run
                heads = [(observation, batch, h) for h in range(head // group * group, (head // group + 1) * group)]
                sample = self._with_site(sample, quantity, observed.double(), heads)
            samples.append(sample)
        return samples

    def _with_site(
        self, sample: QuantitySample, quantity: Quantity, observed: Tensor, heads: Sequence[tuple[str, int, int]]
    ) -> QuantitySample:
        """With the way that makes a gradient of O's loop, or else of the L that gradients of these heads show."""
        for source in (self._backwards.get, self._of_read_lse):
            if source == self._of_read_lse and sample.site is not None and not _stands_out(sample):
                break
            each = [source(key) or {} for key in heads]
            ways = [way for way in each[0] if all(way in of for of in each)]
            made = {way: torch.stack([of[way][quantity] for of in each]).sum(0) for way in ways}
            found = _behind(sample, observed.to(made[""].device), made) if len(made) > 1 else sample
            if found is not sample:
                return found
        return sample

    def _of_read_lse(self, key: tuple[str, int, int]) -> dict[str, dict[str, Tensor]]:
        """``backwards_of_read_lse`` of an observation, batch item and head.

        Empty behind a head that showed none; of others the ways that the first one showed are tried.
        """
        observation, batch, head = key
        group = self._opened.capture.q_heads // self._opened.capture.kv_heads
        if self._group != (group_of := (observation, head // group)):
            self._group, self._read = group_of, {}
        ways = self._ways.get(observation, WAYS)
        if key not in self._read and ways:
            heads = range(head // group * group, (head // group + 1) * group)
            made = self._of_heads(observation, batch, heads, ways)
            self._read.update({(observation, batch, h): one for h, one in zip(heads, made, strict=True)})
            if self._read[key] or self._opened.capture.lengths(batch)[0] >= _ENOUGH_ROWS:
                self._ways[observation] = [way for way in self._read[key] if way]
        return self._read.get(key, {})

    def _of_heads(
        self, observation: str, batch: int, heads: Sequence[int], ways: Sequence[str]
    ) -> list[dict[str, dict[str, Tensor]]]:
        """The same of all query heads of a key head: by dV together, or, of many rows, each by its dQ."""
        capture, device = self._opened.capture, self._opened.device
        rows, keys = capture.lengths(batch)
        subjects = list[SearchedHead]()
        for head in heads if rows * keys <= _MOST_SCORES else ():
            subject = read_subject(capture, observation, batch, head, device)
            if subject is not None and backwards_from_lse(subject.inputs.head):
                subjects.append(subject)

        def read(name: str, head: int) -> Tensor | None:
            found = capture.read(capture.key(observation, name), batch, head)
            return None if found is None else found.to(device).double()

        dv, dq = read("dv", heads[0] // len(heads)), [read("dq", head) for head in heads]
        if len(subjects) < len(heads) or (dv is None and dq[0] is None):
            return [{} for _ in heads]
        together = dv is not None and rows * len(heads) <= _MOST_ROWS
        of = [(subjects, {"dv": dv})] if together else [([s], {"dq": one}) for s, one in zip(subjects, dq, strict=True)]
        made = []
        for some, given in of:
            known, out = [one.inputs.head for one in some], [one.observed.double() for one in some]
            made += backwards_of_read_lse(known, subjects[0].inputs.input_format, out, ways=ways, **given)
        return made


def _stands_out(sample: QuantitySample) -> bool:
    """Whether rows stand out that no rounding explains."""
    return bool(sample.outlying.any()) and not sample.rounding


def _behind(sample: QuantitySample, observed: Tensor, made: Mapping[str, Tensor]) -> QuantitySample:
    """A gradient's sample with the way as its site that makes it, with all that stands out there.

    It does where it leaves a quarter at most, squared, of the error, also of each row and feature that stands out, and
    of what a backward leaves that takes P from an L that is not rounded.

    Args:
        sample: Without a site, or with one by the L of another forward.
        observed: [T, D].
        made: The same by ``tiled_loops.backwards``, or ``backwards_of_read_lse``.
    """
    squares = {way: (observed - of)[sample.rows].square().cpu().numpy() for way, of in made.items()}
    units = np.maximum(sample.expected, 1e-300)

    def left(by_row: npt.NDArray[np.float64]) -> tuple[float, float]:
        return float(by_row.sum()), float((by_row / units).sum())

    way = min((way for way in made if way), key=lambda one: left(squares[one].sum(1)))
    by_row, by_feature = squares[way].sum(1), squares[way].sum(0)
    for rival in (squares[""].sum(1), sample.error):
        if any(one > EXPLAINED * other for one, other in zip(left(by_row), left(rival), strict=True)):
            return sample
    bad, features = (sample.bad_rows > 0) | sample.in_outlying_element, sample.bad_features > 0
    own = (by_row[bad] <= EXPLAINED * sample.error[bad]).all()
    if not own or (by_feature[features] > EXPLAINED * sample.features[0][features]).any():
        return sample
    by_site = max(float(sample.error.sum() - by_row.sum()), 0.0)
    found = replace(sample, site=named(way), made_by_site=by_site, rounding=True, features_rounding=True)
    return replace(found, unlike=None, unlike_features=None)


def _unexplained(part: HeadMeasurement) -> bool:
    o = part.quality.get("o")
    ratio = None if o is None or o.site is not None or not o.compared else o.ratio()
    return ratio is not None and ratio.factor > LOSSY
