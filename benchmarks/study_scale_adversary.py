"""Scale faults planted in attention of an adversary's own arithmetic, and whether ``inspect`` names them.

As ``study_scale_faults``, by somebody who had not read it, nor the search: groups, scales, codes, softmax and P_bar are
written out here after the recipes' papers, in other tiles than the recipes'. A trial is one call; a fault acts where
O's bits change. "named" counts a right name among several that are joined by "or".

    python benchmarks/study_scale_adversary.py --first 1000 --json benchmarks/results/scale_adversary_cpu.json
"""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from measuring import made_by, options_of, save
from torch import Tensor

import attn_diag

LOG2_E = 1.4426950408889634


@dataclass(frozen=True)
class Rule:
    """One quantiser: elements, group of (rows, columns) with 0 for all, and its scale."""

    elements: str
    rows: int
    columns: int
    scale: str = "fp32"
    ties: str = "even"
    levels: int = 1
    unrounded: bool = False


@dataclass(frozen=True)
class Fault:
    """What is planted where."""

    kind: str = ""
    operand: str = ""
    amount: float = 0.0


NONE = Fault()
INT8, FP8, MX8, MX4 = (
    Rule("int8", 1, 0), Rule("e4m3", 0, 0), Rule("e4m3", 1, 32, "e8m0"), Rule("e2m1", 1, 32, "e8m0"),
)  # fmt: skip
NV = Rule("e2m1", 1, 16, "e4m3", levels=2)
S3 = Rule("e2m1", 1, 16, "e4m3")


def away(rows: int) -> Rule:
    """INT8 in groups of rows, halves away from zero."""
    return Rule("int8", rows, 0, ties="away")


# q, k, v, P_bar (None: 16 bits or a cast) of each recipe.
RULES: dict[str, tuple[Rule | None, Rule | None, Rule | None, Rule | None]] = {
    "fa3-fp8": (FP8, FP8, FP8, None),
    "sage1": (away(128), away(64), None, None),
    "sage2": (away(32), away(64), Rule("e4m3", 0, 1), None),
    "sage2-int4": (Rule("int4", 32, 0), Rule("int4", 64, 0), Rule("e4m3", 0, 1), None),
    "sage3": (S3, S3, Rule("e2m1", 16, 1, "e4m3"), Rule("e2m1", 1, 16, "e4m3", unrounded=True)),
    "mxfp8-attention": (MX8, MX8, Rule("e4m3", 32, 1, "e8m0"), MX8),
    "mxfp4-attention": (MX4, MX4, Rule("e2m1", 32, 1, "e8m0"), MX4),
    "nvfp4-attention": (NV, NV, Rule("e2m1", 16, 1, "e4m3", levels=2), S3),
    "kv-int8": (None, INT8, INT8, None),
    "kv-fp8": (None, FP8, FP8, None),
}
CAST = {"fa3-fp8": ("e4m3", 256.0), "sage1": ("fp16", 1.0), "sage2": ("e4m3", 448.0), "sage2-int4": ("e4m3", 448.0)}
PROBS_SCALE = {"nvfp4-attention": 2688.0, "sage3": 2688.0}
SMOOTH = ("sage1", "sage2", "sage2-int4", "sage3", "nvfp4-attention")
LARGEST = {"int8": 127.0, "int4": 7.0, "e4m3": 448.0, "e2m1": 6.0}


