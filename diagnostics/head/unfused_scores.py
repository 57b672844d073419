"""The scores of attention that is not fused, as one of ``unfused.ways`` stores them, and what is made of them alone.

Ways that follow each other share them, and all share dP: a third of what running them one by one takes.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor

from attn_diag.reference import AttentionHead, FloatFormat, round_nearest_even

# Ways that store alpha, or its inverse, in the inputs' format; the last one multiplies q kT by it.
LOW_ALPHA = ("low", "divided", "low-scores")
# Ways whose alpha, mask and softmax are in fp32, behind a stored q kT.
COMPILED = ("compiled", "stored", "capped")
# Of heads with more scores nothing is kept.
_MOST_KEPT = 2**20


def scaled(values: Tensor, factor: float, fmt: FloatFormat) -> Tensor:
    """Numbers of a format times a Python number, as torch has it: in fp32, rounded there and then to the format."""
    return round_nearest_even((values.float() * factor).double(), fmt)


def times_alpha(values: Tensor, alpha: float, fmt: FloatFormat, alpha_in: str) -> Tensor:
    """Numbers of a format times alpha, or what a way of ``LOW_ALPHA`` has in its place."""
    if alpha_in not in LOW_ALPHA:
        return scaled(values, alpha, fmt)
    divided = alpha_in == "divided"
    stored = round_nearest_even(values.new_tensor(1 / alpha if divided else alpha), fmt)
    return round_nearest_even(values / stored if divided else values * stored, fmt)


def _multiplied(head: AttentionHead, fmt: FloatFormat, alpha_in: str) -> tuple[Tensor, Tensor] | None:
    """What a way multiplies for S, [Tq, D] and [Tk, D], before it stores it; None: it does not store S."""
    if alpha_in in ("scores", "low-scores", "shifted-scores", *COMPILED):
        return head.q, head.k
    if alpha_in == "root":
        root, sign = abs(head.scale) ** 0.5, 1 if head.scale > 0 else -1
        return scaled(head.q, root * sign, fmt), scaled(head.k, root, fmt)
    return None if alpha_in in ("fp32", "summed", "key") else (times_alpha(head.q, head.scale, fmt, alpha_in), head.k)


def finite(of_rows: Tensor) -> Tensor:
    """0 in rows that see no key."""
    return of_rows.masked_fill(of_rows.isneginf(), 0.0)


@dataclass(frozen=True)
class StoredScores:
    """Scores as a way stores them, [Tq, Tk] float64."""

    head: AttentionHead
    """Whose."""
    fmt: FloatFormat
    """The inputs' format."""
    wide_scores: bool
    """Whether what follows q kT is in fp32."""
    factors: tuple[Tensor, Tensor] | None
    """What is multiplied for them, see ``_multiplied``."""
    scores: Tensor
    """S, masked; of a way that takes m off first S - m."""
    capped: Tensor | None
    """tanh(S / c) under softcap c."""
    sink: Tensor | None
    """The sink's logit of every row, [Tq]."""
    lse: Tensor
    """Of ``scores`` and ``sink``, [Tq]."""
    largest: Tensor | None = None
    """m, where it was taken off."""
    top: Tensor | None = None
    """Then the key of every row's largest score."""
    by_key: Tensor | None = None
    """Then, with a sink, whether that is m, and not the sink."""

    @cached_property
    def probs(self) -> Tensor:
        """P before its cast."""
        return (self.scores - finite(self.lse)[:, None]).exp()

    @cached_property
    def cast_probs(self) -> Tensor:
        """P."""
        return round_nearest_even(self.probs, self.fmt)

    @cached_property
    def out(self) -> Tensor:
        """O of ways that multiply this P, without dropout."""
        return round_nearest_even(self.cast_probs @ self.head.v, self.fmt)

    @cached_property
    def dv(self) -> Tensor:
        """Likewise dV."""
        assert self.head.do is not None
        return round_nearest_even(self.cast_probs.T @ self.head.do, self.fmt)


