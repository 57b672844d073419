"""The kinds of attention functions, and how a call of each is read: tensors, masks, and where its gradients arrive."""

from __future__ import annotations

import inspect
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.bias import CausalBias, CausalVariant

from attn_diag.watching.live.axes import heads_as_sequences, mask_with_four_axes, with_four_axes
from attn_diag.watching.live.kernels import alibi_origin
from attn_diag.watching.live.score_mods import read_score_mod
from attn_diag.watching.live.tap import Tap

# Everything an AttentionCall holds but its place and gradients, by name; "graph", where those gradients arrive;
# "within", the fused operator that did it; and, where the site knows better than the watch, "projection" (x, w_q,
# whether a bias is added).
Fields = dict[str, Any]
# do, dq, dk, dv -> the tensor in autograd's graph that gets this gradient, and what makes [B, H, T, D] of it.
LayOut = Callable[[Tensor], Tensor]
Graph = dict[str, tuple[Tensor, LayOut]]
Function = Callable[..., Any]


@dataclass(frozen=True)
class AttentionSite:
    """One kind of attention function."""

    name: str
    read: Callable[[Mapping[str, Any], Any, Tap], Fields | None]
    """Tells what a call was from its arguments, its result and the tap; None: no attention."""
    tapped: bool = False
    """Whether it may be made of matrix products, or of another attention function."""
    ring: bool = False
    """Whether fused operators inside are hops of one ring attention, of which only the whole is told."""
    drops: Callable[[Mapping[str, Any]], float] | None = None
    """Tells p of a call's dropout; the products of such a call are recorded, whose operand tells what was kept."""
    holds: tuple[str, ...] = ()
    """Arguments that are held until it has run, as it may write into them."""
    over_operator: bool = False
    """Whether it knows more than a fused operator that runs underneath; else that one is told of instead."""
    around: Callable[[], None] | None = None
    """Called where a function or operator inside was told of instead."""


