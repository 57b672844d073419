"""The command line: exit codes, messages for bad input, outputs that are written whole or not at all."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from builders import Explosive, rounded_inputs
from command_line import Programs, Run, command, loaded_by, python
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor
from typer.core import TyperGroup
from typer.main import get_command

import attn_diag
from attn_diag.cli import app
from attn_diag.results.publish import schemas

META = {"format": "attn-diag-capture", "format_version": "1", "layout": "BHTD", "causal": "top-left", "scale": "0.25"}


def write(path: Path, tensors: dict[str, Tensor] | None = None, **metadata: str) -> Path:
    save_file({n: t.contiguous() for n, t in (tensors or GIVEN).items()}, path, META | metadata)
    return path


def truncated(path: Path) -> Path:
    write(path)
    path.write_bytes(path.read_bytes()[:-700])
    return path


def lying(path: Path) -> Path:
    """The header claims a shape that its bytes do not hold."""
    write(path)
    data = path.read_bytes()
    assert b"[1,2,24,16]" in data
    path.write_bytes(data.replace(b"[1,2,24,16]", b"[9,2,24,16]", 1))
    return path


def empty(path: Path) -> Path:
    path.touch()
    return path


GIVEN = rounded_inputs()
DAMAGED: dict[str, tuple[Callable[[Path], Path], str]] = {
    "missing": (lambda p: p, "no such file"),
    "empty": (empty, "the file is empty"),
    "truncated": (truncated, "truncated or damaged"),
    "lying-header": (lying, "truncated or damaged"),
}
# What is changed of a good file: tensors, or metadata where it is a text.
WRONG: dict[str, tuple[dict[str, Tensor | str | None], str]] = {
    "missing-k": ({"k": None}, "tensor 'k' is missing"),
    "shape": ({"v": GIVEN["v"][:, :, :9]}, "v must have shape [B, H, T, D] = [1, 2, 24, 16]"),
    "head-dim": ({"k": GIVEN["k"][..., :8]}, "k must have shape [B, H, T, D] = [1, 2, 24, 16]"),
    "three-axes": ({"q": GIVEN["q"][0]}, "q must have shape [B, H, T, D]"),
    "head-count": ({"q": torch.ones(1, 3, 24, 16).bfloat16(), "do": None, "o": None}, "q has 3 heads and k has 2"),
    "promoted-k": (
        {"k": GIVEN["k"].float()},
        "got q bfloat16, k float32, v bfloat16: k was silently promoted",
    ),
    "promoted-q": ({"q": GIVEN["q"].float()}, "q was silently promoted"),
    "halves": ({"v": GIVEN["v"].half()}, "got q bfloat16, k bfloat16, v float16\n"),
    "integers": ({"q": GIVEN["q"].int()}, "q has dtype int32"),
    "scale-0": ({"scale": "0"}, "scale must be a finite number other than 0"),
    "scale-nan": ({"scale": "nan"}, "scale must be a finite number other than 0"),
    "scale-word": ({"scale": "big"}, "scale='big' cannot be read as a number"),
    "causal-word": ({"causal": "yes"}, "causal must be one of none, top-left, bottom-right"),
    "newer": ({"format_version": "2"}, "format version '2' is not known"),
    "nameless-version": ({"format_version": ""}, "format version '' is not known"),
    "other-kind": ({"kind": "sparse"}, "metadata says kind='sparse'; expected kind=linear (linear attention), or no"),
    "varlen": ({"cu_seqlens": torch.ones(3)}, "cu_seqlens_q must be integers, got float32"),
    "varlen-batch": ({"cu_seqlens": torch.tensor([0, 25])}, "cu_seqlens_q ends at 25, but there are 24 query rows"),
    "dropout": ({"dropout_p": "0.1"}, "dropout_p=0.1 without 'dropout_mask'"),
    "sinks": ({"sinks": torch.ones(3)}, "sinks must have shape [2], one number a query head, got [3]"),
    "alibi": ({"alibi_slopes": torch.ones(3)}, "alibi_slopes must have shape [2], one slope a query head"),
    "fp8": (
        {n: None if n in ("do", "o") else GIVEN[n].to(torch.float8_e4m3fn) for n in GIVEN},
        "q is float8_e4m3fn without descale factors",
    ),
    "no-dO": ({"do": None, "dq": GIVEN["q"].clone()}, "'do' is missing"),
}


@pytest.mark.parametrize("case", [*DAMAGED, *WRONG])
def test_bad_file(case: str, tmp_path: Path, run: Run) -> None:
    path = tmp_path / "capture.safetensors"
    if case in DAMAGED:
        make, message = DAMAGED[case]
        make(path)
    else:
        changes, message = WRONG[case]
        metadata = {name: text for name, text in changes.items() if isinstance(text, str)}
        write(path, {n: t for n, t in (GIVEN | changes).items() if isinstance(t, Tensor)}, **metadata)
    before = sorted(tmp_path.iterdir())
    done = run("inspect", path, "--json", tmp_path / "out.json", "--html", tmp_path / "out.html")
    assert done.code == 2
    assert message in done.err
    assert str(path) in done.err
    assert "Traceback" not in done.err
    assert not done.out
    assert sorted(tmp_path.iterdir()) == before


BAD_OPTIONS = {
    "unknown-observation": (["--observation", "flash"], "no observation 'flash'; it has observed"),
    "unknown-recipe": (["--recipe", "fa9"], "no recipe 'fa9'; known: fa2"),
    "unknown-label": (["--fail-on", "broken"], "no label broken; known: clean, nonfinite, wrong, lossy"),
    "head-word": (["--head", "first"], "--head takes numbers and ranges"),
    "head-backwards": (["--head", "5-3"], "--head takes numbers and ranges"),
    "head-superscript": (["--head", "²"], "--head takes numbers and ranges"),
    "head-missing": (["--head", "7"], "no head 7; the capture has 0 to 1"),
    "head-giant": (
        ["--head", "0-99999999999"],
        "no head 2, 3, 4, 5, …; the capture has 0 to 1 (got --head 0-99999999999)",
    ),
    "batch-giant": (["--batch", "1-9999999999999999999999"], "no batch item 1, 2, 3, 4, …; the capture has 0"),
    "layer-giant": (["--layer", "0-99999999999"], "no capture is of the layers asked for"),
    "head-digits": (["--head", "9" * 5000], "--head takes numbers and ranges"),
    "layer-missing": (
        ["--layer", "3"],
        "no capture is of the layers asked for: none of them states its layer (got --layer 3)",
    ),
    "level": (["--level", "2"], "level must lie between 0 and 1"),
    "device": (["--device", "tpu"], "device must be auto, cpu or cuda"),
    "scale-0": (["--scale", "0"], "scale must be a finite number other than 0"),
    "scale-huge": (["--scale", "1e200"], "scale must be a finite number other than 0, and so its square, got 1e+200"),
    "scale-tiny": (["--scale", "1e-200"], "scale must be a finite number other than 0, and so its square"),
    "window-huge": (["--window", "99999999999999999999,0"], "-1 is unlimited"),
    "label-none": (["--fail-on", ","], "--fail-on needs at least one label, got ','; known: clean"),
    "scale-word": (["--scale", "big"], "Invalid value for '--scale'"),
    "window": (["--window", "3"], "--window must be LEFT,RIGHT"),
    "scale-nan": (["--scale", "nan"], "scale must be a finite number other than 0"),
    "no-such-option": (["--nope"], "No such option"),
    "unwritable": (["--html", "/nonexistent/out.html"], "cannot write /nonexistent/out.html"),
}


@pytest.mark.parametrize("case", BAD_OPTIONS)
def test_bad_option(case: str, tmp_path: Path, run: Run) -> None:
    options, message = BAD_OPTIONS[case]
    path = write(tmp_path / "capture.safetensors")
    done = run("inspect", path, "--json", tmp_path / "out.json", *options)
    assert done.code == 2
    assert message in " ".join(done.err.replace("│", " ").split())
    assert not done.out
    assert sorted(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("how", ["torch-save", "raw-pickle"])
def test_pickle_is_never_executed(how: str, tmp_path: Path, run: Run) -> None:
    path, proof = tmp_path / "capture.pt", tmp_path / "executed"
    content = {**rounded_inputs(), "notes": Explosive(proof)}
    if how == "torch-save":
        torch.save(content, path)
    else:
        path.write_bytes(pickle.dumps({"notes": Explosive(proof)}))
        pickle.loads(path.read_bytes())
        assert proof.exists(), "the planted pickle is harmless: this test cannot fail"
        proof.unlink()
    done = run("inspect", path, "--json", tmp_path / "out.json")
    assert done.code == 2
    assert "holds more than tensors and was not executed" in done.err
    assert [p.name for p in tmp_path.iterdir()] == ["capture.pt"]


def test_nothing_named_and_empty_directory(tmp_path: Path, run: Run) -> None:
    assert "try --example" in run("inspect").err
    done = run("inspect", tmp_path)
    assert done.code == 2
    assert "no captures in this directory" in done.err


def test_good_capture_report_json_and_html(tmp_path: Path, run: Run) -> None:
    path = write(tmp_path / "capture.safetensors")
    done = run("inspect", path, "--json", tmp_path / "out.json", "--html", tmp_path / "out.html")
    assert done.code == 0
    assert "Of 2 heads 1 is undecided" in " ".join(done.out.split())
    document = json.loads((tmp_path / "out.json").read_text())
    jsonschema.Draft202012Validator(schemas()["diagnosis-4"]).validate(document)
    assert (tmp_path / "out.html").read_text().startswith("<!doctype html>")
    assert len(list(tmp_path.iterdir())) == 3


def test_json_alone_on_stdout(tmp_path: Path, run: Run) -> None:
    done = run("inspect", write(tmp_path / "capture.safetensors"), "--json", "-")
    assert json.loads(done.out)["schema"] == "attn-diag-diagnosis"


def test_fail_on(tmp_path: Path, run: Run) -> None:
    noise = torch.randn(1, 2, 24, 16, generator=torch.Generator().manual_seed(1)) / 50
    path = write(tmp_path / "capture.safetensors", GIVEN | {"o": GIVEN["o"] * (1 + noise).bfloat16()})
    assert run("inspect", path, "--fail-on", "lossy,biased").code == 1
    assert run("inspect", path, "--fail-on", "ill_conditioned").code == 0


def test_fail_on_says_which_graver_label_it_passes_over(tmp_path: Path, run: Run) -> None:
    """A head that is wrong is not asked whether it is lossy."""
    path = write(tmp_path / "capture.safetensors", GIVEN | {"o": GIVEN["o"].flip(1)})
    done = run("inspect", path, "--fail-on", "lossy")
    assert done.code == 0
    assert "heads are wrong, for which --fail-on does not fail: add wrong" in done.err
    done = run("inspect", path, "--fail-on", "lossy,wrong")
    assert done.code == 1
    assert "--fail-on" not in done.err
    assert "--fail-on" not in run("inspect", path).err


def test_a_format_without_a_well_rounded_kernel_is_held_against_the_truth(tmp_path: Path, run: Run) -> None:
    """dQ = 0 in FP32: neither the head's fault nor as good as it gets; how well O is rounded is not asked."""
    q, k, v, do = (torch.randn(1, 1, 32, 16, generator=torch.Generator().manual_seed(i)) for i in range(4))
    sdpa = torch.nn.functional.scaled_dot_product_attention
    o = sdpa(q.double(), k.double(), v.double(), is_causal=True).float()
    given = {"q": q, "k": k, "v": v, "do": do, "o": o, "dq": torch.zeros_like(q)}
    done = run("inspect", write(tmp_path / "capture.safetensors", given), "--causal", "top-left", COLUMNS="400")
    assert done.out.startswith("WRONG: head 0.\n")
    assert "dQ is 100 % off, which no rounding makes: all rows are zero" in " ".join(done.out.split())
    assert "well-rounded kernel's is" not in done.out
    assert "Not judged: O (no well-rounded kernel of this format to compare with), LSE, delta, dK" in done.out


