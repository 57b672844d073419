"""Attention that is not fused: softmax(alpha q kT) v in plain torch, whose every step is stored in the inputs' format.

    S  = cast(alpha cast(q kT))       or cast(cast(alpha q) kT), the same where alpha is a power of two; or no cast, or
                                      but of cast(alpha k) (OpenVINO on a CPU);
                                      or the second, of which m is taken off before softmax: cast(S - m), and
                                      cast(sink - m) where there is a sink, which m may be (gpt-oss);
                                      or cast(q kT), with alpha, the mask and softmax behind it in fp32 (torch.compile),
                                      or cast(alpha cast(q kT) + B) of it, where Inductor stores what softmax reads;
                                      or alpha's root on both, cast(cast(root q) cast(root k)T), as Whisper has it;
                                      or either of the first two of cast(alpha), or of q / cast(1 / alpha), as in JAX
                                      softcap c: t = cast(tanh(cast(S / c))), cast(c t), as Gemma 2 has it
                                      additive mask or slopes: cast(S + B) behind that, or cast(alpha q kT + B)
    P  = cast(softmax(S))             normalised before its cast, so that a row of the cast P does not sum to 1; or
                                      each step cast, e = cast(exp(cast(S - m))), cast(e / l) of l = cast(rowsum(e)),
                                      as in JAX; under jax.jit in BF16 of l = rowsum(e); or but S - m, and
                                      l = cast(rowsum(exp(S - m))), as in tinygrad in FP16
    O  = cast(P V)
    dP = cast(dO VT), dV = cast(PT dO)        dropout: cast(W o P) for this P, cast(W o dP) for dP; under
                                              autocast cast(W o softmax(S)), and W o dP uncast
    dS = cast(P o (dP - rowsum(P o dP)))      with the cast P, or with the one before its cast (a softmax in fp32);
                                              or with exp(cast(S) - L) of the S that torch.compile saves on a GPU
                                              where a mask is added to one head's; the forward's is in fp32
                                              or of g = cast(P o dP) in CUDA's softmax, cast(g - P o rowsum(g));
                                              or each step cast, cast(g - cast(P o cast(rowsum(g)))), the sum at its
                                      end or key by key (MLX on a CPU), or by hand,
                                              cast(P o cast(dP - cast(rowsum(g))))
                                              or derived step by step, as in JAX 0.11: of r = cast(1 / cast(ll)) for
                                              l cast, cast(e o cast(cast(dP / l) - cast(rowsum(cast(e o cast(r dP))))))
                                              softcap: cast(cast(cast(c dS) o (1 - t t)) / c); compiled in fp32, of
                                              t or of cast(t), which Inductor stores on a CPU
    dQ = cast(cast(alpha dS) K), dK = cast(cast(alpha dS)T Q); dS uncast where it is in fp32, and alpha dS cast (JAX)
                                      or not

It stores more than a fused kernel does, so it is coarser, and it makes delta from P and dP, so its dQ may be better.
A fused kernel may store S as it does (``FUSED``): O = cast(cast(exp(S - m)) V / l), and delta = rowsum(dO o O).
Sums are float64 here; torch's fp32 sums move the casts of few elements.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from attn_diag.head.key_by_key import SUMMED
from attn_diag.head.low_sums import LOW_SUMS
from attn_diag.head.unfused_scores import COMPILED, LOW_ALPHA, finite, scaled, steps_of, times_alpha
from attn_diag.reference import AttentionHead, FloatFormat, round_nearest_even
from attn_diag.reference.masking import adds
from attn_diag.reference.rounding import FP32

# How S is stored, and how dS is made: of which P (cast; fp32: before its cast; uncast: likewise with dS in fp32, as of
# q.float() k.float()T), or with which steps stored.
# S in fp32 is FlexAttention's without torch.compile too.
# Where two leave the same, as with equal scores, the first is named: it claims least.
UNFUSED = (
    "unfused:fp32:uncast",
    "unfused:fp32:fp32",
    "unfused:scores:cast",
    "unfused:scores:cuda",
    "unfused:scores:fp32",
    "unfused:q:cast",
    "unfused:q:cuda",
    "unfused:q:fp32",
    "unfused:shifted:cast",
    "unfused:shifted:cuda",
    "unfused:root:cast",
    "unfused:root:cuda",
    "unfused:root:fp32",
    "unfused:compiled:cast",
    "unfused:compiled:fp32",
    "unfused:compiled:saved",
    "unfused:q:products",
    "unfused:q:keys",
    "unfused:summed:powers",
    "unfused:scores:steps",
    "unfused:q:steps",
    "unfused:scores:by-hand",
    "unfused:q:derived",
    "unfused:q:jitted",
)
WORDS = {
    "unfused": "S and P are stored in the inputs' format, as softmax(q k^T) v in plain torch does it",
    "biased": "S, its sum with the mask and P are stored in the inputs' format, as in plain torch",
    "saved": "the backward makes P of scores rounded to the inputs' format, and the forward does not, as in eager "
    "attention with a mask under torch.compile",
    "products": "S, P and P o dP are stored in the inputs' format, as in MLX",
    "keys": "S, P and P o dP are stored in the inputs' format, and a row's sum of P o dP is rounded to it after every "
    "key, as in MLX on a CPU",
    "powers": "S, exp(S - m), its row sum and P are stored in the inputs' format, as in tinygrad",
    "steps": "every step of softmax is stored in the inputs' format, as JAX's softmax of 16 bits does it",
    "derived": "every step of softmax and of its gradient is stored in the inputs' format, as JAX's softmax of 16 bits "
    "does it",
    "alpha": "alpha, S and P are rounded to the inputs' format, as in JAX",
    "low": "alpha, and every step of softmax and of its gradient, is rounded to the inputs' format, as in Flax",
    "dropout": "S, P and 1 / (1 - p) of dropout are rounded to the inputs' format, as in plain torch on a CPU",
    "dropout_factor": "1 / (1 - p) of dropout is rounded to the inputs' format, as in torch's memory-efficient kernel",
    "low-sums": "every product of two numbers, and the sum after each, is rounded to the inputs' format, as in matrix "
    "products of FP16 in TensorFlow on a CPU",
    "low-products": "every product of two numbers is rounded to the inputs' format before it is added, and each step "
    "of softmax, as in tinygrad in BF16",
    "summed": "O is kept in the inputs' format between one key and the next, as in ggml's kernel of few rows on a CPU",
    "key": "alpha k, and P behind its division, are rounded to the inputs' format, as in OpenVINO on a CPU",
    "normalised": "P is normalised before its cast, as in attention that is not fused",
    "scores": "S is rounded to the inputs' format",
    "lse": "the backward makes P of an L (LSE) that is rounded to the inputs' format",
    "lse_steps": "the backward makes P of an L (LSE) and of scores that are rounded to the inputs' format, as in plain "
    "torch",
    "backward_scores": "the backward makes P of scores that are rounded to the inputs' format",
    "backward_shifted": "the backward rounds S - L to the inputs' format, of which it makes P",
    "backward_steps": "the backward makes P of scores that are rounded to the inputs' format, and rounds each step "
    "behind them, as in plain torch",
}
OF_BACKWARD = ("saved", "lse", "lse_steps", "backward_scores", "backward_shifted", "backward_steps")
"""Those that say nothing of the forward."""


# Plain torch on a CPU divides its mask by 1 - p in the inputs' format; on a GPU the factor is fp32.
_ROUNDED = ":rounded"
# Under autocast a softmax in fp32 is dropped out in fp32, and cast for P V alone.
_WIDE = ":wide"
# Of an additive mask (or slopes): what is stored in 16 bits has it.
_BIASED = ":biased"
_OF_BIASED = (
    "unfused:summed:cast",
    "unfused:summed:fp32",
    "unfused:scores:cast:biased",
    "unfused:scores:cuda:biased",
    "unfused:scores:fp32:biased",
    "unfused:q:cast:biased",
    "unfused:q:products:biased",
    "unfused:q:steps:biased",
    "unfused:stored:cast:biased",
    "unfused:stored:fp32:biased",
)
# Where alpha is no power of two: cast dS once, or alpha k, or alpha too, or divide by its cast inverse (Flax).
_OF_ALPHA = (
    "unfused:fp32:scaled",
    "unfused:key:fp32",
    "unfused:low:fp32",
    "unfused:low:products",
    "unfused:low:keys",
    "unfused:low:derived",
    "unfused:low:jitted",
    "unfused:divided:derived",
    "unfused:divided:jitted",
    "unfused:low-scores:fp32",
    "unfused:low-scores:derived",
    "unfused:low-scores:jitted",
)
# And where there is a sink: gpt-oss's way of q kT times alpha, as HY-4 has it.
_OF_SINK = ("unfused:shifted-scores:cast", "unfused:shifted-scores:cuda")
# Where a mask hides keys at most.
_OF_HIDDEN = ("unfused:stored:cast", "unfused:stored:fp32")
# Of a softcap: compiled for a CPU.
_OF_CAPPED = ("unfused:capped:cast", "unfused:capped:fp32")
# Ways whose softmax stores each step.
_STEPS = ("steps", "by-hand", "derived", "jitted", "powers")
# Those whose g is stored, and what is made of it.
_STORED_PRODUCTS = ("products", "keys", "steps")
# Behind a way: a fused kernel that stores the same scores.
FUSED = ":fused"
_FROM_LSE = "from-l:"
# Not plain torch: a fused kernel that multiplies the cast P by a rounded 1 / (1 - p).
ROUNDED_DROPOUT = "rounded-dropout"


def ways(head: AttentionHead) -> tuple[str, ...]:
    """``UNFUSED``, and more with an additive mask or slopes, a softcap, or a scale that rounds; with dropout each also
    with a rounded 1 / (1 - p), and those with a softmax in fp32 with dropout in fp32."""
    mask, biased = head.masking.mask, head.masking.alibi is not None
    biased |= mask is not None and adds(mask)
    found = (*UNFUSED, *(_OF_BIASED if biased else _OF_HIDDEN), *(_OF_CAPPED if head.softcap is not None else ()))
    rounds = math.frexp(abs(head.scale))[0] not in (0.0, 0.5)
    found = (*found, *_OF_ALPHA, *(() if head.sink is None else _OF_SINK)) if rounds else found
    if head.dropout is None:
        return found
    wide = (way + _WIDE for way in found if way.endswith((":fp32", ":uncast")))
    return (*found, *(way + _ROUNDED for way in found), *wide)


def distinct(head: AttentionHead, fmt: FloatFormat) -> tuple[str, ...]:
    """Of ``ways`` one for each dQ and dK, the first.

    Where alpha is a power of two it may be multiplied before or behind a cast to BF16, which ends as few numbers in
    underflow as fp32 does; S is stored then even where only q kT is, if nothing is added to it.
    """
    exact = math.frexp(abs(head.scale))[0] == 0.5 and fmt.min_exponent == FP32.min_exponent
    plain = head.softcap is None and head.masking.alibi is None
    if not (exact and plain and (head.masking.mask is None or not adds(head.masking.mask))):
        return ways(head)

    def same(way: str) -> str:
        alone, alpha_in, probs_of, *more = way.split(":")
        stored = alpha_in in ("q", "compiled", "stored")
        return ":".join((alone, "scores" if stored else alpha_in, "fp32" if probs_of == "saved" else probs_of, *more))

    return _firsts(ways(head), same)


def forwards(head: AttentionHead) -> tuple[str, ...]:
    """Of ``ways`` one for each O, and so each dV, the first: the P and the steps that dS is made of change neither."""

    def same(way: str) -> tuple[str, ...]:
        _, alpha_in, probs_of, *more = way.split(":")
        own = probs_of in ("jitted", "powers")
        return alpha_in, "" if probs_of not in _STEPS else probs_of if own else "steps", *more

    return _firsts(ways(head), same)


def _firsts(of: Sequence[str], kind: Callable[[str], object]) -> tuple[str, ...]:
    """The first of each kind, in their order."""
    found = dict[object, str]()
    for way in of:
        found.setdefault(kind(way), way)
    return tuple(found.values())


def named(way: str) -> str:
    """Which of ``WORDS`` says it: one of ``ways``, ``from_lse``'s, ``LOW_SUMS``, ``ROUNDED_DROPOUT`` or ``SUMMED``."""
    if way.startswith(_FROM_LSE):
        alone = way.startswith(("from-l:fused", "from-l:stored:fp32", "from-l:shifted"))
        return also_fused(way) or "" if alone else "lse_steps" if ":low" in way else "backward_steps"
    if way == ROUNDED_DROPOUT:
        return "dropout_factor"
    if way in (SUMMED, *LOW_SUMS):
        return "summed" if way == SUMMED else way
    if way.endswith(_ROUNDED):
        return "dropout"
    way = way.removesuffix(_WIDE)
    if way.endswith((":products", ":keys", ":powers", ":steps", ":by-hand", ":saved")):
        return "steps" if way.endswith(":by-hand") else way.rpartition(":")[2]
    if way == "unfused:key:fp32":
        return "key"
    if way.split(":")[1] in LOW_ALPHA:
        return "alpha" if way.endswith(":fp32") else "low"
    if way.endswith((":derived", ":jitted")):
        return "derived"
    if way in _OF_BIASED:
        return "biased"
    return "normalised" if ":fp32:" in way else "unfused"


