"""The pytest plugin: baselines and their names, texts of failures, workers, and what it costs who does not use it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import python
from hypothesis import given
from hypothesis import strategies as st

# Loaded here and not first inside a test's inner run, which would forget and load them again.
from attn_diag_pytest.baselines import numbered, safe

pytest_plugins = "pytester"

# In place of ``attn_diag.check``: a kernel is a word, a baseline holds one, and passes where the two are the same.
CONFTEST = """
import json
import pytest
import attn_diag
from attn_diag.results.diagnosis import Tool
from attn_diag.results.check import CheckedCase, CheckReport, Failure

def check(fn, *, baseline=None, update=False, **options):
    if fn == "refused":
        raise attn_diag.InputError("head_dim must be positive, got 0")
    if update:
        baseline.parent.mkdir(parents=True, exist_ok=True)
        baseline.write_text(json.dumps([fn, options]))
    wrong = baseline is not None and json.loads(baseline.read_text()) != [fn, options] or fn == "broken"
    failures = tuple(
        Failure("bias", name, "o", f"mean excess of O +0.21 ulp at head 3, row 17 ({name})", "the last cast truncates",
                f"attn-diag inspect {name}.safetensors")
        for name in ("pairs", "normal")
    )
    case = CheckedCase("pairs", (16, 1, 192, 64), "bf16", ("o",), "", "", True, True, {}, {})
    return CheckReport(
        tool=Tool("1", "3", "2", None, "cpu", "cpu"), source=str(fn), backend="cpu", key="cpu", level=0.01, seed=0,
        exact=False, baseline=baseline and str(baseline), baseline_key=None if fn == "renamed" else "cpu",
        cases=(case,) * 3,
        failures=failures if wrong else (),
    )

@pytest.fixture(autouse=True)
def fake(monkeypatch):
    monkeypatch.setattr(attn_diag, "check", check, raising=False)
"""
MARKED = """
import pytest
@pytest.mark.attn_diag_baseline
def test_kernel(attn_diag):
    assert attn_diag.check_attention("kernel", causal="top-left").passed
"""


BASELINE = "attn_diag_baselines/test_a/test_kernel.json"


@pytest.fixture
def project(pytester: pytest.Pytester) -> pytest.Pytester:
    pytester.makeconftest(CONFTEST)
    pytester.makeini("[pytest]\naddopts = --strict-markers --strict-config\nfilterwarnings = error\n")
    return pytester


def run(project: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    """Without the plugins of this environment that are not under test."""
    return project.runpytest_inprocess("-p", "no:cacheprovider", *arguments)


def changed(project: pytest.Pytester, kernel: str) -> pytest.RunResult:
    """The run that follows where a baseline was made and the kernel is another one since."""
    project.makepyfile(test_a=MARKED)
    run(project, "--attn-diag-update").assert_outcomes(passed=1)
    project.makepyfile(test_a=MARKED.replace('"kernel"', f'"{kernel}"'))
    result = run(project)
    result.assert_outcomes(failed=1)
    return result


def folder(project: pytest.Pytester) -> list[str]:
    return sorted(p.relative_to(project.path).as_posix() for p in project.path.rglob("*.json"))


def text_of(result: pytest.RunResult) -> list[str]:
    """The text of one failure, without pytest's headlines."""
    lines = result.outlines
    start = next(i for i, line in enumerate(lines) if line.startswith("attn-diag: "))
    return lines[start : next(i for i, line in enumerate(lines) if i > start and line.startswith("===="))]


def test_without_a_baseline_a_test_fails_and_says_how_to_create_it(project: pytest.Pytester) -> None:
    project.makepyfile(test_a=MARKED)
    result = run(project)
    result.assert_outcomes(failed=1)
    assert text_of(result) == [
        "attn-diag: this test has no baseline yet",
        f"expected    {BASELINE}".replace("/", os.sep),
        "create it   pytest --attn-diag-update test_a.py::test_kernel",
        "and commit the file: later runs are compared with it.",
    ]
    assert not folder(project)


def test_update_creates_then_compares_then_updates(project: pytest.Pytester) -> None:
    project.makepyfile(test_a=MARKED)
    result = run(project, "--attn-diag-update", "--junitxml=junit.xml")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["*= attn-diag baselines =*", f"created {BASELINE}"])
    assert f'value="created {BASELINE}"' in (project.path / "junit.xml").read_text()
    assert json.loads((project.path / BASELINE).read_text()) == ["kernel", {"causal": "top-left"}]
    run(project).assert_outcomes(passed=1)
    run(project, "--attn-diag-update").stdout.fnmatch_lines([f"unchanged {BASELINE}"])

    changed(project, "other")
    result = run(project, "--attn-diag-update")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines([f"updated {BASELINE}"])
    run(project).assert_outcomes(passed=1)


