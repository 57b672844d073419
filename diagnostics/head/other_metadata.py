"""Other metadata under which a captured O fits: layouts, causal alignments, windows, scales and softcaps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import get_args

import torch

from attn_diag.captures.capture import Capture
from attn_diag.captures.metadata import Causal, Layout, Metadata
from attn_diag.errors import InputError
from attn_diag.head.output_fit import OutputFit, out_fit
from attn_diag.head.quality import LOSSY
from attn_diag.head.read import read_float64, read_head
from attn_diag.head.scale_fit import fit_scale
from attn_diag.head.softcap_fit import fitted_softcap
from attn_diag.head.usual_readings import BEFORE_THE_SCALE, USUAL_SOFTCAPS, usual_windows

# Another reading is named where it leaves so little of the stated one's error: one that is a little nearer explains
# nothing.
_EXPLAINS = 0.25
# And, however coarse a declared recipe, where it leaves less of O than it explains.
_HALF = math.sqrt(0.5)
# A scale that is fitted is so near to the one with a name that it is that.
_SAME_SCALE = 0.01
# So small a part of the stated scale leaves no scores; a scale that fits leaves less of the error than that does.
_NO_SCALE, _ALIKE = 2.0**-20, 1.1


def explained(stated: OutputFit, other: OutputFit) -> float:
    """How large the error under another reading may be that explains the stated one's."""
    # Sound kernels of one declared recipe may differ by ``LOSSY``: what leaves no less shows no other reading.
    most = min(stated.error / LOSSY, _HALF) if other.declared else stated.error
    return min(_EXPLAINS * stated.error + other.rounding, most)


@dataclass(frozen=True)
class OtherMetadata:
    """Other metadata under which an O fits."""

    metadata: Metadata
    """The metadata."""
    words: str
    """What of them differs from the stated ones."""
    error: float
    """O's error under them, over the norm of the reference."""

    def options(self, stated: Metadata) -> tuple[str, ...]:
        """The options of a command that make a capture with the ``stated`` metadata so."""
        found = self.metadata
        said = {"layout": found.layout, "causal": found.causal}
        options = [f"--{name} {value}" for name, value in said.items() if value != getattr(stated, name)]
        if found.scale not in (None, stated.scale):
            options.append(f"--scale {found.scale:.9g}")
        if found.window != stated.window:
            options.append("--window {},{}".format(*(found.window or (-1, -1))))
        if found.softcap is not None and found.softcap != stated.softcap:
            options.append(f"--softcap {found.softcap:g}")
        return tuple(options)


def better_reading(capture: Capture, observation: str, device: torch.device, stated: OutputFit) -> OtherMetadata | None:
    """The other metadata that O fits best; None where none of those tried explains its error.

    Args:
        capture: The capture.
        observation: The observation's name.
        device: Where O is recomputed.
        stated: How well O fits the metadata as they are.
    """
    best: OtherMetadata | None = None
    found = capture
    for reading, words in _readings(capture):
        other = out_fit(reading, observation, device)
        fits = other is not None and other.fits and other.error <= explained(stated, other)
        if other is not None and fits and (best is None or other.error < 0.9 * best.error):
            best = OtherMetadata(reading.metadata, words, other.error)
            found = reading
    near = scaled_reading(found, observation, device, best.error if best else _EXPLAINS * stated.error)
    if best is not None and near is not None:
        was, named, fitted = (m.scale or capture.scale for m in (capture.metadata, best.metadata, near.metadata))
        # In a coarse format a scale with a name may fit about as well as the one that it is.
        by_chance = named != was and abs(fitted / named - 1) > _SAME_SCALE
        chosen: OtherMetadata | None = near if by_chance or near.error < 0.9 * best.error else best
    else:
        chosen = near or best
    if chosen is not None and (chosen.metadata.scale, chosen.metadata.softcap) == (
        capture.metadata.scale,
        capture.metadata.softcap,
    ):
        return chosen
    # A cap of few keys' scores is much like another scale, or another cap with another scale.
    capped = capped_reading(capture, observation, device, lambda fit: explained(stated, fit))
    return capped if chosen is None or (capped is not None and capped.error < 0.9 * chosen.error) else chosen


