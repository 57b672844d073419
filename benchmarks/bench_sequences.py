"""The Triton kernels on packed sequences and with ALiBi, against their dense call of as many pairs, on one GPU.

    python benchmarks/bench_sequences.py [--json FILE]

Times are medians of CUDA-graph replays in milliseconds (forward: with what it needs of the borders), on N(0,1) BF16
inputs, recipe fa2, causal unless said. Each ratio is of times for one pair of query and key: where the documents have
more or fewer pairs than the dense call, the time is divided by their number.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import torch
from bench_kernels import replay_ms
from measuring import made_by, options_of, save
from torch import Tensor

from attn_diag.kernels import preset
from attn_diag.kernels.geometry import Visibility
from attn_diag.kernels.triton_backward import backward
from attn_diag.kernels.triton_forward import forward
from attn_diag.kernels.triton_sequences import DENSE, Sequences

# Heads and head dimension.
HEADS = ((12, 64), (16, 128))
MIXED = (64, 1900, 333, 1024, 1, 777, 2048, 130, 512, 1500, 96, 850, 1280, 40, 1700, 600)
PACKED = {
    "8 documents of 1024": (1024,) * 8,
    "4 documents of 4096": (4096,) * 4,
    "16 documents of mixed lengths": MIXED,
    "64 documents of 128": (128,) * 64,
    "256 documents of 100": (100,) * 256,
    "1 document of 8192": (8192,),
}


@dataclass(frozen=True)
class Call:
    """Forward and backward of some tensors [B, H, T, D], q, k, v and dO."""

    tensors: tuple[Tensor, ...]
    visibility: Visibility
    sequences: Sequences = DENSE

    def times(self) -> tuple[float, float]:
        """Milliseconds of the forward and of the backward."""
        q, k, v, do = self.tensors
        recipe = preset("fa2", head_dim=q.shape[-1])
        more: dict[str, Any] = {"scale": q.shape[-1] ** -0.5, "softcap": None, "sequences": self.sequences}
        found = forward(q, k, v, recipe, self.visibility, **more)
        again = lambda: forward(q, k, v, recipe, self.visibility, **more)  # noqa: E731
        back = lambda: backward(q, k, v, found.o, found.lse, do, recipe, self.visibility, **more)  # noqa: E731
        return replay_ms(again), replay_ms(back)


def normal(*shape: int) -> tuple[Tensor, ...]:
    generator = torch.Generator("cuda").manual_seed(0)
    return tuple(torch.randn(shape, device="cuda", generator=generator).bfloat16() for _ in range(4))


def row(special: Call, dense: Call, pairs: float = 1.0) -> dict[str, float]:
    """``pairs``: of the special call, over the dense one's."""
    (a, b), (c, d) = special.times(), dense.times()
    again, back_again = dense.times()  # on both sides of the other: clocks move
    c, d = (c + again) / 2, (d + back_again) / 2
    found = {"forward [ms]": a, "backward [ms]": b, "dense forward [ms]": c, "dense backward [ms]": d,
             "forward ratio (<= 1.25)": a / c / pairs, "backward ratio (<= 1.25)": b / d / pairs}  # fmt: skip
    return {name: round(value, 4) for name, value in found.items()}


def packed(lengths: tuple[int, ...], heads: int, dim: int) -> dict[str, float]:
    """Documents side by side, against a dense batch of as many sequences with as many pairs, as nearly as may be."""
    causal, total = Visibility("top-left"), sum(lengths)
    cu = torch.tensor([0, *lengths]).cumsum(0).int().cuda()
    tokens = tuple(t.transpose(1, 2) for t in normal(1, total, heads, dim))  # [1, total, H, D], as they are packed
    length = round((sum(n * n for n in lengths) / len(lengths)) ** 0.5)
    if len(set(lengths)) > 1:  # a length that suits the dense kernels
        length = 128 * round(length / 128)
    pairs = sum(n * (n + 1) for n in lengths) / (len(lengths) * length * (length + 1))
    dense = tuple(t.transpose(1, 2) for t in normal(len(lengths), length, heads, dim))
    return row(Call(tokens, causal, Sequences(cu, cu)), Call(dense, causal), pairs)


def alibi(shape: tuple[int, int, int, int], causal: str) -> dict[str, float]:
    tensors = normal(*shape)
    slopes = torch.tensor([2.0 ** (-8 * (h + 1) / shape[1]) for h in range(shape[1])], device="cuda")
    visibility = Visibility(causal)  # type: ignore[arg-type]
    return row(Call(tensors, visibility, Sequences(slopes=slopes)), Call(tensors, visibility))


def main() -> None:
    options = options_of(__doc__).parse_args()
    result: dict[str, Any] = made_by("cuda")
    for heads, dim in HEADS:
        rows = {f"packed, {name}": packed(lengths, heads, dim) for name, lengths in PACKED.items()}
        for length, batch in ((1024, 8), (4096, 4)):
            for causal in ("top-left", "none"):
                rows[f"ALiBi, {batch}x{length}, causal {causal}"] = alibi((batch, heads, length, dim), causal)
        result[f"{heads} heads of {dim}"] = rows
        print(heads, dim, json.dumps(rows, indent=1), flush=True)
        save(result, options.json)


if __name__ == "__main__":
    main()
