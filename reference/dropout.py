"""Dropout of attention's probabilities: which of them a kernel kept."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Dropout:
    """P becomes W o P, W = kept / (1 - p): after the softmax, whose row sum and LSE are those of all keys.

    Source: Srivastava et al., "Dropout", JMLR 15 (2014) 1929, as attention kernels have it: Dao et al.,
    "FlashAttention", arXiv 2205.14135, appendix B.4. Raises ValueError for a p that is no probability below 1, and
    TypeError where ``kept`` is not bool.
    """

    kept: Tensor
    """bool [Tq, Tk]; False where a probability was dropped."""
    p: float
    """How many are dropped in the mean, 0 <= p < 1."""

    def __post_init__(self) -> None:
        if not 0 <= self.p < 1:
            raise ValueError(f"dropout's p must be at least 0 and below 1, got {self.p}")
        if self.kept.dtype != torch.bool:
            raise TypeError(f"dropout's kept must be bool, True where a probability is kept, got {self.kept.dtype}")

    @property
    def factor(self) -> float:
        """1 / (1 - p) in float64, which is taken as exact: what kept probabilities are multiplied by."""
        return 1 / (1 - self.p)
