"""What is tested: a Python function, torch's SDPA by backend, or a recipe that is emulated; called and checked one way.

``probe`` and ``check`` share this: how a target is found by name, what it is called with, what it must return, and what
is said where it returns something else.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from attn_diag.captures.lent import Lent, written_words
from attn_diag.errors import InputError
from attn_diag.head.machine import backend_name
from attn_diag.kernels import PRESETS, Recipe, RecipeNotSupportedError, check_supported, emulate_head, preset
from attn_diag.testing.case_inputs import CaseInputs
from attn_diag.testing.libraries import LIBRARIES, SDPA
from attn_diag.testing.names import imported
from attn_diag.testing.stated import PER_HEAD
from attn_diag.testing.user_function import Function
from attn_diag.work import map_in_order

# fn(q, k, v) -> o, (o, lse) or (o, lse, ...); q, k, v and o [B, H, T, D]. Else by name: ``testing.user_function``.
Attention = Callable[..., Any]
# A tensor -> one of the same values, with other strides or at another place in memory.
Place = Callable[[Tensor], Tensor]
# The same for the tensors of a call by their names: q, k, v and do.
PlaceOf = Callable[[str, Tensor], Tensor]

DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
# Inputs that recipes are known for.
RECIPE_DTYPES = (torch.bfloat16, torch.float16)
GRADIENTS = ("dq", "dk", "dv")
OF_SINKS = ("dsinks",)
# What autograd says of a write into a leaf, or into what a backward needs.
_REFUSED_WRITE = re.compile("in-?place operation")


class MisfitError(Exception):
    """What came back is not the attention asked for: what was expected and what came, of a kernel called "it"."""

    def of(self, name: str) -> str:
        """The message with the kernel's name in place of "it"."""
        return name + str(self).removeprefix("it")


class NoGradientError(MisfitError):
    """Autograd has no gradients to give: a kernel of the forward alone."""


class _ReentrantError(Exception):
    """torch.utils.checkpoint, as it was by default, takes a whole backward and no torch.autograd.grad."""


@dataclass(frozen=True)
class Returned:
    """What one call of a target gave."""

    outputs: dict[str, Tensor]
    """o, L (``lse``, natural logarithm) where it came too, and dq, dk, dv, dsinks where they were asked for."""
    overwritten: Mapping[str, str] = field(default_factory=dict)
    """What the target wrote into though it is not its own (``Lent.written``)."""

    def require_untouched(self) -> None:
        """Raise MisfitError where an input, or O after it was returned, was written into."""
        if self.overwritten:
            raise MisfitError(written_words(self.overwritten))


