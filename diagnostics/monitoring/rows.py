"""Row by row, for a few heads at once: attention in float64 against what the kernel returned. Never waits for the device.

The formulas are those of ``attn_diag.reference.attention`` and ``attn_diag.measure``, over heads and query rows in
bounded blocks. A row is *usable* where it sees a key and all that was captured of it is finite.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attn_diag.monitoring.sample import Sample
from attn_diag.reference import FloatFormat, format_of, round_nearest_even, ulp
from attn_diag.reference.attention import is_power_of_two

# Bytes of [heads, rows, keys] float64 that one block may have alive.
TEMPORARIES = 64 * 2**20
_ALIVE = 4
_MIN_ROWS = 16
# exp of this is 0 in float64, and 0 * this is 0 where 0 * -inf would be NaN.
_FLOOR = -800.0


@dataclass
class HeadRows:
    """Row quantities of h heads and one sequence, [h, R] float64 unless said otherwise.

    ``repeated``, ``units``: whether several scores tie at the maximum when rounded to q's dtype, and whether several P_bar
    round to 1 (bool). With dO: ``delta_error`` observed - reference, ``noise_floor`` sigma, ``dq`` and ``probs_k`` = P K
    [h, R, D], ``contributions`` [h, R, Dv] of O's features to delta's error. ``top_key`` int64.
    """

    usable: Tensor
    sees_key: Tensor
    max_logit: Tensor
    top_key: Tensor
    entropy: Tensor
    repeated: Tensor
    units: Tensor
    lse: Tensor
    delta: Tensor | None = None
    delta_error: Tensor | None = None
    noise_floor: Tensor | None = None
    dq: Tensor | None = None
    probs_k: Tensor | None = None
    contributions: Tensor | None = None


def heads_at_once(sample: Sample) -> int:
    """How many key heads fit one block with at least 16 rows each."""
    group = sample.q.shape[1] // sample.k.shape[1]
    per_head = group * min(_MIN_ROWS, sample.q.shape[2]) * sample.k.shape[2] * 8 * _ALIVE
    linear = group * sample.q.shape[2] * (2 * sample.q.shape[3] + 2 * sample.v.shape[3]) * 8
    return max(1, min(sample.k.shape[1], TEMPORARIES // per_head, TEMPORARIES // linear))


def measure_rows(sample: Sample, sequence: int, kv_heads: slice) -> HeadRows:
    """The rows of the query heads that share key heads ``kv_heads``, of one of the sampled sequences."""
    group = sample.q.shape[1] // sample.k.shape[1]
    heads = slice(kv_heads.start * group, kv_heads.stop * group)
    k, v = (t[sequence, kv_heads].double() for t in (sample.k, sample.v))
    count = heads.stop - heads.start
    step = max(1, TEMPORARIES // (count * len(k[0]) * 8 * _ALIVE))
    rows = sample.q.shape[2]
    blocks = [
        _block(sample, sequence, heads, slice(start, min(start + step, rows)), k, v) for start in range(0, rows, step)
    ]
    names = [name for name, value in vars(blocks[0]).items() if value is not None]
    return HeadRows(**{name: torch.cat([getattr(b, name) for b in blocks], 1) for name in names})


def _block(sample: Sample, sequence: int, heads: slice, rows: slice, k: Tensor, v: Tensor) -> HeadRows:
    """One block of query rows; k, v [g, Tk, D]. Products are batched over key heads, [g, heads per key head * rows, K]."""
    count, size = heads.stop - heads.start, rows.stop - rows.start
    keys = _visible(sample, rows)
    k, v = k[:, keys], v[:, keys]

    def read(tensor: Tensor) -> Tensor:
        return tensor[sequence, heads, rows].double()

    def product(left: Tensor, right: Tensor) -> Tensor:
        return (left.reshape(len(k), -1, left.shape[-1]) @ right).view(count, size, -1)

    q, out = read(sample.q), read(sample.o)
    # A power of two costs no rounding; another scale waits for the product, as in the reference.
    early = is_power_of_two(sample.scale)
    scores = product(q * sample.scale if early else q, k.mT)
    if not early:
        scores.mul_(sample.scale)
    scores, slope, largest = _mask(sample, sequence, heads, rows, keys, scores)
    fmt = format_of(sample.q.dtype)
    row_max, top_key = scores.max(-1)
    sees_key = row_max != -torch.inf  # NaN is left to ``usable``
    row_max = torch.where(sees_key, row_max, 0.0)
    repeated = (scores >= _tie_threshold(row_max, fmt)[..., None]).sum(-1) > 1
    shifted = scores.sub_(row_max[..., None])
    units = (shifted >= fmt.rounds_to_one).sum(-1) > 1
    probs = shifted.clamp_(min=_FLOOR).exp()
    row_sum = torch.where(sees_key, probs.sum(-1), 1.0)
    inverse = torch.where(sees_key, row_sum.reciprocal(), 0.0)
    result = HeadRows(
        usable=sees_key & out.isfinite().all(-1) & q.isfinite().all(-1) & row_sum.isfinite(),
        sees_key=sees_key,
        max_logit=row_max if largest is None else largest,
        top_key=top_key + keys.start,
        entropy=row_sum.log() - (shifted.mul_(probs)).sum(-1) * inverse,
        repeated=repeated & sees_key,
        units=units & sees_key,
        lse=row_max + row_sum.log(),
    )
    del scores, shifted
    if sample.do is None:
        return result
    do = read(sample.do)
    truth = product(probs, v) * inverse[..., None]
    result.usable &= do.isfinite().all(-1)
    result.delta = (do * truth).sum(-1)
    result.contributions = do * (out - truth)
    # rowsum(dO o O_obs) - rowsum(dO o O_ref), term by term: no cancellation.
    result.delta_error = result.contributions.sum(-1)
    result.noise_floor = ((do * ulp(truth, format_of(sample.o.dtype))).square_().sum(-1) / 12).sqrt_()
    dscores = product(do, v.mT).sub_(result.delta[..., None]).mul_(probs)
    if slope is not None:
        dscores.mul_(slope)
        probs.mul_(slope)
    result.dq = product(dscores, k) * (inverse * sample.scale)[..., None]
    result.probs_k = product(probs, k) * inverse[..., None]
    # A NaN in a key that the row does not see reaches it all the same: 0 * NaN.
    result.usable &= (result.delta_error + result.dq.sum(-1) + result.probs_k.sum(-1)).isfinite()
    return result


def _visible(sample: Sample, rows: slice) -> slice:
    """The keys that some row of the block may see; at least one, so that there is a maximum."""
    length = sample.k.shape[2]
    left, right = (None if n < 0 else n for n in sample.window or (-1, -1))
    if sample.causal != "none":
        right = 0
    first, last = sample.position(rows.start), sample.position(rows.stop - 1)
    stop = length if right is None else min(length, max(last + right + 1, 1))
    start = 0 if left is None else min(max(first - left, 0), stop - 1)
    return slice(start, stop)


def _mask(
    sample: Sample, sequence: int, heads: slice, rows: slice, keys: slice, scores: Tensor
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Softcap and masks, in place: scores, the softcap's slope, and the largest visible alpha q.k where it is another."""
    hidden = _hidden(sample, rows, keys)
    mask = _part(sample.mask, sequence, heads, rows, keys)
    additive = mask is not None and mask.dtype != torch.bool
    slope = largest = None
    if sample.softcap is not None or additive:
        seen = scores if mask is None else scores.masked_fill(~mask if not additive else mask == -torch.inf, -torch.inf)
        largest = (seen if hidden is None else seen.masked_fill(hidden, -torch.inf)).amax(-1)
        del seen
    if sample.softcap is not None:
        scores.div_(sample.softcap).tanh_()
        slope = 1 - scores.square()
        scores.mul_(sample.softcap)
    if hidden is not None:
        scores.masked_fill_(hidden, -torch.inf)
    if mask is not None:
        scores = scores.add_(mask) if additive else scores.masked_fill_(~mask, -torch.inf)
    return scores, slope, largest


