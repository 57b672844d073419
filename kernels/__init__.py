"""What is measured: recipes of rounding sites and their emulation. Imports nothing of ours but itself."""

from attn_diag.kernels.emulation import (
    EmulatedHead,
    RecipeNotSupportedError,
    check_supported,
    emulate_head,
    emulate_rows,
    score_rounding,
)
from attn_diag.kernels.recipe import PRESETS, Recipe, Schedule, SoftmaxRule, preset

__all__ = [
    "PRESETS",
    "EmulatedHead",
    "Recipe",
    "RecipeNotSupportedError",
    "Schedule",
    "SoftmaxRule",
    "check_supported",
    "emulate_head",
    "emulate_rows",
    "preset",
    "score_rounding",
]
