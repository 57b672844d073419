"""2**x as the special function unit of NVIDIA GPUs makes it (``ex2.approx``, MUFU.EX2), in every bit.

The unit's design is published: a table by the fraction's first bits, and a quadratic in the others whose square keeps
its upper bits (Oberman and Siu, A High-Performance Area-Efficient Multifunction Interpolator, ARITH 2005). The table,
the columns of the square that are left out and the constant that stands for them were found from what an H100 returns
on a grid of 2^-24; all other fp32 numbers were compared afterwards (``benchmarks/bench_exp2.py``).
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

# Of 23 bits of a fraction, so many choose the segment; the others are the quadratic's argument.
_SEGMENT, _ARGUMENT = 6, 17
# Partial products of the square below this column are not added; what is left is a fraction of 15 bits.
_COLUMN = 19
# Sums have 15 bits behind the result's last one; this constant is added before they are cut off.
_BEHIND, _CONSTANT = 15, 6114
# By segment: values in quarters of the result's last bit (26 bits), slopes (16 bits) and curvatures (10 bits).
_VALUES = (
    33554435, 33919818, 34289182, 34662565, 35040018, 35421577, 35807292, 36197209, 36591372, 36989825, 37392616,
    37799797, 38211409, 38627504, 39048131, 39473337, 39903173, 40337690, 40776937, 41220970, 41669836, 42123592,
    42582286, 43045977, 43514717, 43988561, 44467565, 44951786, 45441278, 45936101, 46436314, 46941971, 47453135,
    47969867, 48492225, 49020269, 49554065, 50093674, 50639159, 51190582, 51748011, 52311510, 52881146, 53456983,
    54039091, 54627538, 55222393, 55823725, 56431607, 57046106, 57667297, 58295254, 58930048, 59571754, 60220447,
    60876205, 61539104, 62209220, 62886634, 63571424, 64263672, 64963458, 65670863, 66385972,
)  # fmt: skip
_SLOPES = (
    22713, 22960, 23210, 23463, 23718, 23977, 24238, 24502, 24768, 25038, 25311, 25586, 25865, 26147, 26431, 26719,
    27010, 27304, 27602, 27902, 28206, 28513, 28824, 29138, 29455, 29776, 30100, 30428, 30759, 31094, 31432, 31775,
    32121, 32471, 32824, 33182, 33543, 33908, 34277, 34651, 35028, 35409, 35795, 36185, 36579, 36977, 37380, 37787,
    38198, 38614, 39035, 39460, 39889, 40324, 40763, 41207, 41655, 42109, 42568, 43031, 43500, 43973, 44452, 44936,
)  # fmt: skip
_CURVATURES = (
    494, 501, 506, 511, 518, 521, 527, 532, 541, 546, 551, 559, 564, 568, 577, 583, 589, 596, 600, 609, 615, 622,
    627, 633, 641, 647, 655, 661, 670, 677, 686, 691, 699, 705, 715, 721, 730, 739, 748, 753, 763, 773, 779, 787,
    796, 806, 813, 822, 833, 842, 849, 858, 870, 877, 887, 896, 909, 917, 925, 938, 946, 959, 969, 980,
)  # fmt: skip


def hardware_exp2(x: Tensor) -> Tensor:
    """2**x of fp32 numbers as ``ex2.approx.f32`` returns it, where that is a normal number.

    Args:
        x: fp32, of any shape; -inf gives 0, NaN stays.

    Returns:
        fp32, at most 2 units in the last place off 2**x; exact where x is whole.
    """
    # The magnitude is cut off to 23 bits of a fraction; a negative one is complemented without the carry.
    fixed = (x.double().nan_to_num(0.0).clamp(-400, 400) * 2.0**23).long()
    fixed -= ((fixed < 0) & (fixed & (2**23 - 1) != 0)).long()
    segment, argument = (fixed >> _ARGUMENT) & (2**_SEGMENT - 1), fixed & (2**_ARGUMENT - 1)
    values, slopes, curvatures, squares = (table.to(x.device) for table in _tables())
    total = values[segment] + slopes[segment] * argument + curvatures[segment] * squares[argument]
    made = torch.ldexp((total >> _BEHIND).double(), (fixed >> 23) - 23).float()
    return torch.where(x.isnan(), x, made)


@cache
def _tables() -> tuple[Tensor, ...]:
    """Values, with the constant, slopes and curvatures by segment; and the square of every argument; all int64."""
    values = (torch.tensor(_VALUES) << (_BEHIND - 2)) + _CONSTANT
    argument = torch.arange(2**_ARGUMENT)
    bits = [(argument >> i) & 1 for i in range(_ARGUMENT)]
    square = torch.zeros_like(argument)
    for i, low in enumerate(bits):
        for j, high in enumerate(bits[i:], i):
            # Two equal partial products of one column are one in the next.
            column = i + j + (i != j)
            if column >= _COLUMN:
                square += (low & high) << (column - _COLUMN)
    return values, torch.tensor(_SLOPES), torch.tensor(_CURVATURES), square
