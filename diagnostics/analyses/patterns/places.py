"""Which rows, features or elements are wrong, neighbours together, and what they hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attn_diag.analyses.patterns.evidence import LEAVES, Evidence, row_limit
from attn_diag.analyses.patterns.lines import Group, Lines
from attn_diag.analyses.patterns.numbers import in_words, intervals
from attn_diag.head.quality import LOSSY
from attn_diag.reference import ulp
from attn_diag.results.wording import number, plural, singular

# So many runs of rows are told one after the other.
_RUNS = 7
_ELEMENTS = 8
# l = 1 / P of the top key.
_ONE_KEY = 1.1
_IN_ONE_ROW = 3
_NEARLY_ALL = 0.85
# Rows between wrong ones that are right by chance (next to no gradient of their own) join them up to this part.
_JOINED = 0.1


@dataclass(frozen=True)
class Place:
    """A part of the tensor that is wrong."""

    rows: Tensor
    """Indices, ascending."""
    features: Tensor | None
    """Indices; None for all."""
    groups: tuple[Group, ...]
    """How; of rows, or of features where those are given."""


def find_elements(evidence: Evidence) -> str | None:
    """In words, where a few elements are all that is wrong."""
    usable = evidence.usable.nonzero()[:, 0]
    noise = torch.maximum(evidence.variance, ulp(evidence.truth, evidence.fmt).square() / 12)
    over = evidence.error.square() / noise.clamp(min=1e-300)
    bad = (over > (3 * LEAVES) ** 2) | ~evidence.observed.isfinite()
    bad[~evidence.usable] = False
    places = bad.nonzero().tolist()
    if not 0 < len(places) <= _ELEMENTS or len(places) > bad.numel() / 16 or evidence.truth.shape[1] < 2:
        return None
    by_row = bad.sum(1)
    if int(by_row.max()) >= _IN_ONE_ROW and bool(evidence.observed.isfinite().all()):
        return None  # a row that is wrong, of which some elements show it
    rest = evidence.error.masked_fill(bad, 0.0)[usable].square().sum(1)
    if bool((rest > row_limit(evidence.truth.shape[1]) * evidence.noise[usable]).any()):
        return None
    named = [
        f"{evidence.unit[:-1]} {row}, feature {column} is {number(float(evidence.observed[row, column]))} "
        f"instead of {number(float(evidence.truth[row, column]))}"
        for row, column in places[:3]
    ]
    more = f" and {plural(len(places) - 3, 'element')} more" if len(places) > 3 else ""
    return "; ".join(named) + more


def find_place(evidence: Evidence) -> Place:
    """Where it is wrong: features of some rows where those are all that is wrong there, else rows."""
    rows = (evidence.outlying & evidence.usable).nonzero()[:, 0]
    if not len(rows):
        rows = evidence.usable.nonzero()[:, 0]
    if (columns := _columns(evidence, rows)) is not None:
        block = Lines(
            evidence.observed[rows].T, evidence.truth[rows].T, evidence.variance[rows].sum(0).clamp(min=1e-300),
            columns, "features",
        )  # fmt: skip
        return Place(rows, columns, tuple(block.groups()))
    lines = Lines(
        evidence.observed, evidence.truth, evidence.noise, rows, evidence.unit, coarse=evidence.coarse,
        spacing=2.0**-evidence.fmt.precision,
        single=evidence.references[0].row_sum < _ONE_KEY if evidence.quantity == "o" else None,
    )  # fmt: skip
    return Place(rows, None, tuple(lines.groups()))


def _columns(evidence: Evidence, rows: Tensor) -> Tensor | None:
    """The features that are wrong in these rows, where few are and all others are right."""
    width = evidence.truth.shape[1]
    if width < 4:
        return None
    noise = torch.maximum(evidence.variance, ulp(evidence.truth, evidence.fmt).square() / 12)[rows]
    error = evidence.error[rows].square()
    over = error.sum(0) / noise.sum(0).clamp(min=1e-300)
    bad = evidence.features | (over > (1.5 * LEAVES) ** 2) | ~over.isfinite()
    good = ~bad
    if not bool(bad.any()) or int(bad.sum()) > width / 2:
        return None
    left = error[:, good].sum(1) / noise[:, good].sum(1).clamp(min=1e-300)
    if float(left.mean()) > LEAVES**2 or float((left > row_limit(width)).double().mean()) > 0.05:
        return None
    # One row's features differ by chance, a column's sum over many rows does not.
    apart = float(over[bad].nan_to_num(torch.inf).median() / over[good].max().clamp(min=0.1))
    if apart < 4 * (1 + 16 / len(rows)) or len(intervals(bad.nonzero()[:, 0].tolist())) > _RUNS:
        return None
    return bad.nonzero()[:, 0]


def in_sentence(evidence: Evidence, place: Place, groups: Sequence[Group]) -> str:
    """The place and what is there: "rows 0-63 are right; rows 64-127 are zero, as if never written"."""
    total = len(evidence.truth)
    if place.features is not None:
        where = (
            "" if len(place.rows) >= _NEARLY_ALL * int(evidence.usable.sum()) else f" of {_named(place.rows, evidence)}"
        )
        width = evidence.truth.shape[1]
        said = [f"{in_words(g.lines.tolist(), width, 'features')}{where} {_number(g)}" for g in groups]
        return "; ".join([*said, "all other features are right"])
    runs, silent = _runs(evidence, groups), set(neutral(evidence))
    periodic = any("every" in _named(g.lines, evidence) for g in groups)
    if len(runs) <= _RUNS and not periodic:
        said = []
        for first, last, g in runs:
            count = last - first + 1
            whole = "all " + evidence.unit if count == total > 1 else None
            subject = whole or (f"{evidence.unit} {first}-{last}" if count > 1 else f"{evidence.unit[:-1]} {first}")
            if g is None:
                verb = ("are", "do") if count > 1 else ("is", "does")
                right = _is_right(evidence, first, last)
                said.append(f"{subject} {verb[0]} right" if right else f"{subject} {verb[1]} not stand out")
            else:
                inside = int(((g.lines >= first) & (g.lines <= last)).sum())
                inside += sum(first <= row <= last for row in silent - set(g.lines.tolist()))
                some = f" ({inside} of {count})" if inside < count else ""
                said.append(f"{subject}{some} {_number(g, count)}")
        return "; ".join(said)
    said = []
    for g in groups:
        where = _named(g.lines, evidence)
        said.append(f"{where} {_number(g, 1 if where.startswith('every') else None)}")
    others = int(evidence.usable.sum()) - sum(len(g.lines) for g in groups)
    return "; ".join([*said, *(["nothing else stands out"] if others else [])])


def _is_right(evidence: Evidence, first: int, last: int) -> bool:
    """Whether a run of rows is as good as a well-rounded kernel's, and does not merely have no row that stands out."""
    kept = evidence.usable.clone()
    kept[:first] = kept[last + 1 :] = False
    return float(evidence.error[kept].square().sum()) <= LOSSY**2 * float(evidence.noise[kept].sum())


