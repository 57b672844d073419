"""Calls of linear attention as they are recorded: what a function was given and returned, and the gradients since.

A call's arguments are read by the function's own signature; what it cannot be judged by is refused with the reason.
Gradients are those that autograd hands to the arguments.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from attn_diag.captures.linear import ALIASES, VALUES_FIRST, LinearCapture
from attn_diag.captures.linear_gates import Gates, gates, has_values_first
from attn_diag.errors import InputError
from attn_diag.reference.linear import LINEAR_OPERATORS, OF_HEADS, linear_reference
from attn_diag.watching.live.stream_capture import in_cuda_graph

# Of autograd's graph of one call: recurrences in torch have ten a step.
_MOST_NODES = 100_000
# What a function of ours has that records no more, where another one stands in front of it.
ENDED = "attn_diag_ended"
_SWITCHES = ("use_qk_l2norm_in_kernel", "normalize")
# What changes the mathematics in a way that a capture does not state, where it is given and not False.
_REFUSED = {
    "gv": "a decay of v", "reverse": "a reversed sequence", "cp_context": "a sequence that several ranks share",
    "head_first": "heads before steps", "z": "a gate of o in the kernel", "seq_idx": "numbers of packed sequences",
}  # fmt: skip


@dataclass(frozen=True)
class LinearCallRecord:
    """One call, detached, and the gradients that came since."""

    operator: str
    """Whose arguments it has."""
    function: str
    """The function's name."""
    place: Any
    """What the recorder was told when the call began."""
    tensors: dict[str, Tensor]
    """Arguments and outputs."""
    options: dict[str, Any]
    """``scale``, ``l2norm``, ``normalize``, ``kernel``."""
    gradients: dict[str, Tensor]
    """dO and the gradients of arguments."""
    without: tuple[str, ...] = ()
    """Arguments that need a gradient and do not lead to o nor the last state: theirs is zero."""
    gates: Gates = field(default_factory=Gates)
    """Arguments that the function makes itself: their gradients are not those of what is captured."""
    autocast: torch.dtype | None = None
    """What autocast rounded to when it was called; None: it was off."""

    def capture(self, **metadata: Any) -> LinearCapture:
        """It as a capture.

        Args:
            **metadata: Fields of ``Metadata``.

        Raises:
            InputError: Its tensors are no call of the operator.
        """
        whole = "do" in self.gradients or "dfinal_state" in self.gradients
        gradients = dict(self.gradients) if whole else {}
        if whole:
            gradients |= {f"d{name}": torch.zeros_like(self.tensors[name]) for name in self.without}
        made = self.gates.tensors
        known = {n for n in self.tensors if n not in made} | {"o", "final_state"}
        gradients = {n: g for n, g in gradients.items() if n.removeprefix("d") in known}
        tensors = {**self.tensors, **gradients, **made}
        capture = LinearCapture.from_tensors(self.operator, tensors, **self.options, **metadata)
        if not self.gates.otherwise:
            return capture
        other = replace(capture, tensors={**capture.tensors, **self.gates.otherwise})
        return min(capture, other, key=_apart)


def _apart(capture: LinearCapture) -> float:
    """How far o is from its reference."""
    return float((capture.tensors["o"].double() - linear_reference(capture.call).values["o"]).norm())


