"""The terminal report and ``--plain``: what is said first, widths, colours, odd terminals, hostile texts, maps."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from builders import CAPTURES, SHARED, first_head, inspected, some, stored
from command_line import Run, program
from rich.cells import cell_len

import attn_diag
from attn_diag.reports import story
from attn_diag.reports.head_map import log_levels
from attn_diag.reports.layout import ASCII, BLOCKS, spark
from attn_diag.reports.renderers import plain_text
from attn_diag.reports.words import drift_words
from attn_diag.results.diagnosis import BiasEstimate, Diagnosis, Drift, Label
from attn_diag.results.quality import Answer, Quantity
from attn_diag.results.wording import SYMBOLS

WIDTHS = [60, 80, 120]
ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
COLOUR = re.compile(r"\x1b\[(?:[0-9;]*;)?(?:3[0-7]|9[0-7]|38;[0-9;]*)m")


@cache
def many() -> Diagnosis:
    """144 heads in 12 captures of one layer each: clean ones, an ill-conditioned and a lossy one."""
    names = ("gpt2_step637_L2H6", "gpt2_step731_L2H4", "failing_step500_L2H7")
    clean, ill, lossy = (first_head(inspected(name)) for name in names)
    model = inspected("gpt2_step731_L2H4")
    (whole,), captures = model.captures, []
    for layer in range(12):
        kinds = [{(4, 9): lossy, (7, 2): ill}.get((layer, head), clean) for head in range(12)]
        heads = [dataclasses.replace(kind, layer=layer, head=head) for head, kind in enumerate(kinds)]
        pooled = dataclasses.replace(clean, layer=layer, head=None)
        observation = dataclasses.replace(whole.observations[0], heads=(*heads, pooled))
        source, metadata = f"run/layer{layer}.safetensors", whole.metadata | {"layer": str(layer)}
        captures.append(dataclasses.replace(whole, source=source, metadata=metadata, observations=(observation,)))
    return dataclasses.replace(model, captures=tuple(captures))


HEADLINES = {
    "failing_step500_L2H7": (
        "LOSSY in L2H7",
        "dQ has 11.6 and O 6.83 times the error of a well-rounded kernel. dQ: all rows follow from the O that the "
        "kernel returned: its forward is to blame, not its backward.",
    ),
    "gpt2_step637_L2H6": (
        "CLEAN",
        "O and dQ are as good as a well-rounded kernel's in L2H6, and no bias was found. Not judged: LSE, delta, dK "
        "and dV (not captured).",
    ),
    "gpt2_step731_L2H4": (
        "ILL-CONDITIONED in L2H4",
        "dQ is 8.04 % off, and a well-rounded kernel's is 8.04 % off as well.",
    ),
    "gqa_T200": ("CLEAN", "in 8 heads, and no bias was found. Not judged: LSE and delta (not captured)."),
    "kernels_gauss_T512": (
        "LOSSY in H0 stable",
        "O has 2.16 and dQ 1.90 times the error of a well-rounded kernel. 4 of 8 heads are lossy.",
    ),
    "kernels_pair_T512": (
        "LOSSY in H0 paper",
        "dQ has 16.5 and O 2.35 times the error of a well-rounded kernel. 4 of 8 heads are lossy.",
    ),
        (
            {"o": "wrong", "dq": "wrong", "dk": "wrong"},
            ("wrong",),
            "WRONG in H0: O is so. dQ and dK are wrong too. 1 of 2 heads is wrong.",
        ),
        ({"o": "nonfinite", "dq": "good"}, ("nonfinite",), "NOT FINITE in H0: O is so. dQ is right. 1 of 2 heads is"),
        ({"dq": "undecided"}, ("undecided",), "UNDECIDED in H0: dQ is so: not clearly as good as one (up to 1.1"),
    ],
)
def test_what_is_right_beside_is_said(answers: dict[Quantity, Answer], labels: tuple[Label, ...], said: str) -> None:
    model = inspected("gqa_T200")
    (whole,) = model.captures
    first, second = whole.observations[0].heads[:2]
    told = {q.quantity: q for q in first.quantities}
    quantities = tuple(
        dataclasses.replace(told[name], answer=answer, words=f"{SYMBOLS[name]} is so.", factor=None)
        for name, answer in answers.items()
    )
    verdict = dataclasses.replace(some(first.verdict), labels=labels, reasons=tuple(q.words for q in quantities))
    heads = (dataclasses.replace(first, quantities=quantities, verdict=verdict), second)
    observation = dataclasses.replace(whole.observations[0], heads=heads)
    diagnosis = dataclasses.replace(model, captures=(dataclasses.replace(whole, observations=(observation,)),))
    assert story.headline(diagnosis).startswith(said)


def test_plain_of_the_command_that_inspects(run: Run) -> None:
    done = run("inspect", CAPTURES / "gqa_T200.safetensors", "--device", "cpu", "--plain", COLUMNS="30")
    assert done.code == 0, done.err
    kept = [text for text in done.out.splitlines() if "/" not in text]
    assert kept == [text for text in plain_text(inspected("gqa_T200")).splitlines() if "/" not in text]
    assert kept[0].startswith("verdict      CLEAN")


def test_plain_of_other_commands() -> None:
    found = attn_diag.identify(stored("gqa_T200"))
    text = plain_text(found)
    assert text.isascii()
    assert not any(line.endswith(" ") for line in text.splitlines())
    assert not found.report().isascii() or "─" not in found.report()


def hostile(value: Any, key: str = "") -> Any:
    """Every free text of a diagnosis with terminal escapes and a line break in it."""
    if isinstance(value, dict):
        return {k: hostile(v, k) for k, v in value.items()}
    if isinstance(value, list):
        return [hostile(v, key) for v in value]
    fixed = {"schema", "labels", "evidence", "delta_source", "output", "quantity", "answer"}
    keeps = key in fixed or not isinstance(value, str) or value in ("NaN", "Infinity", "-Infinity")
    return value if keeps else f"{value}\x1b[2J\x1b]0;owned\x07\r\n\u202e\x9b31m"


def test_no_control_characters_from_files() -> None:
    document = hostile(json.loads(inspected("kernels_pair_T512").to_json()))
    document["captures"][0]["metadata"]["notes"] = "\x1b[2Jnote\n"
    diagnosis = Diagnosis.from_json(json.dumps(document))
    for text in (diagnosis.report(80), plain_text(diagnosis), attn_diag.diff(diagnosis, diagnosis).report(80)):
        assert not [c for c in text if c != "\n" and not c.isprintable()]
        assert "owned" in text, "the check cannot fail: nothing hostile was shown"


def running(sums: list[float], band: float, outside: bool) -> BiasEstimate:
    return BiasEstimate(
        cumulative_sum=sums[-1], drift=Drift(range(len(sums)), sums), drift_band99=band, drift_outside=outside
    )


def test_sparkline() -> None:
    inside = running([0.0, 1.0, -1.0, 0.5], 4.0, False)
    drawn = some(spark(inside, 40))
    assert (drawn.levels, drawn.marks(), drawn.first_row) == ((4, 5, 3, 4), "", None)
    assert drift_words(inside, drawn) == "ends at +0.5, inside the 99 % band of +-4"
    out = running([0.0, -2.0, -5.0, -8.0], 4.0, True)
    drawn = some(spark(out, 40))
    assert drawn.text() == f"{BLOCKS[4]}{BLOCKS[3]}{BLOCKS[1]}{BLOCKS[0]}"
    assert drawn.marks() == "  !!"
    assert "OUTSIDE the 99 % band of +-4 from row 2 on" in drift_words(out, drawn)
    thinned = some(spark(running([0.0, 1.0] * 100, 0.5, False), 10))
    assert len(thinned.levels) == 10
    assert spark(running([0.0, 0.0, 0.0], 1.0, False), 10) is None
    assert spark(BiasEstimate(), 10) is None
    mutant = some(spark(running([0.0, 2.0, 5.0, 8.0], 4.0, True), 40))
    assert mutant.levels != drawn.levels


def test_levels_of_a_map() -> None:
    assert log_levels([1.0, 10.0, 1e8, None, 0.0, math.nan, math.inf]) == [0, 1, 7, None, 0, None, 7]
    assert log_levels([2.0, 2.0, 2.1]) == [0, 0, 0]
    assert log_levels([None]) == [None]


def test_failed_assumptions_come_first() -> None:
    capture = attn_diag.load(CAPTURES / "gqa_T200.safetensors", causal="none")
    text = attn_diag.inspect_captures([capture], device="cpu").report(80)
    assert text.startswith("No verdict")
    assert "causal=top-left fits" in " ".join(text.split())
    assert "What to do" not in text
