"""Kernels of FP32 inputs that go through BF16 somewhere: autocast inside, operands or P, sums in BF16 or FP16.

Such a kernel is no wrong mathematics, however far it is beyond what FP32 or TF32 leave. With e its error, w that of
such a way, emulated on the same head, and d = e - w: the way is named where d is no more than a quarter of e, squared,
in all and in units of every row's noise, and no row and no feature of d is beyond w there. Where it is not that
(another order of the keys, TF32 operands beside), the error is still such a kernel's if its correlation with w is a
half, it is no larger than w, and what is left is neither a factor of the result nor another scale of the scores.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from attn_diag.head.key_by_key import summed
from attn_diag.head.outlying import GROUP_LIMIT
from attn_diag.head.propagation import sloped
from attn_diag.head.quality import ELEMENT_LIMIT, LOSSY
from attn_diag.head.recipe_candidates import describe_schedule
from attn_diag.head.recipe_changes import SITES, rounded
from attn_diag.head.unfused import UNFUSED, WORDS, named, unfused
from attn_diag.kernels import Recipe, Schedule, emulate_head, preset
from attn_diag.kernels.formats import Rounding, parse, round_to
from attn_diag.kernels.recipe import Order
from attn_diag.reference import AttentionHead, format_of, reference_rows

LOW, OPERANDS = "bf16", "the operands of all products in BF16"
_BF16 = parse(LOW)
# On heads of more scores, or with dropout, the first two ways alone are tried: of O, and of gradients.
MOST_SCORES, MOST_OF_GRADIENTS = 2**24, 2**20
IN_BLOCKS = 2
# Keys that are added up before their sum is rounded.
_TILES = (1, 16, 32, 64, 128)
# Key by key, with a running maximum, no more keys are tried: that takes a step a key.
_MOST_STEPS = 512
_ALL_ROWS = 2**20
_FINE = ("input", "probs", "out", "backward_probs", "dscores", "dq")
_CASTS = ("probs", "backward_probs", "dscores")
_ORDERS: tuple[Order, ...] = ("ascending", "descending")
_GRADIENTS = ("gradient_accumulator",)
_SUMS = (("accumulator",), ("row_sum",), ("accumulator", "row_sum"), _GRADIENTS)
# What is left of an error that a way explains, of squares; the best of another kind must leave so many times more.
EXPLAINED, _BEATS = 0.25, 2.0
# The correlation of an error with a way's from which it is such an error.
_ALIKE = 0.5
# Of what is left, a factor or another scale makes less.
_STRUCTURED = 0.25
# Beyond that part of the result sums stand still, or it is no rounding: no way is tried.
_LARGEST = 1 / 8
# A way that leaves no more is it; one that leaves so much of an error has nothing to do with it.
_SURE, _HARDLY = 0.01, 0.9
# Ways are compared on so many rows of O first, and the nearest so many on all.
_ROWS, _NEAREST = 64, 4
Outputs = dict[str, Tensor]
Inputs = Callable[[AttentionHead], AttentionHead]


@dataclass(frozen=True)
class CoarseWay:
    """One way through BF16."""

    words: str
    """What is in BF16; ways of the same words are no rivals."""
    where: str
    """In which order of the keys; empty: whatever it is."""
    outputs: Callable[[AttentionHead], Outputs]
    """o, lse and, of some ways and with dO, dq, dk and dv; float64."""
    backward: bool = True
    """Whether there are gradients."""

    @property
    def told(self) -> str:
        """The words with the order."""
        return f"{self.words} ({self.where})" if self.where else self.words


@cache
def coarse_ways(width: int, keys: int) -> tuple[CoarseWay, ...]:
    """Every way that is tried on heads of so many features and keys, the likeliest first."""
    whole = preset("fa2", LOW, width)
    fine, wide = _changed(whole, dict.fromkeys(_FINE, "fp32")), replace(whole, out="fp32", dq="fp32")
    scores = rounded("scores", LOW)
    unfused_ways = [way for way in UNFUSED if not way.endswith(":keys")]  # whose O is that of others
    found = [
        *(CoarseWay(OPERANDS, "", partial(_emulated, recipe, cut)) for recipe in (wide, whole)),
        *(CoarseWay(OPERANDS, "", partial(_products, of_dp)) for of_dp in (False, True)),
        *(CoarseWay(f"{OPERANDS}; {WORDS[named(way)]}", "", partial(_unfused, way)) for way in unfused_ways),
        CoarseWay(f"{OPERANDS}; {WORDS['normalised']}", "", partial(_normalised, False), backward=False),
        CoarseWay(f"{OPERANDS}, alpha k one; {WORDS['normalised']}", "", partial(_normalised, True), backward=False),
        CoarseWay(scores.words, "", partial(_emulated, scores.apply(fine), _itself)),
        CoarseWay(scores.words, "", partial(_emulated, replace(scores.apply(fine), alpha="after-rounding"), _itself)),
        CoarseWay("P in BF16", "", partial(_emulated, _changed(fine, dict.fromkeys(_CASTS, LOW)), _itself)),
    ]
    tiles = [Schedule(_ALL_ROWS, t, order) for t in _TILES if t < keys for order in _ORDERS]
    for sites, schedule in product(_SUMS, tiles):
        words = f"{' and '.join(SITES[site].value for site in sites)} in BF16"
        where, changed = describe_schedule(schedule), {"schedule": schedule, **dict.fromkeys(sites, LOW)}
        backward = sites == _GRADIENTS
        ways = [(words, _changed(fine, changed), _itself)]
        if schedule.key_tile > 1:
            ways.append((f"{words}, {OPERANDS} too", _changed(wide, changed), cut))
        for said, recipe, of in ways:
            if schedule.key_tile > 1 or (keys <= _MOST_STEPS and schedule.order == "ascending" and not backward):
                found.append(CoarseWay(said, where, partial(_emulated, recipe, of), backward))
            known = () if backward else (False,) if "row_sum" in sites else (False, True)
            summed = [partial(_summed, recipe, normalised, of) for normalised in known]
            found += [CoarseWay(said, where, outputs, backward=False) for outputs in summed]
    if keys <= _MOST_STEPS:
        words = "O's accumulator in FP16, the operands of all products too"
        found.append(CoarseWay(words, "key by key, as in ggml's kernel on a CPU", _key_by_key, backward=False))
    return tuple(found)


def nearest_on(head: AttentionHead, o: Tensor, truth: Tensor) -> list[CoarseWay]:
    """The ways that come nearest to some rows of O; none where all leave about all of its error.

    Args:
        head: The head.
        o: What was observed, [Tq, Dv].
        truth: What is true.
    """
    rows = torch.linspace(0, len(head.q) - 1, min(_ROWS, len(head.q)), device=o.device).long()
    masking, places = head.masking, head.masking.row_positions(len(head.q), len(head.k), o.device)
    mask = None if masking.mask is None else masking.mask[rows]
    few = replace(head, q=head.q[rows], do=None, masking=replace(masking, positions=places[rows], mask=mask))
    apart = float((o - truth)[rows].square().nansum())
    if apart > _LARGEST**2 * float(truth[rows].square().sum()):
        return []
    ways = [way for way in coarse_ways(head.q.shape[1], len(head.k)) if not (way.backward and way.where)]
    found: list[tuple[float, int]] = []
    for number, way in enumerate(ways):
        left = float((way.outputs(few)["o"] - o[rows]).square().nansum())
        if left < _SURE * apart:
            return [way]
        found.append((left, number))
    return [ways[number] for left, number in sorted(found)[:_NEAREST] if left < _HARDLY * apart]


def explained(
    error: Tensor,
    expected: Tensor,
    truth: Tensor,
    by_scale: Callable[[], Tensor],
    runs: Sequence[tuple[CoarseWay, Tensor]],
) -> str | None:
    """What is in BF16, in words, where a way explains an error; empty: one does, not known which; None: none does.

    Args:
        error: Of the rows that count, [n, D].
        expected: What any kernel without BF16 may leave there, squared.
        truth: What is true.
        by_scale: Its derivative by the logarithm of the softmax scale.
        runs: Ways with the errors that they have there.
    """
    size, units = float(error.square().sum()), float((error.square() / expected).sum())
    found = []
    for way, own in runs:
        left = error - own
        allowed = own.square() + expected + truth.square() * (own.square().sum() / truth.square().sum())
        places = [(left.square().sum(dim), allowed.sum(dim)) for dim in (0, 1)]
        placed = any(
            bool((of > limit**2 * to).any())
            for (of, to), limit in zip(places, (GROUP_LIMIT, ELEMENT_LIMIT), strict=True)
        )
        share = max(float(left.square().sum()) / size, float((left.square() / expected).sum()) / units)
        if not placed:
            found.append((share, way, own))
    found.sort(key=lambda one: one[0])
    if not found:
        return None
    share, best, own = found[0]
    other = next((s for s, way, _ in found if way.words != best.words), 1.0)
    if share <= EXPLAINED:
        return best.told if other >= _BEATS * share else ""
    makes = float(own.square().sum())
    if not 0 < size <= LOSSY**2 * makes or float((error * own).sum()) < _ALIKE * math.sqrt(size * makes):
        return None
    known = torch.stack([truth.flatten(), by_scale().flatten()], 1)
    left = (error - own).flatten()[:, None]
    rest = left - known @ torch.linalg.lstsq(known, left).solution
    return "" if float(rest.square().sum()) > (1 - _STRUCTURED) * float(left.square().sum()) else None


def cut(head: AttentionHead, to: Rounding | None = _BF16) -> AttentionHead:
    """The head with its inputs in BF16."""
    q, k, v = (round_to(x, to) for x in (head.q, head.k, head.v))
    return replace(head, q=q, k=k, v=v, do=None if head.do is None else round_to(head.do, to))


def _key_by_key(head: AttentionHead) -> Outputs:
    return summed(cut(head, parse("fp16")), format_of(torch.float16), format_of(torch.float32))


def _changed(recipe: Recipe, fields: Mapping[str, Any]) -> Recipe:
    return replace(recipe, **fields)


def _itself(head: AttentionHead) -> AttentionHead:
    return head


def _emulated(recipe: Recipe, of: Inputs, given: AttentionHead) -> Outputs:
    head = of(given)
    sign = -1 if head.scale < 0 else 1  # kernels take the maximum before the scale
    found = emulate_head(recipe, replace(head, q=sign * head.q, scale=sign * head.scale))
    outputs = {name: getattr(found, name) for name in ("o", "lse", "dq", "dk", "dv")}
    outputs = {name: tensor.double() for name, tensor in outputs.items() if tensor is not None}
    return outputs | ({"dq": sign * outputs["dq"]} if "dq" in outputs else {})


def _products(delta_of_dp: bool, head: AttentionHead) -> Outputs:
    """All that is no product in FP32, dO in rowsum(dO o O) too, or ``delta_of_dp``: rowsum(P o dP)."""
    low, every = cut(head), torch.arange(len(head.q), device=head.q.device)
    block = reference_rows(replace(low, do=None), every)
    seen = block.keys
    o = round_to(block.unnormalised_probs, _BF16) @ low.v[seen] * block.inverse_row_sum[:, None]
    found = {"o": o, "lse": block.row_max + block.row_sum.log()}
    if head.do is None or low.do is None:
        return found
    probs, dprobs = block.probs, low.do @ low.v[seen].T
    delta = (probs * dprobs if delta_of_dp else head.do * o).sum(1, keepdim=True)
    dscores = round_to(sloped(block, probs * (dprobs - delta)), _BF16) * head.scale
    dk, dv = torch.zeros_like(head.k), torch.zeros_like(head.v)
    dk[seen], dv[seen] = dscores.T @ low.q, round_to(probs, _BF16).T @ low.do
    return found | {"dq": dscores @ low.k[seen], "dk": dk, "dv": dv}


def _unfused(way: str, head: AttentionHead) -> Outputs:
    return unfused(cut(head), format_of(torch.bfloat16), way)


def _normalised(of_keys: bool, head: AttentionHead) -> Outputs:
    """P cast behind its division, O in FP32; ``of_keys``: alpha k is cast, as OpenVINO does it on a CPU."""
    given = replace(head, do=None, k=head.k * head.scale, scale=1.0) if of_keys else replace(head, do=None)
    return unfused(cut(given), format_of(torch.bfloat16), UNFUSED[0], out=format_of(torch.float32))


def _summed(recipe: Recipe, normalised: bool, of: Inputs, given: AttentionHead) -> Outputs:
    """The sums of softmax whose maximum is known beforehand; ``normalised``: P, not P_bar, is multiplied by V."""
    head = replace(of(given), do=None)
    block = reference_rows(head, torch.arange(len(head.q), device=head.q.device))
    probs = block.unnormalised_probs * (block.inverse_row_sum[:, None] if normalised else 1.0)
    o, row_sum = head.v.new_zeros(len(probs), head.v.shape[1]), head.v.new_zeros(len(probs), 1)
    of_o, of_sum, of_probs = (parse(fmt) for fmt in (recipe.accumulator, recipe.row_sum, recipe.probs))
    tile, step = recipe.schedule.key_tile, -1 if recipe.schedule.order == "descending" else 1
    for p, v in list(zip(torch.split(probs, tile, 1), torch.split(head.v[block.keys], tile), strict=True))[::step]:
        o, row_sum = round_to(o + round_to(p, of_probs) @ v, of_o), round_to(row_sum + p.sum(1, keepdim=True), of_sum)
    lse = block.row_max + row_sum[:, 0].log()
    return {"o": o if normalised else o / row_sum.masked_fill(row_sum == 0, 1.0), "lse": lse}
