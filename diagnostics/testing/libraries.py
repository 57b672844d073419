"""Attention kernels of libraries, each called through its own interface with one set of options.

A kernel that has no argument for an option refuses it here by name, before it could compute another function.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from inspect import signature
from typing import Any, Protocol

import torch
from torch import Tensor

from attn_diag.errors import InputError
from attn_diag.reference import Alibi, Masking
from attn_diag.reference.masking import AlibiOrigin
from attn_diag.testing.stated import Said

SDPA = {
    "flash": "FLASH_ATTENTION",
    "efficient": "EFFICIENT_ATTENTION",
    "cudnn": "CUDNN_ATTENTION",
    "math": "MATH",
}

# Shapes, masks and options of one process, each compiled.
_COMPILATIONS = 1 << 20


class Options(Said, Protocol):
    """What a call of attention has besides q, k and v; ``CaseInputs`` is one."""

    @property
    def mask(self) -> Tensor | None: ...  # noqa: D102 - as in CaseInputs, and so are the others
    @property
    def positions(self) -> Tensor | None: ...  # noqa: D102
    @property
    def sinks(self) -> Tensor | None: ...  # noqa: D102
    @property
    def alibi_slopes(self) -> Tensor | None: ...  # noqa: D102
    @property
    def alibi_origin(self) -> AlibiOrigin: ...  # noqa: D102
    @property
    def dropout_mask(self) -> Tensor | None: ...  # noqa: D102
    @property
    def dropout_p(self) -> float | None: ...  # noqa: D102


Call = Callable[..., Any]
"""(q, k, v [B, H, T, D], Options) -> o, or (o, lse)."""


@dataclass(frozen=True)
class Library:
    """A kernel of a library."""

    call: Call
    """How it is called."""
    package: str = "torch"
    """The distribution that it comes in."""
    cuda: bool = True
    """Whether it needs a GPU."""
    splits: bool = False
    """Whether ``call`` takes ``num_splits``, into how many parts the keys are split."""
    by_design: str | None = None
    """What it rounds more coarsely on purpose, in words."""


def refuse_options(who: str, options: Options, *known: str) -> None:
    """Raise InputError for an option of the call that a kernel has no argument for.

    Args:
        who: The kernel.
        options: Those of the call.
        known: What it has of window, softcap, mask, positions, sinks, alibi_slopes and dropout_mask.
    """
    named = {n: getattr(options, n) for n in ("window", "softcap", "mask", "positions", "sinks", "alibi_slopes")}
    if unknown := [n for n, value in named.items() if value is not None and n not in known]:
        raise InputError(f"{who} has no {', '.join(unknown)}")
    if options.dropout_mask is not None and "dropout_mask" not in known:
        raise InputError(f"{who} cannot be handed a dropout mask: it draws one of its own, or has no dropout")


def dense_mask(q: Tensor, k: Tensor, options: Options) -> Tensor | None:
    """Everything that hides keys, and ALiBi, as one mask for SDPA, bool (true = attend) or additive in q's dtype.

    Raises InputError for an additive mask that q's dtype cannot hold.
    """
    rows, keys = q.shape[2], k.shape[2]
    masking = Masking(options.causal, options.window, None, options.positions)
    hidden = masking.hidden(masking.row_positions(rows, keys, q.device), slice(0, keys))
    mask = None if options.mask is None else options.mask.to(q.device)
    if options.alibi_slopes is not None:
        at, slopes = masking.row_positions(rows, keys, q.device), options.alibi_slopes.to(q.device).double()
        bias = slopes[..., None, None] * Alibi(0.0, options.alibi_origin).distances(at, slice(0, keys), keys)
        bias = bias if hidden is None else bias.masked_fill(hidden, 0.0)  # which need not fit q's dtype
        if mask is None or mask.dtype != torch.bool:
            mask = bias if mask is None else bias + mask
        else:
            mask = bias.masked_fill(~mask, -torch.inf)
    if mask is None:
        return None if hidden is None else ~hidden
    if mask.dtype == torch.bool:
        return mask if hidden is None else mask & ~hidden
    cast = mask.to(q.dtype)
    if bool((cast.double() != mask.double()).any()):
        raise InputError(f"SDPA takes an additive mask in {q.dtype}, which cannot hold this one's numbers")
    return cast if hidden is None else cast.masked_fill(hidden, -torch.inf)


_OF_SDPA = ("window", "mask", "positions", "alibi_slopes")


def _sdpa(backend: str | None) -> Call:
    def call(q: Tensor, k: Tensor, v: Tensor, options: Options) -> Tensor:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        of_math = ("dropout_mask",) if backend == "math" else ()
        refuse_options("SDPA" if backend is None else f"SDPA's {backend}", options, *_OF_SDPA, *of_math)
        own = options.causal == "top-left" or (options.causal == "bottom-right" and q.shape[2] == k.shape[2])
        plain = all(x is None for x in (options.window, options.mask, options.positions, options.alibi_slopes))
        mask = None if plain and (own or options.causal == "none") else dense_mask(q, k, options)
        if options.dropout_mask is not None:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="Dropout mask should only be used for testing")
                found: tuple[Tensor, Tensor] = torch._scaled_dot_product_attention_math(
                    q, k, v, mask, options.dropout_p or 0.0, mask is None and own, options.dropout_mask.to(q.device),
                    scale=options.scale, enable_gqa=q.shape[1] != k.shape[1],
                )  # fmt: skip
            return found[0]
        with nullcontext() if backend is None else sdpa_kernel([getattr(SDPBackend, SDPA[backend])]):
            return torch.nn.functional.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None and own, scale=options.scale,
                enable_gqa=q.shape[1] != k.shape[1],
            )  # fmt: skip

    return call


def _flex(*, compiled: bool) -> Call:
    def call(q: Tensor, k: Tensor, v: Tensor, options: Options) -> Any:
        from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

        refuse_options("FlexAttention", options, *_OF_SDPA, "softcap")
        (b, h, rows, _), keys = q.shape, k.shape[2]
        masking = Masking(options.causal, options.window, None, options.positions)
        at = masking.row_positions(rows, keys, q.device)
        (left, right), cap = masking.reach, options.softcap
        mask = None if options.mask is None else options.mask.to(q.device).expand(b, h, rows, keys)
        allowed = mask if mask is not None and mask.dtype == torch.bool else None
        added = mask if allowed is None else None
        alibi = Alibi(0.0, options.alibi_origin)
        slopes = None if options.alibi_slopes is None else options.alibi_slopes.to(q.device).expand(b, h)
        far = alibi.distances(at, slice(0, keys), keys).float().expand(rows, keys)

        def sees(b: Tensor, h: Tensor, row: Tensor, key: Tensor) -> Tensor:
            found = key >= 0
            if left is not None:
                found = found & (key >= at[row] - left)
            if right is not None:
                found = found & (key <= at[row] + right)
            return found if allowed is None else found & allowed[b, h, row, key]

        def score(found: Tensor, b: Tensor, h: Tensor, row: Tensor, key: Tensor) -> Tensor:
            if cap is not None:
                found = cap * torch.tanh(found / cap)
            if slopes is not None:
                found = found + slopes[b, h] * far[row, key]
            return found if added is None else found + added[b, h, row, key]

        blocks, as_they_are = None, all(x is None for x in (cap, added, slopes))
        if left is not None or right is not None or allowed is not None:
            own_heads = allowed is not None
            blocks = create_block_mask(
                sees, b if own_heads else None, h if own_heads else None, rows, keys, device=q.device
            )
        run: Any = torch.compile(flex_attention, dynamic=False, fullgraph=True) if compiled else flex_attention
        # Compiled for a CPU it has no LSE to return.
        with_lse = not compiled or q.device.type != "cpu"
        # Beyond eight shapes torch would run, silently, the uncompiled one.
        limits = torch._dynamo.config.patch(recompile_limit=_COMPILATIONS, accumulated_recompile_limit=_COMPILATIONS)
        with warnings.catch_warnings(), limits if compiled else nullcontext():
            # That it is slow when it is not compiled, as is asked for here.
            warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
            found = run(
                q, k, v, score_mod=None if as_they_are else score, block_mask=blocks,
                scale=options.scale, enable_gqa=q.shape[1] != k.shape[1],
                return_aux=AuxRequest(lse=True) if with_lse else None,
            )  # fmt: skip
        return (found[0], found[1].lse) if with_lse else found

    return call


def _varlen(q: Tensor, k: Tensor, v: Tensor, options: Options) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    refuse_options("varlen_attn", options, "window")
    causal = _bottom_right("varlen_attn", q, k, options)
    left, right = options.window or (-1, -1)
    # Each sequence of the batch is a document of its own; all are of one length.
    (b, _, rows, _), keys = q.shape, k.shape[2]
    starts = [torch.arange(b + 1, device=q.device, dtype=torch.int32) * length for length in (rows, keys)]
    packed = [x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)]
    # Older ones have no such argument and group heads unasked.
    grouped = {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}
    call: Any = varlen_attn
    found = call(
        *packed, *starts, rows, keys, scale=options.scale, window_size=(left, 0 if causal else right), **grouped
    )
    o: Tensor = found if isinstance(found, Tensor) else found[0]
    return o.reshape(b, rows, *o.shape[1:]).transpose(1, 2)


def _bottom_right(who: str, q: Tensor, k: Tensor, options: Options) -> bool:
    """Whether the call is causal, for kernels that align the mask bottom-right; InputError where it is top-left."""
    if options.causal == "top-left" and q.shape[2] != k.shape[2]:
        raise InputError(f"{who} aligns its causal mask bottom-right, and Tq and Tk differ")
    return bool(options.causal != "none")


def _swapped(*tensors: Tensor) -> list[Tensor]:
    """[B, T, H, D] of [B, H, T, D], and the other way round."""
    return [x.transpose(1, 2) for x in tensors]


def _returned(found: Any) -> tuple[Tensor, ...]:
    """(o, lse) with o as [B, H, T, D] of what a FlashAttention returns."""
    o, *rest = found if isinstance(found, tuple | list) else [found]
    return o.transpose(1, 2), *(x for x in rest[:1] if isinstance(x, Tensor))


def _flash_2(q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, ...]:
    from flash_attn import flash_attn_func  # type: ignore[import-not-found,unused-ignore]

    refuse_options("flash_attn 2", options, "window", "softcap", "alibi_slopes")
    causal, slopes = _bottom_right("flash_attn 2", q, k, options), options.alibi_slopes
    # Without a left window it counts from the first key under causality, which is another LSE, and from the row else.
    own = "first-key" if causal and (options.window or (-1, -1))[0] < 0 else "row"
    if slopes is not None and options.alibi_origin != own and not causal:
        raise InputError(f"flash_attn 2 counts ALiBi's distances from the row here, not from {options.alibi_origin}")
    found = flash_attn_func(
        *_swapped(q, k, v), softmax_scale=options.scale, causal=causal,
        window_size=options.window or (-1, -1), softcap=options.softcap or 0.0, return_attn_probs=True,
        alibi_slopes=None if slopes is None else slopes.to(q.device),
    )  # fmt: skip
    returned = _returned(found)
    return returned if slopes is None or options.alibi_origin == own else returned[:1]


def _flash_3(q: Tensor, k: Tensor, v: Tensor, options: Options, **splits: int) -> tuple[Tensor, ...]:
    from flash_attn_interface import flash_attn_func  # type: ignore[import-not-found,unused-ignore]

    refuse_options("flash_attn 3", options, "window", "softcap")
    found = flash_attn_func(
        *_swapped(q, k, v), softmax_scale=options.scale, causal=_bottom_right("flash_attn 3", q, k, options),
        window_size=options.window or (-1, -1), softcap=options.softcap or 0.0, **splits,
    )  # fmt: skip
    return _returned(found)


def _flash_4(q: Tensor, k: Tensor, v: Tensor, options: Options, **splits: int) -> tuple[Tensor, ...]:
    from flash_attn.cute import flash_attn_func  # type: ignore[import-not-found,unused-ignore]

    refuse_options("flash_attn 4", options, "window", "softcap", "sinks")
    left, right = (None if n < 0 else n for n in options.window or (-1, -1))
    with_sinks: dict[str, Any] = {}
    if options.sinks is not None:
        sinks = options.sinks.to(q.device)
        if sinks.dtype == torch.float64:
            sinks = sinks.float()
            if bool((sinks.double() != options.sinks.to(q.device)).any()):
                raise InputError("flash_attn 4 takes sinks of 16 or 32 bits, which cannot hold these numbers")
        with_sinks["learnable_sink"] = sinks
    found = flash_attn_func(
        *_swapped(q, k, v), softmax_scale=options.scale, causal=_bottom_right("flash_attn 4", q, k, options),
        window_size=(left, right), softcap=options.softcap or 0.0, **with_sinks, **splits,
    )  # fmt: skip
    return _returned(found)


def _xformers(q: Tensor, k: Tensor, v: Tensor, options: Options) -> Tensor:
    from xformers.ops import fmha  # type: ignore[import-not-found,unused-ignore]

    refuse_options("xformers", options)
    biases = {
        "none": lambda: None,
        "top-left": fmha.attn_bias.LowerTriangularMask,
        "bottom-right": fmha.attn_bias.LowerTriangularFromBottomRightMask,
    }
    group = q.shape[1] // k.shape[1]
    # Its four-dimensional form has no groups; each query head gets a copy of its key head.
    k, v = (x.repeat_interleave(group, 1) if group > 1 else x for x in (k, v))
    o: Tensor = fmha.memory_efficient_attention(
        *_swapped(q, k, v), attn_bias=biases[options.causal](), scale=options.scale
    )
    return o.transpose(1, 2)


def _sage(q: Tensor, k: Tensor, v: Tensor, options: Options) -> Any:
    from sageattention import sageattn  # type: ignore[import-not-found,unused-ignore]

    refuse_options("SageAttention", options)
    causal = _bottom_right("SageAttention", q, k, options)
    # It takes k's mean off k itself, which its caller may still need.
    return sageattn(q, k.clone(), v, tensor_layout="HND", is_causal=causal, sm_scale=options.scale)


def _transformer_engine(q: Tensor, k: Tensor, v: Tensor, options: Options) -> Tensor:
    from transformer_engine.pytorch import DotProductAttention  # type: ignore[import-not-found,unused-ignore]

    refuse_options("Transformer Engine", options, "window")
    masks = {"none": "no_mask", "top-left": "causal", "bottom-right": "causal_bottom_right"}
    attention = DotProductAttention(
        q.shape[1], q.shape[3], num_gqa_groups=k.shape[1], attention_dropout=0.0, qkv_format="bshd",
        attn_mask_type=masks[options.causal], window_size=options.window, softmax_scale=options.scale,
    )  # fmt: skip
    o: Tensor = attention(*(x.contiguous() for x in _swapped(q, k, v)))
    return o.reshape(*o.shape[:2], q.shape[1], v.shape[3]).transpose(1, 2)


def _flashinfer(q: Tensor, k: Tensor, v: Tensor, options: Options) -> Tensor:
    from flashinfer import single_prefill_with_kv_cache  # type: ignore[import-not-found,unused-ignore]

    refuse_options("FlashInfer", options, "softcap")
    causal = _bottom_right("FlashInfer", q, k, options)
    items = [
        single_prefill_with_kv_cache(
            *(x.transpose(0, 1).contiguous() for x in one), causal=causal, sm_scale=options.scale,
            logits_soft_cap=options.softcap,
        )
        for one in zip(q.detach(), k.detach(), v.detach(), strict=True)
    ]  # fmt: skip
    return torch.stack(items).transpose(1, 2)


def _fla(q: Tensor, k: Tensor, v: Tensor, options: Options) -> Tensor:
    from fla.ops.attn import parallel_attn  # type: ignore[import-not-found,unused-ignore]

    refuse_options("flash-linear-attention", options, "window", "sinks")
    if options.causal == "none" or q.shape[2] != k.shape[2]:
        raise InputError("flash-linear-attention's softmax attention is causal, with as many keys as rows")
    left = -1 if options.window is None else options.window[0]
    found = parallel_attn(
        *(x.contiguous() for x in _swapped(q, k, v)), scale=options.scale, window_size=left + 1 if left >= 0 else None,
        sink_bias=None if options.sinks is None else options.sinks.to(q.device).float(),
    )  # fmt: skip
    o: Tensor = found[0] if isinstance(found, tuple | list) else found
    return o.transpose(1, 2)


def _ours(q: Tensor, k: Tensor, v: Tensor, options: Options) -> Tensor:
    from attn_diag.kernels.attention import attention

    refuse_options("attn_diag.attention", options, "window", "softcap", "sinks", "alibi_slopes")
    slopes = options.alibi_slopes
    # Under causality all origins are one softmax.
    if slopes is not None and options.alibi_origin != "row" and options.causal == "none":
        raise InputError(f"attn_diag.attention counts ALiBi's distances from the row, not from {options.alibi_origin}")
    return attention(
        q, k, v, causal=options.causal, window=options.window, scale=options.scale, softcap=options.softcap,
        sinks=None if options.sinks is None else options.sinks.to(q.device),
        alibi_slopes=None if slopes is None else slopes.to(q.device),
    )  # fmt: skip


LIBRARIES = {
    "sdpa": Library(_sdpa(None), cuda=False),
    "sdpa:flash": Library(_sdpa("flash"), cuda=False),
    "sdpa:cudnn": Library(_sdpa("cudnn")),
    "sdpa:efficient": Library(_sdpa("efficient")),
    "sdpa:math": Library(_sdpa("math"), cuda=False),
    "flex_attention": Library(_flex(compiled=False), cuda=False),
    "flex_attention:compiled": Library(_flex(compiled=True), cuda=False),
    "varlen_attn": Library(_varlen),
    "flash_attn_2": Library(_flash_2, "flash-attn"),
    "flash_attn_3": Library(_flash_3, "flash-attn-3", splits=True),
    "flash_attn_4": Library(_flash_4, "flash-attn-4", splits=True),
    "xformers": Library(_xformers, "xformers"),
    "sageattention": Library(_sage, "sageattention", by_design="the scores come from INT8"),
    "transformer_engine": Library(_transformer_engine, "transformer-engine"),
    "flashinfer": Library(_flashinfer, "flashinfer-python"),
    "flash-linear-attention": Library(_fla, "flash-linear-attention"),
    "attn_diag.attention": Library(_ours, "attn-diag"),
}
"""By the name under which a kernel is asked for."""
