"""What is asked of a quantity's samples before its patterns are looked for."""

from __future__ import annotations

from attn_diag.head.quality import QuantitySample
from attn_diag.head.row_effect import RowEffect

# Of what a rounding makes so much of, no pattern explains nearly all.
_MOST = 0.5
# An LSE off by so much of its budget is right.
_LSE_RIGHT = 2.0**-6


def rows_outlying(found: QuantitySample | RowEffect) -> list[int]:
    """Rows that stand out."""
    rows: list[int] = found.rows[found.outlying if isinstance(found, QuantitySample) else found.of_budget > 1].tolist()
    return rows


def rows_unlike(found: QuantitySample | RowEffect) -> list[int]:
    """Rows that a rounding does not make which makes most others."""
    return found.rows[found.unlike].tolist() if isinstance(found, QuantitySample) and found.unlike is not None else []


def made_by_rounding(found: QuantitySample | RowEffect) -> bool:
    """Whether a named rounding makes most of it, so that no mistake can explain nearly all, and what stands out; or O's
    last rounding may make all of it: of rows that are alike, a sink shifts as much as a truncation.
    """
    if isinstance(found, RowEffect):
        return False
    if found.compared and found.by_last_rounding.all():
        return True
    if (found.outlying.any() and not found.rounding) or (found.bad_features.any() and not found.features_rounding):
        return False
    return found.made_by_site > _MOST * float(found.error.sum())


def squared_size(found: QuantitySample | RowEffect) -> float:
    """The squared error over a well-rounded kernel's, of LSE over a part of its budget."""
    if isinstance(found, RowEffect):
        return float(found.of_budget.max(initial=0.0)) / _LSE_RIGHT
    return float(found.error.sum() / max(found.counterfactual.sum(), found.floor.sum(), 1e-300))
