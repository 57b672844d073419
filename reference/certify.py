"""The float64 reference of chosen rows against the oracle: does the certificate hold?"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction

from attn_diag.reference.attention import AttentionHead, HeadReference
from attn_diag.reference.head_bounds import HeadBounds
from attn_diag.reference.oracle import DEFAULT_BITS, MAX_BITS, HeadOracle, OracleLimitError, OracleRow

OUTPUTS = ("out", "lse", "delta", "dq")


@dataclass(frozen=True)
class CheckedOutput:
    """One output of one row."""

    error: float
    """The largest error over its features."""
    bound: float
    """The largest bound over its features."""
    ratio: float
    """The largest error / bound."""


@dataclass(frozen=True)
class CheckedRow:
    """One row."""

    row: int
    """Its number."""
    outputs: Mapping[str, CheckedOutput]
    """By output: out, lse and, with dO, delta and dq; dsink where there is a sink too."""

    @property
    def held(self) -> bool:
        """Whether no error exceeds its bound."""
        return all(checked.ratio <= 1 for checked in self.outputs.values())


def check_rows(
    head: AttentionHead, reference: HeadReference, bounds: HeadBounds, rows: Iterable[int], *, bits: int = DEFAULT_BITS
) -> list[CheckedRow]:
    """Every output of ``reference`` in ``rows`` against the oracle at ``bits`` bits (more where that cannot tell).

    Raises ValueError for too few bits, IndexError for a row that there is not, OracleLimitError where the largest
    working precision cannot tell.
    """
    oracle = HeadOracle(head, bits=bits)
    return [check_row(oracle.row(t), reference, bounds, bits=bits) for t in rows]


def check_row(row: OracleRow, reference: HeadReference, bounds: HeadBounds, *, bits: int = DEFAULT_BITS) -> CheckedRow:
    """One row of ``check_rows``, from its oracle."""
    found = {}
    for output in (*OUTPUTS, "dsink"):
        values, allowed = getattr(reference, output), getattr(bounds, output)
        if values is None or allowed is None:
            continue
        found[output] = _check(row, output, values[row.t].flatten().tolist(), allowed[row.t].flatten().tolist(), bits)
    return CheckedRow(row.t, found)


def _check(row: OracleRow, output: str, values: list[float], bounds: list[float], bits: int) -> CheckedOutput:
    if not row.has_terms:
        # O = 0, L = -inf and no gradient, by definition.
        right = -math.inf if output == "lse" else 0.0
        return CheckedOutput(0.0, 0.0, 0.0 if all(value == right for value in values) else math.inf)
    errors = [_error(row, output, i, values[i], bounds[i], bits) for i in range(len(values))]
    ratios = (_ratio(error, bound) for error, bound in zip(errors, bounds, strict=True))
    return CheckedOutput(max(errors), max(bounds), max(ratios))


def _error(row: OracleRow, output: str, i: int, value: float, bound: float, bits: int) -> float:
    """|value - truth|, rounded upwards by less than what would change its comparison with ``bound``."""
    if not math.isfinite(value):
        return math.inf
    while True:
        least, most = row.ends(output, bits)[i].distance(value)
        if most <= bound:
            return least if least > most / 2 else most
        if least > bound:
            return least
        if (exact := row.exact(output, i)) is not None:
            return float(abs(Fraction(value) - exact))
        bits *= 2
        if bits > MAX_BITS:
            raise OracleLimitError(f"row {row.t}: {MAX_BITS} bits cannot tell whether {output} is within its bound")


def _ratio(error: float, bound: float) -> float:
    if error == 0:
        return 0.0
    return error / bound if bound else math.inf
