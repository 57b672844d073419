"""Where the Triton kernels run: on a CUDA device, or in Triton's interpreter on the CPU."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec

import torch
from torch import Tensor


class BackendError(RuntimeError):
    """The kernels cannot run on these tensors here; the message says what to do."""


# Said at each launch: products and sums are fused, which decides the kernels' bits. Triton 3.9 warns where that is left
# open, and the default of 3.10 keeps them apart.
COMPILED = {"enable_fp_fusion": True}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def interpreted() -> bool:
    """Whether the kernels were decorated for Triton's interpreter (TRITON_INTERPRET=1 at their import)."""
    from attn_diag.kernels.triton_interpreter import INTERPRETED

    return bool(INTERPRETED.value)


def compiles_for(device: torch.device) -> bool:
    """Whether there is a Triton that could compile the kernels for the device."""
    return device.type == "cuda" and torch.version.hip is None and find_spec("triton") is not None


def launching_on(device: torch.device) -> AbstractContextManager[object]:
    """While it is open, kernels are launched on the device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def check_backend(device: torch.device) -> None:
    """Raise BackendError unless tensors on ``device`` can be computed with.

    CUDA tensors need a GPU build of Triton that is not interpreting; CPU tensors need the interpreter.
    """
    if device.type == "cuda" and interpreted():
        raise BackendError("the kernels were loaded with TRITON_INTERPRET=1, for CPU tensors; unset it to use the GPU")
    if device.type == "cpu" and not interpreted():
        raise BackendError(
            "the Triton kernels need CUDA tensors; to run them interpreted on the CPU, set TRITON_INTERPRET=1 before "
            "triton is first imported (or use attn_diag.kernels.emulate_head, which needs neither)"
        )
    if device.type not in ("cpu", "cuda"):
        raise BackendError(f"the Triton kernels run on cuda, or interpreted on cpu, not on {device.type}")


def describe_backend(device: torch.device) -> str:
    """The name a report gives this backend: "triton interpreter" or "triton sm90"."""
    if device.type != "cuda":
        return "triton interpreter"
    major, minor = torch.cuda.get_device_capability(device)
    return f"triton sm{major}{minor}"


def has_tensor_memory(device: torch.device) -> bool:
    """Whether the device copies tiles through tensor descriptors (TMA), and compares packed 16-bit pairs."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


def has_hopper_products(device: torch.device) -> bool:
    """Whether the device has Hopper's products of warpgroups, and Triton the Gluon that ours are written in."""
    import triton

    return torch.cuda.get_device_capability(device)[0] == 9 and triton.__version__.startswith(("3.6", "3.7"))


def fits_descriptor(tensor: Tensor) -> bool:
    """Whether TMA can address the [B, H, T, D] tensor: contiguous features, everything else in steps of 16 bytes."""
    step = 16 // tensor.element_size()
    strides = [s for n, s in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True) if n > 1]
    aligned = tensor.data_ptr() % 16 == 0 and all(s > 0 and s % step == 0 for s in strides)
    return tensor.stride(-1) == 1 and aligned
