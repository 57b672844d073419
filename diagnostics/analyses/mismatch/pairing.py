"""Which sequence of one run is which of the other, and which of their tokens are the same."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from attn_diag.analyses.mismatch.rows import RunRows, head_rows
from attn_diag.analyses.mismatch.tokens import TokenRun, TokenSequence, unit_rows

# v of the first layer follows from the token alone. Of one token two runs' directions differ by a few per cent, by a
# tenth where weights are quantised to four bits; of two tokens by 140 %. v's length is the norm's before it.
SAME_TOKEN = 0.5
# In one run v of a token that comes again differs by what rounding makes in another batch.
_AGAIN = 0.05
# Sequences in which so many tokens come again, and so many are different ones, do so at the same places by no chance.
_TELLING = 4
# Of longer sequences the beginning tells.
_LOOKED_AT = 2048
# So many tokens from the beginning decide where one sequence lies in the other.
_HEAD = 32


@dataclass(frozen=True)
class SequencePair:
    """A sequence that both runs have."""

    train: TokenSequence
    """In the one run."""
    rollout: TokenSequence
    """In the other."""
    shifts: tuple[int, int]
    """What is added to the numbers of the tokens of each, so that they are the same."""
    length: int
    """T: one more than the number of the last token that is the same."""
    left: int
    """The tokens that both have from the first on that is another: they are not compared."""

    def rows(
        self, runs: tuple[TokenRun, TokenRun], layer: int, head: int, device: torch.device
    ) -> tuple[RunRows, RunRows] | None:
        """The rows of a head that both runs have; None where there is none."""
        both = []
        for run, sequence, shift in zip(runs, (self.train, self.rollout), self.shifts, strict=True):
            found = head_rows(run, sequence, layer, head, shift=shift, length=self.length, device=device)
            if found is None:
                return None
            both.append(found)
        a, b = (_last_of_each(found, self.length) for found in both)
        shared = (a >= 0) & (b >= 0)
        if not bool(shared.any()):
            return None
        return both[0].select(a[shared]), both[1].select(b[shared])


def _last_of_each(rows: RunRows, length: int) -> Tensor:
    """Of every token its newest row, -1 without one, int64 [T]."""
    found = torch.full((length,), -1, device=rows.tokens.device)
    inside = (rows.tokens >= 0) & (rows.tokens < length)
    found[rows.tokens[inside]] = torch.arange(len(rows.tokens), device=found.device)[inside]
    return found


def pairs(train: TokenRun, rollout: TokenRun) -> tuple[list[SequencePair], list[str]]:
    """Pair the sequences by their tokens.

    Args:
        train: One run.
        rollout: The other.

    Returns:
        The pairs, and in sentences what has no counterpart.
    """
    tried, notes = _tried(train, rollout, _aligned), []
    if not tried and (tried := _tried(train, rollout, _repeating_alike)):
        notes.append(
            "No v of the first layer, by which tokens are told, agrees in the two runs: sequences are paired by the "
            "places at which their tokens come again, which are the same."
        )
    used: tuple[set[int], set[int]] = (set(), set())
    result = []
    for _, _, i, j, (shift, count) in sorted(tried, reverse=True):
        if -i in used[0] or -j in used[1]:
            continue
        used[0].add(-i)
        used[1].add(-j)
        a, b = train.sequences[-i], rollout.sequences[-j]
        shifts = (max(-shift, 0), max(shift, 0))
        length = max(shifts) + count
        left = min(a.length + shifts[0], b.length + shifts[1]) - max(shifts) - count
        result.append(SequencePair(a, b, shifts, length, left))
        if left > 0:
            again, behind = _again(a, b, shifts, length), left - 1
            place = ""
            if again > behind / 2:
                place = (
                    f", another v there and {again} of {behind} the same again after it (another token, or an entry of "
                    "a cache that was written over)"
                )
            only = "" if place else "only "
            notes.append(
                f"One sequence has the same tokens {only}up to number {length}{place}: what comes after is not "
                f"compared ({left} tokens)."
            )
    for name, run, taken in (("train", train, used[0]), ("rollout", rollout, used[1])):
        if left := len(run.sequences) - len(taken):
            notes.append(
                f"{left} of {len(run.sequences)} sequences of {name} have no counterpart of their own with the same "
                "tokens."
            )
    return result, notes


def _tried(
    train: TokenRun, rollout: TokenRun, align: Callable[[TokenSequence, TokenSequence], tuple[int, int] | None]
) -> list[tuple[int, bool, int, int, tuple[int, int]]]:
    """The pairs of sequences that can be laid upon each other: how many tokens are the same, and which, for sorting."""
    tried = []
    for i, a in enumerate(train.sequences):
        for j, b in enumerate(rollout.sequences):
            if (found := align(a, b)) is not None:
                same_place = a.parts[0].item == b.parts[0].item
                tried.append((found[1], same_place, -i, -j, found))
    return tried


def _aligned(a: TokenSequence, b: TokenSequence) -> tuple[int, int] | None:
    """What is added to b's numbers to have a's, and how many tokens from there on are the same; None: too few."""
    one, other = a.values, b.values
    heads = math.gcd(one.shape[1], other.shape[1])
    if one.shape[2] != other.shape[2]:
        return None
    one, other = (_directions(v[:, :: v.shape[1] // heads]) for v in (one, other))
    best: tuple[int, int] | None = None
    for shift in _shifts(one, other):
        x, y = one[max(shift, 0) :], other[max(-shift, 0) :]
        count = min(len(x), len(y))
        other_token = (x[:count] - y[:count]).norm(dim=1) > SAME_TOKEN
        same = int(other_token.int().argmax()) if bool(other_token.any()) else count
        if same and (best is None or same > best[1]):
            best = shift, same
    # A token or two are the same by chance.
    return best if best is not None and best[1] >= min(4, len(one), len(other)) else None


def _again(a: TokenSequence, b: TokenSequence, shifts: tuple[int, int], length: int) -> int:
    """How many tokens behind the first one that is another are the same."""
    heads = math.gcd(a.values.shape[1], b.values.shape[1])
    one, other = (
        _directions(s.values[length + 1 - shift :, :: s.values.shape[1] // heads])
        for s, shift in ((a, shifts[0]), (b, shifts[1]))
    )
    count = min(len(one), len(other))
    return int(((one[:count] - other[:count]).norm(dim=1) <= SAME_TOKEN).sum())


def _directions(values: Tensor) -> Tensor:
    """Of every token its values, [T, N], divided by their norm."""
    return unit_rows(values.flatten(1))


def _repeating_alike(a: TokenSequence, b: TokenSequence) -> tuple[int, int] | None:
    """As ``_aligned`` of two sequences that begin together, where tokens come again at the same places in both."""
    count = min(a.length, b.length, _LOOKED_AT)
    one, other = (_first_of_each(s.values[:count]) for s in (a, b))
    different = len(set(one.tolist()))
    alike = torch.equal(one, other) and different >= _TELLING and count - different >= _TELLING
    return (0, min(a.length, b.length)) if alike else None


def _first_of_each(values: Tensor) -> Tensor:
    """For every token the first one with its values, int64 [T]."""
    directions = _directions(values).float()
    return (torch.cdist(directions, directions) < _AGAIN).int().argmax(1)


def _shifts(one: Tensor, other: Tensor) -> list[int]:
    """Where the beginning of either may lie in the other, 0 first."""
    found = [0]
    for x, y, sign in ((one, other, 1), (other, one, -1)):
        head = y[:_HEAD]
        windows = len(x) - len(head) + 1
        if windows < 2:
            continue
        away = torch.stack([(x[i : i + windows] - head[i]).square().sum(1) for i in range(len(head))]).sum(0)
        place = int(away.argmin())
        if place:
            found.append(sign * place)
    return found
