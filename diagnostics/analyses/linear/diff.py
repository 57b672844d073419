"""Two kernels of linear attention on the same inputs: chunked and recurrent, two chunk sizes, packed and alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from attn_diag.analyses.linear.inspect import inspect_linear_captures
from attn_diag.captures.linear import LinearCapture, load_linear
from attn_diag.errors import InputError
from attn_diag.head.linear import STATES, LinearRun
from attn_diag.head.machine import describe_tool, pick_device
from attn_diag.reference.linear import OF_HEADS
from attn_diag.results.linear import LinearQuantity
from attn_diag.results.linear_comparison import (
    DifferenceAnswer,
    LinearComparison,
    LinearDifference,
    LinearHeadDifference,
)
from attn_diag.results.quality import Answer
from attn_diag.results.wording import LINEAR_SYMBOLS, number, percent, plural, together

# The gravest first: what a difference is called where a side has this answer.
_ANSWERS: tuple[tuple[Answer, DifferenceAnswer], ...] = (
    ("nonfinite", "nonfinite"), ("wrong", "semantics"), ("lossy", "lossy"), ("undecided", "undecided"),
    ("stated", "stated"),
)  # fmt: skip


def diff_linear(
    a: LinearCapture | str | Path, b: LinearCapture | str | Path, *, a_observation: str | None = None,
    b_observation: str | None = None, level: float = 0.01, device: str = "auto",
) -> LinearComparison:  # fmt: skip
    """Split what parts two kernels on the same inputs into rounding and semantics.

    Args:
        a, b: LinearCaptures, or their files; the one may hold a sequence of the other's alone.
        a_observation, b_observation: Their names, not needed where there is one only.
        level: Significance of the tests of means, as of ``inspect_linear``.
        device: auto, cpu or cuda.

    Raises:
        InputError: They have other inputs, or no output in common.
    """
    first, second = (one if isinstance(one, LinearCapture) else load_linear(one) for one in (a, b))
    first, a_name = _alone(first, a_observation)
    second, b_name = _alone(second, b_observation)
    first, second, sequence = _same_inputs(first, second)
    shared = [name for name in first.observations[a_name] if name in second.observations[b_name]]
    if not shared:
        raise InputError(f"{first.source} and {second.source} have no output in common (o, final_state, dq, …)")
    where = pick_device(device)
    verdicts = inspect_linear_captures([first, second], level=level, device=device)
    each = [capture.observations[0].heads for capture in verdicts.captures]
    run = LinearRun(first, where)
    heads = []
    for index, (one, other) in enumerate(zip(*each, strict=True)):
        known = {q.quantity: q for q in one.quantities}
        found = []
        for theirs in other.quantities:
            place = run.place(theirs.quantity, index)
            if theirs.quantity in shared and theirs.quantity in known and place is not None:
                pair = [
                    c.observations[n][theirs.quantity].to(where).double()[place]
                    for c, n in ((first, a_name), (second, b_name))
                ]
                true = run.reference.values[theirs.quantity][place]
                found.append(_difference(known[theirs.quantity], theirs, pair, true))
        heads.append(LinearHeadDifference(one.head, tuple(found)))
    return LinearComparison(
        describe_tool(where), _source(first, a_name), _source(second, b_name), first.operator, sequence,
        _sentence(heads), tuple(heads),
    )  # fmt: skip


def _difference(a: LinearQuantity, b: LinearQuantity, pair: Sequence[Tensor], true: Tensor) -> LinearDifference:
    name, symbol = a.quantity, LINEAR_SYMBOLS.get(a.quantity, a.quantity)
    if torch.equal(*pair):
        return LinearDifference(name, "same bits", f"{symbol} has the same values.", 0.0, None, None, None)
    answers = {a.answer, b.answer}
    answer: DifferenceAnswer = next((ours for theirs, ours in _ANSWERS if theirs in answers), "rounding")
    if not all(x.isfinite().all() for x in pair):
        words = f"{symbol} is not finite in {_sides(a, b, 'nonfinite')}."
        return LinearDifference(name, "nonfinite", words, None, None, None, None)
    apart = pair[0] - pair[1]
    squares = float(apart.square().sum())
    size = float(true.norm())
    of_a = float((apart * (pair[0] - true)).sum()) / squares
    parts = {"A": of_a, "B": 1 - of_a}
    wrong = [side for side, quantity in (("A", a), ("B", b)) if quantity.answer == "wrong"]
    semantics = min(1.0, max(0.0, sum(parts[side] for side in wrong)))
    difference = math.sqrt(squares) / size if size else None
    expected = a.relative_error_well_rounded
    beside = difference / (math.sqrt(2) * expected) if difference is not None and expected else None
    said = f"{symbol} differs by {percent(difference)}"
    if beside is not None:
        said += f", {number(beside)} times what two well-rounded kernels may"
    if answer == "rounding":
        said += ": rounding, of both"
    elif answer == "semantics":
        said += f": {percent(semantics)} of it is the mathematics of {together(wrong)}"
        causes = [q.words for q in (a, b) if q.answer == "wrong"]
        return LinearDifference(name, answer, f"{said}. {causes[0]}", difference, beside, of_a, semantics)
    elif answer == "lossy":
        said += f": rounding, and {_sides(a, b, 'lossy')} rounds more than it must. "
        said += next(q.words for q in (a, b) if q.answer == "lossy").rstrip(".")
    elif answer == "undecided":
        said += f"; whether {_sides(a, b, 'undecided')} rounds more than it must is undecided"
    return LinearDifference(name, answer, f"{said}.", difference, beside, of_a, semantics)


def _sides(a: LinearQuantity, b: LinearQuantity, answer: Answer) -> str:
    return together([side for side, quantity in (("A", a), ("B", b)) if quantity.answer == answer]) or "A or B"


def _sentence(heads: Sequence[LinearHeadDifference]) -> str:
    every = [(head.head, q) for head in heads for q in head.quantities]
    for answer in ("nonfinite", "semantics", "lossy"):
        own = [(head, q) for head, q in every if q.answer == answer]
        if own:
            head, worst = max(own, key=lambda one: one[1].beside or 0.0)
            named = together([LINEAR_SYMBOLS.get(n, n) for n in dict.fromkeys(q.quantity for _, q in own)])
            return f"{answer}: {named} ({plural(len(heads), 'head')} compared). Head {head}: {worst.words}"
    if all(q.answer == "same bits" for _, q in every):
        return f"{plural(len(heads), 'head')}: the same bits."
    unknown = [q for _, q in every if q.answer in ("undecided", "stated")]
    largest = max((q.beside for _, q in every if q.beside is not None), default=None)
    most = "" if largest is None else f", at most {number(largest)} times what two well-rounded kernels may differ by"
    if unknown:
        named = together([LINEAR_SYMBOLS.get(n, n) for n in dict.fromkeys(q.quantity for q in unknown)])
        return f"{plural(len(heads), 'head')}: no fault found{most}; undecided of {named}."
    return f"{plural(len(heads), 'head')}: rounding alone parts them{most}."


def _source(capture: LinearCapture, observation: str) -> str:
    return capture.source if observation == "observed" else f"{capture.source} ({observation})"


def _alone(capture: LinearCapture, observation: str | None) -> tuple[LinearCapture, str]:
    """The capture with one observation, and its name."""
    observation, _ = capture.observation(observation)
    others = [outputs for name, outputs in capture.observations.items() if name != observation]
    dropped = {id(t) for outputs in others for t in outputs.values()}
    kept = {name: t for name, t in capture.tensors.items() if id(t) not in dropped}
    return replace(capture, tensors=kept), observation


def _same_inputs(a: LinearCapture, b: LinearCapture) -> tuple[LinearCapture, LinearCapture, int | None]:
    """Both on the inputs that they share: of packed or batched sequences the one that the other has alone."""
    for name in ("operator", "l2norm", "normalize"):
        if getattr(a, name) != getattr(b, name):
            raise InputError(f"not the same call: {name} is {getattr(a, name)} in A and {getattr(b, name)} in B")
    if a.call.used_scale != b.call.used_scale:
        raise InputError(f"not the same call: scale is {a.call.used_scale} in A and {b.call.used_scale} in B")
    many = [len(c.call.sequences) for c in (a, b)]
    if many[0] == many[1]:
        if (other := _differing(a, b)) is not None:
            raise InputError(f"not the same inputs: {other}; what parts the outputs would be that")
        return a, b, None
    if min(many) > 1:
        raise InputError(f"A has {many[0]} sequences and B {many[1]}: compare one alone with those of the other")
    larger, alone = (a, b) if many[0] > many[1] else (b, a)
    other = None
    for n in range(max(many)):
        part = _sequence(larger, n)
        other = _differing(part, alone)
        if other is None:
            return (part, alone, n) if larger is a else (alone, part, n)
    raise InputError(f"no sequence of {larger.source} has the inputs of {alone.source} (of the last: {other})")


def _differing(a: LinearCapture, b: LinearCapture) -> str | None:
    names = ("do", "dfinal_state", "cu_seqlens")
    ours, theirs = (c.inputs | {n: c.tensors[n] for n in names if n in c.tensors} for c in (a, b))
    if "cu_seqlens" in ours and len(ours["cu_seqlens"]) == 2:
        del ours["cu_seqlens"]
    if "cu_seqlens" in theirs and len(theirs["cu_seqlens"]) == 2:
        del theirs["cu_seqlens"]
    for name in dict.fromkeys([*ours, *theirs]):
        if name not in ours or name not in theirs:
            return f"{name} is in one of them only"
        one, other = ours[name].double().cpu(), theirs[name].double().cpu()
        if one.shape != other.shape:
            return f"{name} has shape {list(one.shape)} and {list(other.shape)}"
        if not torch.equal(one, other):
            return f"{name} differs by {percent(float((one - other).norm() / one.norm()))}"
    return None


def _sequence(capture: LinearCapture, n: int) -> LinearCapture:
    """One sequence of it, as a call of its own."""
    b, steps = capture.call.sequences[n]
    tensors = {}
    for name, tensor in capture.tensors.items():
        base = name.rpartition(".")[2]
        plain = base.removeprefix("d")
        if base == "cu_seqlens" or (base != plain and plain in OF_HEADS):
            continue  # gradients of one number a head are of all sequences together
        if plain in OF_HEADS:
            tensors[name] = tensor
        elif base in STATES or plain in ("initial_state", "final_state"):
            tensors[name] = tensor[n : n + 1]
        else:
            tensors[name] = tensor[b : b + 1, steps]
    return replace(capture, tensors=tensors)