def blocks(x: Tensor, rows: int, columns: int) -> Tensor:
    """amax of each group, spread out over the elements."""
    height, width = x.shape
    rows, columns = rows or height, columns or width
    down, across = -height % rows, -width % columns
    padded = torch.nn.functional.pad(x.abs(), (0, across, 0, down))
    parts = padded.reshape((height + down) // rows, rows, (width + across) // columns, columns)
    amax = parts.amax((1, 3))
    return amax.repeat_interleave(rows, 0).repeat_interleave(columns, 1)[:height, :width]


def rounded(x: Tensor, elements: str, ties: str, how: str) -> Tensor:
    """Codes of x that is divided by its scale; ``how``: nearest, floor or zero."""
    largest = LARGEST[elements]
    x = x.clamp(-largest, largest)
    if elements.startswith("int"):
        if how == "nearest":
            return torch.round(x) if ties == "even" else torch.trunc(x + 0.5 * torch.sign(x))
        return (torch.floor(x) if how == "floor" else torch.trunc(x)).clamp(-largest, largest)
    if elements == "e4m3":
        near = x.to(torch.float8_e4m3fn).float()
        step = torch.exp2(torch.floor(torch.log2(x.abs().clamp(min=2.0**-6))) - 3)
    else:
        step = torch.exp2(torch.floor(torch.log2(x.abs().clamp(min=1.0))) - 1)
        near = torch.round(x / step) * step
    if how == "nearest":
        return near
    return (torch.floor(x / step) if how == "floor" else torch.trunc(x / step)) * step


def quantized(x: Tensor, rule: Rule | None, fault: Fault, name: str) -> tuple[Tensor, Tensor]:
    """Codes and scales of x, float32, by ``rule``, with ``fault`` where it is of this operand."""
    if rule is None:
        return x, torch.ones_like(x)
    mine = fault if fault.operand == name else NONE
    rows, columns = rule.rows, rule.columns
    if mine.kind == "shared":
        if (rows != 1 and rows) or not columns:
            rows = int(rows * mine.amount) if mine.amount else 0
        else:
            columns = int(columns * mine.amount) if mine.amount else 0
    if mine.kind == "future":
        # A group's scale holds the group of keys behind it too.
        step = max(rows, 1) if rows else len(x)
        behind = torch.cat([x[step:], x[-step:] if step < len(x) else x[:0]])[: len(x)]
        amax = torch.maximum(blocks(x, rows, columns), blocks(behind, rows, columns))
    else:
        amax = blocks(x, rows, columns)
    if mine.kind == "stale":
        amax = amax * mine.amount
    if mine.kind == "delayed":
        # A group has the scale of the one before it.
        step = max(rows, 1)
        amax = torch.cat([amax[:step], amax[:-step]])[: len(x)]
    largest = LARGEST[rule.elements]
    if rule.scale == "e8m0":
        target = 256.0 if rule.elements == "e4m3" else 4.0
        scale = torch.exp2(torch.floor(torch.log2((amax / target).clamp(min=2.0**-126))))
    elif rule.scale == "e4m3":
        level = float(x.abs().max()) / (largest * 448) if rule.levels == 2 else 1.0
        unrounded = amax / largest
        scale = (unrounded / level).clamp(max=448).to(torch.float8_e4m3fn).float() * level
        if rule.unrounded:
            codes = rounded(torch.where(unrounded > 0, x / unrounded, 0), rule.elements, rule.ties, how_of(mine))
            return codes, scale
    else:
        scale = amax / largest
    codes = rounded(torch.where(scale > 0, x / scale, 0), rule.elements, rule.ties, how_of(mine))
    if mine.kind == "zero point":
        codes = codes + mine.amount
    return codes, scale


def how_of(fault: Fault) -> str:
    """Rounding of a fault."""
    return ("floor" if fault.amount < 0 else "zero") if fault.kind == "floor" else "nearest"


def kernel(
    recipe: str, q: Tensor, k: Tensor, v: Tensor, causal: bool, fault: Fault = NONE, tile: int = 64
) -> tuple[Tensor, Tensor]:
    """O [T, D] in BF16 and L [T] of one head."""
    q, k, v = q.float(), k.float(), v.float()
    of_q, of_k, of_v, of_p = RULES[recipe]
    alpha = 1 / math.sqrt(q.shape[1])
    mean = torch.zeros_like(k[:1])
    if recipe in SMOOTH:
        mean = k.mean(0, keepdim=True)
        if recipe in ("sage1", "sage3"):
            mean = mean.bfloat16().float()
        k_in = k - mean
        if recipe in ("sage1", "sage3"):
            k_in = k_in.bfloat16().float()
    else:
        k_in = k
    in_q = recipe in ("sage1", "sage2", "sage2-int4")
    q_in = q * torch.tensor(alpha * LOG2_E, dtype=torch.float32) if in_q else q
    beside = torch.zeros(len(q), len(k))
    if recipe in ("sage2-int4", "sage3"):
        size = 128
        parts = [part.sum(0) / size if recipe == "sage3" else part.mean(0) for part in torch.split(q_in, size)]
        means = torch.stack(parts)[torch.arange(len(q)) // size]
        q_in = q_in - means
        if recipe == "sage3":
            q_in, means = q_in.bfloat16().float(), means.bfloat16().float()
        beside = (means.double() @ k_in.double().T).float()
        if recipe == "sage3":
            beside = beside.bfloat16().float()
    qc, qs = quantized(q_in, of_q, fault, "q")
    kc, ks = quantized(k_in, of_k, fault, "k")
    if of_q is None or of_q.columns:
        scores = ((qc * qs).double() @ (kc * ks).double().T).float()
    else:
        scores = (qc.double() @ kc.double().T).float() * qs[:, :1] * ks[:, :1].T
    scores = scores + beside
    scores = scores / LOG2_E if in_q else scores * alpha
    seen = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q)) if causal else torch.ones_like(scores) > 0
    if recipe in ("fa3-fp8", "kv-int8", "kv-fp8") or not of_v or (of_v.columns == 1 and of_v.rows == 0):
        vc, vs = quantized(v, of_v, fault, "v")
        if recipe.startswith("kv"):
            vc, vs = (vc * vs), torch.ones_like(vs)
    else:
        vc, vs = quantized(v, of_v, fault, "v")
        vc, vs = vc * vs, torch.ones_like(vs)
    m = torch.full((len(q), 1), -1e30)
    total, acc = torch.zeros(len(q), 1), torch.zeros(len(q), v.shape[1])
    starts = list(range(0, len(k), tile))
    for start in reversed(starts) if recipe in ("fa3-fp8",) else starts:
        keys = slice(start, min(start + tile, len(k)))
        s, visible = scores[:, keys], seen[:, keys]
        hidden = s.masked_fill(~visible, -math.inf)
        new = torch.maximum(m, hidden.amax(1, keepdim=True))
        old = torch.exp2((m - new) * LOG2_E)
        p = torch.exp2((hidden - new) * LOG2_E)
        total = total * old + p.sum(1, keepdim=True)
        factor = PROBS_SCALE.get(recipe, 1.0)
        if of_p is not None:
            given = p * factor
            if fault.kind == "masked" and fault.operand == "p":
                # The block's scale is made before the mask.
                raw = torch.exp2((s - new).clamp(max=0) * LOG2_E) * factor
                c, sc = quantized(raw, of_p, NONE, "p")
                c = torch.where(
                    sc > 0, rounded(torch.where(sc > 0, given / sc, 0), of_p.elements, "even", "nearest"), 0
                )
                cast = c * sc
            else:
                c, sc = quantized(given, of_p, fault, "p")
                cast = c * sc
        else:
            fmt, factor = CAST.get(recipe, ("bf16", 1.0))
            given = p * factor
            if fault.operand == "p" and fault.kind == "floor":
                assert fmt == "e4m3"
                cast = rounded(given, "e4m3", "even", "zero")
            elif fmt == "e4m3":
                cast = given.clamp(max=448).to(torch.float8_e4m3fn).float()
            else:
                cast = given.half().float() if fmt == "fp16" else given.bfloat16().float()
        acc = acc * old + (cast.double() @ vc[keys].double()).float() / factor
        m = new
    o = acc / total * vs[:1]
    lse = m[:, 0] + torch.log(total[:, 0]) + (q.double() @ mean.double().T).float()[:, 0] * alpha
    return o.bfloat16(), lse


