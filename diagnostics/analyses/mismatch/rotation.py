"""Whether q and k of one run are those of the other, rotated as RoPE rotates a token at another position, or otherwise.

RoPE turns feature pair i of the token at position p by p theta_i, theta_0 = 1 and falling with i (Su et al.,
"RoFormer", arXiv 2104.09864). A position that is off by n turns it by n theta_i more: pair 0 by n radians
whatever the base, which tells n, and the other pairs by n times something that falls from 1 to 0.

Angles in a lower precision, another base or other frequencies turn each pair of a token by some angle, the same in all
heads. Rounding changes a pair's length as much as its direction: such angles take at most half of that away, and of
pairs that have nothing to do with each other less than 0.8.
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


@dataclass(frozen=True)
class OtherAngles:
    """q or k of the second run are those of the first, each pair of a token turned by some angle."""

    which: str
    """q or k."""
    pair: int
    """The pair that is turned most, from 0."""
    size: float
    """Its angles' root mean square over tokens, in radians."""
    explained: float
    """The part of the squared difference that the angles take away."""


def other_angles(heads: Both, unit: float) -> list[OtherAngles]:
    """Other angles of q, and of k, that explain how far they are apart; empty where there are none.

    Args:
        heads: The rows of both runs.
        unit: The largest relative error of one rounding.
    """
    found = []
    for which in "qk":
        rows = [(number, a.tokens, getattr(a, which), getattr(b, which)) for number, a, b in heads]
        apart = sum(float((b - a).square().sum()) for _, _, a, b in rows)
        if apart > unit**2 * sum(float(a.square().sum()) for _, _, a, _ in rows):
            fits = [_turned(which, rows, apart, *layout) for layout in _layouts(rows[0][2].shape[1])]
            found += [max(fits, key=lambda fit: fit.explained)] if fits else []
    return [one for one in found if one.explained >= _EXPLAINS]


def _turned(which: str, rows: _Rows, apart: float, width: int, interleaved: bool) -> OtherAngles:
    pairs = [(_pairs(a[:, :width], interleaved), _pairs(b[:, :width], interleaved)) for _, _, a, b in rows]
    sums: dict[tuple[int, int], Tensor] = {}
    places = [[(number, token) for token in tokens.tolist()] for number, tokens, _, _ in rows]
    for own, (one, other) in zip(places, pairs, strict=True):
        for place, entry in zip(own, one.conj() * other, strict=True):
            sums[place] = sums.get(place, 0) + entry
    left = sum(float((b[:, width:] - a[:, width:]).square().sum()) for _, _, a, b in rows)
    for own, (one, other) in zip(places, pairs, strict=True):
        angles = torch.stack([sums[place] for place in own]).angle()
        left += float((other * torch.polar(torch.ones_like(angles), -angles) - one).abs().square().sum())
    by_token = torch.stack(list(sums.values()))
    # A pair that is next to nothing has any angle, and weighs as little.
    sizes = ((by_token.abs() * by_token.angle().square()).sum(0) / by_token.abs().sum(0)).sqrt()
    return OtherAngles(which, int(sizes.argmax()), float(sizes.max()), 1 - left / apart)


def _real(z: Tensor, interleaved: bool) -> Tensor:
    if interleaved:
        return torch.stack([z.real, z.imag], 2).flatten(1)
    return torch.cat([z.real, z.imag], 1)
