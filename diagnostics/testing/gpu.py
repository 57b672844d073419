"""The arithmetic of the present GPU, measured: sums of products, exp2, products of fp32, casts from fp32.

The probes take any callables; ``measure_hardware`` hands them small Triton kernels.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Literal

import torch
from torch import Tensor

from attn_diag.captures.hardware import package_version
from attn_diag.errors import InputError
from attn_diag.head.machine import backend_name
from attn_diag.reference import FloatFormat, format_of
from attn_diag.results.hardware import CastProfile, Exp2Profile, HardwareProfile, Subnormals, SumProfile
from attn_diag.testing.gpu_sums import DTYPES, profile_sums, rounding_of

Exp2 = Callable[[Tensor], Tensor]
Multiply = Callable[[Tensor, Tensor], Tensor]
Cast = Callable[[Tensor, torch.dtype], Tensor]
CastFormat = Literal["bf16", "fp16", "e4m3", "e5m2"]
CASTS: dict[CastFormat, torch.dtype] = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
}

# Binades of exp2's arguments: from 2**-30, where 2**x rounds to 1, to 126.
_BINADES = range(-30, 7)
_GRID = 2**20


def measure_hardware() -> HardwareProfile:
    """Probe the current CUDA device: sums of products (wgmma and mma.sync), exp2, fp32 products, casts.

    Raises InputError where there is no CUDA device, or Triton is missing or interpreting.
    """
    device = _require_gpu()
    from attn_diag.kernels import triton_probes as kernels

    started = time.monotonic()
    exp2 = profile_exp2(kernels.exp2, device)
    return HardwareProfile(
        gpu=torch.cuda.get_device_name(device),
        backend=backend_name(device),
        torch=torch.__version__,
        triton=package_version("triton") or "unknown",
        measured=datetime.now(UTC).date().isoformat(),
        sums=tuple(_sums(device)),
        exp2=exp2,
        multiply_subnormals=profile_multiply(kernels.multiply, device),
        casts=tuple(profile_cast(kernels.cast, fmt, device) for fmt in CASTS),
        seconds=time.monotonic() - started,
    )


def profile_exp2(exp2: Exp2, device: torch.device, *, per_binade: int = 2**23) -> Exp2Profile:
    """Measure fp32 ``exp2`` on [-126, 0]: ``per_binade`` equally spaced arguments of each binade (2**23: all of them).

    float64's exp2 is the truth: its error is 2**-29 of an fp32 ulp and less.
    """
    worst, at, count = 0.0, 0.0, 0
    for x in _arguments(per_binade, device):
        errors = _errors_ulp(exp2(x), x).abs()
        largest = int(errors.argmax())
        count += len(x)
        # A NaN is the worst there is.
        if not float(errors[largest]) <= worst and not math.isnan(worst):
            worst, at = float(errors[largest]), float(x[largest])
    grid = -torch.arange(1, _GRID + 1, device=device, dtype=torch.float32) / _GRID
    got = exp2(grid)
    errors = _errors_ulp(got, grid)
    truth = torch.exp2(grid.double())
    integers = torch.arange(-126.0, 1.0, device=device)
    zeros = torch.tensor([0.0, -0.0], device=device)
    small = torch.tensor([-127.0, -130.0, -140.0, -149.0], device=device)
    return Exp2Profile(
        arguments=count,
        max_error_ulp=worst,
        worst_argument=at,
        mean_error_ulp=float(errors.mean()),
        mean_relative_error=float((got.double() / truth - 1).mean()),
        not_nearest=float((got != truth.float()).double().mean()),
        exact_at_zero=bool((exp2(zeros) == 1).all()),
        exact_at_integers=torch.equal(exp2(integers).double(), torch.exp2(integers.double())),
        subnormal_results=_kept(exp2(small), torch.exp2(small.double())),
    )


def profile_multiply(multiply: Multiply, device: torch.device) -> Subnormals | None:
    """Whether fp32 products keep subnormal results and subnormal operands."""
    x = torch.tensor([2.0**-100, -(2.0**-70), 2.0**-140, 2.0**60], device=device)
    y = torch.tensor([2.0**-40, 2.0**-60, 2.0**60, 2.0**-149], device=device)
    return _kept(multiply(x, y), x.double() * y.double())


def profile_cast(cast: Cast, fmt: CastFormat, device: torch.device) -> CastProfile:
    """Measure the cast of fp32 to ``fmt``, on quarters of the spacing after 2,048 numbers and next to ties."""
    target = format_of(CASTS[fmt])
    normal, subnormal = _near_numbers(target, device)

    def run(x: Tensor) -> Tensor:
        return cast(x, CASTS[fmt]).double()

    spacing = _spacing(normal, target)
    rounding = rounding_of((normal.double() / spacing).cpu(), (run(normal) / spacing).cpu())
    least = target.smallest_normal * 2.0**-target.precision
    small = run(subnormal)
    kept: Subnormals | None = None
    if rounding is not None and rounding_of((subnormal.double() / least).cpu(), (small / least).cpu()) == rounding:
        kept = "kept"
    elif not small.abs().lt(target.smallest_normal).logical_and(small != 0).any():
        kept = "flushed"
    too_large = run(torch.tensor([3.0e38, -3.0e38] if fmt != "bf16" else [3.4e38, -3.4e38], device=device)).cpu()
    return CastProfile(fmt, len(normal) + len(subnormal), rounding, kept, _overflow(too_large, target))


def _require_gpu() -> torch.device:
    if not torch.cuda.is_available():
        raise InputError(
            "selftest --hardware needs a CUDA GPU and torch finds none; run it on the machine whose kernels you look "
            "at, or leave --hardware out to check this installation"
        )
    device = torch.device("cuda", torch.cuda.current_device())
    try:
        from attn_diag.kernels.backend import BackendError, check_backend

        check_backend(device)
    except ImportError as error:
        raise InputError(f"selftest --hardware needs Triton, which cannot be imported ({error}); install it") from None
    except BackendError as error:
        raise InputError(f"selftest --hardware: {error}") from None
    return device


def _sums(device: torch.device) -> list[SumProfile]:
    """One for each format and each instruction that Triton's tiles use on this GPU."""
    from attn_diag.kernels import triton_probes as kernels

    found: list[SumProfile] = []
    for operands, dtype in DTYPES.items():
        for tile in range(len(kernels.TILES)):

            def dot(a: Tensor, b: Tensor, c: Tensor, tile: int = tile) -> Tensor:
                return kernels.dot(a, b, c, tile)[0]

            empty = torch.zeros(16, 16, dtype=dtype, device=device)
            instruction = kernels.dot(empty, empty, empty.float(), tile)[1]
            if not any(s.operands == operands and s.instruction == instruction for s in found):
                found.append(profile_sums(dot, operands, instruction=instruction, device=device))
    return found


