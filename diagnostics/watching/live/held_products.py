"""The products of compiled graphs that make the q of recorded calls, on their way: what a product costs is its copy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, Protocol

import torch
from torch import Tensor

from attn_diag.watching.live.frames import in_cuda_graphs_memory, running
from attn_diag.watching.live.linear_layers import CapturedProjection, MadeWith
from attn_diag.watching.live.untraced import passed_by, untraced

# The code of a graph, by identity, and the instruction.
Spot = tuple[int, int]
# What in a product a b of the backward is the gradient [M, N] at a layer's output.
Reads = Callable[[Tensor, Tensor], Tensor]
_capturing: Callable[[], bool] = getattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: False)


class HeldProducts:
    """Holds copies of the first factors of products whose spot is known, until the attention call that follows.

    Attributes:
        held: Of each spot the copy [M, C], and the second factor [C, N].
        idle: Spots of no interest, as long as nobody waits for a gradient.
        to_come: Of spots of the backward that are next: who waits for a gradient, and where in the product it is.
        all_known: Whether every wanted call so far was one of which it is known what makes its q.
    """

    def __init__(self) -> None:
        self.held: dict[Spot, tuple[Tensor, Tensor]] = {}
        self.idle: set[Spot] = set()
        self.to_come: dict[Spot, tuple[Callable[[Tensor], None], Reads]] = {}
        self.all_known = True
        self._serve: dict[Spot, dict[int, Any]] = {}

    def takes(self, spot: Spot, a: Tensor, b: Tensor) -> bool:
        """Whether a product of the backward had the gradient for which a recorded call waits; it has it now."""
        found = self.to_come.pop(spot, None)
        if found is None:
            return False
        to_come, reads = found
        to_come(reads(a, b))
        return True

    def passes(self, spot: Spot, a: Tensor, b: Tensor, frame: FrameType | None) -> bool:
        """Whether that is all there is to do about a product a b that has run, called out of ``frame``."""
        if spot in self.idle:
            return True
        places = self._serve.get(spot)
        if places is None:
            return False
        try:
            # Several modules may share the code.
            found = running(frame)
            place = None if found is None else places.get(id(found[0]))
            if place is None or not place.open or not place.ready:
                return False
            if a.is_cuda and (_capturing() or untraced(in_cuda_graphs_memory)):
                return False
            if untraced(place.asks):
                self.held[spot] = a.clone(), b
        except Exception:  # out of memory: whoever is told tells of it
            return False
        return True

    def serve(self, spot: Spot, place: Any) -> None:
        """Hold what makes the q of a place."""
        self._serve.setdefault(spot, {})[id(place.module)] = place


class ProductThatRan(Protocol):
    """A product that was looked at; see ``graph_projections``."""

    @property
    def site(self) -> Spot:
        """Where."""
        ...

    @property
    def x(self) -> Tensor:
        """Its first factor [M, C], copied."""
        ...

    @property
    def factor(self) -> Any:
        """Its second factor; ``shape`` is [N, C]."""
        ...


class MadeWithProduct(MadeWith):
    """One whose product a compiled graph calls.

    Args:
        projection: The layer.
        products: Where its products are held.
        spot: Of the product.
        recent: Products that have run, and were looked at.
        gradient: The spot, and where in it, of the gradient at its output; None: q is its output.
    """

    __slots__ = ("_gradient", "_products", "_recent", "_spot")

    def __init__(
        self,
        projection: CapturedProjection,
        products: HeldProducts,
        spot: Spot,
        recent: Sequence[ProductThatRan],
        gradient: tuple[Spot, Reads] | None,
    ) -> None:
        super().__init__(projection)
        self._products, self._spot, self._recent, self._gradient = products, spot, recent, gradient

    def serves(self, place: Any) -> None:
        """See ``MadeWith``."""
        self._products.serve(self._spot, place)

    def hands_over(self, y: Tensor | None, to_come: Callable[[Tensor], None]) -> bool:  # noqa: ARG002 - as of layers
        """See ``MadeWith``."""
        return self._gradient is not None

    def goes_back(self, to_come: Callable[[Tensor], None]) -> None:
        """See ``MadeWith``."""
        if self._gradient is not None:
            spot, reads = self._gradient
            self._products.to_come[spot] = to_come, reads

    def ran(self) -> tuple[Tensor, Tensor | None, int, torch.dtype, bool] | None:
        """See ``MadeWith``."""
        if (found := self._products.held.pop(self._spot, None)) is not None:
            return found[0], None, found[1].shape[1], found[0].dtype, True
        # Between some graphs and their products are calls of torch's own, which tell nothing on the way.
        for ran in reversed(self._recent):
            if ran.site == self._spot:
                return ran.x, None, ran.factor.shape[0], ran.x.dtype, True
        return None


for _ours in (
    HeldProducts.passes,
    HeldProducts.takes,
    MadeWithProduct.ran,
    MadeWithProduct.hands_over,
    MadeWithProduct.goes_back,
):
    passed_by(_ours.__code__)
