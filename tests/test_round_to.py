"""attn_diag.round_to: one function for tensors, arrays and numbers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

import attn_diag
from attn_diag.kernels.formats import Mode

TWICE = 1 + 2.0**-8 + 2.0**-40  # by way of fp32 BF16 makes 1.0 of it


@pytest.mark.parametrize(
    "x",
    [
        TWICE,
        np.float64(TWICE),
        np.array(TWICE),
        np.full((2, 3), TWICE),
        torch.tensor(TWICE, dtype=torch.float64),
        torch.full((2, 3), TWICE, dtype=torch.float64),
        np.float32(1.005),
        np.full(4, 1.005, np.float32),
        torch.full((4,), 1.005),
        np.zeros((0, 3)),
    ],
    ids=lambda x: f"{type(x).__name__} {getattr(x, 'dtype', '')} {tuple(getattr(x, 'shape', ()))}",
)
def test_what_comes_back_is_what_came(x: Any) -> None:
    got = attn_diag.round_to(x, "bf16")
    assert type(got) is type(x)
    assert getattr(got, "dtype", None) == getattr(x, "dtype", None)
    assert getattr(got, "shape", None) == getattr(x, "shape", None)
    values = got if isinstance(got, torch.Tensor) else np.asarray(got)
    assert (values == 1.0078125).all()


@pytest.mark.parametrize("mode", ["nearest-even", "toward-zero", "up", "down"])
@pytest.mark.parametrize("name", ["bf16", "fp16", "e4m3", "e5m2", "tf32", "e3m4", "fp32"])
def test_tensors_arrays_and_numbers_agree(name: str, mode: str) -> None:
    values = np.random.default_rng(0).standard_normal(500) * 10.0 ** np.arange(-250, 250)
    values[:5] = 0.0, -0.0, math.inf, -math.inf, math.nan
    array = attn_diag.round_to(values, f"{name}:{mode}")
    tensor = attn_diag.round_to(torch.from_numpy(values), f"{name}:{mode}").numpy()
    numbers = np.array([attn_diag.round_to(float(v), f"{name}:{mode}") for v in values])
    for other in (tensor, numbers):
        np.testing.assert_array_equal(array, other)
        np.testing.assert_array_equal(np.signbit(array[~np.isnan(array)]), np.signbit(other[~np.isnan(other)]))


def test_fp32_is_a_format_here() -> None:
    x = 1 + 2.0**-24 + 2.0**-50
    assert attn_diag.round_to(x, "fp32") == 1 + 2.0**-23
    assert attn_diag.round_to(x, "fp32:down") == 1.0
    assert attn_diag.round_to(x, "fp64") == x
    assert attn_diag.round_to(1e39, "fp32:toward-zero") == np.finfo(np.float32).max


@pytest.mark.parametrize("mode", [Mode.STOCHASTIC, Mode.RANDOM_SIGN])
def test_a_seed_decides(mode: Mode) -> None:
    inputs: list[Any] = [np.linspace(-3, 3, 1001), torch.linspace(-3, 3, 1001)]
    for x in inputs:
        first, again, other = (attn_diag.round_to(x, f"bf16:{mode}", seed=s) for s in (5, 5, 6))
        assert (first == again).all()
        assert (first != other).any()


def test_no_gradient_passes() -> None:
    assert not attn_diag.round_to(torch.ones(3, requires_grad=True), "bf16").requires_grad


@pytest.mark.parametrize(
    ("x", "came"),
    [
        (3, "a value of type int"),
        ([1.0], "a value of type list"),
        (np.arange(3), "a numpy int64"),
        (np.float16(1), "a numpy float16"),
        (torch.arange(3), r"a tensor of torch\.int64"),
        (torch.ones(3, dtype=torch.bfloat16), r"a tensor of torch\.bfloat16"),
    ],
    ids=str,
)
def test_other_inputs_are_refused(x: Any, came: str) -> None:
    with pytest.raises(TypeError, match=rf"expects fp32 or float64 .*, got {came}; convert it first: x\.float\(\)"):
        attn_diag.round_to(x, "bf16")


@pytest.mark.parametrize("text", ["bf17", "bf16:sideways", "fp64:up", "", None])
def test_unknown_formats_are_named(text: Any) -> None:
    with pytest.raises(attn_diag.InputError, match=r"rounding .*a format is one of bf16, .*stochastic"):
        attn_diag.round_to(1.0, text)


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_seeds_out_of_range(seed: int) -> None:
    with pytest.raises(attn_diag.InputError, match=f"seed must lie between 0 and .*, got {seed}"):
        attn_diag.round_to(1.0, "bf16:stochastic", seed=seed)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", list(Mode))
def test_on_a_gpu(mode: Mode) -> None:
    for x in (torch.randn(10_001, dtype=torch.float64), torch.randn(10_001)):
        on_gpu = attn_diag.round_to(x.cuda(), f"e4m3:{mode}", seed=1)
        assert on_gpu.is_cuda
        if mode not in (Mode.STOCHASTIC, Mode.RANDOM_SIGN):
            assert torch.equal(on_gpu.cpu(), attn_diag.round_to(x, f"e4m3:{mode}"))
        else:
            assert not torch.equal(on_gpu.cpu(), x)


def test_a_format_that_rounds_nothing_still_copies() -> None:
    x = np.ones(3)
    y = attn_diag.round_to(x, "fp64")
    y[0] = 2.0
    assert x[0] == 1.0
    z = attn_diag.round_to(given := torch.ones(3, dtype=torch.float64), "fp64")
    z[0] = 2.0
    assert given[0] == 1.0
