"""2**x as a GPU makes it: what its results look like; every bit is compared where there is a GPU."""

from __future__ import annotations

import math

import pytest
import torch

from attn_diag.kernels.hardware_exp2 import hardware_exp2


def grid(count: int, low: float, high: float) -> torch.Tensor:
    return torch.linspace(low, high, count, dtype=torch.float64).float()


def test_whole_numbers_are_exact() -> None:
    x = torch.arange(-126.0, 128.0)
    assert torch.equal(hardware_exp2(x).double(), torch.exp2(x.double()))


@pytest.mark.parametrize("sign", [1, -1])
def test_numbers_below_the_last_bit_of_the_fraction_give_one(sign: int) -> None:
    assert hardware_exp2(torch.tensor([0.0, 2.0**-24, 2.0**-126]) * sign).tolist() == [1.0, 1.0, 1.0]


def test_infinities_and_nan() -> None:
    made = hardware_exp2(torch.tensor([-math.inf, math.inf, math.nan, -3e38, 3e38]))
    assert made[:2].tolist() == [0.0, math.inf]
    assert made[2].isnan()
    assert made[3:].tolist() == [0.0, math.inf]


def test_its_errors_are_those_that_an_h100_made() -> None:
    """Of every multiple of 2^-24 in [-1, 0): how many results lie so many units beside the nearest fp32 number."""
    found = dict.fromkeys((-2, -1, 0, 1), 0)
    for start in range(0, 2**24, 2**22):
        x = (torch.arange(start, start + 2**22, dtype=torch.float64) / 2**24 - 1).float()
        nearest = torch.exp2(x.double()).float()
        off = hardware_exp2(x).view(torch.int32) - nearest.view(torch.int32)
        found = {n: count + int((off == n).sum()) for n, count in found.items()}
    assert sum(found.values()) == 2**24
    assert found == {-2: 86_537, -1: 6_201_531, 0: 10_185_217, 1: 303_931}


def test_it_repeats_in_every_octave() -> None:
    x = grid(4097, 0.0, 1.0)
    assert torch.equal(hardware_exp2(x + 5), hardware_exp2(x) * 32)
    # Numbers below 0 go by the complement of their magnitude: one step of 2^-23 further down.
    inside = x[1:-1]
    assert torch.equal(hardware_exp2(inside - 1), hardware_exp2(inside - 2.0**-23) / 2)


@pytest.mark.gpu
def test_it_has_every_bit_of_the_gpu() -> None:
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (2**22,), generator=generator).int()
    x = torch.cat([bits.view(torch.float32), grid(2**22, -30.0, 0.0), grid(2**20, -126.0, 127.0)])
    made, by_gpu = hardware_exp2(x), torch.exp2(x.cuda()).cpu()
    normal = (made >= torch.finfo(torch.float32).tiny) | made.isnan()
    assert torch.equal(made[normal].nan_to_num(2.0), by_gpu[normal].nan_to_num(2.0))
