"""A plain torch attention that computes as a production kernel does, with a named hook at every intermediate.

Forward, of every query tile i, over the key tiles j that it sees, in the schedule's order (FlashAttention-2,
arXiv 2307.08691, algorithm 1):

    S = scale Q_i K_j^T          masked: -inf
    m' = max(m, rowmax S)
    P_bar = exp(S - m')
    l = l exp(m - m') + rowsum P_bar
    acc = acc exp(m - m') + cast(P_bar) V_j
    O = cast(acc / l),  LSE = m + ln l

Backward, from the stored O and LSE (algorithm 2):

    delta = rowsum(dO * O),  P = exp(S - LSE),  dP = dO V^T,  dS = P * (dP - delta)
    dV = sum_i cast(P)^T dO,  dK = scale sum_i cast(dS)^T Q,  dQ = scale sum_j cast(dS) K

Arithmetic is fp32; ``cast`` rounds to the inputs' format. Under GQA dK and dV are rounded per query head and then
summed. Everything is batched over [B, H] and over query tiles; the key tiles of a row, and the query tiles of a key,
come one after the other as on a GPU.

A hook takes the intermediate and ``Seen``, which holds what was computed before it, and returns what the kernel shall
go on with. ``FORWARD_HOOKS`` and ``BACKWARD_HOOKS`` name them all. B, H: batch and query heads; P: pairs of a query
tile and a key tile; A: query tiles that take part in a step; M, N: rows of a query tile and of a key tile.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from verdicts.inputs import Inputs, in_blocks

FORWARD_HOOKS = {
    "scale": "the softmax scale as read, a float64 scalar",
    "q": "q as loaded, fp32 [B, H, Tq, D]",
    "k": "k as loaded for every query head [B, H, Tk, D]",
    "v": "v as loaded for every query head [B, H, Tk, D]",
    "scores": "S before the mask [B, H, P, M, N]",
    "mask": "what is visible, bool [B or 1, 1, P, M, N]",
    "tile_max": "row maximum of one tile [B, H, A, M]",
    "row_max": "running row maximum [B, H, A, M]",
    "exp_argument": "S - m [B, H, A, M, N]",
    "probs": "P_bar [B, H, A, M, N]",
    "rescale": "exp(m - m'), the factor of the old l [B, H, A, M]",
    "acc_rescale": "the factor of the old accumulator [B, H, A, M]",
    "row_sum": "l after a tile [B, H, A, M]",
    "probs_cast": "P_bar as the second product takes it [B, H, A, M, N]",
    "value_tile": "V's tile as the second product takes it [B, H, A, N, D]",
    "pv": "P_bar V of one tile [B, H, A, M, D]",
    "acc": "accumulator after a tile [B, H, A, M, D]",
    "inverse": "1/l [B, H, I, M], I query tiles",
    "split_out": "O of each split, normalised, fp32 [splits, B, H, I, M, D]",
    "split_lse": "LSE of each split [splits, B, H, I, M]",
    "merge_weights": "weights of the splits [splits, B, H, I, M]",
    "out": "O before its cast [B, H, Tq, D]",
    "lse": "LSE, natural, as stored [B, H, Tq]",
    "o": "O as stored, in the inputs' format [B, H, Tq, D]",
}
BACKWARD_HOOKS = {
    "bwd_scale": "the softmax scale as read, a float64 scalar",
    "bwd_q": "q as loaded, fp32 [B, H, Tq, D]",
    "bwd_k": "k as loaded for every query head [B, H, Tk, D]",
    "bwd_v": "v as loaded for every query head [B, H, Tk, D]",
    "bwd_o": "O as loaded [B, H, Tq, D]",
    "bwd_do": "dO as loaded [B, H, Tq, D]",
    "bwd_lse": "LSE as loaded [B, H, Tq]",
    "delta": "delta [B, H, Tq]",
    "bwd_scores": "S before the mask [B, H, P, M, N]",
    "bwd_mask": "what is visible, bool [B or 1, 1, P, M, N]",
    "bwd_probs": "P = exp(S - LSE) [B, H, P, M, N]",
    "bwd_probs_cast": "P as dV's product takes it [B, H, P, M, N]",
    "dp": "dP [B, H, P, M, N]",
    "cap_slope": "derivative of the softcap [B, H, P, M, N]",
    "ds": "dS [B, H, P, M, N]",
    "ds_cast": "dS as the products take it [B, H, P, M, N]",
    "dq_tile": "one tile's share of dQ [B, H, P, M, D]",
    "dk_tile": "one tile's share of dK [B, H, P, N, D]",
    "dv_tile": "one tile's share of dV [B, H, P, N, D]",
    "dq_acc": "dQ after a tile, without scale [B, H, A, M, D]",
    "dk_acc": "dK after a tile, without scale [B, H, A, N, D]",
    "dv_acc": "dV after a tile [B, H, A, N, D]",
    "dk_heads": "dK of every query head, scaled, fp32 [B, H, Tk, D]",
    "dv_heads": "dV of every query head, fp32 [B, H, Tk, D]",
    "dk_sum": "dK summed over the group, fp32 [B, Hk, Tk, D]",
    "dq_out": "dQ before its cast, scaled [B, H, Tq, D]",
    "dq": "dQ as stored, in the inputs' format [B, H, Tq, D]",
    "dk": "dK as stored, in the inputs' format [B, Hk, Tk, D]",
    "dv": "dV as stored, in the inputs' format [B, Hk, Tk, D]",
}

Plan = list[list[int]]
"""Key tiles of every query tile, in the order of computation."""
PlanHook = Callable[[Plan], Plan]
LOG2_E = math.log2(math.e)


@dataclass(frozen=True)
class Kernel:
    """A schedule and its choices: kernels that differ in these are all healthy."""

    tile_q: int = 128
    tile_k: int = 128
    order: Literal["ascending", "descending", "diagonal first"] = "ascending"
    splits: int = 1
    """Independent runs over ranges of keys, merged in fp32 through their LSE."""
    exp: Literal["exp", "exp2 of an FMA"] = "exp"
    scale_q: bool = False
    """Q is multiplied by the scale in fp32, and S is not."""
    row_sum: Literal["uncast", "cast"] = "uncast"
    """Which P_bar l sums."""
    stale: float = 0.0
    """The running maximum only moves where it would grow by more than this (FlashAttention-4)."""
    ds_probs: Literal["uncast", "cast"] = "uncast"
    """Which P dS multiplies; torch's efficient kernel: "cast"."""
    delta: Literal["from O", "from P"] = "from O"
    """ "from P": delta = rowsum(P * dP), which does not see O's rounding."""
    dq_order: Literal["ascending", "random"] = "ascending"
    """ "random": key tiles add to dQ as atomics happen to come."""
    sums: Literal["plain", "blocks", "truncated"] = "plain"
    """ "blocks": products are summed 16 terms at a time; "truncated": and each such sum is cut to fp32."""


