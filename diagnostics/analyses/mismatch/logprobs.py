"""The difference of two runs' log-probabilities, under the names by which trainers log it.

rho = pi_train / pi_rollout of a sampled token. The samples are rollout's, so that

    k1 = mean(-ln rho)          k3 = mean(rho - 1 - ln rho)          chi^2 = mean(rho^2) - 1

estimate KL(rollout || train) twice and the chi^2 divergence (Schulman, "Approximating KL Divergence", 2020). Names and
clamps are those of verl's rollout correction (docs/algo/rollout_corr.md, verl/utils/debug/metrics.py) and slime's
train_rollout_logprob_abs_diff.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from attn_diag.captures.loading import read_file
from attn_diag.errors import InputError
from attn_diag.results.mismatch import CarriedToken, LogprobSplit

_CLAMP = 20.0
_LISTED = 10
_BAND = 0.1

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Logprobs:
    """Log-probabilities of the same tokens in two runs. Raises InputError where they do not fit each other."""

    train: Array
    """[B, T] (or [T])."""
    rollout: Array
    """The same of rollout."""
    mask: npt.NDArray[np.bool_] | None = None
    """Which tokens were sampled and count, of that shape; None: all."""

    def __post_init__(self) -> None:
        for name in ("train", "rollout", "mask"):
            value = getattr(self, name)
            if value is None:
                continue
            found = np.asarray(value.detach().double().cpu() if hasattr(value, "detach") else value)
            found = found.astype(bool if name == "mask" else np.float64)
            object.__setattr__(self, name, found[None] if found.ndim == 1 else found)
        shapes = [list(a.shape) for a in (self.train, self.rollout, self.mask) if a is not None]
        if self.train.ndim != 2 or any(shape != shapes[0] for shape in shapes):
            raise InputError(
                f"log-probabilities of train and rollout (and the mask) must be [B, T] alike, got {shapes}"
            )
        if not self.counted.any():
            raise InputError("no log-probability counts: the mask is empty")
        if not (np.isfinite(self.train[self.counted]).all() and np.isfinite(self.rollout[self.counted]).all()):
            raise InputError("a log-probability that counts is NaN or infinite; mask it, or capture it again")

    @property
    def counted(self) -> npt.NDArray[np.bool_]:
        """Which count, bool [B, T]."""
        return np.ones(self.train.shape, dtype=bool) if self.mask is None else self.mask

    @property
    def metrics(self) -> dict[str, float]:
        """The difference by the names of verl and slime, for a trainer's logger; ours begin with attn_diag."""
        return metrics_of(self)

    @property
    def difference(self) -> Array:
        """rollout - train, [B, T]; 0 where it does not count."""
        return np.where(self.counted, self.rollout - self.train, 0.0)


def read_logprobs(path: Path) -> Logprobs:
    """A file's train_logprobs, rollout_logprobs and mask. Raises InputError, naming it."""
    tensors, _ = read_file(path)
    missing = [name for name in ("train_logprobs", "rollout_logprobs") if name not in tensors]
    if missing:
        raise InputError(f"{path}: has no {missing[0]}; expected train_logprobs and rollout_logprobs, [B, T]")
    read: dict[str, Any] = {name: tensors[name][...] for name in tensors}
    try:
        return Logprobs(read["train_logprobs"], read["rollout_logprobs"], read.get("mask"))
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def metrics_of(given: Logprobs) -> dict[str, float]:
    """Figures by the names of verl and slime; ours begin with attn_diag."""
    kept, train, rollout = given.counted, given.train, given.rollout
    log_rho = np.clip((train - rollout)[kept], -_CLAMP, _CLAMP)
    rho = np.exp(log_rho)
    rows = kept.any(1)
    counts = kept.sum(1)[rows]

    def by_sequence(values: Array) -> Array:
        means: Array = np.where(kept, values, 0.0).sum(1)[rows] / counts
        return means

    log_ppl = -by_sequence(train), -by_sequence(rollout)
    ppl_difference = log_ppl[0] - log_ppl[1]
    whole = np.clip(np.where(kept, train - rollout, 0.0).sum(1)[rows], -_CLAMP, _CLAMP)
    probs = np.exp(train[kept]), np.exp(rollout[kept])
    apart = np.abs(probs[0] - probs[1])
    varied = min(float(p.std()) for p in probs) > 0 and len(apart) > 1
    found = {
        "rollout_corr/kl": float((rollout - train)[kept].mean()),
        "rollout_corr/k3_kl": float((rho - log_rho - 1).mean()),
        "rollout_corr/chi2_token": float(np.square(rho).mean() - 1),
        "rollout_corr/chi2_seq": float(np.exp(2 * whole).mean() - 1),
        "rollout_corr/training_ppl": float(np.exp(log_ppl[0]).mean()),
        "rollout_corr/rollout_ppl": float(np.exp(log_ppl[1]).mean()),
        "rollout_corr/training_log_ppl": float(log_ppl[0].mean()),
        "rollout_corr/rollout_log_ppl": float(log_ppl[1].mean()),
        "rollout_corr/log_ppl_diff": float(ppl_difference.mean()),
        "rollout_corr/log_ppl_abs_diff": float(np.abs(ppl_difference).mean()),
        "rollout_corr/log_ppl_diff_max": float(ppl_difference.max()),
        "rollout_corr/log_ppl_diff_min": float(ppl_difference.min()),
        "rollout_corr/ppl_ratio": float(np.exp(ppl_difference).mean()),
        "training/rollout_probs_diff_max": float(apart.max()),
        "training/rollout_probs_diff_mean": float(apart.mean()),
        "training/rollout_probs_diff_std": float(apart.std(ddof=1)) if len(apart) > 1 else 0.0,
        "train/train_rollout_logprob_abs_diff": float(np.abs((train - rollout)[kept]).mean()),
        "attn_diag/ratio_outside_0.1": float((np.abs(rho - 1) > _BAND).mean()),
    }
    if varied:
        found["training/rollout_actor_probs_pearson_corr"] = float(np.corrcoef(*probs)[0, 1])
    return found


def split_of(given: Logprobs) -> LogprobSplit:
    """The difference without the layers' shares."""
    kept, difference = given.counted, given.difference
    values = difference[kept]
    squares = np.square(difference)
    total = float(squares.sum())
    order = np.argsort(-squares, axis=None)[: min(_LISTED, int((squares > 0).sum()))]
    carried = tuple(
        CarriedToken(
            int(b), int(t), float(difference[b, t]), float(np.exp(np.clip(-difference[b, t], -_CLAMP, _CLAMP))),
            float(squares[b, t]) / total,
        )
        for b, t in zip(*np.unravel_index(order, squares.shape), strict=True)
    )  # fmt: skip
    return LogprobSplit(
        tokens=len(values),
        metrics=metrics_of(given),
        bias=float(values.mean()),
        bias_error=_standard_error(difference, kept),
        noise=float(values.std(ddof=1)) if len(values) > 1 else 0.0,
        predicted=None,
        shares=(),
        carried=carried,
        missing="Each layer's share of it is not known: that needs the model (attn_diag.explain_logprobs).",
    )


def _standard_error(difference: Array, kept: npt.NDArray[np.bool_]) -> float | None:
    """Of the mean over tokens: over sequences, whose tokens are not independent; over tokens with only one sequence."""
    values = difference[kept]
    rows = kept.any(1)
    if int(rows.sum()) > 1:
        sums = (np.where(kept, difference - values.mean(), 0.0).sum(1))[rows]
        return math.sqrt(float(np.square(sums).sum()) * len(sums) / (len(sums) - 1)) / len(values)
    return float(values.std(ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else None
