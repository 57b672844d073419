"""A chunked kernel of linear attention, emulated: fp32 arithmetic in torch, rounded at the sites of a recipe.

A chunk's steps see each other through scores (decayed, lower triangular), and everything before through the state h:

    u = v, or of a delta rule T (beta v - beta k e^g h), T = (I + tril(beta k k^T D, -1))^-1, D_ij = e^(g_i - g_j)
    o = scale (q e^g h + tril(q k^T D) u);   h' = e^(g_last) h + (k e^(g_last - g))^T u

with g the sum of the chunk's log decays up to a step, and for free a, b one more such pair of keys b and values a^T S.
The order of products and what is rounded between them are those of flash-linear-attention 0.6.0 (``fla.ops``:
common/chunk_h, chunk_delta_h, chunk_o, gla/chunk, kda, generalized_delta_rule/dplr). Gradients are those of this
computation, operands of their products rounded alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attn_diag.kernels.linear_recipe import LinearFault, LinearFormat, LinearRecipe

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_EPSILON = 1e-10


def rounded_to(x: Tensor, fmt: LinearFormat) -> Tensor:
    """fp32 -> ``fmt``, to nearest even, as fp32."""
    return x if fmt == "fp32" else x.to(_DTYPES[fmt]).float()


class _Stored(torch.autograd.Function):
    """A value, and its gradient, kept in a format."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, fmt: LinearFormat) -> Tensor:
        ctx.fmt = fmt
        return rounded_to(x, fmt)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return rounded_to(gradients[0], ctx.fmt), None


class _Product(torch.autograd.Function):
    """A matrix product whose operands are rounded first, forward and backward, and its result too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, operands: LinearFormat, result: LinearFormat) -> Tensor:
        x, y = rounded_to(x, operands), rounded_to(y, operands)
        ctx.save_for_backward(x, y)
        ctx.formats = operands, result
        return rounded_to(x @ y, result)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, y = ctx.saved_tensors
        operands, result = ctx.formats
        given = rounded_to(gradients[0], operands)
        return rounded_to(given @ y.mT, result), rounded_to(x.mT @ given, result), None, None


class _Inverse(torch.autograd.Function):
    """(I + L)^-1 of strictly lower triangular L, in fp32; its gradient by two products."""

    @staticmethod
    def forward(ctx: Any, lower: Tensor, operands: LinearFormat) -> Tensor:
        one = torch.eye(lower.shape[-1], device=lower.device).expand_as(lower)
        inverse: Tensor = torch.linalg.solve_triangular(one + lower, one, upper=False, unitriangular=True)
        ctx.save_for_backward(rounded_to(inverse, operands))
        ctx.operands = operands
        return inverse

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (inverse,) = ctx.saved_tensors
        inner = rounded_to(inverse.mT @ rounded_to(gradients[0], ctx.operands), ctx.operands)
        made: Tensor = -(inner @ inverse.mT).tril(-1)
        return made, None


class _DecayedScores(torch.autograd.Function):
    """Scores times their decays. Kernels round the product's gradient once, for all that take it from there."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, decays: Tensor, taken: LinearFormat) -> Tensor:
        ctx.save_for_backward(scores, decays)
        ctx.taken = taken
        return scores * decays

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        scores, decays = ctx.saved_tensors
        given = gradients[0] * decays
        if ctx.taken == "fp32":
            return given, gradients[0] * scores, None
        of_decays = rounded_to(given, ctx.taken) * scores / decays
        return given, of_decays.masked_fill(decays == 0, 0.0), None


class _DecayedState(torch.autograd.Function):
    """A state times its chunk's decay, whose gradient sums the products of the state and its gradient."""

    @staticmethod
    def forward(ctx: Any, state: Tensor, decay: Tensor, sums: LinearFormat) -> Tensor:
        ctx.save_for_backward(state, decay)
        ctx.sums = sums
        return state * decay

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        state, decay = ctx.saved_tensors
        fmt: LinearFormat = ctx.sums
        terms = rounded_to(rounded_to(state, fmt) * rounded_to(gradients[0], fmt), fmt)
        terms = terms if decay.shape[1] > 1 else terms.flatten(1)[:, None]
        return gradients[0] * decay, summed(terms, fmt)[..., None], None


