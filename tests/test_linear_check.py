"""``check_linear`` and ``invariance_linear``: functions that others wrote pass; broken in one line they are named."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import Run
from linear_kernels import recurrent
from planted_linear import DELTA_RULE, MAMBA, Fault, foreign, planted
from torch import Tensor

import attn_diag
from attn_diag.analyses.linear.words import CAUSES
from attn_diag.results.check import CheckReport

DELTA, QUICK = "gated_delta_rule", ["normal", "initial-state"]
TRIED = ("no inter-chunk term", "initial state transposed")
NAMED = [fault for fault in DELTA_RULE if fault.name in TRIED]


def gla(q: Tensor, k: Tensor, v: Tensor, g: Tensor, scale: float | None = None, *, coarse: bool = True) -> Tensor:
    """GLA step by step, its state kept in BF16; without initial states."""
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    q, k, v, g = (x.transpose(1, 2).float() for x in (q, k, v, g))
    state, outs = torch.zeros(*q.shape[:2], q.shape[3], v.shape[3]), []
    for t in range(q.shape[2]):
        state = state * g[:, :, t].exp()[..., None] + k[:, :, t, :, None] * v[:, :, t, None]
        state = state.bfloat16().float() if coarse else state
        outs.append((q[:, :, t, :, None] * state).sum(2) * factor)
    return torch.stack(outs, 1).bfloat16()


def fine(q: Tensor, k: Tensor, v: Tensor, g: Tensor, scale: float) -> Tensor:
    """The same with a state in fp32."""
    return gla(q, k, v, g, scale, coarse=False)


def nothing(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    del k, v
    return q


def causes(report: CheckReport) -> set[str]:
    said = {f.suspect for f in report.failures} - {None}
    wrong = {q.cause for c in report.cases for q in c.linear if q.answer == "wrong" and q.cause}
    return {name for name, words in CAUSES.items() if words in said} | wrong


@pytest.mark.parametrize("operator", [DELTA, "mamba2"])
def test_what_others_wrote_passes(operator: str) -> None:
    found = attn_diag.check_linear(foreign(operator), operator, cases=[*QUICK, "shared-heads"], head_dim=16)
    assert found.passed, found.report()
    assert {"o", "final_state", "dq", "dinitial_state"} <= set(found.cases[1].outputs)
    assert all(case.deterministic for case in found.cases)


@pytest.mark.parametrize("fault", NAMED, ids=lambda fault: fault.name)
def test_one_broken_line_is_named_and_nothing_else(fault: Any) -> None:
    found = attn_diag.check_linear(planted(DELTA, fault), DELTA, cases=["initial-state"], head_dim=16)
    assert not found.passed
    assert causes(found) & {*fault.cause}, found.report()
    assert not causes(found) - {*fault.cause, "zero", "factor"}, found.report()


NORMALISED = "query = l2norm(query, dim=-1, eps=1e-6)"


@pytest.mark.parametrize(
    ("line", "made", "case"),
    [
        (NORMALISED, NORMALISED, None),
        (NORMALISED, "pass", "l2norm"),
        ("key = l2norm(key, dim=-1, eps=1e-6)", "key = l2norm(key, dim=-1, eps=1e-12)", "l2norm-eps"),
        ("if use_qk_l2norm_in_kernel:", "if False:", "l2norm"),
    ],
    ids=["whole", "q as it is", "another eps", "not at all"],
)
def test_normalising_in_the_kernel_is_checked(line: str, made: str, case: str | None) -> None:
    function = planted(DELTA, Fault("normalising", line, made))
    backward = None if case is None else False
    found = attn_diag.check_linear(function, DELTA, cases=["l2norm", "l2norm-eps"], head_dim=8, backward=backward)
    failed = {f.case for f in found.failures}
    assert failed == ({"l2norm", "l2norm-eps"} if case == "l2norm" else {case} - {None}), found.report()


def gated(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, A_log: Tensor | None = None,
    dt_bias: Tensor | None = None, scale: float | None = None, initial_state: Tensor | None = None,
    output_final_state: bool = False, use_gate_in_kernel: bool = False, use_beta_sigmoid_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None, *, fault: str = "",
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The gated delta rule with all its options, step by step in float64, or with a fault in one of them."""
    if use_gate_in_kernel:
        assert A_log is not None
        assert dt_bias is not None
        raised = g if fault == "bias left out" else g + dt_bias
        g = -(A_log if fault == "A is taken for its logarithm" else A_log.exp()) * torch.nn.functional.softplus(raised)
    beta = beta.sigmoid() if use_beta_sigmoid_in_kernel and fault != "no sigmoid" else beta
    if scale is None or fault == "scale ignored":
        scale = 1.0 if fault == "another default" else q.shape[-1] ** -0.5
    ends = [0, q.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
    outs, states, before = list[Tensor](), list[Tensor](), None
    for n, (i, j) in enumerate(pairwise(ends)):
        own = {"q": q[:, i:j], "k": k[:, i:j], "v": v[:, i:j], "g": g[:, i:j], "beta": beta[:, i:j]}
        if initial_state is not None:
            own["initial_state"] = initial_state if cu_seqlens is None else initial_state[n : n + 1]
        elif fault == "the state goes on" and before is not None:
            own["initial_state"] = before
        o, before = recurrent(own, scale=scale)
        outs.append(o)
        states.append(before)
    return torch.cat(outs, 1).to(v.dtype), torch.cat(states).float() if output_final_state else None


@pytest.mark.parametrize(
    ("fault", "case"),
    [
        ("", ""), ("bias left out", "gates-in-kernel"), ("A is taken for its logarithm", "gates-in-kernel"),
        ("no sigmoid", "gates-in-kernel"), ("scale ignored", "scale"), ("another default", "defaults"),
        ("the state goes on", "packed-alone"),
    ],
)  # fmt: skip
def test_options_of_a_call_are_checked(fault: str, case: str) -> None:
    cases = ["gates-in-kernel", "scale", "defaults"] if not fault else [case]
    function, backward = partial(gated, fault=fault), False if fault else None
    found = attn_diag.check_linear(function, DELTA, cases=cases, head_dim=8, name="gated", backward=backward)
    assert {f.case for f in found.failures} == {case} - {""}, found.report()
    assert fault or {"dg", "dbeta"} <= set(found.cases[-1].outputs)
    assert fault != "the state goes on" or causes(found) == {"sequences_run_on"}, found.report()


@pytest.mark.parametrize(
    "fault",
    [f for f in MAMBA if f.name in ("no inter-chunk term", "no gradient of the decay")],
    ids=lambda fault: fault.name,
)
def test_one_broken_line_of_mamba_is_found(fault: Any) -> None:
    found = attn_diag.check_linear(planted("mamba2", fault), "mamba2", cases=["initial-state"], head_dim=16)
    assert not found.passed
    assert not fault.cause or causes(found) & {*fault.cause}, found.report()


def test_a_state_in_bf16_is_rounding_and_named_in_every_gradient() -> None:
    # Autograd rounds the state's gradient as well: dK and dV were said to be beyond any rounding.
    found = attn_diag.check_linear(gla, "gla", cases=["long"], head_dim=16)
    assert {f.kind for f in found.failures} == {"lossy"}, found.report()
    assert causes(found) == {"state_step"}
    assert {f.quantity for f in found.failures} >= {"o", "dq", "dk", "dv"}


def test_what_a_function_does_not_take_is_said() -> None:
    found = attn_diag.check_linear(
        lambda q, k, v, g, scale: gla(q, k, v, g, scale, coarse=False), "gla", cases=None, head_dim=8
    )
    assert found.passed, found.report()
    assert {case.name for case in found.cases} >= {"normal", "long", "peaked"}
    assert "initial-state was not run: it takes no initial state" in found.notes
    wrong = attn_diag.check_linear(lambda q, **_: q @ 1, "linear_attn", cases=["normal"])
    assert [f.kind for f in wrong.failures] == ["fit"]
    missing = attn_diag.check_linear(nothing, "kda", cases=["normal"])
    assert "takes no g" in missing.failures[0].message
    for given, words in (
        ({"target": gla}, "name the operator"),
        ({"target": gla, "operator": "softmax"}, "operator must be one of"),
        ({"target": "sdpa", "operator": "gla"}, "MODULE:FUNCTION"),
        ({"target": gla, "operator": "gla", "dtype": torch.float32}, "dtype must be one of"),
    ):
        with pytest.raises(attn_diag.InputError, match=words):
            attn_diag.check_linear(**given)


def test_growth_since_a_baseline(tmp_path: Path) -> None:
    file, options = tmp_path / "gla.json", {"cases": ["long"], "name": "gla", "head_dim": 16}
    assert attn_diag.check_linear(gla, "gla", baseline=file, save=True, **options).saved == "saved"  # type: ignore[arg-type]
    # As lossy as it was accepted.
    again = attn_diag.check_linear(gla, "gla", baseline=file, **options)  # type: ignore[arg-type]
    assert again.passed, again.report()
    assert again.cases[0].same_bits
    finer = tmp_path / "finer.json"

    attn_diag.check_linear(fine, "gla", baseline=finer, save=True, **options)  # type: ignore[arg-type]
    grown = attn_diag.check_linear(gla, "gla", baseline=finer, **options)  # type: ignore[arg-type]
    assert {f.kind for f in grown.failures} == {"growth"}


def test_the_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(
        "def attention(q, k, v, scale=1.0):\n"
        "    q, k, v = (x.float().transpose(1, 2) for x in (q, k, v))\n"
        "    return (scale * (q @ k.mT).tril() @ v).transpose(1, 2).bfloat16()\n"
    )
    done = run("check", "mine:attention", "--operator", "linear_attn", "--cases", "normal", "--json", "found.json")
    assert done.code == 0, done.err + done.out
    assert json.loads(Path("found.json").read_text())["operator"] == "linear_attn"
    assert attn_diag.CheckReport.from_json(Path("found.json").read_text()).passed
    done = run("invariance", "mine:attention", "--operator", "linear_attn", "--only", "run-to-run,future-token")
    assert done.code == 0, done.err + done.out
    for refused in (("--causal", "top-left"), ("--scale", 2.0), ("--hunt",)):
        assert run("check", "mine:attention", "--operator", "linear_attn", *refused).code == 2
    assert run("invariance", "sdpa:math", "--recurrent", "mine:attention").code == 2


def test_arrangements_of_what_others_wrote() -> None:
    only = ["other-items", "future-token", "chunk-size", "prefill", "batch-size"]
    found = attn_diag.invariance_linear(foreign(DELTA), DELTA, only=only, shape=(2, 2, 70, 16))
    assert found.passed, found.headline
    assert {p.status for p in found.paths if p.arrangement == "chunk-size"} <= {"rounding", "same"}


@pytest.mark.parametrize(
    ("name", "arrangement"),
    [
        ("initial state of another", "other-items"),
        ("last state is that before the last chunk", "prefill"),
    ],
)
def test_arrangements_name_what_matters(name: str, arrangement: str) -> None:
    (fault,) = (f for f in DELTA_RULE if f.name == name)
    found = attn_diag.invariance_linear(
        planted(DELTA, fault), DELTA, only=["run-to-run", arrangement], shape=(2, 2, 70, 16)
    )
    assert found.failed == (arrangement,), found.report()


def test_another_function_and_later_tokens() -> None:
    def acausal(q: Tensor, k: Tensor, v: Tensor, g: Tensor, scale: float) -> Tensor:
        return gla(q, k - 1e-2 * k.mean(1, keepdim=True), v, g, scale, coarse=False)

    def other(q: Tensor, k: Tensor, v: Tensor, g: Tensor, scale: float) -> Tensor:
        return gla(q, k, v, g * 1.05, scale, coarse=False)

    shape = (1, 2, 64, 16)
    found = attn_diag.invariance_linear(acausal, "gla", only=["future-token"], shape=shape)
    assert found.failed == ("future-token",)
    found = attn_diag.invariance_linear(fine, "gla", recurrent=other, only=["recurrent"], shape=shape)
    assert found.failed == ("recurrent",)
    assert attn_diag.invariance_linear(fine, "gla", recurrent="recipe:16", only=["recurrent"], shape=shape).passed


def test_another_functions_coarser_rounding_is_told_from_wrong_mathematics() -> None:
    def scaled(q: Tensor, k: Tensor, v: Tensor, g: Tensor, scale: float) -> Tensor:
        return fine(q, k, v, g, scale * 1.01)

    shape, only = (1, 2, 64, 16), ["recurrent"]
    found = attn_diag.invariance_linear(fine, "gla", recurrent=gla, only=only, shape=shape)
    assert found.passed, found.headline
    found = attn_diag.invariance_linear(fine, "gla", recurrent=scaled, only=only, shape=shape)
    assert found.failed == ("recurrent",)
    assert "it is 1.01 times what it should be" in found.headline


def test_packed_sequences_with_states_of_their_own() -> None:
    def packed(*, resets: bool) -> Callable[..., tuple[Tensor, Tensor]]:
        def function(
            q: Tensor, k: Tensor, v: Tensor, g: Tensor, initial_state: Tensor, cu_seqlens: Tensor | None = None
        ) -> tuple[Tensor, Tensor]:
            whole = {"q": q, "k": k, "v": v, "g": g}
            if cu_seqlens is None:
                o, state = recurrent({**whole, "initial_state": initial_state}, scale=16**-0.5)
                return o.bfloat16(), state.float()
            outs, states = list[torch.Tensor](), list[torch.Tensor]()
            for n, (i, j) in enumerate(pairwise(cu_seqlens.tolist())):
                own = initial_state[n, None] if resets or n == 0 else states[-1]
                o, state = recurrent({**{m: x[:, i:j] for m, x in whole.items()}, "initial_state": own}, scale=16**-0.5)
                outs.append(o)
                states.append(state)
            return torch.cat(outs, 1).bfloat16(), torch.cat(states).float()

        return function

    options: dict[str, Any] = {"only": ["packed"], "shape": (2, 1, 40, 16)}
    assert attn_diag.invariance_linear(packed(resets=True), "gla", **options).passed
    assert attn_diag.invariance_linear(packed(resets=False), "gla", **options).failed == ("packed",)


def test_what_autograd_changes_is_not_put_down_to_decoding() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor, g: Tensor, initial_state: Tensor) -> tuple[Tensor, Tensor]:
        x = {"q": q, "k": k if torch.is_grad_enabled() else k * 1.05, "v": v, "g": g, "initial_state": initial_state}
        o, state = recurrent(x, scale=16**-0.5)
        return o.bfloat16(), state.float()

    found = attn_diag.invariance_linear(function, "gla", only=["prefill", "no-grad"], shape=(1, 1, 40, 16))
    assert found.failed[0] == "no-grad"