def _hidden(sample: Sample, rows: slice, keys: slice) -> Tensor | None:
    """Where causality or a window hides a key, bool [R, K]."""
    left, right = (None if n < 0 else n for n in sample.window or (-1, -1))
    if sample.causal != "none":
        right = 0
    if left is None and right is None:
        return None
    positions = sample.positions(rows.start, rows.stop)[:, None]
    distance = torch.arange(keys.start, keys.stop, device=positions.device) - positions
    hidden = torch.zeros_like(distance, dtype=torch.bool) if right is None else distance > right
    return hidden if left is None else hidden | (distance < -left)


def _part(mask: Tensor | None, sequence: int, heads: slice, rows: slice, keys: slice) -> Tensor | None:
    if mask is None:
        return None
    own = mask[sequence if len(mask) > 1 else 0]
    own = own[heads] if len(own) > 1 else own
    own = own[:, rows] if own.shape[1] > 1 else own
    return own[..., keys] if own.shape[-1] > 1 else own


def _tie_threshold(row_max: Tensor, fmt: FloatFormat) -> Tensor:
    """The smallest float64 that rounds to what ``row_max`` rounds to: nothing but the maximum need be rounded."""
    nearest = round_nearest_even(row_max, fmt, wait=False)
    below = torch.nextafter(nearest, torch.full_like(nearest, -torch.inf))
    tie = nearest - ulp(below, fmt) / 2
    goes_up = round_nearest_even(tie, fmt, wait=False) == nearest
    return torch.where(goes_up, tie, torch.nextafter(tie, torch.full_like(tie, torch.inf)))
