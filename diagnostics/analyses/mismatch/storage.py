"""Whether q, k or v of one run hold numbers of a format below 16 bits alone, where the other's do not: a cache in FP8.

Numbers of E4M3 times a scale of their own have, in any row, mantissas of the shape s m / 8, m = 8 to 15: with the
largest element's m tried from 8 to 15, all others lie within what rounding the products to 16 bits moves them. By
chance a row of n elements does so with probability 8 (1/5)^(n - 1); INT8 likewise, of which the small numbers tell.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# A product of a number and a scale is rounded to BF16, by 2^-8 of it at most, and so is the one it is held against.
_PRODUCT = 2.0**-7
_MANTISSAS = {"FP8 (E5M2)": 2, "FP8 (E4M3)": 3}
_INT8, _INT8_FROM = 127, 32
# Of INT4 too few are different for that: all rows, of so many features, have several, and they are the same few.
_INT4, _SEVERAL, _FEATURES = (7, 8), 5, 32
# A row must have so many different magnitudes, and so many rows must be of the format: the others are all zeros.
_DISTINCT, _MOST = 8, 0.99
# So many rows, spread over all.
_ROWS = 256
# Of as many neighbours numbers of four bits or less have fewer magnitudes; numbers of BF16 have about 15.
_NEIGHBOURS, _MAGNITUDES = 16, 12


@dataclass(frozen=True)
class CoarseStorage:
    """What one run holds in a coarser format."""

    which: tuple[str, ...]
    """Of q, k and v."""
    side: int
    """0 train, 1 rollout."""
    format: str
    """In words."""


def find_storage(train: Sequence[dict[str, Tensor]], rollout: Sequence[dict[str, Tensor]]) -> CoarseStorage | None:
    """What is stored below 16 bits in one run alone; None where nothing is.

    Args:
        train: Of some heads q, k and v by name, [n, D] each.
        rollout: The same.
    """
    for side, (own, other) in enumerate(((train, rollout), (rollout, train))):
        found = {
            name: fmt
            for name in ("q", "k", "v")
            if (fmt := format_below(torch.cat([head[name] for head in own]))) is not None
            and format_below(torch.cat([head[name] for head in other])) is None
        }
        if found:
            fmt = next(iter(found.values()))
            return CoarseStorage(tuple(name for name, one in found.items() if one == fmt), side, fmt)
    return None


def format_below(x: Tensor) -> str | None:
    """The format below 16 bits whose numbers, times a scale a row, all of x [n, D] are; None: none, or too few tell."""
    every = x[torch.linspace(0, len(x) - 1, min(len(x), _ROWS), device=x.device).long()].double().abs()
    different = (every.sort(1).values.diff(dim=1) > 0).sum(1)
    if every.shape[1] >= _FEATURES and float(_of_int4(every, different).double().mean()) >= _MOST:
        return "INT4"
    rows = every[different >= _DISTINCT]
    if len(rows) < max(1, len(every) // 2):
        return None
    for name, bits in _MANTISSAS.items():
        if float(_of_float(rows, bits).double().mean()) >= _MOST:
            return name
    return "INT8" if float(_of_int8(rows).double().mean()) >= _MOST else None


def rounding_unit(fmt: str) -> float:
    """The largest relative error of a rounding to a format that ``format_below`` names; 0: INT8 has none."""
    return 2.0 ** -(_MANTISSAS[fmt] + 1) if fmt in _MANTISSAS else 0.0


def few_levels(x: Tensor) -> bool:
    """Whether x [n, D] holds numbers of some four bits: of 16 neighbours, in a row or a column, several are alike."""
    return any(_distinct(of.double().abs()) <= _MAGNITUDES for of in (x, x.T))


def _distinct(x: Tensor) -> float:
    """How many magnitudes 16 neighbours have, on average; inf of fewer."""
    groups = x[torch.linspace(0, len(x) - 1, min(len(x), _ROWS), device=x.device).long()]
    groups = groups[:, : groups.shape[1] // _NEIGHBOURS * _NEIGHBOURS].reshape(-1, _NEIGHBOURS)
    return float((1 + (groups.sort(1).values.diff(dim=1) > 0).sum(1)).double().mean()) if len(groups) else torch.inf


def _of_float(rows: Tensor, bits: int) -> Tensor:
    """Which rows [n, D] are numbers of so many mantissa bits, bool [n]."""
    first = 2**bits
    largest = rows.amax(1, keepdim=True)
    found = torch.zeros(len(rows), dtype=torch.bool, device=rows.device)
    for mantissa in range(first, 2 * first):
        scaled = rows / (largest / mantissa)
        exponent = torch.frexp(scaled).exponent
        units = torch.ldexp(scaled, bits + 1 - exponent)  # [first, 2 first)
        near = (units - units.round()).abs() <= _PRODUCT * units
        found |= (near | (rows == 0)).all(1)
    return found


def _of_int4(rows: Tensor, different: Tensor) -> Tensor:
    """Which rows are whole multiples, up to 7 or 8, of one number, and hold several of them."""
    largest = rows.amax(1, keepdim=True).clamp(min=1e-300)
    found = torch.zeros(len(rows), dtype=torch.bool, device=rows.device)
    for top in _INT4:
        units = rows / (largest / top)
        found |= ((units - units.round()).abs() <= _PRODUCT * units).all(1)
    return found & (different >= _SEVERAL)


def _of_int8(rows: Tensor) -> Tensor:
    """Which rows are whole multiples, up to 127, of one number."""
    largest = rows.amax(1, keepdim=True)
    found = torch.zeros(len(rows), dtype=torch.bool, device=rows.device)
    for top in range(_INT8_FROM, _INT8 + 2):
        units = rows / (largest / top)
        found |= ((units - units.round()).abs() <= _PRODUCT * units).all(1)
    return found
