"""Runs the bias tests on redraws of a capture and keeps what each of them said."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from attn_diag.analyses.inspection.clusters import Clusters
from attn_diag.statistics.mean_tests import effective, mean_test, two_way
from attn_diag.statistics.means import PRIMARY
from calibration import draws
from calibration.candidates import CANDIDATES, alarms

Array = npt.NDArray[np.float64]
Labels = npt.NDArray[np.int64]
Features = tuple[Array, Array]  # errors by feature [B, D], and sums over cells [B, 3]
Key = TypeVar("Key")

LEVELS = (0.01, 0.05)
# Which tests each kernel is put to.
TESTED: dict[str, tuple[str, ...]] = {
    "o_stochastic": ("delta", "o"),
    "o_flips": ("delta_excess", "o_excess", "o_away_excess"),
    "probs_stochastic": (*PRIMARY, "o"),
    "probs_nearest": (*PRIMARY, "o"),
    "rounded": ("delta", "o"),
    "gradients": ("dq", "lse"),
    "probs_mismatched": PRIMARY,
}
ON_FRESH = ("rounded", "probs_stochastic", "probs_nearest", "probs_mismatched")
PLANTED_ON = ("rounded", "probs_stochastic")
_COMPARED = ("o_flips", "probs_stochastic", "probs_nearest")
_OTHERS = ("o_stochastic", "rounded")
# Scores of a batch: as many as a CPU's cache nearly holds, or a sixteenth of a GPU (about 3 GB with temporaries).
_BATCH_SCORES = {"cpu": 2**18, "cuda": 2**25}


@dataclass
class Outcomes:
    """What the tests said of each redraw.

    ``tests[kernel, test]``: the shipped test's "mean", "se", "df", "p", "n_eff" and "detectable/level", and the
    p-values "candidate/clusters" of the candidates, each [heads, redraws]. ``plants[kernel, direction, size]``:
    p-values by test, and "n_eff/test". ``others[kernel]``: alarms of methods that the product does not use, by
    "name/level".
    """

    tests: dict[tuple[str, str], dict[str, Array]]
    plants: dict[tuple[str, str, float], dict[str, Array]]
    others: dict[str, dict[str, Array]]

    @classmethod
    def join(cls, parts: Sequence[Outcomes]) -> Outcomes:
        """The redraws of several runs, one after the other."""
        return cls(*(_concatenated([getattr(p, name) for p in parts]) for name in ("tests", "plants", "others")))


def _concatenated(parts: list[dict[Key, dict[str, Array]]]) -> dict[Key, dict[str, Array]]:
    return {key: {name: np.concatenate([p[key][name] for p in parts], 1) for name in parts[0][key]} for key in parts[0]}


def clusters_of(test: str, top_key: Labels) -> Labels | None:
    """The cluster numbers that the product gives the rows of one head, [T], no two of them alike, for this test."""
    return Clusters([top_key], [np.arange(len(top_key))]).of(test)


def cluster_sums(totals: Array, labels: Labels | None, count: int) -> tuple[Array, Array]:
    """Summed errors and numbers of elements by cluster, [B, G], of row totals [B, T] with ``count`` elements each.

    ``labels`` [B, T] from 0 without gaps in each redraw; those with fewer clusters than others get empty ones.
    """
    if labels is None:
        return totals, np.full_like(totals, count)
    batch, width = len(totals), int(labels.max()) + 1
    flat = (labels + width * np.arange(batch)[:, None]).ravel()
    sums = np.bincount(flat, totals.ravel(), batch * width).astype(np.float64)
    sizes = np.bincount(flat, minlength=batch * width) * np.float64(count)
    return sums.reshape(batch, width), sizes.reshape(batch, width)


def judge(totals: Array, labels: Labels | None, count: int, features: Features | None = None) -> dict[str, Array]:
    """What the shipped test says of row totals [B, T] (and the sums by feature and cell).

    NaN where every error is zero: there is nothing to test.
    """
    zero = ~totals.any(-1)
    sums, sizes = cluster_sums(totals, labels, count)
    with np.errstate(invalid="ignore"):
        tests = [mean_test(sums, sizes, level) for level in LEVELS]
        if features is not None:
            by_feature, cells = features
            n = totals.shape[1] * count
            each = np.full_like(by_feature, n / by_feature.shape[1])
            tests = [
                two_way(test, mean_test(by_feature, each, level), cells, n, level)
                for test, level in zip(tests, LEVELS, strict=True)
            ]
        test, at_five = tests
    found = {
        "mean": test.mean,
        "se": test.standard_error,
        "df": test.df,
        "p": test.p_value,
        "n_eff": effective(sums),
        "detectable/0.01": test.minimum_detectable,
        "detectable/0.05": at_five.minimum_detectable,
    }
    return {name: np.where(zero, np.nan, values) for name, values in found.items()}


def run(capture: str, redraws: int, seed: int, device: torch.device) -> Outcomes:
    """Redraw ``capture`` and test; biases are planted in the first half."""
    heads = draws.read_heads(capture, device)
    generator = torch.Generator().manual_seed(seed)
    batch = max(1, _BATCH_SCORES[device.type] // (len(heads[0][1].q) * len(heads[0][1].k)))
    record = _Record()
    for start in range(0, redraws, batch):
        count = min(batch, redraws - start)
        for h, ((_, head), sample) in enumerate(zip(heads, draws.fresh(heads, count, generator), strict=True)):
            own = (seed * 1_000_003 + start * 1009 + h * 7) % 2**31
            tester = _Tester(h, sample, record)
            outputs = draws.kernels_on_fresh(sample, own)
            for kernel, out in outputs.items():
                tester.add(kernel, *totals_of(out, sample, TESTED[kernel]), out - sample.out, own)
            if start < redraws / 2:
                for kernel in PLANTED_ON:
                    for d, direction in enumerate(draws.DIRECTIONS):
                        for size in draws.SIZES:
                            out = draws.planted(outputs[kernel], sample, direction, size, own + d + 1)
                            tester.plant((kernel, direction, size), *totals_of(out, sample, PRIMARY))
            real = draws.original(head)
            tester = _Tester(h, real, record, count)
            for kernel, out in draws.kernels_on_real(real, count, own + 4).items():
                tester.add(kernel, *totals_of(out, real, TESTED[kernel]), out - real.out, own)
            gradients = draws.gradient_errors(head, real, count, own + 6)
            tester.add("gradients", {name: e.sum(-1).cpu().numpy() for name, e in gradients.items()}, {}, None, own)
    return record.outcomes(len(heads))


def totals_of(out: Tensor, sample: draws.Sample, tests: Sequence[str]) -> tuple[dict[str, Array], dict[str, Features]]:
    """Errors summed by row, and by feature and cell, as ``tests`` need them."""
    rows = {test: x.cpu().numpy() for test, x in draws.row_totals(out, sample).items() if test in tests}
    features = {}
    for test in ("o", "delta"):
        if test in tests:
            sums, cells = draws.feature_totals(out, sample, test)
            features[test] = sums.cpu().numpy(), cells.cpu().numpy()
    return rows, features


class _Record:
    """Collects arrays [B] by kind, and by key, name and head."""

    def __init__(self) -> None:
        self.tests: dict[tuple[tuple[str, str], str, int], list[Array]] = defaultdict(list)
        self.plants: dict[tuple[tuple[str, str, float], str, int], list[Array]] = defaultdict(list)
        self.others: dict[tuple[str, str, int], list[Array]] = defaultdict(list)

    def outcomes(self, heads: int) -> Outcomes:
        return Outcomes(_stacked(self.tests, heads), _stacked(self.plants, heads), _stacked(self.others, heads))


def _stacked(cells: dict[tuple[Key, str, int], list[Array]], heads: int) -> dict[Key, dict[str, Array]]:
    found: dict[Key, dict[str, Array]] = {}
    for key, name in dict.fromkeys((key, name) for key, name, _ in cells):
        found.setdefault(key, {})[name] = np.stack([np.concatenate(cells[key, name, h]) for h in range(heads)])
    return found


class _Tester:
    """Tests the row totals of one batch of redraws of one head. ``count``: redraws, where they share their inputs."""

    def __init__(self, head: int, sample: draws.Sample, record: _Record, count: int | None = None) -> None:
        self._head, self._record = head, record
        self._elements = sample.v.shape[-1]
        keys = sample.top_key.cpu().numpy()
        repeat = count or 1
        self._labels = {
            test: _repeated([clusters_of(test, row) for row in keys], repeat) for test in (*PRIMARY, "o", "dq", "lse")
        }
        self._keys = _repeated([np.unique(row, return_inverse=True)[1] for row in keys], repeat)

    def _of(self, test: str) -> tuple[Labels | None, int]:
        """Clusters of a test, and elements a row."""
        return self._labels[test], 1 if test.startswith(("delta", "lse")) else self._elements

    def add(
        self, kernel: str, found: dict[str, Array], features: dict[str, Features], o_error: Tensor | None, seed: int
    ) -> None:
        """Put a kernel to all its tests."""
        for test in TESTED[kernel]:
            totals, (labels, count) = found[test], self._of(test)
            said = judge(totals, labels, count, features.get(test))
            if kernel in _COMPARED and test in (*PRIMARY, "o"):
                said |= self._candidates(totals, count, features.get(test))
            for name, values in said.items():
                self._record.tests[(kernel, test), name, self._head].append(values)
        if kernel in _OTHERS and o_error is not None:
            said = alarms(found["delta"], o_error, LEVELS, seed)
            for name, values in said.items():
                self._record.others[kernel, name, self._head].append(values)

    def _candidates(self, totals: Array, count: int, features: Features | None) -> dict[str, Array]:
        zero, found = ~totals.any(-1), {}
        for clusters, labels in (("keys", self._keys), ("rows", None)):
            sums, sizes = cluster_sums(totals, labels, count)
            with np.errstate(invalid="ignore"):
                for name, candidate in CANDIDATES.items():
                    found[f"{name}/{clusters}"] = np.where(zero, np.nan, candidate(sums, sizes))
        if features is not None:  # of one size, where cr2 is Student's t
            found["cr2/features"] = CANDIDATES["cr2"](features[0], np.ones_like(features[0]))
        return found

    def plant(self, key: tuple[str, str, float], found: dict[str, Array], features: dict[str, Features]) -> None:
        """Put a kernel with a planted bias to the primary tests."""
        for test in PRIMARY:
            said = judge(found[test], *self._of(test), features.get(test))
            self._record.plants[key, test, self._head].append(said["p"])
            self._record.plants[key, f"n_eff/{test}", self._head].append(said["n_eff"])


def _repeated(labels: list[Labels | None], count: int) -> Labels | None:
    if any(found is None for found in labels):
        return None
    return np.repeat(np.stack([found for found in labels if found is not None]), count, 0)
