"""Kernels that hold q, k or v in fewer bits than they were given, and kernels that round elsewhere: what does O tell?

Formats by torch's own casts and by formulas written here, beside the usual roundings of a well-rounded kernel; inputs
of several kinds. Every head's O is inspected by itself: is its format named, another one, or none?

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
    "FP8 (E4M3, scale 1)": lambda x: _float8(x, _E4M3),
    "FP8 (E5M2, scale 1)": lambda x: _float8(x, _E5M2),
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
ELSEWHERE = (
    "nothing", "scores in BF16", "P_bar in E4M3", "P_bar in INT8", "O in E4M3", "a coarse exponential", "alpha in BF16",
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


def _out(q: Tensor, k: Tensor, v: Tensor, dtype: torch.dtype, what: str, *, causal: bool) -> Tensor:
    """O of a kernel that rounds P_bar and O to ``dtype``, and does ``what``."""
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
    largest = scores.amax(-1, keepdim=True)
    shifted = scores - (low(largest) if what == "row maximum in BF16" else largest)
    probs = shifted.exp()
    if what == "a coarse exponential":
        whole = (shifted * 1.442695).clamp(min=-126).floor()
        part = (shifted * 1.442695).clamp(min=-126) - whole
        probs = (2**whole * (1 + part * (0.6565 + part * 0.3435))).where(scores.isfinite(), 0.0)
    total = probs.sum(-1, keepdim=True)
    total = low(total) if what == "row sum in BF16" else total
    if what == "P_bar in E4M3":
        probs = _float8(probs, _E4M3)
    elif what == "P_bar in INT8":
        probs = (probs * 127).round() / 127
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
    o = _out(q, k, v, dtype, what, causal=causal)
    found = attn_diag.inspect(*given, o=o, causal="top-left" if causal else "none", device="cpu")
    said = []
    for head in found.captures[0].observations[0].heads:
        verdict = next((quantity for quantity in head.quantities if quantity.quantity == "o"), None)
        if head.head is None or verdict is None:
            continue
        words = next((p.words for p in verdict.patterns if p.kind == "operands"), "")
        told = words.partition(" what ")[2].partition(" give")[0]
        said.append(
            {
                "seed": seed, "what": what, "names": names, "dtype": str(dtype)[6:], "length": length, "width": width,
                "inputs": kind, "causal": causal, "head": head.head, "answer": verdict.answer,
                "factor": verdict.factor, "said": told,
                "outcome": _outcome(told, verdict.answer, *_wanted(given, names, what)),
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


def _outcome(told: str, answer: str, names: str, wanted: list[str]) -> str:
    if not told:
        return "not named" if answer != "good" else "good"
    named, _, rest = told.partition(" held in ")
    of = set(named.replace(" and ", ", ").split(", "))
    return "right" if of <= set(names) and any(one in rest for one in wanted) else "another named"


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
