"""How the partial results of hops are put together: every format and order that is tried, and whose bits there are."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product

import torch
from torch import Tensor
from torch.nn import functional

EXACT = "in fp32"
# How the words of what is no rounding begin.
OTHER = ("as if", "without")
# A way has the bits of a result: what is left are exponentials that differ in their last bit.
_HAS_ITS_BITS = 0.97
# Ways that agree with it in so much less are other ways.
_FEWER = 0.005
# Of fp32 results, which sum in another order, in units of 2^-24 of the largest part.
ORDER_ERROR = 8 * 2.0**-24
NARROW = {"BF16": torch.bfloat16, "FP16": torch.float16}
_Cast = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class HopPart:
    """What one hop adds to some rows of a result; fp32."""

    rows: Tensor
    """Which, int64 [m]."""
    values: Tensor
    """O of its keys alone, or what it adds to a gradient, [m, D]."""
    lse: Tensor | None = None
    """[m], of O."""
    first_key: int = 0
    """The first of its keys in the sequence."""
    dtype: torch.dtype = torch.float32
    """In which the hop returned them."""


@dataclass(frozen=True)
class Way:
    """One way to put parts together."""

    kind: str
    """What is rounded, in words."""
    order: str
    """In which order; ways of one kind are no rivals."""
    result: Tensor
    """[n, D], in fp32, cast as the result was."""


def merges_of(parts: Sequence[HopPart], rows: int, out: torch.dtype) -> Iterator[Way]:
    """Ways to merge partial O by their LSE.

    Args:
        parts: By hop, in the order in which they ran.
        rows: n.
        out: O's dtype.
    """
    orders = _orders(parts)
    for (kind, kept), (order, chosen) in product(_formats(parts, out), orders.items()):
        yield Way(kind, order, _merged(chosen, rows, kept).to(out).float())
    for name, dtype in _narrow(out).items():
        for order, chosen in orders.items():
            found = _merged(chosen, rows, _Kept(*[_to(dtype)] * 4), dtype)
            yield Way(f"every operation of the merge in {name}", order, found.to(out).float())
            if all(part.dtype == dtype for part in parts):
                kind = f"hops' O in {name} that are subtracted before they are widened"
                yield Way(kind, order, _unwidened(chosen, rows, dtype).to(out).float())
    of_base_2 = [_with_lse(p, p.lse * math.log(2)) for p in parts if p.lse is not None]
    yield Way("as if the hops' LSE were to base 2", "", _merged(of_base_2, rows).to(out).float())
    if len(parts) > 1:
        for number in range(len(parts)):
            left = [part for other, part in enumerate(parts) if other != number]
            yield Way(f"without hop {number}", "", _merged(left, rows).to(out).float())


def sums_of(parts: Sequence[HopPart], rows: int, out: torch.dtype) -> Iterator[Way]:
    """Ways to add up what hops give a gradient; as ``merges_of``."""
    kept: dict[str, _Cast] = {EXACT: _same}
    kept |= {f"the sum in {name} after each hop": _to(dtype) for name, dtype in _narrow(out).items()}
    for (kind, cast), (order, chosen) in product(kept.items(), _orders(parts).items()):
        yield Way(kind, order, _added(chosen, rows, cast).to(out).float())
    if len(parts) > 1:
        for number in range(len(parts)):
            left = [part for other, part in enumerate(parts) if other != number]
            yield Way(f"without hop {number}", "", _added(left, rows, _same).to(out).float())


@dataclass
class SharedBits:
    """How many elements of results have the bits of each way, over heads."""

    same: dict[str, dict[tuple[str, int], int]] = field(default_factory=dict)
    """By kind, and by order and number of those that are alike in both."""
    elements: int = 0
    """Of so many."""

    def add(self, result: Tensor, ways: Sequence[Way], parts: Sequence[HopPart], out: torch.dtype) -> None:
        """Compare one head's result, fp32 [n, D]."""
        self.elements += result.numel()
        largest = torch.zeros_like(result)
        for part in parts:
            largest[part.rows] = torch.maximum(largest[part.rows], part.values.abs())
        allowed = largest * ORDER_ERROR if out == torch.float32 else torch.zeros_like(result)
        alike: Counter[tuple[str, str]] = Counter()
        for way in ways:
            key = way.order, alike[way.kind, way.order]
            alike[way.kind, way.order] += 1
            of_kind = self.same.setdefault(way.kind, {})
            of_kind[key] = of_kind.get(key, 0) + int(((result - way.result).abs() <= allowed).sum())

    @property
    def kinds(self) -> list[str]:
        """Those that have its bits, the plainest first; several where they cannot be told apart."""
        best = {kind: max(orders.values()) / max(self.elements, 1) for kind, orders in self.same.items()}
        most = max(best.values(), default=0.0)
        return [kind for kind, share in best.items() if share >= most - _FEWER] if most >= _HAS_ITS_BITS else []

    @property
    def share(self) -> float:
        """Of the elements, those that have the bits of the nearest way."""
        return max((same for orders in self.same.values() for same in orders.values()), default=0) / max(
            self.elements, 1
        )

    @property
    def words(self) -> str:
        """The way, with its order where that shows; empty: none has its bits."""
        kinds = self.kinds
        if not kinds:
            return ""
        if EXACT in kinds:
            return f"{EXACT}, cast once"
        orders = self.same[kinds[0]]
        at = {order for (order, _), same in orders.items() if same >= max(orders.values()) - _FEWER * self.elements}
        order = at.pop() if len(at) == 1 else ""
        return " or ".join(kinds[:2]) + (f", {order}" if order else "")


