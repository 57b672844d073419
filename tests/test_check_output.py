"""What a check tells CI: JUnit XML, GitHub's annotations and summary, the terminal; the command and its exit codes."""

from __future__ import annotations

import json
import re
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest
from command_line import Run

import attn_diag
from attn_diag.head.machine import describe_tool, pick_device
from attn_diag.reports.ci import junit_document, step_summary, workflow_commands
from attn_diag.results.check import CheckedBias, CheckedCase, CheckReport, Failure, Size
from attn_diag.results.quality import Pattern, QuantityVerdict

HOSTILE = "<script>alert(1)</script>|\x00\x1b[31m\ud800\n::error::x%0A,a:b]]>&\"'`|[l](javascript:x)"


@pytest.fixture(scope="module")
def failed() -> CheckReport:
    return CheckReport(
        tool=describe_tool(pick_device("cpu")), source=HOSTILE, backend="cpu", key="k | d | v", level=0.01, seed=0,
        exact=True, baseline=HOSTILE, baseline_key="k | d | v",
        cases=(
            CheckedCase(
                HOSTILE, (16, 1, 192, 64), "bfloat16", deterministic=True, same_bits=False, seconds=1.5,
                biases={"o_away_excess": CheckedBias(-0.5, 0.01, 15.0, (-0.02, 0.02), 1e-9, 1e-8, 0.0)},
                sizes={"o": Size(0.8, 0.4, 1.1, 0.4, 0.45)}, worst=(1, 0, 7, 1.0),
            ),
            CheckedCase("normal", (16, 1, 192, 64), "bfloat16", deterministic=False, seconds=0.5),
        ),
        failures=(
            Failure("bias", HOSTILE, "o", f"{HOSTILE}: 50 % off", f"truncates {HOSTILE}", f"inspect {HOSTILE}"),
            Failure("growth", HOSTILE, "o", "grown"),
        ),
        notes=(HOSTILE,), tests=3,
    )  # fmt: skip


def test_junit_has_a_testcase_for_every_case_and_kind(failed: CheckReport) -> None:
    root = ET.fromstring(junit_document(failed))
    (suite,) = root.findall("testsuite")
    for element in (root, suite):
        assert (element.get("tests"), element.get("failures"), element.get("errors")) == ("18", "2", "0")
        assert float(element.get("time", "")) == 2.0
    assert [child.tag for child in suite] == ["properties", *["testcase"] * 18, "system-out"]
    cases = suite.findall("testcase")
    assert len({c.get("name") for c in cases}) == 18
    assert all(c.get("classname") and float(c.get("time", "")) >= 0 for c in cases)
    broken = [c for c in cases if c.find("failure") is not None]
    assert [f.get("type") for c in broken for f in c.findall("failure")] == ["bias", "growth"]
    properties = {p.get("name"): p.get("value") for p in suite.iter("property")}
    assert properties["torch"] == failed.tool.torch
    assert properties["key"] == "k | d | v"
    # What XML cannot say is replaced, the rest is there as text.
    name = str(broken[0].get("name"))
    assert "<script>" in name
    assert "\x00" not in name
    assert "\ufffd" in name


def test_documents_of_older_versions_are_read(failed: CheckReport) -> None:
    plain = replace(
        failed,
        source="k",
        baseline=None,
        notes=(),
        cases=failed.cases[1:],
        failures=(Failure("growth", "normal", "o", "x"),),
    )
    document = json.loads(plain.to_json())
    for case in document["cases"]:
        del case["quantities"], case["documented"]
    for failure in document["failures"]:
        del failure["factor"]
    assert CheckReport.from_json(json.dumps(document)) == plain


def test_junit_of_a_run_that_passes(failed: CheckReport) -> None:
    root = ET.fromstring(junit_document(replace(failed, failures=())))
    assert root.get("failures") == "0"
    assert not list(root.iter("failure"))


