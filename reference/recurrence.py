"""The recurrence of linear attention in float64, forward and backward, with a proven bound of its error.

    S_t = S_{t-1} (diag(w_t) + a_t b_t^T) + v_t k_t^T          S [V, K], as papers write it
    o_t = scale S_t q_t

Here S is stored transposed, [K, V], as fla stores it, with M_t = diag(w_t) + b_t a_t^T:

    u_t = a_t^T S_{t-1};  S_t = diag(w_t) S_{t-1} + b_t u_t + k_t v_t^T;  o_t = scale q_t^T S_t

Backward, from do_t and the gradient of the last state: H_t = dL/dS_t, D_T = dL/dS_T given,

    H_t = D_t + scale q_t do_t^T;  D_{t-1} = M_t^T H_t = diag(w_t) H_t + a_t (b_t^T H_t);  dS_0 = D_0
    dq_t = scale S_t do_t          dk_t = H_t v_t              dv_t = H_t^T k_t
    dw_t = rowsum(H_t o S_{t-1})   da_t = S_{t-1} (H_t^T b_t)  db_t = H_t (S_{t-1}^T a_t)

The bound. Column j of S's error is multiplied by M_t and joined by what one step adds: e_t[j] <= ||M_t|| e_{t-1}[j] +
local_t[j], in the 2-norm. ||M_t|| is that of M_t and not of |M_t|, which for a delta rule doubles the bound with every
step where ||M_t|| = 1 (``spectral_norm``). One step (products, two additions; u a sum of K products) adds at most

    local[j] = (g3 max|w| + dw) ||S_j|| + (g3 ||b|| + ||db||) |u_j| + ||b|| ((gK ||a|| + ||da||) ||S_j||)
               + g3 ||k|| |v_j| + ||dk|| |v_j| + ||k|| dv_j,  dw, da, db, dk, dv: how far the arguments may be off

and the gradients likewise; every sum of products adds gamma(n) times the sum of their sizes. Where M_t is larger than
1 the bound grows, as errors may: a bound that is no number says that float64 knows nothing there.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attn_diag.reference.bounded import SLACK, TINY, Bounded, gamma

# Steps between the states that are kept; those between are computed again for the backward.
SEGMENT = 64
# How much more than the largest |w| a norm is said to be at least, and the halvings of a bisection.
_ROOM = 2.0**-30
_HALVINGS = 40


@dataclass(frozen=True)
class Recurrence:
    """The arguments of N recurrences of the same length T, each with the bound of its own error."""

    q: Bounded
    """[N, T, K]."""
    k: Bounded
    """[N, T, K]."""
    v: Bounded
    """[N, T, V]."""
    w: Bounded
    """The decay, [N, T, K]."""
    a: Bounded | None
    """[N, T, K]; None: no rank-one part."""
    b: Bounded | None
    """[N, T, K]; None with ``a``."""
    scale: float
    """Of o."""
    initial: Tensor
    """S_0, [N, K, V]."""


@dataclass(frozen=True)
class RecurrenceResult:
    """What a recurrence gives; every field with its bound."""

    o: Bounded
    """[N, T, V]."""
    states: Bounded
    """S before the first step of every segment, and the last S: [N, segments + 1, K, V]."""
    gradients: dict[str, Bounded]
    """q, k, w, a, b [N, T, K], v [N, T, V], initial [N, K, V] by name; none where there is no dO."""
    norms: Tensor
    """At least ||M_t||, [N, T]."""
    drives: Tensor
    """||H_t||, how much the loss depends on S_t, [N, T]; empty without dO."""


def spectral_norm(w: Tensor, a: Tensor | None, b: Tensor | None) -> Tensor:
    """At least the largest singular value of diag(w) + b a^T; at most 2**-29 more than that or the largest |w|.

    M^T M = W^2 + U C U^T with U = [a, W b] and C = [[b.b, 1], [1, 0]]. For x > max w^2, by Haynsworth's inertia
    formula, x I - M^T M is positive definite if and only if det(C^-1 - U^T (x I - W^2)^-1 U) < 0, that is
    p (b.b + r) < (1 - s)^2, p = sum a^2 / (x - w^2), r = sum (w b)^2 / (x - w^2), s = sum a w b / (x - w^2).
    Bisection keeps an x that passes this with more room than its rounding takes; that of w^2 beside x is the same as a
    change of w by u, which the last factor covers.

    Args:
        w: [..., K].
        a: [..., K]; None: no rank-one part.
        b: [..., K]; None with ``a``.

    Returns:
        [...].
    """
    largest = w.abs().amax(-1)
    if a is None or b is None:
        return largest * SLACK + TINY
    length = torch.linalg.vector_norm(a, dim=-1) * torch.linalg.vector_norm(b, dim=-1)
    low = largest.square() * (1 + _ROOM) + TINY
    high = (largest + length * (1 + _ROOM)).square() * (1 + 2 * _ROOM) + TINY
    wb, square, of_b = w * b, w.square(), b.square().sum(-1)
    margin = 64 * gamma(w.shape[-1])

    def passes(x: Tensor) -> Tensor:
        inverse = (x[..., None] - square).reciprocal()
        p, r = (a.square() * inverse).sum(-1), (wb.square() * inverse).sum(-1)
        s = (a * wb * inverse).sum(-1)
        error = margin * (p * (of_b + r) + (1 + (a * wb).abs().mul(inverse).sum(-1)).square())
        return p * (of_b + r) + error < (1 - s).square()

    high = torch.where(passes(low), low, high)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        fits = passes(middle)
        low, high = torch.where(fits, low, middle), torch.where(fits, middle, high)
    return high.sqrt() * (1 + _ROOM)


def run_recurrence(r: Recurrence, do: Bounded | None = None, dfinal: Tensor | None = None) -> RecurrenceResult:
    """Run the recurrences, and their backward where ``do`` or ``dfinal`` is given.

    Args:
        r: The arguments.
        do: dL/do, [N, T, V].
        dfinal: dL/dS_T, [N, K, V], exact.
    """
    with torch.no_grad(), torch.autocast(r.initial.device.type, enabled=False):
        return _Run(r).result(do, dfinal)


class _Run:
    def __init__(self, r: Recurrence) -> None:
        self.r = r
        given = {"q": r.q, "k": r.k, "v": r.v, "w": r.w} | ({"a": r.a, "b": r.b} if r.a and r.b else {})
        self.x = {name: x.value for name, x in given.items()}
        self.off = {name: x.bound.expand_as(x.value) for name, x in given.items()}
        self.length = r.q.value.shape[1]
        # An empty sequence is one empty segment.
        self.starts = range(0, max(self.length, 1), SEGMENT)
        self.free = "a" in given
        norms = spectral_norm(self.x["w"], self.x.get("a"), self.x.get("b"))
        norms = norms + self.off["w"].amax(-1)
        if self.free:
            (na, ea), (nb, eb) = self._norm("a"), self._norm("b")
            norms = norms + na * eb + nb * ea + ea * eb
        self.norms = norms * SLACK

    def _norm(self, name: str, part: slice = slice(None)) -> tuple[Tensor, Tensor]:
        norm = torch.linalg.vector_norm
        return norm(self.x[name][:, part], dim=-1), norm(self.off[name][:, part], dim=-1)

    def result(self, do: Bounded | None, dfinal: Tensor | None) -> RecurrenceResult:
        r, state = self.r, self.r.initial.double()
        error = torch.zeros_like(state[:, 0])
        kept, kept_errors, outs, bounds = [], [], [], []
        for start in self.starts:
            kept.append(state)
            kept_errors.append(error)
            part = slice(start, min(start + SEGMENT, self.length))
            states, errors = self._states(part, state, error)
            q, off = self.x["q"][:, part, :, None], self.off["q"][:, part, :, None]
            after, after_errors = states[:, 1:], errors[:, 1:]
            outs.append((q * after).sum(2) * r.scale)
            sizes = (q.abs() * after.abs()).sum(2) * gamma(after.shape[2] + 1) + (off * after.abs()).sum(2)
            length = torch.linalg.vector_norm(q, dim=2) + torch.linalg.vector_norm(off, dim=2)
            bounds.append((sizes + length * after_errors) * abs(r.scale))
            state, error = states[:, -1], errors[:, -1]
        kept.append(state)
        kept_errors.append(error)
        o = Bounded(torch.cat(outs, 1), torch.cat(bounds, 1) * SLACK + TINY)
        whole = Bounded(torch.stack(kept, 1), (torch.stack(kept_errors, 1)[:, :, None] * SLACK + TINY))
        if do is None and dfinal is None:
            return RecurrenceResult(o, whole, {}, self.norms, self.norms.new_zeros(0))
        do = Bounded.exact(torch.zeros_like(o.value)) if do is None else do
        gradients, drives = self._backward(do, dfinal, kept, kept_errors)
        return RecurrenceResult(o, whole, gradients, self.norms, drives)

    def _states(self, part: slice, state: Tensor, error: Tensor) -> tuple[Tensor, Tensor]:
        """S before and after every step of a segment, [N, C + 1, K, V], and the errors' norms, [N, C + 1, V]."""
        k, v, w = (self.x[name][:, part] for name in "kvw")
        fixed = k[..., None] * v[:, :, None]
        found, heads = [state], []
        for t in range(w.shape[1]):
            state = w[:, t, :, None] * found[-1]
            if self.free:
                head = self.x["a"][:, part][:, t, None] @ found[-1]
                heads.append(head[:, 0])
                state = state + self.x["b"][:, part][:, t, :, None] * head
            found.append(state + fixed[:, t])
        states = torch.stack(found, 1)
        sizes = torch.linalg.vector_norm(states[:, :-1], dim=2)
        (nk, ek), g3 = self._norm("k", part), gamma(3)
        local = (g3 * w.abs().amax(-1) + self.off["w"][:, part].amax(-1))[..., None] * sizes
        local += (g3 * nk + ek)[..., None] * v.abs() + (nk + ek)[..., None] * self.off["v"][:, part]
        if self.free:
            (na, ea), (nb, eb) = self._norm("a", part), self._norm("b", part)
            local += (g3 * nb + eb)[..., None] * (torch.stack(heads, 1).abs() if heads else sizes)
            local += ((nb + eb) * (gamma(w.shape[2]) * na + ea))[..., None] * sizes
        return states, self._carried(local * SLACK + TINY, self.norms[:, part], error)

    @staticmethod
    def _carried(local: Tensor, norms: Tensor, error: Tensor) -> Tensor:
        errors = [error]
        for t in range(norms.shape[1]):
            errors.append(norms[:, t, None] * errors[-1] + local[:, t])
        return torch.stack(errors, 1)

    def _backward(
        self, do: Bounded, dfinal: Tensor | None, kept: list[Tensor], kept_errors: list[Tensor]
    ) -> tuple[dict[str, Bounded], Tensor]:
        drive = torch.zeros_like(kept[0]) if dfinal is None else dfinal.double()
        error = torch.zeros_like(kept_errors[0])
        parts: list[dict[str, Bounded]] = []
        sizes: list[Tensor] = []
        for i in reversed(range(len(self.starts))):
            part = slice(self.starts[i], min(self.starts[i] + SEGMENT, self.length))
            states, errors = self._states(part, kept[i], kept_errors[i])
            drives, drive_errors, drive, error = self._drives(part, do, drive, error)
            before, after = (Bounded(states[:, s], errors[:, s, None]) for s in (slice(-1), slice(1, None)))
            parts.insert(0, self._gradients(part, do, before, after, Bounded(drives, drive_errors[:, :, None])))
            sizes.insert(0, torch.linalg.vector_norm(drives, dim=(2, 3)))
        found = {}
        for name in parts[0]:
            bound = torch.cat([p[name].bound for p in parts], 1)
            found[name] = Bounded(torch.cat([p[name].value for p in parts], 1), bound * SLACK + TINY)
        found["initial"] = Bounded(drive, (error[:, None] * SLACK + TINY).expand_as(drive))
        return found, torch.cat(sizes, 1)

    def _drives(self, part: slice, do: Bounded, drive: Tensor, error: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """H of every step of a segment and the norms of its columns' errors, then D and its error before it."""
        w, q, scale = self.x["w"][:, part], self.x["q"][:, part], self.r.scale
        nq, eq = self._norm("q", part)
        given, given_off = do.value[:, part], do.bound.expand_as(do.value)[:, part]
        fixed = (q * scale)[..., None] * given[:, :, None]
        g3 = gamma(3)
        of_w = g3 * w.abs().amax(-1) + self.off["w"][:, part].amax(-1)
        of_o = abs(scale) * ((g3 * nq + eq)[..., None] * given.abs() + (nq + eq)[..., None] * given_off)
        if self.free:
            a, b = self.x["a"][:, part], self.x["b"][:, part]
            (na, ea), (nb, eb) = self._norm("a", part), self._norm("b", part)
            of_w = of_w + (na + ea) * (gamma(w.shape[2]) * nb + eb) + (g3 * na + ea) * (nb + eb) * SLACK
        norm = torch.linalg.vector_norm
        drives: list[Tensor] = []
        errors: list[Tensor] = []
        for t in reversed(range(w.shape[1])):
            whole = drive + fixed[:, t]
            error = error + of_o[:, t] + g3 * norm(whole, dim=1)
            drives.insert(0, whole)
            errors.insert(0, error)
            drive = w[:, t, :, None] * whole
            if self.free:
                drive = drive + a[:, t, :, None] * (b[:, t, None] @ whole)
            error = self.norms[:, part][:, t, None] * error + of_w[:, t, None] * norm(whole, dim=1) + TINY
        if not drives:
            return fixed, of_o, drive, error
        return torch.stack(drives, 1), torch.stack(errors, 1), drive, error

    def _gradients(
        self, part: slice, do: Bounded, before: Bounded, after: Bounded, drives: Bounded
    ) -> dict[str, Bounded]:
        one = {name: Bounded(x[:, part], self.off[name][:, part]) for name, x in self.x.items()}
        scaled = do.value[:, part] * self.r.scale
        off = do.bound.expand_as(do.value)[:, part] * abs(self.r.scale)
        found = {
            "q": _times_row(after, Bounded(scaled, off + gamma(2) * scaled.abs() + TINY)),
            "k": _times_row(drives, one["v"]),
            "v": _times_column(drives, one["k"]),
            "w": _rows_of_product(drives, before),
        }
        if self.free:
            found["a"] = _times_row(before, _times_column(drives, one["b"]))
            found["b"] = _times_row(drives, _times_column(before, one["a"]))
        return found


def _times_row(matrix: Bounded, row: Bounded) -> Bounded:
    """Matrix [N, C, K, V] times row [N, C, V] -> [N, C, K]; its bound is a norm of each column, [N, C, 1, V]."""
    off = row.bound.expand_as(row.value)
    sizes = row.value.abs()
    moved = matrix.value.abs() @ (off + gamma(row.value.shape[2] + 1) * sizes)[..., None]
    moved = moved[..., 0] + (matrix.bound[:, :, 0] * (sizes + off)).sum(2, keepdim=True)
    return Bounded((matrix.value @ row.value[..., None])[..., 0], moved)


def _times_column(matrix: Bounded, column: Bounded) -> Bounded:
    """The transpose of matrix [N, C, K, V] times column [N, C, K] -> [N, C, V]."""
    off = column.bound.expand_as(column.value)
    norm = torch.linalg.vector_norm
    moved = matrix.value.mT.abs() @ (off + gamma(column.value.shape[2] + 1) * column.value.abs())[..., None]
    length = norm(column.value, dim=2) + norm(off, dim=2)
    moved = moved[..., 0] + matrix.bound[:, :, 0] * length[..., None]
    return Bounded((matrix.value.mT @ column.value[..., None])[..., 0], moved)


def _rows_of_product(one: Bounded, other: Bounded) -> Bounded:
    """Sums over V of the elementwise product of two matrices [N, C, K, V] -> [N, C, K]."""
    a, b = one.value.abs(), other.value.abs()
    moved = (a @ other.bound.mT)[..., 0] + (b @ one.bound.mT)[..., 0]
    moved = moved + (one.bound * other.bound).sum((2, 3))[..., None] + gamma(a.shape[3] + 1) * (a * b).sum(3)
    return Bounded((one.value * other.value).sum(3), moved)