@dataclass(frozen=True)
class _Kept:
    """What is done to a hop's O and LSE, and to the merged ones."""

    part: _Cast
    part_lse: _Cast
    merged: _Cast
    lse: _Cast


def _formats(parts: Sequence[HopPart], out: torch.dtype) -> list[tuple[str, _Kept]]:
    """By kind, of which several are alike to who reads of it, what is rounded."""
    found = [(EXACT, _Kept(_same, _same, _same, _same))]
    for name, dtype in _narrow(out).items():
        low = _to(dtype)
        if any(part.dtype == torch.float32 for part in parts):
            found.append((f"each hop's O in {name}", _Kept(low, _same, _same, _same)))
        found.append((f"the merged O in {name} after each hop", _Kept(_same, _same, low, _same)))
        found += [(f"the merged O and LSE in {name} after each hop", _Kept(_same, of, low, low)) for of in (_same, low)]
    for name, dtype in NARROW.items():
        low = _to(dtype)
        found += [(f"the LSE in {name} after each hop", _Kept(_same, of, _same, low)) for of in (_same, low)]
    return found


def _narrow(out: torch.dtype) -> dict[str, torch.dtype]:
    return {name: dtype for name, dtype in NARROW.items() if out in (dtype, torch.float32)}


def _orders(parts: Sequence[HopPart]) -> dict[str, list[HopPart]]:
    return {
        "in the order in which they ran": list(parts),
        "in the opposite order": list(parts)[::-1],
        "from the first keys": sorted(parts, key=lambda part: part.first_key),
    }


def _merged(
    parts: Sequence[HopPart], rows: int, kept: _Kept | None = None, dtype: torch.dtype = torch.float32
) -> Tensor:
    """O <- O - sigmoid(L_hop - L) (O - O_hop), L <- L - logsigmoid(L - L_hop), each operation in ``dtype``; fp32."""
    kept = kept or _Kept(_same, _same, _same, _same)
    o = parts[0].values.new_zeros(rows, parts[0].values.shape[1]).to(dtype)
    lse = o.new_full((rows, 1), -torch.inf)
    for part in parts:
        assert part.lse is not None
        at, new, new_lse = part.rows, kept.part(part.values).to(dtype), kept.part_lse(part.lse[:, None]).to(dtype)
        step, both = _weighed(lse[at], new_lse)
        o[at] = kept.merged((o[at] - step * (o[at] - new)).float()).to(dtype)
        lse[at] = kept.lse(both.float()).to(dtype)
    return o.float()


def _unwidened(parts: Sequence[HopPart], rows: int, dtype: torch.dtype) -> Tensor:
    """The same with O as torch has it without convert_to_f32: in the hops' dtype, until the fp32 LSE widens it."""
    o = parts[0].values.new_zeros(rows, parts[0].values.shape[1]).to(dtype)
    lse = parts[0].values.new_full((rows, 1), -torch.inf)
    for number, part in enumerate(parts):
        assert part.lse is not None
        at, new = part.rows, part.values.to(dtype)
        step, both = _weighed(lse[at], part.lse[:, None])
        added = new if number == 0 else o[at] - step * (o[at] - new)
        o = o.to(added.dtype).index_copy(0, at, added)
        lse[at] = both
    return o.float()


def _weighed(lse: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
    """What a hop's O weighs beside what is merged, and the LSE of both."""
    # Rows that saw nothing yet, or see nothing here, have no difference of two LSE.
    fresh, empty = lse == -torch.inf, new == -torch.inf
    step = torch.sigmoid(new - lse).masked_fill(fresh, 1.0).masked_fill(empty, 0.0)
    both = lse - functional.logsigmoid(lse - new)
    return step, torch.where(empty, lse, torch.where(fresh, new, both))


def _added(parts: Sequence[HopPart], rows: int, cast: _Cast) -> Tensor:
    found = parts[0].values.new_zeros(rows, parts[0].values.shape[1])
    for part in parts:
        found[part.rows] = cast(found[part.rows] + part.values)
    return found


def _with_lse(part: HopPart, lse: Tensor) -> HopPart:
    return HopPart(part.rows, part.values, lse, part.first_key, part.dtype)


def _same(t: Tensor) -> Tensor:
    return t


def _to(dtype: torch.dtype) -> _Cast:
    return lambda t: t.to(dtype).float()
