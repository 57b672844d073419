"""How two runs add up their output projections over ranks, and what that makes of what these return.

    Y_b - Y_a = [(O_b - O_a) W_a]  +  [O_b (W_b - W_a)]  +  [products_b - products_a]  +  [sum_b - sum_a]
                 came in with O        other weights         each rank's, rounded       order and format of the sum

in float64, with products_x what the ranks of run x give, added up exactly, less O_x W_x, and sum_x what adding them up
adds to that; a bias and a last cast are of the products. It adds up exactly.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch
from torch import Tensor

from attn_diag.analyses.mismatch.layers import figures_of
from attn_diag.analyses.mismatch.outputs import ProjectionCall, projections_of
from attn_diag.analyses.mismatch.pairing import SequencePair
from attn_diag.analyses.mismatch.reduced import JudgedSum, SumFault, judged, multiple_of
from attn_diag.analyses.mismatch.split import LayerSums
from attn_diag.analyses.mismatch.tokens import TokenRun, TokenSequence
from attn_diag.analyses.mismatch.weights import OtherWeights, compare_weights, rounded_alike
from attn_diag.captures.capture import Capture
from attn_diag.reference import format_of
from attn_diag.results.mismatch import (
    MismatchCause,
    MismatchRepair,
    OutputDifference,
    OutputPart,
    ProjectionSum,
    RunName,
)
from attn_diag.results.wording import listed, percent, plural

_NAMES: tuple[RunName, RunName] = ("train", "rollout")
_PARTS = ("inputs", "weights", "products", "sum")
# So many calls before one are looked at for a part that was given again.
_BEFORE = 4
# Other weights are made up for where no more of what they make is left in what arises in the projection.
_UNDONE = 0.05
# Weights that are less apart, relative to their size, are the same: FP32 ones of two runs that trained alike.
_LAST_BITS = 2.0**-20
IN_FP32 = "output projections' parts added up in fp32, each once, with one cast, in both"
SAME_WEIGHTS = "the same weights of the output projection"
MADE_IN_FP32 = "output projections' parts made and added up in fp32, with one cast, in both"


@dataclass
class ComparedSums:
    """What is found of both runs."""

    sums: list[ProjectionSum] = field(default_factory=list)
    outputs: list[OutputDifference] = field(default_factory=list)
    causes: list[MismatchCause] = field(default_factory=list)
    repairs: list[MismatchRepair] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    added: dict[int, list[tuple[Tensor, Tensor] | None]] = field(default_factory=dict)
    """By layer and pair of sequences what adding up adds in rollout less that in train, as it is and with one cast in
    fp32; [T, C] each, NaN where not compared."""


@dataclass
class _Squares:
    """Over the layers: what arises in output projections, and what repairs leave of it."""

    layers: list[int] = field(default_factory=list)
    reference: float = 0.0
    arising: float = 0.0
    in_fp32: float = 0.0
    made_in_fp32: float = 0.0
    same_weights: float = 0.0


def compare_sums(
    sides: Sequence[Sequence[Capture]], runs: Sequence[TokenRun], pairs: Sequence[SequencePair], device: torch.device
) -> ComparedSums:
    """Compare the output projections that the captures hold; nothing is found where they hold none.

    Args:
        sides: The captures of train and of rollout, as the ranks wrote them.
        runs: The same, put together.
        pairs: Their sequences.
        device: Where float64 is computed.
    """
    found, squares = ComparedSums(), _Squares()
    by_layer: list[dict[int, list[ProjectionCall]]] = []
    for side, name in zip(sides, _NAMES, strict=True):
        calls, notes = projections_of(side, name, device)
        found.notes += notes
        by_layer.append({})
        for call in calls:
            by_layer[-1].setdefault(call.layer, []).append(call)
    shared = any(len(call.ranks) > 1 for layers in by_layer for calls in layers.values() for call in calls)
    layers = sorted({*by_layer[0], *by_layer[1]})
    shared |= any(_other_weights(*(calls.get(layer, []) for calls in by_layer)) for layer in layers)
    for layer in layers if shared else ():
        both = [layers.get(layer, []) for layers in by_layer]
        for calls, other, name in zip(both, both[::-1], _NAMES, strict=True):
            _judge(found, calls, name, multiple_of(other[0]) if other else None)
        if all(both):
            _compare(found, squares, layer, both, runs, pairs)
        else:
            missing = _NAMES[0] if not both[0] else _NAMES[1]
            found.notes.append(
                f"Layer {layer}: {missing}'s output projection was not captured (sums=True), so that what the sum adds "
                "to the difference is not told."
            )
    if squares.arising > 0:
        size = squares.reference or 1.0
        lefts = {
            IN_FP32: squares.in_fp32, MADE_IN_FP32: squares.made_in_fp32, SAME_WEIGHTS: squares.same_weights
        }  # fmt: skip
        for what, left in lefts.items():
            removes = 1 - left / squares.arising
            repair = MismatchRepair(what, tuple(squares.layers), "output", removes, math.sqrt(left / size))
            found.repairs += [repair] if math.isfinite(left) and left != squares.arising else []
    return found


def _judge(found: ComparedSums, calls: Sequence[ProjectionCall], run: RunName, usual: float | None) -> None:
    """What is said of a layer's sums in one run."""
    groups: dict[tuple[tuple[int, ...], str, str, str], list[JudgedSum]] = {}
    faults: dict[str, list[SumFault]] = {}
    layer, shared = calls[0].layer if calls else 0, sum(call.is_sum for call in calls)
    if single := [call for call in calls if not call.is_sum]:
        dtype = str(single[0].part(0).dtype)[6:]
        found.sums.append(ProjectionSum(run, layer, (0,), len(single), "", dtype, "", None, 0.0, 0.0, within=True))
    for number, call in enumerate(calls):
        if not call.is_sum:
            continue
        one = judged(call, [other for other in calls[:number] if other.ranks == call.ranks][-_BEFORE:], usual)
        key = call.ranks, call.by, str(call.total.dtype)[6:], one.how.words.partition(",")[0]
        groups.setdefault(key, []).append(one)
        for fault in one.faults:
            faults.setdefault(fault.words, []).append(fault)
    for (ranks, by, dtype, _), ones in groups.items():
        largest = max(ones, key=lambda one: one.call.total.numel())
        size = sum(one.squares["exact"] for one in ones) or 1.0
        error, once = (math.sqrt(sum(one.squares[name] for one in ones) / size) for name in ("error", "once"))
        agreement, within = min(one.how.agreement for one in ones), not any(one.faults for one in ones)
        way = largest.how.words
        found.sums.append(
            ProjectionSum(run, layer, ranks, len(ones), by, dtype, way, agreement, error, once, within=within)
        )
    for words, those in faults.items():
        offs = [fault.off for fault in those if fault.off is not None]
        often = f"in {len(those)} of {plural(shared, 'call')}" if shared > 1 else ""
        told = " ".join(filter(None, (f"{percent(max(offs))} off" if offs else "", often)))
        said = f"{run}'s output projection: {words}{f' ({told})' if told else ''}"
        fault = those[0]
        found.causes.append(
            MismatchCause(layer, "sum", fault.label, run, said, "fitted", fault.explained, "", "output")
        )  # fmt: skip


