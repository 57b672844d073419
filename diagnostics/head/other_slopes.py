"""Other ALiBi slopes than a capture states: what a kernel computes that drops them, takes another head's, or errs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch

from attn_diag.captures.alibi import SLOPES
from attn_diag.captures.capture import Capture
from attn_diag.head.mistakes import Mistake
from attn_diag.head.read import read_float64, read_head
from attn_diag.head.slope_fit import fit_slope
from attn_diag.reference import Alibi, AttentionHead

_MOST_HEADS = 16
# Rows that a slope is read off, and slopes that are told.
_ROWS, _LISTED = 128, 4
# Slopes this near, over the larger one, are one slope: a bias of 64 moves by less than a sixteenth.
_SAME = 2.0**-10


def other_slopes(capture: Capture, batch: int, head: int) -> list[Mistake]:
    """The slopes that a faulty kernel may have given a head.

    Args:
        capture: The capture.
        batch: Index of the batch item.
        head: Index of the query head in the capture.

    Returns:
        None at all, those of other heads, and mistakes in the slope; where none is stated, those that models with as
        many heads have.
    """
    stated, origin = capture.alibi_slope(batch, head), capture.metadata.alibi_origin
    number, heads = head + capture.metadata.head_offset, capture.q_heads
    if stated is None:
        usual = usual_slopes(heads)
        return [_mistake("ALiBi's usual slopes, which are not stated,", _alibi(usual[head], "row"))]
    own = 0.0 if not math.isfinite(stated) else stated
    nearest = sorted((h for h in range(heads) if h != head), key=lambda h: abs(h - head))[:_MOST_HEADS]
    found = [("no ALiBi slope (the bias dropped)", 0.0)]
    found += [
        (f"the ALiBi slope of head {h - head + number}", slope)
        for h in nearest
        if (slope := capture.alibi_slope(batch, h)) is not None
    ]
    found += [
        ("an ALiBi slope of the wrong sign", -own),
        ("the ALiBi slope times the scale", own * capture.scale),
        ("the ALiBi slope divided by the scale", own / capture.scale),
        ("an ALiBi slope in base 2 (2 to the power of the bias)", own * math.log(2)),
        ("the ALiBi slope multiplied by log2(e)", own * math.log2(math.e)),
    ]
    return [
        _mistake(words, _alibi(slope, origin))
        for words, slope in found
        if math.isfinite(slope) and abs(slope - own) > _SAME * max(abs(slope), abs(own))
    ]


def _mistake(words: str, alibi: Alibi | None) -> Mistake:
    several = "the ALiBi slopes of other heads" if "of head" in words else words
    return Mistake("alibi", words, partial(_with_alibi, alibi), several, "the forward's LSE has the right one")


def _with_alibi(alibi: Alibi | None, head: AttentionHead) -> AttentionHead:
    return replace(head, masking=replace(head.masking, alibi=alibi))


def _alibi(slope: float, origin: str) -> Alibi | None:
    held = float(torch.tensor(slope, dtype=torch.float32))
    return Alibi(held, origin) if held and math.isfinite(held) else None  # type: ignore[arg-type]


def usual_slopes(heads: int) -> list[float]:
    """The slopes of the paper for so many heads: 2^(-8 h / n), and between them where n is no power of two."""
    power = 2 ** math.floor(math.log2(heads))
    found = [2.0 ** (-8 * (h + 1) / power) for h in range(power)]
    return found + [2.0 ** (-4 * (2 * h + 1) / power) for h in range(heads - power)]


def with_other_slopes(capture: Capture, observation: str, device: torch.device) -> Iterator[tuple[str, Capture]]:
    """The capture with other slopes in all its heads, and what is to be said where its O fits them.

    Args:
        capture: The capture.
        observation: The observation with an O, from which other slopes are read.
        device: Where they are computed.

    Yields:
        Words and capture.
    """
    bare = replace(
        capture, tensors={n: t for n, t in capture.tensors.items() if n != SLOPES},
        metadata=replace(capture.metadata, alibi_origin="row"),
    )  # fmt: skip
    if SLOPES not in capture.tensors:
        slopes = torch.tensor(usual_slopes(capture.q_heads), dtype=torch.float32)
        yield "ALiBi's usual slopes, which are not stated: O fits them", _with(bare, slopes, capture)
        return
    stated = capture.tensors[SLOPES][...].float()
    yield "ALiBi slopes dropped: O fits attention without them", bare
    if stated.shape[-1] > 1:
        for by, way in ((1, "before"), (-1, "further on")):
            words = f"ALiBi slopes off by one head: O fits those of the head {way}"
            yield words, _with(bare, stated.roll(by, -1), capture)
    mistakes = {
        "of the wrong sign": -1.0, "times the scale": capture.scale, "divided by the scale": 1 / capture.scale,
        "in base 2": math.log(2), "multiplied by log2(e)": math.log2(math.e),
    }  # fmt: skip
    for words, factor in mistakes.items():
        yield f"other ALiBi slopes: O fits the stated ones {words}", _with(bare, stated * factor, capture)
    fitted = [_seen(capture, observation, head, device) for head in range(capture.q_heads)]
    known = [slope for slope in fitted if slope is not None]
    if len(known) == len(fitted):
        listed = ", ".join(f"{s:.3g}" for s in known[:_LISTED]) + (", …" if len(known) > _LISTED else "")
        yield f"other ALiBi slopes: O fits {listed}", _with(bare, torch.tensor(known, dtype=torch.float32), capture)


def _seen(capture: Capture, observation: str, head: int, device: torch.device) -> float | None:
    """The slope that a head's O seems to have seen."""
    inputs = read_head(capture, 0, head, device)
    out = read_float64(capture, capture.key(observation, "o"), 0, head, device)
    if out is None or inputs.head.masking.alibi is None:
        return None if out is None else capture.alibi_slope(0, head)
    rows = torch.linspace(0, len(out) - 1, min(len(out), _ROWS), device=device).long()
    return fit_slope(inputs.head, rows, out[rows].masked_fill(inputs.unusable[rows, None], math.nan))


def _with(bare: Capture, slopes: torch.Tensor, stated: Capture) -> Capture:
    metadata = replace(bare.metadata, alibi_origin=stated.metadata.alibi_origin)
    return replace(bare, tensors={**bare.tensors, SLOPES: slopes}, metadata=metadata)
