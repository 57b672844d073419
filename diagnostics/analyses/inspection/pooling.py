"""From the measurements of one or several heads and sequences to one entry of the diagnosis."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import numpy.typing as npt
import torch

from attn_diag.analyses.verdict import beyond_reference, judge
from attn_diag.head.certification import pool_certificates
from attn_diag.head.figure_sums import errors_by_feature
from attn_diag.head.measure import HeadMeasurement
from attn_diag.head.propagation import AtomSums, GradientSums, add_parts
from attn_diag.reference import UNIT
from attn_diag.results.diagnosis import (
    Bias,
    BiasEstimate,
    DeltaRounding,
    HeadDiagnosis,
    Propagation,
    RepeatCount,
    RoundingBias,
    RowMaxima,
    Swamped,
    TopRow,
)
from attn_diag.results.figures import HeadFigures, PredictedError
from attn_diag.results.quality import QuantityVerdict
from attn_diag.statistics.means import MIN_SEQUENCES, PRIMARY, SignedErrors, adjust, estimate_bias

_TOP_ROWS = 5


@dataclass
class Entry:
    """An entry before its verdict, which needs the adjusted p-values of the whole run."""

    diagnosis: HeadDiagnosis
    bit_identical: bool | None
    in_doubt: int
    sequences: int

    def primary_p_values(self) -> dict[str, float]:
        """The primary tests' p-values by name, those that exist and whose mean the reference is sharp enough for.

        None where the oracle found the reference wrong.
        """
        if self.diagnosis.certificate is not None and not self.diagnosis.certificate.held:
            return {}
        estimates = {name: getattr(self.diagnosis.bias, name) for name in PRIMARY}
        return {
            n: e.p_value
            for n, e in estimates.items()
            if e is not None and e.p_value is not None and not beyond_reference(e)
        }

    def judged(self, adjusted: dict[str, float], level: float) -> HeadDiagnosis:
        """The diagnosis with adjusted p-values and verdict."""
        d = self.diagnosis
        estimates = {n: replace(getattr(d.bias, n), p_adjusted=p) for n, p in adjusted.items()}
        bias = replace(d.bias, **estimates)
        verdict = judge(
            bias=bias,
            rounding_bias=d.rounding_bias,
            row_maxima=d.row_maxima,
            noise_factor=d.noise_factor,
            conditioning=d.conditioning,
            propagation=d.propagation,
            top_rows=d.top_rows,
            bit_identical=self.bit_identical,
            in_doubt=self.in_doubt,
            quantities=d.quantities,
            swamped_rows=d.swamped.rows if d.swamped else 0,
            sequences=self.sequences,
            certificate=d.certificate,
            level=level,
        )
        return replace(d, bias=bias, verdict=verdict)


def adjust_family(entries: list[Entry]) -> tuple[list[dict[str, float]], int]:
    """Benjamini-Hochberg over all primary p-values of the run: adjusted values per entry, and the family's size.

    The pooled entry of a single head repeats that head's tests; whoever calls leaves it out.
    """
    raw = [entry.primary_p_values() for entry in entries]
    flat = [(i, name, p) for i, tests in enumerate(raw) for name, p in tests.items()]
    result: list[dict[str, float]] = [{} for _ in raw]
    for (i, name, _), p in zip(flat, adjust([p for _, _, p in flat]), strict=True):
        result[i][name] = p
    return result, len(flat)


def pool(
    parts: list[HeadMeasurement], *, layer: int | None, head: int | None, sequences: int, k_length: int,
    dw_q: GradientSums | None, extra: Propagation, level: float, figures: HeadFigures | None = None,
    quantities: Sequence[QuantityVerdict] = (), missing: tuple[str, ...] = (),
) -> Entry:  # fmt: skip
    """One entry from the measurements of one head's sequences, or of all heads.

    ``sequences``: batch size analysed; from 8 on they are the clusters. ``dw_q``: already summed over the
    batch. ``extra``: dK, dV and notes. ``figures``: those of a single head. ``quantities``: each captured one, judged;
    ``missing``: those that were not captured.
    """
    errors = {
        name: SignedErrors.join([p.errors[name] for p in parts])
        for name in parts[0].errors
        if all(name in p.errors for p in parts)
    }
    if sequences >= MIN_SEQUENCES:
        errors = {n: replace(e, features=None) for n, e in errors.items()}  # shared within a sequence
    clusters = Clusters([p.top_key for p in parts], [p.batch for p in parts], sequences, k_length)
    biases = {
        n: estimate_bias(e, clusters.of(n), level, with_drift=not n.startswith("rounding")) for n, e in errors.items()
    }
    biases = {n: _with_reference_bound(e, [p.reference_bounds.get(n) for p in parts]) for n, e in biases.items()}
    analysed = sum(len(p.rows) for p in parts)
    eligible = sum(p.rows_eligible for p in parts)
    noise, judged = (sum(p.noise[i] for p in parts) for i in (0, 1))
    conditioning = [p.conditioning for p in parts if p.conditioning is not None]
    dq_sums = [p.dq for p in parts if p.dq is not None]
    swamped = [p.swamped for p in parts if p.swamped is not None]
    identical = [p.bit_identical for p in parts]
    dq = GradientSums.pool(dq_sums).result() if dq_sums else None
    diagnosis = HeadDiagnosis(
        layer=layer,
        batch=parts[0].batch if sequences == 1 else None,
        head=head,
        rows_all=analysed,
        rows_fully_masked=sum(p.rows_fully_masked for p in parts),
        rows_nonfinite=sum(p.rows_nonfinite for p in parts),
        rows_unknown=sum(p.rows_unknown for p in parts),
        row_maxima=_row_maxima(parts, analysed, eligible),
        swamped=Swamped(sum(r for r, _ in swamped), sum(e for _, e in swamped)) if swamped else None,
        bias=Bias(**{f.name: biases.get(f.name) for f in fields(Bias)}),
        rounding_bias=RoundingBias(biases.get("rounding_o"), biases.get("rounding_delta")),
        delta_source=parts[0].delta_source,  # type: ignore[arg-type]
        delta_rounding=_pool_delta_rounding(parts),
        noise_factor=math.sqrt(noise / judged) if judged else None,
        conditioning=_condition(conditioning),
        propagation=replace(extra, dq=dq, dw_q=None if dw_q is None else dw_q.result()),
        top_rows=_top_rows(parts, errors.get("delta")),
        attribution=None,
        verdict=None,
        certificate=pool_certificates([p.certificate for p in parts]),
        figures=figures,
        quantities=tuple(quantities),
        not_judged=missing,
    )
    same = None if any(i is None for i in identical) else all(identical)
    return Entry(diagnosis, same, sum(p.in_doubt for p in parts), sequences)


def _with_reference_bound(estimate: BiasEstimate, sums: list[float | None]) -> BiasEstimate:
    """The estimate with what the reference's errors (``sums``, one a part) and the rounding of its mean amount to."""
    known = [s for s in sums if s is not None]
    if not estimate.n or estimate.rms is None or len(known) < len(sums):
        return estimate
    # Differences observed - reference and their sum: at most n + 2 roundings (Higham, eq. 4.4), and mean |e| <= rms.
    rounding = (estimate.n + 2) * UNIT * 1.01 * estimate.rms
    return replace(estimate, reference_bound=sum(known) / estimate.n + rounding)