@dataclass(frozen=True)
class _Rows:
    """One run's rows of a sequence; float64 [T, C], NaN where there is none."""

    product: Tensor
    output: Tensor
    added: Tensor
    """What adding up adds to the exact sum of the parts."""
    once: Tensor
    """What doing that in fp32 with one cast would add."""
    made: Tensor
    """What one cast would add to the product itself."""
    of_train: Tensor
    """O times train's weights."""
    weight: Tensor | None = None
    """Its own."""


def _compare(
    found: ComparedSums, squares: _Squares, layer: int, both: Sequence[Sequence[ProjectionCall]],
    runs: Sequence[TokenRun], pairs: Sequence[SequencePair],
) -> None:  # fmt: skip
    """What the layer's output projection returns in both runs."""
    sums, lefts, kept = LayerSums(), [0.0, 0.0, 0.0, 0.0], 0.0
    added: list[tuple[Tensor, Tensor] | None] = []
    other: OtherWeights | None = None
    for number, pair in enumerate(pairs):
        a = _rows(both[0], runs[0], pair.train, layer, pair.shifts[0], pair.length, None)
        trained = None if a is None else a.weight
        b = _rows(both[1], runs[1], pair.rollout, layer, pair.shifts[1], pair.length, trained)
        if a is None or b is None or a.output.shape != b.output.shape:
            added.append(None)
            continue
        added.append((b.added - a.added, b.once - a.once))
        if other is None and a.weight is not None and b.weight is not None and not _same(a.weight, b.weight):
            other = compare_weights(*_of_one_format(a.weight, b.weight))
        use = (a.product + b.of_train + b.product + a.output + b.output).isfinite().all(1)
        tokens = use.nonzero()[:, 0]
        if not len(tokens):
            continue
        difference = (b.output - a.output)[use]
        parts = {"inputs": (b.of_train - a.product)[use], "weights": (b.product - b.of_train)[use]}
        parts["sum"] = (b.added - a.added)[use]
        parts["products"] = difference - parts["inputs"] - parts["weights"] - parts["sum"]
        reference = a.product[use]
        for name, values in (("difference", difference.square()), ("size", reference.abs())):
            sums.add(name, values.sum(1), number, tokens)
        sums.add("reference", reference.square().sum(1), number, tokens)
        for name, part in parts.items():
            sums.add(f"{name}.square", part.square().sum(1), number, tokens)
            sums.add(f"{name}.along", (part * difference).sum(1), number, tokens)
            sums.add(f"{name}.away", (part * reference.sign()).sum(1), number, tokens)
        arising = difference - parts["inputs"]
        kept += float((arising * parts["weights"]).sum())
        for i, left in enumerate((
            arising, arising - parts["sum"] + (b.once - a.once)[use], (b.made - a.made)[use] + parts["weights"],
            arising - parts["weights"],
        )):  # fmt: skip
            lefts[i] += float(left.square().sum())
    found.added[layer] = added
    size = float(sums["reference"].sum())
    if not size:
        found.notes.append(
            f"Layer {layer}: what the sums of the output projection add to the difference is not told: its weights "
            "were not captured, its numbers are not finite, or its rows are not those of attention (packed sequences)."
        )
        return
    if any(call.biased for calls in both for call in calls):
        lefts[2] = math.nan  # a bias is in the products
    names = [name for name in _PARTS if name != "weights" or other is not None]
    figures = {name: figures_of(sums, name, size) for name in names}
    if other is not None and kept < _UNDONE * float(sums["weights.square"].sum()):
        lefts[2:] = math.nan, lefts[0]
        found.notes.append(
            f"Layer {layer}: {other.words_of('output')} ({percent(other.difference)} of w_o apart), which what it "
            "returns does not show: something makes up for them, as an adapter that one run has merged."
        )
    elif other is not None:
        words = f"{other.words_of('output')} ({percent(other.difference)} of w_o apart)"
        found.causes.append(
            MismatchCause(layer, "weights", "semantics", "both", words, "stated", figures["weights"][1], "", "output")
        )  # fmt: skip
    squares.layers.append(layer)
    squares.reference += size
    squares.arising += lefts[0]
    squares.in_fp32 += lefts[1]
    squares.made_in_fp32 += lefts[2]
    squares.same_weights += lefts[3]
    found.outputs.append(
        OutputDifference(
            layer, int((sums["size"] > 0).sum()), math.sqrt(float(sums["difference"].sum()) / size),
            tuple(OutputPart(name, *values) for name, values in figures.items()),  # type: ignore[arg-type]
        )
    )  # fmt: skip


