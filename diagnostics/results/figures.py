"""What a head's figures show, as plain numbers: rows and elements thinned to what a page can draw.

All is pooled over the sequences analysed. A row number counts the analysed rows in the pooled order, as in ``Drift``:
sequence by sequence, without those that were left out. ``HeadFigures.rows`` says which rows these are.
"""

from __future__ import annotations

from dataclasses import dataclass

from attn_diag.results.base import Number, SideBySide


@dataclass(frozen=True)
class RowRuns(SideBySide):
    """Which rows of the capture the row numbers stand for, in runs of consecutive rows.

    Row ``first[i]`` + j of a figure is query row ``row[i]`` + j of batch item ``batch[i]``, until the next run begins.
    Where nothing was left out there is one run a sequence.
    """

    first: tuple[int, ...]
    """Row number, in the pooled order, at which each run begins; at most 512 runs."""
    batch: tuple[int, ...]
    """The batch item of each run."""
    row: tuple[int, ...]
    """The query row, within the capture's batch item, at which each run begins."""
    rows: int
    """How many rows were analysed."""
    total: int
    """How many runs there are; only the first 512 are listed."""


@dataclass(frozen=True)
class RowStrip(SideBySide):
    """Repeated maxima along the rows, in at most 512 groups of consecutive analysed rows."""

    first_rows: tuple[int, ...]
    """Each group's first row; the last group ends with the last analysed row."""
    exact: tuple[int, ...]
    """The largest multiplicity of the row maximum in the group, scores rounded to q's dtype (1: not repeated)."""
    unit: tuple[int, ...]
    """The largest number of keys in a row of the group whose P_bar rounds to 1 in q's dtype."""


@dataclass(frozen=True)
class UnitPositions(SideBySide):
    """Where P_bar rounds to 1, in rows where it does so more than once: pairs (row, key), at most 512 of ``total``.

    Of one row at most 16 pairs are candidates; where there are too many they are taken evenly along the rows.
    """

    rows: tuple[int, ...]
    """The pairs' rows, ascending."""
    keys: tuple[int, ...]
    """The pairs' keys, counted within their sequence."""
    total: int
    """How many such pairs there are."""


@dataclass(frozen=True)
class UlpHistogram:
    """Signed error of O, observed - reference, in ulp of O's dtype at the reference; a count of elements.

    Bin i holds errors from ``lowest`` + i ``width`` on; one bin is centred on 0. There are at most 64 bins, around all
    but at most 0.1 % of the elements on either side. The counts add up to all elements analysed.
    """

    lowest: Number
    """Lower edge of the first bin, in ulp."""
    width: Number
    """Width of every bin, in ulp."""
    counts: tuple[int, ...]
    """Elements in each bin."""
    below: int
    """Elements below the first bin."""
    above: int
    """Elements above the last bin."""


@dataclass(frozen=True)
class Alignment(SideBySide):
    """How dO and the error of O agree in sign, feature by feature, [Dv]."""

    aligned: tuple[Number | None, ...]
    """The fraction of rows where dO * error > 0, of those where it is not 0 (null: there are none)."""
    contribution: tuple[Number, ...]
    """Sum over the rows of dO * error, in units of delta; over the features they add up to delta's error (from_o)."""


@dataclass(frozen=True)
class PredictedError(SideBySide):
    """Norms of a gradient's error beside what delta alone predicts, in at most 128 groups.

    dQ: by group of consecutive analysed rows; dW_Q: by row of this head's W_Q, that is by feature of q, in groups of
    consecutive ones. All are Frobenius norms over the group.
    """

    first: tuple[int, ...]
    """Each group's first row (dQ) or feature (dW_Q)."""
    observed: tuple[Number, ...] | None
    """Norm of observed - reference; null where the gradient was not captured."""
    predicted: tuple[Number, ...] | None
    """Norm of the error that delta's error alone makes (Qiu & Yao, section 3.2); null without O or delta."""
    reference: tuple[Number, ...]
    """Norm of the true gradient."""


@dataclass(frozen=True)
class HeadFigures:
    """One head of one observation; null where the capture lacks what a figure needs."""

    rows: RowRuns
    """Which rows the figures' row numbers stand for."""
    strip: RowStrip
    """Repeated maxima along the rows."""
    unit_positions: UnitPositions
    """Where P_bar rounds to 1 more than once in a row."""
    o_error: UlpHistogram | None = None
    """Histogram of O's signed error; null without an O."""
    alignment: Alignment | None = None
    """Agreement of dO and O's error; null without O or dO."""
    dq: PredictedError | None = None
    """dQ's error along the rows; null without dO, and without all of O, delta and dQ."""
    dw_q: PredictedError | None = None
    """dW_Q's error by feature of q; null where dW_Q or its error is not known."""
    max_logit: Number | None = None
    """The largest score S = alpha q.k (mask and softcap included) of the analysed rows; null where there are none."""
