"""What is true: attention and linear attention in float64 on a kernel's own inputs, and correct rounding.

Imports nothing of ours.
"""

from attn_diag.reference.attention import (
    AttentionHead,
    HeadReference,
    RowBlock,
    Rows,
    reference_head,
    reference_rows,
    row_blocks,
)
from attn_diag.reference.certificate import UNIT, BoundCollector
from attn_diag.reference.dropout import Dropout
from attn_diag.reference.head_bounds import HeadBounds
from attn_diag.reference.linear import LINEAR_OPERATORS, LinearCall, LinearOperator, LinearReference, linear_reference
from attn_diag.reference.masking import Alibi, Masking, absorbed_rows, hides
from attn_diag.reference.rounding import FloatFormat, format_of, round_nearest_even, ulp

__all__ = [
    "LINEAR_OPERATORS",
    "UNIT",
    "Alibi",
    "AttentionHead",
    "BoundCollector",
    "Dropout",
    "FloatFormat",
    "HeadBounds",
    "HeadReference",
    "LinearCall",
    "LinearOperator",
    "LinearReference",
    "Masking",
    "RowBlock",
    "Rows",
    "absorbed_rows",
    "format_of",
    "hides",
    "linear_reference",
    "reference_head",
    "reference_rows",
    "round_nearest_even",
    "row_blocks",
    "ulp",
]