def _arguments(per_binade: int, device: torch.device) -> Iterator[Tensor]:
    """fp32 arguments in [-126, 0), binade by binade."""
    step = 2**23 // per_binade
    for exponent in _BINADES:
        bits = torch.arange(0, 2**23, step, dtype=torch.int32, device=device) | ((exponent + 127) << 23)
        x = -bits.view(torch.float32)
        yield x[x >= -126]


def _errors_ulp(got: Tensor, x: Tensor) -> Tensor:
    wide = x.double()
    return (got.double() - torch.exp2(wide)) / torch.exp2(wide.floor() - 23)


def _kept(results: Tensor, truth: Tensor) -> Subnormals | None:
    """Whether all results are 0, or all are the ``truth``, which fp32 holds; None where it is neither."""
    if bool((results == 0).all()):
        return "flushed"
    return "kept" if torch.equal(results.double(), truth) else None


def _near_numbers(fmt: FloatFormat, device: torch.device) -> tuple[Tensor, Tensor]:
    """fp32 numbers in and between neighbours of ``fmt``, of either sign: normal, and subnormal.

    Quarters of a spacing, and the fp32 numbers on both sides of each tie.
    """
    generator = torch.Generator().manual_seed(0)
    top = int(torch.tensor(fmt.largest, dtype=torch.float64).log2().floor())
    significands = 2**fmt.precision + torch.randint(0, 2**fmt.precision, (2048,), generator=generator)
    exponents = torch.randint(fmt.min_exponent, top, (2048,), generator=generator) - fmt.precision
    quarters = torch.arange(4, dtype=torch.float64) / 4
    normal = torch.ldexp(significands[:, None] + quarters, exponents[:, None])
    # Of the subnormals every one, up to 2,048; ties stay exact in fp32 unless they lie below its own subnormals.
    least = fmt.min_exponent - fmt.precision
    counts = torch.arange(min(2**fmt.precision, 2048), dtype=torch.float64)
    small = torch.ldexp(counts[:, None] + quarters, torch.tensor(least))
    found = []
    for values in (normal, small):
        exact = values.float()
        ties = exact[:, 2]
        around = [torch.nextafter(ties, torch.full_like(ties, to)) for to in (torch.inf, 0.0)]
        one_sign = torch.cat([exact.flatten(), *around])
        found.append(torch.cat([one_sign, -one_sign]).to(device))
    return found[0], found[1]


def _spacing(x: Tensor, fmt: FloatFormat) -> Tensor:
    """Of ``fmt`` at each normal number ``x``, float64."""
    return torch.exp2(x.double().abs().log2().floor() - fmt.precision)


def _overflow(found: Tensor, fmt: FloatFormat) -> Literal["infinite", "largest", "nan"] | None:
    if found.isnan().all():
        return "nan"
    signs = torch.tensor([1.0, -1.0], dtype=torch.float64)
    if torch.equal(found, signs * torch.inf):
        return "infinite"
    return "largest" if torch.equal(found, signs * fmt.largest) else None
