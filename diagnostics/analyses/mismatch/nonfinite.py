"""NaN and infinity in the rows of a layer: whose they are, and which rows are left to compare."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor

from attn_diag.analyses.mismatch.rows import RunRows
from attn_diag.results.mismatch import MismatchCause, RunName
from attn_diag.results.wording import plural

_RUNS: tuple[RunName, RunName] = ("train", "rollout")


def finite_rows(a: RunRows, b: RunRows) -> Tensor:
    """The rows whose q, k, v and O are finite in both runs, as indices."""
    whole = [_finite(rows, name) for rows in (a, b) for name in "qkvo"]
    return torch.stack(whole).all(0).nonzero()[:, 0]


def not_finite(
    layer: int, heads: Sequence[tuple[int, tuple[RunRows, RunRows]]], before: Collection[MismatchCause]
) -> Iterator[MismatchCause]:
    """The causes of NaN and infinity in a layer.

    Args:
        layer: Its number.
        heads: Index and rows, of train and rollout, of every head of every sequence.
        before: What was found so of the layers before it: of the same run, NaN came in from there.
    """
    for side, run in enumerate(_RUNS):
        of_run = [(head, both[side]) for head, both in heads]
        total = plural(sum(len(rows.tokens) for _, rows in of_run), "row")
        came = {name: sum(int((~_finite(rows, name)).sum()) for _, rows in of_run) for name in "qk"}
        if any(came.values()) and not any(cause.side == run for cause in before):
            # Rows of k are marked where those of v are not finite, too.
            names = " and ".join(words for name, words in (("q", "q"), ("k", "k or v")) if came[name])
            words = f"{names} of {run} is NaN or infinite in {max(came.values())} of {total} of its heads"
            told = f"{words}: that comes from before attention"
            yield MismatchCause(layer, "unnamed-input", "unnamed", run, told, "fitted", None, "", "projection")
        made = [(head, int(t)) for head, rows in of_run for t in rows.tokens[_made(rows)]]
        if made:
            head, token = min(made, key=lambda one: one[1])
            words = (
                f"{run}'s O is NaN or infinite in {len(made)} of {total} of its heads, first at token {token} in head "
                f"{head}, where q and all keys and values that it sees are finite"
            )
            yield MismatchCause(layer, "unnamed-o", "unnamed", run, words, "fitted", None, "")


def _finite(rows: RunRows, name: str) -> Tensor:
    found: Tensor = getattr(rows, name).isfinite().all(1)
    return found


def _made(rows: RunRows) -> Tensor:
    """Rows whose O is not finite though all that it is made of is, bool [n]."""
    visible = rows.bias > -torch.inf
    sound = _finite(rows, "q") & visible.any(1) & ~(visible & ~rows.known).any(1)
    return sound & ~_finite(rows, "o")
