"""Packages of attention kernels as they are seen from Python, with their operators' own schemas; plain torch inside."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.library import Library


@dataclass
class Ran:
    """What the kernels were given and returned, in their own layouts."""

    forward: list[dict[str, Any]] = field(default_factory=list)
    backward: list[dict[str, Any]] = field(default_factory=list)


RAN = Ran()


def seen(q: Tensor, k: Tensor, causal: str, left: int, right: int) -> Tensor:
    """[Tq, Tk], which keys a row sees, of [B, T, H, D]."""
    rows, keys = q.shape[1], k.shape[1]
    at = torch.arange(rows)[:, None] + (0 if causal == "top-left" else keys - rows)
    j = torch.arange(keys)[None]
    right = 0 if causal != "none" else right
    return ((left < 0) | (j >= at - left)) & (((right < 0) & (causal == "none")) | (j <= at + max(right, 0)))


def alibi(slopes: Tensor, rows: int, keys: int, causal: str, left: int) -> Tensor:
    """[1 or B, H, Tq, Tk], as flash_attn 2's csrc/flash_attn/src/mask.h adds it, LSE and all."""
    at, j = torch.arange(rows)[:, None] + keys - rows, torch.arange(keys)[None]
    distance = j.expand(rows, -1) if causal != "none" and left < 0 else -(at - j).abs()
    return slopes.reshape(-1, slopes.shape[-1], 1, 1) * distance


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    causal: str,
    left: int,
    right: int,
    softcap: float,
    bias: Any = None,
    slopes: Any = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """O [B, T, H, D], LSE [B, H, T], P and d scores / d S, [B, H, Tq, Tk]; all in FP32 but O."""
    group = q.shape[2] // k.shape[2]
    wide = [t.float().transpose(1, 2) for t in (q, *(x.repeat_interleave(group, 2) for x in (k, v)))]
    scores = wide[0] @ wide[1].mT * scale
    slope = torch.ones_like(scores)
    if softcap:
        capped = (scores / softcap).tanh()
        scores, slope = softcap * capped, 1 - capped.square()
    if bias is not None:
        scores = scores + bias.float()
    if slopes is not None:
        scores = scores + alibi(slopes, q.shape[1], k.shape[1], causal, left)
    scores = scores.masked_fill(~seen(q, k, causal, left, right), -torch.inf)
    lse = scores.logsumexp(-1)
    probs = (scores - lse.clamp(min=-1e30)[..., None]).exp()
    return (probs @ wide[2]).transpose(1, 2).to(q.dtype).contiguous(), lse, probs, slope


