"""The check before any verdict: does the captured O agree with attention as the metadata describe it?

A wrong causal alignment, scale, layout, window or LSE base makes "errors" of order one that no rounding can
explain. Rows spread over the capture are recomputed; where they miss, other readings are tried and the one
that fits is named.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, get_args

import torch

from attn_diag.captures.capture import Capture
from attn_diag.captures.dropout import KEPT
from attn_diag.captures.metadata import AlibiOrigin, LseBase
from attn_diag.head.declared import declared_recipe
from attn_diag.head.other_documents import merged, seen_in_out
from attn_diag.head.other_dropouts import with_other_dropouts
from attn_diag.head.other_metadata import OtherMetadata, better_reading, explained, scaled_reading
from attn_diag.head.other_sinks import with_other_sinks
from attn_diag.head.other_slopes import with_other_slopes
from attn_diag.head.output_fit import (
    TOLERANCE,
    FitSubject,
    OutputFit,
    lse_fit,
    lse_fits,
    out_fit,
    out_fits,
    sampled_heads,
)
from attn_diag.head.read import HeadTensors, read_float64, read_head
from attn_diag.head.unseen_dropout import UnseenDropout, in_weights
from attn_diag.reference import format_of
from attn_diag.results.diagnosis import Assumptions, Misfit
from attn_diag.results.wording import percent

_NAMES = {"o": "O", "lse": "LSE"}
# O is as far off as one rounding where its error is at most so many times that. A scale that leaves half of the error
# and a rounding itself takes away sqrt(3) roundings or more, and the error is two.
_ONE_ROUNDING = 1.5
_ALIKE = 1.1


def check_assumptions(capture: Capture, observations: Sequence[str], device: torch.device) -> Assumptions:
    """Compare each observation's O and LSE with a recomputation under the metadata, in norm.

    LSE may be 5 % off, O 5 % more than correct rounding of the recomputed O to its own format makes it be, and both 5 %
    more than a declared recipe's.
    Rows with NaN or Inf in their inputs or output are not compared. Where none is left, or nothing was captured
    to compare with, ``ok`` is None.
    """
    return judge_checks(
        capture, observations, [check for name in observations for check in check_observation(capture, name, device)]
    )


def check_observation(
    capture: Capture,
    observation: str,
    device: torch.device,
    tensors: HeadTensors | None = None,
    fit: OutputFit | None = None,
) -> tuple[Misfit, ...]:
    """The check of O, then that of LSE unless O already fails; only where there are rows to compare.

    ``tensors``: of heads that are read for others too. ``fit``: how well O fits, where that is known.
    """
    captured = {output for output in _NAMES if capture.key(observation, output) in capture.tensors}
    stated = fit
    if stated is None and "o" in captured:
        stated = out_fit(capture, observation, device, tensors)
    out = _check_out(capture, observation, device, stated)
    lse = None
    if "lse" in captured and (out is None or out.ok):
        lse = _check_lse(capture, observation, device, tensors)
    if lse is not None and not lse.ok and out is not None:
        # Then it is no rounding in few rows that O is off by: sinks take most of rows that see few keys.
        again = _check_out(capture, observation, device, stated, few=False)
        if again is not None and not again.ok:
            out, lse = again, None
    return tuple(check for check in (out, lse) if check is not None)


def judge_checks(capture: Capture, observations: Sequence[str], checks: Sequence[Misfit]) -> Assumptions:
    """What the ``checks`` of these observations say together."""
    wrong = [c for c in checks if not c.ok]
    if not checks:
        captured = any(capture.key(name, output) in capture.tensors for name in observations for output in _NAMES)
        why = (
            "no sampled row could be compared, each has NaN or Inf or is fully masked"
            if captured
            else "no O or LSE was captured to check them with"
        )
        return Assumptions(None, capture.assumed, (), f"not checked: {why}")
    if not wrong:
        worst = max(c.relative_error for c in checks)
        names = " and ".join(dict.fromkeys(_NAMES[c.output] for c in checks))
        agree = "agrees" if len({c.output for c in checks}) == 1 else "agree"
        # Only O may be further off, as far as its own format makes it, or in few rows.
        by = "the declared recipe's error" if capture.metadata.declared else "correct rounding to O's own format"
        coarse = f"; {by}, or scores in 16 bits in a few rows, can make that" if worst > TOLERANCE else ""
        message = f"hold: {names} {agree} within {worst:.2g} (sampled rows){coarse}"
        if (near := next((c for c in checks if c.better is not None), None)) is not None:
            message += f"; yet {near.better} fits {near.observation!r} within {near.better_error:.2g}"
        return Assumptions(True, capture.assumed, tuple(checks), message)
    return Assumptions(False, capture.assumed, tuple(checks), " ".join(dict.fromkeys(_message(c) for c in wrong)))


def wrong_among(
    capture: Capture, found: Assumptions, device: torch.device, places: Sequence[tuple[int, int]]
) -> str | None:
    """What checks that no other metadata explain say of some heads: other heads' errors are none of theirs.

    Args:
        capture: The capture.
        found: The checks of some of its heads, whichever.
        device: Where O and LSE are recomputed.
        places: Batch items and heads.

    Returns:
        Of the first that is off itself, how far, in a sentence; None where none is.
    """
    for check in (c for c in found.checks if not c.ok):
        asked = [FitSubject(capture, check.observation, places=[place]) for place in places]
        fits = (out_fits if check.output == "o" else lse_fits)(asked, device)
        for (batch, head), fit in zip(places, fits, strict=True):
            if fit is not None and not fit.ok:
                sequence = f" of sequence {batch}" if capture.batch > 1 else ""
                of_head = f"head {capture.metadata.head_offset + head}{sequence}"
                return f"{of_head}: {_message(replace(check, relative_error=fit.error))}"
    return None


def _message(check: Misfit) -> str:
    if math.isfinite(check.relative_error):
        # What fits no other metadata may be made of operands in few bits.
        fits = any(one is not None for one in (check.better, check.documents, check.sinks, check.slopes))
        wrong = f"is {percent(check.relative_error)} off under the stated metadata"
        wrong += ", which no rounding explains" if fits or check.dropout is not None else ""
    elif math.isnan(check.relative_error):
        wrong = "cannot be compared: with these values and the stated scale the float64 reference itself overflows"
    else:
        masked = "every sampled row is fully masked (or V is 0)"
        wrong = f"is not 0, as it must be under the stated metadata: {masked}"
    found = f"{_NAMES[check.output]} of '{check.observation}' {wrong};"
    if check.documents is not None:
        return f"{found} {check.documents} within {percent(check.better_error)}: cu_seqlens are wrong, or not obeyed."
    if check.better is not None and check.dropout is not None:
        return f"{found} {check.dropout}"
    for words, what in ((check.sinks, "sinks are"), (check.slopes, "slopes are"), (check.dropout, "dropout is")):
        if words is not None:
            return f"{found} {words} within {percent(check.better_error)}: the kernel's {what} not the capture's."
    if check.better is None:
        return f"{found} no other causal alignment, scale, layout, window or base tried fits either."
    near = percent(check.better_error)
    return f"{found} {check.better} fits within {near}: correct the metadata or pass it as an option."


def _check_out(
    capture: Capture, observation: str, device: torch.device, stated: OutputFit | None, *, few: bool = True
) -> Misfit | None:
    """``few``: whether an error that few rows have is none of the metadata's."""
    if stated is None:
        return None
    stated = replace(stated, few=stated.few and few)
    if stated.ok:
        # Rows that attend to one key have O exactly: what is less than a rounding of O shows no other scale.
        rounding = torch.finfo(capture.tensors[capture.key(observation, "o")].dtype).eps / math.sqrt(48)
        # Nor does what one correct rounding of O leaves: under another scale it leaves as much.
        seen = not stated.few and stated.error > max(rounding / 4, _ONE_ROUNDING * stated.rounding)
        near = scaled_reading(capture, observation, device, stated.error / 2) if seen else None
        return _misfit(observation, stated, near)
    cuts = (merged(capture), seen_in_out(capture, observation)) if capture.documents is not None else ()
    for cut in cuts:
        other = None if cut is None else out_fit(cut.of(capture), observation, device)
        if cut is not None and other is not None and other.fits and other.error <= explained(stated, other):
            return Misfit(observation, "o", stated.error, False, None, other.error, cut.short)
    others: dict[str, Iterator[tuple[str, Capture]]] = {
        "sinks": with_other_sinks(capture, observation, device),
        "slopes": with_other_slopes(capture, observation, device),
        "dropout": with_other_dropouts(capture),
    }
    for field, captures in others.items():
        fits = [(out_fit(c, observation, device), words) for words, c in captures]
        known = [(f.error, words) for f, words in fits if f is not None and f.fits and f.error <= explained(stated, f)]
        if known:
            # Of those that fit as well the first: numbers that are fitted come last.
            error, words = next(one for one in known if one[0] <= _ALIKE * min(known)[0])
            said: dict[str, Any] = {field: words}
            return Misfit(observation, "o", stated.error, False, None, error, **said)
    best = better_reading(capture, observation, device, stated)
    if best is None and (unseen := _unseen_dropout(capture, observation, device)) is not None:
        left = math.sqrt(unseen.error / unseen.reference)
        return Misfit(observation, "o", stated.error, False, unseen.words, left, dropout=unseen.sentence)
    return _misfit(observation, stated, best)


