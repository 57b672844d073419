"""The fault of a kernel whose findings do not name it: another scale, keys left out, or one changed rounding."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from attn_diag.head.unfused import FUSED, WORDS, also_fused, named, unfused, ways
from attn_diag.reference import format_of, reference_head, reference_rows
from attn_diag.results.wording import percent
from attn_diag.testing import suspects
from attn_diag.testing.case_inputs import CaseInputs
from attn_diag.testing.other_function import other_limit, wrong_numbers
from attn_diag.testing.seen_keys import mask_fault
from attn_diag.testing.target import RECIPE_DTYPES, Target

# Half of a rounding's error of l and one of O's elements: what l in the inputs' format makes is a half.
_FACTOR_SHARE = 0.25
# What the casts of P make of it is at most a quarter.
_FACTOR_OF_PROBS = 4.0
# Rows count where so many keys do, in effect (equal ones are one: their scores are off alike): what P's roundings make
# is a small part of their error there.
_MANY_KEYS = 16
# A rounding to nearest goes to either side: its mean is a small part of its rms.
_ONE_SIDED = 0.2
# It is in every row: with relative errors uniform within half a spacing (x in [1, 2) uniform) (sum f^2)^2 / sum f^4 is
# (5/9) (1/2)^2 / (7/24) = 0.48 of the rows. Half of that; where few rows carry the factor, other things make it.
_IN_EVERY_ROW = 0.24
# Attention that is not fused is recognised in the first sequences, by what its emulation leaves of the squared error.
_SEQUENCES, _EXPLAINED = 4, 0.25


@dataclass(frozen=True)
class Suspect:
    """What is at fault."""

    words: str
    """In a few words."""
    evidence: str
    """What speaks for it, in a sentence."""
    options: tuple[str, ...] = ()
    """The options with which the same command would be right."""


def found_suspect(case: CaseInputs, o: Tensor, target: Target, *, of_l: bool) -> Suspect | None:
    """What is at fault; None where nothing is known to be.

    Args:
        case: Inputs from N(0,1).
        o: What the kernel returned for them.
        target: The kernel.
        of_l: Not O but L is at fault.
    """
    if not of_l:
        if (limit := limit_suspect(case, o, target.device)) is not None:
            return limit
        if (numbers := wrong_numbers(case, o, target.device)) is not None:
            off = f"O is {percent(numbers.relative_error)} off; they take most of it away."
            return Suspect(f"it {numbers.words}", off, numbers.options)
        if (mask := mask_fault(case, target)) is not None:
            return Suspect(f"it {mask}", "Asked with equal scores and a V of unit vectors, O shows which keys it sees.")
    if case.q.dtype in RECIPE_DTYPES and o.dtype == case.q.dtype and (found := _by_bits(case, target, of_l=of_l)):
        # What no kernel is worse for is what this one does, not what is wrong with it.
        return None if suspects.sound(found.words, case.k.shape[2]) else found
    return None if of_l else row_factor(case, o, target.device)


def limit_suspect(case: CaseInputs, o: Tensor, device: torch.device) -> Suspect | None:
    """The other scale or softcap that explains most of an error; None where none does."""
    if (limit := other_limit(case, o, device)) is None:
        return None
    off = f"O of {case.name} is {percent(limit.relative_error)} off; that takes most of it away."
    return Suspect(f"it {limit.words}", off, limit.options)


def _by_bits(case: CaseInputs, target: Target, *, of_l: bool) -> Suspect | None:
    """The one change of a published recipe that makes these bits."""
    name, dtype, dim = "lse" if of_l else "o", case.q.dtype, case.q.shape[3]
    outputs = {n: x.cpu() for n, x in target.call(case).outputs.items()}
    if name not in outputs:
        return None
    found = suspects.suspects(case, outputs, [name], suspects.published(dtype, dim), None, target.device)
    if name not in found:
        return None
    words, evidence = found[name]
    shown = evidence.removeprefix(words).strip(" ()")
    return Suspect(words, f"{shown[0].upper()}{shown[1:]}.")


def row_factor(case: CaseInputs, o: Tensor, device: torch.device) -> Suspect | None:
    """Whether every row of O is off by a factor of its own, to either side: that is l, which no feature escapes.

    e_t = O_obs - O_ref is projected on O_ref's row. Roundings of O and of scores leave 1 / D of their square there; of
    P, to whatever format, they make a factor of variance eps^2 sum P^2 (l's own eps^2 in a row with one key): a part
    sum P^2 of their square. So rows where this is large are left out, and it is a quarter of what is seen at most.
    What is off to one side in the mean (a truncation) is left to other signatures, and attention that is not fused is
    recognised first.
    """
    if (found := not_fused(case, o, device)) is not None:
        return found
    along = by_probs = total = mean = squares = fourths = rows = 0.0
    relative = 2.0 ** (-2 * format_of(case.q.dtype).precision) / 24  # E[1/x^2] = 1/2 over [1, 2)
    for b, h in product(range(case.q.shape[0]), range(case.q.shape[1])):
        head, seen = case.head(b, h, device, gradients=False), o[b, h].to(device).double()
        block = reference_rows(head, torch.arange(len(head.q), device=device))
        truth = block.out
        size = truth.square().sum(1)
        alike = torch.unique(head.k, dim=0, return_inverse=True)[1][block.keys]
        spread = torch.zeros_like(block.probs).index_add_(1, alike - alike.min(), block.probs).square().sum(1)
        good = seen.isfinite().all(1) & (size > 0) & (spread <= 1 / _MANY_KEYS)
        error = (seen - truth)[good]
        factor = (error * truth[good]).sum(1) / size[good]
        along += float((factor.square() * size[good]).sum())
        by_probs += relative * float((spread * size)[good].sum())
        total += float(error.square().sum())
        mean += float(factor.sum())
        rows += float(good.sum())
        squares += float(factor.square().sum())
        fourths += float(factor.square().square().sum())
    if (
        not rows
        or squares**2 < _IN_EVERY_ROW * rows * fourths
        or along < max(_FACTOR_SHARE * total, _FACTOR_OF_PROBS * by_probs)
        or abs(mean / rows) > _ONE_SIDED * math.sqrt(squares / rows)
    ):
        return None
    return Suspect(
        "the row sum l, or 1/l, is rounded",
        f"Every row of O that many keys make is off by a factor of its own "
        f"({percent(math.sqrt(squares / rows), '.2g')} rms), which makes {percent(along / total, '.2g')} of their "
        f"squared error; other roundings leave {percent(1 / o.shape[3], '.2g')} of theirs there.",
    )


def not_fused(case: CaseInputs, o: Tensor, device: torch.device) -> Suspect | None:
    """Whether O is what softmax(q kT) v in plain torch makes of these inputs, S and P stored in their format."""
    if case.q.dtype not in RECIPE_DTYPES or o.dtype != case.q.dtype:
        return None
    fmt, error, left = format_of(o.dtype), 0.0, dict[str, float]()
    for b, h in product(range(min(case.q.shape[0], _SEQUENCES)), range(case.q.shape[1])):
        head, seen = case.head(b, h, device, gradients=False), o[b, h].to(device).double()
        error += float((seen - reference_head(head).out).square().sum())
        for way in (way + kind for way in ways(head) for kind in ("", FUSED)):
            left[way] = left.get(way, 0.0) + float((seen - unfused(head, fmt, way)["o"]).square().sum())
    way = min((way for way in left if not way.endswith(FUSED)), key=lambda name: left[name])
    least = left[way]
    site = named(way) if least < _EXPLAINED * left[way + FUSED] else also_fused(way)
    if site is None or not least < _EXPLAINED * error:
        return None
    return Suspect(WORDS[site], f"That, emulated, leaves {percent(least / error, '.2g')} of O's squared error.")
