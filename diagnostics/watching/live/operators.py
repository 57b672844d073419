"""Attention operators, met in torch's dispatcher: in eager code and, at run time, inside compiled graphs alike.

While somebody listens, each operator has a kernel of ours in front of the one that was there (torch's own, or another's
that replaced it). Ours calls that one, and tells of what it was given and returned. Nothing is traced, no graph is
changed and nothing is compiled again. Where all of attention is one composite operator that autograd takes apart
(``SCALED_DOT_PRODUCT``), it is met above autograd, in eager code alone; the fused operators are met below. Which those
are, of torch and of other packages, ``kernels`` declares. Where one runs inside another, the outer one is told of.
"""

from __future__ import annotations

import functools
import inspect
import json
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import cached_property, partial
from importlib import import_module
from types import CodeType
from typing import Any

import torch
from torch import Tensor
from torch.library import Library, get_kernel

from attn_diag.watching.live.kernels import OPERATORS, FusedOperator, refusal

# Called instead of an operator: the kernel that was there, and what it is to be called with.
Meets = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
# Our kernel, from the one that was there and the operator's arguments with their defaults.
_Arguments = Mapping[str, Any]
_Makes = Callable[[Any, _Arguments], Callable[..., Any]]

SCALED_DOT_PRODUCT = "aten::scaled_dot_product_attention"


