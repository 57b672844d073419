"""How far two calls of a kernel are apart, in units of what a well-rounded kernel is off by on their inputs."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from attn_diag.head.counterfactual import NoiseCollector
from attn_diag.head.outlying import GROUP_LIMIT
from attn_diag.head.propagation import sloped
from attn_diag.head.quality import ELEMENT_LIMIT
from attn_diag.reference import FloatFormat, RowBlock, format_of, reference_head, ulp
from attn_diag.results.invariance import PathDifference
from attn_diag.testing.case_inputs import CaseInputs
from attn_diag.work import map_in_order

# fp32 kernels leave up to so much of 1 + |m| in L.
_FP32_LSE = 2.0**-20
# In exact arithmetic a row that sees one key has dQ = 0, and a kernel leaves fp32's crumbs of numbers near 1.
_CRUMBS = 2.0**-20


@dataclass(frozen=True)
class Expected:
    """What is true of a call, and the variance of a well-rounded kernel's error; both by quantity, float64."""

    truth: dict[str, Tensor]
    """[B, H, T, D]; lse [B, H, T]."""
    variance: dict[str, Tensor]
    """Likewise."""
    sane: dict[str, Tensor]
    """Likewise of a kernel that casts dP too, as autograd does behind a cast P: far more in rows near one-hot."""


@dataclass
class _SaneNoise(NoiseCollector):
    """Gathers besides what a cast of dP adds: with e its relative variance, x = P^2 e dP^2, and J 1 at a row's maximum,

    var dQ += alpha^2 (x K^2 + (x 1) ((P K)^2 + J K^2)), var dK += alpha^2 (x + (P^2 + J) (x 1))^T Q^2.

    J: through the maximum autograd adds what cancels but for rounding.
    """

    further: dict[str, Tensor] = field(default_factory=dict)
    """By quantity."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.further = {n: torch.zeros_like(self.variance[n]) for n in ("dq", "dk") if n in self.variance}

    def add(self, block: RowBlock) -> None:
        """Take one block of the reference."""
        super().add(block)
        if self.head.do is None:
            return
        rows, keys, probs = block.rows, block.keys, block.probs
        moved = probs.square() * (self.head.do[rows] @ self.head.v[keys].T).square() * self._relative
        moved = sloped(block, sloped(block, moved))
        summed = moved.sum(1)[:, None]
        largest = torch.zeros_like(probs).scatter_(1, probs.argmax(1, keepdim=True), 1.0)
        dq = (moved + largest * summed) @ self._k2[keys] + summed * (probs @ self.head.k[keys]).square()
        self.further["dq"][rows] = dq * self.head.scale**2
        self.further["dk"][keys] += (moved + (probs.square() + largest) * summed).T @ self._q2[rows]


def expected_of(inputs: CaseInputs, formats: dict[str, FloatFormat], device: torch.device) -> Expected:
    """The truth and the noise of every head; as many key heads as query heads.

    Args:
        inputs: What the kernel is called with.
        formats: In which it returns o, dq, dk and dv; the inputs' for others.
        device: Where the reference runs.
    """
    fmt = format_of(inputs.q.dtype)
    batch, heads = inputs.q.shape[:2]

    def one(place: tuple[int, int]) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
        head = inputs.head(*place, device)
        noise = _SaneNoise(head, fmt, formats.get("o", fmt), want_keys=head.do is not None)
        reference = reference_head(head, noise.add)
        variance = noise.finished(reference, formats)
        size = reference.row_max.abs().nan_to_num(posinf=0.0)
        variance["lse"] = variance.pop("row_sum") + (_FP32_LSE * (1 + size)).square()
        truth = {"o": reference.out, "lse": reference.lse}
        if head.do is not None:
            for name in ("dq", "dk", "dv"):
                found = getattr(reference, name)
                assert found is not None
                truth[name] = found
                variance[name] = variance[name] + _CRUMBS**2 * float(variance[name].mean())
        sane = {n: variance[n] + noise.further[n] if n in noise.further else variance[n] for n in truth}
        return tuple({n: found[n].cpu() for n in truth} for found in (truth, variance, sane))  # type: ignore[return-value]

    places = [(b, h) for b in range(batch) for h in range(heads)]
    each = list(map_in_order(one, places, parallel=device.type == "cpu"))
    truth, variance, sane = (
        {n: torch.stack([e[i][n] for e in each]).view(batch, heads, *each[0][i][n].shape) for n in each[0][i]}
        for i in (0, 1, 2)
    )
    return Expected(truth, variance, sane)


def own_error(observed: Tensor, truth: Tensor, variance: Tensor) -> float | None:
    """Rms error over that of a well-rounded kernel; None where nothing is finite."""
    good = observed.isfinite() & truth.isfinite()
    if not bool(good.any()):
        return None
    return math.sqrt(float((observed - truth)[good].square().sum() / variance[good].sum().clamp(min=1e-300)))


def difference(
    name: str, first: Tensor, second: Tensor, variance: Tensor, allowed: Tensor, fmt: FloatFormat
) -> PathDifference:
    """Compare one quantity of two calls.

    Args:
        name: Which.
        first: Of the one call, [B, H, T, D] or, of lse, [B, H, T].
        second: Of the other, in the same order.
        variance: Of a well-rounded kernel's error.
        allowed: Of the error that these two may have.
        fmt: The format of the outputs.
    """
    a, b, expected, allowed = (x.double().reshape(*x.shape[:3], -1) for x in (first, second, variance, allowed))
    same = (a == b) | (a.isnan() & b.isnan())
    broken = ~same & (a.isfinite() != b.isfinite())
    counted = ~same & ~broken
    moved = torch.where(counted, b - a, 0.0).nan_to_num(posinf=torch.inf, neginf=-torch.inf)
    # The difference of two errors has twice the variance of one.
    allowed = 2 * allowed
    squares = moved.square()

    def over(dims: tuple[int, ...], limit: float) -> Tensor:
        x, y = (t.sum(dims, keepdim=True) if dims else t for t in (squares, allowed))
        return (x / y.clamp(min=1e-300)).sqrt() / limit

    worst = torch.maximum(over((), ELEMENT_LIMIT), over((3,), ELEMENT_LIMIT))
    of_limit = max(float(worst.max()), float(over((0, 1, 2, 3), GROUP_LIMIT)))
    place = (broken.any(3).double() if bool(broken.any()) else worst.amax(3)).flatten().argmax()
    at = torch.unravel_index(place, a.shape[:3])
    finite = bool(counted.any()) or not bool(broken.any())
    spacing = ulp(torch.where(a.isfinite(), a, 0.0).abs().amax(3, keepdim=True), fmt)
    return PathDifference(
        quantity=name,
        elements=a.numel(),
        differing=int((~same).sum()),
        nonfinite=int(broken.sum()),
        max_ulp=float((moved.abs() / spacing).max()) if finite else None,
        of_noise=math.sqrt(float(squares.sum() / expected.sum().clamp(min=1e-300))) if finite else None,
        of_limit=of_limit if finite else None,
        first=None if bool(same.all()) else (int(at[0]), int(at[1]), int(at[2])),
    )
