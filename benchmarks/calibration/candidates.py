"""What the product does not use, measured on the same redraws: why it does not.

The candidates are tests of a clustered mean, from which the shipped one was chosen. Each takes ``sums`` and ``sizes``
[R, G] (size 0: no such cluster) and returns p-values [R].
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from scipy.special import bdtr, ndtr, stdtr
from torch import Tensor

from attn_diag.statistics.drift import FLAT_BAND_99
from attn_diag.statistics.mean_tests import effective

Array = npt.NDArray[np.float64]
Candidate = Callable[[Array, Array], Array]
_BLOCK, _RESAMPLES = 32, 399


def _mean(sums: Array, sizes: Array) -> tuple[Array, Array, Array, Array]:
    """Elements and mean of each redraw, [R], the clusters' residual sums [R, G], and how many there are, [R]."""
    n, g = sizes.sum(-1), np.count_nonzero(sizes, axis=-1)
    mean = sums.sum(-1) / n
    return n, mean, sums - sizes * mean[:, None], g


def _two_sided(mean: Array, se: Array, df: Array) -> Array:
    return np.asarray(2 * stdtr(df, -np.abs(mean / se)))


def student(sums: Array, sizes: Array) -> Array:
    """CR1 variance, G - 1 degrees of freedom (Cameron & Miller 2015, eq. 11)."""
    n, mean, residual, g = _mean(sums, sizes)
    return _two_sided(mean, np.sqrt(g / (g - 1) * np.square(residual).sum(-1)) / n, g - 1)


def reduced(sums: Array, sizes: Array, correlation: float = 0.0) -> Array:
    """CR2 variance with Bell & McCaffrey's degrees of freedom (Imbens & Kolesar, Rev. Econ. Stat. 98 (2016) 701).

    For a mean, CR2 scales the residual sum of cluster c by a_c = (1 - n_c/N)^(-1/2). Working model of the degrees
    of freedom: errors of equal variance with this correlation inside a cluster, so a cluster sum has the variance
    v_c = n_c (1 + (n_c - 1) correlation).
    """
    n, mean, residual, _ = _mean(sums, sizes)
    share = sizes / n[:, None]
    scale = 1 / (1 - share)
    se = np.sqrt((np.square(residual) * scale).sum(-1)) / n
    v = sizes * (1 + (sizes - 1) * correlation)
    # r = (I - share 1') s, weights a^2: trace(M) and trace(M^2) of M_cd = a_c a_d cov(r_c, r_d).
    # cov(r_c, r_d) = v_c [c=d] - share_d v_c - share_c v_d + share_c share_d sum v
    total = v.sum(-1, keepdims=True)
    diagonal = scale * (v - 2 * share * v + share**2 * total)
    x, y = v * scale, share * scale
    squares = ((scale * v) ** 2 - 4 * scale**2 * v**2 * share + 2 * scale**2 * v * share**2 * total).sum(-1)
    # sum over all c, d of a_c^2 a_d^2 (share_d v_c + share_c v_d - share_c share_d V)^2
    vv, ss, vs = (v * x).sum(-1), (share * y).sum(-1), (v * y).sum(-1)
    t = total[:, 0]
    squares += 2 * vv * ss + 2 * vs**2 + t**2 * ss**2 - 4 * t * vs * ss
    return _two_sided(mean, se, diagonal.sum(-1) ** 2 / squares)


def equicorrelated(sums: Array, sizes: Array) -> Array:
    """The same with rows of one cluster moving together."""
    return reduced(sums, sizes, 1.0)


def satterthwaite(sums: Array, sizes: Array) -> Array:
    """CR1 with the degrees of freedom that the cluster sums themselves show: (sum v)^2 / sum v^2 is 3 n_eff - 2 in the
    mean where they are normal with variances v."""
    n, mean, residual, g = _mean(sums, sizes)
    se = np.sqrt(g / (g - 1) * np.square(residual).sum(-1)) / n
    return _two_sided(mean, se, np.clip(3 * effective(residual) - 2, 1, g - 1))


def sign_flips(sums: Array, sizes: Array) -> Array:  # noqa: ARG001
    """Randomisation test: how often random signs of the cluster sums give as large a total.

    By Lugannani & Rice's saddlepoint formula (Robinson, J. R. Stat. Soc. B 44 (1982) 91), not by drawing.
    """
    scaled = np.abs(sums) / np.abs(sums).max(-1, keepdims=True)
    observed = np.abs((np.sign(sums) * scaled).sum(-1))
    top = scaled.sum(-1)
    smallest = 2.0 ** (1 - np.count_nonzero(scaled, axis=-1).astype(float))
    inside = np.minimum(observed, top * (1 - 1e-9))
    low, high = np.zeros(len(sums)), np.full(len(sums), 1.0)
    while np.any(grow := (scaled * np.tanh(high[:, None] * scaled)).sum(-1) < inside) and high.max() < 1e9:
        high[grow] *= 2
    for _ in range(50):
        middle = (low + high) / 2
        less = (scaled * np.tanh(middle[:, None] * scaled)).sum(-1) < inside
        low, high = np.where(less, middle, low), np.where(less, high, middle)
    theta = (low + high) / 2
    y = theta[:, None] * scaled
    k0 = (np.logaddexp(y, -y) - np.log(2)).sum(-1)
    k2 = np.square(scaled / np.cosh(np.minimum(y, 300))).sum(-1)
    w, u = np.sqrt(np.maximum(2 * (theta * inside - k0), 0)), theta * np.sqrt(k2)
    with np.errstate(divide="ignore", invalid="ignore"):
        tail = ndtr(-w) + np.exp(-w * w / 2) / np.sqrt(2 * np.pi) * (1 / u - 1 / w)
    tail = np.where(w < 1e-4, 0.5, tail)
    return np.asarray(np.clip(2 * tail, smallest, 1.0))


CANDIDATES: dict[str, Candidate] = {
    "student": student,
    "cr2": reduced,
    "cr2_equicorrelated": equicorrelated,
    "satterthwaite": satterthwaite,
    "sign_flips": sign_flips,
}


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
