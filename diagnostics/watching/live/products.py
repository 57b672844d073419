"""Matrix products, met in torch's dispatcher: what compiled graphs make of linear layers, and of their gradients."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import CodeType
from typing import Any, NamedTuple

from torch import Tensor

from attn_diag.watching.live.operators import Kernels, Makes
from attn_diag.watching.live.places import graph_site

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


class ProductOverrides:
    """Our kernels in front of those of products, between ``install`` and ``remove``.

    Args:
        told: Told of a product that has run.
    """

    def __init__(self, told: Callable[[Product], None]) -> None:
        self._told = told
        self._kernels = Kernels()

    def install(self) -> None:
        """Put them there."""
        if not self._kernels.there:
            self._kernels.put((name, key, self._makes(first)) for name, first in _PRODUCTS.items() for key in _KEYS)

    def remove(self) -> None:
        """Leave every operator as it was."""
        self._kernels.remove()

    def _makes(self, first: int) -> Makes:
        told = self._told

        def makes(kernel: Any, arguments: Sequence[Any]) -> Callable[..., Any]:  # noqa: ARG001 - as of all kernels
            def run(keys: Any, *args: Any, **kwargs: Any) -> Any:
                y = kernel.call_boxed(keys, *args, **kwargs)
                told(Product(args[first], args[first + 1], y, graph_site(sys._getframe(1))))
                return y

            return run

        return makes


_KEYS = ("CPU", "CUDA")