def test_a_failure_says_where_what_and_how_to_go_on(project: pytest.Pytester) -> None:
    result = changed(project, "other")
    assert text_of(result) == [
        "attn-diag: other fails 2 of 3 cases (cpu, level 0.01)",
        "suspect     the last cast truncates",
        "1. [bias] mean excess of O +0.21 ulp at head 3, row 17 (pairs)",
        "   likewise in normal",
        f"compared    with {BASELINE}".replace("/", os.sep),
        "look closer attn-diag inspect pairs.safetensors",
        "accept      pytest --attn-diag-update test_a.py::test_kernel",
    ]
    assert not any("Traceback" in line or "fixture.py" in line for line in result.outlines)


def test_a_baseline_of_another_kernel_is_none(project: pytest.Pytester) -> None:
    """Statistics alone would pass, and nobody would see that nothing is compared any more."""
    assert text_of(changed(project, "renamed"))[0] == "attn-diag: this test's baseline has no entry for cpu"


def test_without_the_marker_nothing_is_stored_or_accepted(project: pytest.Pytester) -> None:
    project.makepyfile("def test_kernel(attn_diag): attn_diag.check_attention('broken')")
    result = run(project, "--attn-diag-update")
    result.assert_outcomes(failed=1)
    assert not folder(project)
    assert not any(line.startswith("accept") for line in text_of(result))


def test_every_call_and_every_parameter_has_a_file_of_its_own(project: pytest.Pytester) -> None:
    project.makepyfile(
        test_a="""
        import pytest
        @pytest.mark.attn_diag_baseline
        class TestKernels:
            @pytest.mark.parametrize("name", ["a/b", "a b", "x" * 300])
            def test_two(self, attn_diag, name):
                attn_diag.check_attention("first" + name)
                attn_diag.check_attention("second" + name)
        """
    )
    run(project, "--attn-diag-update").assert_outcomes(passed=3)
    files = folder(project)
    assert len(files) == 6
    assert sum(f.endswith(".2.json") for f in files) == 3
    assert all(f.startswith("attn_diag_baselines/test_a/TestKernels-test_two-") for f in files)
    assert {json.loads((project.path / f).read_text())[0][:5] for f in files if ".2." in f} == {"secon"}
    run(project).assert_outcomes(passed=3)


def test_a_marker_names_a_folder_or_a_file(project: pytest.Pytester) -> None:
    project.makepyfile(
        test_a="""
        import pytest
        @pytest.mark.attn_diag_baseline("kept")
        def test_folder(attn_diag): attn_diag.check_attention("a")
        @pytest.mark.attn_diag_baseline(path="kept/one.json")
        def test_file(attn_diag): attn_diag.check_attention("b")
        """
    )
    run(project, "--attn-diag-update").assert_outcomes(passed=2)
    assert folder(project) == ["kept/one.json", "kept/test_folder.json"]


@pytest.mark.parametrize(
    ("mark", "message"),
    [
        ("'kept.json'", "cannot share the file kept.json; give a folder"),
        ("'a', 'b'", "takes one path, a str or Path, got ('a', 'b')"),
        ("folder='a'", "takes one path"),
        ("3", "takes one path"),
    ],
)
def test_a_marker_that_cannot_hold_is_refused(project: pytest.Pytester, mark: str, message: str) -> None:
    project.makepyfile(
        f"""
        import pytest
        @pytest.mark.attn_diag_baseline({mark})
        @pytest.mark.parametrize("x", [1, 2])
        def test_x(attn_diag, x): attn_diag.check_attention("a")
        """
    )
    result = run(project, "--attn-diag-update")
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines([f"*{message}*"])
    assert not folder(project)


def test_wrong_options_fail_in_one_line(project: pytest.Pytester) -> None:
    project.makepyfile("def test_kernel(attn_diag): attn_diag.check_attention('refused')")
    result = run(project)
    result.assert_outcomes(failed=1)
    assert "attn-diag: head_dim must be positive, got 0" in result.outlines
    assert not any("fixture.py" in line for line in result.outlines)


