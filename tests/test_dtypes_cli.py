"""``attn-diag dtypes``: the user's script runs as it would alone, and the report stands whatever becomes of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import Done, Run

from attn_diag import DtypeDrift

# RWKV-7's time mix, from facts known of flash-linear-attention: k is promoted by an fp32 parameter.
RWKV = """
import sys
import torch
from torch import nn
from torch.nn import functional as F

class TimeMix(nn.Module):
    def __init__(self, size=64):
        super().__init__()
        self.r, self.k, self.v, self.w = (nn.Linear(size, size, bias=False) for _ in range(4))
        self.k_a = nn.Parameter(torch.ones(size))

    def forward(self, x):
        r, k, v = self.r(x), self.k(x), self.v(x)
        a = torch.sigmoid(self.w(x))
        k = k.addcmul(k * (a - 1), self.k_a)
        r, k, v = (t.view(2, -1, 4, 16).transpose(1, 2) for t in (r, k, v))
        return F.scaled_dot_product_attention(r, k, v)

if __name__ == "__main__":
    model = TimeMix()
    with torch.autocast("cpu", getattr(torch, sys.argv[1])):
        model(torch.randn(2, 8, 64))
"""
FIXED = RWKV.replace("self.k_a)", "self.k_a.to(k.dtype))")
LINE = RWKV.splitlines().index("        k = k.addcmul(k * (a - 1), self.k_a)") + 1


@pytest.fixture
def dtypes(run: Run, tmp_path: Path) -> Callable[..., Done]:
    """``attn-diag dtypes OPTIONS script.py ARGUMENTS``, in this process."""

    def call(source: str | bytes, *arguments: str, options: tuple[str, ...] = (), width: int = 100) -> Done:
        script = tmp_path / "script.py"
        script.write_bytes(source if isinstance(source, bytes) else source.encode())
        return run("dtypes", *options, script, *arguments, COLUMNS=str(width))

    return call


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_addcmul_line_end_to_end(dtypes: Callable[..., Done], tmp_path: Path, dtype: str) -> None:
    target = tmp_path / "found.json"
    done = dtypes(RWKV, dtype, options=("--fail-on", "mixed", "--json", str(target)))
    assert done.code == 1
    found = DtypeDrift.from_json(target.read_text())
    (call,) = found.mixed_calls
    (cause,) = call.causes["k"]
    assert cause.source is not None
    assert (Path(cause.source.file).name, cause.source.line) == ("script.py", LINE)
    assert cause.source.text == RWKV.splitlines()[LINE - 1].strip()
    assert (cause.operation, cause.regime, call.differing) == ("Tensor.addcmul", dtype, ("k",))
    assert f"k is float32, promoted by Tensor.addcmul at script.py:{LINE}" in " ".join(done.out.split())
    assert "self.k_a.to(k.dtype)" in done.out


def test_the_fixed_script_is_clean(dtypes: Callable[..., Done]) -> None:
    done = dtypes(FIXED, "bfloat16", options=("--fail-on", "mixed,alike,elsewhere"))
    assert done.code == 0
    assert "MIXED" not in done.out
    assert "q, k and v share one dtype in the attention call." in done.out


# Rotary embeddings with fp32 cos, as transformers' Llama has them under autocast, without a cache and with one.
ROTARY = """
import torch
from torch.nn import functional as F
q, k, v = (torch.randn(1, 2, 8, 16).bfloat16() for _ in range(3))
cos = torch.ones(16)
with torch.autocast("cpu", torch.bfloat16):
    F.scaled_dot_product_attention(q * cos, k * cos, v)
    F.scaled_dot_product_attention(q * cos, k * cos, torch.cat([torch.zeros(1, 2, 0, 16), v], 2))
