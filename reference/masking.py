"""Which keys a query row of attention attends to."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Causal = Literal["none", "top-left", "bottom-right"]
AlibiOrigin = Literal["row", "first-key", "last-key"]


@dataclass(frozen=True)
class Alibi:
    """A bias that grows with a key's distance (Press et al., "Train Short, Test Long", arXiv 2108.12409).

    Under causality all three origins are one softmax: they differ by a number a row, which the LSE keeps and O loses.
    Raises ValueError for a slope that is not finite or that fp32 cannot hold: its products with distances up to 2**29
    would round.
    """

    slope: float
    """Of one head; 0 is no bias."""
    origin: AlibiOrigin = "row"
    """"row": -slope |position(t) - j|, as flash_attn defines it; "first-key": slope j, what flash_attn 2 computes under
    causality without a left window, and BLOOM; "last-key": slope (j - (Tk - 1)), as MPT."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.slope) and float(torch.tensor(self.slope, dtype=torch.float32)) == self.slope):
            raise ValueError(f"an ALiBi slope must be a finite number of fp32, got {self.slope}")

    def distances(self, positions: Tensor, keys: slice, k_length: int) -> Tensor:
        """What the slope is multiplied by, int64 [R, K] ([1, K] where all rows share it).

        Args:
            positions: position(t) of R rows, int64 [R].
            keys: K keys.
            k_length: Tk.
        """
        at = torch.arange(keys.start, keys.stop, device=positions.device)[None, :]
        if self.origin == "row":
            return (at - positions[:, None]).abs_().neg_()
        return at if self.origin == "first-key" else at - (k_length - 1)

    def add_to(self, scores: Tensor, distances: Tensor, unit: float = 1.0) -> None:
        """Add the bias to ``scores`` [R, K] in place, rounded once, as a fused multiply-add does.

        Args:
            scores: In units of ``unit``; fp32 ones get a slope that was divided by it in fp32.
            distances: As of ``distances``.
            unit: alpha, where the scores still lack it.
        """
        if scores.dtype == torch.float64:
            scores.add_(distances.double().mul_(self.slope / unit))
            return
        slope = float(torch.tensor(self.slope / unit, dtype=scores.dtype))
        scores.copy_(scores.double().add_(distances.double().mul_(slope)))


@dataclass(frozen=True)
class Masking:
    """Which keys a query row attends to: the one rule, for whoever masks scores."""

    causal: Causal = "none"
    """Row t sees keys j <= position(t)."""
    window: tuple[int, int] | None = None
    """(left, right), inclusive, -1 for unlimited: position(t) - left <= j <= position(t) + right."""
    mask: Tensor | None = None
    """[Tq, Tk]: bool (true = attend) or additive, applied after scale and softcap."""
    positions: Tensor | None = None
    """[Tq], integers: where only chosen query rows are kept, the last key that a causal row t sees. Without it
    position(t) = t, shifted by Tk - Tq unless ``causal`` is "top-left" (the default of FlashAttention >= 2.1, also for
    windows)."""
    alibi: Alibi | None = None
    """A bias by distance; added after scale, softcap and ``mask``."""

    @property
    def reach(self) -> tuple[int | None, int | None]:
        """How many keys before and after position(t) row t may see; None for all of them."""
        left, right = (None if n < 0 else n for n in self.window or (-1, -1))
        if self.causal != "none":
            right = 0
        return left, right

    def shift(self, q_length: int, k_length: int) -> int:
        """position(t) - t, where the rows are all of a sequence's."""
        return 0 if self.causal == "top-left" else k_length - q_length

    def row_positions(self, q_length: int, k_length: int, device: torch.device) -> Tensor:
        """position(t) for every query row, int64 [Tq]."""
        if self.positions is not None:
            return self.positions.to(device=device, dtype=torch.int64)
        return torch.arange(q_length, device=device) + self.shift(q_length, k_length)

    def span(self, first: int, last: int, k_length: int) -> slice:
        """The keys that some row at positions ``first`` to ``last`` may see, as far as causality and window tell."""
        left, right = self.reach
        stop = min(k_length, last + right + 1) if right is not None else k_length
        start = min(max(0, first - left), k_length) if left is not None else 0
        return slice(start, max(start, stop))

    def hidden(self, positions: Tensor, keys: slice) -> Tensor | None:
        """Where causality or window hides one of ``keys`` from a row; the host does not wait.

        Args:
            positions: position(t) of R rows, int64 [R].
            keys: K keys, with start and stop.

        Returns:
            bool [R, K], or None where neither hides anything.
        """
        left, right = self.reach
        if left is None and right is None:
            return None
        distance = torch.arange(keys.start, keys.stop, device=positions.device) - positions[:, None]
        beyond = None if right is None else distance > right
        if left is None:
            return beyond
        return distance < -left if beyond is None else beyond | (distance < -left)


def hides(mask: Tensor) -> Tensor:
    """Where a mask hides a key, bool of its shape: False, or (additive) as low as the lowest number of its format.

    Hugging Face writes that number for -inf.
    """
    return ~mask if mask.dtype == torch.bool else mask <= torch.finfo(mask.dtype).min / 2


# Half the fp32 spacing from here on, 2^-7, is BF16's spacing at 1: no kernel's P is then known from its inputs.
ABSORBS = -(2.0**17)


def adds(mask: Tensor) -> bool:
    """Whether a mask adds something to scores of keys that it does not hide."""
    return mask.dtype != torch.bool and bool(((mask != 0) & (mask > ABSORBS) & ~hides(mask)).any())


def absorbed_rows(mask: Tensor, hidden: Tensor | None) -> Tensor:
    """Rows of which every visible key has so low a number added that fp32 does not hold the score beside it.

    Or FP16's lowest number, beside which FP16 holds no score. What a kernel makes of such a row is the rounding of
    score + mask: from -2^30 on P is uniform. The host does not wait.

    Args:
        mask: Additive, [..., R or 1, K or 1].
        hidden: Of ``Masking.hidden``.

    Returns:
        bool [..., R or 1, 1]; rows that see no key at all are not among them.
    """
    top = mask if hidden is None else torch.where(hidden, -torch.inf, mask)
    top = top.amax(-1, keepdim=True)
    return ((top <= ABSORBS) | hides(top)) & (top > -torch.inf)
