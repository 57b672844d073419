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
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from types import CodeType
from typing import Any

import torch
from torch import Tensor
from torch.library import Library, get_kernel

from attn_diag.watching.live.backlog import Backlog
from attn_diag.watching.live.kernels import FusedOperator, loaded, operators
from attn_diag.watching.live.operator_calls import Arguments, OperatorBackward, OperatorCall
from attn_diag.watching.live.overwritten import DO_OVERWRITTEN, OPERANDS, Held, HeldByOperators
from attn_diag.watching.live.untraced import passed_by, traced_again, untraced

# Called instead of an operator: the kernel that was there, and what it is to be called with.
Meets = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
# Our kernel, from the one that was there and the operator's arguments with their defaults.
Makes = Callable[[Any, Arguments], Callable[..., Any]]

SCALED_DOT_PRODUCT = "aten::scaled_dot_product_attention"


class Kernels:
    """Kernels of ours in front of operators' own, between ``put`` and ``remove``."""

    def __init__(self) -> None:
        self._libraries: list[Any] = []
        self._there: set[tuple[str, str]] = set()

    @property
    def there(self) -> bool:
        """Whether they are there now."""
        return bool(self._libraries)

    def put(self, wanted: Iterable[tuple[str, str, Makes]]) -> None:
        """Put them there, where they are not yet: of each operator by name, for a dispatch key.

        What is not in this build is left out.
        """
        found: list[tuple[str, str, Callable[..., Any]]] = []
        for name, key, ours in wanted:
            if (name, key) not in self._there and (kernel := _kernel(name, key)) is not None:
                found.append((name, key, ours(kernel.call_boxed, _arguments(name))))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that an operator is overridden
            for name, key, kernel in found:
                namespace, bare = name.split("::")
                library: Any = Library(namespace, "IMPL")  # type: ignore[no-untyped-call]
                self._libraries.append(library)
                library.impl(bare, kernel, key, with_keyset=True, allow_override=True)
                self._there.add((name, key))
        _forget(name for name, _, _ in found)

    def remove(self) -> None:
        """Leave every operator as it was (each registration leaves some hundred bytes in torch)."""
        while self._libraries:
            self._libraries.pop()._destroy()
        _forget({name for name, _ in self._there})
        self._there.clear()


