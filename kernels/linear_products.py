"""Products and sums of linear attention's chunked kernels, with what they and their gradients round."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from attn_diag.kernels.linear_recipe import LinearFormat, LinearRecipe

# Steps of a block, whose own scores are made without products.
_BLOCK = 16
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def rounded_to(x: Tensor, fmt: LinearFormat) -> Tensor:
    """fp32 -> ``fmt``, to nearest even, as fp32; to TF32 as tensor cores take it, cut off."""
    if fmt == "tf32":
        return (x.contiguous().view(torch.int32) & -(2**13)).view(torch.float32)
    return x if fmt == "fp32" else x.to(_DTYPES[fmt]).float()


class _Stored(torch.autograd.Function):
    """A value kept in a format, and its gradient in one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, fmt: LinearFormat, of_gradient: LinearFormat) -> Tensor:
        ctx.fmt = of_gradient
        return rounded_to(x, fmt)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return rounded_to(gradients[0], ctx.fmt), None, None


class _Product(torch.autograd.Function):
    """A matrix product whose operands are rounded first, forward and backward, and its result too.

    ``again`` is the format of the first operand where the second one's gradient takes it again, ``right`` that of the
    second in the product alone.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, y: Tensor, operands: LinearFormat, result: LinearFormat, again: LinearFormat,
        right: LinearFormat,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(rounded_to(x, again), rounded_to(y, operands))
        ctx.formats = operands, result
        return rounded_to(rounded_to(x, operands) @ rounded_to(y, right), result)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, y = ctx.saved_tensors
        operands, result = ctx.formats
        given = rounded_to(gradients[0], operands)
        return rounded_to(given @ y.mT, result), rounded_to(x.mT @ given, result), None, None, None, None


class _Read(torch.autograd.Function):
    """What steps read of a state: decays * (x @ state), one decay a step."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, state: Tensor, decays: Tensor, recipe: LinearRecipe) -> Tensor:
        operands, result = recipe.inter or recipe.operands, recipe.accumulator
        made = rounded_to(rounded_to(x, operands) @ rounded_to(state, operands), result)
        ctx.save_for_backward(x, state, decays, made)
        ctx.recipe = recipe
        return made * decays

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        x, state, decays, made = ctx.saved_tensors
        recipe, (given,) = ctx.recipe, gradients
        operands, result = recipe.inter or recipe.operands, recipe.accumulator
        of_decays = (given * made).sum(-1, keepdim=True)
        of_x = _times(given, decays, recipe.decayed or operands, operands, result, rounded_to(state, operands).mT)
        if recipe.state_gradient is None:
            of_state = rounded_to(x, operands).mT @ rounded_to(given * decays, operands)
        else:
            of_state = rounded_to(x * decays, recipe.state_gradient).mT @ rounded_to(given, operands)
        return of_x, rounded_to(of_state, result), of_decays, None


class _Written(torch.autograd.Function):
    """What steps write to a state: keys^T (decays * values), one decay a step."""

    @staticmethod
    def forward(ctx: Any, keys: Tensor, values: Tensor, decays: Tensor, recipe: LinearRecipe) -> Tensor:
        operands, result = recipe.inter or recipe.operands, recipe.accumulator
        ctx.save_for_backward(keys, values, decays)
        ctx.recipe = recipe
        if recipe.stepped is not None:
            return rounded_to(rounded_to(keys * decays, operands).mT @ rounded_to(values, operands), result)
        return rounded_to(rounded_to(keys, operands).mT @ rounded_to(values * decays, operands), result)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        keys, values, decays = ctx.saved_tensors
        recipe = ctx.recipe
        operands, result = recipe.inter or recipe.operands, recipe.accumulator
        given = rounded_to(gradients[0], operands)
        of_keys = _times(values, decays, recipe.decayed or operands, operands, result, given.mT)
        of_values = rounded_to(rounded_to(keys, operands) @ given, result)
        return of_keys, of_values * decays, (of_values * values).sum(-1, keepdim=True), None