def test_nonfinite_input_is_reported_and_the_rest_analysed(tmp_path: Path, run: Run) -> None:
    tensors = rounded_inputs()
    tensors["v"][0, 1, 20, 5] = torch.nan
    tensors["q"][0, 0, 3, :2] = torch.inf
    done = run("inspect", write(tmp_path / "capture.safetensors", tensors), "--json", "-", "--json-full")
    assert "2 NaN or Inf in q, first at [0, 0, 3, 0]" in done.err
    assert "1 NaN or Inf in v, first at [0, 1, 20, 5]" in done.err
    document = json.loads(done.out)
    heads = document["captures"][0]["observations"][0]["heads"]
    assert [(head["rows_all"], head["rows_nonfinite"]) for head in heads] == [(23, 1), (20, 4), (43, 5)]
    jsonschema.Draft202012Validator(attn_diag.json_schema()).validate(document)
    found = [(n["tensor"], n["count"], n["first"]) for n in document["captures"][0]["nonfinite"]]
    assert sorted(found) == [("q", 2, [0, 0, 3, 0]), ("v", 1, [0, 1, 20, 5])]


def test_one_unreadable_of_several(tmp_path: Path, run: Run) -> None:
    write(tmp_path / "a.safetensors")
    truncated(tmp_path / "b.safetensors")
    done = run("inspect", tmp_path, "--json", "-")
    assert done.code == 2
    assert "b.safetensors: truncated" in done.err
    document = json.loads(done.out)
    assert len(document["captures"]) == 1
    assert "b.safetensors" in document["summary"]["unreadable"][0]
    truncated(tmp_path / "a.safetensors")
    done = run("inspect", tmp_path, "--json", "-")
    assert (done.code, done.out) == (2, "")
    assert "a.safetensors: truncated" in done.err
    assert "none of the captures could be read" in done.err


