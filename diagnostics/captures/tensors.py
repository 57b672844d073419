"""Other libraries' arrays as torch tensors, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from attn_diag.errors import InputError

# What NumPy has of ml_dtypes, by name, for which torch has a type of the same bits.
_OF_BITS = {
    "bfloat16": (np.int16, torch.bfloat16),
    "float8_e4m3fn": (np.uint8, torch.float8_e4m3fn),
    "float8_e5m2": (np.uint8, torch.float8_e5m2),
}


def as_tensor(name: str, value: Any) -> Tensor:
    """``value`` as a tensor of the same bits.

    Args:
        name: What it is called, for errors.
        value: A tensor of torch, an array of NumPy (BF16 and FP8 as ml_dtypes has them) or JAX, or of another library
            that has DLPack (CuPy, MLX, TensorFlow).

    Raises:
        InputError: It is none, is not known yet (inside ``jax.jit``), or has a type that torch lacks; and what to do.
    """
    if isinstance(value, Tensor):
        return value
    if isinstance(value, np.ndarray):
        return tensor_from_numpy(name, value)
    library = type(value).__module__.partition(".")[0]
    if library in ("jax", "jaxlib"):
        return _from_jax(name, value)
    if hasattr(value, "__dlpack__"):
        try:
            return from_dlpack(value)
        except Exception as error:
            raise InputError(
                f"{name}: torch cannot take this {_kind(value)} ({error}); give it as a NumPy array"
            ) from None
    hint = f"torch.tensor({name})" if isinstance(value, list | tuple | int | float) else f"torch.from_numpy(… {name} …)"
    raise InputError(f"{name} must be a tensor of torch, NumPy or JAX, got {_kind(value)}; {hint} makes one")


def _from_jax(name: str, value: Any) -> Tensor:
    """NumPy's copy of it: torch's DLPack takes no BF16 of a CPU's from every JAX, and half of an int4's bits."""
    try:
        return tensor_from_numpy(name, np.asarray(value))
    except InputError:
        raise
    except Exception as error:
        # A tracer has no values.
        raise InputError(
            f"{name} is a JAX array without values here ({type(error).__name__}): outside jax.jit and jax.grad it has "
            "them; return it from the compiled function and inspect it there, or use jax.debug.callback"
        ) from None


def tensor_from_numpy(name: str, array: np.ndarray[Any, Any]) -> Tensor:
    """A NumPy array as a tensor. Raises InputError, naming it, for a type that torch lacks."""
    native = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("="))
    if native.dtype.name in _OF_BITS:
        bits, dtype = _OF_BITS[native.dtype.name]
        return torch.from_numpy(native.view(bits).copy()).view(dtype)
    try:
        return torch.from_numpy(native.copy())
    except TypeError:
        raise InputError(
            f"{name} is an array of {array.dtype.name}, which torch has not; expected one of float64, float32, "
            "float16, bfloat16 or float8 (ml_dtypes), or of whole numbers"
        ) from None


def _kind(value: object) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