class _Stepped(torch.autograd.Function):
    """(scores * steps of their keys) @ values; the gradients of values and steps take the scores without them."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, values: Tensor, steps: Tensor, recipe: LinearRecipe) -> Tensor:
        ctx.save_for_backward(scores, values, steps)
        ctx.recipe = recipe
        weights = rounded_to(scores * steps.mT, recipe.operands)
        return rounded_to(weights @ rounded_to(values, recipe.operands), recipe.accumulator)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        scores, values, steps = ctx.saved_tensors
        operands, result = ctx.recipe.operands, ctx.recipe.accumulator
        given = rounded_to(gradients[0], operands)
        of_weights = rounded_to(given @ rounded_to(values, operands).mT, result)
        again = rounded_to(scores, ctx.recipe.score_weights or operands)
        of_values = rounded_to(again.mT @ given, result)
        return of_weights * steps.mT, of_values * steps, (of_values * values).sum(-1, keepdim=True), None


class _BlockScores(torch.autograd.Function):
    """tril(sum_k left_ik right_jk e^(log_ik - log_jk)) of a chunk: blocks of 16 steps by products, others by sums.

    Products have operands in a format, decayed from (and to) a block's first step; the gradient of ``right`` counts
    from its block's last.
    """

    @staticmethod
    def forward(ctx: Any, left: Tensor, right: Tensor, log: Tensor, fmt: LinearFormat) -> Tensor:
        ctx.save_for_backward(left, right, log)
        ctx.fmt = fmt
        made = left.new_zeros(*left.shape[:2], left.shape[2], left.shape[2])
        for own in blocks(left):
            made[..., own, own] = (left[..., own, None, :] * right[..., None, own, :] * _within(log, own)).sum(-1)
            first, before = log[..., own.start, None, :], slice(0, own.start)
            decayed = rounded_to(left[..., own, :] * (log[..., own, :] - first).exp(), fmt)
            made[..., own, before] = (
                decayed @ rounded_to(right[..., before, :] * (first - log[..., before, :]).exp(), fmt).mT
            )
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        left, right, log = ctx.saved_tensors
        given, fmt = gradients[0], ctx.fmt
        of_left, of_right = torch.zeros_like(left), torch.zeros_like(right)
        for own in blocks(left):
            apart = given[..., own, own, None] * _within(log, own)
            of_left[..., own, :] = (apart * right[..., None, own, :]).sum(-2)
            of_right[..., own, :] = (apart * left[..., own, None, :]).sum(-3)
            first, before = log[..., own.start, None, :], slice(0, own.start)
            decayed = rounded_to(right[..., before, :] * (first - log[..., before, :]).exp(), fmt)
            made = rounded_to(given[..., own, before], fmt) @ decayed
            of_left[..., own, :] += made * (log[..., own, :] - first).exp()
            last, after = log[..., own.stop - 1, None, :], slice(own.stop, left.shape[2])
            decayed = rounded_to(left[..., after, :] * (log[..., after, :] - last).exp(), fmt)
            made = rounded_to(given[..., after, own].mT, fmt) @ decayed
            of_right[..., own, :] += made * (last - log[..., own, :]).exp()
        return of_left, of_right, left * of_left - right * of_right, None


def blocks(x: Tensor) -> list[slice]:
    """Steps of a chunk [..., C, D] in blocks of 16."""
    size = x.shape[2]
    return [slice(start, min(start + _BLOCK, size)) for start in range(0, size, _BLOCK)]


def _within(log: Tensor, own: slice) -> Tensor:
    """e^(log_i - log_j) of a block's steps, 0 above the diagonal."""
    apart = log[..., own, None, :] - log[..., None, own, :]
    seen = torch.ones(apart.shape[2:4], dtype=torch.bool, device=log.device).tril()
    return apart.masked_fill(~seen[..., None], -torch.inf).exp()


def _times(
    x: Tensor, decays: Tensor, decayed: LinearFormat, operands: LinearFormat, result: LinearFormat, y: Tensor
) -> Tensor:
    """(decays * x) @ y; where the decayed operand is not rounded, the product is multiplied instead."""
    if decayed == "fp32":
        return rounded_to(rounded_to(x, operands) @ y, result) * decays
    return rounded_to(rounded_to(x * decays, decayed) @ y, result)


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


