"""``explain``: the words say what the diagnosis holds, and nothing else."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from builders import SHARED, inspected, rounded_inputs, with_heads

import attn_diag
from attn_diag import Diagnosis, Explanation, InputError, explain
from attn_diag.analyses.explain import paragraphs
from attn_diag.results.diagnosis import Certificate, HeadDiagnosis, Verdict


def flat(explanation: Explanation) -> str:
    return " ".join(str(explanation).split())


# What must be said of each: computed independently (the table of the captures, float64), or counted.
FACTS = {
    ("gpt2_step731_L2H4", 4, "observed"): (
        "layer 2 head 4: ill_conditioned", "at step 731", "O and dQ were compared",
        "No: O is as good as a well-rounded kernel",
        "No bias,", "one of 5.5e-09 would have been found", "No row has a repeated maximum",
        "delta's term in dQ over dQ itself, is 91:",
        "dQ is 8.04 % off", "the error of delta alone would put it 7.32 % off", "dW_Q is 10.4 % off",
        "would put it 11.5 % off", "delta 87.8 %, the cast of dS 12.2 %", "no more than with random signs",
        "16 rows of O equal V", "the error of the LSE (not captured)", "attribute", "what-if", "--head 4",
    ),
    ("failing_step500_L2H7", 7, "observed"): (
        "layer 2 head 7: lossy", "at step 500", "Yes: O has 6.83 ", "No bias,", "62 of 1023 rows",
        "up to 3 times", "a count does not show that it did", "dQ is 14.8 % off", "would put it 14.3 % off",
        "dW_Q is 7.17 % off", "would put it 6.92 % off", "942 (30 %)", "that of recipe bf16-forward is used",
    ),
    ("kernels_pair_T512", 0, "paper"): (
        "paper, head 0: lossy", "The yardstick is a well-rounded kernel", "Yes: ", "126 of 511 rows",
        "dQ over dQ itself, is 248:",
        "dQ is 92.9 % off", "so this backward rounds elsewhere too", "dW_Q: not computed, x or w_q was not captured",
        "--observation paper --head 0",
    ),
    ("kernels_pair_T512", 0, "flash"): (
        "flash, head 0: ill_conditioned", "No: O is as good as a well-rounded kernel", "Yet dQ is 5.61 % off",
        "126 of 511 rows",
        "232 rows of O equal V", "so dQ is a small difference", "Parts of its squared error: delta 99.4 %",
    ),
    ("kernels_pair_T512", 1, "stable"): (
        "stable, head 1: lossy, biased", "Yes. Bias is", "delta -0.000427 (-1.7 noise floors), adjusted p 0.00042",
        "for the query rows of this sequence only",
    ),
}  # fmt: skip


def missing(text: str, facts: tuple[str, ...]) -> list[str]:
    return [fact for fact in facts if fact.lower() not in text.lower()]


@pytest.mark.parametrize(("capture", "head", "observation"), FACTS, ids=lambda x: str(x))
def test_the_facts_are_told(capture: str, head: int, observation: str) -> None:
    found = explain(inspected(capture), head, observation=observation)
    assert not missing(flat(found), FACTS[capture, head, observation])
    assert (found.head, found.observation) == (head, observation)


def swapped(head: HeadDiagnosis) -> HeadDiagnosis:
    p = head.propagation
    return replace(head, propagation=replace(p, dq=p.dw_q, dw_q=p.dq))


MUTANTS: dict[str, Callable[[HeadDiagnosis], HeadDiagnosis]] = {
    "factor": lambda h: replace(h, quantities=tuple(replace(q, answer="lossy") for q in h.quantities)),
    "conditioning": lambda h: replace(h, conditioning=9.1),
    "dQ and dW_Q swapped": swapped,
    "repeated maxima": lambda h: replace(
        h, row_maxima=replace(h.row_maxima, exact=replace(h.row_maxima.exact, rows=5))
    ),
    "no swamped rows": lambda h: replace(h, swamped=None),
    "no gradients": lambda h: replace(h, propagation=replace(h.propagation, dq=None, dw_q=None)),
    "biased": lambda h: replace(
        h,
        bias=replace(
            h.bias,
            delta_excess=replace(h.bias.delta_excess, p_adjusted=1e-9, well_rounded_mean=0.0),  # type: ignore[type-var]
        ),
    ),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_another_diagnosis_is_told_otherwise(mutant: str) -> None:
    key = ("gpt2_step731_L2H4", 4, "observed")
    assert missing(flat(explain(with_heads(inspected(key[0]), MUTANTS[mutant]))), FACTS[key])


def numbers_of(value: Any) -> Iterator[float]:
    """Every number in a dataclass, however deep; those in its texts too."""
    if isinstance(value, bool) or value is None:
        return
    if isinstance(value, int | float):
        yield float(value)
    elif isinstance(value, str):
        yield from (float(n) for n in re.findall(r"\d+(?:\.\d+)?", value))
    elif dataclasses.is_dataclass(value):
        for item in dataclasses.fields(value):
            if item.name not in ("drift", "figures"):  # curves: they hold nearly any number
                yield from numbers_of(getattr(value, item.name))
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from numbers_of(name)
            yield from numbers_of(item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from numbers_of(item)


# Of the method: one rounding gives "about 1", 2 passes, a level, float64, 95 %, "1 capture", 0.1 % of delta.
CONSTANTS = (0.0, 0.1, 1.0, 2.0, 64.0, 95.0)


def invented(explanation: Explanation, source: Diagnosis) -> list[str]:
    """Numbers in the words that are none of the diagnosis's, rounded as told."""
    capture, observation, head = next(
        e for e in source.ranked() if (e[1].name, e[2].head) == (explanation.observation, explanation.head)
    )
    known = [*numbers_of(head), *numbers_of(capture.metadata), *numbers_of(capture.shape), *numbers_of(capture.source)]
    known += [*numbers_of(observation.name), *numbers_of(observation.recipe), source.family.level, *CONSTANTS]
    known += [float(len(observation.outputs)), float(len(head.top_rows)), sum(r.share for r in head.top_rows), 3.0, 4.0]
    known += [0.1 * (head.conditioning or 0.0)]
    texts = " ".join(p.text for p in explanation.paragraphs)
    found = re.findall(r"(?<![A-Za-z_0-9.])[+-]?\d+(?:\.\d+)?(?:e[+-]\d+)?(?: ?%)?", texts)
    return [token for token in found if not any(tells(token, value) for value in known)]


