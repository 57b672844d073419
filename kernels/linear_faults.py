"""What a kernel of linear attention may get wrong: faults that are emulated, in words, and which calls can have them.

Most are another kernel's arguments (another head's decay, 2^g for e^g, beta of the next step): the emulated kernel runs
on these, and autograd makes the gradients that such a kernel returns. The others are within the kernel (its chunks) or
in how it takes the call (sequences, heads, lengths of q and k).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attn_diag.kernels.linear_heads import LinearHeads

Change = Callable[[LinearHeads], LinearHeads]


@dataclass(frozen=True)
class LinearFaultKind:
    """One fault."""

    words: str
    """What is wrong."""
    needs: tuple[str, ...] = ()
    """What a call must have for it: tensors by name, or one of ``heads`` (several), ``square`` (K is V), ``sequences``
    (several), ``shared`` (heads of q and k), ``lengths`` (q and k are normalised), ``plain`` (nothing is erased),
    ``free`` (a and b), ``channels`` (a decay each), ``decay``, ``decay_gradient``."""
    by_chunk: bool = False
    """Whether it is another one in chunks of another size."""
    change: Change | None = None
    """The arguments that a kernel with it computes with; None: it is elsewhere."""


def shifted(x: Tensor, by: int) -> Tensor:
    """[N, T, D], the steps ``by`` later, zeros where there is none.

    Args:
        x: Of every step.
        by: 1 or -1.
    """
    none = torch.zeros_like(x[:, :1])
    return torch.cat([none, x[:, :-1]], 1) if by > 0 else torch.cat([x[:, 1:], none], 1)


def _given(name: str, change: Callable[[Tensor], Tensor]) -> Change:
    def changed(x: LinearHeads) -> LinearHeads:
        tensor = getattr(x, name)
        changes: dict[str, Any] = {} if tensor is None else {name: change(tensor)}
        return replace(x, **changes)

    return changed


def _beta(written: Callable[[Tensor], Tensor], erased: Callable[[Tensor], Tensor]) -> Change:
    """Beta is another one where values are written, and where they are erased: v beta / beta', and beta'."""

    def changed(x: LinearHeads) -> LinearHeads:
        assert x.beta is not None
        beta = erased(x.beta)
        return replace(x, v=x.v * written(x.beta) / beta.clamp(min=2.0**-24), beta=beta)

    return changed


def _after(x: LinearHeads) -> LinearHeads:
    """S_t = w_t (S_{t-1} + v k^T): what is written decays at once."""
    assert x.g is not None
    return replace(x, k=x.k * x.g.exp())


def _swapped(x: LinearHeads) -> LinearHeads:
    return replace(x, a=x.b, b=x.a)


def _first_lost(g: Tensor) -> Tensor:
    return torch.cat([torch.zeros_like(g[:, :1]), g[:, 1:]], 1)


def _fault(words: str, *needs: str, change: Change | None = None, by_chunk: bool = False) -> LinearFaultKind:
    return LinearFaultKind(words, needs, by_chunk, change)


_UNIT: Callable[[Tensor], Tensor] = torch.ones_like
_SAME: Callable[[Tensor], Tensor] = torch.clone
FAULTS: dict[str, LinearFaultKind] = {
    # Within chunks, or between them.
    "no_inter_chunk": _fault(
        "the inter-chunk term is missing: nothing of the state before its chunk reaches a step", by_chunk=True),
    "boundary_write": _fault(
        "a chunk boundary is off by one: the last step of each chunk is not written to the state", by_chunk=True),
    "boundary_decay": _fault(
        "a chunk boundary is off by one: the decay of each chunk's last step is not applied to the state", "decay",
        by_chunk=True),
    "inter_not_decayed": _fault(
        "the inter-chunk term lacks the decays: the state before a chunk reaches its steps as it was", "decay",
        by_chunk=True),
    "inter_decay_exclusive": _fault(
        "the inter-chunk term lacks each step's own decay: the sum of the decays' logarithms is exclusive", "decay",
        by_chunk=True),
    "inter_not_scaled": _fault("the inter-chunk term is not multiplied by the scale", "scale", by_chunk=True),
    "no_intra_chunk": _fault("what a chunk's own steps write does not reach them", by_chunk=True),
    "state_not_decayed": _fault("the state does not decay from one chunk to the next", "decay", by_chunk=True),
    "state_decayed_twice": _fault("the state decays twice from one chunk to the next", "decay", by_chunk=True),
    "state_lost": _fault("each chunk starts from nothing: no state is carried over", by_chunk=True),
    "state_transposed": _fault("the state is transposed from one chunk to the next", "square", by_chunk=True),
    "state_of_another_head": _fault(
        "each head goes on from the state that the head before it has at a chunk's end", "heads", by_chunk=True),
    "read_transposed": _fault("o reads the state before its chunk transposed", "square", by_chunk=True),
    "read_of_another_head": _fault("o reads the state that the head before it had", "heads", by_chunk=True),
    "read_of_chunk_before": _fault("o reads the state that was there a chunk earlier", by_chunk=True),
    "diagonal_missing": _fault("o lacks what its own step writes: the mask within a chunk excludes the diagonal"),
    # Of the first state.
    "no_initial_state": _fault("the initial state is not used", "initial_state",
                               change=_given("initial", torch.zeros_like)),
    "initial_state_transposed": _fault(
        "the initial state is used transposed ([V, K] for [K, V])", "initial_state", "square",
        change=_given("initial", lambda s: s.mT)),
    "initial_state_of_another": _fault(
        "each sequence starts from the initial state of the one before it", "initial_state", "sequences"),
    "initial_state_of_another_head": _fault(
        "each head starts from the initial state of the head before it", "initial_state", "heads",
        change=_given("initial", lambda s: s.roll(1, 0))),
    "first_decay_lost": _fault(
        "the first step's decay is not applied to the initial state", "initial_state", "decay",
        change=_given("g", _first_lost)),
    # Of sequences and heads.
    "sequences_run_on": _fault(
        "packed sequences are not told apart: each goes on from the state that the one before left", "cu_seqlens"),
    "sequences_end_late": _fault(
        "packed sequences end one step late: the first step of each belongs to the one before it", "cu_seqlens",
        "sequences"),
    "sequences_end_early": _fault(
        "packed sequences end one step early: the last step of each belongs to the one after it", "cu_seqlens",
        "sequences"),
    "heads_in_turns": _fault(
        "heads of v take q and k in turns (head modulo the heads of q and k), not in groups", "shared"),
    "values_of_another_head": _fault(
        "each head takes the values of the head before it", "heads", change=_given("v", lambda v: v.roll(1, 0))),
    "keys_of_another_head": _fault(
        "each head takes the keys of the head before it", "heads", change=_given("k", lambda k: k.roll(1, 0))),
    "queries_late": _fault("each step reads with the query of the step before it",
                           change=_given("q", lambda q: shifted(q, 1))),
    "values_early": _fault("each step writes the value of the next step", change=_given("v", lambda v: shifted(v, -1))),
    # Of decays.
    "decay_of_another_head": _fault(
        "each head decays as the head before it should", "decay", "heads", change=_given("g", lambda g: g.roll(1, 0))),
    "decay_of_next_channel": _fault(
        "each channel decays as the one before it should", "channels", change=_given("g", lambda g: g.roll(1, 2))),
    "decay_of_first_channel": _fault(
        "all channels of a head decay as the first one should", "channels",
        change=_given("g", lambda g: g[..., :1].expand_as(g))),
    "decay_of_mean_channel": _fault(
        "all channels of a head decay alike, by the mean of their logarithms", "channels",
        change=_given("g", lambda g: g.mean(2, keepdim=True).expand_as(g))),
    "decay_base_two": _fault(
        "the decays are 2^g instead of e^g: their logarithms are natural, and the exponential is to base 2", "decay",
        change=_given("g", lambda g: g * math.log(2))),
    "decay_logarithm_to_base_two": _fault(
        "the decays' logarithms are converted to base 2, and then used as natural ones", "decay",
        change=_given("g", lambda g: g / math.log(2))),
    "decay_twice": _fault("every decay is applied twice", "decay", change=_given("g", lambda g: 2 * g)),
    "decay_root": _fault("every decay is the square root of what it should be", "decay",
                         change=_given("g", lambda g: g / 2)),
    "decay_not_applied": _fault("nothing decays", "decay", change=_given("g", torch.zeros_like)),
    "decay_exponential": _fault(
        "the decays are exp(-exp(w)), as RWKV-LM's kernels make them, of what is taken for their logarithms", "decay",
        "free", change=_given("g", lambda g: -g.exp())),
    "decay_clamped": _fault(
        "the decays are exp(-sigmoid(w) / sqrt(e)), as RWKV-LM's kernels make them, of what is taken for their "
        "logarithms", "decay", "free", change=_given("g", lambda g: -math.exp(-0.5) * g.sigmoid())),
    "decay_late": _fault("each step has the decay of the step before it", "decay",
                         change=_given("g", lambda g: shifted(g, 1))),
    "decay_early": _fault("each step has the decay of the step after it", "decay",
                          change=_given("g", lambda g: shifted(g, -1))),
    "decay_after_update": _fault(
        "a step's decay comes after its update: what it writes decays at once", "decay", "plain", change=_after),
    # Of beta, and of a and b.
    "beta_ignored": _fault("beta is taken for 1", "beta", change=_given("beta", _UNIT)),
    "beta_sigmoid": _fault("beta goes through a sigmoid once more", "beta", change=_given("beta", torch.sigmoid)),
    "beta_squared": _fault("beta is applied twice", "beta", change=_given("beta", torch.square)),
    "beta_doubled": _fault("beta is doubled, as where negative eigenvalues are allowed", "beta",
                           change=_given("beta", lambda b: 2 * b)),
    "beta_late": _fault("each step has the beta of the step before it", "beta",
                        change=_given("beta", lambda b: shifted(b, 1))),
    "beta_early": _fault("each step has the beta of the step after it", "beta",
                         change=_given("beta", lambda b: shifted(b, -1))),
    "beta_of_another_head": _fault("each head has the beta of the head before it", "beta", "heads",
                                   change=_given("beta", lambda b: b.roll(1, 0))),
    "write_without_beta": _fault("what is written is not multiplied by beta", "beta", change=_beta(_UNIT, _SAME)),
    "erase_without_beta": _fault("what is erased is not multiplied by beta", "beta", change=_beta(_SAME, _UNIT)),
    "erase_sign": _fault("what the state holds for a key is added to it, not taken off", "beta",
                         change=lambda x: replace(x, v=-x.v, beta=None if x.beta is None else -x.beta)),
    "a_sign": _fault("the sign of a (or of b) is turned", "free", change=_given("a", torch.neg)),
    "a_b_swapped": _fault("a and b are swapped", "free", change=_swapped),
    "a_ignored": _fault("a and b are not used", "free", change=_given("a", torch.zeros_like)),
    "a_early": _fault("each step has the a of the step after it", "free", change=_given("a", lambda a: shifted(a, -1))),
    # Of what is made of the arguments.
    "steps_ignored": _fault("what is written is not multiplied by dt", "dt",
                            change=_given("steps", _UNIT)),
    "steps_squared": _fault("what is written is multiplied by dt twice", "dt", change=_given("steps", torch.square)),
    "not_normalized": _fault("q and k are not normalised", "lengths"),
    "q_not_normalized": _fault("q is not normalised", "lengths"),
    "k_not_normalized": _fault("k is not normalised", "lengths"),
    "normalized_over_heads": _fault("q and k are normalised over heads, not over features", "lengths", "heads"),
    "normalized_in_mean": _fault("q and k are divided by their root mean square, not by their length", "lengths"),
    # Of the backward.
    "no_last_gradient": _fault("the gradient of the last state is ignored", "dfinal_state"),
    "no_decay_gradient": _fault("the gradient of the decay is dropped: it is zero", "decay_gradient"),
    "no_decay_gradient_of_states": _fault(
        "the gradient of the decay lacks what reaches it through the states between chunks", "decay_gradient",
        by_chunk=True),
    "no_state_gradient": _fault(
        "the gradient does not pass from one chunk to the one before it through the state", by_chunk=True),
    "state_gradient_not_decayed": _fault(
        "the gradient of the state does not decay from one chunk to the one before it", "decay", by_chunk=True),
    "beta_gradient_of_write": _fault(
        "beta's gradient lacks what comes from erasing", "beta", change=_beta(_SAME, torch.detach)),
    "beta_gradient_of_erasure": _fault(
        "beta's gradient lacks what comes from writing", "beta", change=_beta(torch.detach, _SAME)),
    "no_norm_gradient": _fault("the gradients of q and k lack that of their lengths", "lengths"),
}  # fmt: skip
"""By name."""
LINEAR_FAULTS: dict[str, str] = {name: fault.words for name, fault in FAULTS.items()}
"""What a kernel may get wrong, in words."""
OF_GRADIENTS = (
    "no_last_gradient", "no_decay_gradient", "no_decay_gradient_of_states", "no_state_gradient",
    "state_gradient_not_decayed", "beta_gradient_of_write", "beta_gradient_of_erasure", "no_norm_gradient",
)  # fmt: skip
"""Those of which the forward knows nothing."""
