"""Functions of linear attention that a process of their own can import."""

from __future__ import annotations

import os
import signal

import torch
from planted_linear import DELTA_RULE, foreign, planted
from torch import Tensor

chunked = foreign("gated_delta_rule")
no_state = planted("gated_delta_rule", next(f for f in DELTA_RULE if f.name == "no inter-chunk term"))


def without_state(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float) -> Tensor:
    """Takes no initial state."""
    del k, g, beta, scale
    return v + q


def overwriting(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float, initial_state: Tensor
) -> Tensor:
    """Changes its k."""
    del q, g, beta, scale, initial_state
    with torch.no_grad():
        k *= 0
    return v + k


def dying(*_: Tensor, **__: Tensor) -> Tensor:
    """Its process dies."""
    os.kill(os.getpid(), signal.SIGSEGV)
    raise AssertionError
