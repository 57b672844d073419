"""Whether ``attn-diag mismatch`` tells coarser rounding from ordinary rounding, and names the site.

A trainer that runs recipe fa2, and an engine on the same inputs: healthy kernels in several schedules, and kernels of
this file, written apart from the recipes that the analysis emulates, that round one thing more coarsely.

    cd benchmarks
    python study_mismatch_rounding.py --seeds 20 --of healthy --json results/mismatch_rounding_cpu.json
    python study_mismatch_rounding.py --seeds 10 --of coarse --json results/mismatch_rounding_cpu.json
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from measuring import made_by, save
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import attn_diag
from attn_diag.head.quality import LOSSY
from attn_diag.kernels import Recipe, preset
from attn_diag.results.mismatch import Mismatch
from attn_diag.testing.case_inputs import CaseInputs
from attn_diag.testing.target import emulate

CPU = torch.device("cpu")
FA2 = preset("fa2")
Rounding = Callable[[Tensor], Tensor]


def _as_is(x: Tensor) -> Tensor:
    return x


def bf16(x: Tensor) -> Tensor:
    """To nearest, kept in fp32."""
    return x.bfloat16().float()


def truncated(x: Tensor) -> Tensor:
    """To BF16 toward zero, kept in fp32."""
    return (x.contiguous().view(torch.int32) & -65536).view(torch.float32)


def e4m3(x: Tensor) -> Tensor:
    """To FP8 with scale 1, kept in the dtype."""
    return x.float().clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype)


def e4m3_of_tensor(x: Tensor) -> Tensor:
    """To FP8 with one scale for the whole tensor, kept in the dtype."""
    scale = x.abs().amax().float() / 448
    return (e4m3(x.float() / scale) * scale).to(x.dtype)


def int8_of_token(x: Tensor) -> Tensor:
    """To INT8 with a scale a token and head, kept in the dtype."""
    scale = x.float().abs().amax(-1, keepdim=True) / 127
    return ((x.float() / scale).round() * scale).to(x.dtype)


@dataclass(frozen=True)
class Tiled:
    """Causal attention over key tiles with an online softmax, in plain torch, with a hook at each rounding."""

    tile: int = 64
    scores: Rounding = _as_is
    probs: Rounding = bf16
    row_sum: Rounding = _as_is
    accumulator: Rounding = _as_is
    out: Rounding = bf16

    def __call__(self, case: CaseInputs) -> Tensor:
        """O [B, H, T, D]."""
        q, k, v = (x.float() for x in (case.q, case.k, case.v))
        scores = self.scores(q @ k.mT * case.scale)
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
        top = torch.full((*scores.shape[:-1], 1), -math.inf)
        total, o = torch.zeros_like(top), torch.zeros_like(q)
        for begin in range(0, scores.shape[-1], self.tile):
            part = scores[..., begin : begin + self.tile]
            new = torch.maximum(top, part.amax(-1, keepdim=True))
            probs, keep = (part - new).exp(), (top - new).exp()
            total = self.row_sum(total * keep + probs.sum(-1, keepdim=True))
            o = self.accumulator(o * keep + self.probs(probs) @ v[..., begin : begin + self.tile, :])
            top = new
        return self.out(o / total).to(case.q.dtype)


def splits(case: CaseInputs, *, size: int, partial: Rounding) -> Tensor:
    """Splits of keys, each with its own O and LSE, merged in fp32."""
    q, k, v = (x.float() for x in (case.q, case.k, case.v))
    scores = q @ k.mT * case.scale
    scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
    parts, sums = [], []
    for begin in range(0, scores.shape[-1], size):
        part = scores[..., begin : begin + size]
        top = part.amax(-1, keepdim=True)
        probs = (part - top.masked_fill(top == -math.inf, 0.0)).exp()
        total = probs.sum(-1, keepdim=True)
        lse = top + total.log()
        parts.append(partial(bf16(probs) @ v[..., begin : begin + size, :] / total.clamp(min=1e-30)))
        sums.append(lse)
    whole = torch.stack(sums)
    weights = (whole - whole.logsumexp(0)).exp()
    return torch.stack([w * o for w, o in zip(weights, parts, strict=True)]).sum(0).to(case.q.dtype)


def recipe(chosen: Recipe) -> Callable[[CaseInputs], Tensor]:
    """O of a recipe's emulation."""
    return lambda case: emulate(chosen, case, CPU, with_gradients=False)["o"]


