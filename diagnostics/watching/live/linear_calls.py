"""Calls of linear attention met where they run: flash-linear-attention's functions, by their names.

``chunk_kda``, ``fused_recurrent_rwkv7`` and their kin are found in every module that has them under their own name,
and put back afterwards. A call's arguments are read by the function's own signature; what it cannot be judged by is
refused with the reason. Gradients are those that autograd hands to the arguments.
"""

from __future__ import annotations

import functools
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attn_diag.captures.linear import ALIASES, LinearCapture
from attn_diag.errors import InputError
from attn_diag.printing import say
from attn_diag.reference.linear import LINEAR_OPERATORS
from attn_diag.watching.live.functions import namespaces

_NAME = re.compile(r"(?:fused_)?(?:chunk|recurrent)_(\w+)")
_OPERATORS = {"dplr_delta_rule": "dplr", "iplr_delta_rule": "iplr"}
_SWITCHES = ("use_qk_l2norm_in_kernel", "normalize")
# What changes the mathematics in a way that a capture does not state, where it is given and not False.
_REFUSED = {
    "gv": "a decay of v", "reverse": "a reversed sequence", "use_gate_in_kernel": "a gate made in the kernel",
    "use_beta_sigmoid_in_kernel": "a sigmoid of beta made in the kernel", "state_v_first": "states in [V, K] order",
    "cp_context": "a sequence that several ranks share", "head_first": "heads before steps",
}  # fmt: skip


class LinearCalls(list[LinearCapture]):
    """The calls captured so far, complete once their backward has run; and why others were not."""

    def __init__(self) -> None:
        super().__init__()
        self.refused: dict[str, int] = {}
        """Reasons, each with how many calls it kept out."""


@contextmanager
def capture_linear(
    folder: str | os.PathLike[str] | None = None,
    *,
    most: int = 64,
    functions: Mapping[str, Callable[..., Any]] | None = None,
) -> Iterator[LinearCalls]:
    """Capture calls of linear attention: those that begin inside, complete when it ends.

    Args:
        folder: Where captures are written, call0.safetensors and so on; None: they are only kept.
        most: Calls that are kept; later ones run as ever.
        functions: Other functions to meet, by the operator whose arguments they have; they are called under the names
            that modules have for them now.

    Yields:
        The captures, which fill when the ``with`` ends.
    """
    calls, recorder = LinearCalls(), _Recorder(most)
    met = {id(f): (op, f) for op, f in (functions or {}).items()}
    for operator in met.values():
        if operator[0] not in LINEAR_OPERATORS:
            raise InputError(f"operator must be one of {', '.join(LINEAR_OPERATORS)}, got {operator[0]!r}")
    met |= {id(f): (op, f) for op, f in _loaded()}
    wrapped = {key: recorder.wrapped(operator, function) for key, (operator, function) in met.items()}
    changed: list[tuple[dict[str, Any], str, Any]] = []
    for space in list(namespaces()):
        for name, value in list(space.items()):
            if id(value) in wrapped and callable(value):
                changed.append((space, name, value))
                space[name] = wrapped[id(value)]
    try:
        yield calls
    finally:
        for space, name, value in changed:
            space[name] = value
        recorder.finish(calls, None if folder is None else Path(folder))


def _loaded() -> Iterator[tuple[str, Callable[..., Any]]]:
    """fla's functions in loaded modules, with their operators."""
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith("fla.ops") and module is not None:
            for name, value in list(vars(module).items()):
                found = _NAME.fullmatch(name)
                if found is None or not callable(value):
                    continue
                operator = _OPERATORS.get(found[1], found[1])
                if operator in LINEAR_OPERATORS:
                    yield operator, value


