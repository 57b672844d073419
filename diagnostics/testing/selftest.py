"""``selftest``: checks of this installation against independent numbers, or the measurement of this machine's GPU."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Literal, overload

import torch
from torch import Tensor

from attn_diag.captures.hardware import save_profile
from attn_diag.errors import InputError
from attn_diag.head.machine import describe_tool
from attn_diag.kernels import formats
from attn_diag.kernels.accumulation import tensor_core_matmul
from attn_diag.reference import (
    AttentionHead,
    BoundCollector,
    FloatFormat,
    HeadReference,
    Masking,
    format_of,
    reference_head,
    round_nearest_even,
)
from attn_diag.reference.rounding_table import RoundingTable
from attn_diag.results.hardware import HardwareProfile
from attn_diag.results.selftest import Installation, InstallationCheck
from attn_diag.testing import gpu

_DIGITS = 50


@overload
def selftest(*, hardware: Literal[False] = False) -> Installation: ...
@overload
def selftest(*, hardware: Literal[True]) -> HardwareProfile: ...
@overload
def selftest(*, hardware: bool) -> Installation | HardwareProfile: ...
def selftest(*, hardware: bool = False) -> Installation | HardwareProfile:
    """Check this installation's numbers against independent ones on the CPU, in a few seconds.

    Args:
        hardware: Measure the present GPU's sums of products, exp2 and casts instead, and keep the profile in the user's
            cache folder, from which later reports and captures on this GPU name it. Warns where it cannot be kept.

    Raises:
        InputError: With ``hardware``, there is no CUDA device or no Triton.
    """
    if not hardware:
        return check_installation()
    profile = gpu.measure_hardware()
    try:
        save_profile(profile)
    except InputError as error:
        warnings.warn(f"the profile is measured but not kept: {error}", stacklevel=2)
    return profile


def check_installation() -> Installation:
    """Run all checks; never raises for a check that fails."""
    started = time.monotonic()
    checks = tuple(check for group in GROUPS for check in group())
    return Installation(
        tool=describe_tool(torch.device("cpu")),
        checks=checks,
        passed=all(check.passed for check in checks),
        seconds=time.monotonic() - started,
    )


def rounding_checks(
    reference: Callable[[Tensor, FloatFormat], Tensor] = round_nearest_even,
    site: Callable[[Tensor, formats.Rounding | None], Tensor] = formats.round_to,
) -> Iterator[InstallationCheck]:
    """Both rounding functions, and torch's own cast from fp32, against tables of all numbers of each format."""
    for name, dtype in gpu.CASTS.items():
        fmt = formats.parse(name)
        assert fmt is not None
        layout = fmt.format
        table = RoundingTable.of(layout.exponent_bits, layout.mantissa_bits, top=layout.top)
        x = _around(table.numbers)
        expected = table.bracket(x).round("nearest-even")
        wrong = _different(reference(x, format_of(dtype)), expected) + _different(site(x, fmt), expected)
        yield InstallationCheck(f"float64 to {name}, nearest-even", wrong, "wrong", 0, 2 * len(x))
        single = x.float()
        exact = (single.double() == x) & expected.isfinite() & (expected.abs() < format_of(dtype).largest)
        wrong = _different(single.to(dtype).double()[exact], expected[exact])
        yield InstallationCheck(f"torch's cast of fp32 to {name}", wrong, "wrong", 0, int(exact.sum()))


