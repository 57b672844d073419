"""One layer of both runs: what either computes, what the difference of O consists of, and what explains it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from attn_diag.analyses.mismatch.fit import LayerFit, fit_layer
from attn_diag.analyses.mismatch.hypotheses import window_of
from attn_diag.analyses.mismatch.nonfinite import finite_rows
from attn_diag.analyses.mismatch.norms import NormFactor, find_norm
from attn_diag.analyses.mismatch.pairing import SequencePair
from attn_diag.analyses.mismatch.rotation import PositionShift, find_rotations, without
from attn_diag.analyses.mismatch.rows import RunRows, observation_of, stream_rows, with_scale_of
from attn_diag.analyses.mismatch.small import small_errors
from attn_diag.analyses.mismatch.small_words import Seen, SmallError
from attn_diag.analyses.mismatch.split import (
    PARTS,
    HeadSemantics,
    LayerSums,
    SplitHead,
    add_head,
    both_streams,
    split_head,
)
from attn_diag.analyses.mismatch.storage import CoarseStorage, find_storage
from attn_diag.analyses.mismatch.stray import StrayRow, find_stray
from attn_diag.analyses.mismatch.tokens import TokenRun, TokenSequence
from attn_diag.analyses.mismatch.weights import OtherWeights, compare_weights
from attn_diag.captures.capture import Capture
from attn_diag.reference import format_of
from attn_diag.results.mismatch import DifferencePart, MismatchLayer, RunError
from attn_diag.statistics.ratios import paired_ratio


@dataclass(frozen=True)
class HeadOfBoth:
    """One head of one sequence."""

    sequence: int
    """Number of the pair."""
    head: int
    """Index of the query head."""
    rows: tuple[RunRows, RunRows]
    """Of train and of rollout, the same tokens."""
    semantics: tuple[HeadSemantics, HeadSemantics]
    """What either computes: as stated, or as found."""


@dataclass(frozen=True)
class ComparedLayer:
    """A layer as it was compared."""

    layer: int
    """Its number."""
    heads: tuple[HeadOfBoth, ...]
    """Every head of every sequence; its semantics are those found."""
    splits: tuple[SplitHead, ...]
    """The parts of each."""
    sums: LayerSums
    """Over the heads."""
    fits: tuple[LayerFit, LayerFit]
    """How train's and rollout's O fit what they state."""
    rotations: tuple[PositionShift, ...]
    """Rows of rollout at another position."""
    weights: OtherWeights | None
    """That w_q differs."""
    norm: NormFactor | None
    """That x, q or k differ by a factor a token."""
    storage: CoarseStorage | None
    """That q, k or v of one run alone are stored below 16 bits."""
    stray: StrayRow | None
    """The row that strays furthest, where O fits rounding as a whole."""
    small: tuple[SmallError, ...]
    """What a run's O has less than its rounding off, but many elements alike."""
    seen: Seen | None
    """What of that would have been seen; None: it was not looked for."""
    entering: tuple[tuple[Tensor, Tensor] | None, ...]
    """By pair of sequences x of both, [T, C] each, NaN in rows that not both have; None: not captured."""
    stream: float | None
    """||x_b - x_a|| / ||x_a||."""
    units: tuple[float, float]
    """Half the spacing of q's format at 1 in either run: the largest relative error of one rounding."""

    @property
    def unit(self) -> float:
        """The larger of the units."""
        return max(self.units)

    @property
    def stated(self) -> HeadOfBoth:
        """A head, for what all heads share."""
        return self.heads[0]


LayerRows = list[tuple[int, int, tuple[RunRows, RunRows]]]
"""Of every head the number of its pair of sequences, its index, and its rows in train and in rollout."""


def rows_of_layer(
    runs: tuple[TokenRun, TokenRun], matched: Sequence[SequencePair], layer: int, device: torch.device
) -> LayerRows:
    """The rows of a layer that are in both runs."""
    heads = range(min(run.q_heads for run in runs))
    every = (
        (number, head, pair.rows(runs, layer, head, device)) for number, pair in enumerate(matched) for head in heads
    )
    return [(number, head, both) for number, head, both in every if both is not None]


