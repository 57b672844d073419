"""What each layer adds to the difference of two runs' log-probabilities: by running the model with that difference.

A float64 copy of train's model runs again and again on the same tokens, each time with one place more at which it is
moved by what rollout differs from train there. What a run adds to the log-probabilities is what arises at that place,
in every order of the Taylor series; what came in from below was there before. Places: of each layer x (what is outside
attention below it), q, k and v (the projection), O by another semantics, O by rounding, and what adding up the output
projection's parts over ranks adds, where that was captured; and what enters the LM head. The head itself, and each
run's error outside attention, are measured against float64 on the run's own values.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from attn_diag.analyses.mismatch.layers import ComparedLayer
from attn_diag.analyses.mismatch.logprobs import Logprobs, split_of
from attn_diag.analyses.mismatch.mismatch import CapturedRun, ComparedRuns, compare_runs, headline
from attn_diag.errors import InputError
from attn_diag.results.mismatch import (
    LayerShare,
    LogprobSplit,
    Mismatch,
    OutsideError,
    SharePlace,
)
from attn_diag.watching.forced_runs import ForcedModel, LayerTargets, SeenRun
from attn_diag.watching.outside import outside_causes, outside_errors
from attn_diag.watching.repaired import LogprobParts, LogprobPlace, SplitDifference, repairs_of_logprobs

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from attn_diag.work import Progress

_PLACES: tuple[SharePlace, ...] = ("stream", "projection", "semantics", "rounding", "sum")


@dataclass(frozen=True)
class LayerValues:
    """What both runs had in one layer, as rows of the model's input; NaN where not compared."""

    train: LayerTargets
    """x, q, k, v and o of train."""
    rollout: LayerTargets
    """The same of rollout."""
    semantics: Tensor
    """What another semantics adds to O, [B, Hq, T, Dv]."""
    rounding: Tensor
    """What rounding and schedule add."""
    sums: tuple[Tensor, Tensor] | None = None
    """What adding up the output projection over ranks adds, as it is and in fp32 with one cast, [B, T, C]; None where
    that was not captured in both."""


def explain_logprobs(
    model: nn.Module,
    input_ids: Tensor,
    train: CapturedRun,
    rollout: CapturedRun,
    *,
    logprobs: Logprobs | tuple[ArrayLike, ArrayLike],
    mask: ArrayLike | None = None,
    hidden: tuple[Tensor, Tensor] | None = None,
    dtype: torch.dtype = torch.float64,
    device: str = "auto",
    progress: Progress | None = None,
    **inputs: Any,
) -> Mismatch:
    """As ``mismatch``, with each layer's share of the difference of log-probabilities, and what repairs leave of it.

    A copy of the model in ``dtype`` runs four times a layer, forward only.

    Args:
        model: Train's model: a Hugging Face transformers model for causal language modelling, whose calls ``train``
            holds.
        input_ids: The tokens as the captured forward of train had them, [B, T].
        train: As of ``mismatch``; one forward, a sequence a batch item.
        rollout: As of ``mismatch``.
        logprobs: Of token t + 1 after the tokens up to t, in train and in rollout, [B, T - 1] each.
        mask: Which of them were sampled and count, [B, T - 1]; None: all, or what ``logprobs`` says.
        hidden: What entered the LM head in train and in rollout, [B, T, C] each, NaN in rows that are not known. None:
            what arises behind the last attention is not told apart from the rest.
        dtype: What the copy computes in.
        device: Where the captures are compared; the model stays where it is.
        progress: Called with (done, total) after every layer, and after every run of the model.
        **inputs: More of the model's inputs, such as attention_mask and position_ids.

    Returns:
        The comparison; ``logprobs`` and ``repairs`` are of the log-probabilities.

    Raises:
        InputError: As of ``mismatch``; or train is no single forward of these tokens, the model is none of
            transformers, or ``hidden`` does not fit it.
    """
    given = logprobs if isinstance(logprobs, Logprobs) else Logprobs(*logprobs, mask)  # type: ignore[arg-type]
    if list(given.train.shape) != [input_ids.shape[0], input_ids.shape[1] - 1]:
        raise InputError(
            f"log-probabilities must be [B, T - 1] = {[input_ids.shape[0], input_ids.shape[1] - 1]} beside input_ids "
            f"{list(input_ids.shape)}, got {list(given.train.shape)}: entry t is that of token t + 1"
        )
    compared = compare_runs(train, rollout, device=device, progress=progress)
    exact = ForcedModel(model, input_ids, dtype, inputs)
    base = exact.run()
    values = _values(compared, input_ids.shape[0], input_ids.shape[1], base)
    if hidden is not None:
        _require_hidden(hidden, base.head)
    steps = list(_steps(values))
    parts: dict[LogprobPlace, np.ndarray[Any, Any]] = {}
    targets: dict[int, LayerTargets] = {}
    before = base.logprobs
    in_fp32: dict[int, np.ndarray[Any, Any]] = {}
    for done, (layer, place) in enumerate(steps):
        if place == "sum" and (sums := values[layer].sums) is not None:
            once = {**targets, layer: replace(targets[layer], output=sums[1])}
            in_fp32[layer] = (exact.run(once).logprobs - before).numpy()
        targets[layer] = _moved(values[layer], base, layer, place, targets.get(layer, LayerTargets()))
        after = exact.run(targets).logprobs
        parts[layer, place] = (after - before).numpy()
        before = after
        if progress is not None:
            progress(done + 1, len(steps))
    own = [_own(exact, values, side, hidden) for side in (0, 1)]
    if hidden is not None and base.head is not None:
        after = exact.run(targets, base.head + (hidden[1] - hidden[0]).to(base.head)).logprobs
        parts[None, "stream"] = (after - before).numpy()
        parts[None, "head"] = given.difference - (own[1].logprobs - own[0].logprobs).numpy()
    outside = outside_errors(
        [(own[side], {n: (v.train, v.rollout)[side] for n, v in values.items()}) for side in (0, 1)], given, hidden
    )
    found = compared.result
    causes = (*found.causes, *outside_causes(found, outside))
    found = replace(
        found, causes=tuple(sorted(causes, key=lambda c: c.layer)), outcome="finding" if causes else found.outcome
    )
    first = found.causes[0] if causes else None
    found = replace(
        found, logprobs=_shares(given, parts, outside), begins=None if first is None else first.layer,
        place=None if first is None else first.place,
    )  # fmt: skip
    as_run = ForcedModel(model, input_ids, None, inputs)
    rounding = {layer: v.rounding for layer, v in values.items()}
    repairs = repairs_of_logprobs(
        SplitDifference(found, given, parts, in_fp32, outside, compared.layers, as_run, rounding)
    )
    return replace(found, headline=headline(found, compared.layers, compared.pairs), repairs=tuple(repairs))


