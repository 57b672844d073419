"""Sums of O and delta, observed and as recipes make them: whether an observed mean is the recipe's own."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from attn_diag.head.compared import MOST_SCORES
from attn_diag.head.counterfactual import Counterfactuals
from attn_diag.head.cut_off import makes, ways
from attn_diag.head.declared import DRAWS
from attn_diag.head.head_stack import HeadStack
from attn_diag.head.key_by_key import in_fp32, with_row_sum_in_fp32
from attn_diag.head.measurement import CutOff
from attn_diag.head.stacks import numbers
from attn_diag.head.streaming import ObservedHead, StreamedHead
from attn_diag.head.truncated_inputs import TruncatedInputs
from attn_diag.reference.rounding import FP32
from attn_diag.statistics.means import SignedErrors

Sums = dict[str, npt.NDArray[np.float64]]
# Standard errors: of healthy heads one in a thousand has such a mean.
_CLEAR = 3.0
# An O in fp32 that is so much nearer, squared, than a kernel's that casts P is one of a kernel that does not.
_FINER = 1 / 16
# Of which a row sum is made: one number, or a vector of the CPU's.
_LANES = (1, 4, 8, 16)


def mean_sums(stack: HeadStack) -> list[Sums]:
    """Sums of O, of O away from zero and of delta of each head: observed, and of every run, [1 + N] each by test.

    Runs are of what is declared and draws of it, else of a well-rounded kernel, or of a format without one of operands
    rounded to nearest, where O's errors follow these; a head without any has no sums.
    """
    runs = [_runs(*one) for one in zip(stack.passes, stack.seen, stack.indices, strict=True)]
    found: list[Sums] = [{} for _ in runs]
    if known := [h for h, of_head in enumerate(runs) if of_head]:
        part = stack if len(known) == len(runs) else stack.only(known)
        for h, sums in zip(known, _sums(part, [runs[h] for h in known]), strict=True):
            found[h] = sums
    return found


def cut_off(passed: StreamedHead, seen: ObservedHead, rows: Tensor, away: SignedErrors | None) -> CutOff:
    """What of a kernel's products was cut off to TF32, by O's errors: operands of inputs in fp32, else P.

    Args:
        passed: The head.
        seen: What is measured.
        rows: Indices of the rows that count.
        away: O's errors beyond correct rounding, away from zero: P is asked for where these are clearly negative.
    """
    other, out, truth = passed.counterfactuals, seen.outputs.get("o"), passed.truth.reference.out
    if out is None or passed.declared(seen) is not None:
        return ""
    if isinstance(other, TruncatedInputs):
        return "operands" if other.is_cut_off(out, truth, rows) else ""
    if away is None or not away.total.size:  # without rows of its own, as a copy of another sequence
        return ""
    clear = away.total.sum() < -_CLEAR * np.sqrt(len(rows)) * away.total.std()
    if not clear or other.scores > MOST_SCORES:
        return ""
    made = (other.outputs(way)["o"][rows] for way in ways("o", alpha_exact=other.alpha_exact))
    return "probs" if any(makes(one, out[rows], truth[rows], seen.formats["o"]) for one in made) else ""


def _runs(passed: StreamedHead, seen: ObservedHead, rows: Tensor) -> list[dict[str, Tensor]]:
    declared, other, out = passed.declared(seen), passed.counterfactuals, seen.outputs.get("o")
    if declared is not None:
        return [declared.outputs(), *(declared.draw(n) for n in range(DRAWS))]
    if isinstance(other, Counterfactuals):
        usual: dict[str, Tensor] | None = other.outputs()
    else:
        usual = None if out is None else other.to_nearest(out, passed.truth.reference.out, rows)
    # What is its own measure (``TruncatedInputs.to_nearest``) has its sums in it.
    own = usual is not None and usual["o"] is out
    summed = None if own else _by_sums_in_fp32(passed, seen, rows, usual)
    return [one for one in (summed or usual,) if one is not None]


def _by_sums_in_fp32(
    passed: StreamedHead, seen: ObservedHead, rows: Tensor, usual: dict[str, Tensor] | None
) -> dict[str, Tensor] | None:
    """What sums in fp32 make of O and delta, beside factors in fp32; None where O is not in fp32, or no mean shows.

    Args:
        passed, seen, rows: As of ``cut_off``.
        usual: What O is held against otherwise: a recipe's outputs, which cast P, or those of factors in fp32.
    """
    head, truth, out = passed.truth.head, passed.truth.reference.out, seen.outputs.get("o")
    if out is None or seen.formats["o"] != FP32 or len(head.q) * len(head.k) > MOST_SCORES or len(rows) < 2:
        return None
    error, casts = (out - truth)[rows], isinstance(passed.counterfactuals, Counterfactuals)
    of_usual = torch.zeros_like(truth) if usual is None or casts else usual["o"] - truth
    if (
        usual is not None
        and casts
        and float(error.square().sum()) > _FINER * float((usual["o"] - truth)[rows].square().sum())
    ):
        return None
    by_row = torch.stack([error.sum(1), (error * truth[rows].sign()).sum(1)])
    if not bool((by_row.sum(1).abs() > _CLEAR * math.sqrt(len(rows)) * by_row.std(1)).any()):
        return None
    # P V key by key, or the row sum: whichever is nearer.
    every = (in_fp32(head), *(with_row_sum_in_fp32(head, lanes) for lanes in _LANES))
    errors = [one - truth + of_usual for one in every]
    made = min(errors, key=lambda one: float((error - one[rows]).square().sum()))
    found = {"o": truth + made}
    delta = passed.truth.reference.delta
    return found if head.do is None or delta is None else found | {"delta": delta + (head.do * made).sum(1)}


def _sums(stack: HeadStack, runs: Sequence[Sequence[dict[str, Tensor]]]) -> list[Sums]:
    """Of heads with as many runs each."""
    count, out, found = len(runs[0]), stack.output("o"), list[Tensor]()

    def add(observed: Tensor, name: str, sign: Tensor | None = None) -> None:
        every = (observed if i < 0 else stack.chosen([of_head[i][name] for of_head in runs]) for i in range(-1, count))
        found.extend((x if sign is None else x * sign).flatten(1).sum(1) for x in every)

    if out is not None:
        add(out, "o")
        add(out, "o", stack.of(lambda passed: passed.truth.reference.out).sign())
    if stack.errors is not None and "delta" in runs[0][0]:
        add(stack.chosen([e.delta for e in stack.errors]), "delta")
    tests: list[tuple[str, ...]] = [("o_excess",), ("o_away_excess",)] if out is not None else []
    tests += [("delta", "delta_excess")]
    by_head = np.array(numbers(*found)).reshape(len(runs), -1, 1 + count) if found else np.zeros((len(runs), 0, 0))
    return [{name: sums for names, sums in zip(tests, of_head, strict=False) for name in names} for of_head in by_head]
