"""Attention operators, met in torch's dispatcher: in eager code and, at run time, inside compiled graphs alike.

While somebody listens, each operator has a kernel of ours in front of the one that was there (torch's own, or another's
that replaced it). Ours calls that one, and tells of what it was given and returned. Nothing is traced, no graph is
changed and nothing is compiled again. Where all of attention is one composite operator that autograd takes apart
(``SCALED_DOT_PRODUCT``), it is met above autograd, in eager code alone; the fused operators are met below.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.library import Library, get_kernel

# Called instead of an operator: the kernel that was there, and what it is to be called with.
Meets = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
# Our kernel, from the one that was there and the operator's arguments.
Makes = Callable[[Any, Sequence[Any]], Callable[..., Any]]

SCALED_DOT_PRODUCT = "aten::scaled_dot_product_attention"
# What operators call their arguments -> what we do.
_NAMES = {
    "query": "q", "key": "k", "value": "v", "out": "o", "logsumexp": "lse", "grad_out": "do", "grad_out_": "do",
    "attn_mask": "mask", "attn_bias": "mask",
}  # fmt: skip


@dataclass(frozen=True)
class FusedOperator:
    """An operator that does the whole forward, with another of its name that does the backward."""

    name: str
    kernel: str
    """What reports call it."""
    backward: str
    devices: tuple[str, ...]
    """Those it has kernels for, as the dispatcher names them."""
    lse: int = 1
    """Which of its results is the LSE."""
    causal: str = "top-left"
    """What it means by ``is_causal`` where there are more or fewer keys than queries."""


def _of_torch(name: str, kernel: str, *devices: str, causal: str = "top-left") -> FusedOperator:
    return FusedOperator(f"aten::{name}", f"torch SDPA {kernel}", f"aten::{name}_backward", devices, causal=causal)


OPERATORS = (
    _of_torch("_scaled_dot_product_flash_attention", "flash", "CUDA", causal="bottom-right"),
    _of_torch("_scaled_dot_product_efficient_attention", "efficient", "CUDA"),
    _of_torch("_scaled_dot_product_cudnn_attention", "cuDNN", "CUDA"),
    _of_torch("_scaled_dot_product_flash_attention_for_cpu", "flash on the CPU", "CPU"),
    _of_torch("_scaled_dot_product_fused_attention_overrideable", "of the device's backend", "XPU", "PrivateUse1"),
    FusedOperator(
        "attn_diag::attention_forward", "attn_diag.attention", "attn_diag::attention_backward", ("CPU", "CUDA"), lse=2
    ),
)


class OperatorCall:
    """One forward of a fused operator: the tensors are its own, as it was given and returned them.

    Attributes:
        operator: which.
        o: what it returned.
        lse: likewise.
        module: The name of the module that makes the call, from the one that was compiled on; empty: not known.
    """

    module = ""

    def __init__(
        self,
        operator: FusedOperator,
        arguments: Sequence[Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        o: Tensor,
        lse: Tensor | None,
    ) -> None:
        self.operator, self.o, self.lse = operator, o, lse
        self._call = arguments, args, kwargs

    @cached_property
    def given(self) -> Mapping[str, Any]:
        """Its arguments by name; tensors by ours."""
        return _named(*self._call)

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v."""
        return self.given["q"], self.given["k"], self.given["v"]

    def fused(self, d: int, dv: int, rows: int) -> dict[str, Any]:
        """The kernel's name, q, k, v, o and LSE by the names of ``AttentionCall``.

        Args:
            d: q's features without padding.
            dv: v's.
            rows: Query rows, without what pads the LSE.
        """
        q, k, v = self.inputs
        lse = self.lse
        if lse is not None:
            lse = lse.squeeze(-1) if lse.dim() == 4 else lse
            lse = lse[..., :rows] if lse.numel() else None
        tensors = {"q": q[..., :d], "k": k[..., :d], "v": v[..., :dv], "o": self.o[..., :dv], "lse": lse}
        return {"kernel": self.kernel, **tensors}

    def fields(self) -> dict[str, Any]:
        """Everything an ``AttentionCall`` holds, where nothing but the operator is known."""
        q, _, v = self.inputs
        given = self.given
        causal, window = "none", None
        if isinstance(given.get("causal"), str):
            causal, left, right = given["causal"], given["left"], given["right"]
            window = None if left < 0 and right < 0 else (left, right)
        elif given["is_causal"]:
            causal = self.operator.causal
        dropout = given.get("dropout_p") or 0.0
        return self.fused(q.shape[-1], v.shape[-1], q.shape[-2]) | {
            "mask": given.get("mask"),
            "causal": causal,
            "window": window,
            "scale": given.get("scale"),
            "softcap": given.get("softcap"),
            "refused": f"attention dropout {dropout:g} is on: run with dropout 0 to analyse it" if dropout else None,
        }

    @property
    def kernel(self) -> str:
        """What reports call it, and who stands in for it."""
        if "recipe" in self.given:
            forward, backward = (json.loads(self.given[n])["name"] for n in ("recipe", "backward_recipe"))
            return f"{self.operator.kernel}, {forward} forward, {backward} backward"
        if "flash_attention" in self.operator.name and self.o.is_cuda and (other := _flash_implementation()):
            return f"{self.operator.kernel} ({other})"
        return self.operator.kernel


