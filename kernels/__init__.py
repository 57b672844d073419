"""What is measured: recipes of rounding sites and their emulation. Imports nothing of ours but itself."""

from attn_diag.kernels.emulation import (
    EmulatedHead,
    EmulatedRows,
    RecipeNotSupportedError,
    RowTrace,
    block_scores,
    check_supported,
    emulate_blocks,
    emulate_forwards,
    emulate_head,
    emulate_lse,
    emulate_rows,
    emulate_rows_of_several,
    in_any_block,
    score_rounding,
    trace_row,
)
from attn_diag.kernels.emulation_forward import RangeTrace
from attn_diag.kernels.emulation_stack import emulate_stack, stackable
from attn_diag.kernels.presets import LOW_BIT, PRESETS, RECIPES, preset
from attn_diag.kernels.recipe import Recipe, Schedule, SoftmaxRule

__all__ = [
    "LOW_BIT",
    "PRESETS",
    "RECIPES",
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
    "emulate_forwards",
    "emulate_head",
    "emulate_lse",
    "emulate_rows",
    "emulate_rows_of_several",
    "emulate_stack",
    "in_any_block",
    "preset",
    "score_rounding",
    "stackable",
    "trace_row",
]