INPUTS = ("normal", "growing", "outliers", "mean", "sink", "vmean", "short", "odd", "gqa")


def made(kind: str, seed: int, recipe: str) -> tuple[Tensor, Tensor, Tensor]:
    """q [H, T, D], k and v [HK, T, D] in BF16."""
    g = torch.Generator().manual_seed(seed * 7919 + sum(map(ord, kind + recipe)))
    t = {"short": 96 if seed % 2 else 192, "odd": 233}.get(kind, 320 if seed % 2 else 256)
    kv = 1
    heads = 2 if kind == "gqa" else 1
    q, k, v = (torch.randn(h, t, 64, generator=g) for h in (heads, kv, kv))
    if kind == "growing":
        k = k * torch.linspace(0.25, 3.0, t)[:, None]
        v = v * torch.linspace(0.5, 2.0, t)[:, None]
    if kind == "outliers":
        k[..., 5] *= 8
        q[..., 11] *= 6
        v[..., 3] *= 8
    if kind == "mean":
        k = k + 2 * torch.randn(1, 1, 64, generator=g)
    if kind == "sink":
        k[:, 0] *= 12
        v[:, 0] *= 0.1
    if kind == "vmean":
        v = v + 1.5
    return q.bfloat16(), k.bfloat16(), v.bfloat16()


