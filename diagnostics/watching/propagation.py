"""What each layer adds to the difference of two runs' log-probabilities: by running the model with that difference.

A float64 copy of train's model runs again and again on the same tokens, each time with one place more at which q, k and
v, or O, are moved by what rollout's differ from train's there. What a run adds to the log-probabilities is what arises
at that place, in every order of the Taylor series; what came in from below was there before. Places: of each layer
q, k and v (the projection), O by another semantics, O by rounding.
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from attn_diag.analyses.mismatch.layers import ComparedLayer, HeadOfBoth
from attn_diag.analyses.mismatch.logprobs import Logprobs, split_of
from attn_diag.analyses.mismatch.mismatch import CapturedRun, ComparedRuns, compare_runs
from attn_diag.analyses.mismatch.repairs import DOES
from attn_diag.errors import InputError
from attn_diag.results.mismatch import LayerShare, LogprobSplit, Mismatch, MismatchRepair, SharePlace

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from attn_diag.work import Progress

_PLACES: tuple[SharePlace, ...] = ("projection", "semantics", "rounding")
# At which place of its layer a cause arises; semantics for others.
_ARISES: dict[str, SharePlace] = {"position": "projection", "weights": "projection", "unnamed-input": "projection",
                                  "merge": "rounding", "coarse": "rounding"}  # fmt: skip


def explain_logprobs(
    model: nn.Module,
    input_ids: Tensor,
    train: CapturedRun,
    rollout: CapturedRun,
    *,
    logprobs: Logprobs | tuple[ArrayLike, ArrayLike],
    mask: ArrayLike | None = None,
    dtype: torch.dtype = torch.float64,
    device: str = "auto",
    progress: Progress | None = None,
    **inputs: Any,
) -> Mismatch:
    """As ``mismatch``, with each layer's share of the difference of log-probabilities, and what repairs leave of it.

    A copy of the model in ``dtype`` runs three times a layer, forward only.

    Args:
        model: Train's model: a Hugging Face transformers model for causal language modelling, whose calls ``train``
            holds.
        input_ids: The tokens as the captured forward of train had them, [B, T].
        train: As of ``mismatch``; one forward, a sequence a batch item.
        rollout: As of ``mismatch``.
        logprobs: Of token t + 1 after the tokens up to t, in train and in rollout, [B, T - 1] each.
        mask: Which of them were sampled and count, [B, T - 1]; None: all, or what ``logprobs`` says.
        dtype: What the copy computes in.
        device: Where the captures are compared; the model stays where it is.
        progress: Called with (done, total) after every layer, and after every run of the model.
        **inputs: More of the model's inputs, such as attention_mask and position_ids.

    Returns:
        The comparison; ``logprobs`` and ``repairs`` are of the log-probabilities.

    Raises:
        InputError: As of ``mismatch``; or train is no single forward of these tokens, or the model is none of
            transformers.
    """
    given = logprobs if isinstance(logprobs, Logprobs) else Logprobs(*logprobs, mask)  # type: ignore[arg-type]
    if list(given.train.shape) != [input_ids.shape[0], input_ids.shape[1] - 1]:
        raise InputError(
            f"log-probabilities must be [B, T - 1] = {[input_ids.shape[0], input_ids.shape[1] - 1]} beside input_ids "
            f"{list(input_ids.shape)}, got {list(given.train.shape)}: entry t is that of token t + 1"
        )
    compared = compare_runs(train, rollout, device=device, progress=progress)
    moves = _moves(compared, input_ids.shape[0], input_ids.shape[1])
    exact = copy.deepcopy(model).to(dtype).eval()
    steps = list(_steps(moves))

    def run(forced: dict[int, _Forced]) -> tuple[Tensor, _Seen]:
        seen = _Seen(forced, base)
        with torch.no_grad(), _seeing(exact, seen):
            logits = exact(input_ids=input_ids, use_cache=False, **inputs).logits
        found = logits[:, :-1].double().log_softmax(-1).gather(2, input_ids[:, 1:, None].to(logits.device))
        return found[..., 0].cpu(), seen

    base: dict[int, dict[str, Tensor]] = {}
    before, first = run({})
    if missing := [layer for layer in moves if layer not in first.calls]:
        raise InputError(
            f"the model makes no call of attention in layer {missing[0]} that transformers' interface shows; give the "
            "Hugging Face model whose layers were captured"
        )
    base = first.calls
    forced: dict[int, _Forced] = {}
    parts: list[tuple[int, SharePlace, np.ndarray[Any, Any]]] = []
    for done, (layer, place) in enumerate(steps):
        forced[layer] = replace(forced.get(layer, _Forced(moves[layer])), until=place)
        after, _ = run(forced)
        parts.append((layer, place, (after - before).numpy()))
        before = after
        if progress is not None:
            progress(done + 1, len(steps))
    split = _shares(given, parts)
    found = replace(compared.result, logprobs=split)
    return replace(found, repairs=tuple(_repairs(found, given, parts)))


@dataclass(frozen=True)
class LayerMoves:
    """By how much rollout differs from train in one layer, for every row of the model's input; 0 where not compared."""

    q: Tensor
    """[B, Hq, T, D]."""
    k: Tensor
    """[B, Hk, T, D]."""
    v: Tensor
    """[B, Hk, T, Dv]."""
    semantics: Tensor
    """What another semantics adds to O, [B, Hq, T, Dv]."""
    o: Tensor
    """All that O differs by, [B, Hq, T, Dv]."""
    compared: Tensor
    """Rows that were compared, bool [B, T]."""


