"""P_bar in 8 bits, as kernels in FP8 multiply it with v: what such a cast makes of O.

P_bar is relative to the largest score so far. So the numbers of a format between which it falls, and what rounding
makes of O, differ with the order in which a kernel takes its keys, and with how many at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product

import torch
from torch import Tensor

from attn_diag.head.recipe_candidates import TILES, describe_schedule
from attn_diag.kernels.quantize import quantize
from attn_diag.kernels.quantizers import PRESETS, Quantizer, quantizer
from attn_diag.kernels.recipe import Order, Schedule
from attn_diag.reference import RowBlock

_ALL_KEYS = Schedule(key_tile=2**20)
_ORDERS: tuple[Order, ...] = "ascending", "descending"
# Of all casts these keys at once are tried, of the best one all tiles.
_FIRST_TILE = 128
_MOST_CODES = 255


@dataclass(frozen=True)
class CastProbs:
    """How P_bar was cast before it was multiplied with v."""

    format: str
    """In words, "FP8 (E4M3)"."""
    factor: str
    """In words, "times 256"; empty: not known."""
    by: Quantizer
    """How."""
    amax: float | None
    """What scales are made of; None: P_bar's own largest numbers."""
    schedule: Schedule | None = _ALL_KEYS
    """In which order the keys came; None: P was divided by l before, so that it matters not."""
    schedule_known: bool = True
    """Whether no other order leaves as little."""
    sums_cast: bool = False
    """Whether l sums what was cast."""
    steps: int = 0
    """Above 0: codes from 0 to 255 of one step for all, 1 over this, as a softmax in INT8 has them (TFLite's: 256)."""

    @property
    def words(self) -> str:
        """ "FP8 (E4M3), times 256, in 128-key tiles descending"."""
        known = [self.factor]
        if self.schedule is not None and self.schedule_known:
            order = describe_schedule(self.schedule)
            if self.by_tile:
                order = order.rpartition(" ")[0]
            known.append(order if self.schedule == _ALL_KEYS else f"in {order}")
        head, _, rest = self.format.partition(")")
        known = [word for word in known if word]
        if not known:
            return self.format
        return f"{', '.join([head, *known])})" if rest or ")" in self.format else f"{self.format} ({', '.join(known)})"

    @property
    def by_tile(self) -> bool:
        """Whether each tile's row has a scale of its own, so that their order matters not."""
        return self.by.block == "row"

    @property
    def symbol(self) -> str:
        """What was cast."""
        return "P̄" if self.schedule is not None else "P"

    def out(self, block: RowBlock, v: Tensor) -> Tensor:
        """O of some rows, [R, Dv]; v [K, Dv] are the values of the block's keys."""
        probs = block.probs
        largest = torch.ones_like(probs[:, :1])
        if self.schedule is not None:
            largest = _largest(probs, block, self.schedule, so_far=not self.by_tile)
        if self.steps:
            cast = (probs / largest * self.steps).round().clamp(max=_MOST_CODES) / self.steps * largest
        else:
            cast = quantize(probs / largest, self.by, amax=self.amax).values * largest
        made: Tensor = cast @ v
        return made / cast.sum(1, keepdim=True).clamp(min=1e-300) if self.sums_cast else made


def _largest(probs: Tensor, block: RowBlock, schedule: Schedule, *, so_far: bool) -> Tensor:
    """Of every element the largest of its row so far, or in its tile, [R, K]."""
    start, keys = block.keys.start or 0, probs.shape[1]
    tiles = torch.arange(start, start + keys, device=probs.device) // schedule.key_tile
    tiles = (tiles - start // schedule.key_tile).expand(probs.shape)
    largest = probs.new_full((len(probs), int(tiles[0, -1]) + 1), 1e-300)
    largest.scatter_reduce_(1, tiles, probs, "amax")
    if so_far and schedule.order == "descending":
        largest = largest.flip(1).cummax(1).values.flip(1)
    elif so_far:
        largest = largest.cummax(1).values
    return largest.gather(1, tiles)


def first_casts(keys: int) -> Iterator[CastProbs]:
    """Every cast that is looked for, of so many keys, in a few orders."""
    for one in _casts():
        if one.schedule is None or one.schedule in (_ALL_KEYS, *_in_tiles(one, keys, [_FIRST_TILE])):
            yield one


def in_other_ways(one: CastProbs, keys: int) -> Iterator[CastProbs]:
    """A cast in all orders that are tried, and with the other sum."""
    schedules = [one.schedule] if one.schedule is None else [_ALL_KEYS, *_in_tiles(one, keys, TILES)]
    for schedule, sums_cast in product(schedules, (False, True)):
        yield replace(one, schedule=schedule, sums_cast=sums_cast)


def told_apart(alike: Sequence[CastProbs], *, sure: bool) -> CastProbs:
    """The first of several that leave as little, with the words that are all of theirs; none where it is not sure."""
    factors, schedules = ({getattr(one, name) for one in alike} for name in ("factor", "schedule"))
    factor = alike[0].factor if sure and len(factors) == 1 else ""
    return replace(alike[0], factor=factor, schedule_known=sure and len(schedules) == 1)


def _in_tiles(one: CastProbs, keys: int, tiles: Sequence[int]) -> list[Schedule]:
    orders = _ORDERS[:1] if one.by_tile else _ORDERS
    return [Schedule(key_tile=tile, order=order) for tile in tiles if tile < keys for order in orders]


@cache
def _casts() -> tuple[CastProbs, ...]:
    e4m3, e5m2 = (quantizer("fp8", elements=elements) for elements in ("e4m3", "e5m2"))
    fixed = [
        *(CastProbs("FP8 (E4M3)", f"times {factor}", e4m3, 448 / factor) for factor in (256, 448, 240)),
        CastProbs("FP8 (E4M3)", "as it is", e4m3, 448.0),
        CastProbs("FP8 (E5M2)", "as it is", e5m2, e5m2.mapped),
        CastProbs("INT8", "times 127", quantizer("int8", block="tensor"), 1.0),
    ]
    own = [
        CastProbs("INT8", "a scale for a row", PRESETS["int8"], None),
        *(CastProbs(name.upper(), "", PRESETS[name], None) for name in ("mxfp8", "mxfp4")),
    ]
    orders = _ALL_KEYS, *(Schedule(key_tile=_FIRST_TILE, order=order) for order in _ORDERS)
    return (
        *(replace(one, schedule=order) for one in (*fixed, *own) for order in orders),
        *(replace(one, schedule=None) for one in fixed),
        *(
            CastProbs("INT8", f"in steps of 1/{n}", quantizer("int8", block="tensor"), None, None, steps=n)
            for n in (_MOST_CODES + 1, _MOST_CODES)
        ),
    )
