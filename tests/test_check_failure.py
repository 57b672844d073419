"""The failure text of a check, its limits, and the capture it points to."""

from __future__ import annotations

import inspect
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from builders import some
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attn_diag import check, load
from attn_diag.errors import InputError
from attn_diag.reports.ci import failure_lines, gravest
from attn_diag.results.check import KINDS, CheckedCase, CheckReport, Failure
from attn_diag.results.diagnosis import Tool
from attn_diag.testing.case_inputs import fingerprint
from attn_diag.testing.regression.cases import capture_of_case
from attn_diag_pytest.fixture import CheckOptions

MESSAGE = "pairs: O is biased beyond correct rounding by -0.5 ulp; O is off most in head 0, row 22: 1 ulp"


def report(*failures: Failure, **changes: object) -> CheckReport:
    made = CheckReport(
        tool=Tool("1", "3", "2", None, "cpu", "cpu"),
        source="attention",
        backend="cpu",
        key="attention | cpu | torch 2",
        level=0.01,
        seed=0,
        exact=False,
        baseline="kept.json",
        baseline_key="attention | cpu | torch 2",
        cases=(CheckedCase("pairs", (16, 1, 192, 64), "bf16"), CheckedCase("normal", (16, 1, 192, 64), "bf16")),
        failures=failures,
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def failure(kind: str = "bias", case: str = "pairs", quantity: str = "o", **more: str) -> Failure:
    return Failure(kind, case, quantity, more.pop("message", MESSAGE), **more)  # type: ignore[arg-type]


def test_one_failure_in_full() -> None:
    found = failure(suspect="the last cast of O truncates (100 % of its bits)", look_closer="attn-diag probe x")
    assert failure_lines(report(found), accept="pytest --attn-diag-update test_a.py::test_b") == [
        "attn-diag: attention fails 1 of 2 cases (cpu, level 0.01)",
        "suspect     the last cast of O truncates (100 % of its bits)",
        "1. [bias] pairs: O is biased beyond correct rounding by -0.5 ulp; O is off most",
        "   in head 0, row 22: 1 ulp",
        "compared    with kept.json",
        "look closer attn-diag probe x",
        "accept      pytest --attn-diag-update test_a.py::test_b",
    ]


def test_the_gravest_comes_first_and_cases_are_joined() -> None:
    found = report(
        failure("bits"),
        failure("growth", "normal"),
        failure("bias", "normal", suspect="a (1 %)"),
        failure("bias", "ramp", suspect="a (2 %)"),
        failure("fit", "ramp", message="ramp: NaN"),
    )
    lines = failure_lines(found)
    assert [line[:9] for line in lines if line[:1].isdigit()] == ["1. [fit] ", "2. [bias]", "3. [growt", "4. [bits]"]
    assert "   likewise in ramp" in lines
    assert [line for line in lines if line.startswith("suspect")] == ["suspect     a (1 %)"]
    assert gravest(found).case == "ramp"


def test_what_it_was_compared_with() -> None:
    def compared(**changes: object) -> str:
        return next(x for x in failure_lines(report(failure(), **changes), width=120) if x.startswith("compared"))

    assert compared() == "compared    with kept.json"
    assert compared(baseline_key="x | gpu").endswith("kept.json, entry x | gpu")
    assert compared(baseline=None, baseline_key=None).endswith(
        "with published recipes on the same inputs (no baseline)"
    )


@given(
    st.lists(
        st.builds(
            Failure,
            st.sampled_from(KINDS),
            st.text(max_size=30),
            st.sampled_from(["o", "delta", "dq", "dk", "dv", "lse"]),
            st.text(max_size=600),
            st.none() | st.text(max_size=300),
            st.none() | st.text(max_size=100),
        ),
        min_size=1,
        max_size=60,
    ),
    st.text(max_size=300),
)
@settings(deadline=None)
def test_whatever_fails_it_is_short_and_harmless(failures: list[Failure], source: str) -> None:
    lines = failure_lines(report(*failures, source=source), accept="pytest x")
    assert len(lines) <= 25
    assert all(line.isprintable() for line in lines)
    commands = ("look closer", "accept")
    # Long words stay whole after a label only.
    assert all(len(line) <= 80 for line in lines if not line.startswith((*commands, "suspect", " " * 12)))
    assert lines[-1] == "accept      pytest x"


def test_many_failures_would_not_fit_without_the_limit() -> None:
    many = [
        failure(kind, quantity=q, message=MESSAGE * 4, suspect=f"{kind} " * 60, look_closer="attn-diag probe x")
        for kind in KINDS
        for q in ("o", "delta", "dq")
    ]
    found = report(*many, source="x " * 200)
    assert len(failure_lines(found, accept="pytest x", limit=100)) > 25
    lines = failure_lines(found, accept="pytest x")
    assert len(lines) <= 25
    assert "... and 24 more failures: nonfinite of o," in "\n".join(lines)


def test_the_fixture_takes_the_options_of_check() -> None:
    own = {"target", "baseline", "save", "update", "progress", "folder"}
    assert set(CheckOptions.__annotations__) == set(inspect.signature(check).parameters) - own


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def test_the_capture_is_the_case_bit_for_bit(tmp_path: Path) -> None:
    (case,) = check(attention, causal=True, cases=["pairs"], head_dim=16, seed=3, device="cpu").cases
    capture = some(capture_of_case(attention, "pairs", causal=True, head_dim=16, seed=3, device="cpu"))
    capture.save(tmp_path / "pairs.safetensors")
    stored = load(tmp_path / "pairs.safetensors")
    assert fingerprint({name: stored.tensors[name][...] for name in case.outputs}) == case.fingerprint
    assert (stored.metadata.causal, stored.metadata.scale, stored.metadata.kernel) == ("top-left", 0.25, "attention")
    other = some(capture_of_case(attention, "pairs", causal=True, head_dim=16, seed=4, device="cpu"))
    assert fingerprint({name: other.tensors[name][...] for name in case.outputs}) != case.fingerprint


def test_a_kernel_that_raises_leaves_no_capture() -> None:
    def raises(*_: Tensor) -> Tensor:
        raise RuntimeError("no such kernel image")

    assert capture_of_case(raises, "pairs", head_dim=16, device="cpu") is None
    assert capture_of_case(attention, "pairs", head_dim=16, device="cpu") is not None


def test_a_kernel_whose_package_is_missing_has_no_verdict() -> None:
    """'FAIL (certain)' was said of a kernel that nothing had run."""

    def uninstalled(*_: Tensor) -> Tensor:
        raise ModuleNotFoundError("No module named 'flash_attn'")

    with pytest.raises(InputError, match="cannot be run here: No module named 'flash_attn'; install what it imports"):
        check(uninstalled, device="cpu")
