"""Backwards that make P of L, as the published formulas have it, with L or each step in the inputs' format.

    S  = cast(alpha cast(q kT)) in steps, alpha cast(q kT) where steps are compiled into one, alpha q kT in a fused one,
         or its cast, or S - L is cast there
    L  = cast(L), or in fp32; of plain torch's S and cast cast(m + cast(log(cast(rowsum(cast(exp(cast(S - m))))))))
    P  = cast(exp(cast(S - L))) in steps, where L is cast; else cast(exp(S - L)); dS multiplies it uncast but in steps
    dV = cast(PT dO), dP = cast(dO VT) but in a fused one
    D  = cast(rowsum(cast(dO o O))) in steps, rowsum(dO o O) else
    dS = cast(P o cast(dP - D)) in steps, cast(P o (dP - D)) else
    dQ = cast(alpha cast(dS K)), dK = cast(alpha cast(dST Q)); in a fused one cast once

O is a fused kernel's, or that of plain torch (``unfused``), whose S and P are stored.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from attn_diag.head.key_by_key import summed, summed_ways
from attn_diag.head.low_sums import LOW_SUMS, low_sum_ways, low_summed
from attn_diag.head.unfused import FUSED, distinct, forwards, unfused, ways
from attn_diag.head.unfused_scores import finite, scaled, steps_of
from attn_diag.reference import AttentionHead, FloatFormat, round_nearest_even

# How it is made, whether L is cast, and whose O it is.
FROM_LSE = (
    "from-l:fused:low",
    "from-l:stored:fp32",
    "from-l:shifted:fp32",
    "from-l:compiled:low",
    "from-l:steps:low",
    "from-l:compiled:fp32",
    "from-l:steps:fp32",
    "from-l:steps:low:unfused",
    "from-l:steps:fp32:unfused",
)


def backwards_from_lse(head: AttentionHead) -> tuple[str, ...]:
    """``FROM_LSE``; none of a head without gradients, with dropout, a softcap or a sink."""
    # A sink that L lost would look like plain torch's rounded L.
    plain = head.dropout is None and head.softcap is None and head.sink is None
    return FROM_LSE if head.do is not None and plain else ()


def unpublished(head: AttentionHead, fmt: FloatFormat, quantity: str) -> tuple[str, ...]:
    """The ways of plain torch (``unfused``), of ``key_by_key`` and of these that leave a quantity differently."""
    if quantity == "o":
        return *forwards(head), *summed_ways(head)
    return *(forwards(head) if quantity == "dv" else distinct(head, fmt)), *backwards_from_lse(head)


def made_by(head: AttentionHead, fmt: FloatFormat, way: str, out: FloatFormat) -> dict[str, Tensor] | None:
    """What a kernel returns for one head that is none that is published; None: it is.

    Args:
        head: The head.
        fmt: The inputs' format.
        way: One of ``unfused.ways`` or of ``FROM_LSE``, also with ``FUSED`` behind it, ``SUMMED`` or of ``LOW_SUMS``.
        out: The format in which O is stored.
    """
    if (alone := way.removesuffix(FUSED)) in ways(head):
        return unfused(head, fmt, way, out=out)
    if alone in backwards_from_lse(head):
        return from_lse(head, fmt, way)
    if way in LOW_SUMS:
        return low_summed(head, fmt, way) if way in low_sum_ways(head, fmt) else None
    return summed(head, fmt, out) if way in summed_ways(head) else None


def from_lse(
    head: AttentionHead, fmt: FloatFormat, way: str, forward: tuple[Tensor, Tensor] | None = None
) -> dict[str, Tensor]:
    """What such a kernel returns for one head.

    Args:
        head: The head; all of its scores are held at once.
        fmt: The inputs' format.
        way: One of ``FROM_LSE``; with ``FUSED`` behind it a fused kernel that rounds L, or of one with an fp32 L
            the scores of its backward, alone; of a fused one nothing.
        forward: O and L of its forward, where they are known.

    Returns:
        o, lse, delta, dq, dk and dv; float64.
    """
    assert head.do is not None
    alone, way = way.endswith(FUSED), way.removesuffix(FUSED)
    _, how, of_lse, *of_o = way.split(":")
    cast = partial(round_nearest_even, fmt=fmt)
    steps = steps_of(head, fmt)
    exact = steps.scores("fp32", biased=False)
    true, lse = exact.scores, exact.lse if forward is None else forward[1]
    if forward is not None:
        o = forward[0]
    elif of_o:
        o = steps.scores("scores", biased=False).out
    else:
        o = steps.fused_o
    in_steps, fused = how == "steps" and not alone, how in ("fused", "stored", "shifted") or alone
    nothing = alone and how in ("fused", "stored")
    given = cast(finite(lse)) if of_lse == "low" and not nothing else finite(lse)
    rounded = (how == "stored" and not nothing) or not fused or (alone and of_lse == "fp32" and not nothing)
    scores = scores_of(head, fmt, how) if rounded else true
    if forward is None and of_o and of_lse == "low":
        largest = finite(scores.amax(1))
        given = cast(largest + cast(cast(cast(cast(scores - largest[:, None]).exp()).sum(1)).clamp(min=1e-30).log()))
    shifted = scores - given[:, None]
    stored = (in_steps and of_lse == "low") or (how == "shifted" and not alone)
    wide = (cast(shifted) if stored else shifted).exp()
    probs = cast(wide)
    dprobs = steps.exact_dprobs if fused else steps.dprobs
    if in_steps:
        delta = cast(cast(head.do * o).sum(1))
        dscores = cast(probs * cast(dprobs - delta[:, None]))
    else:
        delta = (head.do * o).sum(1)
        dscores = cast(wide * (dprobs - delta[:, None]))
    dq, dk = dscores @ head.k, dscores.T @ head.q
    dq, dk = (cast(x * head.scale) if fused else scaled(cast(x), head.scale, fmt) for x in (dq, dk))
    return {"o": o, "lse": lse, "delta": delta, "dq": dq, "dk": dk, "dv": cast(probs.T @ head.do)}


def scores_of(head: AttentionHead, fmt: FloatFormat, how: str) -> Tensor:
    """S of which a backward makes P, masked, [Tq, Tk] float64; ``how``: the second part of one of ``FROM_LSE``."""
    products = steps_of(head, fmt).products
    if how in ("compiled", "steps"):
        products = round_nearest_even(products, fmt)
    scores = scaled(products, head.scale, fmt) if how == "steps" else products * head.scale
    head.apply_mask(scores, slice(0, len(head.q)), slice(0, len(head.k)))
    return round_nearest_even(scores, fmt) if how == "stored" else scores
