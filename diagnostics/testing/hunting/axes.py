"""The axes along which a capture is changed, their levels, and what failing levels have in common."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, product
from typing import Any

from attn_diag.results.hunt import Variant
from attn_diag.testing.hunting.inputs import CHANGES
from attn_diag.testing.hunting.layouts import LAYOUTS

Level = tuple[Any, ...]
"""What the fields of an axis are set to."""

FIELDS: dict[str, tuple[str, ...]] = {
    "head size": ("head_dim",),
    "group": ("group",),
    "mask": ("causal",),
    "length": ("rows", "keys"),
    "values": ("source", "values"),
    "layout": ("layout",),
    "dtype": ("dtype",),
    "batch": ("batch",),
    "key heads": ("key_heads",),
}
"""Axis -> the fields of a Variant that it sets, in the order in which they are tried."""

_HEAD_SIZES = range(8, 257, 8)
_GROUPS = (1, 2, 3, 4, 5, 6, 7, 8, 16)
# Around the multiples of 16, 32, 64 and 128, and of what tiles are made of; and few rows.
_LENGTHS = (
    1, 2, 3, 7, 8, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 80, 95, 96, 97, 112, 127, 128, 129, 160, 191, 192, 193, 200,
    255, 256, 257, 320, 383, 384, 385, 511, 512, 513,
)  # fmt: skip
_LONGER = (1023, 1024, 1025, 2049)
_UNEQUAL = (
    (1, 128), (1, 129), (16, 128), (64, 128), (63, 128), (65, 128), (128, 129), (127, 128), (100, 133), (128, 256),
    (129, 128), (128, 64), (128, 1), (133, 100), (200, 17),
)  # fmt: skip


def level_of(variant: Variant, axis: str) -> Level:
    """Where a variant is on an axis."""
    return tuple(getattr(variant, name) for name in FIELDS[axis])


def at(variant: Variant, axis: str, level: Level) -> Variant:
    """The variant with another level of one axis."""
    return replace(variant, **dict(zip(FIELDS[axis], level, strict=True)))


def differing(one: Variant, other: Variant) -> list[str]:
    """The axes on which they differ."""
    return [axis for axis in FIELDS if level_of(one, axis) != level_of(other, axis)]


def level_words(axis: str, level: Level) -> str:
    """How a level is written."""
    if axis == "length":
        return str(level[0]) if level[0] == level[1] else f"{level[0]}x{level[1]}"
    if axis == "values":
        return str(level[1] if level[1] != "plain" else level[0])
    return str(level[0])


def levels(axis: str, first: Variant, *, cuda: bool, fixed: bool) -> list[Level]:
    """All levels of an axis, that of ``first`` among them; none but that where the kernel's mask is its own."""
    found: list[Level]
    if axis == "head size":
        found = [(d,) for d in _HEAD_SIZES]
    elif axis == "group":
        found = [(g,) for g in _GROUPS]
    elif axis == "mask":
        found = [] if fixed else [("none",), ("top-left",), ("bottom-right",)]
    elif axis == "length":
        found = [(t, t) for t in (*_LENGTHS, *(_LONGER if cuda else ()))] + list(_UNEQUAL)
    elif axis == "values":
        found = [("captured", "plain"), ("normal", "plain"), *((first.source, name) for name in CHANGES)]
    elif axis == "layout":
        found = [("contiguous",), *((name,) for name in LAYOUTS)]
    elif axis == "dtype":
        found = [("bf16",), ("fp16",), ("fp32",)]
    else:
        found = [(n,) for n in (1, 2, 3, 4)]
    own = level_of(first, axis)
    return found if own in found else [own, *found]


def rich(first: Variant, accepted: Mapping[str, Sequence[Level]]) -> Variant:
    """A variant that differs from the first on every axis where the kernel takes another level."""
    wanted: dict[str, list[Level]] = {
        "group": [(2,), (3,), (1,)],
        "mask": [("bottom-right",), ("top-left",), ("none",)],
        "length": [(100, 133), (65, 128), (97, 97), (65, 65)],
        "values": [("normal", "plain")],
        "layout": [("transposed",), ("sliced features",)],
        "dtype": [("fp16",)],
        "batch": [(2,)],
        "key heads": [(1,), (2,)],
    }
    found = first
    for axis, choices in wanted.items():
        own = level_of(first, axis)
        # Both causal masks are one where Tq = Tk, as in the first case.
        causal = axis == "mask" and own != ("none",)
        other = [c for c in choices if c in accepted.get(axis, ()) and c != own and (c == ("none",) or not causal)]
        if other:
            found = at(found, axis, other[0])
    return found


