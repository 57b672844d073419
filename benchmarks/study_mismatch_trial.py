"""A trial of ``mismatch`` by differences that it was not built on: healthy ones, and faults, in a plain model.

A model of three layers in BF16 (RoPE, RMS norms, GQA, an MLP) runs twice on the same tokens, with attention in plain
torch that shares no code with the recipes. The engine's run differs: in its kernel or in how its calls and caches are
laid out (healthy), or by a fault in layer 1. Counted are healthy runs that are accused, faults that are called
rounding, and faults with a wrong kind or layer.

    python benchmarks/study_mismatch_trial.py --seeds 3 --json FILE
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from measuring import made_by, options_of, save
from torch import Tensor
from torch.nn import functional

import attn_diag
from attn_diag.results.mismatch import Mismatch

LAYERS, HEADS, KEY_HEADS, DIM, WIDTH = 3, 4, 2, 64, 256
LENGTH, BATCH, AT = 112, 2, 1
Kernel = Callable[..., Tensor]
"""From q [n, D], k, v [m, D] of a head in BF16, what is added to scores [n, m], and alpha: O [n, D], fp32."""
Format = torch.dtype | None


def rounded(t: Tensor, fmt: torch.dtype | None) -> Tensor:
    """In fp32 again."""
    return t if fmt is None else t.to(fmt).float()


def tiled(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float, *, tile: int = 64, backwards: bool = False,
    score: Format = None, probs: Format = torch.bfloat16, acc: Format = None, total: Format = None, stale: float = 0.0,
    base2: bool = False, sum_cast: bool = False, sink: float | None = None, cap: float | None = None,
) -> Tensor:  # fmt: skip
    """Online softmax, tile by tile; a format is that of what is rounded, None: fp32."""
    top = q.new_full((len(q), 1), -torch.inf, dtype=torch.float32)
    row_sum, o = torch.zeros_like(top), torch.zeros(len(q), v.shape[1])
    if sink is not None:
        top, row_sum = torch.full_like(top, sink), torch.ones_like(top)
    tiles = range(0, len(k), tile)
    for at in reversed(tiles) if backwards else tiles:
        s = q.float() @ k[at : at + tile].float().mT * scale
        s = s if cap is None else cap * torch.tanh(s / cap)
        s = rounded(s + bias[:, at : at + tile], score)
        new = torch.maximum(top, s.amax(1, keepdim=True))
        if stale:
            new = torch.where((new - top > stale) | top.isinf(), new, top)
        safe = new.masked_fill(new.isinf(), 0.0)
        p = torch.exp2((s - safe) * math.log2(math.e)) if base2 else (s - safe).exp()
        factor, cast = (top - safe).exp(), rounded(p, probs)
        row_sum = rounded(row_sum * factor + (cast if sum_cast else p).sum(1, keepdim=True), total)
        o = rounded(o * factor + cast @ v[at : at + tile].float(), acc)
        top = new
    return o / row_sum.clamp(min=1e-37)


def split(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float, *, size: int, lse: Format = None,
    part: Format = None, base2: bool = False, drop: int | None = None, **options: Any,
) -> Tensor:  # fmt: skip
    """Splits of keys merged by their LSE; ``part`` and ``lse`` are the formats in which they are stored."""
    outs, logs = [], []
    for number, at in enumerate(range(0, len(k), size)):
        if number == drop:
            continue
        b = bias[:, at : at + size]
        s = q.float() @ k[at : at + size].float().mT * scale + b
        own = s.logsumexp(1, keepdim=True)
        o = tiled(q, k[at : at + size], v[at : at + size], b, scale, tile=size, **options)
        outs.append((o if part is None else o.to(part).float()).nan_to_num(0.0))
        logs.append(own if lse is None else own.to(lse).float())
    weights = torch.stack(logs) * (math.log(2) if base2 else 1.0)
    weights = (weights - weights.logsumexp(0)).exp().nan_to_num(0.0)
    return (torch.stack(outs) * weights).sum(0)


def plain(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float, *, wide: bool = False, probs: Format = None
) -> Tensor:
    """Softmax of the whole row, then the product."""
    q, k, v = (t.double() if wide else t.float() for t in (q, k, v))
    p = (q @ k.mT * scale + bias).softmax(-1)
    return (p if probs is None else p.to(probs).to(p.dtype)).matmul(v).float()


def torch_sdpa(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float) -> Tensor:
    """torch's own on a CPU."""
    o = functional.scaled_dot_product_attention(
        q[None, None], k[None, None], v[None, None], bias[None, None].to(q), scale=scale
    )
    return o[0, 0].float()


