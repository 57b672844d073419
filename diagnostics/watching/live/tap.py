"""What ran underneath an attention function while one call of it ran."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from attn_diag.watching.live.operators import OperatorCall

_PRODUCTS = ("aten::bmm", "aten::baddbmm")


class Tap:
    """Is handed the fused operator that runs, and records batched matrix products where it is asked to.

    Attributes:
        operator: the fused operator; None: none ran.
        hops: of a ring, all fused operators in the order in which they ran.
        products_seen: of each product its two factors and its result.
    """

    def __init__(self) -> None:
        self.operator: OperatorCall | None = None
        self.hops: list[OperatorCall] = []
        self.products_seen: list[tuple[Tensor, Tensor, Tensor]] = []

    def products(self) -> TorchDispatchMode:
        """A context that records products; it passes all operators on as they came."""
        return _Products(self.products_seen)

    def fused(self, q: Tensor, v: Tensor) -> dict[str, Any]:
        """Inputs (cast by autocast) and results of the operator underneath, without its padding of q's and v's D.

        Returns:
            The kernel's name, q, k, v, o and its own LSE by the names of ``AttentionCall``; empty where there was none.
        """
        return {} if self.operator is None else self.operator.fused(q.shape[-1], v.shape[-1], q.shape[-2])


class _Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, seen: list[tuple[Tensor, Tensor, Tensor]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seen = seen

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.name().partition(".")[0] in _PRODUCTS:
            self._seen.append((args[-2], args[-1], result))
        return result