def also_fused(way: str) -> str | None:
    """Which of ``WORDS`` says of a way as of ``named`` what a fused kernel may do as well; None: nothing."""
    if way.startswith(_FROM_LSE):
        return "lse" if ":low" in way else "backward_shifted" if "shifted" in way else "backward_scores"
    return None if named(way) in ("normalised", "key") else "scores"


def unfused(head: AttentionHead, fmt: FloatFormat, way: str, *, out: FloatFormat | None = None) -> dict[str, Tensor]:
    """What plain torch returns for one head.

    Args:
        head: The head; all of its scores are held at once.
        fmt: The inputs' format.
        way: One of ``ways``, or with ``FUSED`` behind it.
        out: The format in which O is stored; None: the inputs'.

    Returns:
        o, lse (of the stored scores) and, with dO, delta, dq, dk and dv; float64.
    """
    fused, way = way.endswith(FUSED), way.removesuffix(FUSED)
    _, alpha_in, probs_of, *_ = way.split(":")
    cast = partial(round_nearest_even, fmt=fmt)

    def dropped(values: Tensor) -> Tensor:
        if head.dropout is None:
            return values
        factor = torch.full((), head.dropout.factor, dtype=torch.float64, device=values.device)
        found = values * (head.dropout.kept * (cast(factor) if way.endswith(_ROUNDED) else factor))
        return found if fused or way.endswith(_WIDE) else cast(found)

    steps = steps_of(head, fmt)
    stored = steps.scores(alpha_in, biased=_BIASED in way)
    scores, capped, sink, lse, wide_scores = stored.scores, stored.capped, stored.sink, stored.lse, stored.wide_scores
    if probs_of in _STEPS:
        powers, row_sum = _in_steps(scores, sink, cast, alone=probs_of == "powers")
        low_sum = cast(row_sum)
        row_sum = row_sum if probs_of == "jitted" else low_sum
        wide = cast(powers / row_sum)
    else:
        wide = stored.probs
    if fused:
        if probs_of not in _STEPS:
            shift = finite(scores.amax(1))
            powers, row_sum = cast((scores - shift[:, None]).exp()), (finite(lse) - shift).exp()[:, None]
        slope = 1.0 if capped is None else 1 - capped.square()
        return {"lse": lse} | _fused(head, wide, powers, row_sum, slope, cast, dropped, out or fmt)
    probs = stored.cast_probs if probs_of not in _STEPS else cast(wide)
    kept = cast(dropped(wide)) if way.endswith(_WIDE) else dropped(probs)
    shared = kept is stored.cast_probs  # which has O and dV of several ways
    of_inputs = out is None or out == fmt
    o = stored.out if shared and of_inputs else round_nearest_even(kept @ head.v, out or fmt)
    found = {"o": o, "lse": lse if stored.largest is None else lse + stored.largest}
    if head.do is None:
        return found
    dprobs = dropped(steps.dprobs)
    weights = wide if probs_of in ("fp32", "uncast", "scaled") else probs
    if probs_of == "saved":
        weights = (cast(scores) - finite(lse)[:, None]).exp()
    in_steps = probs_of in ("cuda", "by-hand", *_STORED_PRODUCTS)
    products = cast(weights * dprobs) if in_steps else weights * dprobs
    delta = products.sum(1)
    if probs_of in ("derived", "jitted"):
        inverse = cast(1 / cast(low_sum * low_sum))
        delta = cast(cast(cast(inverse * dprobs) * powers).sum(1))
        dscores = cast(powers * cast(cast(dprobs / row_sum) - delta[:, None]))
    elif probs_of == "powers":
        inner = cast((dprobs * powers).sum(1))[:, None]
        dscores = (dprobs / row_sum - cast(inner / row_sum.square())) * (scores - finite(scores.amax(1))[:, None]).exp()
    elif probs_of == "by-hand":
        dscores = cast(weights * cast(dprobs - cast(delta)[:, None]))
    elif probs_of in _STORED_PRODUCTS:
        delta = _key_by_key(products, cast) if probs_of == "keys" else cast(delta)
        dscores = cast(products - cast(weights * delta[:, None]))
    else:
        dscores = products - weights * delta[:, None]
    if capped is not None and head.softcap is not None:
        slope = 1 - (cast(capped) if alpha_in == "capped" else capped).square()
        if wide_scores:
            dscores *= slope
        else:
            dscores = cast(cast(cast(dscores) * head.softcap) * slope) / head.softcap
    in_fp32 = probs_of in ("uncast", "scaled", "powers") or alpha_in in COMPILED
    dscores = dscores if in_fp32 else cast(dscores)
    if sink is not None and stored.top is not None and stored.by_key is not None:
        # gpt-oss's m has a gradient, what the casts leave of a row's sum, which goes to the largest score.
        of_sink = cast(-cast((sink - lse).exp()) * delta)
        moved = cast(dscores.sum(1) + of_sink).where(stored.by_key, 0.0)
        dscores = cast(dscores.scatter_add(1, stored.top[:, None], -moved[:, None]))
    low_q, low_k = stored.factors or (head.q, head.k)
    if alpha_in in ("q", "shifted", "low", "divided"):
        dq, dk = times_alpha(cast(dscores @ head.k), head.scale, fmt, alpha_in), cast(dscores.T @ low_q)
    elif alpha_in == "root":
        root = abs(head.scale) ** 0.5
        dq = scaled(cast(dscores @ low_k), root if head.scale > 0 else -root, fmt)
        dk = scaled(cast(dscores.T @ low_q), root, fmt)
    else:
        dscores = dscores * head.scale if in_fp32 else times_alpha(dscores, head.scale, fmt, alpha_in)
        dscores = dscores if probs_of == "uncast" else cast(dscores)
        dq, dk = cast(dscores @ head.k), cast(dscores.T @ head.q)
    dv = stored.dv if shared else cast(kept.T @ head.do)
    return found | {"delta": delta, "dq": dq, "dk": dk, "dv": dv}


