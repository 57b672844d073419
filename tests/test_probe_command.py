"""``attn-diag probe``: its exit codes, and what cannot be probed."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import Run
from probed_kernels import SHAPE, Fn, kernel, nearest, run
from torch import Tensor

import attn_diag
from attn_diag.testing.probing.catalogue import PROBES

pytestmark = pytest.mark.slow


def raising(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    if q.shape[2] > SHAPE[2]:
        raise RuntimeError("T must be 96")
    return kernel()(q, k, v)


def returning(change: Callable[[Tensor], Any]) -> Fn:
    def fn(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return change(kernel()(q, k, v))

    return fn


def vandal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    o = kernel()(q, k, v)
    k.zero_()
    return o


BAD: dict[str, tuple[Any, dict[str, Any], str]] = {
    "shape": (returning(lambda o: o[:, :, 1:]), {}, r"\[B, H, T, D\] \[2, 8, 96, 32\], got \[2, 8, 95, 32\]"),
    "dtype": (returning(lambda o: o.double()), {}, "o in torch.bfloat16 or torch.float32, got torch.float64"),
    "device": (returning(lambda o: o.to("meta")), {}, "must return o on cpu, got meta"),
    "nothing": (returning(repr), {}, "must return a tensor o, .* got str"),
    "raises": (raising, {}, "probe 'length': raising raised RuntimeError .*: T must be 96; leave this probe out"),
    "in place": (
        vandal,
        {},
        r"probe 'normal': vandal writes into its input k \([\d.]+ (% )?of its \d+ elements, first at ",
    ),
    "no callable": (3, {}, "expected a callable fn"),
    "recipe": ("fa9", {}, "no recipe 'fa9'; known: fa2"),
    "incomplete": (replace(attn_diag.preset("fa2"), exp="polynomial"), {}, "without exp_degree"),
    "recipe dtype": ("fa2", {"dtype": torch.float32}, "recipes are run for bfloat16 and float16"),
    "probe": (kernel(), {"probes": ["one"]}, "no probe 'one'; known: normal"),
    "no probe": (kernel(), {"probes": []}, "at least one"),
    "probes in a string": (kernel(), {"probes": "ones"}, r"a list of names, got the string 'ones'; pass \['ones'\]"),
    "int dtype": (kernel(), {"dtype": torch.int8}, "dtype must be torch.bfloat16"),
    "three sizes": (kernel(), {"shape": (1, 2, 3)}, "four positive integers"),
    "short": (kernel(), {"shape": (1, 2, 3, 16)}, "length T must be at least 16, got 3"),
    "level": (kernel(), {"level": 0}, "level must lie between 0 and 1"),
    "scale": (kernel(), {"scale": -1}, "scale must be a positive number"),
    "causal": (kernel(), {"causal": "left"}, "causal must be none, top-left"),
    "normaliser": (kernel(), {"dtype": torch.float32, "probes": ["normaliser-up"]}, "no probe of float32"),
    "cuda": (kernel(), {"device": "tpu"}, "device must be auto, cpu or cuda"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_probed_is_said(case: str) -> None:
    fn, options, message = BAD[case]
    with pytest.raises(attn_diag.InputError, match=message):
        run(fn, **options)


@pytest.mark.parametrize("name", [n for n in PROBES if n not in ("repeat", "batch", "sign", "power-of-two")])
def test_inputs_beyond_the_dtype_name_the_scale_and_are_never_passed_on(name: str) -> None:
    """Not the kernel but the probe's own q and k would be infinite."""

    def attempt(scale: float) -> attn_diag.ProbeReport:
        fn = kernel(scale=scale * SHAPE[3] ** 0.5, cast=lambda o: nearest(o, torch.float16))
        return run(fn, dtype=torch.float16, scale=scale, probes=[name])

    # One that does not use the scale runs with any.
    if name in ("normal", "ones", "unit-vectors", "ramp", "constant-rows", "outliers"):
        assert "nonfinite" not in attempt(1e-6).labels
        return
    message = rf"probe '{name}': .* within 65504, the largest float16, got .* scale 1e-06; pass a larger scale"
    with pytest.raises(attn_diag.InputError, match=message):
        attempt(1e-6)
    assert "nonfinite" not in attempt(1e-2).labels


