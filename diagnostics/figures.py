"""What a head's figures show, as plain numbers: rows and elements thinned to what a page can draw.

All is pooled over the sequences analysed. A row number counts rows in the pooled order, as in ``Drift``.
"""

from __future__ import annotations

from dataclasses import dataclass

from attn_diag.plain import Number


@dataclass(frozen=True)
class RowStrip:
    """Repeated maxima along the rows, in at most 512 groups of consecutive rows.

    ``first_rows``: each group's first row; ``exact``, ``unit``: the largest multiplicity in the group by these two
    definitions (1: the maximum is not repeated, 0: no row of the group was analysed).
    """

    first_rows: tuple[int, ...]
    exact: tuple[int, ...]
    unit: tuple[int, ...]


@dataclass(frozen=True)
class UnitPositions:
    """Where P_bar rounds to 1, in rows where it does so more than once: pairs (row, key), at most 512 of ``total``."""

    rows: tuple[int, ...]
    keys: tuple[int, ...]
    total: int


@dataclass(frozen=True)
class UlpHistogram:
    """Signed error of O in ulp: ``counts`` in bins of ``width`` from ``lowest`` on; what lies outside is counted."""

    lowest: Number
    width: Number
    counts: tuple[int, ...]
    below: int
    above: int


@dataclass(frozen=True)
class Alignment:
    """How dO and the error of O agree in sign, feature by feature, [Dv].

    ``aligned``: the fraction of rows where dO * error > 0, of those where it is not 0 (None: there are none);
    ``contribution``: sum over the rows of dO * error. The contributions add up to delta's error where it is ``from_o``.
    """

    aligned: tuple[Number | None, ...]
    contribution: tuple[Number, ...]


@dataclass(frozen=True)
class PredictedError:
    """Norms of a gradient's error beside what delta alone predicts, in groups.

    dQ: by group of consecutive rows (``first`` its first row), at most 128; dW_Q: by row of W_Q, that is by feature of
    q, in groups of consecutive ones, at most 128. ``observed`` is None where the gradient was not captured.
    ``reference``: norms of the true gradient.
    """

    first: tuple[int, ...]
    observed: tuple[Number, ...] | None
    predicted: tuple[Number, ...]
    reference: tuple[Number, ...]


@dataclass(frozen=True)
class HeadFigures:
    """One head of one observation; None where the capture lacks what a figure needs."""

    strip: RowStrip
    unit_positions: UnitPositions
    o_error: UlpHistogram | None = None
    alignment: Alignment | None = None
    dq: PredictedError | None = None
    dw_q: PredictedError | None = None
    max_logit: Number | None = None