PLAIN = Kernel()


@dataclass(frozen=True, eq=False)
class Outputs:
    """What one call returns."""

    o: Tensor
    """[B, Hq, Tq, D], in the inputs' format, as are dq, dk, dv."""
    lse: Tensor
    """[B, Hq, Tq], fp32, natural logarithm."""
    dq: Tensor
    dk: Tensor
    dv: Tensor

    def tensors(self) -> dict[str, Tensor]:
        return {name: getattr(self, name) for name in QUANTITIES}


QUANTITIES = ("o", "lse", "dq", "dk", "dv")


@dataclass(eq=False)
class Seen:
    """What a pass has computed so far, for its hooks; calling it passes a value through its hook."""

    inputs: Inputs
    kernel: Kernel
    hooks: Mapping[str, Hook]
    values: dict[str, Tensor] = field(default_factory=dict)
    rows: Tensor = field(default_factory=lambda: torch.empty(0))
    """Numbers of the query rows of the value at hand, [P or A, M]."""
    keys: Tensor = field(default_factory=lambda: torch.empty(0))
    """Numbers of the keys of the value at hand, [P or A, N]."""
    pair_rows: Tensor = field(default_factory=lambda: torch.empty(0))
    """Numbers of the query rows of every pair, [P, M]."""
    pair_keys: Tensor = field(default_factory=lambda: torch.empty(0))
    """Numbers of the keys of every pair, [P, N]."""
    step: int = 0
    """How many tiles the query tiles at hand took before this one."""
    natural: float = 1.0
    """What turns stored scores into natural logarithms; not 1 where the scale is part of the exponential's FMA."""

    def __post_init__(self) -> None:
        self._generator = torch.Generator().manual_seed(self.inputs.seed + 1)

    def __call__(self, name: str, x: Tensor) -> Tensor:
        hook = self.hooks.get(name)
        self.values[name] = x if hook is None else hook(x, self)
        return self.values[name]

    def __getitem__(self, name: str) -> Tensor:
        return self.values[name]

    def uniform(self, x: Tensor) -> Tensor:
        """Random numbers in [0, 1) of x's shape, the same on every device."""
        return torch.rand(x.shape, generator=self._generator).to(x.device)

    def normal(self, x: Tensor) -> Tensor:
        """Standard normal numbers of x's shape, the same on every device."""
        return torch.randn(x.shape, generator=self._generator).to(x.device)

    def cast(self, x: Tensor) -> Tensor:
        """Rounded to the inputs' format, kept in fp32."""
        return x.to(self.inputs.q.dtype).float()


