"""Matrix products, met in torch's dispatcher: what compiled graphs make of linear layers, and of their gradients."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, NamedTuple

from torch import Tensor

from attn_diag.watching.live.frames import graph_site, in_cuda_graphs_memory
from attn_diag.watching.live.operator_calls import Arguments
from attn_diag.watching.live.operators import Kernels, Makes
from attn_diag.watching.live.stream_capture import in_cuda_graph
from attn_diag.watching.live.untraced import passed_by, untraced

# By name: which of its arguments is the first factor.
PRODUCTS = {"aten::mm": 0, "aten::mm.out": 0, "aten::addmm": 1, "aten::addmm.out": 1, "aten::addmm_": 1}


class Product(NamedTuple):
    """One product that has run, y = a b (and what is added): the tensors are its own."""

    a: Tensor
    """[M, K]."""
    b: Tensor
    """[K, N]."""
    y: Tensor
    """[M, N]."""
    site: tuple[CodeType, int] | None
    """The code of the graph, and the place in it, that calls the product; None in eager code."""


Told = Callable[[Product], None]
# Whether nothing of a product is of interest, or what is has been taken: by its place in code, a, b and the frame.
Passes = Callable[[tuple[int, int], Tensor, Tensor, FrameType | None], bool]
_KEYS = ("CPU", "CUDA")
_listeners: list[Told] = []
_passes: list[Passes] = []
_lock = threading.Lock()


def _in_child() -> None:
    """A forked child has locks that nobody will ever open."""
    global _lock
    _lock = threading.Lock()
    _listeners.clear()
    _passes.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)


def _never(spot: tuple[int, int], a: Tensor, b: Tensor, frame: FrameType | None) -> bool:  # noqa: ARG001 - as others
    return False


def listen(told: Told, passes: Passes = _never, *, wanted: bool) -> None:
    """Tell ``told`` of every product from now on, or no more; while nobody is told, the operators are as they were.

    Args:
        told: Told.
        passes: Asked before; where it says so for all who listen, nobody is told.
        wanted: Whether to begin or to end.
    """
    with _lock:
        if wanted and told not in _listeners:
            _listeners.append(told)
            _passes.append(passes)
        elif not wanted and told in _listeners:
            _listeners.remove(told)
            _passes.remove(passes)
        if not _listeners:
            _kernels.remove()
        elif not _kernels.there:
            _kernels.put((name, key, _makes(first)) for name, first in PRODUCTS.items() for key in _KEYS)


def _makes(first: int) -> Makes:
    def makes(kernel: Any, arguments: Arguments) -> Callable[..., Any]:  # noqa: ARG001 - as of all kernels
        def run(keys: Any, *args: Any, **kwargs: Any) -> Any:
            y = kernel(keys, *args, **kwargs)
            frame = sys._getframe().f_back
            spot = (0, 0) if frame is None else (id(frame.f_code), frame.f_lasti)
            for passes in _passes:
                if not passes(spot, args[first], args[first + 1], frame):
                    break
            else:
                return y
            untraced(_tell, args[first], args[first + 1], y, frame)
            return y

        passed_by(run.__code__)
        return run

    return makes


def _tell(x: Tensor, w: Tensor, y: Tensor, frame: FrameType | None) -> None:
    if not (y.is_cuda and (in_cuda_graph() or in_cuda_graphs_memory())):
        product = Product(x, w, y, graph_site(frame))
        for told in tuple(_listeners):
            told(product)


passed_by(_never.__code__)
_kernels = Kernels()
