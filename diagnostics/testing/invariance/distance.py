"""How far two calls of a kernel are apart, in units of what a well-rounded kernel is off by on their inputs."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from attn_diag.head.counterfactual import NoiseCollector
from attn_diag.head.quality import ELEMENT_LIMIT, GROUP_LIMIT
from attn_diag.reference import AttentionHead, FloatFormat, Masking, format_of, reference_head, ulp
from attn_diag.results.invariance import PathDifference
from attn_diag.testing.target import CaseInputs
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


def expected_of(inputs: CaseInputs, formats: dict[str, FloatFormat], device: torch.device) -> Expected:
    """The truth and the noise of every head; as many key heads as query heads.

    Args:
        inputs: What the kernel is called with.
        formats: In which it returns o, dq, dk and dv; the inputs' for others.
        device: Where the reference runs.
    """
    fmt = format_of(inputs.q.dtype)
    batch, heads = inputs.q.shape[:2]

    def one(place: tuple[int, int]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        q, k, v = (x[place].to(device).double() for x in (inputs.q, inputs.k, inputs.v))
        do = None if inputs.do is None else inputs.do[place].to(device).double()
        head = AttentionHead(q, k, v, do, inputs.scale, Masking(causal=inputs.causal))
        noise = NoiseCollector(head, fmt, formats.get("o", fmt), want_keys=do is not None)
        reference = reference_head(head, noise.add)
        variance = noise.finished(reference, formats)
        size = reference.row_max.abs().nan_to_num(posinf=0.0)
        variance["lse"] = variance.pop("row_sum") + (_FP32_LSE * (1 + size)).square()
        truth = {"o": reference.out, "lse": reference.lse}
        if do is not None:
            for name in ("dq", "dk", "dv"):
                found = getattr(reference, name)
                assert found is not None
                truth[name] = found
                variance[name] = variance[name] + _CRUMBS**2 * float(variance[name].mean())
        return {n: x.cpu() for n, x in truth.items()}, {n: variance[n].cpu() for n in truth}

    places = [(b, h) for b in range(batch) for h in range(heads)]
    each = list(map_in_order(one, places, parallel=device.type == "cpu"))
    truth, variance = (
        {n: torch.stack([e[i][n] for e in each]).view(batch, heads, *each[0][i][n].shape) for n in each[0][i]}
        for i in (0, 1)
    )
    return Expected(truth, variance)


def own_error(observed: Tensor, truth: Tensor, variance: Tensor) -> float | None:
    """Rms error over that of a well-rounded kernel; None where nothing is finite."""
    good = observed.isfinite() & truth.isfinite()
    if not bool(good.any()):
        return None
    return math.sqrt(float((observed - truth)[good].square().sum() / variance[good].sum().clamp(min=1e-300)))


def difference(
    name: str, first: Tensor, second: Tensor, variance: Tensor, own: float | None, fmt: FloatFormat
) -> PathDifference:
    """Compare one quantity of two calls.

    Args:
        name: Which.
        first: Of the one call, [B, H, T, D] or, of lse, [B, H, T].
        second: Of the other, in the same order.
        variance: Of a well-rounded kernel's error.
        own: How many times that kernel's error this one's is.
        fmt: The format of the outputs.
    """
    a, b, expected = (x.double().reshape(*x.shape[:3], -1) for x in (first, second, variance))
    same = (a == b) | (a.isnan() & b.isnan())
    broken = ~same & (a.isfinite() != b.isfinite())
    counted = ~same & ~broken
    moved = torch.where(counted, b - a, 0.0).nan_to_num(posinf=torch.inf, neginf=-torch.inf)
    # The difference of two errors has twice the variance of one.
    allowed = 2 * expected * max(own or 1.0, 1.0) ** 2
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
        quantity=name,  # type: ignore[arg-type]
        elements=a.numel(),
        differing=int((~same).sum()),
        nonfinite=int(broken.sum()),
        max_ulp=float((moved.abs() / spacing).max()) if finite else None,
        of_noise=math.sqrt(float(squares.sum() / expected.sum().clamp(min=1e-300))) if finite else None,
        of_limit=of_limit if finite else None,
        first=None if bool(same.all()) else (int(at[0]), int(at[1]), int(at[2])),
    )