class OperatorOverrides:
    """Our kernels in front of the operators' own, between ``install`` and ``remove``.

    Args:
        composite: Called instead of ``SCALED_DOT_PRODUCT``.
        late: Told of one that has run and was to be recorded, where no operator underneath was.
        forward: Told of a fused operator that has run.
        backward: Told of one's backward.
        backlog: Records the calls that need not be told of at once.
        held: Holds what operators that nobody knows are given.
    """

    def __init__(
        self,
        composite: Meets,
        late: Callable[[tuple[Any, ...], dict[str, Any], Any], None],
        forward: Callable[[OperatorCall], None],
        backward: Callable[[OperatorBackward], None],
        backlog: Backlog,
        held: HeldByOperators,
    ) -> None:
        self._held = held
        self._composite, self._late, self._forward, self._backward = composite, late, forward, backward
        self._backlog = backlog
        self._kernels = Kernels()
        self._known = 0, 0
        self._within = threading.local()
        self._codes: set[CodeType] = set()
        self._standing_in: dict[int, tuple[Callable[..., Any], Callable[..., Any]]] = {}

    def install(self) -> None:
        """Put them there; what the build or the device lacks is left out, until it is imported."""
        known = len(sys.modules), len(operators())
        if self._kernels.there and known == self._known:
            return
        # Ours is registered when it is first used: by then the call would be over.
        with suppress(ImportError):
            import_module("attn_diag.kernels.attention")
        self._known = len(sys.modules), len(operators())
        # Above autograd alone: with a kernel of a device's the operator would be one that nobody may take apart, in a
        # graph that is exported meanwhile, and without that of autograd one that has no gradient.
        devices = {device: None for operator in operators() for device in operator.devices}
        wanted: list[tuple[str, str, Makes]] = [(SCALED_DOT_PRODUCT, f"Autograd{d}", self._met) for d in devices]
        for operator in operators():
            if operator.needs and operator.needs not in sys.modules:
                continue
            for device in operator.devices:
                wanted.append((operator.name, device, partial(self._ran, operator)))
                wanted.append((operator.backward, device, partial(self._went_back, operator)))
        self._kernels.put(wanted)

    def remove(self) -> None:
        """Leave every operator as it was."""
        self._kernels.remove()

    def functions(self) -> Iterator[tuple[Callable[..., Any], Callable[..., Any]]]:
        """Kernels that are Python functions, of packages that are loaded now, and what is to stand in their place.

        In a graph that is traced that is the function itself.
        """
        for operator in operators():
            for name in (operator.name, operator.backward) if operator.is_function else ():
                function = loaded(name)
                if function is not None and getattr(function, "__code__", None) not in self._codes:
                    # The same each time: what a graph breaks at is guarded, and would be compiled anew.
                    if id(function) not in self._standing_in:
                        ours = self._of_function(operator, function, backward=name == operator.backward)
                        self._standing_in[id(function)] = function, ours
                    found = self._standing_in[id(function)]
                    vars(found[1]).update(vars(function))  # what it has come to keep on itself since
                    yield found

    def _of_function(self, operator: FusedOperator, function: Callable[..., Any], *, backward: bool) -> Any:
        parameters = inspect.signature(function).parameters.values()
        named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        defaults = {p.name: None if p.default is p.empty else p.default for p in named}
        make = self._went_back if backward else self._ran
        ours = make(operator, function, defaults)

        def run(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs) if torch.compiler.is_compiling() else ours(*args, **kwargs)

        passed_by(run.__code__)
        self._codes.add(run.__code__)
        return functools.wraps(function)(run)

    def _met(self, kernel: Any, arguments: Arguments) -> Callable[..., Any]:  # noqa: ARG002 - as the others
        composite, late, backlog = self._composite, self._late, self._backlog

        def run(keys: Any, *args: Any, **kwargs: Any) -> Any:
            # A subclass (a DTensor, a fake one) takes the operator apart: what is inside is met on plain tensors.
            if type(args[0]) not in (Tensor, torch.nn.Parameter):
                return kernel(keys, *args, **kwargs)
            if backlog.open and backlog.begins(args, kwargs):
                result = None
                try:
                    result = kernel(keys, *args, **kwargs)
                finally:
                    recorded = backlog.ended(result)
                if not recorded:
                    untraced(late, args, kwargs, result)
                return result
            return untraced(composite, traced_again(partial(kernel, keys)), args, kwargs)

        passed_by(run.__code__)
        return run

    def _ran(self, operator: FusedOperator, kernel: Any, arguments: Arguments) -> Callable[..., Any]:
        def tell(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, held: Held | None = None) -> None:
            call = OperatorCall(operator, arguments, args, kwargs, result)
            call.held = held
            self._forward(call)

        backlog = self._backlog

        def records(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> bool:
            # Functions may be given all by name, and are told of at once.
            return backlog.open and not operator.is_function and backlog.ran(operator, arguments, args, kwargs, result)

        return self._outermost(operator, kernel, tell, records, partial(self._hold, operator, arguments, OPERANDS))

    def _hold(
        self, operator: FusedOperator, arguments: Arguments, names: Sequence[str], args: tuple[Any, ...], kwargs: Any
    ) -> Held | None:
        try:
            return self._held.hold(operator, operator.given(arguments, args, kwargs), names)
        except Exception:  # out of memory, or arguments that nobody can read: who is told of the call tells of it
            return None

    def _went_back(self, operator: FusedOperator, kernel: Any, arguments: Arguments) -> Callable[..., Any]:
        def tell(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, held: Held | None = None) -> None:
            back = OperatorBackward(operator, arguments, args, kwargs, result)
            if held is not None and (do := held.as_given(("do",)).get("do")) is not None:
                back.notes = [DO_OVERWRITTEN] if held.overwritten else []
                back.given_do(do)
            self._backward(back)

        backlog = self._backlog
        # Behind the dispatcher's keys.
        at = 1 + list(arguments).index("out") if not operator.is_function and "out" in arguments else 0

        def records(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> bool:  # noqa: ARG001 - as forwards
            return backlog.open and 0 < at < len(args) and backlog.went_back(args[at], args, result)

        return self._outermost(operator, kernel, tell, records, partial(self._hold, operator, arguments, ("do",)))

    def _outermost(
        self,
        operator: FusedOperator,
        kernel: Any,
        tell: Callable[..., None],
        records: Callable[[tuple[Any, ...], dict[str, Any], Any], bool],
        hold: Callable[[tuple[Any, ...], dict[str, Any]], Held | None],
    ) -> Callable[..., Any]:
        within, first, holds = self._within, 0 if operator.is_function else 1, operator.holds

        def run(*args: Any, **kwargs: Any) -> Any:
            if getattr(within, "one", False):
                return kernel(*args, **kwargs)
            held = untraced(hold, args[first:], kwargs) if holds else None
            within.one = True
            try:
                result = kernel(*args, **kwargs)
            finally:
                within.one = False
            if held is not None:
                untraced(tell, args[first:], kwargs, result, held)
            elif not records(args, kwargs, result):
                untraced(tell, args[first:], kwargs, result)
            return result

        passed_by(records.__code__)
        passed_by(run.__code__)
        self._codes.add(run.__code__)
        return run


def _kernel(name: str, key: str) -> Any | None:
    # Most packages are not there, and an exception for each costs ten times as much.
    if not name or not torch._C._dispatch_has_kernel(name):
        return None
    try:
        return get_kernel(name, key)
    except (RuntimeError, ValueError):
        return None


def _arguments(name: str) -> Arguments:
    schema = torch._C._get_schema(*_parted(name)).arguments
    return {a.name: a.default_value if a.has_default_value() else None for a in schema}


def _forget(names: Iterable[str]) -> None:
    """Have torch's Python dispatcher look again where an operator's kernels are.

    It remembers, under symbolic shapes, that an operator has a kernel for autograd of its own. Once that is gone, what
    is traced would have no gradient.
    """
    for name in names:
        whole, overload = _parted(name)
        namespace, bare = whole.split("::")
        with suppress(AttributeError):  # whoever registered it has taken it away
            operator = getattr(getattr(getattr(torch.ops, namespace), bare), overload or "default")
            operator._dispatch_cache.clear()


def _parted(name: str) -> tuple[str, str]:
    """The operator's name and its overload's."""
    whole, _, overload = name.partition(".")
    return whole, overload
