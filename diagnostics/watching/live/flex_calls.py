"""Calls of FlexAttention in a compiled graph, as the operators behind them tell of them."""

from __future__ import annotations

from functools import cached_property
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from attn_diag.watching.live.flex_graphs import BACKWARD, FORWARD, NAMESPACE, read_function
from attn_diag.watching.live.operators import FusedOperator, OperatorBackward, OperatorCall
from attn_diag.watching.live.sites import FLEX
from attn_diag.watching.live.tap import Tap

_FLEX = FusedOperator(f"{NAMESPACE}::{FORWARD}", "torch FlexAttention", f"{NAMESPACE}::{BACKWARD}", ("CPU", "CUDA"))


def _arguments(name: str) -> Any:
    return torch._C._get_schema(name, "").arguments


class FlexCall(OperatorCall):
    """One forward.

    Args:
        args: Of the operator behind it.
    """

    def __init__(self, args: tuple[Any, ...]) -> None:
        super().__init__(_FLEX, _arguments(_FLEX.name), args, {}, args[4], args[5])
        self.module = args[13]

    @cached_property
    def base_e_lse(self) -> Tensor | None:
        """[B, Hq, Tq]; the kernel's own is in base 2."""
        return None if self.lse is None else self.lse * self.given["lse_unit"]

    def fields(self) -> dict[str, Any]:
        """Everything an ``AttentionCall`` holds; what hides keys is written out as a mask."""
        g, unreadable = self.given, []
        functions = dict[str, Any]()
        for name in ("score", "mask"):
            if text := g[f"{name}_mod"]:
                made = read_function(text, g[f"{name}_tensors"], g[f"{name}_numbers"])
                functions[name] = made
                unreadable += [f"{name}_mod"] if made is None else []
        blocks = None
        if (hides := functions.get("mask")) is not None:
            # By their number torch tells a mask_mod's arguments from a score_mod's.
            blocks = SimpleNamespace(shape=g["blocks"].shape, mask_mod=lambda b, h, row, key: hides(b, h, row, key))
        given = {"query": g["q"], "key": g["k"], "value": g["v"], "block_mask": blocks, "scale": g["scale"]}
        found = FLEX.read({**given, "score_mod": functions.get("score")}, (self.o, self.base_e_lse), Tap())
        assert found is not None
        del found["graph"]
        if unreadable:
            found["refused"] = f"a {' and a '.join(unreadable)} that cannot be written out"
        return found


def flex_backward(args: tuple[Any, ...]) -> OperatorBackward:
    """One backward.

    Args:
        args: Of the operator behind it.
    """
    return OperatorBackward(_arguments(_FLEX.backward), args, {}, args[7:10])
