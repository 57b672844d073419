"""Which products of tiles of T x T are wanted, so that their kernels are compiled together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from attn_diag.reference.triton_tiles import Cast, Weight


class TileProduct(NamedTuple):
    """A product to be compiled, see ``FusedHeads.rows`` and ``keys``."""

    way: Literal["rows", "keys"]
    """Which of both."""
    weight: Weight
    """W."""
    of: Literal["q", "k", "v", "do"]
    """A tensor of the other factor's shape."""
    cast: Cast = "none"
    """The format of W's cast."""
    alpha_first: bool = False
    """Whether alpha dS is cast."""
    summed: bool = False
    """Whether row sums are wanted."""