class _SharedScores(torch.autograd.Function):
    """q k^T of heads that share q and k, whose gradients are added up over these heads before they are rounded.

    So mamba_ssm has it (``_chunk_scan_bwd_dcb``, ``_bmm_chunk_bwd``). The first of the heads has all of the gradient.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, sharing: int, recipe: LinearRecipe) -> Tensor:
        q, k = (rounded_to(x, recipe.operands) for x in (q, k))
        ctx.save_for_backward(q, k)
        ctx.sharing, ctx.recipe = sharing, recipe
        return rounded_to(q @ k.mT, recipe.accumulator)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        q, k = ctx.saved_tensors
        recipe, sharing = ctx.recipe, ctx.sharing
        summed_up = rounded_to(gradients[0].reshape(-1, sharing, *gradients[0].shape[1:]).sum(1), recipe.shared_scores)
        of_q, of_k = torch.zeros_like(q), torch.zeros_like(k)
        of_q[::sharing] = rounded_to(summed_up @ k[::sharing], recipe.accumulator)
        of_k[::sharing] = rounded_to(summed_up.mT @ q[::sharing], recipe.accumulator)
        return of_q, of_k, None, None


class _KeyScores(torch.autograd.Function):
    """beta (k k^T) decays of a delta rule; gradients are rounded once, decayed, before beta multiplies them."""

    @staticmethod
    def forward(ctx: Any, keys: Tensor, decays: Tensor, beta: Tensor, recipe: LinearRecipe) -> Tensor:
        keys = rounded_to(keys, recipe.operands)
        scores = rounded_to(keys @ keys.mT, recipe.accumulator)
        ctx.save_for_backward(keys, decays, beta, scores)
        ctx.recipe = recipe
        return scores * decays * beta

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        keys, decays, beta, scores = ctx.saved_tensors
        fmt, result, decayed = ctx.recipe.operands, ctx.recipe.accumulator, gradients[0] * decays
        given = rounded_to(decayed, fmt)
        of_rows = rounded_to(given @ keys, result)
        of_columns = rounded_to(given.mT @ rounded_to(keys * beta, fmt), result)
        of_decays = rounded_to(decayed, ctx.recipe.score_gradients or fmt) * scores * beta / decays
        return (
            of_rows * beta + of_columns, of_decays.masked_fill(decays == 0, 0.0),
            (of_rows * keys).sum(-1, keepdim=True), None,
        )  # fmt: skip


class _CenteredScores(torch.autograd.Function):
    """sum_k left_ik e^(log_i - mid) right_jk e^(mid - right_log_j) of a whole chunk, mid the middle step's log."""

    @staticmethod
    def forward(
        ctx: Any, left: Tensor, right: Tensor, left_log: Tensor, right_log: Tensor, fmt: LinearFormat
    ) -> Tensor:
        middle = right_log[..., right_log.shape[-2] // 2, None, :]
        here, there = (left_log - middle).exp(), (middle - right_log).exp()
        ctx.save_for_backward(left, right, here, there)
        ctx.fmt = fmt
        return rounded_to(left * here, fmt) @ rounded_to(right * there, fmt).mT

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, None]:
        left, right, here, there = ctx.saved_tensors
        given = rounded_to(gradients[0], ctx.fmt)
        of_left = (given @ rounded_to(right * there, ctx.fmt)) * here
        of_right = (given.mT @ rounded_to(left * here, ctx.fmt)) * there
        return of_left, of_right, of_left * left, -of_right * right, None


class _Closing(torch.autograd.Function):
    """Keys times the decays to their chunk's end, e^(last - through), rounded; so are their gradients.

    The gradient of ``last`` multiplies these rounded keys with the gradients that were not rounded, that of
    ``through`` the keys with those that were, so that the two do not cancel.
    """

    @staticmethod
    def forward(ctx: Any, keys: Tensor, last: Tensor, through: Tensor, fmt: LinearFormat) -> Tensor:
        decays = (last - through).exp()
        made = rounded_to(keys * decays, fmt)
        ctx.save_for_backward(keys, decays, made)
        ctx.fmt = fmt
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        keys, decays, made = ctx.saved_tensors
        given = rounded_to(gradients[0], ctx.fmt)
        return given * decays, (made * gradients[0]).sum(-2, keepdim=True), -given * keys * decays, None


