"""What every installation must do, in the current folder: the example, a capture, a monitor, and their reports."""

import json
import subprocess
import sys
import warnings
from importlib.metadata import version
from pathlib import Path

import torch
from torch import nn

import attn_diag


class Attention(nn.Module):
    """Two causal heads of 16 features."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(32, 32, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[1, T, 32] to [1, 2, T, 16]."""
        q, k, v = (f(x).view(1, -1, 2, 16).transpose(1, 2) for f in (self.q, self.k, self.v))
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def run(*words: str) -> str:
    """What a command of this environment prints; it must succeed."""
    return subprocess.run(
        [sys.executable, "-m", "attn_diag", *words], check=True, stdout=subprocess.PIPE, text=True
    ).stdout


def labels(file: str) -> list[list[str]]:
    """Of every head in a command's JSON."""
    table = json.loads(Path(file).read_text())["heads"]
    labels = [found for found, head in zip(table["verdict.labels"], table["head"], strict=True) if head is not None]
    assert labels == [list(head.verdict.labels) for head in attn_diag.read_diagnosis(file).heads if head.verdict]
    return labels


def train(steps: int) -> dict[str, float]:
    """Capture and watch some steps of training; the monitor's figures."""
    model = Attention().bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randn(1, 64, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    monitor = attn_diag.Monitor(model, every=1)
    with attn_diag.capture(model, "captures/", steps=range(steps)), monitor:
        for _ in range(steps):
            model(x).float().square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return monitor.metrics()


warnings.simplefilter("error")
for command in ("--help", "--version", "inspect --help", "env"):
    assert run(*command.split())
run("inspect", "--example", "--json", "example.json", "--html", "example.html")
assert labels("example.json") == [["ill_conditioned"]], labels("example.json")
run("report", "example.json", "--html", "again.html")
assert "ill" in run("report", "example.html")
assert train(3)["attn/nonfinite_rate/max"] == 0
run("inspect", "captures", "--details", "1", "--json", "captures.json", "--html", "captures.html")
assert len(labels("captures.json")) == 6, labels("captures.json")
assert run("report", "captures.html")
assert run("diff", "captures.json", "captures.json")
assert (
    subprocess.run([sys.executable, "-m", "attn_diag", "inspect", "--no-such"], stderr=subprocess.DEVNULL).returncode
    == 2
)
names = ("torch", "triton", "numpy", "scipy", "safetensors", "pydantic", "typer", "rich", "jinja2", "mpmath")
print("works with", ", ".join(f"{name} {version(name)}" for name in names))