@pytest.mark.parametrize("always", [True, False], ids=["always NaN", "NaN in every second call"])
def test_nan_in_some_rows_is_broken_and_not_invariant_only_if_it_changes(always: bool) -> None:
    calls = iter(range(10**9))

    def some(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        o = kernel()(q, k, v)
        if always or next(calls) % 2 == 0:
            o[0, 0, 3] = torch.nan
        return o

    found = run(some, probes=["normal", "repeat", "sign"])
    assert found["repeat"].labels == ("nonfinite", "broken", *([] if always else ["not-invariant"]))
    assert ("The same call gives different results" in " ".join(found.summary)) == (not always)
    assert found["repeat"].differing == (0 if always else SHAPE[3])
    if always:
        assert found["normal"].labels == ("nonfinite", "broken")
        assert found["normal"].nonfinite == SHAPE[3]
        assert found["sign"].labels == ("nonfinite", "broken")
        assert found["sign"].words.endswith("the same in both calls")
        assert len(found.summary) == 1
        assert found.summary[0].startswith("NaN or Inf: normal, repeat, sign. Mend that first")
        old = found.to_json().replace('"nonfinite",', "")
        assert attn_diag.ProbeReport.from_json(old).labels == {"broken"}, "documents from before the label still read"


@pytest.fixture
def cli(run: Run) -> Run:
    """``attn-diag probe ...`` on small inputs."""
    return lambda *arguments, **_: run("probe", *arguments, "--shape", "2,8,48,16", "--device", "cpu")


def test_cli_exit_codes(cli: Run) -> None:
    code, out, _ = cli("fa2", "--probes", "ones,normaliser-down,normaliser-up")
    assert code == 0
    assert "does not match the weights" in out
    assert cli("fa2", "--probes", "ones,normaliser-up", "--fail-on", "biased")[0] == 1
    assert cli("lowp-row-sum", "--probes", "normaliser-up", "--fail-on", "biased,too-large")[0] == 0
    assert cli("lowp-row-sum", "--probes", "normaliser-up", "--fail-on", "lse-biased")[0] == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fa9"], "no recipe 'fa9'"),
        (["fa2", "--dtype", "fp8"], "--dtype must be one of bf16, fp16, fp32"),
        (["fa2", "--probes", "one"], "no probe 'one'"),
        (["fa2", "--fail-on", "bad"], "--fail-on: no label bad"),
        (["no_such_module:f"], "cannot import no_such_module:f"),
        (["math:f"], "cannot import math:f"),
        (["math.py:sqrt"], "name the module, not its file: math:sqrt"),
        (["torch:__version__"], "no recipe"),
        (["torch.nn.functional:scaled_dot_product_attention", "--scale", "1", "--probes", "sign"], "no verdict: On N"),
    ],
)
def test_cli_refuses(cli: Run, arguments: list[str], message: str) -> None:
    code, _, err = cli(*arguments)
    assert code == 2
    assert message in err


@pytest.mark.parametrize(
    ("source", "why"), [("def f(:", "SyntaxError: invalid"), ("raise RuntimeError('no GPU')", "RuntimeError: no GPU")]
)
def test_a_module_that_cannot_be_imported_is_no_internal_error(
    cli: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, why: str
) -> None:
    (tmp_path / "my_broken_kernel.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    code, _, err = cli("my_broken_kernel:f")
    assert code == 2
    assert f"cannot import my_broken_kernel:f: {why}" in err


def test_cli_probes_a_function_of_the_working_directory(
    cli: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "from torch.nn.functional import scaled_dot_product_attention as attend\n"
    (tmp_path / "my_own_kernel.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    code, out, _ = cli("my_own_kernel:attend", "--probes", "sign", "--json", "-")
    assert code == 0
    assert json.loads(out)["source"] == "my_own_kernel:attend"
    assert "" not in sys.path
