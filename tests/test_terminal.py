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
from command_line import Programs, Run
from rich.cells import cell_len

import attn_diag
from attn_diag.analyses.patterns.of_capture import CapturePatterns
from attn_diag.reports import story
from attn_diag.reports.head_map import log_levels
from attn_diag.reports.layout import ASCII, BLOCKS, bar_line, spark
from attn_diag.reports.opening import opening
from attn_diag.reports.places import places_words
from attn_diag.reports.renderers import plain_text
from attn_diag.reports.words import drift_words
from attn_diag.results.diagnosis import BiasEstimate, Diagnosis, Drift, Label
from attn_diag.results.findings import FindingPlace
from attn_diag.results.microscope import Point
from attn_diag.results.quality import Answer, Quantity
from attn_diag.results.wording import SYMBOLS, share

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
    return Diagnosis(model.tool, model.family, tuple(captures), model.summary)


HEADLINES = {
    "failing_step500_L2H7": (
        "LOSSY: layer 2, head 7, step 500 (the kernel's fault: scores, row sum, O's accumulator in BF16).",
        "dQ has 11.5 and O 6.83 times the error of a well-rounded kernel. dQ: all rows follow from the O that the "
        "kernel returned: its forward is to blame, not its backward.",
    ),
    "gpt2_step637_L2H6": (
        "PASS",
        "O and dQ are as good as a well-rounded kernel's in L2H6, and no bias was found. Not judged: LSE, delta, dK "
        "and dV (not captured).",
    ),
    "gpt2_step731_L2H4": (
        "ILL-CONDITIONED: layer 2, head 4, step 731 (no fault of the kernel).",
        "dQ is 8.04 % off, and a well-rounded kernel's would be 8.04 % off as well",
    ),
    "gqa_T200": ("PASS", "in 8 heads, and no bias was found. Not judged: LSE and delta (not captured)."),
    "kernels_gauss_T512": (
        "LOSSY in 'paper': both heads (scores, maximum, row sum, PV of a range, O's accumulator in BF16). LOSSY in",
        "Lossy In 'paper': O has 2.15 and dQ 1.90 times the error of a well-rounded kernel (H0).",
    ),
    "kernels_pair_T512": (
        "LOSSY in 'paper': both heads",
        "ILL-CONDITIONED in 'flash' and 'flex': both heads (no fault of the kernel).",
    ),
    "pair_T256": ("ILL-CONDITIONED: both heads (no fault of the kernel)", "these inputs amplify ordinary rounding."),
}


@pytest.mark.parametrize("name", SHARED)
def test_the_first_line_says_what_is_wrong(name: str) -> None:
    label, words = HEADLINES[name]
    first = " ".join(" ".join(inspected(name).report(200).splitlines()[:6]).split())
    assert first.startswith(label)
    assert words in first
    # Of several observations each finding says which.
    assert ("Lossy In 'paper': dQ" in first) == (name == "kernels_pair_T512")
    wrong = next(other for other, _ in HEADLINES.values() if other[:4] != label[:4])
    assert not first.startswith(wrong)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", [*SHARED, "many"])
def test_nothing_is_wider_than_the_screen_or_cut_off(name: str, width: int) -> None:
    diagnosis = many() if name == "many" else inspected(name)
    text = diagnosis.report(width)
    assert max(map(cell_len, text.splitlines())) <= width
    assert "…" not in text
    flat = " ".join(text.split())
    for _, _, head in diagnosis.ranked()[:1]:
        verdict = some(head.verdict)
        advised = () if verdict.labels == ("clean",) else verdict.suggestions
        for sentence in (*verdict.reasons, *advised):
            assert " ".join(sentence.split()) in flat


def test_order_of_the_story() -> None:
    """Verdict, what to do, heads (the worst first), then where the numbers come from."""
    text = inspected("kernels_pair_T512").report(100)
    order = [
        "LOSSY",
        "What to do",
        "Heads, worst first",
        "H0 paper: lossy",
        "Where the numbers come from",
        "attn-diag 0",
    ]
    positions = [text.index(words) for words in order]
    assert positions == sorted(positions)
    rows = re.findall(r"^(H\d)\s+(\w+)\s+([a-z_, ]+?)\s+[\d.]+ ", text, re.M)
    assert [labels for _, _, labels in rows][:2] == ["lossy"] * 2
    assert sorted(labels for _, _, labels in rows) == [*["ill_conditioned"] * 4, *["lossy"] * 3, "lossy, biased"]
    assert rows[0][:2] == ("H0", "paper")
    flat = " ".join(text.split())
    assert "attn-diag attribute" in flat
    assert "--head 0 --observation paper" in flat
    for words in ("well-rounded kernel", "Benjamini-Hochberg", "does not prove", "float64 reference on cpu"):
        assert words in flat, words


