"""Which function a kernel computes, where it is not the one it was called as: another mask, scale or layout, or none.

``probe`` and ``check`` stop at such a kernel: every figure about its rounding would be of another function's. They say
what fits (other metadata, tried as ``inspect`` tries them), else which keys its rows see (``seen_keys``), else what
``inspect`` finds in O.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import get_args

import torch
from torch import Tensor

from attn_diag.analyses.inspection.inspect import inspect_captures
from attn_diag.captures.capture import Capture
from attn_diag.captures.metadata import AlibiOrigin, Causal
from attn_diag.captures.sources import DEFAULT_OBSERVATION
from attn_diag.head.other_metadata import OtherMetadata, better_reading, capped_reading, scaled_reading
from attn_diag.head.other_sinks import with_other_sinks
from attn_diag.head.other_slopes import with_other_slopes
from attn_diag.head.output_fit import OutputFit, lse_fit, out_fit
from attn_diag.reference import format_of
from attn_diag.results.quality import QuantityVerdict
from attn_diag.results.wording import function_words, number, percent
from attn_diag.testing.case_inputs import CaseInputs
from attn_diag.testing.next_command import Again, listed_numbers
from attn_diag.testing.seen_keys import mask_fault
from attn_diag.testing.stated import stated_words
from attn_diag.testing.target import Target

# Other slopes leave so much less of O's error, at least, and no more than two roundings of O.
_BEATS, _ALIKE = 4.0, 1.1
# A softcap that explains O takes half of its squared error away, and leaves hardly more than one rounding of O makes.
_MOST, _ROUNDINGS = math.sqrt(0.5), 1.5
# A fit knows a scale to so much of it, or better.
_FITTED = 2e-3
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
    rounded: bool = False
    """Whether a format below 16 bits makes it, which is a rounding."""

    @property
    def known(self) -> bool:
        """Whether what it computes is known, and only not what was stated."""
        return bool(self.options or self.call)

    def sentence(self, case: CaseInputs) -> str:
        """All of it, of that case."""
        fits = "; no scale, mask or layout tried fits" if self.fits is None else f"; with {self.fits} it fits"
        return (
            f"{case.name}: O is {percent(self.relative_error)} off softmax(scale Q K^T) V as stated "
            f"({stated_words(case)}){'' if self.rounded else ', which no rounding explains'}: it {self.words}{fits}"
        )

    def again(self, name: str, asked: Again, also: Sequence[str] = ()) -> str | None:
        """The command ``name`` with what is right, or a call that is; None where nothing is known that fits."""
        if self.call is not None or not self.options:
            return self.call
        # A kernel below 16 bits is declared to check alone.
        command = asked.command("check" if self.rounded else name, [*self.options, *also])
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
    unexplained = OtherFunction(stated.error, _UNEXPLAINED)
    return stated.error, (_of_pattern(capture, device, stated.error) or unexplained) if patterns else unexplained


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
        # A kernel that is coarse besides leaves more than one rounding; then it is to explain more than a scale does.
        beside = 0.0 if scaled is None else _MOST * scaled.error
        return min(_MOST * stated.error, max(_ROUNDINGS * fit.rounding, beside))

    capped = capped_reading(capture, DEFAULT_OBSERVATION, device, below)
    known = [reading for reading in (scaled, capped) if reading is not None]
    best = min(known, key=lambda r: r.error, default=None)
    # Slopes that are a little off are much like another scale, or a softcap.
    if best is None or wrong_numbers(case, o, device, below=best.error) is not None:
        return None
    return _of_reading(capture, best, stated.error)


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


def wrong_numbers(case: CaseInputs, o: Tensor, device: torch.device, below: float = math.inf) -> OtherFunction | None:
    """The other ALiBi slopes, or sinks, that take most of O's error away and leave less than ``below``, if any do."""
    capture = _capture(case, o)
    stated = out_fit(capture, DEFAULT_OBSERVATION, device)
    if stated is None:
        return None
    others = [("alibi_slopes", *found) for found in with_other_slopes(capture, DEFAULT_OBSERVATION, device)]
    others += [("sinks", *found) for found in with_other_sinks(capture, DEFAULT_OBSERVATION, device)]
    fits = [(out_fit(other, DEFAULT_OBSERVATION, device), name, words, other) for name, words, other in others]
    known = [(fit.error, name, words, other) for fit, name, words, other in fits if fit is not None and fit.ok]
    if not known:
        return None
    # Of those that fit as well the first: numbers that are fitted come last.
    error, name, words, other = next(k for k in known if k[0] <= _ALIKE * min(error for error, *_ in known))
    least = min(stated.error / (2 if below < math.inf else _BEATS), below, 2.0 ** -format_of(o.dtype).precision)
    if not error < least:
        return None
    if getattr(case, name) is not None:
        what, dropped, rest = words.partition(" dropped")
        return OtherFunction(stated.error, f"drops its {what}{rest}" if dropped else f"has {words}")
    numbers = other.tensors[name][...].flatten()[: case.q.shape[1]].tolist()
    estimated = name == "sinks"
    told = listed_numbers([float(number(x, 3)) for x in numbers] if estimated else numbers)
    # What keys that fill a tile make is no sink to be stated: a call that is arranged otherwise tells.
    options = () if "fill a tile" in words else (f"--{name.replace('_', '-')} {told}",)
    words = words.replace("the capture does not state", "are not stated")
    return OtherFunction(stated.error, f"has {words}", "them stated", options, estimated=estimated)


