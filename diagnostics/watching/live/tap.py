"""What ran underneath an attention function while one call of it ran."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from attn_diag.watching.live.operator_calls import OperatorCall
from attn_diag.watching.live.overwritten import Held

_PRODUCTS = ("aten::bmm", "aten::baddbmm")


class Tap:
    """Is handed the fused operator that runs, and records batched matrix products where it is asked to.

    Attributes:
        operator: the fused operator; None: none ran.
        began: the number that autograd's next node had when this was made: nodes of the call have it or a higher one.
        hops: of a ring, all fused operators in the order in which they ran.
        held: what the call was given, where it may write into that.
        products_seen: of each product its two factors and its result.
    """

    def __init__(self) -> None:
        self.operator: OperatorCall | None = None
        self.began: int = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
        self.hops: list[OperatorCall] = []
        self.products_seen: list[tuple[Tensor, Tensor, Tensor]] = []
        self.held = Held()

    def products(self) -> TorchDispatchMode:
        """A context that records products; it passes all operators on as they came."""
        return _Products(self.products_seen)

    def around_softmax(self, batch: int, heads: int) -> dict[str, Any] | None:
        """q, k, v and o of two batched products around a softmax, and where their gradients arrive; None without."""
        if len(self.products_seen) < 2:
            return None
        (q, k_t, _), (_, v, o) = self.products_seen[0], self.products_seen[-1]

        def spread(x: Tensor) -> Tensor:
            return x.reshape(batch, heads, *x.shape[1:])

        def turned(x: Tensor) -> Tensor:
            return spread(x.transpose(1, 2))

        graph = {"do": (o, spread), "dq": (q, spread), "dk": (k_t, turned), "dv": (v, spread)}
        return {"q": spread(q), "k": turned(k_t), "v": spread(v), "o": spread(o), "graph": graph}

    def kept(self, q: Tensor, k: Tensor, o: Tensor) -> Tensor | None:
        """Which probabilities were multiplied with v: those that are not 0, after a dropout.

        Args:
            q: [B, Hq, Tq, D].
            k: [B, Hk, Tk, D].
            o: [B, Hq, Tq, Dv], the last product.

        Returns:
            bool [B, Hq, Tq, Tk]; None where the last product that was recorded is another.
        """
        if not self.products_seen:
            return None
        shape = torch.Size((*q.shape[:3], k.shape[2]))
        probs, _, result = self.products_seen[-1]
        return (probs != 0).reshape(shape) if (probs.numel(), result.numel()) == (shape.numel(), o.numel()) else None

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
