"""What the operator underneath an attention function was given and returned, while one call runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

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
        self._fused: tuple[str, Tensor, Tensor, Tensor, Tensor, Tensor | None] | None = None
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
            self._fused = kernel, q, k, v, result[0], result[where]
        elif name in _PRODUCTS:
            self.products.append((args[-2], args[-1], result))
        return result

    def fused(self, q: Tensor, v: Tensor) -> dict[str, Any]:
        """Inputs (cast by autocast) and results of the operator underneath, without its padding of q's and v's D.

        Returns:
            The kernel's name, q, k, v, o and its own LSE by the names of ``AttentionCall``; empty where there was none.
        """
        if self._fused is None:
            return {}
        kernel, own_q, own_k, own_v, o, lse = self._fused
        d, dv, rows = q.shape[-1], v.shape[-1], q.shape[-2]
        if lse is not None:
            lse = lse.squeeze(-1) if lse.dim() == 4 else lse
            lse = lse[..., :rows] if lse.numel() else None
        q, k, v, o = own_q[..., :d], own_k[..., :d], own_v[..., :dv], o[..., :dv]
        return {"kernel": kernel, "q": q, "k": k, "v": v, "o": o, "lse": lse}
