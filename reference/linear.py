"""Linear attention in float64: every operator as a setting of one recurrence, on its own arguments taken as exact.

    setting            decay w        a        b         written to S        scale by default
    rwkv7              e^g [K]        a        b         k v^T               1
    dplr               e^g [K]        a        b         k v^T               1/sqrt(K)
    iplr               1              a        b         k v^T               1/sqrt(K)
    delta_rule         1              k        -beta k   beta k v^T          1/sqrt(K)
    gated_delta_rule   e^g            w o k    -beta k   beta k v^T          1/sqrt(K)
    kda                e^g [K]        w o k    -beta k   beta k v^T          1/sqrt(K)
    gla                e^g [K]        -        -         k v^T               1/sqrt(K)
    simple_gla         e^g            -        -         k v^T               1/sqrt(K)
    retention          1 - 2^(-5-h)   -        -         k v^T               1/sqrt(K)
    linear_attn        1              -        -         k v^T               1/sqrt(K)
    mamba2             e^(dt A)       -        -         dt k v^T            1

g is the logarithm of the decay, [K] where it has one number a channel. Arguments have fla's names (flash-linear-
attention 0.6.0, ``fla.ops``) and its layout, [B, T, H, D] and [B, T, H]; of rwkv7 q is r and g is w there, of dplr and
gla g is gk, of mamba2 (state-space duality, Dao and Gu, arXiv 2405.21060) q is C, k is B and v is x. Heads of q, k
may be fewer than those of v and of everything else (grouped values): each is shared by its group. Sources: RWKV-7,
arXiv 2503.14456, eq. 17; gated delta rule, 2412.06464; KDA, 2510.26692; GLA, 2312.06635; RetNet, 2307.08621.

``l2norm`` divides q and k by sqrt(x.x + 1e-6), as fla's kernels do on request. ``normalize`` divides o by
scale q_t . sum k + 1e-10, which linear_attn does unless told not to: one more column of v, of ones. mamba2's D, where
it is given, adds D v to o (the skip connection that its kernels add before they round).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from attn_diag.reference.bounded import Bounded
from attn_diag.reference.recurrence import SEGMENT, Recurrence, run_recurrence

# Elements of the states of a segment that are worked on at once.
_AT_ONCE = 2**22
_NORM_EPSILON = 1e-6
_NORMALIZE_EPSILON = 1e-10


@dataclass(frozen=True)
class LinearOperator:
    """What an operator's arguments mean in the recurrence."""

    name: str
    """fla's name of the operator, without ``chunk_``."""
    arguments: tuple[str, ...]
    """The names of the tensors that it needs."""
    optional: tuple[str, ...] = ()
    """And of those that it takes."""
    unit_scale: bool = False
    """Whether the scale is 1 by default, instead of 1/sqrt(K)."""

    @property
    def has_delta(self) -> bool:
        """Whether it writes beta k (v - S^T k)^T."""
        return "beta" in self.arguments


LINEAR_OPERATORS = {
    s.name: s
    for s in (
        LinearOperator("rwkv7", ("q", "k", "v", "g", "a", "b"), unit_scale=True),
        LinearOperator("dplr", ("q", "k", "v", "g", "a", "b")),
        LinearOperator("iplr", ("q", "k", "v", "a", "b")),
        LinearOperator("delta_rule", ("q", "k", "v", "beta")),
        LinearOperator("gated_delta_rule", ("q", "k", "v", "g", "beta")),
        LinearOperator("kda", ("q", "k", "v", "g", "beta")),
        LinearOperator("gla", ("q", "k", "v", "g")),
        LinearOperator("simple_gla", ("q", "k", "v"), ("g", "g_gamma")),
        LinearOperator("retention", ("q", "k", "v"), ("g_gamma",)),
        LinearOperator("linear_attn", ("q", "k", "v")),
        LinearOperator("mamba2", ("q", "k", "v", "dt", "A"), ("D",), unit_scale=True),
    )
}
# One number a head.
OF_HEADS = ("g_gamma", "A", "D")