def test_assert_unbiased_fails_with_its_text(project: pytest.Pytester) -> None:
    project.makepyfile(
        """
        import torch
        def test_bias(attn_diag):
            x = torch.linspace(1, 2, 64, dtype=torch.float64)
            assert attn_diag.assert_unbiased(x.bfloat16(), x, name="fine").mean is not None
            attn_diag.assert_unbiased((x + 0.1).bfloat16(), x, name="gate")
        """
    )
    result = run(project)
    result.assert_outcomes(failed=1)
    assert text_of(result)[0].startswith("attn-diag: gate is biased")
    assert not any("Traceback" in line for line in result.outlines)


def test_workers_write_every_baseline_once(project: pytest.Pytester) -> None:
    project.makepyfile(
        **{
            f"test_{name}": "import pytest\n@pytest.mark.attn_diag_baseline\n@pytest.mark.parametrize('x', range(6))\n"
            "@pytest.mark.xdist_group('together')\n"
            "def test_x(attn_diag, x): attn_diag.check_attention(f'kernel {x}')\n"
            for name in ("a", "b")
        }
    )
    workers = ("-p", "xdist", "-n", "2", "--dist", "loadgroup", "-p", "no:cacheprovider")
    result = project.runpytest_subprocess("--attn-diag-update", *workers)
    result.assert_outcomes(passed=12)
    assert len(folder(project)) == 12
    created = [line for line in result.outlines if line.startswith("created ")]
    assert len(created) == len(set(created)) == 12
    # The same names without workers, and without their groups.
    run(project).assert_outcomes(passed=12)


WHAT_IS_LOADED = """
import sys
def pytest_unconfigure():
    print("loaded:", *sorted({name.split(".")[0] for name in sys.modules}))
"""


def loaded_by(project: Path, *arguments: str) -> set[str]:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-s", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True, check=True)
    assert "1 test collected" in done.stdout
    line = next(line for line in done.stdout.splitlines() if line.startswith("loaded:"))
    return set(line.split()[1:])


def test_a_project_that_does_not_use_it_pays_nothing(tmp_path: Path) -> None:
    """pytest loads every plugin of an environment at every start."""
    (tmp_path / "test_unrelated.py").write_text("def test_nothing(): pass")
    (tmp_path / "conftest.py").write_text(WHAT_IS_LOADED)
    loaded = loaded_by(tmp_path)
    assert "attn_diag_pytest" in loaded, "the plugin is not installed: run pip install -e . again"
    assert not loaded & {"attn_diag", "torch", "numpy", "scipy", "rich", "pydantic"}
    assert "attn_diag_pytest" not in loaded_by(tmp_path, "-p", "no:attn_diag_pytest")
    # This test can fail.
    (tmp_path / "conftest.py").write_text("import attn_diag" + WHAT_IS_LOADED)
    assert "attn_diag" in loaded_by(tmp_path)


def test_loading_it_takes_milliseconds() -> None:
    code = "import pytest, time; t = time.perf_counter(); import attn_diag_pytest; print(time.perf_counter() - t)"
    seconds = min(float(python("-c", code).out) for _ in range(3))
    # 4 ms measured, on one core of a server; torch alone would take over a second.
    assert seconds < 0.1


def test_the_folder_is_not_importable_as_a_part_of_the_package() -> None:
    """In an editable install it lies in attn_diag's folder, too."""
    done = python("-c", "import attn_diag.pytest_plugin")
    assert done.code == 1
    assert "ModuleNotFoundError" in done.err or "import attn_diag_pytest instead of" in done.err


@given(st.text(min_size=1, max_size=200))
def test_names_of_files_are_safe(name: str) -> None:
    kept = safe(name)
    assert set(kept) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-")
    assert len(kept) <= 109
    assert kept
    assert not kept.startswith(".")


@given(st.lists(st.text(alphabet="ab:[]/. -\x00", min_size=1, max_size=6), unique=True, max_size=20))
def test_two_tests_never_share_a_file(names: list[str]) -> None:
    assert len({safe(n).lower() for n in names}) == len(names)


def test_a_plain_name_stays_as_it_is() -> None:
    assert safe("test_flash") == "test_flash"
    assert safe("test_flash[bf16-64]").startswith("test_flash-bf16-64-")
    assert numbered(Path("a/test_x.json"), 1) == Path("a/test_x.json")
    assert numbered(Path("a/test_x.json"), 2) == Path("a/test_x.2.json")


def test_changed_names_without_their_hash_would_collide() -> None:
    names = ("test_x[a/b]", "test_x[a b]")
    assert len({safe(n) for n in names}) == 2
    assert len({safe(n).rpartition("-")[0] for n in names}) == 1