def test_mistyped_path_among_several(tmp_path: Path, run: Run) -> None:
    fine, typo, bare = write(tmp_path / "a.safetensors"), tmp_path / "b.safetensors", tmp_path / "bare"
    bare.mkdir()
    done = run("inspect", typo, bare, fine, "--json", "-")
    assert done.code == 2
    assert f"attn-diag: {typo}: no such file or directory\n" in done.err
    assert f"attn-diag: {bare}: no captures in this directory" in done.err
    document = json.loads(done.out)
    assert [c["source"] for c in document["captures"]] == [str(fine)]
    assert [u.partition(": ")[0] for u in document["summary"]["unreadable"]] == [str(typo), str(bare)]
    done = run("inspect", typo, bare)
    assert (done.code, done.out) == (2, "")
    assert "none of the captures could be read" in done.err
    done = run("inspect", "--example", typo)
    assert done.code == 2
    assert "ILL-CONDITIONED: layer 2, head 4" in done.out


def test_option_that_fits_no_file_is_said_once(tmp_path: Path, run: Run) -> None:
    for name in ("a", "b"):
        write(tmp_path / f"{name}.safetensors", layer="3")
    done = run("inspect", tmp_path, "--causal", "yes")
    assert done.code == 2
    assert done.err.count("causal must be one of") == 1
    assert "they are of 3 (got --layer 0-2)" in run("inspect", tmp_path, "--layer", "0-2").err