def _fused(
    head: AttentionHead,
    probs: Tensor,
    powers: Tensor,
    row_sum: Tensor,
    slope: Tensor | float,
    cast: Callable[[Tensor], Tensor],
    dropped: Callable[[Tensor], Tensor],
    out: FloatFormat,
) -> dict[str, Tensor]:
    """What a fused kernel makes of stored scores: of P, of exp(S - m) and its sum, and of a softcap's slope."""
    o = round_nearest_even((dropped(powers) @ head.v) / row_sum, out)
    if head.do is None:
        return {"o": o}
    delta = (head.do * o).sum(1)
    dscores = cast(probs * (dropped(head.do @ head.v.T) - delta[:, None]) * slope)
    dq, dk = cast(dscores @ head.k * head.scale), cast(dscores.T @ head.q * head.scale)
    return {"o": o, "delta": delta, "dq": dq, "dk": dk, "dv": cast(dropped(cast(probs)).T @ head.do)}


def _in_steps(
    scores: Tensor, sink: Tensor | None, cast: Callable[[Tensor], Tensor], *, alone: bool = False
) -> tuple[Tensor, Tensor]:
    """exp(S - m), each step cast, and its sum [n, 1]; 1 in rows that see no key. ``alone``: the powers alone cast."""
    shift = finite(scores.amax(1) if sink is None else torch.maximum(scores.amax(1), sink))
    of_sink = None if sink is None else sink - shift
    if alone:
        wide = (scores - shift[:, None]).exp()
        powers, row_sum = cast(wide), wide.sum(1) if of_sink is None else wide.sum(1) + of_sink.exp()
    else:
        powers = cast(cast(scores - shift[:, None]).exp())
        row_sum = powers.sum(1) if of_sink is None else powers.sum(1) + cast(cast(of_sink).exp())
    return powers, row_sum.masked_fill(row_sum == 0, 1.0)[:, None]


def _key_by_key(products: Tensor, cast: Callable[[Tensor], Tensor]) -> Tensor:
    """The sum of every row, cast after each key, [Tq]."""
    found = products.new_zeros(len(products))
    for of_key in products.T.contiguous():
        found = cast(found + of_key)
    return found