@dataclass(frozen=True)
class DwQ:
    """dW_Q of one head: its sums, and its error by feature of q (None where no error is known)."""

    sums: GradientSums
    by_feature: PredictedError | None


def dw_q_of(parts: list[HeadMeasurement]) -> DwQ | None:
    """dW_Q of one head: gradients of its sequences added before norms are taken, with the atoms' coherence."""
    projected = [p.dw_q for p in parts if p.dw_q is not None]
    if not projected or len(projected) < len(parts):
        return None
    atoms = [p.atoms for p in parts if p.atoms is not None]
    sums = None
    if len(atoms) == len(parts):
        sums = AtomSums.of(torch.cat([left for left, _ in atoms]), torch.cat([right for _, right in atoms]))
    total = add_parts(projected)
    return DwQ(GradientSums.of(total, atoms=sums), errors_by_feature(total))


class Clusters:
    """Cluster numbers of pooled rows: by sequence, or by sequence, head and argmax key, or none; see ``bias``.

    ``top_keys``: of every sequence and head, its rows' argmax keys; ``batches``: the sequence of each.
    """

    def __init__(
        self, top_keys: Sequence[npt.NDArray[np.int64]], batches: Sequence[int], sequences: int, k_length: int
    ) -> None:
        self._by_sequence: npt.NDArray[np.int64] | None = None
        if sequences >= MIN_SEQUENCES:
            numbers = [np.full(len(keys), batch) for keys, batch in zip(top_keys, batches, strict=True)]
            self._by_sequence = _dense(np.concatenate(numbers))
        self._by_key = _dense(np.concatenate([i * k_length + keys for i, keys in enumerate(top_keys)]))

    def of(self, quantity: str) -> npt.NDArray[np.int64] | None:
        """The clusters of the rows for one of ``Bias``'s quantities; None: every row its own."""
        if self._by_sequence is not None:
            return self._by_sequence
        if quantity in ("delta_excess", "dq", "lse") or ("excess" in quantity and not self._by_key.any()):
            return None
        return self._by_key


