"""How the forward's error reaches the gradients: delta, LSE, and the casts of a fused backward.

With D_delta and D_L the signed errors of delta and LSE of the query rows, and w = exp(-D_L) - 1 (-D_L to first
order; the exact factor makes the parts add up):

    from delta    dQ: -alpha diag(D_delta) P K       dK: -alpha (diag(D_delta) P)^T Q
    from LSE      dQ: diag(w) (dQ + delta's part)    dK: alpha (diag(w) (dS - diag(D_delta) P))^T Q
                  dV: (diag(w) P)^T dO
    casts         dS' = cast(exp(S - L_obs) o (dP - delta_obs));  dQ' = cast(alpha dS' K);  dK' = cast(alpha dS'^T Q)
                  P' = cast(exp(S - L_obs));  dV' = cast(P'^T dO)

FlashAttention-2 and FlexAttention cast dS, cuDNN casts alpha dS: other bits where alpha is no power of two. What a
kernel does is read off its dQ.

With softcap P in the delta terms becomes P o (1 - (S/c)^2). The delta identity is Qiu & Yao's, arXiv 2510.04212,
section 3.2. dW_Q = sum over rows of dQ (x) x carries every part over linearly, and so does the transposed Jacobian of
what may lie between (``head.pullback``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from attn_diag.captures.latent import of_latent
from attn_diag.reference import (
    AttentionHead,
    FloatFormat,
    HeadReference,
    RowBlock,
    reference_rows,
    round_nearest_even,
)

_NARROW = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class ForwardErrors:
    """What the backward was fed: delta and LSE of one observation and head, [Tq] float64, and the cast's format.

    ``delta_error`` = observed - reference; ``lse`` and ``lse_error`` None where LSE was not captured. ``dq`` [Tq, D]
    is what it returned, None where unknown.
    """

    delta: Tensor
    delta_error: Tensor
    lse: Tensor | None
    lse_error: Tensor | None
    cast: FloatFormat
    dq: Tensor | None = None


@dataclass
class GradientParts:
    """One gradient's reference, observation and the predicted parts of its error; tensors of one shape.

    ``parts`` holds the additive contributions by name, None where unknown; ``predicted`` the gradient that
    delta, LSE and all casts together predict.
    """

    reference: Tensor
    observed: Tensor | None
    parts: dict[str, Tensor | None]
    predicted: Tensor | None

    def map(self, function: Callable[[Tensor], Tensor]) -> GradientParts:
        """Every tensor that is known through a linear ``function``."""

        def apply(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else function(tensor)

        parts = {name: apply(part) for name, part in self.parts.items()}
        return GradientParts(function(self.reference), apply(self.observed), parts, apply(self.predicted))


class BackwardCollector:
    """Gathers, block by block, the T x T products that the predictions of dQ, dK and dV need.

    ``want_casts``: follow the casts too. ``want_keys``: also dK and dV.
    """

    def __init__(self, head: AttentionHead, errors: ForwardErrors, *, want_casts: bool, want_keys: bool) -> None:
        assert head.do is not None
        self.head, self.errors = head, errors
        self._want_casts = want_casts
        # Whether alpha dS is cast, which the first block tells.
        self._alpha_first = None if errors.dq is not None and math.frexp(head.scale)[0] != 0.5 else False
        self.wanted = {
            "dq_cast": want_casts,
            "dk_delta": want_keys,
            "dk_lse": want_keys and errors.lse is not None,
            "dv_lse": want_keys and errors.lse is not None,
            "dk_cast": want_keys and want_casts,
            "dv_cast": want_keys and want_casts,
        }
        """Which of these are made; the others stay None."""
        self.dq_cast: Tensor | None = None
        self.dk_delta: Tensor | None = None
        self.dk_lse: Tensor | None = None
        self.dv_lse: Tensor | None = None
        self.dk_cast: Tensor | None = None
        self.dv_cast: Tensor | None = None

    def begin(self) -> None:
        """To be called before blocks come; the kernels bring their own."""
        shapes = {"dq": self.head.q.shape, "dk": self.head.k.shape, "dv": self.head.v.shape}
        for name in (n for n, wanted in self.wanted.items() if wanted):
            setattr(self, name, self.head.q.new_zeros(shapes[name[:2]]))

    def add(self, block: RowBlock) -> None:
        """Take one block of the reference, backward included."""
        assert block.unnormalised_dscores is not None
        assert self.head.do is not None
        rows, keys = block.rows, block.keys
        scaled_q = self.head.q[rows] * self.head.scale
        delta_error = self.errors.delta_error[rows]
        if self.dk_delta is not None:
            weight = (delta_error * block.inverse_row_sum)[:, None]
            self.dk_delta[keys] -= sloped(block, block.unnormalised_probs).T @ (scaled_q * weight)
        if self.dk_lse is not None and self.dv_lse is not None and self.errors.lse_error is not None:
            factor = torch.expm1(-self.errors.lse_error[rows])[:, None]
            probs = block.probs
            moved = block.unnormalised_dscores * block.inverse_row_sum[:, None] - sloped(
                block, probs * delta_error[:, None]
            )
            self.dk_lse[keys] += moved.T @ (scaled_q * factor)
            self.dv_lse[keys] += self.head.drop(probs, rows, keys).T @ (self.head.do[rows] * factor)
        if not self._want_casts:
            return
        dscores, factor = self._fed(block)
        dscores = self._cast_dscores_(dscores, rows, keys)
        if self.dq_cast is not None:
            self.dq_cast[rows] = dscores @ self.head.k[keys]
        if self.dk_cast is not None and self.dv_cast is not None:
            self.dk_cast[keys] += dscores.T @ self.head.q[rows]
            probs = _kernel_cast_(block.unnormalised_probs * factor[:, None], self.errors.cast)
            self.dv_cast[keys] += self.head.drop(probs, rows, keys).T @ self.head.do[rows]

    def _fed(self, block: RowBlock) -> tuple[Tensor, Tensor]:
        """dS of a backward that is fed with the captured O and LSE, before it is cast, and what makes P of P_bar."""
        assert block.unnormalised_dscores is not None
        # dS_obs = exp(-D_L) (dS - D_delta P), and P = P_bar / l: two passes, no second exponential.
        delta_error, probs = self.errors.delta_error[block.rows], sloped(block, block.unnormalised_probs)
        dscores = torch.addcmul(block.unnormalised_dscores, probs, delta_error[:, None], value=-1)
        factor = block.inverse_row_sum
        if self.errors.lse_error is not None:
            factor = factor * torch.exp(-self.errors.lse_error[block.rows])
        return dscores.mul_(factor[:, None]), factor

    def look(self, rows: Tensor) -> None:
        """Read off a few rows whether alpha dS is cast."""
        block = reference_rows(self.head, rows)
        self._cast_dscores_(self._fed(block)[0], rows, block.keys)

    def _cast_dscores_(self, dscores: Tensor, rows: slice | Tensor, keys: slice) -> Tensor:
        """alpha times dS [R, K] as it was cast; in place."""

        def cast_(values: Tensor, *, alpha_first: bool) -> Tensor:
            alpha, fmt = self.head.scale, self.errors.cast
            return _kernel_cast_(values.mul_(alpha), fmt) if alpha_first else _kernel_cast_(values, fmt).mul_(alpha)

        if self._alpha_first is None and self.errors.dq is not None:
            off = [
                (cast_(dscores.clone(), alpha_first=first) @ self.head.k[keys] - self.errors.dq[rows]).norm()
                for first in (False, True)
            ]
            self._alpha_first = bool(off[1] < off[0]) if off[0] != off[1] else None  # no gradient in these rows
        return cast_(dscores, alpha_first=bool(self._alpha_first))


def _kernel_cast_(x: Tensor, fmt: FloatFormat) -> Tensor:
    """Round float64 in place as a fused kernel does, from its fp32 value. The second rounding is the kernel's own."""
    narrow = _NARROW.get(fmt.name)
    return round_nearest_even(x, fmt) if narrow is None else x.copy_(x.float().to(narrow))


