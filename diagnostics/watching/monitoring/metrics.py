"""Per-head figures of one attention call on the device, against float64; nothing here makes the host wait.

They are those of ``attn_diag.inspect`` (``attn_diag.results.diagnosis``), over all heads at once and on sampled rows.
With e_t = -alpha Delta_delta,t (P K)_t the first-order error of dQ in row t and x_t the projection's input, the
predicted error of dW_Q is E = sum e_t (x) x_t. Plain torch's backward has P as the forward rounded it and no delta from
O: there e_t is dQ's measured error, and its part along (P K)_t a figure of its own. See ``HeadMetrics``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attn_diag.reference import format_of
from attn_diag.watching.monitoring.figures import NONFINITE, NORMS, SUMS, HeadSums
from attn_diag.watching.monitoring.key_gradients import COLUMNS, ForwardSketch, GradientFit
from attn_diag.watching.monitoring.nonfinite import broken_rows
from attn_diag.watching.monitoring.rows import (
    TEMPORARIES,
    SampledRows,
    cast_error,
    dense_clusters,
    heads_at_once,
    joined,
    measure_rows,
    multiplied,
    standard_error,
)
from attn_diag.watching.monitoring.sample import LayerProjection, Sample, by_layer, pieces

# Columns to which x is projected for what must be kept or sent between ranks.
SKETCH = 256


def head_sums(
    sample: Sample, past: Tensor | None = None, *, alone: bool = True, temporaries: int = TEMPORARIES
) -> HeadSums:
    """The sums behind the figures.

    Args:
        sample: Of one layer, or of so many as ``stacks`` says.
        past: See ``HeadSums.metrics``.
        alone: There are no other ranks. Of the sketches only E's is needed then, the norms being known already.
        temporaries: About so many bytes are used.
    """
    with torch.no_grad(), torch.autocast(sample.q.device.type, enabled=False):
        heads, step, count = sample.k.shape[1], heads_at_once(sample, temporaries), 1 if alone else len(NORMS)
        # Several layers are not taken apart: each has its x.
        step = heads if sample.layers > 1 else min(step, heads)
        parts = [
            _FewHeads(sample, slice(start, min(start + step, heads)), count, temporaries).run(past)
            for start in range(0, heads, step)
        ]
        return HeadSums.joined(parts) if len(parts) > 1 else parts[0]


def sketch(x: Tensor) -> Tensor:
    """``x`` [..., C] float64 projected to [..., c], c = min(C, 256), so that inner products are kept in the mean.

    Random signs / sqrt(c), the same on every rank and at every check; C <= 256 is left as it is. A squared norm of
    several rows' sums is off by a relative standard deviation of at most sqrt(2 / c), 9 %.
    """
    if x.shape[-1] <= SKETCH:
        return x
    key = (x.shape[-1], x.device)
    if key not in _SIGNS:
        generator = torch.Generator().manual_seed(x.shape[-1])
        drawn = torch.randint(0, 2, (x.shape[-1], SKETCH), generator=generator, dtype=torch.int8)
        # 2^-4 is a number of BF16.
        _SIGNS[key] = (drawn.to(torch.bfloat16) * 2 - 1).mul_(SKETCH**-0.5).to(x.device)
    return x @ _SIGNS[key].double()


_SIGNS: dict[tuple[int, torch.device], Tensor] = {}


class _FewHeads:
    """The sums of the query heads that share some key heads, over the sampled sequences."""

    def __init__(self, sample: Sample, kv_heads: slice, sketches: int, temporaries: int) -> None:
        group = sample.q.shape[1] // sample.k.shape[1]
        self._sample, self._kv_heads, self._sketches = sample, kv_heads, sketches
        self._temporaries = temporaries
        self._heads = slice(kv_heads.start * group, kv_heads.stop * group)
        self._totals: dict[str, Tensor] = {}
        self._keys = False
        self._measured = sample.dq is not None and not sample.fused

    def run(self, past: Tensor | None) -> HeadSums:
        sample, heads = self._sample, self._heads
        projection = sample.projection
        if sample.w_q is not None:
            projection = LayerProjection.of(sample.w_q[heads], sample.q[:, heads], sample.x, self._temporaries)
        elif projection is not None:
            projection = LayerProjection(*(values[heads] for values in projection))
        largest, seen, lefts, rights, sketched = [], [], [], [], []
        self._add_keys()
        for sequence in range(len(sample.q)):
            found = measure_rows(sample, sequence, self._kv_heads, self._temporaries)
            seen.append(found.sees_key if found.absorbed is None else found.sees_key | found.absorbed)
            rows = torch.stack([found.max_logit, *self._add_errors(sequence, found)])
            largest.append(torch.where(found.usable, rows, -torch.inf).amax(2))
            lse_factor = self._add_forward(sequence, found)
            if sample.do is None:
                continue
            x = None if sample.x is None else sample.x[sequence].double()
            left, clusters = self._add_backward(found, x, lse_factor)
            if x is not None:
                lefts.append(left)
                rights.append(x)
                sketched.append(sketch(x))
                if past is not None:
                    self._add_past(left[0], sketched[-1], past[heads].double(), clusters)
        maxima, *worst = torch.stack(largest).amax(0)
        if projection is not None:
            self._add(q=projection.q, misfit=projection.misfit)
        unknown = torch.full_like(maxima, torch.nan)
        norms, sketches = torch.stack([unknown] * len(NORMS), 1), None
        if lefts:
            left = by_layer(joined(lefts, 2), 1, sample.layers)
            norms = _squares(left, joined(rights, 1), self._temporaries)
            sketches = _products(left[: self._sketches], joined(sketched, 1)).float().flatten(1, 2)
            if sample.lse is None and not self._measured:
                norms[:, 2] = torch.nan
        weight = unknown if projection is None else projection.norms
        sums = torch.stack([self._totals.get(name, unknown) for name in SUMS], 1)
        columns = [maxima, weight, *worst, *self._nonfinite(torch.stack(seen))]
        return HeadSums(sums, torch.stack(columns, 1), norms, sketches)

    def _nonfinite(self, seen: Tensor) -> list[Tensor]:
        """One a name of ``NONFINITE``; ``seen``: which sampled rows see a key, absorbed ones too, [S, h, R]."""
        sample, heads = self._sample, self._heads
        if sample.largest is None:
            return [torch.full(seen.shape[1:2], torch.nan, dtype=torch.float64, device=seen.device)] * len(NONFINITE)
        rows: list[Tensor | None] = [None, None]
        if not sample.all_see_keys:
            rows = [None if t is None else broken_rows(t[:, heads], seen) for t in (sample.o, sample.dq)]
        largest = sample.largest.of_heads(heads, self._kv_heads)
        return list(largest.made(*rows, scaled=sample.q.dtype == torch.float16).values())

    def _add(self, **sums: Tensor) -> None:
        for name, value in sums.items():
            self._totals[name] = self._totals[name] + value if name in self._totals else value

    def _add_keys(self) -> None:
        """Adds how well dK and dV of the heads' key heads fit; the casts' part of what is left follows row by row."""
        sample, few, own = self._sample, self._kv_heads, self._heads
        keys = None if sample.keys is None else GradientFit(*(t[few] for t in sample.keys))
        if sample.do is not None and sample.dq is not None and sample.dk is not None and sample.dv is not None:
            sketch = ForwardSketch.of(sample.q[:, own], sample.o[:, own])
            keys = GradientFit.of(
                sketch, sample.k[:, few], sample.v[:, few], do=sample.do[:, own], dq=sample.dq[:, own],
                dk=sample.dk[:, few], dv=sample.dv[:, few],
            )  # fmt: skip
        self._keys = keys is not None
        if keys is None:
            return
        group = sample.q.shape[1] // sample.k.shape[1]
        each = {name: t.repeat_interleave(group) for name, t in keys._asdict().items()}
        cast = cast_error(multiplied(format_of(sample.q.dtype))) ** 2
        for name in ("dk", "dv"):
            off, size, rounded = (each[f"{name}_{of}"] for of in ("off", "size", "rounded"))
            self._add(**{f"{name}_off": off, f"{name}_size": size, f"{name}_left": rounded * cast})

    def _add_errors(self, sequence: int, found: SampledRows) -> tuple[Tensor, Tensor]:
        """Adds what O and dQ are off; returns it over what a well-rounded kernel leaves, squares of rows, [h, R]."""
        usable, sample, heads = found.usable, self._sample, self._heads

        def total(x: Tensor) -> Tensor:
            return torch.where(usable, x, 0.0).sum(1)

        self._add(o_off=total(found.o_error), o_size=total(found.o_size), o_expected=total(found.o_expected))
        of_o, gradient = found.o_error / found.o_expected.clamp(min=1e-300), found.gradient
        if gradient is None or gradient.dq_error is None or gradient.dq_expected is None or gradient.dq_casts is None:
            return of_o, torch.full_like(of_o, torch.nan)
        off, size = gradient.dq_error.square().sum(-1), gradient.dq.square().sum(-1)
        self._add(dq_off=total(off), dq_size=total(size), dq_left=total(gradient.dq_expected))
        if self._keys and sample.do is not None:
            # The sampled rows stand for all, and dS and P_bar are cast for both sides.
            group = sample.q.shape[1] // sample.k.shape[1]
            many = 2 * COLUMNS * sample.q_length / sample.q.shape[2]
            for name, casts, other in (("dk", gradient.dq_casts, sample.q), ("dv", found.o_casts, sample.do)):
                left = total(casts * other[sequence, heads].double().square().sum(-1)) * many
                of_group = left.view(-1, group).sum(1).repeat_interleave(group)
                self._add(**{f"{name}_left": of_group})
            if found.absorbed is not None and sample.fused:
                # A fused kernel's LSE loses ln l in such a row: what it adds to dK and dV is no gradient.
                lost = (found.absorbed & (sample.do[sequence, heads] != 0).any(-1)).any(1).view(-1, group).any(1)
                unknown = torch.where(lost, torch.nan, 0.0).double().repeat_interleave(group)
                self._add(**{f"{name}_{of}": unknown for name in ("dk", "dv") for of in ("off", "size", "left")})
        return of_o, off / gradient.dq_expected.clamp(min=1e-300)

    def _add_forward(self, sequence: int, found: SampledRows) -> Tensor | None:
        """Adds what needs no dO; returns exp(L_ref - L_obs) - 1, [h, R], 0 where it is unknown; None without LSE."""
        usable, counted = found.usable, torch.float64
        flags = torch.stack([usable, found.repeated, found.units]) & usable
        rows, ties, units = flags.sum(2, dtype=counted)
        entropy = torch.where(usable, found.entropy, 0.0).sum(1)
        self._add(rows=rows, seen=found.sees_key.sum(1, dtype=counted), entropy=entropy, ties=ties, units=units)
        if self._sample.lse is None:
            return None
        missed = torch.expm1(found.lse - self._sample.lse[sequence, self._heads].double())
        known = usable & (missed.abs() < torch.inf)
        missed = torch.where(known, missed, 0.0)
        self._add(unity=missed.sum(1), lse_rows=known.sum(1, dtype=counted))
        return missed

    def _add_backward(self, found: SampledRows, x: Tensor | None, lse_factor: Tensor | None) -> tuple[Tensor, Tensor]:
        """Adds what needs dO, and x [L, R, C]; returns e, dQ, and "part" (``NORMS``), [3, h, R, D], and the clusters.

        They are zero in unusable rows.
        """
        gradient = found.gradient
        assert gradient is not None
        scale, usable, known = self._sample.scale, found.usable, found.usable[..., None]
        error = torch.where(usable, gradient.delta_error, 0.0)
        floor = torch.where(usable, gradient.noise_floor, 0.0)
        judged = floor > 0
        relative = torch.where(judged, error / floor, 0.0)
        dq, probs_k = torch.where(known, gradient.dq, 0.0), torch.where(known, gradient.probs_k, 0.0)
        direction = probs_k.square().sum(-1) * scale**2  # ||alpha (P K)_t||^2
        off = probs_k * (-scale * error)[..., None]
        part = off
        if lse_factor is not None:
            part = off + lse_factor[..., None] * (dq + off)
        if measured := self._measured:
            assert gradient.dq_error is not None
            off = torch.where(known, gradient.dq_error, 0.0)
            part = _along(off, probs_k)
        left = torch.stack([off, dq, part])
        squares = left.square().sum((2, 3))
        clusters = dense_clusters(found.top_key, usable)
        contributions = torch.where(known, gradient.contributions, 0.0)
        bias, rows = error.sum(1), usable.sum(1, dtype=torch.float64)
        floor_squares = floor.square() * direction
        cast = torch.where(usable, gradient.cast_noise, 0.0)
        expected = floor_squares + cast.square() * direction
        if gradient.dq_casts is not None and measured:
            expected = expected + torch.where(usable, gradient.dq_casts, 0.0)
        self._add(
            noise=relative.square().sum(1),
            noise_rows=judged.sum(1, dtype=torch.float64),
            delta_dq=(torch.where(usable, gradient.delta, 0.0).square() * direction).sum(1),
            dq=squares[1],
            dq_delta=squares[0],
            measured=rows if measured else torch.zeros_like(rows),
            dq_floor=floor_squares.sum(1),
            dq_expected=expected.sum(1),
            bias=bias,
            bias_sigma=relative.sum(1),
            bias_variance=standard_error(contributions, clusters, usable).square(),
            groups=torch.ones_like(bias),
            group_squares=bias.square(),
            group_products=bias * rows,
            group_sizes=rows.square(),
        )
        if measured or lse_factor is not None:
            self._add(dq_part=squares[2])
        if x is not None:
            length = x.square().sum(2).repeat_interleave(len(error) // len(x), 0)  # [h, R]
            lengths = (off.square().sum(2) * length).sum(1)
            copied = _together((expected * length).sqrt(), clusters, gradient.copies)
            self._add(atoms=lengths, dw_q_floor=(floor_squares * length).sum(1), dw_q_expected=copied)
        return left, clusters

    def _add_past(self, error: Tensor, x: Tensor, past: Tensor, clusters: Tensor) -> None:
        """<E, M>, M = ``past`` [h, D, c], is a sum of <a_t, M> = e_t . M x_t; ``error`` [h, R, D], ``x`` [L, R, c]."""
        by_past = by_layer(past, 0, len(x)).flatten(1, 2) @ x.mT  # [L, h * D, R]
        products = (error * by_past.view(*past.shape[:2], -1).mT).sum(2)
        by_key = torch.zeros_like(products).scatter_add_(1, clusters, products)
        self._add(past_dot=products.sum(1), past_variance=by_key.square().sum(1))


def _along(error: Tensor, direction: Tensor) -> Tensor:
    """Each row's part of ``error`` along ``direction``, [h, R, D] both; 0 where that is 0."""
    size = direction.square().sum(-1, keepdim=True).clamp(min=1e-300)
    return direction * ((error * direction).sum(-1, keepdim=True) / size)


