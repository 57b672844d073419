"""What many tests start from: the stored captures and their diagnoses, and inputs with an O that is known."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from made_once import made_once
from torch import Tensor

import attn_diag
from attn_diag.head.assumptions import check_assumptions
from attn_diag.head.read import NonFiniteCensus, read_head
from attn_diag.kernels import Recipe, emulate_head
from attn_diag.reference import AttentionHead, BoundCollector, HeadBounds, HeadReference, Masking, reference_head
from attn_diag.results.diagnosis import CaptureDiagnosis, HeadDiagnosis

T = TypeVar("T")
CAPTURES = Path(__file__).parent / "captures"
SHARED = sorted(path.stem for path in CAPTURES.glob("*.safetensors"))


def stored(name: str) -> attn_diag.Capture:
    """A real capture, by the name of its file."""
    return attn_diag.load(CAPTURES / f"{name}.safetensors")


@made_once
def inspected(name: str, details: int = 0) -> attn_diag.Diagnosis:
    """The diagnosis of a real capture, made once."""
    return attn_diag.inspect_captures([stored(name)], device="cpu", details=details)


def true_o(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, *, causal: bool = True) -> Tensor:
    """softmax(scale · Q Kᵀ) V in float64, [B, H, T, D], with as many keys as queries; heads may share keys."""
    k, v = (x.double().repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q.double() @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
    return scores.softmax(-1) @ v


def rounded_inputs(
    heads: int = 2,
    rows: int = 24,
    *,
    batch: int = 1,
    kv_heads: int | None = None,
    d: int = 16,
    seed: int = 0,
    causal: bool = True,
) -> dict[str, Tensor]:
    """Normal q, k, v and dO [batch, heads, rows, d] in BF16, and O, one rounding away from the truth."""
    generator = torch.Generator().manual_seed(seed)
    counts = {"q": heads, "k": kv_heads or heads, "v": kv_heads or heads, "do": heads}
    found = {n: torch.randn(batch, count, rows, d, generator=generator).bfloat16() for n, count in counts.items()}
    return found | {"o": true_o(found["q"], found["k"], found["v"], causal=causal).bfloat16()}


def with_findings(diagnosis: attn_diag.Diagnosis, captures: Sequence[CaptureDiagnosis]) -> attn_diag.Diagnosis:
    """The diagnosis of other captures, with what their heads share."""
    return attn_diag.Diagnosis(diagnosis.tool, diagnosis.family, tuple(captures), diagnosis.summary)


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


def rounded_dq(given: dict[str, Tensor]) -> Tensor:
    """dQ of such inputs under a causal mask in BF16, one rounding away from the truth."""
    q = given["q"].double().requires_grad_()
    (dq,) = torch.autograd.grad(true_o(q, given["k"], given["v"]), q, given["do"].double())
    return dq.bfloat16()


def first_head(diagnosis: attn_diag.Diagnosis) -> HeadDiagnosis:
    """The first head of the first observation."""
    return diagnosis.captures[0].observations[0].heads[0]


def with_bounds(head: AttentionHead) -> tuple[HeadReference, HeadBounds]:
    """The float64 reference of a head, streamed in blocks of five rows, and how far it may be off."""
    bounds = BoundCollector(head)
    found = reference_head(head, bounds.add, gradient_sums=True, block_rows=5)
    return found, bounds.bounds(found)


def labels_of(found: CaptureDiagnosis) -> set[str]:
    """The labels of all heads of the first observation."""
    return {label for head in found.observations[0].heads if head.verdict for label in head.verdict.labels}


def visible_pairs(masking: Masking, queries: int, keys: int) -> Tensor:
    """Which pairs may attend, spelled out pair by pair; [queries, keys]."""
    m, found = masking, torch.zeros(queries, keys, dtype=torch.bool)
    left, right = m.window or (-1, -1)
    for t, j in product(range(queries), range(keys)):
        if m.positions is not None:
            position = int(m.positions[t])
        else:
            position = t if m.causal == "top-left" else t + keys - queries
        seen = m.causal == "none" or j <= position
        seen &= (left < 0 or j >= position - left) and (right < 0 or j <= position + right)
        if m.mask is not None:
            seen &= bool(m.mask[t, j]) if m.mask.dtype == torch.bool else float(m.mask[t, j]) > -math.inf
        found[t, j] = seen
    return found


@cache
def hard_fp32() -> npt.NDArray[np.float32]:
    """Every BF16 number, every midpoint of two, the fp32 numbers next to both, and random bit patterns."""
    upper = np.arange(2**16, dtype=np.uint32) << 16
    near = np.concatenate([upper | low for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)])
    random = np.random.default_rng(0).integers(0, 2**32, 200_000, dtype=np.uint64).astype(np.uint32)
    return np.concatenate([near, random]).view(np.float32)


def equal_bits(capture: attn_diag.Capture, observation: str, recipe: Recipe, output: str) -> Tensor:
    """Where the recipe's O or dQ has the captured bits, over all heads of the first sequence [H, T, D]."""
    found = []
    for head in range(capture.q_heads):
        inputs = read_head(capture, 0, head, torch.device("cpu"), NonFiniteCensus()).head
        observed = some(capture.read(capture.key(observation, output), 0, head))
        # O needs no backward.
        given = replace(inputs, do=None) if output == "o" else inputs
        found.append(getattr(emulate_head(recipe, given, key_gradients=False), output) == observed)
    return torch.stack(found)


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
