"""Attention kernels that are known by name: what each is given and returns, in whose words and which layout.

A kernel is a pair of registered torch operators ("namespace::name"), or of Python functions ("module:name") where its
package registers none. What a declaration does not mention is refused by the argument's name, never guessed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from attn_diag.captures.metadata import AlibiOrigin
from attn_diag.watching.live import flashinfer_calls, triton_calls
from attn_diag.watching.live.fused_dropout import kept_by_efficient, kept_by_flash
from attn_diag.watching.live.paged_calls import of_kvcache, without_pages

Given = Mapping[str, Any]
# What kernels call their arguments -> what we do.
NAMES = {
    "query": "q", "key": "k", "value": "v", "out": "o", "logsumexp": "lse", "softmax_lse": "lse", "grad_out": "do",
    "grad_out_": "do", "dout": "do", "grad": "do", "d_o": "do", "attn_mask": "mask", "attn_bias": "mask",
    "bias": "mask", "softmax_scale": "scale", "attn_scale": "scale", "sm_scale": "scale", "causal": "is_causal",
    "p": "dropout_p", "dropout": "dropout_p", "window_size_left": "left", "window_left": "left",
    "window_size_right": "right", "window_right": "right", "cu_seq_q": "cu_seqlens_q", "cu_seq_k": "cu_seqlens_k",
    "cu_seqlens_kv": "cu_seqlens_k", "learnable_sink": "sinks",
}  # fmt: skip
# Where several sequences share an axis.
_BORDERS = ("cu_seqlens_q", "cu_seqlens_k", "cu_seqlens_kv", "cu_seq_q", "cu_seq_k")
# Or not all of it is used, or the keys lie in pages.
_PACKED = (
    *_BORDERS, "cu_seqlens_k_new", "seqused_q", "seqused_k", "sequed_q", "sequed_k", "seqlen_k", "block_table",
    "block_tables", "page_table", "page_table_k", "leftpad_k", "kv_batch_idx",
)  # fmt: skip
# Tensors that change nothing of what is computed.
_HARMLESS = frozenset(
    {*NAMES, *NAMES.values(), "dq", "dk", "dv", "rng_state", "philox_seed", "philox_offset", "scheduler_metadata",
     "slots", *_PACKED}
)  # fmt: skip


@dataclass(frozen=True)
class FusedOperator:
    """An operator, or a function, that does the whole forward, with another that does the backward."""

    name: str
    """"namespace::name" of an operator, "module:name" of a Python function, "module:Class.name" of a method."""
    kernel: str
    """What reports call it."""
    backward: str
    """Empty where there is none."""
    devices: tuple[str, ...]
    """Those it has kernels for, as the dispatcher names them."""
    lse: int = 1
    """Which of its results is the LSE [B, H, Tq] (or [B, H, Tq, 1]), a natural logarithm."""
    causal: str = "top-left"
    """What it means by ``is_causal`` where there are more or fewer keys than queries."""
    layout: str = "BHTD"
    """The order of the axes of q, k, v, o and their gradients."""
    reads: Callable[[Given], Given] | None = None
    """What its arguments say in our words, where other names do not say it: ``is_causal`` (also an alignment), ``left``
    and ``right`` of the window, ``layouts`` of q, k, o, do and dq by name, and ``refused``, in words."""
    needs: str = ""
    """A module without which it runs inside another known operator alone."""
    o: int = 0
    """Which of its results is O."""
    gradients: tuple[int, ...] = (0, 1, 2)
    """Which results of its backward are dQ, dK and dV."""
    packs: bool = False
    """Whether q [total, H, D] (or [1, H, total, D]) with ``cu_seqlens_q`` and ``cu_seqlens_k`` are documents one after
    the other; its LSE is [H, total] then, or [1, H, total]."""
    kept: Callable[[Given, Sequence[Any], int], Tensor | None] | None = None
    """Tells which probabilities of the first sequences a call with dropout kept, bool [sequences, Hq, Tq, Tk], from
    what it was given and returned; None: nobody can."""
    returns: Callable[[Sequence[Any], Given], Sequence[Any]] | None = None
    """Makes what ``o`` and ``lse`` say of its results and of what it was given by name; None: they are that."""
    written: str = ""
    """The argument that it writes O into, where it returns nothing."""

    holds: bool = False
    """Whether it may write into what it is given, as one that nobody here knows."""

    @property
    def is_function(self) -> bool:
        """Whether it is a Python function."""
        return "::" not in self.name

    def given(self, arguments: Mapping[str, Any], args: tuple[Any, ...], kwargs: Given) -> dict[str, Any]:
        """Name the arguments of a call, by ours where we have a name.

        Args:
            arguments: Its arguments' names in order, with their defaults.
            args: What a call gave in that order.
            kwargs: And by name.
        """
        found = {**arguments, **dict(zip(arguments, args, strict=False)), **kwargs}
        named = {ours: found[theirs] for theirs, ours in NAMES.items() if theirs in found and ours not in found}
        found = named | found
        found |= {} if self.reads is None else dict(self.reads(found))
        found |= without_pages(found) if self.packs else {}
        return found | {"packed": self.packs and _is_packed(found, self.layout)}

    def laid_out(self, tensor: Tensor, name: str, given: Given) -> Tensor:
        """[B, H, T, D] of one of its tensors.

        Args:
            tensor: As the kernel has it; packed sequences [T, H, D] become one.
            name: Which it is, by our name.
            given: Its arguments.
        """
        layouts = given.get("layouts", {})
        layout = layouts.get(name, layouts.get("k" if name in "kv" else "q", self.layout))
        if given.get("rows_apart") and tensor.dim() == 4:
            tensor = tensor.flatten(0, 1)
        tensor = tensor[None] if tensor.dim() == 3 else tensor
        return tensor if layout == "BHTD" else tensor.permute([layout.index(axis) for axis in "BHTD"])


def alibi_origin(causal: bool, window: tuple[int, int], keys: int) -> AlibiOrigin:
    """Where flash_attn 2 counts the bias of its slopes from: under plain causality it adds slope j, in its LSE too.

    Args:
        causal: As it was given.
        window: Likewise, (left, right), below 0 unlimited.
        keys: Tk, of packed sequences the longest; a window that reaches so far is none.

    Source: csrc/flash_attn/src/mask.h, and ``set_params_fprop`` for when a call is causal.
    """
    left, right = window
    plain = (causal or right == 0) and (left < 0 or left >= keys)
    return "first-key" if plain else "row"


def refusal(given: Given) -> str | None:
    """Why attn-diag cannot analyse a call with these arguments, in words."""
    if dropout := given.get("dropout_p"):
        return f"attention dropout {dropout:g} is on: run with dropout 0 to analyse it"
    if given.get("refused"):
        return str(given["refused"])
    known = _BORDERS if given.get("packed") else ()
    if packed := [name for name in _PACKED if name not in known and given.get(name) is not None]:
        return f"packed or paged sequences are not captured yet ({', '.join(packed)})"
    told = _HARMLESS | {"alibi_slopes"} if "alibi_origin" in given else _HARMLESS
    unknown = [name for name, value in given.items() if name not in told and _alters(value)]
    return f"{', '.join(unknown)} not supported" if unknown else None


def _is_packed(given: Given, layout: str) -> bool:
    """[total, H, D], or a batch of one, between borders."""
    borders = all(isinstance(given.get(name), Tensor) for name in ("cu_seqlens_q", "cu_seqlens_k"))
    return borders and (given["q"].dim() == 3 or (layout == "BHTD" and given["q"].shape[0] == 1))


def _alters(value: object) -> bool:
    """Whether an argument that we do not know may change the result: a tensor, or a function of scores."""
    if isinstance(value, (list, tuple)):
        return any(map(_alters, value))
    return isinstance(value, Tensor) or callable(value)


def _of_torch(name: str, kernel: str, *devices: str, **options: Any) -> FusedOperator:
    return FusedOperator(f"aten::{name}", f"torch SDPA {kernel}", f"aten::{name}_backward", devices, **options)


def _of_tokens(
    name: str, kernel: str, backward: str, reads: Callable[[Given], Given] | None = None, needs: str = ""
) -> FusedOperator:
    """[B, T, H, D], and causality and windows that end with the last key."""
    # Such kernels run on a GPU alone; the CPU stands for whatever else a package gives them.
    devices = ("CUDA", "CPU") if "::" in name else ()
    return FusedOperator(name, kernel, backward, devices, 1, "bottom-right", "BTHD", reads, needs, packs=True)


def _slopes(given: Given) -> Given:
    """flash_attn 2's ALiBi."""
    if given.get("alibi_slopes") is None:
        return {}
    left, right = (-1 if given.get(name) is None else given[name] for name in ("left", "right"))
    keys = given.get("max_seqlen_k") or given["k"].shape[-3]
    return {"alibi_origin": alibi_origin(bool(given.get("is_causal")), (left, right), keys)}


