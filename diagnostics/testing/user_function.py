"""A user's function, and what it is told of a call besides q, k and v: what it has parameters for."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from inspect import Parameter, signature
from typing import Any

import torch
from torch import Tensor

from attn_diag.errors import InputError
from attn_diag.testing.case_inputs import CaseInputs

DROPOUT, SINKS, SLOPES = "dropout_mask", "sinks", "alibi_slopes"
# Mask, window, softcap and scale are a function's own.
_TOLD = (DROPOUT, "dropout_p", SINKS, SLOPES)


@dataclass(frozen=True)
class Function:
    """fn(q, k, v), called as a target's is.

    A parameter ``dropout_mask`` is given which probabilities are kept, bool [B, H, Tq, Tk], and ``dropout_p`` the mean
    number of those that are not; where a call has no dropout, None and 0. ``sinks`` is given the logits of attention
    sinks, [H] fp32, whose gradient is looked at too, and ``alibi_slopes`` ALiBi's, [H] fp32; where there
    are none, None, or what the parameter has by default.
    """

    called: Callable[..., Any]
    """The function."""
    name: str
    """What errors call it."""
    takes: Collection[str]
    """What it is told by name."""
    own: Collection[str] = ()
    """Those of them that it has numbers of its own for, where it is told none."""

    @classmethod
    def of(cls, called: Callable[..., Any], name: str) -> Function:
        """The function with what its own parameters are called; one that cannot be looked into is told nothing."""
        try:
            known = signature(called.forward if isinstance(called, torch.nn.Module) else called).parameters
        except (TypeError, ValueError):
            return cls(called, name, ())
        takes = [told for told in _TOLD if told in known]
        return cls(
            called, name, takes, [n for n in takes if not any(known[n].default is x for x in (None, Parameter.empty))]
        )

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, case: CaseInputs) -> Any:
        """Call it. Raises InputError where the case has dropout and the function takes no mask."""
        if case.dropout_mask is not None and DROPOUT not in self.takes:
            raise InputError(
                f"{self.name} takes no dropout_mask, and a mask that it drew itself would be another: give it a "
                "parameter dropout_mask, bool [B, H, Tq, Tk], True where a probability is kept, and dropout_p"
            )
        mask = None if case.dropout_mask is None else case.dropout_mask.to(q.device, copy=True)
        sinks = None if case.sinks is None else case.sinks.to(q.device)
        slopes = None if case.alibi_slopes is None else case.alibi_slopes.to(q.device, copy=True)
        if slopes is not None and slopes.ndim == 2 and bool((slopes == slopes[:1]).all()):
            slopes = slopes[0]
        told = {DROPOUT: mask, "dropout_p": case.dropout_p or 0.0, SINKS: sinks, SLOPES: slopes}
        kept = [n for n in self.own if told[n] is None]
        return self.called(q, k, v, **{name: told[name] for name in self.takes if name not in kept})
