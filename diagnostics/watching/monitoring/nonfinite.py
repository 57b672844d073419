"""Whether NaN or Inf is a kernel's own: it is in O, dQ, dK or dV of a head, and what went in is finite.

Looked for in whole tensors, of all rows and the whole batch, by their largest size, which takes NaN along; nothing
waits for the device. Rows that see no key may hold anything, so where there may be such (a mask, packed sequences, rows
of other ranks) O and dQ are those of the sampled rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from attn_diag.watching.live.call import AttentionCall
from attn_diag.watching.live.pending import TOTALS


@dataclass(frozen=True)
class Largest:
    """Of each head the largest size in a tensor, [Hq] or [Hk] (of several layers, one after the other); None: unknown.

    NaN and Inf stay what they are.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    bias: Tensor | None
    """[Hq], of mask, sinks and slopes together; -inf hides keys."""
    do: Tensor | None = None
    dq: Tensor | None = None
    dk: Tensor | None = None
    dv: Tensor | None = None

    @classmethod
    def of(cls, call: AttentionCall) -> Largest:
        """Look at what a forward took and gave."""
        with torch.no_grad():
            added = [t for t in (call.mask, call.sinks, call.alibi_slopes) if t is not None and t.is_floating_point()]
            bias = sum((t.amax() for t in added), torch.zeros((), device=call.q.device)) if added else None
            q, k, v, o = (_largest(t) for t in (call.q, call.k, call.v, call.o))
            return cls(q, k, v, o, None if bias is None else bias.expand(call.q.shape[1]))

    def with_gradient(self, call: AttentionCall) -> Largest:
        """Add what a backward took and gave, but for totals over several calls, and over other ranks' rows."""
        if call.do is None or TOTALS in call.notes:
            return self
        # What lies between packed sequences is nobody's.
        whole = call.own is None and call.cu_seqlens_q is None and call.cu_seqlens_k is None
        found = {"do": call.do, "dq": call.dq} | ({"dk": call.dk, "dv": call.dv} if whole else {})
        with torch.no_grad():
            return replace(self, **{name: _largest(t) for name, t in found.items() if t is not None})

    @classmethod
    def stacked(cls, given: Sequence[Largest | None]) -> Largest | None:
        """Of layers that are alike, one after the other; None: of none."""
        if not (those := [one for one in given if one is not None]):
            return None
        each = ([getattr(one, field.name) for one in those] for field in fields(cls))
        return cls(*(None if parts[0] is None else torch.cat(parts) for parts in each))  # type: ignore[arg-type]

    def of_heads(self, heads: slice, key_heads: slice) -> Largest:
        """Of some key heads, and the query heads that share them."""
        parts = {"k": key_heads, "v": key_heads, "dk": key_heads, "dv": key_heads}
        known = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{name: t[parts.get(name, heads)] for name, t in known.items() if t is not None})

    @property
    def known(self) -> tuple[bool, ...]:
        """Which are known."""
        return tuple(getattr(self, field.name) is not None for field in fields(self))

    def made(self, o: Tensor | None, dq: Tensor | None, *, scaled: bool) -> dict[str, Tensor]:
        """Of each result 1 where a query head's holds NaN or Inf and what it is made of does not, else 0; float64 [Hq].

        dK and dV are those of the head's key head; "came": where what went in holds some already, dO included. What is
        not known is NaN. What is a gradient's, and may be a loss scaler's, is 1/2.

        Args:
            scaled: Whether gradients overflow where a loss scaler tries its factor.
            o: Where O's sampled rows hold some, bool [Hq]; None: as its largest size says.
            dq: The same of dQ.
        """
        heads, group = len(self.q), len(self.q) // len(self.k)
        k, v = (_broken(t).repeat_interleave(group) for t in (self.k, self.v))
        forward = _broken(self.q) | k | v
        if self.bias is not None:
            forward = forward | ~(self.bias < torch.inf)
        came = forward if self.do is None else forward | _broken(self.do)
        backward = came | _broken(self.o)
        # A key head's gradients are made of all its query heads'.
        of_keys = backward.view(-1, group).any(1).repeat_interleave(group)
        results = {
            "o": (_broken(self.o) if o is None else o, forward),
            "dq": (dq if dq is not None or self.dq is None else _broken(self.dq), backward),
            "dk": (None if self.dk is None else _broken(self.dk).repeat_interleave(group), of_keys),
            "dv": (None if self.dv is None else _broken(self.dv).repeat_interleave(group), of_keys),
        }
        doubtful = 0.5 if scaled else 1.0
        unknown = torch.full((heads,), torch.nan, dtype=torch.float64, device=self.q.device)
        made = {name: unknown if own is None else (own & ~before).double() for name, (own, before) in results.items()}
        made |= {name: made[name] * doubtful for name in ("dq", "dk", "dv")}
        return made | {"came": torch.maximum(forward.double(), came * doubtful)}


def broken_rows(values: Tensor, counted: Tensor) -> Tensor:
    """Which heads hold NaN or Inf in rows [S, H, R, D] that are ``counted``, bool [S, H, R]."""
    return (counted & ~values.isfinite().all(-1)).any(-1).any(0)


def _largest(tensor: Tensor) -> Tensor:
    """Of [B, H, T, D], for each head."""
    values = tensor.float() if tensor.element_size() == 1 else tensor
    found: Tensor = torch.linalg.vector_norm(values, torch.inf, (0, 2, 3))
    return found


def _broken(largest: Tensor) -> Tensor:
    return ~largest.isfinite()
