"""Attention below 16 bits in plain torch with faults of its scales, for ``study_scale_faults``; one head at a time.

It shares no code with the recipes: FP8 through torch's own casts, INT8 and FP4 by ``round``, scales from ``amax``.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Fault:
    """What is wrong with one of q, k, v or P_bar ("p")."""

    kind: str = ""
    """Of the issue's list, or besides it."""
    of: str = ""
    what: str = ""
    """What is done, as ``faulty_amax`` and the quantisers read it; "" nothing."""
    number: float = 0.0
    """Its size."""
    said: tuple[str, ...] = ()
    """What a report says where it names it: one of these."""

    def at(self, of: str) -> Fault:
        """The fault, if it is of that tensor; else none."""
        return self if self.of == of else SOUND


SOUND = Fault()


def cast_e4m3(x: Tensor) -> Tensor:
    return x.clamp(-448, 448).to(E4M3).float()


def cut_e4m3(x: Tensor) -> Tensor:
    """Toward zero."""
    near = x.clamp(-448, 448).to(E4M3)
    below = (near.view(torch.uint8) - 1).view(E4M3).float()
    return torch.where(near.float().abs() > x.abs().clamp(max=448), below, near.float())


def cast_fp4(x: Tensor, cut: bool) -> Tensor:
    size = x.abs().clamp(max=6.0)
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    steps = size / step
    return torch.copysign((steps.floor() if cut else steps.round()) * step, x)


