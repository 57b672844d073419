"""What a capture's tensors are called, their types, and what may stand for one that still lies in a file."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

OBSERVED = ("o", "lse", "delta", "dq", "dk", "dv", "dq_pre", "dsinks", "dmask", "dkv")
# Those with keys for rows.
KEYED = ("dk", "dv", "dkv")
DEFAULT_OBSERVATION = "observed"
PACKING = ("cu_seqlens_q", "cu_seqlens_k")
CACHE = ("page_table", "cache_seqlens")
INPUTS = (
    "q", "k", "v", "do", "x", "w_q", "mask", "q_positions", "q_descale", "k_descale", "v_descale", "sinks",
    "alibi_slopes", "dropout_mask", *PACKING, *CACHE,
)  # fmt: skip
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64, *FP8)


class TensorSource(Protocol):
    """A tensor that may still lie in a file: its shape and dtype are known, its parts are read by indexing."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of all axes."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Type of the stored values."""
        ...

    def __getitem__(self, index: Any) -> Tensor: ...