def _ours(given: Given) -> Given:
    """Keys in pages are given to it as [pages, Hk, page size, D]."""
    said: dict[str, Any] = {} if given.get("alibi_slopes") is None else {"alibi_origin": "row"}
    if given.get("page_table") is not None:
        q, k, v = (given[name] for name in "qkv")
        said |= {"q": q[0].transpose(0, 1), "k": k.transpose(1, 2), "v": v.transpose(1, 2)}
        said["layouts"] = {"q": "BTHD", "k": "BTHD", "o": "BHTD"}
    return said


def _chunked(given: Given) -> Given:
    return {"refused": "attention_chunk not supported"} if given.get("attention_chunk") else {}


def _sglang(given: Given) -> Given:
    """flash_attn 3 as sgl-kernel builds it (csrc/flash_extension.cc), whose LSE may have its sinks in it or not."""
    if given.get("sinks") is not None:
        return {"refused": "sinks of SGLang's flash_attn 3 not supported"}
    return _chunked(given)


def _torch_varlen(given: Given) -> Given:
    """Its window is one argument, and says that it is causal too."""
    left, right = given.get("window_size") or (-1, -1)
    causal = bool(given.get("is_causal"))
    return {"left": -1 if causal and right == 0 and left < 0 else left, "right": -1 if causal and left < 0 else right}