def function_checks(
    exp: Callable[[Tensor], Tensor] = torch.exp, log: Callable[[Tensor], Tensor] = torch.log
) -> Iterator[InstallationCheck]:
    """float64's exp and log against mpmath, on arguments that attention meets.

    Limit: 2 ulp. The references' bounds count on no more.
    """
    import mpmath

    generator = torch.Generator().manual_seed(0)
    uniform = torch.rand(600, generator=generator, dtype=torch.float64)
    arguments = {
        "exp": (exp, mpmath.exp, torch.cat([-700 * uniform, -uniform, -(2.0 ** (-60 * uniform))])),
        "log": (log, mpmath.log, torch.cat([1 + uniform * 1e5, 1 + 2.0 ** (-50 * uniform), uniform + 1e-300])),
    }
    with mpmath.workdps(_DIGITS):
        for name, (function, truth, x) in arguments.items():
            worst = 0.0
            for value, got in zip(x.tolist(), function(x).tolist(), strict=True):
                true = truth(mpmath.mpf(value))
                error = abs(mpmath.mpf(got) - true) / math.ulp(float(true))
                worst = max(worst, float(error)) if error == error else math.nan
            yield InstallationCheck(f"float64 {name}, largest error", worst, "ulp", 2.0, len(x))


def attention_checks(
    reference: Callable[[AttentionHead], HeadReference] = reference_head,
) -> Iterator[InstallationCheck]:
    """The float64 reference of a small causal head against the oracle; errors in units of their proven bounds."""
    from attn_diag.reference.certify import OUTPUTS, check_rows

    generator = torch.Generator().manual_seed(0)
    q, k, v, do = (torch.randn(12, 8, generator=generator).bfloat16().double() for _ in range(4))
    head = AttentionHead(4 * q, k, v, do, 8**-0.5, Masking("top-left"))
    collector = BoundCollector(head)
    bounds = collector.bounds(reference_head(head, collector.add, gradient_sums=True))
    found = check_rows(head, reference(head), bounds, range(len(q)))
    for output in OUTPUTS:
        worst = max(row.outputs[output].ratio for row in found)
        yield InstallationCheck(f"reference {output} of a causal head", worst, "of its bound", 1.0, len(found))


def sum_checks(
    matmul: Callable[[Tensor, Tensor], Tensor] = tensor_core_matmul,
    exact: Callable[[Tensor, Tensor], Tensor] = torch.matmul,
) -> Iterator[InstallationCheck]:
    """Sums whose results are known: a Hopper tensor core's, and float64 ones of BF16 products, exact here."""
    known = [
        ([1.0, 2.0**-24], 1.0),
        ([1.0, -(2.0**-25)], 1 - 2.0**-24),
        ([1.0, -(2.0**-26)], 1.0),
        ([1.0] + [2.0**-25] * 4, 1 + 2.0**-23),
        ([1.0, -1.0, 2.0**-26], 0.0),
    ]
    wrong = sum(
        float(matmul(torch.tensor([terms], dtype=torch.float64), torch.ones(len(terms), 1).double())) != value
        for terms, value in known
    )
    yield InstallationCheck("tensor-core sums that an H200 returned", wrong, "wrong", 0, len(known))
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randn(40, 64, generator=generator).bfloat16().double() for _ in range(2))
    a, b = (torch.where(x.abs() < 2.0**-8, 0.0, x) for x in (a, b))  # so that no sum needs more than 53 bits
    got = exact(a, b.T).tolist()
    wrong = sum(
        Fraction(value) != sum((Fraction(x) * Fraction(y) for x, y in zip(row, column, strict=True)), Fraction(0))
        for row, results in zip(a.tolist(), got, strict=True)
        for column, value in zip(b.tolist(), results, strict=True)
    )
    yield InstallationCheck("float64 products of BF16 matrices", wrong, "wrong", 0, 1600)


GROUPS: tuple[Callable[[], Iterator[InstallationCheck]], ...] = (
    rounding_checks,
    function_checks,
    attention_checks,
    sum_checks,
)


def _different(found: Tensor, expected: Tensor) -> int:
    """Zeros of the other sign count."""
    return int(((found != expected) | (found.signbit() != expected.signbit())).sum())


def _around(numbers: Tensor) -> Tensor:
    """A format's ``numbers``, its ties and what lies next to ties, up to overflow; of either sign."""
    ties = (numbers[:-1] + numbers[1:]) / 2
    below, above = (torch.nextafter(ties, ties.new_tensor(to)) for to in (0.0, torch.inf))
    x = torch.cat([numbers, ties, below, above])
    return torch.cat([x, -x])