class LinearRecorder:
    """Keeps calls, detached, and the gradients that come later.

    Args:
        begins: Called before each call; what it returns is the record's ``place``, None: the call is not kept.
        sequences: So many of a batch are kept, the first; None: all, and always of packed sequences.
    """

    def __init__(self, begins: Callable[[], Any], sequences: int | None = None) -> None:
        self._begins, self._sequences = begins, sequences
        self.calls: list[LinearCallRecord] = []
        self.refused: dict[str, int] = {}
        self._inside = False

    def begins(self) -> Any:
        """The place of a call that runs; None where it is not to be recorded: in another one, or in a CUDA graph."""
        return None if self._inside or in_cuda_graph() else self._begins()

    def first(self, tensor: Tensor) -> int | None:
        """So many sequences of a batch are kept, the first; None: all of it."""
        return None if len(tensor) <= (self._sequences or len(tensor)) else self._sequences

    def wrapped(self, operator: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, which records its calls."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if vars(call)[ENDED] or (place := self.begins()) is None:
                return function(*args, **kwargs)
            slots: dict[str, Tensor] = {}
            try:
                bound = inspect.signature(function).bind(*args, **kwargs)
            except TypeError:
                return function(*args, **kwargs)  # which says what is wrong
            batched = [t for t in bound.arguments.values() if isinstance(t, Tensor) and t.ndim > 2]
            packed = bound.arguments.get("cu_seqlens") is not None
            first = None if packed or not batched else self.first(batched[0])
            turned = has_values_first(bound)
            try:
                tensors = _arguments(operator, bound, first, turned=turned)
            except Exception as error:
                self.refuse(f"{type(error).__name__}: {error}")
                return function(*args, **kwargs)
            aliases = _alias(operator, bound, slots, first, turned=turned)
            self._inside = True
            try:
                result = _with_alias(function(*bound.args, **bound.kwargs))
            finally:
                self._inside = False
            try:
                self._record(operator, function, bound, tensors, slots, result, first, place, aliases, turned=turned)
            except InputError as error:
                self.refuse(f"{function.__name__} {error}")
            except Exception as error:
                self.refuse(f"{type(error).__name__}: {error}")
            return result

        vars(call)[ENDED] = False  # whatever is so of the function
        return call

    def refuse(self, reason: str) -> None:
        """Count a call that cannot be a capture."""
        self.refused[reason] = self.refused.get(reason, 0) + 1

    def _record(
        self,
        operator: str,
        function: Callable[..., Any],
        bound: inspect.BoundArguments,
        tensors: dict[str, Tensor],
        slots: dict[str, Tensor],
        result: Any,
        first: int | None,
        place: Any,
        aliases: Mapping[str, Tensor],
        *,
        turned: bool,
    ) -> None:
        bound.apply_defaults()
        given = _given(bound)
        for name, what in _REFUSED.items():
            value = given.get(name)
            if value is not None and value is not False:
                self.refuse(f"{function.__name__} with {name}: {what} is not known to a capture; pass what it makes")
                return
        if operator == "gated_delta_rule" and given.get("gk") is not None:
            self.refuse(f"{function.__name__} with gk: a decay a channel; that is kda")
            return
        with torch.no_grad():
            made = gates(operator, given)
        made = Gates(*({n: kept(n, t, first) for n, t in each.items()} for each in (made.tensors, made.otherwise)))
        o, state = result[:2] if isinstance(result, tuple) else (result, None)
        tensors["o"] = kept("o", o, first)
        if isinstance(state, Tensor):
            tensors["final_state"] = kept("final_state", state, first, turned=turned)
            if state.requires_grad:
                state.register_hook(  # type: ignore[no-untyped-call]
                    functools.partial(_keep, slots, "dfinal_state", first, turned=turned)
                )
        if o.requires_grad:
            o.register_hook(functools.partial(_keep, slots, "do", first))
        options = {"scale": given.get("scale"), "l2norm": bool(given.get(_SWITCHES[0])), "kernel": function.__name__}
        options["normalize"] = bool(given.get(_SWITCHES[1]))
        asked = {n: alias for n, alias in aliases.items() if n in tensors and n not in made.tensors}
        without = _unreached([o, state], asked)
        kind = o.device.type
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        name = function.__name__
        self.calls.append(LinearCallRecord(operator, name, place, tensors, options, slots, without, made, autocast))


def _ours(known: Mapping[str, str], theirs: str) -> str:
    return "initial_state" if theirs == VALUES_FIRST else known.get(theirs, theirs)


def _given(bound: inspect.BoundArguments) -> dict[str, Any]:
    given = dict(bound.arguments)
    rest: dict[str, Any] = given.pop("kwargs", {})
    return given | rest


def _arguments(operator: str, bound: inspect.BoundArguments, first: int | None, *, turned: bool) -> dict[str, Tensor]:
    """Copies of the tensors that the operator takes: the call may write into them, and so may what follows."""
    known, setting = ALIASES[""] | ALIASES.get(operator, {}), LINEAR_OPERATORS[operator]
    wanted = {*setting.arguments, *setting.optional, "initial_state", "cu_seqlens"}
    given = {_ours(known, theirs): value for theirs, value in _given(bound).items()}
    return {
        ours: kept(ours, value, first, turned=turned)
        for ours, value in given.items()
        if ours in wanted and isinstance(value, Tensor)
    }


def _alias(
    operator: str, bound: inspect.BoundArguments, slots: dict[str, Tensor], first: int | None, *, turned: bool
) -> dict[str, Tensor]:
    """Give the call views of its tensors: their gradients are this call's alone, whatever else uses the tensors."""
    known = ALIASES[""] | ALIASES.get(operator, {})
    aliases = {}
    for name, value in bound.arguments.items():
        ours = _ours(known, name)
        if first is not None and ours in OF_HEADS:
            continue  # its gradient is a sum over the whole batch
        if isinstance(value, Tensor) and value.requires_grad and torch.is_grad_enabled():
            alias = value.view_as(value)
            left_out = functools.partial(torch.zeros, value.shape, dtype=value.dtype, device=value.device)
            alias.register_hook(  # type: ignore[no-untyped-call]
                functools.partial(_keep, slots, f"d{ours}", first, left_out=left_out, turned=turned)
            )
            bound.arguments[name] = aliases[ours] = alias
    return aliases


def _with_alias(result: Any) -> Any:
    """What was returned, with a view of the last state: its gradient is not that of an o which was made of it."""
    state = result[1] if type(result) is tuple and len(result) > 1 else None
    if not isinstance(state, Tensor) or not state.requires_grad:
        return result
    return (result[0], state.view_as(state), *result[2:])


def _unreached(outputs: Sequence[Any], aliases: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Those of the arguments that autograd has no way to from the outputs; none where that would take too long."""
    nodes = [o.grad_fn for o in outputs if isinstance(o, Tensor) and o.grad_fn is not None]
    left, seen = {alias.grad_fn: name for name, alias in aliases.items()}, set(nodes)
    while nodes and left and len(seen) < _MOST_NODES:
        node = nodes.pop()
        left.pop(node, None)
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                nodes.append(following)
    return () if nodes or not seen else tuple(left.values())


def _keep(
    slots: dict[str, Tensor], name: str, first: int | None, gradient: Tensor | None,
    left_out: Callable[[], Tensor] | None = None, *, turned: bool = False,
) -> None:  # fmt: skip
    # A function that leaves a gradient out hands None on, which leaves it zero.
    if gradient is None and left_out is not None:
        gradient = left_out()
    if gradient is not None:
        slots[name] = kept(name, gradient, first, turned=turned)


def kept(name: str, tensor: Tensor, first: int | None, *, turned: bool = False) -> Tensor:
    """A copy of an argument or output by our name: of the ``first`` sequences, and [K, V] of a state ``turned``."""
    part = tensor.detach().mT if turned and name.endswith("_state") else tensor.detach()
    return (part if name.removeprefix("d") in OF_HEADS or first is None else part[:first]).clone()