class _DecayedState(torch.autograd.Function):
    """A state times its chunk's decay, whose gradient sums the products of the state and its gradient."""

    @staticmethod
    def forward(ctx: Any, state: Tensor, decay: Tensor, sums: LinearFormat, of_terms: LinearFormat) -> Tensor:
        ctx.save_for_backward(state, decay)
        ctx.sums, ctx.terms = sums, of_terms
        return state * decay

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        state, decay = ctx.saved_tensors
        terms = rounded_to(state, ctx.terms) * rounded_to(gradients[0], ctx.terms)
        terms = terms if decay.shape[1] > 1 else _by_threads(terms)[:, None]
        made = summed(rounded_to(terms, ctx.terms) if ctx.sums == "fp32" else terms, ctx.sums)
        return gradients[0] * decay, made[..., None], None, None


def _by_threads(terms: Tensor) -> Tensor:
    """[N, K, V] as [N, K * V], in the order in which ``summed`` has the sums of 4 warps that hold the tile.

    Lanes hold eight neighbours of V each, then those of K; then come the warps.
    """
    n, k, v = terms.shape
    lanes = max(v // 8, 1)
    others = max(32 // lanes, 1)
    if v % 8 or 32 % lanes or k % (4 * others):
        return terms.flatten(1)
    return terms.reshape(n, -1, 4, others, lanes, 8).permute(0, 3, 4, 2, 1, 5).flatten(1)


def summed(terms: Tensor, fmt: LinearFormat) -> Tensor:
    """Sums over the last dimension as 128 threads make them: of eight neighbours or more one by one, then in pairs.

    Every second term is added in an instruction with its product (``fma.rn.bf16x2``), which rounds once.

    Args:
        terms: [..., n], products that were not rounded.
        fmt: Of the other products, and of every sum on the way.
    """
    if fmt == "fp32":
        return terms.sum(-1)
    own = max(8, -(-terms.shape[-1] // 128))
    threads = 1 << (-(-terms.shape[-1] // own) - 1).bit_length()
    terms = torch.nn.functional.pad(terms, (0, own * threads - terms.shape[-1])).reshape(
        *terms.shape[:-1], threads, own
    )
    total = rounded_to(rounded_to(terms[..., 1], fmt) + terms[..., 0], fmt)
    for i in range(2, own):
        term = rounded_to(terms[..., i], fmt) if i % 2 else terms[..., i]
        total = rounded_to(total + term, fmt)
    while total.shape[-1] > 1:
        one, other = total.chunk(2, -1)
        total = rounded_to(one + other, fmt)
    return total[..., 0]


stored: Callable[[Tensor, LinearFormat, LinearFormat], Tensor] = _Stored.apply
product: Callable[[Tensor, Tensor, LinearFormat, LinearFormat, LinearFormat, LinearFormat], Tensor] = _Product.apply
key_scores: Callable[[Tensor, Tensor, Tensor, LinearRecipe], Tensor] = _KeyScores.apply
closing: Callable[[Tensor, Tensor, Tensor, LinearFormat], Tensor] = _Closing.apply
centered_scores: Callable[[Tensor, Tensor, Tensor, Tensor, LinearFormat], Tensor] = _CenteredScores.apply
shared_scores: Callable[[Tensor, Tensor, int, LinearRecipe], Tensor] = _SharedScores.apply
decayed_scores: Callable[[Tensor, Tensor, LinearFormat], Tensor] = _DecayedScores.apply
block_scores: Callable[[Tensor, Tensor, Tensor, LinearFormat], Tensor] = _BlockScores.apply
decayed_state: Callable[[Tensor, Tensor, LinearFormat, LinearFormat], Tensor] = _DecayedState.apply
read: Callable[[Tensor, Tensor, Tensor, LinearRecipe], Tensor] = _Read.apply
stepped: Callable[[Tensor, Tensor, Tensor, LinearRecipe], Tensor] = _Stepped.apply
written: Callable[[Tensor, Tensor, Tensor, LinearRecipe], Tensor] = _Written.apply