@dataclass(frozen=True)
class LinearCall:
    """One call of an operator."""

    setting: LinearOperator
    """Which."""
    tensors: Mapping[str, Tensor]
    """Its arguments by name, [B, T, H, D], [B, T, H] or [H]; ``initial_state`` [N, H, K, V] where there is one."""
    scale: float | None = None
    """Of o; None: the operator's own."""
    l2norm: bool = False
    """Whether q and k are normalised first."""
    normalize: bool = False
    """Whether o is divided by q . sum k."""
    cu_seqlens: Sequence[int] | None = None
    """Of packed sequences (B is 1): where each begins, and the end. N is their number then, else B."""

    @property
    def used_scale(self) -> float:
        """The scale of o."""
        if self.scale is not None:
            return self.scale
        return 1.0 if self.setting.unit_scale else float(self.tensors["q"].shape[3] ** -0.5)

    @property
    def sequences(self) -> list[tuple[int, slice]]:
        """Batch item and steps of each of the N sequences."""
        q = self.tensors["q"]
        if self.cu_seqlens is None:
            return [(b, slice(0, q.shape[1])) for b in range(q.shape[0])]
        return [(0, slice(i, j)) for i, j in pairwise(self.cu_seqlens)]


@dataclass(frozen=True)
class LinearReference:
    """What is true, by the names of the operator's outputs, and how far it may be off."""

    values: dict[str, Tensor]
    """``o`` [B, T, HV, V], ``final_state`` [N, HV, K, V]; with dO the gradients (``dq``, ``dinitial_state``), shaped as
    their inputs; float64."""
    bounds: dict[str, Tensor]
    """A proven bound of |reference - truth| for each, elementwise; inf where float64 knows nothing."""
    states: list[Tensor]
    """Of each sequence, S before every ``SEGMENT`` steps and at the end, [HV, segments + 1, K, V]."""
    norms: list[Tensor]
    """Of each sequence, at least ||M_t||, [HV, T]."""
    drives: list[Tensor]
    """Of each sequence, ||dL/dS_t||, [HV, T]; empty without dO."""


