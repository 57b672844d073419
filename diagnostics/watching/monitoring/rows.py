"""Row by row, for some heads at once: float64 attention against what the kernel returned. The host never waits.

The formulas are those of ``attn_diag.reference.attention`` and ``attn_diag.head.measure``, over heads and query rows in
bounded blocks, with as few operations a block as will do: on a GPU their number, not their size, is what takes time.
Last, the clusters of rows whose errors may be shared, and the standard error that follows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from attn_diag.head.no_recipe import TF32
from attn_diag.reference import Alibi, FloatFormat, absorbed_rows, format_of, hides, round_nearest_even, ulp
from attn_diag.reference.sums import is_power_of_two
from attn_diag.watching.monitoring.sample import Sample, by_layer

# Bytes of [heads, rows, keys] float64 that one block may have alive at once.
TEMPORARIES = 64 * 2**20
_ALIVE = 3
_MIN_ROWS = 16
# exp of this is 0 in float64, and 0 * this is 0 where 0 * -inf would be NaN.
_FLOOR = -800.0
# As in ``head.counterfactual``: what an fp32 score is off by, of its size; and squared, what kernels may flush to zero.
_FP32_SCORE, _FLUSHED = 2.0**-23, 2.0**-232


@dataclass
class SampledRows:
    """Row quantities of h heads and one sequence, [h, R] float64 unless said otherwise."""

    usable: Tensor
    """bool: the row sees a key, and all that was sampled of it or computed from it is finite."""
    sees_key: Tensor
    """bool: the row sees a key, and not absorbed ones alone (``reference.absorbed_rows``)."""
    max_logit: Tensor
    top_key: Tensor
    """int64: the first key with the largest score."""
    entropy: Tensor
    repeated: Tensor
    """bool: several scores equal the maximum when rounded to q's dtype."""
    units: Tensor
    """bool: several P_bar round to 1."""
    lse: Tensor
    o_error: Tensor
    """Squared error of O's row."""
    o_size: Tensor
    """Its reference's squared norm."""
    o_expected: Tensor
    """What a well-rounded kernel leaves of it in the mean (``head.counterfactual``)."""
    o_casts: Tensor
    """Of that the part of P_bar's cast."""
    absorbed: Tensor | None = None
    """bool: the row sees absorbed keys alone (``reference.absorbed_rows``); None: no row does."""
    gradient: GradientRows | None = None


@dataclass
class GradientRows:
    """What needs dO; float64, as ``SampledRows``."""

    delta: Tensor
    """[h, R]."""
    delta_error: Tensor
    """Observed - reference, [h, R]."""
    noise_floor: Tensor
    """sigma, [h, R]."""
    cast_noise: Tensor
    """Standard deviation that the cast of P_bar gives delta in a well-rounded kernel, [h, R]."""
    copies: Tensor
    """bool [h, R]: O is V of the top key, but for less than a spacing or so."""
    dq: Tensor
    """[h, R, D]."""
    probs_k: Tensor
    """P K, [h, R, D]."""
    contributions: Tensor
    """What each feature of O adds to delta's error, [h, R, Dv]."""
    dq_error: Tensor | None = None
    """Observed - reference, [h, R, D], where dQ was seen."""
    dq_casts: Tensor | None = None
    """Then: the variance that the casts of dS and dQ give a row of dQ in a well-rounded kernel, [h, R]."""
    dq_expected: Tensor | None = None
    """Then: what such a kernel leaves of a row's squared error in the mean, delta's part included, [h, R]."""


def cast_error(fmt: FloatFormat) -> float:
    """Root mean square of a nearest-even cast's relative error, 2^-p / sqrt(24): E (1/x)^2 = 1/2 over a binade."""
    return float(2.0**-fmt.precision / 24**0.5)


def multiplied(fmt: FloatFormat) -> FloatFormat:
    """The format in which operands are multiplied: of FP32 it may be TF32."""
    return fmt if fmt.precision <= TF32.precision else TF32