def test_file_named_twice_counts_once(tmp_path: Path, run: Run) -> None:
    path = write(tmp_path / "a.safetensors")
    done = run("inspect", path, tmp_path, "--json", "-")
    assert len(json.loads(done.out)["captures"]) == 1


def test_extreme_scale_of_a_file_is_no_internal_error(tmp_path: Path, run: Run) -> None:
    # Its square is a number, the square of that (tried as another reading) is not.
    path = write(tmp_path / "a.safetensors", scale="1e100")
    done = run("inspect", path)
    assert done.code == 2
    assert "scale=0.25 (1/sqrt(D)) fits" in done.err


UNUSABLE: dict[str, tuple[dict[str, Tensor], list[str], str]] = {
    "w_q": (
        GIVEN | {"x": torch.ones(1, 24, 8), "w_q": torch.ones(16, 8)},
        [],
        "w_q must have D * heads = 32 rows for this capture's 2 heads",
    ),
    "observation": (
        {"flash.o" if n == "o" else n: t for n, t in GIVEN.items()},
        ["--observation", "observed"],
        "no observation 'observed'; it has flash",
    ),
    "head": ({n: t[:, :1] for n, t in GIVEN.items()}, ["--head", "1"], "no head 1; the capture has 0 (got --head 1)"),
    "recipe": (
        {n: t.float() for n, t in GIVEN.items()},
        ["--recipe", "fa2"],
        "recipes are run for bfloat16 and float16 inputs, q is float32",
    ),
}


