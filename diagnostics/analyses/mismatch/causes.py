"""What makes the runs differ in a layer, in words; and where that begins."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from attn_diag.analyses.mismatch.cache import cache_words, changed_in_cache
from attn_diag.analyses.mismatch.fit import LayerFit
from attn_diag.analyses.mismatch.layers import ComparedLayer, HeadOfBoth, windows
from attn_diag.analyses.mismatch.projected import JUMP, OF_SAME_INPUT, ROUNDINGS, jump_of
from attn_diag.analyses.mismatch.rotation import other_angles
from attn_diag.analyses.mismatch.rows import RunRows
from attn_diag.analyses.mismatch.small_words import words_of
from attn_diag.analyses.mismatch.storage import format_below, rounding_unit
from attn_diag.analyses.mismatch.unwritten import unwritten_rows
from attn_diag.head.output_fit import TOLERANCE
from attn_diag.head.quality import LOSSY
from attn_diag.results.mismatch import CauseKind, MismatchCause, MismatchLayer, Place, RunName
from attn_diag.results.wording import number, percent, plural, times

_RUNS: tuple[RunName, RunName] = ("train", "rollout")
# From so many units on, a jump that may be rounding still is worth a sentence.
_NOTED = 2
# Scales that were stored in fp32.
_SAME_SCALE = 1e-5


def causes_of(found: ComparedLayer, result: MismatchLayer, before: Sequence[MismatchLayer]) -> list[MismatchCause]:
    """The causes of one layer.

    Args:
        found: The layer.
        result: Its figures.
        before: Those of the layers before it.
    """
    causes = [*_semantics(found), *_positions(found)]
    if not alike(found):
        for index, (side, fit) in enumerate(zip(_RUNS, found.fits, strict=True)):
            for cause in _of_fit(found.layer, side, fit, [head.rows[index] for head in found.heads]):
                shared = [one for one in found.small if one.side == index]
                by_many = f"; many elements share it: {words_of(shared, side, len(found.heads))}" if shared else ""
                causes.append(replace(cause, words=cause.words + by_many))
    small = list(_small(found))
    causes += small
    for index, (side, fit) in enumerate(zip(_RUNS, found.fits, strict=True)):
        # Of a kernel that rounds as it should the row itself strays.
        if fit.coarse and fit.best is None and (where := unwritten_rows(found.heads, index)) is not None:
            causes.append(_cause(found.layer, "unnamed-o", side, f"{side}'s O is {where}", fitted=True))
    if found.stray is not None and not small and not any(fit.coarse for fit in found.fits):
        row, side = found.stray, _RUNS[found.stray.side]
        made = "a fault, or scores rounded to 16 bits" if row.by_scores else "no rounding makes that"
        made = "a fault, or a coarser rounding than a well-rounded kernel's" if row.coarse else made
        words = (
            f"{side}'s O is off in few rows, most at token {row.token} in head {row.head}: {times(row.times)} times "
            f"what rounding leaves there; {made}"
        )
        causes.append(_cause(found.layer, "unnamed-o", side, words, fitted=True))
    if found.weights is not None:
        words = f"{found.weights.words} ({percent(found.weights.difference)} of w_q apart)"
        causes.append(_cause(found.layer, "weights", "both", words, place="projection"))
    if (stored := found.storage) is not None:
        which, side = " and ".join(stored.which), _RUNS[stored.side]
        apart = " and ".join(percent(float(getattr(result, name))) for name in stored.which)
        does = "holds" if len(stored.which) == 1 else "hold"
        words = f"{which} of {side} {does} numbers of {stored.format} alone ({apart} off the other's)"
        causes.append(_cause(found.layer, "storage", side, words, fitted=True, place="projection"))
    changed = False
    for which_run, run in enumerate(_RUNS):
        changes = changed_in_cache([(h.head, h.rows[which_run]) for h in found.heads], found.units[which_run])
        if changes:
            changed = True
            words, rounding = cache_words(run, changes)
            cause = _cause(found.layer, "storage", run, words, fitted=True, place="projection")
            causes.append(cause if rounding else replace(cause, label="unnamed"))
    if not any(c.kind in ("position", "weights", "storage") for c in causes):
        causes += _angles(found)
    if found.norm is not None and not any(c.kind in ("position", "weights") for c in causes):
        place: Place = "stream" if found.norm.which == "x" else "projection"
        causes.append(_cause(found.layer, "norm", "both", found.norm.words, fitted=True, place=place))
    # Beside what is stored below 16 bits the others may be another's.
    told = {*(["q", "k", "v"] if changed else stored.which if stored is not None else ())}
    if (
        not any(c.kind in ("position", "weights", "norm") for c in causes)
        and len(told) < len("qkv")
        and (jump := jump_of(found, result, before, told)) is not None
    ):
        coarse = _coarse_in_both(found, result) if jump[0] == "projection" and not told else None
        causes.append(coarse or _cause(found.layer, "unnamed-input", "both", jump[1], place=jump[0]))
    return causes


def alike(found: ComparedLayer) -> bool:
    """Whether what either computes from its inputs differs by no more than two well-rounded kernels do.

    Both may then be off in the same way, which is no mismatch.
    """
    apart = expected = 0.0
    for split in found.splits:
        part = split.parts["semantics"] + split.parts["rounding"]
        apart += float(part[split.usable].square().sum())
    for name, fit in zip(_RUNS, found.fits, strict=True):
        if fit.factor:
            expected += float(found.sums[f"{name}.error"].sum()) / fit.factor**2
    return apart <= LOSSY**2 * expected and all(fit.coarse for fit in found.fits)


def small_jump(found: ComparedLayer, result: MismatchLayer, before: Sequence[MismatchLayer]) -> str:
    """What is said of an x that differs more than what came in, by no more than roundings may; empty: nothing."""
    if result.x is None or not before or before[-1].layer != found.layer - 1:
        return ""
    came_in = max(before[-1].difference, before[-1].x or 0.0)
    if not max(_NOTED * found.unit, JUMP * came_in) < result.x <= ROUNDINGS * found.unit:
        return ""
    return (
        f"Layer {found.layer}: x differs by {percent(result.x)}, where O and x of layer {before[-1].layer} differ by "
        f"{percent(came_in)} at most: roundings outside attention may make that, and so may an MLP, a norm or a "
        "residual that differs a little; attn_diag.explain_logprobs with the model tells which."
    )


def _cause(
    layer: int, kind: CauseKind, side: RunName | str, words: str, *, fitted: bool = False,
    explained: float | None = None, alternative: str = "", place: Place = "attention",
) -> MismatchCause:  # fmt: skip
    labels = {
        "merge": "rounding",
        "coarse": "rounding",
        "storage": "rounding",
        "unnamed-o": "unnamed",
        "unnamed-input": "unnamed",
    }
    return MismatchCause(
        layer, kind, labels.get(kind, "semantics"), side, words, "fitted" if fitted else "stated", explained,  # type: ignore[arg-type]
        alternative, place,
    )  # fmt: skip


def _of_fit(layer: int, side: RunName, fit: LayerFit, heads: Sequence[RunRows]) -> Iterator[MismatchCause]:
    """``heads``: that run's rows of each."""
    if fit.best is not None:
        words = f"{side} computes with {fit.best.words}{fit.beside}"
        yield _cause(layer, fit.best.kind, side, words, fitted=True, explained=fit.explained, alternative=fit.runner_up)
        return
    if not fit.coarse:
        return
    off = f"{side}'s O is {times(fit.factor)} times as far from float64 as a well-rounded kernel's"
    kind: CauseKind = "coarse"
    if fit.site is not None:
        where = f" ({fit.site.where})" if fit.site.where else ""
        yield _cause(layer, kind, side, f"{off}: {fit.site.words}{where}", fitted=True, explained=fit.site_explains)
        return
    if fit.nearest or fit.relative > TOLERANCE:
        kind = "unnamed-o"
    if not fit.nearest and (stored := _stored_below(heads)) is not None:
        told = f"all of it are numbers of {stored}, as it was stored below 16 bits; what else it is off by is not told"
        yield _cause(layer, kind, side, f"{off}: {told}", fitted=True)
        return
    told = fit.nearest or (
        "no coarser rounding and no other semantics that was tried explains that: it rounds more coarsely than its "
        "format, or computes what was not tried"
    )
    words = f"{off}; {told}"
    yield _cause(layer, kind, side, words, fitted=True, explained=fit.explained, alternative=fit.runner_up)


