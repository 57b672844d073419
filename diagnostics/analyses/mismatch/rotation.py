"""Whether q and k of one run are those of the other, rotated as RoPE rotates a token at another position.

RoPE turns feature pair i of the token at position p by p theta_i, theta_0 = 1 and falling with i (Su et al.,
"RoFormer", arXiv 2104.09864). A position that is off by n turns it by n theta_i more: pair 0 by n radians
whatever the base, which tells n, and the other pairs by n times something that falls from 1 to 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attn_diag.analyses.mismatch.rows import RunRows

# The part of the squared difference of q or k that the rotation must take away.
_EXPLAINS = 0.9
# Pair 0 tells n modulo 2 pi.
_FARTHEST = 3
_NEAR = 0.15
_FEWEST = 2
_ROUNDING = 2.0**-5


@dataclass(frozen=True)
class PositionShift:
    """Rows of q or k of the second run that are those of the first at another position."""

    which: str
    """q or k."""
    positions: int
    """n: how much later the second run's position is."""
    tokens: Tensor
    """Of which tokens, by sequence: int64 [rows, 2], sequence and token."""
    rows: int
    """Of so many rows in all."""
    angles: Tensor
    """By feature pair, [r / 2]."""
    interleaved: bool
    """Whether a pair is (2i, 2i + 1), or (i, i + r / 2)."""
    explained: float
    """The part of these rows' squared difference that it takes away."""

    def undone(self, x: Tensor) -> Tensor:
        """x [n, D] at the first run's position."""
        r = 2 * len(self.angles)
        back = torch.polar(torch.ones_like(self.angles), -self.angles)
        turned = _real(_pairs(x[:, :r], self.interleaved) * back, self.interleaved)
        return torch.cat([turned, x[:, r:]], 1)


Both = Sequence[tuple[int, RunRows, RunRows]]
"""Of some heads, the sequence and the rows of both runs."""


def find_rotations(heads: Both) -> list[PositionShift]:
    """The rotations of q, and of k, of a layer; empty where there is none."""
    found = []
    for which in "qk":
        one = [(number, a.tokens, getattr(a, which), getattr(b, which)) for number, a, b in heads]
        for positions in _candidates(one):
            if (rotation := _fit(which, one, positions)) is not None:
                found.append(rotation)
                break
    return found


_Rows = Sequence[tuple[int, Tensor, Tensor, Tensor]]


def _candidates(rows: _Rows) -> list[int]:
    if all(float((b - a).norm()) <= _ROUNDING * float(a.norm()) for _, _, a, b in rows):
        return []
    return [n for n in range(-_FARTHEST, _FARTHEST + 1) if n]


def _layouts(features: int) -> list[tuple[int, bool]]:
    rotated = [features, features // 2, features // 4]
    return [(r, interleaved) for r in rotated if r >= 4 and r % 2 == 0 for interleaved in (False, True)]


def _fit(which: str, rows: _Rows, positions: int) -> PositionShift | None:
    best: PositionShift | None = None
    for width, interleaved in _layouts(rows[0][2].shape[1]):
        sums: dict[tuple[int, int], Tensor] = {}
        for number, tokens, a, b in rows:
            turned = _pairs(a[:, :width], interleaved).conj() * _pairs(b[:, :width], interleaved)
            for token, entry in zip(tokens.tolist(), turned, strict=True):
                sums[number, token] = sums.get((number, token), 0) + entry
        places = torch.tensor(list(sums))
        by_token = torch.stack(list(sums.values())).cpu()
        off = torch.remainder(by_token[:, 0].angle() - positions + math.pi, 2 * math.pi) - math.pi
        picked = off.abs() < _NEAR
        if int(picked.sum()) < _FEWEST:
            continue
        angles = by_token[picked].sum(0).angle()
        angles = torch.where(angles * positions < -0.2, angles + math.copysign(2 * math.pi, positions), angles)
        relative = angles / positions
        if (
            bool((relative.diff() > 0.05).any())
            or bool((relative < -0.05).any())
            or abs(float(relative[0]) - 1) > _NEAR
        ):
            continue
        chosen = PositionShift(which, positions, places[picked], len(places), angles, interleaved, 0.0)
        explained = _explained(chosen, rows)
        if explained >= _EXPLAINS and (best is None or explained > best.explained):
            best = replace(chosen, explained=explained)
    return best


def _explained(rotation: PositionShift, rows: _Rows) -> float:
    before = after = 0.0
    for number, tokens, a, b in rows:
        at = rows_in(rotation, number, tokens)
        moved = replace(rotation, angles=rotation.angles.to(b.device)).undone(b[at])
        before += float((b[at] - a[at]).square().sum())
        after += float((moved - a[at]).square().sum())
    return 1 - after / before if before else 0.0


def rows_in(rotation: PositionShift, sequence: int, tokens: Tensor) -> Tensor:
    """Which of a sequence's tokens are rotated, indices."""
    named = rotation.tokens[rotation.tokens[:, 0] == sequence, 1].to(tokens.device)
    return torch.isin(tokens, named).nonzero()[:, 0]


def without(rotations: Sequence[PositionShift], sequence: int, b: RunRows) -> RunRows:
    """The second run's rows with the rotations undone."""
    for rotation in rotations:
        turning = replace(rotation, angles=rotation.angles.to(b.q.device))
        if rotation.which == "q":
            at = rows_in(rotation, sequence, b.tokens)
            q = b.q.clone()
            q[at] = turning.undone(q[at])
            b = replace(b, q=q)
            continue
        named = rotation.tokens[rotation.tokens[:, 0] == sequence, 1].to(b.q.device)
        blocks = []
        for rows, k, v in b.blocks:
            moved = k.clone()
            moved[named] = turning.undone(moved[named])
            blocks.append((rows, moved, v))
        b = replace(b, blocks=tuple(blocks))
    return b


def _pairs(x: Tensor, interleaved: bool) -> Tensor:
    half = x.shape[1] // 2
    parts = (x[:, 0::2], x[:, 1::2]) if interleaved else (x[:, :half], x[:, half:])
    return torch.complex(*(part.contiguous() for part in parts))


def _real(z: Tensor, interleaved: bool) -> Tensor:
    if interleaved:
        return torch.stack([z.real, z.imag], 2).flatten(1)
    return torch.cat([z.real, z.imag], 1)
