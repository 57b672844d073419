"""Rounding inside kernels: nearest-even in the interpreter and on a GPU, and no BF16 value in the interpreter; e^x."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import mpmath
import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from builders import hard_fp32
from torch import Tensor

from attn_diag.kernels.attention import attention
from attn_diag.kernels.formats import parse
from attn_diag.kernels.triton_math import as_operand, round_bits_to_bf16, round_to, rounding_error
from attn_diag.kernels.triton_probes import cast, divide, dot, exp2, multiply
from attn_diag.kernels.triton_rounding import round_tensor
from attn_diag.reference.triton_exp import exp_of

# numpy says so where fp32 overflows a smaller format; a GPU does not.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")


@triton.jit
def round_kernel(x_ptr, y_ptr, n, FORMAT: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr):
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs, mask=offs < n, other=0.0)
    y = round_bits_to_bf16(x) if BITS else round_to(x, FORMAT)
    tl.store(y_ptr + offs, y, mask=offs < n)


def rounded(x: Tensor, fmt: str, *, bits: bool = False) -> Tensor:
    y = torch.full_like(x, torch.nan)
    round_kernel[(triton.cdiv(len(x), 4096),)](x, y, len(x), FORMAT=fmt, BITS=bits, BLOCK=4096)
    return y


@pytest.mark.parametrize("fmt", ["bf16", "fp16", "fp32"])
def test_rounding_is_nearest_even_on_hard_values(fmt: str, device: str) -> None:
    values = hard_fp32()
    with np.errstate(all="ignore"):
        dtype = {"bf16": ml_dtypes.bfloat16, "fp16": np.float16, "fp32": np.float32}[fmt]
        expected = values.astype(dtype).astype(np.float32)
    got = rounded(torch.from_numpy(values).to(device), fmt).cpu().numpy()
    np.testing.assert_array_equal(np.isnan(got), np.isnan(expected))
    number = ~np.isnan(expected)
    np.testing.assert_array_equal(got[number].view(np.uint32), expected[number].view(np.uint32))


@pytest.mark.gpu
def test_integer_rounding_is_the_hardware_cast_on_every_bit_pattern(device: str) -> None:
    step = 2**28
    for start in range(-(2**31), 2**31, step):
        x = torch.arange(start, start + step, dtype=torch.int64, device=device).to(torch.int32).view(torch.float32)
        hardware, integer = (rounded(x, "bf16", bits=bits) for bits in (False, True))
        same = (hardware == integer) & (hardware.signbit() == integer.signbit()) | (hardware.isnan() & integer.isnan())
        assert bool(same.all()), x[~same][:4].view(torch.int32)


@triton.jit
def error_kernel(x_ptr, y_ptr, n, FORMAT: tl.constexpr, PAIRS: tl.constexpr, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs, mask=offs < n, other=0.0)
    tl.store(y_ptr + offs, rounding_error(x, as_operand(x, FORMAT), FORMAT, PAIRS), mask=offs < n)


@pytest.mark.parametrize("fmt", ["bf16", "fp16"])
def test_the_error_of_a_rounding_is_that_of_the_cast(fmt: str, device: str) -> None:
    x = torch.from_numpy(hard_fp32()).to(device)
    with np.errstate(all="ignore"):
        expected = rounded(x, fmt) - x
        for pairs in (False, device == "cuda" and torch.cuda.get_device_capability()[0] >= 9):
            got = torch.full_like(x, 1.0)
            error_kernel[(triton.cdiv(len(x), 4096),)](x, got, len(x), FORMAT=fmt, PAIRS=pairs, BLOCK=4096)
            assert torch.equal(got.isnan(), expected.isnan())
            number = ~expected.isnan()
            assert torch.equal(got[number].view(torch.int32), expected[number].view(torch.int32))


@triton.jit
def forbidden_cast(x_ptr):
    x = tl.load(x_ptr + tl.arange(0, 16))
    tl.store(x_ptr + tl.arange(0, 16), x.to(tl.bfloat16).to(tl.float32))


@triton.jit
def forbidden_dot(x_ptr):
    x = tl.load(x_ptr + tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :])
    tl.store(x_ptr + tl.arange(0, 16), tl.sum(tl.dot(x, x), 1))


@pytest.fixture
def no_interpreted_bf16(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """Any BF16 value that the interpreter makes, loads or multiplies raises."""
    if device != "cpu":
        pytest.skip("guards the interpreter, and kernels run compiled here")
    from triton.runtime import interpreter

    original = interpreter.TensorHandle.__init__

    def guarded(self: object, data: object, dtype: object, *rest: object, **more: object) -> None:
        # Pointers have an element type too; only values count.
        if getattr(dtype, "name", "") == "bf16":
            raise AssertionError("a BF16 value in Triton's interpreter")
        original(self, data, dtype, *rest, **more)

    monkeypatch.setattr(interpreter.TensorHandle, "__init__", guarded)


@pytest.mark.usefixtures("no_interpreted_bf16")
@pytest.mark.parametrize("kernel", [forbidden_cast, forbidden_dot])
def test_the_guard_sees_bf16(kernel: triton.JITFunction) -> None:
    x = torch.ones(256, dtype=torch.bfloat16 if kernel is forbidden_dot else torch.float32)
    with pytest.raises(Exception, match="BF16 value in Triton's interpreter"):
        kernel[(1,)](x)


@pytest.mark.usefixtures("no_interpreted_bf16")
@pytest.mark.parametrize("recipe", ["fa2", "qiu2025-stabilised", "bf16-forward", "delta-from-dp"])
def test_interpreted_kernels_hold_no_bf16(recipe: str) -> None:
    from attn_diag.kernels.attention import attention

    q, k, v = (torch.randn(1, 2, 40, 32).bfloat16().requires_grad_() for _ in range(3))
    out, dump = attention(q, k, v, causal="top-left", recipe=recipe, instrument="full")
    out.float().square().sum().backward()
    assert int(dump.multiplicity("exact").min()) >= 1


def test_a_launch_says_whether_products_and_sums_are_fused(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """It decides the kernels' bits, and Triton's default of it changes with 3.10."""
    launches: dict[str, Any] = {}
    run = type(round_bits_to_bf16).run

    def seen(kernel: Any, *arguments: Any, **options: Any) -> Any:
        launches[kernel.fn.__name__] = options.get("enable_fp_fusion")
        return run(kernel, *arguments, **options)

    monkeypatch.setattr(type(round_bits_to_bf16), "run", seen)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, 32, 16, generator=generator).bfloat16().to(device) for _ in range(3))
    o, dump = attention(q.requires_grad_(), k, v, instrument="full", backward_recipe="delta-from-dp")
    o.sum().backward()
    dump.multiplicity("exact")
    attention(q, k, v).sum().backward()
    x = torch.ones(16, 16, device=device)
    for made in (dot(x, x, x), exp2(x[0]), multiply(x[0], x[0]), divide(x, x), cast(x[0], torch.float16)):
        assert made is not None
    round_tensor(x, parse("fp16"))
    assert {"forward_kernel", "delta_kernel", "dq_kernel", "dkdv_kernel", "dot_kernel"} <= set(launches)
    assert [name for name, said in launches.items() if said is None] == []


@triton.jit
def exp_kernel(x_ptr, y_ptr, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + at, exp_of(tl.load(x_ptr + at, mask=at < count, other=0.0)), mask=at < count)


def test_exp_of_float64(device: str) -> None:
    """Within 1 ulp: the certificate takes it for 2 at most."""
    generator = torch.Generator().manual_seed(3)
    sizes = [torch.rand(3000, generator=generator, dtype=torch.float64) * most for most in (0.3, 4.0, 40.0, 708.0)]
    x = -torch.cat([*sizes, torch.linspace(700, 746, 500).double()])
    special = torch.tensor([0.0, -0.0, -746.0, -1e9, -1e300, -math.inf, math.nan], dtype=torch.float64)
    every = torch.cat([special, -special[-1:], x, -x[:6000]]).to(device)
    y = torch.empty_like(every)
    exp_kernel[(triton.cdiv(len(every), 512),)](every, y, len(every), BLOCK=512)
    values = y.cpu()
    assert values[:6].tolist() == [1, 1, 0, 0, 0, 0]
    assert values[6:8].isnan().all()
    with mpmath.workdps(40):
        true = [mpmath.exp(one) for one in every[8:].tolist()]
        off = [(one - other) / math.ulp(float(other)) for one, other in zip(values[8:].tolist(), true, strict=True)]
    assert max(abs(float(one)) for one in off) < 1