def covering(
    first: Variant, choices: Mapping[str, Sequence[Level]], few: Mapping[str, Sequence[Level]], seed: int
) -> Iterator[Variant]:
    """Variants in which every pair of levels of two axes occurs, and every triple of head size, mask and group.

    Greedy, so that the first ones cover most (Cohen, Dalal, Fredman & Patton 1997, the AETG system).

    Args:
        first: What all else is as in.
        choices: The levels of each axis.
        few: Fewer of those of some axes, for pairs.
        seed: Of the choices between equals.
    """
    draw = random.Random(seed)
    small = {axis: few.get(axis, found) for axis, found in choices.items()}
    open_: set[tuple[tuple[str, Level], ...]] = set()
    for one, other in combinations(small, 2):
        open_ |= {((one, a), (other, b)) for a, b in product(small[one], small[other])}
    if triple := [axis for axis in ("head size", "group", "mask") if len(choices.get(axis, ())) > 1]:
        lists = [choices["head size"] if axis == "head size" else small[axis] for axis in triple]
        open_ |= {tuple(zip(triple, each, strict=True)) for each in product(*lists)}
    while open_:
        best: tuple[int, dict[str, Level]] = (0, {})
        for _ in range(12):
            row = dict(draw.choice(_largest(open_)))
            for axis in draw.sample(list(small), len(small)):
                if axis not in row:
                    # What pairs with the row's levels most; among equals any.
                    count = dict.fromkeys(small[axis], 0)
                    for level in count:
                        count[level] = sum(
                            tuple(sorted(((axis, level), have), key=lambda x: list(small).index(x[0]))) in open_
                            for have in row.items()
                        )
                    most = max(count.values())
                    row[axis] = draw.choice([level for level, n in count.items() if n == most])
            covered = sum(all(row.get(a) == x for a, x in found) for found in open_)
            if covered > best[0]:
                best = covered, row
        row = best[1]
        open_ -= {found for found in open_ if all(row.get(a) == x for a, x in found)}
        variant = first
        for axis, level in row.items():
            variant = at(variant, axis, level)
        yield variant


def _largest(open_: set[tuple[tuple[str, Level], ...]]) -> list[tuple[tuple[str, Level], ...]]:
    """Triples as long as there are any, in an order that does not depend on the run."""
    longest = max(map(len, open_))
    return sorted((found for found in open_ if len(found) == longest), key=repr)


def law(axis: str, failing: Sequence[Level], passing: Sequence[Level]) -> str | None:
    """What failing levels have in common and no passing one has, the simplest first; None where nothing fits."""
    if len(failing) < 2 or not passing:
        return None
    for words, holds in _laws(axis, failing):
        if all(map(holds, failing)) and not any(map(holds, passing)):
            return words
    return None


def _laws(axis: str, failing: Sequence[Level]) -> Iterator[tuple[str, Callable[[Level], bool]]]:
    if axis == "length":
        yield "Tq ≠ Tk", lambda x: x[0] != x[1]
        yield "Tq > Tk", lambda x: x[0] > x[1]
        yield "Tq < Tk", lambda x: x[0] < x[1]
        for name, index in (("Tq", 0), ("Tk", 1)):
            yield from _of_numbers(name, index, failing)
        for modulus in (2, 4, 8, 16, 32, 64, 128, 256):
            rest = {n % modulus for x in failing for n in x}
            for r in sorted(rest):
                yield f"Tq or Tk mod {modulus} = {r}", lambda x, m=modulus, r=r: r in (x[0] % m, x[1] % m)  # type: ignore[misc]
    elif axis in ("head size", "group", "batch", "key heads"):
        name = {"head size": "D", "group": "group", "batch": "B", "key heads": "Hk"}[axis]
        yield from _of_numbers(name, 0, failing)


def _of_numbers(name: str, index: int, failing: Sequence[Level]) -> Iterator[tuple[str, Callable[[Level], bool]]]:
    numbers = sorted({x[index] for x in failing})
    low, high = numbers[0], numbers[-1]
    yield f"{name} ≥ {low}", lambda x: x[index] >= low
    yield f"{name} ≤ {high}", lambda x: x[index] <= high
    for modulus in (2, 3, 4, 8, 16, 32, 64, 128, 256):
        if low % modulus and all(n % modulus for n in numbers):
            yield f"{name} no multiple of {modulus}", lambda x, m=modulus: x[index] % m != 0  # type: ignore[misc]
        if len({n % modulus for n in numbers}) == 1:
            yield f"{name} mod {modulus} = {low % modulus}", lambda x, m=modulus: x[index] % m == low % m  # type: ignore[misc]
    if low != high:
        yield f"{name} from {low} to {high}", lambda x: low <= x[index] <= high
    for modulus in (8, 16, 32, 64):
        if all(n % modulus for n in numbers):
            yield (
                f"{name} from {low} to {high}, no multiple of {modulus}",
                lambda x, m=modulus: low <= x[index] <= high and x[index] % m != 0,  # type: ignore[misc]
            )
