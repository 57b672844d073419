"""How an all-reduce added up what ranks gave: the format and the order whose bits its result has."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations

import torch
from torch import Tensor

from attn_diag.analyses.mismatch.merges import EXACT, NARROW, ORDER_ERROR
from attn_diag.errors import InputError
from attn_diag.results.wording import listed, percent

# Orders are told by pieces of the tensor, as rings and channels cut it; of so many elements a wrong one misses some.
_SEGMENT = 256
# Segments that are looked at, spread over the tensor.
_MOST = 4096
# A format has the bits of a result: what is left are parts that were computed again.
_HAS_ITS_BITS = 0.97
# Of more ranks only orders along a ring are tried, both ways round.
_RANKS = 4
# So many pieces are told with their orders.
_TOLD = 4


@dataclass(frozen=True)
class AllReduced:
    """What is known of one all-reduce."""

    words: str
    """The format, and the order where that shows; empty: none that was tried has its bits."""
    agreement: float
    """Share of elements that have the bits of the nearest."""
    in_fp32: bool
    """Whether they are those of one cast at the end."""


def reduction_of(parts: Sequence[Tensor], result: Tensor) -> AllReduced:
    """Which format and order the result of an all-reduce has the bits of.

    Args:
        parts: By rank, two or more tensors [...] of BF16, FP16 or FP32: what it gave (``all_gather`` it before).
        result: Of the same shape and dtype, what all of them got.

    Returns:
        The format and the order; of large tensors, the pieces that have one order.

    Raises:
        InputError: fewer than two parts, other shapes or dtypes than the result's.
    """
    kinds = {(tuple(t.shape), t.dtype) for t in (*parts, result)}
    if len(parts) < 2 or len(kinds) > 1 or result.dtype not in (torch.float32, *NARROW.values()) or not result.numel():
        told = listed([f"{shape} {str(dtype)[6:]}" for shape, dtype in sorted(kinds, key=str)], len(kinds))
        raise InputError(
            f"an all-reduce's parts, one of each rank, and its result must have one shape and one dtype of "
            f"float32, bfloat16 and float16, got {len(parts)} part{'s' * (len(parts) != 1)}: {told}"
        )
    ranks = [_segments(part).float() for part in parts]
    got, dtype = _segments(result).float(), result.dtype
    exact = torch.stack(ranks).double().sum(0)
    allowed = ORDER_ERROR * torch.stack(ranks).abs().amax(0) if dtype == torch.float32 else torch.zeros_like(got)
    once = float(((exact.to(dtype).float() - got).abs() <= allowed).float().mean())
    best = AllReduced(f"{EXACT}, cast once", once, in_fp32=True)
    for name, narrow in NARROW.items():
        if best.agreement < 1 and dtype in (narrow, torch.float32):
            found = _in_format(ranks, got, name, narrow)
            # Of two ranks there is one addition, and its cast is the only one.
            best = found if found.agreement > max(best.agreement, _HAS_ITS_BITS) else best
    for left in range(len(ranks)):
        rest = exact - ranks[left].double()
        share = float(((rest.to(dtype).float() - got).abs() <= allowed).float().mean())
        if share > max(best.agreement, _HAS_ITS_BITS):
            best = AllReduced(f"without rank {left}", share, in_fp32=False)
    return best if best.agreement >= _HAS_ITS_BITS else AllReduced("", best.agreement, in_fp32=False)


def _in_format(ranks: Sequence[Tensor], got: Tensor, name: str, dtype: torch.dtype) -> AllReduced:
    """Cast after each addition, in an order that may be another for each piece of the tensor."""
    orders = dict(_orders(ranks, dtype))
    words = list(orders)
    same = torch.stack([total == got for total in orders.values()])  # [orders, segments, elements]
    shares = same.float().mean(2)
    best = shares.amax(0)
    # One that lies in two pieces has one order up to some element, and another one behind it.
    two = same[:, best < 1].cumsum(2, dtype=torch.int16)
    best[best < 1] = (two.amax(0) + (two[..., -1:] - two).amax(0)).amax(1).float() / same.shape[2]
    agreement = float(best.mean())
    pieces: list[tuple[set[int], int]] = []
    for segment in shares.T:
        fits = set((segment >= max(float(segment.max()), _HAS_ITS_BITS)).nonzero()[:, 0].tolist())
        if pieces and pieces[-1][0] & fits:
            pieces[-1] = pieces[-1][0] & fits, pieces[-1][1] + 1
        elif fits:  # none: it lies in two pieces
            pieces.append((fits, 1))
    told = [words[min(fits)] if len(fits) == 1 else "" for fits, _ in pieces]
    return AllReduced(f"in {name} after each addition{_of_pieces(told, pieces)}", agreement, in_fp32=False)


def _of_pieces(told: Sequence[str], pieces: Sequence[tuple[set[int], int]]) -> str:
    if not pieces or not all(told):
        return ""
    if len(pieces) == 1:
        return f", {told[0]}"
    count, kinds = len(pieces), len(set(told))
    if count > _TOLD:
        return f", in {kinds} orders in {count} pieces" if kinds > 1 else f", {told[0]}"
    whole = sum(size for _, size in pieces)
    return ", " + listed(
        [f"{o} in {percent(size / whole)} of it" for o, (_, size) in zip(told, pieces, strict=True)], _TOLD
    )


def _orders(ranks: Sequence[Tensor], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """By order in words, the sum that is cast after each addition."""
    numbers = range(len(ranks))
    along = [tuple((first + step * i) % len(ranks) for i in numbers) for step in (-1, 1) for first in numbers]
    every = [*reversed([*permutations(numbers)]), *along] if len(ranks) <= _RANKS else along
    # The first two are alike: of such orders the last, which is along a ring if one is.
    for order in {(frozenset(order[:2]), order[2:]): order for order in every}.values():
        total = ranks[order[0]]
        for number in order[1:]:
            total = (total + ranks[number]).to(dtype).float()
        yield f"ranks {', '.join(map(str, order))}", total
    for pairing in _pairings(len(ranks)):
        level = [ranks[number] for number in pairing]
        while len(level) > 1:
            level = [(a + b).to(dtype).float() for a, b in zip(level[::2], level[1::2], strict=True)]
        yield f"in pairs of ranks {', '.join(map(str, pairing))}", level[0]


def _pairings(ranks: int) -> list[tuple[int, ...]]:
    """Trees over as many ranks as a power of two; of more than four, neighbours alone."""
    if ranks < 4 or ranks & (ranks - 1):
        return []
    return [(0, 1, 2, 3), (0, 2, 1, 3), (0, 3, 1, 2)] if ranks == 4 else [tuple(range(ranks))]


def _segments(t: Tensor) -> Tensor:
    """[segments, elements], spread; what is shorter than one is one."""
    flat = t.detach().flatten()
    if len(flat) < _SEGMENT:
        return flat[None]
    segments = flat[: len(flat) // _SEGMENT * _SEGMENT].view(-1, _SEGMENT)
    at = torch.linspace(0, len(segments) - 1, min(len(segments), _MOST)).long().to(flat.device)
    return segments[at]
