"""Folders of captures with planted findings, small enough to be inspected in seconds.

python tests/planted_folders.py FOLDER      # writes each of them there, to be tried on the command line
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from planted_heads import Steps, rounded
from torch import Tensor

from attn_diag import Capture
from attn_diag.kernels import emulate_head, preset
from attn_diag.reference import AttentionHead, Masking

T, D, C, HEADS = 128, 32, 48, 4
SCALE = D**-0.5
CAUSAL = Masking("top-left")
Kernel = Callable[[AttentionHead], dict[str, Tensor]]
RUN = {"run": "1a2b3c4d", "module": "h.2.attn", "call": "0"}


def by_recipe(name: str) -> Kernel:
    """A kernel that rounds as a published one does."""

    def run(head: AttentionHead) -> dict[str, Tensor]:
        made = emulate_head(preset(name, "bf16", D), head)
        found = {"o": made.o, "dq": made.dq, "dk": made.dk, "dv": made.dv}
        return {key: t for key, t in found.items() if t is not None}

    return run


healthy, coarse_scores = by_recipe("fa2"), by_recipe("bf16-scores")


def truncating(head: AttentionHead) -> dict[str, Tensor]:
    """Cuts every eighth element of O instead of rounding it: too little to be coarse, and always towards zero."""
    steps = Steps(head)
    nearest = rounded(steps.o)
    cut = torch.where(nearest.abs() > steps.o.abs(), nearest - nearest.sign() * _ulp(steps.o), nearest)
    steps.o = torch.where(torch.arange(steps.o.numel()).view_as(steps.o) % 8 == 0, cut, nearest)
    steps.delta = (steps.do * steps.o).sum(1, keepdim=True)
    steps.ds = rounded(steps.p_bar / steps.l * (steps.dp - steps.delta))
    return {name: t for name, t in steps.outputs().items() if name in ("o", "dq", "dk", "dv")}


def _ulp(values: Tensor) -> Tensor:
    """Of BF16."""
    return torch.exp2(torch.floor(torch.log2(values.abs())) - 7)


def noisy_dq(size: float) -> Kernel:
    """dQ with noise of this size relative to it: a backward that gets worse."""

    def run(head: AttentionHead) -> dict[str, Tensor]:
        found = healthy(head)
        generator = torch.Generator().manual_seed(3)
        noise = torch.randn(found["dq"].shape, generator=generator, dtype=torch.float64)
        dq = found["dq"].double()
        return found | {"dq": dq + size * dq.square().mean().sqrt() * noise}

    return run


def broken(kernel: Kernel, output: str) -> Kernel:
    """NaN in one row of an output."""

    def run(head: AttentionHead) -> dict[str, Tensor]:
        found = {name: t.clone() for name, t in kernel(head).items()}
        found[output][T // 2] = torch.nan
        return found

    return run


def unmasked(head: AttentionHead) -> dict[str, Tensor]:
    """Sees all keys, whatever the capture says."""
    return healthy(replace(head, masking=Masking("none")))


def leaking(head: AttentionHead) -> dict[str, Tensor]:
    """Sees one key too many in every 16th row."""
    found, other = healthy(head), healthy(replace(head, masking=Masking("top-left", positions=torch.arange(1, T + 1))))
    o = found["o"].clone()
    o[15::16] = other["o"][15::16]
    return found | {"o": o}


def capture(
    kernels: Kernel | list[Kernel],
    *,
    layer: int = 0,
    step: int | None = None,
    seed: int = 0,
    batch: int = 1,
    rows: int = T,
    v_mean: float = 0.0,
    observations: dict[str, Kernel] | None = None,
    outputs: tuple[str, ...] = ("o", "dq", "dk", "dv"),
    **metadata: Any,
) -> Capture:
    """One layer's attention call; ``kernels``: for all heads, or for each. A large ``v_mean`` leaves little of dQ."""
    fixed = torch.Generator().manual_seed(layer + 1000 * metadata.get("head_offset", 0))
    generator = torch.Generator().manual_seed(1000 * layer + (step or 0) + 77 * seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    each = kernels if isinstance(kernels, list) else [kernels] * HEADS
    x, w_q = draw(batch, rows, C).bfloat16(), torch.randn(len(each) * D, C, generator=fixed) / C**0.5
    w_q = w_q.bfloat16()
    q = (x.float() @ w_q.float().T).bfloat16().view(batch, rows, len(each), D).transpose(1, 2).contiguous()
    # The heads of a tensor-parallel rank are not those of another, though x is the same.
    generator.manual_seed(generator.initial_seed() + metadata.get("head_offset", 0))
    k, v, do = (draw(batch, len(each), rows, D) for _ in range(3))
    tensors = {"q": q, "k": k.bfloat16(), "v": (v + v_mean).bfloat16(), "do": do.bfloat16(), "x": x, "w_q": w_q}
    named = {"": each} if observations is None else {n: [one] * len(each) for n, one in observations.items()}
    for name, chosen in named.items():
        found: dict[str, list[list[Tensor]]] = {output: [] for output in outputs}
        for item in range(batch):
            parts = []
            for h, kernel in enumerate(chosen):
                head_q, head_k, head_v, head_do = (tensors[n][item, h].double() for n in ("q", "k", "v", "do"))
                parts.append(kernel(AttentionHead(head_q, head_k, head_v, head_do, scale=SCALE, masking=CAUSAL)))
            for output, made in found.items():
                made.append([part[output] for part in parts])
        prefix = f"{name}." if name else ""
        for output, made in found.items():
            tensors[prefix + output] = torch.stack([torch.stack(items) for items in made]).bfloat16()
    stated = {"causal": "top-left", "scale": SCALE, "layer": layer, "step": step} | metadata
    return Capture.from_tensors(tensors, **stated)


def clean() -> list[Capture]:
    return [capture(healthy, layer=layer, step=step) for layer in (0, 1) for step in (100, 200)]


def one_finding() -> list[Capture]:
    return [
        capture(coarse_scores if layer == 3 and step >= 200 else healthy, layer=layer, step=step)
        for layer in (1, 3)
        for step in (100, 200, 300)
    ]


def two_findings() -> list[Capture]:
    planted = {(3, 200): coarse_scores, (3, 300): coarse_scores, (3, 400): coarse_scores}
    planted |= {(7, 300): truncating, (7, 400): truncating}
    return [
        capture(planted.get((layer, step), healthy), layer=layer, step=step)
        for layer in (3, 5, 7)
        for step in (100, 200, 300, 400)
    ]


def growing() -> list[Capture]:
    sizes = {100: 0.0, 200: 0.01, 300: 0.03, 400: 0.1, 500: 0.4}
    return [
        capture([healthy, noisy_dq(size)] if size else [healthy] * 2, layer=2, step=step)
        for step, size in sizes.items()
    ]


def one_rank() -> list[Capture]:
    return [
        capture(
            coarse_scores if rank == 2 else healthy, layer=2, step=500, seed=rank, rank=rank,
            extra=RUN | {"world_size": "4"},
        )
        for rank in range(4)
    ]  # fmt: skip


def one_tensor_rank() -> list[Capture]:
    return [
        capture(
            [coarse_scores if rank == 2 else healthy] * 2, layer=2, step=500, seed=0, rank=rank, head_offset=2 * rank,
            extra=RUN | {"world_size": "4"},
        )
        for rank in range(4)
    ]  # fmt: skip


def mixed_kernels() -> list[Capture]:
    return [
        capture(
            coarse_scores if step >= 300 else healthy, layer=layer, step=step,
            kernel="my_triton_attention" if step >= 300 else "SDPA flash",
        )
        for layer in (0, 1)
        for step in (100, 200, 300, 400)
    ]  # fmt: skip


def two_observations() -> list[Capture]:
    return [capture(healthy, layer=4, observations={"flash": healthy, "mine": coarse_scores}, outputs=("o", "dq"))]


def nan_at_a_step() -> list[Capture]:
    return [
        capture(
            [healthy, broken(healthy, "dq")] if (layer, step) == (5, 300) else [healthy] * 2, layer=layer, step=step
        )
        for layer in (4, 5)
        for step in (100, 200, 300)
    ]


def wrong_mask() -> list[Capture]:
    return [capture(unmasked if layer == 6 else healthy, layer=layer, step=100) for layer in (5, 6)]


def leak() -> list[Capture]:
    return [capture(leaking if layer == 6 else healthy, layer=layer, step=100) for layer in (5, 6)]


def ill_conditioned() -> list[Capture]:
    return [capture(healthy, layer=layer, step=700, v_mean=60.0 if layer == 2 else 0.0) for layer in (1, 2)]


def undecided() -> list[Capture]:
    return [capture([healthy], layer=0, step=100, rows=5)]


def emulated() -> list[Capture]:
    return [capture(healthy, layer=layer, step=100, outputs=()) for layer in (0, 1)]


FOLDERS: dict[str, Callable[[], list[Capture]]] = {
    made.__name__: made
    for made in (
        clean, one_finding, two_findings, growing, one_rank, one_tensor_rank, mixed_kernels, two_observations,
        nan_at_a_step, wrong_mask, leak, ill_conditioned, undecided, emulated,
    )
}  # fmt: skip


def write(folder: Path, name: str) -> Path:
    """The captures of a folder, as a run leaves them; its path."""
    (folder / name).mkdir(parents=True)
    for found in FOLDERS[name]():
        m = found.metadata
        rank = "" if m.rank is None else f"_rank{m.rank}"
        step = 0 if m.step is None else m.step
        found.save(folder / name / f"step{step:06d}_layer{m.layer:02d}{rank}.safetensors")
    return folder / name


if __name__ == "__main__":
    for name in FOLDERS:
        print(write(Path(sys.argv[1]), name))