@dataclass(frozen=True)
class Run:
    """How one of the two runs computes."""

    kernel: Kernel = tiled
    dtype: torch.dtype = torch.bfloat16
    calls: tuple[int, ...] = (LENGTH,)
    """Where each call ends; of one row each from the last on."""
    layout: str = "dense"
    window: int | None = None
    sink: bool = False
    softcap: float | None = None
    alibi: bool = False
    fault: str = ""
    """In layer 1."""
    change: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    """Of what the capture says."""
    also: str = ""
    """In all layers, in both runs."""
    with_x: bool = True
    peaked: float = 2.0
    stream: torch.dtype = torch.float32


def rms(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """Of the last axis, in fp32."""
    x = x.float()
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


def rope(x: Tensor, positions: Tensor, base: float = 10000.0) -> Tensor:
    """Rotations by halves, [B, H, T, D]."""
    rates = base ** (-torch.arange(0, DIM, 2) / DIM)
    angles = positions[:, None].float() * rates
    cos, sin = angles.cos(), angles.sin()
    a, b = x.float().chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1).to(x.dtype)


def quantised(w: Tensor, group: int = 32) -> Tensor:
    """INT4 in groups along the inputs."""
    parts = w.float().reshape(*w.shape[:-1], -1, group)
    scale = parts.abs().amax(-1, keepdim=True) / 7
    return ((parts / scale).round().clamp(-7, 7) * scale).flatten(-2).to(w.dtype)


def stored(t: Tensor, how: str) -> Tensor:
    """In FP8 without a scale, or in INT8 with one a token."""
    if how == "fp8":
        return t.float().to(torch.float8_e4m3fn).to(t.dtype)
    scale = t.float().abs().amax(-1, keepdim=True) / 127
    return ((t.float() / scale).round() * scale).to(t.dtype)