def as_counted(case: CaseInputs, outputs: Mapping[str, Tensor | None], device: torch.device) -> CaseInputs:
    """The case with ALiBi's bias counted from where LSE has it: the row, or the first or last key.

    Under a causal mask -slope (t - j) and slope j differ by a constant of the row: O is the same, LSE is not (BLOOM's,
    and flash_attn 2's). All that is judged of them is judged of the case that is returned.
    """
    o, lse = outputs["o"], outputs.get("lse")
    if o is None or lse is None or case.alibi_slopes is None or case.alibi_origin != "row" or case.causal == "none":
        return case
    capture = replace(case, do=None).captured({"o": o.detach().cpu(), "lse": lse.detach().cpu()})
    fits: dict[AlibiOrigin, OutputFit] = {}
    for origin in get_args(AlibiOrigin):
        counted = replace(capture, metadata=replace(capture.metadata, alibi_origin=origin))
        fit = lse_fit(counted, DEFAULT_OBSERVATION, device)
        if fit is None:
            return case
        fits[origin] = fit
    best = min(fits, key=lambda name: fits[name].error)
    known = fits[best].fits and fits[best].error < fits["row"].error / _BEATS
    return replace(case, alibi_origin=best) if known else case


def origin_words(cases: Iterable[CaseInputs]) -> list[str]:
    """What is to be said where LSE counts from elsewhere than the row."""
    found = {c.alibi_origin for c in cases} - {"row"}
    return [
        f"LSE counts ALiBi's bias from the {origin.replace('-', ' ')}, not from the row: one number a row, of which O "
        "has nothing; it is taken so"
        for origin in sorted(found)
    ]


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


def _of_pattern(capture: Capture, device: torch.device, error: float) -> OtherFunction | None:
    """What ``inspect`` says of O; None where it finds no pattern."""
    observations = inspect_captures([capture], device=device.type).captures[0].observations
    of_o = (v for one in observations for head in one.heads for v in head.quantities if v.quantity == "o")
    for verdict in of_o:
        for pattern in verdict.patterns[:1]:
            if pattern.kernel is not None:
                options = (f"--declared {pattern.kernel}",)
                words = f"has the bits of {pattern.kernel}, a kernel below 16 bits"
                return OtherFunction(error, words, f"declared={pattern.kernel}", options, rounded=True)
            if verdict.answer == "wrong" or pattern.formats:
                return OtherFunction(error, f"returns an O of which {pattern.words}", rounded=bool(pattern.formats))
    return None
