"""Rounding to any low-precision format, in one step and in every mode: torch tensors, numpy arrays, plain numbers."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from attn_diag.errors import InputError
from attn_diag.kernels.formats import Rounding, parse
from attn_diag.kernels.formats import round_to as round_torch
from attn_diag.kernels.rounding_numpy import round_array

Values = TypeVar("Values", Tensor, np.ndarray[Any, Any], np.floating[Any], float)


def round_to(x: Values, rounding: str, seed: int = 0) -> Values:
    """``x`` rounded once to a format, returned as what it came as: same type, dtype, shape and device.

        attn_diag.round_to(1 + 2**-8 + 2**-40, "bf16")          # 1.0078125; by way of fp32 it would be 1.0
        attn_diag.round_to(torch.randn(8), "e4m3:stochastic", seed=1)

    Subnormals, overflow, signed zeros, infinities and NaN: the rules are stated in ``attn_diag.kernels.formats``. Every
    fp32 input has been tried for bf16, fp16, e4m3 and e5m2 (``benchmarks/bench_rounding.py``).

    Args:
        x: A torch tensor (any shape and device), a numpy array or scalar, fp32 or float64 each, or a Python float.
        rounding: A format (bf16, fp16, tf32, e4m3, e5m2, fp32, fp64, or e<x>m<y> for x exponent and y mantissa bits,
            2 to 8 and 1 to 23), with an optional mode after a colon: nearest-even (the default), toward-zero, up, down,
            stochastic, random-sign.
        seed: Starts the random modes. The same seed draws the same for the same kind of input on the same kind of
            device; torch on a CPU, torch on CUDA and numpy draw differently.

    Returns:
        What ``x`` is, without gradients.

    Raises:
        InputError: The format or mode is unknown, or the seed is outside 0 .. 2**32 - 1.
        TypeError: Other inputs: integers, and 16- and 8-bit floats, whose own dtype may not hold the result.
    """
    wanted = _parse(rounding)
    if not 0 <= seed < 2**32:  # all that torch's CPU generator looks at
        raise InputError(f"seed must lie between 0 and 2**32 - 1, got {seed}")
    if isinstance(x, Tensor):
        return _round_tensor(x, wanted, seed)
    if isinstance(x, (np.ndarray, np.floating)):
        if x.dtype not in (np.float32, np.float64):
            raise _wrong_input(f"a numpy {x.dtype}")
        rounded = np.array(x) if wanted is None else round_array(np.asarray(x), wanted, seed)
        return rounded if isinstance(x, np.ndarray) else x.dtype.type(rounded[()])
    if isinstance(x, float):
        return float(round_array(np.asarray(x), wanted, seed)[()])
    raise _wrong_input(f"a value of type {type(x).__name__}")


def _parse(text: str) -> Rounding | None:
    """As a site's text, but that "fp32" is the format: at a site it means that nothing is rounded."""
    name, colon, mode = str(text).partition(":")
    try:
        return parse(f"e8m23{colon}{mode}" if name == "fp32" else str(text))
    except ValueError as error:
        raise InputError(f"rounding {text!r}: {error}") from error


def _round_tensor(x: Tensor, rounding: Rounding | None, seed: int) -> Tensor:
    if x.dtype not in (torch.float32, torch.float64):
        raise _wrong_input(f"a tensor of {x.dtype}")
    x = x.detach()
    if rounding is None:
        return x.clone()
    if x.device.type == "cuda":
        try:
            from attn_diag.kernels.backend import interpreted
            from attn_diag.kernels.triton_rounding import round_tensor
        except ImportError:
            pass  # no wheel of triton for this platform: torch's operations do the same, in more passes
        else:
            if not interpreted():
                return round_tensor(x, rounding, seed)
    return round_torch(x, rounding, seed)


def _wrong_input(what: str) -> TypeError:
    return TypeError(
        f"round_to expects fp32 or float64 (a torch tensor, a numpy array or scalar) or a Python float, got {what}; "
        f"convert it first: x.float(), x.astype(np.float32) or float(x)"
    )
