"""Which function a kernel computes, where it is not the one it was called as: another mask, scale or layout, or none.

``probe`` and ``check`` stop at such a kernel: every figure about its rounding would be of another function's. They say
what fits (other metadata, tried as ``inspect`` tries them), else which keys its rows see (it is called with equal
scores and a V of unit vectors, so that O shows that), else what ``inspect`` finds in O.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attn_diag.analyses.inspection.inspect import inspect_captures
from attn_diag.captures.capture import Capture
from attn_diag.captures.metadata import Causal
from attn_diag.captures.sources import DEFAULT_OBSERVATION
from attn_diag.errors import InputError
from attn_diag.head.bounded_mask import words_of
from attn_diag.head.other_metadata import OtherMetadata, better_reading, capped_reading, scaled_reading
from attn_diag.head.other_sinks import with_other_sinks
from attn_diag.head.other_slopes import with_other_slopes
from attn_diag.head.output_fit import OutputFit, out_fit
from attn_diag.reference import Masking, format_of
from attn_diag.results.quality import QuantityVerdict
from attn_diag.results.wording import function_words, number, percent, ranges
from attn_diag.testing.case_inputs import CaseInputs
from attn_diag.testing.next_command import Again, listed_numbers
from attn_diag.testing.stated import stated_words
from attn_diag.testing.target import MisfitError, Target

# Equal scores give every key seen the same weight, rounded once: far from the half of another count of keys.
_UNEVEN = 0.02
# What V holds in FP16, so that O shows a weight of 2^-28 to one part in a hundred.
_UNIT_FP16 = 2.0**14
# Other slopes leave so much less of O's error, at least, and no more than two roundings of O.
_BEATS = 4.0
# A softcap that explains O takes half of its squared error away, and leaves hardly more than one rounding of O makes.
_MOST, _ROUNDINGS = math.sqrt(0.5), 1.5
# A fit knows a scale to so much of it, or better.
_FITTED = 2e-3
# Rows of a longer call would cost V = e_j too many calls, and tell no more.
_LONGEST = 512
_UNEXPLAINED = "returns an O that no mask, scale or layout tried explains"
_MASKS = {
    "none": "no causal mask",
    "top-left": "a causal mask (top-left)",
    "bottom-right": "a causal mask (bottom-right)",
}


@dataclass(frozen=True)
class OtherFunction:
    """What a kernel computes instead of what it was called as."""

    relative_error: float
    """||O_obs - O_ref|| / ||O_ref|| under what was stated; infinite: O must be 0 and is not."""
    words: str
    """What it does, in words that follow its name: "uses a causal mask (top-left), not none"."""
    fits: str | None = None
    """The other choices that fit, such as "scale 1, causal none"; None where none does."""
    options: tuple[str, ...] = ()
    """The options of the command that say so, such as "--causal top-left"; empty where it has none for it."""
    call: str | None = None
    """What says so in Python, where the command has no option for it."""
    of_mask: bool = False
    """Whether it is keys that are hidden, or shown, of the call by itself."""
    estimated: bool = False
    """Whether what the options say was read off O, and is known to some digits alone."""

    @property
    def known(self) -> bool:
        """Whether what it computes is known, and only not what was stated."""
        return bool(self.options or self.call)

    def sentence(self, case: CaseInputs) -> str:
        """All of it, of that case."""
        fits = "; no scale, mask or layout tried fits" if self.fits is None else f"; with {self.fits} it fits"
        return (
            f"{case.name}: O is {percent(self.relative_error)} off softmax(scale Q K^T) V as stated "
            f"({stated_words(case)}), which no rounding explains: it {self.words}{fits}"
        )

    def again(self, name: str, asked: Again, also: Sequence[str] = ()) -> str | None:
        """The command ``name`` with what is right, or a call that is; None where nothing is known that fits."""
        if self.call is not None or not self.options:
            return self.call
        command = asked.command(name, [*self.options, *also])
        return f"{command} (with the kernel's own: these are read off O)" if self.estimated else command


def fit_of(
    case: CaseInputs, o: Tensor, target: Target | None, device: torch.device, *, patterns: bool = True
) -> tuple[float | None, OtherFunction | None]:
    """How far O is from the attention that ``case`` states, and what it is instead where no rounding makes that.

    Args:
        case: What the kernel was called with.
        o: What it returned, [B, H, T, D].
        target: The kernel; None where only its output is known.
        device: Where O is recomputed.
        patterns: Look for a pattern in an O that nothing else explains, which takes long.

    Returns:
        ||O_obs - O_ref|| / ||O_ref|| over sampled rows, None where no row can be compared; and the other function, None
        where it is the attention stated.
    """
    capture = _capture(case, o)
    stated = out_fit(capture, DEFAULT_OBSERVATION, device)
    if stated is None or stated.ok:
        return None if stated is None else stated.error, None
    reading = better_reading(capture, DEFAULT_OBSERVATION, device, stated)
    if reading is not None:
        return stated.error, _of_reading(capture, reading, stated.error)
    if (numbers := wrong_numbers(case, o, device)) is not None:
        return stated.error, numbers
    words = None if target is None else mask_fault(case, target)
    if target is not None and words is not None and case.window is None and words.startswith(_whole_mask(case)):
        return stated.error, _with_other_mask(case, o, target, device, stated.error)
    if words is not None:
        return stated.error, OtherFunction(stated.error, words, of_mask=True)
    return stated.error, OtherFunction(stated.error, _pattern_words(capture, device) if patterns else _UNEXPLAINED)


def _whole_mask(case: CaseInputs) -> str:
    """How the words of the other causal mask begin, whole and exact."""
    return "lets row t see keys 0 to the last" if case.causal != "none" else "lets row t see keys 0 to t;"


def _with_other_mask(case: CaseInputs, o: Tensor, target: Target, device: torch.device, error: float) -> OtherFunction:
    """The mask is the other one, and something else is wrong besides."""
    causal: Causal = "none" if case.causal != "none" else "top-left"
    _, also = fit_of(replace(case, causal=causal), o, target, device)
    said = f"uses {_MASKS[causal]} where {case.causal} was asked for"
    if also is None:
        return OtherFunction(error, said, stated_words(replace(case, causal=causal)), (f"--causal {causal}",))
    options = (f"--causal {causal}", *also.options) if also.options else ()
    return OtherFunction(error, f"{said} and {also.words}", also.fits, options, also.call)


def other_limit(case: CaseInputs, o: Tensor, device: torch.device) -> OtherFunction | None:
    """The scale or softcap that explains most of the error of an O that is nearly the attention stated; None where none
    does."""
    capture = _capture(case, o)
    stated = out_fit(capture, DEFAULT_OBSERVATION, device)
    if stated is None or not stated.ok:
        return None
    scaled = scaled_reading(capture, DEFAULT_OBSERVATION, device, stated.error / 2)

    def below(fit: OutputFit) -> float:
        return min(_MOST * stated.error, _ROUNDINGS * fit.rounding)

    capped = capped_reading(capture, DEFAULT_OBSERVATION, device, below)
    known = [reading for reading in (scaled, capped) if reading is not None]
    return _of_reading(capture, min(known, key=lambda r: r.error), stated.error) if known else None


def nearly(
    case: CaseInputs,
    o: Tensor,
    verdict: QuantityVerdict | None,
    target: Target | None,
    device: torch.device,
    *,
    limits: bool,
) -> OtherFunction | None:
    """What a kernel computes whose O is nearly the attention stated, and by its verdict not right; None: not known.

    ``limits``: whether the inputs show another scale or softcap.
    """
    if verdict is None:
        return None
    wrong = verdict.answer == "wrong"
    if limits and (wrong or verdict.answer == "lossy") and (other := other_limit(case, o, device)) is not None:
        return other
    # What a mask lets through few rows may show; asked for, it is seen at once.
    words = mask_fault(case, target) if wrong and target is not None else None
    return None if words is None else OtherFunction(verdict.relative_error or 0.0, words, of_mask=True)


def wrong_numbers(case: CaseInputs, o: Tensor, device: torch.device) -> OtherFunction | None:
    """The other ALiBi slopes, or sinks, that take most of O's error away; None where none do."""
    capture = _capture(case, o)
    stated = out_fit(capture, DEFAULT_OBSERVATION, device)
    if stated is None:
        return None
    others = [("alibi_slopes", *found) for found in with_other_slopes(capture)]
    others += [("sinks", *found) for found in with_other_sinks(capture, DEFAULT_OBSERVATION, device)]
    fits = [(out_fit(other, DEFAULT_OBSERVATION, device), name, words, other) for name, words, other in others]
    known = [(fit.error, *rest) for fit, *rest in fits if fit is not None and fit.ok]
    if not known:
        return None
    error, name, words, other = min(known, key=lambda one: one[0])
    if not (error < stated.error / _BEATS and error < 2.0 ** -format_of(o.dtype).precision):
        return None
    if getattr(case, name) is not None:
        what, dropped, rest = words.partition(" dropped")
        return OtherFunction(stated.error, f"drops its {what}{rest}" if dropped else f"has {words}")
    numbers = other.tensors[name][...].flatten()[: case.q.shape[1]].tolist()
    estimated = name == "sinks"
    told = listed_numbers([float(number(x, 3)) for x in numbers] if estimated else numbers)
    option = f"--{name.replace('_', '-')} {told}"
    words = words.replace("the capture does not state", "are not stated")
    return OtherFunction(stated.error, f"has {words}", "them stated", (option,), estimated=estimated)