def _named(rows: Tensor, evidence: Evidence) -> str:
    return in_words(rows.tolist(), len(evidence.truth), evidence.unit, neutral(evidence))


def neutral(evidence: Evidence) -> list[int]:
    """Rows that cannot be told to be right: not usable, or true values within their noise."""
    return (~evidence.clear & ~evidence.outlying).nonzero()[:, 0].tolist()


def _number(group: Group, count: int | None = None) -> str:
    """The predicate in the singular, of a single line."""
    if (len(group.lines) if count is None else count) != 1:
        return group.predicate
    return singular(group.predicate)


def _runs(evidence: Evidence, groups: Sequence[Group]) -> list[tuple[int, int, Group | None]]:
    """Neighbouring rows of one group, first and last; None for what is right. Rows that cannot be judged join both."""
    owner = [-1] * len(evidence.truth)
    for i, group in enumerate(groups):
        for row in group.lines.tolist():
            owner[row] = i
    _fill(owner, set(neutral(evidence)))
    runs: list[list[int]] = []
    for row, i in enumerate(owner):
        if runs and runs[-1][2] == i:
            runs[-1][1] = row
        else:
            runs.append([row, row, i])
    while _join(runs):
        pass
    return [(first, last, None if i < 0 else groups[i]) for first, last, i in runs]


def _fill(owner: list[int], silent: set[int]) -> None:
    """Rows that cannot be told join their neighbours, and what is right where those differ; in place."""
    known = [row for row, i in enumerate(owner) if i >= 0 or row not in silent]
    for first, last in intervals(sorted(set(range(len(owner))) - set(known))):
        before = owner[first - 1] if first else None
        after = owner[last + 1] if last + 1 < len(owner) else None
        sides = [i for i in (before, after) if i is not None]
        owner[first : last + 1] = [min(sides, default=-1)] * (last - first + 1)


def _join(runs: list[list[int]]) -> bool:
    """Join the first runs of one group that few right rows separate, in place; False where there are none."""
    for k in range(1, len(runs) - 1):
        before, between, after = runs[k - 1 : k + 2]
        gap, sides = between[1] - between[0] + 1, [r[1] - r[0] + 1 for r in (before, after)]
        if between[2] < 0 <= before[2] == after[2] and gap <= 4 and gap <= _JOINED * sum(sides):
            runs[k - 1 : k + 2] = [[before[0], after[1], before[2]]]
            return True
    return False


def row_ranges(rows: Tensor) -> tuple[tuple[int, int], ...]:
    """Rows as inclusive ranges."""
    return intervals(rows.tolist())