class _Recorder:
    """Keeps calls, detached, and the gradients that come later."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._calls: list[tuple[str, str, dict[str, Any], dict[str, Tensor]]] = []
        self._refused: dict[str, int] = {}
        self._inside = False

    def wrapped(self, operator: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, which records its calls."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            # One of these may call another.
            if self._inside or len(self._calls) >= self._most:
                return function(*args, **kwargs)
            slots: dict[str, Tensor] = {}
            try:
                bound = _aliased(operator, inspect.signature(function).bind(*args, **kwargs), slots)
            except TypeError:
                return function(*args, **kwargs)  # which says what is wrong
            self._inside = True
            try:
                result = function(*bound.args, **bound.kwargs)
            finally:
                self._inside = False
            try:
                self._record(operator, function, bound, slots, result)
            except Exception as error:
                self._refuse(f"{type(error).__name__}: {error}")
            return result

        return call

    def _refuse(self, reason: str) -> None:
        self._refused[reason] = self._refused.get(reason, 0) + 1

    def _record(
        self,
        operator: str,
        function: Callable[..., Any],
        bound: inspect.BoundArguments,
        slots: dict[str, Tensor],
        result: Any,
    ) -> None:
        bound.apply_defaults()
        given = dict(bound.arguments)
        given |= given.pop("kwargs", {})
        for name, what in _REFUSED.items():
            value = given.get(name)
            if value is not None and value is not False:
                self._refuse(f"{function.__name__} with {name}: {what} is not known to a capture; pass what it makes")
                return
        known = ALIASES[""] | ALIASES.get(operator, {})
        setting = LINEAR_OPERATORS[operator]
        wanted = {*setting.arguments, *setting.optional, "initial_state", "cu_seqlens"}
        if operator == "gated_delta_rule" and given.get("gk") is not None:
            self._refuse(f"{function.__name__} with gk: a decay a channel; that is kda")
            return
        tensors: dict[str, Any] = {}
        for theirs, value in given.items():
            ours = known.get(theirs, theirs)
            if ours in wanted and isinstance(value, Tensor):
                # What follows may change it in place.
                tensors[ours] = value.detach().clone()
        o, state = result[:2] if isinstance(result, tuple) else (result, None)
        tensors["o"] = o.detach().clone()
        if isinstance(state, Tensor):
            tensors["final_state"] = state.detach().clone()
            if state.requires_grad:
                state.register_hook(functools.partial(_keep, slots, "dfinal_state"))  # type: ignore[no-untyped-call]
        if o.requires_grad:
            o.register_hook(functools.partial(_keep, slots, "do"))
        options = {"scale": given.get("scale"), "l2norm": bool(given.get(_SWITCHES[0])), "kernel": function.__name__}
        options["normalize"] = bool(given.get(_SWITCHES[1]))
        self._calls.append((operator, function.__name__, {**tensors, **{"options": options}}, slots))

    def finish(self, calls: LinearCalls, folder: Path | None) -> None:
        for number, (operator, name, given, slots) in enumerate(self._calls):
            options = given.pop("options")
            gradients = slots if "do" in slots or "dfinal_state" in slots else {}
            try:
                capture = LinearCapture.from_tensors(operator, {**given, **gradients}, **options)
            except InputError as error:
                self._refuse(f"{name}: {error}")
                continue
            if folder is not None:
                folder.mkdir(parents=True, exist_ok=True)
                capture.save(folder / f"call{number}_{name}.safetensors")
            calls.append(capture)
        calls.refused.update(self._refused)
        for reason, count in self._refused.items():
            say(f"attn-diag: {count} calls of linear attention were not captured: {reason}")


def _aliased(operator: str, bound: inspect.BoundArguments, slots: dict[str, Tensor]) -> inspect.BoundArguments:
    """The call with views of its tensors: their gradients are this call's alone, whatever else uses the tensors."""
    known = ALIASES[""] | ALIASES.get(operator, {})
    for name, value in bound.arguments.items():
        if isinstance(value, Tensor) and value.requires_grad and torch.is_grad_enabled():
            alias = value.view_as(value)
            alias.register_hook(functools.partial(_keep, slots, f"d{known.get(name, name)}"))  # type: ignore[no-untyped-call]
            bound.arguments[name] = alias
    return bound


def _keep(slots: dict[str, Tensor], name: str, gradient: Tensor | None) -> None:
    # A function that leaves a gradient out hands None on.
    if gradient is not None:
        slots[name] = gradient.detach().clone()