def test_advice_is_said_once() -> None:
    steps = story.next_steps(inspected("kernels_pair_T512"))
    assert [step.partition(" (")[0] for step in steps] == ["lossy", "biased", "ill_conditioned"]
    assert "(H0 paper and 3 more)" in steps[0]
    assert len(story.next_steps(inspected("gqa_T200"))) == 1


@pytest.mark.parametrize("width", WIDTHS)
def test_map_of_many_heads(width: int) -> None:
    lines = many().report(width).splitlines()
    start = next(i for i, line in enumerate(lines) if "worst verdict" in line)
    rows = {line.split()[0]: line[5 : 5 + 24] for line in lines[start + 2 : start + 14]}
    assert list(rows) == [f"L{layer}" for layer in range(12)]
    letters = {(name, i): row[2 * i] for name, row in rows.items() for i in range(12)}
    assert letters.pop(("L4", 9)) == "L"
    assert letters.pop(("L7", 2)) == "c"
    assert set(letters.values()) == {"·"}
    names = [line.split()[0] for line in lines if re.match(r"L\d+H", line)]
    assert names[:2] == ["L4H9", "L7H2"]
    assert "139 more: 139 clean" in " ".join(lines)


@pytest.mark.parametrize("ascii_only", [False, True])
def test_map_at_the_heads_own_place(ascii_only: bool, tmp_path: Path, programs: Programs) -> None:
    """The tallest block of the noise factor stands at the lossy head, and nowhere else."""
    environment = {"PYTHONIOENCODING": "ascii"} if ascii_only else {"PYTHONIOENCODING": "utf-8"}
    (tmp_path / "saved.json").write_text(many().to_json())
    done = programs.run("attn_diag", "report", tmp_path / "saved.json", COLUMNS="120", **environment)
    assert done.code == 0, done.err
    text = done.out
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if "noise factor  " in line and "worst verdict" in line)
    at = lines[start].index("noise factor")
    top = (ASCII if ascii_only else BLOCKS)[-1]
    tall = [(line.split()[0], (m.start() - at) // 2) for line in lines[start + 2 : start + 14]
            for m in re.finditer(re.escape(top), line) if at <= m.start() < at + 24]  # fmt: skip
    assert tall == [("L4", 9)]
    assert not ascii_only or text.isascii()


@pytest.fixture
def shown(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """What ``attn-diag report`` prints into a pipe."""
    for name in ("NO_COLOR", "FORCE_COLOR", "TERM", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)

    def call(diagnosis: Diagnosis, *options: str, **environment: str) -> str:
        path = tmp_path / "saved.json"
        path.write_text(diagnosis.to_json())
        done = run("report", path, *options, **environment)
        assert done.code == 0, done.err
        return done.out

    return call


@pytest.mark.parametrize(
    ("environment", "options", "coloured", "escaped"),
    [
        ({}, (), False, False),
        ({"FORCE_COLOR": "1", "TERM": "xterm-256color"}, (), True, True),
        ({"FORCE_COLOR": "1", "TERM": "xterm-256color", "NO_COLOR": "1"}, (), False, True),
        ({"FORCE_COLOR": "1", "TERM": "dumb"}, (), False, False),
        ({"FORCE_COLOR": "1", "TERM": "xterm-256color"}, ("--plain",), False, False),
    ],
    ids=["pipe", "forced", "NO_COLOR", "dumb", "plain"],
)
def test_colours(
    shown: Callable[..., str], environment: dict[str, str], options: tuple[str, ...], coloured: bool, escaped: bool
) -> None:
    text = shown(inspected("kernels_pair_T512"), *options, **environment)
    assert bool(COLOUR.search(text)) == coloured
    assert ("\x1b" in text) == escaped
    if not options:
        assert ESCAPES.sub("", text) == inspected("kernels_pair_T512").report(80)


@pytest.mark.parametrize("name", [*SHARED, "many"])
def test_plain(name: str, shown: Callable[..., str]) -> None:
    diagnosis = many() if name == "many" else inspected(name)
    text = plain_text(diagnosis)
    assert text.isascii()
    lines = text.splitlines()
    kinds = {
        "verdict",
        "opening",
        "summary",
        "warning",
        "next",
        "head",
        "reason",
        "quantity",
        "test",
        "drift",
        "fact",
        "note",
    }
    assert {line.split()[0] for line in lines} <= kinds | {"capture", "family", "tool"}
    assert all(line[12] == " " != line[13] for line in lines)
    assert len([line for line in lines if line.startswith("head ")]) == len(list(diagnosis.entries()))
    assert plain_text(diagnosis) == shown(diagnosis, "--plain", COLUMNS="40", FORCE_COLOR="1")
    assert not any(line.endswith(" ") for line in lines)


def test_plain_can_be_grepped() -> None:
    lines = plain_text(inspected("kernels_pair_T512")).splitlines()
    (row,) = [line for line in lines if re.match(r"head +paper/H0 ", line)]
    assert re.search(r"lossy +factor=16\.5\d* +noise_factor=11\.5\d* +conditioning=24\d\.?\d* +dq_error=0\.929", row)
    assert [line for line in lines if re.match(r"test +stable/H1 +delta_excess .*p_adjusted=0\.0002", line)]
    assert [line for line in lines if re.match(r"drift +stable/H1 .*OUTSIDE the 99 % band .* from row \d+ on", line)]


def test_every_captured_quantity_is_shown_beside_a_well_rounded_kernel() -> None:
    diagnosis = inspected("gqa_T200")
    wide = " ".join(diagnosis.report(80).split())
    assert re.search(
        r"quantity verdict error rounded factor interval O good 0\.\d+ % 0\.\d+ % 1\.00 \S+ to 1\.\d\d dQ ", wide
    )
    lines = plain_text(diagnosis).splitlines()
    assert [
        line for line in lines if re.match(r"quantity +H5 +dV good +factor=1 +low=1 +high=1 +error=0\.00\d+$", line)
    ]
    assert [line for line in lines if re.match(r"reason +H5 +Not judged: LSE and delta \(not captured\)\.$", line)]


@pytest.mark.parametrize(
    ("answers", "labels", "said"),
    [
        (
            {"o": "good", "dq": "wrong", "dk": "undecided", "dv": "good"},
            ("wrong",),
            "WRONG: head 0. 1 other head passes. | dQ is so. O and dV are right.",
        ),
        (
            {"o": "wrong", "dq": "wrong", "dk": "wrong"},
            ("wrong",),
            "WRONG: head 0. 1 other head passes. | O is so. dQ and dK are wrong too.",
        ),
        (
            {"o": "nonfinite", "dq": "good"},
            ("nonfinite",),
            "NaN OR INF: head 0. 1 other head passes. | O is so. dQ is right.",
        ),
        (
            {"dq": "undecided"},
            ("undecided",),
            "PASS: O, dQ, dK and dV are as good as a well-rounded kernel's in H1, and no bias was found. Of 2 heads "
            "1 is undecided: H0. Not judged: LSE and delta (not captured). | head 0: dQ is so.",
        ),
    ],
)
def test_what_is_right_beside_is_said(answers: dict[Quantity, Answer], labels: tuple[Label, ...], said: str) -> None:
    assert opened_as(answers, labels).startswith(said)


def test_what_is_wrong_beside_the_furthest_is_said() -> None:
    told = opened_as({"o": "good", "dq": "wrong", "dk": "wrong", "dv": "wrong"}, ("wrong",), furthest="dk")
    assert "| dK is so. dQ and dV are wrong too. O is right." in told


def opened_as(answers: dict[Quantity, Answer], labels: tuple[Label, ...], furthest: Quantity | None = None) -> str:
    """The first lines of a diagnosis whose first head has these answers."""
    model = inspected("gqa_T200")
    (whole,) = model.captures
    first, second = whole.observations[0].heads[:2]
    told = {q.quantity: q for q in first.quantities}
    quantities = tuple(
        dataclasses.replace(
            told[name], answer=answer, words=f"{SYMBOLS[name]} is so.", factor=9.0 if name == furthest else None
        )
        for name, answer in answers.items()
    )
    verdict = dataclasses.replace(some(first.verdict), labels=labels, reasons=tuple(q.words for q in quantities))
    heads = (dataclasses.replace(first, quantities=quantities, verdict=verdict), second)
    observation = dataclasses.replace(whole.observations[0], heads=heads)
    capture = dataclasses.replace(whole, observations=(observation,))
    diagnosis = Diagnosis(model.tool, model.family, (capture,), model.summary)
    (told_first, *_) = [line.said for line in opening(diagnosis) if line.label is not None]
    return f"{story.headline(diagnosis)} | {told_first}"


def test_plain_of_the_command_that_inspects(run: Run) -> None:
    done = run("inspect", CAPTURES / "gqa_T200.safetensors", "--device", "cpu", "--plain", COLUMNS="30")
    assert done.code == 0, done.err
    kept = [text for text in done.out.splitlines() if "/" not in text]
    assert kept == [text for text in plain_text(inspected("gqa_T200")).splitlines() if "/" not in text]
    assert kept[0].startswith("verdict      PASS: ")


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
    fixed |= {"label", "also", "quantities", "right", "gradients", "biased_mean"}
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


@pytest.mark.parametrize("values", [(-1.7e308, 1.7e308, 1.0), (0.0, 5e-324), (math.inf, -1e308), (1e308, 1e308)])
def test_numbers_at_the_ends_of_the_range_are_drawn(values: tuple[float, ...]) -> None:
    """A saved diagnosis can hold any number."""
    assert len(bar_line(values).split("  ")[0]) == len(values)
    for band in (math.nan, math.inf, 0.0):
        drawn = spark(running([*values, 1.0], band, True), 40)
        assert drawn is None or set(drawn.levels) <= set(range(8))
    points = tuple(Point(i, i, value, 0.0, unit=False) for i, value in enumerate(values, start=1))
    element = some(first_head(inspected("gpt2_step637_L2H6", details=1)).microscope)
    curve = dataclasses.replace(some(element.curve), keys=len(points), points=points)
    assert f"t = 1 … {len(points)}" in dataclasses.replace(element, curve=curve).report()
    assert [share(value) for value in (math.inf, -math.inf, math.nan, 1e305, 0.99999)] == [
        "inf %", "-inf %", "nan %", "inf %", "99.99 %",
    ]  # fmt: skip


def test_levels_of_a_map() -> None:
    assert log_levels([1.0, 10.0, 1e8, None, 0.0, math.nan, math.inf]) == [0, 1, 7, None, 0, None, 7]
    assert log_levels([2.0, 2.0, 2.1]) == [0, 0, 0]
    assert log_levels([None]) == [None]


def test_failed_assumptions_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    def sought(*_: object) -> None:
        raise AssertionError("patterns of what is wrong are sought beside another function's truth")

    monkeypatch.setattr(CapturePatterns, "explain", sought)
    capture = attn_diag.load(CAPTURES / "gqa_T200.safetensors", causal="none")
    text = attn_diag.inspect_captures([capture], device="cpu").report(80)
    assert text.startswith("MASK OR SCALE NOT AS STATED: all 8 heads (judged as causal=none, O fits")
    assert "causal=top-left fits" in " ".join(text.split())
    assert "What to do" not in text


def test_places_beyond_the_third_are_not_called_whole_layers() -> None:
    one, other = FindingPlace((0,), (1,), False, (5, 9), (5, 9)), FindingPlace((1,), (2,), False, (5, 9), (5, 9))
    several = [
        one,
        other,
        dataclasses.replace(one, heads=(3,)),
        *(dataclasses.replace(one, layers=(n,)) for n in (4, 5)),
    ]
    assert places_words(several).endswith("; heads of layers 4-5, at both steps (5 to 9)")
    whole = [dataclasses.replace(place, all_heads=True) for place in several]
    assert "; layers 4-5, at" in places_words(whole)


def test_what_is_pooled_of_several_layers_is_told_apart() -> None:
    of_model = many()
    report = dataclasses.replace(of_model, captures=of_model.captures[:2]).report(120)
    assert re.findall(r"^(L\d all|all) ", report, re.MULTILINE) == ["L0 all", "L1 all"]
    report = dataclasses.replace(of_model, captures=of_model.captures[:1]).report(120)
    assert re.findall(r"^(L\d all|all) ", report, re.MULTILINE) == ["all"]
