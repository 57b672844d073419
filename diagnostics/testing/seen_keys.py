"""Which keys a kernel's rows see: it is asked with equal scores and unit vectors V, so that O shows that."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attn_diag.errors import InputError
from attn_diag.head.bounded_mask import words_of
from attn_diag.reference import Masking
from attn_diag.results.wording import number, ranges
from attn_diag.testing.case_inputs import CaseInputs
from attn_diag.testing.target import MisfitError, Target

# Equal scores give every key seen the same weight, rounded once: far from the half of another count of keys.
_UNEVEN = 0.02
# What V holds in FP16, so that O shows a weight of 2^-28 to one part in a hundred.
_UNIT_FP16 = 2.0**14
# Rows of a longer call would cost V = e_j too many calls, and tell no more.
_LONGEST = 512


def mask_fault(case: CaseInputs, target: Target) -> str | None:
    """Which keys rows see that they should not, or do not see though they should; None where that is not what is wrong.

    In words that follow the kernel's name.
    """
    try:
        seen = seen_keys(case, target)
    except (MisfitError, InputError):
        return None
    if seen is None or isinstance(seen, str):
        return seen
    count, said = len(seen.keys), []
    hidden = Masking(case.causal, case.window).hidden(torch.arange(count), slice(0, count))
    right = torch.ones_like(seen.keys) if hidden is None else ~hidden
    if not torch.equal(seen.keys, right):
        should = "all keys" if hidden is None else (_band(right) or "others").partition(",")[0]
        said.append(f"{_mask_words(seen.keys, right)}; it should see {should}")
    if seen.leaks is not None:
        capped = case.softcap is not None and abs(seen.leaks + case.softcap) < _UNEVEN * case.softcap
        before = f"masks scores before it caps them (hidden ones are then {-(case.softcap or 0):g}, not -inf)"
        said.append(before if capped else f"hides keys by {words_of(seen.leaks)}")
    return " and ".join(said) or None


@dataclass(frozen=True)
class SeenKeys:
    """What a row sees of equal scores."""

    keys: Tensor
    """bool [T, T]: the keys that weigh most in their row, all alike."""
    leaks: float | None = None
    """All others weigh exp of this of them; None: nothing."""


def seen_keys(case: CaseInputs, target: Target) -> SeenKeys | str | None:
    """Which keys each row of a kernel's first head sees, asked with equal scores and unit vectors V, D keys a call.

    Returns:
        The keys; words where V shows in another head's O; None where the weights are not one number for all keys that a
        row sees and another, or 0, for the rest, and for other lengths of keys than of rows.
    """
    case = replace(case, sinks=None, dropout_mask=None, dropout_p=None)  # with which no row's weights are even
    count, dim = min(case.q.shape[2], _LONGEST), case.v.shape[3]
    if case.q.shape[2] != case.k.shape[2]:
        return None
    group = case.q.shape[1] // case.k.shape[1]
    zeros = torch.zeros_like(case.q[:, :, :count])
    unit = _UNIT_FP16 if case.v.dtype == torch.float16 else 1.0
    weights = torch.zeros(count, count, dtype=torch.float64)
    blank = replace(
        case, q=zeros, k=torch.zeros_like(case.k[:, :, :count]), v=torch.zeros_like(case.v[:, :, :count]), do=None
    )
    made = target.call(blank).outputs["o"].double().nan_to_num().abs().max()
    if float(made):
        return f"returns an O of up to {number(float(made))} where V is all zeros"
    for first in range(0, count, dim):
        part = list(range(first, min(first + dim, count)))
        v = blank.v.clone()
        v[0, 0, part, range(len(part))] = unit
        o = target.call(replace(blank, v=v)).outputs["o"].double().cpu()
        weights[:, part] = o[0, 0, :, : len(part)] / unit
        o[0, :group] = 0
        if bool((o.nan_to_num() != 0).any()):
            batch, head = (o.nan_to_num() != 0).any(3).any(2).nonzero()[0].tolist()
            return f"mixes heads: V of sequence 0, head 0 shows in O of sequence {batch}, head {head}"
    return _levels(weights)


def _levels(weights: Tensor) -> SeenKeys | None:
    """The keys that weigh most, and what the others weigh of them; None where either are not all alike."""
    most = weights.amax(1, keepdim=True)
    if not bool(weights.isfinite().all()) or bool((weights < 0).any()) or not bool((most > 0).any()):
        return None
    ratio = torch.where(most > 0, weights / most.clamp(min=1e-300), 0.0)
    seen = ratio > 1 - 2 * _UNEVEN
    rest = ratio[~seen & (most > 0)]
    share = float(rest.median()) if rest.numel() else 0.0
    # A row without a key that it sees is all hidden ones, alike.
    if not bool((rest - share).abs().le(2 * _UNEVEN * share).all()):
        return None
    even = 1.0 / (seen.sum(1, keepdim=True) + share * (~seen).sum(1, keepdim=True)).clamp(min=1)
    if not bool((weights - even).abs()[seen].le((_UNEVEN * even).expand_as(seen)[seen]).all()):
        return None
    return SeenKeys(seen, math.log(share) if share > 0 else None)


def _mask_words(seen: Tensor, right: Tensor) -> str:
    """A mask in words that follow a kernel's name."""
    count = len(seen)
    lost = (right.any(0) & ~seen.any(0)).nonzero()[:, 0].tolist()
    blind = (right.any(1) & ~seen.any(1)).nonzero()[:, 0].tolist()
    if lost and torch.equal(seen, right & seen.any(0)):
        return f"never sees {'key' if len(lost) == 1 else 'keys'} {ranges(lost)} of {count}"
    if (band := _band(seen)) is not None:
        empty = f" ({'row' if len(blind) == 1 else 'rows'} {ranges(blind)}: none)" if blind else ""
        return f"lets row t see {band}{empty}"
    more, fewer = int((seen & ~right).sum()), int((right & ~seen).sum())
    rows = ((seen != right).any(1)).nonzero()[:, 0].tolist()
    counts = [f"{n} {what}" for n, what in ((more, "that must be masked"), (fewer, "too few")) if n]
    return f"has another mask in rows {ranges(rows)} (pairs of row and key: {', '.join(counts)})"


def _band(seen: Tensor) -> str | None:
    """The keys from t - left to t + right that all rows see; None where they are no such band."""
    count = len(seen)
    rows, keys = (seen.nonzero()[:, i] for i in (0, 1))
    if not len(rows):
        return None
    behind, ahead = int((rows - keys).max()), int((keys - rows).max())
    t, j = torch.arange(count)[:, None], torch.arange(count)
    if not torch.equal(seen, (j >= t - behind) & (j <= t + ahead)):
        return None
    whole = behind >= count - 1
    first = "0" if whole else _offset(-behind)
    last = "the last" if ahead >= count - 1 else _offset(ahead)
    # What ends before or after the row itself is mostly a border that is off.
    like = {-1: "back by one", 1: "ahead by one"}.get(ahead)
    kind = "a causal mask" if whole else f"a window of {behind + ahead + 1} keys"
    return f"keys {first} to {last}" + (f", {kind} shifted {like}" if like else "")


def _offset(by: int) -> str:
    return "t" if not by else f"t{by:+d}"