"""
TAKEN = "\ntry:\n    F.scaled_dot_product_attention(q, k * cos, v)\nexcept RuntimeError:\n    pass\n"
NARROW = '\nwith torch.autocast("cpu", torch.bfloat16):\n    F.scaled_dot_product_attention(q.half(), k, v)\n'
DOUBLE = NARROW.replace("q.half(), k, v", "q.double(), k.double(), v.double()")


def test_what_autocast_casts_back_is_not_accused(dtypes: Callable[..., Done]) -> None:
    said = " ".join(dtypes(ROTARY, options=("--fail-on", "mixed")).out.split())
    assert said.startswith("OK ")
    assert "autocast makes q, k and v bfloat16 inside 2 attention calls that got wider ones" in said
    assert "FAIL" not in said
    assert "autocast makes all three bfloat16 inside" in said


@pytest.mark.parametrize("other", [TAKEN, NARROW, DOUBLE], ids=["raised", "float16 q", "float64"])
def test_a_call_that_autocast_does_not_settle_fails_and_comes_first(dtypes: Callable[..., Done], other: str) -> None:
    said = " ".join(dtypes(ROTARY + other).out.split())
    assert said.startswith("FAIL")
    assert "in 1 of 3 attention calls" in said


@pytest.mark.parametrize("options", [(), ("--fail-on", "alike")], ids=str)
def test_findings_fail_only_where_asked(dtypes: Callable[..., Done], options: tuple[str, ...]) -> None:
    assert dtypes(RWKV, "bfloat16", options=options).code == 0


def test_what_comes_after_the_script_is_the_scripts(dtypes: Callable[..., Done]) -> None:
    done = dtypes("import sys; print(sys.argv[1:], __name__)", "--json", "x", "-v")
    assert done.out.startswith("['--json', 'x', '-v'] __main__\n")
    assert done.code == 0


def test_modules_beside_the_script_are_found(dtypes: Callable[..., Done], tmp_path: Path) -> None:
    (tmp_path / "beside_the_script.py").write_text("value = 7")
    assert "seven: 7" in dtypes("import beside_the_script as b; print('seven:', b.value)").out


def test_json_alone_on_stdout(dtypes: Callable[..., Done]) -> None:
    done = dtypes("print('of the script')\n" + RWKV, "bfloat16", options=("--json", "-"))
    assert json.loads(done.out)["schema"] == "attn-diag-dtypes"
    assert "of the script" in done.err


def test_what_the_script_raises_is_shown_as_its_own(dtypes: Callable[..., Done]) -> None:
    """Its traceback begins with its own line and shows none of this package's; the report of what was seen follows."""
    failing = RWKV.replace("        model(", "        pass\n    model(").replace("self.v(x)", "self.v(x).bfloat16()")
    done = dtypes(failing, "bfloat16", options=("--fail-on", "alike"))
    assert done.code == 2
    lines = done.err.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert 'script.py"' in lines[1]
    assert lines[-1].startswith("RuntimeError: ")
    assert "diagnostics" not in done.err
    assert "runpy" not in done.err
    assert "Ended early (RuntimeError" in done.out
    assert "MIXED CALL" in done.out
    assert "and raised." in done.out
    assert dtypes(failing, "bfloat16", options=("--fail-on", "mixed")).code == 1


def test_causes_of_exceptions_are_shown_too(dtypes: Callable[..., Done]) -> None:
    done = dtypes("try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise KeyError('k') from e")
    assert done.err.count("Traceback") == 2
    assert done.err.count("script.py") == 2


@pytest.mark.parametrize(
    ("leaving", "code", "said"),
    [
        ("sys.exit()", 0, ""),
        ("sys.exit(7)", 7, ""),
        ("sys.exit('a reason')", 1, "a reason"),
        ("raise KeyboardInterrupt", 130, ""),
    ],
)
def test_the_scripts_own_exit_is_honoured(dtypes: Callable[..., Done], leaving: str, code: int, said: str) -> None:
    done = dtypes(f"import sys, torch\ntorch.ones(3) + 0\n{leaving}\nprint('not reached')")
    assert done.code == code
    assert said in done.err
    assert "2 operations" in done.out
    assert "not reached" not in done.out
    assert ("Ended early" in done.out) == bool(code)


@pytest.mark.parametrize("source", [b"def f(:", b"\xff\xfe", b"a\0b"])
def test_unreadable_scripts(dtypes: Callable[..., Done], source: bytes) -> None:
    done = dtypes(source)
    assert (done.code, done.out) == (2, "")
    assert "is no Python" in done.err
    assert "Traceback" not in done.err


def test_a_missing_script_and_unknown_labels(dtypes: Callable[..., Done], run: Run) -> None:
    assert "no label wrong" in dtypes(RWKV, options=("--fail-on", "wrong")).err
    assert run("dtypes", "/nowhere/x.py").code == 2


@pytest.mark.parametrize("width", [80, 120])
def test_readable_at(dtypes: Callable[..., Done], width: int) -> None:
    out = dtypes(RWKV, "bfloat16", width=width).out
    assert max(map(len, out.splitlines())) <= width
    assert "…" not in out.replace("… ", ""), "a cell is cut off"
    assert f"script.py:{LINE}" in out