def sloped(block: RowBlock, values: Tensor) -> Tensor:
    """``values`` [R, K] times the slope 1 - (S/c)^2 of a softcap c; unchanged without one."""
    return values if block.slope is None else values * block.slope


def dq_parts(
    scale: float,
    dq: Tensor,
    probs_k: Tensor,
    delta_error: Tensor,
    lse_error: Tensor | None,
    dq_cast: Tensor | None,
    observed: Tensor | None,
    observed_format: FloatFormat | None,
) -> GradientParts:
    """The parts of dQ's error, of one head or of H side by side.

    Args:
        scale: alpha.
        dq: The true one, [..., n, D].
        probs_k: P K, [..., n, D].
        delta_error, lse_error: As of ``ForwardErrors``, [..., n].
        dq_cast: As of ``BackwardCollector``, [..., n, D]; None: unknown.
        observed: The kernel's dQ, [..., n, D]; None: unknown.
        observed_format: Its format.
    """
    delta = probs_k * (-scale * delta_error)[..., None]
    lse = None
    if lse_error is not None:
        lse = torch.expm1(-lse_error)[..., None] * (dq + delta)
    parts: dict[str, Tensor | None] = {"delta": delta, "lse": lse, "ds_cast": None, "dq_cast": None}
    predicted = None
    if dq_cast is not None and observed_format is not None:
        predicted = round_nearest_even(dq_cast, observed_format)
        uncast = dq + delta + (0.0 if lse is None else lse)
        parts["ds_cast"] = dq_cast - uncast
        parts["dq_cast"] = predicted - dq_cast
    return GradientParts(dq, observed, parts, predicted)


