"""Gates that functions of linear attention make of their arguments before the recurrence begins.

flash-linear-attention's layers leave the decay's softplus and beta's sigmoid to the kernel (``use_gate_in_kernel``,
``use_beta_sigmoid_in_kernel``), Mamba-2's functions dt's bias and softplus. A capture has what comes out of them, made
here in fp32 as kernels make it; then there is no gradient of g, beta or dt to be judged: autograd has that of what went
in.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from attn_diag.captures.linear import VALUES_FIRST
from attn_diag.errors import InputError

_GATE, _SIGMOID = "use_gate_in_kernel", "use_beta_sigmoid_in_kernel"
_TURNED = ("state_v_first", "transpose_state_layout")
_SIXTEEN = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Gates:
    """Arguments as the recurrence takes them, instead of what the function was given."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    """By our names."""
    otherwise: dict[str, Tensor] = field(default_factory=dict)
    """The same as plain torch makes them, in their own 16 bits."""


def has_values_first(bound: inspect.BoundArguments) -> bool:
    """Whether a function that is called with this has its states as [V, K]."""
    given = {**bound.arguments, **bound.arguments.get("kwargs", {})}
    return VALUES_FIRST in bound.signature.parameters or any(given.get(name) for name in _TURNED)


def gates(operator: str, given: Mapping[str, Any]) -> Gates:
    """The gates that a function makes itself.

    Args:
        operator: Whose arguments it has.
        given: Its arguments by its own names.

    Raises:
        InputError: It has a gate that is not known here.
    """
    if operator == "mamba2":
        return _steps(given)
    found: dict[str, Tensor] = {}
    with torch.autocast(given["q"].device.type if "q" in given else "cpu", enabled=False):
        if given.get(_GATE):
            found["g"] = _decay(operator, given)
        if given.get(_SIGMOID):
            found["beta"] = given["beta"].float().sigmoid() * (2.0 if given.get("allow_neg_eigval") else 1.0)
    return Gates(found)


def _decay(operator: str, given: Mapping[str, Any]) -> Tensor:
    """The logarithm of the decay, as fla.ops.kda.gate and fla.ops.gated_delta_rule.gate have it."""
    g, a_log, bias, bound = given["g"].float(), given.get("A_log"), given.get("dt_bias"), given.get("lower_bound")
    if operator not in ("kda", "gated_delta_rule") or (a_log is None and bound is None):
        raise InputError(f"with {_GATE}: a gate of {operator} that is made in the kernel is not known to a capture")
    like = (g.shape[2], -1) if operator == "kda" else (g.shape[2],)
    raised = g if bias is None else g + bias.float().view(like)
    rate = None if a_log is None else a_log.float().exp().view(g.shape[2], *([1] if operator == "kda" else []))
    made: Tensor
    if bound is not None and operator == "kda":
        made = float(bound) * (raised if rate is None else rate * raised).sigmoid()
    else:
        assert rate is not None
        made = -rate * functional.softplus(raised)
    return made


def _steps(given: Mapping[str, Any]) -> Gates:
    """Mamba-2's dt with its bias, softplus and limits."""
    dt, bias, soft = given["dt"], given.get("dt_bias"), bool(given.get("dt_softplus"))
    low, high = given.get("dt_limit") or (0.0, float("inf"))
    skip = given.get("D")
    if isinstance(skip, Tensor) and skip.ndim != 1:
        raise InputError("with D of more than one number a head: not known to a capture")
    if bias is None and not soft and (low, high) == (0.0, float("inf")):
        return Gates()

    def made(dt: Tensor) -> Tensor:
        raised = dt if bias is None else dt + bias.to(dt.dtype)
        return (functional.softplus(raised) if soft else raised).clamp(low, high)

    with torch.autocast(dt.device.type, enabled=False):
        whole = made(dt.float())
    # As the call's own autocast has it.
    return Gates({"dt": whole}, {"dt": made(dt).float()} if dt.dtype in _SIXTEEN else {})
