"""The rows of a head on which recipes are run."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from attn_diag.head.read import HeadInputs
from attn_diag.kernels.emulation_operands import HeadLike
from attn_diag.reference import reference_rows
from attn_diag.work import map_in_order

# Rows among which those that attend to many keys are looked for, and how many are looked at together.
_POOL, _BLOCK = 512, 64
# Rows that see few keys, at least so many and one in so many; and the keys that each sees at least, if any does.
_FEW_ROWS, _FEW_OF, _TELLING_KEYS = 24, 16, 64
# Keys of the smallest tile that any recipe or loop is tried with; so few rows that see no others would tell too little.
_TILE, _LEAST = 16, 8


def usable_rows(inputs: HeadInputs, observed: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Those of ``rows`` that tell something (finite in and out, a visible key), and 1 / sum P^2 of each.

    The latter is the number of keys that a row effectively attends to: on a row with one key all recipes agree.
    """

    def look(block_rows: Tensor) -> tuple[Tensor, Tensor]:
        block = reference_rows(replace(inputs.head, do=None), block_rows)
        inputs.mark_rows(block)
        good = ~inputs.unusable[block_rows] & observed[block_rows].isfinite().all(1) & ~block.fully_masked
        return block_rows[good], 1 / block.probs.square().sum(1)[good]

    found = list(map_in_order(look, torch.split(rows, _BLOCK), parallel=rows.device.type == "cpu"))
    return torch.cat([kept for kept, _ in found]), torch.cat([attended for _, attended in found])


def spread_rows(length: int, count: int, device: torch.device) -> Tensor:
    """``count`` rows (or all) spread over the ``length``, int64."""
    return torch.linspace(0, length - 1, min(length, count), device=device).long()


def choose_rows(inputs: HeadInputs, observed: Tensor, few: int, many: int) -> tuple[Tensor, Tensor]:
    """Rows for a coarse search and for the final comparison, ascending; empty where none is usable.

    Half of the ``few`` are spread, half attend to the most keys. The ``many`` are spread (all rows, if there are no
    more) and hold the few.
    """
    length, device = len(observed), observed.device
    pool, attended = usable_rows(inputs, observed, spread_rows(length, _POOL, device))
    even = pool[spread_rows(len(pool), few // 2, device)] if len(pool) else pool
    wide = pool[attended.argsort(descending=True, stable=True)[: few - few // 2]]
    coarse = torch.unique(torch.cat((even, wide)))
    rest, _ = usable_rows(inputs, observed, spread_rows(length, many, device))
    return coarse, torch.unique(torch.cat((coarse, rest)))


def seeing_few(head: HeadLike, rows: Tensor) -> Tensor:
    """Some of the rows, ascending: they see the fewest keys, whose tiles are all that is walked, but not too few."""
    spans = {row: head.visible_span(slice(row, row + 1)) for row in rows.tolist()}
    keys = {row: span.stop - span.start for row, span in spans.items()}
    telling = [row for row, count in keys.items() if count >= _TELLING_KEYS] or list(keys)
    count = max(_FEW_ROWS, len(keys) // _FEW_OF)
    return rows.new_tensor(sorted(sorted(telling, key=keys.__getitem__)[:count]))


def in_one_tile(inputs: HeadInputs, observed: Tensor) -> Tensor:
    """Usable rows that see two keys or more, none behind the first tile: all schedules are one there; int64 [R].

    Empty where they are few.
    """
    spans = [inputs.head.visible_span(slice(row, row + 1)) for row in range(len(observed))]
    rows = [row for row, span in enumerate(spans) if span.stop <= _TILE and span.stop - span.start > 1]
    found = torch.tensor(rows[:_BLOCK], dtype=torch.int64, device=observed.device)
    usable = usable_rows(inputs, observed, found)[0] if rows else found
    return usable if len(usable) >= _LEAST else usable[:0]