class Model:
    """The weights."""

    def __init__(self, seed: int) -> None:
        g = self.generator = torch.Generator().manual_seed(seed)

        def linear(rows: int, columns: int, size: float = 1.0) -> Tensor:
            return torch.randn(rows, columns, generator=g) * (size / math.sqrt(columns))

        self.tokens = torch.randn(BATCH, LENGTH, WIDTH, generator=g)
        self.layers = [
            {
                "q": linear(HEADS * DIM, WIDTH), "k": linear(KEY_HEADS * DIM, WIDTH),
                "v": linear(KEY_HEADS * DIM, WIDTH), "o": linear(WIDTH, HEADS * DIM, 0.5),
                "up": linear(2 * WIDTH, WIDTH), "down": linear(WIDTH, 2 * WIDTH, 0.5),
                "norm": 1 + 0.1 * torch.randn(WIDTH, generator=g), "norm2": 1 + 0.1 * torch.randn(WIDTH, generator=g),
                "sink": torch.randn(HEADS, generator=g), "slopes": 2.0 ** -torch.arange(1, HEADS + 1).float(),
                "qn": 1 + 0.1 * torch.randn(DIM, generator=g), "kn": 1 + 0.1 * torch.randn(DIM, generator=g),
            }
            for _ in range(LAYERS)
        ]  # fmt: skip

    def run(self, how: Run) -> list[attn_diag.Capture]:
        """All captures of a run."""
        caches: list[list[Tensor]] = [[] for _ in self.layers]
        found: list[attn_diag.Capture] = []
        begin = 0
        for call, end in enumerate(how.calls):
            h = self.tokens[:, begin:end].to(how.stream)
            for number, w in enumerate(self.layers):
                h = self._layer(h, number, w, how, caches[number], begin, call, found)
            begin = end
        return found

    def _layer(self, h: Tensor, number: int, w: dict[str, Tensor], how: Run, cache: list[Tensor], begin: int, call: int,
               found: list[attn_diag.Capture]) -> Tensor:  # fmt: skip
        fault = how.fault if number == AT else ""
        fault, low = fault or how.also, how.dtype
        weights = {n: w[n].to(low) for n in ("q", "k", "v", "o", "up", "down")}
        if fault.startswith("int4 "):
            for name in fault.removeprefix("int4 "):
                weights[name] = quantised(weights[name])
        eps = 0.05 if fault == "epsilon" else 1e-6
        norm = w["norm"] - 1 if fault == "norm without one" else w["norm"]
        x = rms(h, norm, eps).to(low)
        every = (functional.linear(x, weights[n]) for n in "qkv")
        q, k, v = (t.reshape(*t.shape[:2], -1, DIM).transpose(1, 2) for t in every)
        q = (rms(q, w["qn"]) * how.peaked).to(low)
        if fault != "no norm of k":
            k = rms(k, w["kn"]).to(low)
        if fault == "q 5 % large":
            q = (q.float() * 1.05).to(low)
        if fault == "no values":
            v[:, 0] = 0.0
        if fault == "bias of q":
            q = (q + torch.linspace(-0.3, 0.3, DIM)).to(low)
        at = torch.arange(begin, begin + h.shape[1])
        late = 1 if fault == "late position" and begin else 0
        base = 20000.0 if fault == "rope base" else 10000.0
        q, k = rope(q, at + late, base), rope(k, at + late, base)
        if fault in ("fp8 v", "fp8 kv", "fp8 k"):
            k, v = (stored(t, "fp8") if n in fault[4:] else t for n, t in (("k", k), ("v", v)))
        if fault in ("int8 k", "int8 kv"):
            k, v = (stored(t, "int8") if n in fault[5:] else t for n, t in (("k", k), ("v", v)))
        if cache:
            k, v = torch.cat([cache[0], k], 2), torch.cat([cache[1], v], 2)
        cache[:] = [k, v]
        o = self._attend(q, k, v, w, how, fault, at)
        tensors: dict[str, Any] = {"q": q, "k": k, "v": v, "o": o}
        if how.with_x:
            tensors |= {"x": x, "w_q": weights["q"]}
        said: dict[str, Any] = {"causal": "bottom-right", "layer": number, "step": call, "scale": DIM**-0.5}
        if how.window is not None:
            said["window"] = (how.window, 0)
        if how.softcap is not None:
            said["softcap"] = how.softcap
        if how.sink:
            tensors["sinks"] = w["sink"]
        if how.alibi:
            tensors["alibi_slopes"] = w["slopes"]
        made = {"tensors": tensors, "metadata": said}
        made = how.change(made) if how.change else made
        pieces = laid_out(made, how.layout)
        found += [attn_diag.Capture.from_tensors(one["tensors"], **one["metadata"]) for one in pieces]
        y = functional.linear(o.to(low).transpose(1, 2).flatten(2), weights["o"])
        h = (h.float() + y.float() * (0.9 if fault == "residual scale" else 1.0)).to(how.stream)
        z = rms(h, w["norm2"]).to(low)
        act = functional.relu if fault == "activation" else functional.silu
        return (h.float() + functional.linear(act(functional.linear(z, weights["up"])), weights["down"]).float()).to(
            how.stream
        )

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, w: dict[str, Tensor], how: Run, fault: str, at: Tensor
    ) -> Tensor:
        keys = torch.arange(k.shape[2])
        distance = at[:, None] - keys
        window, scale, sunk, cap = how.window, DIM**-0.5, how.sink, how.softcap
        window = {"window + 2": (window or 0) + 2, "no window": None, "a window": 40}.get(fault, window)
        scale *= {"scale + 3 %": 1.03, "scale of 80": (64 / 80) ** 0.5, "scale - 1 %": 0.99}.get(fault, 1.0)
        seen = distance >= {"sees the next": -1, "misses its own": 1}.get(fault, 0)
        seen = seen if window is None else seen & (distance <= window)
        seen |= (~seen.any(1, keepdim=True)) & (keys == 0)
        hidden = {"hidden by -10": -10.0, "hidden by -4": -4.0}.get(fault, -torch.inf)
        if fault == "page swapped" and len(keys) > 48:
            order = keys.clone()
            order[16:32], order[32:48] = keys[32:48], keys[16:32]
            k, v = k[:, :, order], v[:, :, order]
        if fault == "keys late":
            k = k.roll(1, 2)
        if fault == "values late":
            v = v.roll(1, 2)
        if fault == "another sequence's cache" and len(keys) > 40:
            k, v = k.clone(), v.clone()
            k[1, :, 30:36], v[1, :, 30:36] = k[0, :, 30:36], v[0, :, 30:36]
        if fault == "no window while decoding" and len(at) == 1:
            seen = distance >= 0
        if fault == "stale key":
            k = k.clone()
            k[:, :, min(5, len(keys) - 1)] = k[:, :, 0]
        out = torch.zeros(*q.shape[:3], DIM)
        for b in range(len(q)):
            for head in range(HEADS):
                kv = head // (HEADS // KEY_HEADS)
                kv = head % KEY_HEADS if fault == "other key heads" else kv
                bias = torch.zeros(seen.shape).masked_fill(~seen, hidden)
                if how.alibi:
                    slope = w["slopes"][head] * (2 if fault == "slopes doubled" else 1)
                    bias = bias - slope * distance.clamp(min=0)
                options: dict[str, Any] = {}
                if sunk and fault != "no sink":
                    options["sink"] = float(w["sink"][head]) * (-1 if fault == "sink negated" else 1)
                if cap is not None and fault != "no softcap":
                    options["cap"] = 30.0 if fault == "softcap 30" else cap
                kernel = KERNEL_FAULTS.get(fault, how.kernel)
                out[b, head] = kernel(q[b, head], k[b, kv], v[b, kv], bias, scale, **options)
        if fault == "heads swapped":
            out = out[:, [1, 0, 2, 3]]
        if fault == "O 10 % small":
            out *= 0.9
        if fault == "one head 1 % small":
            out[:, 2] *= 0.99
        if fault == "some rows of another":
            out[:, :, -3:] = out[:, :, -4:-3]
        if fault == "dropout":
            kept = torch.rand(out.shape[:3], generator=self.generator)[..., None] > 0.1
            out = out * kept / 0.9
        if fault == "truncated O":
            return (out.view(torch.int32) & -65536).view(torch.float32).to(how.dtype)
        return out.to(how.dtype)