def summed(terms: Tensor, fmt: LinearFormat) -> Tensor:
    """Sums over the last dimension as 128 threads make them: of eight neighbours or more one by one, then in pairs.

    Args:
        terms: [..., n].
        fmt: Of every sum on the way.
    """
    if fmt == "fp32":
        return terms.sum(-1)
    own = max(8, -(-terms.shape[-1] // 128))
    threads = 1 << (-(-terms.shape[-1] // own) - 1).bit_length()
    terms = torch.nn.functional.pad(terms, (0, own * threads - terms.shape[-1])).reshape(
        *terms.shape[:-1], threads, own
    )
    total = terms[..., 0]
    for i in range(1, own):
        total = rounded_to(total + terms[..., i], fmt)
    while total.shape[-1] > 1:
        one, other = total.chunk(2, -1)
        total = rounded_to(one + other, fmt)
    return total[..., 0]


_kept: Callable[[Tensor, LinearFormat], Tensor] = _Stored.apply
_product: Callable[[Tensor, Tensor, LinearFormat, LinearFormat], Tensor] = _Product.apply
_inverse: Callable[[Tensor, LinearFormat], Tensor] = _Inverse.apply
_decayed_scores: Callable[[Tensor, Tensor, LinearFormat], Tensor] = _DecayedScores.apply
_decayed_state: Callable[[Tensor, Tensor, LinearFormat], Tensor] = _DecayedState.apply


@dataclass(frozen=True)
class LinearHeads:
    """N heads of one sequence, fp32; ``g`` [N, T, K], [N, T, 1] or None, ``beta`` [N, T, 1], all else [N, T, D]."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor | None
    beta: Tensor | None
    a: Tensor | None
    b: Tensor | None
    initial: Tensor
    """[N, K, V]."""
    scale: float
    normalize: bool = False
    skip: Tensor | None = None
    """What is added to o before it is rounded, [N, T, V]."""


def run_linear(
    x: LinearHeads, recipe: LinearRecipe, fault: LinearFault | None = None
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Run the kernel.

    Args:
        x: Its arguments.
        recipe: What is rounded.
        fault: What it gets wrong besides (initial states and dropped gradients are the caller's).

    Returns:
        o [N, T, V], the last state [N, K, V], and the states before every chunk.
    """
    return _Kernel(x, recipe, fault).run()


class _Kernel:
    def __init__(self, x: LinearHeads, recipe: LinearRecipe, fault: LinearFault | None) -> None:
        self.x, self.recipe, self.fault = x, recipe, fault
        self.stored_format = recipe.stored or recipe.operands

    def product(self, x: Tensor, y: Tensor) -> Tensor:
        return _product(x, y, self.recipe.operands, self.recipe.accumulator)

    def inter(self, x: Tensor, y: Tensor) -> Tensor:
        """A product with the state, or into it."""
        return _product(x, y, self.recipe.inter or self.recipe.operands, self.recipe.accumulator)

    def stored(self, x: Tensor, fmt: LinearFormat | None = None) -> Tensor:
        return _kept(x, fmt or self.stored_format)

    def scaled(self, x: Tensor) -> Tensor:
        """An operand times its decays, which kernels of free a and b hand on between products, and so its gradient."""
        return x if self.x.a is None else self.stored(x)

    def decay(self, log: Tensor) -> Tensor:
        """e^log."""
        return self.stored(self.stored(log, self.recipe.log_decay).exp(), self.recipe.decay)

    def chunks(self, x: Tensor | None) -> Tensor | None:
        """[N, T, D] as [N, chunks, C, D], zeros behind the end."""
        if x is None:
            return None
        size = self.recipe.chunk
        padded = torch.nn.functional.pad(x, (0, 0, 0, -x.shape[1] % size))
        return padded.reshape(len(x), -1, size, x.shape[2])

    def run(self) -> tuple[Tensor, Tensor, list[Tensor]]:
        x = self.x
        q, k, v = (self.chunks(t) for t in (x.q, x.k, x.v))
        assert q is not None
        assert k is not None
        assert v is not None
        g = self.chunks(x.g)
        log = torch.zeros_like(q[..., :1]) if g is None else g.cumsum(2)
        step = torch.zeros_like(log) if g is None else g
        # A decay of one number a step multiplies products; one a channel their operands.
        self.by_channel = log.shape[-1] > 1
        scores = self.scores(q, k, log, log)
        sources: list[tuple[Tensor, Tensor, Callable[[Tensor, int], Tensor]]] = []
        if x.beta is not None:
            sources = [(k, scores, self.delta_rule(k, v, log))]
        else:
            sources = [(k, scores, lambda _, c: v[:, c])]
            if x.a is not None and x.b is not None:
                sources.append(self.low_rank(k, v, q, log, step))
        return self.carried(q, log, sources, x.initial)

    def scores(self, left: Tensor, right: Tensor, left_log: Tensor, right_log: Tensor, diagonal: int = 0) -> Tensor:
        """tril(sum_k left_ik right_jk e^(left_log_ik - right_log_jk)), [N, chunks, C, C]."""
        seen = torch.ones(left.shape[2], left.shape[2], dtype=torch.bool, device=left.device).tril(diagonal)
        apart = left_log[:, :, :, None] - right_log[:, :, None]
        decays = self.decay(apart.masked_fill(~seen[..., None], -torch.inf))
        if not self.by_channel:
            taken = self.recipe.score_gradients or self.recipe.operands
            return _decayed_scores(self.product(left, right.mT), decays[..., 0], taken)
        pairs = left[:, :, :, None] * right[:, :, None]
        # Rounded as it is made; its gradient is not.
        pairs = pairs + (rounded_to(pairs.detach(), self.recipe.elementwise) - pairs.detach())
        return (pairs * decays).sum(4)

    def delta_rule(self, k: Tensor, v: Tensor, log: Tensor) -> Callable[[Tensor, int], Tensor]:
        beta = self.chunks(self.x.beta)
        assert beta is not None
        lower = self.stored(self.scores(k, k, log, log, -1) * beta, self.recipe.solved)
        inverse = self.stored(_inverse(lower, self.recipe.operands), self.recipe.inverse)
        u = self.stored(self.product(inverse, beta * v))
        w = self.stored(self.product(inverse, beta * k * self.decay(log)))
        return lambda state, c: u[:, c] - self.inter(w[:, c], state)

    def low_rank(
        self, k: Tensor, v: Tensor, q: Tensor, log: Tensor, step: Tensor
    ) -> tuple[Tensor, Tensor, Callable[[Tensor, int], Tensor]]:
        """Keys b with values a^T S, S being the state before the step."""
        a, b = self.chunks(self.x.a), self.chunks(self.x.b)
        assert a is not None
        assert b is not None
        before = log - step
        lower, other = (self.stored(self.scores(a, x, before, log, -1), self.recipe.solved) for x in (b, k))
        inverse = _inverse(-lower, self.recipe.operands)
        u = self.stored(self.product(inverse @ other, v))
        w = self.stored(self.product(self.stored(inverse, self.recipe.inverse), self.scaled(a * self.decay(before))))
        return b, self.scores(q, b, log, log), lambda state, c: u[:, c] + self.inter(w[:, c], state)

    def carried(
        self,
        q: Tensor,
        log: Tensor,
        sources: list[tuple[Tensor, Tensor, Callable[[Tensor, int], Tensor]]],
        state: Tensor,
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """The chunks one after the other."""
        outs, states, scale = [], [], self.x.scale
        # Kernels that go step by step read o from the state that they have just written.
        stepwise = self.recipe.chunk == 1 and self.fault is None
        for c in range(q.shape[1]):
            state = state if stepwise else self.stored(state, self.recipe.state)
            states.append(state)
            last = log[:, c, -2 if self.fault == "boundary_decay" else -1, None]
            through = log[:, c].detach() if self.fault == "no_decay_gradient_of_states" else log[:, c]
            last = last.detach() if self.fault == "no_decay_gradient_of_states" else last
            here, rest = (
                self.decay(through),
                self.decay((last - through).clamp(max=0.0) if self.fault else last - through),
            )
            if self.by_channel:
                out = self.inter(self.scaled(q[:, c] * here), state)
            else:
                out = self.inter(q[:, c], state) * here
            if self.fault == "no_inter_chunk":
                out = torch.zeros_like(out)
            after = _decayed_state(state, self.decay(last).mT, self.recipe.decay_sums)
            for keys, scores, written in sources:
                values = self.stored(written(state, c))
                out = out + self.product(scores[:, c], values)
                if self.fault == "boundary_write":
                    values = torch.cat([values[:, :-1], torch.zeros_like(values[:, :1])], 1)
                if self.by_channel:
                    after = after + self.inter(self.scaled(keys[:, c] * rest).mT, values)
                else:
                    after = after + self.inter(keys[:, c].mT, values * rest)
            if stepwise:
                after = self.stored(after, self.recipe.state)
                out = self.inter(q[:, c], after)
            outs.append(out * scale)
            state = after
        state = state if stepwise else self.stored(state, self.recipe.state)
        out = torch.cat(outs, 1)[:, : self.x.q.shape[1]]
        if self.x.normalize:
            out = out / self._sums()
        if self.x.skip is not None:
            out = out + self.x.skip
        return self.stored(out, self.recipe.out), state, states

    def _sums(self) -> Tensor:
        keys = self.stored(self.x.k.cumsum(1), self.recipe.normalizer)
        return (self.x.q * self.x.scale * keys).sum(2, keepdim=True) + _EPSILON


def run_linear_call(
    tensors: Mapping[str, Tensor],
    prepare: Callable[[dict[str, Tensor]], LinearHeads],
    recipe: LinearRecipe,
    *,
    do: Tensor | None,
    dfinal: Tensor | None,
    fault: LinearFault | None = None,
) -> dict[str, Tensor]:
    """The kernel on an operator's own arguments, and the gradients of these.

    Args:
        tensors: fp32, by name; what a gradient is wanted of.
        prepare: Makes the kernel's arguments of them.
        recipe: What is rounded.
        do: [N, T, V].
        dfinal: [N, K, V].
        fault: What it gets wrong besides.

    Returns:
        ``o``, ``final_state``, ``states`` [N, chunks, K, V], and with do or dfinal the gradients (``dq``, …), fp32.
    """
    wanted = do is not None or dfinal is not None
    leaves = {name: x.detach().float().requires_grad_(wanted) for name, x in tensors.items()}
    given = dict(leaves)
    if fault == "no_decay_gradient":
        given |= {name: given[name].detach() for name in ("g", "dt", "A") if name in given}
    with torch.set_grad_enabled(wanted), torch.autocast(next(iter(leaves.values())).device.type, enabled=False):
        o, last, states = run_linear(prepare(given), recipe, fault)
        found = {"o": o.detach(), "final_state": last.detach(), "states": torch.stack(states, 1).detach()}
        if not wanted:
            return found
        loss = o.new_zeros(())
        if do is not None:
            loss = loss + (o * do).sum()
        if dfinal is not None:
            loss = loss + (last * dfinal).sum()
        gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
    return found | {f"d{name}": g for name, g in zip(leaves, gradients, strict=True)}
