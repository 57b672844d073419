"""What a notebook shows: text where text is asked for, and one display of a result.

IPython's own shell runs the cells, under the name by which rich knows a notebook's (ipykernel's has it).
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from command_line import python

CELLS = """
import contextlib, io, json, sys, warnings
from IPython.core.displaypub import CapturingDisplayPublisher
from IPython.core.interactiveshell import InteractiveShell
from rich.console import Console

class Hook:
    # What ipykernel's hook sends to the page as the cell's result.
    def __init__(self, shell): self.shell, self.shown = shell, []
    def __call__(self, result=None):
        if result is not None:
            self.shown.append(self.shell.display_formatter.format(result)[0])

ZMQInteractiveShell = type("ZMQInteractiveShell", (InteractiveShell,), {})
shell = ZMQInteractiveShell.instance(display_pub_class=CapturingDisplayPublisher)
hook = Hook(shell)

def cell(source):
    shell.display_pub.outputs.clear(); hook.shown.clear()
    sys.displayhook, said = hook, io.StringIO()
    kept, shell.display_trap.hook = shell.display_trap.hook, hook
    with contextlib.redirect_stdout(said):
        done = shell.run_cell(source, silent=False)
    shell.display_trap.hook = kept
    done.raise_error()
    return {"stdout": said.getvalue(), "displayed": len(shell.display_pub.outputs), "results": list(hook.shown)}

told = {name: cell(source) for name, source in json.loads(sys.argv[1]).items()}
print("told:" + json.dumps(told))
"""
SETUP = """
import torch, attn_diag
g = torch.Generator().manual_seed(0)
q, k, v, do = (torch.randn(1, 2, 24, 16, generator=g).bfloat16() for _ in range(4))
o = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
found = attn_diag.inspect(q, k, v, o=o, do=do, causal=True, device="cpu")
"""


@pytest.fixture(scope="module")
def told() -> dict[str, Any]:
    pytest.importorskip("IPython")
    cells = {
        "setup": SETUP,
        "a notebook, to rich": "from rich.console import Console\nprint(Console().is_jupyter)",
        "report": "print(found.report())",
        "length": "print(len(found.report()), len(str(attn_diag.explain(found))), len(repr(found)))",
        "explain": "print(attn_diag.explain(found))",
        "plain": "from attn_diag.reports.renderers import plain_text\nprint(plain_text(found))",
        "found": "found",
        "explained": "attn_diag.explain(found)",
        "attribute": "attributed = attn_diag.attribute(q, k, v, o=o, do=do, causal=True, device='cpu')\nattributed",
        "several": "attn_diag.attribute([attn_diag.Capture.from_tensors({'q': q, 'k': k, 'v': v})])",
    }
    done = python("-W", "ignore", "-c", CELLS, json.dumps(cells))
    assert done.code == 0, done.err
    found: dict[str, Any] = json.loads(done.out.rpartition("told:")[2])
    assert found["a notebook, to rich"]["stdout"] == "True\n"
    return found


@pytest.mark.parametrize("name", ["report", "explain", "plain"])
def test_text_is_text(name: str, told: dict[str, Any]) -> None:
    cell = told[name]
    assert (cell["displayed"], cell["results"]) == (0, [])
    assert "H0" in cell["stdout"] or "head 0" in cell["stdout"]
    assert len(cell["stdout"].splitlines()) > 5
    assert all(int(length) > 100 for length in told["length"]["stdout"].split())


@pytest.mark.parametrize("name", ["found", "explained", "attribute", "several"])
def test_a_result_is_displayed_once(name: str, told: dict[str, Any]) -> None:
    cell = told[name]
    assert (cell["displayed"], cell["stdout"]) == (0, "")
    (shown,) = cell["results"]
    assert set(shown) == {"text/plain", "text/html"}
    assert len(shown["text/html"]) > 200
    assert shown["text/plain"].strip()