@dataclass(frozen=True)
class KeyShare:
    """What a query head adds to dK and dV of its key head: [Tk, D] and [Tk, Dv], or of N heads, [N, ...]."""

    dk: Tensor | None
    """Its part of dK."""
    dv: Tensor | None
    """Of dV."""
    dk_delta: Tensor | None = None
    """As of ``BackwardCollector``, as the next four; None where it is not known."""
    dk_lse: Tensor | None = None
    dv_lse: Tensor | None = None
    dk_cast: Tensor | None = None
    dv_cast: Tensor | None = None

    @classmethod
    def of(cls, reference: HeadReference, collected: BackwardCollector | None) -> KeyShare:
        """Of one head."""
        predicted = {} if collected is None else {name: getattr(collected, name) for name in _PREDICTED}
        return cls(reference.dk, reference.dv, **predicted)

    @classmethod
    def stacked(cls, several: Sequence[KeyShare]) -> KeyShare:
        """Of several that hold the same."""
        columns = ([getattr(one, f.name) for one in several] for f in fields(cls))
        return cls(*(None if column[0] is None else torch.stack(column) for column in columns))


_PREDICTED = ("dk_delta", "dk_lse", "dv_lse", "dk_cast", "dv_cast")


def key_parts(
    shares: Sequence[KeyShare], observed: Mapping[str, Tensor], formats: Mapping[str, FloatFormat]
) -> dict[str, GradientParts]:
    """The parts of dK's and dV's errors of one key head, or of N: query heads' contributions added up.

    ``observed`` and ``formats`` by "dk", "dv" and, of a latent that k and v share, "dkv", which has no parts.
    """
    results: dict[str, GradientParts] = {}
    for name, operand in (("dk", "ds_cast"), ("dv", "p_cast")):
        reference = _total(getattr(s, name) for s in shares)
        assert reference is not None
        parts: dict[str, Tensor | None] = {} if name == "dv" else {"delta": _total(s.dk_delta for s in shares)}
        parts["lse"] = _total(getattr(s, f"{name}_lse") for s in shares)
        uncast = sum((p for p in parts.values() if p is not None), start=reference)
        cast = _total(getattr(s, f"{name}_cast") for s in shares)
        predicted = None
        if cast is not None and name in formats:
            predicted = round_nearest_even(cast, formats[name])
            parts |= {operand: cast - uncast, f"{name}_cast": predicted - cast}
        results[name] = GradientParts(reference, observed.get(name), parts, predicted)
    if "dkv" in observed:
        casts = [None if s.dk_cast is None or s.dv_cast is None else of_latent(s.dk_cast, s.dv_cast) for s in shares]
        cast = _total(casts)
        predicted = None if cast is None else round_nearest_even(cast, formats["dkv"])
        reference = of_latent(results["dk"].reference, results["dv"].reference)
        results["dkv"] = GradientParts(reference, observed["dkv"], {}, predicted)
    return results


def project(parts: GradientParts, x: Tensor) -> GradientParts:
    """dQ's parts carried over to dW_Q: every [n, D] tensor t becomes t^T x, [D, C]; ``x`` [n, C] float64."""
    names = list(parts.parts)
    stack = [parts.reference, parts.observed, parts.predicted, *(parts.parts[name] for name in names)]
    known = [t for t in stack if t is not None]
    products = iter(torch.split(torch.cat(known, 1).T @ x, [t.shape[1] for t in known]))
    reference, observed, predicted, *rest = (None if t is None else next(products) for t in stack)
    assert reference is not None
    return GradientParts(reference, observed, dict(zip(names, rest, strict=True)), predicted)


def add_parts(parts: list[GradientParts]) -> GradientParts:
    """Elementwise sums, for gradients to which several sequences contribute."""
    reference = _total(p.reference for p in parts)
    assert reference is not None
    of_parts = {name: _total(p.parts[name] for p in parts) for name in parts[0].parts}
    return GradientParts(reference, _total(p.observed for p in parts), of_parts, _total(p.predicted for p in parts))


def _total(tensors: Iterable[Tensor | None]) -> Tensor | None:
    """The elementwise sum; None if one of them is, or there are none."""
    found = list(tensors)
    known = [t for t in found if t is not None]
    return torch.stack(known).sum(0) if known and len(known) == len(found) else None