def compare_layer(
    runs: tuple[TokenRun, TokenRun], matched: Sequence[SequencePair], layer: int, rows: LayerRows, device: torch.device
) -> ComparedLayer | None:
    """Compare one layer, of ``rows_of_layer``; None where no row of it is finite in both runs."""
    heads: list[HeadOfBoth] = []
    for number, head, both in rows:
        usable = finite_rows(*both)
        if len(usable):
            a, b = both if len(usable) == len(both[0].tokens) else (one.select(usable) for one in both)
            b = with_scale_of(a, b)
            heads.append(HeadOfBoth(number, head, (a, b), (HeadSemantics.stated(a), HeadSemantics.stated(b))))
    if not heads:
        return None
    captures = [next(iter(run.calls[layer].values())) for run in runs]
    fits = tuple(_fit(capture, heads, side) for side, capture in enumerate(captures))
    rotations = tuple(find_rotations([(h.sequence, *h.rows) for h in heads]))
    found = [_with_found(h, fits) for h in heads]
    sums, splits = LayerSums(), []
    for h in found:
        split = _split(h, rotations)
        splits.append(split)
        add_head(sums, split, *h.rows, h.sequence)
    weights = _weights(runs, matched, layer)
    entering = tuple(
        both_streams(
            list(stream_rows(runs[0], pair.train, layer, pair.shifts[0], device)),
            list(stream_rows(runs[1], pair.rollout, layer, pair.shifts[1], device)),
            pair.length,
        )
        for pair in matched
    )
    streams = [(a[a[:, 0].isfinite()], b[b[:, 0].isfinite()]) for a, b in filter(None, entering)]
    small, seen = _small(captures, heads, splits, fits)
    units = tuple(2.0 ** -(format_of(capture.tensors["q"].dtype).precision + 1) for capture in captures)
    return ComparedLayer(
        layer, tuple(found), tuple(splits), sums, (fits[0], fits[1]), rotations, weights,
        find_norm(streams, [h.rows for h in heads], max(units)), _storage(heads), _stray(captures, found, splits),
        small, seen, entering, _stream(streams), (units[0], units[1]),
    )  # fmt: skip


def _stream(streams: Sequence[tuple[Tensor, Tensor]]) -> float | None:
    if not streams:
        return None
    apart = sum(float((b - a).square().sum()) for a, b in streams)
    return _relative(apart, sum(float(a.square().sum()) for a, _ in streams))


def _fit(capture: Capture, heads: Sequence[HeadOfBoth], side: int) -> LayerFit:
    stated = [(h.rows[side], h.semantics[side]) for h in heads]
    return fit_layer(stated, format_of(capture.tensors["q"].dtype), format_of(_out(capture)))


def _storage(heads: Sequence[HeadOfBoth]) -> CoarseStorage | None:
    both = [[{name: getattr(h.rows[side], name) for name in "qkv"} for h in heads] for side in (0, 1)]
    return find_storage(both[0], both[1])


def _stray(captures: Sequence[Capture], heads: Sequence[HeadOfBoth], splits: Sequence[SplitHead]) -> StrayRow | None:
    both = [(h.head, h.rows, h.semantics, split) for h, split in zip(heads, splits, strict=True)]
    return find_stray(both, [(format_of(c.tensors["q"].dtype), format_of(_out(c))) for c in captures])


def _small(
    captures: Sequence[Capture], heads: Sequence[HeadOfBoth], splits: Sequence[SplitHead], fits: Sequence[LayerFit]
) -> tuple[tuple[SmallError, ...], Seen | None]:
    return small_errors(
        [(h.sequence, h.head, h.rows, h.semantics) for h in heads],
        [split.errors for split in splits],
        [(format_of(c.tensors["q"].dtype), format_of(_out(c))) for c in captures],
        [fit.best is None and fit.site is None for fit in fits],
    )


def _out(capture: Capture) -> torch.dtype:
    return capture.tensors[capture.key(observation_of(capture), "o")].dtype


def _with_found(head: HeadOfBoth, fits: Sequence[LayerFit]) -> HeadOfBoth:
    """The head with what was found that either computes."""
    changed = [
        stated if fit.best is None or fit.best.merge is not None else fit.best.applied(rows, stated)
        for fit, rows, stated in zip(fits, head.rows, head.semantics, strict=True)
    ]
    return replace(head, semantics=(changed[0], changed[1]))


def _split(head: HeadOfBoth, rotations: Sequence[PositionShift]) -> SplitHead:
    a, b = head.rows
    if not rotations:
        return split_head(a, b, head.semantics)
    put_back = without(rotations, head.sequence, b)
    whole = split_head(a, b, head.semantics)
    back = split_head(a, put_back, (head.semantics[0], head.semantics[0]))
    moved = whole.parts["inputs"] - back.parts["inputs"]
    parts = whole.parts | {"inputs": back.parts["inputs"], "semantics": whole.parts["semantics"] + moved}
    return replace(whole, parts=parts, usable=whole.usable & back.usable)


def _weights(runs: tuple[TokenRun, TokenRun], matched: Sequence[SequencePair], layer: int) -> OtherWeights | None:
    """That w_q differs, of the ranks that made any pair of sequences."""
    of_ranks: dict[tuple[int | None, ...], list[Capture]] = {}
    for pair in matched:
        both = [_with_weights(run, s, layer) for run, s in zip(runs, (pair.train, pair.rollout), strict=True)]
        held = [capture for capture in both if capture is not None]
        if len(held) == len(runs):
            of_ranks.setdefault(tuple(capture.metadata.rank for capture in held), held)
    return next(filter(None, (compare_weights(*map(_used, held)) for held in of_ranks.values())), None)