def tells(token: str, value: float) -> bool:
    told = float(token.rstrip(" %"))
    digits = max(1, len(re.sub(r"e.*|[^0-9]|^0+", "", token.lower().replace(".", "").lstrip("+-0"))))
    options = [value, 100 * value] if "%" in token else [value, abs(value)]
    return any(math.isclose(told, option, rel_tol=0.5001 * 10 ** (1 - digits), abs_tol=1e-12) for option in options)


@pytest.mark.parametrize("name", SHARED)
def test_no_number_is_invented(name: str) -> None:
    diagnosis = inspected(name)
    for _, made, head in diagnosis.entries():
        found = explain(diagnosis, head.head, observation=made.name)
        assert not invented(found, diagnosis), found


@pytest.mark.parametrize("claim", ["dQ is 17.3 % off.", "A mean of -4.4e-05.", "777 rows."])
def test_the_search_for_invented_numbers_can_fail(claim: str) -> None:
    diagnosis = inspected("gpt2_step731_L2H4")
    found = explain(diagnosis)
    last = replace(found.paragraphs[-1], text=f"{found.paragraphs[-1].text} {claim}")
    assert invented(replace(found, paragraphs=(*found.paragraphs[:-1], last)), diagnosis)


def contradictions(found: Explanation) -> list[str]:
    """Answers that the labels do not give."""
    texts, labels = {p.title: p.text for p in found.paragraphs}, found.labels or ()
    wrong = []
    if ("Yes. Bias" in texts["Is it biased?"]) != ("biased" in labels):
        wrong.append("bias")
    if "No bias" in texts["Is it biased?"] and {"biased", "undecided"} & set(labels):
        wrong.append("no bias")
    size = texts["Is the error larger than it must be?"]
    if ("Yes: " in size) != bool({"lossy", "wrong", "nonfinite"} & set(labels)):
        wrong.append("size")
    if ("Yet dQ" in size) != ("ill_conditioned" in labels):
        wrong.append("conditioning")
    return wrong


@pytest.mark.parametrize("name", SHARED)
def test_words_and_labels_agree(name: str) -> None:
    diagnosis = inspected(name)
    for _, made, head in diagnosis.entries():
        assert not contradictions(explain(diagnosis, head.head, observation=made.name)), (made.name, head.head)


@pytest.mark.parametrize("labels", [("clean",), ("biased",), ("lossy",)], ids=str)
def test_the_check_of_words_and_labels_can_fail(labels: Any) -> None:
    assert contradictions(replace(explain(inspected("gpt2_step731_L2H4")), labels=labels))