@dataclass(frozen=True)
class Target:
    """A named attention, where it runs and how it is called."""

    name: str
    """What reports call it."""
    backend: str
    """What reports call the origin of its numbers."""
    device: torch.device
    """Where it runs."""
    recipe: Recipe | None = None
    """What is emulated; else ``fn`` is called."""
    fn: Callable[[Tensor, Tensor, Tensor, CaseInputs], Any] | None = None
    """Called with copies of q, k, v on the device, and with the case that they are of."""
    fixed: bool = False
    """Mask and scale are its own: it cannot be told those of a case."""

    @classmethod
    def of(
        cls, given: Attention | str | Recipe, name: str | None = None, *, dtype: torch.dtype, head_dim: int,
        device: torch.device,
    ) -> Target:  # fmt: skip
        """The target that a user names or hands over.

        Args:
            given: A callable ``fn(q, k, v)`` (a module or an ``autograd.Function`` is one; see ``Function`` for what
                else it is given), the name of a preset or a recipe, "sdpa", "sdpa:flash" (efficient, cudnn, math), a
                library's ("flex_attention", …), or "MODULE:FUNCTION" (also of the working directory).
            name: What reports call it; by default its own name.
            dtype: Of the inputs.
            head_dim: Of the inputs.
            device: Where it runs.

        Raises:
            InputError: ``given`` is none of these, cannot be imported, or is a recipe that is not complete or whose
                inputs are not BF16 or FP16.
        """
        if isinstance(given, str) and given in LIBRARIES:
            return cls(name or given, backend_name(device), device, fn=LIBRARIES[given].call)
        if isinstance(given, str) and given.startswith("sdpa:"):
            raise InputError(f"no SDPA backend {given.partition(':')[2]!r}; known: {', '.join(SDPA)}")
        if isinstance(given, str) and ":" in given:
            name = name or given
            given = imported(given)
        if isinstance(given, type) and issubclass(given, torch.autograd.Function):
            name, given = name or given.__name__, given.apply
        if callable(given):
            own = str(getattr(given, "__name__", type(given).__name__))
            called = "fn" if own == "<lambda>" else own
            return cls(name or called, backend_name(device), device, fn=Function.of(given, called), fixed=True)
        if not isinstance(given, str | Recipe):
            raise InputError(f"expected a callable fn(q, k, v) -> o, a recipe or a name, got {type(given).__name__}")
        recipe = _recipe(given, dtype, head_dim)
        return cls(name or recipe.name, f"emulation on {backend_name(device)}", device, recipe=recipe)

    @property
    def takes(self) -> Collection[str]:
        """What a user's function is told of a call by name."""
        return self.fn.takes if isinstance(self.fn, Function) else ()

    def own_numbers(self, case: CaseInputs) -> list[str]:
        """What of a case's slopes and sinks, one a head, the kernel has of its own and is not told."""
        return [n for n in PER_HEAD if self.fixed and n not in self.takes and getattr(case, n) is not None]

    def call(self, inputs: CaseInputs, *, gradients: bool = False, place: PlaceOf = lambda _, x: x) -> Returned:
        """Call it once, without autograd or with it.

        Args:
            inputs: What to call it with.
            gradients: Whether dq, dk and dv are wanted, and dsinks of learned sinks.
            place: Puts each input elsewhere in memory, with the same values; an emulation takes them as they are.

        Returns:
            Outputs detached, on the device and in the dtype in which they came. Of a kernel whose writing into an
            input autograd refuses, those of its forward alone.

        Raises:
            MisfitError: It raised, returned no such o, or has no gradients although ``gradients`` asks for them.
        """
        try:
            return self._called(inputs, gradients, place)
        except MisfitError as error:
            if not (gradients and _REFUSED_WRITE.search(str(error))):
                raise
            if not (found := self._called(inputs, False, place)).overwritten:
                raise
            return found

    def _called(self, inputs: CaseInputs, gradients: bool, place: PlaceOf) -> Returned:
        if self.recipe is not None:
            return Returned(emulate(self.recipe, inputs, self.device, with_gradients=gradients))
        assert self.fn is not None
        lent = Lent()
        copies = [
            lent.out(n, x, place(n, x.to(self.device, copy=True)).detach()).requires_grad_(gradients)
            for n, x in (("q", inputs.q), ("k", inputs.k), ("v", inputs.v))
        ]
        if inputs.sinks is not None:
            sinks = lent.out("sinks", inputs.sinks, inputs.sinks.to(self.device, copy=True)).requires_grad_(gradients)
            inputs = replace(inputs, sinks=sinks)
        with reported("", _shapes(inputs)), torch.set_grad_enabled(gradients):
            found = self.fn(copies[0], copies[1], copies[2], inputs)
        o, *rest = found if isinstance(found, tuple | list) and found else [found]
        outputs = {"o": _required(o, inputs)}
        if rest and isinstance(rest[0], Tensor) and rest[0].shape == o.shape[:3] and rest[0].is_floating_point():
            outputs["lse"] = rest[0].detach()
        lent.look()
        if gradients:
            try:
                outputs |= self._gradients(o, copies, inputs, place, lent)
            except _ReentrantError:
                with reported("", _shapes(inputs)):
                    found = self.fn(copies[0], copies[1], copies[2], inputs)
                o = found[0] if isinstance(found, tuple | list) else found
                outputs |= self._gradients(o, copies, inputs, place, lent, reentrant=True)
            lent.look(backward=True)
        return Returned(outputs, lent.written)

    def _gradients(
        self, o: Tensor, copies: list[Tensor], inputs: CaseInputs, place: PlaceOf, lent: Lent, *,
        reentrant: bool = False,
    ) -> dict[str, Tensor]:  # fmt: skip
        assert inputs.do is not None
        if not o.requires_grad:
            raise NoGradientError("what it returns does not depend on q, k, v for autograd (it is not differentiable)")
        leaves = copies if inputs.sinks is None else [*copies, inputs.sinks]
        held = inputs.do.to(o.dtype)
        do = lent.out("do", held, place("do", held.to(self.device, copy=True)))
        lent.out("o", o.detach().to("cpu", copy=True), o)
        with reported(" in its backward", _shapes(inputs)):
            if reentrant:
                torch.autograd.backward(o, do)
            found: Any = (
                [x.grad for x in leaves] if reentrant else torch.autograd.grad(o, leaves, do, allow_unused=True)
            )
        # Sinks that are not learned have no gradient.
        named = dict(zip((*GRADIENTS, *OF_SINKS), found, strict=False))
        if missing := [n for n in GRADIENTS if named[n] is None]:
            raise MisfitError(f"it gives no {', '.join(missing)} by autograd")
        return {n: g.detach() for n, g in named.items() if g is not None}

    def run(self, inputs: CaseInputs, *, backward: bool | None = None) -> tuple[dict[str, Tensor], list[str]]:
        """Call it, with gradients where there is a dO and autograd gives them.

        Args:
            inputs: What to call it with.
            backward: True demands gradients, False leaves them out.

        Returns:
            The outputs on the CPU, lse in fp32; and notes for the report.

        Raises:
            MisfitError: As ``call`` does; and where it wrote into an input.
        """
        notes: list[str] = []
        gradients = backward is not False and inputs.do is not None
        try:
            found = self.call(inputs, gradients=gradients)
        except NoGradientError as error:
            if backward:
                raise
            notes.append(f"no gradients were checked: {error}")
            found = self.call(inputs)
        found.require_untouched()
        judged = {*GRADIENTS} <= {*found.outputs}
        if judged and self.recipe is None and inputs.sinks is not None and OF_SINKS[0] not in found.outputs:
            notes.append(f"{inputs.name}: autograd gives the sinks no gradient: dSink was not judged")
        return {n: (x.float() if n == "lse" else x).cpu() for n, x in found.outputs.items()}, notes