def _with_weights(run: TokenRun, sequence: TokenSequence, layer: int) -> Capture | None:
    """The first call of a sequence that has w_q, or of the layer, where another alone has it."""
    calls = run.calls[layer]
    own = [calls[part.call] for part in sequence.parts if part.call in calls]
    return next((capture for capture in (*own, *calls.values()) if "w_q" in capture.tensors), None)


def _used(capture: Capture) -> Tensor:
    """w_q as it is multiplied: autocast rounds what is stored in fp32."""
    stored = capture.tensors["w_q"][...]
    used = capture.tensors["x" if "x" in capture.tensors else "q"].dtype
    return stored.to(used) if format_of(used).precision < format_of(stored.dtype).precision else stored


def _relative(square: float, reference: float) -> float:
    return math.sqrt(square / reference) if reference else (math.inf if square else 0.0)


def layer_result(found: ComparedLayer) -> MismatchLayer:
    """The figures of a layer."""
    sums = found.sums
    reference = float(sums["reference"].sum())
    counted = sums["size"] > 0
    return MismatchLayer(
        layer=found.layer,
        tokens=int(counted.sum()),
        heads=len({h.head for h in found.heads}),
        difference=_relative(float(sums["difference"].sum()), reference),
        x=found.stream,
        q=_apart(sums, "q"),
        k=_apart(sums, "k"),
        v=_apart(sums, "v"),
        parts=tuple(_part(sums, name, reference) for name in PARTS),
        errors=_errors(found, reference),
    )


def _apart(sums: LayerSums, name: str) -> float:
    return _relative(float(sums[f"{name}.difference"].sum()), float(sums[f"{name}.reference"].sum()))


def _part(sums: LayerSums, name: str, reference: float) -> DifferencePart:
    return DifferencePart(name, *figures_of(sums, name, reference))  # type: ignore[arg-type]


def figures_of(sums: LayerSums, name: str, reference: float) -> tuple[float, float, float | None, float, float | None]:
    """Of a part: its size, its share and that one's error, its mean away from zero and that one's error."""
    share = _ratio_of_sums(sums[f"{name}.along"], sums["difference"])
    away = _ratio_of_sums(sums[f"{name}.away"], sums["size"])
    return _relative(float(sums[f"{name}.square"].sum()), reference), *share, *away


def _ratio_of_sums(over: Tensor, under: Tensor) -> tuple[float, float | None]:
    """sum(over) / sum(under) and its delete-one jackknife error over tokens."""
    kept = (under != 0) | (over != 0)
    a, b = over[kept].double(), under[kept].double()
    total = float(b.sum())
    if not total:
        return 0.0, None
    value = float(a.sum()) / total
    n = len(a)
    rest = b.sum() - b
    if n < 2 or bool((rest <= 0).any()):
        return value, None
    left_out = (a.sum() - a) / rest
    return value, math.sqrt(float((left_out - left_out.mean()).square().sum()) * (n - 1) / n)


def _errors(found: ComparedLayer, reference: float) -> RunError:
    train, rollout = found.sums["train.error"], found.sums["rollout.error"]
    kept = found.sums["size"] > 0
    ratio = paired_ratio(np.asarray(rollout[kept]), np.asarray(train[kept]))
    nearer = "neither"
    if ratio is not None and ratio.low > 1:
        nearer = "train"
    elif ratio is not None and ratio.high < 1:
        nearer = "rollout"
    return RunError(
        _relative(float(train.sum()), reference), _relative(float(rollout.sum()), reference),
        None if ratio is None else ratio.factor, None if ratio is None else ratio.low,
        None if ratio is None else ratio.high, nearer,  # type: ignore[arg-type]
        found.fits[0].factor, found.fits[1].factor,
    )  # fmt: skip


def windows(found: ComparedLayer, *, where_apart: bool = False) -> tuple[int | None, int | None]:
    """How many keys before its own a row of either run sees; None for all.

    ``where_apart``: of the rows alone that see other keys in one run than in the other.
    """
    (a, b), (rows_a, rows_b) = found.stated.semantics, found.stated.rows
    if where_apart:
        rows = (a.visible ^ b.visible).any(1).nonzero()[:, 0]
        a, b = (replace(one, bias=one.bias[rows]) for one in (a, b))
        rows_a, rows_b = rows_a.select(rows), rows_b.select(rows)
    return window_of(a, rows_a), window_of(b, rows_b)
