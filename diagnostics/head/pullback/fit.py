"""Measuring the map between projection and attention on one pass of the model, and testing it on the other.

Without a norm R and the factor g come from the backward, dq_pre = g R^T dq, which a bias does not touch; the forward
must then have R^T q - g y constant over the rows. With a norm they come from the forward, and the backward, with
nothing left to choose, must have J^T dq = dq_pre. Both passes are tested head by head, against ``rounding``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attn_diag.head.pullback.jacobian import (
    Formats,
    MapRows,
    Norm,
    Pullback,
    backward_variance,
    forward_variance,
    normalise,
)
from attn_diag.head.pullback.rotation import Pairs, Rotation
from attn_diag.results.wording import percent

_NORMS = {"rms": "QK-norm (RMSNorm)", "layer": "QK-norm (LayerNorm)"}
# Rows for every unknown that is fitted to a feature or a pair: then fitting adds an eighth to the errors' variance.
_ROWS_PER_UNKNOWN = 8
# Where rounding may make up half of what is compared, nothing is shown: an unrelated x would be off by 1.4.
_BLIND = 0.5
# What our own float64 arithmetic may be off by, relatively: some ten roundings. It counts where the model's is float64.
_OWN = 2.0**-49
# Above it percents are shown as whole numbers.
_PERCENTS = 0.1
# A measured factor this near to 1 is not worth a word.
_NEAR_ONE = 0.01


@dataclass(frozen=True)
class Kind:
    """A family of maps to try: which norm, and whether pairs of features turn."""

    norm: Norm
    rotated: bool

    @property
    def words(self) -> str:
        """What it is called."""
        words = [] if self.norm == "none" else [_NORMS[self.norm]]
        words += ["a rotary embedding"] if self.rotated else []
        return " and ".join(words) or "at most a bias"

    @property
    def min_rows(self) -> int:
        """So many rows it takes: without a norm a bias is fitted, with one see ``_modulus_fit``."""
        return _ROWS_PER_UNKNOWN * {"none": 1, "rms": 2, "layer": 5}[self.norm]


# From the plainest on: the first that fits is taken.
KINDS = tuple(Kind(norm, rotated) for norm in ("none", "rms", "layer") for rotated in (False, True))


@dataclass(frozen=True)
class Agreement:
    """How far two things that should agree are apart, and how far rounding lets them be; relative norms."""

    off: float
    allowed: float

    @classmethod
    def of(cls, difference: Tensor, variance: Tensor, size: float, freedom: float = 1.0) -> Agreement:
        """From tensors of equal shape; ``size``: the norm to compare with, ``freedom``: makes up for fitted numbers."""
        if not size:
            return cls(0.0 if not bool(difference.any()) else math.inf, 0.0)
        return cls(float(difference.norm()) * freedom / size, math.sqrt(float(variance.sum())) / size + _OWN)

    @property
    def holds(self) -> bool:
        """Whether they agree, and that means something."""
        return self.off <= self.allowed < _BLIND

    @property
    def ratio(self) -> float:
        """Off over allowed, above 1 where it does not hold; the larger the worse."""
        if not self.off < math.inf:
            return math.inf
        if not self.allowed:
            return math.inf if self.off else 0.0
        return max(self.off / self.allowed, self.allowed / _BLIND)

    def __str__(self) -> str:
        off, allowed = (percent(part, ".0f" if part > _PERCENTS else ".2g") for part in (self.off, self.allowed))
        return f"{off} off, {allowed} allowed"


@dataclass(frozen=True)
class Verified:
    """Both passes' agreements in one head; ``backward`` None where dq_pre was not captured."""

    forward: Agreement
    backward: Agreement | None

    @property
    def holds(self) -> bool:
        """Whether both agree."""
        return self.forward.holds and (self.backward is None or self.backward.holds)

    @property
    def worst(self) -> tuple[str, Agreement]:
        """The pass that agrees worse."""
        if self.backward is None or self.forward.ratio > self.backward.ratio:
            return "forward", self.forward
        return "backward", self.backward


