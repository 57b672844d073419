"""Linear attention under the monitor: one call of a layer on checked steps, judged as ``inspect`` judges a capture."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attn_diag.analyses.linear.inspect import inspect_linear_captures
from attn_diag.captures.linear import LinearCapture
from attn_diag.errors import InputError
from attn_diag.reference.linear import OF_HEADS
from attn_diag.results.linear import LinearHead
from attn_diag.watching.live.call import CallPlace
from attn_diag.watching.live.linear_calls import replace_functions
from attn_diag.watching.live.linear_records import LinearRecorder
from attn_diag.watching.monitoring.record import JUDGED_FLAGS, LayerCheck

# Steps of all heads together that are looked at in a layer: 16 heads of a sequence of 1,024.
_MOST = 2**14


class LinearLayers:
    """The calls of linear attention of a model.

    Args:
        begins: Called before each call: where it is, if it is wanted.
        functions: Other functions than flash-linear-attention's, by the operator whose arguments they have.
        sequences: How many of a batch are looked at.
        level: Significance of the tests of means in one check.

    Raises:
        InputError: An operator is not known.
    """

    def __init__(
        self,
        begins: Callable[[], CallPlace | None],
        functions: Mapping[str, Callable[..., Any]] | None,
        sequences: int,
        level: float,
    ) -> None:
        self._functions, self._level = functions, level
        self._recorder = LinearRecorder(begins, sequences)
        replace_functions(self._recorder, functions)()
        self._put_back: Callable[[], None] | None = None

    def look(self, *, wanted: bool) -> None:
        """Have calls recorded from now on, or no more: then nothing stands between a model and its functions."""
        if not wanted and self._put_back is not None:
            self._put_back()
            self._put_back = None
        elif wanted and self._put_back is None:
            self._put_back = replace_functions(self._recorder, self._functions)

    def finish(self) -> tuple[list[LayerCheck], list[str]]:
        """What the calls since the last check show, and why others show nothing."""
        records, self._recorder.calls = self._recorder.calls, []
        refused, self._recorder.refused = [*self._recorder.refused], {}
        captures: dict[tuple[int, str | None], LinearCapture] = {}
        autocast: dict[tuple[int, str | None], torch.dtype | None] = {}
        for record in records:
            try:
                key = record.place.layer, record.place.module
                captures[key], autocast[key] = _some_heads(record.capture()), record.autocast
            except InputError as error:
                refused.append(f"{record.function}: {error}")
        if not captures:
            return [], refused
        device = next(iter(captures.values())).tensors["q"].device.type
        found = inspect_linear_captures(captures.values(), level=self._level, device=device)
        each = (capture.observations[0].heads for capture in found.captures)
        checked = [_checked(*key, heads, autocast[key]) for key, heads in zip(captures, each, strict=True)]
        return checked, refused


def _some_heads(capture: LinearCapture) -> LinearCapture:
    """The first heads, whole groups of them, that have no more than ``_MOST`` steps."""
    q, v = capture.tensors["q"], capture.tensors["v"]
    groups, group = q.shape[2], v.shape[2] // q.shape[2]
    few = max(1, min(groups, _MOST // (q.shape[0] * q.shape[1]) // group))
    if few == groups:
        return capture

    def part(name: str, tensor: Tensor) -> Tensor:
        base = name.removeprefix("d")
        if name == "cu_seqlens":
            return tensor
        if base in OF_HEADS:
            return tensor[: few * group]
        if base in ("initial_state", "final_state"):
            return tensor[:, : few * group]
        return tensor[:, :, : few * (tensor.shape[2] // groups)]

    return replace(capture, tensors={name: part(name, t) for name, t in capture.tensors.items()})


def _checked(layer: int, module: str | None, heads: tuple[LinearHead, ...], autocast: torch.dtype | None) -> LayerCheck:
    values = {name: np.full(len(heads), np.nan) for q in heads[0].quantities for name in _names(q.quantity)}
    for number, head in enumerate(heads):
        for quantity in head.quantities:
            numbers = (quantity.relative_error, quantity.factor)
            for name, value in zip(_names(quantity.quantity), numbers, strict=True):
                values[name][number] = np.nan if value is None else value
    values |= {flag: np.array([float(label in head.labels) for head in heads]) for label, flag in JUDGED_FLAGS.items()}
    words = tuple(said_of(head, autocast) if head.labels[0] in JUDGED_FLAGS else None for head in heads)
    return LayerCheck(layer, module, values, words)


def said_of(head: LinearHead, autocast: torch.dtype | None) -> str:
    """What an alarm says of a head.

    Args:
        head: As it was judged.
        autocast: What autocast rounded to when its function was called; None: it was off.
    """
    first = next((q for q in head.quantities if q.words == head.reasons[0]), None)
    if autocast is None or first is None or first.cause != "accumulator":
        return head.reasons[0]
    made = (
        f"the call ran under autocast to {str(autocast).removeprefix('torch.')}, where plain torch rounds the results"
    )
    return (
        f"{head.reasons[0].removesuffix('.')}; {made} of its products: without autocast they stay fp32, as in kernels."
    )


def _names(quantity: str) -> tuple[str, str]:
    return f"{quantity}_error", f"{quantity}_factor"
