"""The test of delta's mean, for many heads at once on the device: ``statistics.means`` without degrees of freedom."""

from __future__ import annotations

import torch
from torch import Tensor


def dense_clusters(keys: Tensor, usable: Tensor) -> Tensor:
    """Cluster numbers [h, R] below R of the rows by their argmax key; unusable rows share one with nobody else."""
    rows = keys.shape[1]
    marked = torch.where(usable, keys, -1)
    ordered, order = marked.sort(dim=1, stable=True)
    starts = torch.zeros_like(ordered)
    starts[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    number = starts.cumsum(1)
    return torch.empty_like(number).scatter_(1, order, number).clamp_(max=rows - 1)


def standard_error(contributions: Tensor, clusters: Tensor, usable: Tensor) -> Tensor:
    """Of the sum over rows of delta's errors, [h]: n times the standard error of their mean.

    ``contributions`` [h, R, F]: what each feature of O adds to a row's error, 0 in unusable rows. Errors may be shared
    within an argmax key and within a feature: ``means.two_way``; features alone where all rows have one key.
    """
    heads, _, features = contributions.shape
    index = clusters[..., None].expand_as(contributions)
    cells = torch.zeros_like(contributions).scatter_add_(1, index, contributions)  # [h, cluster, F]
    ones = usable.to(contributions.dtype)
    sizes = torch.zeros_like(ones).scatter_add_(1, clusters, ones)
    n = ones.sum(1)
    mean = contributions.sum((1, 2)) / n
    by_key = _variance(cells.sum(2), sizes, mean, n)
    by_feature = _variance(cells.sum(1), (n / features)[:, None].expand(heads, features), mean, n)
    cell_sizes = sizes / features
    of_cells = (
        cells.square().sum((1, 2))
        - 2 * mean * (cells.sum(2) * cell_sizes).sum(1)
        + mean.square() * cell_sizes.square().sum(1) * features
    )
    both = torch.maximum(by_key + by_feature - of_cells, torch.minimum(by_key, by_feature))
    several = (sizes > 0).sum(1) > 1
    return torch.where(several, both, by_feature).sqrt_()


def _variance(sums: Tensor, sizes: Tensor, mean: Tensor, n: Tensor) -> Tensor:
    """CR2's variance of the sum, as ``means.mean_test``; [h]."""
    left = (1 - sizes / n[:, None]).clamp_(min=torch.finfo(sums.dtype).tiny)
    return ((sums - sizes * mean[:, None]).square() / left).sum(1)
