"""How the gradient of a latent that k and v share may be wrong: a use that is missing, or counted twice."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from attn_diag.captures.latent import of_latent
from attn_diag.results.quality import Pattern

# A mistake is named where it leaves so little of the squared error.
_LEAVES = 0.05


def latent_pattern(observed: Tensor, dk: Tensor, dv: Tensor) -> Pattern | None:
    """The mistake that explains the gradient; None where none of those known does.

    Args:
        observed: dKV, [Tk, D] float64.
        dk: What is true of the use as k, [Tk, D], of all query heads together.
        dv: Of the use as v, [Tk, Dv].
    """
    finite = observed.isfinite().all(1)
    before = float((observed - of_latent(dk, dv))[finite].square().sum())
    fits = []
    for words, made in _mistakes(dk, dv):
        left = float((observed - made)[finite].square().sum())
        fits.append((left, words))
    left, words = min(fits)
    if not before or not left <= _LEAVES * before:
        return None
    return Pattern("part", f"all keys {words}", explained=1 - left / before)


def _mistakes(dk: Tensor, dv: Tensor) -> Iterator[tuple[str, Tensor]]:
    none_k, none_v = torch.zeros_like(dk), torch.zeros_like(dv)
    yield "miss dV: they hold the gradient of the use as k alone", dk
    yield "miss dK: they hold the gradient of the use as v alone", of_latent(none_k, dv)
    yield "count dV twice", of_latent(dk, 2 * dv)
    yield "count dK twice", of_latent(2 * dk, dv)
    yield "count both uses twice", 2 * of_latent(dk, dv)
    yield "have dV with the wrong sign", of_latent(dk, -dv)
    yield "have dK with the wrong sign", of_latent(-dk, dv)
    yield "have dV in the last features instead of the first", of_latent(dk, none_v) + _last(dk, dv)
    yield "are zero", none_k


def _last(dk: Tensor, dv: Tensor) -> Tensor:
    return torch.nn.functional.pad(dv, (dk.shape[1] - dv.shape[1], 0))
