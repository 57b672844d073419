"""Rows of dQ, or keys of dK, with another derivative of the softcap than 1 - tanh^2(S/c)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from attn_diag.analyses.patterns.evidence import Evidence, Guess
from attn_diag.analyses.patterns.slab import Slab

# What may stand in its place, of t = tanh(S/c).
_INSTEAD: dict[str, Callable[[Tensor], Tensor]] = {
    "are without the softcap's derivative": torch.ones_like,
    "have the softcap's derivative twice, (1 - tanh²)²": lambda t: (1 - t.square()).square(),
    "have 1 - tanh for the softcap's derivative 1 - tanh²": lambda t: 1 - t,
    "have 1 - |tanh| for the softcap's derivative 1 - tanh²": lambda t: 1 - t.abs(),
    "have tanh² for the softcap's derivative 1 - tanh²": torch.square,
    "have the softcap's derivative at the capped score": lambda t: 1 - t.tanh().square(),
}
# Any smooth function of t is near a polynomial of it; it must leave so much less than a mere factor does.
_DEGREE, _BEATS = 4, 4.0


def of_gradient(evidence: Evidence, slabs: Sequence[Slab], rows: Tensor) -> Iterator[Guess]:
    """Guesses for a head with a softcap; none without.

    Args:
        evidence: dQ or dK.
        slabs: The rows in each query head that makes them.
        rows: Which n rows or keys.
    """
    if evidence.quantity not in ("dq", "dk") or slabs[0].tanh is None:
        return

    def made(derivative: Callable[[Tensor], Tensor]) -> Tensor:
        parts = [s.total(s.weights(sloped=False) * derivative(s.tanh)) for s in slabs if s.tanh is not None]
        return torch.stack(parts).sum(0)

    cap = slabs[0].head.softcap or 1.0
    undivided = {"have 1 - S² for the softcap's derivative 1 - (S/c)²": lambda t: 1 - (cap * t).square()}
    for words, derivative in (_INSTEAD | undivided).items():
        yield Guess("formula", words, made(derivative))
    terms = torch.stack([made(lambda t, n=n: t**n) for n in range(_DEGREE + 1)])  # type: ignore[misc]
    noise = evidence.noise[rows].clamp(min=1e-300).sqrt()[:, None]
    truth, goal = evidence.truth[rows] / noise, evidence.observed[rows] / noise
    matrix = (terms / noise).flatten(1).T
    fitted = matrix @ torch.linalg.lstsq(matrix, goal.flatten()[:, None]).solution[:, 0]
    factor = (goal * truth).sum() / truth.square().sum().clamp(min=1e-300)
    left = (goal.flatten() - fitted).square().sum()
    if bool(_BEATS * left < (goal - factor * truth).square().sum()):
        words = "have another function of the score for the softcap's derivative"
        yield Guess("formula", words, fitted.view_as(goal) * noise, _DEGREE + 1)