def test_annotations_are_one_line_each_and_escaped(failed: CheckReport) -> None:
    lines = workflow_commands(failed)
    assert len(lines) == 2
    for line in lines:
        assert line.isprintable(), "no line break or control character may end the command"
        assert re.fullmatch(r"::error title=([^:,]*)::(.*)", line)
    assert "50 %25 off" in lines[0]
    assert "::error::x%250A" in lines[0], "a % in the text is not one of ours"
    assert lines[0].count("%0A") == 1, "the only line break is ours"
    assert len(workflow_commands(replace(failed, failures=failed.failures * 20))) == 10


def test_the_summary_holds_text_alone(failed: CheckReport) -> None:
    text = step_summary(failed)
    assert text.startswith("### ❌")
    assert "<script" not in text
    assert "](" not in text
    assert "\x1b" not in text
    rows = [line for line in text.splitlines() if line.startswith("| ") and "| bias |" in line]
    assert len(rows) == 1
    assert rows[0].count("|") == 4, "the columns stay three"
    assert step_summary(replace(failed, failures=())).startswith("### ✅")


@pytest.mark.parametrize("width", [80, 120])
def test_the_terminal_report(failed: CheckReport, width: int) -> None:
    text = failed.report(width)
    assert max(map(len, text.splitlines())) <= width
    for words in ("FAILED: 1 of 2 cases, 2 failures", "looks like: truncates", "[bias]", "vary", "other", "--update"):
        assert words in text
    assert "\x1b" not in text
    assert "passed: 2 cases" in replace(failed, failures=()).report(width)


FAST = ("--cases", "normal", "--no-backward", "--device", "cpu")
MODULE = """
import torch
def good(q, k, v):
    return torch.nn.functional.scaled_dot_product_attention(q, k, v)
def bad(q, k, v):
    wide = good(q.float(), k.float(), v.float())
    return (wide.view(torch.int32) & -65536).view(torch.float32).to(torch.bfloat16)
"""


def test_save_compare_break_accept(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = tmp_path / "kernels_of_a_user.py"
    module.write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    good = ("kernels_of_a_user:good", *FAST, "--baseline", "b.json")
    code, _, err = run("check", *good)
    assert (code, "no such baseline" in err) == (2, True)
    assert run("check", *good, "--save")[0] == 0
    code, _, err = run("check", *good, "--save")
    assert (code, "use --update" in err) == (2, True)
    assert run("check", *good, "--exact", "--json", "c.json")[0] == 0
    assert CheckReport.from_json(Path("c.json").read_text()).cases[0].same_bits is True
    # The kernel of that name is broken now.
    module.write_text(MODULE.replace("good", "fine").replace("bad", "good"))
    monkeypatch.delitem(sys.modules, "kernels_of_a_user")
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    code, out, _ = run("check", *good, "--junit", "j.xml")
    assert code == 1
    assert "::error title=attn-diag check kernels_of_a_user%3Agood%3A normal%3A bias::" in out
    assert "| normal | bias |" in Path("summary.md").read_text()
    assert ET.parse("j.xml").getroot().get("failures") != "0"
    assert "::error" not in run("check", *good, "--no-github")[1]
    code, out, _ = run("check", *good, "--no-github", "--plain")
    assert code == 1
    assert out.isascii()
    assert "FAILED: 1 of 1" in out
    assert "x [bias]" in out
    assert not any(line.endswith(" ") for line in out.splitlines())
    code, out, err = run("check", *good, "--json", "-")
    assert json.loads(out)["failures"]
    assert "::error" in err
    assert run("check", *good, "--update")[0] == 0
    assert run("check", *good, "--exact")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("nothing",), "no kernel 'nothing'"),
        (("no_such_module:f",), "cannot import"),
        (("missing.safetensors",), "missing.safetensors"),
        (("fa2", "--cases", "nothing"), "no case"),
        (("fa2", "--dtype", "fp32"), "--dtype must be one of bf16, fp16"),
        (("fa2", "--save"), "need the baseline file"),
        (("fa2", "--junit", "no/such/folder/j.xml"), "cannot write"),
    ],
)
def test_what_cannot_be_run_exits_with_2(run: Run, arguments: tuple[str, ...], words: str) -> None:
    code, _, err = run("check", *arguments, "--device", "cpu")
    assert code == 2
    assert words in err


