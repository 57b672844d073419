"""What a converted capture's notes say of rows of O, and of dO."""

from __future__ import annotations

import torch

from attn_diag.captures.capture import Capture
from attn_diag.head.dumped import gradient_fit, zeroed_rows
from attn_diag.head.output_fit import TOLERANCE
from attn_diag.results.wording import plural

# How the note begins of an output that does not fit q, k and v.
MISFIT = " does not agree with attention on q, k and v"
# dQ of another dO has nothing to do with it: ||a - b|| is ||b|| at least, but for chance. In ill-conditioned heads a
# sound one is far off too: so many times what rounding is expected to make of it shows another dO.
_UNRELATED, _BEYOND = 0.9, 8.0
# Up to so many times that, or TOLERANCE, dQ is said to agree.
_AGREES = 2.0


def lost_rows(capture: Capture) -> list[str]:
    """That rows of O are zeros which attention makes none."""
    if "o" not in capture.tensors or not (found := zeroed_rows(capture, torch.device("cpu"))):
        return []
    item, head, rows = found[0]
    named = ", ".join(map(str, rows[:4])) + (", …" if len(rows) > 4 else "")
    where = f"head {head}" + (f" of batch item {item}" if capture.batch > 1 else "")
    more = f", and of {plural(len(found) - 1, 'other head')}" if len(found) > 1 else ""
    return [
        f"O{MISFIT}: {'row' if len(rows) == 1 else 'rows'} {named} of {where} {'is' if len(rows) == 1 else 'are'} zero "
        f"in every element ({plural(len(rows), 'row')}{more}): not written, or padding that no mask states?"
    ]


def of_gradient(capture: Capture) -> list[str]:
    """What is said of dO: dQ is made of it; the other gradients and O are not looked at."""
    if "do" not in capture.tensors:
        return []
    found = gradient_fit(capture, torch.device("cpu")) if "dq" in capture.tensors else None
    if found is None:
        return ["dO is held against nothing: there is no dQ to check it with"]
    off, expected = found
    if off <= max(TOLERANCE, _AGREES * expected):
        return [f"dQ agrees with dO within {off:.2g}"]
    if off <= max(_UNRELATED, _BEYOND * expected):
        return [f"dQ is {off:.2g} off what dO makes of it, where rounding is expected to leave {expected:.2g}"]
    return [
        f"dQ{MISFIT} with dO (off by {off:.2g}): dO of another step, call or layout, or dQ of another q (before "
        "RoPE, or a factor)?"
    ]
