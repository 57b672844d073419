"""What is told of a layer's W_Q while it is there: spectral norms, and whether q is its output.

The host never waits. A sharded model has its weights only during the forward, so this is done then.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# 2**10 powers of the Gram matrix; see ``spectral_norms`` for what that leaves.
_SQUARINGS = 10
_ELEMENTS = 2**22  # float64, 32 MB


@dataclass(frozen=True)
class LayerProjection:
    """Of every head, [Hq] float64: ``norms`` of W_Q; squared norms of q, ``q``, and of what x W_Q^T misses, ``misfit``.

    The latter two are NaN without x.
    """

    norms: Tensor
    q: Tensor
    misfit: Tensor

    @classmethod
    def of(cls, w_q: Tensor, q: Tensor, x: Tensor | None) -> LayerProjection:
        """From w_q [Hq * D, C] and the sampled q [S, Hq, R, D] and x [S, R, C]."""
        with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
            heads = q.shape[1]
            weight = w_q.detach().view(heads, q.shape[3], -1)
            norms = spectral_norms(weight)
            if x is None:
                unknown = torch.full_like(norms, torch.nan)
                return cls(norms, unknown, unknown)
            inputs = x.double()
            step = max(1, _ELEMENTS // (q.shape[0] * q.shape[2] * q.shape[3]))
            parts = [_fit(weight[i : i + step], q[:, i : i + step], inputs) for i in range(0, heads, step)]
            return cls(norms, torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts]))


def _fit(weight: Tensor, q: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Squared norms of q and of q - x W^T less its mean over rows, which is a bias of the projection; [h] each."""
    values = q.double()
    missed = values - torch.einsum("src,hdc->shrd", x, weight.double())
    missed = missed - missed.mean((0, 2), keepdim=True)
    return values.square().sum((0, 2, 3)), missed.square().sum((0, 2, 3))


def spectral_norms(weight: Tensor) -> Tensor:
    """The largest singular value of each of ``weight`` [h, D, C]: float64 [h].

    With G = W W^T [D, D] of eigenvalues g_i, the result is sqrt(tr(G^(k+1)) / tr(G^k)), k = 1024, by ten squarings:
    a mean of the eigenvalues with weights g_i^k. It is never above the truth and, for any spectrum of D = 128
    eigenvalues, at most 0.14 % below. A decomposition would make the host wait; a power iteration needs a start vector,
    and its error depends on it.
    """
    step = max(1, _ELEMENTS // (weight.shape[1] * weight.shape[2]))
    return torch.cat([_norms(weight[start : start + step].double()) for start in range(0, len(weight), step)])


def _norms(weight: Tensor) -> Tensor:
    gram = weight @ weight.mT
    power = gram
    for i in range(_SQUARINGS):
        if i % 3 == 0:  # each squaring of a matrix of norm 1 leaves D^(-1/2) of it at least
            power = power / torch.linalg.vector_norm(power, dim=(1, 2), keepdim=True)
        power = torch.bmm(power, power)
    trace = power.diagonal(dim1=1, dim2=2).sum(1)
    # W = 0 gives 0 / 0.
    norms = ((gram * power).sum((1, 2)) / trace).clamp_(min=0.0).sqrt_()
    return torch.where(gram.diagonal(dim1=1, dim2=2).sum(1) == 0, 0.0, norms)