class Steps:
    """What ways of one head have in common; nothing of it may be changed in place."""

    def __init__(self, head: AttentionHead, fmt: FloatFormat) -> None:
        self.head, self.fmt = head, fmt
        self._last: tuple[tuple[str, bool], StoredScores] | None = None

    @cached_property
    def products(self) -> Tensor:
        """q kT, float64."""
        return self.head.q @ self.head.k.T

    @cached_property
    def exact_dprobs(self) -> Tensor:
        """dP before its cast and dropout."""
        assert self.head.do is not None
        return self.head.do @ self.head.v.T

    @cached_property
    def dprobs(self) -> Tensor:
        """Its cast."""
        return round_nearest_even(self.exact_dprobs, self.fmt)

    @cached_property
    def fused_o(self) -> Tensor:
        """O of a fused kernel, of a head without sink, softcap and dropout."""
        exact = self.scores("fp32", biased=False)
        shift = finite(exact.scores.amax(1))[:, None]
        powers = round_nearest_even((exact.scores - shift).exp(), self.fmt)
        return round_nearest_even(powers @ self.head.v / (finite(exact.lse)[:, None] - shift).exp(), self.fmt)

    def scores(self, alpha_in: str, *, biased: bool) -> StoredScores:
        """The scores of ways with this second part, whose mask is added before a cast, or not."""
        kind, last = (alpha_in, biased), self._last
        if last is None or last[0] != kind:
            last = self._last = kind, _stored(self.head, self.fmt, alpha_in, biased=biased)
        return last[1]


class _Last(threading.local):
    """The head that this thread looked at last."""

    steps: Steps | None = None


_LAST = _Last()


def steps_of(head: AttentionHead, fmt: FloatFormat) -> Steps:
    """Those of a head, kept until another one is asked for."""
    found = _LAST.steps
    if found is None or found.head is not head or found.fmt is not fmt:
        found = Steps(head, fmt)
        _LAST.steps = found if len(head.q) * len(head.k) <= _MOST_KEPT else None
    return found


def _stored(head: AttentionHead, fmt: FloatFormat, alpha_in: str, *, biased: bool) -> StoredScores:
    cast = partial(round_nearest_even, fmt=fmt)
    factors = _multiplied(head, fmt, alpha_in)
    wide_scores = factors is None or alpha_in in COMPILED
    if alpha_in == "key":
        scores = head.q @ scaled(head.k, head.scale, fmt).T
    elif factors is None:
        scores = (head.q @ head.k.T) * head.scale
    else:
        low_q, low_k = factors
        scores = cast(low_q @ low_k.T)
        if alpha_in in ("scores", "low-scores", "shifted-scores"):
            scores = times_alpha(scores, head.scale, fmt, alpha_in)
        elif alpha_in in COMPILED:
            scores = scores * head.scale
    capped = None
    if head.softcap is not None:
        stored = (lambda x: x) if wide_scores else cast
        capped = stored(stored(scores / head.softcap).tanh())
        scores = head.softcap * capped if wide_scores else cast(head.softcap * capped)
    head.apply_mask(scores, slice(0, len(head.q)), slice(0, len(head.k)))
    if alpha_in in ("summed", "stored") or biased:
        scores = cast(scores)
    sink = None if head.sink is None else torch.full_like(scores[:, 0], head.sink)
    largest = top = by_key = None
    if alpha_in in ("shifted", "shifted-scores"):
        largest, top = scores.max(1)
        by_key = None if sink is None else largest >= sink
        largest = largest if sink is None else torch.maximum(largest, sink)
        shift = finite(largest)
        scores, sink = cast(scores - shift[:, None]), None if sink is None else cast(sink - shift)
    lse = scores.logsumexp(1)
    if sink is not None:
        lse = torch.logaddexp(lse, sink)
    return StoredScores(head, fmt, wide_scores, factors, scores, capped, sink, lse, largest, top, by_key)
