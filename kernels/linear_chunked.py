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

import torch
from torch import Tensor

from attn_diag.kernels import linear_products as products
from attn_diag.kernels.linear_faults import FAULTS
from attn_diag.kernels.linear_heads import LinearHeads
from attn_diag.kernels.linear_inverse import inverse as triangular_inverse
from attn_diag.kernels.linear_products import rounded_to
from attn_diag.kernels.linear_recipe import LinearFormat, LinearRecipe

_EPSILON = 1e-10
# Faults that carry another state from one chunk to the next, and those of which o alone reads another: of this chunk's
# and the one's before.
_CARRIED: dict[str | None, Callable[[Tensor], Tensor]] = {
    "no_state_gradient": torch.detach,
    "state_lost": torch.zeros_like,
    "state_of_another_head": lambda state: state.roll(1, 0),
    "state_transposed": lambda state: state.mT,
}
_READ: dict[str | None, Callable[[Tensor, Tensor], Tensor]] = {
    "read_of_another_head": lambda state, _: state.roll(1, 0),
    "read_of_chunk_before": lambda _, before: before,
    "read_transposed": lambda state, _: state.mT,
}
# Of a chunk's start and number: values as the scores of their chunk take them, and as they are written to the state.
Written = Callable[[Tensor, int], tuple[Tensor, Tensor]]


def run_linear(x: LinearHeads, recipe: LinearRecipe, fault: str | None = None) -> tuple[Tensor, Tensor]:
    """Run the kernel.

    Args:
        x: Its arguments.
        recipe: What is rounded.
        fault: What it gets wrong besides, of ``FAULTS`` (how it takes the call and dropped gradients are the caller's).

    Returns:
        o [N, T, V] and the last state [N, K, V], of a sequence without steps the first.
    """
    change = None if fault is None else FAULTS[fault].change
    return _Kernel(x if change is None else change(x), recipe, fault).run()


