"""What instrumented kernels saw: row statistics, and tiles of chosen rows."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from attn_diag.kernels.backend import describe_backend
from attn_diag.kernels.geometry import Causal, Level, Visibility
from attn_diag.kernels.recipe import Recipe

# Of a repeated maximum, see ``attn_diag.kernels.triton_multiplicity``.
DEFINITIONS = ("exact", "as_run", "window", "unit")


@dataclass
class Dump:
    """The intermediates of one call of ``attention``, as the kernels computed them. Shapes are [B, Hq, Tq] unless said.

    What the backward fills in is None before it has run, and under torch.compile, whose backward cannot reach this
    object.
    """

    level: Level
    """What was kept: "rows", "tiles" or "full"."""
    recipe_json: str = field(repr=False)
    """The recipe; ``recipe`` reads it."""
    q: Tensor = field(repr=False)
    """[B, Hq, Tq, D]."""
    k: Tensor = field(repr=False)
    """[B, Hk, Tk, D]."""
    o: Tensor = field(repr=False)
    """[B, Hq, Tq, D], in the recipe's format."""
    lse: Tensor = field(repr=False)
    """L, fp32."""
    causal: Causal
    """As in the call."""
    window: tuple[int, int]
    """(left, right), inclusive; -1: unlimited."""
    scale: float
    """alpha."""
    softcap: float | None
    """As in the call."""
    rows: Tensor = field(repr=False)
    """[5, B, Hq, Tq] fp32, raw; the properties read it."""
    slots: Tensor | None = field(repr=False)
    """int32: where each row's tiles lie, -1 for nowhere."""
    raw_scores: Tensor = field(repr=False)
    """[slots, Tk], raw; use ``scores``."""
    raw_probs: Tensor = field(repr=False)
    """[slots, Tk], raw; use ``probs``."""
    tile_max: Tensor = field(repr=False)
    """[slots, tiles] fp32: the maximum that each tile's P_bar is relative to."""
    delta: Tensor | None = field(default=None, repr=False)
    """fp32, from the backward."""
    dprobs: Tensor | None = field(default=None, repr=False)
    """dP, [slots, Tk] fp32, from the backward."""
    dscores: Tensor | None = field(default=None, repr=False)
    """dS in the recipe's format, [slots, Tk], from the backward."""
    sinks: Tensor | None = field(default=None, repr=False)
    """[Hq] fp32, as in the call; l and L have them in it, m is that of the keys."""
    alibi_slopes: Tensor | None = field(default=None, repr=False)
    """[Hq] or [B, Hq] ([documents, Hq]) fp32, as in the call; the scores have their bias in it."""
    cu_seqlens_q: Tensor | None = field(default=None, repr=False)
    """int32 [documents + 1], as in the call."""
    cu_seqlens_k: Tensor | None = field(default=None, repr=False)
    """Likewise, of the keys; columns of ``scores``, ``probs``, ``dprobs`` and ``dscores`` are rows of k."""

    page_table: Tensor | None = field(default=None, repr=False)
    """As in the call, int32. The rows of q are those of packed sequences then, and k is [pages, Hk, page size, D]."""
    cache_seqlens: Tensor | None = field(default=None, repr=False)
    """As in the call, int32 [B]."""
    v: Tensor | None = field(default=None, repr=False)
    """[pages, Hk, page size, Dv], of a call with pages alone."""

    @property
    def has_backward(self) -> bool:
        """Whether the backward has run, so that ``delta`` is there."""
        return self.delta is not None

    @cached_property
    def recipe(self) -> Recipe:
        """The forward's recipe."""
        return Recipe.from_json(self.recipe_json)

    @property
    def backend(self) -> str:
        """Where the numbers come from, such as "triton sm90"."""
        return describe_backend(self.q.device)

    @property
    def visibility(self) -> Visibility:
        """Which keys a row sees."""
        return Visibility(self.causal, self.window)

    @property
    def factor(self) -> float:
        """What stored scores and maxima are to be multiplied by to include alpha: alpha, or 1."""
        return self.scale if self.recipe.alpha == "in-exponent" and self.softcap is None else 1.0

    @property
    def row_max(self) -> Tensor:
        """m: what was subtracted last, alpha included, fp32; -inf for a row without keys."""
        return self.rows[0] * self.factor

    @property
    def row_sum(self) -> Tensor:
        """l, fp32."""
        return self.rows[1]

    @property
    def unity_defect(self) -> Tensor:
        """What O would be for V = 1, minus 1: sum of the cast P_bar over l, minus 1; fp32, NaN for a row without keys.

        The sum is the one that P_bar V makes (on a GPU, the tensor core's).
        """
        return self.rows[3] / self.rows[1] - 1

    @property
    def out_rounding(self) -> Tensor:
        """Sum over features of O's last rounding error, rounded minus unrounded; fp32."""
        return self.rows[4]

    def multiplicity(self, definition: str) -> Tensor:
        """How many scores are the row's maximum, int32; 0 for a row without keys.

        The first call runs the second pass over the rows that the forward flagged, on q and k as they are then.

        Args:
            definition: One of DEFINITIONS; ValueError for another name.
        """
        if definition not in DEFINITIONS:
            raise ValueError(f"no definition {definition!r} of a repeated maximum; known: {', '.join(DEFINITIONS)}")
        return self._multiplicities[DEFINITIONS.index(definition)]

    @cached_property
    def _multiplicities(self) -> Tensor:
        from attn_diag.kernels.triton_multiplicity import multiplicities
        from attn_diag.kernels.triton_sequences import Sequences

        row_max, _, near, *_ = self.rows
        keys = self.cu_seqlens_k if self.page_table is None else self.cache_seqlens
        sequences = Sequences(self.cu_seqlens_q, keys, self.alibi_slopes, self.page_table)
        return multiplicities(
            self.q.detach(), self.k.detach(), near, row_max, self.recipe, self.visibility, scale=self.scale,
            softcap=self.softcap, sequences=sequences,
        )  # fmt: skip

    @cached_property
    def chosen(self) -> Tensor:
        """Batch item, head and query row of every dumped row: int64 [slots, 3]. Synchronises with the device."""
        if self.slots is None:
            return torch.empty(0, 3, dtype=torch.int64)
        chosen = self.slots >= 0
        return chosen.nonzero()[self.slots[chosen].argsort()]

    @property
    def scores(self) -> Tensor:
        """S of the chosen rows as the recipe stores it, to be multiplied by ``factor``; [slots, Tk]."""
        return torch.where(self.visible, self.raw_scores, -torch.inf)

    @property
    def probs(self) -> Tensor:
        """The cast P_bar of the chosen rows, each from its own tile's ``tile_max``, [slots, Tk]; 0 where hidden."""
        return torch.where(self.visible, self.raw_probs, 0.0)

    @cached_property
    def visible(self) -> Tensor:
        """Which keys the chosen rows see: bool [slots, Tk]. Tiles that no row of a block sees are never written."""
        rows = self.chosen[:, 2:]
        keys = torch.arange(self.k.shape[2], device=rows.device)
        if self.cu_seqlens_q is None or self.cu_seqlens_k is None:
            distance = keys - rows - self.visibility.shift(self.q.shape[2], self.k.shape[2])
            seen = torch.ones_like(distance, dtype=torch.bool)
        else:
            borders_q, borders_k = self.cu_seqlens_q.long(), self.cu_seqlens_k.long()
            document = torch.searchsorted(borders_q, rows.contiguous(), right=True) - 1
            # Rows behind the last document see nothing.
            after = (document + 1).clamp(max=len(borders_q) - 1)
            q_length, k_length = (borders[after] - borders[document] for borders in (borders_q, borders_k))
            shift = self.visibility.shift(0, 1) * (k_length - q_length)
            own = keys - borders_k[document]
            distance = own - (rows - borders_q[document]) - shift
            seen = (own >= 0) & (own < k_length)
        left, right = self.visibility.reach()
        if left is not None:
            seen &= distance >= -left
        if right is not None:
            seen &= distance <= right
        return seen
