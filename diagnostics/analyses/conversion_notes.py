"""What a converted capture's notes say of rows of O, and of dO."""

from __future__ import annotations

import torch

from attn_diag.captures.capture import Capture
from attn_diag.head.counterfactual import covers
from attn_diag.head.dumped import gradient_fit, zeroed_rows
from attn_diag.head.output_fit import TOLERANCE
from attn_diag.reference import format_of
from attn_diag.results.wording import plural

# How the note begins of an output that does not fit q, k and v.
MISFIT = " does not agree with attention on q, k and v"
# So many times what is expected of a well-rounded kernel's dQ shows another dO, or a wrong backward: sqrt(2) times the
# most that a coarse kernel leaves. One of a real run (scores, sums and O in BF16, before its failure) leaves 11.3 times
# that, the published one of arXiv 2510.04212 on repeated maxima 9.5, others that round all they store to 16 bits 7.
_BEYOND = 16.0


def lost_rows(capture: Capture) -> list[str]:
    """A note that rows of O are zero where attention makes none so; no note where there are none."""
    if "o" not in capture.tensors or not (found := zeroed_rows(capture, torch.device("cpu"))):
        return []
    item, head, rows, tried = found[0]
    named = ", ".join(map(str, rows[:4])) + (", …" if len(rows) > 4 else "")
    where = f"head {head}" + (f" of batch item {item}" if capture.batch > 1 else "")
    more = f"; so are rows of {plural(len(found) - 1, 'other head')}" if len(found) > 1 else ""
    return [
        f"O{MISFIT}: {'row' if len(rows) == 1 else 'rows'} {named} of {where} {'is' if len(rows) == 1 else 'are'} zero "
        f"in every element ({len(rows)} of {plural(tried, 'row')} of zeros that were tried{more}): not written, or "
        "padding that no mask states?"
    ]


def of_gradient(capture: Capture) -> list[str]:
    """What is said of dO: dQ is made of it; the other gradients and O are not looked at."""
    if "do" not in capture.tensors:
        return []
    if "dq" not in capture.tensors:
        return ["dO is held against nothing: there is no dQ to check it with"]
    if not covers(format_of(capture.tensors["q"].dtype)) or capture.metadata.declared is not None:
        return ["dO is held against nothing: that is done of kernels in 16 bits alone"]
    if (found := gradient_fit(capture, torch.device("cpu"))) is None:
        return ["dO is held against nothing: no row tells (NaN, Inf, or a dQ that is 0 whatever dO is)"]
    off, expected = found
    if _BEYOND * expected >= 1:  # another dO is no further off than that
        return [f"dO is held against nothing: rounding is expected to leave {expected:.2g} of dQ"]
    if off <= max(TOLERANCE, _BEYOND * expected):
        return [f"dQ is within {off:.2g} of what dO makes of it, where rounding is expected to leave {expected:.2g}"]
    return [
        f"dQ{MISFIT} with dO (off by {off:.2g}): dO of another step, call or layout, dQ of another q (before RoPE, or "
        "a factor), or a wrong backward?"
    ]