def _rows(
    calls: Sequence[ProjectionCall], run: TokenRun, sequence: TokenSequence, layer: int, shift: int, length: int,
    trained: Tensor | None,
) -> _Rows | None:  # fmt: skip
    """The rows of one sequence, whose O is multiplied by train's weights too; None where none is known."""
    held: list[Tensor] | None = None
    weight: Tensor | None = None
    for part in sequence.parts:
        capture = run.calls[layer].get(part.call)
        if capture is None or capture.documents is not None or part.call[3]:
            continue
        there = [call for call in calls if call.call == part.call[:2]]
        batches = [call.output.shape[0] for call in there]
        # Groups of ranks that hold other sequences come in the order of their ranks, as they were merged.
        if sum(batches) != capture.batch:
            continue
        item, call = part.item, next(iter(there))
        for call in there:
            if item < call.output.shape[0]:
                break
            item -= call.output.shape[0]
        rows, tokens = part.rows.to(call.device), part.tokens.to(call.device) + shift
        inside = (tokens >= 0) & (tokens < length)
        rows, tokens = rows[inside], tokens[inside]
        if not len(rows) or int(rows.max()) >= call.output.shape[1]:
            continue
        if held is None:
            held = [call.output.new_full((length, call.output.shape[2]), torch.nan) for _ in range(6)]
        weight = call.weight
        for whole, values in zip(held, _of_item(call, item, trained), strict=True):
            whole[tokens] = values[rows]
    return None if held is None else replace(_Rows(*held), weight=weight)