class OperatorBackward:
    """One backward of a fused operator.

    Attributes:
        gradients: dq, dk and dv.
        of_lse: whether the LSE has a gradient too, so that dq and dk are not those of o alone.
    """

    of_lse = False

    def __init__(
        self,
        arguments: Sequence[Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        gradients: Sequence[Tensor | None],
    ) -> None:
        self.gradients = gradients
        self._call = arguments, args, kwargs

    @cached_property
    def given(self) -> Mapping[str, Any]:
        """Its arguments by name; q, k, v, o, lse and do by ours."""
        return _named(*self._call)


class Kernels:
    """Kernels of ours in front of operators' own, between ``put`` and ``remove``."""

    def __init__(self) -> None:
        self._libraries: list[Any] = []
        self._names: set[str] = set()

    @property
    def there(self) -> bool:
        """Whether they are there now."""
        return bool(self._libraries)

    def put(self, wanted: Iterable[tuple[str, str, Makes]]) -> None:
        """Put them there: of each operator by name, for a dispatch key; what is not in this build is left out."""
        found: list[tuple[str, str, Callable[..., Any]]] = []
        for name, key, ours in wanted:
            if (kernel := _kernel(name, key)) is not None:
                found.append((name, key, ours(kernel, torch._C._get_schema(*_parted(name)).arguments)))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that an operator is overridden
            for name, key, kernel in found:
                namespace, bare = name.split("::")
                library: Any = Library(namespace, "IMPL")  # type: ignore[no-untyped-call]
                self._libraries.append(library)
                library.impl(bare, kernel, key, with_keyset=True, allow_override=True)
        self._names = {name for name, _, _ in found}
        _forget(self._names)

    def remove(self) -> None:
        """Take them away."""
        while self._libraries:
            self._libraries.pop()._destroy()
        _forget(self._names)
        self._names = set()


class OperatorOverrides:
    """Our kernels in front of the operators' own, between ``install`` and ``remove``.

    Args:
        composite: Called instead of ``SCALED_DOT_PRODUCT``.
        forward: Told of a fused operator that has run.
        backward: Told of one's backward.
    """

    def __init__(
        self,
        composite: Meets,
        forward: Callable[[OperatorCall], None],
        backward: Callable[[OperatorBackward], None],
    ) -> None:
        self._composite, self._forward, self._backward = composite, forward, backward
        self._kernels = Kernels()

    def install(self) -> None:
        """Put them there; what the build or the device lacks is left out."""
        if self._kernels.there:
            return
        # Ours is registered when it is first used: by then the call would be over.
        with suppress(ImportError):
            import_module("attn_diag.kernels.attention")
        # Above autograd alone: with a kernel of a device's the operator would be one that nobody may take apart, in a
        # graph that is exported meanwhile, and without that of autograd one that has no gradient.
        devices = {device: None for operator in OPERATORS for device in operator.devices}
        wanted: list[tuple[str, str, Makes]] = [(SCALED_DOT_PRODUCT, f"Autograd{d}", self._met) for d in devices]
        for operator in OPERATORS:
            for device in operator.devices:
                wanted.append((operator.name, device, partial(self._ran, operator)))
                wanted.append((operator.backward, device, self._went_back))
        self._kernels.put(wanted)

    def remove(self) -> None:
        """Leave every operator as it was (each registration leaves some hundred bytes in torch)."""
        self._kernels.remove()

    def _met(self, kernel: Any, arguments: Sequence[Any]) -> Callable[..., Any]:  # noqa: ARG002 - as the others
        composite = self._composite

        def run(keys: Any, *args: Any, **kwargs: Any) -> Any:
            def original(*args: Any, **kwargs: Any) -> Any:
                return kernel.call_boxed(keys, *args, **kwargs)

            # A subclass (a DTensor, a fake one) takes the operator apart: what is inside is met on plain tensors.
            if type(args[0]) not in (Tensor, torch.nn.Parameter):
                return original(*args, **kwargs)
            return composite(original, args, kwargs)

        return run

    def _ran(self, operator: FusedOperator, kernel: Any, arguments: Sequence[Any]) -> Callable[..., Any]:
        forward = self._forward

        def run(keys: Any, *args: Any, **kwargs: Any) -> Any:
            result = kernel.call_boxed(keys, *args, **kwargs)
            forward(OperatorCall(operator, arguments, args, kwargs, result[0], result[operator.lse]))
            return result

        return run

    def _went_back(self, kernel: Any, arguments: Sequence[Any]) -> Callable[..., Any]:
        backward = self._backward

        def run(keys: Any, *args: Any, **kwargs: Any) -> Any:
            result = kernel.call_boxed(keys, *args, **kwargs)
            backward(OperatorBackward(arguments, args, kwargs, result[:3]))
            return result

        return run


def in_cuda_graph() -> bool:
    """Whether a CUDA graph is being recorded: what we add would be recorded too, and replayed."""
    return bool(torch.cuda.is_initialized()) and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]