Hook = Callable[[Tensor, Seen], Tensor]


def attend(
    inputs: Inputs,
    kernel: Kernel = PLAIN,
    hooks: Mapping[str, Hook] | None = None,
    plans: Mapping[str, PlanHook] | None = None,
) -> Outputs:
    """Forward and backward of one call.

    Args:
        inputs (Inputs): The call.
        kernel (Kernel): Its schedule.
        hooks (Mapping[str, Hook] | None): Functions at intermediates, by the names of ``FORWARD_HOOKS`` and
            ``BACKWARD_HOOKS``.
        plans (Mapping[str, PlanHook] | None): Functions that change which tiles are visited, at "forward" and
            "backward".
    """
    hooks, plans = hooks or {}, plans or {}
    unknown = {*hooks} - {*FORWARD_HOOKS, *BACKWARD_HOOKS} | {*plans} - {"forward", "backward"}
    if unknown:
        raise ValueError(f"no such hook: {', '.join(sorted(unknown))}; see FORWARD_HOOKS and BACKWARD_HOOKS")
    plan = tile_plan(inputs, kernel)
    copies = {way: plans[way]([list(p) for p in plan]) if way in plans else plan for way in ("forward", "backward")}
    o, lse = forward(Seen(inputs, kernel, hooks), copies["forward"])
    dq, dk, dv = backward(Seen(inputs, kernel, hooks), copies["backward"], o, lse)
    return Outputs(o, lse, dq, dk, dv)