def plans() -> list[tuple[str, Fault]]:
    """Every recipe with every fault that it has."""
    found: list[tuple[str, Fault]] = []
    for recipe, rules in RULES.items():
        for name, rule in zip("qkvp", rules, strict=True):
            if rule is None:
                if name == "p" and recipe in ("fa3-fp8", "sage2"):
                    found.append((recipe, Fault("floor", "p", 1.0)))
                continue
            grouped = rule.rows > 0 and not (rule.rows == 1 and rule.columns == 0)
            if grouped or rule.columns:
                wide = 2.0 if grouped and rule.columns != 1 else 0.0
                found.append((recipe, Fault("shared", name, 0.0 if recipe == "sage3" and name == "v" else wide)))
                if name == "k":
                    found.append((recipe, Fault("shared", name, 4.0)))
            found.append((recipe, Fault("floor", name, 1.0)))
            if name != "p":
                found.append((recipe, Fault("floor", name, -1.0)))
                found.append((recipe, Fault("stale", name, 0.6)))
                if name == "k":
                    found.append((recipe, Fault("stale", name, 1.7)))
            if rule.elements.startswith("int"):
                found.append((recipe, Fault("zero point", name, 1.0)))
                if name == "k":
                    found.append((recipe, Fault("zero point", name, -1.0)))
            if name in "kv" and rule.rows > 0 and not (rule.rows == 1 and recipe == "sage3"):
                found.append((recipe, Fault("future", name)))
                if name == "k" and rule.rows > 1:
                    found.append((recipe, Fault("delayed", name)))
            if name == "p":
                found.append((recipe, Fault("masked", "p")))
    return found


# What a report says of a tensor X where it names the fault; a scale of the block before or after makes the same numbers
# as a wider one now and then.
SAID = {
    "shared": r"\bX has a scale for|which is the head",
    "floor": r"\bX is rounded (toward zero|down)|casts of X that all round one way",
    "stale": r"largest number of X .{0,30}is taken for",
    "delayed": r"\bX has the scale of the block before|running amax|\bX has a scale for",
    "future": r"later ones|from there on|block after it|\bX has a scale for",
    "zero point": r"\bX's integers.*zero point",
    "masked": r"keys that are masked as well",
}
# And where it names anything.
NAMES = (
    r"\b[qkv] has (a|the) scales? |\b[qkv] has scales|P_bar has a scale|scales of P_bar's blocks|\b[qkv] is rounded"
    r"|P_bar is rounded|[qkv]'s integers|\b[qkv] is (multiplied|divided)|largest number of [qkv]|all scales of"
    r"|scores are multiplied|[OL] is multiplied by|MASK OR SCALE|[qkv]'s scales are|\b[qkv] is in|the mean is not taken"
)


