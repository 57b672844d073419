"""Kernels below 16 bits, held against the format they are declared to have: sound ones, and ones with planted faults.

Every kernel is a plain torch attention that shares no code with the recipes: FP8 through torch's own casts, INT8
through ``round``, the backward as autograd would write it down in fp32 with BF16 casts. What a fault did is measured
without the tool: the factor of O's, dQ's, dK's or dV's error over a sound kernel's, of all rows or of the worst one.
Where a wrong scale or rounding is not named, its trace in O and L is measured too: what cannot be told from a sound
kernel even by who knows the fault ("traceless") is rightly not named.

    python benchmarks/study_declared.py --seeds 20 --processes 16 --json benchmarks/results/declared_cpu.json
    python benchmarks/study_declared.py --adverse --json …        # late, huge or outlying inputs, in rows of their own
    python benchmarks/study_declared.py --only "MXFP8: " --json …      # these alone; the other rows of the file stay
"""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from multiprocessing import get_context
from typing import Any

import torch
from measuring import made_by, options_of, save
from torch import Tensor

import attn_diag

HEADS, LENGTH, WIDTH = 2, 256, 64
E4M3 = torch.float8_e4m3fn
FAMILIES = ("gaussian", "outliers", "k with a mean", "peaked", "near-uniform")
# Where a few rows, keys or features are much larger than the rest.
ADVERSE = ("late keys", "one huge key", "outlying features", "outliers in v")


@dataclass(frozen=True)
class Plan:
    """A kernel: its format, and what is wrong with it."""

    form: str = "fp8"
    """fp8, int8 (SageAttention 2's groups, FP8 P V), int8-fp16 (SageAttention 1), mxfp8, nvfp4."""
    fault: str = ""
    scales: str = "head"
    """Of FP8: head, call (one for all heads) or power (of two)."""
    probs_scale: float = 256.0
    tile: int = 64
    margin: float = 1.0
    """Of FP8 and INT8, what amax is multiplied by."""