def _capture(case: CaseInputs, o: Tensor) -> Capture:
    return replace(case, do=None).captured({"o": o.detach().cpu()})


def _of_reading(capture: Capture, reading: OtherMetadata, error: float) -> OtherFunction:
    """What differs, in words, as options and as a call."""
    stated, found = capture.metadata, reading.metadata
    scale = capture.scale if found.scale is None else found.scale
    said, options = [], []
    if found.layout != stated.layout:
        said.append("takes q, k, v as [B, T, H, D], not [B, H, T, D]")
    if found.causal != stated.causal:
        said.append(f"uses {_MASKS[found.causal]} where {stated.causal} was asked for")
        options.append(f"--causal {found.causal}")
    if found.window != stated.window:
        left, right = found.window or (-1, -1)
        ahead = f" and {right} ahead" if right else ""
        said.append("sees no window" if found.window is None else f"sees a window: {left} keys back{ahead}")
        options.append(f"--window {left},{right}")
    if found.softcap != stated.softcap:
        cap = found.softcap
        said.append("does not cap its scores" if cap is None else f"caps its scores at {cap:g} (softcap)")
        options.append(f"--softcap {cap or 0:g}")
    if not math.isclose(scale, capture.scale, rel_tol=1e-9):
        scale = _rounded(scale)
        said.append(f"scales by {_scale_words(scale, reading.words)}, not {number(capture.scale, 6)}")
        options.append(f"--scale {scale:.9g}")
    if found.layout != stated.layout:
        python = "lambda q, k, v: fn(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)"
        return OtherFunction(error, " and ".join(said), reading.words, call=python)
    fits = function_words(found.causal, scale, found.window, found.softcap)
    return OtherFunction(error, " and ".join(said), fits, tuple(options))


def _scale_words(scale: float, reading: str) -> str:
    """A scale with the name that the reading gives it, "0.124035 (1/sqrt(65))"."""
    named = reading.partition("scale=")[2]
    return number(scale, 6) + (f" {named[named.index('(') :]}" if "(" in named else "")


def _rounded(scale: float) -> float:
    """The root of a whole number that a fitted scale is, within what a fit can tell; else the scale."""
    whole = scale**-2
    near = round(whole) > 0 and abs(whole - round(whole)) < _FITTED * whole
    return float(f"{round(whole) ** -0.5:.9g}") if near else scale


def _pattern_words(capture: Capture, device: torch.device) -> str:
    """What ``inspect`` says of O."""
    observations = inspect_captures([capture], device=device.type).captures[0].observations
    of_o = (v for one in observations for head in one.heads for v in head.quantities if v.quantity == "o")
    for verdict in of_o:
        if verdict.patterns and (verdict.answer == "wrong" or verdict.patterns[0].kind == "operands"):
            return f"returns an O of which {verdict.patterns[0].words}"
    return _UNEXPLAINED


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