def _stored_below(heads: Sequence[RunRows]) -> str | None:
    """The format below 16 bits of which all numbers of O are, and v's are not; None: none."""
    o, v = (torch.cat([getattr(rows, name).nan_to_num() for rows in heads]) for name in ("o", "v"))
    stored = format_below(o)
    return None if stored is None or format_below(v) == stored else stored


def _small(found: ComparedLayer) -> Iterator[MismatchCause]:
    """What is less than its rounding, but many elements' alike."""
    for which, side in enumerate(_RUNS):
        own = [one for one in found.small if one.side == which]
        if own and not found.fits[which].coarse:
            first = max(own, key=lambda one: one.clear)
            kind: CauseKind = "scale" if first.kind == "scale" else "unnamed-o"
            yield _cause(found.layer, kind, side, words_of(own, side, len(found.heads)), fitted=True)


def _semantics(found: ComparedLayer) -> Iterator[MismatchCause]:
    """What the captures themselves state differently."""
    layer = found.layer
    other = [h for h in found.heads if abs(h.rows[1].scale / h.rows[0].scale - 1) > _SAME_SCALE]
    if other:
        scales = [rows.scale for rows in other[0].rows]
        off = percent(scales[1] / scales[0] - 1, "+.3g")
        words = f"softmax scale {number(scales[0], 6)} in train, {number(scales[1], 6)} in rollout ({off})"
        yield _cause(layer, "scale", "both", words + _in_sequences(found, other))
    other = [h for h in found.heads if h.rows[0].softcap != h.rows[1].softcap]
    if other:
        a, b = ("no softcap" if r.softcap is None else f"softcap {r.softcap:g}" for r in other[0].rows)
        yield _cause(layer, "softcap", "both", f"{a} in train, {b} in rollout{_in_sequences(found, other)}")
    other = [h for h in found.heads if h.rows[0].sink != h.rows[1].sink]
    if other:
        a, b = ("no sink" if r.sink is None else f"a sink (logit {number(r.sink)})" for r in other[0].rows)
        yield _cause(layer, "sink", "both", f"{a} in train, {b} in rollout (head {other[0].head})")
    if (masks := _masks(found)) is not None:
        yield _cause(layer, masks[0], "both", masks[1])