# (what is left out, what must then not be claimed, what must be said)
SILENT: dict[str, tuple[set[str], tuple[str, ...], str]] = {
    "do": ({"do"}, ("dQ is ", "dW_Q is", "dQ would be off", "The mean error of delta"),
           "Nothing can be said of dQ and dW_Q: that needs dO"),
    "dq": (set(), ("dQ is ", "Parts of its squared error"), "The kernel's dQ was not captured"),
    "x": (set(), ("dW_Q is", "coherence"), "dW_Q: not computed, x or w_q was not captured"),
}  # fmt: skip


def claims(text: str, forbidden: tuple[str, ...]) -> list[str]:
    return [claim for claim in forbidden if claim in text]


@pytest.mark.parametrize("left_out", SILENT)
def test_nothing_is_claimed_of_what_is_missing(left_out: str) -> None:
    without, forbidden, said = SILENT[left_out]
    given = {name: t for name, t in rounded_inputs(rows=64).items() if name not in without}
    text = flat(explain(attn_diag.inspect(**given, causal=True), 1))  # type: ignore[arg-type]
    assert not claims(text, forbidden)
    assert said in text
    # The full capture does claim it, so the search can fail.
    assert claims(flat(explain(inspected("gpt2_step731_L2H4"))), forbidden)


def test_no_verdict_no_numbers() -> None:
    given = rounded_inputs(rows=64)
    found = explain(attn_diag.inspect(given["q"], given["k"], given["v"], o=given["o"], causal=False))
    assert found.labels is None
    assert [p.title for p in found.paragraphs] == ["What was measured", "No verdict"]
    assert "causal=top-left fits" in flat(found)


def test_nan_of_the_kernel_is_told_first() -> None:
    given = rounded_inputs(rows=64)
    given["o"][0, 1, 7] = math.inf
    text = flat(explain(attn_diag.inspect(**given, causal=True), 1))  # type: ignore[arg-type]
    assert "Yes: O holds NaN or Inf: " in text
    assert "Rows left out: 1 with NaN or Inf" in text


def test_a_violated_bound_ends_it() -> None:
    certificate = Certificate(4, 200, {"o": 2.5}, False)
    verdict = Verdict(("undecided",), "none", ("THE REFERENCE IS WRONG HERE",), ("Report it.",))
    broken = with_heads(inspected("gpt2_step731_L2H4"), lambda h: replace(h, certificate=certificate, verdict=verdict))
    found = explain(broken)
    assert found.paragraphs[-1].text == "THE REFERENCE IS WRONG HERE Report it."


def test_the_same_words_every_time_and_json() -> None:
    one = explain(inspected("failing_step500_L2H7"))
    again = explain(Diagnosis.from_json(inspected("failing_step500_L2H7").to_json()))
    assert str(one) == str(again) == repr(one)
    assert Explanation.from_json(one.to_json()) == one


def test_the_worst_head_by_default() -> None:
    found = explain(inspected("kernels_pair_T512"))
    assert (found.observation, found.head, found.others) == ("paper", 0, 7), "dQ 93 % off"
    assert explain(inspected("kernels_pair_T512"), 0).observation == "paper"
    assert "worst of 4 entries" in flat(explain(inspected("kernels_pair_T512"), 0))


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"head": 99}, "holds no head 99; it holds head 0 (flash), head 0 (flex)"),
        ({"head": 0, "observation": "flsh"}, "observation 'flsh'"),
        ({"layer": 3}, "layer 3"),
    ],
    ids=str,
)
def test_a_head_that_is_not_there(asked: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError) as error:
        explain(inspected("kernels_pair_T512"), **asked)
    assert said in str(error.value)


def test_lines_and_html() -> None:
    text = str(explain(inspected("gpt2_step731_L2H4")))
    assert max(map(len, text.splitlines())) <= 80
    assert text == text.rstrip()
    assert "<b>Is it biased?</b>" in explain(inspected("gpt2_step731_L2H4"))._repr_html_()


def test_every_paragraph_ends_a_sentence() -> None:
    for name in ("gpt2_step731_L2H4", "kernels_pair_T512", "gqa_T200"):
        diagnosis = inspected(name)
        for capture, made, head in diagnosis.entries():
            for paragraph in paragraphs(diagnosis, capture, made, head):
                assert re.fullmatch(r"(?s).*[.)]", paragraph.text), paragraph
                assert ".." not in paragraph.text
                assert "None" not in paragraph.text
                assert "nan" not in paragraph.text.split()