@dataclass(frozen=True)
class _Forced:
    """How far one layer is moved: its q, k and v; also by another semantics; or all of O."""

    moves: LayerMoves
    until: SharePlace = "projection"


def _moves(compared: ComparedRuns, batch: int, length: int) -> dict[int, LayerMoves]:
    places = []
    for pair in compared.pairs:
        if len(pair.train.parts) > 1:
            raise InputError(
                "train has several calls of one sequence; the model can be moved where it is one forward of all tokens"
            )
        part = pair.train.parts[0]
        places.append((part.item, -part.offset - pair.shifts[0]))
    found = {}
    for layer in compared.layers:
        found[layer.layer] = _of_layer(layer, places, batch, length)
    return found


def _of_layer(layer: ComparedLayer, places: Sequence[tuple[int, int]], batch: int, length: int) -> LayerMoves:
    heads = 1 + max(h.head for h in layer.heads)
    a = layer.heads[0].rows[0]
    d, dv = a.q.shape[1], a.o.shape[1]
    q, semantics, o = (torch.zeros(batch, heads, length, width, dtype=torch.float64) for width in (d, dv, dv))
    k, v = (torch.zeros(batch, heads, length, width, dtype=torch.float64) for width in (d, dv))
    compared = torch.zeros(batch, length, dtype=torch.bool)
    for h, split in zip(layer.heads, layer.splits, strict=True):
        item, offset = places[h.sequence]
        use = split.usable
        at = (h.rows[0].tokens[use] + offset).cpu()
        if item >= batch or (len(at) and not 0 <= int(at.min()) <= int(at.max()) < length):
            raise InputError(f"train has rows that input_ids [{batch}, {length}] lack; give the tokens of its forward")
        for whole, part in ((q, _apart(h, "q")), (k, _apart(h, "k")), (v, _apart(h, "v")), (o, _apart(h, "o"))):
            whole[item, h.head, at] = part[use].cpu()
        # Of a row at another position the semantics' part is in q and k already.
        own = torch.zeros_like(split.parts["semantics"]) if layer.rotations else split.parts["semantics"]
        semantics[item, h.head, at] = own[use].cpu()
        compared[item, at] = True
    return LayerMoves(q, k, v, semantics, o, compared)


def _apart(head: HeadOfBoth, name: str) -> Tensor:
    a, b = head.rows
    found: Tensor = getattr(b, name) - getattr(a, name)
    return found


def _steps(moves: dict[int, LayerMoves]) -> Iterator[tuple[int, SharePlace]]:
    """In the order in which they are moved; places where nothing arises are left out."""
    for layer, found in moves.items():
        for place in _PLACES:
            if place != "semantics" or bool(found.semantics.any()):
                yield layer, place


