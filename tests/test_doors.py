"""No name that somebody else chose acts where it is shown: every command, log line and exception, on hostile names."""

from __future__ import annotations

import logging
import re
import traceback
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
import torch
from builders import rounded_inputs
from command_line import Run
from hostile import hostile_diagnosis
from safetensors.torch import save_file

import attn_diag
from attn_diag.captures.capture import Captures

pytestmark = pytest.mark.slow

pytest_plugins = "pytester"

Command = Callable[[Path, str], tuple[object, ...]]
# What each holds would move the cursor, colour, reorder, forge a line, command a CI system or be rich's markup.
NAMES = {
    "controls": "a\n::error file=x::owned\r::add-mask::owned\x85::error::\u2028\x1b[31m\x9b31m\x1b]0;owned\x07"
    "\x7f\u202e\u2066\u200b[/] [red]owned[/red] [link=owned]:bug:[/link] [bold",
    "commands": "::error::owned ##[add-mask]owned ##vso[task.setvariable variable=owned]1",
    "folded": "::warning::owned" * 300,
    "undecodable": "owned\udcff\udc9b31m",
}


def short(name: str) -> str:
    """What a file can be called."""
    return name[:200].replace("/", "|")


def text(name: str) -> str:
    """What a tensor, a key or a note can be called."""
    return name.encode(errors="replace").decode()


def offences(printed: str, allowed: str = "(?!)") -> list[str]:
    """Lines that do more than be read."""
    found = []
    for line in printed.split("\n"):
        acts = re.match(r"\s*::", line) and not re.match(allowed, line)
        if acts or re.search(r"##\w*\[", line) or not line.isprintable():
            found.append(line)
    return found


class Dropping(torch.nn.Module):
    """Attention that nothing here can judge, as its dropout keeps nothing."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        return torch.nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=1.0)


def capture_of(name: str) -> attn_diag.Capture:
    """A good capture that says the name wherever it can."""
    given = rounded_inputs(heads=1)
    o = given.pop("o")
    told = {field: text(name) for field in ("kernel", "device", "torch", "notes")}
    return attn_diag.Capture.from_tensors(
        given | {f"{text(name)}.o": o, f"{text(name)}2.o": o.roll(1, -1), text(name): o},
        causal="top-left", layer=1, step=2, extra={text(name): text(name), "module": text(name)}, **told,
    )  # fmt: skip


def capture(folder: Path, name: str) -> Path:
    # safetensors writes no name that is not UTF-8.
    return capture_of(name).save(folder / "captured.safetensors").rename(folder / f"{short(name)}.safetensors")


def bad_capture(folder: Path, name: str) -> Path:
    """A capture that is refused, and says so of its tensors' names."""
    return saved(folder, name, {text(name): torch.zeros(3), "q": torch.zeros(3)})


def saved(folder: Path, name: str, what: object) -> Path:
    torch.save(what, folder / "saved.pt")
    return (folder / "saved.pt").rename(folder / f"{short(name)}.pt")


def diagnosis(folder: Path, name: str) -> Path:
    target = folder / f"{short(name)}.json"
    target.write_text(hostile_diagnosis(text(name)).to_json())
    return target


def layer(folder: Path, name: str) -> Path:
    w = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    save_file({text(name): w, "observed": w.bfloat16()}, folder / "layer.safetensors")
    return (folder / "layer.safetensors").rename(folder / f"{short(name)}.safetensors")


def dump(folder: Path, name: str) -> Path:
    given = {text(name) + n: t for n, t in rounded_inputs().items()}
    return saved(folder, name, {text(name): given, "q": torch.zeros(2), text(name) + "\n": torch.zeros(3)})


def script(folder: Path, name: str) -> Path:
    target = folder / f"{short(name)}.py"
    target.write_text(
        "import torch\n"
        f"name = {text(name)!r}\n"
        "def f(q):\n"
        "    with torch.autocast('cpu', torch.bfloat16):\n"
        "        k = q.float() * 2\n"
        "        return torch.nn.functional.scaled_dot_product_attention(q, k, k)\n"
        "f.__code__ = f.__code__.replace(co_name=name, co_qualname=name)\n"
        "f(torch.ones(1, 1, 4, 8, dtype=torch.bfloat16))\n"
        "raise ValueError(name)\n"
    )
    return target


def kernels(folder: Path, name: str) -> str:
    """A module with a kernel of that name, which is wrong."""
    # Of a module of its own: Python imports each once.
    module = f"owned_{folder.name}"
    (folder / f"{module}.py").write_text(
        f"name = {text(name)!r}\n"
        "def bad(q, k, v):\n    return v * 2\n"
        "bad.__name__ = bad.__qualname__ = name\n"
        "globals()[name] = bad\n"
    )
    return f"{module}:{text(name)}"


