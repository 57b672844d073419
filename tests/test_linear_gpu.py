"""Linear attention on a GPU: inspect, check and replay say what they say on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from linear_kernels import observed
from test_linear_check import DELTA

import attn_diag
from attn_diag import LinearCapture
from attn_diag.testing.linear.cases import draw, with_outputs
from attn_diag.testing.linear.function import LinearFunction
from attn_diag.testing.linear.inputs import LONG, linear_inputs, rounded

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("operator", ["rwkv7", "gated_delta_rule", "kda", "gla"])
@pytest.mark.parametrize("defect", [None, "state_bf16", "no_inter_chunk"])
def test_inspect_judges_alike_on_both(operator: str, defect: str | None) -> None:
    given = rounded(linear_inputs(operator, (1, 96, 1, 32, 32), 0, kind=LONG))
    do = torch.randn(given["v"].shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    scale = 1.0 if operator == "rwkv7" else 32**-0.5
    made = observed(given, do, scale=scale, defect=defect)
    capture = LinearCapture.from_tensors(operator, {**given, "do": do, **made})
    cpu, cuda = (attn_diag.inspect_linear(capture, device=device).heads[0].quantities for device in ("cpu", "cuda"))
    assert [(q.quantity, q.answer, q.cause) for q in cpu] == [(q.quantity, q.answer, q.cause) for q in cuda]
    for one, other in zip(cpu, cuda, strict=True):
        assert one.factor == pytest.approx(other.factor, rel=0.02)


def test_check_passes_the_recipe() -> None:
    found = attn_diag.check_linear("recipe:16", DELTA, cases=["normal", "packed"], device="cuda")
    assert found.passed, found.report()


def test_replay_runs_functions_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parent)
    inputs = draw("initial-state", DELTA, 3, dtype=torch.bfloat16, shape=(1, 130, 2, 16))
    outputs, _ = LinearFunction.of("recipe", DELTA, device=torch.device("cpu")).run(inputs)
    (found,) = attn_diag.replay_linear(
        with_outputs(inputs, outputs), against=["recipe:16", "replayed_linear:no_state"], device="cuda"
    ).captures
    assert (found.cause, found.culprits) == ("kernel", ("replayed_linear:no_state",)), found.words
    assert [k.outcome for k in found.kernels] == ["captured", "ran", "ran"]