def _cutlass(given: Given) -> Given:
    """A row sees so many keys as its window counts, itself among them."""
    window = given.get("window_size")
    return {
        "is_causal": ("none", "top-left", "bottom-right")[given["custom_mask_type"]],
        "left": window - 1 if window else -1,
    }


def _sage(given: Given) -> Given:
    q, k, _ = (given[name] for name in "qkv")
    layout = {"HND": "BHTD", "NHD": "BTHD"}[given.get("tensor_layout", "HND")]
    unequal = given.get("is_causal") and q.shape[layout.index("T")] != k.shape[layout.index("T")]
    return {
        # Only one of them looks at a mask, whatever their callers hand them.
        "mask": given.get("attn_mask") if "quantization_backend" in given else None,
        "layouts": {"q": layout, "k": layout},
        "refused": "causal attention of unequal lengths, which SageAttention leaves undefined" if unequal else None,
    }


def _transformer_engine(given: Given) -> Given:
    """Its layouts ("sbhd_sbhd_sbhd", "bs3hd", …) name s, b, h and d; digits are how q, k and v lie in one tensor."""
    layouts = [part.translate(_NO_DIGITS) for part in given["qkv_layout"].removeprefix("paged_kv_").split("_")]
    masking, bias = given["attn_mask_type"], given["attn_bias_type"]
    padded = "padding" in masking or any("b" not in layout for layout in layouts)
    aligned = masking.removeprefix("padding_").removeprefix("padding") or "no_mask"
    left, right = given["window_size"] or (-1, -1)
    wrong = [
        f"{name} {value}"
        for name, value, plain in (
            ("attn_bias_type", bias, ("no_bias", "post_scale_bias")),
            ("attn_mask_type", aligned, ("no_mask", *_TE_CAUSAL)),
            ("softmax_type", given.get("softmax_type", "vanilla"), ("vanilla",)),
        )
        if value not in plain
    ]
    if aligned == "no_mask" and (left, right) != (-1, -1):
        wrong.append("a window without causality")
    described: dict[str, Any] = {
        "is_causal": _TE_CAUSAL.get(aligned, "none"),
        "left": left,
        "right": right,
        "mask": given.get("attn_bias"),
        "refused": f"{', '.join(wrong)} not supported" if wrong and not padded else None,
        "aux_ctx_tensors": None,
    }
    if given.get("aux_ctx_tensors"):
        described["lse"] = given["aux_ctx_tensors"][0]
    if not padded:
        # They are given for sequences of full length too.
        described |= {"cu_seqlens_q": None, "cu_seqlens_k": None, "cu_seqlens_kv": None}
        described |= {"cu_seqlens_q_padded": None, "cu_seqlens_kv_padded": None}
        back = given.get("dqkv_layout", given["qkv_layout"]).translate(_NO_DIGITS).split("_")
        formats = {
            "q": layouts[0],
            "k": layouts[-1],
            "o": given.get("o_format") or layouts[0],
            "do": given.get("do_format") or layouts[0],
            "dq": back[0],
            "dk": back[-1],
            "dv": back[-1],
        }
        described["layouts"] = {name: layout.replace("s", "t").upper() for name, layout in formats.items()}
    return described


