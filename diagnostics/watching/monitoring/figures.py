"""The figures of attention heads, and the sums that they are made of, which add up over sequences and ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

# q - x W_Q^T, less a bias, is rounding where q is the projection's own output; RoPE or QK-norm leave the order of 1.
_MISFIT = 0.05
_TINY = 1e-300
# Of what delta alone makes: a dQ that is smaller is what float64 leaves of none (2^-53 of each term; 2^-40 is known to
# 2^-13). Where all rows of V are one, as at DETR's decoder's beginning, dP is delta and there is no dQ.
_VANISHES = 2.0**40
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
    """Norm of the predicted error of dQ over the reference's norm, from delta alone. Of attention that is not fused,
    whose backward does not use O, of the measured error, here and in all that follows from it."""
    measured: Tensor
    """Share of rows whose error of dQ is measured: 1 where attention is not fused, else 0."""
    dq_share_lse: Tensor
    """The same ratio, predicted from delta and LSE; of attention that is not fused unknown."""
    dq_share_delta: Tensor
    """Of attention that is not fused, the part of the measured error that lies along (P K)_t in each row, as an error
    of delta does, over the reference's norm. Of fused attention ``dq_share`` is all of delta, and this is unknown."""
    dq_over_floor: Tensor
    """That error's norm (from delta) over what one correct rounding of O would leave if rows erred independently."""
    dq_expected_over_floor: Tensor
    """Root mean square of ``dq_over_floor`` in a well-rounded kernel, at most: it casts P_bar, too."""
    dw_q_share: Tensor
    """As ``dq_share``, of dW_Q."""
    dw_q_share_lse: Tensor
    """As ``dq_share_lse``, of dW_Q."""
    dw_q_share_delta: Tensor
    """As ``dq_share_delta``, of dW_Q."""
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
    o_error: Tensor
    """Norm of O's measured error over the reference's norm, on the sampled rows."""
    o_factor: Tensor
    """Norm of that error over what a well-rounded kernel leaves in the mean; of FP32 inputs one that casts to TF32."""
    o_row_factor: Tensor
    """The same of the row in which it is largest."""
    dq_error: Tensor
    """As ``o_error``, of dQ as the backward returned it, fused or not."""
    dq_factor: Tensor
    dq_row_factor: Tensor
    dk_error: Tensor
    """||K^T dK - dQ^T Q|| over ||dQ^T Q||, of all rows and keys of the head's key head; see ``key_gradients``."""
    dk_factor: Tensor
    """Over what a well-rounded kernel leaves of it in the mean, at most."""
    dv_error: Tensor
    """||V^T dV - O^T dO|| over ||O^T dO||, likewise."""
    dv_factor: Tensor
    o_nonfinite: Tensor
    """1 where O holds NaN or Inf though what went in is finite, else 0; of all rows that see a key."""
    dq_nonfinite: Tensor
    """The same of dQ, where q, k, v, O and dO are finite; 1/2 in FP16, which overflows where a loss scaler is at work.
    Likewise ``dk_nonfinite``, ``dv_nonfinite``, of all keys."""
    dk_nonfinite: Tensor
    dv_nonfinite: Tensor
    came_nonfinite: Tensor
    """1 where q, k, v or dO hold NaN or Inf already, else 0; 1/2 where it is dO alone, in FP16."""


METRICS = tuple(f.name for f in fields(HeadMetrics))

# Of them those that say nothing where q is not x W_Q^T itself.
_OF_W_Q = frozenset(name for name in METRICS if name.startswith(("dw_q", "coherence", "past")))

# What adds up over heads' sequences, and over ranks; one column each.
SUMS = (
    "rows", "seen", "entropy", "ties", "units", "lse_rows", "unity",
    "noise", "noise_rows", "delta_dq", "dq", "dq_delta", "dq_part", "dq_floor",
    "bias", "bias_sigma", "bias_variance", "groups", "group_squares", "group_products", "group_sizes",
    "dq_expected", "dw_q_expected", "atoms", "dw_q_floor", "misfit", "q", "past_dot", "past_variance",
    "measured", "o_off", "o_size", "o_expected", "dq_off", "dq_size", "dq_left",
    "dk_off", "dk_size", "dk_left", "dv_off", "dv_size", "dv_left",
)  # fmt: skip
# What the largest counts of; one column each.
NONFINITE = tuple(f"{name}_nonfinite" for name in ("o", "dq", "dk", "dv", "came"))
MAXIMA = ("max_logit", "w_q_norm", "o_row", "dq_row", *NONFINITE)
# Squared norms of matrices, which themselves add up: exact for one rank, from the sketches of several. "part" is E as
# predicted from delta and LSE, and where it was measured its part along P K.
NORMS = ("dw_q_delta", "dw_q", "dw_q_part")


