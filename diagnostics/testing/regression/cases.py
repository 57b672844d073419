"""The suite of inputs: named, drawn from a seed on the CPU, 16 independent sequences each; and users' captures."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attn_diag.captures.capture import Capture
from attn_diag.captures.metadata import Causal
from attn_diag.errors import InputError
from attn_diag.testing.probing import inputs

BUILDERS: dict[str, inputs.Builder] = {
    "normal": inputs.normal,
    "pairs": inputs.duplicate_keys,
    "sinks": inputs.sinks,
    "tails": inputs.long_tails,
    "outliers": inputs.outliers,
    "one-hot": inputs.one_hot_rows,
    "ones": inputs.ones,
    "constant-rows": inputs.constant_rows,
    "ramp": inputs.ramp,
    "normaliser-down": inputs.normaliser_down,
    "normaliser-up": inputs.normaliser_up,
}
# Independent sequences, the clusters of the tests: t with 15 degrees of freedom.
SEQUENCES = 16
# Two 128-key tiles, the second half full: the order of keys matters, and so does what a kernel does at an edge.
LENGTH = 192


@dataclass(frozen=True)
class CaseInputs:
    """q [B, Hq, Tq, D], k, v [B, Hk, Tk, D] and dO [B, Hq, Tq, D] (or None) on the CPU; what to compute of them."""

    name: str
    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor | None
    scale: float
    causal: Causal
    capture: Capture | None = None

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the inputs' bits, shapes and dtypes, of the scale and the mask."""
        tensors = {"q": self.q, "k": self.k, "v": self.v} | ({} if self.do is None else {"do": self.do})
        return fingerprint(tensors, f"{self.scale!r} {self.causal}")


def fingerprint(tensors: dict[str, Tensor], also: str = "") -> str:
    """SHA-256 over names, dtypes, shapes and bits."""
    digest = hashlib.sha256(also.encode())
    for name, tensor in tensors.items():
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)} ".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def choose(names: Iterable[str] | None) -> list[str]:
    """These cases in the suite's order; all for None. Raises InputError for unknown names, for a str and for none."""
    if names is None:
        return list(BUILDERS)
    if isinstance(names, str):
        raise InputError(f"cases must be a list of names, got the string {names!r}; pass [{names!r}]")
    wanted = list(names)
    if unknown := [n for n in wanted if n not in BUILDERS]:
        raise InputError(f"no case {', '.join(map(repr, unknown))}; known: {', '.join(BUILDERS)}")
    return [name for name in BUILDERS if name in wanted]


def draw(
    name: str, seed: int, *, dtype: torch.dtype, causal: Causal, head_dim: int, scale: float, length: int = LENGTH
) -> CaseInputs:
    """A case of the suite; every (seed, name) has draws of its own. dO from N(0,1) in ``dtype``."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {seed}".encode()))
    how = inputs.Draw(SEQUENCES, 1, length, head_dim, dtype, scale, causal != "none", generator)
    made = BUILDERS[name](how)
    return CaseInputs(name, made.q, made.k, made.values[0], how.normal().to(dtype), scale, causal)


def of_captures(captures: Sequence[Capture]) -> list[CaseInputs]:
    """The inputs of users' captures, named by their files (by their paths where several files have one name).

    Raises InputError for what a callable fn(q, k, v) cannot be given: masks, windows, softcap, chosen rows, FP8.
    """
    names = [Path(c.source).name for c in captures]
    if len(set(names)) < len(names):
        names = [c.source for c in captures]
    found = []
    for name, capture in zip(names, captures, strict=True):
        refuse_what_is_not_run(capture)
        tensors = {n: _whole(capture, n) for n in ("q", "k", "v", "do") if n in capture.tensors}
        case = CaseInputs(
            name, tensors["q"], tensors["k"], tensors["v"], tensors.get("do"), capture.scale,
            capture.metadata.causal, capture,
        )  # fmt: skip
        found.append(case)
    return found


def refuse_what_is_not_run(capture: Capture) -> None:
    """Raise InputError where the capture is not softmax(alpha Q K^T) V with at most a causal mask."""
    m = capture.metadata
    given: dict[str, Any] = {"window": m.window, "softcap": m.softcap}
    given |= {n: capture.tensors.get(n) for n in ("mask", "q_positions", "q_descale")}
    if odd := [n for n, value in given.items() if value is not None]:
        raise InputError(f"{capture.source}: check knows no {', '.join(odd)}; leave this capture out")


def _whole(capture: Capture, name: str) -> Tensor:
    """A tensor of a capture as [B, H, T, D] in memory."""
    tensor = capture.tensors[name][...].cpu()
    return tensor.transpose(1, 2).contiguous() if capture.metadata.layout == "BTHD" else tensor
