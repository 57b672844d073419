"""The predictions of dQ, dK and dV of many heads at once, by the float64 kernels; see ``propagation``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce

import torch
from torch import Tensor

from attn_diag.head.propagation import BackwardCollector
from attn_diag.reference.fused import FusedHeads
from attn_diag.reference.fused_products import Cast, KeyProduct, RowProduct, TileWeight

# From so many scores of a head on a few of its rows tell which cast a kernel makes, before all of them are computed.
_LONG, _LOOKED_AT = 2**28, 64


def ask_backward(collectors: Sequence[BackwardCollector], fused: FusedHeads) -> Callable[[], Callable[[], None]]:
    """Ask the kernels for what every head's collector gathers of blocks; the formulas are those of ``add``.

    Args:
        collectors: Of the heads of ``fused``, in their order, that want the same of one observation.
        fused: The heads.

    Returns:
        What takes that of query rows and asks for that of keys; it returns what lets the collectors take all.
    """
    first, inverse = collectors[0], fused.inverse
    errors = [c.errors for c in collectors]
    delta_error = torch.stack([e.delta_error for e in errors])
    lse_error = None
    if first.errors.lse_error is not None:
        lse_error = torch.stack([e.lse_error for e in errors if e.lse_error is not None])
    factor = inverse if lse_error is None else inverse * torch.exp(-lse_error)
    cast: Cast = "fp16" if first.errors.cast.name == "fp16" else "bf16"
    orders: list[bool | None] = []
    asked: dict[bool, RowProduct] = {}
    if first.wanted["dq_cast"]:
        length = len(first.head.q)
        if first._alpha_first is None and length * len(first.head.k) >= _LONG:
            rows = torch.linspace(0, length - 1, min(length, _LOOKED_AT), device=inverse.device).long()
            for collector in collectors:
                collector.look(rows)
        orders = [c._alpha_first for c in collectors]
        tried = (False, True) if None in orders else sorted({order is True for order in orders})
        asked = {
            alpha_first: fused.ask(TileWeight("dscores_cast", cast, alpha_first), None, factor, delta_error)
            for alpha_first in tried
        }

    def take() -> Callable[[], None]:
        found = dict[str, Tensor]()
        both = {alpha_first: fused.take(product) for alpha_first, product in asked.items()}
        chosen = [
            _casts_alpha(e.dq, both[False][i], both[True][i]) if order is None else order
            for i, (e, order) in enumerate(zip(errors, orders, strict=bool(asked)))
        ]
        if both:
            found["dq_cast"] = _chosen(both, chosen)
        casts, of_keys = dict[bool, KeyProduct](), dict[str, list[KeyProduct]]()
        if first.wanted["dk_cast"] and fused.do is not None:
            casts = {
                alpha_first: fused.ask_keys(TileWeight("dscores_cast", cast, alpha_first), fused.q, factor, delta_error)
                for alpha_first in sorted(set(chosen))
            }
            of_keys["dv_cast"] = [fused.ask_keys(TileWeight("probs_cast", cast), fused.do, factor)]
        of_keys |= _ask_of_errors(first, fused, delta_error, lse_error)

        def finish() -> None:
            if casts:
                found["dk_cast"] = _chosen({order: fused.take_keys(one) for order, one in casts.items()}, chosen)
            for name, products in of_keys.items():
                found[name] = reduce(torch.add, map(fused.take_keys, products))
            for i, collector in enumerate(collectors):
                for name, values in found.items():
                    setattr(collector, name, values[i])

        return finish

    return take


def _ask_of_errors(
    first: BackwardCollector, fused: FusedHeads, delta_error: Tensor, lse_error: Tensor | None
) -> dict[str, list[KeyProduct]]:
    """Ask for what the errors of delta and LSE, [H, Tq], make of dK and dV: by name summands, as far as wanted."""
    assert fused.do is not None
    scaled, found = fused.inverse * first.head.scale, dict[str, list[KeyProduct]]()
    dscores, sloped, probs = TileWeight("dscores"), TileWeight("sloped"), TileWeight("probs")
    if first.wanted["dk_delta"]:
        found["dk_delta"] = [fused.ask_keys(sloped, fused.q, times=-delta_error * scaled)]
    if first.wanted["dk_lse"] and lse_error is not None:
        moved = torch.expm1(-lse_error)
        found["dk_lse"] = [
            fused.ask_keys(dscores, fused.q, times=scaled * moved),
            fused.ask_keys(sloped, fused.q, times=-delta_error * scaled * moved),
        ]
        found["dv_lse"] = [fused.ask_keys(probs, fused.do, times=fused.inverse * moved)]
    return found


def _chosen(by_order: Mapping[bool, Tensor], chosen: Sequence[bool]) -> Tensor:
    """Of every head that of its order."""
    return torch.stack([by_order[alpha_first][i] for i, alpha_first in enumerate(chosen)])


def _casts_alpha(dq: Tensor | None, after: Tensor, before: Tensor) -> bool:
    """Whether the kernel's dQ is nearer to that of alpha dS cast (``before``) than to alpha times dS cast."""
    return dq is not None and bool((before - dq).norm() < (after - dq).norm())