def _in_sequences(found: ComparedLayer, other: Sequence[HeadOfBoth]) -> str:
    """In how many sequences that is so; empty: in all."""
    these, every = ({h.sequence for h in heads} for heads in (other, found.heads))
    return f" in {len(these)} of {plural(len(every), 'sequence')}" if len(these) < len(every) else ""


def _masks(found: ComparedLayer) -> tuple[CauseKind, str] | None:
    """Which keys one run alone sees, as stated; None where both see the same."""
    only = [0, 0]
    edge = rows_other = total = 0
    additive = False
    for h in found.heads:
        a, b = h.rows
        seen = a.bias > -torch.inf, b.bias > -torch.inf
        other = seen[0] ^ seen[1]
        total += len(other)
        both = seen[0] & seen[1]
        apart = (b.bias - a.bias).masked_fill(~both, 0.0)
        mean = apart.sum(1, keepdim=True) / both.sum(1, keepdim=True).clamp(min=1)
        additive |= bool(((apart - mean).masked_fill(~both, 0.0).abs() > 1e-3).any())
        if not bool(other.any()):
            continue
        rows_other += int(other.any(1).sum())
        only[0] += int((seen[0] & ~seen[1]).sum())
        only[1] += int((seen[1] & ~seen[0]).sum())
        first = both.int().argmax(1)
        place = torch.arange(other.shape[1], device=other.device)
        edge += int((other & (place < first[:, None])).sum())
    if rows_other:
        seen_back = windows(found)
        if edge == sum(only) and seen_back != (None, None):
            if seen_back[0] == seen_back[1]:  # of one run in some calls alone
                seen_back = windows(found, where_apart=True)
            named = ["no window" if w is None else f"a window of {plural(w + 1, 'key')}" for w in seen_back]
            return "window", f"{named[0]} in train, {named[1]} in rollout ({rows_other} of {total} rows)"
        words = (
            f"masks: in {rows_other} of {total} rows train sees {plural(only[0], 'key')} that rollout does not, and "
            f"rollout {only[1]} that train does not"
        )
        return "mask", words
    return ("mask", "additive masks, or ALiBi's slopes, of other values") if additive else None