def heads_at_once(sample: Sample, temporaries: int) -> int:
    """Count the key heads that fit one block with at least 16 rows each, and whose row quantities fit as many bytes."""
    group, rows = sample.q.shape[1] // sample.k.shape[1], sample.q.shape[2]
    block = group * min(_MIN_ROWS, rows) * sample.k.shape[2] * 8 * _ALIVE
    linear = group * rows * (2 * sample.q.shape[3] + 2 * sample.v.shape[3]) * 8
    return max(1, temporaries // max(block, linear))


def measure_rows(sample: Sample, sequence: int, kv_heads: slice, temporaries: int = TEMPORARIES) -> SampledRows:
    """Measure the rows of the query heads that share key heads ``kv_heads``, in one of the sampled sequences."""
    group = sample.q.shape[1] // sample.k.shape[1]
    heads = slice(kv_heads.start * group, kv_heads.stop * group)
    k, v = (t[sequence, kv_heads].double() for t in (sample.k, sample.v))
    every = _blocks(sample, heads.stop - heads.start, temporaries)
    blocks = [_block(sample, sequence, heads, rows, k, v) for rows in every]
    b = {name: joined([block[name] for block in blocks], 1) for name in blocks[0]}
    del blocks
    fmt = format_of(sample.q.dtype)
    row_max, row_sum = b["row_max"], b["row_sum"]
    sees_key = row_max != -torch.inf  # NaN is left to ``usable``
    row_max = torch.where(sees_key, row_max, 0.0)
    inverse = torch.where(sees_key, row_sum.reciprocal(), 0.0)
    log_sum = torch.where(sees_key, row_sum, 1.0).log()
    out, truth = sample.o[sequence, heads].double(), b["out"].mul_(inverse[..., None])
    trace = row_sum + out.sum(-1)  # finite where they are
    error = out - truth
    spacing = ulp(truth, format_of(sample.o.dtype))
    cast, smallest = cast_error(multiplied(fmt)) ** 2, 2.0 ** (2 * (fmt.min_exponent - fmt.precision)) / 12
    scores = row_max.mul(_FP32_SCORE).square_()
    square = inverse.square()
    o_casts = b["o_cast"].mul_(square) * (scores + cast)
    values, keys = (t.square().sum((1, 2)).repeat_interleave(group)[:, None] for t in (v, k))
    found = SampledRows(
        usable=sees_key,
        sees_key=sees_key,
        max_logit=b.get("largest", row_max),
        top_key=b["top_key"],
        entropy=log_sum - b["weighted"] * inverse,
        repeated=b["second"] >= _tie_threshold(row_max, fmt),
        units=b["second"] - row_max >= fmt.rounds_to_one,
        lse=row_max + log_sum,
        o_error=error.square().sum(-1),
        o_size=truth.square().sum(-1),
        o_expected=spacing.square().sum(-1).div_(12) + o_casts + values * (smallest * square + _FLUSHED),
        o_casts=o_casts,
        absorbed=b.get("absorbed"),
    )
    if sample.do is not None:
        do = sample.do[sequence, heads].double()
        contributions = error.mul_(do)
        found.gradient = GradientRows(
            delta=b["delta"],
            # rowsum(dO o O_obs) - rowsum(dO o O_ref), term by term: no cancellation.
            delta_error=contributions.sum(-1),
            noise_floor=(do * spacing).square_().sum(-1).div_(12).sqrt_(),
            cast_noise=b["cast"].sqrt_().mul_(inverse * cast_error(fmt)),
            copies=(row_sum - 1) * inverse <= 2.0**-fmt.precision,
            dq=b["dq"].mul_((inverse * sample.scale)[..., None]),
            probs_k=b["probs_k"].mul_(inverse[..., None]),
            contributions=contributions,
        )
        if sample.dq is not None:
            g = found.gradient
            g.dq_error = sample.dq[sequence, heads].double().sub_(g.dq)
            of_scores = b["ds_cast"].mul_(square * sample.scale**2)
            squares = g.dq.square().sum(-1)
            g.dq_casts = (of_scores + squares).mul_(cast_error(fmt) ** 2)
            of_probs = (g.cast_noise / cast_error(fmt)).square_().mul_(cast)
            of_delta = (g.noise_floor.square() + of_probs) * g.probs_k.square().sum(-1) * sample.scale**2
            # Kernels cast dS or alpha dS: below the normal numbers the latter is coarser.
            lost = keys * (smallest * max(sample.scale**2, 1.0) + _FLUSHED)
            g.dq_expected = of_scores * (cast + scores) + squares * cast + of_delta + lost
        # A NaN in a key that the row does not see reaches it all the same: 0 * NaN.
        gradient = found.gradient
        trace = trace + gradient.delta_error + gradient.dq.sum(-1) + gradient.probs_k.sum(-1)
        if gradient.dq_error is not None:
            trace = trace + gradient.dq_error.sum(-1)
    found.usable = sees_key & (trace.abs() < torch.inf)
    return found


def joined(parts: list[Tensor], axis: int) -> Tensor:
    """``torch.cat``, without a copy of a single part."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, axis)


def _blocks(sample: Sample, heads: int, temporaries: int) -> Iterator[slice]:
    """Query rows by blocks: as many as their visible keys leave room for."""
    rows, start = sample.q.shape[2], 0
    budget = temporaries // (heads * 8 * _ALIVE)
    while start < rows:
        # The last row of the block decides; its keys are not fewer than its predecessors'.
        low, high = start + 1, rows
        while low < high:
            stop = (low + high + 1) // 2
            keys = _visible(sample, slice(start, stop))
            low, high = (stop, high) if (stop - start) * (keys.stop - keys.start) <= budget else (low, stop - 1)
        yield slice(start, low)
        start = low


def _block(sample: Sample, sequence: int, heads: slice, rows: slice, k: Tensor, v: Tensor) -> dict[str, Tensor]:
    """One block of query rows, sums not yet divided by l: [h, R] or [h, R, D or Dv] by name. k, v [g, Tk, D or Dv].

    Products are batched over key heads, [g, query heads of one * rows, K]. ``second`` is the largest score but the one
    at ``top_key``; ``weighted`` is sum P_bar ln P_bar.
    """
    count, size = heads.stop - heads.start, rows.stop - rows.start
    keys = _visible(sample, rows)
    k, v = k[:, keys], v[:, keys]

    def product(left: Tensor, right: Tensor) -> Tensor:
        return torch.bmm(left.reshape(len(k), -1, left.shape[-1]), right).view(count, size, -1)

    q = sample.q[sequence, heads, rows].double()
    # A power of two costs no rounding; another scale waits for the product, as in the reference.
    early = is_power_of_two(sample.scale)
    scores = product(q.mul_(sample.scale) if early else q, k.mT)
    if not early:
        scores.mul_(sample.scale)
    scores, slope, largest, absorbed = _mask(sample, sequence, heads, rows, keys, scores)
    row_max, top_key = scores.max(-1, keepdim=True)
    scores.scatter_(-1, top_key, -torch.inf)
    found = {"row_max": row_max[..., 0], "top_key": top_key[..., 0] + keys.start, "second": scores.amax(-1)}
    scores.scatter_(-1, top_key, row_max)
    # exp(-inf - -inf) is NaN: a row without keys has no maximum, and P_bar = 0 throughout.
    shifted = scores.sub_(torch.where(row_max == -torch.inf, 0.0, row_max)).clamp_(min=_FLOOR)
    probs = shifted.exp()
    found["row_sum"] = probs.sum(-1)
    found["weighted"] = shifted.mul_(probs).sum(-1)
    if sample.sinks is not None:
        # One more key, of value 0. exp of more than the limit would be infinite, and O is 0 long before.
        of_sink = (sample.sinks[heads].double()[:, None] - found["row_max"]).clamp_(_FLOOR, -_FLOOR / 2)
        found["row_sum"] += of_sink.exp()
        found["weighted"] += of_sink * of_sink.exp()
    if largest is not None:
        found["largest"] = largest
    if absorbed is not None:
        found["absorbed"] = absorbed
    del scores, shifted

    def dropped(x: Tensor) -> Tensor:
        """[h, R, K] times W of dropout."""
        if sample.dropout_mask is None or sample.dropout_p is None:
            return x
        return x.mul(sample.dropout_mask[sequence, heads, rows, keys]).div_(1 - sample.dropout_p)

    kept = dropped(probs)
    found["out"] = product(kept, v)
    found["o_cast"] = product(kept.square(), v.square().sum(-1, keepdim=True))[..., 0]
    if sample.do is None:
        return found
    del kept
    do = sample.do[sequence, heads, rows].double()
    # Where l = 0 there are no keys, and delta is 0 / 0 in a row that is not used.
    found["delta"] = (do * found["out"]).sum(-1) / found["row_sum"]
    dprobs = dropped(product(do, v.mT))
    found["cast"] = torch.mul(dprobs, probs).square_().sum(-1)
    dscores = dprobs.sub_(found["delta"][..., None]).mul_(probs)
    if slope is not None:
        dscores.mul_(slope)
        probs.mul_(slope)
    found["dq"] = product(dscores, k)
    if sample.dq is not None:
        found["ds_cast"] = product(dscores.square(), k.square().sum(-1, keepdim=True))[..., 0]
    if sample.sinks is None:
        # P = 1 whatever the only score of a row is: dP - delta is 0, and what float64 leaves of it is no gradient.
        found["dq"].masked_fill_((found["second"] == -torch.inf)[..., None], 0.0)
    found["probs_k"] = product(probs, k)
    return found


def _visible(sample: Sample, rows: slice) -> slice:
    """The keys that some row of the block may see; at least one, so that there is a maximum."""
    if sample.documents is not None:
        return slice(0, sample.k.shape[2])  # where documents end the device alone knows
    keys = sample.masking.span(sample.position(rows.start), sample.position(rows.stop - 1), sample.k.shape[2])
    stop = max(keys.stop, 1)
    return slice(min(keys.start, stop - 1), stop)


def _mask(
    sample: Sample, sequence: int, heads: slice, rows: slice, keys: slice, scores: Tensor
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Softcap and masks, in place: scores, the softcap's slope, the largest visible alpha q.k where it is another.

    Last, [h, R], which rows are absorbed, where some may be: no key is left to them.
    """
    hidden = sample.masking.hidden(sample.positions(rows), keys)
    if sample.documents is not None:
        others = sample.documents.hidden(rows, keys)
        hidden = others if hidden is None else hidden | others
    scores = by_layer(scores, 0, sample.layers)  # [L, h, R, K]
    mask = sample.mask
    if mask is not None:
        part = slice(sequence, sequence + 1), slice(None), heads if sample.layers == 1 else slice(None), rows, keys
        mask = mask[tuple(own if size > 1 else slice(None) for own, size in zip(part, mask.shape, strict=True))][0]
    additive = mask is not None and mask.dtype != torch.bool
    slope = largest = absorbed = None
    if mask is not None and additive:
        absorbed = absorbed_rows(mask, hidden)
        mask = mask.masked_fill(absorbed, -torch.inf)
        absorbed = absorbed.expand(*scores.shape[:3], 1).flatten(0, 1)[..., 0]
    if sample.softcap is not None or additive or sample.alibi_slopes is not None:
        seen = scores
        if mask is not None:
            seen = scores.masked_fill(hides(mask), -torch.inf)
        largest = (seen if hidden is None else seen.masked_fill(hidden, -torch.inf)).amax(-1).flatten(0, 1)
        del seen
    if sample.softcap is not None:
        scores.div_(sample.softcap).tanh_()
        slope = (1 - scores.square()).flatten(0, 1)
        scores.mul_(sample.softcap)
    if hidden is not None:
        scores.masked_fill_(hidden, -torch.inf)
    if mask is not None:
        scores = scores.add_(mask) if additive else scores.masked_fill_(~mask, -torch.inf)
    scores = scores.flatten(0, 1)
    if sample.alibi_slopes is not None:
        distances = Alibi(0.0, sample.alibi_origin).distances(sample.positions(rows), keys, sample.k.shape[2])
        own = sample.alibi_slopes[sequence, heads]
        own = own[:, rows] if own.shape[1] > 1 else own
        scores = scores.add_(own[..., None] * distances)
    return scores, slope, largest, absorbed


def _tie_threshold(row_max: Tensor, fmt: FloatFormat) -> Tensor:
    """The smallest float64 that rounds to what ``row_max`` rounds to: nothing but the maximum need be rounded."""
    nearest = round_nearest_even(row_max, fmt, wait=False)
    below = torch.nextafter(nearest, torch.full_like(nearest, -torch.inf))
    tie = nearest - ulp(below, fmt) / 2
    goes_up = round_nearest_even(tie, fmt, wait=False) == nearest
    return torch.where(goes_up, tie, torch.nextafter(tie, torch.full_like(tie, torch.inf)))


def dense_clusters(keys: Tensor, usable: Tensor) -> Tensor:
    """Number the clusters that rows form by their argmax key.

    Args:
        keys: argmax key of each row, int64 [h, R].
        usable: bool [h, R]; the other rows share one cluster, with no usable row.

    Returns:
        int64 [h, R], below R.
    """
    rows = keys.shape[1]
    marked = torch.where(usable, keys, -1)
    ordered, order = marked.sort(dim=1, stable=True)
    starts = torch.zeros_like(ordered)
    starts[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    number = starts.cumsum(1)
    return torch.empty_like(number).scatter_(1, order, number).clamp_(max=rows - 1)


def standard_error(contributions: Tensor, clusters: Tensor, usable: Tensor) -> Tensor:
    """Standard error of the sum over rows of delta's errors (n times that of their mean), as ``means.two_way`` has it.

    Errors may be shared within an argmax key and within a feature; where all rows have one key, features alone count.
    All heads at once, on the device, and without degrees of freedom.

    Args:
        contributions: what each feature of O adds to a row's error, [h, R, F]; 0 in unusable rows.
        clusters: of ``dense_clusters``.
        usable: bool [h, R].

    Returns:
        [h].
    """
    heads, _, features = contributions.shape
    index = clusters[..., None].expand_as(contributions)
    cells = torch.zeros_like(contributions).scatter_add_(1, index, contributions)  # [h, cluster, F]
    ones = usable.to(contributions.dtype)
    sizes = torch.zeros_like(ones).scatter_add_(1, clusters, ones)
    n = ones.sum(1)
    mean = contributions.sum((1, 2)) / n
    by_key = _variance(cells.sum(2), sizes, mean, n)
    by_feature = _variance(cells.sum(1), (n / features)[:, None].expand(heads, features), mean, n)
    cell_sizes = sizes / features
    of_cells = (
        cells.square().sum((1, 2))
        - 2 * mean * (cells.sum(2) * cell_sizes).sum(1)
        + mean.square() * cell_sizes.square().sum(1) * features
    )
    both = torch.maximum(by_key + by_feature - of_cells, torch.minimum(by_key, by_feature))
    several = (sizes > 0).sum(1) > 1
    return torch.where(several, both, by_feature).sqrt_()


def _variance(sums: Tensor, sizes: Tensor, mean: Tensor, n: Tensor) -> Tensor:
    """CR2's variance of the sum, as ``means.mean_test``; [h]."""
    left = (1 - sizes / n[:, None]).clamp_(min=torch.finfo(sums.dtype).tiny)
    return ((sums - sizes * mean[:, None]).square() / left).sum(1)
