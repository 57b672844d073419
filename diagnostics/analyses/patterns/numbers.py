"""Numbers and sets of rows in words: "1/alpha", "every 128th row from 0"."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from attn_diag.reference import format_of, round_nearest_even
from attn_diag.results.wording import between, number, ranges

_SHORT = {"BF16": torch.bfloat16, "FP16": torch.float16}
_PERIODS = (2, 3, 4, 8, 16, 32, 64, 128, 256, 512)


def scales(stated: float, head_dim: int) -> dict[str, float]:
    """Softmax scales that kernels have used by mistake, by name."""
    padded = {2 ** math.ceil(math.log2(head_dim)), *(-(-head_dim // m) * m for m in (16, 32, 64, 128))} - {head_dim}
    found = {"no scale": 1.0, "1/D": 1 / head_dim, "1/sqrt(D)": head_dim**-0.5, "the scale applied twice": stated**2}
    found |= {"the scale times log2(e)": stated * math.log2(math.e), "the scale times ln 2": stated * math.log(2)}
    found |= {f"1/sqrt({n})": n**-0.5 for n in (head_dim + 1, head_dim - 1, *sorted(padded)) if n > 0}
    found |= {"twice the scale": 2 * stated, "half the scale": stated / 2, "the scale's negative": -stated}
    found |= {"sqrt(scale)": math.sqrt(stated), "1/scale": 1 / stated, "scale 0": 0.0}
    return {name: value for name, value in found.items() if abs(value - stated) > 1e-9 * abs(stated)}


def rounded_scales(stated: float) -> dict[str, float]:
    """What the softmax scale is where a constant of it is rounded to 16 bits, by name."""
    found = {}
    for fmt, dtype in _SHORT.items():
        for name, value in (("log2(e)", math.log2(math.e)), ("the scale times log2(e)", stated * math.log2(math.e))):
            found[f"{name} in {fmt}"] = stated * _rounded(value, dtype) / value
        found[f"the scale in {fmt}"] = _rounded(stated, dtype)
    return found


def rounded_softcap(stated: float) -> dict[str, float]:
    """What the softcap is in 16 bits, by name."""
    return {f"the softcap in {fmt}": _rounded(stated, dtype) for fmt, dtype in _SHORT.items()}


def _rounded(value: float, dtype: torch.dtype) -> float:
    return float(round_nearest_even(torch.tensor(value, dtype=torch.float64), format_of(dtype)))


def factors(alpha: float, *, scaled: bool, dropped: float = 0.0) -> dict[str, float]:
    """Factors by which a quantity may be off, by name; ``scaled``: it contains alpha once, as dQ and dK do.

    ``dropped``: p of dropout.
    """
    found = {"ln 2": math.log(2), "log2(e)": math.log2(math.e)}
    if alpha > 0 and abs(alpha - 1) > 1e-3:
        missing, twice = ("the scale is missing", "the scale is applied twice") if scaled else ("1/scale", "the scale")
        found |= {missing: 1 / alpha, twice: alpha}
        roots = {"1/sqrt(scale)": alpha**-0.5, "sqrt(scale)": alpha**0.5}
        # With D = 16 that is 2: what was counted twice, sooner than a root.
        found |= {name: value for name, value in roots.items() if value not in (0.5, 2.0)}
    if dropped:
        found |= {
            "dropout without the factor 1/(1-p)": 1 - dropped,
            "dropout's factor 1/(1-p) twice": 1 / (1 - dropped),
        }
    return found


def named(value: float, known: Mapping[str, float], tolerance: float) -> str | None:
    """The name of the known number that a value is, within a relative tolerance; None for none, or several."""
    near = [name for name, other in known.items() if abs(value - other) <= tolerance * abs(other)]
    return near[0] if len(near) == 1 else None


def ordinal(n: int) -> str:
    """1st, 2nd, 3rd, 4th, …"""
    suffix = "th" if n % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(n % 10, "th")
    return f"{n}{suffix}"


def intervals(rows: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Whole numbers in ascending order as inclusive ranges."""
    found: list[list[int]] = []
    for n in rows:
        if found and n == found[-1][1] + 1:
            found[-1][1] = n
        else:
            found.append([n, n])
    return tuple((first, last) for first, last in found)


def in_words(rows: Sequence[int], total: int, unit: str = "rows", either: Sequence[int] = ()) -> str:
    """A set of rows: "row 5", "rows 64-127", "every 128th row from 0", "rows 64-127 of every 128".

    Args:
        rows: Their numbers, ascending.
        total: How many there are.
        unit: What they are.
        either: Rows that may belong to it or not.
    """
    if len(set(rows) | set(either)) == total:
        return f"all {unit}"
    if len(rows) == 1:
        return f"{unit[:-1]} {rows[0]}"
    if len(intervals(rows)) > 2 and (periodic := _periodic(rows, total, unit, either)) is not None:
        return periodic
    more = f" ({len(rows)} of {total})" if len(intervals(rows)) > 4 else ""
    return f"{unit} {ranges(rows)}{more}"


def _periodic(rows: Sequence[int], total: int, unit: str, either: Sequence[int]) -> str | None:
    member: npt.NDArray[np.bool_] = np.zeros(total, dtype=bool)
    member[list(rows)] = True
    known = np.ones(total, dtype=bool)
    known[list(either)] = False
    for period in _PERIODS:
        if total < 2 * period:
            break
        phase = np.arange(total) % period
        inside = np.flatnonzero(
            np.bincount(phase[known], member[known], period) >= 0.9 * np.bincount(phase[known], minlength=period)
        )
        if not len(inside) or inside[-1] - inside[0] + 1 != len(inside) or len(inside) == period:
            continue
        expected = (phase >= inside[0]) & (phase <= inside[-1])
        if ((expected != member) & known).sum() > 0.02 * member.sum():
            continue
        if len(inside) == 1:
            return f"every {'second' if period == 2 else ordinal(period)} {unit[:-1]} from {inside[0]}"
        return f"{unit} {inside[0]}-{inside[-1]} of every {period}"
    return None


def spread(values: npt.NDArray[np.float64]) -> str:
    """From the smallest to the largest, but for one in twenty at either end."""
    low, high = np.quantile(values, (0.05, 0.95))
    return between(number(float(low)), number(float(high)))
