"""Attention in methods: of FlashInfer's wrappers, and of transformers' models with ALiBi, BLOOM and MPT.

The latter have a bias of one number a head and key, slope j or slope (j - (Tk - 1)), rounded as the model does. It is
kept so, [B, H, 1, Tk], beside a causal mask; written out for every row only where the mask is no causal one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from attn_diag.reference import Masking, hides
from attn_diag.watching.live.kernels import loaded, operators
from attn_diag.watching.live.sites import AttentionSite, Fields, Function, with_dropout
from attn_diag.watching.live.tap import Tap


class MethodSpace(dict[str, Any]):
    """A method of a class as a namespace: what is put there is put into the class."""

    def __init__(self, owner: type, name: str) -> None:
        super().__init__({name: vars(owner)[name]})
        self._owner = owner

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        setattr(self._owner, name, value)


def method_spaces() -> Iterator[MethodSpace]:
    """Those of the classes that are loaded."""
    for where in (*_SITES, *(o.name for o in operators() if o.is_function)):
        module, _, bare = where.partition(":")
        owner, _, name = bare.rpartition(".")
        found = getattr(sys.modules.get(module), owner, None) if owner else None
        if isinstance(found, type) and name in vars(found):
            yield MethodSpace(found, name)


def methods() -> Iterator[tuple[AttentionSite, Function]]:
    """Every method that is loaded now and that no operator is declared for."""
    for where, site in _SITES.items():
        if (method := loaded(where)) is not None:
            yield site, method


def _read_bloom(a: Mapping[str, Any], result: Any, tap: Tap) -> Fields | None:  # noqa: ARG001 - one protocol
    module, alibi = a["self"], a["alibi"]
    heads = module.num_heads
    if (found := tap.around_softmax(len(a["hidden_states"]), heads)) is None:
        return None
    dropout = module.attention_dropout.p if module.training else 0.0
    found = with_dropout({"kernel": "transformers BLOOM eager", **found}, dropout, tap)
    bias = alibi.detach().reshape(-1, heads, 1, alibi.shape[-1])
    return found | {"scale": module.inv_norm_factor} | _masked(bias, a["attention_mask"], found["q"], torch.add)


def _read_mpt(a: Mapping[str, Any], result: Any, tap: Tap) -> Fields | None:  # noqa: ARG001 - one protocol
    module, bias, mask = a["self"], a["position_bias"], a["attention_mask"]
    if (found := tap.around_softmax(len(a["hidden_states"]), module.n_heads)) is None:
        return None
    dropout = module.attn_dropout_p if module.training else 0.0
    found = with_dropout({"kernel": "transformers MPT eager", **found}, dropout, tap)
    q, k = found["q"], found["k"]
    found["scale"] = module.softmax_scale
    if bias is None:
        return found | {"mask": None if mask is None else ~mask}

    def fill(bias: Tensor, hidden: Tensor) -> Tensor:
        return torch.where(hidden, torch.finfo(q.dtype).min, bias)

    masked = _masked(bias.detach()[None, ..., -k.shape[2] :], mask, q, fill)
    if masked["causal"] == "none" and mask is not None and bool(mask.all(-1).any()):
        found["refused"] = found.get("refused") or (
            "a row that sees no key (padding on the left): MPT gives it the mean of all V, and its scores no gradient; "
            "pad on the right"
        )
    return found | masked


def _masked(bias: Tensor, mask: Tensor | None, q: Tensor, combined: Callable[[Tensor, Tensor], Tensor]) -> Fields:
    """A bias by key and what a mask hides.

    Args:
        bias: [B or 1, H, 1, Tk].
        mask: [B or 1, 1, Tq, Tk], additive or bool (True hides); None: nothing is hidden.
        q: [B, H, Tq, D].
        combined: Both as the model adds them, where the mask is not causality and hidden keys.

    Returns:
        mask and causal of the call.
    """
    if mask is None:
        return {"mask": bias, "causal": "none"}
    hidden = mask if mask.dtype == torch.bool else hides(mask)
    rows, keys = q.shape[2], bias.shape[-1]
    masking = Masking("bottom-right")
    later = masking.hidden(masking.row_positions(rows, keys, q.device), slice(0, keys))
    assert later is not None
    padding = hidden[..., -1:, :]
    # The first row sees a key: one without any is not left out here, but sees all alike.
    causal = (hidden == (later | padding)).all() & ~(later[0] | padding).all(-1).any()
    plain = mask.dtype == torch.bool or bool((mask.masked_fill(hidden, 0.0) == 0).all())
    if not plain or not bool(causal):
        return {"mask": combined(bias, mask), "causal": "none"}
    whole = bias.expand(max(len(bias), len(padding)), -1, -1, -1)
    return {"mask": whole.masked_fill(padding, -torch.inf) if bool(padding.any()) else bias, "causal": "bottom-right"}


_SITES = {
    "transformers.models.bloom.modeling_bloom:BloomAttention.forward": AttentionSite(
        "transformers BLOOM", _read_bloom, tapped=True
    ),
    "transformers.models.mpt.modeling_mpt:MptAttention.forward": AttentionSite(
        "transformers MPT", _read_mpt, tapped=True
    ),
}