def scaled_reading(capture: Capture, observation: str, device: torch.device, below: float) -> OtherMetadata | None:
    """The scale that fits the first head best, where O's error under it is smaller than ``below``."""
    observed = read_float64(capture, capture.key(observation, "o"), 0, 0, device)
    fit = None if observed is None else fit_scale(read_head(capture, 0, 0, device), observed)
    if fit is None:
        return None
    metadata = replace(capture.metadata, scale=fit.scale)
    other = out_fit(replace(capture, metadata=metadata), observation, device)
    if other is None or not other.fits or not other.error < below:
        return None
    # Where O has nothing of the scores (k or q became zeros in the kernel) a fit runs toward 0, which nobody stated.
    none = out_fit(replace(capture, metadata=replace(metadata, scale=_NO_SCALE * capture.scale)), observation, device)
    if none is not None and none.error <= _ALIKE * other.error:
        return None
    return OtherMetadata(metadata, f"scale={fit.named}", other.error)


def capped_reading(
    capture: Capture, observation: str, device: torch.device, below: Callable[[OutputFit], float]
) -> OtherMetadata | None:
    """The softcap that O fits, of all; None where none leaves as little of O's error as is said of it."""
    fitted = fitted_softcap(capture, observation, device)
    if fitted is None or fitted[1].error > below(fitted[1]):
        return None
    cap = float(f"{fitted[0]:.4g}")
    return OtherMetadata(replace(capture.metadata, softcap=cap), f"softcap={cap:g}", fitted[1].error)


def _readings(capture: Capture) -> Iterator[tuple[Capture, str]]:
    """Other layouts, causal alignments, windows, scales and softcaps that the shapes allow, in words."""
    stated = capture.metadata
    default = capture.head_dim**-0.5
    factors = {"log2(e)": math.log2(math.e), "ln(2)": math.log(2)}
    scales: dict[str, float | None] = {
        f"scale={default:.6g} (1/sqrt(D))": default,
        "scale=1": 1.0,
        f"scale={1 / capture.head_dim:.6g} (1/D)": 1 / capture.head_dim,
    }
    scales |= {f"scale times {name} (base-2 exponent)": capture.scale * f for name, f in factors.items()}
    scales |= {f"scale={capture.scale**2:.6g} (applied twice)": capture.scale**2}
    scales = {"": stated.scale, **scales}
    layouts: tuple[Layout, ...] = get_args(Layout)
    causals: list[Causal] = sorted(get_args(Causal), key=lambda causal: causal != stated.causal)
    for layout, causal, window, (words, scale) in product(layouts, causals, {stated.window, None}, scales.items()):
        changed = {
            f"layout={layout}": layout != stated.layout,
            f"causal={causal}": causal != stated.causal,
            "window=-1,-1": window != stated.window,
            words: bool(words),
        }
        said = ", ".join(name for name, is_changed in changed.items() if is_changed)
        try:
            metadata = replace(stated, layout=layout, causal=causal, window=window, scale=scale)
            other = replace(capture, metadata=metadata)
        except InputError:
            continue
        if said:
            yield other, said
    if stated.window is None:
        for causal, left in product(causals, usual_windows(capture.k_length)):
            usual = (left, left if causal == "none" else 0)
            said = f"window={left},{usual[1]}"
            said = said if causal == stated.causal else f"causal={causal}, {said}"
            yield replace(capture, metadata=replace(stated, causal=causal, window=usual)), said
    for cap in [cap for cap in (None, *USUAL_SOFTCAPS) if cap != stated.softcap]:
        said = "attention without the softcap" if cap is None else f"softcap={cap:g}"
        yield replace(capture, metadata=replace(stated, softcap=cap)), said
    if stated.softcap is not None:
        cap = stated.softcap * capture.scale
        yield replace(capture, metadata=replace(stated, softcap=cap)), f"softcap={cap:g} ({BEFORE_THE_SCALE})"
