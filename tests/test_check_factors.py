"""A factor that all of a gradient shares, however near to 1, is a bias; a single row's factor is no row sum's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import attn_diag
from attn_diag.captures.loading import load as load_capture
from attn_diag.kernels import preset
from attn_diag.results.baseline import BaselineCase, SequenceMean
from attn_diag.results.check import CheckedCase, Failure, Kind
from attn_diag.results.quality import QuantityVerdict
from attn_diag.testing.next_command import Again
from attn_diag.testing.probing.search import row_factor
from attn_diag.testing.regression import closer, documented, figures, judge
from attn_diag.testing.regression.cases import draw
from attn_diag.testing.regression.figures import ErrorSize, Measured
from attn_diag.testing.stated import Stated
from attn_diag.testing.target import emulate

CPU = torch.device("cpu")
FACTOR = 1025 / 1024


def attention(q: Tensor, k: Tensor, v: Tensor, low: torch.dtype | None = None) -> Tensor:
    """Causal, all in fp32 but what is rounded to ``low``, the row sum, and O."""
    scores = q.float() @ k.float().mT * q.shape[-1] ** -0.5
    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    probs = (scores - scores.amax(-1, keepdim=True)).masked_fill(later, -torch.inf).exp()
    row_sum = probs.sum(-1, keepdim=True)
    o: Tensor = (probs @ v.float() / (row_sum if low is None else row_sum.to(low).float())).to(q.dtype)
    return o


def longer_dq(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """O is right, dQ too long by less than a rounding, before its cast."""
    q = q.float()
    return attention(q * FACTOR + (q * (1 - FACTOR)).detach(), k, v).to(k.dtype)


def test_a_factor_of_a_gradient_within_a_rounding_is_a_bias(tmp_path: Path) -> None:
    found = attn_diag.check(longer_dq, cases=["normal"], causal=True, device="cpu", folder=tmp_path)
    [failure] = found.failures
    assert (failure.kind, failure.quantity) == ("bias", "dq")
    bias = found.cases[0].biases["dq_factor"]
    assert bias.standard_error is not None
    assert abs(bias.mean - (FACTOR - 1)) < 4 * bias.standard_error
    assert "dQ is 1.00098" in failure.message
    assert "O is off most" not in failure.message
    # What was returned is there to be looked at.
    file = tmp_path / "normal.safetensors"
    assert failure.look_closer == f"attn-diag attribute {file}"
    assert load_capture(file).tensors["dq"].shape == (16, 1, 192, 64)
    told = " ".join(found.report().split())
    assert "dQ is 1.00098 times the true one" in told.partition("Next:")[0]


def case_with(mean: float, error: float = 1e-5) -> tuple[Measured, CheckedCase]:
    """A case whose dQ is longer by ``mean``; a well-rounded kernel's is shorter by 1e-4."""
    known, size = SequenceMean(mean, error, 15.0), ErrorSize(3e-3, 3e-3, 1.1e-3, SequenceMean(0.0, 0.01, 15.0))
    return Measured({"dq_factor": known}, {"dq_factor": -1e-4}, {"dq": size}, None), CheckedCase("normal", (), "")


@pytest.mark.parametrize(
    ("mean", "fails"), [(0.0, False), (-2e-4, False), (1.5e-4, False), (4e-4, True), (-4e-4, True)]
)
def test_a_factor_is_held_to_the_walk_of_one_rounding_beside_a_well_rounded_kernels(mean: float, fails: bool) -> None:
    measured, case = case_with(mean)
    biases = judge.biases_of(measured, 192, None, same_key=False, same_inputs=True)
    assert biases["dq_factor"].accepted == pytest.approx((-1e-4 - 2.2e-3 / 192**0.5, 2.2e-3 / 192**0.5))
    [case], _ = judge.adjusted([replace(case, biases=biases)])
    assert bool(judge.failures_of(case, 0.01)) == fails
    wrong = replace(case, quantities=(QuantityVerdict("dq", "wrong", "dQ is 9 % off.", relative_error=0.09),))
    assert [f.kind for f in judge.failures_of(wrong, 0.01)] == ["wrong"]


