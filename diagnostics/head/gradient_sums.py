"""How large the parts of a gradient's error are: sums that add up over heads and sequences."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from attn_diag.head.propagation import GradientParts
from attn_diag.head.stacks import inner, numbers
from attn_diag.results.diagnosis import GradientError

_FLIPS = 499
_ATOM_BLOCK = 512


@dataclass
class GradientSums:
    """Squared norms and inner products of one gradient's error parts, and of its atoms; they add over heads."""

    reference: float = 0.0
    error: float = 0.0
    along: float = 0.0
    observed: bool = True
    predicted_by_delta: float | None = None
    left_by_delta: float = 0.0
    left_by_all: float | None = None
    dots: dict[str, float | None] = field(default_factory=dict)
    floor: float | None = None
    atoms: AtomSums | None = None

    @classmethod
    def of(cls, p: GradientParts, floor: float | None = None, atoms: AtomSums | None = None) -> GradientSums:
        """Of one gradient tensor (Frobenius inner products)."""
        return replace(cls.each(p.map(lambda tensor: tensor[None]), [floor])[0], atoms=atoms)

    @classmethod
    def each(cls, p: GradientParts, floors: Sequence[float | None]) -> list[GradientSums]:
        """Of the gradients of H heads, [H, ...] each."""
        delta, found = p.parts.get("delta"), {"reference": inner(p.reference, p.reference)}
        if delta is not None:
            found["predicted_by_delta"] = inner(delta, delta)
        parts = p.parts if p.observed is not None else {}
        if p.observed is not None:
            error = p.observed - p.reference
            found |= {"error": inner(error, error), "along": inner(error, p.reference)}
            found |= {f"part {name}": inner(part, error) for name, part in parts.items() if part is not None}
            if delta is not None:
                found["left_by_delta"] = inner(rest := error - delta, rest)
            if p.predicted is not None:
                found["left_by_all"] = inner(rest := p.observed - p.predicted, rest)
        of_heads = [dict(zip(found, values, strict=True)) for values in numbers(*found.values())]
        return [
            cls(
                reference=sums["reference"],
                error=sums.get("error", 0.0),
                along=sums.get("along", 0.0),
                observed=p.observed is not None,
                predicted_by_delta=sums.get("predicted_by_delta"),
                left_by_delta=sums.get("left_by_delta", 0.0),
                left_by_all=sums.get("left_by_all"),
                dots={name: sums.get(f"part {name}") for name in parts},
                floor=floor,
            )
            for sums, floor in zip(of_heads, floors, strict=True)
        ]

    @classmethod
    def pool(cls, parts: list[GradientSums]) -> GradientSums:
        """The sums over several heads; a part unknown in one of them is unknown in all."""
        first = parts[0]
        return cls(
            reference=sum(p.reference for p in parts),
            error=sum(p.error for p in parts),
            along=sum(p.along for p in parts),
            observed=all(p.observed for p in parts),
            predicted_by_delta=_sum([p.predicted_by_delta for p in parts]),
            left_by_delta=sum(p.left_by_delta for p in parts),
            left_by_all=_sum([p.left_by_all for p in parts]),
            dots={name: _sum([p.dots.get(name) for p in parts]) for name in first.dots},
            floor=_sum([p.floor for p in parts]),
            atoms=AtomSums.pool([p.atoms for p in parts]),
        )

    def result(self) -> GradientError:
        """The figures of a report."""
        observed = self.observed and self.error > 0
        return GradientError(
            relative_error=_norm_ratio(self.error, self.reference) if self.observed else None,
            predicted_relative_error=_norm_ratio(self.predicted_by_delta, self.reference),
            unexplained_fraction=_norm_ratio(self.left_by_delta, self.error)
            if observed and self.predicted_by_delta is not None
            else None,
            shares={n: None if d is None else d / self.error for n, d in self.dots.items()} if observed else None,
            unexplained_with_casts=_norm_ratio(self.left_by_all, self.error) if observed else None,
            over_noise_floor=_norm_ratio(self.error, self.floor) if self.observed else None,
            **(self.atoms.result() if self.atoms is not None else {}),
        )


@dataclass
class AtomSums:
    """Sums over the rank-1 atoms a_t of delta's error; they add over heads (whose blocks of dW_Q or dK differ)."""

    total: float
    squares: float
    norms: float
    fourths: float
    flipped: Tensor

    @classmethod
    def of(cls, left: Tensor, right: Tensor, seed: int = 0) -> AtomSums:
        """Atoms left_t (x) right_t; ``left`` [n, D], ``right`` [n, C], n rows.

        ||sum s_t a_t||^2 = s^T G s with G = (left left^T) o (right right^T), evaluated in row blocks for
        the plain sum and for random signs s (fixed seed).
        """
        n = len(left)
        generator = torch.Generator().manual_seed(seed)
        signs = torch.randint(0, 2, (n, _FLIPS), generator=generator, dtype=torch.int8).to(left.device)
        squares = left.square().sum(1) * right.square().sum(1)
        flipped = left.new_zeros(_FLIPS)
        flips = signs.double().mul_(2).sub_(1)
        for start in range(0, n, _ATOM_BLOCK):
            part = slice(start, start + _ATOM_BLOCK)
            gram = (left[part] @ left.T).mul_(right[part] @ right.T)
            flipped += (gram @ flips).mul_(flips[part]).sum(0)
        total = _dot(together := left.T @ right, together)
        norms = squares.sqrt().sum()
        return cls(total, float(squares.sum()), float(norms), float(squares.square().sum()), flipped.cpu())

    @classmethod
    def pool(cls, parts: list[AtomSums | None]) -> AtomSums | None:
        """The sums over heads; None if one of them has none."""
        known = [p for p in parts if p is not None]
        if not known or len(known) < len(parts):
            return None
        sums = {name: sum(getattr(p, name) for p in known) for name in ("total", "squares", "norms", "fourths")}
        return cls(**sums, flipped=torch.stack([p.flipped for p in known]).sum(0))

    def result(self) -> dict[str, float | None]:
        """coherence, its null, cancellation and participation."""
        if not self.squares or not self.fourths:  # below the smallest number
            return {}
        return {
            "coherence": self.total / self.squares,
            "coherence_null95": float(self.flipped.quantile(0.95)) / self.squares,
            "cancellation": math.sqrt(self.total) / self.norms,
            "participation": self.squares * self.squares / self.fourths,
        }


def _dot(a: Tensor, b: Tensor) -> float:
    return float(torch.dot(a.reshape(-1), b.reshape(-1)))


def _sum(values: list[float | None]) -> float | None:
    return None if any(v is None for v in values) else sum(v for v in values if v is not None)


def _norm_ratio(numerator: float | None, denominator: float | None) -> float | None:
    if numerator is None or not denominator:
        return None
    return math.sqrt(numerator / denominator)