@dataclass
class HeadSums:
    """What the metrics are made of; NaN where unknown."""

    sums: Tensor
    """[Hq, len(SUMS)] float64: adds up over ranks."""
    maxima: Tensor
    """[Hq, len(MAXIMA)] float64: the largest counts over ranks; of rows, squares."""
    norms: Tensor
    """[Hq, 3] float64: squared norms of E, of dW_Q, and of "part" (``NORMS``), of this rank alone."""
    sketches: Tensor | None
    """[1 or 3, Hq, D, c] fp32: these matrices, or E alone, projected; None where there is no dW_Q."""

    def metrics(self, past: Tensor | None = None) -> HeadMetrics:
        """The figures.

        Args:
            past: average of earlier checks' E, [Hq, D, c]; the one with which ``head_sums`` was called.
        """
        s = dict(zip(SUMS, self.sums.unbind(1), strict=True))
        dw_q_delta, dw_q, dw_q_part = self.norms.unbind(1)
        nan = torch.full_like(dw_q, torch.nan)
        vanishes = s["delta_dq"] > _VANISHES**2 * s["dq"]
        dq, dq_size, dw_q = (torch.where(vanishes, nan, size) for size in (s["dq"], s["dq_size"], dw_q))
        length = nan
        if past is not None and self.sketches is not None:
            own = self.sketches[0].double().square().sum((1, 2))
            length = (own * past.double().square().sum((1, 2))).sqrt()
        roots = {
            "noise_factor": (s["noise"], s["noise_rows"]),
            "conditioning": (s["delta_dq"], s["dq"]),
            "dq_share": (s["dq_delta"], dq),
            "dq_share_lse": (s["dq_part"], torch.where(s["measured"] > 0, nan, dq)),
            "dq_share_delta": (s["dq_part"], torch.where(s["measured"] > 0, dq, nan)),
            "dq_over_floor": (s["dq_delta"], s["dq_floor"]),
            "dq_expected_over_floor": (s["dq_expected"], s["dq_floor"]),
            "dw_q_share": (dw_q_delta, dw_q),
            "dw_q_share_lse": (dw_q_part, torch.where(s["measured"] > 0, nan, dw_q)),
            "dw_q_share_delta": (dw_q_part, torch.where(s["measured"] > 0, dw_q, nan)),
            "dw_q_over_floor": (dw_q_delta, s["dw_q_floor"]),
            "dw_q_expected_over_floor": (s["dw_q_expected"], s["dw_q_floor"]),
        }
        for name, left in (("o", "o_expected"), ("dq", "dq_left"), ("dk", "dk_left"), ("dv", "dv_left")):
            off = s[f"{name}_off"]
            roots[f"{name}_error"] = off, dq_size if name == "dq" else s[f"{name}_size"]
            # What is to be exact has no limit.
            roots[f"{name}_factor"] = off, torch.where(off > 0, s[left].clamp(min=_TINY), s[left])
        ratios = {
            "entropy": (s["entropy"], s["rows"]),
            "tie_rate": (s["ties"], s["rows"]),
            "unit_rate": (s["units"], s["rows"]),
            "unity_defect": (s["unity"], s["lse_rows"]),
            "delta_bias": (s["bias"], _bias_variance(s).sqrt()),
            "delta_bias_sigma": (s["bias_sigma"], s["noise_rows"]),
            "nonfinite_rate": (s["seen"] - s["rows"], s["seen"]),
            "measured": (s["measured"], s["rows"]),
            "coherence": (dw_q_delta, s["atoms"]),
            "coherence_with_past": (s["past_dot"], length),
            "past_z": (s["past_dot"], s["past_variance"].sqrt()),
        }
        parts = torch.stack([top for top, _ in (roots | ratios).values()])
        wholes = torch.stack([bottom for _, bottom in (roots | ratios).values()])
        values = torch.where(wholes > 0, parts / wholes, torch.nan)
        values[: len(roots)].clamp_(min=0.0).sqrt_()
        # Of W_Q nothing is known where q is not x W_Q^T itself.
        through = s["misfit"] <= _MISFIT**2 * s["q"]
        found = dict(zip(roots | ratios, values, strict=True))
        projected = torch.where(through, values, torch.nan)
        for name, value in zip(roots | ratios, projected, strict=True):
            found[name] = value if name in _OF_W_Q else found[name]
        largest = dict(zip(MAXIMA, self.maxima.unbind(1), strict=True))
        return HeadMetrics(
            max_logit=torch.where(s["rows"] > 0, largest["max_logit"], nan),
            w_q_norm=largest["w_q_norm"],
            o_row_factor=largest["o_row"].sqrt(),
            dq_row_factor=largest["dq_row"].sqrt(),
            **found,
            **{name: largest[name] for name in NONFINITE},
        )

    def split(self, layers: int) -> list[HeadSums]:
        """Those of each layer, where they are of several with the same number of heads."""
        sketches = [None] * layers if self.sketches is None else self.sketches.chunk(layers, 1)
        parts = zip(self.sums.chunk(layers), self.maxima.chunk(layers), self.norms.chunk(layers), sketches, strict=True)
        return [HeadSums(*part) for part in parts]

    @classmethod
    def joined(cls, parts: Sequence[HeadSums]) -> HeadSums:
        """Those of several heads, as one."""
        sketches = [part.sketches for part in parts if part.sketches is not None]
        return cls(
            sums=torch.cat([part.sums for part in parts]),
            maxima=torch.cat([part.maxima for part in parts]),
            norms=torch.cat([part.norms for part in parts]),
            sketches=torch.cat(sketches, 1) if sketches else None,
        )


def _bias_variance(s: dict[str, Tensor]) -> Tensor:
    """Variance of the sum of delta's errors: from 8 sequences on between them (CR2, equal sizes), else within each."""
    n, groups = s["rows"], s["groups"]
    mean = s["bias"] / n
    between = s["group_squares"] - 2 * mean * s["group_products"] + mean.square() * s["group_sizes"]
    between = between * groups / (groups - 1).clamp(min=1.0)
    return torch.where(groups >= _SEQUENCES, between, s["bias_variance"])
