"""A head is named by the model's number everywhere, also where a capture begins at another head than 0."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import some
from command_line import Run

import attn_diag
from attn_diag.kernels import emulate_head, preset
from attn_diag.reference import AttentionHead, Masking

FIRST = 6
NONE_OF_1 = "no head 1; the capture has 6 to 7 (the model's numbers: its head_offset is 6)"


@pytest.fixture(scope="module")
def plain() -> attn_diag.Capture:
    """Two heads that differ, and what fa2 makes of them; the capture does not say which heads of the model they are."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, do = (torch.randn(1, 2, 64, 16, generator=generator).bfloat16() for _ in range(4))
    # Two equal keys: head 1 has more repeated maxima.
    k[:, 1, 1] = k[:, 1, 0]
    masking = Masking("top-left")
    wide = [t[0].double() for t in (q, k, v)]
    heads = [AttentionHead(wide[0][h], wide[1][h], wide[2][h], None, 0.25, masking) for h in range(2)]
    o = torch.stack([emulate_head(preset("fa2"), head).o for head in heads])[None]
    return attn_diag.Capture.from_tensors({"q": q, "k": k, "v": v, "o": o, "do": do}, causal="top-left")


@pytest.fixture(scope="module")
def shifted(plain: attn_diag.Capture) -> attn_diag.Capture:
    """The same, as heads 6 and 7 of the model."""
    return replace(plain, metadata=replace(plain.metadata, head_offset=FIRST))


RUNS: dict[str, Callable[..., Any]] = {
    "what_if": partial(attn_diag.what_if, recipe="fa2", only=["uncast-ds"], device="cpu"),
    "identify": partial(attn_diag.identify, rows=16, device="cpu"),
    "microscope": partial(attn_diag.microscope, row=50, feature=3, recipe="fa2", device="cpu"),
    "closed_form": partial(attn_diag.closed_form, recipe="fa2", device="cpu"),
}


def content(result: Any) -> dict[str, Any]:
    """What a result says of its head, without the number."""
    document: dict[str, Any] = json.loads(result.to_json())
    del document["head"]
    return document


@pytest.mark.parametrize("name", RUNS)
def test_head_is_the_models_number(name: str, plain: attn_diag.Capture, shifted: attn_diag.Capture) -> None:
    run = RUNS[name]
    of_index = [run(plain, head=index) for index in range(2)]
    assert content(of_index[0]) != content(of_index[1])
    for index, expected in enumerate(of_index):
        found = run(shifted, head=FIRST + index)
        assert found.head == FIRST + index
        assert content(found) == content(expected)
    assert run(shifted).head == FIRST
    assert run(plain).head == 0


# Its result is no document, so that it is compared in a test of its own.
OTHERS: dict[str, Callable[..., Any]] = {"repeated_maxima": partial(attn_diag.repeated_maxima, device="cpu")}


@pytest.mark.parametrize("name", [*RUNS, *OTHERS])
def test_a_head_that_the_capture_lacks_is_refused(
    name: str, plain: attn_diag.Capture, shifted: attn_diag.Capture
) -> None:
    run = (RUNS | OTHERS)[name]
    with pytest.raises(attn_diag.InputError, match=re.escape(NONE_OF_1)):
        run(shifted, head=1)
    for missing in (-1, 2):
        with pytest.raises(attn_diag.InputError, match=f"no head {missing}; the capture has 0 to 1$"):
            run(plain, head=missing)
    with pytest.raises(attn_diag.InputError, match=r"no batch item 1; the capture has 0$"):
        run(shifted, batch=1)


def test_repeated_maxima_takes_the_models_number(plain: attn_diag.Capture, shifted: attn_diag.Capture) -> None:
    def repeated(capture: attn_diag.Capture, head: int | None = None) -> list[int]:
        found = attn_diag.repeated_maxima(capture, head=head, device="cpu")["exact"]
        return [int(count) for count in some(found).multiplicity]

    assert sum(repeated(plain, 0)) < sum(repeated(plain, 1))
    assert repeated(shifted, 6) == repeated(shifted) == repeated(plain, 0)
    assert repeated(shifted, 7) == repeated(plain, 1)


def test_selections_take_the_models_numbers(shifted: attn_diag.Capture) -> None:
    seventh = attn_diag.Selection(heads=frozenset({7}))
    first = attn_diag.Selection(heads=frozenset({1}))
    attributed = attn_diag.attribute(shifted, recipe="fa2", selection=seventh, device="cpu")
    assert [head.head for head in attributed.heads] == [7]
    identified = attn_diag.identify_captures([shifted], selection=seventh, rows=16, device="cpu")
    assert [result.head for result in identified.results] == [7]
    assert attn_diag.identify_captures([shifted], rows=16, device="cpu").results[0].head == FIRST
    with pytest.raises(attn_diag.InputError, match=re.escape(NONE_OF_1)):
        attn_diag.attribute(shifted, selection=first)
    with pytest.raises(attn_diag.InputError, match=re.escape(NONE_OF_1)):
        attn_diag.identify_captures([shifted], selection=first)


def test_a_head_without_a_usable_row_is_named_by_the_models_number(shifted: attn_diag.Capture) -> None:
    q = shifted.tensors["q"][...].clone()
    q[:, 1] = torch.nan
    broken = replace(shifted, tensors={**shifted.tensors, "q": q})
    with pytest.raises(attn_diag.InputError, match="head 7: every row"):
        attn_diag.what_if(broken, recipe="fa2", head=7, device="cpu")
    with pytest.raises(attn_diag.InputError, match="head 7: no row is finite"):
        attn_diag.attribute(broken, recipe="fa2", selection=attn_diag.Selection(heads=frozenset({7})), device="cpu")


def test_figures_of_a_head_of_the_model(shifted: attn_diag.Capture) -> None:
    found = attn_diag.paper_figures(shifted, head=7, device="cpu")
    assert found.chosen.head == 7
    prefix = some(found.prefix)
    assert (
        prefix.error[-1]
        == attn_diag.microscope(shifted, row=prefix.row, feature=prefix.feature, head=7).curve.points[-1].error
    )


COMMANDS = {
    "what-if": ["--recipe", "fa2", "--only", "uncast-ds"],
    "identify": ["--rows", "16"],
    "microscope": ["--recipe", "fa2", "--row", "50", "--feature", "3"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_take_the_models_number(command: str, shifted: attn_diag.Capture, tmp_path: Path, run: Run) -> None:
    file = shifted.save(tmp_path / "heads_6_and_7.safetensors")
    line = [command, file, "--device", "cpu", "--json", "-", *COMMANDS[command]]
    for arguments, head in (([], 6), (["--head", "6"], 6), (["--head", "7"], 7)):
        code, out, _ = run(*line, *arguments)
        document = json.loads(out)
        assert (code, document.get("head", document.get("results", [{}])[0].get("head"))) == (0, head)
    code, out, err = run(*line, "--head", "1")
    assert (code, out) == (2, "")
    assert NONE_OF_1 in err