class _Kernel:
    def __init__(self, x: LinearHeads, recipe: LinearRecipe, fault: str | None) -> None:
        self.x, self.recipe, self.fault = x, recipe, fault
        self.stored_format = recipe.stored or recipe.operands
        self.diagonal = -1 if fault == "diagonal_missing" else 0

    def product(self, x: Tensor, y: Tensor, again: LinearFormat | None = None) -> Tensor:
        fmt = self.recipe.operands
        return products.product(x, y, fmt, self.recipe.accumulator, again or fmt, fmt)

    def inter(self, x: Tensor, y: Tensor, right: LinearFormat | None = None) -> Tensor:
        """A product with the state, or into it."""
        fmt = self.recipe.inter or self.recipe.operands
        return products.product(x, y, fmt, self.recipe.accumulator, fmt, right or fmt)

    def stored(self, x: Tensor, fmt: LinearFormat | None = None) -> Tensor:
        fmt = fmt or self.stored_format
        return products.stored(x, fmt, fmt)

    def part(self, x: Tensor) -> Tensor:
        """x for one kernel of several, which hands back its part of x's gradient."""
        return x if self.by_channel else products.stored(x, "fp32", self.recipe.parts)

    def new_values(self, new: Tensor) -> tuple[Tensor, Tensor]:
        """New values as the scores of their chunk take them, and as they are written to the state."""
        # Where channels decay apart nothing comes between these and the product, which rounds them.
        own = "fp32" if self.by_channel and self.recipe.new_values else self.recipe.new_values or self.stored_format
        return products.stored(new, self.stored_format, self.recipe.parts), products.stored(new, own, "fp32")

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

    def run(self) -> tuple[Tensor, Tensor]:
        x = self.x
        g = self.chunks(x.g)
        # A decay of one number a step multiplies products; one a channel their operands.
        self.by_channel = g is not None and g.shape[-1] > 1
        q, k, v = (self.chunks(t) for t in (x.q, x.k, x.v))
        assert q is not None
        assert k is not None
        assert v is not None
        if x.normalized:
            q, k = self.part(q), self.part(k)
        step = torch.zeros_like(q[..., :1]) if g is None else products.stored(g, self.recipe.log_steps, "fp32")
        log = step.cumsum(2)
        whole, k = k, self.part(k)
        scores = self.scores(q, k, log, log, self.diagonal)
        self.steps = self.chunks(x.steps)
        if self.steps is not None and self.recipe.stepped is None:
            v, self.steps = v * self.steps, None
        sources: list[tuple[Tensor, Tensor, Written]] = []
        if x.beta is not None:
            sources = [(k, scores, self.delta_rule(self.part(whole), v, log))]
        else:
            values = self.stored(v)
            sources = [(k, scores, lambda _, c: (values[:, c], values[:, c]))]
            if x.a is not None and x.b is not None:
                sources.append(self.low_rank(k, v, q, log, step))
        return self.carried(q, log, step, sources, x.initial)

    def scores(self, left: Tensor, right: Tensor, left_log: Tensor, right_log: Tensor, diagonal: int = 0) -> Tensor:
        """tril(sum_k left_ik right_jk e^(left_log_ik - right_log_jk)), [N, chunks, C, C]."""
        if self.by_channel and self.recipe.score_operands is not None and self.x.a is not None:
            made = products.centered_scores(left, right, left_log, right_log, self.recipe.score_operands)
            return made.tril(diagonal)
        if self.by_channel and self.recipe.score_operands is not None:
            return products.block_scores(left, right, left_log, self.recipe.score_operands).tril(diagonal)
        decays = self.apart(left_log, right_log, diagonal)
        if not self.by_channel:
            taken = self.recipe.score_gradients or self.recipe.operands
            if self.x.sharing > 1 and self.recipe.shared_scores is not None:
                made = products.shared_scores(left, right, self.x.sharing, self.recipe)
            else:
                made = self.product(left, right.mT)
            return products.decayed_scores(made, decays[..., 0], taken)
        pairs = left[:, :, :, None] * right[:, :, None]
        made = (pairs * decays).sum(4)
        if self.recipe.elementwise == "fp32":
            return made
        # Rounded as they are made; in gradients they are not.
        coarse = (rounded_to(pairs.detach(), self.recipe.elementwise) * decays.detach()).sum(4)
        return made + (coarse - made.detach())

    def apart(self, left_log: Tensor, right_log: Tensor, diagonal: int) -> Tensor:
        """e^(left_log_i - right_log_j), zero above the diagonal, [N, chunks, C, C, K or 1]."""
        size = left_log.shape[2]
        seen = torch.ones(size, size, dtype=torch.bool, device=left_log.device).tril(diagonal)
        apart = left_log[:, :, :, None] - right_log[:, :, None]
        return self.decay(apart.masked_fill(~seen[..., None], -torch.inf))

    def delta_rule(self, k: Tensor, v: Tensor, log: Tensor) -> Written:
        beta = self.chunks(self.x.beta)
        assert beta is not None
        if self.by_channel:
            lower = self.scores(k, k, log, log, -1) * beta
        else:
            lower = products.key_scores(k, self.apart(log, log, -1)[..., 0], beta, self.recipe)
        inverse = triangular_inverse(
            self.stored(lower, self.recipe.solved), self.recipe.operands, self.recipe.joined, False
        )
        inverse = self.stored(inverse, self.recipe.inverse)
        u = self.stored(self.product(inverse, beta * v))
        keys, decays = self.part(k), self.decay(log)
        w = self.product(inverse, beta * keys * decays)
        if self.recipe.beta_keys != "fp32":
            # Rounded in the forward alone.
            coarse = self.product(inverse, rounded_to(beta * keys, self.recipe.beta_keys) * decays)
            w = w + (coarse - w).detach()
        w = self.stored(w)
        return lambda state, c: self.new_values(u[:, c] - self.inter(w[:, c], state))

    def low_rank(self, k: Tensor, v: Tensor, q: Tensor, log: Tensor, step: Tensor) -> tuple[Tensor, Tensor, Written]:
        """Keys b with values a^T S, S being the state before the step."""
        a, b = self.chunks(self.x.a), self.chunks(self.x.b)
        assert a is not None
        assert b is not None
        before = log - step
        lower, other = (products.stored(self.scores(a, x, before, log, -1), self.recipe.solved, "fp32") for x in (b, k))
        applied = self.recipe.applied or "fp32"
        inverse = triangular_inverse(-lower, self.recipe.applied or self.recipe.operands, self.recipe.joined, True)
        u = self.stored(self.product(products.product(inverse, other, applied, "fp32", applied, applied), v))
        multiplier = products.stored(inverse, self.recipe.inverse or self.stored_format, "fp32")
        w = self.stored(self.product(multiplier, self.scaled(a * self.decay(before))))
        return (
            b,
            self.scores(q, b, log, log, self.diagonal),
            lambda state, c: self.new_values(u[:, c] + self.inter(w[:, c], state)),
        )

    def sight(self, log: Tensor, step: Tensor) -> Tensor:
        """The logarithm of the decay with which a chunk's steps see the state before it."""
        if self.fault == "inter_not_decayed":
            return torch.zeros_like(log)
        return log - step if self.fault == "inter_decay_exclusive" else log

    def carry(self, state: Tensor, decay: Tensor) -> tuple[Tensor, Tensor]:
        """The state and the decay that multiplies it, over a chunk."""
        if self.fault == "state_not_decayed":
            decay = torch.ones_like(decay)
        elif self.fault == "state_gradient_not_decayed":
            bare = state / decay.detach().clamp(min=_EPSILON)
            state = bare + (state - bare).detach()
        return state, decay * decay if self.fault == "state_decayed_twice" else decay

    def carried(
        self, q: Tensor, log: Tensor, step: Tensor, sources: list[tuple[Tensor, Tensor, Written]], state: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The chunks one after the other."""
        outs, scale, sums = [self.x.v[:, :0]], self.x.scale, self.recipe.decay_sums
        # Kernels that go step by step read o from the state that they have just written.
        stepwise = self.recipe.chunk == 1 and self.fault is None
        before = state
        for c in range(q.shape[1]):
            state = state if stepwise else self.stored(state, self.recipe.state)
            if c and self.fault in _CARRIED:
                state = _CARRIED[self.fault](state)
            seen = _READ[self.fault](state, before) if self.fault in _READ else state
            before = state
            last = log[:, c, -2 if self.fault == "boundary_decay" else -1, None]
            through = log[:, c].detach() if self.fault == "no_decay_gradient_of_states" else log[:, c]
            last = last.detach() if self.fault == "no_decay_gradient_of_states" else last
            here, rest = (
                self.decay(self.sight(through, step[:, c])),
                self.decay((last - through).clamp(max=0.0) if self.fault else last - through),
            )
            if self.by_channel:
                out = self.inter(self.scaled(q[:, c] * here), seen)
            else:
                out = products.read(q[:, c], seen, here, self.recipe)
            out = out / scale if self.fault == "inter_not_scaled" else out
            steps = None if self.steps is None else self.steps[:, c]
            if self.fault == "no_inter_chunk":
                out = torch.zeros_like(out)
            after = products.decayed_state(
                *self.carry(state, self.decay(last).mT), sums, self.recipe.decay_terms or sums
            )
            for keys, scores, written in sources:
                values, put = written(state, c)
                if self.fault == "no_intra_chunk":
                    pass
                elif steps is None:
                    out = out + self.product(scores[:, c], values, self.recipe.score_weights)
                else:
                    out = out + products.stepped(scores[:, c], values, steps, self.recipe)
                if self.fault == "boundary_write":
                    put = torch.cat([put[:, :-1], torch.zeros_like(put[:, :1])], 1)
                if self.by_channel:
                    if self.recipe.closing is None or self.x.a is None:
                        ended = self.scaled(keys[:, c] * rest)
                    else:
                        ended = products.closing(keys[:, c], last, through, self.recipe.closing)
                    after = after + self.inter(ended.mT, put, self.recipe.new_values)
                else:
                    weights = rest if steps is None else rest * steps
                    after = after + products.written(keys[:, c], put, weights, self.recipe)
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
        return self.stored(out, self.recipe.out), state

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
    fault: str | None = None,
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
        ``o``, ``final_state``, and with do or dfinal the gradients (``dq``, …), fp32.
    """
    wanted = do is not None or dfinal is not None
    leaves = {name: x.detach().float().requires_grad_(wanted) for name, x in tensors.items()}
    given = dict(leaves)
    if fault == "no_decay_gradient":
        given |= {name: given[name].detach() for name in ("g", "dt", "A") if name in given}
    with torch.set_grad_enabled(wanted), torch.autocast(next(iter(leaves.values())).device.type, enabled=False):
        o, last = run_linear(prepare(given), recipe, fault)
        found = {"o": o.detach(), "final_state": last.detach()}
        if not wanted:
            return found
        loss = o.new_zeros(())
        if do is not None:
            loss = loss + (o * do).sum()
        if dfinal is not None:
            loss = loss + (last * dfinal).sum()
        gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
    return found | {f"d{name}": g for name, g in zip(leaves, gradients, strict=True)}
