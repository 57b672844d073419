"""The signed errors of several heads or sequences as one, and the tests of their means."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from attn_diag.analyses.inspection.clusters import Clusters, joined_sequences
from attn_diag.head.measurement import HeadMeasurement
from attn_diag.results.diagnosis import BiasEstimate
from attn_diag.statistics.arrays import Array
from attn_diag.statistics.means import MIN_SEQUENCES, BiasCase, SignedErrors, estimate_biases
from attn_diag.statistics.ratios import RatioCase, paired_ratios


@dataclass(frozen=True)
class PooledErrors:
    """What is tested of one head's sequences, or of all heads'."""

    parts: list[HeadMeasurement]
    """The measurements."""
    errors: dict[str, SignedErrors]
    """By quantity, their rows one after the other."""
    clusters: Clusters
    """Which of these rows count as one."""
    independent: int
    """How many sequences there are that share no keys."""
    reference_errors: dict[str, float]
    """By quantity as of ``BiasCase``; only those that are known, as the next."""
    well_rounded: dict[str, float]
    """By primary test as of ``BiasCase``."""
    declared: dict[str, Array]
    """Of a declared kernel instead, see ``HeadMeasurement.mean_sums``."""

    @classmethod
    def of(cls, parts: list[HeadMeasurement], sequences: int, k_length: int) -> PooledErrors:
        """Join the errors of ``parts``; from 8 on the ``sequences`` of a batch are the clusters."""
        joined = joined_sequences(parts, k_length)
        independent = len({joined[p.batch] for p in parts if len(p.tested)})
        by_sequence = independent >= MIN_SEQUENCES
        groups = [(p.head, joined[p.batch]) for p in parts]
        errors = {
            name: SignedErrors.join([p.errors[name] for p in parts], groups)
            for name in parts[0].errors
            if all(name in p.errors for p in parts)
        }
        if by_sequence:
            errors = {n: replace(e, features=None) for n, e in errors.items()}  # shared within a sequence
        gradients = [p.with_gradient for p in parts if p.with_gradient is not None]
        clusters = Clusters(
            [p.top_key + p.head * sequences * k_length for p in parts],
            [p.alike for p in parts],
            [joined[p.batch] for p in parts] if by_sequence else None,
            gradients if len(gradients) == len(parts) else None,
        )
        bounds = {name: [p.reference_bounds.get(name) for p in parts] for name in errors}
        known = {name: sum(b for b in found if b is not None) for name, found in bounds.items() if None not in found}
        sums = _mean_sums(parts)
        declared = {name: of_test for name, of_test in sums.items() if len(of_test) > 2}
        beside = {name: float(of_test[1] - of_test[0]) for name, of_test in sums.items() if name not in declared}
        return cls(parts, errors, clusters, independent, known, beside, declared)

    @property
    def by_sequence(self) -> bool:
        """Whether sequences are the clusters."""
        return self.independent >= MIN_SEQUENCES

    def cases(self) -> list[BiasCase]:
        """What is to be tested of each quantity."""
        return [
            self._case(name, error, self.clusters.of(name, shared=error.features is not None))
            for name, error in self.errors.items()
        ]

    def _case(self, name: str, errors: SignedErrors, clusters: npt.NDArray[np.int64] | None) -> BiasCase:
        return BiasCase(
            errors,
            clusters,
            with_drift=not name.startswith("rounding"),
            reference_error=self.reference_errors.get(name),
            well_rounded=self.well_rounded.get(name),
        )

    def settled(self, found: Sequence[BiasEstimate], level: float) -> dict[str, BiasEstimate]:
        """The tests of ``cases``, where another way of clustering is not the safer one."""
        biases = dict(zip(self.errors, found, strict=True))
        for name, error in self.errors.items():
            if error.features is not None and name == "delta_excess" and not self.by_sequence:
                # Few keys may agree by chance: what rows alone say is the least uncertainty.
                rows = self.clusters.within(name)
                (alone,) = estimate_biases([self._case(name, replace(error, features=None), rows)], level)
                if (alone.standard_error or 0.0) > (biases[name].standard_error or 0.0):
                    biases[name] = alone
            if self.by_sequence and biases[name].p_value is not None and biases[name].t is None:
                # The same in every sequence, and so perhaps in every row: these are many more signs.
                (biases[name],) = estimate_biases([self._case(name, error, self.clusters.within(name))], level)
        return biases


def _mean_sums(parts: Sequence[HeadMeasurement]) -> dict[str, Array]:
    """``HeadMeasurement.mean_sums`` of all parts that have rows."""
    known = [p.mean_sums for p in parts if p.mean_sums]
    if len(known) < 2:
        return known[0] if known else {}
    return {name: np.sum([of_part[name] for of_part in known], axis=0) for name in known[0]}


def pooled_biases(several: Sequence[PooledErrors], level: float) -> list[dict[str, BiasEstimate]]:
    """The mean signed errors of each by quantity, tested side by side at this significance level."""
    cases = [one.cases() for one in several]
    found = iter(estimate_biases([case for of_one in cases for case in of_one], level))
    return [one.settled([next(found) for _ in of_one], level) for one, of_one in zip(several, cases, strict=True)]


@dataclass(frozen=True)
class NoiseFactor:
    """How many times delta's noise floor its errors are; None: unknown."""

    factor: float | None
    ci95: tuple[float, float] | None
    """Its 95 % interval; None where it cannot be told."""


Tested = tuple[PooledErrors, dict[str, BiasEstimate], NoiseFactor]


def tests(several: Sequence[PooledErrors], level: float) -> list[Tested]:
    """The mean signed errors and the noise factor of each."""
    return list(zip(several, pooled_biases(several, level), noise_factors(several), strict=True))


def noise_factors(several: Sequence[PooledErrors]) -> list[NoiseFactor]:
    """The noise factor of each."""
    squares = list[Array]()
    for one in several:
        noise = [p.noise for p in one.parts if p.noise is not None]
        squares.append(np.concatenate(noise) if len(noise) == len(one.parts) else np.zeros(0))
    cases = [
        RatioCase(of_rows, np.ones(len(of_rows)), one.clusters.of("delta") if len(of_rows) else None)
        for of_rows, one in zip(squares, several, strict=True)
    ]
    return [
        NoiseFactor(
            math.sqrt(of_rows.mean()) if len(of_rows) else None,
            None if found is None or not math.isfinite(found.high) else (found.low, found.high),
        )
        for of_rows, found in zip(squares, paired_ratios(cases), strict=True)
    ]
