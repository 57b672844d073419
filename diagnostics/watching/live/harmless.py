"""A watch's own failures are told of, and never an exception in somebody's training."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

import torch


class Harmless(Protocol):
    """A watch."""

    @property
    def gone(self) -> bool:
        """Whether this is a forked child's copy."""
        ...

    def failed(self, error: Exception) -> None:
        """Something failed."""
        ...


def harmless(method: Callable[..., Any]) -> Callable[..., Any]:
    """Have a watch's method log its failures instead of raising them; it returns None then."""

    @functools.wraps(method)
    def run(watch: Harmless, *args: Any) -> Any:
        return run_harmlessly(watch, method, watch, *args)

    return run


def run_harmlessly(watch: Harmless, what: Callable[..., Any], *args: Any) -> Any:
    """Do something, or have ``watch`` tell why not; returns None then."""
    if watch.gone or torch.compiler.is_compiling():
        return None  # nothing of ours belongs in a graph that is traced, nor in a forked child
    try:
        return what(*args)
    except Exception as error:
        watch.failed(error)
        return None
