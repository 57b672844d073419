"""Kernels behind ``torch.autograd.Function``, which no torch function mode sees, met in their ``forward``.

A forward is attention's if its parameters say so: q, k and v, query, key and value, or RWKV's r, k and v. So kernels
are met that nobody here has heard of, and those of flash-linear-attention, and where ``attend = Flash.apply`` was bound
before.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.function import FunctionMeta

_OPERANDS = (("q", "k", "v"), ("query", "key", "value"), ("r", "k", "v"))
_BACKWARD = re.compile("backward|bwd", re.IGNORECASE)

Forward = Callable[..., Any]
Around = Callable[[Forward, tuple[int, int, int], tuple[Any, ...], dict[str, Any]], Any]


@contextmanager
def forwards_met(around: Around) -> Iterator[None]:
    """Have every forward of attention called through ``around``, of classes that are made meanwhile too.

    Args:
        around: Given the forward, where q, k and v stand among its arguments, and these; returns what it makes.
    """
    met: list[tuple[type, Any]] = []

    def meet(cls: type) -> None:
        if cls.__module__.startswith("torch."):
            return  # whose functions are met by themselves
        own = vars(cls).get("forward")
        forward = own.__func__ if isinstance(own, staticmethod) else own
        if callable(forward) and (places := operand_places(cls.__name__, forward)) is not None:

            @functools.wraps(forward)
            def call(*args: Any, **kwargs: Any) -> Any:
                return around(forward, places, args, kwargs)

            met.append((cls, own))
            cls.forward = staticmethod(call)  # type: ignore[attr-defined]

    made: Any = FunctionMeta.__init__

    def make(cls: Any, name: str, bases: Any, attrs: Any) -> None:
        made(cls, name, bases, attrs)
        meet(cls)

    for cls in _below(torch.autograd.Function):
        meet(cls)
    FunctionMeta.__init__ = make  # type: ignore[method-assign]
    try:
        yield
    finally:
        FunctionMeta.__init__ = made  # type: ignore[method-assign]
        for cls, own in met:
            cls.forward = own  # type: ignore[attr-defined]


def operand_places(name: str, forward: Forward) -> tuple[int, int, int] | None:
    """Where q, k and v stand among a forward's arguments; None if it is no attention's."""
    try:
        parameters = [p.lower() for p in inspect.signature(forward).parameters]
    except (TypeError, ValueError):
        return None
    if _BACKWARD.search(name) is None:
        for operands in _OPERANDS:
            if set(operands) <= set(parameters):
                q, k, v = map(parameters.index, operands)
                return q, k, v
    return None


def _below(cls: type) -> Iterator[type]:
    subclasses: list[type] = cls.__subclasses__()
    for sub in subclasses:
        yield sub
        yield from _below(sub)
