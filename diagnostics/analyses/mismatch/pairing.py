"""Which sequence of one run is which of the other, and which of their tokens are the same."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from attn_diag.analyses.mismatch.rows import RunRows, head_rows
from attn_diag.analyses.mismatch.tokens import TokenRun, TokenSequence

# v of the first layer follows from the token alone. Of one token two runs differ by a few per cent, by a tenth where
# weights are quantised to four bits; two tokens by 140 %.
SAME_TOKEN = 0.5
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
    """SequencePair the sequences by their tokens.

    Args:
        train: One run.
        rollout: The other.

    Returns:
        The pairs, and in sentences what has no counterpart.
    """
    tried = []
    for i, a in enumerate(train.sequences):
        for j, b in enumerate(rollout.sequences):
            if (found := _aligned(a, b)) is not None:
                same_place = a.parts[0].item == b.parts[0].item
                tried.append((found[1], same_place, -i, -j, found))
    used: tuple[set[int], set[int]] = (set(), set())
    result, notes = [], []
    for _, _, i, j, (shift, count) in sorted(tried, reverse=True):
        if -i in used[0] or -j in used[1]:
            continue
        used[0].add(-i)
        used[1].add(-j)
        a, b = train.sequences[-i], rollout.sequences[-j]
        shifts = (max(-shift, 0), max(shift, 0))
        length = max(shifts) + count
        result.append(SequencePair(a, b, shifts, length))
        overlap = min(a.length + shifts[0], b.length + shifts[1]) - max(shifts)
        if count < overlap:
            notes.append(
                f"One sequence has the same tokens only up to number {length}: what comes after is not compared "
                f"({overlap - count} tokens)."
            )
    for name, run, taken in (("train", train, used[0]), ("rollout", rollout, used[1])):
        if left := len(run.sequences) - len(taken):
            notes.append(
                f"{left} of {len(run.sequences)} sequences of {name} have no counterpart with the same tokens."
            )
    return result, notes


def _aligned(a: TokenSequence, b: TokenSequence) -> tuple[int, int] | None:
    """What is added to b's numbers to have a's, and how many tokens from there on are the same; None: too few."""
    one, other = a.values, b.values
    heads = math.gcd(one.shape[1], other.shape[1])
    if one.shape[2] != other.shape[2]:
        return None
    one, other = (v[:, :: v.shape[1] // heads].flatten(1) for v in (one, other))
    best: tuple[int, int] | None = None
    for shift in _shifts(one, other):
        x, y = one[max(shift, 0) :], other[max(-shift, 0) :]
        count = min(len(x), len(y))
        away = (x[:count] - y[:count]).norm(dim=1)
        other_token = away > SAME_TOKEN * x[:count].norm(dim=1)
        same = int(other_token.int().argmax()) if bool(other_token.any()) else count
        if same and (best is None or same > best[1]):
            best = shift, same
    # A token or two are the same by chance.
    return best if best is not None and best[1] >= min(4, len(one), len(other)) else None


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
