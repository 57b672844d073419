"""The profile of the present GPU, by small Triton kernels."""

from __future__ import annotations

import time
from datetime import UTC, datetime

import torch
from torch import Tensor

from attn_diag.captures.hardware import package_version
from attn_diag.errors import InputError
from attn_diag.head.machine import backend_name
from attn_diag.results.hardware import HardwareProfile, SumProfile
from attn_diag.testing.hardware.functions import CASTS, profile_cast, profile_exp2, profile_multiply
from attn_diag.testing.hardware.sums import DTYPES, profile_sums


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