def _positions(found: ComparedLayer) -> Iterator[MismatchCause]:
    by_shift: dict[int, list[str]] = {}
    for rotation in found.rotations:
        by_shift.setdefault(rotation.positions, []).append(rotation.which)
    for positions, which in by_shift.items():
        one = next(r for r in found.rotations if r.positions == positions)
        rows = f"in {len(one.tokens)} of {one.rows} tokens" if len(one.tokens) < one.rows else "in every token"
        words = (
            f"RoPE position off by {positions:+d}: {' and '.join(which)} of rollout {rows} are train's turned by "
            f"{plural(abs(positions), 'position')}"
        )
        explained = min(r.explained for r in found.rotations if r.positions == positions)
        yield _cause(found.layer, "position", "both", words, fitted=True, explained=explained, place="projection")


def _angles(found: ComparedLayer) -> Iterator[MismatchCause]:
    turned = other_angles([(h.sequence, *h.rows) for h in found.heads], found.unit)
    if turned:
        which, most = " and ".join(one.which for one in turned), max(turned, key=lambda one: one.size)
        are = "is" if len(turned) == 1 else "are"
        words = (
            f"RoPE's angles are others (another base, scaling or precision, other positions, or turned twice or not at "
            f"all): {which} of rollout {are} train's with each pair of features turned, pair {most.pair} most, by "
            f"{number(most.size)} radians (rms)"
        )
        explained = min(one.explained for one in turned)
        yield _cause(found.layer, "position", "both", words, fitted=True, explained=explained, place="projection")


def _coarse_in_both(found: ComparedLayer, result: MismatchLayer) -> MismatchCause | None:
    """What is said where all that differs are FP8 numbers in both runs, by no more than a rounding in each makes."""
    apart = {name: float(getattr(result, name)) for name in ("q", "k", "v")}
    limit = (OF_SAME_INPUT if result.x == 0 else ROUNDINGS) * found.unit
    apart = {name: size for name, size in apart.items() if size > limit}
    for name, size in apart.items():
        both = [format_below(torch.cat([getattr(head.rows[side], name) for head in found.heads])) for side in (0, 1)]
        units = [0.0 if fmt is None else rounding_unit(fmt) for fmt in both]
        if 0.0 in units or size > sum(units):
            return None
    sizes = " and ".join(map(percent, apart.values()))
    words = (
        f"train's and rollout's {' and '.join(apart)} are numbers of FP8 alone, {sizes} apart: as other scales make "
        "it, or a projection that differs by no more"
    )
    cause = _cause(found.layer, "storage", "both", words, fitted=True, place="projection")
    return replace(cause, label="unnamed")
