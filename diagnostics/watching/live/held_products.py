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
_capturing: Callable[[], bool] = getattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: False)


class HeldProducts:
    """Holds copies of the first factors of products whose spot is known, until the attention call that follows.

    Attributes:
        held: Of each spot the copy [M, C], and the second factor [C, N].
        idle: Spots of no interest, as long as nobody waits for a gradient.
        all_known: Whether every wanted call so far was one of which it is known what makes its q.
    """

    def __init__(self) -> None:
        self.held: dict[Spot, tuple[Tensor, Tensor]] = {}
        self.idle: set[Spot] = set()
        self.all_known = True
        self._serve: dict[Spot, dict[int, Any]] = {}

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
    """One whose product a compiled graph calls."""

    __slots__ = ("_products", "_recent", "_spot")

    def __init__(
        self, projection: CapturedProjection, products: HeldProducts, spot: Spot, recent: Sequence[ProductThatRan]
    ) -> None:
        super().__init__(projection)
        self._products, self._spot, self._recent = products, spot, recent

    def serves(self, place: Any) -> None:
        """See ``MadeWith``."""
        self._products.serve(self._spot, place)

    def ran(self) -> tuple[Tensor, int, torch.dtype, bool] | None:
        """See ``MadeWith``."""
        if (found := self._products.held.pop(self._spot, None)) is not None:
            return found[0], found[1].shape[1], found[0].dtype, True
        # Between some graphs and their products are calls of torch's own, which tell nothing on the way.
        for ran in reversed(self._recent):
            if ran.site == self._spot:
                return ran.x, ran.factor.shape[0], ran.x.dtype, True
        return None


for _ours in (HeldProducts.passes, MadeWithProduct.ran):
    passed_by(_ours.__code__)