def tile_plan(inputs: Inputs, kernel: Kernel) -> Plan:
    """The key tiles that each query tile must visit under causal and window, in the kernel's order."""
    t_q, t_k = inputs.q.shape[2], inputs.k.shape[2]
    left, right = inputs.window or (-1, -1)
    plan = []
    for start in range(0, t_q, kernel.tile_q):
        first_row, last_row = start + inputs.diagonal, min(start + kernel.tile_q, t_q) - 1 + inputs.diagonal
        first = first_row - left if left >= 0 else 0
        last = last_row if inputs.causal != "none" else t_k - 1
        last = min(last, last_row + right if right >= 0 else last, t_k - 1)
        tiles = list(range(max(first, 0) // kernel.tile_k, last // kernel.tile_k + 1)) if last >= 0 else []
        if kernel.order != "ascending":
            tiles = tiles[::-1] if kernel.order == "descending" else tiles[-1:] + tiles[:-1]
        plan.append(tiles)
    return plan


def forward(seen: Seen, plan: Plan) -> tuple[Tensor, Tensor]:
    """O [B, H, Tq, D] in the inputs' format and LSE [B, H, Tq] of ``plan``."""
    inputs, kernel = seen.inputs, seen.kernel
    t_q = inputs.q.shape[2]
    scale = float(seen("scale", torch.tensor(inputs.scale, dtype=torch.float64)))
    q = seen("q", inputs.q.float())
    k = seen("k", inputs.k.float().repeat_interleave(inputs.group, 1))
    v = seen("v", inputs.v.float().repeat_interleave(inputs.group, 1))
    i, j = _pairs(seen, plan)
    q, k, v = _tiles(q, kernel.tile_q), _tiles(k, kernel.tile_k), _tiles(v, kernel.tile_k)
    scores = _product(q[:, :, i] * scale if kernel.scale_q else q[:, :, i], k[:, :, j].mT, kernel.sums)
    fused = kernel.exp != "exp" and inputs.softcap is None and not kernel.scale_q
    seen.natural = scale if fused else 1.0
    scores = _softcap(scores if fused or kernel.scale_q else scores * scale, inputs.softcap)
    scores = seen("scores", scores)
    hidden = ~seen("mask", inputs.visible(seen.rows, seen.keys))
    scores = scores.masked_fill(hidden, -math.inf)
    parts = [_online_softmax(seen, scores, v, j, chosen) for chosen in _splits(plan, kernel)]
    out, lse = parts[0] if kernel.splits == 1 else _merge(seen, parts)
    out = seen("out", out.flatten(2, 3)[:, :, :t_q])
    lse = seen("lse", lse.flatten(2, 3)[:, :, :t_q].contiguous())
    return seen("o", out.to(inputs.q.dtype)), lse


def _online_softmax(seen: Seen, scores: Tensor, v: Tensor, key_tiles: Tensor, chosen: Plan) -> tuple[Tensor, Tensor]:
    """O [B, H, I, M, D] and LSE [B, H, I, M] over the pairs that ``chosen`` lists for each query tile, in turn."""
    kernel = seen.kernel
    b, h = scores.shape[:2]
    shape = (b, h, len(chosen), kernel.tile_q)
    running = scores.new_full(shape, -math.inf)
    total, acc = scores.new_zeros(shape), scores.new_zeros((*shape, v.shape[-1]))
    exp = torch.exp if kernel.exp == "exp" else torch.exp2
    for seen.step in range(max((len(c) for c in chosen), default=0)):
        active = [i for i, pairs in enumerate(chosen) if len(pairs) > seen.step]
        pairs = torch.tensor([chosen[i][seen.step] for i in active], device=scores.device)
        seen.rows, seen.keys = seen.pair_rows[pairs], seen.pair_keys[pairs]
        s, old = scores[:, :, pairs], running[:, :, active]
        highest = seen("tile_max", s.amax(-1))
        if kernel.stale:
            highest = torch.where((highest - old) * seen.natural > kernel.stale, highest, old)
        new = seen("row_max", torch.maximum(old, highest))
        # A row that has seen no key yet: any finite number will do.
        base = new.masked_fill(new == -math.inf, 0)
        probs = seen("probs", exp(seen("exp_argument", _argument(seen, s, base[..., None]))))
        rescale = seen("rescale", exp(_argument(seen, old, base)))
        cast = seen("probs_cast", seen.cast(probs))
        added = _row_sum(probs if kernel.row_sum == "uncast" else cast, kernel.sums)
        total[:, :, active] = seen("row_sum", total[:, :, active] * rescale + added)
        pv = seen("pv", _product(cast, seen("value_tile", v[:, :, key_tiles[pairs]]), kernel.sums))
        rescale = seen("acc_rescale", rescale)
        acc[:, :, active] = seen("acc", acc[:, :, active] * rescale[..., None] + pv)
        running[:, :, active] = new
    inverse = seen("inverse", torch.where(total == 0, 1.0, 1 / total))
    return acc * inverse[..., None], running * seen.natural + total.log()


def _argument(seen: Seen, s: Tensor, base: Tensor) -> Tensor:
    """S - m, in base e or 2; for base 2 as a fused multiply-add: one rounding."""
    if seen.kernel.exp == "exp":
        return s - base
    unit = torch.tensor(seen.natural * LOG2_E, dtype=torch.float32, device=s.device)
    return (s.double() * unit.double() - (base * unit).double()).float()


def _merge(seen: Seen, parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Splits' O and LSE, merged: O = sum exp(LSE_s - LSE) O_s."""
    out = seen("split_out", torch.stack([p[0] for p in parts]))
    lses = seen("split_lse", torch.stack([p[1] for p in parts]))
    highest = lses.amax(0)
    highest = highest.masked_fill(highest == -math.inf, 0)
    weights = (lses - highest).exp()
    total = weights.sum(0)
    weights = seen("merge_weights", weights / torch.where(total == 0, 1.0, total))
    return (weights[..., None] * out).sum(0), highest + total.log()


def backward(seen: Seen, plan: Plan, o: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """dQ [B, Hq, Tq, D], dK and dV [B, Hk, Tk, D], in the inputs' format."""
    inputs, kernel = seen.inputs, seen.kernel
    b, heads, t_q, _ = inputs.q.shape
    t_k, dtype = inputs.k.shape[2], inputs.q.dtype
    scale = float(seen("bwd_scale", torch.tensor(inputs.scale, dtype=torch.float64)))
    q = seen("bwd_q", inputs.q.float())
    k = seen("bwd_k", inputs.k.float().repeat_interleave(inputs.group, 1))
    v = seen("bwd_v", inputs.v.float().repeat_interleave(inputs.group, 1))
    do = seen("bwd_do", inputs.do.float())
    i, j = _pairs(seen, plan)
    delta = (do * seen("bwd_o", o.float())).sum(-1)
    lse = seen("bwd_lse", lse)
    # Rows past the end: exp(S - inf) = 0, as FlashAttention-2 has it.
    lse = in_blocks(pad(lse, (0, -t_q % kernel.tile_q), value=math.inf), 2, kernel.tile_q)
    q, do = _tiles(q, kernel.tile_q)[:, :, i], _tiles(do, kernel.tile_q)[:, :, i]
    k, v = _tiles(k, kernel.tile_k)[:, :, j], _tiles(v, kernel.tile_k)[:, :, j]

    plain = _softcap(_product(q, k.mT, kernel.sums) * scale, inputs.softcap)
    scores = seen("bwd_scores", plain)
    mask = seen("bwd_mask", inputs.visible(seen.rows, seen.keys))
    probs = seen("bwd_probs", (scores - lse[:, :, i][..., None]).exp().masked_fill(~mask, 0))
    cast = seen("bwd_probs_cast", seen.cast(probs))
    dp = seen("dp", _product(do, v.mT, kernel.sums))
    if kernel.delta == "from P":
        rows = (probs * dp).sum(-1)
        delta = rows.new_zeros(b, heads, len(plan), kernel.tile_q).index_add_(2, i, rows).flatten(2)[:, :, :t_q]
    delta = seen("delta", delta)
    delta = in_blocks(pad(delta, (0, -t_q % kernel.tile_q)), 2, kernel.tile_q)[:, :, i]
    ds = (probs if kernel.ds_probs == "uncast" else cast) * (dp - delta[..., None])
    if inputs.softcap is not None:
        ds = ds * seen("cap_slope", 1 - (scores / inputs.softcap).square())
    ds_cast = seen("ds_cast", seen.cast(seen("ds", ds)))

    by_query = [[p for p, row in enumerate(i.tolist()) if row == tile] for tile in range(len(plan))]
    by_key = [[p for p, key in enumerate(j.tolist()) if key == tile] for tile in range(-(-t_k // kernel.tile_k))]
    if kernel.dq_order == "random":
        shuffle = random.Random(inputs.seed)
        by_query = [shuffle.sample(pairs, len(pairs)) for pairs in by_query]
    dv = _accumulate(seen, "dv", _product(cast.mT, do, kernel.sums), by_key)[:, :, :t_k]
    dk = _accumulate(seen, "dk", _product(ds_cast.mT, q, kernel.sums), by_key)[:, :, :t_k]
    dq = _accumulate(seen, "dq", _product(ds_cast, k, kernel.sums), by_query)[:, :, :t_q]

    dq = seen("dq_out", dq * scale).to(dtype)
    dk, dv = seen("dk_heads", dk * scale), seen("dv_heads", dv)
    if inputs.group > 1:
        dk, dv = (in_blocks(seen.cast(x), 1, inputs.group).sum(2) for x in (dk, dv))
    return seen("dq", dq), seen("dk", seen("dk_sum", dk).to(dtype)), seen("dv", dv.to(dtype))


def _accumulate(seen: Seen, name: str, parts: Tensor, takes: list[list[int]]) -> Tensor:
    """The tiles' shares [B, H, P, R, D] added up in fp32 in the order of ``takes``: [B, H, tiles * R, D]."""
    parts = seen(f"{name}_tile", parts)
    b, h, _, size, d = parts.shape
    acc = parts.new_zeros(b, h, len(takes), size, d)
    for seen.step in range(max(len(t) for t in takes)):
        active = [tile for tile, pairs in enumerate(takes) if len(pairs) > seen.step]
        pairs = torch.tensor([takes[tile][seen.step] for tile in active], device=parts.device)
        seen.rows, seen.keys = seen.pair_rows[pairs], seen.pair_keys[pairs]
        acc[:, :, active] = seen(f"{name}_acc", acc[:, :, active] + parts[:, :, pairs])
    seen.rows, seen.keys = seen.pair_rows, seen.pair_keys
    return acc.flatten(2, 3)


def _pairs(seen: Seen, plan: Plan) -> tuple[Tensor, Tensor]:
    """Query tile and key tile of every pair, [P] each; tells ``seen`` which rows and keys those are."""
    device, kernel = seen.inputs.q.device, seen.kernel
    found = [(i, j) for i, tiles in enumerate(plan) for j in tiles]
    i, j = torch.tensor(found, dtype=torch.long, device=device).reshape(-1, 2).unbind(1)
    seen.rows = i[:, None] * kernel.tile_q + torch.arange(kernel.tile_q, device=device)
    seen.keys = j[:, None] * kernel.tile_k + torch.arange(kernel.tile_k, device=device)
    seen.pair_rows, seen.pair_keys = seen.rows, seen.keys
    return i, j


def _splits(plan: Plan, kernel: Kernel) -> list[Plan]:
    """For every split the pairs of each query tile: split s has the s-th range of key tiles."""
    width = -(-(1 + max((j for tiles in plan for j in tiles), default=0)) // kernel.splits)
    chosen: list[Plan] = [[[] for _ in plan] for _ in range(kernel.splits)]
    pair = 0
    for i, tiles in enumerate(plan):
        for j in tiles:
            chosen[min(j // width, kernel.splits - 1)][i].append(pair)
            pair += 1
    return chosen


def _tiles(x: Tensor, size: int) -> Tensor:
    """[B, H, T, D] cut into tiles [B, H, T/size, size, D]; the last one is filled with zeros."""
    return in_blocks(pad(x, (0, 0, 0, -x.shape[2] % size)), 2, size)


def _softcap(scores: Tensor, cap: float | None) -> Tensor:
    return scores if cap is None else cap * (scores / cap).tanh()


def _product(a: Tensor, b: Tensor, sums: str) -> Tensor:
    """A B in fp32: as the library sums, or 16 terms at a time, rounded to nearest or toward zero after each 16."""
    if sums == "plain":
        return a @ b
    total = a.new_zeros(*a.shape[:-1], b.shape[-1])
    for start in range(0, a.shape[-1], 16):
        block = a[..., start : start + 16].double() @ b[..., start : start + 16, :].double() + total.double()
        total = block.float() if sums == "blocks" else toward_zero(block)
    return total


def toward_zero(x: Tensor) -> Tensor:
    """float64 cut to fp32."""
    near = x.float()
    return torch.where(near.abs().double() > x.abs(), torch.nextafter(near, torch.zeros_like(near)), near)


def _row_sum(x: Tensor, sums: str) -> Tensor:
    """Sum over the last axis: as the library adds, or from the last term to the first."""
    return x.sum(-1) if sums == "plain" else x.flip(-1).cumsum(-1)[..., -1]


HEALTHY: dict[str, Kernel] = {
    "ascending 128": Kernel(),
    "ascending 64": Kernel(tile_q=64, tile_k=64),
    "ascending 128 x 64": Kernel(tile_k=64),
    "ascending 64 x 128": Kernel(tile_q=64),
    "descending 128": Kernel(order="descending"),
    "diagonal first 128": Kernel(order="diagonal first"),
    "split 2": Kernel(splits=2),
    "split 3 of 64": Kernel(splits=3, tile_k=64),
    "exp2 of an FMA": Kernel(exp="exp2 of an FMA", order="descending"),
    "scale in q": Kernel(scale_q=True),
    "l of cast P": Kernel(row_sum="cast"),
    "stale maximum": Kernel(stale=math.log(256), exp="exp2 of an FMA"),
    "sums of 16": Kernel(sums="blocks"),
    "truncated sums": Kernel(sums="truncated", exp="exp2 of an FMA"),
    "dQ by atomics": Kernel(dq_order="random", tile_k=64),
    "delta from P": Kernel(delta="from P"),
    "dS of cast P": Kernel(ds_probs="cast", tile_q=64, tile_k=64),
}
"""Kernels that nobody may accuse; "dS of cast P" alone (as torch's efficient) has a documented factor on dQ and dK."""


def with_settings(kernel: Kernel, settings: Mapping[str, object]) -> Kernel:
    """The kernel with other choices, by field name."""
    return replace(kernel, **settings)  # type: ignore[arg-type]  # names and values are Defect's