def _dense(labels: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Labels renumbered from 0, in their order, without gaps."""
    return np.unique(labels, return_inverse=True)[1]


def _row_maxima(parts: list[HeadMeasurement], analysed: int, eligible: int) -> RowMaxima:
    def count(definition: str) -> RepeatCount | None:
        sums = [p.repeats[definition] for p in parts]
        known = [s for s in sums if s is not None]
        if len(known) < len(sums):
            return None
        rows = sum(s.rows for s in known)
        return RepeatCount(rows, eligible, rows / analysed if analysed else None, max(s.largest for s in known))

    exact, window, unit = count("exact"), count("window"), count("unit")
    assert exact is not None
    assert window is not None
    assert unit is not None
    return RowMaxima(exact, count("as_run"), window, unit)


def _condition(parts: list[tuple[float, float]]) -> float | None:
    delta_term, dq = sum(a for a, _ in parts), sum(b for _, b in parts)
    return math.sqrt(delta_term / dq) if dq else None


def _pool_delta_rounding(parts: list[HeadMeasurement]) -> DeltaRounding | None:
    known = [(p.delta_rounding, len(p.rows)) for p in parts if p.delta_rounding is not None and len(p.rows)]
    total = sum(n for _, n in known)
    if not total:
        return None
    mean = sum(d.mean * n for d, n in known) / total
    rms = math.sqrt(sum(d.rms**2 * n for d, n in known) / total)
    return DeltaRounding(mean, rms, max(d.max_abs for d, _ in known))


def _top_rows(parts: list[HeadMeasurement], delta: SignedErrors | None) -> tuple[TopRow, ...]:
    if delta is None or not (total := delta.square):
        return ()
    starts = np.cumsum([0] + [len(p.rows) for p in parts])
    found = []
    for i in np.argsort(-np.abs(delta.total), kind="stable")[:_TOP_ROWS]:
        which = int(np.searchsorted(starts, i, side="right")) - 1
        part = parts[which]
        row = int(part.rows[i - starts[which]])
        found.append(TopRow(part.batch, part.head, row, float(delta.total[i]), float(delta.total[i]) ** 2 / total))
    return tuple(found)


def unclustered(errors: SignedErrors) -> BiasEstimate:
    """Mean, rms and running figures without any test, for quantities whose rows are not independent."""
    estimate = estimate_bias(errors, np.zeros(len(errors.total), dtype=np.int64), 0.05, with_drift=False)
    return replace(estimate, n_eff=None)
