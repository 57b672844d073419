"""Calls of FlexAttention in a compiled graph, as the operators behind them tell of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import copy
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from attn_diag.watching.live.flex_graphs import BACKWARD, FORWARD, NAMESPACE, read_function
from attn_diag.watching.live.operator_calls import OperatorBackward, OperatorCall
from attn_diag.watching.live.sites import FLEX
from attn_diag.watching.live.tap import Tap


@cache
def _names(operator: str) -> tuple[str, ...]:
    return tuple(argument.name for argument in torch._C._get_schema(f"{NAMESPACE}::{operator}", "").arguments)


class FlexCall(OperatorCall):
    """One forward.

    Args:
        args: Of the operator behind it.
    """

    def __init__(self, args: tuple[Any, ...]) -> None:
        given = dict(zip(_names(FORWARD), args, strict=True))
        self.about: dict[str, Any] = json.loads(given["about"])
        self._given, self._inputs = given, (given["q"], given["k"], given["v"])
        self._laid_out_o, self.lse, self.module = given["o"], given["lse"], self.about["module"]
        self._differentiable = None

    @property
    def name(self) -> str:
        """The operator's, behind FlexAttention in a compiled graph."""
        return f"{NAMESPACE}::{FORWARD}"

    @property
    def is_cuda(self) -> bool:
        """Whether it ran on a GPU."""
        return self.o.is_cuda

    def copied(self, copy_of: Callable[[Tensor], Tensor], copy_whole: Callable[[Tensor], Tensor]) -> FlexCall:
        """The same call, holding copies instead of any tensor of its own; see ``OperatorCall``."""
        q, k, v = (copy_of(t) for t in self.inputs)
        others = {name: None if (t := self.given[name]) is None else copy_of(t) for name in ("o", "lse", "blocks")}
        copies = {"q": q, "k": k, "v": v, **others}
        found = copy(self)
        found._given = {
            **self.given,
            **copies,
            "token": None,
            "tensors": [copy_whole(t) for t in self.given["tensors"]],
        }
        found._inputs, found._differentiable = (q, k, v), self.differentiable
        found._laid_out_o, found.lse = copies["o"], copies["lse"]
        return found

    @property
    def base_e_lse(self) -> Tensor | None:
        """[B, Hq, Tq]; the kernel's own is in base 2."""
        return None if self.lse is None else self.lse * self.about["lse_unit"]

    def fields(self) -> dict[str, Any]:
        """Everything an ``AttentionCall`` holds; what hides keys is written out as a mask."""
        g, unreadable = self.given, []
        functions = dict[str, Any]()
        tensors, numbers = iter(g["tensors"]), iter(g["numbers"])
        for name in ("score_mod", "mask_mod"):
            if (written := self.about[name]) is not None:
                functions[name] = made = read_function(written, tensors, numbers)
                unreadable += [name] if made is None else []
        blocks = None
        if (hides := functions.get("mask_mod")) is not None:
            # By their number torch tells a mask_mod's arguments from a score_mod's.
            blocks = SimpleNamespace(shape=g["blocks"].shape, mask_mod=lambda b, h, row, key: hides(b, h, row, key))
        given = {"query": g["q"], "key": g["k"], "value": g["v"], "block_mask": blocks, "scale": g["scale"]}
        with _vmap_allowed():
            found = FLEX.read({**given, "score_mod": functions.get("score_mod")}, (self.o, self.base_e_lse), Tap())
        assert found is not None
        del found["graph"]
        if unreadable:
            found["refused"] = f"a {' and a '.join(unreadable)} that cannot be written out"
        return found


def _vmap_allowed() -> Any:
    """Masks are written out by torch.vmap. It is off below a dispatch mode, and torch runs new graphs in one."""
    include, exclude = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    for name in dir(torch._C.DispatchKey):
        if name.startswith("FuncTorch"):
            exclude = exclude.remove(getattr(torch._C.DispatchKey, name))
    return torch._C._ForceDispatchKeyGuard(include, exclude)


def flex_backward(args: tuple[Any, ...]) -> OperatorBackward:
    """One backward, from the arguments of the operator behind it."""
    given = dict(zip(_names(BACKWARD), args, strict=True))
    gradients = [given[name] for name in ("dq", "dk", "dv")]
    return OperatorBackward.known(given["o"], given["lse"], given["do"], gradients, of_lse=given["of_lse"])
