"""RWKV-LM's own operators of RWKV-7, met in torch's dispatcher: autograd Functions call them, and TorchScript those.

Their forward is given six arguments [B, T, H, N] and writes o, states and more; their backward is given the same six,
dO and those states, and writes the six gradients. In place of the decay's logarithm they take what it is made of, so
that there is no gradient of g. Operators of these names with other arguments are left alone. Sources:
github.com/BlinkDL/RWKV-LM, RWKV-v5/cuda and RWKV-v7/train_temp/cuda.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from attn_diag.captures.linear_gates import Gates
from attn_diag.watching.live.linear_records import LinearCallRecord, LinearRecorder, kept
from attn_diag.watching.live.operators import Kernels, Makes
from attn_diag.watching.live.untraced import passed_by


def _exponential(w: Tensor) -> Tensor:
    return -w.float().exp()


def _clamped(w: Tensor) -> Tensor:
    return -math.exp(-0.5) * w.float().sigmoid()


_CLAMPED = ("qgkvab", _clamped)
# The order of their arguments, by our names, and the decay's logarithm of what they are given as g.
_OPERATORS: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "wind_backstepping": ("gqkvab", _exponential),
    **dict.fromkeys(("rwkv7_clampw", "rwkv7_clampw_v3", "rwkv7_clampw128_v2"), _CLAMPED),
}

_KERNELS = Kernels()
_LISTENING: list[LinearRecorder] = []
# By whom, and where their states are: fp32 tensors of one call, which its backward is given again.
_RAN: MutableMapping[tuple[int, int], LinearCallRecord] = WeakValueDictionary()


def is_loaded() -> bool:
    """Whether one of these operators is there."""
    return any(torch._C._dispatch_has_kernel(f"{name}::forward") for name in _OPERATORS)


def listen(recorder: LinearRecorder) -> Callable[[], None]:
    """Have calls of these operators recorded; what is returned ends that.

    An operator has one kernel of ours, however many listen: one below another could not be taken away first.
    """
    _LISTENING.append(recorder)
    _KERNELS.put(_wanted())

    def end() -> None:
        if recorder in _LISTENING:
            _LISTENING.remove(recorder)
        if not _LISTENING:
            _KERNELS.remove()

    return end


def _wanted() -> Iterator[tuple[str, str, Makes]]:
    for name, (order, decay) in _OPERATORS.items():
        for device in ("CPU", "CUDA"):
            yield f"{name}::forward", device, _forward(name, order, decay)
            yield f"{name}::backward", device, _backward(order)


def _forward(name: str, order: str, decay: Callable[[Tensor], Tensor]) -> Makes:
    def make(kernel: Any, _arguments: Any) -> Callable[..., Any]:
        def run(keys: Any, *args: Any, **kwargs: Any) -> Any:
            result = kernel(keys, *args, **kwargs)
            if len(args) != len(order) + 3 or type(args[0]) is not Tensor:
                return result
            *given, o, states, _ = args
            for recorder in tuple(_LISTENING):
                key = id(recorder), states.data_ptr()
                _RAN.pop(key, None)  # where another call had its own before
                if (place := recorder.begins()) is not None:
                    first = recorder.first(o)
                    tensors = {n: kept(n, t, first) for n, t in zip((*order, "o"), (*given, o), strict=True)}
                    gates = Gates({"g": decay(tensors["g"])})
                    record = LinearCallRecord("rwkv7", name, place, tensors, {"kernel": name}, {}, gates=gates)
                    recorder.calls.append(record)
                    _RAN[key] = record
            return result

        passed_by(run.__code__)
        return run

    return make


def _backward(order: str) -> Makes:
    def make(kernel: Any, _arguments: Any) -> Callable[..., Any]:
        def run(keys: Any, *args: Any, **kwargs: Any) -> Any:
            result = kernel(keys, *args, **kwargs)
            if len(args) != 2 * len(order) + 3 or type(args[0]) is not Tensor:
                return result
            dy, states, _, *made = args[len(order) :]
            for recorder in tuple(_LISTENING):
                if (record := _RAN.pop((id(recorder), states.data_ptr()), None)) is not None:
                    gradients = {"do": dy} | {f"d{n}": t for n, t in zip(order, made, strict=True)}
                    record.gradients.update({n: kept(n, t, recorder.first(dy)) for n, t in gradients.items()})
            return result

        passed_by(run.__code__)
        return run

    return make