def block_amax(x: Tensor, rows: int, columns: int) -> Tensor:
    padded = torch.nn.functional.pad(x, (0, -x.shape[1] % columns, 0, -x.shape[0] % rows)).abs()
    return padded.reshape(padded.shape[0] // rows, rows, padded.shape[1] // columns, columns).amax((1, 3))


def over(figures: Tensor, x: Tensor, rows: int, columns: int) -> Tensor:
    """A figure of every block for each element."""
    return figures.repeat_interleave(rows, 0)[: len(x)].repeat_interleave(columns, 1)[:, : x.shape[1]]


def shared(amax: Tensor, count: int) -> Tensor:
    """So many blocks below each other have the largest of their amax."""
    padded = torch.nn.functional.pad(amax, (0, 0, 0, -len(amax) % count))
    groups = padded.reshape(-1, count, amax.shape[1]).amax(1, keepdim=True)
    return groups.expand(-1, count, -1).reshape(padded.shape)[: len(amax)]


def faulty_amax(amax: Tensor, fault: Fault, random: torch.Generator) -> Tensor:
    if fault.what == "stale":
        return amax * fault.number
    if fault.what == "stale by block":
        return amax * (0.6 + 0.8 * torch.rand(amax.shape, generator=random))
    if fault.what == "wide":
        return shared(amax, int(fault.number))
    if fault.what == "wide along rows":
        return shared(amax.T, int(fault.number)).T
    if fault.what == "next":
        return torch.cat([torch.maximum(amax[:-1], amax[1:]), amax[-1:]])
    if fault.what == "all later":
        return amax.flip(0).cummax(0).values.flip(0)
    if fault.what == "head":
        return amax.max().expand_as(amax)
    return amax


def int8(x: Tensor, rows: int, fault: Fault, random: torch.Generator, *, away: bool) -> Tensor:
    """With a scale for so many rows; ties ``away`` from zero."""
    width = x.shape[1]
    scale = over(faulty_amax(block_amax(x, rows, width), fault, random) / 127, x, rows, width)
    steps = x / torch.where(scale == 0, 1.0, scale)
    if fault.what == "floor":
        codes = steps.floor()
    elif fault.what == "cut":
        codes = steps.trunc()
    else:
        codes = torch.copysign((steps.abs() + 0.5).floor(), x) if away else steps.round()
    return (codes.clamp(-127, 127) + (fault.number if fault.what == "zero point" else 0.0)) * scale


def fp8(x: Tensor, rows: int, columns: int, fault: Fault, random: torch.Generator) -> Tensor:
    scale = over(faulty_amax(block_amax(x, rows, columns), fault, random) / 448, x, rows, columns)
    quotient = x / torch.where(scale == 0, 1.0, scale)
    return (cut_e4m3 if fault.what in ("cut", "floor") else cast_e4m3)(quotient) * scale


def mxfp8(
    x: Tensor, rows: int, columns: int, fault: Fault, random: torch.Generator, seen: Tensor | None = None
) -> Tensor:
    """Scales 2^(floor(log2 amax) - 8), the amax of ``seen`` where that is given."""
    amax = faulty_amax(block_amax(x if seen is None else seen, rows, columns), fault, random)
    power = torch.where(amax == 0, 1.0, amax).log2()
    exponent = (power.ceil() if fault.what == "scale up" else power.floor()).clamp(-119, 127) - 8
    scale = over(exponent.exp2(), x, rows, columns)
    return (cut_e4m3 if fault.what in ("cut", "floor") else cast_e4m3)(x / scale) * scale


def nvfp4(
    x: Tensor, rows: int, columns: int, fault: Fault, random: torch.Generator, *, level: bool = True,
    seen: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Scales in E4M3 of ``level``, the whole tensor's amax / 2688."""
    amax = faulty_amax(block_amax(x if seen is None else seen, rows, columns), fault, random)
    whole = x.abs().max() / 2688 if level and bool(x.any()) else torch.tensor(1.0)
    whole = whole * fault.number if fault.what == "stale level" else whole
    stored = amax / 6 / whole
    scale = over((cut_e4m3 if fault.what == "scale cut" else cast_e4m3)(stored) * whole, x, rows, columns)
    return cast_fp4(x / torch.where(scale == 0, 1e38, scale), fault.what in ("cut", "floor")) * scale


@dataclass
class Kernel:
    """One kernel: what it is declared to be, and its fault."""

    recipe: str
    fault: Fault = SOUND
    tile: int = 64
    seed: int = 0
    random: torch.Generator = field(init=False)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """O [T, D] and L [T] of one causal head, q, k, v fp32 with a 16-bit format's numbers."""
        self.random = torch.Generator().manual_seed(self.seed)
        alpha, mean = q.shape[1] ** -0.5, k.mean(0)
        smoothed = self.recipe in ("sage1", "sage2", "nvfp4-attention")
        q8, k8, v8 = self._quantised(q, k - mean if smoothed else k, v)
        scores = (q8 @ k8.T) * alpha
        back = alpha * (q @ mean) if smoothed and self.fault.what != "mean not added" else 0.0
        visible = torch.ones(scores.shape, dtype=torch.bool).tril()
        most, total = scores.new_full((len(q), 1), -torch.inf), scores.new_zeros(len(q), 1)
        sums = torch.zeros_like(v8)
        for start in range(0, len(k), self.tile):
            keys = slice(start, start + self.tile)
            part = scores[:, keys].masked_fill(~visible[:, keys], -torch.inf)
            new = torch.maximum(most, part.amax(1, keepdim=True))
            p = (part - new).exp()
            every = (scores[:, keys] - new).exp() if self.fault.what == "masked" else None
            shrink = (most - new).exp().masked_fill(most == -torch.inf, 0.0)
            total, most = total * shrink + p.sum(1, keepdim=True), new
            sums = sums * shrink + self._cast(p, every) @ v8[keys]
        return sums / total, (most + total.log())[:, 0] + back

    def _quantised(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        of_q, of_k, of_v = (self.fault.at(name) for name in "qkv")
        random, length, width = self.random, *k.shape
        if self.recipe == "fa3-fp8":
            q, k, v = (fp8(x, length, width, f, random) for x, f in ((q, of_q), (k, of_k), (v, of_v)))
        elif self.recipe == "sage1":
            k = k.bfloat16().float()
            q, k, v = int8(q, 128, of_q, random, away=True), int8(k, 64, of_k, random, away=True), v.half().float()
        elif self.recipe == "sage2":
            q, k = int8(q, 32, of_q, random, away=True), int8(k, 64, of_k, random, away=True)
            v = fp8(v, length, 1, of_v, random)
        elif self.recipe == "mxfp8-attention":
            q, k, v = mxfp8(q, 1, 32, of_q, random), mxfp8(k, 1, 32, of_k, random), mxfp8(v, 32, 1, of_v, random)
        elif self.recipe == "nvfp4-attention":
            q, k, v = nvfp4(q, 1, 16, of_q, random), nvfp4(k, 1, 16, of_k, random), nvfp4(v, 16, 1, of_v, random)
        else:
            k, v = (int8(x, 1, f, random, away=False).bfloat16().float() for x, f in ((k, of_k), (v, of_v)))
        return q, k, v

    def _cast(self, p: Tensor, every: Tensor | None) -> Tensor:
        fault = self.fault.at("p")
        if self.recipe in ("fa3-fp8", "sage2"):
            by = 256.0 if self.recipe == "fa3-fp8" else 448.0
            return cast_e4m3(p * by) / by
        if self.recipe == "mxfp8-attention":
            return mxfp8(p, 1, 32, fault, self.random, every)
        if self.recipe == "nvfp4-attention":
            every = None if every is None else every * 2688
            return nvfp4(p * 2688, 1, 16, fault, self.random, level=False, seen=every) / 2688
        return p.half().float() if self.recipe == "sage1" else p.bfloat16().float()


def inputs(family: str, seed: int, length: int = 256, width: int = 64) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v [T, D] of one head, BF16."""
    g = torch.Generator().manual_seed(1_000_003 * seed + 11)
    q, k, v = (torch.randn(length, width, generator=g) for _ in range(3))
    if family == "outlying features":
        k[:, torch.randperm(width, generator=g)[:2]] += 12
        q[:, 3] *= 8
    if family == "one huge key":
        k[length // 3] *= 15
    if family == "one huge value":
        v[length // 3] *= 30
    if family == "growing keys":
        k *= torch.logspace(-1, 0.8, length)[:, None]
    if family == "growing values":
        v *= torch.logspace(-1, 1, length)[:, None]
    if family == "peaked":
        q *= 3
    if family == "a sink":
        q += 0.5
        k[0] += 1.5
    if family == "v with a mean":
        v += 2
    if family == "heavy tails":
        k, v = (x / torch.rand(x.shape, generator=g).pow(1 / 3).clamp(min=0.05) for x in (k, v))
    if family == "sparse":
        k *= torch.rand(k.shape, generator=g) < 0.3
        v *= torch.rand(v.shape, generator=g) < 0.2
    return q.bfloat16(), k.bfloat16(), v.bfloat16()


FAMILIES = (
    "blocks alike", "outlying features", "one huge key", "one huge value", "growing keys", "growing values", "peaked",
    "a sink", "v with a mean", "heavy tails", "sparse",
)  # fmt: skip
