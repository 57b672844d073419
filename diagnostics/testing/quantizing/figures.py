"""What a quantised weight's errors are: their means, what they consist of, and what they do to the layer's output."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from attn_diag.kernels.elements import Integers
from attn_diag.kernels.formats import Mode
from attn_diag.kernels.quantize import Quantized, spread
from attn_diag.kernels.quantizers import Quantizer
from attn_diag.results.quant import ErrorPart, MeanOfErrors, OutputShift
from attn_diag.statistics.mean_tests import mean_test
from attn_diag.statistics.means import adjust

# Fewer clusters leave too few degrees of freedom for a test.
MIN_CLUSTERS = 8


@dataclass(frozen=True)
class QuantizationErrors:
    """Signed errors of a quantised weight; all float64, [R, C]."""

    w: Tensor
    """The weight."""
    error: Tensor
    """Q(w) - w."""
    zero: Tensor
    """Where Q(w) is 0 and w is not: bool."""
    clipped: Tensor
    """Where w lies past the last number: bool."""

    @property
    def rms(self) -> float:
        """Root mean square of the error over that of w; 0 of a weight of zeros."""
        return _ratio(float(self.error.norm()), float(self.w.norm()))

    @property
    def away(self) -> float:
        """Mean of error times sign(w) over the mean of |w|."""
        return _ratio(float((self.error * self.w.sign()).sum()), float(self.w.abs().sum()))

    def parts(self) -> Iterator[ErrorPart]:
        """What they consist of."""
        square, size = float(self.error.square().sum()), float(self.w.abs().sum())
        rest = ~self.clipped & ~self.zero
        for name, where in (("clipped", self.clipped), ("dead-zone", self.zero & ~self.clipped), ("grid", rest)):
            chosen = self.error[where]
            away = float((chosen * self.w[where].sign()).sum())
            yield ErrorPart(
                name,  # type: ignore[arg-type]
                int(where.sum()),
                _ratio(float(chosen.square().sum()), square),
                _ratio(away, size),
            )

    def output(self, x: Tensor) -> OutputShift:
        """The error of y = x wᵀ; ``x`` float64 [N, C]."""
        y = x @ self.w.T
        error = x @ self.error.T
        shift = error.mean(0)
        size = float(y.square().mean().sqrt())
        worst = int(shift.abs().argmax())
        return OutputShift(
            rows=len(x),
            error=_ratio(float(error.square().mean().sqrt()), size),
            constant=_ratio(float(shift.square().mean()), float(error.square().mean())),
            worst_channel=worst,
            worst_shift=_ratio(float(shift[worst]), size),
        )


def beyond_clipping(errors: QuantizationErrors, made: Quantized, by: Quantizer) -> QuantizationErrors:
    """The errors less the mean that drawn ones have because the outermost numbers clip; others as they are."""
    elements = by.parsed_elements
    if elements.mode is not Mode.STOCHASTIC:
        return errors
    shape = errors.w.shape[0], errors.w.shape[1]
    scale = spread(made.scale, shape, by).double()
    scale = scale if made.tensor_scale is None else scale * made.tensor_scale.double()
    zero = 0.0 if made.zero_point is None else spread(made.zero_point, shape, by).double()
    least, most = (elements.lowest, elements.highest) if isinstance(elements, Integers) else (
        -by.largest, by.largest
    )  # fmt: skip
    within = torch.minimum(torch.maximum(errors.w, (least - zero) * scale), (most - zero) * scale)
    return replace(errors, error=errors.error - (within - errors.w))


@dataclass(frozen=True)
class Means:
    """The tests of the means, adjusted together."""

    mean: MeanOfErrors
    """Of the error."""
    away: MeanOfErrors
    """Of the error times sign(w)."""
    channels_tested: int
    """Output channels with enough blocks."""
    channels_biased: int
    """How many of them have another mean than 0."""


def means_of(errors: QuantizationErrors, by: Quantizer, level: float) -> Means:
    """Whether the errors have a mean, by blocks as clusters: those share a scale.

    The two means of all elements are one family of Benjamini and Hochberg, the channels' another.
    """
    unit = float(errors.w.square().mean().sqrt()) or 1.0
    found = []
    for values in (errors.error, errors.error * errors.w.sign()):
        sums, sizes = _clusters(values, by)
        found.append(_tested(sums.reshape(-1), sizes.reshape(-1), level, unit))
    adjusted = adjust([p for *_, p in found])
    mean, away = (MeanOfErrors(m, se, p, n) for (m, se, n, _), p in zip(found, adjusted, strict=True))
    sums, sizes = _clusters(errors.error, by, by_row=True)
    tested = biased = 0
    if sums.shape[1] >= MIN_CLUSTERS and len(sums):
        test = mean_test(sums, sizes, level)
        known = np.asarray(test.standard_error) > 0
        tested = int(known.sum())
        biased = sum(p <= level for p in adjust([float(p) for p in np.asarray(test.p_value)[known]]))
    return Means(mean, away, tested, biased)


def _tested(sums: npt.NDArray[np.float64], sizes: npt.NDArray[np.float64], level: float, unit: float) -> tuple[
    float, float | None, int, float | None
]:  # fmt: skip
    mean = _ratio(float(sums.sum()), float(sizes.sum()) * unit)
    if len(sums) < MIN_CLUSTERS:
        return mean, None, len(sums), None
    test = mean_test(sums, sizes, level)
    error = float(test.standard_error)
    if error <= 2.0**-40 * unit:
        return mean, None, len(sums), None
    return mean, error / unit, len(sums), float(test.p_value)


def _clusters(
    values: Tensor, by: Quantizer, *, by_row: bool = False
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Sums and sizes of the blocks, [R / r, C / c]; of rows, where blocks are too few. ``by_row``: within rows."""
    r, c = by.block_shape((values.shape[0], values.shape[1]))
    if by_row:
        r = 1
    elif -(-values.shape[0] // r) * -(-values.shape[1] // c) < MIN_CLUSTERS:
        r, c = 1, values.shape[1]
    filled = torch.nn.functional.pad(
        torch.stack([values, torch.ones_like(values)]), (0, -values.shape[1] % c, 0, -values.shape[0] % r)
    )
    blocks = filled.reshape(2, filled.shape[1] // r, r, filled.shape[2] // c, c).sum((2, 4))
    return blocks[0].cpu().numpy(), blocks[1].cpu().numpy()


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else 0.0
