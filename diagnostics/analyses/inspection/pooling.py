"""From the measurements of one or several heads and sequences to one entry of the diagnosis."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch

from attn_diag.analyses.inspection.pooled_errors import NoiseFactor, PooledErrors
from attn_diag.analyses.inspection.ranks import Ranks
from attn_diag.analyses.verdicts.means import beyond_reference, of_cut_off
from attn_diag.analyses.verdicts.verdict import judge
from attn_diag.head.certification import pool_certificates
from attn_diag.head.declared import mean_is_the_recipes
from attn_diag.head.figure_sums import errors_by_feature
from attn_diag.head.gradient_sums import AtomSums, GradientSums
from attn_diag.head.measurement import CutOff, HeadMeasurement
from attn_diag.head.propagation import add_parts
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
from attn_diag.results.wording import number, plural
from attn_diag.statistics.means import (
    MIN_SEQUENCES,
    PRIMARY,
    BiasCase,
    SignedErrors,
    adjust,
    estimate_biases,
)

_TOP_ROWS = 5


@dataclass
class Entry:
    """An entry before its verdict, which needs the adjusted p-values of the whole run."""

    diagnosis: HeadDiagnosis
    bit_identical: bool | None
    in_doubt: int
    sequences: int
    """How many of them are independent."""
    remarks: tuple[str, ...] = ()
    """What its tests rest on, where that is less than it seems."""
    nearly_uniform: bool = False
    """Whether rows attend to all their keys nearly alike."""
    declared_sums: dict[str, npt.NDArray[np.float64]] = field(default_factory=dict)
    """Of a declared kernel, see ``HeadMeasurement.mean_sums``."""
    cut_off: CutOff = ""
    """See ``HeadMeasurement``."""

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
            declared={name: mean_is_the_recipes(sums) for name, sums in self.declared_sums.items()},
        )
        words = self.remarks + _uniform_words(d, level) if self.nearly_uniform else self.remarks
        verdict = replace(verdict, reasons=(*verdict.reasons, *words)) if words else verdict
        verdict = of_cut_off(verdict, self.cut_off) if self.cut_off else verdict
        return replace(d, bias=bias, verdict=verdict)


def adjust_family(entries: list[Entry], ranks: Ranks) -> tuple[list[dict[str, float]], int]:
    """Benjamini-Hochberg over all primary p-values of the run: adjusted values per entry, and the family's size.

    The pooled entry of a single head repeats that head's tests; whoever calls leaves it out.

    Args:
        entries: This rank's.
        ranks: The processes whose tests are one family.
    """
    raw = [entry.primary_p_values() for entry in entries]
    flat = [(i, name, p) for i, tests in enumerate(raw) for name, p in tests.items()]
    result: list[dict[str, float]] = [{} for _ in raw]
    family = ranks.gather([p for _, _, p in flat])
    adjusted = adjust([p for of_rank in family for p in of_rank])
    before = sum(map(len, family[: ranks.rank]))
    for (i, name, _), p in zip(flat, adjusted[before : before + len(flat)], strict=True):
        result[i][name] = p
    return result, len(adjusted)


def pool(
    pooled: PooledErrors, biases: dict[str, BiasEstimate], noise: NoiseFactor, *, layer: int | None, head: int | None,
    sequences: int, dw_q: GradientSums | None, extra: Propagation, figures: HeadFigures | None = None,
    quantities: Sequence[QuantityVerdict] = (), missing: tuple[str, ...] = (),
) -> Entry:  # fmt: skip
    """One entry from the measurements of one head's sequences, or of all heads.

    Args:
        pooled: The measurements, with their errors joined.
        biases: Of these errors, by ``pooled_biases``.
        noise: Of them, by ``noise_factors``.
        layer, head: The model's numbers, for the entry.
        sequences: Batch size analysed.
        dw_q: Already summed over the batch.
        extra: dK, dV and notes.
        figures: Those of a single head.
        quantities: Each captured one, judged.
        missing: Those that were not captured.
    """
    parts, errors, independent = pooled.parts, pooled.errors, pooled.independent
    analysed = sum(len(p.rows) for p in parts)
    eligible = sum(p.rows_eligible for p in parts)
    conditioning = [p.conditioning for p in parts if p.conditioning is not None]
    dq_sums = [p.dq for p in parts if p.dq is not None]
    swamped = [p.swamped for p in parts if p.swamped is not None]
    identical = [p.bit_identical for p in parts]
    dq = (dq_sums[0] if len(dq_sums) == 1 else GradientSums.pool(dq_sums)).result() if dq_sums else None
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
        noise_factor=noise.factor,
        noise_factor_ci95=noise.ci95,
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
    in_doubt = sum(p.in_doubt for p in parts)
    uniform = 2 * sum(p.nearly_uniform for p in parts) > len(parts)
    remarks = tuple(_remarks(parts, sequences, independent))
    cut_off = parts[0].cut_off if len({p.cut_off for p in parts}) == 1 else ""
    return Entry(diagnosis, same, in_doubt, independent, remarks, uniform, pooled.declared, cut_off)


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


def _remarks(parts: Sequence[HeadMeasurement], sequences: int, independent: int) -> Iterator[str]:
    """What the tests of means rest on, where that is fewer rows or sequences than it seems."""
    repeating = [p for p in parts if p.repeated]
    then = f"as {plural(independent, 'independent sequence')}"
    if independent < MIN_SEQUENCES <= sequences:
        then += f"; with fewer than {MIN_SEQUENCES}, means are tested over distinct rows, of these sequences only"
    if repeating:
        alike = {p.batch for p in repeating} | {p.source for p in repeating}
        most = max(p.repeated for p in repeating)
        size = plural(most, "row") if all(p.repeated == most for p in repeating) else f"up to {most} rows"
        if all(not len(p.tested) for p in repeating):
            yield f"{len(alike)} of {sequences} sequences are copies of others: {size} of each count once, {then}."
        else:
            begin = all(p.tested[0] > p.rows[p.repeated - 1] for p in repeating if len(p.tested))
            rows = f"the first {size}".replace("first 1 row", "first row") if begin else size
            yield f"{len(alike)} of {sequences} sequences share {rows}: they count once, {then}."
    elif independent < sequences:
        yield f"Sequences look at keys that they share: all {sequences} count {then}."
    tested, gradients = sum(len(p.tested) for p in parts), [p.with_gradient for p in parts]
    some = sum(int(g.sum()) for g in gradients if g is not None)
    if all(g is not None for g in gradients) and tested and not some:
        yield f"dO is zero in all {tested} rows: no gradient comes to this head, and nothing is said of its backward."
    elif all(g is not None for g in gradients) and 2 * some < tested:
        yield f"dO is zero in {tested - some} of {tested} rows: delta and dQ are tested over the other {some}."


def _uniform_words(found: HeadDiagnosis, level: float) -> tuple[str, ...]:
    """Why correct rounding itself has a mean where attention is nearly uniform; empty where it has none."""
    biased = []
    for name, estimate in (("O", found.rounding_bias.o), ("delta", found.rounding_bias.delta)):
        if estimate is not None and estimate.p_value is not None and estimate.p_value <= level:
            biased.append(f"{name}: {number(estimate.mean)}")
    if not biased:
        return ()
    return (
        "Attention is nearly uniform here, as in a fresh model: O is nearly the same number in every row, and rounds "
        f"the same way each time, so that correct rounding itself has a mean ({', '.join(biased)}), which is no fault "
        "of the kernel.",
    )


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
    counts = [len(p.tested) if p.with_gradient is None else int(np.count_nonzero(p.with_gradient)) for p in parts]
    starts, found = [0, *accumulate(counts)], []
    for i in largest_places(np.abs(delta.total), _TOP_ROWS).tolist():
        which = bisect_right(starts, i) - 1
        part, place, error = parts[which], i - starts[which], float(delta.total[i])
        if part.with_gradient is not None and counts[which] < len(part.tested):
            place = np.flatnonzero(part.with_gradient)[place]
        found.append(TopRow(part.batch, part.head, int(part.tested[place]), error, error**2 / total))
    return tuple(found)


def largest_places(sizes: npt.NDArray[np.float64], most: int) -> npt.NDArray[np.int64]:
    """Where so many of the largest sizes [n] are, the largest first; of equal ones the first."""
    left, found = sizes.copy(), np.zeros(min(most, len(sizes)), dtype=np.int64)
    for i in range(len(found)):
        found[i] = left.argmax()
        left[found[i]] = -np.inf
    return found


def unclustered(several: Sequence[SignedErrors]) -> list[BiasEstimate]:
    """Mean and rms of each without any test, for quantities whose rows are not independent."""
    one = {rows: np.zeros(rows, dtype=np.int64) for rows in {len(errors.total) for errors in several}}
    cases = [BiasCase(errors, one[len(errors.total)], with_drift=False) for errors in several]
    return [replace(estimate, n_eff=None) for estimate in estimate_biases(cases, 0.05)]
