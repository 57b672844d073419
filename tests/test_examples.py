"""The recipes for other people's training scripts: what stands in ``examples`` runs, and changes no training."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_models import nano_gpt, next_token_loss, tokens

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parent.parent / "examples"


def printed(source: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    script = folder / "script.py"
    script.write_text(source)
    left = runpy.run_path(str(script))
    if "monitor" in left:
        left["monitor"].close()  # as the end of the process would
    return capsys.readouterr().out.splitlines()


def test_nanogpt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = (EXAMPLES / "nanogpt.py").read_text()
    bare, parts = re.subn(r"# attn-diag: \d.*?# end\n", "", recipe, flags=re.DOTALL)
    assert parts == 3
    assert "attn_diag" not in bare
    watched, unwatched = (printed(source, tmp_path, capsys) for source in (recipe, bare))

    def own(lines: list[str]) -> list[str]:
        return [line for line in lines if line.startswith("iter") or "val loss" in line]

    assert len(own(watched)) == 10
    assert own(watched) == own(unwatched) == unwatched
    assert [line.split(",")[0] for line in watched if "worst head" in line] == [f"step {i}" for i in (0, 2, 4, 6)]


def test_hf_trainer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed((EXAMPLES / "hf_trainer.py").read_text(), tmp_path, capsys)
    assert "step 5, the worst head of each layer" in lines
    assert lines[-1] == "0 alarms"


def test_a_kernel_under_development() -> None:
    """Its usual test passes, and the check names the mistake."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(EXAMPLES / "kernel")]
    told = subprocess.run(command, capture_output=True, text=True, cwd=EXAMPLES / "kernel", check=False).stdout
    assert "1 failed, 1 passed" in told
    assert "the row sum l, or 1/l, is rounded" in told


def test_the_notebook_runs() -> None:
    cells = json.loads((EXAMPLES / "inspect.ipynb").read_text())["cells"]
    assert all(cell["outputs"] for cell in cells if cell["cell_type"] == "code")
    known: dict[str, Any] = {}
    for cell in cells:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), known)
    assert known["found"].captures[0].observations[0].heads[0].verdict.labels == ("ill_conditioned",)


def test_torchtitan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for the trainer that has what v0.2.2's has; the recipe was imported with the real one by hand."""
    net = nano_gpt().model
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    logged: list[tuple[int, float]] = []
    closed: list[int] = []

    class Trainer:
        def __init__(self, step: int) -> None:
            self.model_parts, self.step = [net], step
            self.job_config = SimpleNamespace(
                job=SimpleNamespace(dump_folder=str(tmp_path)), metrics=SimpleNamespace(enable_wandb=False)
            )
            log = SimpleNamespace(log=lambda metrics, step: logged.append((step, metrics["attn/step"])))
            self.metrics_processor = SimpleNamespace(logger=log)

        def train_step(self, data_iterator: Iterator[torch.Tensor]) -> None:
            for _ in range(2):
                torch.autograd.backward(next_token_loss(net, next(data_iterator)))
            optimizer.step()
            optimizer.zero_grad()

        def train(self, steps: int) -> None:
            data = (tokens(i) for i in range(2 * steps))
            for _ in range(steps):
                self.step += 1
                self.train_step(data)
            self.close()

        def close(self) -> None:
            closed.append(self.step)

    stand_in: Any = ModuleType("torchtitan.train")
    stand_in.Trainer, stand_in.main = Trainer, None
    monkeypatch.setitem(sys.modules, "torchtitan", ModuleType("torchtitan"))
    monkeypatch.setitem(sys.modules, "torchtitan.train", stand_in)
    recipe = (EXAMPLES / "torchtitan_monitor.py").read_text().replace("EVERY = 50", "EVERY = 2")
    script = tmp_path / "recipe.py"
    script.write_text(recipe)
    watched = runpy.run_path(str(script))["WatchedTrainer"]
    watched(0).train(5)
    resumed = watched(4)
    resumed.train(4)
    assert logged == [(2, 2), (4, 4), (6, 6), (8, 8)]
    assert closed == [5, 8]
    assert [check.step for check in resumed.monitor.history] == [2, 4, 6, 8]