class OperatorCall:
    """One forward of a fused operator: the tensors are its own, as it was given and returned them, as [B, H, T, D].

    Args:
        operator: Which.
        arguments: Its arguments with their defaults.
        args: What it was given.
        kwargs: Likewise.
        result: What it returned.

    Attributes:
        operator: Which.
        lse: What it returned; None where it does not.
    """

    def __init__(
        self, operator: FusedOperator, arguments: _Arguments, args: tuple[Any, ...], kwargs: _Arguments, result: Any
    ) -> None:
        self.operator = operator
        results = result if isinstance(result, (list, tuple)) else (result,)
        self._o: Any = next(iter(results), None)
        lse = results[operator.lse] if len(results) > operator.lse else None
        # Transformer Engine's comes with others, which autograd keeps.
        lse = next(iter(lse), None) if isinstance(lse, (list, tuple)) else lse
        self.lse: Tensor | None = lse
        self._call = arguments, args, kwargs

    @cached_property
    def given(self) -> Mapping[str, Any]:
        """Its arguments by name, ours where we have one; tensors as it was given them."""
        return self.operator.given(*self._call)

    @property
    def is_cuda(self) -> bool:
        """Whether it ran on a GPU."""
        return bool(getattr(self._o, "is_cuda", False))

    @cached_property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v."""
        q, k, v = (self.operator.laid_out(self.given[name], name, self.given) for name in "qkv")
        return q, k, v

    @cached_property
    def o(self) -> Tensor:
        """What it returned."""
        return self.operator.laid_out(self._o, "o", self.given)

    def fused(self, d: int, dv: int, rows: int) -> dict[str, Any]:
        """The kernel's name, q, k, v, o and LSE by the names of ``AttentionCall``.

        Args:
            d: q's features without padding.
            dv: v's.
            rows: Query rows, without what pads the LSE.
        """
        q, k, v = self.inputs
        lse = self.lse
        if lse is not None:
            lse = lse.squeeze(-1) if lse.dim() == 4 else lse
            lse = lse[..., :rows] if lse.numel() else None
        tensors = {"q": q[..., :d], "k": k[..., :d], "v": v[..., :dv], "o": self.o[..., :dv], "lse": lse}
        return {"kernel": self.kernel, **tensors}

    def fields(self) -> dict[str, Any]:
        """Everything an ``AttentionCall`` holds, where nothing but the operator is known."""
        q, _, v = self.inputs
        given = self.given
        causal = given.get("is_causal") or "none"
        left, right = (-1 if end is None or end < 0 else end for end in (given.get("left"), given.get("right")))
        return self.fused(q.shape[-1], v.shape[-1], q.shape[-2]) | {
            "mask": given.get("mask"),
            "causal": self.operator.causal if causal is True else causal,
            "window": None if left < 0 and right < 0 else (left, right),
            "scale": given.get("scale"),
            "softcap": given.get("softcap") or None,
            "refused": refusal(given),
        }

    @property
    def kernel(self) -> str:
        """What reports call it, and who stands in for it."""
        if "recipe" in self.given:
            forward, backward = (json.loads(self.given[n])["name"] for n in ("recipe", "backward_recipe"))
            return f"{self.operator.kernel}, {forward} forward, {backward} backward"
        if "flash_attention" in self.operator.name and self.is_cuda and (other := _flash_implementation()):
            return f"{self.operator.kernel} ({other})"
        return self.operator.kernel


class OperatorBackward:
    """One backward of a fused operator.

    Args:
        operator: Whose.
        arguments: The backward's arguments with their defaults.
        args: What it was given.
        kwargs: Likewise.
        result: What it returned.
    """

    def __init__(
        self, operator: FusedOperator, arguments: _Arguments, args: tuple[Any, ...], kwargs: _Arguments, result: Any
    ) -> None:
        self._operator, self._call, self._result = operator, (arguments, args, kwargs), result

    @cached_property
    def _given(self) -> Mapping[str, Any]:
        return self._operator.given(*self._call)

    @cached_property
    def gradients(self) -> list[Tensor | None]:
        """dq, dk and dv."""
        names = ("dq", "dk", "dv")
        # Some write them into tensors that they are given.
        written = [self._given.get(name) for name in names]
        grads = self._result[:3] if all(grad is None for grad in written) else written
        return [None if t is None else self._laid_out(name, t) for name, t in zip(names, grads, strict=True)]

    @property
    def o(self) -> Tensor:
        """What the forward returned, as it was given it."""
        return self._laid_out("o", self._given["o"])

    @property
    def lse(self) -> Tensor:
        """Likewise."""
        lse: Tensor = self._given["lse"]
        return lse

    @property
    def do(self) -> Tensor:
        """The gradient of o."""
        return self._laid_out("do", self._given["do"])

    @property
    def of_lse(self) -> bool:
        """Whether the LSE has a gradient too, so that dq and dk are not those of o alone."""
        return self._given.get("dlse") is not None

    def _laid_out(self, name: str, tensor: Tensor) -> Tensor:
        return self._operator.laid_out(tensor, name, self._given)


class OperatorOverrides:
    """Our kernels in front of the operators' own, between ``install`` and ``remove``.

    Args:
        composite: Called instead of ``SCALED_DOT_PRODUCT``.
        forward: Told of a fused operator that has run.
        backward: Told of one's backward.
    """

    def __init__(
        self,
        composite: Meets,
        forward: Callable[[OperatorCall], None],
        backward: Callable[[OperatorBackward], None],
    ) -> None:
        self._composite, self._forward, self._backward = composite, forward, backward
        self._libraries: list[Any] = []
        self._overridden: set[tuple[str, str]] = set()
        self._modules_seen = 0
        self._within = threading.local()
        self._codes: set[CodeType] = set()

    def install(self) -> None:
        """Put them there; what the build or the device lacks is left out, until it is imported."""
        if self._libraries and len(sys.modules) == self._modules_seen:
            return
        # Ours is registered when it is first used: by then the call would be over.
        with suppress(ImportError):
            import_module("attn_diag.kernels.attention")
        self._modules_seen = len(sys.modules)
        if (dynamo := sys.modules.get("torch._dynamo.eval_frame")) is not None:
            for code in self._codes:
                dynamo.skip_code(code)
        found: list[tuple[str, str, Callable[..., Any]]] = []
        # Above autograd alone: with a kernel of a device's the operator would be one that nobody may take apart, in a
        # graph that is exported meanwhile, and without that of autograd one that has no gradient.
        devices = {device: None for operator in OPERATORS for device in operator.devices}
        wanted: list[tuple[str, str, _Makes]] = [(SCALED_DOT_PRODUCT, f"Autograd{d}", self._met) for d in devices]
        for operator in OPERATORS:
            if operator.needs and operator.needs not in sys.modules:
                continue
            for device in operator.devices:
                wanted.append((operator.name, device, partial(self._ran, operator)))
                wanted.append((operator.backward, device, partial(self._went_back, operator)))
        for name, key, ours in wanted:
            if (name, key) not in self._overridden and (kernel := _kernel(name, key)) is not None:
                schema = torch._C._get_schema(name, "").arguments
                defaults = {a.name: a.default_value if a.has_default_value() else None for a in schema}
                found.append((name, key, ours(partial(_boxed, kernel), defaults)))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that an operator is overridden
            for name, key, kernel in found:
                namespace, bare = name.split("::")
                library: Any = Library(namespace, "IMPL")  # type: ignore[no-untyped-call]
                self._libraries.append(library)
                library.impl(bare, kernel, key, with_keyset=True, allow_override=True)
                self._overridden.add((name, key))
        _forget(name for name, _, _ in found)

    def remove(self) -> None:
        """Leave every operator as it was (each registration leaves some hundred bytes in torch)."""
        while self._libraries:
            self._libraries.pop()._destroy()
        _forget({name for name, _ in self._overridden})
        self._overridden.clear()

    def of_function(self, operator: FusedOperator, function: Callable[..., Any], *, backward: bool) -> Any:
        """Make what is to stand in a Python function's place: in a graph that is traced it is the function itself.

        Args:
            operator: The kernel that it, or its backward, is.
            function: The function.
            backward: Which of the two.
        """
        parameters = inspect.signature(function).parameters.values()
        named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        defaults = {p.name: None if p.default is p.empty else p.default for p in named}
        make = self._went_back if backward else self._ran
        ours = make(operator, function, defaults)

        def run(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs) if torch.compiler.is_compiling() else ours(*args, **kwargs)

        self._codes.add(run.__code__)
        return functools.wraps(function)(run)

    def _met(self, kernel: Any, arguments: _Arguments) -> Callable[..., Any]:  # noqa: ARG002 - as the others
        composite = self._composite

        def run(keys: Any, *args: Any, **kwargs: Any) -> Any:
            # A subclass (a DTensor, a fake one) takes the operator apart: what is inside is met on plain tensors.
            if type(args[0]) not in (Tensor, torch.nn.Parameter):
                return kernel(keys, *args, **kwargs)
            return composite(partial(kernel, keys), args, kwargs)

        return run

    def _ran(self, operator: FusedOperator, kernel: Any, arguments: _Arguments) -> Callable[..., Any]:
        def tell(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
            self._forward(OperatorCall(operator, arguments, args, kwargs, result))

        return self._outermost(operator, kernel, tell)

    def _went_back(self, operator: FusedOperator, kernel: Any, arguments: _Arguments) -> Callable[..., Any]:
        def tell(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
            self._backward(OperatorBackward(operator, arguments, args, kwargs, result))

        return self._outermost(operator, kernel, tell)

    def _outermost(
        self,
        operator: FusedOperator,
        kernel: Any,
        tell: Callable[[tuple[Any, ...], dict[str, Any], Any], None],
    ) -> Callable[..., Any]:
        within, first = self._within, 0 if operator.is_function else 1
        untraced: list[Callable[..., None]] = []

        def run(*args: Any, **kwargs: Any) -> Any:
            if getattr(within, "one", False):
                return kernel(*args, **kwargs)
            within.one = True
            try:
                result = kernel(*args, **kwargs)
            finally:
                within.one = False
            if not untraced:
                # Where a graph breaks around a function, what runs between its parts is compiled too, ours with it.
                dynamo = sys.modules.get("torch._dynamo") if operator.is_function else None
                untraced.append(getattr(dynamo, "disable", _itself)(tell))
            untraced[0](args[first:], kwargs, result)
            return result

        self._codes.add(run.__code__)
        return run


def _boxed(kernel: Any, keys: Any, *args: Any, **kwargs: Any) -> Any:
    return kernel.call_boxed(keys, *args, **kwargs)


def _kernel(name: str, key: str) -> Any | None:
    # Most packages are not there, and an exception for each costs ten times as much.
    if not name or not torch._C._dispatch_has_kernel(name):
        return None
    try:
        return get_kernel(name, key)
    except (RuntimeError, ValueError):
        return None


def _forget(names: Iterable[str]) -> None:
    """Have torch's Python dispatcher look again where an operator's kernels are.

    It remembers, under symbolic shapes, that an operator has a kernel for autograd of its own. Once that is gone, what
    is traced would have no gradient.
    """
    for name in names:
        namespace, bare = name.split("::")
        with suppress(AttributeError):  # whoever registered it has taken it away
            operator = getattr(getattr(torch.ops, namespace), bare).default
            operator._dispatch_cache.clear()


def _itself(function: Callable[..., None]) -> Callable[..., None]:
    return function


def _flash_implementation() -> str | None:
    """Who stands in for torch's flash attention (``activate_flash_attention_impl``)."""
    from torch.nn import attention

    current = getattr(attention, "current_flash_attention_impl", None)
    return None if current is None else current()