@pytest.mark.parametrize("case", UNUSABLE)
def test_one_unusable_of_several(case: str, tmp_path: Path, run: Run) -> None:
    tensors, options, message = UNUSABLE[case]
    bad, fine = write(tmp_path / "a.safetensors", tensors), write(tmp_path / "b.safetensors")
    done = run("inspect", bad, fine, *options, "--json", "-")
    assert done.code == 2
    assert f"attn-diag: {bad}: {message}" in done.err
    document = json.loads(done.out)
    assert [c["source"] for c in document["captures"]] == [str(fine)]
    assert [u.startswith(f"{bad}: ") for u in document["summary"]["unreadable"]] == [True]
    twin = write(tmp_path / "twin.safetensors", tensors)
    for several in ([bad], [bad, twin]):
        done = run("inspect", *several, *options, "--json", tmp_path / "out.json")
        assert (done.code, done.out) == (2, "")
        assert [f"attn-diag: {path}: {message}" in done.err for path in several] == [True] * len(several)
        assert not (tmp_path / "out.json").exists()


def test_contradicted_metadata_give_no_verdict(tmp_path: Path, run: Run) -> None:
    done = run("inspect", write(tmp_path / "capture.safetensors"), "--causal", "none", "--json", "-", "--json-full")
    assert done.code == 2
    assert "causal=top-left fits" in done.err
    assert all(h["verdict"] is None for h in json.loads(done.out)["captures"][0]["observations"][0]["heads"])


def test_file_without_metadata_states_its_defaults(tmp_path: Path, run: Run) -> None:
    path = tmp_path / "capture.safetensors"
    save_file(rounded_inputs(), path)
    done = run("inspect", path, "--causal", "top-left", "--scale", "0.25")
    assert done.code == 0
    assert "assumed: layout=BHTD (default)" in done.out


def test_example(run: Run) -> None:
    done = run("inspect", "--example")
    assert done.code == 0
    assert "ill_conditioned" in done.out


def test_env(run: Run) -> None:
    assert f"torch {torch.__version__}" in run("env").out


def test_help_imports_neither_torch_nor_scipy() -> None:
    heavy = ("torch", "scipy", "numpy")
    group = get_command(app)
    assert isinstance(group, TyperGroup)
    asked = [["--help"], ["--version"], *([name, "--help"] for name in group.commands)]
    done = python("-c", "\n".join(command(*arguments) for arguments in asked))
    assert done.code == 0, done.err
    for words in ("inspect", attn_diag.__version__, "--lse-base", "--fail-on"):
        assert words in done.out
    assert done.out.count("Usage: attn-diag") == len(asked) - 1
    assert loaded_by("\n".join(command(*arguments) for arguments in asked), *heavy) == set()
    assert loaded_by("import numpy", *heavy) == {"numpy"}, "the check cannot fail"