def _of_item(call: ProjectionCall, item: int, trained: Tensor | None) -> Iterator[Tensor]:
    """The product, what is returned, what is added, once, and to the product, and train's product; [T, C]."""
    output, exact = call.output[item], call.exact[item]
    product = torch.full_like(output, torch.nan)
    if call.products is not None:
        product[call.rows] = call.products[item]
    dtype = call.total.dtype
    yield product
    yield output
    yield call.total[item].double() - exact if call.is_sum else torch.zeros_like(exact)
    yield exact.to(dtype).double() - exact if call.is_sum else torch.zeros_like(exact)
    yield product.to(dtype).double() - product
    of_train = product
    if trained is not None and call.weight is not None and not _same(trained, call.weight):
        other = call.with_weight(trained)
        if other is not None:
            of_train = torch.full_like(output, torch.nan)
            of_train[call.rows] = other[item]
    yield of_train


def _other_weights(a: Sequence[ProjectionCall], b: Sequence[ProjectionCall]) -> bool:
    """Whether the first calls of a layer have other weights in the two runs."""
    both = [calls[0].weight for calls in (a, b) if calls]
    return len(both) > 1 and both[0] is not None and both[1] is not None and not _same(both[0], both[1])


def _same(a: Tensor, b: Tensor) -> bool:
    """Whether weights are equal, in the narrower of their formats, but for what is below ``_LAST_BITS``."""
    if a.shape != b.shape or rounded_alike(a, b):
        return a.shape == b.shape
    a, b = _of_one_format(a, b)
    return torch.equal(a, b) or bool((a.double() - b.double()).norm() < _LAST_BITS * a.double().norm())


def _of_one_format(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Weights that one run keeps in fp32 are rounded as the other's."""
    narrow = min(a.dtype, b.dtype, key=lambda dtype: format_of(dtype).precision)
    return a.to(narrow), b.to(narrow)


def with_sums(causes: Sequence[MismatchCause], found: ComparedSums, layers: Sequence[int]) -> list[MismatchCause]:
    """All causes by layer; what a wrong sum makes of the next layer's input is no other cause, and is noted."""
    wrong = {c.layer for c in found.causes}
    behind = {later for layer, later in pairwise(layers) if layer in wrong}
    taken = [c for c in causes if c.layer in behind and c.place == "stream" and c.kind in ("unnamed-input", "norm")]
    if taken:
        told = listed([str(c.layer) for c in taken], 6)
        found.notes.append(
            f"x of layer {told} differs by more than rounding, as the layer before's output projection returns "
            "something else: whether something else differs there too is not told."
        )
    return sorted([*(c for c in causes if c not in taken), *found.causes], key=lambda cause: cause.layer)
