"""A differentiable attention whose numerics are a declared recipe, and which shows its intermediates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from typing import Any, Literal, overload
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from attn_diag.kernels.arguments import (
    INPUTS,
    check_options,
    check_tensors,
    checked_borders,
    checked_sinks,
    checked_slopes,
    slots_of,
)
from attn_diag.kernels.dump import Dump
from attn_diag.kernels.emulation import RecipeNotSupportedError
from attn_diag.kernels.formats import Format
from attn_diag.kernels.geometry import Causal, Level, Visibility
from attn_diag.kernels.pages import Pages
from attn_diag.kernels.presets import preset
from attn_diag.kernels.recipe import FORMATS, QUANTIZERS, SMOOTHING, Recipe
from attn_diag.kernels.triton_backward import backward, backward_like
from attn_diag.kernels.triton_forward import forward, forward_like
from attn_diag.kernels.triton_low_bit import low_bit_sites
from attn_diag.kernels.triton_sequences import Sequences


def check_kernels_support(recipe: Recipe) -> None:
    """Raise RecipeNotSupportedError, naming the site, unless the Triton kernels can run the recipe.

    Sums of products are the hardware's own (a GPU's tensor cores do not round to nearest), whatever ``accumulation``
    says: "exact" is refused.
    """
    known: dict[str, tuple[object, ...]] = {
        **dict.fromkeys(FORMATS, ("fp32", "bf16", "fp16")),
        "probs": ("fp32", recipe.input),
        "backward_probs": ("fp32", recipe.input),
        "dscores": ("fp32", recipe.input),
        **dict.fromkeys((*QUANTIZERS, *SMOOTHING), ("none",)),
        "alpha": ("before-rounding", "after-rounding", "in-exponent"),
        "pv_sums": ("fp32",),
        "pv_levels": ("one",),
        "backward_operands": ("given",),
        "input": ("bf16", "fp16"),
        "exp": ("exact", "exp2-fma", "exp2-scaled"),
        "accumulation": ("fp32-nearest", "nvidia-tensor-core"),
        "division": ("before-last-cast",),
        "probs_scale": (1.0,),
        "sink_joins": ("last",),
        "arithmetic": ("fp32",),
    }
    known |= low_bit_sites(recipe)
    wrong = [f"{site}={getattr(recipe, site)}" for site, values in known.items() if getattr(recipe, site) not in values]
    tile, split = recipe.schedule.key_tile, recipe.schedule.split_keys
    if tile < 16 or tile & (tile - 1):
        wrong.append(f"key_tile={tile} (a power of two from 16 on is needed)")
    if split is not None and split % tile:
        wrong.append(f"split_keys={split} (a multiple of key_tile={tile} is needed)")
    if recipe.gradient_accumulator != "fp32":
        ordered = split is None and recipe.schedule.order == "ascending"
        if not ordered or tile % 64 or recipe.schedule.query_block % 128:
            wrong.append(
                f"gradient_accumulator={recipe.gradient_accumulator} in schedule {recipe.schedule} (ascending ranges "
                "of a multiple of 64 keys and 128 rows are needed)"
            )
    wrong += recipe.softmax.missing()
    if wrong:
        raise RecipeNotSupportedError(f"recipe {recipe.name}: the Triton kernels cannot run {', '.join(wrong)}")


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: Causal = ..., window: tuple[int, int] | None = ...,
    scale: float | None = ..., softcap: float | None = ..., recipe: str | Recipe = ...,
    backward_recipe: str | Recipe | None = ..., instrument: Literal["none"] = ..., dump_rows: Tensor | None = ...,
    layout: Literal["BHTD", "BTHD"] = ..., sinks: Tensor | None = ..., alibi_slopes: Tensor | None = ...,
    cu_seqlens_q: Tensor | None = ..., cu_seqlens_k: Tensor | None = ..., page_table: Tensor | None = ...,
    cache_seqlens: Tensor | None = ...,
) -> Tensor: ...  # fmt: skip
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: Causal = ..., window: tuple[int, int] | None = ...,
    scale: float | None = ..., softcap: float | None = ..., recipe: str | Recipe = ...,
    backward_recipe: str | Recipe | None = ..., instrument: Literal["rows", "tiles", "full"],
    dump_rows: Tensor | None = ..., layout: Literal["BHTD", "BTHD"] = ..., sinks: Tensor | None = ...,
    alibi_slopes: Tensor | None = ..., cu_seqlens_q: Tensor | None = ..., cu_seqlens_k: Tensor | None = ...,
    page_table: Tensor | None = ..., cache_seqlens: Tensor | None = ...,
) -> tuple[Tensor, Dump]: ...  # fmt: skip
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: Causal = "none",
    window: tuple[int, int] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    recipe: str | Recipe = "fa2",
    backward_recipe: str | Recipe | None = None,
    instrument: Level = "none",
    dump_rows: Tensor | None = None,
    layout: Literal["BHTD", "BTHD"] = "BHTD",
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    page_table: Tensor | None = None,
    cache_seqlens: Tensor | None = None,
) -> Tensor | tuple[Tensor, Dump]:
    """softmax(scale Q K^T) V by Triton kernels that round where the recipe says, differentiable in q, k, v and sinks.

    Args:
        q: [B, Hq, Tq, D] (or [B, Tq, Hq, D], see ``layout``; packed also [total, Hq, D]), BF16 or FP16, any strides, D
            from 16 to 576.
        k: [B, Hk, Tk, D], Hq a multiple of Hk; same dtype and device.
        v: [B, Hk, Tk, Dv], Dv from 16 to 512, D's own or not (192 and 128 in
            DeepSeek's MLA; absorbed, 576 and 512: v is k[..., :512]).
        causal: "none", "top-left" (as SDPA's is_causal) or "bottom-right" (as FlashAttention >= 2.1).
        window: (left, right) keys around the diagonal, inclusive, -1 for unlimited.
        scale: alpha; default D**-0.5.
        softcap: c of S <- c tanh(S / c), or None.
        recipe: a preset's name, adapted to q's dtype and D, or a Recipe as it is.
        backward_recipe: the backward's, where it differs from the forward's.
        instrument: "none"; "rows" (row statistics); "tiles" (also S, P_bar, dP, dS of ``dump_rows``); "full" (of all
            rows: 6 bytes an element of the T x T matrix, and 6 more after the backward).
        dump_rows: for "tiles": bool, broadcastable to [B, Hq, Tq]; on the CPU it costs no synchronisation.
        layout: of q, k, v and the result.
        sinks: [Hq], a logit a head that is one more term of the softmax's denominator (gpt-oss); any float dtype.
        alibi_slopes: [Hq] or [B, Hq] (packed: [documents, Hq]): -slope |position(t) - j| is added to the scores, as
            the causal mask is aligned. They get no gradient.
        cu_seqlens_q: Packed sequences: int32 [documents + 1], where the documents begin among q's rows (B = 1), and
            where the last ends. Each is a sequence of its own; O is 0 behind the last.
        cu_seqlens_k: Of k's and v's rows; default ``cu_seqlens_q``. On a CUDA device the numbers of both are not
            checked, as that would wait for it: they must begin at 0 and never fall.
        page_table: Of a cache in pages: int32 [B, pages of a sequence], the pages that a sequence's keys lie in, in
            order. k and v are [pages, page size, Hk, D] then, whatever ``layout`` says of q; with ``cu_seqlens_q`` the
            sequences are its documents. There are no gradients, and of instruments "rows" alone, whose dump is that of
            packed sequences. On a CUDA device the numbers are not checked: every page has to be there.
        cache_seqlens: int32 [B], how many keys each sequence has; needed beside ``page_table``. Alone: of Tk keys only
            so many are looked at.

    Returns:
        O [B, Hq, Tq, Dv] in q's layout and the recipe's ``out`` format; with instrumentation (O, Dump). Its bits are
        the same at every level.

    Under ``torch.autocast`` fp32 inputs are cast to its dtype, as SDPA's are. The forward and all gradients are
    deterministic. CPU tensors need Triton's interpreter (TRITON_INTERPRET=1).

    Raises:
        TypeError: dtypes differ, or are neither BF16 nor FP16, or not the recipe's.
        ValueError: shapes, options or head dimension that cannot be.
        RecipeNotSupportedError: a rounding site the kernels do not have; its name is given.
        BackendError: devices differ, or nothing here can run the kernels.
    """
    if torch.is_autocast_enabled(q.device.type):
        q, k, v = (t.to(torch.get_autocast_dtype(q.device.type)) for t in (q, k, v))
    if layout not in ("BHTD", "BTHD"):
        raise ValueError(f"layout must be BHTD or BTHD, got {layout!r}")
    pages = None
    if page_table is not None or cache_seqlens is not None:
        pages = Pages.of(q, k, v, layout, cu_seqlens_q, cu_seqlens_k, page_table, cache_seqlens, instrument)
        q, k, v = pages.q, pages.k, pages.v
    tokens = cu_seqlens_q is not None and q.ndim == k.ndim == v.ndim == 3  # [total, H, D]
    if tokens:
        q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
    elif layout == "BTHD" and pages is None:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    check_tensors(q, k, v, one_batch=pages is None)
    if sinks is not None:
        sinks = checked_sinks(sinks, q)
    borders: tuple[Tensor | None, Tensor | None] = (None, None)
    if pages is not None:
        borders = (pages.borders, None)
    elif cu_seqlens_q is not None:
        borders = checked_borders(cu_seqlens_q, cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k, q, k)
    elif cu_seqlens_k is not None:
        raise ValueError("cu_seqlens_k needs cu_seqlens_q: give both, or neither")
    if alibi_slopes is not None:
        sequences = q.shape[0] if borders[0] is None else len(borders[0]) - 1
        alibi_slopes = checked_slopes(alibi_slopes, q, sequences)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    check_options(causal, scale, softcap, instrument)
    dtype, dim = INPUTS[q.dtype], q.shape[-1]
    backward_recipe = recipe if backward_recipe is None else backward_recipe
    wanted = (r if isinstance(r, str) else r.json for r in (recipe, backward_recipe))
    recipes = [_resolve(name_or_json, dtype, dim) for name_or_json in wanted]
    left, right = window or (-1, -1)
    slots, n_slots = slots_of(q, instrument, dump_rows)
    key = 0 if instrument == "none" or torch.compiler.is_compiling() else next(_KEYS)
    o, _, lse, rows, scores, probs, tile_max = torch.ops.attn_diag.attention_forward(
        q, k, v, slots, n_slots, *recipes, causal, left, right, scale, softcap, instrument, key, sinks,
        alibi_slopes, *borders, *((None, None) if pages is None else (pages.table, pages.lengths)),
    )  # fmt: skip
    if pages is not None:
        out: Tensor = pages.restored(o)
    else:
        out = o[0].transpose(0, 1) if tokens else o.transpose(1, 2) if layout == "BTHD" else o
    if instrument == "none":
        return out
    dump = Dump(
        level=instrument, recipe_json=recipes[0], q=q, k=k, o=o.detach(), lse=lse, causal=causal, window=(left, right),
        scale=scale, softcap=softcap, sinks=None if sinks is None else sinks.detach(), alibi_slopes=alibi_slopes,
        cu_seqlens_q=borders[0], cu_seqlens_k=borders[1], rows=rows, slots=slots, raw_scores=scores,
        raw_probs=probs, tile_max=tile_max,
    )  # fmt: skip
    if pages is not None:
        dump.page_table, dump.cache_seqlens, dump.v = pages.table, pages.lengths, v
    if key:
        _DUMPS[key] = dump
    return out, dump


@dataclass(frozen=True)
class _Call:
    """The options of one call, read from the primitive arguments of the registered operators."""

    recipe: Recipe
    backward_recipe: Recipe
    visibility: Visibility
    scale: float
    softcap: float | None
    level: Level

    @staticmethod
    @lru_cache(maxsize=256)
    def read(
        recipe: str, backward_recipe: str, causal: Causal, left: int, right: int, scale: float, softcap: float | None,
        level: Level,
    ) -> _Call:  # fmt: skip
        recipes = Recipe.from_json(recipe), Recipe.from_json(backward_recipe)
        return _Call(*recipes, Visibility(causal, (left, right)), scale, softcap, level)


# Dumps that wait for their backward, by the key that travels with the call.
_DUMPS: WeakValueDictionary[int, Dump] = WeakValueDictionary()
_KEYS = count(1)

_OPTIONS = (
    "str recipe, str backward_recipe, str causal, int left, int right, float scale, float? softcap, str level, int key"
)
# The place of ``key`` among them; after it come tensors that most calls do not have.
_KEY = 8
_SEQUENCES = "Tensor? alibi_slopes=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None"
_PAGES = "Tensor? page_table=None, Tensor? cache_seqlens=None"


def _sinks(arguments: Sequence[Any]) -> Tensor | None:
    return arguments[_KEY + 1] if len(arguments) > _KEY + 1 else None


def _sequences(tensors: Sequence[Any]) -> Sequences:
    """From what follows ``key`` (and sinks)."""
    slopes, cu_q, cu_k, table, lengths = (*tensors, *[None] * 5)[:5]
    return Sequences(cu_q, cu_k if table is None else lengths, slopes, table)


@torch.library.custom_op(
    "attn_diag::attention_forward",
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, Tensor? slots, int n_slots, {_OPTIONS}, Tensor? sinks=None, "
    f"{_SEQUENCES}, {_PAGES}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _forward_op(
    q: Tensor, k: Tensor, v: Tensor, slots: Tensor | None, n_slots: int, *arguments: Any
) -> tuple[Tensor, ...]:
    call = _Call.read(*arguments[:_KEY])
    return forward(
        q, k, v, call.recipe, call.visibility, scale=call.scale, softcap=call.softcap, level=call.level, slots=slots,
        n_slots=n_slots, unrounded=call.backward_recipe.delta_from == "fp32-o", sinks=_sinks(arguments),
        sequences=_sequences(arguments[_KEY + 2 :]),
    )  # fmt: skip


@_forward_op.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, slots: Tensor | None, n_slots: int, *arguments: Any) -> tuple[Tensor, ...]:  # noqa: ARG001
    call = _Call.read(*arguments[:_KEY])
    return forward_like(
        q, k, v, call.recipe, call.visibility, softcap=call.softcap, level=call.level, n_slots=n_slots,
        unrounded=call.backward_recipe.delta_from == "fp32-o", sequences=_sequences(arguments[_KEY + 2 :]),
    )  # fmt: skip


@torch.library.custom_op(
    "attn_diag::attention_backward",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, Tensor do, Tensor? slots, int n_slots, "
    f"{_OPTIONS}, {_SEQUENCES}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _backward_op(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor, slots: Tensor | None, n_slots: int,
    *arguments: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    call = _Call.read(*arguments[:_KEY])
    return backward(
        q, k, v, o, lse, do.to(q.dtype), call.backward_recipe, call.visibility, scale=call.scale, softcap=call.softcap,
        level=call.level, slots=slots, n_slots=n_slots, sequences=_sequences(arguments[_KEY + 1 :]),
    )  # fmt: skip


@_backward_op.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor, slots: Tensor | None, n_slots: int,  # noqa: ARG001
    *arguments: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    call = _Call.read(*arguments[:_KEY])
    return backward_like(q, k, v, lse, call.backward_recipe, level=call.level, n_slots=n_slots)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, slots, n_slots, *arguments = inputs
    o, unrounded, lse, *rest = output
    delta_from = unrounded if _Call.read(*arguments[:_KEY]).backward_recipe.delta_from == "fp32-o" else o
    sequences = (*arguments[_KEY + 2 :], None, None, None)[:3]
    ctx.save_for_backward(q, k, v, delta_from, lse, slots, _sinks(arguments), *sequences)
    ctx.n_slots, ctx.arguments, ctx.count = n_slots, arguments[: _KEY + 1], len(inputs)
    ctx.mark_non_differentiable(unrounded, lse, *rest)


def _gradients(ctx: Any, do: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, o, lse, slots, sinks, *sequences = ctx.saved_tensors
    dq, dk, dv, *seen = torch.ops.attn_diag.attention_backward(
        q, k, v, o, lse, do, slots, ctx.n_slots, *ctx.arguments, *sequences
    )
    dump = None if torch.compiler.is_compiling() else _DUMPS.get(ctx.arguments[-1])
    if dump is not None:
        dump.delta, dump.dprobs, dump.dscores = seen
    rest: list[Tensor | None] = [None] * (ctx.count - 3)
    if sinks is not None:
        rest[_KEY + 3] = sink_gradients(sinks, lse, seen[0])  # behind slots and n_slots
    return dq, dk, dv, *rest


def sink_gradients(sinks: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """dSink [Hq] = -sum over rows and batch of P_sink delta, in fp32; ``lse`` and ``delta`` [B, Hq, Tq]."""
    logits = sinks[:, None]
    probs = torch.where(logits == -torch.inf, 0.0, torch.exp(logits - lse))  # L may be -inf too
    return -(probs * delta).sum((0, 2))


_forward_op.register_autograd(_gradients, setup_context=_save)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _resolve(name_or_json: str, dtype: Format, head_dim: int) -> str:
    """A preset adapted to q's dtype and head dimension, or the recipe given; checked, as JSON."""
    given = name_or_json.startswith("{")
    found = Recipe.from_json(name_or_json) if given else preset(name_or_json, dtype, head_dim)
    if found.input != dtype:
        raise TypeError(
            f"recipe {found.name} is for {found.input} inputs, got {dtype} ones; "
            f"use recipe.for_input({dtype!r}) or cast q, k and v"
        )
    check_kernels_support(found)
    return found.json