def outcome(fault: Fault, text: str) -> str:
    """In a word what a report says."""
    told = " ".join(text.split())
    if not fault.kind:
        silent = told.startswith(("PASS", "NOTHING")) and "Not as declared" not in told
        return "sound" if silent and not re.search(NAMES, told) else "accused"
    named = re.search(SAID[fault.kind].replace("X", {"p": "P_bar"}.get(fault.operand, fault.operand)), told)
    if named or re.search(NAMES, told):
        return "named" if named else "wrong culprit"
    return {"PASS": "passed", "NOTH": "undecided"}.get(told[:4], "told without a name")


def judged(recipe: str, kind: str, seed: int, fault: Fault, causal: bool) -> dict[str, Any]:
    """One call: whether the fault acts, how much further off O is, and what inspect says."""
    q, k, v = made(kind, seed, recipe)
    outs, sound = [], []
    for head in range(len(q)):
        args = recipe, q[head], k[0], v[0], causal
        outs.append(kernel(*args, fault))
        sound.append(kernel(*args) if fault.kind else outs[-1])
    o, lse = (torch.stack([one[i] for one in outs])[None] for i in (0, 1))
    plain = torch.stack([one[0] for one in sound])[None]
    group = len(q)
    keys, values = (x[None].double().expand(-1, group, -1, -1) for x in (k, v))
    exact = torch.nn.functional.scaled_dot_product_attention(q[None].double(), keys, values, is_causal=causal)
    own = float((plain.double() - exact).square().mean().sqrt())
    change = float((o.double() - plain.double()).square().mean().sqrt()) / own
    capture = attn_diag.Capture.from_tensors(
        {"q": q[None], "k": k[None], "v": v[None], "o": o, "lse": lse}, causal="top-left" if causal else "none"
    )
    result = attn_diag.inspect(capture, declared=recipe)
    text = result.report()
    said = outcome(fault, text) if not fault.kind or bool((o != plain).any()) else "does not act"
    words = {} if said in ("named", "sound") else {"report": " ".join(text.split())[:400]}
    planted = " ".join(str(x) for x in (fault.kind, fault.operand, fault.amount) if x)
    return {
        "recipe": recipe,
        "inputs": kind,
        "seed": seed,
        "fault": planted,
        "O's change": round(change, 3),
        "is": said,
    } | words


def main() -> None:
    """Run all calls, and save what was said."""
    parser = options_of(__doc__)
    parser.add_argument("--first", type=int, default=1000, help="added to the seeds")
    parser.add_argument("--sound", type=int, default=6, help="of how many kinds of inputs sound calls are made")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    every = [(r, i, n, NONE) for n, i in enumerate(INPUTS[: arguments.sound]) for r in RULES]
    every += [(r, INPUTS[(7 * n + n // 9) % len(INPUTS)], n, f) for n, (r, f) in enumerate(plans())]
    counts: dict[str, Counter[str]] = {}
    odd = []
    for recipe, kind, seed, fault in every:
        causal = fault.kind in ("masked", "future", "delayed") or seed % 3 != 0
        found = judged(recipe, kind, seed + arguments.first, fault, causal)
        # An amax that is too large clips nothing.
        group = "amax too large" if fault.kind == "stale" and fault.amount > 1 else fault.kind or "sound calls"
        counts.setdefault(group, Counter())[found["is"]] += 1
        if "report" in found:
            odd.append(found)
            print(found, flush=True)
        save(made_by() | {"first": arguments.first, "counts": counts, "not as it should be": odd}, arguments.json)
    for group, counted in counts.items():
        print(group, dict(counted), flush=True)


if __name__ == "__main__":
    main()