def emulate(
    recipe: Recipe, case: CaseInputs, device: torch.device, *, with_gradients: bool = True, sequences: int | None = None
) -> dict[str, Tensor]:
    """Run a recipe on a case, head by head.

    Args:
        recipe: What to run.
        case: The inputs.
        device: Where to run it.
        with_gradients: Run the backward too, where the case has a dO.
        sequences: Only the first so many batch items.

    Returns:
        o, lse (in the recipe's arithmetic) and, with the backward, dq, dk and dv; on the CPU.
    """
    batch, heads = case.q.shape[:2]
    batch = batch if sequences is None else min(batch, sequences)
    group = heads // case.k.shape[1]
    do = case.do if with_gradients else None

    def one(place: tuple[int, int]) -> dict[str, Tensor]:
        found = emulate_head(recipe, case.head(*place, device, gradients=with_gradients))
        names = ("o", "lse", *GRADIENTS) if do is not None else ("o", "lse")
        return {n: getattr(found, n).cpu() for n in names}

    places = [(b, h) for b in range(batch) for h in range(heads)]
    each = list(map_in_order(one, places, parallel=device.type == "cpu"))
    stacked = {n: torch.stack([e[n] for e in each]) for n in each[0]}
    outputs = {n: x.view(batch, heads, *x.shape[1:]) for n, x in stacked.items()}
    if group > 1 and do is not None:
        # Query heads that share a key head add their gradients, rounded once more.
        for n in ("dk", "dv"):
            x = outputs[n]
            outputs[n] = x.double().view(batch, heads // group, group, *x.shape[2:]).sum(2).to(x.dtype)
    return outputs


def _recipe(given: str | Recipe, dtype: torch.dtype, head_dim: int) -> Recipe:
    if isinstance(given, str) and given not in PRESETS:
        backends = ", ".join(f"sdpa:{backend}" for backend in SDPA)
        raise InputError(
            f"no recipe {given!r}; known: {', '.join(PRESETS)}; and no kernel {given!r}: pass sdpa, {backends}, "
            "MODULE:FUNCTION or a callable fn(q, k, v) -> o"
        )
    if dtype not in RECIPE_DTYPES:
        named = str(dtype).removeprefix("torch.")
        raise InputError(f"recipes are run for bfloat16 and float16 inputs, got {named}")
    fmt: Any = DTYPES[dtype]
    recipe = preset(given, fmt, head_dim) if isinstance(given, str) else given.for_input(fmt)
    try:
        check_supported(recipe)
    except RecipeNotSupportedError as error:
        raise InputError(str(error)) from None
    return recipe


def _required(o: Any, inputs: CaseInputs) -> Tensor:
    """``o`` detached, if it is what an attention returns."""
    if not isinstance(o, Tensor):
        raise MisfitError(f"it must return a tensor o, or a tuple that starts with it, got {type(o).__name__}")
    expected = [*inputs.q.shape[:3], inputs.v.shape[3]]
    if list(o.shape) != expected:
        raise MisfitError(f"it must return o of shape [B, H, T, D] {expected}, got {list(o.shape)}")
    if o.dtype not in (inputs.q.dtype, torch.float32):
        raise MisfitError(f"it must return o in {inputs.q.dtype} or torch.float32, got {o.dtype}")
    return o.detach()


@contextmanager
def reported(where: str, shapes: str) -> Iterator[None]:
    """Turns an exception inside into a MisfitError with its type, what it was called with, and its first line; of an
    import that fails into an InputError."""
    try:
        yield
    except (InputError, MisfitError):
        raise
    except Exception as error:
        if "use_reentrant=True" in str(error):
            raise _ReentrantError from None
        first = (str(error).strip().splitlines() or ["no message"])[0].rstrip(".")
        if isinstance(error, ImportError):  # says nothing of the kernel
            raise InputError(f"the kernel cannot be run here: {first}; install what it imports") from error
        # Inputs that need gradients are refused by some (FlexAttention on a CPU): these have their forward alone.
        refused = isinstance(error, NotImplementedError) and torch.is_grad_enabled()
        kind = NoGradientError if refused else MisfitError
        raise kind(f"it raised {type(error).__name__}{where} on {shapes}: {first}") from error


def _shapes(inputs: CaseInputs) -> str:
    return f"q, k, v {list(inputs.q.shape)} {inputs.q.dtype}"