def _unseen_dropout(capture: Capture, observation: str, device: torch.device) -> UnseenDropout | None:
    """Dropout whose mask the capture lacks, in the weights of rows that see few keys."""
    if KEPT in capture.tensors or declared_recipe(capture) is not None:
        return None
    key = capture.key(observation, "o")
    heads = []
    for batch, head in sampled_heads(capture):
        inputs, o = read_head(capture, batch, head, device), read_float64(capture, key, batch, head, device)
        assert o is not None
        heads.append((replace(inputs.head, do=None), o.masked_fill(inputs.unusable[:, None], math.nan)))
    return in_weights(heads, format_of(capture.tensors[key].dtype))


def _misfit(observation: str, stated: OutputFit, other: OtherMetadata | None) -> Misfit:
    words, error = (None, None) if other is None else (other.words, other.error)
    return Misfit(observation, "o", stated.error, stated.ok, words, error)


def _check_lse(capture: Capture, observation: str, device: torch.device, tensors: HeadTensors | None) -> Misfit | None:
    stated = capture.metadata.lse_base
    fit = lse_fit(capture, observation, device, tensors)
    if fit is None:
        return None
    error = fit.error
    if fit.ok:
        return Misfit(observation, "lse", error, ok=True)
    base: LseBase = "2" if stated == "e" else "e"
    flipped = replace(capture, metadata=replace(capture.metadata, lse_base=base))
    other = lse_fit(flipped, observation, device)
    if other is not None and other.fits:
        return Misfit(observation, "lse", error, False, f"lse_base={base}", other.error)
    for origin in get_args(AlibiOrigin) if "alibi_slopes" in capture.tensors else ():
        moved = replace(capture, metadata=replace(capture.metadata, alibi_origin=origin))
        other = lse_fit(moved, observation, device)
        if other is not None and other.fits:
            return Misfit(observation, "lse", error, False, f"alibi_origin={origin}", other.error)
    return Misfit(observation, "lse", error, ok=False)