def inputs(family: str, seed: int, late: float = 1.0) -> list[Tensor]:
    """q, k, v, dO [1, H, T, D] BF16; the second half of k is ``late`` times as large."""
    g = torch.Generator().manual_seed(seed)
    q, k, v, do = (torch.randn(1, HEADS, LENGTH, WIDTH, generator=g) for _ in range(4))
    if family == "outliers":
        q[..., 7] *= 6
        k[..., 3] *= 6
    if family == "k with a mean":
        k += 2 * torch.randn(1, HEADS, 1, WIDTH, generator=g)
    if family == "peaked":
        q *= 3
    if family == "near-uniform":
        q *= 0.1
    if family == "one huge key":
        k[:, :, 100] *= 30
    if family == "outlying features":
        q[..., 7] *= 20
        k[..., 3] *= 20
    if family == "outliers in v":
        v[..., 5] *= 30
        v[:, :, 100] *= 10
    k[:, :, LENGTH // 2 :] *= 8.0 if family == "late keys" else late
    return [x.bfloat16() for x in (q, k, v, do)]


def late_of(plan: Plan) -> float:
    """``inputs``' ``late`` of a plan: a scale that other blocks make does nothing where all blocks are alike."""
    return 8.0 if plan.fault in _LATE else 1.0


def to_fp8(x: Tensor, scale: Tensor) -> Tensor:
    return (x / scale).clamp(-448, 448).to(E4M3).float() * scale


def cut(x: Tensor, bits: int, least: int) -> Tensor:
    """x rounded toward zero to so many explicit mantissa bits, subnormal below 2^least."""
    step = torch.exp2(x.abs().clamp(min=1e-30).log2().floor().clamp(min=least) - bits)
    return (x / step).trunc() * step


def fp8(x: Tensor, plan: Plan, amax: float = 1.0, shift: Tensor | float = 1.0) -> Tensor:
    """x [1, H, T, D] in E4M3, its scales too small by ``amax`` (stale), and multiplied back with ``shift``."""
    largest = x.abs().amax((1, 2, 3), keepdim=True) if plan.scales == "call" else x.abs().amax((2, 3), keepdim=True)
    scale = largest.clamp(min=1e-30) * amax * plan.margin / 448
    scale = torch.exp2(scale.log2().ceil()) if plan.scales == "power" else scale
    return to_fp8(x, scale) * shift


def int8(
    x: Tensor,
    block: int,
    amax: Tensor | float = 1.0,
    roll: int = 0,
    to_code: Callable[[Tensor], Tensor] = torch.round,
    reach: str = "",
) -> Tensor:
    """x in INT8 with a scale for ``block`` rows; multiplied back with the scale ``roll`` blocks further.

    Scales may be those of a block and the one after it (reach "next"), of all so far ("so far"), of the block before
    alone ("before"), or of the second block that of all ("all").
    """
    rows = x.shape[2]
    parts = torch.nn.functional.pad(x, (0, 0, 0, -rows % block)).reshape(*x.shape[:2], -1, block, x.shape[3])
    largest = parts.abs().amax((3, 4), keepdim=True).clamp(min=1e-30)
    if reach == "next":
        largest[:, :, :-1] = torch.maximum(largest[:, :, :-1], largest[:, :, 1:])
    if reach == "so far":
        largest = largest.cummax(2).values
    if reach == "before":
        largest = torch.cat([largest[:, :, :1], largest[:, :, :-1]], 2)
    if reach == "all":
        largest[:, :, 1] = largest.amax(2)
    scale = largest * amax / 127
    codes = to_code(parts / scale)
    codes = (codes + 128) % 256 - 128 if reach == "wraps" else codes.clamp(-127, 127)
    return (codes * scale.roll(roll, 2)).flatten(2, 3)[:, :, :rows]


def blocks_of(
    x: Tensor, dim: int, size: int, grid: Callable[[Tensor], Tensor], top: float, read: str = "", times: float = 1.0
) -> Tensor:
    """x with a power-of-two scale (or E4M3's) for ``size`` elements along ``dim``, that scale ``times`` too large.

    Multiplied back with the scales transposed (``read`` "transposed") or with those of the block before ("before").
    """
    moved = x.movedim(dim, -1)
    parts = moved.reshape(*moved.shape[:-1], -1, size)
    largest = parts.abs().amax(-1, keepdim=True).clamp(min=1e-30)
    if top == 6:
        level = x.abs().amax((2, 3), keepdim=True)[..., None] / (6 * 448)
        scale = (largest / 6 / level).to(E4M3).float().clamp(min=2.0**-9) * level
    else:
        scale = torch.exp2((largest / top).log2().floor())
    scale = scale * times
    codes, lying = grid(parts / scale), scale[..., 0] if dim == 3 else scale[..., 0].mT
    if read == "transposed":
        lying = lying.mT.reshape(lying.shape)
    if read == "before":
        lying = lying.flatten(2).roll(1, 2).view_as(lying)
    return (codes * (lying if dim == 3 else lying.mT)[..., None]).reshape_as(moved).movedim(-1, dim)


_FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
# Midpoints; a tie goes to the even code.
_BOUNDS = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])


def fp4(x: Tensor) -> Tensor:
    odd = torch.tensor([True, False, True, False, True, False, True])
    code = (x.abs()[..., None] > _BOUNDS).sum(-1) + ((x.abs()[..., None] == _BOUNDS) & ~odd).sum(-1)
    return _FP4[code] * x.sign()


def e4m3(x: Tensor) -> Tensor:
    return x.clamp(-448, 448).to(E4M3).float()


_REACH = {
    "one group shared too widely": "all", "future keys in a scale": "next", "running amax": "so far",
    "amax of the group before": "before", "codes that wrap": "wraps",
}  # fmt: skip

_LATE = ("one group shared too widely", "future keys in a scale", "amax of the group before")


