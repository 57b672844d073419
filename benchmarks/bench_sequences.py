"""The Triton kernels on packed sequences, with ALiBi, on pages and absorbed MLA, against their dense call, on one GPU.

    python benchmarks/bench_sequences.py [--parts packed alibi pages mla] [--json FILE]

Times are medians of CUDA-graph replays in milliseconds (forward: with what it needs of the borders), on N(0,1) BF16
inputs, recipe fa2, causal unless said. Each ratio is of times for one pair of query and key: where the documents have
more or fewer pairs than the dense call, the time is divided by their number. Keys in pages: forward alone, two key
heads, against contiguous keys. Absorbed MLA (one key head of 576 features, 512 of which are v) against D = 256, and MLA
of 192 and 128 features, as it is trained, against D = 128, for as many products.
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
PARTS = ["packed", "alibi", "pages", "mla"]
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
    forward_only: bool = False

    def times(self) -> tuple[float, float]:
        """Milliseconds of the forward and of the backward (NaN where there is none)."""
        q, k, v, do = self.tensors
        recipe = preset("fa2", head_dim=q.shape[-1])
        more: dict[str, Any] = {"scale": q.shape[-1] ** -0.5, "softcap": None, "sequences": self.sequences}
        found = forward(q, k, v, recipe, self.visibility, **more)
        again = lambda: forward(q, k, v, recipe, self.visibility, **more)  # noqa: E731
        if self.forward_only:
            return replay_ms(again), float("nan")
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
    return {name: round(value, 4) for name, value in found.items() if value == value}


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


def pages(rows: int, heads: int, dim: int, size: int, count: int, keys: int) -> dict[str, float]:
    """A cache in pages, in an order of chance, against the same sequences' keys as a batch."""
    kv_heads = 2
    q, k, v, do = (t.transpose(1, 2) for t in normal(count, keys, heads, dim))
    q, k, v = q[:, :, :rows], k[:, :kv_heads], v[:, :kv_heads]
    table = torch.randperm(count * keys // size, device="cuda").int().view(count, -1)
    pools = tuple(t.transpose(1, 2).reshape(-1, size, kv_heads, dim)[table.flatten().argsort()] for t in (k, v))
    borders, lengths = torch.arange(count + 1, device="cuda").int() * rows, torch.full((count,), keys, device="cuda")
    visibility = Visibility("bottom-right")
    packed_q = q.transpose(0, 1).flatten(1, 2)[None]
    sequences = Sequences(borders, lengths.int(), table=table)
    tensors = (packed_q, *(t.transpose(1, 2) for t in pools), packed_q)
    paged = Call(tensors, visibility, sequences, forward_only=True)
    return row(paged, Call((q, k.contiguous(), v.contiguous(), do), visibility, forward_only=True))


def absorbed(rows: int, keys: int, heads: int) -> dict[str, float]:
    """One latent for all heads; the dense call has 256 features of q, k and v."""
    visibility = Visibility("bottom-right")
    (q, *_), (latent, *_) = normal(4, heads, rows, 576), normal(4, 1, keys, 576)
    narrow_q, narrow = (t[..., :256].contiguous() for t in (q, latent))
    mla = Call((q, latent, latent[..., :512], q[..., :512].contiguous()), visibility)
    return row(mla, Call((narrow_q, narrow, narrow, narrow_q), visibility), (576 + 512) / (2 * 256))


def trained_mla(batch: int, heads: int, length: int) -> dict[str, float]:
    """As DeepSeek-V3 trains: q and k of 192 features, v of 128; the dense call has 128 of each."""
    visibility = Visibility("top-left")
    q, k, *_ = normal(batch, heads, length, 192)
    narrow_q, narrow_k, v, do = normal(batch, heads, length, 128)
    return row(Call((q, k, v, do), visibility), Call((narrow_q, narrow_k, v, do), visibility), (192 + 128) / (2 * 128))


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS, help="of it")
    options = parser.parse_args()
    result: dict[str, Any] = made_by("cuda")
    for heads, dim in HEADS:
        rows: dict[str, dict[str, float]] = {}
        if "packed" in options.parts:
            rows |= {f"packed, {name}": packed(lengths, heads, dim) for name, lengths in PACKED.items()}
        if "alibi" in options.parts:
            for length, batch in ((1024, 8), (4096, 4)):
                for causal in ("top-left", "none"):
                    rows[f"ALiBi, {batch}x{length}, causal {causal}"] = alibi((batch, heads, length, dim), causal)
        if "pages" in options.parts:
            for count, keys in ((32, 4096), (256, 1024)):
                for few in (1, 8):
                    for size in (16, 64, 256):
                        name = f"pages of {size}, {few} rows of {count} sequences of {keys}"
                        rows[name] = pages(few, heads, dim, size, count, keys)
        result[f"{heads} heads of {dim}"] = rows
        print(heads, dim, json.dumps(rows, indent=1), flush=True)
        save(result, options.json)
    if "mla" in options.parts:
        shapes = {
            "1024 rows, 4096 keys": (1024, 4096),
            "64 rows, 16384 keys": (64, 16384),
            "1 row, 16384 keys": (1, 16384),
        }
        result["absorbed MLA"] = {f"4x16 heads, {name}": absorbed(*shape, 16) for name, shape in shapes.items()}
        result["MLA of 192 and 128"] = {
            f"{b}x16 heads of {t}": trained_mla(b, 16, t) for b, t in ((8, 1024), (4, 4096))
        }
        save(result, options.json)


if __name__ == "__main__":
    main()
