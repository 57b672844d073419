"""Torch's fused attention operators with mistakes in them, put into the dispatcher for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.library import Library

# By device: the forward and the backward, and where the backward's arguments are.
OPERATORS: dict[str, tuple[str, str]] = {
    "cpu": (
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention_for_cpu_backward",
    ),
    "flash": ("_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_backward"),
    "efficient": ("_scaled_dot_product_efficient_attention", "_scaled_dot_product_efficient_attention_backward"),
    "cudnn": ("_scaled_dot_product_cudnn_attention", "_scaled_dot_product_cudnn_attention_backward"),
}


@dataclass
class Call:
    """A backward, and what it returned."""

    do: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor

    def __post_init__(self) -> None:
        self.scale = self.q.shape[3] ** -0.5

    def causal_probs(self, shift: int = 0) -> Tensor:
        scores = self.q.float() @ self._repeated(self.k).mT * self.scale
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1 + shift)
        probs: Tensor = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        return probs

    def _repeated(self, x: Tensor) -> Tensor:
        return x.float().repeat_interleave(self.q.shape[1] // x.shape[1], 1)

    def again(self, probs: Tensor, delta: Tensor | float) -> None:
        """dQ and dK from other probabilities or another delta."""
        dscores = probs * (self.do.float() @ self._repeated(self.v).mT - delta)
        dk = dscores.mT @ self.q.float() * self.scale
        self.dk = dk.view(len(dk), self.k.shape[1], -1, *dk.shape[2:]).sum(2).to(self.k.dtype)
        self.dq = (dscores @ self._repeated(self.k) * self.scale).to(self.q.dtype)


def _negated(c: Call) -> None:
    c.dq = -c.dq


def _without_delta(c: Call) -> None:
    c.again(c.causal_probs(), 0.0)


def _delta_of_another_head(c: Call) -> None:
    c.again(c.causal_probs(), (c.do.float() * c.o.float()).sum(-1, keepdim=True).roll(1, 1))


def _future_key(c: Call) -> None:
    c.again(c.causal_probs(1), (c.do.float() * c.o.float()).sum(-1, keepdim=True))


def _key_head_zero(c: Call) -> None:
    c.dk = c.dk.clone()
    c.dk[:, -1] = 0


def _value_head_zero(c: Call) -> None:
    c.dv = c.dv.clone()
    c.dv[:, -1] = 0


def _key_nan(c: Call) -> None:
    c.dk = c.dk.clone()
    c.dk[0, 1, 3] = torch.nan


def _value_infinite(c: Call) -> None:
    c.dv = c.dv.clone()
    c.dv[0, 1, 3, 0] = torch.inf


def _query_nan(c: Call) -> None:
    c.dq = c.dq.clone()
    c.dq[0, 1, 3] = torch.nan


def _stale_scale(c: Call) -> None:
    c.dq = c.dq * 0.75


def _dk_unscaled(c: Call) -> None:
    c.dk = c.dk / c.scale


def _dv_transposed(c: Call) -> None:
    c.dv = c.dv.mT.reshape(c.dv.shape)


def _last_features(c: Call) -> None:
    c.dq = c.dq.clone()
    c.dq[..., -4:] = 0


def _tile(c: Call) -> None:
    c.dq = c.dq.clone()
    c.dq[:, :, -16:] = 0


def _rows_missing(c: Call) -> None:
    probs = c.causal_probs()
    probs[:, :, -16:] = 0
    dv = probs.mT @ c.do.float()
    c.dv = dv.view(len(dv), c.v.shape[1], -1, *dv.shape[2:]).sum(2).to(c.v.dtype)


def _unrelated_then_zero(c: Call) -> None:
    """What flash-attn-4 returned for D = 72: some rows right, others mixed up, the last never written."""
    dq, t = c.dq.clone(), c.dq.shape[2]
    dq[:, :, t // 4 : t // 2] = c.dq[:, :, t // 4 : t // 2].flip(2)
    dq[:, :, t // 2 :] = 0
    c.dq = dq


def _dv_is_dk(c: Call) -> None:
    c.dv = c.dk.clone()


def _tenth_too_large(o: Tensor) -> Tensor:
    return o * 1.1


def _a_head_zero(o: Tensor) -> Tensor:
    o = o.clone()
    o[:, -1] = 0
    return o


def _rows_shifted(o: Tensor) -> Tensor:
    return o.roll(1, 2)


# What does wrong, and what of the operators it is.
FAULTS: dict[str, Callable[[Any], Any]] = {
    "dQ negated": _negated,
    "no delta": _without_delta,
    "delta of another head": _delta_of_another_head,
    "one future key": _future_key,
    "dK of a head zero": _key_head_zero,
    "dV of a head zero": _value_head_zero,
    "dK of a head NaN": _key_nan,
    "dV of a head Inf": _value_infinite,
    "dQ of a head NaN": _query_nan,
    "dQ of a stale scale": _stale_scale,
    "dK unscaled": _dk_unscaled,
    "dV transposed": _dv_transposed,
    "last features of dQ zero": _last_features,
    "a tile of dQ zero": _tile,
    "rows missing in dV": _rows_missing,
    "dQ unrelated, then zero": _unrelated_then_zero,
    "dV is dK": _dv_is_dk,
    "O a tenth too large": _tenth_too_large,
    "O of a head zero": _a_head_zero,
    "O of the row before": _rows_shifted,
}
OF_O = {"O a tenth too large", "O of a head zero", "O of the row before"}


@contextmanager
def replaced(fault: str, device: str, when: Callable[[], bool] = lambda: True) -> Iterator[None]:
    """With a fused operator that does wrong.

    Args:
        fault: Which of ``FAULTS``.
        device: One of ``OPERATORS``.
        when: Asked at every call whether it does.
    """
    name, key = OPERATORS[device][0 if fault in OF_O else 1], "CPU" if device == "cpu" else "CUDA"
    kernel, change = torch.library.get_kernel(f"aten::{name}", key), FAULTS[fault]

    def forward(keys: Any, *given: Any, **options: Any) -> Any:
        found = kernel.call_boxed(keys, *given, **options)
        return (change(found[0]), *found[1:]) if when() else found

    def backward(keys: Any, *given: Any, **options: Any) -> Any:
        found = kernel.call_boxed(keys, *given, **options)
        if not when():
            return found
        do, q, k, v = given[:4]
        call = Call(do, q, k, v, given[5 if device == "efficient" else 4], *found[:3])
        change(call)
        # Laid out as they were: a compiled graph counts on it.
        made = (torch.empty_like(t).copy_(new) for t, new in zip(found, (call.dq, call.dk, call.dv), strict=False))
        return (*made, *found[3:])

    library: Any = Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    library.impl(name, forward if fault in OF_O else backward, key, with_keyset=True, allow_override=True)
    try:
        yield
    finally:
        library._destroy()
