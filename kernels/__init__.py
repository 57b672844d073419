"""What is measured: recipes of rounding sites and their emulation. Imports nothing of ours but itself."""

from attn_diag.kernels.emulation import (
    EmulatedHead,
    EmulatedRows,
    RecipeNotSupportedError,
    RowTrace,
    block_scores,
    check_supported,
    emulate_blocks,
    emulate_head,
    emulate_rows,
    score_rounding,
    trace_row,
)
from attn_diag.kernels.emulation_forward import RangeTrace
from attn_diag.kernels.recipe import PRESETS, Recipe, Schedule, SoftmaxRule, preset

__all__ = [
    "PRESETS",
    "EmulatedHead",
    "EmulatedRows",
    "RangeTrace",
    "Recipe",
    "RecipeNotSupportedError",
    "RowTrace",
    "Schedule",
    "SoftmaxRule",
    "block_scores",
    "check_supported",
    "emulate_blocks",
    "emulate_head",
    "emulate_rows",
    "preset",
    "score_rounding",
    "trace_row",
]
