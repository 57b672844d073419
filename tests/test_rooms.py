"""The rules between the folders, what importing costs, and what the wheel holds."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import median

import pytest
from command_line import loaded_by

import attn_diag

ROOT = Path(__file__).parent.parent
SOURCES = {
    "diagnostics": "attn_diag",
    "diagnostics/pytest_plugin": "attn_diag_pytest",
    "kernels": "attn_diag.kernels",
    "reference": "attn_diag.reference",
    "reports": "attn_diag.reports",
}
# From the bottom up. A room imports from itself and from rooms below it; rooms of one line never from each other.
LAYERS = (
    ("reference", "kernels", "printing"),
    ("errors", "work"),
    ("results",),
    ("captures", "statistics"),
    ("head",),
    ("analyses",),
    ("testing", "watching"),
    ("cli",),
    ("faces",),
)
HEIGHT = {room: height for height, layer in enumerate(LAYERS) for room in layer}
# Reports stand beside all of it: they see results, and only what talks to the user sees them.
REPORTS_SEE, REPORTS_SEEN_BY = {"reports", "results", "errors", "printing"}, {"cli", "faces"}
# The package itself hands out public names of all rooms; Python and pytest start the others.
FACES = {"attn_diag", "attn_diag.__main__", "attn_diag_pytest"}


def modules() -> dict[str, Path]:
    """Every module of ours by its name."""
    found = {}
    for folder, package in SOURCES.items():
        for file in (ROOT / folder).rglob("*.py"):
            parts = [p for p in file.relative_to(ROOT / folder).with_suffix("").parts if p != "__init__"]
            if folder != "diagnostics" or parts[:1] != ["pytest_plugin"]:
                found[".".join([package, *parts])] = file
    return found


def imports(source: str, known: Iterable[str]) -> set[str]:
    """Modules of ours that a file imports anywhere in it, in functions and for type checkers too."""
    known, found = set(known), set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= names & known or {str(node.module)}
    return found & known


def arrows() -> dict[str, set[str]]:
    """Module -> the modules that it imports."""
    files = modules()
    return {name: imports(file.read_text(), files) - {name} for name, file in files.items()}


def room(module: str) -> str:
    if module in FACES or module.startswith("attn_diag_pytest."):
        return "faces"
    return module.split(".")[1]


def allowed(one: str, other: str) -> bool:
    """Whether a module of room ``one`` may import one of room ``other``."""
    if "reports" in (one, other):
        return other in REPORTS_SEE if one == "reports" else one in REPORTS_SEEN_BY
    return one == other or HEIGHT[other] < HEIGHT[one]


def circles(graph: Mapping[str, Iterable[str]]) -> list[set[str]]:
    """Sets of names that reach each other."""
    reached: dict[str, set[str]] = {}
    for name in graph:
        todo = list(graph[name])
        reached[name] = set()
        while todo:
            if (item := todo.pop()) not in reached[name]:
                reached[name].add(item)
                todo += graph.get(item, ())
    inside = [{n for n in reached[name] if name in reached.get(n, ())} for name in graph if name in reached[name]]
    return [circle for i, circle in enumerate(inside) if circle not in inside[:i]]


def public_classes() -> dict[str, list[str]]:
    """Name -> the modules that define a class of that name."""
    found: dict[str, list[str]] = {}
    for name, file in modules().items():
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found.setdefault(node.name, []).append(name)
    return found


def test_arrows_between_rooms_point_down() -> None:
    up = [f"{a} -> {b}" for a, found in arrows().items() for b in found if not allowed(room(a), room(b))]
    assert not up


def test_neither_modules_nor_folders_go_in_circles() -> None:
    graph, files = arrows(), modules()
    assert not circles(graph)
    home = {name: str(file.parent.relative_to(ROOT)) for name, file in files.items() if room(name) != "faces"}
    folders: dict[str, set[str]] = {folder: set() for folder in home.values()}
    for name, folder in home.items():
        folders[folder] |= {home[other] for other in graph[name] if other in home} - {folder}
    assert not circles(folders)


def test_a_public_class_name_means_one_thing() -> None:
    assert {name: places for name, places in public_classes().items() if len(places) > 1} == {}


def test_where_to_begin_names_modules_that_there_are() -> None:
    maps = {file: text for file in modules().values() if "Where to begin" in (text := file.read_text())}
    assert len(maps) >= 4
    for file, text in maps.items():
        for name in re.findall(r"``([\w*]+)``", text):
            assert [*file.parent.glob(f"{name}.py"), *file.parent.glob(f"{name}/__init__.py")], f"{file}: {name}"


def test_modules_stay_small() -> None:
    lengths = sorted(len(file.read_text().splitlines()) for file in modules().values())
    assert median(lengths) <= 150
    assert lengths[len(lengths) * 9 // 10] <= 350
    assert lengths[-1] <= 400


def test_the_rules_of_the_rooms_can_fail() -> None:
    known = set(modules())
    assert imports("def f():\n    from attn_diag.head import measure", known) == {"attn_diag.head.measure"}
    assert imports("import attn_diag.errors\nimport torch", known) == {"attn_diag.errors"}
    upward = [("head", "analyses"), ("testing", "watching"), ("results", "reports"), ("reports", "head")]
    upward += [("statistics", "captures"), ("kernels", "reference"), ("captures", "head"), ("head", "reports")]
    assert not any(allowed(one, other) for one, other in upward)
    assert allowed("cli", "watching")
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [{"a", "b", "c"}]
    assert not circles({"a": {"b", "c"}, "b": {"c"}})
    assert "Diagnosis" in public_classes()


def test_a_diagnosis_is_read_without_torch() -> None:
    """Reports, diff and the pull request's bot read diagnoses on machines that need no torch."""
    heavy = {"torch", "scipy", "triton", "mpmath"}
    light = "\n".join(f"import attn_diag.results.{m}" for m in ("figures", "microscope", "attribution"))
    assert not loaded_by(light, *heavy, "numpy")
    assert not loaded_by("import attn_diag.results.diagnosis", *heavy)
    assert "torch" in loaded_by("import attn_diag.analyses.microscopy.microscope", *heavy), "the check above can fail"


def test_importing_the_package_costs_nothing() -> None:
    assert not loaded_by("import attn_diag", "torch", "scipy", "numpy", "rich", "pydantic")


def test_every_public_name_exists() -> None:
    assert set(attn_diag.__all__) <= set(dir(attn_diag))
    for name in attn_diag.__all__:
        assert getattr(attn_diag, name) is not None
    with pytest.raises(AttributeError, match="attribute nothing"):
        getattr(attn_diag, "nothing")  # noqa: B009 - mypy knows all names


def test_wheel_holds_only_the_package_and_its_man_page(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    outside = [n for n in names if not n.startswith(("attn_diag/", "attn_diag_pytest/")) and ".dist-info/" not in n]
    assert [n.partition(".data/data/")[2] for n in outside] == ["share/man/man1/attn-diag.1"]
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


def test_captures_in_the_wheel_are_small(wheel: Path) -> None:
    sizes = {
        Path(i.filename).name: i.file_size
        for i in zipfile.ZipFile(wheel).infolist()
        if i.filename.endswith(".safetensors")
    }
    # The example, and the real head of check's suite.
    assert sizes.keys() == {
        "gpt2_step731_L2H4_rows.safetensors",
        "failing_step500_L2H7_first_rows.safetensors",
    }
    assert sum(sizes.values()) <= 900_000


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
