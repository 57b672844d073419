"""A function of linear attention: found by name, called with a capture's inputs by the names of its own arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attn_diag.captures.lent import Lent
from attn_diag.captures.linear import ALIASES, VALUES_FIRST, LinearCapture
from attn_diag.errors import InputError
from attn_diag.head.linear import LinearRun
from attn_diag.head.machine import backend_name
from attn_diag.kernels.linear_recipe import LinearRecipe
from attn_diag.reference.linear import LINEAR_OPERATORS
from attn_diag.testing.invariance.layouts import as_it_is
from attn_diag.testing.linear.calls import How
from attn_diag.testing.names import imported
from attn_diag.testing.target import MisfitError, NoGradientError, Place, reported

# fn(q, k, v, …) -> o, or (o, final_state, …), with flash-linear-attention's names and layout.
LinearFunctionGiven = Callable[..., Any]
# An emulated kernel: "recipe", or "recipe:16" in chunks of 16.
RECIPE = "recipe"
# By the switch of a capture, what functions call it.
_SWITCHES = {"l2norm": ("use_qk_l2norm_in_kernel", "l2norm"), "normalize": ("normalize",)}
_WANTED = ("output_final_state", "return_final_states", "return_final_state")
_CHUNKS = ("chunk_size", "block_size")
# Where a function has no default: flash-linear-attention's.
_USUAL_CHUNK = 64


@dataclass(frozen=True)
class LinearFunction:
    """An operator's function, or an emulated kernel."""

    name: str
    """What reports call it."""
    operator: str
    """Whose arguments it has."""
    device: torch.device
    """Where it runs."""
    fn: Callable[..., Any] | None
    """What is called; None: ``recipe`` is emulated."""
    recipe: LinearRecipe | None = None
    """The roundings of an emulated kernel; None: the well-rounded one's."""
    options: Mapping[str, Any] | None = None
    """Further arguments."""

    @classmethod
    def of(
        cls, given: LinearFunctionGiven | str, operator: str, name: str | None = None, *, device: torch.device
    ) -> LinearFunction:
        """The function that a user names or hands over.

        Args:
            given: A callable with flash-linear-attention's arguments, "MODULE:FUNCTION", or "recipe" ("recipe:16" in
                chunks of 16): the well-rounded kernel, emulated.
            operator: Whose arguments it has.
            name: What reports call it.
            device: Where it runs.

        Raises:
            InputError: It is none of these, cannot be imported, or the operator is not known.
        """
        if operator not in LINEAR_OPERATORS:
            raise InputError(f"operator must be one of {', '.join(LINEAR_OPERATORS)}, got {operator!r}")
        if isinstance(given, str) and given.partition(":")[0] == RECIPE:
            return cls(name or given, operator, device, None, _recipe(given))
        if isinstance(given, str):
            if ":" not in given:
                raise InputError(
                    f"no function {given!r} of linear attention: pass MODULE:FUNCTION with flash-linear-attention's "
                    f"arguments, or {RECIPE} (or {RECIPE}:16)"
                )
            name, given = name or given, imported(given)
        if isinstance(given, type) and issubclass(given, torch.autograd.Function):
            name, given = name or given.__name__, given.apply
        if not callable(given):
            raise InputError(f"expected a function of linear attention, got {type(given).__name__}")
        own = str(getattr(given, "__name__", type(given).__name__))
        return cls(name or ("fn" if own == "<lambda>" else own), operator, device, given)

    @property
    def backend(self) -> str:
        """What reports call the origin of its numbers."""
        return backend_name(self.device) if self.fn is not None else f"emulation on {backend_name(self.device)}"

    @property
    def parameters(self) -> Mapping[str, inspect.Parameter]:
        """What it can be called with."""
        if self.fn is None:
            return {}
        try:
            return inspect.signature(self.fn).parameters
        except (TypeError, ValueError):
            return {"kwargs": inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD)}

    @property
    def chunk_option(self) -> str | None:
        """The name of its argument that is the chunk's size; None: it has none."""
        return next((name for name in _CHUNKS if name in self.parameters), None)

    @property
    def takes_packed(self) -> bool:
        """Whether it can be given packed sequences."""
        return self.fn is None or "cu_seqlens" in self.parameters

    def takes(self, name: str) -> bool:
        """Whether it can be given a tensor of the operator's (of an emulated kernel: all)."""
        return self.fn is None or self._parameter(name) is not None

    def with_chunk(self, size: int) -> LinearFunction:
        """It, in chunks of this size. Raises InputError where it has no such option."""
        if self.fn is None:
            return replace(self, recipe=_recipe(f"{RECIPE}:{size}"))
        if self.chunk_option is None:
            raise InputError(f"{self.name} has no {' or '.join(_CHUNKS)}")
        return replace(self, options={**(self.options or {}), self.chunk_option: size})

    def _parameter(self, name: str) -> str | None:
        """What it calls a tensor of the operator's; None: it does not take it."""
        known = ALIASES[""] | ALIASES[self.operator] if self.operator in ALIASES else ALIASES[""]
        parameters = self.parameters
        if name == "initial_state" and self._values_first:
            return VALUES_FIRST
        names = [theirs for theirs, ours in known.items() if ours == name and theirs in parameters]
        if name in parameters or names:
            return name if name in parameters else names[0]
        whatever = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
        return name if whatever and not _listed(parameters) else None

    def run(
        self, capture: LinearCapture, *, gradients: bool = True, place: Place = as_it_is, how: How | None = None
    ) -> tuple[dict[str, Tensor], Mapping[str, str]]:
        """Call it once.

        Args:
            capture: Its inputs, with ``do`` (and ``dfinal_state``) where gradients are wanted; outputs are ignored.
            gradients: Whether they are wanted.
            place: Puts each tensor of four dimensions elsewhere in memory.
            how: How it is called, beside its tensors; None: all is given.

        Returns:
            ``o``, ``final_state`` where it returns one, and the gradients, on the CPU; and what it wrote into
            though that is not its own (``Lent.written``). An argument that gets no gradient has zeros.

        Raises:
            MisfitError: It raised, does not take these inputs, or returned no such o.
            NoGradientError: Gradients are wanted, and o does not depend on its inputs for autograd.
        """
        gradients = gradients and ("do" in capture.tensors or "dfinal_state" in capture.tensors)
        if self.fn is None:
            return self._emulated(capture, gradients=gradients), {}
        how = how or How()
        inputs = capture.inputs if how.in_kernel is None else {**capture.inputs, **how.in_kernel.raw}
        lent = Lent()
        leaves = {
            n: lent.out(n, x, _moved(x, self.device, place).detach()).requires_grad_(gradients)
            for n, x in inputs.items()
        }
        with reported("", _shapes(capture)), torch.set_grad_enabled(gradients):
            args, given = self._in_order(self._arguments(leaves, capture, how))
            returned = self.fn(*args, **given)
        several: list[Any] = list(returned) if isinstance(returned, tuple | list) and returned else [returned]
        o, state = several[0], several[1] if len(several) > 1 else None
        outputs = {"o": _like(o, "o", capture.tensors["v"].shape)}
        if isinstance(state, Tensor):
            state = state.mT if self._values_first else state
            q, v = capture.tensors["q"], capture.tensors["v"]
            _like(state, "the last state", (len(capture.call.sequences), v.shape[2], q.shape[3], v.shape[3]))
            outputs["final_state"] = state
        lent.look()
        if gradients:
            outputs |= self._gradients(outputs, leaves, capture, lent)
            lent.look(backward=True)
        found = {n: x.detach().cpu().contiguous() for n, x in outputs.items()}
        if gradients and how.in_kernel is not None:
            found |= how.in_kernel.of_gates(found)
        return found, lent.written

    @property
    def _values_first(self) -> bool:
        return VALUES_FIRST in self.parameters

    def _arguments(self, leaves: Mapping[str, Tensor], capture: LinearCapture, how: How) -> dict[str, Any]:
        given: dict[str, Any] = {}
        if how.in_kernel is not None:
            also = {n: x.to(self.device) for n, x in how.in_kernel.also.items()}
            given |= also | how.in_kernel.options
            if missing := how.in_kernel.missing(self.parameters):
                raise _not_taken(f"it takes no {missing}, which makes a gate in the kernel")
        for name, leaf in leaves.items():
            theirs = self._parameter(name)
            if theirs is None:
                raise _not_taken(f"it takes no {name}, which these inputs have (arguments: {_listed(self.parameters)})")
            given[theirs] = leaf.mT if theirs == VALUES_FIRST else leaf
        parameters = self.parameters
        if "cu_seqlens" in capture.tensors:
            if "cu_seqlens" not in parameters:
                raise _not_taken("it takes no cu_seqlens, and these are packed sequences")
            given["cu_seqlens"] = capture.tensors["cu_seqlens"].to(self.device)
        own = replace(capture, scale=None).call.used_scale
        if "scale" in parameters:
            if not (how.defaults and parameters["scale"].default is None):
                given["scale"] = capture.call.used_scale
        elif capture.call.used_scale != own:
            raise _not_taken(f"it takes no scale, and that of these inputs is {capture.call.used_scale:g}")
        for switch, names in _SWITCHES.items():
            own_name = next((n for n in names if n in parameters), None)
            if own_name is not None:
                given[own_name] = getattr(capture, switch)
            elif getattr(capture, switch):
                raise _not_taken(f"it takes no {names[0]}, which these inputs ask for")
        given |= {name: True for name in _WANTED if name in parameters and not how.defaults}
        chunk = self.chunk_option
        if chunk is not None and parameters[chunk].default is inspect.Parameter.empty:
            given[chunk] = _USUAL_CHUNK
        return {**given, **(self.options or {})}

    def _in_order(self, given: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """The first arguments by their place: what dispatches to another package's function may name them otherwise."""
        first = []
        for name, parameter in self.parameters.items():
            if name not in given or parameter.kind is inspect.Parameter.KEYWORD_ONLY:
                break
            first.append(given.pop(name))
        return first, given

    def _gradients(
        self, outputs: Mapping[str, Tensor], leaves: Mapping[str, Tensor], capture: LinearCapture, lent: Lent
    ) -> dict[str, Tensor]:
        given = {"o": capture.tensors.get("do"), "final_state": capture.tensors.get("dfinal_state")}
        pairs = [
            (x, lent.out(f"d{n}", held := d.cpu().to(x.dtype), held.to(x.device, copy=True)))
            for n, d in given.items() if d is not None and (x := outputs.get(n)) is not None and x.requires_grad
        ]  # fmt: skip
        if not outputs["o"].requires_grad or not pairs:
            raise NoGradientError("what it returns does not depend on its inputs for autograd (not differentiable)")
        for n, x in outputs.items():
            lent.out(n, x.detach().to("cpu", copy=True), x)
        with reported(" in its backward", _shapes(capture)):
            # One that autograd has no way to is left out of the mathematics: zero.
            found = torch.autograd.grad(
                [x for x, _ in pairs], list(leaves.values()), [d for _, d in pairs],
                allow_unused=True, materialize_grads=True,
            )  # fmt: skip
        return {f"d{name}": gradient for name, gradient in zip(leaves, found, strict=True)}

    def _emulated(self, capture: LinearCapture, *, gradients: bool) -> dict[str, Tensor]:
        run = LinearRun(capture, self.device)
        # What differs from the well-rounded kernel's is the chunk alone; formats are the inputs' own.
        recipe = run.recipe if self.recipe is None else replace(run.recipe, chunk=self.recipe.chunk)
        like = {"o": capture.tensors["v"].dtype, "final_state": torch.float32}
        found = run.emulated(recipe, forward=not gradients)
        return {
            n: x.to(like[n] if n in like else capture.tensors[n.removeprefix("d")].dtype).cpu()
            for n, x in found.items()
        }


def _not_taken(words: str) -> MisfitError:
    """Inputs that a function does not take are no fault of what it returns."""
    error = MisfitError(words)
    error.__cause__ = NotImplementedError(words)
    return error


def _recipe(given: str) -> LinearRecipe | None:
    _, colon, size = given.partition(":")
    if not colon:
        return None
    if not size.isdigit() or not 1 <= int(size) <= 1024:
        raise InputError(f"{RECIPE}:N is an emulated kernel in chunks of N steps, 1 to 1024; got {given!r}")
    return LinearRecipe(chunk=int(size))


def _listed(parameters: Mapping[str, inspect.Parameter]) -> str:
    plain = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return ", ".join(name for name, p in parameters.items() if p.kind in plain)


def _moved(x: Tensor, device: torch.device, place: Place) -> Tensor:
    moved = x.to(device, copy=True)
    return place(moved) if moved.ndim == 4 else moved


def _like(x: Any, what: str, shape: tuple[int, ...]) -> Tensor:
    if not isinstance(x, Tensor):
        raise MisfitError(f"it must return a tensor o, or a tuple that starts with it, got {type(x).__name__}")
    if tuple(x.shape) != tuple(shape):
        raise MisfitError(f"it must return {what} of shape {list(shape)}, got {list(x.shape)}")
    return x


def _shapes(capture: LinearCapture) -> str:
    q, v = capture.tensors["q"], capture.tensors["v"]
    return f"q {list(q.shape)}, v {list(v.shape)} {q.dtype}"