@dataclass(frozen=True)
class MapFit:
    """One kind of map as measured in one sequence: what its heads share. ``gain`` [D] without a norm, else None."""

    kind: Kind
    rotation: Rotation | None
    gain: Tensor | None

    @property
    def words(self) -> str:
        """What it is called."""
        pairs = "" if self.rotation is None else f" ({self.rotation.pairs.words})"
        factor = 1.0 if self.gain is None else float(self.gain[0])
        return self.kind.words + pairs + (f" and a factor of {factor:.4g}" if abs(factor - 1) > _NEAR_ONE else "")

    @property
    def shared(self) -> Pullback | None:
        """J^T where it is the same in all heads: without a norm, and then y and the bias play no part in it."""
        if self.gain is None:
            return None
        return Pullback("none", self.rotation, self.gain, *(self.gain.new_zeros(0) for _ in range(3)))

    def of_head(self, head: MapRows) -> Pullback:
        """The map of one head; with a norm its g and b are measured on the head itself."""
        unit, size = normalise(head.y, self.kind.norm)
        gain, bias = self.gain, torch.zeros_like(unit[0])
        if gain is None:
            gain, bias = _gain(head, unit, self.kind, self.rotation.pairs if self.rotation else None)
        elif bool(head.usable.any()):
            kept = self._kept(head)
            turned = head.q if self.rotation is None else self.rotation.back(head.q)
            difference = (turned - gain * unit) * kept
            bias = difference.sum(0) / kept.sum(0).clamp(min=1)
        return Pullback(self.kind.norm, self.rotation, gain, bias, unit, size)

    def verify(self, head: MapRows, formats: Formats) -> Verified:
        """Test both passes in one head."""
        pullback, kept = self.of_head(head), self._kept(head)
        z, rows = pullback.unrotate(head.q), float(head.usable.sum())
        variance = forward_variance(pullback, head, formats.working)
        if self.rotation is not None and self.kind.norm == "none":
            variance += self.rotation.uncertainty(z)
        # What the rows differ in: a large bias must not make up for a y that is not seen.
        varying = pullback.gain * pullback.unit * kept
        if self.kind.norm == "none":
            varying = (varying - varying.sum(0) / kept.sum(0).clamp(min=1)) * kept
        difference = z - pullback.gain * pullback.unit - pullback.bias
        freedom = math.sqrt(rows / max(rows - 1, 1)) if self.kind.norm == "none" else 1.0
        forward = Agreement.of(difference * kept, variance * kept, float(varying.norm()), freedom)
        if head.dq is None or head.dq_pre is None:
            return Verified(forward, None)
        variance = backward_variance(pullback, head, formats)
        if self.rotation is not None and self.kind.norm != "none":
            variance += self.rotation.uncertainty(head.dq) * (pullback.gain / pullback.size).square()
        used = head.usable
        if self.kind.norm != "none":
            # Where y is 0 the Jacobian is that of the norm's epsilon, and q shows no angle; x is 0 there, or w_q.
            used = used & pullback.unit.any(1)
            used = used if self.rotation is None else used & self.rotation.seen.all(1)
        if not bool(used.any()) and bool(head.dq_pre.any()):
            return Verified(forward, Agreement(math.inf, 0.0))
        difference, expected = (pullback(head.dq) - head.dq_pre)[used], head.dq_pre[used]
        return Verified(forward, Agreement.of(difference, variance[used], float(expected.norm())))

    def _kept(self, head: MapRows) -> Tensor:
        """Elements of the forward that can be compared, [T, D]: of usable rows, with a known angle."""
        kept = head.usable[:, None].expand_as(head.q)
        return kept if self.rotation is None else kept & self.rotation.known(head.q)


def bias_alone(head_dim: int, device: torch.device) -> MapFit:
    """q = y + b: what can be seen without dq_pre."""
    return MapFit(Kind("none", False), None, torch.ones(head_dim, dtype=torch.float64, device=device))


def measure(kind: Kind, heads: Sequence[MapRows], formats: Formats) -> MapFit:
    """Measure a map of this kind on some heads of one sequence, with dq and dq_pre, at least one of them not 0."""
    if kind.norm == "none":
        return _measure_backward(kind, heads, formats)
    if not kind.rotated:
        return MapFit(kind, None, None)
    units = [normalise(head.y, kind.norm)[0] for head in heads]
    pairs = Pairs.of_partner(_partner_by_fit(heads, units, kind.norm), heads[0].q.shape[1])
    z = []
    for head, unit in zip(heads, units, strict=True):
        gain, bias = _gain(head, unit, kind, pairs)
        z.append(gain * unit + bias)
    rotation = Rotation.measure(pairs, z, [head.q for head in heads])
    fit = MapFit(kind, rotation, None)
    noise = [forward_variance(fit.of_head(head), head, formats.working) for head in heads]
    return replace(fit, rotation=Rotation.measure(pairs, z, [head.q for head in heads], noise))


def _measure_backward(kind: Kind, heads: Sequence[MapRows], formats: Formats) -> MapFit:
    before = [head.dq for head in heads if head.dq is not None]
    after = [head.dq_pre for head in heads if head.dq_pre is not None]
    gain = torch.ones_like(before[0][0])
    if not kind.rotated:
        return MapFit(kind, None, gain * (_dot(before, after) / _dot(before, before)))
    pairs = Pairs.of_partner(_partner_by_modulus(before, after), len(gain))
    # A scaled rotary embedding may carry a factor (YaRN), which features that do not turn lack.
    turning, rest = slice(0, pairs.features), slice(pairs.features, None)
    for place in (turning, rest):
        given, found = [b[:, place] for b in before], [a[:, place] for a in after]
        if squares := _dot(given, given):
            turned = math.sqrt(_dot(found, found) * squares)
            gain[place] = (turned if place == turning else _dot(given, found)) / squares
    # dq_pre is dq turned back: what is measured is R^T.
    fit = MapFit(kind, Rotation.measure(pairs, before, after).inverse(), gain)
    noise = [backward_variance(fit.of_head(head), head, formats) for head in heads]
    rotation = Rotation.measure(pairs, before, after, noise).inverse()
    if bool(rotation.seen.all()):
        return replace(fit, rotation=rotation)
    # Rows without a gradient (a causal mask's first, a prompt left out of the loss): their angles from the forward.
    maps = [fit.of_head(head) for head in heads]
    forward = Rotation.measure(pairs, [m.gain * m.unit + m.bias for m in maps], [head.q for head in heads])
    return replace(fit, rotation=rotation.filled_from(forward))