def linear_reference(call: LinearCall, do: Tensor | None = None, dfinal: Tensor | None = None) -> LinearReference:
    """The operator in float64, and its gradients where ``do`` or ``dfinal`` is given.

    Args:
        call: Its arguments.
        do: dL/do, like o.
        dfinal: dL/d final_state, [N, HV, K, V].
    """
    v, q = call.tensors["v"], call.tensors["q"]
    heads, group = v.shape[2], v.shape[2] // q.shape[2]
    backward = do is not None or dfinal is not None
    values: dict[str, Tensor] = {}
    bounds: dict[str, Tensor] = {}
    found = LinearReference(values, bounds, [], [], [])

    def put(name: str, like: tuple[int, ...], index: tuple[int | slice, ...], part: Bounded) -> None:
        for into, given in ((values, part.value), (bounds, part.settled())):
            target = into.setdefault(name, torch.zeros(like, dtype=torch.float64, device=v.device))
            # Heads of a group, sequences and steps of one number a head add up.
            target[index] += given

    state_shape = (len(call.sequences), heads, q.shape[3], v.shape[3])
    most = max(1, _AT_ONCE // (SEGMENT * q.shape[3] * v.shape[3]) // group) * group
    for n, (b, steps) in enumerate(call.sequences):
        parts = []
        for start in range(0, heads, most):
            of = slice(start, min(start + most, heads))
            shared = slice(of.start // group, of.stop // group)
            head = _Heads(call, n, b, steps, of, shared)
            part = head.run(None if do is None else do[b, steps, of], None if dfinal is None else dfinal[n, of])
            put("o", tuple(v.shape), (b, steps, of), part.outputs["o"].map("transpose", 0, 1))
            put("final_state", state_shape, (n, of), part.outputs["final_state"])
            for name, gradient in part.outputs.items():
                if name == "dinitial_state":
                    put(name, state_shape, (n, of), gradient)
                elif name[1:] in OF_HEADS:
                    put(name, (heads,), (of,), gradient.sum(1))
                elif name not in ("o", "final_state"):
                    given = call.tensors[name[1:]]
                    gradient = gradient if gradient.value.ndim == given.ndim - 1 else gradient.sum(2)
                    where = of if given.shape[2] == heads else shared
                    if given.shape[2] != heads:
                        gradient = gradient.map("unflatten", 0, (-1, group)).sum(1)
                    put(name, tuple(given.shape), (b, steps, where), gradient.map("transpose", 0, 1))
            parts.append(part)
        found.states.append(torch.cat([p.states for p in parts]))
        found.norms.append(torch.cat([p.norms for p in parts]))
        found.drives.append(torch.cat([p.drives for p in parts]) if backward else v.new_zeros(0).double())
    return found


@dataclass
class _Part:
    outputs: dict[str, Bounded]
    states: Tensor
    norms: Tensor
    drives: Tensor


@dataclass
class _Heads:
    """Some heads of one sequence: arguments of the recurrence, and their gradients made those of the operator's."""

    call: LinearCall
    n: int
    b: int
    steps: slice
    of: slice
    shared: slice
    _undo: dict[str, Callable[[Bounded], Bounded]] = field(default_factory=dict)

    def _given(self, name: str) -> Bounded:
        """An argument as [heads, T, D]; D is 1 where it has one number a step."""
        tensor = self.call.tensors[name].double()
        if name in OF_HEADS:
            return Bounded.exact(tensor[self.of, None, None])
        whole = tensor.shape[2] == self.call.tensors["v"].shape[2]
        part = tensor[self.b, self.steps, self.of if whole else self.shared].transpose(0, 1)
        part = part if part.ndim == 3 else part[..., None]
        group = self.call.tensors["v"].shape[2] // tensor.shape[2]
        return Bounded.exact(part.repeat_interleave(group, 0))

    def _normalised(self, name: str) -> Bounded:
        x = self._given(name)
        if not self.call.l2norm:
            return x
        epsilon = Bounded.exact(torch.tensor(_NORM_EPSILON, dtype=torch.float64, device=x.value.device))
        inverse = ((x * x).sum(2, keepdim=True) + epsilon).rsqrt()
        y = x * inverse
        self._undo[name] = lambda dy: inverse * (dy - y * (y * dy).sum(2, keepdim=True))
        return y

    def _decay(self) -> tuple[Bounded, Bounded | None]:
        """w as [heads, T, 1 or K], and dt."""
        call, v = self.call, self._given("v")
        if call.setting.name == "mamba2":
            dt = self._given("dt")
            return (dt * self._given("A")).exp(), dt
        name = next((n for n in ("g", "g_gamma") if n in call.tensors), None)
        if name is not None:
            return self._given(name).exp(), None
        ones = torch.ones_like(v.value[..., :1])
        if call.setting.name == "retention":
            number = torch.arange(self.of.start, self.of.stop, device=ones.device, dtype=torch.float64)
            ones = ones * (1 - 2 ** (-5 - number))[:, None, None]
        return Bounded.exact(ones), None

    def run(self, do: Tensor | None, dfinal: Tensor | None) -> _Part:
        call, delta = self.call, self.call.setting.has_delta
        q, k, v = self._normalised("q"), self._normalised("k"), self._given("v")
        keys, values = q.value.shape[2], v.value.shape[2]
        decay, dt = self._decay()
        w = decay.map("expand", *q.value.shape)
        a, b, written, beta = None, None, k, None
        if delta:
            beta = self._given("beta")
            written = beta * k
            a, b = w * k, -written
        elif "a" in call.setting.arguments:
            a, b = self._given("a"), self._given("b")
        elif dt is not None:
            written = dt * k
        if call.normalize:
            v = Bounded.exact(torch.cat([v.value, torch.ones_like(v.value[..., :1])], 2))
        initial = v.value.new_zeros(len(v.value), keys, v.value.shape[2])
        if "initial_state" in call.tensors:
            initial[..., :values] = call.tensors["initial_state"][self.n, self.of].double()
        recurrence = Recurrence(q, written, v, w, a, b, call.used_scale, initial)
        inner = None if do is None else Bounded.exact(do.transpose(0, 1))
        if call.normalize:
            return self._divided(recurrence, inner, values)
        found = run_recurrence(recurrence, inner, dfinal)
        last = found.states.map("select", 1, -1)
        outputs = {"o": found.o, "final_state": last}
        if found.gradients:
            outputs |= self._pulled_back(found.gradients, k, w, beta, dt)
        if "D" in call.tensors:
            self._skip(outputs, v, inner)
        return _Part(outputs, found.states.value, found.norms, found.drives)

    def _skip(self, outputs: dict[str, Bounded], v: Bounded, do: Bounded | None) -> None:
        """Add D v to o, and what follows to the gradients."""
        skip = self._given("D")
        outputs["o"] = outputs["o"] + skip * v
        if do is not None:
            outputs["dv"] = outputs["dv"] + skip * do
            outputs["dD"] = (do * v).sum(2)

    def _divided(self, recurrence: Recurrence, do: Bounded | None, values: int) -> _Part:
        """O = O' / (l + epsilon), with l the last column."""
        found = run_recurrence(recurrence)
        epsilon = Bounded.exact(recurrence.initial.new_tensor(_NORMALIZE_EPSILON))
        inverse = (found.o.columns(values, values + 1) + epsilon).reciprocal()
        o = found.o.columns(0, values) * inverse
        outputs = {"o": o, "final_state": found.states.map("select", 1, -1).columns(0, values)}
        drives = found.drives
        if do is not None:
            through = [do * inverse, -((do * o).sum(2, keepdim=True) * inverse)]
            bounds = [x.bound.expand_as(x.value) for x in through]
            again = run_recurrence(recurrence, Bounded(torch.cat([x.value for x in through], 2), torch.cat(bounds, 2)))
            core = again.gradients
            core |= {name: core[name].columns(0, values) for name in ("v", "initial")}
            outputs |= self._pulled_back(core, self._given("k"), recurrence.w, None, None)
            drives = again.drives
        return _Part(outputs, found.states.value[..., :values], found.norms, drives)

    def _pulled_back(
        self, core: dict[str, Bounded], k: Bounded, w: Bounded, beta: Bounded | None, dt: Bounded | None
    ) -> dict[str, Bounded]:
        """Gradients of the operator's arguments, by the chain rule."""
        arguments = (*self.call.setting.arguments, *self.call.setting.optional)
        dw, found = core["w"], {"q": core["q"], "k": core["k"], "v": core["v"]}
        if beta is not None:
            found["beta"] = (k * (core["k"] - core["b"])).sum(2)
            found["k"] = w * core["a"] + beta * (core["k"] - core["b"])
            dw = dw + k * core["a"]
        elif "a" in arguments:
            found |= {"a": core["a"], "b": core["b"]}
        dg = w * dw
        if dt is not None:
            of_g = dg.sum(2)
            of_a = self._given("A").map("squeeze", 2)
            found["k"] = dt * core["k"]
            found["dt"] = of_g * of_a + (k * core["k"]).sum(2)
            found["A"] = of_g * dt.map("squeeze", 2)
        elif "g" in self.call.tensors:
            found["g"] = dg
        found |= {name: undo(found[name]) for name, undo in self._undo.items()}
        found["initial_state"] = core["initial"]
        if "initial_state" not in self.call.tensors:
            del found["initial_state"]
        return {f"d{name}": gradient for name, gradient in found.items()}
