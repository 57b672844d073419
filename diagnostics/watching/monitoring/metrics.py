"""Per-head figures of one attention call on the device, against float64; nothing here makes the host wait.

They are those of ``attn_diag.inspect`` (``attn_diag.results.diagnosis``), over all heads at once and on sampled rows.
With e_t = -alpha Delta_delta,t (P K)_t the first-order error of dQ in row t and x_t the projection's input, the
predicted error of dW_Q is E = sum e_t (x) x_t. See ``HeadMetrics`` for each figure's definition.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from attn_diag.watching.live.call import AttentionCall
from attn_diag.watching.monitoring.rows import (
    TEMPORARIES,
    SampledRows,
    dense_clusters,
    heads_at_once,
    measure_rows,
    standard_error,
)
from attn_diag.watching.monitoring.sample import Sample

# Columns to which x is projected for what must be kept or sent between ranks.
SKETCH = 256
# q - x W_Q^T, less a bias, is rounding where q is the projection's own output; RoPE or QK-norm leave the order of 1.
_MISFIT = 0.05
# From so many sequences on they are the clusters of delta's test (``means.MIN_SEQUENCES``).
_SEQUENCES = 8


@dataclass(frozen=True)
class HeadMetrics:
    """One value a head: float64 tensors [Hq], NaN where something that the figure needs was not there."""

    max_logit: Tensor
    """The largest visible alpha q.k, before softcap and additive masks (Kimi K2's QK-clip, arXiv 2507.20534)."""
    entropy: Tensor
    """Mean over rows of -sum P ln P, nats."""
    tie_rate: Tensor
    """Share of rows whose maximum is repeated: "exact" of ``attn_diag.head.row_maxima``."""
    unit_rate: Tensor
    """Share of rows in which several P_bar round to 1: "unit" of ``attn_diag.head.row_maxima``."""
    unity_defect: Tensor
    """Mean of exp(L_ref - L_obs) - 1, by which the backward's probabilities miss a sum of 1."""
    noise_factor: Tensor
    """Rms of Delta_delta over its noise floor sigma."""
    conditioning: Tensor
    """||alpha diag(delta) P K|| / ||dQ||."""
    delta_bias: Tensor
    """t of the mean of Delta_delta, with the clusters of ``statistics.means``."""
    delta_bias_sigma: Tensor
    """The mean of Delta_delta in units of sigma."""
    dq_share: Tensor
    """Norm of the predicted error of dQ over the reference's norm, from delta alone."""
    dq_share_lse: Tensor
    """The same ratio, predicted from delta and LSE."""
    dq_over_floor: Tensor
    """That error's norm (from delta) over what one correct rounding of O would leave if rows erred independently."""
    dq_expected_over_floor: Tensor
    """Root mean square of ``dq_over_floor`` in a well-rounded kernel, at most: it casts P_bar, too."""
    dw_q_share: Tensor
    """As ``dq_share``, of dW_Q."""
    dw_q_share_lse: Tensor
    """As ``dq_share_lse``, of dW_Q."""
    dw_q_over_floor: Tensor
    """As ``dq_over_floor``, of dW_Q."""
    dw_q_expected_over_floor: Tensor
    """As ``dq_expected_over_floor``, of dW_Q; rows that copy the same key's V may err alike."""
    coherence: Tensor
    """||sum a||^2 / sum ||a||^2 of the atoms a_t = e_t (x) x_t; 1 is what random signs give."""
    coherence_with_past: Tensor
    """Cosine between E and the average of earlier checks' E."""
    past_z: Tensor
    """The inner product of these two, in standard deviations of what random signs of the argmax keys' parts give."""
    w_q_norm: Tensor
    """Spectral norm of the head's W_Q."""
    nonfinite_rate: Tensor
    """Share of rows, of those that see a key, with NaN or Inf."""


METRICS = tuple(f.name for f in fields(HeadMetrics))

# What adds up over heads' sequences, and over ranks; one column each.
SUMS = (
    "rows", "seen", "entropy", "ties", "units", "lse_rows", "unity",
    "noise", "noise_rows", "delta_dq", "dq", "dq_delta", "dq_lse", "dq_floor",
    "bias", "bias_sigma", "bias_variance", "groups", "group_squares", "group_products", "group_sizes",
    "dq_expected", "dw_q_expected", "atoms", "dw_q_floor", "misfit", "q", "past_dot", "past_variance",
)  # fmt: skip
# Squared norms of matrices, which themselves add up: exact for one rank, from the sketches of several.
NORMS = ("dw_q_delta", "dw_q", "dw_q_lse")


@dataclass
class HeadSums:
    """What the metrics are made of; NaN where unknown."""

    sums: Tensor
    """[Hq, len(SUMS)] float64: adds up over ranks."""
    maxima: Tensor
    """[Hq, 2] float64: the largest score and the norm of W_Q, of which the largest counts over ranks."""
    norms: Tensor
    """[Hq, 3] float64: squared norms of E, of dW_Q, and of E with LSE's part, of this rank alone."""
    sketches: Tensor | None
    """[1 or 3, Hq, D, c] fp32: these matrices, or E alone, projected; None where there is no dW_Q."""

    def metrics(self, past: Tensor | None = None) -> HeadMetrics:
        """The figures.

        Args:
            past: average of earlier checks' E, [Hq, D, c]; the one with which ``head_sums`` was called.
        """
        s = dict(zip(SUMS, self.sums.unbind(1), strict=True))
        dw_q_delta, dw_q, dw_q_lse = self.norms.unbind(1)
        through = s["misfit"] <= _MISFIT**2 * s["q"]
        nan = torch.full_like(dw_q, torch.nan)

        def ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
            return torch.where(denominator > 0, numerator / denominator, nan)

        def root(numerator: Tensor, denominator: Tensor) -> Tensor:
            return ratio(numerator, denominator).clamp(min=0.0).sqrt()

        def projected(value: Tensor) -> Tensor:
            return torch.where(through, value, nan)

        cosine = nan
        if past is not None and self.sketches is not None:
            own = self.sketches[0].double().square().sum((1, 2))
            cosine = ratio(s["past_dot"], (own * past.double().square().sum((1, 2))).sqrt())
        return HeadMetrics(
            max_logit=torch.where(s["rows"] > 0, self.maxima[:, 0], nan),
            entropy=ratio(s["entropy"], s["rows"]),
            tie_rate=ratio(s["ties"], s["rows"]),
            unit_rate=ratio(s["units"], s["rows"]),
            unity_defect=ratio(s["unity"], s["lse_rows"]),
            noise_factor=root(s["noise"], s["noise_rows"]),
            conditioning=root(s["delta_dq"], s["dq"]),
            delta_bias=ratio(s["bias"], _bias_variance(s).sqrt()),
            delta_bias_sigma=ratio(s["bias_sigma"], s["noise_rows"]),
            dq_share=root(s["dq_delta"], s["dq"]),
            dq_share_lse=root(s["dq_lse"], s["dq"]),
            dq_over_floor=root(s["dq_delta"], s["dq_floor"]),
            dq_expected_over_floor=root(s["dq_expected"], s["dq_floor"]),
            dw_q_share=projected(root(dw_q_delta, dw_q)),
            dw_q_share_lse=projected(root(dw_q_lse, dw_q)),
            dw_q_over_floor=projected(root(dw_q_delta, s["dw_q_floor"])),
            dw_q_expected_over_floor=projected(root(s["dw_q_expected"], s["dw_q_floor"])),
            coherence=projected(ratio(dw_q_delta, s["atoms"])),
            coherence_with_past=projected(cosine),
            past_z=projected(ratio(s["past_dot"], s["past_variance"].sqrt())),
            w_q_norm=self.maxima[:, 1],
            nonfinite_rate=ratio(s["seen"] - s["rows"], s["seen"]),
        )


def head_metrics(
    call: AttentionCall, *, sequences: int = 1, rows: int = 1024, past: Tensor | None = None
) -> HeadMetrics:
    """The figures of one call, on its first ``sequences`` and up to ``rows`` evenly spaced query rows."""
    return head_sums(Sample.of(call, sequences, rows), past).metrics(past)


def head_sums(sample: Sample, past: Tensor | None = None, *, alone: bool = True) -> HeadSums:
    """The sums behind the figures, in about 64 MB of temporaries.

    Args:
        past: see ``HeadSums.metrics``.
        alone: there are no other ranks. Of the sketches only E's is needed then, the norms being known already.
    """
    with torch.no_grad(), torch.autocast(sample.q.device.type, enabled=False):
        heads, step = sample.k.shape[1], heads_at_once(sample)
        parts = [
            _FewHeads(sample, slice(start, min(start + step, heads)), 1 if alone else len(NORMS)).run(past)
            for start in range(0, heads, step)
        ]
        sketches = [p.sketches for p in parts if p.sketches is not None]
        return HeadSums(
            sums=torch.cat([p.sums for p in parts]),
            maxima=torch.cat([p.maxima for p in parts]),
            norms=torch.cat([p.norms for p in parts]),
            sketches=torch.cat(sketches, 1) if sketches else None,
        )


def sketch(x: Tensor) -> Tensor:
    """``x`` [n, C] float64 projected to [n, c], c = min(C, 256), so that inner products are kept in the mean.

    Random signs / sqrt(c), the same on every rank and at every check; C <= 256 is left as it is. A squared norm of
    several rows' sums is off by a relative standard deviation of at most sqrt(2 / c), 9 %.
    """
    if x.shape[1] <= SKETCH:
        return x
    key = (x.shape[1], x.device)
    if key not in _SIGNS:
        generator = torch.Generator().manual_seed(x.shape[1])
        drawn = torch.randint(0, 2, (x.shape[1], SKETCH), generator=generator, dtype=torch.int8)
        _SIGNS[key] = drawn.to(x.device)
    return x @ _SIGNS[key].double().mul_(2).sub_(1).mul_(SKETCH**-0.5)


_SIGNS: dict[tuple[int, torch.device], Tensor] = {}


class _FewHeads:
    """The sums of the query heads that share some key heads, over the sampled sequences."""

    def __init__(self, sample: Sample, kv_heads: slice, sketches: int) -> None:
        group = sample.q.shape[1] // sample.k.shape[1]
        self._sample, self._kv_heads, self._sketches = sample, kv_heads, sketches
        self._heads = slice(kv_heads.start * group, kv_heads.stop * group)
        self._totals: dict[str, Tensor] = {}

    def run(self, past: Tensor | None) -> HeadSums:
        sample = self._sample
        largest, lefts, rights = [], [], []
        for sequence in range(len(sample.q)):
            found = measure_rows(sample, sequence, self._kv_heads)
            largest.append(torch.where(found.usable, found.max_logit, -torch.inf).amax(1))
            self._add_forward(sequence, found)
            if sample.do is None:
                continue
            x = None if sample.x is None else sample.x[sequence].double()
            left = self._add_backward(sequence, found, x, past)
            if x is not None:
                lefts.append(left)
                rights.append(x)
        maxima = torch.stack(largest).amax(0)
        if (projection := sample.projection) is not None:
            self._add(q=projection.q[self._heads], misfit=projection.misfit[self._heads])
        unknown = torch.full_like(maxima, torch.nan)
        norms, sketches = torch.stack([unknown] * len(NORMS), 1), None
        if lefts:
            norms, sketches = _matrices(_joined(lefts, 2), _joined(rights, 0), self._sketches)
            if sample.lse is None:
                norms[:, 2] = torch.nan
        weight = unknown if projection is None else projection.norms[self._heads]
        sums = torch.stack([self._totals.get(name, unknown) for name in SUMS], 1)
        return HeadSums(sums, torch.stack([maxima, weight], 1), norms, sketches)

    def _add(self, **sums: Tensor) -> None:
        for name, value in sums.items():
            self._totals[name] = self._totals[name] + value if name in self._totals else value

    def _add_forward(self, sequence: int, found: SampledRows) -> None:
        def total(values: Tensor) -> Tensor:
            return torch.where(found.usable, values, 0.0).sum(1)

        ones = torch.ones_like(found.entropy)
        self._add(
            rows=total(ones),
            seen=found.sees_key.to(ones.dtype).sum(1),
            entropy=total(found.entropy),
            ties=total(found.repeated.to(ones.dtype)),
            units=total(found.units.to(ones.dtype)),
        )
        if self._sample.lse is not None:
            missed = self._lse_factor(sequence, found)
            known = found.usable & missed.isfinite()
            self._add(unity=torch.where(known, missed, 0.0).sum(1), lse_rows=known.to(ones.dtype).sum(1))

    def _lse_factor(self, sequence: int, found: SampledRows) -> Tensor:
        """exp(L_ref - L_obs) - 1, [h, R]."""
        assert self._sample.lse is not None
        return torch.expm1(found.lse - self._sample.lse[sequence, self._heads].double())

    def _add_backward(self, sequence: int, found: SampledRows, x: Tensor | None, past: Tensor | None) -> Tensor:
        """Adds what needs dO; returns e, dQ, and e with LSE's part, [3, h, R, D], zero in unusable rows."""
        gradient = found.gradient
        assert gradient is not None
        scale, usable, known = self._sample.scale, found.usable, found.usable[..., None]
        error = torch.where(usable, gradient.delta_error, 0.0)
        floor = torch.where(usable, gradient.noise_floor, 0.0)
        judged = floor > 0
        relative = torch.where(judged, error / floor, 0.0)
        dq, probs_k = torch.where(known, gradient.dq, 0.0), torch.where(known, gradient.probs_k, 0.0)
        direction = probs_k.square().sum(-1) * scale**2  # ||alpha (P K)_t||^2
        by_delta = probs_k * (-scale * error)[..., None]
        left = torch.stack([by_delta, dq, by_delta])
        if self._sample.lse is not None:
            factor = self._lse_factor(sequence, found)
            left[2] += torch.where(usable & factor.isfinite(), factor, 0.0)[..., None] * (dq + by_delta)
        squares = left.square().sum((2, 3))
        clusters = dense_clusters(found.top_key, usable)
        contributions = torch.where(known, gradient.contributions, 0.0)
        bias, rows = error.sum(1), usable.to(error.dtype).sum(1)
        floor_squares = floor.square() * direction
        cast = torch.where(usable, gradient.cast_noise, 0.0)
        expected = floor_squares + cast.square() * direction
        self._add(
            noise=relative.square().sum(1),
            noise_rows=judged.to(error.dtype).sum(1),
            delta_dq=(torch.where(usable, gradient.delta, 0.0).square() * direction).sum(1),
            dq=squares[1],
            dq_delta=squares[0],
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
        if self._sample.lse is not None:
            self._add(dq_lse=squares[2])
        if x is not None:
            length = x.square().sum(1)
            lengths = (by_delta.square().sum(2) * length).sum(1)
            copied = _together((expected * length).sqrt(), clusters, gradient.copies)
            self._add(atoms=lengths, dw_q_floor=(floor_squares * length).sum(1), dw_q_expected=copied)
            if past is not None:
                self._add_past(by_delta, sketch(x), past[self._heads].double(), clusters)
        return left

    def _add_past(self, error: Tensor, x: Tensor, past: Tensor, clusters: Tensor) -> None:
        """<E, M> with M = ``past`` [h, D, c] is a sum of <a_t, M> = e_t . M x_t; ``error`` [h, R, D], ``x`` [R, c]."""
        products = (error * (past @ x.T).mT).sum(2)
        by_key = torch.zeros_like(products).scatter_add_(1, clusters, products)
        self._add(past_dot=products.sum(1), past_variance=by_key.square().sum(1))


def _together(sizes: Tensor, clusters: Tensor, alike: Tensor) -> Tensor:
    """Squared size of a sum of atoms, at most, in the mean; ``sizes`` [h, R] their root mean squares.

    Rows of one cluster that are ``alike`` (bool [h, R]) have errors of one direction, the others independent ones.
    """
    shared = torch.zeros_like(sizes).scatter_add_(1, clusters, torch.where(alike, sizes, 0.0))
    return shared.square().sum(1) + torch.where(alike, 0.0, sizes).square().sum(1)


def _joined(parts: list[Tensor], axis: int) -> Tensor:
    """``torch.cat``, without a copy of a single part."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, axis)


def _matrices(left: Tensor, x: Tensor, sketches: int) -> tuple[Tensor, Tensor]:
    """E, dW_Q, E with LSE's part from rows [3, h, n, D] and x [n, C]: squared norms [h, 3]; of the first ``sketches``
    of them the sketches [sketches, h, D, c].
    """
    step = max(1, TEMPORARIES // (3 * 8 * left.shape[3] * x.shape[1]))
    norms = []
    for start in range(0, left.shape[1], step):
        products = left[:, start : start + step].mT @ x
        norms.append(products.square_().sum((2, 3)).T)
        del products
    return torch.cat(norms), (left[:sketches].mT @ sketch(x)).float()


def _bias_variance(s: dict[str, Tensor]) -> Tensor:
    """Variance of the sum of delta's errors: from 8 sequences on between them (CR2, equal sizes), else within each."""
    n, groups = s["rows"], s["groups"]
    mean = s["bias"] / n
    between = s["group_squares"] - 2 * mean * s["group_products"] + mean.square() * s["group_sizes"]
    between = between * groups / (groups - 1).clamp(min=1.0)
    return torch.where(groups >= _SEQUENCES, between, s["bias_variance"])
