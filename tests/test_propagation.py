"""Planted errors of delta and LSE are followed into dQ, dK, dV and dW_Q; atoms against brute force."""

from __future__ import annotations

import pytest
import torch
from builders import some
from torch import Tensor

from attn_diag.head.gradient_sums import AtomSums, GradientSums
from attn_diag.head.propagation import BackwardCollector, ForwardErrors, KeyShare, dq_parts, key_parts
from attn_diag.reference import AttentionHead, Masking, reference_head
from attn_diag.reference.rounding import BF16, FP64, round_nearest_even


def make_head(softcap: float | None = None) -> AttentionHead:
    generator = torch.Generator().manual_seed(11)
    q, k, v, do = (torch.randn(n, 24, generator=generator).bfloat16().double() for n in (63, 95, 95, 63))
    return AttentionHead(q, k, v, do, 24**-0.5, Masking("bottom-right"), softcap)


def backward(head: AttentionHead, delta: Tensor, lse: Tensor, cast: str = "exact") -> dict[str, Tensor]:
    """A fused backward spelled out: P = exp(S - L), dS = P o (dP - delta), optionally cast to BF16 (or alpha dS)."""
    do = some(head.do)
    scores = head.scale * head.q @ head.k.T
    slope = torch.ones_like(scores)
    if head.softcap is not None:
        capped = torch.tanh(scores / head.softcap)
        scores, slope = head.softcap * capped, 1 - capped**2
    hidden = torch.arange(95) > torch.arange(63)[:, None] + 32
    probs = torch.exp(scores.masked_fill(hidden, -torch.inf) - lse[:, None])
    dscores = probs * (do @ head.v.T - delta[:, None]) * slope
    if cast != "exact":
        probs = round_nearest_even(probs, BF16)
    scaled = {
        "exact": lambda: head.scale * dscores,
        "dS cast": lambda: head.scale * round_nearest_even(dscores, BF16),
        "alpha dS cast": lambda: round_nearest_even(head.scale * dscores, BF16),
    }[cast]()
    return {"dq": scaled @ head.k, "dk": scaled.T @ head.q, "dv": probs.T @ do}


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("cast", ["exact", "dS cast", "alpha dS cast"])
@pytest.mark.parametrize("with_lse", [False, True], ids=["delta", "delta-and-lse"])
def test_parts_add_up_to_the_error(softcap: float | None, cast: str, with_lse: bool) -> None:
    head = make_head(softcap)
    reference = reference_head(head)
    generator = torch.Generator().manual_seed(1)
    delta_error = 0.05 * torch.randn(63, generator=generator, dtype=torch.float64)
    lse_error = 0.02 * torch.randn(63, generator=generator, dtype=torch.float64) * with_lse
    delta, lse = some(reference.delta) + delta_error, reference.lse + lse_error
    observed = backward(head, delta, lse, cast)
    known: tuple[Tensor | None, Tensor | None] = (lse, lse_error) if with_lse else (None, None)
    errors = ForwardErrors(delta, delta_error, *known, FP64 if cast == "exact" else BF16, observed["dq"])
    collected = BackwardCollector(head, errors, want_casts=True, want_keys=True)
    collected.begin()
    probs_k = torch.zeros_like(head.q)

    def observe(block) -> None:  # type: ignore[no-untyped-def]
        collected.add(block)
        slope = 1.0 if block.slope is None else block.slope
        probs_k[block.rows] = (block.probs * slope) @ head.k[block.keys]

    reference_head(head, observe, block_rows=10)
    fed = errors.delta_error, errors.lse_error, collected.dq_cast
    dq = dq_parts(head.scale, some(reference.dq), probs_k, *fed, observed["dq"], FP64)
    keys = key_parts(
        [KeyShare.of(reference, collected)], {n: observed[n] for n in ("dk", "dv")}, {"dk": FP64, "dv": FP64}
    )
    for name, parts in {"dq": dq, **keys}.items():
        assert parts.observed is not None
        error = parts.observed - parts.reference
        total = sum((p for p in parts.parts.values() if p is not None), torch.zeros_like(error))
        assert (error - total).norm() <= 1e-11 * parts.reference.norm(), name
        assert (parts.observed - some(parts.predicted)).norm() <= 1e-11 * parts.reference.norm(), name
    result = GradientSums.of(dq).result()
    assert sum(s for s in some(result.shares).values() if s is not None) == pytest.approx(1.0, abs=1e-9)
    if cast == "exact" and not with_lse:
        assert result.unexplained_fraction == pytest.approx(0.0, abs=1e-9)


def test_atoms_against_the_outer_products_themselves() -> None:
    generator = torch.Generator().manual_seed(2)
    left, right = (torch.randn(600, n, generator=generator, dtype=torch.float64) for n in (5, 9))
    atoms = left[:, :, None] * right[:, None, :]
    norms = atoms.flatten(1).norm(dim=1)
    result = AtomSums.of(left, right).result()
    assert result["coherence"] == pytest.approx(float(atoms.sum(0).square().sum() / norms.square().sum()))
    assert result["cancellation"] == pytest.approx(float(atoms.sum(0).norm() / norms.sum()))
    assert result["participation"] == pytest.approx(float(norms.square().sum() ** 2 / norms.pow(4).sum()))
    signs = torch.randint(0, 2, (2000, 600), generator=generator).double() * 2 - 1
    flipped = (torch.einsum("st,tdc->sdc", signs, atoms)).square().sum((1, 2)) / norms.square().sum()
    assert result["coherence_null95"] == pytest.approx(float(flipped.quantile(0.95)), rel=0.1)


def test_aligned_atoms_exceed_their_null() -> None:
    left = torch.ones(200, 3, dtype=torch.float64)
    right = torch.ones(200, 4, dtype=torch.float64)
    result = AtomSums.of(left, right).result()
    assert result["coherence"] == pytest.approx(200)
    assert result["cancellation"] == pytest.approx(1)
    assert some(result["coherence_null95"]) < 10
