"""What the launches of ``fused`` make: the forward's rows, and products of tiles of T x T, several in one.

A launch recomputes S, and dP where a weight needs it: of several products in one it does so once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeVar

from torch import Tensor

Weight = Literal["probs", "sloped", "dscores", "probs_squared", "dscores_squared", "probs_cast", "dscores_cast"]
Cast = Literal["none", "bf16", "fp16"]
Product = TypeVar("Product")

# More features than that are taken in parts.
MOST_FEATURES = 128
# Measured on an H100: so many sums of a tile of query rows fit into registers, of k, whose tile is there already, and
# of other factors.
_OF_KEYS, _OF_OTHERS = 3, 2
# So many sums of a tile of keys take less time together than alone: of those with dP; of those without, of up to
# ``_NARROW`` features, and of more.
_WITH_DPROBS, _WITHOUT, _NARROW, _WITHOUT_WIDE = 2, 3, 64, 1


@dataclass(frozen=True)
class TileWeight:
    """W of a product, as of ``triton_attention``. No tuple: Triton 3.6 would take it apart."""

    name: Weight
    """Which."""
    cast: Cast = "none"
    """The format of its cast."""
    alpha_first: bool = False
    """Whether alpha dS is cast instead of dS."""

    @property
    def needs_dprobs(self) -> bool:
        """Whether it is made of dP."""
        return self.name.startswith("dscores")


@dataclass(frozen=True)
class FusedRows:
    """What the forward leaves of every row of H heads, [H, Tq], but for O_bar; float64 or integers.

    Without ``details`` all but O_bar, m and l is without meaning.
    """

    unnormalised_out: Tensor
    """O_bar, [H, Tq, Dv]."""
    row_max: Tensor
    """m."""
    row_sum: Tensor
    """l, that of a sink included."""
    second_max: Tensor
    """The largest score of another key than ``top_key``; -inf where there is none."""
    squares: Tensor
    """Row sums of P_bar^2."""
    bias: Tensor
    """The largest size of what a mask or ALiBi adds to a score, of keys whose P_bar was not 0 at first."""
    top_key: Tensor
    """int64: the first key with the largest score; 0 in a row without keys."""
    visible: Tensor
    """int64: how many keys the row sees."""
    rises: Tensor
    """int64: how often a tile of keys raised m, and so P_bar before it was rescaled."""


class HighScores(NamedTuple):
    """Scores of N query rows above a threshold of each."""

    counts: Tensor
    """How many, int64 [N]."""
    keys: Tensor
    """The keys of the first of them, ascending, int32 [N, kept]; without meaning from ``counts`` on."""
    scores: Tensor
    """Their scores, float64 [N, kept]."""


@dataclass(eq=False)
class KeyProduct:
    """W^T Y over tiles of keys, as ``RowProduct``."""

    weight: TileWeight
    """W."""
    y: Tensor
    """Y, [H, Tq, Dy]."""
    numbers: tuple[Tensor, ...] = ()
    """a, b and c of W, [H, Tq] each, as far as W has them."""
    times: Tensor | None = None
    """What each row of Y is times, [H, Tq]; None: 1."""
    found: Tensor | None = None
    """W^T Y, [H, Tk, Dy], once it is made."""


class TileProduct(NamedTuple):
    """A product to be compiled, see ``FusedHeads.rows`` and ``keys``."""

    way: Literal["rows", "keys"]
    """Which of both."""
    weight: TileWeight
    """W."""
    of: Literal["q", "k", "v", "do", "keys"]
    """A tensor of the other factor's shape; "keys": k itself."""
    summed: bool = False
    """Whether row sums are wanted."""


@dataclass(eq=False)
class RowProduct:
    """W X over tiles of query rows, asked for of ``FusedHeads``, which makes it with others."""

    weight: TileWeight
    """W."""
    x: Tensor | None
    """X, [key heads, Tk, Dx]; None: k."""
    numbers: tuple[Tensor, ...] = ()
    """a, b and c of W, [H, Tq] each, as far as W has them."""
    sums: Tensor | None = None
    """[2, H, Tq], to be filled with row sums of P_bar o (dP - delta) and of its squares; of one product a launch."""
    found: Tensor | None = None
    """W X, [H, Tq, Dx], once it is made."""


def launches(asked: Sequence[RowProduct], width: int, value_width: int) -> Iterator[list[RowProduct]]:
    """These products, those that one launch makes together.

    Args:
        asked: In the order in which they were asked for.
        width: Features of q and k.
        value_width: Of v and dO.
    """
    if max(width, value_width) > MOST_FEATURES:
        yield from ([one] for one in asked)
        return
    alike: dict[int | None, list[RowProduct]] = {}
    for one in asked:
        alike.setdefault(None if one.x is None else one.x.shape[2], []).append(one)
    for x_width, some in alike.items():
        many = _OF_KEYS if x_width is None else _OF_OTHERS
        yield from (some[start : start + many] for start in range(0, len(some), many))


def key_launches(asked: Sequence[KeyProduct], width: int, value_width: int) -> Iterator[list[KeyProduct]]:
    """As ``launches``, of products of keys."""
    widest = max(width, value_width)
    without = _WITHOUT if widest <= _NARROW else _WITHOUT_WIDE
    alike: dict[tuple[int, bool], list[KeyProduct]] = {}
    for one in asked:
        alike.setdefault((one.y.shape[2], one.weight.needs_dprobs), []).append(one)
    for (_, needs_dprobs), some in alike.items():
        many = 1 if widest > MOST_FEATURES else _WITH_DPROBS if needs_dprobs else without
        yield from (some[start : start + many] for start in range(0, len(some), many))


def pairs_of(asked: Sequence[Product]) -> Iterator[Sequence[Product]]:
    """These products, those that one launch of Gluon's kernels makes together."""
    yield from (asked[start : start + 2] for start in range(0, len(asked), 2))
