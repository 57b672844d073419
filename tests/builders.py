"""What many tests start from: the stored captures and their diagnoses, and inputs with an O that is known."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

import attn_diag
from attn_diag.head.assumptions import check_assumptions
from attn_diag.results.diagnosis import HeadDiagnosis

T = TypeVar("T")
CAPTURES = Path(__file__).parent / "captures"
SHARED = sorted(path.stem for path in CAPTURES.glob("*.safetensors"))


def stored(name: str) -> attn_diag.Capture:
    """A real capture, by the name of its file."""
    return attn_diag.load(CAPTURES / f"{name}.safetensors")


@cache
def inspected(name: str, details: int = 0) -> attn_diag.Diagnosis:
    """The diagnosis of a real capture, made once."""
    return attn_diag.inspect_captures([stored(name)], device="cpu", details=details)


def true_o(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, *, causal: bool = True) -> Tensor:
    """softmax(scale · Q Kᵀ) V in float64, [B, H, T, D], with as many keys as queries."""
    scores = q.double() @ k.double().mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
    return scores.softmax(-1) @ v.double()


def rounded_inputs(heads: int = 2, rows: int = 24, *, seed: int = 0, causal: bool = True) -> dict[str, Tensor]:
    """Normal q, k, v and dO [1, heads, rows, 16] in BF16, and O, one rounding away from the truth."""
    generator = torch.Generator().manual_seed(seed)
    found = {n: torch.randn(1, heads, rows, 16, generator=generator).bfloat16() for n in ("q", "k", "v", "do")}
    return found | {"o": true_o(found["q"], found["k"], found["v"], causal=causal).bfloat16()}


def with_heads(diagnosis: attn_diag.Diagnosis, change: Callable[[HeadDiagnosis], HeadDiagnosis]) -> attn_diag.Diagnosis:
    """The diagnosis with every entry of a head changed, those of all heads together left as they are."""
    captures = []
    for capture in diagnosis.captures:
        made = (
            replace(o, heads=tuple(change(h) if h.head is not None else h for h in o.heads))
            for o in capture.observations
        )
        captures.append(replace(capture, observations=tuple(made)))
    return replace(diagnosis, captures=tuple(captures))


def holds(capture: attn_diag.Capture, device: str = "cpu") -> bool | None:
    """Whether ``inspect`` finds O and LSE to be what the metadata say; what it says is shown where a test fails."""
    checked = check_assumptions(capture, list(capture.observations), torch.device(device))
    print(checked.message)
    return checked.ok


def some(value: T | None) -> T:
    """The value, which must be there."""
    assert value is not None, "expected a value, got None"
    return value


class Explosive:
    """Unpickling this would create a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {self.path}",)