def forward(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """O and LSE."""
    o, lse, _, _ = attend(q, k, v, **options)
    RAN.forward.append({"q": q.clone(), "k": k.clone(), "v": v.clone(), "o": o.clone(), "lse": lse.clone()})
    return o, lse


def backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, **options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """dQ, dK and dV from O and LSE, in the layout and dtype of q."""
    _, _, probs, slope = attend(q, k, v, **options)
    group = q.shape[2] // k.shape[2]
    wide_q, wide_do, wide_o = (t.float().transpose(1, 2) for t in (q, do, o))
    wide_k, wide_v = (t.repeat_interleave(group, 2).float().transpose(1, 2) for t in (k, v))
    delta = (wide_do * wide_o).sum(-1, keepdim=True)
    ds = probs * (wide_do @ wide_v.mT - delta) * slope * options["scale"]

    def grouped(t: Tensor) -> Tensor:
        return t.reshape(t.shape[0], -1, group, *t.shape[2:]).sum(2)

    found = (ds @ wide_k, grouped(ds.mT @ wide_q), grouped(probs.mT @ wide_do))
    dq, dk, dv = (t.transpose(1, 2).to(q.dtype).contiguous() for t in found)
    RAN.backward.append({"do": do.clone(), "lse": lse.clone(), "dq": dq.clone(), "dk": dk.clone(), "dv": dv.clone()})
    return dq, dk, dv


Given = dict[str, Any]
# Schema, kernel and what a trace is given in its place, both of the arguments by name.
Definition = tuple[str, Callable[[Given], Any], Callable[[Given], Any]]


@contextlib.contextmanager
def operators(namespace: str, **definitions: Definition) -> Iterator[None]:
    """Operators of the CPU; where torch has one of that name, its kernel."""
    own = namespace != "aten"
    library: Any = Library(namespace, "FRAGMENT" if own else "IMPL")  # type: ignore[no-untyped-call]

    def named(schema: str, function: Callable[[Given], Any]) -> Callable[..., Any]:
        arguments = torch._C.parse_schema(f"x::y{schema}").arguments
        defaults = {a.name: a.default_value if a.has_default_value() else None for a in arguments}

        def run(*args: Any, **kwargs: Any) -> Any:
            return function(defaults | dict(zip((a.name for a in arguments), args, strict=False)) | kwargs)

        return run

    for name, (schema, kernel, fake) in definitions.items():
        if own:
            library.define(f"{name}{schema}")
            torch.library.register_fake(f"{namespace}::{name}", named(schema, fake), lib=library)
        library.impl(name, named(schema, kernel), "CPU")
    try:
        yield
    finally:
        library._destroy()
        for name in definitions:
            vars(getattr(torch.ops, namespace)).pop(name, None)


@contextlib.contextmanager
def modules(**contents: dict[str, Any]) -> Iterator[dict[str, ModuleType]]:
    """Modules by name, with __ for a dot."""
    made = {}
    for name, content in contents.items():
        module = ModuleType(name.replace("__", "."))
        vars(module).update(content)
        made[module.__name__] = sys.modules[module.__name__] = module
    try:
        yield made
    finally:
        for name in made:
            del sys.modules[name]


# flash_attn 2.7.0 to 2.8.4: flash_attn/flash_attn_interface.py
FA2_FORWARD = (
    "(Tensor q, Tensor k, Tensor v, float dropout_p, float softmax_scale, bool causal, SymInt window_size_left, "
    "SymInt window_size_right, float softcap, Tensor? alibi_slopes, bool return_softmax) "
    "-> (Tensor, Tensor, Tensor, Tensor)"
)
FA2_BACKWARD = (
    "(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, Tensor(a6!)? dq, Tensor(a7!)? dk, "
    "Tensor(a8!)? dv, float dropout_p, float softmax_scale, bool causal, SymInt window_size_left, "
    "SymInt window_size_right, float softcap, Tensor? alibi_slopes, bool deterministic, Tensor? rng_state=None) "
    "-> Tensor"
)
FA2_PACKED = (
    "(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, "
    "SymInt max_seqlen_k, float dropout_p, float softmax_scale, bool causal, SymInt window_size_left=-1, "
    "SymInt window_size_right=-1, float softcap=0., Tensor? alibi_slopes=None, bool return_softmax=False, "
    "Tensor? block_table=None, Tensor? leftpad_k=None, Tensor? seqused_k=None, bool zero_tensors=False, "
    "SymInt num_splits=0) -> (Tensor, Tensor, Tensor, Tensor)"
)


def _lasts(a: Given, causal: bool) -> Given:
    """Our words for the options; causality and windows end with the last key."""
    window = {"left": a["window_size_left"], "right": a["window_size_right"]}
    causality = "bottom-right" if causal else "none"
    more = {"slopes": a["alibi_slopes"]} if a.get("alibi_slopes") is not None else {}
    return {"scale": a["softmax_scale"], "causal": causality, "softcap": a["softcap"], **window, **more}


def _lse_of(q: Tensor) -> Tensor:
    return q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)


def _fa2_forward(a: Given) -> Any:
    o, lse = forward(a["q"], a["k"], a["v"], **_lasts(a, a["causal"]))
    return o, lse, o.new_empty(0), torch.zeros(2, dtype=torch.int64)


def _fake_forward(a: Given) -> Any:
    q = a["q"]
    return torch.empty_like(q), _lse_of(q), q.new_empty(0), q.new_empty(2, dtype=torch.int64)


def _write_gradients(a: Given, causal: bool) -> Tensor:
    found = backward(*(a[name] for name in ("dout", "q", "k", "v", "out", "softmax_lse")), **_lasts(a, causal))
    for name, grad in zip(("dq", "dk", "dv"), found, strict=True):
        a[name].copy_(grad)
    return torch.zeros_like(a["softmax_lse"])


def _packed(a: Given) -> Any:
    q = a["q"]
    return torch.zeros_like(q), q.new_zeros((q.shape[1], q.shape[0])), q.new_empty(0), torch.zeros(2)