def _require_hidden(hidden: tuple[Tensor, Tensor], head: Tensor | None) -> None:
    if head is None:
        raise InputError("hidden was given, but the model has no get_output_embeddings(): leave hidden out")
    if any(one.shape != head.shape for one in hidden):
        raise InputError(
            f"hidden must be what enters the LM head in train and in rollout, {list(head.shape)} each, got "
            f"{[list(one.shape) for one in hidden]}"
        )


def _values(compared: ComparedRuns, batch: int, length: int, base: SeenRun) -> dict[int, LayerValues]:
    places = []
    for pair in compared.pairs:
        if len(pair.train.parts) > 1:
            raise InputError(
                "train has several calls of one sequence; the model can be moved where it is one forward of all tokens"
            )
        part = pair.train.parts[0]
        places.append((part.item, -part.offset - pair.shifts[0]))
    if missing := [layer.layer for layer in compared.layers if layer.layer not in base.calls]:
        raise InputError(
            f"the model makes no call of attention in layer {missing[0]} that transformers' interface shows; give the "
            "Hugging Face model whose layers were captured"
        )
    found = {layer.layer: _of_layer(layer, places, batch, length, base.x.get(layer.layer)) for layer in compared.layers}
    return {
        number: replace(one, sums=_sums(compared.added.get(number, ()), places, base.x.get(number)))
        for number, one in found.items()
    }


def _sums(
    added: Sequence[tuple[Tensor, Tensor] | None], places: Sequence[tuple[int, int]], base: Tensor | None
) -> tuple[Tensor, Tensor] | None:
    """What sums over ranks add, as the model's input has its rows; None where that is not known, or no bit."""
    known = [(place, both) for place, both in zip(places, added, strict=False) if both is not None]
    if base is None or not any(bool((both[0].nan_to_num(0.0) != 0).any()) for _, both in known):
        return None
    found = torch.full((2, *base.shape[:2], known[0][1][0].shape[1]), torch.nan, dtype=torch.float64)
    for (item, offset), both in known:
        tokens = both[0][:, 0].isfinite().nonzero()[:, 0].cpu()
        tokens = tokens[(tokens + offset >= 0) & (tokens + offset < base.shape[1])]
        for whole, one in zip(found, both, strict=True):
            whole[item, tokens + offset] = one[tokens].cpu()
    return found[0], found[1]


def _of_layer(
    layer: ComparedLayer, places: Sequence[tuple[int, int]], batch: int, length: int, base: Tensor | None
) -> LayerValues:
    heads = 1 + max(h.head for h in layer.heads)
    width = layer.heads[0].rows[0].o.shape[1]
    semantics, rounding = (torch.full((batch, heads, length, width), torch.nan, dtype=torch.float64) for _ in range(2))
    sides = []
    for side in (0, 1):
        held = {}
        for name in ("q", "k", "v", "o"):
            width = getattr(layer.heads[0].rows[0], name).shape[1]
            held[name] = torch.full((batch, heads, length, width), torch.nan, dtype=torch.float64)
        for h, split in zip(layer.heads, layer.splits, strict=True):
            item, offset = places[h.sequence]
            use = split.usable
            at = (h.rows[0].tokens[use] + offset).cpu()
            if item >= batch or (len(at) and not 0 <= int(at.min()) <= int(at.max()) < length):
                raise InputError(
                    f"train has rows that input_ids [{batch}, {length}] lack; give the tokens of its forward"
                )
            for name, whole in held.items():
                whole[item, h.head, at] = getattr(h.rows[side], name)[use].cpu()
            # Of a row at another position the semantics' part is in q and k already.
            own = torch.zeros_like(split.parts["semantics"]) if layer.rotations else split.parts["semantics"]
            semantics[item, h.head, at] = own[use].cpu()
            rounding[item, h.head, at] = split.parts["rounding"][use].cpu()
        sides.append(LayerTargets(x=_x(layer, side, places, length, base), **held))
    return LayerValues(sides[0], sides[1], semantics, rounding)


