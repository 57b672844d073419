"""Whether numbers go up or down in the order in which they came, whatever their distribution."""

from __future__ import annotations

from collections.abc import Sequence

_FEWEST = 4


def kendall(steps: Sequence[int], values: Sequence[float]) -> tuple[float | None, float | None]:
    """Kendall's tau and its two-sided p-value (exact where nothing ties); None below four steps, or where none differs.

    Source: M. G. Kendall, "A new measure of rank correlation", Biometrika 30 (1938) 81.
    """
    from scipy.stats import kendalltau

    if len(steps) < _FEWEST or len(set(values)) < 2:
        return None, None
    found = kendalltau(steps, values)
    return float(found.statistic), float(found.pvalue)