def bind(function: Function, site: AttentionSite, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Name the call's arguments, defaults filled in."""
    if site in (SDPA, PATCHED):
        return {**_SDPA, **dict(zip(_SDPA, args, strict=False)), **kwargs}
    bound = _signature(function).bind(*args, **kwargs)
    bound.apply_defaults()
    named = (
        {**kwargs, **dict(zip(_TRANSFORMERS, args, strict=False))} if site in (TRANSFORMERS, REGISTERED, EAGER) else {}
    )
    return {**bound.arguments, **named}


@cache
def _signature(function: Function) -> inspect.Signature:
    return inspect.signature(function)


# scaled_dot_product_attention's arguments with their defaults: the builtin has no signature that inspect could read.
_SDPA = {"query": None, "key": None, "value": None, "attn_mask": None, "dropout_p": 0.0, "is_causal": False,
         "scale": None, "enable_gqa": False}  # fmt: skip


# What transformers hands on in this order, whatever a function calls it; all else by name.
_TRANSFORMERS = ("module", "query", "key", "value", "attention_mask")


def unchanged(t: Tensor) -> Tensor:
    """[B, H, T, D] as it is."""
    return t


def turned(t: Tensor) -> Tensor:
    """[B, H, T, D] of [B, T, H, D]."""
    return t.transpose(1, 2)


def gradients(o: Tensor, q: Tensor, k: Tensor, v: Tensor, lay_out: LayOut = unchanged) -> Graph:
    """Where the gradients arrive, all laid out alike."""
    inputs: Graph = {"dq": (q, lay_out), "dk": (k, lay_out), "dv": (v, lay_out)}
    return {"do": (o, lay_out), **_unshared(inputs.items())}


def _unshared(inputs: Iterable[tuple[str, tuple[Tensor, LayOut]]]) -> Graph:
    """Without tensors given twice: theirs is one gradient for both."""
    every = dict(inputs)
    if len({id(t) for t, _ in every.values()}) == len(every):
        return every
    return {
        name: (t, lay_out)
        for name, (t, lay_out) in every.items()
        if sum(t is other and lay_out is of_other for other, of_other in every.values()) == 1
    }


def as_autocast(t: Tensor) -> Tensor:
    """Cast as autocast does for a matrix product, or for an attention function that casts what it is given."""
    return t.to(autocast_dtype(t))


def autocast_dtype(t: Tensor) -> torch.dtype:
    """Return the dtype to which autocast casts a tensor for a matrix product."""
    device = t.device.type
    autocast = t.dtype != torch.float64 and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if autocast else t.dtype


def with_dropout(found: Fields, dropout: float | None, tap: Tap) -> Fields:
    """The call with what was kept, which the operator underneath or P times V tells; refused where nobody knows.

    Args:
        found: The call.
        dropout: p.
        tap: What ran underneath.
    """
    if not dropout:
        return found
    within = found.get("within")
    kept = within.kept() if within is not None else tap.kept(found["q"], found["k"], found["o"])
    if kept is None or dropout >= 1:
        return found | {"refused": found.get("refused") or refusals(dropout)}
    return found | {"dropout_mask": kept, "dropout_p": float(dropout)}


def _unexpanded(mask: Tensor) -> LayOut:
    """What makes the gradient of a mask one of what it was expanded from: that alone is kept."""
    axes = [axis for axis in range(mask.dim()) if mask.stride(axis) == 0 and mask.shape[axis] > 1]
    return partial(torch.sum, dim=axes, keepdim=True, dtype=torch.float32) if axes else unchanged


def refusals(dropout: float | None, **others: object) -> str | None:
    """Why a call with dropout, or with any of ``others``, is not analysed; None without."""
    if dropout:
        return f"attention dropout {dropout:g} is on: run with dropout 0 to analyse it"
    present = [name for name, value in others.items() if value is not None]
    return f"{', '.join(present)} not supported" if present else None


def _read_sdpa(a: Mapping[str, Any], result: Any, tap: Tap) -> Fields | None:
    q, k, v, mask = a["query"], a["key"], a["value"], a["attn_mask"]
    causal = "top-left" if a["is_causal"] else "none"
    if isinstance(mask, CausalBias):
        causal = "bottom-right" if mask.variant == CausalVariant.LOWER_RIGHT else "top-left"
        mask = None
    if any(t.is_nested for t in (q, k, v)) or q.dim() < 2 or not q.shape[:-4] == k.shape[:-4] == v.shape[:-4]:
        return None
    fused = tap.fused(q, v) if q.dim() in (3, 4) else {}
    if q.dim() == 3 and len(q) == len(k):
        fused = {name: heads_as_sequences(x) if isinstance(x, Tensor) else x for name, x in fused.items()}
    tensors = fused or {
        "kernel": "torch SDPA math",
        "q": as_autocast(with_four_axes(q)),
        "k": as_autocast(with_four_axes(k)),
        "v": as_autocast(with_four_axes(v)),
        "o": with_four_axes(result),
    }
    learned: Graph = {}
    if isinstance(mask, Tensor) and mask.is_floating_point() and (q.dim() == 4 or mask.dim() < 3):
        learned["dmask"] = (mask, _unexpanded(mask))
    found: Fields = tensors | {
        "graph": gradients(result, q, k, v, with_four_axes) | learned,
        "within": tap.operator if fused and q.dim() == 4 else None,
        "mask": mask if mask is None else mask_with_four_axes(mask, q),
        "causal": causal,
        "scale": a["scale"],
    }
    return with_dropout(found, a["dropout_p"], tap) | _outer_projection()


def _read_multi_head(a: Mapping[str, Any], result: Any, tap: Tap) -> Fields | None:  # noqa: ARG001 - one protocol
    """The path with ``need_weights=True``: two batched products around a softmax; scale is already in q."""
    query, heads = a["query"], a["num_heads"]
    if query.dim() != 3 or (found := tap.around_softmax(batch := query.shape[1], heads)) is None:
        return None
    q = found["q"]
    found |= {
        "kernel": "torch multi_head_attention_forward",
        "mask": _additive(a["attn_mask"], a["key_padding_mask"], batch, heads, q.dtype),
        "scale": 1.0,
        "projection": _multi_head_projection(a, q.shape[-1] ** -0.5),
    }
    return with_dropout(found, a["dropout_p"] if a["training"] else 0.0, tap)


def _multi_head_projection(a: Mapping[str, Any], scale: float) -> tuple[Tensor, Tensor, bool] | None:
    """x [B, T, C], the rows of the weight that make q (times what q is multiplied by), and whether with a bias."""
    packed, size = a["in_proj_weight"], a["embed_dim_to_check"]
    weight = a["q_proj_weight"] if a["use_separate_proj_weight"] else packed[:size]
    return a["query"].transpose(0, 1), weight * scale, a["in_proj_bias"] is not None


_outer = threading.local()


@contextmanager
def inside(function: Function, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[None]:
    """While multi_head_attention_forward runs, which may end in another function, keep what only it knows."""
    _outer.call = (function, args, kwargs)
    try:
        yield
    finally:
        _outer.call = None


def _outer_projection() -> Fields:
    if (call := getattr(_outer, "call", None)) is None:
        return {}
    a = bind(call[0], MULTI_HEAD, call[1], call[2])
    return {"projection": _multi_head_projection(a, 1.0)} if a["query"].dim() == 3 else {}


def _additive(mask: Tensor | None, padding: Tensor | None, batch: int, heads: int, dtype: torch.dtype) -> Tensor | None:
    """nn.MultiheadAttention's masks (True leaves out) as one additive mask."""

    def floating(x: Tensor) -> Tensor:
        return torch.zeros_like(x, dtype=dtype).masked_fill_(x, -math.inf) if x.dtype == torch.bool else x

    total = None
    if mask is not None:
        total = floating(mask)
        if total.dim() == 3 and len(total) == batch * heads:
            total = total.reshape(batch, heads, *total.shape[1:])
    if padding is not None:
        keys = floating(padding)[:, None, None, :]
        total = keys if total is None else total + keys
    return total


def _read_eager(a: Mapping[str, Any], result: Any, tap: Tap) -> Fields | None:
    """transformers' eager_attention_forward masks by the mask it is given alone."""
    found = _read_transformers(a, result, tap)
    if found is None:
        return None
    options = {**(a.get("kwargs") or {}), **a}
    dropout = options.get("dropout")
    found["refused"] = None if found["refused"] == refusals(dropout) else found["refused"]
    found = with_dropout(found, dropout, tap)
    if options.get("position_bias") is not None and found["q"].dtype.itemsize == 2:
        # T5's softmax rounds to 16 bits what a fused kernel keeps in fp32: single rows look like mistakes.
        why = f"position_bias not supported in {found['q'].dtype} eager attention, sdpa is"
        found["refused"] = found["refused"] or why
    return found | {"kernel": "transformers eager", "causal": "none", "window": None}


def _read_transformers(a: Mapping[str, Any], result: Any, tap: Tap) -> Fields | None:  # noqa: ARG001 - one protocol
    """Hugging Face's convention: q [B, H, T, D], the result [B, T, H, D] first of a tuple."""
    more = a.get("kwargs") or {}
    options = {**more, **{name: value for name, value in a.items() if name != "kwargs"}}
    q, k, v, module = options["query"], options["key"], options["value"], options["module"]
    o, more_results = (result[0], result[1:]) if isinstance(result, tuple) else (result, ())
    mask, window = options.get("attention_mask"), options.get("sliding_window")
    # FlexAttention's LSE comes where others return their weights; transformers rounds it to the dtype of v.
    wide = (torch.float32, torch.float64)
    lse = next((t for t in more_results if isinstance(t, Tensor) and t.shape == q.shape[:3] and t.dtype in wide), None)
    sinks = options.get("s_aux")
    with_sinks: Graph = {} if sinks is None else {"dsinks": (sinks, Tensor.flatten)}
    found: Fields = {"q": as_autocast(q), "k": as_autocast(k), "v": as_autocast(v), "o": turned(o)} | {
        "kernel": f"transformers {getattr(getattr(module, 'config', None), '_attn_implementation', None)}",
        "lse": lse,
        "graph": gradients(o, q, k, v) | {"do": (o, turned)} | with_sinks,
        "sinks": None if sinks is None else sinks.flatten(),
        "lse_sink": "included" if lse is None or sinks is None else "excluded",  # FlexAttention's, of the keys alone
        "scale": options.get("scaling"),
        "softcap": options.get("softcap"),
        "refused": refusals(options.get("dropout")),
    }
    if isinstance(mask, Tensor) and mask.dim() == 4:
        # Some masks are longer than the keys of this layer.
        found["mask"] = mask[..., : k.shape[-2]]
    elif mask is not None and not isinstance(mask, Tensor):
        found["mask"] = _block_mask(mask, q, k)
    else:
        if isinstance(mask, Tensor):
            found["refused"] = found["refused"] or "a padding mask goes to a packed kernel"
        causal = options.get("is_causal")
        causal = getattr(module, "is_causal", True) if causal is None else causal
        found["causal"] = "bottom-right" if causal and q.shape[2] > 1 else "none"
        found["window"] = (window - 1, 0) if window else None
    return found | _with_bias(found, options.get("position_bias"))


def _with_bias(found: Fields, bias: Tensor | None) -> Fields:
    """A relative position bias [1 or B, H, Tq, Tk], as T5's, and the mask of the call in one."""
    mask = found.get("mask")
    if bias is None:
        return {}
    added = bias.detach().float()[..., : found["k"].shape[-2]]
    if mask is None:
        return {"mask": added}
    return {"mask": added.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else added + mask}


def _read_flex(a: Mapping[str, Any], result: Any, tap: Tap) -> Fields | None:  # noqa: ARG001 - one protocol
    q, k, v = a["query"], a["key"], a["value"]
    o, aux = result if isinstance(result, tuple) else (result, None)
    mask = None if a["block_mask"] is None else _block_mask(a["block_mask"], q, k)
    found: Fields = {"mask": mask} if a["score_mod"] is None else read_score_mod(a["score_mod"], q, k, mask)
    scale, factor = a["scale"], found.pop("factor", 1.0)
    if factor != 1:
        scale = factor * (q.shape[3] ** -0.5 if scale is None else scale)
    return {"kernel": "torch FlexAttention", "q": q, "k": k, "v": v, "o": o} | {
        "graph": gradients(o, q, k, v),
        "lse": getattr(aux, "lse", aux),
        "scale": scale,
        **found,
    }


def _block_mask(block_mask: Any, q: Tensor, k: Tensor) -> Tensor:
    """A BlockMask written out, [B or 1, H or 1, Tq, Tk] bool: its blocks alone do not say which keys are seen."""
    from torch.nn.attention.flex_attention import create_mask

    batch, heads = block_mask.shape[:2]
    mask: Tensor = create_mask(block_mask.mask_mod, batch, heads, q.shape[2], k.shape[2], device=q.device)
    return mask


def _read_flash_attn(a: Mapping[str, Any], result: Any, tap: Tap) -> Fields | None:  # noqa: ARG001 - one protocol
    o = result[0] if isinstance(result, tuple) else result
    # Of a packed argument each part's gradient is the same part of its gradient.
    if "qkv" in a:
        inputs = [(a["qkv"], _part(number)) for number in range(3)]
    elif "kv" in a:
        inputs = [(a["q"], turned), (a["kv"], _part(0)), (a["kv"], _part(1))]
    else:
        inputs = [(a[name], turned) for name in "qkv"]
    q, k, v = (lay_out(t) for t, lay_out in inputs)
    window = tuple(a.get("window_size") or (-1, -1))
    graph: Graph = {"do": (o, turned), **_unshared(zip(("dq", "dk", "dv"), inputs, strict=True))}
    if (sinks := _flash_sinks(a)) is not None:
        graph["dsinks"] = (sinks, unchanged)
    slopes, causal = a.get("alibi_slopes"), bool(a.get("causal"))
    return {"kernel": "flash_attn", "q": q, "k": k, "v": v, "o": turned(o)} | {
        "graph": graph,
        "lse": _saved_lse(o, tuple(q.shape[:3])),
        "sinks": sinks,
        "causal": "bottom-right" if causal else "none",
        "scale": a.get("softmax_scale"),
        "window": None if window == (-1, -1) else window,
        "softcap": a.get("softcap") or None,
        "alibi_slopes": slopes,
        "alibi_origin": "row" if slopes is None else alibi_origin(causal, window, k.shape[2]),
        "refused": refusals(a.get("dropout_p")),
    }


def _flash_sinks(a: Mapping[str, Any]) -> Tensor | None:
    """FlashAttention-4's argument, and that of others' forks; their LSE has the sinks in it."""
    return next((t for name in ("learnable_sink", "s_aux", "sinks") if (t := a.get(name)) is not None), None)


def _part(number: int) -> LayOut:
    """[B, H, T, D] of one of the tensors packed as [B, T, 2 or 3, H, D]."""
    return lambda packed: packed[:, :, number].transpose(1, 2)


def _saved_lse(o: Tensor, shape: tuple[int, ...]) -> Tensor | None:
    """The LSE [B, H, Tq] that an autograd.Function kept for its backward: the one fp32 tensor of that shape."""
    if o.grad_fn is None or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        return None  # unpacking under saved-tensor hooks would run them
    kept = [t for t in getattr(o.grad_fn, "saved_tensors", ()) if t is not None and t.dtype == torch.float32]
    fitting = [t for t in kept if tuple(t.shape) == shape]
    return fitting[0].detach() if len(fitting) == 1 else None


def _transformers_dropout(a: Mapping[str, Any]) -> float:
    return {**(a.get("kwargs") or {}), **a}.get("dropout") or 0.0


SDPA = AttentionSite(
    "scaled_dot_product_attention", _read_sdpa, drops=lambda a: float(a["dropout_p"]), over_operator=True
)
MULTI_HEAD = AttentionSite("multi_head_attention_forward", _read_multi_head, tapped=True)
EAGER = AttentionSite("transformers eager", _read_eager, drops=_transformers_dropout)
TRANSFORMERS = AttentionSite("transformers", _read_transformers)
FLEX = AttentionSite("flex_attention", _read_flex, over_operator=True)
FLASH_ATTN = AttentionSite("flash_attn", _read_flash_attn)
# What somebody else has put in their place, or beside them.
PATCHED = replace(SDPA, name="scaled_dot_product_attention, replaced", holds=("query", "key", "value", "attn_mask"))
REGISTERED = replace(TRANSFORMERS, name="transformers, registered", holds=("query", "key", "value", "attention_mask"))