KERNEL_FAULTS: dict[str, Kernel] = {
    "scores in BF16": partial(tiled, score=torch.bfloat16),
    "accumulator in BF16": partial(tiled, tile=16, acc=torch.bfloat16),
    "row sum in BF16": partial(tiled, tile=16, total=torch.bfloat16),
    "P in E4M3": partial(tiled, probs=torch.float8_e4m3fn),
    "merge by an LSE in BF16": partial(split, size=16, lse=torch.bfloat16),
    "merge by an LSE in FP16": partial(split, size=16, lse=torch.float16),
    "merge with LSE to base 2": partial(split, size=32, base2=True),
    "a split left out": partial(split, size=16, drop=1),
    "P of 512 steps": lambda q, k, v, bias, scale: (
        ((q.float() @ k.float().mT * scale + bias).softmax(-1) * 512).round().div(512) @ v.float()
    ),
}


def laid_out(made: dict[str, Any], layout: str) -> Iterator[dict[str, Any]]:
    """The captures of a call, as some engine has them."""
    t, said = made["tensors"], made["metadata"]
    if layout == "dense":
        yield made
    elif layout == "BTHD":
        yield {
            "tensors": {n: x.transpose(1, 2) if n in "qkvo" else x for n, x in t.items()},
            "metadata": {**said, "layout": "BTHD"},
        }
    elif layout == "repeated keys":
        yield {**made, "tensors": t | {n: t[n].repeat_interleave(HEADS // KEY_HEADS, 1) for n in "kv"}}
    elif layout == "heads apart":
        for rank, part in enumerate((0, 1)):
            half = {
                n: x[:, part * x.shape[1] // 2 : (part + 1) * x.shape[1] // 2] if n in "qkvo" else x
                for n, x in t.items()
            }
            half = {
                n: x[rank * len(x) // 2 : (rank + 1) * len(x) // 2] if n in ("sinks", "w_q") else x
                for n, x in half.items()
            }
            yield {
                "tensors": half,
                "metadata": {
                    **said,
                    "rank": rank,
                    "head_offset": rank * HEADS // 2,
                    "extra": {"run": "a", "world_size": "2", "call": "0"},
                },
            }
    elif layout == "packed":
        ends = [torch.tensor([0, *[t[n].shape[2] * (b + 1) for b in range(BATCH)]], dtype=torch.int32) for n in "qk"]
        joined = {n: torch.cat(list(t[n]), 1)[None] for n in "qkvo"}
        joined |= {"x": torch.cat(list(t["x"]))[None], "w_q": t["w_q"]} if "x" in t else {}
        joined |= {n: x for n, x in t.items() if n in ("sinks", "alibi_slopes")}
        yield {"tensors": joined | {"cu_seqlens_q": ends[0], "cu_seqlens_k": ends[1]}, "metadata": said}
    elif layout == "padded left":
        pad = 9
        wide = {n: functional.pad(t[n], (0, 0, pad, 0), value=0.5) for n in "qkvo"}
        rows, keys = wide["q"].shape[2], wide["k"].shape[2]
        seen = torch.arange(keys)[None] <= torch.arange(rows)[:, None] + keys - rows
        seen = seen & (torch.arange(keys) >= pad)
        yield {"tensors": wide | {"mask": seen[None, None]}, "metadata": {**said, "causal": "none"}}
    elif layout.startswith("pages"):
        size = int(layout.split()[1])
        count = -(-t["k"].shape[2] // size)
        order = torch.randperm(count * BATCH, generator=torch.Generator().manual_seed(1))
        paged = {}
        for n in "kv":
            flat = functional.pad(t[n].transpose(1, 2), (0, 0, 0, 0, 0, count * size - t[n].shape[2]), value=3.0)
            pages = flat.reshape(BATCH * count, size, *flat.shape[2:])
            paged[n] = torch.empty_like(pages).index_copy_(0, order, pages)
        lengths = torch.full((BATCH,), t["k"].shape[2], dtype=torch.int32)
        more = {"page_table": order.view(BATCH, count).int(), "cache_seqlens": lengths}
        rest = {n: x for n, x in t.items() if n not in ("x", "w_q")}
        yield {"tensors": rest | paged | more, "metadata": said}


def scale_in_q(made: dict[str, Any]) -> dict[str, Any]:
    """q multiplied by alpha already, and alpha stated as 1 (64 ** -0.5 is a power of two)."""
    t, said = made["tensors"], made["metadata"]
    return {
        "tensors": {**{n: x for n, x in t.items() if n not in ("x", "w_q")}, "q": t["q"] * DIM**-0.5},
        "metadata": {**said, "scale": 1.0},
    }


DECODING = (64, *range(65, LENGTH + 1))
BASE = Run()
HEALTHY: dict[str, tuple[Run, Run]] = {
    "tiles of 16": (BASE, Run(partial(tiled, tile=16))),
    "tiles of 48": (BASE, Run(partial(tiled, tile=48))),
    "tiles of 64 from the last": (BASE, Run(partial(tiled, backwards=True))),
    "one tile": (BASE, Run(partial(tiled, tile=512))),
    "2 splits": (BASE, Run(partial(split, size=56))),
    "splits of 16": (BASE, Run(partial(split, size=16))),
    "splits of 40": (BASE, Run(partial(split, size=40))),
    "splits of 56 whose O is in BF16": (BASE, Run(partial(split, size=56, part=torch.bfloat16))),
    "torch's SDPA": (BASE, Run(torch_sdpa)),
    "P not cast": (BASE, Run(partial(tiled, probs=None))),
    "P in FP16": (BASE, Run(partial(tiled, probs=torch.float16))),
    "float64": (BASE, Run(partial(plain, wide=True))),
    "exp2": (BASE, Run(partial(tiled, base2=True))),
    "row sum of the cast P": (BASE, Run(partial(tiled, sum_cast=True))),
    "a maximum that stays": (BASE, Run(partial(tiled, stale=4.0, tile=16))),
    "prefill in chunks of 32": (BASE, Run(calls=(32, 64, 96, LENGTH))),
    "prefill in chunks of 7": (BASE, Run(calls=(*range(7, LENGTH, 7), LENGTH))),
    "decoding": (BASE, Run(calls=DECODING)),
    "decoding with splits": (BASE, Run(partial(split, size=32), calls=DECODING)),
    "packed": (BASE, Run(layout="packed")),
    "packed, without x": (BASE, Run(partial(split, size=32), layout="packed", with_x=False)),
    "padded left": (BASE, Run(partial(tiled, tile=32), layout="padded left", with_x=False)),
    "pages of 16": (BASE, Run(partial(tiled, tile=16), layout="pages 16")),
    "pages of 7, decoding": (BASE, Run(layout="pages 7", calls=DECODING)),
    "BTHD": (BASE, Run(partial(tiled, tile=16), layout="BTHD")),
    "keys repeated for every query head": (BASE, Run(partial(tiled, tile=16), layout="repeated keys")),
    "heads on two ranks": (BASE, Run(partial(tiled, tile=32), layout="heads apart")),
    "alpha in q": (BASE, Run(partial(tiled, tile=32), change=scale_in_q)),
    "windows in both": (Run(window=30), Run(partial(split, size=16), window=30, calls=DECODING)),
    "sinks in both": (Run(sink=True), Run(partial(tiled, tile=16), sink=True, calls=DECODING)),
    "softcap in both": (Run(softcap=20.0), Run(partial(tiled, tile=16), softcap=20.0)),
    "ALiBi in both": (Run(alibi=True), Run(partial(tiled, tile=16), alibi=True, calls=DECODING)),
    "residual in BF16 in both": (Run(stream=torch.bfloat16), Run(partial(tiled, tile=16), stream=torch.bfloat16)),
    "residual in BF16 in the engine": (BASE, Run(stream=torch.bfloat16)),
    "FP16 in both": (
        Run(partial(tiled, probs=torch.float16), torch.float16),
        Run(partial(split, size=16, probs=torch.float16), torch.float16),
    ),
    "FP8 caches in both": (Run(also="fp8 kv"), Run(partial(tiled, tile=16), also="fp8 kv", calls=DECODING)),
    "INT8 caches in both": (Run(also="int8 kv"), Run(partial(tiled, tile=16), also="int8 kv")),
    "a head without values": (Run(also="no values"), Run(partial(tiled, tile=16), also="no values")),
    "INT4 weights in both": (Run(also="int4 qkv"), Run(partial(tiled, tile=16), also="int4 qkv", calls=DECODING)),
    "peaked": (Run(peaked=8.0), Run(partial(tiled, tile=16), peaked=8.0)),
    "nearly uniform": (Run(peaked=0.1), Run(partial(split, size=16), peaked=0.1)),
}  # fmt: skip
_P = replace(BASE, peaked=16.0)
_W, _S, _C, _A = (
    replace(BASE, window=30),
    replace(BASE, sink=True),
    replace(BASE, softcap=8.0),
    replace(BASE, alibi=True),
)
INPUT, OUT, COARSE = {"unnamed-input"}, {"unnamed-o"}, {"coarse"}
FAULTS: dict[str, tuple[Run, set[str]]] = {
    "scale + 3 %": (BASE, {"scale"}), "scale - 1 %": (BASE, {"scale"}), "scale of 80": (BASE, {"scale"}),
    "window + 2": (_W, {"window"}), "no window": (_W, {"window"}), "a window": (BASE, {"window"} | OUT),
    "no sink": (_S, {"sink"}), "sink negated": (_S, {"sink"}), "no softcap": (_C, {"softcap"}),
    "softcap 30": (_C, {"softcap"}), "sees the next": (BASE, {"mask"}), "misses its own": (BASE, {"mask"}),
    "hidden by -10": (BASE, {"mask"}), "hidden by -4": (BASE, {"mask"}), "slopes doubled": (_A, {"mask"} | OUT),
    "rope base": (BASE, INPUT | {"position"}), "late position": (replace(BASE, calls=DECODING), {"position"}),
    "heads swapped": (BASE, OUT), "other key heads": (BASE, OUT), "keys late": (BASE, OUT), "values late": (BASE, OUT),
    "stale key": (BASE, OUT | COARSE), "page swapped": (BASE, OUT), "one head 1 % small": (BASE, OUT | COARSE),
    "some rows of another": (BASE, OUT), "dropout": (BASE, OUT), "int4 q": (BASE, {"weights"} | INPUT),
    "int4 k": (BASE, INPUT), "int4 kv": (BASE, INPUT), "epsilon": (BASE, {"norm"}),
    "norm without one": (BASE, INPUT | {"norm"}),
    "no norm of k": (BASE, INPUT | {"norm"}), "bias of q": (BASE, INPUT), "fp8 v": (BASE, {"storage"}),
    "fp8 k": (BASE, {"storage"}), "fp8 kv": (replace(BASE, calls=DECODING), {"storage"}), "int8 k": (BASE, {"storage"}),
    "int8 kv": (BASE, {"storage"}), "truncated O": (BASE, COARSE), "scores in BF16": (BASE, COARSE),
    "accumulator in BF16": (BASE, COARSE), "row sum in BF16": (BASE, COARSE), "P in E4M3": (BASE, COARSE),
    "merge by an LSE in BF16": (BASE, {"merge"}), "merge by an LSE in FP16": (_P, {"merge"}),
    "merge with LSE to base 2": (BASE, {"lse-base"}), "a split left out": (BASE, OUT),
    "P of 512 steps": (BASE, OUT | COARSE), "q 5 % large": (BASE, INPUT | {"norm"}), "O 10 % small": (BASE, OUT),
    "another sequence's cache": (BASE, OUT),
    "no window while decoding": (replace(_W, calls=DECODING), {"window"} | OUT),
}  # fmt: skip
# Not fused, which is told where it is beyond 1.25 times a fused kernel's error.
EITHER = {"coarse", ""}
# What arises behind O of layer 1 shows in layer 2; where it is as small as roundings may be, a note says so.
BEHIND = {"residual scale": INPUT, "activation": INPUT}


def judged(found: Mismatch, kinds: set[str], layer: int, side: str) -> str:
    """ "right", or what is wrong."""
    if kinds == EITHER and found.outcome != "finding":
        return "right"
    if not kinds:
        return "right" if found.outcome != "finding" else "accused"
    if found.outcome != "finding":
        return "noted" if any(f"Layer {layer}: x differs" in note for note in found.notes) else "called rounding"
    if found.begins != layer:
        return "wrong layer"
    first = {c.kind for c in found.causes if c.layer == layer}
    if any(c.layer == layer and c.side not in (side, "both") for c in found.causes):
        return "wrong side"
    if first <= kinds:
        return "right"
    unnamed = first <= {*kinds, "unnamed-o", "unnamed-input"}
    return "found, without its name" if unnamed else "wrong kind" if not first & kinds else "one more kind"


def totals_of(counts: list[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """Verdicts of all healthy and of all faulty runs."""
    totals: dict[str, dict[str, int]] = {"healthy": {}, "faults": {}}
    for row in counts:
        of = totals["healthy" if row["healthy"] else "faults"]
        for verdict, count in row["verdicts"].items():
            of[verdict] = of.get(verdict, 0) + count
    return totals


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--only", nargs="*", help="these cases alone")
    parser.add_argument("--faults", action="store_true", help="no healthy ones")
    parser.add_argument("--mirrored", action="store_true", help="the fault is train's")
    options = parser.parse_args()
    torch.set_num_threads(1)
    started = time.monotonic()
    healthy = {} if options.faults else HEALTHY
    cases: dict[str, tuple[Run, Run, set[str], int]] = {n: (a, b, set(), AT) for n, (a, b) in healthy.items()}
    cases |= {n: (run, replace(run, fault=n), kinds, AT) for n, (run, kinds) in FAULTS.items()}
    cases |= {n: (BASE, replace(BASE, fault=n), kinds, AT + 1) for n, kinds in BEHIND.items()}
    cases["P normalised, then cast"] = (BASE, Run(partial(plain, probs=torch.bfloat16)), EITHER, 0)
    counts = []
    for name, (train, rollout, kinds, layer) in cases.items():
        if options.only and name not in options.only:
            continue
        row: dict[str, Any] = {"name": name, "healthy": not kinds, "verdicts": {}, "said": {}}
        for seed in range(options.first, options.first + options.seeds):
            try:
                both = [Model(seed).run(train), Model(seed).run(rollout)]
                found = attn_diag.mismatch(*(reversed(both) if options.mirrored else both))
                side = "train" if options.mirrored else "rollout"
                verdict, said = judged(found, kinds, layer, side), found.headline
            except attn_diag.InputError as error:
                verdict, said = "refused", str(error)
            row["verdicts"][verdict] = row["verdicts"].get(verdict, 0) + 1
            if verdict != "right":
                row["said"][seed] = said
        counts.append(row)
        print(name, row["verdicts"], *row["said"].values(), sep=" | ", flush=True)
        how = {"seconds": round(time.monotonic() - started), "first": options.first, "mirrored": options.mirrored}
        save({**made_by(), **how, "totals": totals_of(counts), "cases": counts}, options.json)
    print(totals_of(counts))


if __name__ == "__main__":
    main()
