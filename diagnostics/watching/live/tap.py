"""What the operator underneath an attention function was given and returned, while one call runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


@dataclass(frozen=True)
class FusedCall:
    """One fused operator: q, k, v as it got them (cast by autocast, perhaps padded), o and its own LSE."""

    kernel: str
    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    lse: Tensor | None


# operator -> (what reports call it, which of its results is the LSE)
_FUSED = {
    "aten::_scaled_dot_product_flash_attention": ("torch SDPA flash", 1),
    "aten::_scaled_dot_product_efficient_attention": ("torch SDPA efficient", 1),
    "aten::_scaled_dot_product_cudnn_attention": ("torch SDPA cuDNN", 1),
    "aten::_scaled_dot_product_flash_attention_for_cpu": ("torch SDPA flash on the CPU", 1),
    "aten::_scaled_dot_product_fused_attention_overrideable": ("torch SDPA of the device's backend", 1),
    "attn_diag::attention_forward": ("attn_diag.attention", 2),
}
_PRODUCTS = ("aten::bmm", "aten::baddbmm")


class Tap(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records fused attention operators, and batched matrix products, that run while it is entered.

    It passes every operator on as it came, so results are the same bits, and it is entered for calls that somebody
    wants only: others cost nothing.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.fused: FusedCall | None = None
        self.products: list[tuple[Tensor, Tensor, Tensor]] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.name().partition(".")[0]
        if name in _FUSED:
            kernel, where = _FUSED[name]
            q, k, v = args[:3]
            self.fused = FusedCall(kernel, q, k, v, result[0], result[where])
        elif name in _PRODUCTS:
            self.products.append((args[-2], args[-1], result))
        return result


def attention_node(o: Tensor) -> Any | None:
    """The autograd node of the fused operator behind ``o``, past the views and casts that a call may add; or None."""
    node: Any = o.grad_fn
    for _ in range(_MAX_STEPS):
        if node is None:
            return None
        name: str = node.name()
        if any(part in name for part in _NODES):
            return node
        if not name.startswith(_PASSING):
            return None
        node = node.next_functions[0][0] if node.next_functions else None
    return None


_MAX_STEPS = 6
_NODES = ("ScaledDotProductFlash", "ScaledDotProductEfficient", "ScaledDotProductCudnn", "ScaledDotProductFused",
          "attn_diag_attention_forward")  # fmt: skip
_PASSING = ("Slice", "Transpose", "Permute", "View", "UnsafeView", "ToCopy", "Clone", "Alias", "Unsqueeze", "Squeeze")

Hook = Callable[[Sequence[Tensor | None], Sequence[Tensor | None]], None]
