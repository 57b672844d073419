"""Rows whose maximum is repeated, by four definitions, and elements of O that swallowed all but one key.

A repeated maximum makes several unnormalised probabilities 1 at once, the trigger of the mechanism of
Qiu & Yao, arXiv 2510.04212, section 3.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from attn_diag.reference import FloatFormat, RowBlock, round_nearest_even, ulp

# A score within this distance of the row maximum counts as a repeat by the definition "window" (the
# published mitigation's own threshold).
WINDOW = 1e-3
DEFINITIONS = ("exact", "as_run", "window", "unit")
# Positions kept per row; an all-equal row would otherwise keep Tk of them.
MAX_POSITIONS = 16
# Candidates held before they are decided about: few, unless many scores are equal.
_MAX_PENDING = 2**20
_NO_KEY = torch.iinfo(torch.int64).max


@dataclass
class Repeats:
    """One definition's result for one head: multiplicity of the maximum per row [Tq] (0 for a row without keys).

    ``rows``, ``keys`` [n]: where the maxima of the rows with more than one lie, at most 16 a row.
    """

    multiplicity: Tensor
    rows: Tensor
    keys: Tensor

    def values(self, v: Tensor) -> tuple[Tensor, Tensor]:
        """Sign and binary exponent of V (``v`` [Tk, Dv]) at every position: two tensors [n, Dv]."""
        at = v[self.keys]
        return at.sign(), torch.frexp(at)[1] - 1


class RowMaximaCollector:
    """Gathers repeated row maxima block by block while the reference streams.

    ``input_format`` is q's. ``round_scores`` is the recipe's own rounding of the scores, float64 -> float64
    and monotonic, None where it is unknown; ``score_format`` its format.
    """

    def __init__(
        self,
        q_length: int,
        device: torch.device,
        input_format: FloatFormat,
        round_scores: Callable[[Tensor], Tensor] | None = None,
        score_format: FloatFormat | None = None,
    ) -> None:
        self._format = input_format
        self._round_scores = round_scores
        self._score_format = score_format
        names = [d for d in DEFINITIONS if d != "as_run" or round_scores is not None]
        self._multiplicity = {d: torch.zeros(q_length, dtype=torch.int64, device=device) for d in names}
        self._positions: dict[str, list[tuple[Tensor, Tensor]]] = {d: [] for d in names}
        self._index = torch.arange(q_length, device=device)
        self._row_max = torch.full((q_length,), -torch.inf, dtype=torch.float64, device=device)
        self._pending: list[tuple[Tensor, Tensor, Tensor]] = []
        self._pending_count = 0
        self._top_key = torch.full((q_length,), _NO_KEY, dtype=torch.int64, device=device)
        self.visible_keys = torch.zeros(q_length, dtype=torch.int64, device=device)

    def add(self, block: RowBlock) -> None:
        """Take one block of the reference."""
        top = block.row_max
        self._row_max[block.rows] = top
        self.visible_keys[block.rows] = block.visible_keys
        # Whatever rounds to the same number as the maximum lies within a spacing of it (two for a recipe
        # that rounds before and after the scale); only those candidates are looked at.
        reach = ulp(top, self._format).clamp_(min=max(WINDOW, -self._format.rounds_to_one))
        if self._score_format is not None:
            reach = torch.maximum(reach, 2.5 * ulp(top, self._score_format))
        threshold = (top - reach).masked_fill_(block.fully_masked, torch.inf)
        rows, columns = (block.scores >= threshold[:, None]).nonzero(as_tuple=True)
        self._pending.append((self._index[block.rows][rows], columns + block.keys.start, block.scores[rows, columns]))
        self._pending_count += len(rows)
        if self._pending_count > _MAX_PENDING:
            self._settle()

    @property
    def top_key(self) -> Tensor:
        """The first key with the row's largest score, int64 [Tq]; 0 in rows without keys."""
        self._settle()
        return self._top_key.masked_fill(self._top_key == _NO_KEY, 0)

    def repeats(self, definition: str) -> Repeats | None:
        """The result for one definition; None for "as_run" where the recipe is unknown."""
        if definition not in self._multiplicity:
            return None
        self._settle()
        parts = self._positions[definition]
        empty = torch.zeros(0, dtype=torch.int64, device=self._top_key.device)
        rows = torch.cat([empty, *(r for r, _ in parts)])
        keys = torch.cat([empty, *(k for _, k in parts)])
        return Repeats(self._multiplicity[definition], rows, keys)

    def _settle(self) -> None:
        """Decide about the candidates gathered so far; those of one row always come together."""
        if not self._pending:
            return
        rows, keys, scores = (torch.cat(column) for column in zip(*self._pending, strict=True))
        self._pending, self._pending_count = [], 0
        row_top = self._row_max[rows]
        at_top = scores == row_top
        self._top_key.scatter_reduce_(0, rows[at_top], keys[at_top], "amin")
        repeats = {
            "exact": round_nearest_even(scores, self._format) == round_nearest_even(row_top, self._format),
            "window": row_top - scores <= WINDOW,
            "unit": scores - row_top >= self._format.rounds_to_one,
        }
        if self._round_scores is not None:
            repeats["as_run"] = self._round_scores(scores) == self._round_scores(row_top)
        for name, is_repeat in repeats.items():
            self._record(name, rows[is_repeat], keys[is_repeat])

    def _record(self, name: str, rows: Tensor, keys: Tensor) -> None:
        count = torch.bincount(rows, minlength=len(self._row_max))
        self._multiplicity[name] += count
        several = count[rows] > 1
        rows, keys = rows[several], keys[several]
        rank = torch.arange(len(rows), device=rows.device) - torch.searchsorted(rows, rows)
        keep = rank < MAX_POSITIONS
        self._positions[name].append((rows[keep], keys[keep]))


def swamped_elements(out: Tensor, reference_out: Tensor, v: Tensor, top_key: Tensor) -> Tensor:
    """Where O_obs equals V of the row's maximal key exactly, though the true O does not. bool [Tq, Dv].

    ``out``, ``reference_out`` [Tq, Dv], ``v`` [Tk, Dv], ``top_key`` [Tq]. A count, not a cause by itself.
    """
    v_top = v[top_key]
    return (out == v_top) & (reference_out != v_top)