def test_internal_errors_exit_with_3(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr("attn_diag.head.open.check_observation", broken)
    done = run("inspect", write(tmp_path / "capture.safetensors"))
    assert done.code == 3
    assert "internal error: RuntimeError: planted" in done.err
    assert "Traceback" not in done.err
    assert "Traceback" in run("inspect", tmp_path / "capture.safetensors", "--debug").err


@pytest.mark.parametrize("option", ["--json", "--html"])
def test_failing_write_leaves_nothing(option: str, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "capture.safetensors")

    def full_disk(self: Path, _: Path) -> None:
        assert self.stat().st_size
        raise OSError(28, "No space left on device")

    # The last step, which JSON and page have in common.
    monkeypatch.setattr(Path, "replace", full_disk)
    done = run("inspect", path, option, tmp_path / "out")
    assert done.code == 2
    assert f"cannot write {tmp_path / 'out'}: No space left on device" in done.err
    assert list(tmp_path.iterdir()) == [path]


def test_links_devices_and_pipes_are_written_through(tmp_path: Path, run: Run) -> None:
    path, link, pipe = write(tmp_path / "capture.safetensors"), tmp_path / "link.json", tmp_path / "pipe"
    link.symlink_to("target.json")
    os.mkfifo(pipe)
    # A page is larger than a pipe holds.
    with ThreadPoolExecutor(1) as reader:
        page = reader.submit(pipe.read_bytes)
        assert run("inspect", path, "--json", link, "--html", pipe).code == 0
        assert page.result(timeout=60).startswith(b"<!doctype html>")
    assert link.is_symlink()
    assert pipe.is_fifo()
    assert json.loads((tmp_path / "target.json").read_text())["schema"] == "attn-diag-diagnosis"
    device = tmp_path / "null"
    device.symlink_to("/dev/null")
    assert run("inspect", path, "--json", device).code == 0
    assert device.is_char_device()
    assert not list(tmp_path.glob(".*"))


def test_outputs_overwrite_neither_each_other_nor_a_capture(tmp_path: Path, run: Run) -> None:
    path = write(tmp_path / "capture.safetensors")
    before = path.read_bytes()
    done = run("inspect", path, "--json", tmp_path / ".." / tmp_path.name / path.name)
    assert done.code == 2
    assert "is a capture to be inspected and would be overwritten" in done.err
    done = run("inspect", path, "--json", tmp_path / "out", "--html", tmp_path / "." / "out")
    assert done.code == 2
    assert "is to be written twice; give each output a file of its own" in done.err
    assert "only --json writes to stdout" in run("inspect", path, "--html", "-").err
    assert run("inspect", path, "--json", "x" * 300).code == 2
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


INTERRUPTING = "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nlen(str())\n"


def test_ctrl_c_while_a_module_is_imported(tmp_path: Path) -> None:
    """What is raised then is swallowed, or becomes another error, by torch and NumPy."""
    (tmp_path / "torch.py").write_text(f"try:\n    exec({INTERRUPTING!r})\nexcept BaseException:\n    swallowed")
    path = os.pathsep.join([str(tmp_path), *sys.path])
    done = python("-m", "attn_diag", "inspect", "--example", PYTHONPATH=path)
    assert done == (130, "", "attn-diag: interrupted\n")


def test_ctrl_c_elsewhere() -> None:
    source = f"import attn_diag.cli, attn_diag.__main__\nattn_diag.cli.main = lambda: exec({INTERRUPTING!r})\n"
    assert python("-c", f"{source}attn_diag.__main__.main()") == (130, "", "attn-diag: interrupted\n")


def test_ctrl_c_in_a_script_is_the_script_s(tmp_path: Path) -> None:
    (tmp_path / "victim.py").write_text(INTERRUPTING)
    (tmp_path / "train.py").write_text("try:\n    import victim\nexcept KeyboardInterrupt:\n    raise SystemExit(7)\n")
    assert python("-m", "attn_diag", "dtypes", tmp_path / "train.py").code == 7


def test_module_as_a_program(tmp_path: Path, programs: Programs) -> None:
    path = truncated(tmp_path / "capture.safetensors")
    done = programs.run("attn_diag", "inspect", path)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(f"attn-diag: {path}: truncated or damaged")
    assert len(done.err.splitlines()) == 1


@pytest.mark.parametrize(
    ("stdout", "report", "code", "message"),
    [
        ("closed-pipe", [], 0, ""),
        ("closed-pipe", ["--json", "-"], 0, ""),
        ("full", ["--json", "-"], 2, "cannot write to stdout: No space left on device"),
        ("ascii", [], 0, ""),
    ],
    ids=["closed-pipe", "closed-pipe-json", "full", "ascii"],
)
def test_stdout_that_takes_no_report(
    stdout: str, report: list[str], code: int, message: str, tmp_path: Path, programs: Programs
) -> None:
    environment = {"PYTHONIOENCODING": "ascii"} if stdout == "ascii" else {}
    target = {"closed-pipe": "closed pipe", "full": "/dev/full", "ascii": ""}[stdout]
    path = write(tmp_path / "capture.safetensors")
    done = programs.run("attn_diag", "inspect", path, *report, stdout=target, **environment)
    assert done.code == code, done.err
    assert message in done.err
    assert len(done.err.splitlines()) == bool(message)
    assert stdout != "ascii" or (done.out.isascii() and "judged" in done.out)


def test_a_closed_stderr_leaves_stdout_to_the_json(tmp_path: Path) -> None:
    program = f"exec {sys.executable} -m attn_diag inspect a.safetensors missing.pt --json - 2>&-"
    write(tmp_path / "a.safetensors")
    done = subprocess.run(["sh", "-c", program], check=False, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2
    assert json.loads(done.stdout)["schema"] == "attn-diag-diagnosis"


def test_a_files_name_that_is_no_utf8(tmp_path: Path, run: Run) -> None:
    path = tmp_path / "\udcff.pt"
    try:
        torch.save(GIVEN, tmp_path / "a.pt")
        (tmp_path / "a.pt").rename(path)
    except OSError:
        pytest.skip("this file system has UTF-8 names alone")
    for full in ([], ["--json-full"]):
        assert run("inspect", path, "--causal", "top-left", "--json", tmp_path / "out.json", *full).code == 0
        found = attn_diag.Diagnosis.from_json((tmp_path / "out.json").read_bytes())
        assert found.captures[0].source.endswith("/�.pt")


def valid_bytes(suffix: str, folder: Path) -> bytes:
    path = folder / f"valid{suffix}"
    if suffix == ".safetensors":
        write(path)
    elif suffix == ".pt":
        torch.save(GIVEN, path)
    else:
        arrays: dict[str, Any] = {n: t.float().numpy() for n, t in GIVEN.items()}
        np.savez(path, **arrays)
    return path.read_bytes()


@pytest.mark.parametrize("suffix", [".safetensors", ".pt", ".npz"])
@settings(
    max_examples=150, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_mutated_files_load_or_are_refused(suffix: str, tmp_path: Path, data: st.DataObject) -> None:
    original = valid_bytes(suffix, tmp_path)
    content = bytearray(original)
    # Damage near the headers is the most interesting.
    near = st.one_of(st.integers(0, min(400, len(original) - 1)), st.integers(0, len(original) - 1))
    for _ in range(data.draw(st.integers(1, 4))):
        kind, at = data.draw(st.sampled_from(["flip", "cut", "insert"])), data.draw(near)
        at = min(at, max(len(content) - 1, 0))
        if kind == "flip" and content:
            content[at] = data.draw(st.integers(0, 255))
        elif kind == "cut":
            del content[at : at + data.draw(st.integers(1, 300))]
        else:
            content[at:at] = data.draw(st.binary(min_size=1, max_size=20))
    path = tmp_path / f"mutated{suffix}"
    path.write_bytes(bytes(content))
    try:
        capture = attn_diag.load(path)
    except attn_diag.InputError as error:
        if str(path) not in str(error):
            pytest.fail(f"the message does not name the file: {error}")
    else:
        for name, tensor in capture.tensors.items():
            assert tensor[...].shape == torch.Size(tensor.shape), name


@pytest.mark.parametrize("name", ["hunt", "capture", "Monitor", "break_if", "explain"])
def test_what_the_docs_call_by_a_name_that_is_no_command_is_pointed_to(name: str, run: Run) -> None:
    done = run(name, "somewhere")
    assert done.code == 2
    assert done.err.startswith(f"attn-diag: there is no command '{name}': attn")


@pytest.mark.parametrize(
    ("given", "spins"), [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, None)]
)
def test_waiting_threads_sleep_unless_the_user_says_otherwise(given: dict[str, str], spins: str | None) -> None:
    code = (
        "import os, sys; sys.argv = ['attn-diag', '--version']; from attn_diag import __main__\n"
        "try:\n    __main__.main()\nexcept SystemExit:\n    print(os.environ.get('GOMP_SPINCOUNT'))\n"
        "print('torch' in sys.modules)"
    )
    kept = {k: v for k, v in os.environ.items() if k not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    done = subprocess.run([sys.executable, "-c", code], env=kept | given, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[1:] == [str(spins), "False"]