def _eager(case: CaseInputs) -> Tensor:
    """As transformers' eager attention computes."""
    scores = (case.q @ case.k.mT) * case.scale
    scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
    return scores.float().softmax(-1).to(case.q.dtype) @ case.v


HEALTHY: dict[str, Callable[[CaseInputs], Tensor]] = {
    "tiles of 32": recipe(replace(FA2, schedule=replace(FA2.schedule, key_tile=32))),
    "cudnn": recipe(preset("cudnn")),
    "efficient": recipe(preset("efficient")),
    "flex": recipe(preset("flex")),
    "splits of 64": recipe(replace(FA2, schedule=replace(FA2.schedule, key_tile=64, split_keys=64))),
    "sdpa": lambda c: scaled_dot_product_attention(c.q, c.k, c.v, is_causal=True),
    "fp32 throughout": lambda c: scaled_dot_product_attention(c.q.float(), c.k.float(), c.v.float(), is_causal=True).to(
        c.q.dtype
    ),
    "plain torch, tiles of 48": Tiled(48),
    "plain torch, splits of 40": lambda c: splits(c, size=40, partial=_as_is),
}
STORED: dict[str, tuple[str, Rounding]] = {
    "v stored in E4M3": ("v", e4m3),
    "v stored in E4M3, a scale a tensor": ("v", e4m3_of_tensor),
    "k and v stored in INT8, a scale a token": ("kv", int8_of_token),
}
"""What the engine's capture holds of its own cache, and computes with."""
COARSE: dict[str, tuple[Callable[[CaseInputs], Tensor], tuple[str, ...]]] = {
    "O's accumulator in BF16, tiles of 32": (Tiled(32, accumulator=bf16), ("accumulator of O",)),
    "O's accumulator in BF16, tiles of 40": (Tiled(40, accumulator=bf16), ()),
    "row sum in BF16, tiles of 64": (Tiled(row_sum=bf16), ("row sum",)),
    "scores in BF16": (Tiled(scores=bf16), ("scores S",)),
    "P truncated": (Tiled(256, probs=truncated), ("cast of P̄ truncates",)),
    "O truncated": (Tiled(out=truncated), ("cast of O truncates",)),
    "P in E4M3": (Tiled(256, probs=e4m3), ("P̄ in FP8",)),
    "O of splits of 32 keys in BF16": (lambda c: splits(c, size=32, partial=bf16), ("O of each split",)),
    "v in E4M3 inside": (lambda c: Tiled()(replace(c, v=e4m3(c.v))), ("v in FP8",)),
    "k and v in E4M3 inside, a scale a tensor": (
        lambda c: Tiled()(replace(c, k=e4m3_of_tensor(c.k), v=e4m3_of_tensor(c.v))), ("k and v in FP8",),
    ),
    "eager": (_eager, ("S and P are stored",)),
}  # fmt: skip
"""A kernel, and what its cause must say; nothing: that no rounding which was tried explains it."""


def drawn(seed: int) -> CaseInputs:
    """Gaussian, peaked, with a mean in V, or short, by the seed."""
    generator = torch.Generator().manual_seed(seed)
    length, dim = ((192, 32), (256, 64), (320, 32), (96, 32))[seed % 4]
    q, k, v = (torch.randn(1, 4, length, dim, generator=generator) for _ in range(3))
    q = q * (1.0, 3.0, 1.0, 2.0)[seed % 4]
    v = v + (0.0, 0.0, 1.0, 0.0)[seed % 4]
    return CaseInputs("drawn", q.bfloat16(), k.bfloat16(), v.bfloat16(), None, dim**-0.5, "top-left")