_NO_DIGITS = str.maketrans("", "", "23")
_TE_CAUSAL = {"causal": "top-left", "causal_bottom_right": "bottom-right"}
_TE = "transformer_engine.pytorch.cpp_extensions.fused_attn"
_SAGE_2 = ("qk_int8_pv_fp16_triton", "qk_int8_pv_fp16_cuda", "qk_int8_pv_fp8_cuda", "qk_int8_pv_fp8_cuda_sm90")


def _of_sage(name: str) -> FusedOperator:
    # 1.0.6 takes the mean of its caller's k off, in place.
    return FusedOperator(f"sageattention.core:{name}", f"SageAttention {name}", "", (), reads=_sage, holds=True)


def _of_flashinfer(name: str, reads: Callable[[Given], Given]) -> FusedOperator:
    return replace(_of_tokens(f"flashinfer.{name}", "FlashInfer", "", reads), returns=flashinfer_calls.results)


def _of_triton(module: str, name: str, kernel: str, written: str, reads: Callable[[Given], Given]) -> FusedOperator:
    return replace(_of_tokens(f"{module}:{name}", kernel, "", reads), written=written)


OPERATORS = (
    _of_torch("_scaled_dot_product_flash_attention", "flash", "CUDA", causal="bottom-right", kept=kept_by_flash),
    _of_torch("_scaled_dot_product_efficient_attention", "efficient", "CUDA", kept=kept_by_efficient),
    _of_torch("_scaled_dot_product_cudnn_attention", "cuDNN", "CUDA"),
    _of_torch("_scaled_dot_product_flash_attention_for_cpu", "flash on the CPU", "CPU"),
    _of_torch("_scaled_dot_product_fused_attention_overrideable", "of the device's backend", "XPU", "PrivateUse1"),
    FusedOperator(
        "attn_diag::attention_forward",
        "attn_diag.attention",
        "attn_diag::attention_backward",
        ("CPU", "CUDA"),
        lse=2,
        reads=_ours,
        packs=True,
    ),
    _of_tokens(
        "torch_attn::_varlen_attn", "torch varlen_attn", "torch_attn::_varlen_attn_backward", reads=_torch_varlen
    ),
    _of_tokens(
        "flash_attn::_flash_attn_varlen_forward", "flash_attn 2", "flash_attn::_flash_attn_varlen_backward", _slopes
    ),
    _of_tokens("_vllm_fa2_C::varlen_fwd", "vLLM flash_attn 2", "", _slopes),
    _of_tokens("_vllm_fa3_C::fwd", "vLLM flash_attn 3", "", _chunked),
    _of_tokens("sgl_kernel::fwd", "SGLang flash_attn 3", "", _sglang),
    _of_tokens("flash_attn::_flash_attn_forward", "flash_attn 2", "flash_attn::_flash_attn_backward", _slopes),
    # Of FlashAttention-3 older versions have the inner pair alone.
    _of_tokens("flash_attn_3::_flash_attn_forward", "flash_attn 3", "flash_attn_3::_flash_attn_backward", _chunked),
    _of_tokens("flash_attn_3::fwd", "flash_attn 3", "flash_attn_3::bwd", _chunked),
    _of_tokens(
        "flash_attn.cute.interface:_flash_attn_fwd", "FlashAttention-4", "flash_attn.cute.interface:_flash_attn_bwd"
    ),
    # Its kernel is no operator. With new keys it puts them into the cache first.
    _of_tokens("flash_attn.flash_attn_interface:flash_attn_with_kvcache", "flash_attn 2 kvcache", "", of_kvcache),
    _of_flashinfer("prefill:single_prefill_with_kv_cache", flashinfer_calls.of_one),
    _of_flashinfer("decode:single_decode_with_kv_cache", flashinfer_calls.of_one),
    _of_flashinfer("prefill:BatchPrefillWithPagedKVCacheWrapper.run", flashinfer_calls.of_pages),
    _of_flashinfer("prefill:BatchPrefillWithRaggedKVCacheWrapper.run", flashinfer_calls.of_ragged),
    _of_flashinfer("decode:BatchDecodeWithPagedKVCacheWrapper.run", flashinfer_calls.of_pages),
    *(_of_triton(*function) for function in triton_calls.FUNCTIONS),
    _of_tokens("xformers_flash::flash_fwd", "xformers flash", "xformers_flash::flash_bwd"),
    _of_tokens("xformers_flash3::flash_fwd", "xformers flash 3", "xformers_flash3::flash_bwd"),
    _of_tokens(
        "aten::_efficient_attention_forward",
        "xformers cutlass",
        "aten::_efficient_attention_backward",
        _cutlass,
        needs="xformers",
    ),
    _of_tokens(
        "xformers::efficient_attention_forward_cutlass",
        "xformers cutlass",
        "xformers::efficient_attention_backward_cutlass",
        _cutlass,
    ),
    _of_tokens(f"{_TE}:fused_attn_fwd", "Transformer Engine fused", f"{_TE}:fused_attn_bwd", _transformer_engine),
    *(_of_sage(f"sageattn_{name}") for name in _SAGE_2),
    _of_sage("sageattn"),
    _of_sage("sageattn_varlen"),
)
# What users have declared, by name.
_declared: dict[str, FusedOperator] = {}


def declare(operator: FusedOperator) -> None:
    """Have one more known, or known anew."""
    _declared[operator.name] = operator


def operators() -> tuple[FusedOperator, ...]:
    """All that are known now."""
    return (*OPERATORS, *_declared.values())


def loaded(name: str) -> Callable[..., Any] | None:
    """The function or method of a package that is loaded now, by the name that an operator has for it."""
    module, _, bare = name.partition(":")
    owner, _, last = bare.rpartition(".")
    home = sys.modules.get(module)
    return getattr(getattr(home, owner, None) if owner else home, last, None)


def is_forward(name: str) -> bool:
    """Whether code that names this, without its namespace, names a known operator's forward."""
    if any(name == _bare(operator.name) for operator in _declared.values()):
        return True
    return name.startswith(_BEGINNINGS) and not name.endswith("_backward")


def _bare(name: str) -> str:
    return name.split("::")[1].partition(".")[0]


# Overloads, and variants of a device, go on.
_BEGINNINGS = tuple(_bare(o.name).removesuffix("_for_cpu") for o in OPERATORS if not o.is_function)