def _gain(head: MapRows, unit: Tensor, kind: Kind, pairs: Pairs | None) -> tuple[Tensor, Tensor]:
    """g and b [D] of q = R (g o u + b), by least squares over the rows.

    In features that turn only the modulus is known before R is: |q|^2 is linear in the squares of g and, with a bias,
    in g o b. Their signs are lost: g is taken as positive, and where it is not, the tests fail.
    """
    u, q = unit[head.usable], head.q[head.usable]
    with_bias = kind.norm == "layer"
    found = _solve(torch.stack([u.T, torch.ones_like(u.T)] if with_bias else [u.T], 2), q.T)
    gain, bias = found[:, 0].clone(), found[:, 1].clone() if with_bias else torch.zeros_like(unit[0])
    if pairs is not None and len(q):
        found = _modulus_fit(u[:, pairs.first], u[:, pairs.second], pairs.sum(q.square()), with_bias)[0]
        for place, which in ((pairs.first, 0), (pairs.second, 1)):
            gain[place] = found[:, which].clamp(min=0).sqrt()
            if with_bias:
                bias[place] = torch.where(gain[place] > 0, found[:, 2 + which] / (2 * gain[place]), 0.0)
    return gain, bias


def _partner_by_modulus(before: list[Tensor], after: list[Tensor]) -> int:
    """The feature that turns with feature 0, if ``after`` is ``before`` ([T, D] each, one a head) turned and scaled.

    Only of the right pair the modulus follows; pairs that turn little in all rows could not be told apart, but feature
    0 turns fastest. 1, or at most D/2: those are the layouts in use.
    """
    given, found = (_moduli_with_first(torch.cat(tensors)) for tensors in (before, after))
    # The cosine of the angle between the two, over all rows and heads: 1 where one is a multiple of the other.
    cosine = (given * found).sum(0) / (given.norm(dim=0) * found.norm(dim=0))
    return 1 + int(cosine.nan_to_num(0.0).argmax())


def _moduli_with_first(values: Tensor) -> Tensor:
    """|a + ib|^2 of feature 0 with each of the features 1 to D/2, [n, D] to [n, D/2]."""
    squares = values.square()
    return squares[:, :1] + squares[:, 1 : values.shape[1] // 2 + 1]


def _partner_by_fit(heads: Iterable[MapRows], units: Iterable[Tensor], norm: Norm) -> int:
    """The feature that turns with feature 0: with the right one |q|^2 follows from u."""
    left = []
    for head, unit in zip(heads, units, strict=True):
        u, square = unit[head.usable], _moduli_with_first(head.q[head.usable])
        second = u[:, 1 : square.shape[1] + 1]
        left.append(_modulus_fit(u[:, :1].expand_as(second), second, square, norm == "layer")[1])
    return 1 + int(sum(left[1:], start=left[0]).argmin())


def _modulus_fit(first: Tensor, second: Tensor, square: Tensor, with_bias: bool) -> tuple[Tensor, Tensor]:
    """Coefficients [P, 2 or 5] of ``square`` [n, P] in u^2 (and u, and 1) of the pairs' features, [n, P] each.

    Also what is left, [P], over what there was, infinite where that is nothing. An error of rounding is a part of
    |q|^2, so rows weigh by its inverse.
    """
    a, b, square = first.T, second.T, square.T
    weight = square + square.mean(1, keepdim=True)
    weight = torch.where(weight > 0, 1 / weight, 0.0)
    columns = [a.square(), b.square()] + ([a, b, torch.ones_like(a)] if with_bias else [])
    matrix, target = torch.stack(columns, 2) * weight[:, :, None], square * weight
    found = _solve(matrix, target)
    left = (target - (matrix @ found[:, :, None])[:, :, 0]).square().sum(1)
    return found, (left / target.square().sum(1)).nan_to_num(torch.inf)


def _solve(matrix: Tensor, target: Tensor) -> Tensor:
    """Least squares, [P, n, k] and [P, n] to [P, k]; by way of a pseudo-inverse, as a column may be all zero."""
    inverse: Tensor = torch.linalg.pinv(matrix.mT @ matrix, hermitian=True)
    return (inverse @ (matrix.mT @ target[:, :, None]))[:, :, 0]


def _dot(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    return sum(float((x * y).sum()) for x, y in zip(a, b, strict=True))
