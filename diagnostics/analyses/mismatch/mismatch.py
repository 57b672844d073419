"""Captures of two runs of the same tokens in, a Mismatch out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from attn_diag.analyses.mismatch.cache import lost_keys
from attn_diag.analyses.mismatch.causes import alike, causes_of, small_jump
from attn_diag.analyses.mismatch.layers import ComparedLayer, compare_layer, layer_result, rows_of_layer
from attn_diag.analyses.mismatch.logprobs import Logprobs, split_of
from attn_diag.analyses.mismatch.nonfinite import not_finite
from attn_diag.analyses.mismatch.pairing import SequencePair, pairs
from attn_diag.analyses.mismatch.repairs import repairs_of
from attn_diag.analyses.mismatch.rings import ring_merges, with_rings
from attn_diag.analyses.mismatch.small_words import Seen
from attn_diag.analyses.mismatch.sums import compare_sums, with_sums
from attn_diag.analyses.mismatch.tokens import TokenRun, by_layer, read_run
from attn_diag.captures.capture import Capture
from attn_diag.captures.loading import find_captures, load
from attn_diag.captures.validity import short
from attn_diag.errors import InputError
from attn_diag.head.machine import describe_tool, pick_device
from attn_diag.results.mismatch import Mismatch, MismatchCause, MismatchLayer, MismatchSide, RunName
from attn_diag.results.wording import percent, plural, times

if TYPE_CHECKING:
    from numpy.typing import ArrayLike
    from torch import Tensor

    from attn_diag.work import Progress

_NAMES: tuple[RunName, RunName] = ("train", "rollout")

CapturedRun = str | PathLike[str] | Capture | Sequence[Capture]


@dataclass(frozen=True)
class ComparedRuns:
    """Two runs as they were compared."""

    result: Mismatch
    """What was found."""
    runs: tuple[TokenRun, TokenRun]
    """Train and rollout."""
    pairs: tuple[SequencePair, ...]
    """The sequences that both have; ``ComparedLayer`` numbers them."""
    layers: tuple[ComparedLayer, ...]
    """The layers that both have."""
    added: Mapping[int, Sequence[tuple[Tensor, Tensor] | None]]
    """By layer and pair what the sums of output projections add in rollout less train; see ``ComparedSums``."""


def mismatch(
    train: CapturedRun,
    rollout: CapturedRun,
    *,
    logprobs: Logprobs | tuple[ArrayLike, ArrayLike] | None = None,
    device: str = "auto",
    progress: Progress | None = None,
) -> Mismatch:
    """Where two runs of the same tokens part, layer by layer, and why.

    Each layer's difference of O is split, exactly, into what came in with q, k and v, what another semantics makes
    (scale, mask, window, sink, softcap, RoPE position), and rounding. A semantics is named where the captures state
    another, or where an O fits it as well as rounding lets it and nothing else does.

    Args:
        train: A folder of captures, a capture's file, a Capture, or several: q, k, v and o of every layer, as
            ``attn_diag.capture(model, folder, batch=None, calls=None)`` writes them around a forward of the trainer's
            model.
        rollout: The same of the engine: prefill, chunks and decode steps in any layout; calls of one sequence are found
            by the keys in their caches.
        logprobs: Log-probabilities of the sampled tokens in train and in rollout, [B, T] each; a ``Logprobs`` says
            which of them count. What each layer adds to their difference, ``attn_diag.explain_logprobs`` tells.
        device: Where float64 is computed: auto, cpu or cuda.
        progress: Called with (done, total) after every layer.

    Returns:
        The comparison.

    Raises:
        InputError: Something cannot be read, or the runs share no layer, no sequence of tokens.
    """
    found = compare_runs(train, rollout, device=device, progress=progress).result
    if logprobs is None:
        return found
    given = logprobs if isinstance(logprobs, Logprobs) else Logprobs(np.asarray(logprobs[0]), np.asarray(logprobs[1]))
    return replace(found, logprobs=split_of(given))


def compare_runs(
    train: CapturedRun, rollout: CapturedRun, *, device: str = "auto", progress: Progress | None = None
) -> ComparedRuns:
    """As ``mismatch``, with what a closer look needs."""
    at = pick_device(device)
    sides = [_captures(side, name) for side, name in zip((train, rollout), _NAMES, strict=True)]
    layers, runs = read_runs(sides[0], sides[1], at)
    matched, notes = pairs(*runs)
    notes = [*runs[0].notes, *runs[1].notes, *notes]
    if not matched:
        raise InputError(
            f"train and rollout share no sequence of tokens that could be told: no v of layer {layers[0]}, the first "
            "that both have, agrees. Capture the same tokens in both; if they are the same, what makes v of them is "
            "another (the embedding, the norm, v's projection)"
        )
    results: list[MismatchLayer] = []
    compared: list[ComparedLayer] = []
    causes = lost_keys(layers[0], dict(zip(_NAMES, runs, strict=True)))
    broken: list[MismatchCause] = []
    for done, layer in enumerate(layers):
        rows = rows_of_layer(runs, matched, layer, at)
        broken += not_finite(layer, [(head, both) for _, head, both in rows], tuple(broken))
        causes += [cause for cause in broken if cause.layer == layer]
        found = compare_layer(runs, matched, layer, rows, at)
        if found is None:
            notes.append(f"Layer {layer}: no row is {'finite ' if rows else ''}in both runs.")
            continue
        result = layer_result(found)
        new = causes_of(found, result, results)
        causes += new
        if not new and (said := small_jump(found, result, results)):
            notes.append(said)
        if alike(found):
            factors = " and ".join(times(fit.factor) for fit in found.fits)
            notes.append(
                f"Layer {layer}: O of train and of rollout is {factors} times as far from float64 as a well-rounded "
                "kernel's, under what the captures state, but in the same way: that is no mismatch."
            )
        results.append(result)
        compared.append(found)
        if progress is not None:
            progress(done + 1, len(layers))
    if not results:
        if causes:
            raise InputError(
                f"no row of any layer is finite in both runs: in layer {causes[0].layer} {causes[0].words}"
            )
        raise InputError("train and rollout share sequences, but no row of any layer; capture whole forwards in both")
    most = max(layer.tokens for layer in results)
    few = [layer for layer in results if layer.tokens < most]
    notes += [f"Layer {layer.layer}: {layer.tokens} of {most} tokens were compared." for layer in few]
    merges = [m for side, name in zip(sides, _NAMES, strict=True) for m in ring_merges(side, name, at)]
    causes = with_rings(causes, merges)
    sums = compare_sums(sides, runs, matched, at)
    causes = with_sums(causes, sums, [layer.layer for layer in results])
    repairs = [*repairs_of(compared, causes), *sums.repairs]
    identical = not any([one.difference for one in results] + [one.difference for one in sums.outputs])
    begins = causes[0] if causes else None
    whole = Mismatch(
        tool=describe_tool(at),
        train=_side("train", sides[0], runs[0], train),
        rollout=_side("rollout", sides[1], runs[1], rollout),
        outcome="finding" if causes else "identical" if identical else "rounding",
        headline="",
        begins=None if begins is None else begins.layer,
        place=None if begins is None else begins.place,
        sequences=len(matched),
        tokens=most,
        layers=tuple(results),
        causes=tuple(causes),
        logprobs=None,
        repairs=tuple(sorted(repairs, key=lambda repair: -repair.removes)),
        notes=(*notes, *sums.notes),
        merges=tuple(merges),
        sums=tuple(sums.sums),
        outputs=tuple(sums.outputs),
    )
    whole = replace(whole, headline=headline(whole, compared, matched))
    return ComparedRuns(whole, runs, tuple(matched), tuple(compared), sums.added)


def read_runs(
    train: Sequence[Capture], rollout: Sequence[Capture], device: torch.device
) -> tuple[list[int], tuple[TokenRun, TokenRun]]:
    """The layers that both runs have, and the runs. Raises InputError where there is none."""
    known = [set(by_layer(side)[0]) for side in (train, rollout)]
    layers = sorted(known[0] & known[1])
    if not layers:
        listed = " and ".join(", ".join(map(str, sorted(layers))) for layers in known)
        raise InputError(f"train and rollout share no layer: they have {listed}; capture the same layers in both")
    return layers, (read_run(train, layers[0], device), read_run(rollout, layers[0], device))


def _captures(side: CapturedRun, name: str) -> list[Capture]:
    if isinstance(side, Capture):
        return [side]
    if isinstance(side, str | PathLike):
        return [load(path) for path in find_captures([Path(fspath(side))])]
    captures = list(side)
    if not captures:
        raise InputError(f"{name}: expected captures, got none")
    return captures


def _side(name: RunName, captures: Sequence[Capture], run: TokenRun, given: CapturedRun) -> MismatchSide:
    if isinstance(given, str | PathLike):
        source = fspath(given)
    else:
        folders = {str(Path(c.source).parent) for c in captures}
        source = folders.pop() if len(folders) == 1 and len(captures) > 1 else captures[0].source
    of_layers = [c for calls in run.calls.values() for c in calls.values()]
    kernels = tuple(dict.fromkeys(c.metadata.kernel for c in of_layers if c.metadata.kernel))
    return MismatchSide(
        name, source, len(of_layers), max(len(calls) for calls in run.calls.values()), len(run.sequences), kernels,
        short(of_layers[0].tensors["q"].dtype),
    )  # fmt: skip


def headline(found: Mismatch, layers: Sequence[ComparedLayer], matched: Sequence[SequencePair]) -> str:
    """The result in a sentence.

    Args:
        found: Without it.
        layers: Those that were compared, one at least.
        matched: The sequences.
    """
    tokens, sequences = plural(found.tokens, "token"), plural(found.sequences, "sequence")
    if (fewest := min(layer.tokens for layer in found.layers)) < found.tokens:
        tokens = f"{fewest} to {tokens}"
    where = f"{tokens} of {sequences}, {plural(len(found.layers), 'layer')}"
    apart = [
        f"{side.sequences - found.sequences} of {plural(side.sequences, 'sequence')} of {side.name}"
        for side in (found.train, found.rollout)
        if side.sequences > found.sequences
    ]
    if left := sum(pair.left for pair in matched):
        apart.append(f"{plural(left, 'token')} from one on that is another")
    if apart:
        where += f" (not compared: {' and '.join(apart)})"
    if found.outcome == "identical":
        return f"train and rollout are bit for bit the same: O of {where}"
    worst = max(found.layers, key=lambda layer: layer.difference)
    if found.outcome == "rounding":
        most = f"O by up to {percent(worst.difference)} (layer {worst.layer})"
        if found.outputs:
            output = max(found.outputs, key=lambda one: one.difference)
            most += f", its output projection by up to {percent(output.difference)} (layer {output.layer})"
        seen = [layer.seen for layer in layers]
        known = [one for one in seen if one is not None]
        unseen = "what moves it by less than rounding is not told from that"
        if len(known) == len(seen):
            unseen = reduce(Seen.beside, known).words
        return f"nothing beyond rounding and schedule is seen in attention: {most} in {where} ({unseen})"
    first = found.causes[0]
    others = sorted({cause.layer for cause in found.causes} - {first.layer})
    more = f"; also in {plural(len(others), 'later layer')}" if others else ""
    return f"the runs part in layer {first.layer}: {first.words}{more}"