CHECK = ("--cases", "normal", "--no-backward", "--device", "cpu")
COMMANDS: dict[str, Command] = {
    "inspect": lambda f, n: ("inspect", capture(f, n), "--details", "1", "--html", f / "page.html"),
    "inspect plain": lambda f, n: ("inspect", capture(f, n), "--plain", "--fail-on", "lossy"),
    "inspect json": lambda f, n: ("inspect", capture(f, n), "--json", "-"),
    "inspect bad": lambda f, n: ("inspect", bad_capture(f, n), capture(f, n)),
    "inspect refused": lambda f, n: ("inspect", bad_capture(f, n)),
    "inspect traceback": lambda f, n: ("inspect", bad_capture(f, n), "--debug"),
    "inspect missing": lambda f, n: ("inspect", f / short(n)),
    "inspect option": lambda _, n: ("inspect", f"--{text(n)}"),
    "inspect label": lambda _, n: ("inspect", "--example", "--fail-on", text(n)),
    "inspect recipe": lambda _, n: ("inspect", "--example", "--recipe", text(n)),
    "report": lambda f, n: ("report", diagnosis(f, n)),
    "report plain": lambda f, n: ("report", diagnosis(f, n), "--plain"),
    "report page": lambda f, n: ("report", diagnosis(f, n), "--html", f / "page.html"),
    "report of a capture": lambda f, n: ("report", capture(f, n)),
    "diff": lambda f, n: ("diff", capture(f, n), capture(f, n)),
    "diff edited": lambda f, n: ("diff", diagnosis(f, n), diagnosis(f, n)),
    "diff plain": lambda f, n: ("diff", diagnosis(f, n), capture(f, n), "--plain"),
    "identify": lambda f, n: ("identify", capture(f, n)),
    "attribute": lambda f, n: ("attribute", capture(f, n), "--observation", text(n)),
    "what-if": lambda f, n: ("what-if", capture(f, n), "--observation", text(n), "--seeds", "0"),
    "microscope": lambda f, n: ("microscope", capture(f, n), "--observation", text(n)),
    "microscope extra": lambda f, n: ("microscope", capture(f, n), short(n)),
    "figures": lambda f, n: ("figures", capture(f, n), "--html", f / "page.html"),
    "probe": lambda f, n: ("probe", kernels(f, n), "--probes", "ones", "--shape", "1,1,64,16", "--device", "cpu"),
    "probe missing": lambda _, n: ("probe", text(n)),
    "replay": lambda f, n: ("replay", capture(f, n), "--against", kernels(f, n), "--html", f / "page.html"),
    "invariance": lambda f, n: (
        "invariance", kernels(f, n), "--only", "run-to-run", "--shape", "1,1,16,16", "--device", "cpu",
        "--html", f / "page.html",
    ),
    "invariance missing": lambda _, n: ("invariance", text(n)),
    "replay hunt": lambda f, n: (
        "replay", capture(f, n), "--hunt", "--against", kernels(f, n), "--axes", "batch", "--budget", "5", "--out",
        f / "found", "--html", f / "page.html",
    ),
    "check": lambda f, n: ("check", kernels(f, n), *CHECK, "--github", "--junit", f / "junit.xml"),
    "check capture": lambda f, n: ("check", kernels(f, n), *CHECK, "--capture", capture(f, n), "--plain", "--github"),
    "check stored": lambda f, n: ("check", capture(f, n), "--device", "cpu", "--github", "--junit", f / "junit.xml"),
    "check baseline": lambda f, n: ("check", "fa2", *CHECK, "--baseline", diagnosis(f, n)),
    "check saved": lambda f, n: ("check", "fa2", *CHECK, "--baseline", f / short(n), "--save"),
    "mismatch": lambda f, n: ("mismatch", capture(f, n), capture(f, n), "--html", f / "page.html"),
    "mismatch missing": lambda f, n: ("mismatch", f / short(n), f / short(n)),
    "quant": lambda f, n: ("quant", layer(f, n), "--weight", text(n), "--html", f / "page.html"),
    "quant missing": lambda f, n: ("quant", layer(f, n), "--quantizer", text(n), "--set", f"block={text(n)}"),
    "convert": lambda f, n: ("convert", dump(f, n), f / short(n)),
    "convert mapped": lambda f, n: (
        "convert", dump(f, n), f / short(n), *(x for k in "qkvo" for x in ("--map", f"{k}={text(n)}.{text(n)}{k}")),
    ),
    "convert capture": lambda f, n: ("convert", bad_capture(f, n), f / short(n)),
    "dtypes": lambda f, n: ("dtypes", script(f, n)),
    "dtypes plain": lambda f, n: ("dtypes", "--plain", script(f, n)),
    "no command": lambda _, n: (text(n),),
}  # fmt: skip


