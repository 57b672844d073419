"""Matrix products, met in torch's dispatcher: what compiled graphs make of linear layers, and of their gradients."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, NamedTuple

from torch import Tensor

from attn_diag.watching.live.operator_calls import Arguments
from attn_diag.watching.live.operators import Kernels, Makes
from attn_diag.watching.live.places import graph_site, in_cuda_graphs_memory
from attn_diag.watching.live.stream_capture import in_cuda_graph
from attn_diag.watching.live.untraced import passed_by, untraced

# By name: which of its arguments is the first factor.
_PRODUCTS = {"aten::mm": 0, "aten::mm.out": 0, "aten::addmm": 1, "aten::addmm.out": 1, "aten::addmm_": 1}


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
_KEYS = ("CPU", "CUDA")
_listeners: list[Told] = []
_lock = threading.Lock()


def _in_child() -> None:
    """A forked child has locks that nobody will ever open."""
    global _lock
    _lock = threading.Lock()
    _listeners.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)


def listen(told: Told, *, wanted: bool) -> None:
    """Tell ``told`` of every product from now on, or no more; while nobody is told, the operators are as they were."""
    with _lock:
        if wanted and told not in _listeners:
            _listeners.append(told)
        elif not wanted and told in _listeners:
            _listeners.remove(told)
        if not _listeners:
            _kernels.remove()
        elif not _kernels.there:
            _kernels.put((name, key, _makes(first)) for name, first in _PRODUCTS.items() for key in _KEYS)


def are_met() -> bool:
    """Whether products are met now."""
    return _kernels.there


def _makes(first: int) -> Makes:
    def makes(kernel: Any, arguments: Arguments) -> Callable[..., Any]:  # noqa: ARG001 - as of all kernels
        def run(keys: Any, *args: Any, **kwargs: Any) -> Any:
            y = kernel(keys, *args, **kwargs)
            untraced(_tell, args[first], args[first + 1], y, sys._getframe().f_back)
            return y

        passed_by(run.__code__)
        return run

    return makes


def _tell(x: Tensor, w: Tensor, y: Tensor, frame: FrameType | None) -> None:
    if not (y.is_cuda and (in_cuda_graph() or in_cuda_graphs_memory())):
        product = Product(x, w, y, graph_site(frame))
        for told in tuple(_listeners):
            told(product)


_kernels = Kernels()