@dataclass
class _Seen:
    """Follows one run of the model, moves what is to be moved, and keeps what it would have been."""

    forced: dict[int, _Forced]
    base: dict[int, dict[str, Tensor]]
    calls: dict[int, dict[str, Tensor]] = field(default_factory=dict)

    def call(self, attend: Callable[..., Any], layer: int, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """One call of attention: args are the module, q, k and v (any of them by name)."""
        names = ("module", "query", "key", "value")
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        rest = args[len(names) :]
        forced = self.forced.get(layer)
        if forced is not None:
            moved, base = forced.moves, self.base[layer]
            for name, move in (("query", moved.q), ("key", moved.k), ("value", moved.v)):
                given[name] = _placed(given[name], base[name], move, moved.compared)
        result = attend(*(given.pop(name) for name in names), *rest, **given)
        out = result[0] if isinstance(result, tuple) else result
        if forced is not None and forced.until != "projection":
            # transformers' O is [B, T, H, D].
            if forced.until == "semantics":
                out = out + moved.semantics.transpose(1, 2).to(out)
            else:
                turned = _placed(out.transpose(1, 2), self.base[layer]["o"], moved.o, moved.compared)
                out = turned.transpose(1, 2).contiguous()
        if not self.base:
            kept = {**dict(zip(names, args, strict=False)), **kwargs}
            self.calls[layer] = {name: kept[name] for name in names[1:]} | {"o": out.transpose(1, 2)}
        return (out, *result[1:]) if isinstance(result, tuple) else out


def _placed(free: Tensor, base: Tensor, move: Tensor, compared: Tensor) -> Tensor:
    """``base + move`` in the rows that were compared, ``free`` in the others; [B, H, T, D]."""
    heads = free.shape[1]
    step = move.shape[1] // heads if heads < move.shape[1] else 1
    wanted = base + move[:, ::step].to(free)
    return torch.where(compared.to(free.device)[:, None, :, None], wanted, free)


@contextmanager
def _seeing(model: nn.Module, seen: _Seen) -> Iterator[None]:
    """Have a transformers model's attention go through ``seen`` meanwhile."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    name = getattr(getattr(model, "config", None), "_attn_implementation", None)
    if name is None:
        raise InputError(f"model must be one of Hugging Face transformers, got {type(model).__name__}")
    home: Any = ALL_ATTENTION_FUNCTIONS._global_mapping
    if name == "eager":
        home, name = vars(sys.modules[type(model).__module__]), "eager_attention_forward"
    original = home[name]
    ours = {id(module) for module in model.modules()}

    def attend(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        layer = getattr(module, "layer_idx", None)
        if layer is None or id(module) not in ours:
            return original(module, *args, **kwargs)
        return seen.call(original, layer, (module, *args), kwargs)

    home[name] = attend
    try:
        yield
    finally:
        home[name] = original


_Parts = Sequence[tuple[int, SharePlace, "np.ndarray[Any, Any]"]]


def _shares(given: Logprobs, parts: _Parts) -> LogprobSplit:
    kept, observed = given.counted, given.difference
    total = float(np.square(observed).sum())
    named = [(layer, place, np.where(kept, part, 0.0)) for layer, place, part in parts]
    explained = sum((part for _, _, part in named), np.zeros_like(observed))
    every: list[tuple[int | None, SharePlace, np.ndarray[Any, Any]]] = [*named, (None, "rest", observed - explained)]
    shares = []
    for layer, place, part in every:
        values = part[kept]
        error = float(values.std(ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else None
        shares.append(
            LayerShare(
                layer, place, float(values.mean()), error, math.sqrt(float(np.square(values).mean())),
                float((part * observed).sum()) / total if total else 0.0,
            )
        )  # fmt: skip
    left = float(np.square(observed - explained).sum())
    return replace(split_of(given), predicted=1 - left / total if total else None, shares=tuple(shares), missing="")


def _repairs(found: Mismatch, given: Logprobs, parts: _Parts) -> Iterator[MismatchRepair]:
    kept, observed = given.counted, given.difference
    total = float(np.square(observed).sum())
    if not total:
        return
    wanted: list[tuple[str, set[tuple[int, SharePlace]]]] = []
    for kind, what in DOES.items():
        places = {(c.layer, _ARISES.get(kind, "semantics")) for c in found.causes if c.kind == kind}
        if places:
            wanted.append((what, places))
    if not any(cause.kind == "unnamed-o" for cause in found.causes):
        every: set[tuple[int, SharePlace]] = {(layer, place) for layer, place, _ in parts if place == "rounding"}
        wanted.append(("the same attention kernel and schedule in both", every))
    results = []
    for what, places in wanted:
        removed = sum((part for layer, place, part in parts if (layer, place) in places), np.zeros_like(observed))
        left = float(np.square(np.where(kept, observed - removed, 0.0)).sum())
        layers = tuple(sorted({layer for layer, _ in places}))
        results.append(
            MismatchRepair(what, layers, "log-probability", 1 - left / total, math.sqrt(left / int(kept.sum())))
        )
    yield from sorted(results, key=lambda repair: -repair.removes)