def test_a_stored_capture(run: Run, captures: Path) -> None:
    code, out, _ = run(
        "check", captures / "kernels_gauss_T512.safetensors", "--observation", "flash", "--device", "cpu"
    )
    assert code == 0, out
    assert "stored observation 'flash'" in out


def test_it_is_public() -> None:
    assert callable(attn_diag.check)
    assert attn_diag.CheckReport is CheckReport


def test_what_is_wrong_with_linear_attention_comes_before_a_site_of_what_is_coarse(failed: CheckReport) -> None:
    failures = (
        Failure("lossy", "long", "final_state", "long: coarse", "the decays in the inputs' format", factor=1.65),
        Failure("wrong", "long", "dg", "long: dg is 80 % off", factor=27.0),
    )
    found = replace(failed, source="fn", operator="gated_delta_rule", failures=failures)
    first = " ".join(found.report(80).partition("Errors")[0].split())
    assert first.startswith("FAIL fn (certain): the log decay's gradient is wrong"), first


@pytest.mark.parametrize(
    ("low", "other", "said"),
    [
        (1.05, 0.01, "as good as"),
        (1.2, 0.01, "no failure, but errors of O 1.24 times"),
        (1.2, 1.5, "as good as"),  # of an error that a well-rounded kernel's whole result is
    ],
)
def test_a_kernel_that_is_surely_coarser_is_not_called_as_good(
    failed: CheckReport, low: float, other: float, said: str
) -> None:
    o = QuantityVerdict("o", "undecided", "", factor=1.24, factor_ci95=(low, 1.28), relative_error_well_rounded=other)
    case = replace(failed.cases[1], quantities=(o,), deterministic=True)
    found = replace(failed, source="fn", baseline=None, baseline_key=None, failures=(), cases=(case,))
    first = " ".join(found.report(80).partition("bias")[0].split())
    assert f"OK fn: 1 case, {said} a well-rounded kernel" in first, first


def test_a_factor_that_is_all_that_is_wrong_stands_in_the_first_line(failed: CheckReport) -> None:
    words = "all rows are 1.0039 times the true ones, and but for that as good as a well-rounded kernel's"
    dq = QuantityVerdict(
        quantity="dq", answer="lossy", words="", factor=1.79, patterns=(Pattern("shared factor", words),)
    )  # fmt: skip
    case = replace(failed.cases[1], quantities=(dq,))
    coarse = Failure("lossy", "normal", "dq", "normal: coarse", factor=1.79)
    found = replace(failed, source="fn", baseline=None, baseline_key=None, failures=(coarse,), cases=(case,))
    assert f"FAIL fn (sure): of dQ {words}" in " ".join(found.report(80).split())
    both = replace(found, failures=(coarse, replace(coarse, quantity="o")))
    assert "1.0039" not in both.report(80).partition("check of")[0]
    # Other scores are what gradients are made of as well.
    scale = QuantityVerdict("o", "lossy", "", patterns=(Pattern("shared scale", "all rows are what a scale gives"),))
    coarser = (replace(coarse, quantity="o"), replace(coarse, quantity="dv"))
    scaled = replace(found, failures=coarser, cases=(replace(case, quantities=(scale,)),))
    assert "of O all rows are what a scale gives" in " ".join(scaled.report(80).split())


def test_a_report_that_passes_says_what_was_run() -> None:
    report = attn_diag.check("sdpa:math", cases=["normal"], backward=False, device="cpu").report(200)
    assert "Run with 192 rows of 64 features alone: --hunt tries others." in " ".join(report.split())
