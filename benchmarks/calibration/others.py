"""Ways to look for a bias that the product does not use, measured on the same redraws: why it does not."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from scipy.special import bdtr, ndtr
from torch import Tensor

from attn_diag.statistics.means import FLAT_BAND_99

Array = npt.NDArray[np.float64]
_BLOCK, _RESAMPLES = 32, 399


def alarms(delta: Array, o_error: Tensor, levels: tuple[float, ...], seed: int) -> dict[str, Array]:
    """Alarms (0 or 1) [B] by "name/level", from delta's errors by row [B, T] and O's by element [B, T, D]."""
    found: dict[str, Array] = {}
    sign, element = sign_test(delta), elementwise_t(o_error)
    low, high = _bootstrap_means(delta, levels, seed)
    for i, level in enumerate(levels):
        found[f"sign test on delta/{level}"] = (sign <= level).astype(float)
        found[f"elementwise t on O/{level}"] = (element <= level).astype(float)
        found[f"percentile block bootstrap on delta/{level}"] = ((low[i] > 0) | (high[i] < 0)).astype(float)
    path, total = np.abs(np.cumsum(delta, 1)), np.sqrt(np.square(delta).sum(1, keepdims=True))
    rows = np.arange(1, delta.shape[1] + 1)
    found["band of constant sigma, 2.576 sigma sqrt(rows)/0.01"] = (
        (path > 2.576 * total * np.sqrt(rows / len(rows))).any(1).astype(float)
    )
    found["the product's flat band/0.01"] = (path > FLAT_BAND_99 * total).any(1).astype(float)
    return found


def sign_test(values: Array) -> Array:
    """p-values [B] of as many positive as negative values [B, n]; zeros are left out."""
    n = np.count_nonzero(values, axis=1)
    fewer = np.minimum((values > 0).sum(1), (values < 0).sum(1))
    return np.asarray(np.minimum(1.0, 2 * bdtr(fewer.astype(float), n, 0.5)))


def elementwise_t(errors: Tensor) -> Array:
    """p-values [B] of a zero mean of [B, T, D], every element taken as independent."""
    flat = errors.flatten(1)
    z = flat.mean(1) / flat.std(1) * flat.shape[1] ** 0.5
    return np.asarray(2 * ndtr(-np.abs(z.cpu().numpy())))


def _bootstrap_means(values: Array, levels: tuple[float, ...], seed: int) -> tuple[Array, Array]:
    """Percentile limits [levels, B] of the mean, blocks of 32 neighbouring rows drawn with replacement."""
    blocks = np.add.reduceat(values, np.arange(0, values.shape[1], _BLOCK), axis=1)
    rng, count = np.random.default_rng(seed), blocks.shape[1]
    draws = rng.multinomial(count, np.full(count, 1 / count), _RESAMPLES)
    means = blocks @ draws.T
    tails = np.array(levels) / 2
    return np.quantile(means, tails, axis=1), np.quantile(means, 1 - tails, axis=1)
