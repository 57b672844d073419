"""``details``: the worst heads taken apart inside an inspection, and what cannot be."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import inspected, rounded_inputs, some, stored
from command_line import Run
from torch import Tensor

import attn_diag
from attn_diag.analyses.inspection.inspect import inspect_captures
from attn_diag.reference import AttentionHead, HeadReference, Masking, reference_head
from attn_diag.results.diagnosis import Diagnosis, HeadDiagnosis

pytestmark = pytest.mark.slow


def detailed(diagnosis: Diagnosis) -> list[tuple[str, HeadDiagnosis]]:
    return [(o.name, h) for _, o, h in diagnosis.ranked() if h.attribution or h.microscope or h.details_note]


def test_the_worst_heads_are_taken_apart_and_no_others() -> None:
    plain = inspected("pair_T256")
    assert not detailed(plain)
    found = inspected("pair_T256", details=3)
    assert [(name, h.head) for name, h in detailed(found)] == [(o.name, h.head) for _, o, h in plain.ranked()[:3]]
    assert [h.head for o in found.captures[0].observations for h in o.heads if h.attribution and h.head is None] == []
    stripped = json.loads(found.to_json())
    for observation in stripped["captures"][0]["observations"]:
        for head in observation["heads"]:
            head["attribution"] = head["microscope"] = None
    assert stripped == json.loads(plain.to_json()), "nothing else changes"


def test_they_are_what_the_commands_say() -> None:
    capture = stored("failing_step500_L2H7")
    ((_, head),) = detailed(inspected("failing_step500_L2H7", details=1))
    attribution = attn_diag.attribute(capture, device="cpu").heads[0]
    assert head.attribution == attribution
    assert attribution.guilty["dq"] == "scores"
    found = some(head.microscope)
    asked = attn_diag.microscope(capture, row=found.row, feature=found.feature, device="cpu")
    assert replace(found, chosen="as asked") == asked


def test_a_head_that_was_measured_is_not_streamed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    passes: list[AttentionHead] = []

    def counted(head: AttentionHead, *arguments: Any, **options: Any) -> HeadReference:
        passes.append(head)
        return reference_head(head, *arguments, **options)

    monkeypatch.setattr("attn_diag.head.truth.reference_head", counted)
    capture = stored("gpt2_step637_L2H6")
    kept = detailed(inspect_captures([capture], device="cpu", details=1))
    assert len(passes) == 1
    monkeypatch.setattr("attn_diag.analyses.inspection.inspect._KEPT_BYTES", 0)
    assert detailed(inspect_captures([capture], device="cpu", details=1)) == kept
    assert len(passes) == 3, "beyond the memory granted it is"


def truth_of_head(capture: attn_diag.Capture, head: int) -> tuple[Tensor, Tensor, Tensor]:
    """O, dO and the true O of one head in float64."""
    q, k, v, do, o = (some(capture.read(name, 0, head)).double() for name in ("q", "k", "v", "do", "o"))
    return o, do, reference_head(AttentionHead(q, k, v, None, capture.scale, Masking(capture.metadata.causal))).out


def most_of_delta(capture: attn_diag.Capture, head: int, *, weight_by_do: bool = True) -> tuple[int, int]:
    o, do, truth = truth_of_head(capture, head)
    parts = (do if weight_by_do else 1.0) * (o - truth)
    row = int(parts.sum(1).abs().argmax())
    return row, int(parts[row].abs().argmax())


@pytest.mark.parametrize("name", ["failing_step500_L2H7", "gpt2_step637_L2H6", "gpt2_step731_L2H4"])
def test_the_microscope_looks_at_what_adds_most_to_the_worst_rows_delta(name: str) -> None:
    capture = stored(name)
    ((_, head),) = detailed(inspected(name, details=1))
    found = some(head.microscope)
    assert (found.row, found.feature) == most_of_delta(capture, 0)
    assert (found.row, found.feature) != most_of_delta(capture, 0, weight_by_do=False), "dO matters here"
    assert "delta's error" in found.chosen
    assert found.row == head.top_rows[0].row


def test_without_do_it_chooses_as_the_command_does() -> None:
    capture = stored("gpt2_step637_L2H6")
    without = replace(capture, tensors={n: t for n, t in capture.tensors.items() if n in ("q", "k", "v", "o")})
    ((_, head),) = detailed(inspect_captures([without], device="cpu", details=1))
    assert head.microscope == attn_diag.microscope(without, device="cpu")
    assert set(some(head.attribution).totals) == {"o"}


def small(batch: int = 1, heads: int = 2, length: int = 40, **change: Any) -> dict[str, Any]:
    return {**rounded_inputs(heads, length, batch=batch, kv_heads=1, seed=5), "causal": True, **change}


def test_the_sequence_of_the_worst_row_is_looked_at() -> None:
    given = small(batch=3)
    given["o"][2, 1, 7] *= 1.0625
    ((_, head),) = detailed(attn_diag.inspect(**given, details=1, device="cpu"))
    attribution, microscope = some(head.attribution), some(head.microscope)
    assert (attribution.batch, microscope.batch, microscope.row) == (2, 2, 7)
    assert (head.head, attribution.head, microscope.head) == (1, 1, 1)


def test_heads_keep_the_models_numbers() -> None:
    capture = attn_diag.Capture.from_tensors(rounded_inputs(), causal="top-left", head_offset=6, layer=3)
    found = detailed(inspect_captures([capture], details=2, device="cpu"))
    assert sorted(h.head for _, h in found if h.head is not None) == [6, 7]
    for _, head in found:
        assert {some(head.attribution).head, some(head.microscope).head} == {head.head}


def test_a_recipe_that_was_run_is_explained_by_itself() -> None:
    """Not by the recipe that a captured O beside it comes from."""
    found = attn_diag.inspect(**small(heads=1), recipes=["qiu2025"], details=2, device="cpu")
    by_name = dict(detailed(found))
    assert set(by_name) == {"observed", "qiu2025 (emulated)"}
    head = by_name["qiu2025 (emulated)"]
    attribution, microscope = some(head.attribution), some(head.microscope)
    assert attribution.recipe.startswith("qiu2025, as asked for")
    assert attribution.totals["o"].captured is None
    assert microscope.observation is None
    assert microscope.bit_equal


def test_a_known_recipe_is_not_recognised_again(device: str) -> None:
    given = {n: t.to(device) if isinstance(t, torch.Tensor) else t for n, t in small(heads=1, length=32).items()}
    o, dump = attn_diag.attention(given["q"], given["k"], given["v"], causal="top-left", instrument="rows")
    assert dump is not None
    del given["o"], given["causal"]
    ((_, head),) = detailed(
        attn_diag.inspect(given["q"], given["k"], given["v"], do=given["do"], dump=dump, details=1, device="cpu")
    )
    attribution = some(head.attribution)
    assert attribution.recipe.endswith("as asked for")
    assert json.loads(attribution.recipe_json) == json.loads(dump.recipe_json)
    assert o.shape == given["q"].shape


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no O was captured": (
        {"o": None, "dq": torch.zeros(1, 2, 40, 16).bfloat16()}, "neither attribution nor microscope: .*O"
    ),
    "metadata that contradict O": ({"scale": 3.0}, "neither attribution nor microscope: .*scale"),
    "a recipe that rounds at random": (
        {"o": None, "recipes": [replace(attn_diag.preset("fa2", "bf16", 16), name="random", out="bf16:stochastic")]},
        "no microscope: .*random",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_taken_apart_says_why(case: str) -> None:
    change, words = REFUSED[case]
    found = attn_diag.inspect(**small(**change), details=1, device="cpu")
    ((_, head),) = detailed(found)
    assert re.search(words, some(head.details_note)), head.details_note
    assert head.microscope is None
    assert Diagnosis.from_json(found.to_json()) == found


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
def test_no_dtype_stops_an_inspection(dtype: torch.dtype) -> None:
    """Recipes cover BF16 and FP16."""
    given: dict[str, Any] = {n: t.to(dtype) if isinstance(t, Tensor) else t for n, t in small().items()}
    ((_, head),) = detailed(attn_diag.inspect(**given, details=1, device="cpu"))
    assert (head.attribution is None) == (head.microscope is None) == (head.details_note is not None)
    assert (head.attribution is not None) == (dtype is torch.float16)


@pytest.mark.parametrize("length", [1, 2])
def test_short_sequences(length: int) -> None:
    detailed(attn_diag.inspect(**small(length=length), details=2, device="cpu"))


def test_head_without_a_usable_row() -> None:
    given = small(heads=1)
    given["q"] = torch.full_like(given["q"], torch.nan)
    ((_, head),) = detailed(attn_diag.inspect(**given, details=1, device="cpu"))
    assert head.attribution is None
    assert head.details_note is not None


def test_masks() -> None:
    mask = torch.zeros(40, 40)
    mask[:, 3] = -torch.inf
    given = small(heads=1, mask=mask)
    scores = given["q"].double() @ given["k"].double().mT / 4 + mask
    scores = scores.masked_fill(torch.ones(40, 40).triu(1).bool(), -torch.inf)
    given["o"] = (scores.softmax(-1) @ given["v"].double()).bfloat16()
    ((_, head),) = detailed(attn_diag.inspect(**given, details=1, device="cpu"))
    assert head.microscope is not None
    assert head.attribution is not None


def test_a_number_of_details_below_zero_is_refused() -> None:
    with pytest.raises(attn_diag.InputError, match=r"details must be .* got -1"):
        attn_diag.inspect(**small(), details=-1)


def test_progress_counts_the_heads_taken_apart_too() -> None:
    seen: list[tuple[int, int]] = []
    capture = attn_diag.Capture.from_tensors(rounded_inputs(), causal="top-left")
    inspect_captures([capture], details=5, device="cpu", progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (4, 4)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


@pytest.mark.parametrize(
    ("options", "expected"), [([], 0), (["--html"], 1), (["--html", "--details", "0"], 0), (["--details", "2"], 2)]
)
def test_the_command_line(options: list[str], expected: int, tmp_path: Path, run: Run) -> None:
    capture = attn_diag.Capture.from_tensors(rounded_inputs(), causal="top-left").save(tmp_path / "capture.safetensors")
    said = [part if part != "--html" else f"--html={tmp_path / 'page.html'}" for part in options]
    done = run("inspect", capture, "--json", "-", "--device", "cpu", *said)
    assert done.code == 0, done.err
    assert len(detailed(Diagnosis.from_json(done.out))) == expected
