"""What the code of a module's class names: attention that no hook meets is known by what its code calls."""

from __future__ import annotations

import re
from collections.abc import Iterator
from types import CodeType, FunctionType

from torch import nn

from attn_diag.watching.drift.forwards import operand_places
from attn_diag.watching.live.linear_calls import operator_of

# By name, with the module's: Mamba-1's scan, RWKV's and xLSTM's operators, and others of flash-linear-attention.
_RECURRENCE = re.compile(
    r"(selective_scan|mamba_inner|rwkv\d)[^.]*$|rwkv_linear_attention$|mlstm"
    r"|fla\.ops\..*\.(fused_)?(chunk|recurrent)_(?![^.]*cumsum)[^.]*$",
    re.IGNORECASE,
)


def kernels(module: nn.Module) -> dict[str, str]:
    """Functions of q, k and v, or recurrences, that the code of a module's class, and of those in it, calls.

    A class's own methods of q, k and v that take a softmax are by their class's name; forwards, which may project, not.
    """
    found: dict[str, str] = {}
    for kind in {type(m) for m in module.modules()}:
        for name, function in _named(kind):
            if operand_places(name, function) is not None or _recurs(name, function):
                found[name] = _path(function)
        for method in _functions(kind):
            softmax = any("softmax" in name for name in names(method.__code__))
            if softmax and method.__name__ != "forward" and operand_places(method.__name__, method) is not None:
                found[method.__qualname__] = _path(method)
    return found


def calls_linear(module: nn.Module) -> bool:
    """Whether its code calls linear attention, or a recurrence that is not known here."""
    return any(operator_of(name) is not None or recurs(path) for name, path in kernels(module).items())


def recurs(path: str) -> bool:
    """Whether a function, by its name with its module's, is a recurrence that is not known here."""
    return operator_of(path.rpartition(".")[2]) is None and _RECURRENCE.search(path) is not None


def is_linear(kind: type) -> bool:
    """Whether the code of a class calls a released function of linear attention, or another recurrence."""
    return any(_recurs(name, function) for name, function in _named(kind)) or "selective_scan" in mentions(kind)


def _recurs(name: str, function: FunctionType) -> bool:
    return operator_of(name) is not None or recurs(_path(function))


def _path(function: FunctionType) -> str:
    return f"{function.__module__}.{function.__qualname__}"


def mentions(kind: type) -> frozenset[str]:
    """Names in the code of a class, and in the functions of its module that its code names."""
    found = {name for function in _functions(kind) for name in names(function.__code__)}
    return frozenset(found.union(*(names(other.__code__) for _, other in _named(kind))))


def _named(kind: type) -> Iterator[tuple[str, FunctionType]]:
    """Functions that the code of a class calls by a name of its module."""
    for function in _functions(kind):
        for name in names(function.__code__):
            if isinstance(other := function.__globals__.get(name), FunctionType):
                yield name, other


def _functions(kind: type) -> Iterator[FunctionType]:
    """What a class, and those that it is made from, define."""
    for base in kind.__mro__[: kind.__mro__.index(nn.Module)]:
        # What torch.jit.script_method took away, it keeps aside; its own methods say nothing of a model.
        scripted = [stub.original_method for stub in vars(base).get("_methods", {}).values()]
        for value in () if base.__module__ == "torch.jit._script" else (*vars(base).values(), *scripted):
            while hasattr(value, "__wrapped__"):
                value = value.__wrapped__
            if isinstance(value, FunctionType):
                yield value


def names(code: CodeType) -> Iterator[str]:
    """Names of attributes and of what is global, in code and in what is defined inside it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from names(constant)
