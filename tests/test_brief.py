"""What a prompt and a notebook show of diagnoses, findings and captures: 25 lines of 80 columns at most."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from builders import inspected, rounded_inputs, some, with_heads
from prompts import too_much

import attn_diag
from attn_diag import Capture, Diagnosis, Finding
from attn_diag.analyses.inspection.inspect import inspect_captures
from attn_diag.captures.capture import Captures
from attn_diag.reports import brief
from attn_diag.reports.brief import wrapped
from attn_diag.results.diagnosis import GradientError, HeadDiagnosis, Verdict
from attn_diag.watching.live.call import CallPlace

pytestmark = pytest.mark.slow

LONG = "a_very_long_name_of_a_kernel_or_a_file_that_goes_on_and_on_" * 5


@pytest.fixture(scope="module")
def small() -> Diagnosis:
    return inspect_captures([Capture.from_tensors(rounded_inputs(), causal="top-left")])


def many(found: Diagnosis, heads: int = 1, captures: int = 1, name: str = "", source: str = "x") -> Diagnosis:
    """The first head of a diagnosis, many times over."""
    (observation,) = found.captures[0].observations
    one = replace(observation.heads[0], layer=11)
    single = tuple(replace(one, head=i) for i in range(heads))
    observation = replace(observation, name=name or observation.name, heads=(*single, observation.pooled))
    capture = replace(found.captures[0], observations=(observation,))
    return replace(found, captures=tuple(replace(capture, source=f"{source}{i}") for i in range(captures)))


def with_long_summary(found: Diagnosis, **changed: Any) -> Diagnosis:
    summary = replace(found.summary, unreadable=(LONG,) * 50, warnings=(LONG,) * 50, **changed)
    return replace(found, summary=summary)


def with_long_reasons(found: Diagnosis) -> Diagnosis:
    long = Verdict(("lossy",), "none", (LONG * 9,), (LONG * 9,))
    (capture,) = with_heads(found, lambda h: replace(h, verdict=long)).captures
    unsure = replace(capture.assumptions, ok=False, message=LONG * 3)
    return replace(found, captures=(replace(capture, assumptions=unsure),))


CASES: dict[str, Callable[[Diagnosis], Diagnosis]] = {
    "as it is": lambda d: d,
    "144 heads": lambda d: many(d, heads=144),
    "300 captures": lambda d: many(d, captures=300),
    "long names": lambda d: many(d, heads=9, captures=9, name=LONG, source=f"/{LONG}/{LONG}"),
    "a name of several lines": lambda d: many(d, heads=9, name="a\nb\n" * 20, source="\x1b[31m\n" * 9),
    "wide characters": lambda d: many(d, heads=9, captures=3, name="注意力" * 30, source="测" * 90),
    "unreadable files": lambda d: with_long_summary(many(d, heads=99)),
    "long reasons": lambda d: with_long_reasons(many(d, heads=50)),
    "nothing": lambda d: replace(d, captures=()),
    "everything at once": lambda d: with_long_summary(with_long_reasons(many(d, heads=50)), sentence=LONG * 9),
    "a long sentence": lambda d: replace(d, summary=replace(d.summary, sentence=LONG * 9)),
}


@pytest.mark.parametrize("case", CASES)
def test_a_diagnosis_takes_at_most_25_lines(small: Diagnosis, case: str) -> None:
    diagnosis = CASES[case](small)
    assert not too_much(repr(diagnosis))
    assert "report()" in repr(diagnosis)
    place = CallPlace(10**6, 11, LONG, 3, True)
    finding = Finding((LONG, LONG), place, "after its backward", LONG, None, diagnosis)
    assert not too_much(str(finding)), str(finding)
    assert not too_much(str(replace(finding, diagnosis=None, refused=LONG * 9)))
    assert "\n" not in repr(finding)


@pytest.mark.parametrize("case", ["144 heads", "long names"])
def test_the_limit_can_be_broken(small: Diagnosis, case: str) -> None:
    assert too_much(CASES[case](small).report(80), width=79)
    assert too_much("x" * 81)


def test_an_error_that_is_nan_comes_first(small: Diagnosis) -> None:
    def with_errors(*errors: float) -> list[int | None]:
        def with_error(h: HeadDiagnosis) -> HeadDiagnosis:
            error = GradientError(relative_error=errors[some(h.head)])
            return replace(h, propagation=replace(h.propagation, dq=error))

        found = with_heads(many(small, heads=len(errors)), with_error)
        return [head.head for _, _, head in found.ranked()]

    assert with_errors(0.1, 0.5, float("nan"), 0.3, 0.4) == [2, 1, 4, 3, 0]
    assert with_errors(0.1, 0.5, 0.0, 0.3, 0.4) == [1, 4, 3, 0, 2]


def test_wrapping_keeps_the_words() -> None:
    text = "one two three " * 12
    assert " ".join(line.strip() for line in wrapped(text, 9)) == text.strip()
    assert wrapped(text, 2)[-1].endswith("…")


def test_the_worst_first_and_what_to_type_next() -> None:
    found = inspected("kernels_pair_T512")
    lines = repr(found).splitlines()
    rows = lines[next(i for i, line in enumerate(lines) if line.startswith("head ")) + 1 :]
    assert "paper" in rows[0]
    assert "lossy" in rows[0]
    assert "lossy, biased" in repr(found)
    assert "explain(found, 0" in repr(found)
    assert "observation='paper'" in repr(found)
    heads = [entry[2] for entry in found.ranked()]
    assert [h.verdict.labels[0] for h in heads if h.verdict] == ["lossy"] * 4 + ["ill_conditioned"] * 4
    reversed_first = replace(found, captures=tuple(reversed(found.captures)))
    assert brief(reversed_first) == brief(found), "the order of the file does not matter"


def captures_of(count: int, source: str = "memory") -> Captures:
    extra = {"module": "model.layers.0.self_attn", "call": "2"}
    one = Capture.from_tensors(rounded_inputs(), causal="top-left", layer=0, step=7, extra=extra)
    return Captures([replace(one, source=source)] * count)


@pytest.mark.parametrize("count", [0, 1, 2, 20, 21, 500])
def test_a_list_of_captures(count: int) -> None:
    shown = repr(captures_of(count, source=LONG))
    assert not too_much(shown)
    assert str(count) in shown
    if count:
        one = repr(captures_of(1)[0])
        assert "step 7, layer 0, model.layers.0.self_attn, call 2, q BHTD [1, 2, 24, 16] bfloat16" in one
        assert "step 7, layer 0, model.layers.0.self_attn" in shown
    assert too_much(list.__repr__(captures_of(500)))


TAG = "<script>alert(1)</script>"


def test_notebooks_escape_names() -> None:
    given = rounded_inputs()
    given[f"{TAG}.o"] = given.pop("o")
    capture = Capture.from_tensors(given, causal="top-left", step=1, kernel=TAG, extra={"module": TAG})
    capture = replace(capture, source=f"{TAG}.safetensors")
    diagnosis = inspect_captures([capture])
    finding = Finding((TAG,), CallPlace(0, 0, TAG, 0, True), "after its forward", TAG, capture, diagnosis)
    for shown in (diagnosis, Captures([capture]), finding, attn_diag.explain(diagnosis)):
        page = shown._repr_html_()
        assert "<script" not in page
        assert "&lt;script&gt;" in page
    assert "<script" in TAG, "what is looked for"


def test_figures_of_fp32_heads_stand_apart() -> None:
    torch.manual_seed(0)
    q, k, v, do = (torch.randn(1, 2, 64, 32, requires_grad=True) for _ in range(4))
    o = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    dq, dk, dv = torch.autograd.grad(o, (q, k, v), do)
    rows = [
        line
        for line in repr(attn_diag.inspect(q, k, v, o=o, do=do, dq=dq, dk=dk, dv=dv)).split("\n")
        if "clean" in line
    ]
    # Head, verdict, noise factor, conditioning, dQ with its sign of percent, dW_Q.
    assert [len(row.split()) for row in rows] == [7, 7]