def _x(
    layer: ComparedLayer, side: int, places: Sequence[tuple[int, int]], length: int, base: Tensor | None
) -> Tensor | None:
    """x of one run as the model's input has its rows; None where it was not captured, or is no input of attention."""
    known = [(place, both) for place, both in zip(places, layer.entering, strict=True) if both is not None]
    if base is None or not known or known[0][1][0].shape[1] != base.shape[2]:
        return None
    whole = torch.full(base.shape, torch.nan, dtype=torch.float64)
    apart = size = 0.0
    for (item, offset), both in known:
        tokens = both[0][:, 0].isfinite().nonzero()[:, 0].cpu()
        tokens = tokens[(tokens + offset >= 0) & (tokens + offset < length)]
        whole[item, tokens + offset] = both[side][tokens].cpu()
        there = base[item, tokens + offset].cpu().double()
        apart += float((both[0][tokens].cpu() - there).square().sum())
        size += float(there.square().sum())
    # What enters the projection is not what enters the module where a norm or a quantiser lies between.
    return whole if apart <= _SAME_PLACE**2 * size else None


# Rounding through all layers moves x by per cents; another place of the model by its size.
_SAME_PLACE = 0.5


def _steps(values: Mapping[int, LayerValues]) -> Iterator[tuple[int, SharePlace]]:
    """In the order in which they are moved; places where nothing arises are left out."""
    for layer, found in values.items():
        for place in _PLACES:
            if (place == "stream" and found.train.x is None) or (place == "sum" and found.sums is None):
                continue
            if place != "semantics" or bool((found.semantics.nan_to_num(0.0) != 0).any()):
                yield layer, place


def _moved(values: LayerValues, base: SeenRun, layer: int, place: SharePlace, so_far: LayerTargets) -> LayerTargets:
    """The targets with one place more at which the exact model is moved by what rollout differs."""
    a, b = values.train, values.rollout

    def moved(name: str, free: Tensor) -> Tensor:
        move: Tensor = getattr(b, name) - getattr(a, name)
        heads = free.shape[1]
        return free.repeat_interleave(move.shape[1] // heads, 1).to(move) + move if move.dim() == 4 else free + move

    call = base.calls[layer]
    if place == "stream":
        assert b.x is not None
        assert a.x is not None
        return replace(so_far, x=base.x[layer].to(b.x) + (b.x - a.x))
    if place == "projection":
        return replace(so_far, **{name: moved(name, call[name]) for name in "qkv"})
    if place == "semantics":
        return replace(so_far, added=values.semantics)
    if place == "sum":
        assert values.sums is not None
        return replace(so_far, output=values.sums[0])
    return replace(so_far, added=None, o=moved("o", call["o"]))


def _own(
    exact: ForcedModel, values: Mapping[int, LayerValues], side: int, hidden: tuple[Tensor, Tensor] | None
) -> SeenRun:
    """What float64 makes of one run's own O, x and hidden states."""
    mine = {layer: (v.train, v.rollout)[side] for layer, v in values.items()}
    targets = {layer: LayerTargets(x=v.x, o=v.o) for layer, v in mine.items()}
    return exact.run(targets, None if hidden is None else hidden[side])


def _shares(given: Logprobs, parts: LogprobParts, outside: Sequence[OutsideError]) -> LogprobSplit:
    kept, observed = given.counted, given.difference
    total = float(np.square(observed).sum())
    named = {place: np.where(kept, part, 0.0) for place, part in parts.items()}
    explained = sum(named.values(), np.zeros_like(observed))
    every: dict[LogprobPlace, np.ndarray[Any, Any]] = {**named, (None, "rest"): observed - explained}
    shares = []
    for (layer, place), part in every.items():
        values = part[kept]
        error = float(values.std(ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else None
        shares.append(
            LayerShare(
                layer, place, float(values.mean()), error, math.sqrt(float(np.square(values).mean())),
                float((part * observed).sum()) / total if total else 0.0,
            )
        )  # fmt: skip
    left = float(np.square(observed - explained).sum())
    return replace(
        split_of(given), predicted=1 - left / total if total else None, shares=tuple(shares), missing="",
        outside=tuple(outside),
    )  # fmt: skip
