"""Kernels that hold q, k or v in fewer bits than they were given, or cast P_bar to 8, and kernels that round elsewhere.

What does O tell? Formats by torch's own casts and by formulas written here, beside the usual roundings of a
well-rounded kernel; inputs of several kinds; half of those that hold something below 16 bits cast P_bar to 8 as well,
in tiles of keys. Every head's O is inspected by itself: is what was done named, something else, or nothing?

    python benchmarks/study_low_bit_inputs.py --count 400 --workers 16 --json …
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import torch
from measuring import made_by, options_of, save
from torch import Tensor

import attn_diag

Change = Callable[[Tensor], Tensor]
_E4M3, _E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
_KINDS = ("normal", "outlier features", "common mean", "large scores", "sink")


def _float8(x: Tensor, dtype: torch.dtype, scale: Tensor | float = 1.0) -> Tensor:
    largest = torch.finfo(dtype).max
    found: Tensor = (x / scale).clamp(-largest, largest).to(dtype).float() * scale
    return found


def _integers(x: Tensor, bits: int, over: int | tuple[int, ...], *, zero: bool = False, group: int = 0) -> Tensor:
    shape = x.shape
    if group:
        x, over = x.reshape(*shape[:-1], -1, group), -1
    found: Tensor
    if zero:
        low, high = x.amin(over, keepdim=True).clamp(max=0), x.amax(over, keepdim=True).clamp(min=0)
        scale = ((high - low) / (2**bits - 1)).clamp(min=1e-8)
        at = (-low / scale).round()
        found = (((x / scale).round() + at).clamp(0, 2**bits - 1) - at) * scale
    else:
        scale = (x.abs().amax(over, keepdim=True) / (2 ** (bits - 1) - 1)).clamp(min=1e-8)
        found = (x / scale).round() * scale
    return found.reshape(shape)


def _largest(x: Tensor, *over: int) -> Tensor:
    return x.abs().amax(over, keepdim=True)


# By what is to be said of it, where a row has at least 32 numbers.
FORMATS: dict[str, Change] = {
    "FP8 (E4M3, scale 1 up to a power of two)": lambda x: _float8(x, _E4M3),
    "FP8 (E5M2, scale 1 up to a power of two)": lambda x: _float8(x, _E5M2),
    "FP8 (E4M3, a scale for the head)": lambda x: _float8(x, _E4M3, _largest(x, -1, -2) / 448),
    "FP8 (E4M3, a scale for a row)": lambda x: _float8(x, _E4M3, _largest(x, -1) / 448),
    "FP8 (E4M3, one scale": lambda x: _float8(x, _E4M3, x.abs().amax() / 200),
    "INT8 (a scale for a row)": lambda x: _integers(x, 8, -1),
    "INT8 (a scale for the head)": lambda x: _integers(x, 8, (-1, -2)),
    "INT8 (one scale": lambda x: _integers(x, 8, (0, 1, 2, 3)),
    "INT8 (a scale for a row and a zero point)": lambda x: _integers(x, 8, -1, zero=True),
    "INT4 (a scale for 32 of a row)": lambda x: _integers(x, 4, -1, group=32),
    "INT4 (a scale for a feature and a zero point)": lambda x: _integers(x, 4, -2, zero=True),
    "INT2 (a scale for 32 of a row and a zero point)": lambda x: _integers(x, 2, -1, zero=True, group=32),
}
# P_bar's casts, by what is to be said of them.
CASTS: dict[str, Change] = {
    "FP8 (E4M3, times 256": lambda p: _float8(p, _E4M3, 1 / 256),
    "FP8 (E4M3, times 448": lambda p: _float8(p, _E4M3, 1 / 448),
    "FP8 (E4M3, times 240": lambda p: _float8(p, _E4M3, 1 / 240),
    "FP8 (E4M3, as it is": lambda p: _float8(p, _E4M3),
    "FP8 (E5M2, as it is": lambda p: _float8(p, _E5M2),
    "INT8 (times 127": lambda p: (p * 127).round() / 127,
    "INT8 (a scale for a row": lambda p: _integers(p + 1e-30, 8, -1),
}
ELSEWHERE = (
    "nothing", "scores in BF16", "P_bar in FP8 toward zero", "P_bar in 6 bits", "O in E4M3",
    "a coarse exponential", "alpha in BF16",
    "sums in BF16", "row sum in BF16", "q times alpha in BF16", "k without its mean in BF16", "small P_bar left out",
    "v cut off", "row maximum in BF16",
)  # fmt: skip


def _inputs(kind: str, heads: int, kv_heads: int, length: int, width: int) -> list[Tensor]:
    q, k, v = (torch.randn(1, count, length, width) for count in (heads, kv_heads, kv_heads))
    if kind == "outlier features":
        k[..., 3] *= 8
        k[..., 17] *= 5
    if kind == "common mean":
        k, v = k + torch.randn(1, kv_heads, 1, width), v + 0.5 * torch.randn(1, kv_heads, 1, width)
    if kind == "large scores":
        q = 3 * q
    if kind == "sink":
        k[..., 0, :] *= 3
        v[..., 0, :] *= 0.02
    return [q, k, v]


def _cast(scores: Tensor, v: Tensor, cast: Change, tile: int, *, descending: bool, sums_cast: bool) -> Tensor:
    """O of a kernel that takes so many keys at once and casts P_bar, relative to the largest score so far."""
    largest, total = torch.full_like(scores[..., :1], -torch.inf), torch.zeros_like(scores[..., :1])
    out, starts = total, range(0, scores.shape[-1], tile)
    for start in reversed(starts) if descending else starts:
        part = scores[..., start : start + tile]
        now = torch.maximum(largest, part.amax(-1, keepdim=True))
        shift = now.masked_fill(now == -torch.inf, 0.0)
        probs, rescale = (part - shift).exp(), (largest - shift).exp()
        total = rescale * total + (cast(probs) if sums_cast else probs).sum(-1, keepdim=True)
        out, largest = rescale * out + cast(probs) @ v[..., start : start + tile, :], now
    return out / total


def _out(
    q: Tensor, k: Tensor, v: Tensor, dtype: torch.dtype, what: str, *, causal: bool, cast: dict[str, Any] | None = None
) -> Tensor:
    """O of a kernel that rounds P_bar to ``dtype`` or casts it so, rounds O to ``dtype``, and does ``what``."""
    low: Change = lambda x: x.bfloat16().float()  # noqa: E731
    alpha, length = q.shape[-1] ** -0.5, q.shape[2]
    if what == "alpha in BF16":
        alpha = float(torch.tensor(alpha * 1.4427).bfloat16()) / 1.4427
    if what == "q times alpha in BF16":
        q = low(q * alpha) / alpha
    if what == "k without its mean in BF16":
        mean = k.mean(-2, keepdim=True)
        k = low(k - mean) + mean
    if what == "v cut off":
        v = (v.contiguous().view(torch.int32) & -(2**19)).view(torch.float32)
    scores = q @ k.mT * alpha
    scores = low(scores) if what == "scores in BF16" else scores
    if causal:
        scores = scores.masked_fill(torch.ones(length, length, dtype=torch.bool).triu(1), -torch.inf)
    if cast is not None:
        return _cast(scores, v, **cast).to(dtype)
    largest = scores.amax(-1, keepdim=True)
    shifted = scores - (low(largest) if what == "row maximum in BF16" else largest)
    probs = shifted.exp()
    if what == "a coarse exponential":
        whole = (shifted * 1.442695).clamp(min=-126).floor()
        part = (shifted * 1.442695).clamp(min=-126) - whole
        probs = (2**whole * (1 + part * (0.6565 + part * 0.3435))).where(scores.isfinite(), 0.0)
    total = probs.sum(-1, keepdim=True)
    total = low(total) if what == "row sum in BF16" else total
    if what == "P_bar in FP8 toward zero":
        probs = (probs.view(torch.int32) & -(2**20)).view(torch.float32)
    elif what == "P_bar in 6 bits":
        probs = (probs * 31).round() / 31
    else:
        probs = probs.to(dtype).float()
    probs = probs.where(probs > 1e-2, 0.0) if what == "small P_bar left out" else probs
    out = torch.zeros_like(q[..., :1]) if what == "sums in BF16" else probs @ v
    for start in range(0, length, 32) if what == "sums in BF16" else ():
        out = low(out + probs[..., start : start + 32] @ v[..., start : start + 32, :])
    out = out / total
    return (_float8(out, _E4M3) if what == "O in E4M3" else out).to(dtype)


def run(seed: int) -> list[dict[str, Any]]:
    """One kernel on one call: what is said of O of each head."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    draw = random.Random(seed)
    dtype = draw.choice([torch.bfloat16, torch.bfloat16, torch.float16])
    heads, kv_heads = draw.choice([2, 4]), draw.choice([1, 2])
    length, width = draw.choice([64, 128, 256, 512]), draw.choice([32, 64, 128])
    causal, kind = draw.random() < 0.6, draw.choice(_KINDS)
    names = draw.choice(["kv", "kv", "k", "v", "qkv", "", "", ""])
    what = draw.choice(list(FORMATS) if names else ELSEWHERE)
    given = [x.to(dtype) for x in _inputs(kind, heads, kv_heads, length, width)]
    used = [FORMATS[what](x.float()) if n in names else x.float() for n, x in zip("qkv", given, strict=True)]
    q, k, v = (x if x.shape[1] == heads else x.repeat_interleave(heads // kv_heads, 1) for x in used)
    casts = draw.random() < 0.5 if names else draw.random() < 0.4
    said_of_it = draw.choice(list(CASTS)) if casts else ""
    tile, descending = draw.choice([32, 64, 96, 128, 160, 2**20]), draw.random() < 0.5
    how = {"cast": CASTS.get(said_of_it), "tile": tile, "descending": descending, "sums_cast": draw.random() < 0.2}
    what = what if names or not casts else "P_bar alone"
    o = _out(q, k, v, dtype, what, causal=causal, cast=how if casts else None)
    found = attn_diag.inspect(*given, o=o, causal="top-left" if causal else "none", device="cpu")
    said = []
    for head in found.captures[0].observations[0].heads:
        verdict = next((quantity for quantity in head.quantities if quantity.quantity == "o"), None)
        if head.head is None or verdict is None:
            continue
        words = next((p.words for p in verdict.patterns if p.kind == "operands"), "")
        told = words.partition(" what ")[2].partition(" give")[0]
        of_probs = f"{said_of_it}, {tile}" if casts else ""
        said.append(
            {
                "seed": seed, "what": what, "names": names, "probs": of_probs,
                "dtype": str(dtype)[6:], "length": length, "width": width,
                "inputs": kind, "causal": causal, "head": head.head, "answer": verdict.answer,
                "factor": verdict.factor, "said": told,
                "outcome": _outcome(told, verdict.answer, said_of_it, tile, *_wanted(given, names, what)),
            }
        )  # fmt: skip
    return said


def _wanted(given: list[Tensor], names: str, what: str) -> tuple[str, list[str]]:
    """Of which of q, k and v something may be said, and what: the same numbers may have several names."""
    width, found = given[0].shape[-1], [what]
    if what == "q times alpha in BF16" and width == 64:  # alpha is a power of two
        return "q", ["BF16"]
    if width == 32:
        found.append(what.replace("32 of a row", "a row"))
    if "one scale" in what:  # which is that of the head with the largest number
        found.append(what.replace("one scale", "a scale for the head"))
    return names, found


def _outcome(told: str, answer: str, cast: str, tile: int, names: str, wanted: list[str]) -> str:
    if not told:
        return "not named" if answer != "good" else "good"
    inputs, _, probs = told.replace("P cast", "P̄ cast").partition("P̄ cast to ")
    if probs and not _is_cast(probs.partition(" or ")[0], cast, tile):
        return "another named"
    named, _, rest = inputs.partition(" held in ")
    of = set(named.replace(" and ", ", ").split(", "))
    if inputs and not (of <= set(names) and any(one in rest for one in wanted)):
        return "another named"
    return "right" if bool(probs) == bool(cast) and bool(inputs) == bool(names) else "in part"


def _is_cast(said: str, cast: str, tile: int) -> bool:
    """Whether what is said of P_bar's cast is what was done: its format, and what else is said."""
    form, _, factor = cast.partition(", ") if "FP8" in cast else cast.partition(" (")
    if not cast or form.rstrip(")") not in said:
        return False
    known = said.rstrip(")").partition("(E4M3" if "E4M3" in said else "(E5M2" if "E5M2" in said else "(")[2]
    factors = [one for one in ("times", "as it is", "scale") if one in known]
    return (not factors or factor in known) and ("-key" not in known or f"{tile}-key" in known)


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--workers", type=int, default=1)
    options = parser.parse_args()
    seeds = range(options.first, options.first + options.count)
    counts: dict[str, Counter[str]] = {"formats": Counter(), "elsewhere": Counter()}
    missed: list[dict[str, Any]] = []
    with ProcessPoolExecutor(options.workers, get_context("spawn")) as pool:
        for one in (head for heads in pool.map(run, seeds) for head in heads):
            counts["formats" if one["names"] else "elsewhere"][one["outcome"]] += 1
            if one["outcome"] == "another named" or (one["names"] and one["outcome"] != "right"):
                missed.append(one)
                print(one, flush=True)
    print(counts)
    save({**made_by(), "seeds": [seeds.start, seeds.stop], "counts": counts, "not_right": missed}, options.json)


if __name__ == "__main__":
    main()
