"""What an output of linear attention plainly is instead of itself: another head's, another step's, another gradient.

No kernel is emulated for these: the reference has the numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from attn_diag.analyses.linear.words import CAUSES, Cause
from attn_diag.captures.linear import LINEAR_OUTPUTS
from attn_diag.head.linear import STATES, LinearRun, Place
from attn_diag.results.wording import LINEAR_SYMBOLS

# What it must make of the squared error, and what it may leave beside a well-rounded kernel's own squared error; or all
# but this, whatever is left.
_EXPLAINS, _LEAVES, _WHOLE = 0.98, 16.0, 0.998
# A factor is a known number's where it is so near.
_NEAR = 5e-3


def fact_of(run: LinearRun, name: str, observed: Tensor, place: Place, noise: float) -> Cause | None:
    """What a head's output is instead, or None.

    Args:
        run: The capture's.
        name: The quantity.
        observed: The head's.
        place: Where the head is in the quantity's tensor.
        noise: A well-rounded kernel's squared error.
    """
    true = run.reference.values[name][place]
    total = float((observed - true).square().sum())
    best: tuple[float, str, str] | None = None
    for cause, words, other in _others(run, name, place):
        left = float((observed - other).square().sum())
        explained = 1 - left / total if total else 0.0
        fits = explained > _WHOLE or (explained > _EXPLAINS and left <= _LEAVES * noise)
        if fits and (best is None or explained > best[0]):
            best = explained, cause, words
    return None if best is None else Cause(best[1], best[0], best[2])


def _others(run: LinearRun, name: str, place: Place) -> Iterator[tuple[str, str, Tensor]]:
    """By cause and words what else it may be."""
    values, tensors = run.reference.values, run.capture.tensors
    whole, true = values[name], values[name][place]
    if name in STATES and true.shape[-1] == true.shape[-2]:
        yield "transposed", CAUSES["transposed"], true.mT
    axis = 1 if name in STATES else 2
    for head in range(whole.shape[axis]):
        if not isinstance(place[axis], slice) and head != place[axis]:
            number = head + run.capture.metadata.head_offset
            yield "of_another_head", f"it is that of head {number}", whole.select(axis, head)
    for by, words in ((1, "before"), (-1, "after")):
        if len(true) > 1 and (len(true) > 2 or by == 1):
            side = f"the one {words} it" if len(true) > 2 else "the other"
            yield "of_another_sequence", f"each sequence has that of {side}", true.roll(by, 0)
        if name not in STATES:
            yield "of_another_step", f"each step has that of the step {words} it", _shifted(true, run, by)
    if name in LINEAR_OUTPUTS:
        return
    for other, value in values.items():
        if other not in (name, *LINEAR_OUTPUTS) and value.shape == whole.shape:
            yield "of_another_gradient", f"it is {LINEAR_SYMBOLS.get(other, other)}", value[place]
    if name == "dg":
        g = tensors["g"].to(run.device).double()[place]
        yield "of_decay_itself", CAUSES["of_decay_itself"], true / g.exp().clamp(min=1e-30)
        yield "not_summed", CAUSES["not_summed"], true - _shifted(true, run, -1)
    if name == "dv" and "beta" in tensors:
        beta = tensors["beta"].to(run.device).double()[place][..., None]
        yield "without_beta", CAUSES["without_beta"], true / beta.clamp(min=2.0**-24)


def _shifted(true: Tensor, run: LinearRun, by: int) -> Tensor:
    """Each sequence's steps moved by one, zeros where there is none."""
    found = torch.zeros_like(true)
    for b, steps in run.capture.call.sequences:
        own = true[b, steps]
        found[b, steps] = torch.cat([own[:1] * 0, own[:-1]] if by > 0 else [own[1:], own[:1] * 0])
    return found


def factor_in_words(factor: float, run: LinearRun) -> str:
    """A factor, and whose number it is where that is known.

    Args:
        factor: What an output is multiplied by.
        run: The capture's.
    """
    scale, said = run.capture.call.used_scale, f"it is {factor:.4g} times what it should be"
    known = {"as with the scale applied twice": scale, "as without the scale": 1 / scale} if scale != 1 else {}
    known |= {"as with ln 2 once too often": math.log(2), "as without ln 2": 1 / math.log(2)}
    near = [words for words, number in known.items() if abs(factor / number - 1) < _NEAR]
    return f"{said} ({near[0]})" if near else said
