"""The rules between the folders, what importing costs, and what the wheel holds."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import attn_diag

ROOT = Path(__file__).parent.parent
PACKAGES = {
    "reference": "attn_diag.reference",
    "kernels": "attn_diag.kernels",
    "reports": "attn_diag.reports",
}
# Folder -> our modules that it may import, by prefix.
ALLOWED = {
    "reference": ("attn_diag.reference",),
    "kernels": ("attn_diag.kernels",),
    "reports": (
        "attn_diag.reports",
        "attn_diag.comparison.result",
        "attn_diag.diagnosis",
        "attn_diag.drift.result",
        "attn_diag.errors",
        "attn_diag.attribution.result",
        "attn_diag.debugging.result",
        "attn_diag.hardware.installation",
        "attn_diag.hardware.profile",
        "attn_diag.identification.result",
        "attn_diag.errors",
        "attn_diag.figures",
        "attn_diag.microscopy.result",
        "attn_diag.mitigation.result",
        "attn_diag.paper.result",
        "attn_diag.probing.result",
        "attn_diag.regression.result",
    ),
}
# Of diagnostics, only the faces know the reports.
FACES = {
    "attribution/result.py",
    "cli/check.py",
    "cli/common.py",
    "cli/figures.py",
    "cli/inspect.py",
    "cli/report.py",
    "comparison/read.py",
    "comparison/result.py",
    "debugging/finding.py",
    "debugging/result.py",
    "diagnosis.py",
    "drift/result.py",
    "hardware/installation.py",
    "hardware/profile.py",
    "identification/result.py",
    "microscopy/result.py",
    "mitigation/result.py",
    "paper/result.py",
    "probing/result.py",
    "pytest_plugin/fixture.py",
    "regression/result.py",
}


def imports(source: str) -> set[str]:
    """Modules of ours that a file imports anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in found if name.split(".")[0] == "attn_diag"}


def offences(folder: str, source: str) -> list[str]:
    return [name for name in imports(source) if not name.startswith(ALLOWED[folder])]


@pytest.mark.parametrize("folder", ALLOWED)
def test_rooms_import_only_what_they_may(folder: str) -> None:
    for file in (ROOT / folder).rglob("*.py"):
        assert not offences(folder, file.read_text()), file


def test_only_the_faces_import_reports() -> None:
    for file in (ROOT / "diagnostics").rglob("*.py"):
        name = file.relative_to(ROOT / "diagnostics").as_posix()
        found = {i for i in imports(file.read_text()) if i.startswith("attn_diag.reports")}
        assert not found or name in FACES, name


def test_the_import_rules_can_fail() -> None:
    assert offences("reference", "def f():\n    from attn_diag.kernels import preset")
    assert offences("reports", "import attn_diag.reference.rounding")
    assert not offences("reports", "from attn_diag.diagnosis import Diagnosis")


def test_a_diagnosis_is_read_without_torch() -> None:
    """Reports, diff and the pull request's bot read diagnoses on machines that need no torch."""
    heavy = {"torch", "scipy", "triton", "mpmath"}
    for module in ("figures", "microscopy.result", "attribution.result"):
        assert not (heavy | {"numpy"}) & modules_after(f"import attn_diag.{module}"), module
    assert not heavy & modules_after("import attn_diag.diagnosis")
    assert "torch" in modules_after("import attn_diag.microscopy.microscope"), "the check above can fail"


def modules_after(code: str) -> set[str]:
    script = f"import sys\n{code}\nprint(*{{m.split('.')[0] for m in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True, cwd="/")
    return set(done.stdout.split())


def test_importing_the_package_costs_nothing() -> None:
    assert not {"torch", "scipy", "numpy", "rich", "pydantic"} & modules_after("import attn_diag")


def test_every_public_name_exists() -> None:
    assert set(attn_diag.__all__) <= set(dir(attn_diag))
    for name in attn_diag.__all__:
        assert getattr(attn_diag, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        attn_diag.nothing  # noqa: B018


def test_the_lists_of_public_names_agree() -> None:
    """What type checkers see, what is imported on first use, and what ``__all__`` names."""
    assert attn_diag.__file__ is not None
    tree = ast.parse(Path(attn_diag.__file__).read_text())
    (guarded,) = (node.body for node in tree.body if isinstance(node, ast.If))
    seen = {alias.name for node in guarded if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert seen == set(attn_diag._HOME) == set(attn_diag.__all__)
    assert {"Certify", "read_log"} <= seen


def test_wheel_holds_only_the_package(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    outside = [n for n in names if not n.startswith(("attn_diag/", "attn_diag_pytest/")) and ".dist-info/" not in n]
    assert not outside
    for needed in (
        "py.typed",
        "reference/attention.py",
        "kernels/recipe.py",
        "reports/static/vendor/echarts/LICENSE",
        "reports/static/vendor/echarts/NOTICE",
        "reports/static/vendor/echarts/echarts.min.js",
        "reports/static/charts.js",
        "reports/static/print.css",
        "reports/templates/document.html.j2",
        "reports/templates/fragment.html.j2",
    ):
        assert f"attn_diag/{needed}" in names
    sources = {
        p for folder in ("kernels", "reference", "reports", "diagnostics") for p in (ROOT / folder).rglob("*.py")
    }
    assert sum(n.endswith(".py") for n in names) == len(sources)


def test_example_in_the_wheel_is_small(wheel: Path) -> None:
    captures = [i for i in zipfile.ZipFile(wheel).infolist() if i.filename.endswith(".safetensors")]
    assert len(captures) == 1
    assert captures[0].file_size <= 800_000


def test_wheel_beside_hugging_face_kernels(wheel: Path, tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--target",
        str(tmp_path),
        str(wheel),
    ]
    subprocess.run(command, check=True)
    code = (
        "import attn_diag.kernels, kernels, attn_diag\n"
        "assert hasattr(kernels, 'get_kernel'), kernels.__file__\n"
        "print(attn_diag.kernels.__file__)"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment,
    )
    assert Path(done.stdout.strip()) == tmp_path / "attn_diag" / "kernels" / "__init__.py"


def test_kernels_is_not_ours_in_tests() -> None:
    import kernels

    assert hasattr(kernels, "get_kernel"), kernels.__file__