@pytest.mark.parametrize("same_inputs", [False, True])
def test_a_factor_is_held_against_a_baselines_of_the_same_inputs_alone(same_inputs: bool) -> None:
    """Sequences of one normaliser round alike: two seeds' factors differ by more than either's spread."""
    measured, _ = case_with(5e-5)
    known = BaselineCase("", "", ("dq",), None, {"dq_factor": SequenceMean(-5e-5, 1e-5, 15.0)})
    test = judge.biases_of(measured, 192, known, same_key=True, same_inputs=same_inputs)["dq_factor"]
    assert test.p_value is not None
    assert (test.p_value < 0.01) == same_inputs


def test_what_is_a_documented_kernels_own_factor_is_no_bias() -> None:
    """dS multiplies the cast P; where all rows are alike its casts err to one side, and dK is 1.002 times the truth."""
    case = draw("constant-rows", 0, dtype=torch.bfloat16, head_dim=64, stated=Stated("none", 0.125))
    assert case.do is not None
    case = replace(case, q=case.q[:2], k=case.k[:2], v=case.v[:2], do=case.do[:2])
    other = emulate(preset("fa2"), case, CPU)
    factors = documented.factors(["dk"], case, other, CPU)["dk"]
    assert max(factors) > 1e-3
    sizes = {"dk": ErrorSize(3e-3, 3e-3, 1.1e-3, SequenceMean(0.0, 0.01, 1.0))}
    for mean, expected in ((2e-3, {"dk_factor": max(factors)}), (2e-5, {})):
        biases = {"dk_factor": SequenceMean(mean, 1e-5, 1.0)}
        assert figures._documented(biases, {"dk_factor": 0.0}, sizes, case, other, CPU) == expected


@pytest.mark.parametrize("factor", [8.0, 2.5, -1.0, 0.0])
def test_a_gradient_that_is_many_times_too_long_is_no_documented_error(factor: float) -> None:
    """What is left beside a published kernel's is measured by that one's length, not by the wrong one's."""
    case = draw("normal", 0, dtype=torch.bfloat16, head_dim=32, stated=Stated("top-left", 0.2))
    assert case.do is not None
    case = replace(case, q=case.q[:1], k=case.k[:1], v=case.v[:1], do=case.do[:1])
    other = emulate(preset("fa2"), case, CPU)
    wrong = [QuantityVerdict("dk", "wrong", "dK is wrong.", relative_error=abs(factor - 1))]
    assert documented.explained(wrong, case, {**other, "dk": factor * other["dk"]}, CPU) == {}


@pytest.mark.parametrize(
    ("quantity", "kind", "target", "command"),
    [
        ("o", "wrong", "m:f", "attn-diag probe m:f --dtype fp16 --probes normal"),
        ("dq", "wrong", "m:f", "attn-diag check m:f --dtype fp16 --hunt"),
        ("dk", "lossy", "m:f", "attn-diag check m:f --dtype fp16 --cases normal --out failing"),
        ("dv", "bias", None, "attn_diag.check(fn, dtype=torch.float16, cases=['normal'], folder='failing')"),
    ],
)
def test_the_next_command_judges_what_failed(quantity: str, kind: Kind, target: str | None, command: str) -> None:
    """``probe`` judges no gradient."""
    failure = Failure(kind, "normal", quantity, "normal: dQ")
    assert closer.of_kernel(failure, "normal", Again(target, "fp16", Stated("none", 0.125)), None) == command


def test_a_single_row_that_is_off_is_no_row_sum_that_is_rounded() -> None:
    case = draw("normal", 0, dtype=torch.float16, head_dim=64, stated=Stated("top-left", 0.125))
    case = replace(case, q=case.q[:4], k=case.k[:4], v=case.v[:4], do=None)
    found = row_factor(case, attention(case.q, case.k, case.v, torch.bfloat16), CPU)
    assert found is not None
    assert found.words == "the row sum l, or 1/l, is rounded"
    o = attention(case.q, case.k, case.v)
    o[:, :, -1] *= 1.1
    assert row_factor(case, o, CPU) is None
    o = attention(case.q, case.k, case.v)
    o[:, :, ::24] *= 1 + 0.05 * torch.randn(4, 1, 8, 1).half()
    assert row_factor(case, o, CPU) is None
