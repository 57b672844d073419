"""The float64 reference against torch autograd in float64, streamed and not, on odd shapes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from builders import some, visible_pairs
from torch import Tensor

from attn_diag.reference import AttentionHead, Masking, reference_head, reference_rows

TOLERANCE = 1e-12  # normwise, per tensor


@dataclass(frozen=True)
class Case:
    tq: int
    tk: int
    d: int
    masking: Masking
    softcap: float | None = None


def additive(tq: int, tk: int) -> Tensor:
    bias = torch.randn(tq, tk, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    bias[:, ::7] = -torch.inf
    return bias


CASES = {
    "square-63": Case(63, 63, 80, Masking("top-left")),
    "square-333": Case(333, 333, 64, Masking("bottom-right")),
    "unmasked": Case(63, 333, 32, Masking()),
    "cross-top-left": Case(77, 333, 80, Masking("top-left")),
    "cross-bottom-right": Case(77, 333, 80, Masking("bottom-right")),
    "longer-queries": Case(333, 77, 16, Masking("bottom-right")),
    "window": Case(333, 333, 32, Masking("top-left", window=(40, 0))),
    "window-both-ways": Case(77, 333, 32, Masking("none", window=(31, 17))),
    "softcap": Case(63, 63, 80, Masking("top-left"), softcap=1.5),
    "softcap-window": Case(77, 333, 48, Masking("bottom-right", window=(100, -1)), softcap=5.0),
    "additive": Case(63, 77, 32, Masking("none", mask=additive(63, 77))),
    "bool": Case(63, 77, 32, Masking("top-left", mask=additive(63, 77) > -0.5)),
    "chosen-rows": Case(40, 333, 32, Masking("top-left", positions=torch.arange(5, 325, 8))),
}
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


def make_head(case: Case, seed: int = 0) -> AttentionHead:
    generator = torch.Generator().manual_seed(seed)
    sizes = ((case.tq, case.d), (case.tk, case.d), (case.tk, case.d), (case.tq, case.d))
    q, k, v, do = (torch.randn(*s, generator=generator).bfloat16().double() for s in sizes)
    return AttentionHead(q, k, v, do, case.d**-0.5, case.masking, case.softcap)


def naive(case: Case, head: AttentionHead) -> dict[str, Tensor]:
    """Attention and its gradients by autograd, every intermediate kept."""
    q, k, v = (t.clone().requires_grad_() for t in (head.q, head.k, head.v))
    raw = head.scale * q @ k.T
    scores = raw if head.softcap is None else head.softcap * torch.tanh(raw / head.softcap)
    if case.masking.mask is not None and case.masking.mask.dtype != torch.bool:
        scores = scores + case.masking.mask
    scores = scores.masked_fill(~visible_pairs(case.masking, case.tq, case.tk), -torch.inf)
    keyed = (scores > -torch.inf).any(1)
    m = scores.amax(1).masked_fill(~keyed, 0.0).detach()
    p_bar = torch.exp(scores - m[:, None])
    row_sum = p_bar.sum(1)
    probs = p_bar / row_sum.masked_fill(~keyed, 1.0)[:, None]
    out = probs @ v
    do = some(head.do)
    dscores, dprobs, dq, dk, dv = torch.autograd.grad(out, (raw, probs, q, k, v), do)
    return {
        "scores": scores.detach(),
        "row_max": scores.detach().amax(1),
        "unnormalised_probs": p_bar.detach(),
        "row_sum": row_sum.detach(),
        "lse": scores.detach().logsumexp(1),
        "unnormalised_out": (p_bar @ v).detach(),
        "out": out.detach(),
        "probs": probs.detach(),
        "dprobs": dprobs,
        "delta": (do * out.detach()).sum(1),
        "dscores": dscores,
        "dq": dq,
        "dk": dk,
        "dv": dv,
    }


def assert_close(name: str, got: Tensor, expected: Tensor) -> None:
    assert torch.equal(got.isfinite(), expected.isfinite()), f"{name}: finite elsewhere"
    finite = expected.isfinite()
    error = (got - expected)[finite].norm() / expected[finite].norm().clamp_min(1e-300)
    assert error <= TOLERANCE, f"{name}: {error:.2e} off in norm"


@every_case
@pytest.mark.parametrize("block_rows", [7, 64, 1000])
def test_streamed_head_agrees_with_autograd(case: Case, block_rows: int) -> None:
    head = make_head(case)
    expected = naive(case, head)
    got = reference_head(head, block_rows=block_rows)
    for name in ("row_max", "row_sum", "lse", "unnormalised_out", "out", "delta", "dq", "dk", "dv"):
        assert_close(name, getattr(got, name), expected[name])


@every_case
def test_chosen_rows_show_every_intermediate(case: Case) -> None:
    head = make_head(case)
    expected = naive(case, head)
    rows = torch.tensor([case.tq - 1, 0, case.tq // 2])
    block = reference_rows(head, rows)
    for name in ("scores", "unnormalised_probs", "probs", "dprobs", "dscores"):
        got = torch.full((3, case.tk), -torch.inf if name == "scores" else 0.0, dtype=torch.float64)
        got[:, block.keys] = getattr(block, name)
        wanted = expected[name][rows]
        if name == "dprobs":  # dP of keys outside the block's span is never formed
            wanted = torch.where(got != 0, wanted, 0.0)
        assert_close(name, got, wanted)


def test_fully_masked_rows_give_zero() -> None:
    case = CASES["longer-queries"]
    got = reference_head(make_head(case))
    masked = got.fully_masked
    assert int(masked.sum()) == case.tq - case.tk
    assert not got.out[masked].any()
    assert not some(got.dq)[masked].any()
    assert (got.lse[masked] == -torch.inf).all()
    assert not got.out[~masked].isnan().any()


def test_autocast_does_not_reach_the_reference() -> None:
    head = make_head(CASES["square-63"])
    plain = reference_head(head)
    with torch.autocast("cpu", torch.bfloat16):
        inside = reference_head(head)
    assert torch.equal(plain.out, inside.out)


def test_inputs_must_be_float64() -> None:
    head = make_head(CASES["square-63"])
    with pytest.raises(TypeError, match="k must be float64"):
        replace(head, k=head.k.float())


@pytest.mark.gpu
@every_case
def test_cuda_agrees_with_cpu(case: Case) -> None:
    head = make_head(case)
    masking = case.masking
    if masking.mask is not None:
        masking = replace(masking, mask=masking.mask.cuda())
    moved = replace(head, q=head.q.cuda(), k=head.k.cuda(), v=head.v.cuda(), do=some(head.do).cuda(), masking=masking)
    cpu, cuda = reference_head(head), reference_head(moved)
    for name in ("out", "lse", "delta", "dq", "dk", "dv"):
        assert_close(name, getattr(cuda, name).cpu(), getattr(cpu, name))