def _kernel(name: str, key: str) -> Any | None:
    try:
        return get_kernel(name, key)
    except (RuntimeError, ValueError):
        return None


def _forget(names: Iterable[str]) -> None:
    """Have torch's Python dispatcher look again where an operator's kernels are.

    It remembers, under symbolic shapes, that an operator has a kernel for autograd of its own. Once that is gone, what
    is traced would have no gradient.
    """
    for name in names:
        whole, overload = _parted(name)
        namespace, bare = whole.split("::")
        operator = getattr(getattr(getattr(torch.ops, namespace), bare), overload or "default")
        operator._dispatch_cache.clear()


def _parted(name: str) -> tuple[str, str]:
    """The operator's name and its overload's."""
    whole, _, overload = name.partition(".")
    return whole, overload


def _named(arguments: Sequence[Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    found = {a.name: a.default_value for a in arguments if a.has_default_value()}
    found |= {a.name: value for a, value in zip(arguments, args, strict=False)} | dict(kwargs)
    return {ours: found[theirs] for theirs, ours in _NAMES.items() if theirs in found and ours not in found} | found


def _flash_implementation() -> str | None:
    """Who stands in for torch's flash attention (``activate_flash_attention_impl``)."""
    from torch.nn import attention

    current = getattr(attention, "current_flash_attention_impl", None)
    return None if current is None else current()