def run(plan: Plan, q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> dict[str, Tensor]:
    """The kernel: o, lse, dq, dk, dv."""
    fault, length, alpha = plan.fault, q.shape[2], q.shape[3] ** -0.5
    wide = [x.float() for x in (q, k, v, do)]
    one = torch.ones(1, HEADS, 1, 1)
    wrong = one.clone()
    wrong[0, 0] = 1.07
    stale = (0.6 if fault == "stale amax" else 1.0) * (plan.margin if plan.form != "fp8" else 1.0)
    if plan.form == "fp8":
        q8 = fp8(wide[0], plan, shift=1.07 if fault == "wrong descale" else 1.0)
        k8 = fp8(wide[1], plan, amax=stale, shift=wrong if fault == "one head's descale" else 1.0)
        v8 = fp8(wide[2], plan, amax=stale, shift=1.07 if fault == "wrong descale of v" else 1.0)
        scale = wide[1].abs().amax((2, 3), keepdim=True) / 448
        if fault == "rounded toward zero":
            k8 = cut(wide[1] / scale, 3, -6) * scale
        if fault == "v clipped where E4M3FNUZ ends":
            scale = wide[2].abs().amax((2, 3), keepdim=True) / 448
            v8 = to_fp8(wide[2].clamp(-240 * scale, 240 * scale), scale)
        if fault == "E5M2":
            scale = wide[2].abs().amax((2, 3), keepdim=True) / 57344
            v8 = (wide[2] / scale).to(torch.float8_e5m2).float() * scale
        if fault == "wrong descale of some keys":
            k8[:, :, 160:] *= 1.15
    elif plan.form in ("int8", "int8-fp16"):
        centred = wide[1] - wide[1].mean(2, keepdim=True)
        rows = 32 if plan.form == "int8" else 128
        second = torch.ones(-(-length // rows), 1, 1)
        second[1] = 0.5 if fault == "one group of q clipped" else 1.0
        q8 = int8(wide[0], rows, plan.margin * second) * (1.07 if fault == "wrong descale" else 1.0)
        some = torch.ones(-(-length // 64), 1, 1)
        some[1] = 0.5 if fault == "one group clipped" else 1.0
        to_code = {"rounded toward zero": torch.trunc, "rounded down": torch.floor}.get(fault, torch.round)
        k8 = int8(
            wide[1] if fault == "not smoothed" else centred,
            256 if fault == "shared too widely" else 64,
            stale * some * (0.7 if fault == "codes that wrap" else 1.0),
            roll=1 if fault == "scale of another group" else 0,
            to_code=to_code,
            reach=_REACH.get(fault, ""),
        )
        if fault == "one group's scale doubled":
            k8[:, :, 64:128] *= 2
        if fault == "scale of other rows":
            q8 = int8(wide[0], rows, plan.margin, roll=1)
        k8 = k8 * (wrong if fault == "one head's descale" else 1.0)
        v8 = wide[2]
        if plan.form == "int8":
            scale = wide[2].abs().amax(2, keepdim=True).clamp(min=1e-30) * plan.margin / 448
            scale[..., 5] *= 0.5 if fault == "one feature of v clipped" else 1.0
            v8 = to_fp8(wide[2], scale.roll(1, 3) if fault == "scale of another feature" else scale)
            v8 = (v8 / scale.roll(1, 3) * scale) if fault == "scale of another feature" else v8
            if fault == "k's scales for v":
                v8 = to_fp8(wide[2], wide[1].abs().amax(2, keepdim=True) / 448)
            if fault == "scale of the first feature":
                v8 = v8 / scale * scale[..., :1]
    else:
        grid, size, top = (fp4, 16, 6.0) if plan.form == "nvfp4" else (e4m3, 32, 256.0)
        centre = wide[1].mean(2, keepdim=True) if plan.form == "nvfp4" else 0.0
        halved = 0.5 if fault == "all of q's scales halved" else 1.0
        q8 = blocks_of(wide[0], 3, size, grid, top, times=halved) * (1.4 if fault == "wrong descale" else 1.0)
        read = {"transposed scales": "transposed", "scale of the block before": "before"}.get(fault, "")
        wider = min(4 * size, q.shape[3]) if fault == "shared too widely" else size
        coarser = (
            grid
            if fault != "rounded toward zero"
            else partial(cut, bits=1, least=0)
            if top == 6
            else partial(cut, bits=3, least=-6)
        )
        k8 = blocks_of(wide[1] - centre, 3, wider, coarser, top, read)
        k8 = k8 * (1 + 6 * (wrong - 1) if fault == "one head's descale" else 1.0)
        v8 = blocks_of(wide[2], 2, size, grid, top)
        if fault == "scale of another group":
            k8 = torch.cat([2 * k8[:, :, :64], k8[:, :, 64:]], 2)
    scores = (q8 @ k8.mT) * alpha
    mask = torch.ones(length, length, dtype=torch.bool).tril(1 if fault == "mask off by one" else 0)
    if fault == "dropped key block":
        mask[128:, 64:96] = False
    scores = scores.masked_fill(~mask, -torch.inf)
    most, total = torch.full_like(scores[..., :1], -torch.inf), torch.zeros_like(scores[..., :1])
    sums = torch.zeros_like(v8)
    for start in range(0, length, plan.tile):
        keys = slice(start, start + plan.tile)
        part = scores[..., keys]
        new = torch.maximum(most, part.amax(-1, keepdim=True))
        shift = new.masked_fill(new == -torch.inf, 0.0)
        p = (part - shift).exp()
        shrink = (most - shift).exp().masked_fill(most == -torch.inf, 0.0)
        total, most = total * shrink + p.sum(-1, keepdim=True), new
        if plan.form in ("fp8", "int8"):
            factor = 448.0 if plan.form == "int8" else plan.probs_scale
            cast = (p * factor).to(E4M3).float() / factor
            if fault == "P truncated":
                down = (p * factor).log2().floor().clamp(min=-6)
                cast = ((p * factor) / torch.exp2(down - 3)).floor() * torch.exp2(down - 3) / factor
        elif plan.form == "int8-fp16":
            cast = p.half().float()
        elif plan.form == "mxfp8":
            cast = blocks_of(p, 3, 32, e4m3, 256.0)
        else:
            groups = (p * 2688).reshape(*p.shape[:-1], -1, 16)
            unit = (groups.amax(-1, keepdim=True).clamp(min=1e-30) / 6).to(E4M3).float().clamp(min=2.0**-9)
            cast = (fp4(groups / unit) * unit).reshape_as(p) / 2688
        sums = sums * shrink + cast @ v8[..., keys, :]
    o = (sums / total).bfloat16()
    lse = (most + total.log())[..., 0]
    if plan.form not in ("fp8", "mxfp8") and fault != "not smoothed":
        lse = lse + alpha * (wide[0] @ wide[1].mean(2, keepdim=True).mT)[..., 0]
    # FlashAttention-2's backward on the 16-bit inputs.
    exact = ((wide[0] @ wide[1].mT) * alpha).masked_fill(~mask, -torch.inf)
    p = (exact - lse[..., None]).exp()
    delta = (wide[3] * o.float()).sum(-1, keepdim=True)
    ds = (p * (wide[3] @ wide[2].mT - delta)).bfloat16().float()
    dv_do, dv_p = wide[3], p.bfloat16().float()
    if fault == "dV of FP8":
        dv_do, dv_p = fp8(wide[3], plan), e4m3(p * 256) / 256
    out = {"o": o, "lse": lse, "dq": alpha * ds @ wide[1], "dk": alpha * ds.mT @ wide[0], "dv": dv_p.mT @ dv_do}
    return {name: x if name == "lse" else x.bfloat16() for name, x in out.items()}


DECLARED = {
    "fp8": "fa3-fp8", "int8": "sage2", "int8-fp16": "sage1", "mxfp8": "mxfp8-attention", "nvfp4": "nvfp4-attention",
}  # fmt: skip
HEALTHY = {
    "FP8, a scale a head": Plan(),
    "FP8, one scale for all heads": Plan(scales="call"),
    "FP8, scales of powers of two": Plan(scales="power"),
    "FP8, P times 448, tiles of 128": Plan(probs_scale=448.0, tile=128),
    "INT8 and FP8 P V": Plan("int8"),
    "INT8 and FP16 P V": Plan("int8-fp16"),
    "MXFP8, tiles of 64": Plan("mxfp8"),
    "NVFP4, tiles of 64": Plan("nvfp4"),
}
_ANY = (
    "wrong descale",
    "one head's descale",
    "mask off by one",
    "dropped key block",
    "dV of FP8",
    "rounded toward zero",
)
_INT8 = ("stale amax", "scale of another group", "shared too widely", "not smoothed", "one group clipped",
         "scale of other rows", "one group of q clipped", "one feature of v clipped", "one group shared too widely",
         "future keys in a scale", "rounded down", "one group's scale doubled", "running amax",
         "amax of the group before", "codes that wrap", "scale of another feature", "scale of the first feature",
         "k's scales for v")  # fmt: skip
# Of v's scales by feature, which SageAttention 1 has none of.
_FEATURES = ("one feature of v clipped", "scale of another feature", "scale of the first feature", "k's scales for v")
_BLOCKS = ("scale of another group", "shared too widely", "transposed scales", "scale of the block before")
_FP8 = ("wrong descale of v", "stale amax", "P truncated", "E5M2", "wrong descale of some keys")
FAULTS = {
    **{f"FP8: {f}": Plan(fault=f) for f in (*_ANY, *_FP8)},
    **{f"INT8: {f}": Plan("int8", f) for f in (*_ANY, *_INT8)},
    **{f"INT8-FP16: {f}": Plan("int8-fp16", f) for f in (*_ANY, *_INT8) if f not in _FEATURES},
    **{f"MXFP8: {f}": Plan("mxfp8", f) for f in (*_ANY, *_BLOCKS, "all of q's scales halved")},
    **{f"NVFP4: {f}": Plan("nvfp4", f) for f in (*_ANY, *_BLOCKS)},
}


def exact(q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> dict[str, Tensor]:
    """The truth, float64, by autograd."""
    with torch.enable_grad():
        x = [t.double().requires_grad_() for t in (q, k, v)]
        s = (x[0] @ x[1].mT) * WIDTH**-0.5
        s = s.masked_fill(~torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(), -torch.inf)
        o = s.softmax(-1) @ x[2]
        grads = torch.autograd.grad(o, x, do.double())
    return {"o": o.detach(), **dict(zip(("dq", "dk", "dv"), grads, strict=True))}


def effect(made: dict[str, Tensor], sound: dict[str, Tensor], truth: dict[str, Tensor]) -> tuple[float, float]:
    """The largest factor of a quantity's error over a sound kernel's, of a head and of a row."""
    whole = row = 0.0
    for name, true in truth.items():
        a, b = (x[name].double() - true for x in (made, sound))
        whole = max(whole, float((a.square().sum((2, 3)) / b.square().sum((2, 3))).sqrt().max()))
        rows = b.square().sum(3).mean(2, keepdim=True)
        row = max(row, float((a.square().sum(3) / torch.maximum(b.square().sum(3), rows)).sqrt().max()))
    return whole, row


# Scales and tiles of sound kernels; a fault's effect is over that of the worst of them.
SOUND = ((1.0, 64), (1.02, 128), (1.04, 32), (1.06, 256))


def named_in(words: str) -> set[str]:
    """The culprits that are named there."""
    return {name for name, texts in CULPRITS.items() if any(text in words for text in texts)}


def judge(plan: Plan, family: str, seed: int) -> dict[str, Any]:
    """One call, inspected as what it is declared to be."""
    tensors = inputs(family, seed, late_of(plan))
    made = run(plan, *tensors)
    sound = [run(replace(plan, fault="", margin=m, tile=t), *tensors) for m, t in SOUND]
    names: dict[str, Any] = {**dict(zip(("q", "k", "v", "do"), tensors, strict=True)), **made}
    begun = time.perf_counter()
    found = attn_diag.inspect(**names, causal=True, declared=DECLARED[plan.form], device="cpu")
    seconds = time.perf_counter() - begun
    labels: list[str] = sorted(found.labels)
    truth = exact(*tensors)
    whole, row = (min(found) for found in zip(*(effect(made, other, truth) for other in sound), strict=True))
    factors = {
        q.quantity: (q.answer, round(q.factor or 0.0, 3), round(q.relative_error_16_bit or 0.0, 5))
        for head in found.heads for q in head.quantities if q.factor is not None
    }  # fmt: skip
    words = " ".join([found.captures[0].assumptions.message, *(q.words for h in found.heads for q in h.quantities)])
    culprits = named_in(words)
    if CLIPPED in words:
        culprits = culprits - {"wrong descale", "scale of another group", "scale of other rows"} | {"too small"}
    # The whole of a group's sentence holds that of all groups.
    culprits -= {"stale amax"} if any("clipped" in name for name in culprits) else set()
    said = [reason for head in found.heads if head.verdict for reason in head.verdict.reasons[:2]]
    return {
        "labels": labels or ["not as stated"],
        "factor": whole,
        "row": row,
        "seconds": seconds,
        "quantities": factors,
        "said": said,
        "together": [sorted(culprits & named_in(part)) for part in re.split(r"[.;] ", words) if ", or " in part],
        "culprits": sorted(culprits),
    }


# What a report says where it names a scale or a rounding as the culprit; other faults are told by where they are.
CULPRITS = {
    "wrong descale": ("throughout, as by a descale factor of q or k", "; yet scale", "; scale="),
    "wrong descale of v": ("as by a descale factor of v",),
    "scale of another group": ("a scale of k that is wrong there", "k is multiplied back with the scale of the block"),
    "scale of other rows": ("a scale of q that is wrong there", "q is multiplied back with the scale of the block"),
    "one group's scale doubled": ("k in keys 64-127 is multiplied back with twice its scale",),
    "running amax": ("(a running amax)",),
    "amax of the group before": ("k has the scale of the block before",),
    "codes that wrap": ("wraps around",),
    "scale of another feature": ("v is divided by the scale of the feature before",),
    "scale of the first feature": ("v is multiplied back with the scale of the first feature throughout",),
    "k's scales for v": ("v has k's scales",),
    "transposed scales": ("k is multiplied back with its scales",),
    "scale of the block before": ("k is multiplied back with the scale of the block before",),
    "all of q's scales halved": ("all scales of q are half",),
    "stale amax": ("a stale amax",),
    "shared too widely": ("has a scale for",),
    "one group clipped": ("k in keys 64-127 is taken for 0.5 times",),
    "one group of q clipped": ("q in rows 32-63 is taken for 0.5 times", "q in rows 128-255 is taken for 0.5 times"),
    "one feature of v clipped": ("v in feature 5 is taken for 0.5 times",),
    "one group shared too widely": ("k in keys 64-127 has the scale of the head",),
    "future keys in a scale": ("k has scales of 64 rows and the block after it",),
    "a later block's scale": ("has the scale of the block after it, which is the head's",),
    "rounded down": ("k is rounded down",),
    "rounded toward zero": ("k is rounded toward zero", "v is rounded toward zero", "q is rounded toward zero"),
    "P truncated": ("P_bar is rounded toward zero",),
    "E5M2": ("is in e5m2",),
    "not smoothed": ("mean is not taken off",),
}
ACCUSED = {"nonfinite", "wrong", "lossy", "biased", "not as stated"}
NAMED = {"nonfinite", "wrong", "lossy", "not as stated"}
# Where bits do not tell, factors below 1 are said to be a wrong scale or this.
CLIPPED = "or numbers of q or k that are clipped or rounded toward zero"
# What a fault may be said to be besides: the words for P_bar are "or casts of P_bar that all round one way".
ALIKE = {
    "one head's descale": ("wrong descale",),
    "wrong descale of some keys": ("scale of another group",),
    "P truncated": ("P truncated", "wrong descale of v"),
    "scale of another group": ("scale of another group", "scale of the block before"),
    "scale of the block before": ("scale of another group", "scale of the block before"),
    "one group shared too widely": ("one group shared too widely", "a later block's scale"),
    "future keys in a scale": ("future keys in a scale", "a later block's scale"),
    "stale amax": ("stale amax", "too small"),
    "rounded toward zero": ("rounded toward zero", "too small"),
}
# What a fault must do to be one: 1.25 times a sound kernel's error, or 3 times a row's.
BROKEN, BROKEN_ROW = 1.25, 3.0


# Sound kernels with scales of their own, against which a fault's trace in O and L is held.
OTHERS = tuple(1 + 0.005 * i for i in range(1, 13))
# Who knows the fault and looks for nothing else tells a trace of so many standard deviations from a sound kernel.
TOLD = 4.0


def trace(plan: Plan, tensors: list[Tensor], made: dict[str, Tensor]) -> float:
    """What a fault does to O and L along its own direction, in standard deviations of sound kernels there.

    The difference to the same kernel without the fault, element by element in units of what sound kernels with scales
    of their own differ by, is a filter for it that no tool has. Of the head where it is largest.
    """
    twin = run(replace(plan, fault=""), *tensors)
    others = [run(replace(plan, fault="", margin=plan.margin * m), *tensors) for m in OTHERS]
    found = []
    for h in range(HEADS):
        fault, sound = torch.zeros(0), torch.zeros(len(OTHERS), 0)
        for name in ("o", "lse"):
            apart = torch.stack([(x[name] - twin[name])[0, h].float() for x in others])
            unit = apart.square().mean((0, *range(2, apart.ndim)), keepdim=True).clamp(min=1e-30).sqrt()
            fault = torch.cat([fault, ((made[name] - twin[name])[0, h].float() / unit[0]).flatten()])
            sound = torch.cat([sound, (apart / unit).flatten(1)], 1)
        along = float((sound @ fault).square().mean().sqrt())
        found.append(float(fault @ fault) / along if along else 0.0)
    return max(found)


def answer(name: str, plan: Plan, family: str, seed: int) -> dict[str, Any]:
    """What is said of one call, and whether it is as it should be."""
    sound = name in HEALTHY
    found = judge(plan, family, seed)
    acts = sound or found["factor"] >= BROKEN or found["row"] >= BROKEN_ROW
    acts |= plan.fault == "dV of FP8"  # 15 times what the declared backward leaves, however coarse its L is
    hit = bool((ACCUSED if sound else NAMED) & set(found["labels"]))
    right = set(ALIKE.get(plan.fault, (plan.fault,)))
    named = acts and bool(right & set(found["culprits"]))
    # Ways that make the same numbers are named together.
    others = set(found["culprits"]) - right
    hedged = bool(others) and any(others <= set(some) and right & set(some) for some in found["together"])
    misnamed = bool(others) and not hedged
    counts = {"calls": 1, "acting": acts, "accused": acts and hit, "named": named, "hedged": hedged,
              "misnamed": misnamed}  # fmt: skip
    if acts and not named and right & set(CULPRITS):
        tensors = inputs(family, seed, late_of(plan))
        found["trace"] = trace(plan, tensors, run(plan, *tensors))
        counts["traceless"] = found["trace"] < TOLD
    wrong = misnamed or (acts and hit == sound) or "trace" in found
    return {"counts": counts, "labels": found["labels"],
            "wrong": {"family": family, "seed": seed, **found} if wrong else None}  # fmt: skip


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--only", default="", help="names that hold this, or one of several: clipped|stale")
    parser.add_argument("--adverse", action="store_true", help="inputs of ADVERSE, in rows of their own")
    parser.add_argument("--processes", type=int, default=1)
    arguments = parser.parse_args()

    def chosen(name: str) -> bool:
        return any(part in name for part in arguments.only.split("|"))

    families, suffix = (ADVERSE, ", adverse inputs") if arguments.adverse else (FAMILIES, "")
    kept: list[dict[str, Any]] = []
    if arguments.json and arguments.json.exists():
        rows_of_file = json.loads(arguments.json.read_text())["rows"]
        kept = [r for r in rows_of_file if not (chosen(r["kernel"]) and r["kernel"].endswith("inputs") == bool(suffix))]
    seeds = range(arguments.first, arguments.first + arguments.seeds)
    plans = {name: plan for name, plan in (HEALTHY | FAULTS).items() if chosen(name)}
    rows: list[dict[str, Any]] = []
    with ProcessPoolExecutor(arguments.processes, get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        # Few seeds have all families between the kernels.
        places = {name: place for place, name in enumerate(HEALTHY | FAULTS)}
        calls = {
            name: [pool.submit(answer, name, plan, families[(places[name] + s) % len(families)], s) for s in seeds]
            for name, plan in plans.items()
        }
        for name, plan in plans.items():
            counts, labels = Counter[str](), Counter[str]()
            worst: list[object] = []
            for call in calls[name]:
                found = call.result()
                counts.update(found["counts"])
                labels.update(found["labels"])
                worst += [] if found["wrong"] is None else [found["wrong"]]
            kind = "sound" if name in HEALTHY else "fault"
            rows.append({"kernel": name + suffix, "kind": kind, "plan": asdict(plan), "first seed": arguments.first,
                         **counts, "labels": dict(labels), "not as it should be": worst[:4]})  # fmt: skip
            print(f"{kind} {name}: {dict(counts)} {dict(labels)}", flush=True)
            inputs_of = {"length": LENGTH, "width": WIDTH, "families": FAMILIES, "adverse": ADVERSE}
            save(made_by() | inputs_of | {"rows": [*kept, *rows]}, arguments.json)


if __name__ == "__main__":
    main()
