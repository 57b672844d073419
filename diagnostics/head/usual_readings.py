"""Caps of scores and windows that models use: what a capture's metadata may have left out."""

from __future__ import annotations

# Caps of scores that models use (Gemma 2: 50, Grok 1: 30).
USUAL_SOFTCAPS = (15.0, 20.0, 30.0, 50.0, 100.0)
# alpha c tanh(S / c) of unscaled scores S is a cap of alpha c.
BEFORE_THE_SCALE = "scores are capped before they are scaled"


def usual_windows(k_length: int) -> list[int]:
    """Powers of two below the number of keys, and one less: a window of W keys reaches W - 1 back."""
    powers = [2**i for i in range(k_length.bit_length()) if 2**i < k_length]
    return sorted({left for power in powers for left in (power - 1, power) if left})