class FlashAttn2(torch.autograd.Function):
    """Pads D to a multiple of 8, and keeps what the operator returned for the backward."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, *options: Any) -> Any:
        dropout_p, scale, causal, window, softcap, alibi_slopes = options
        ctx.d, ctx.options = q.shape[-1], (*options[:1], q.shape[-1] ** -0.5 if scale is None else scale, *options[2:])
        q, k, v = (torch.nn.functional.pad(t, [0, -t.shape[-1] % 8]) if t.shape[-1] % 8 else t for t in (q, k, v))
        o, lse, _, rng = torch.ops.flash_attn._flash_attn_forward(
            q, k, v, dropout_p, ctx.options[1], causal=causal, window_size_left=window[0], window_size_right=window[1],
            softcap=softcap, alibi_slopes=alibi_slopes, return_softmax=False,
        )  # fmt: skip
        ctx.save_for_backward(q, k, v, o, lse, rng)
        return o[..., : ctx.d]

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> Any:
        q, k, v, o, lse, rng = ctx.saved_tensors
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        do = torch.nn.functional.pad(do, [0, -ctx.d % 8]) if ctx.d % 8 else do
        dropout_p, scale, causal, window, softcap, alibi_slopes = ctx.options
        torch.ops.flash_attn._flash_attn_backward(
            do, q, k, v, o, lse, dq, dk, dv, dropout_p, scale, causal, window[0], window[1], softcap, alibi_slopes,
            False, rng_state=rng,
        )  # fmt: skip
        return *(t[..., : ctx.d] for t in (dq, dk, dv)), *(None,) * 6


def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: Any = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Any = None,
) -> Any:  # fmt: skip
    return FlashAttn2.apply(q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes)  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def flash_attn_2() -> Iterator[Callable[..., Any]]:
    defined = {
        "_flash_attn_forward": (FA2_FORWARD, _fa2_forward, _fake_forward),
        "_flash_attn_backward": (
            FA2_BACKWARD,
            lambda a: _write_gradients(a, a["causal"]),
            lambda a: torch.empty_like(a["softmax_lse"]),
        ),
        "_flash_attn_varlen_forward": (FA2_PACKED, _packed, _packed),
    }
    content = {"flash_attn_func": flash_attn_func}
    with operators("flash_attn", **defined), modules(flash_attn={}, flash_attn__flash_attn_interface=content):
        yield flash_attn_func


# flash_attn 3 (hopper/flash_api.cpp, of August 2026): its operators; older versions' Python calls them as they are.
FA3_FORWARD = (
    "(Tensor q, Tensor k, Tensor v, Tensor(k_new!)? k_new = None, Tensor(v_new!)? v_new = None, Tensor? q_v = None, "
    "Tensor(out!)? out = None, Tensor? cu_seqlens_q = None, Tensor? cu_seqlens_k = None, Tensor? cu_seqlens_k_new = "
    "None, Tensor? seqused_q = None, Tensor? seqused_k = None, int? max_seqlen_q = None, int? max_seqlen_k = None, "
    "Tensor? page_table = None, Tensor? kv_batch_idx = None, Tensor? leftpad_k = None, Tensor? rotary_cos = None, "
    "Tensor? rotary_sin = None, Tensor? seqlens_rotary = None, Tensor? q_descale = None, Tensor? k_descale = None, "
    "Tensor? v_descale = None, float? softmax_scale = None, bool is_causal = False, int window_size_left = -1, "
    "int window_size_right = -1, int attention_chunk = 0, float softcap = 0.0, bool is_rotary_interleaved = False, "
    "Tensor? scheduler_metadata = None, int num_splits = 0, bool? pack_gqa = None, int sm_margin = 0) "
    "-> (Tensor(out!), Tensor, Tensor, Tensor)"
)
FA3_BACKWARD = (
    "(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, Tensor(dq!)? dq = None, "
    "Tensor(dk!)? dk = None, Tensor(dv!)? dv = None, Tensor? cu_seqlens_q = None, Tensor? cu_seqlens_k = None, "
    "Tensor? seqused_q = None, Tensor? seqused_k = None, int? max_seqlen_q = None, int? max_seqlen_k = None, "
    "float? softmax_scale = None, bool is_causal = False, int window_size_left = -1, int window_size_right = -1, "
    "float softcap = 0.0, bool deterministic = False, int sm_margin = 0) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)


def _fa3_forward(a: Given) -> Any:
    o, lse = forward(a["q"], a["k"], a["v"], **_lasts(a, a["is_causal"]))
    return o, lse, o.new_empty(0), o.new_empty(0)


# Of 2026 on, custom operators around these (hopper/flash_attn_interface.py), which a graph may hold.
FA3_OUTER = FA3_FORWARD
for _theirs, _outer in (
    ("(k_new!)", ""), ("(v_new!)", ""), ("(out!)", ""), (" q_v ", " qv "), (" out ", " out_ "),
    (" is_causal", " causal"), (" is_rotary_interleaved = False", " rotary_interleaved = True"),
    ("num_splits = 0", "num_splits = 1"),
):  # fmt: skip
    FA3_OUTER = FA3_OUTER.replace(_theirs, _outer)
FA3_OUTER_BACKWARD = (
    "(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, Tensor? cu_seqlens_q=None, "
    "Tensor? cu_seqlens_k=None, Tensor? sequed_q=None, Tensor? sequed_k=None, SymInt? max_seqlen_q=None, "
    "SymInt? max_seqlen_k=None, Tensor(a12!)? dq=None, Tensor(a13!)? dk=None, Tensor(a14!)? dv=None, "
    "float? softmax_scale=None, bool is_causal=False, SymInt window_size_left=-1, SymInt window_size_right=-1, "
    "float softcap=0., bool deterministic=False, SymInt sm_margin=0) -> Tensor"
)


def _fa3_outer_forward(a: Given) -> Any:
    return torch.ops.flash_attn_3.fwd(*a.values())


def _fa3_outer_backward(a: Given) -> Any:
    tensors, packed, grads = list(a.values())[:6], list(a.values())[6:12], [a["dq"], a["dk"], a["dv"]]
    return torch.ops.flash_attn_3.bwd(*tensors, *grads, *packed, *list(a.values())[15:])[0]


class FlashAttn3(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: Any, causal: bool, window: Any, softcap: float
    ) -> Any:
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        options = causal, *window, 0, softcap, True, None, 1, None, 0
        ops = torch.ops.flash_attn_3
        run = ops._flash_attn_forward if hasattr(ops, "_flash_attn_forward") else ops.fwd
        o, lse, *_ = run(q, k, v, *(None,) * 20, scale, *options)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.options = scale, causal, window[0], window[1], softcap, False, 0
        return o

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> Any:
        grads = [torch.empty_like(t) for t in ctx.saved_tensors[:3]]
        ops, none = torch.ops.flash_attn_3, (None,) * 6
        if hasattr(ops, "_flash_attn_backward"):
            ops._flash_attn_backward(do, *ctx.saved_tensors, *none, *grads, *ctx.options)
        else:
            ops.bwd(do, *ctx.saved_tensors, *grads, *none, *ctx.options)
        return *grads, *(None,) * 4


def flash_attn_3_func(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: Any = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
) -> Any:  # fmt: skip
    return FlashAttn3.apply(q, k, v, softmax_scale, causal, window_size, softcap)  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def flash_attn_3(outer: bool = True) -> Iterator[Callable[..., Any]]:
    def five(lse: Tensor) -> Any:
        return tuple(torch.zeros_like(lse) for _ in range(5))

    defined = {
        "fwd": (FA3_FORWARD, _fa3_forward, lambda a: (*_fake_forward(a)[:3], a["q"].new_empty(0))),
        "bwd": (
            FA3_BACKWARD,
            lambda a: five(_write_gradients(a, a["is_causal"])),
            lambda a: five(a["softmax_lse"]),
        ),
    }
    if outer:
        defined["_flash_attn_forward"] = FA3_OUTER, _fa3_outer_forward, defined["fwd"][2]
        backwards = FA3_OUTER_BACKWARD, _fa3_outer_backward, lambda a: torch.empty_like(a["softmax_lse"])
        defined["_flash_attn_backward"] = backwards
    with (
        operators("flash_attn_3", **defined),
        modules(flash_attn_3={}, flash_attn_interface={"flash_attn_func": flash_attn_3_func}),
    ):
        yield flash_attn_3_func