def compared(case: CaseInputs, engine: Callable[[CaseInputs], Tensor], inputs: CaseInputs | None = None) -> Mismatch:
    """The trainer, recipe fa2, beside an engine whose capture holds ``inputs``."""
    with tempfile.TemporaryDirectory() as folder:
        runs = []
        for name, o, given in (
            ("train", recipe(FA2)(case), case),
            ("rollout", engine(inputs or case), inputs or case),
        ):
            path = Path(folder) / f"{name}.safetensors"
            tensors = {"q": given.q, "k": given.k, "v": given.v, "o": o}
            attn_diag.Capture.from_tensors(tensors, causal="top-left", layer=0).save(path)
            runs.append(path)
        return attn_diag.mismatch(*runs, device="cpu")


def judged(found: Mismatch, words: tuple[str, ...] | None, kind: str = "coarse") -> str:
    """named, unnamed (found, no site said), small (silent, at most 1.25 times a well-rounded kernel), silent (beyond
    that), or wrong (another cause, or an accusation)."""
    if words is None:
        return "quiet" if not found.causes else "wrong"
    if not found.causes:
        factor = found.layers[0].errors.rollout_noise
        return "small" if kind == "coarse" and factor is not None and factor <= LOSSY else "silent"
    if any(cause.kind != kind or cause.side != "rollout" for cause in found.causes):
        return "wrong"
    said = found.causes[0].words
    if words and all(w in said for w in words):
        return "named"
    return "unnamed" if "no coarser rounding" in said else "wrong"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--of", choices=["healthy", "coarse", "all"], default="all")
    parser.add_argument("--kernels", nargs="*", default=[""], help="how the names of those looked at begin")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    started = time.monotonic()
    every: list[tuple[str, Callable[[CaseInputs], Tensor], tuple[str, ...] | None, str]] = [
        *((name, kernel, None, "") for name, kernel in HEALTHY.items()),
        *((name, kernel, words, "") for name, (kernel, words) in COARSE.items()),
        *((name, Tiled(), (" of rollout hold", "FP8" if "E4M3" in name else "INT8"), name) for name in STORED),
    ]
    for name, kernel, words, stored in every:
        if options.of == ("coarse" if words is None else "healthy") or not name.startswith(tuple(options.kernels)):
            continue
        mine: list[dict[str, Any]] = []
        for seed in range(options.seeds):
            case, inputs = drawn(seed), None
            if stored:
                of, how = STORED[stored]
                changed: dict[str, Any] = {x: how(getattr(case, x)) for x in of}
                inputs = replace(case, **changed)
            found = compared(case, kernel, inputs)
            said = judged(found, words, "storage" if stored else "coarse")
            noise = found.layers[0].errors.rollout_noise
            mine.append({"kernel": name, "seed": seed, "said": said, "factor": noise, "headline": found.headline})
        factors = sorted(float(c["factor"]) for c in mine)
        others = Counter(c["headline"] for c in mine if c["said"] == "wrong")
        print(
            f"{name:42} {dict(Counter(c['said'] for c in mine))} factor {factors[0]:.2f} to {factors[-1]:.2f} "
            f"{dict(others.most_common(2))}", flush=True,
        )  # fmt: skip
        if options.json is not None:
            # Kernels that another run of the study looked at stay.
            before = json.loads(options.json.read_text())["cases"] if options.json.exists() else []
            kept = [c for c in before if c["kernel"] != name]
            save({**made_by(), "seconds": round(time.monotonic() - started), "cases": [*kept, *mine]}, options.json)


if __name__ == "__main__":
    main()