by_name = pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)


@pytest.mark.parametrize(
    ("command", "name"),
    [
        pytest.param(command, name, id=f"{what}-{kind}")
        for (what, command), (kind, name) in product(COMMANDS.items(), NAMES.items())
        # Where nothing but a path is undecodable.
        if kind != "undecodable" or what in ("inspect bad", "report", "check saved", "convert", "dtypes")
    ],
)
def test_no_command_prints_what_acts(
    command: Command, name: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = run(*command(tmp_path, name), GITHUB_STEP_SUMMARY=str(tmp_path / "summary"))
    assert done.code in (0, 1, 2), done.err
    assert offences(done.out, allowed="::error title=") == []
    assert offences(done.err) == []
    for file in ("summary", "junit.xml"):
        if (tmp_path / file).exists():
            assert offences((tmp_path / file).read_text()) == []


@by_name
def test_names_are_shown_and_colour_nothing(name: str, run: Run, tmp_path: Path) -> None:
    done = run("report", diagnosis(tmp_path, name), FORCE_COLOR="1", TERM="xterm")
    styled = re.sub(r"\x1b\[[0-9;]*m", "", done.out)
    assert styled != done.out
    assert offences(styled) == []
    assert "owned" in styled


@by_name
def test_the_check_of_what_acts_can_fail(name: str) -> None:
    assert offences(name)


@by_name
def test_a_result_at_a_prompt_and_in_a_notebook(name: str) -> None:
    found, capture = hostile_diagnosis(text(name)), capture_of(name)
    for said in (repr(found), found.report(60), found._repr_html_(), repr(capture), repr(Captures([capture]))):
        assert "owned" in said
        assert offences(said) == []
    read = attn_diag.Diagnosis.from_json(found.to_json())
    assert read == found, "an escape in the JSON is the same character"


@by_name
def test_an_exception_and_what_python_shows_of_it(name: str, tmp_path: Path) -> None:
    with pytest.raises(attn_diag.InputError) as refused:
        attn_diag.load(bad_capture(tmp_path, name))
    assert offences("".join(traceback.format_exception(refused.value))) == []
    assert "owned" in str(refused.value)
    assert "\n" not in str(refused.value)


@by_name
def test_log_lines(name: str, caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    model = torch.nn.Sequential()
    model.add_module(text(name).replace(".", " "), Dropping())
    with attn_diag.Monitor(model, every=1), attn_diag.capture(model, tmp_path / short(name), steps=[0]):
        model(torch.ones(1, 1, 4, 8)).sum().backward()
    logging.getLogger("attn_diag").error("%s", name)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) >= 3
    assert all("owned" in line and "\n" not in line for line in said)
    assert offences("\n".join(said)) == []


def test_there_is_one_logger() -> None:
    """The filter that makes log lines harmless is that logger's, and not its children's."""
    sources = [file.read_text() for file in Path(attn_diag.__file__).parent.rglob("*.py")]
    named = {found for source in sources for found in re.findall(r"getLogger\((.*?)\)", source)}
    assert named == {'"attn_diag"'}


@pytest.mark.parametrize("name", [NAMES["controls"], NAMES["commands"]], ids=["controls", "commands"])
def test_the_pytest_plugin(name: str, pytester: pytest.Pytester) -> None:
    module = kernels(pytester.path, name).partition(":")[0]
    pytester.makepyfile(
        f"""
        import sys
        sys.path.insert(0, ".")
        from {module} import bad, name
        def test_checked(attn_diag):
            attn_diag.check_attention(bad, cases=["normal"], backward=False, device="cpu", name=name)
        def test_refused(attn_diag):
            attn_diag.check_attention(name)
        def test_unbiased(attn_diag):
            import torch
            attn_diag.assert_unbiased(torch.ones(64, 4, dtype=torch.bfloat16) * 2, torch.ones(64, 4), name=name)
        """
    )
    done = pytester.runpytest_inprocess("-p", "no:cacheprovider", "--junitxml=junit.xml", "-rA")
    done.assert_outcomes(failed=3)
    for printed in (done.stdout.str(), (pytester.path / "junit.xml").read_text()):
        assert "owned" in printed
        assert offences(printed) == []


def test_the_promises_name_tests_that_exist() -> None:
    root = Path(__file__).parent.parent
    named = re.findall(r"`(tests/\w+\.py)::(\w+)`", (root / "SECURITY.md").read_text())
    assert len(named) > 10
    assert not [(file, test) for file, test in named if f"\ndef {test}(" not in (root / file).read_text()]
