"""How many bits of O emulation reproduces of real kernels in layouts beyond the dense one: packed documents, attention
sinks, softcap, ALiBi, a cache in pages.

Every kernel that is installed runs on N(0,1) inputs in BF16; ``identify`` searches the recipe of one head, and that
recipe is emulated for all heads and documents, on the tensor core's sums too.

    python benchmarks/bench_layout_bits.py --json benchmarks/results/layout_bits_h200.json
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from bench_bits import MODELS, missed
from measuring import made_by, normal, options_of, save
from torch import Tensor

from attn_diag.captures.capture import Capture
from attn_diag.head.identification import identify_head
from attn_diag.head.recipe_candidates import describe_schedule
from attn_diag.kernels import Recipe

HEADS, KEY_HEADS, HEAD_DIM, LENGTH = 4, 2, 64, 1024
LENGTHS = (333, 512, 128, 51)
CAP = 20.0


def _dense(seed: int = 0) -> dict[str, Tensor]:
    """q, k, v [1, H, T, D]."""
    q, k, v, _ = normal(1, HEADS, LENGTH, HEAD_DIM, seed=seed)
    return {name: x.cuda() for name, x in zip("qkv", (q, k[:, :KEY_HEADS], v[:, :KEY_HEADS]), strict=True)}


def _packed() -> dict[str, Tensor]:
    """q, k, v [total, H, D] and the starts of documents."""
    flat = {name: x[0].transpose(0, 1).contiguous() for name, x in _dense().items()}
    starts = torch.tensor([0, *LENGTHS]).cumsum(0).to("cuda", torch.int32)
    return flat | {"cu_seqlens_q": starts, "cu_seqlens_k": starts}


def _starts(x: dict[str, Tensor]) -> tuple[Tensor, Tensor, int, int]:
    return x["cu_seqlens_q"], x["cu_seqlens_k"], max(LENGTHS), max(LENGTHS)


def _varlen_attn() -> Capture:
    from torch.nn.attention.varlen import varlen_attn

    x = _packed()
    # torch 2.11 groups heads unasked and has no argument for it.
    k, v = (x[n].repeat_interleave(HEADS // KEY_HEADS, 1) for n in "kv")
    o = varlen_attn(x["q"], k, v, *_starts(x), window_size=(-1, 0))
    assert isinstance(o, Tensor)
    return Capture.from_tensors(x | {"k": k, "v": v, "o": o}, causal="bottom-right")


def _flash_4_varlen() -> Capture:
    from flash_attn.cute import flash_attn_varlen_func  # type: ignore[import-not-found,unused-ignore]

    x = _packed()
    q_starts, k_starts, longest, _ = _starts(x)
    found = flash_attn_varlen_func(
        x["q"], x["k"], x["v"], cu_seqlens_q=q_starts, cu_seqlens_k=k_starts, max_seqlen_q=longest,
        max_seqlen_k=longest, causal=True,
    )  # fmt: skip
    return Capture.from_tensors(x | {"o": _first(found)}, causal="bottom-right")


def _flash_4(**options: Any) -> Capture:
    from flash_attn.cute import flash_attn_func

    x = _dense()
    found = flash_attn_func(*(t.transpose(1, 2) for t in x.values()), causal=True, **options)
    sinks = options.get("learnable_sink")
    tensors = x | {"o": _first(found).transpose(1, 2)} | ({} if sinks is None else {"sinks": sinks})
    return Capture.from_tensors(tensors, causal="bottom-right", softcap=options.get("softcap"))


def _fla_sinks() -> Capture:
    from fla.ops.attn import parallel_attn  # type: ignore[import-not-found,unused-ignore]

    x, sinks = _dense(), _sinks().float()
    o = parallel_attn(*(t.transpose(1, 2).contiguous() for t in x.values()), sink_bias=sinks)
    return Capture.from_tensors(x | {"o": _first(o).transpose(1, 2), "sinks": sinks}, causal="top-left")


def _flash_4_pages() -> Capture:
    """64 and 1 query rows behind caches of 517 and 300 keys, in pages of 128 that lie about."""
    from flash_attn.cute import flash_attn_varlen_func

    x, lengths, rows, size = _dense(), (517, 300), (64, 1), 128
    table = torch.tensor([[5, 2, 8, 0, 7], [3, 9, 1, 4, 6]], device="cuda", dtype=torch.int32)
    q = x["q"][0, :, : sum(rows)].transpose(0, 1).contiguous()
    k, v = (torch.randn(10, size, KEY_HEADS, HEAD_DIM, device="cuda").bfloat16() for _ in "kv")
    starts = torch.tensor([0, *rows]).cumsum(0).to("cuda", torch.int32)
    used = torch.tensor(lengths, device="cuda", dtype=torch.int32)
    found = flash_attn_varlen_func(
        q, k, v, cu_seqlens_q=starts, max_seqlen_q=max(rows), seqused_k=used, page_table=table, causal=True
    )
    pages = {"page_table": table, "cache_seqlens": used, "cu_seqlens_q": starts}
    return Capture.from_tensors({"q": q, "k": k, "v": v, "o": _first(found)} | pages, causal="bottom-right")


def _flex(score_mod: Callable[..., Tensor] | None, **more: Any) -> Capture:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    x = _dense()
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, LENGTH, LENGTH, device="cuda")  # noqa: ARG005
    found = torch.compile(flex_attention, dynamic=False)(
        x["q"], x["k"], x["v"], score_mod=score_mod, block_mask=mask, enable_gqa=True
    )
    tensors = {name: value for name, value in more.items() if isinstance(value, Tensor)}
    metadata = {name: value for name, value in more.items() if name not in tensors}
    return Capture.from_tensors(x | {"o": _first(found)} | tensors, causal="top-left", **metadata)


def _flex_softcap() -> Capture:
    return _flex(lambda s, b, h, i, j: CAP * torch.tanh(s / CAP), softcap=CAP)  # noqa: ARG005


def _flex_alibi() -> Capture:
    slopes = torch.tensor([2.0 ** (-2 * (h + 1)) for h in range(HEADS)], device="cuda")
    return _flex(lambda s, b, h, i, j: s + slopes[h] * (j - i), alibi_slopes=slopes)  # noqa: ARG005


def _sinks() -> Tensor:
    return torch.tensor([-1.0, 0.5, 2.0, 4.0], device="cuda", dtype=torch.bfloat16)


def _first(found: Any) -> Tensor:
    return found[0] if isinstance(found, tuple | list) else found  # type: ignore[no-any-return]


CALLS: dict[str, Callable[[], Capture]] = {
    "torch varlen_attn": _varlen_attn,
    "FlexAttention, causal": lambda: _flex(None),
    "FlexAttention, softcap": _flex_softcap,
    "FlexAttention, ALiBi": _flex_alibi,
    "FlashAttention-4, causal": _flash_4,
    "FlashAttention-4, learnable_sink": lambda: _flash_4(learnable_sink=_sinks()),
    "FlashAttention-4, softcap": lambda: _flash_4(softcap=CAP),
    "FlashAttention-4, varlen": _flash_4_varlen,
    "FlashAttention-4, page_table": _flash_4_pages,
    "flash-linear-attention, sink_bias": _fla_sinks,
}


def judged(capture: Capture) -> dict[str, Any]:
    """The recipe of the first head of the longest sequence, and what it misses of all.

    Where that head does not tell several recipes apart, the others' bits do.
    """
    longest = max(range(capture.batch), key=capture.lengths)
    found = identify_head(capture, "observed", longest, 0, torch.device("cuda"))
    if found is None:
        return {"refused": "no recipe covers these formats"}

    def of(recipe: Recipe) -> dict[str, dict[str, Any]]:
        return {m: missed(capture, "observed", replace(recipe, accumulation=m), torch.device("cuda")) for m in MODELS}

    def fewest(by_model: dict[str, dict[str, Any]]) -> dict[str, Any]:
        return min(by_model.values(), key=lambda counts: counts["o"])

    # Where nothing fits: the nearest, whose misses tell by how little.
    recipes = [t.recipe for t in found.as_good] or [found.recipe or found.best.recipe]
    recipe, by_model = min(((r, of(r)) for r in recipes), key=lambda pair: fewest(pair[1])["o"])
    least = fewest(by_model)
    return {
        "outcome": found.outcome, "recipe": recipe.name, "schedule": describe_schedule(recipe.schedule),
        "agreement": 1 - least["o"] / least["o_of"], "missed": by_model,
    }  # fmt: skip


def main() -> None:
    """Run every kernel, and print the agreement of its O."""
    parser = options_of(__doc__)
    parser.add_argument("--only", nargs="*", default=list(CALLS))
    options = parser.parse_args()
    rows = []
    for name in options.only:
        try:
            result = judged(CALLS[name]())
        # Not installed, or it refuses the call; a report of the others is worth having.
        except Exception as error:
            result = {"refused": f"{type(error).__name__}: {str(error)[:200]}"}
        rows.append({"kernel": name} | result)
        print(name, {n: v for n, v in result.items() if n != "missed"}, flush=True)
        save(made_by("cuda") | {"rows": rows}, options.json)


if __name__ == "__main__":
    main()
