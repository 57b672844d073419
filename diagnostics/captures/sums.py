"""The sum of an output projection's parts in a capture: what its tensors are called, and what is said of it."""

from __future__ import annotations

from collections.abc import Mapping

from attn_diag.captures.sources import TensorSource

PART = "sum_part"
"""What this rank gave, [B, T, C]."""
TOTAL = "sum_total"
"""What it got, [B, T, C]; of a sum that is scattered, some of the T rows."""
OUTPUT = "sum_output"
"""What the output projection returned, where that is something else, or nothing was added up."""
W_O = "w_o"
"""The rank's own columns of the output projection's weight, [C, D * heads]."""
_NAMES = (PART, TOTAL, OUTPUT, W_O)
RANKS, BY, DTYPE, MODULE = "sum_ranks", "sum_by", "sum_dtype", "sum_module"
"""In the metadata: which ranks' parts were added up, by what, the dtype in which the projection returned it, and the
projection's name."""
BIAS, TURNED, ASKED = "sum_bias", "sum_turned", "sums"
"""Likewise, where they are so: that the projection adds a bias, that what ranks gave lay in memory as [T, B, C], and
that sums were asked for."""


def without_sums(tensors: Mapping[str, TensorSource]) -> dict[str, TensorSource]:
    """What is left without them: they are of one rank."""
    return {name: tensor for name, tensor in tensors.items() if name not in _NAMES}
