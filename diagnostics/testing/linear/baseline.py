"""What ``check_linear`` keeps of a function in a baseline, and its errors' sizes beside a well-rounded kernel's."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from attn_diag.captures.linear import LinearCapture
from attn_diag.reference import format_of
from attn_diag.results.baseline import BaselineCase, BaselineEntry, BaselineSize, SequenceMean
from attn_diag.results.check import CheckedCase
from attn_diag.results.linear import LinearQuantity
from attn_diag.testing.regression.baseline import device_words, versions
from attn_diag.testing.regression.figures import ErrorSize, Measured

_NORMAL_95 = 1.96
# Groups of 16 steps that an interval of a factor is made of, at least, but one.
_FREEDOM = 7.0


def sizes_of(gravest: Mapping[str, LinearQuantity], capture: LinearCapture) -> dict[str, ErrorSize]:
    """Errors beside the yardstick's, for growth since a baseline.

    Args:
        gravest: By quantity the worst head; its factor's interval tells what chance is.
        capture: What was judged.
    """
    found = {}
    for name, q in gravest.items():
        error, yardstick = q.relative_error, q.relative_error_well_rounded
        if not error or not yardstick or q.factor_ci95 is None:
            continue
        low, high = q.factor_ci95
        cast = 2.0 ** -(format_of(capture.tensors["q"].dtype).precision + 1) / math.sqrt(3)
        spread = math.log(high / low) / (2 * _NORMAL_95) if low > 0 else None
        ratio = math.log(math.hypot(error, cast / 2) / math.hypot(yardstick, cast / 2))
        found[name] = ErrorSize(error, yardstick, cast / 2, SequenceMean(ratio, spread, _FREEDOM))
    return found


def entry_of(
    subject: str,
    device: torch.device,
    measured: Sequence[tuple[CheckedCase, Measured | None]],
    *,
    seed: int,
    exact: bool,
) -> BaselineEntry:
    """What is accepted of every case that could be measured.

    Args:
        subject: The function's name and what it computes.
        device: Where it ran.
        measured: The figures of its cases.
        seed: Of the inputs.
        exact: Whether equal bits are demanded of whoever compares.
    """
    cases = {}
    for c, figures in measured:
        if figures is not None:
            sizes = {n: BaselineSize(s.error, s.yardstick, s.log_ratio) for n, s in figures.sizes.items()}
            cases[c.name] = BaselineCase(c.inputs_fingerprint, c.fingerprint, c.outputs, c.deterministic, {}, sizes)
    return BaselineEntry(
        subject=subject, device=device_words(device), versions=versions(), seed=seed, exact=exact, recipe=None,
        agreement=None, cases=cases,
    )  # fmt: skip