def _together(sizes: Tensor, clusters: Tensor, alike: Tensor) -> Tensor:
    """Squared size of a sum of atoms, at most, in the mean; ``sizes`` [h, R] their root mean squares.

    Rows of one cluster that are ``alike`` (bool [h, R]) have errors of one direction, the others independent ones.
    """
    shared = torch.zeros_like(sizes).scatter_add_(1, clusters, torch.where(alike, sizes, 0.0))
    return shared.square().sum(1) + torch.where(alike, 0.0, sizes).square().sum(1)


def _squares(left: Tensor, x: Tensor, temporaries: int) -> Tensor:
    """Squared norms [L * h, 3] of E, dW_Q and E with LSE's part, from rows [3, L, h, n, D] and x [L, n, C]."""
    norms, at_once = [], temporaries // (3 * 8 * left.shape[4] * x.shape[2])
    for layers, heads in pieces(left.shape[1], left.shape[2], at_once):
        products = _products(left[:, layers, heads], x[layers])
        norms.append(products.square_().sum((3, 4)).flatten(1).T)
        del products
    return torch.cat(norms)


def _products(left: Tensor, x: Tensor) -> Tensor:
    """[m, L, h, D, c] of [m, L, h, n, D] and [L, n, c]: one product a layer."""
    of_layers = left.permute(1, 0, 2, 4, 3)
    products: Tensor = of_layers.flatten(1, 3) @ x
    return products.view(*of_layers.shape[:4], -1).transpose(0, 1)
